"""Kernels, chunked torch, the public functions and the literal equations give the same bits."""

from itertools import pairwise

import pytest
import torch

from smat_fn.simulation import NOISES, naive, opposite
from smat_fn.testing import assert_trees_equal

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (1, 7, 8, 63, 4097, 12301)
# numpy's, in the interpreter
overflows = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}
ALONE = {"alpha_min": 0.0}, {"drop_prob": 0.999999}, {"drop_prob": 0.5}, {"sigma": 1e30}


def by_size(*sizes):
    return {f"n{size}": (size,) for size in sizes}


def assert_same(*results):
    """Pairs (states, weighted gradients) with the bits of the first."""
    for states, weighted in results[1:]:
        assert_trees_equal(states, results[0][0])
        assert_trees_equal(weighted, results[0][1])


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[::2])], ids=str
)
def test_all_sizes(case, dtype, noise):
    c = case(by_size(*SIZES[: None if noise == "uniform" else -1]), dtype, noise=noise)
    assert_same(c.public(), c.chunked(), c.kernels())


@pytest.mark.parametrize(
    ("dtype", "noise"),
    [
        pytest.param(dtype, noise, marks=[pytest.mark.slow] * (dtype != torch.bfloat16 and noise != "uniform"))
        for dtype in DTYPES
        for noise in NOISES
    ],
    ids=str,
)
def test_short_leaves_against_the_literal_equations(case, dtype, noise):
    c = case(by_size(1, 7, 8, 63), dtype, noise=noise, seed=3)
    states = naive.simulate(c.params, c.base, c.drawn, where=c.where)
    weighted = naive.reweight(c.params, c.drawn, where=c.where)
    assert_same((states, weighted), c.public(), c.chunked(), c.kernels())


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("dtype", "drop_prob"),
    [
        *((torch.float32, 0.37), (torch.bfloat16, 0.0)),
        *(pytest.param(torch.float32, p, marks=pytest.mark.slow) for p in (0.0, 0.5, 0.99999)),
        *(pytest.param(torch.bfloat16, p, marks=pytest.mark.slow) for p in (0.37, 0.5, 0.99999)),
    ],
    ids=str,
)
def test_the_opposite_of_a_draw_against_the_literal_equations(case, dtype, drop_prob, noise):
    c = case(by_size(1, 7, 8, 63), dtype, noise=noise, seed=4, drop_prob=drop_prob)
    c = c._replace(drawn=opposite(c.drawn))
    states = naive.simulate(c.params, c.base, c.drawn, where=c.where)
    weighted = naive.reweight(c.params, c.drawn, where=c.where)
    assert_same((states, weighted), c.public(), c.chunked(), c.kernels())


@pytest.mark.parametrize(
    "start", [3, 4089, 2**35 + 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 2**32 + 2**31, 2**35 + 16))]
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[::2])], ids=str
)
def test_starts(case, dtype, start):
    c = case(by_size(7, 64, 4097, 4104), dtype, start=start)
    by_kernels = c.kernels()
    assert_same(c.public(), c.chunked(), by_kernels)
    path, leaf = "n64", c.params["n64"]
    center, m = c.base[path].float(), naive.mask(c.drawn, path, leaf, masked=True, start=start)
    noise = naive.noise(c.drawn, path, leaf, start=start)
    state = (center + c.drawn.scale * m * (leaf.float() - center) + noise).to(dtype)
    assert_trees_equal({path: by_kernels[0][path]}, {path: state})


@pytest.mark.parametrize("cuts", [(0, 8, 4096, 4500), (0, 3, 4095, 4097, 4500)], ids=str)
def test_shards_are_slices_of_the_whole(case, cuts):
    whole = case({"w": (4500,)}, torch.bfloat16, masked=True)
    expected = whole.kernels()
    shards = []
    for low, high in pairwise(cuts):
        part = whole._replace(
            params={"w": whole.params["w"][low:high]}, base={"w": whole.base["w"][low:high]}, starts=[low]
        )
        shards.append(part.kernels())
    assert_same(expected, tuple({"w": torch.cat([shard[i]["w"] for shard in shards])} for i in (0, 1)))


@pytest.mark.parametrize(
    ("strengths", "masked"),
    [
        *((OFF | one, True) for one in ({}, *ALONE)),
        *((OFF | one, False) for one in ({}, {"sigma": 1e30})),  # the others change nothing there
        *(pytest.param(OFF | one, False, marks=pytest.mark.slow) for one in ALONE[:-1]),
    ],
    ids=str,
)
@overflows
def test_each_operation_alone(case, strengths, masked):
    for dtype in DTYPES:
        c = case(by_size(8, 63), dtype, masked=masked, **strengths)
        literal = (
            naive.simulate(c.params, c.base, c.drawn, where=c.where),
            naive.reweight(c.params, c.drawn, where=c.where),
        )
        assert_same(literal, c.public(), c.chunked(), c.kernels())


@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
def test_base_of_another_dtype(case, dtypes):
    c = case(by_size(7, 64), *dtypes)
    literal = naive.simulate(c.params, c.base, c.drawn, where=c.where)
    by_kernels = c.kernels()
    assert_trees_equal(by_kernels[0], literal)
    assert_same(c.public(), c.chunked(), by_kernels)


def mixed_tree(case):
    """Several dtypes, sizes that fill rows and others, empty and 0-d leaves, views that start at odd places."""
    shapes = {"a": (0, 3), "b": (16, 8), "c": (), "d": (4097,), "e": (8,), "f": (0,), "g": (129, 8), "h": (3, 5)}
    c = case(shapes, seed=5)
    for tree, dtypes in ((c.params, DTYPES), (c.base, DTYPES[1:])):
        for i, path in enumerate(tree):
            tree[path] = tree[path].to(dtypes[i % len(dtypes)])
    for path, offset in (("e", 1), ("g", 3)):
        tree = c.params if path == "e" else c.base
        tree[path] = torch.cat([torch.zeros(offset, dtype=tree[path].dtype), tree[path].flatten()])[offset:].view(
            shapes[path]
        )
        assert tree[path].data_ptr() % 16
    return c


def test_a_mixed_tree_in_one_call(case):
    c = mixed_tree(case)
    by_kernels = c.kernels()
    assert_same(c.public(), c.chunked(), by_kernels)
    assert_trees_equal(by_kernels[0], naive.simulate(c.params, c.base, c.drawn, where=c.where))


@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        *((1, dtype) for dtype in DTYPES),
        *((4, torch.bfloat16), (5, torch.float16)),
        *(pytest.param(4, dtype, marks=pytest.mark.slow) for dtype in DTYPES[::2]),
        *(pytest.param(5, dtype, marks=pytest.mark.slow) for dtype in DTYPES[:2]),
    ],
    ids=str,
)
def test_views_at_odd_offsets(case, dtype, offset):
    c = case({"w": (2, 2056)}, dtype, masked=True)

    def shifted(leaf):
        view = torch.cat([torch.zeros(offset, dtype=dtype), leaf.flatten()])[offset:].view(leaf.shape)
        assert view.data_ptr() % 16 or offset == 4
        return {"w": view}

    assert_same(
        c.public(),
        c._replace(params=shifted(c.params["w"])).kernels(),
        c._replace(base=shifted(c.base["w"])).kernels(),
        c._replace(params=shifted(c.params["w"])).chunked(),
    )


def test_strided_leaves_are_read_in_their_logical_order(case):
    c = case({"w": (24, 40), "v": (40, 3)}, masked=True)

    def turned(tree):
        return {path: leaf.t().contiguous().t() for path, leaf in tree.items()}

    strided = c._replace(params=turned(c.params), base=turned(c.base))
    assert not strided.params["w"].is_contiguous()
    results = strided.public(), strided.chunked(), strided.kernels()
    assert_same(c.public(), *results)
    assert all(leaf.stride() == (1, len(leaf)) for pair in results for made in pair for leaf in made.values())
    expanded = c._replace(params={"w": torch.ones(1).expand(24, 40), "v": torch.ones(40, 1).expand(40, 3)})
    written_out = expanded._replace(params={path: leaf.clone() for path, leaf in expanded.params.items()})
    assert_same(written_out.public(), expanded.public(), expanded.chunked(), expanded.kernels())


@overflows
def test_infinite_and_huge_values(case):
    c = case({"w": (64,)}, masked=True, drop_prob=0.0)
    c.params["w"][:4] = torch.tensor([float("inf"), -float("inf"), 3e38, -3e38])
    c.base["w"][2] = -3e38
    assert_same(c.public(), c.chunked(), c.kernels())


def test_float64_takes_no_kernel(case, kernels):
    c = case(by_size(8, 63), torch.float64)
    with pytest.raises(AssertionError, match="simulate_kernel"):
        c.kernels()
    with kernels():
        assert_same(c.public(), c.chunked())
