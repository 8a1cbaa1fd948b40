"""Reweight, norm and clip in one or two launches: the bits of the three separate functions."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from smat_fn import ops, tree
from smat_fn.ops import launch
from smat_fn.ops.cpu import Drawn
from smat_fn.optim.chain import clip
from smat_fn.testing import assert_trees_equal

SHAPES = {"a": (64, 64), "b": (5000,), "c": (8,), "empty": (0,), "scalar": (), "d": (3, 7)}
WAYS = pytest.mark.parametrize("by_kernels", [False, True], ids=["plain", "kernels"])
DONATE = pytest.mark.parametrize("donate", [False, True], ids=["pure", "donate"])
SIMULATED = pytest.mark.parametrize("simulated", [False, True], ids=["clean", "simulated"])


@pytest.fixture
def finished(kernels, device):
    """``finished(case, simulated, ...)``: (gradient, norm, launches) for a case whose params are gradients."""

    def run(c, simulated, max_norm, *, by_kernels, donate=False, grads=None):
        where = device if by_kernels else "cpu"
        if grads is None:
            grads = {path: leaf.to(where, copy=True) for path, leaf in c.params.items()}
        numbers = type(c.numbers)(*(number.to(where) for number in c.numbers)) if simulated else None
        before = launch.LAUNCHES["reweight_kernel"]
        with kernels() if by_kernels else nullcontext():
            result, norm = ops.reweight_and_clip(grads, numbers, c.masked, max_norm=max_norm, donate=donate)
        launches = launch.LAUNCHES["reweight_kernel"] - before
        assert (launches > 0) == by_kernels
        if not donate:
            assert_trees_equal({path: leaf.cpu() for path, leaf in grads.items()}, c.params)
        return {path: leaf.cpu() for path, leaf in result.items()}, norm.cpu(), launches

    return run


DTYPES = (torch.float32,), (torch.float16, torch.bfloat16, torch.float32), (torch.bfloat16,)
BOUNDS = None, 0.5, 1e6
# fast: two of the first dtypes, bounds and flags in each combination
FINISHED = [
    pytest.param(
        DTYPES[kind], simulated, BOUNDS[bound], donate, by_kernels,
        marks=[pytest.mark.slow] * ((kind, bound) != (by_kernels ^ simulated, donate ^ simulated)),
    )
    for kind, bound, simulated, donate, by_kernels in product(range(3), range(3), *3 * [(False, True)])
]  # fmt: skip


@pytest.mark.parametrize(("dtypes", "simulated", "max_norm", "donate", "by_kernels"), FINISHED, ids=str)
def test_the_separate_functions_bit_for_bit(case, finished, dtypes, simulated, max_norm, donate, by_kernels):
    c = case(SHAPES, seed=2)
    c = c._replace(params={p: v.to(dtypes[i % len(dtypes)]) for i, (p, v) in enumerate(c.params.items())})
    weighted = c.public()[1] if simulated else c.params
    expected, norm = clip(weighted, max_norm)
    assert torch.equal(norm, tree.global_norm(weighted).float())
    assert 0.5 < norm.item() < 1e6
    got, got_norm, _ = finished(c, simulated, max_norm, by_kernels=by_kernels, donate=donate)
    assert_trees_equal(got, expected)
    assert_trees_equal([got_norm], [norm])


def test_partial_sums_are_added_in_the_order_of_the_definition(case, kernels, device):
    blocks = torch.zeros(11, 4096)
    for level, block in enumerate(blocks):
        first, second = 2048 >> level, 1024 >> level
        block[0] = 1
        # squares of 2**-24: each alone is lost beside 1, both together would not be
        block[first] = block[first + second] = 2**-12
    c = case({"a": (11, 4096), "b": (4097,), "empty": (0,), "c": (8,)}, masked=False, alpha_min=1.0)
    leaves = [blocks.to(device), *(torch.ones(leaf.shape, device=device) for leaf in list(c.params.values())[1:])]
    sums = torch.full((11 + 2 + 1,), float("nan"), device=device)
    with kernels():
        numbers = type(c.numbers)(*(number.to(device) for number in c.numbers))
        launch.Reweighting(leaves, leaves, Drawn(numbers, c.masked, c.starts))(sums=sums, store=False)
    assert sums.tolist() == [1.0] * 11 + [4096.0, 1.0, 8.0]


@DONATE
@SIMULATED
def test_one_launch_without_a_clip_and_two_with(case, finished, simulated, donate):
    c = case({"a": (64, 64), "b": (16,), "c": (40, 8)}, torch.bfloat16)
    for max_norm, launches in ((None, 1), (1.0, 2)):
        assert finished(c, simulated, max_norm, by_kernels=True, donate=donate)[2] == launches


@WAYS
def test_a_donated_gradient_holds_the_result(case, kernels, device, by_kernels):
    c = case({"a": (64,), "b": (7,)})
    where = device if by_kernels else "cpu"
    grads = {path: leaf.to(where, copy=True) for path, leaf in c.params.items()}
    numbers = type(c.numbers)(*(number.to(where) for number in c.numbers))
    with kernels() if by_kernels else nullcontext():
        result, _ = ops.reweight_and_clip(grads, numbers, c.masked, max_norm=0.5, donate=True)
    assert all(result[path].data_ptr() == grads[path].data_ptr() for path in grads)


@WAYS
@DONATE
@SIMULATED
def test_gradients_as_autograd_hands_them_out(case, finished, device, simulated, donate, by_kernels):
    one = torch.linspace(-1, 1, 24, device=device if by_kernels else "cpu").view(4, 6)
    # one tensor for two leaves; turned; expanded; two parts of one tensor
    grads = {"a": one, "b": one, "c": one.clone().t(), "d": one[0, 0].expand(6, 4)}
    grads |= dict(zip(("e", "f"), one.clone().split(2), strict=True))
    c = case({path: leaf.shape for path, leaf in grads.items()})
    c = c._replace(params={path: leaf.cpu().clone() for path, leaf in grads.items()})
    expected, norm = clip(c.public()[1] if simulated else c.params, 0.5)
    measured = finished(c, False, None, by_kernels=by_kernels, grads=grads)[1]
    assert_trees_equal([measured], [tree.global_norm(c.params).float()])
    got, got_norm, _ = finished(c, simulated, 0.5, by_kernels=by_kernels, donate=donate, grads=grads)
    assert_trees_equal(got, expected)
    assert_trees_equal([got_norm], [norm])
    # parts that lie side by side, as those of averaged gradients, are written in place if they are donated; no other is
    wanted = {path: expected[path] if donate and path in ("e", "f") else leaf for path, leaf in c.params.items()}
    assert_trees_equal({path: leaf.cpu() for path, leaf in grads.items()}, wanted)


@WAYS
def test_no_leaves_and_empty_leaves(kernels, device, by_kernels):
    where = device if by_kernels else "cpu"
    with kernels() if by_kernels else nullcontext():
        for leaves in ({}, {"a": torch.zeros(0, device=where)}):
            result, norm = ops.reweight_and_clip(leaves, None, [False] * len(leaves), max_norm=1.0, donate=False)
            assert_trees_equal(result, leaves)
            assert norm == 0


@WAYS
def test_a_norm_that_is_not_finite_is_reported(case, finished, by_kernels):
    c = case({"a": (16,)})
    c.params["a"][3] = float("inf")
    assert finished(c, False, None, by_kernels=by_kernels)[1] == float("inf")
