"""How often kernels are launched and compiled, what they may write to, and what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smat_fn import ops
from smat_fn.mat.offload.rebuild import Absent
from smat_fn.ops import launch, library
from smat_fn.testing import assert_trees_equal

ALIGNED = {"a": (16, 8), "b": (8,), "c": (4104,)}


@pytest.fixture
def variants():
    """Compiled variants seen in a test alone."""
    before = set(launch.VARIANTS)
    launch.VARIANTS.clear()
    yield launch.VARIANTS
    launch.VARIANTS |= before


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, marks=[pytest.mark.slow] * (dtype != torch.bfloat16)) for dtype in library.SUPPORTED],
    ids=str,
)
def test_an_aligned_tree_takes_one_launch(case, dtype):
    case(ALIGNED, dtype).kernels(launches=1)
    case(ALIGNED, dtype, start=4096 + 8).kernels(launches=1)
    case(ALIGNED | {"empty": (0, 4)}, dtype).kernels(launches=1)


def test_one_launch_for_each_dtype_and_one_for_what_is_not_aligned(case):
    c = case(ALIGNED | {"d": (8,), "odd": (7,), "scalar": ()})
    c.kernels(launches=2)
    for tree in (c.params, c.base):
        tree["b"], tree["d"] = tree["b"].bfloat16(), tree["d"].half()
    c.kernels(launches=4)


def test_nothing_is_launched_for_empty_leaves(case, kernels):
    c = case({"a": (0,), "b": (0, 3)})
    before = launch.LAUNCHES.copy()
    with kernels():
        assert_trees_equal(c.public()[0], c.params)
    assert before == launch.LAUNCHES


@pytest.mark.slow
def test_a_variant_serves_every_seed_step_size_and_draw(case, variants):
    for seed, shapes, strengths in (
        (0, ALIGNED, {}),
        (-(2**60), {"w": (64, 64)}, {"drop_prob": 0.9, "alpha_min": 1.0}),
        (7, {f"l{i}": (8 * i + 8,) for i in range(17)}, {"sigma": 0.0, "drop_prob": 1 / 3}),
    ):
        for start in (0, 8, 2**40):
            case(shapes, torch.bfloat16, masked=True, seed=seed, start=start, **strengths).kernels(launches=1)
    assert sorted(name for name, *_ in variants) == ["reweight_kernel", "simulate_kernel"]


@pytest.mark.slow
def test_variants_are_dtype_masked_noise_and_aligned(case, variants):
    wanted = {
        (dtype, masked, noise, aligned)
        for dtype in library.SUPPORTED
        for masked in (True, False)
        for noise in ("uniform", "gaussian", "laplace")
        for aligned in (True, False)
    }
    for seed in (1, 2):
        for dtype, masked, noise, aligned in wanted:
            case({"w": (8 if aligned else 7,)}, dtype, masked=masked, noise=noise, seed=seed).kernels(launches=1)
    counts = [sum(name == kernel for name, *_ in variants) for kernel in ("simulate_kernel", "reweight_kernel")]
    # both tables of quantiles share a kernel; the gradient knows no noise
    assert counts == [3 * 2 * 2 * 2, 3 * 2 * 2]


@pytest.mark.parametrize("target", ["params", "base"])
@pytest.mark.parametrize("sizes", [(8, 4104), (7, 4097)], ids=str)
def test_out_may_be_an_input(case, kernels, device, sizes, target):
    c = case({f"n{n}": (n,) for n in sizes}, torch.bfloat16, noise="gaussian")
    expected, weighted = c.chunked()
    for where in dict.fromkeys(("cpu", device)):
        numbers = [number.to(where) for number in c.numbers]
        trees = {n: [leaf.to(where, copy=True) for leaf in getattr(c, n).values()] for n in ("params", "base")}
        with kernels():
            ops.simulate_into(trees["params"], trees["base"], trees[target], *numbers, c.masked, c.starts)
        assert_trees_equal([leaf.cpu() for leaf in trees[target]], list(expected.values()))
        grads = [leaf.to(where, copy=True) for leaf in c.params.values()]
        with kernels():
            ops.reweight_into(grads, grads, *numbers[:3], c.masked, c.starts)
        assert_trees_equal([leaf.cpu() for leaf in grads], list(weighted.values()))


def test_leaves_that_cannot_be_written_to_are_all_named(case, kernels):
    c = case({"a": (2, 3), "b": (3, 2), "c": (4,)})
    params, base = list(c.params.values()), list(c.base.values())
    out = [torch.empty(3, 2).t(), torch.empty(3, 2, dtype=torch.bfloat16), torch.empty(5)]
    message = (
        r"leaf 0 of out has strides \(1, 2\), must be contiguous; "
        r"leaf 1 of out is torch.bfloat16 \(3, 2\), must be torch.float32 \(3, 2\); "
        r"leaf 2 of out is torch.float32 \(5,\), must be torch.float32 \(4,\)$"
    )
    with kernels():
        for way in (
            lambda: ops.simulate_into(params, base, out, *c.numbers, c.masked, c.starts),
            lambda: ops.reweight_into(params, out, *c.numbers[:3], c.masked, c.starts),
        ):
            with pytest.raises(ValueError, match=message):
                way()


def test_tensors_on_the_cpu_take_no_kernel_unless_forced(case):
    before = launch.LAUNCHES.copy()
    c = case(ALIGNED)
    c.public()
    c.chunked()
    assert before == launch.LAUNCHES
    with library.forced(), pytest.raises(ZeroDivisionError):
        1 / 0  # noqa: B018
    assert not library.by_kernel(list(c.params.values()))


def test_tensors_without_memory_of_their_own_take_no_kernel(kernels):
    with FakeTensorMode():
        fake = torch.zeros(8, device="cuda")
    assert not library.by_kernel([fake])  # else the kernel would read address 0
    with kernels():
        assert not library.by_kernel([Absent(torch.zeros(8), "w", "")])
        assert library.by_kernel([torch.nn.Parameter(torch.zeros(8))]) == library.by_kernel([torch.zeros(8)])


def test_the_norm_of_leaves_of_several_dtypes_is_put_in_order_without_a_wait(monkeypatch):
    waits, to = [], torch.Tensor.to
    with FakeTensorMode():
        sums, leaves = [torch.zeros(1, device="cuda") for _ in range(2)], [torch.zeros(8, device="cuda")] * 2
        spy = lambda own, *args, **more: waits.append(more.get("non_blocking")) or to(own, *args, **more)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, "to", spy)
        library.in_order([(sums[0], [1]), (sums[1], [0])], leaves)
    assert waits[-1] is True  # of the order, which the host makes


def test_no_launch_becomes_part_of_a_cuda_graph(monkeypatch):
    names = "simulate", "simulate_into", "reweight", "reweight_into", "block_squares", "climb_into"
    assert all(torch.Tag.cudagraph_unsafe in getattr(torch.ops.smat_fn, name).default.tags for name in names)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="leave simulate, reweight, norms, clipping and climbs out of the graph"):
        launch._send(torch.zeros(8, dtype=torch.int64), torch.device("cuda"))


def test_strided_keys_and_tables_are_read_in_their_logical_order(case, kernels, device):
    c = case(ALIGNED, noise="gaussian", masked=True)
    plain = type(c.numbers)(*(number.to(device) for number in c.numbers))
    streams, table = plain.streams.permute(1, 2, 0).contiguous(), plain.quantiles.repeat_interleave(2)
    strided = plain._replace(streams=streams.permute(2, 0, 1), quantiles=table[::2])
    with kernels():
        for a, b in zip(c._by_ops(strided, device), c._by_ops(plain, device), strict=True):
            assert_trees_equal(a, b)


def test_a_scale_of_float64_is_rounded_before_a_kernel_reads_it(case, kernels, device):
    c = case(ALIGNED)
    exact = c._replace(drawn=c.drawn._replace(scale=c.drawn.scale.double()))
    for a, b in zip(exact.kernels(), c.kernels(), strict=True):
        assert_trees_equal(a, b)
