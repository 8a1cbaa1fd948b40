"""Merging on disk by compiled loops gives the bits of the pure mergers in torch, and is done where it can be."""

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise

import numpy
import pytest
import torch

from smat_fn import execution
from smat_fn.config import (
    ArceeFusion,
    Breadcrumbs,
    Consensus,
    Dare,
    DareTies,
    Della,
    Emr,
    Karcher,
    MagMax,
    MetaGpt,
    ModelStock,
    MultiSlerp,
    NearSwap,
    NuSlerp,
    Pcb,
    Ram,
    Sce,
    Slerp,
    TallMask,
    TaskArithmetic,
    Ties,
    WeightAverage,
    WeightedAverage,
)
from smat_fn.folders import merge_folders
from smat_fn.folders.streaming import chunks, survey
from smat_fn.merge.parts import arithmetic, looped, merger
from smat_fn.merge.parts import looped_ranks as ranks
from smat_fn.merge.parts.looped import sources
from smat_fn.merge.ties import ties_density

SHAPES = {"large": (37, 1031), "rows": (9, 300), "short": (50, 7), "edge": (3, 1024), "vector": (2049,), "one": ()}
CONFIGS = {
    "ties": Ties(coef=0.7, keep=0.3, aggregate="sum", scope="global"),
    "ties mean": Ties(coef=0.7, keep=0.55, aggregate="mean", scope="global"),
    "ties all": Ties(coef=0.7, keep=1.0, aggregate="sum", scope="global"),
    "ties tensor": Ties(coef=0.7, keep=0.4, aggregate="mean", scope="tensor"),
    "ties densities": Ties(coef=0.7, keep=0.4, aggregate="sum", scope="tensor", densities={"x": 0.1}),
    "dare": Dare(coef=0.3, drop_prob=0.3),
    "dare_ties": DareTies(coef=0.3, drop_prob=0.3),
    "dare_ties mean": DareTies(coef=0.3, drop_prob=0.9, aggregate="mean"),
    "della": Della(coef=0.9, drop_prob=0.5, window=0.14),
    "breadcrumbs": Breadcrumbs(coef=0.3, drop_smallest=0.45, drop_largest=0.2),
    "breadcrumbs kept": Breadcrumbs(coef=0.3, drop_smallest=0.45, drop_largest=0.54, count="kept"),
    "breadcrumbs, none of the largest": Breadcrumbs(coef=0.3, drop_smallest=0.9, drop_largest=0.0),
}
OF_EXPERTS = {
    "weights": {"x": 0.37, "y": {"large": -1.3, "*": 0.25}},
    "densities": {"x": 0.21, "y": {"large": 1.0, "rows": 0.0, "*": 0.9}},
}
SHARES = {"rescale": True, **OF_EXPERTS}
CONFIGS |= {
    "wa": WeightAverage(),
    "linear": WeightedAverage(weights=(0.5, {"large": -0.25, "*": 1.5}, 0.3)),
    "linear, not normalised": WeightedAverage(weights=(0.5, 0.0, 0.3), normalize=False),
    "karcher": Karcher(),
    "metagpt": MetaGpt(coef=0.7),
    "model_stock": ModelStock(clamp=False),
    "slerp": Slerp(coef=0.3),
    "nuslerp": NuSlerp(t=0.6),
    "multislerp": MultiSlerp(weights=(0.1, 0.2, 0.9)),
    "sce": Sce(coef=0.7),
    "sce of some": Sce(coef=0.7, density=0.4, floor=0.0),
    "sce of some weights": Sce(density=0.9, weights=OF_EXPERTS["weights"]),
    "sce weights": Sce(coef=0.7, weights=OF_EXPERTS["weights"]),
    "magmax": MagMax(coef=0.4),
    "magmax weights": MagMax(coef=0.4, weights={"y": {"large": -1.3, "*": 1.0}}),
    "ram": Ram(coef=0.7, threshold=0.3),
    "ram plus": Ram(coef=0.7, threshold=0.5, boost=0.2, cap=0.7),
    "ram plus by tensor": Ram(threshold=0.3, boost=1.3, cap=3.0, scope="tensor"),
    "consensus": Consensus(coef=0.7, ratio=0.9),
    "tall_mask": TallMask(ratio=0.6, task="y", coef=0.7),
    "emr": Emr(task="z", coef=0.7),
    "nearswap": NearSwap(t=0.3, coef=0.7),
    "pcb": Pcb(coef=0.7, ratio=0.4, clip=0.1),
    "pcb of all": Pcb(coef=0.7, ratio=1.0, clip=0.0),
    "arcee_fusion": ArceeFusion(coef=0.7),
    "ta": TaskArithmetic(coef=0.7),
    "ta weights": TaskArithmetic(coef=0.7, weights=OF_EXPERTS["weights"], aggregate="mean"),
    "ties weights": Ties(coef=0.7, keep=0.4, aggregate="mean", scope="tensor", **OF_EXPERTS),
    "ties weights of the model": Ties(
        coef=0.7, keep=0.4, aggregate="sum", scope="global", weights={"z": 0.5}, densities={"y": 0.0}
    ),
    "ties all": Ties(coef=0.7, keep=0.4, aggregate="mean", scope="global", elect=False),
    "ties all weights": Ties(coef=0.7, keep=0.4, aggregate="mean", scope="tensor", elect=False, **OF_EXPERTS),
    "ties rescale": Ties(coef=0.7, keep=0.4, aggregate="sum", scope="tensor", **SHARES),
    "dare weights": Dare(coef=0.3, drop_prob=0.3, aggregate="mean", **OF_EXPERTS),
    "dare rescale": Dare(coef=0.3, drop_prob=0.3, **SHARES),
    "dare_ties weights": DareTies(coef=0.3, drop_prob=0.3, aggregate="mean", **OF_EXPERTS),
    "dare_ties rescale": DareTies(coef=0.3, drop_prob=0.3, **SHARES),
    "della weights": Della(coef=0.9, drop_prob=0.5, window=0.14, windows={"x": 0.04}, **OF_EXPERTS),
    "della rescale": Della(coef=0.9, drop_prob=0.5, window=0.14, elect=False, aggregate="sum", **SHARES),
    "breadcrumbs weights": Breadcrumbs(
        coef=0.3, drop_smallest=0.45, drop_largest=0.2, largest={"x": 0.05}, count="kept", elect=True, **OF_EXPERTS
    ),
    "breadcrumbs rescale": Breadcrumbs(coef=0.3, drop_smallest=0.45, drop_largest=0.2, aggregate="mean", **SHARES),
}
FEWER = {"slerp": 2, "nuslerp": 2, "nearswap": 1, "arcee_fusion": 2}  # experts
TABLES = {"count_high", "count_between"}
LOOPS = (
    *TABLES,
    "banded",
    "votes",
    "sampled",
    "between",
    "nth_equal",
    "magnitudes",
    "vectors",
    "masked",
    "averaged",
    "combined",
    "counted",
    "gram",
    "norms",
    "norms_of_task",
    "variances",
    "sampled_variances",
    "variances_between",
    "varying_squares",
    "varying",
    "absolute_sums",
    "among",
    "betas_among",
    "competing",
    "balanced",
    "fused",
    "of_all_tasks",
)
USED = {
    "ties": {"banded", "votes", "sampled", "between"},
    "ties tensor": {"banded", "sampled", "between", "magnitudes", "nth_equal"},
    **{name: {"averaged"} for name in ("wa", "linear", "linear, not normalised")},
    **{name: {"averaged", "gram"} for name in ("karcher", "slerp")},
    **{name: {"banded", "gram"} for name in ("multislerp", "model_stock", "nuslerp", "metagpt")},
    "sce": {"combined", "gram"},
    **{name: {"variances", "varying_squares", "varying"} for name in ("sce of some", "sce of some weights")},
    **{name: {"combined", "counted"} for name in ("ram plus", "ram plus by tensor")},
    "emr": {"combined", "norms_of_task"},
    **{name: {"combined"} for name in ("magmax", "ram", "consensus", "tall_mask", "nearswap")},
    **{name: {"vectors", "among", "betas_among", "competing", "balanced"} for name in ("pcb", "pcb of all")},
    "arcee_fusion": {"among", "fused"},
    "dare": {"masked"},
    "dare_ties": {"masked"},
    "della": {"magnitudes", "masked"},
    "breadcrumbs": {"banded", "sampled", "between", "magnitudes", "nth_equal"},
    **{key: {"banded"} for key in ("ta", "ta weights", "ties weights")},
    **{key: {"banded", "norms"} for key in ("ties rescale", "breadcrumbs rescale")},
    **{key: {"masked"} for key in ("dare weights", "dare_ties weights")},
    **{key: {"masked", "norms"} for key in ("dare rescale", "dare_ties rescale")},
    "della weights": {"magnitudes", "masked"},
    "della rescale": {"magnitudes", "masked", "norms"},
}
DTYPES = {
    "float32": (torch.float32,) * 3,
    "bfloat16": (torch.bfloat16,) * 3,
    "bfloat16 of float32": (torch.float32, torch.bfloat16, torch.bfloat16),
    "float32 of bfloat16": (torch.bfloat16, torch.float32, torch.bfloat16),
    "float16": (torch.float16, torch.float16, torch.bfloat16),
}
ALONE = (
    "magmax",
    "sce",
    "sce of some",
    "ram plus",
    "consensus",
    "tall_mask",
    "emr",
    "nearswap",
    "pcb",
    "arcee_fusion",
)  # with arithmetic of their own
# each configuration with one in turn, the others are slow: all loops read and write leaves by the same functions
RUNS = [
    pytest.param(name, dtypes, marks=[pytest.mark.slow] * ((i + j) % 5 and name not in ALONE))
    for i, name in enumerate(CONFIGS)
    for j, dtypes in enumerate(DTYPES)
]


@pytest.fixture(autouse=True)
def _numba():
    if os.environ.get("SMAT_FN_NUMBA") == "0":
        pytest.skip("numba is switched off")


@pytest.fixture
def calls(loops_called):
    return loops_called(LOOPS)


def trees(dtypes, grid):
    """Base and three experts; one of them changes nothing in two leaves, and all of them little in one."""
    generator = torch.Generator().manual_seed(1)

    def tree(scale, dtype):
        leaves = {path: scale * torch.randn(shape, generator=generator) for path, shape in SHAPES.items()}
        if grid:
            leaves = {path: (leaf / grid).round() * grid for path, leaf in leaves.items()}
        return {path: leaf.to(dtype) for path, leaf in leaves.items()} | {"void": torch.zeros(0, 4, dtype=dtype)}

    base = tree(1.0, dtypes[0])
    experts = {name: tree(1.0, dtype) for name, dtype in zip("xyz", dtypes, strict=True)}
    for path in ("rows", "vector"):
        experts["y"][path] = base[path].to(dtypes[1])
    experts["z"]["edge"] = -base["edge"].to(dtypes[2])
    return base, experts


@pytest.mark.parametrize(
    "grid", [pytest.param(None, id="distinct", marks=pytest.mark.slow), pytest.param(0.25, id="equal")]
)
@pytest.mark.parametrize(("name", "dtypes"), RUNS)
def test_equal_bits(name, dtypes, grid, calls, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "SMALL", 1 << 12)
    monkeypatch.setattr(merger, "STARTED", 0)
    base, experts = trees(DTYPES[dtypes], grid)
    if name in FEWER:
        experts = dict(islice(experts.items(), FEWER[name]))
    if FEWER.get(name) == 2 and name != "arcee_fusion":
        experts["y"]["large"] = 1.0001 * experts["x"]["large"]  # their arc is a line
    paths = folders.save_family(tmp_path, base, experts)
    with execution.off():
        if CONFIGS[name].based:
            expected = folders.in_memory(CONFIGS[name], base, experts)
        else:  # in memory the experts are of one dtype
            merge_folders(CONFIGS[name], *paths, tmp_path / "plain")
            expected = folders.load(tmp_path / "plain")
    for i, (chunk, workers, large) in enumerate([(1 << 19, 1, 1 << 24), (10_001, 3, 1 << 12)]):
        monkeypatch.setattr(survey, "LARGE", large)
        monkeypatch.setattr(sys.modules["smat_fn.merge.sce"], "BLOCK", large)
        merge_folders(CONFIGS[name], *paths, tmp_path / f"{i}", key=folders.key, chunk=chunk, workers=workers)
        folders.assert_same_bits(folders.load(tmp_path / f"{i}"), expected)
    assert calls >= USED.get(name, set()) - (set() if grid else {"nth_equal"})
    assert calls


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("config", [Emr(), TallMask(ratio=0.6, coef=0.7)], ids=lambda config: config.name)
def test_folders_of_all_tasks_have_the_bytes_of_torch(config, dtypes, calls, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "BLOCK", 2 * 4096)
    base, experts = trees(DTYPES[dtypes], None)
    own = experts["x"]["large"].dtype  # small, equal, opposite and no changes, zeros of both signs
    changes = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -1e-30, 3.0]).to(own)
    base["large"].view(-1)[:4096] = torch.tensor([0.0, -0.0]).to(own).repeat(2048)
    for i, expert in enumerate(experts.values()):
        expert["large"].view(-1)[:4096] = changes.roll(i).repeat_interleave(3**i)[:512].repeat(4096)[:4096]
    paths = folders.save_family(tmp_path, base, experts)
    with execution.off():
        merge_folders(config, *paths, tmp_path / "plain", shard_size=100_000)
    assert not calls
    merge_folders(config, *paths, tmp_path / "looped", shard_size=100_000, workers=2)
    assert "of_all_tasks" in calls
    plain, found = ({file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in ("plain", "looped"))
    assert plain.keys() == found.keys()
    assert {name for name in plain if plain[name] != found[name]} <= {"manifest.json"}  # it has the time


@pytest.mark.parametrize("split", [0, 1, 2, 1023, 1024, 1025, 3000])
def test_equal_magnitudes_stay_up_to_a_position(split):
    base, expert, out = torch.zeros(3000), torch.ones(3000), torch.empty(3000)
    bits = looped.bits_of(torch.tensor(1.0))
    window = looped.Window(
        execution.loops(), 0, 3000, sources([base, expert]), (base, expert), None, 1.0, out, torch.empty
    )
    band = (bits, bits + 1, looped.INFINITE, looped.INFINITE), (split, looped.NEVER)
    looped.ByMagnitude([band]).merge(window, looped.Terms([1.0], [1.0]))
    assert torch.equal(out, (torch.arange(3000) < split).float())


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_rounding_is_told_as_by_torch(out_dtype, folders, tmp_path):
    base, experts = trees(DTYPES["float32"], None)
    paths = folders.save_family(tmp_path, base, experts)

    def told(name):
        report = merge_folders(CONFIGS["ties"], *paths, tmp_path / name, out_dtype=out_dtype)
        return report, folders.load(tmp_path / name)

    looped, merged = told("looped")
    with execution.off():
        plain, expected = told("plain")
    folders.assert_same_bits(merged, expected)
    assert looped.rounding_ratio == pytest.approx(plain.rounding_ratio, rel=1e-4)
    assert looped.density == plain.density


def test_the_density_that_is_told_counts_equal_magnitudes(folders, tmp_path):
    base, experts = trees(DTYPES["float32"], 0.25)
    report = merge_folders(CONFIGS["ties"], *folders.save_family(tmp_path, base, experts), tmp_path / "out")
    assert report.density == ties_density(base, experts, keep=0.3)
    assert report.density["x"] > 0.3


@pytest.mark.parametrize(
    "name", ["ties", "ties tensor", "dare", "dare_ties", "della", "breadcrumbs", "wa", "pcb", "arcee_fusion"]
)
def test_values_that_are_not_finite_are_refused_as_by_torch(name, folders, tmp_path):
    base, experts = trees(DTYPES["bfloat16"], None)
    experts["y"]["short"].view(-1)[5] = float("nan")
    experts["z"]["large"].view(-1)[-1] = float("-inf")
    if name in FEWER:
        experts = {"x": experts["x"] | {"large": experts["z"]["large"]}, "y": experts["y"]}
    paths, texts = folders.save_family(tmp_path, base, experts), []
    for i in range(2):
        plain = execution.off() if i else nullcontext()
        with pytest.raises(ValueError, match="1 values that are NaN or infinite") as caught, plain:
            merge_folders(CONFIGS[name], *paths, tmp_path / "out", key=folders.key)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("plain", [False, True], ids=["loops", "torch"])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_an_infinite_value_is_named_though_the_weights_of_sce_depend_on_it(density, plain, folders, tmp_path):
    """In the last chunk of its parameter: the chunks before it are merged first, with these weights."""
    base, experts = trees(DTYPES["bfloat16"], None)
    experts["z"]["large"].view(-1)[-1] = float("inf")
    paths = folders.save_family(tmp_path, base, experts)
    told = "^parameter 'large' of expert 'z' holds 1 values that are NaN or infinite$"
    with pytest.raises(ValueError, match=told), execution.off() if plain else nullcontext():
        merge_folders(Sce(density=density), *paths, tmp_path / "out", chunk=4096)


@pytest.mark.parametrize("plain", [False, True], ids=["loops", "torch"])
@pytest.mark.parametrize(("coef", "out_dtype"), [(1.133, "bfloat16"), (2.0, "float32")])
@pytest.mark.parametrize("kind", [TaskArithmetic, partial(Ties, keep=1.0, aggregate="sum", scope="tensor")])
def test_merged_values_beyond_the_output_are_refused(kind, coef, out_dtype, plain, folders, tmp_path):
    base, experts = {"w": torch.zeros(4)}, {"x": {"w": torch.tensor([3e38, 0.0, 1.0, 2.0])}}
    paths = folders.save_family(tmp_path, base, experts)
    refused = pytest.raises(ValueError, match=rf"exceed the range of torch\.{out_dtype}")
    with refused, execution.off() if plain else nullcontext():
        merge_folders(kind(coef=coef), *paths, tmp_path / "out", out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # of which no loop reads the second
def test_ties_without_a_majority_and_of_no_density(dtype, folders, tmp_path):
    base, change = {"w": torch.zeros(2, dtype=dtype)}, torch.tensor([1.0, -1.0], dtype=dtype)
    paths = folders.save_family(tmp_path, base, {"x": {"w": change}, "y": {"w": -change}})
    merge_folders(CONFIGS["ties all"], *paths, tmp_path / "none")
    assert folders.load(tmp_path / "none")["w"].eq(0).all()
    own = Ties(coef=1, keep=1.0, aggregate="sum", scope="tensor", densities={"y": 0.0})
    merge_folders(own, *paths, tmp_path / "x")
    assert torch.equal(folders.load(tmp_path / "x")["w"], change)


@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_squares_that_float32_does_not_hold_are_told(size):
    assert chunks._square(torch.full((4,), size)) == pytest.approx(4 * size**2, rel=1e-6, abs=0)


def test_other_dtypes_are_left_to_torch(calls, folders, tmp_path):
    base, experts = trees((torch.float16, torch.float16, torch.float64), None)
    paths = folders.save_family(tmp_path, base, experts)
    merge_folders(CONFIGS["ties"], *paths, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(CONFIGS["ties"], base, experts))
    assert not calls


BRACKETS = {
    "below": lambda sample, share: ranks.Bracket(0, 1),
    "above": lambda sample, share: ranks.Bracket(0x7F000000, 0xFFFFFFFF),
    "all": lambda sample, share: ranks.Bracket(0, 0xFFFFFFFF),
    "of one value": lambda sample, share: ranks.Bracket(int(numpy.float32(0.75).view("u4")) - 1, 0x7F000000),
}


@pytest.mark.parametrize(
    ("name", "bracket", "room"),
    [  # each two of them together, the others are slow
        pytest.param(name, bracket, room, marks=[pytest.mark.slow] * ((i + j + k) % 2))
        for i, name in enumerate(["ties", "ties tensor", "breadcrumbs"])
        for j, bracket in enumerate(BRACKETS)
        for k, room in enumerate([1 << 22, 100])
    ],
)
def test_a_sample_may_mislead(name, bracket, room, calls, folders, tmp_path, monkeypatch):
    for attribute, value in {"bracket": BRACKETS[bracket], "ROOM": room, "SMALL": 0}.items():
        monkeypatch.setattr(ranks, attribute, value)
    base, experts = trees(DTYPES["bfloat16"], 0.25)
    paths = folders.save_family(tmp_path, base, experts)
    merge_folders(CONFIGS[name], *paths, tmp_path / "out", workers=2)
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(CONFIGS[name], base, experts))
    assert calls >= (TABLES if room == 100 or bracket in ("below", "above") else {"between"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 63, 1024, 5000])
def test_magnitudes_are_counted_beside_two_and_collected_between_them(size, dtype):
    loops = execution.loops()
    base, expert = (torch.randn(2, size) * 4).round().to(dtype) / 4
    values = (expert.float() - base.float()).abs().numpy().view("u4")
    for low, high in [(0, 1), (0, 0xFFFFFFFF), (values.max(), 0xFFFFFFFF), *pairwise(numpy.unique(values))]:
        room = numpy.empty(size + 1, "u4")
        *found, largest = loops.between(sources([base, expert]), size, numpy.uint32(low), numpy.uint32(high), room)
        inside = values[(values > low) & (values < high)]
        wanted = [(values < low).sum(), (values == low).sum(), len(inside), (values == high).sum()]
        assert [*found, largest] == [*wanted, values.max()]
        assert numpy.array_equal(numpy.sort(room[: len(inside)]), numpy.sort(inside))


def test_a_sample_does_not_depend_on_windows():
    loops = execution.loops()
    base, expert = torch.randn(2, 50_000)

    def sample(*starts):
        out, found = numpy.empty((1000, loops.RUN), "u4"), 0
        for start, stop in pairwise([0, *starts, 50_000]):
            read = sources([base[start:stop], expert[start:stop]])
            found += loops.sampled(read, stop - start, start, 500, out[found:])
        return out[:found]

    whole, parts = sample(), sample(20_000, 20_001, 20_010, 33_333)
    assert len(whole) == 100
    values = (expert - base).abs().numpy().view("u4")
    starts = {values[start : start + loops.RUN].tobytes(): start for start in range(len(values))}
    places = [starts[run.tobytes()] for run in whole]
    assert [place // 500 for place in places] == list(range(100))
    assert len({place % 500 for place in places}) > 80
    assert {run.tobytes() for run in parts} <= {run.tobytes() for run in whole}
    assert len(parts) >= 98


def test_all_float16_numbers_are_read_and_written_as_by_torch():
    loops, one = execution.loops(), numpy.ones(1, "f4")

    def copied(values, dtype):
        base, out = torch.zeros(len(values)), torch.empty(len(values), dtype=dtype)
        loops.averaged(sources([base, values]), len(values), one, one[0], False, sources([out]))
        return out

    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    wide = every.float()
    number = ~wide.isnan()
    assert torch.equal(copied(every, torch.float32).view(torch.int32)[number], wide.view(torch.int32)[number])
    assert copied(every, torch.float32)[~number].isnan().all()
    near = wide[number].double()[:, None] * (1 + 2.0**-11 * torch.tensor([-1.001, -1, -0.5, 0.499, 1, 1.001]))
    exact = torch.cat(
        [near.float().view(-1), torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32).view(torch.float32)]
    )
    narrow = exact.half()
    number = ~narrow.isnan()
    assert torch.equal(copied(exact, torch.float16).view(torch.int16)[number], narrow.view(torch.int16)[number])
    assert copied(exact, torch.float16)[~number].isnan().all()


@pytest.mark.parametrize("alike", [1, 64], ids=["independent", "rows"])
def test_the_bracket_of_a_sample_holds_the_rank(alike):
    """At 3.5 standard errors it misses one in 2,000."""
    generator, missed = numpy.random.default_rng(0), 0
    for share in numpy.linspace(0.01, 0.99, 100):
        scale = generator.lognormal(size=(1 << 16) // alike).repeat(alike)
        values = numpy.abs(generator.standard_normal(1 << 16) * scale).astype("f4")
        starts = generator.integers(0, len(values) // 16, 400) * 16
        low, high = ranks.bracket(numpy.stack([values[s : s + 16] for s in starts]).view("u4"), share)
        exact = numpy.partition(values, int(share * len(values)))[int(share * len(values))].view("u4")
        missed += not low <= exact <= high
    assert missed <= 1
    assert ranks.bracket(numpy.empty((0, 16), "u4"), 0.5) == (0, 1)  # of leaves that are all shorter than a run


@pytest.mark.parametrize("stored", ["odd address", "transposed"])
def test_leaves_that_no_loop_can_read_in_place_are_copied_window_by_window(stored, folders, tmp_path, monkeypatch):
    base, experts = trees(DTYPES["float32"], 0.25)
    paths = folders.save_family(tmp_path, base, experts)
    monkeypatch.setattr(chunks, "SPAN", 1000)
    folder = paths[1]["x"]
    if stored == "transposed":
        leaves = {**experts["x"], "large": experts["x"]["large"].T.contiguous().T}  # in another order in memory
        (folder / "model.safetensors").unlink()
        torch.save(leaves, folder / "pytorch_model.bin")
    else:
        file = folder / "model.safetensors"
        size = int.from_bytes(file.read_bytes()[:8], "little")
        header, data = json.loads(file.read_bytes()[8 : 8 + size]), file.read_bytes()[8 + size :]
        text = json.dumps(header).encode()
        text += b" " * (1 + -len(text) % 8)  # safetensors pads to a multiple of 8, but does not ask for it
        file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    for name in ("ties tensor", "wa"):
        merge_folders(CONFIGS[name], *paths, tmp_path / name, key=folders.key)
        folders.assert_same_bits(folders.load(tmp_path / name), folders.in_memory(CONFIGS[name], base, experts))


@pytest.mark.parametrize("case", ["few weights", "many", "started", "not a sum"])
def test_sums_take_a_loop_where_that_saves_time(case, calls, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "started", lambda: case == "started")
    monkeypatch.setattr(merger, "STARTED", 0 if case == "many" else 1 << 31)
    base, experts = trees(DTYPES["float32"], 0.25)
    paths = folders.save_family(tmp_path, base, experts)
    config = CONFIGS["ta weights" if case == "not a sum" else "ta"]
    merge_folders(config, *paths, tmp_path / "out")
    assert bool(calls) == (case != "few weights")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(config, base, experts))


def test_more_coordinates_than_a_table_counts(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "FULL", 5000)
    monkeypatch.setattr(ranks, "SMALL", 0)
    monkeypatch.setattr(ranks, "bracket", BRACKETS["below"])
    monkeypatch.setattr(chunks, "SPAN", 1000)
    base, experts = trees(DTYPES["bfloat16"], 0.25)
    paths = folders.save_family(tmp_path, base, experts)
    merge_folders(CONFIGS["ties"], *paths, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(CONFIGS["ties"], base, experts))
