"""Clipping against torch's own, and chains."""

import math

import pytest
import torch

from smat_fn import optim, tree
from smat_fn.simulation import reweight_and_clip

PYTHAGORAS = {"a": [3.0, 4.0], "b": [12.0], "scalar": 0.0}


def exact(dtype=torch.float32):
    return {name: torch.tensor(value, dtype=dtype) for name, value in PYTHAGORAS.items()}


def gaussian(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = {"w": (40, 30), "b": (7,), "scalar": (), "empty": (0,)}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("donate", [False, True])
def test_clip_is_its_definition(dtype, donate):
    clipped, norm = optim.clip(exact(dtype), 6.5, donate=donate)
    assert norm.item() == 13
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    factor = torch.tensor(6.5 / (13 + 1e-6), dtype=torch.float64).to(wide)
    for name, leaf in exact(dtype).items():
        assert clipped[name].dtype == dtype
        assert torch.equal(clipped[name], (leaf.to(wide) * factor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("donate", [False, True])
def test_a_scalar_leaf_is_rounded_like_any_other(dtype, donate):
    values = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = [values.clone(), *(value.clone() for value in values)]
    (vector, *scalars), _ = optim.clip(grads, 0.37, donate=donate)
    assert torch.equal(torch.stack(scalars), vector)
    assert scalars[0].dtype == dtype


@pytest.mark.parametrize("max_norm", [0.5, 5.0, 1e4])
def test_clip_is_torch_clip_grad_norm(max_norm):
    grads = gaussian(torch.float64)
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for leaf, g in zip(leaves, grads.values(), strict=True):
        leaf.grad = g.clone()
    total = torch.nn.utils.clip_grad_norm_(leaves, max_norm)
    clipped, norm = optim.clip(grads, max_norm)
    assert norm.item() == pytest.approx(total.item(), rel=1e-6)
    for got, leaf in zip(clipped.values(), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("max_norm", [None, 1e4])
def test_a_norm_below_the_bound_changes_no_bit(dtype, max_norm):
    grads = gaussian(dtype)
    clipped, norm = optim.clip(grads, max_norm)
    assert torch.equal(norm, tree.global_norm(grads).float())
    assert all(torch.equal(clipped[name], g) for name, g in grads.items())
    assert all(clipped[name].dtype == g.dtype for name, g in grads.items())


def test_clip_changes_its_arguments_only_if_they_are_donated():
    grads = gaussian()
    copy = tree.clone(grads)
    pure, _ = optim.clip(grads, 0.1)
    assert all(torch.equal(grads[name], copy[name]) for name in grads)
    donated, _ = optim.clip(grads, 0.1, donate=True)
    assert all(donated[name] is grads[name] for name in ("w", "b", "scalar"))
    assert all(torch.equal(donated[name], pure[name]) for name in grads)


def test_donation_scales_shared_and_expanded_gradients_once():
    # what autograd returns for (a + b).sum(), and for sums of one leaf
    shared, row = torch.tensor([3.0, 4.0]), torch.full((1,), 0.5)
    grads = {"a": shared, "b": shared, "flat": row.expand(8), "part": shared[:1]}
    pure, norm = optim.clip(grads, 1.0)
    donated, donated_norm = optim.clip(grads, 1.0, donate=True)
    assert torch.equal(norm, donated_norm)
    assert all(torch.equal(pure[name], donated[name]) for name in grads)
    assert torch.equal(shared, torch.tensor([3.0, 4.0]))


def test_clip_takes_nested_trees():
    clipped, norm = optim.clip({"x": [torch.tensor([3.0]), (torch.tensor(4.0),)]}, 2.5)
    assert norm == 5
    assert type(clipped["x"][1]) is tuple
    assert clipped["x"][1][0].item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan, math.inf])
def test_bad_bounds_are_refused(max_norm):
    calls = optim.clip_by_global_norm, lambda m: optim.clip(exact(), m)
    for use in (*calls, lambda m: reweight_and_clip(exact(), None, max_norm=m)):
        with pytest.raises(ValueError, match=f"max_norm is {max_norm}, must be positive and finite, or None"):
            use(max_norm)
    with pytest.raises(ValueError, match="max_norm is None, must be positive and finite: leave the transform out"):
        optim.clip_by_global_norm(None)


@pytest.mark.parametrize("donate", [False, True])
def test_a_chain_is_its_parts_in_order(donate):
    params, inner = gaussian(seed=1), optim.adamw(0.1, weight_decay=0.1)
    chained = optim.chain(lambda g: tree.tree_map(lambda x: 2 * x, g), optim.clip_by_global_norm(0.3), inner)
    want, want_state = params, inner.init(params)
    got = tree.clone(params)
    state = chained.init(got)
    for step in range(3):
        grads = gaussian(seed=step)
        copy = tree.clone(grads)
        clipped, _ = optim.clip(tree.tree_map(lambda x: 2 * x, grads), 0.3)
        want, want_state = inner.update(clipped, want_state, want)
        got, state = chained.update(grads, state, got, **({"donate": True} if donate else {}))
        assert all(torch.equal(grads[name], copy[name]) for name in grads)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert state.optimizer.step == 3


def test_chains_nest():
    params, grads = gaussian(), gaussian(seed=1)
    flat = optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1))
    deep = optim.chain(optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1)))
    got, want = (o.update(grads, o.init(params), params)[0] for o in (deep, flat))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    "parts",
    [(), (optim.clip_by_global_norm(1.0),), (optim.adam(0.1), optim.clip_by_global_norm(1.0)), (optim.adam(0.1),) * 2],
    ids=["nothing", "no optimizer", "optimizer first", "two"],
)
def test_a_chain_has_one_optimizer_at_its_end(parts):
    with pytest.raises(ValueError, match="gradient transforms first and one optimizer last"):
        optim.chain(*parts)
