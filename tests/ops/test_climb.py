"""The climb: compiled loops and plain torch against ASAM's formula, bit for bit."""

import pytest
import torch

from smat_fn import execution, ops, testing, tree
from smat_fn.ops import launch

SHAPES = {"long": (5, 4099), "block": (4096,), "short": (7,), "number": (), "nothing": (0, 3)}


def formula(params, slopes, rho, adaptive):
    """``theta + |theta| (|theta| s) (rho / (norm + 1e-12))``, each operation rounded."""
    wide = {path: tree.compute_dtype(leaf) for path, leaf in params.items()}
    theta = {path: leaf.to(wide[path]) for path, leaf in params.items()}
    weight = {path: leaf.abs() if adaptive else torch.ones_like(leaf) for path, leaf in theta.items()}
    weighted = {path: weight[path] * leaf.to(wide[path]) for path, leaf in slopes.items()}
    length = rho / (tree.global_norm(weighted) + 1e-12)
    return [
        (theta[path] + weight[path] * weighted[path] * length.to(wide[path])).to(leaf.dtype)
        for path, leaf in params.items()
    ]


ADAPTIVE = pytest.mark.parametrize("adaptive", [True, False])


@ADAPTIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_every_way_is_the_formula(dtype, adaptive):
    params, slopes = (testing.random_tree(seed, SHAPES, dtype=dtype) for seed in (0, 1))
    if dtype == torch.float32:
        slopes["short"] = slopes["short"].bfloat16()  # momentum may be kept in another dtype than masters
    params["strided"], slopes["strided"] = params["long"].T, slopes["long"].T
    want = formula(params, slopes, 0.3, adaptive)
    for strided in (True, False):
        if not strided:
            params.pop("strided"), slopes.pop("strided")
            want = formula(params, slopes, 0.3, adaptive)
        inputs = [leaf.clone() for leaf in (*params.values(), *slopes.values())]
        found = ops.climb(list(params.values()), list(slopes.values()), rho=0.3, adaptive=adaptive)
        with execution.off():
            plain = ops.climb(list(params.values()), list(slopes.values()), rho=0.3, adaptive=adaptive)
        for path, a, b, c in zip(params, found, plain, want, strict=True):
            assert (a.dtype, a.stride()) == (params[path].dtype, params[path].stride())
            assert torch.equal(a, c), path
            assert torch.equal(b, c), path
        for before, after in zip(inputs, (*params.values(), *slopes.values()), strict=True):
            assert torch.equal(before, after)


@ADAPTIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_the_formula_in_two_launches_beside_a_leaf_that_they_do_not_take(dtype, adaptive, kernels, device):
    params, slopes = (
        {p: leaf.to(device) for p, leaf in testing.random_tree(s, SHAPES, dtype=dtype).items()} for s in (0, 1)
    )
    params["block"], slopes["block"] = params["block"].double(), slopes["block"].double()
    want, before = formula(params, slopes, 0.3, adaptive), launch.LAUNCHES["climb_kernel"]
    with kernels():
        found = ops.climb(list(params.values()), list(slopes.values()), rho=0.3, adaptive=adaptive)
    assert launch.LAUNCHES["climb_kernel"] - before == 2
    testing.assert_trees_equal(found, want)


def test_a_donated_slope_becomes_the_result_unless_it_shares_its_memory():
    params, slopes = (list(testing.random_tree(s, SHAPES).values()) for s in (0, 1))
    params.append(params[0]), slopes.append(slopes[0])
    want = ops.climb(params, slopes, rho=0.3, adaptive=True)
    before = slopes[0].clone()
    found = ops.climb(params, slopes, rho=0.3, adaptive=True, donate=True)
    testing.assert_trees_equal(found, want)
    assert torch.equal(slopes[0], before)
    assert [a is b for a, b in zip(found, slopes, strict=True)] == [False, True, True, True, True, False]


def test_without_a_slope_it_stays():
    leaf = torch.randn(5, generator=torch.Generator().manual_seed(0))
    (found,) = ops.climb([leaf], [torch.zeros(5)], rho=1.0, adaptive=True)
    assert torch.equal(found, leaf)
    assert ops.climb([], [], rho=1.0, adaptive=True) == []


def climb_one(theta, slope):
    return ops.climb([theta], [slope], rho=0.3, adaptive=True)[0]


def test_inside_transforms_it_batches_compiles_and_has_the_derivative_of_the_formula():
    theta, slope, u = testing.random_tree(2, {"a": (3, 7), "b": (3, 7), "c": (7,)}, dtype=torch.float64).values()
    found = torch.func.vmap(climb_one)(theta, slope)
    for row, t, s in zip(found, theta, slope, strict=True):
        torch.testing.assert_close(row, climb_one(t, s), rtol=1e-14, atol=0)

    def formula(t, s):
        return t + 0.3 * t.square() * s / ((t.abs() * s).norm() + 1e-12)

    for argument in (0, 1):
        slopes = [torch.func.grad(lambda t, s, f=f: (f(t, s) * u).sum(), argument) for f in (climb_one, formula)]
        ours, theirs = (slope_of(theta[0], slope[0]) for slope_of in slopes)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
        assert slopes[0](theta[0], torch.zeros(7, dtype=torch.float64)).isfinite().all()
    compiled = torch.compile(climb_one, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(theta[0], slope[0]), climb_one(theta[0], slope[0]), rtol=1e-14, atol=0)
