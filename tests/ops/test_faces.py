"""The registered operations and their derivatives: torch's own checks, and every transform through the kernels too."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.func import vmap

from smat_fn import materialise, random
from smat_fn.ops import autograd as faces
from smat_fn.ops import launch, library
from smat_fn.ops.cpu import Numbers
from smat_fn.testing import assert_trees_close, assert_trees_equal

# torch's own: forward mode registers decompositions by torch.jit.script, linearize folds constants of a graph
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]
SHAPES = {"a": (3, 4), "b": (9,), "c": ()}


def arguments(c):
    """Positional arguments of the four operations: inputs, (outputs,) numbers, masked, starts."""
    params, base, out = ([leaf.clone() for leaf in leaves.values()] for leaves in (c.params, c.base, c.params))
    streams, scale, cutoff, *_ = c.numbers
    return {
        library.simulate: (params, base, *c.numbers, c.masked, c.starts),
        library.simulate_into: (params, base, out, *c.numbers, c.masked, c.starts),
        library.reweight: (params, streams, scale, cutoff, c.masked, c.starts),
        library.reweight_into: (params, out, streams, scale, cutoff, c.masked, c.starts),
    }


@pytest.mark.parametrize("noise", ["uniform", pytest.param("laplace", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_opcheck(case, dtype, noise):
    for op, args in arguments(case(SHAPES, dtype, noise=noise)).items():
        assert set(torch.library.opcheck(op, args).values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_derivatives_by_finite_differences(case, noise):
    c = case({"a": (2, 2), "b": (5,), "c": ()}, torch.float64, noise=noise, sigma=0.1)
    streams, scale, cutoff, sigma, quantiles = c.numbers
    params, base = ([leaf.requires_grad_() for leaf in leaves.values()] for leaves in (c.params, c.base))
    scale, sigma = scale.double().requires_grad_(), sigma.requires_grad_()

    def simulated(scale, sigma, *leaves):
        numbers = Numbers(streams, scale, cutoff, sigma, quantiles)
        return tuple(faces.simulate(leaves[:3], leaves[3:], numbers, c.masked, c.starts))

    def weighted(scale, *grads):
        return tuple(faces.reweight(grads, c.numbers._replace(scale=scale), c.masked, c.starts))

    for fn, inputs in ((simulated, (scale, sigma, *params, *base)), (weighted, (scale, *params))):
        assert torch.autograd.gradcheck(fn, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(fn, inputs, check_fwd_over_rev=True)


def test_without_a_formula_the_operations_refuse_to_be_differentiated(case):
    args = arguments(case(SHAPES))[library.simulate]
    args[0][0].requires_grad_()
    out = library.simulate(*args)
    with pytest.raises(RuntimeError, match=r"no autograd formula|does not require grad"):
        out[0].sum().backward()


def test_derivatives_in_scale_and_sigma_of_bfloat16_leaves_are_sums_in_float32(case):
    c = case({"a": (40, 8), "b": (33,)}, torch.bfloat16, base_dtype=torch.float32, masked=True)
    scale, sigma = c.numbers.scale.requires_grad_(), c.numbers.sigma.requires_grad_()
    numbers = c.numbers._replace(scale=scale, sigma=sigma)
    states = faces.simulate(list(c.params.values()), list(c.base.values()), numbers, c.masked, c.starts)
    by_scale, by_sigma = torch.autograd.grad(sum(state.float().sum() for state in states), (scale, sigma))
    mask, noise = unit_parts(c)
    delta = {path: c.params[path].double() - c.base[path].double() for path in c.params}
    assert_trees_close([by_scale], [sum((mask[p] * delta[p]).sum() for p in mask)], rtol=1e-5)
    assert_trees_close([by_sigma], [sum(noise[p].sum() for p in noise)], rtol=1e-5)
    assert by_sigma.dtype == torch.float64


def unit_parts(c):
    """m and epsilon / sigma in float64, by path."""
    like = {path: leaf.double() for path, leaf in c.params.items()}
    return materialise(c.drawn._replace(sigma=torch.ones_like(c.drawn.sigma)), like, where=c.where)


@pytest.mark.parametrize("by_kernels", [False, True], ids=["plain", "kernels"])
def test_vmap_over_other_dimensions_with_leaves_that_have_none(case, kernels, device, by_kernels):
    c = case({"a": (3, 4), "b": (9,), "c": (2, 5)}, noise="gaussian")
    where = device if by_kernels else "cpu"
    streams, scale, cutoff, sigma, quantiles = (number.to(where) for number in c.numbers)
    params, base = ([leaf.to(where) for leaf in leaves.values()] for leaves in (c.params, c.base))
    keys = torch.stack([streams, streams.flip(0), streams + 1], 1)
    scales, turned = (
        scale * torch.tensor([0.1, 0.5, 1.0], device=where),
        torch.stack([base[2], base[2] + 1, -base[2]], 2),
    )
    thetas = torch.stack([params[0], 2 * params[0], -params[0]], -1)

    def both(streams, scale, theta, theta_0):
        numbers = Numbers(streams, scale, cutoff, sigma, quantiles)
        states = faces.simulate([theta, *params[1:]], [*base[:2], theta_0], numbers, c.masked, c.starts)
        return *states, *faces.reweight([*params[:2], theta_0], numbers, c.masked, c.starts)

    before = launch.LAUNCHES.total()
    with kernels() if by_kernels else nullcontext():
        got = vmap(both, in_dims=(1, 0, 2, 2), out_dims=(0, 1, 2, 0, 1, -1))(keys, scales, thetas, turned)
        launches = launch.LAUNCHES.total() - before
        rows = [both(keys[:, i], scales[i], thetas[..., i], turned[..., i]) for i in range(3)]
    expected = [
        torch.stack(leaves, dim) for leaves, dim in zip(zip(*rows, strict=True), (0, 1, 2, 0, 1, -1), strict=True)
    ]
    assert (launches > 0) == by_kernels
    assert_trees_equal(list(got), expected)


# all transforms: the rows of tests/transforms, through the faces instead of the public functions


def load_uses():
    """A copy of tests/transforms/test_uses.py of its own."""
    path = Path(__file__).parents[1] / "transforms" / "test_uses.py"
    spec = importlib.util.spec_from_file_location("uses_of_the_faces", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


USES = load_uses()
ROWS = [(table, row) for table in ("EAGER", "REWEIGHT") for row in getattr(USES, table)]
# the interpreter takes half a second or more for others, seconds for batches over coordinates: a launch each
FAST = ("vmap key", "jvp alpha", "vmap(grad) key", "forward over reverse")
BY_KERNELS = [pytest.param(*row, marks=[pytest.mark.slow] * (row[1] not in FAST), id=" ".join(row)) for row in ROWS]


def through_faces(dtype, device="cpu"):
    """`simulate` and `reweight` of flat trees by the faces, computed in dtype on a device."""

    def parts(leaves, drawn, where):
        numbers = Numbers(
            random.leaf_streams(drawn.key, list(leaves)).to(device),
            drawn.scale.to(device, dtype),
            random.threshold(drawn.drop_prob).to(device),
            drawn.sigma.to(device),
            drawn.noise.to(device),
        )
        return numbers, [where(path, leaf) for path, leaf in leaves.items()], [0] * len(leaves)

    def back(leaves, values):
        return {
            path: value.to(leaf.device, leaf.dtype) for (path, leaf), value in zip(leaves.items(), values, strict=True)
        }

    def simulate(params, base, drawn, *, where):
        numbers, masked, starts = parts(params, drawn, where)
        theta, theta_0 = ([leaf.to(device, dtype) for leaf in leaves.values()] for leaves in (params, base))
        return back(params, faces.simulate(theta, theta_0, numbers, masked, starts))

    def reweight(grads, drawn, *, where):
        numbers, masked, starts = parts(grads, drawn, where)
        raw = [leaf.to(device, dtype) for leaf in grads.values()]
        return back(grads, faces.reweight(raw, numbers, masked, starts))

    return simulate, reweight


@pytest.mark.parametrize(("table", "row"), ROWS, ids=map(" ".join, ROWS))
def test_every_transform(monkeypatch, table, row):
    simulate, reweight = through_faces(torch.float64)
    monkeypatch.setattr(USES, "simulate", simulate)
    monkeypatch.setattr(USES, "reweight", reweight)
    actual, expected = getattr(USES, table)[row]
    assert_trees_close([actual()], [expected()], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("table", "row"), BY_KERNELS)
def test_every_transform_by_kernels(monkeypatch, kernels, device, table, row):
    simulate, reweight = through_faces(torch.float32, device)
    monkeypatch.setattr(USES, "simulate", simulate)
    monkeypatch.setattr(USES, "reweight", reweight)
    actual, expected = getattr(USES, table)[row]
    before = launch.LAUNCHES.total()
    with kernels():
        value = actual()
    assert launch.LAUNCHES.total() > before
    assert_trees_close([value], [expected()], rtol=2e-5, atol=2e-5)
