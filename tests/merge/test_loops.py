"""Merging in memory by compiled loops gives the bits of torch's operations, and is done where it can be."""

import os
import sys
import threading
import time
import weakref
from contextlib import nullcontext
from itertools import islice, pairwise

import numpy
import pytest
import torch

from smat_fn import config as of
from smat_fn import execution, merge, random
from smat_fn.merge.parts import looped_ranks, merger, ranks, sampled, windows
from smat_fn.merge.parts.looped import sources
from smat_fn.merge.ties import votes_by_loops

KEY = random.key(7)
BY_EXPERT = {
    "weights": {"x": 0.37, "y": {"large": -1.3, "*": 0.25}},
    "densities": {"x": 0.21, "y": {"large": 1.0, "rows": 0.0, "*": 0.9}},
}
OF_A_LEAF = {"x": {"large": -0.37, "vector": 0.0, "*": 1.0}}  # of no other expert
DARE, DELLA = {"coef": 0.3, "drop_prob": 0.3}, {"coef": 0.9, "drop_prob": 0.5, "window": 0.14}
CRUMBS, TIES = {"coef": 0.3, "drop_smallest": 0.45, "drop_largest": 0.2}, {"coef": 0.7, "keep": 0.3}
CONFIGS = {  # and the loops that they take
    "ties": (of.Ties(**TIES, aggregate="sum", scope="global"), "banded votes between"),
    "ties mean": (of.Ties(coef=1, keep=0.55, aggregate="mean", scope="global"), "banded votes between"),
    "ties and float64": (of.Ties(**TIES, aggregate="sum", scope="global"), ""),
    "ties tensor": (of.Ties(**TIES, aggregate="mean", scope="tensor"), "banded between magnitudes nth_equal"),
    "ties by expert": (of.Ties(**TIES, aggregate="mean", scope="tensor", **BY_EXPERT), "banded"),
    "ties all": (of.Ties(**TIES, aggregate="mean", scope="tensor", elect=False), "banded"),
    "ties all by expert": (of.Ties(**TIES, aggregate="mean", scope="tensor", elect=False, **BY_EXPERT), "banded"),
    "ties of none": (of.Ties(**TIES, aggregate="sum", scope="global", densities={"y": 0.0}), "banded votes"),
    "ties rescale": (of.Ties(**TIES, aggregate="sum", scope="tensor", rescale=True), "banded norms"),
    "dare": (of.Dare(**DARE), "masked"),
    "dare rescale": (of.Dare(**DARE, aggregate="mean", rescale=True, **BY_EXPERT), "masked norms"),
    "dare_ties": (of.DareTies(**DARE), "masked"),
    "dare_ties mean": (of.DareTies(coef=0.3, drop_prob=0.9, aggregate="mean"), "masked"),
    "della": (of.Della(**DELLA), "ranked_by_counts masked"),
    "della by expert": (of.Della(**DELLA, windows={"x": 0.04}, **BY_EXPERT), "ranked_by_buckets masked"),
    "della rescale": (of.Della(**DELLA, elect=False, aggregate="sum", rescale=True), "norms masked"),
    "breadcrumbs": (of.Breadcrumbs(**CRUMBS), "banded between magnitudes nth_equal"),
    "breadcrumbs kept": (of.Breadcrumbs(**CRUMBS, count="kept", elect=True, largest={"x": 0.05}), "banded"),
    "emr": (of.Emr(task="z", coef=0.7), "combined norms_of_task"),
    "sce": (of.Sce(coef=0.7), "combined gram"),
    "sce of some": (of.Sce(coef=0.7, density=0.4, floor=0.0), "variances varying_squares varying"),
    "sce of none": (of.Sce(density=0.0), "variances varying_squares varying"),
    "ram": (of.Ram(coef=0.7, threshold=0.3), "combined"),
    "ram boost": (of.Ram(threshold=0.3, boost=1.3, cap=3.0), "combined counted"),
    "ram tensor": (of.Ram(threshold=0.3, boost=1.3, cap=3.0, scope="tensor"), "combined counted"),
    "consensus": (of.Consensus(coef=0.7, ratio=0.9), "combined"),
    "tall_mask": (of.TallMask(ratio=0.6, task="y", coef=0.7), "combined"),
    "magmax": (of.MagMax(coef=0.4), "combined"),
    "nearswap": (of.NearSwap(t=0.3, coef=0.7), "combined"),
    "pcb": (of.Pcb(coef=0.7, ratio=0.4, clip=0.1), "among betas_among competing balanced"),
    "sce by expert": (of.Sce(coef=0.7, weights=OF_A_LEAF), "combined gram"),
    "sce of some by expert": (of.Sce(density=0.9, weights=OF_A_LEAF), "variances varying_squares varying"),
    "consensus by expert": (of.Consensus(coef=0.7, ratio=0.9, weights=OF_A_LEAF), "combined"),
    "magmax by expert": (of.MagMax(coef=0.4, weights=OF_A_LEAF), "combined"),
    "pcb by expert": (of.Pcb(coef=0.7, ratio=0.4, clip=0.1, weights=OF_A_LEAF), "among betas_among competing balanced"),
    "ta": (of.TaskArithmetic(coef=0.7), "banded"),
    "ta by expert": (of.TaskArithmetic(coef=0.7, weights=BY_EXPERT["weights"], aggregate="mean"), "banded"),
    "metagpt": (of.MetaGpt(coef=0.7), "banded gram"),
    "model_stock": (of.ModelStock(clamp=False), "banded gram"),
    "nuslerp": (of.NuSlerp(t=0.6), "banded"),
    "multislerp": (of.MultiSlerp(weights=(0.1, 0.2, 0.9)), "banded"),
    "wa": (of.WeightAverage(), "averaged"),
    "linear": (of.WeightedAverage(weights=(0.5, {"large": -0.25, "*": 1.5}, 0.3)), "averaged"),
    "linear, not normalised": (of.WeightedAverage(weights=(0.5, 0.0, 0.3), normalize=False), "averaged"),
    "karcher": (of.Karcher(), "averaged gram"),
    "karcher, weighted": (of.Karcher(weights=(0.5, {"large": 2.0, "*": 1.5}, 0.3)), "averaged gram"),
    "slerp": (of.Slerp(coef=0.3), "averaged gram"),
    "slerp along a leaf": (of.Slerp(coef=0.3, arc="leaf"), "averaged gram"),
    "slerp along rows": (of.Slerp(coef=0.3, arc="last"), ""),
    "arcee_fusion": (of.ArceeFusion(coef=0.7), "among fused"),
    "arcee_fusion, away": (of.ArceeFusion(coef=-0.7), "among fused"),
}
FEWER = {"nuslerp": 2, "nearswap": 1} | {name: 2 for name in CONFIGS if name.startswith(("slerp", "arcee"))}
GLOBAL = "ties", "ties mean", "ties of none", "pcb", "pcb by expert"
LOOPS = sorted({loop for _, names in CONFIGS.values() for loop in names.split()})
F, B, H, D = torch.float32, torch.bfloat16, torch.float16, torch.float64
LEAVES = {  # shape, and the dtypes of base and experts
    "large": ((37, 1031), (F, F, F, F)),
    "rows": ((9, 300), (B, B, B, B)),
    "short": ((50, 7), (F, B, H, F)),
    "edge": ((3, 1024), (H, H, H, H)),
    "vector": ((2049,), (B, F, B, F)),
    "one": ((), (F, F, F, F)),
    "double": ((5, 33), (F, F, D, F)),
    "turned": ((40, 30), (F, F, F, F)),
    "void": ((0, 4), (F, F, F, F)),
}


@pytest.fixture(autouse=True)
def _loops(monkeypatch):
    if os.environ.get("SMAT_FN_NUMBA") == "0":
        pytest.skip("numba is switched off")
    monkeypatch.setattr(merger, "WORTH", 0)
    monkeypatch.setattr(sampled, "WORTH", 0)
    monkeypatch.setattr(merger, "STARTED", 0)


@pytest.fixture
def calls(loops_called):
    return loops_called(LOOPS)


def trees(name="", grid=0.25):
    """Base and experts with equal magnitudes, zeros of both signs, and views; one expert changes nothing in a leaf."""
    generator, found = torch.Generator().manual_seed(1), []
    for i in range(4):
        tree = {"steps": torch.tensor([3, 4])}
        for path, (shape, dtypes) in LEAVES.items():
            leaf = torch.randn(shape, generator=generator)
            tree[path] = (leaf if grid is None else (leaf / grid).round() * grid).to(dtypes[i])
        tree["turned"] = tree["turned"].T if i else tree["turned"].reshape(30, 40)
        tree["large"] = torch.stack([tree["large"], tree["large"]], -1)[..., i % 2]
        bytes_of = torch.cat([torch.zeros(1, dtype=torch.uint8), tree["rows"].view(torch.uint8).view(-1)])
        tree["rows"] = bytes_of[1:].view(torch.uint8).numpy().view("u2").view("i2")
        tree["rows"] = torch.from_numpy(tree["rows"]).view(B).view(9, 300)  # at an odd address
        if name in GLOBAL:
            del tree["double"]  # its magnitudes, and so all, would be ranked in float64
        found.append(tree)
    base, *experts = found
    experts[1]["vector"] = base["vector"].to(B)
    experts[2]["edge"] = torch._neg_view(base["edge"])
    if name and not CONFIGS[name][0].based:  # such experts are of one dtype
        experts = [{path: leaf.to(experts[1][path].dtype) for path, leaf in own.items()} for own in experts]
    if name.startswith("slerp"):
        experts[1]["large"] = 1.0001 * experts[0]["large"]  # their arc is a line
    return base, dict(islice(zip("xyz", experts, strict=True), FEWER.get(name, 3)))


def same(left, right):
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        assert (leaf.dtype, leaf.shape) == (right[path].dtype, right[path].shape), path
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (leaf, right[path])]
        assert torch.equal(*bits), path


def merged(name, base, experts):
    """The merged tree, and the merged task vector of a merger with a base."""
    config = CONFIGS[name][0]
    if not config.based:
        return (merge.merge_by(config, base, experts),)
    options = {key: value for key, value in config.settings().items() if key not in ("coef", *config.selects)}
    own, key = getattr(merge, config.name.replace("-", "_"), None), (KEY,) if config.random else ()
    return own(*key, base, experts, coef=config.coef, **options), merge.vector_by(config, base, experts, key=KEY)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_bits(name, threads, calls, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(looped_ranks, "SMALL", 1 << 12)
    monkeypatch.setattr(windows.InPlace, "span", 1 << 11)
    base, experts = trees(name, 0.25 if threads == 1 else None)
    with execution.off():
        expected = merged(name, base, experts)
    assert not calls
    if threads == 3:
        monkeypatch.setattr(sys.modules["smat_fn.merge.sce"], "BLOCK", 1 << 10)
    for found, wanted in zip(merged(name, base, experts), expected, strict=True):
        same(found, wanted)
    assert calls >= set(CONFIGS[name][1].split()) - ({"nth_equal"} if threads == 3 else set())


@pytest.mark.parametrize("by_loops", [False, True], ids=["torch", "loops"])
@pytest.mark.parametrize("grid", [0.25, None])
def test_variances_are_ranked_without_being_held(grid, by_loops, loops_called, monkeypatch):
    base, experts = trees("", grid)
    wanted = merged("sce of some", base, experts)
    sce, scans = sys.modules["smat_fn.merge.sce"], []
    monkeypatch.setattr(sce, "BLOCK", 16)
    monkeypatch.setattr(sce.ranks, "position", lambda *args, own=ranks.position: scans.append(args) or own(*args))
    monkeypatch.setattr(merger.arithmetic, "BLOCK", 1 << 12)
    monkeypatch.setattr(windows.InPlace, "span", 1 << 12)
    of_loops = ["sampled_variances", "variances_between", *["nth_equal_variance"] * bool(grid)]
    called = loops_called(of_loops)
    with nullcontext() if by_loops else execution.off():
        for found, expected in zip(merged("sce of some", base, experts), wanted, strict=True):
            same(found, expected)
    assert called == (set(of_loops) if by_loops else set())
    assert scans or by_loops  # equal ones, of which some stay


@pytest.mark.parametrize("by_loops", [False, True], ids=["torch", "loops"])
def test_equal_variances_stay_up_to_a_position_in_any_window(by_loops, monkeypatch):
    monkeypatch.setattr(sys.modules["smat_fn.merge.sce"], "BLOCK", 16)
    monkeypatch.setattr(merger.arithmetic, "BLOCK", 1 << 12)
    monkeypatch.setattr(windows.InPlace, "span", 1 << 12)
    size = (1 << 15) + 5  # more than are ranked as a whole
    base, change = torch.zeros(size), torch.arange(size).remainder(2).mul(2.0).sub(1)
    with nullcontext() if by_loops else execution.off():
        found = merge.sce({"w": base}, {"x": {"w": change}, "y": {"w": 3 * change}}, density=0.5)["w"]
    assert torch.equal(found != 0, torch.arange(size) < size // 2)


@pytest.mark.parametrize("dtype", [F, B, H])
@pytest.mark.parametrize("size", [1, 16, 1023, 1025, 5000])
def test_variances_are_counted_sampled_and_found(size, dtype):
    """Of weighted vectors, as by torch."""
    loops, weights = execution.loops(), numpy.array([1.0, -0.5, 0.0, 2.0], "f4")
    base, *experts = ((torch.randn(5, size) * 4).round() / 4).to(dtype)
    deltas = [(expert.float() - base.float()) * float(w) for expert, w in zip(experts, weights, strict=True)]
    values = sys.modules["smat_fn.merge.sce"]._variance(deltas).numpy().view("u4")
    where = sources([base, *experts]), size, weights
    every = numpy.unique(values)
    for low, high in [(0, 1), (0, 0xFFFFFFFF), (values.max(), 0xFFFFFFFF), *islice(pairwise(every), 40)]:
        room = numpy.empty(size + 1, "u4")
        found = loops.variances_between(*where, numpy.uint32(low), numpy.uint32(high), room)
        inside = values[(values > low) & (values < high)]
        wanted = [(values < low).sum(), (values == low).sum(), len(inside), (values == high).sum(), (values == 0).sum()]
        assert list(found) == wanted
        assert numpy.array_equal(numpy.sort(room[: len(inside)]), numpy.sort(inside))
    for bits in every[:40]:
        places = numpy.flatnonzero(values == bits)
        for count, place in enumerate(places[:3], 1):
            assert loops.nth_equal_variance(*where, numpy.uint32(bits), count) == place
        assert loops.nth_equal_variance(*where, numpy.uint32(bits), len(places) + 1) == -1
    out = numpy.empty((size // 100 + 2, loops.RUN), "u4")
    runs = out[: loops.sampled_variances(*where, 0, 100, out)]
    assert len(runs) == sum(place <= size - loops.RUN for place in _places(loops, size, 100))
    for run, place in zip(runs, _places(loops, size, 100), strict=False):
        assert numpy.array_equal(run, values[place : place + loops.RUN])


def _places(loops, size, step):
    """Where runs of a sample begin: those of magnitudes, of numbers that are their own positions."""
    out = numpy.empty((size // step + 2, loops.RUN), "u4")
    base, positions = torch.zeros(-(-size // step) * step), torch.arange(float(-(-size // step) * step))
    found = loops.sampled(sources([base, positions]), len(positions), 0, step, out)
    return out[:found, 0].view("f4").astype(int).tolist()


def test_variances_whose_sample_misleads_are_counted(monkeypatch):
    base, experts = trees("", None)
    wanted = merged("sce of some", base, experts)
    monkeypatch.setattr(sys.modules["smat_fn.merge.sce"], "BLOCK", 16)
    monkeypatch.setattr(sys.modules["smat_fn.merge.sce"], "bracket", lambda *_: looped_ranks.Bracket(0, 1))
    counted = []
    monkeypatch.setattr(ranks, "select", lambda *args, own=ranks.select: counted.append(args) or own(*args))
    for found, expected in zip(merged("sce of some", base, experts), wanted, strict=True):
        same(found, expected)
    assert counted


@pytest.mark.parametrize("coef", [1, 0.1, -0.0, torch.tensor(0.3), torch.tensor(0.3, dtype=D)], ids=repr)
def test_coefficients_are_those_of_torch(coef):
    base, experts = trees()
    with execution.off():
        expected = merge.magmax(base, experts, coef=coef)
    same(merge.magmax(base, experts, coef=coef), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, marks=[pytest.mark.slow] * (turn % 3 != place))
        for turn, name in enumerate(CONFIGS)
        for place, value in enumerate([float("nan"), float("inf"), 3e38])
    ],
)
def test_what_is_not_finite_is_merged_by_torch(name, value):
    base, experts = trees(name)
    base["large"][3, 5], experts["x"]["large"][3, 5], experts["x"]["short"][1, 1] = -value, value, -7.0
    results = []
    for plain in (True, False):
        with execution.off() if plain else torch.no_grad():
            try:
                results.append(merged(name, base, experts))
            except (ValueError, RuntimeError) as error:  # ranks of NaN
                results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        for found, wanted in zip(*results, strict=True):
            same(found, wanted)


def test_values_beyond_the_dtype_of_base_are_infinite():
    base, experts = {"w": torch.ones(9, dtype=H)}, {"x": {"w": torch.full((9,), 6e4, dtype=H)}}
    assert merge.magmax(base, experts, coef=2)["w"].isposinf().all()


def test_variances_below_zero_are_errors():
    base, experts = {"running_var": torch.ones(9)}, {"x": {"running_var": torch.zeros(9)}}
    with pytest.raises(ValueError, match="values below 0"):
        merge.magmax(base, experts, coef=2)


def test_nested_trees_and_parameters_that_require_grad(calls):
    base, experts = trees()
    nested = {"a": {"b": torch.nn.Parameter(base["large"])}, "c": [base["steps"]]}
    own = {name: {"a": {"b": e["large"].clone().requires_grad_()}, "c": [e["steps"]]} for name, e in experts.items()}
    found = merge.magmax(nested, own, coef=0.7)
    assert calls
    with execution.off():
        expected = merge.magmax(base, experts, coef=0.7)
    assert not found["a"]["b"].requires_grad
    same({"large": found["a"]["b"], "steps": found["c"][0]}, {path: expected[path] for path in ("large", "steps")})


def test_only_large_trees_outside_of_transforms_take_loops(calls, monkeypatch):
    base, *experts = ({"w": torch.randn(25), "steps": torch.arange(50)} for _ in range(3))
    experts = dict(zip("xy", experts, strict=True))
    monkeypatch.setattr(merger, "WORTH", 50)

    def sizes(name):
        calls.clear()
        CONFIGS[name][0].function(base, experts, **({"keep": 0.3} if name == "ties" else {}))
        return bool(calls)

    assert sizes("ties")
    assert sizes("ta")
    monkeypatch.setattr(merger, "WORTH", 51)
    assert not sizes("ties")
    monkeypatch.setattr(execution, "started", lambda: False)
    monkeypatch.setattr(merger, "WORTH", 13)  # numba is started for four times as many
    assert not sizes("ties")
    monkeypatch.setattr(merger, "WORTH", 12)
    assert sizes("ties")
    monkeypatch.setattr(merger, "STARTED", 50)
    assert sizes("ta")
    monkeypatch.setattr(merger, "STARTED", 51)
    assert not sizes("ta")
    monkeypatch.setattr(execution, "transformed", lambda: True)
    assert not sizes("ties")
    monkeypatch.undo()
    monkeypatch.setattr(execution, "started", lambda: False)
    monkeypatch.setattr(execution, "_imported", lambda: pytest.fail("numba would be imported"))
    CONFIGS["ties"][0].function(base, experts, keep=0.3)


def test_loops_read_at_even_addresses():
    base, experts = trees()
    where, _held = merger.InMemory(base, experts, by_loops=True).read("rows", experts)(0, 300)
    assert base["rows"].data_ptr() % 2
    assert not (where[:, 0] % 2).any()


@pytest.mark.parametrize("small", [0, 1 << 15], ids=["counted", "sorted"])
def test_orders_are_those_of_torch_and_none_of_what_is_not_finite(small, monkeypatch):
    monkeypatch.setattr(looped_ranks, "SMALL", small)
    monkeypatch.setattr(windows.InPlace, "span", 100)
    loops, sizes = execution.loops(), []
    monkeypatch.setattr(loops, "between", lambda *args, own=loops.between: sizes.append(args[1::3]) or own(*args))
    base, expert = {"w": torch.zeros(1000)}, {"w": torch.randn(1000).mul(30).round()}
    group = merger.InMemory(base, {"x": expert}, by_loops=True).ranks("x", ["w"])
    magnitudes = expert["w"].abs()
    for rank in (1, 2, 500, 999, 1000):
        order = ranks.order_of(magnitudes, rank)
        assert looped_ranks.orders(group, [rank]) == [order]
        last = (magnitudes == ranks.value_of(order.bits, F)).nonzero()[-1]
        assert looped_ranks.position(group, order.bits, order.equal) == int(last)
    for place in (0, 999):
        for value in (float("-inf"), float("nan")):
            expert["w"][:], expert["w"][place] = 1.0, value
            assert looped_ranks.orders(group, [1, 500]) is None
    assert all(len(room) > size for size, room in sizes)  # the loop writes one beyond what it finds


def test_exponents_of_many_experts_are_those_of_torch(calls, monkeypatch):
    monkeypatch.setattr(sys.modules["smat_fn.merge.pcb"], "_EXPERTS", 2)
    base, experts = trees("pcb")
    with execution.off():
        expected = merge.pcb_vector(base, experts, ratio=0.4)
    assert not calls
    same(merge.pcb_vector(base, experts, ratio=0.4), expected)
    assert {"betas_among", "competing"} <= calls


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e-3, 0.5, 40.0])
def test_exponentials_are_computed_where_a_place_is_in_doubt(scale, many, monkeypatch):
    pcb = sys.modules["smat_fn.merge.pcb"]
    monkeypatch.setattr(pcb, "_EXPERTS", 2 if many else 88)
    generator, computed = torch.Generator().manual_seed(3), []
    deltas = torch.randn(3, 20_001, generator=generator) * scale
    deltas[0, ::3], deltas[1, ::7], deltas[1, 5::21] = 0.0, -0.0, scale
    sizes = deltas.abs().sort(1).values
    given = [pcb.Bounds(low, high) for low, high in zip(*sizes[:, [2, -3]].T.tolist(), strict=True)]
    betas = pcb.Betas(list(deltas), given, F)
    rows, keys = betas.numbers(), sampled._keys(betas.numbers().numpy())
    ordered = numpy.sort(keys, 1)
    places = [(0, 1), (100, 101), (9000, 9100), (12_000, 12_500), (18_000, 18_001), (19_990, 20_000)]
    limits = [[(row[i], max(row[j], row[i] + 1)) for i, j in places] + [(0, 0xFFFFFFFF)] for row in ordered]
    exp = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda own: computed.append(own.numel()) or exp(own))
    for some in (slice(0, 5), slice(6, 7), slice(0, 7)):
        pairs = numpy.array(limits, numpy.uint32)[:, some]
        counts, hits = betas.among(execution.loops(), pairs)
        wanted, others = sampled.among(execution.loops(), rows, pairs)
        assert (counts == wanted).all()
        assert all((numpy.sort(own) == numpy.sort(other)).all() for own, other in zip(hits, others, strict=True))
    if scale in (1e-3, 1e-12):
        assert sum(computed[:3]) < 0.1 * rows.numel()
    assert sum(computed[3:6]) == rows.numel()


def test_a_sum_beyond_float32_leaves_beta_to_torch():
    pcb, loops = sys.modules["smat_fn.merge.pcb"], execution.loops()
    deltas = torch.full((3, 64), 3e38)
    deltas[0] = torch.linspace(1e-40, 4e-39, 64)  # times the sum of 6e38: 0.06 to 2.4
    betas = pcb.Betas(list(deltas), [pcb.Bounds(0.0, 1.0), *[pcb.Bounds(0.0, 3e38)] * 2], F)
    keys = numpy.sort(sampled._keys(betas.numbers().numpy()), 1)
    limits = numpy.stack([keys[:, 5], keys[:, 5] + 1], 1)[:, None]
    counts, _ = betas.among(loops, limits)
    assert (counts == sampled.among(loops, betas.numbers(), limits)[0]).all()
    assert counts[0, 0].tolist() == [5, 1, 0, 0]


def test_bounds_that_float32_does_not_hold(calls):
    generator = torch.Generator().manual_seed(3)
    steps = 40 * torch.rand(8, 3000, dtype=D, generator=generator)
    experts = [{"w": (1 + row * 2.0**-23).float(), "z": 1 + row * 2.0**-23} for row in steps]
    base = {path: torch.zeros_like(leaf) for path, leaf in experts[0].items()}
    with execution.off():
        expected = merge.pcb_vector(base, experts, ratio=0.3, clip=0.1)
    assert not calls
    same(merge.pcb_vector(base, experts, ratio=0.3, clip=0.1), expected)
    assert "competing" in calls


VALUES = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)).mul(100).round().div(100)
VALUES[0, :9000], VALUES[1, 5], VALUES[1, 7:9], VALUES[1, 9] = -0.0, -float("inf"), float("inf"), float("nan")
READ = {  # passes over the numbers
    "sample": (1, {}, VALUES[:, ::97]),
    "much between": (2, {"KEPT": 2000}, VALUES[:, ::97]),
    "misled": (3, {}, torch.ones(2, 500)),
    "misled, of one number": (3, {}, torch.full((2, 500), -0.01)),
    "float64": (4, {}, VALUES[:, ::97].double()),
    "all": (0, {}, VALUES),
}


@pytest.mark.parametrize("case", READ)
def test_a_pass_finds_the_numbers_of_ranks(case, monkeypatch):
    passes, constants, sample = READ[case]
    for name, value in constants.items():
        monkeypatch.setattr(sampled, name, value)
    values, read = VALUES.to(sample.dtype), []

    def over(count):
        read.append(count)
        return map(count, values.split(7001, 1))

    places = [0, 1, 11_111, 25_000, 37_321, 49_996, 49_998]
    found = torch.cat(sampled.ordered(over, places, 50_000, sample), 1)
    assert torch.equal(found, values.double().sort(1).values[:, places])
    assert len(read) == passes


@pytest.mark.parametrize(("length", "cut"), [(700, 999), (1, 5000), (20_000, 1500)])
def test_differences_of_rows_are_scaled_and_ranked(length, cut):
    one, two = torch.randn(2, 40_000).bfloat16()
    factors = torch.randn(-(-40_000 // length))
    values = (two.float() - one.float()).abs() * factors.repeat_interleave(length)[:40_000]
    parts = list(enumerate(zip(one.split(cut), two.split(cut), strict=True)))
    blocks = [sampled.Scaled(part, cut * i, length, factors) for i, part in parts]
    assert torch.equal(torch.cat([block.numbers() for block in blocks]), values)
    found = sampled.ordered(lambda count: map(count, blocks), [0, 9999, 39_999], 40_000, values[None, ::31])
    assert torch.equal(torch.cat(found, 1)[0], values.double().sort().values[[0, 9999, 39_999]])


@pytest.mark.parametrize(
    ("shape", "most", "rows", "cuts"),
    [
        ((37, 1031), 1, False, [0, 8192, 16384, 24576, 32768, 38147]),
        ((12, 1024), 10_000, True, [0, 8192, 12288]),  # rows that end with blocks of 4,096
        ((12, 1024), 4096, True, [0, 4096, 8192, 12288]),
        ((12, 1024), 4095, True, None),
        ((9, 300), 2700, True, [0, 2700]),
        ((9, 300), 2699, True, None),
    ],
    ids=str,
)
def test_windows_whose_norms_are_added_begin_with_blocks(shape, most, rows, cuts):
    tasks = windows.each_window(lambda *cut: cut[:2], lambda cut: cut, torch.empty(shape), 10_000, most, rows=rows)
    assert (tasks and [task() for task in tasks]) == (cuts and list(pairwise(cuts)))


def test_threads_of_a_survey():
    threads, started, done = windows.Threads(2), threading.Event(), []
    assert list(threads.in_order([lambda: time.sleep(0.01) or 0, lambda: 1])) == [0, 1]

    def outer():
        return {threading.get_ident(), *threads.in_order([threading.get_ident] * 2)}

    assert len(*threads.in_order([outer])) == 1  # or all of them might wait for one another

    def fails():
        assert started.wait(10)
        raise KeyError

    def runs():
        started.set()
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(KeyError):
        list(threads.in_order([fails, runs]))
    assert done  # the memory that it writes to may go now


def test_memory_is_held_while_votes_are_counted(monkeypatch):
    class Held:
        pass

    class Formed:
        span = 5

        def __call__(self, start, stop):
            held = Held()
            alive.append(weakref.ref(held))
            return torch.empty(0).numpy(), held

    alive = []
    monkeypatch.setattr("smat_fn.merge.parts.looped.votes", lambda *_: int(alive[-1]() is not None))
    assert sum(task() for task in votes_by_loops(Formed(), 12, [])) == 3
