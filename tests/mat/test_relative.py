"""SMAT with noise in units of the update, and with alpha above 1, against the definitions."""

import pytest
import torch

from smat_fn import draw, optim, random, simulate, testing
from smat_fn.mat import sigma_units, smat
from smat_fn.simulation import relative
from smat_fn.simulation.relative import simulate_by_leaf, update_rms

SHAPES = {"blocks.0.w": (8, 4), "head": (4,), "still": (3,)}
KEY = random.key(9)
BASE, PARAMS = (testing.random_tree(seed, SHAPES) for seed in (0, 1))
PARAMS["still"] = BASE["still"].clone()
HYPER = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.4}


def in_block(path, leaf):
    return path == "blocks.0.w"


@pytest.mark.parametrize("of", ["update", "leaf"])
def test_one_step_is_the_gradient_at_that_state(of):
    seen = []

    def loss(params, batch):
        seen.append({path: leaf.detach().clone() for path, leaf in params.items()})
        return sum(leaf.sum() for leaf in params.values()) * batch, {}

    options = {"where": in_block, "period": 1, "sigma_of": of, **HYPER}
    method = smat.build(loss, optim.adam(0.01), BASE, **options)
    method.update(KEY, method.init(PARAMS), torch.tensor(1.0))
    drawn = draw(random.fold_in(KEY, 0), **HYPER)
    if of == "leaf":
        want = simulate_by_leaf(PARAMS, BASE, drawn, where=in_block)
    else:
        want = simulate(PARAMS, BASE, drawn._replace(sigma=0.4 * update_rms(PARAMS, BASE)), where=in_block)
    testing.assert_trees_equal(seen[0], want)


def test_the_update_is_not_read_by_the_host(monkeypatch):
    drawn, seen = draw(KEY, **HYPER), []
    there = torch.ones((), dtype=torch.float64, device="meta")  # has no value that could be read
    for module in (sigma_units, relative):
        monkeypatch.setattr(module, "update_rms", lambda *_: there)
    monkeypatch.setattr(relative, "simulate", lambda params, base, drawn, **_: seen.append(drawn) or params)
    simulate_by_leaf(PARAMS, BASE, drawn)
    sigma_units._ByUpdate(lambda *given: seen.append(given[-1]), BASE)(PARAMS, None, drawn)
    assert [own.sigma.device.type for own in seen] == ["meta"] * (len(SHAPES) + 1)


def test_alpha_reaches_up_to_alpha_max():
    keys = [random.fold_in(KEY, i) for i in range(200)]
    scales = [float(draw(key, alpha_max=1.8, **HYPER).scale) for key in keys]
    plain = [float(draw(key, **HYPER).scale) for key in keys]
    assert 0.3 <= min(scales) < 0.35
    assert 1.7 < max(scales) <= 1.8
    for wide, narrow in zip(scales, plain, strict=True):  # the same uniform number
        assert (wide - 0.3) / 1.5 == pytest.approx((narrow - 0.3) / 0.7, abs=1e-6)


def test_scale_above_one_alone_is_not_off():
    def end(**options):
        off = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0, "period": 1}
        loss = lambda params, batch: (sum((leaf**2).sum() for leaf in params.values()) * batch, {})  # noqa: E731
        method = smat.build(loss, optim.adam(0.01), BASE, **off, **options)
        return method.update(KEY, method.init(PARAMS), torch.tensor(1.0))[1]

    assert not end().simulated
    assert end(alpha_max=2.0).simulated


def test_a_base_that_is_elsewhere_has_no_update_to_read():
    with pytest.raises(ValueError, match="sigma_of 'leaf' reads base as it is: leave out offload 'cpu'"):
        smat.build(lambda p, b: (p["head"].sum(), {}), optim.adam(0.1), BASE, sigma_of="leaf", offload="cpu")
