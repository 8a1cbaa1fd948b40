"""Noise in units of the update, against its definition."""

import math

import pytest
import torch

from smat_fn import draw, random, simulate, testing
from smat_fn.simulation.relative import simulate_by_leaf, update_rms

SHAPES = {"blocks.0.w": (8, 4), "head": (4,), "still": (3,)}
KEY = random.key(9)
BASE, PARAMS = (testing.random_tree(seed, SHAPES) for seed in (0, 1))
PARAMS["still"] = BASE["still"].clone()
HYPER = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.4}


def in_block(path, leaf):
    return path == "blocks.0.w"


def rms(*leaves):
    values = torch.cat([leaf.reshape(-1) for leaf in leaves]).double()
    return math.sqrt(float((values**2).mean()))


def test_the_rms_of_the_update():
    assert float(update_rms(PARAMS, BASE)) == pytest.approx(rms(*(PARAMS[p] - BASE[p] for p in SHAPES)), rel=1e-6)
    assert float(update_rms(BASE, BASE)) == 0


def test_by_leaf_the_noise_is_that_of_simulate_times_the_rms_of_the_leaf():
    drawn = draw(KEY, **HYPER)
    found = simulate_by_leaf(PARAMS, BASE, drawn, where=in_block)
    quiet = simulate(PARAMS, BASE, drawn._replace(sigma=torch.zeros_like(drawn.sigma)), where=in_block)
    for path, leaf in found.items():
        size = rms(PARAMS[path] - BASE[path])
        unit = simulate(PARAMS, BASE, drawn, where=in_block)[path] - quiet[path]
        torch.testing.assert_close(leaf - quiet[path], size * unit, rtol=1e-4, atol=1e-6)
    testing.assert_trees_equal({"still": found["still"]}, {"still": BASE["still"]})


@pytest.mark.parametrize(
    "function", [update_rms, lambda params, base: simulate_by_leaf(params, base, draw(KEY, **HYPER))]
)
def test_trees_that_do_not_match_are_one_error(function):
    with pytest.raises(ValueError, match=r"base lacks parameter 'a' of params; base has parameter 'b' that params"):
        function({"a": torch.zeros(2)}, {"b": torch.zeros(2)})
