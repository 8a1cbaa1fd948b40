"""On a CUDA device: the kernels are what runs, with the bits of the CPU, without a wait of the host."""

import pytest
import torch

from smat_fn import random, reweight, simulate
from smat_fn.ops import launch, library
from smat_fn.simulation import draw
from smat_fn.simulation import reweight_and_clip as finish
from smat_fn.testing import assert_trees_equal, random_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
SHAPES = {"embed": (3001, 512), "w": (2048, 4096), "b": (4097,), "norm": (2048,), "odd": (7, 7)}


def where(path, leaf):
    return path in ("w", "odd")


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
@pytest.mark.parametrize("dtype", library.SUPPORTED, ids=str)
def test_the_bits_of_the_cpu_by_two_launches(dtype, noise):
    params, base = random_tree(1, SHAPES, dtype=dtype), random_tree(2, SHAPES, dtype=dtype)
    drawn = draw(random.key(3), alpha_min=0.2, drop_prob=0.5, sigma=2e-3, noise=noise)
    there, origin = ({path: leaf.cuda() for path, leaf in leaves.items()} for leaves in (params, base))
    before = launch.LAUNCHES.copy()
    states, grads = simulate(there, origin, drawn, where=where), reweight(there, drawn, where=where)
    clipped, norm = finish(there, drawn, where=where, max_norm=1.0)
    assert launch.LAUNCHES - before == {"simulate_kernel": 2, "reweight_kernel": 2 + 4}
    assert all(leaf.is_cuda for tree in (states, grads, clipped) for leaf in tree.values())
    assert_trees_equal({path: leaf.cpu() for path, leaf in there.items()}, params)
    for got, expected in (
        (states, simulate(params, base, drawn, where=where)),
        (grads, reweight(params, drawn, where=where)),
    ):
        assert_trees_equal({path: leaf.cpu() for path, leaf in got.items()}, expected)
    expected, expected_norm = finish(params, drawn, where=where, max_norm=1.0)
    assert_trees_equal([norm.cpu()], [expected_norm])
    assert_trees_equal({path: leaf.cpu() for path, leaf in clipped.items()}, expected)


@pytest.mark.parametrize("dtype", library.SUPPORTED, ids=str)
def test_leaves_beside_one_that_no_kernel_takes_are_clipped_to_the_bits_of_the_cpu(dtype):
    grads = {**random_tree(1, {"w": (513, 700)}, dtype=dtype), **random_tree(2, {"b": (9,)}, dtype=torch.float64)}
    before = launch.LAUNCHES.copy()
    clipped, norm = finish({path: leaf.cuda() for path, leaf in grads.items()}, None, max_norm=0.3)
    assert launch.LAUNCHES - before == {"reweight_kernel": 2}  # the squares of w and its clip
    expected, expected_norm = finish(grads, None, max_norm=0.3)
    assert_trees_equal([norm.cpu()], [expected_norm])
    assert_trees_equal({path: leaf.cpu() for path, leaf in clipped.items()}, expected)


def test_the_host_does_not_wait():
    leaves = {path: leaf.cuda() for path, leaf in random_tree(1, {"w": (64, 64), "b": (7,)}).items()}
    key = random.key(3).cuda()

    def step():
        drawn = draw(key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
        return finish(simulate(leaves, leaves, drawn), drawn, max_norm=1.0)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_leaves_on_a_device_that_is_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("no GPU beside the first")
    params, base = random_tree(1, SHAPES), random_tree(2, SHAPES)
    drawn = draw(random.key(3), alpha_min=0.2, drop_prob=0.5, sigma=2e-3)
    second = [{path: leaf.to("cuda:1") for path, leaf in leaves.items()} for leaves in (params, base)]
    states = simulate(*second, drawn, where=where)
    assert_trees_equal({path: leaf.cpu() for path, leaf in states.items()}, simulate(params, base, drawn, where=where))
