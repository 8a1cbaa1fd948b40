"""Probing: E L(theta~) beside L(theta), over fixed keys."""

import pytest
import torch

from smat_fn import draw, random, simulate, testing
from smat_fn.simulation import probe
from smat_fn.types import Micro

SHAPES = {"w": (3, 4), "b": (4,)}
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.01}
KEYS = random.split(random.key(7), 4)


def trees(dtype=torch.float64):
    return (testing.random_tree(seed, SHAPES, dtype=dtype) for seed in (1, 2))


def loss_fn(params, batch):
    return ((batch @ params["w"] + params["b"]) ** 2).mean(), None


def test_it_is_the_mean_loss_at_the_draws_of_the_keys():
    base, params = trees()
    batches = [testing.random_tree(seed, {"x": (5, 3)}, dtype=torch.float64)["x"] for seed in (3, 4)]

    def loss(state):
        return sum(loss_fn(state, x)[0].item() for x in batches) / 2

    def masked(path, leaf):
        return path == "w"

    found = probe(loss_fn, params, base, batches, KEYS, where=masked, **STRENGTHS)
    assert found.clean == loss(params)
    assert found.simulated == tuple(loss(simulate(params, base, draw(key, **STRENGTHS), where=masked)) for key in KEYS)
    assert found.mean == pytest.approx(sum(found.simulated) / 4, rel=1e-15)


def test_batches_have_their_weights():
    base, params = trees()
    x = testing.random_tree(3, {"x": (6, 3)}, dtype=torch.float64)["x"]
    whole = probe(loss_fn, params, base, [x], KEYS, **STRENGTHS)
    parts = probe(loss_fn, params, base, [Micro(x[:1], 1), Micro(x[1:], 5)], KEYS, **STRENGTHS)
    assert parts.clean == pytest.approx(whole.clean, rel=1e-12)
    assert parts.simulated == pytest.approx(whole.simulated, rel=1e-12)


def test_with_everything_off_both_losses_are_those_of_the_parameters():
    base = {path: torch.zeros(shape, dtype=torch.float64) for path, shape in SHAPES.items()}
    _, params = trees()
    found = probe(loss_fn, params, base, [torch.ones(2, 3).double()], KEYS, alpha_min=1, drop_prob=0, sigma=0)
    assert found.simulated == (found.clean,) * 4


def test_the_expectation_on_a_quadratic_has_its_closed_form():
    # L = |theta|^2 / 2 from base 0 without mask: E L(theta~) = E alpha^2 |theta|^2 / 2 + d sigma^2 / 2
    _, params = trees()
    base = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    square = sum(float((leaf**2).sum()) for leaf in params.values())
    found = probe(
        lambda p, _: (sum((leaf**2).sum() for leaf in p.values()) / 2, None),
        params, base, [None], random.split(random.key(1), 400), alpha_min=0.5, drop_prob=0.0, sigma=0.1,
    )  # fmt: skip
    expected = (1 + 0.5 + 0.25) / 3 * square / 2 + 16 * 0.01 / 2
    testing.assert_within_errors(torch.tensor(found.simulated), expected)


def test_bad_input_is_refused():
    base, params = trees()
    for batches, why in (([], "no batches"), (iter([]), "no batches"), (torch.ones(2, 3), "batches are a tensor")):
        with pytest.raises(ValueError, match=why):
            probe(loss_fn, params, base, batches, KEYS, **STRENGTHS)
    with pytest.raises(ValueError, match=r"weights of the batches add up to 0\.0"):
        probe(loss_fn, params, base, [Micro(torch.ones(2, 3), 0.0)], KEYS, **STRENGTHS)
    with pytest.raises(ValueError, match=r"keys have shape \(2,\), must be \(N, 2\)"):
        probe(loss_fn, params, base, [torch.ones(2, 3)], random.key(0), **STRENGTHS)
    with pytest.raises(ValueError, match="keys are a int"):
        probe(loss_fn, params, base, [torch.ones(2, 3)], 0, **STRENGTHS)
    with pytest.raises(ValueError, match="alpha_min is 2"):
        probe(loss_fn, params, base, [torch.ones(2, 3).double()], KEYS, alpha_min=2, drop_prob=0, sigma=0)
