"""Merging on disk equals merging in memory, bit for bit, whatever the shards, chunks and dtypes."""

import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn import merge, random
from smat_fn.config import (
    ArceeFusion,
    Breadcrumbs,
    Cart,
    Consensus,
    Dare,
    DareTies,
    DcMerge,
    Della,
    Emr,
    IsoC,
    IsoCts,
    Karcher,
    MagMax,
    MetaGpt,
    ModelStock,
    MultiSlerp,
    NearSwap,
    NuSlerp,
    Opcm,
    Pcb,
    Ram,
    Sce,
    Slerp,
    Svc,
    TallMask,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
    Wudi,
)
from smat_fn.folders import merge_folders, run
from smat_fn.folders.prepare import prepare
from smat_fn.folders.streaming import chunks
from smat_fn.merge import BASELESS
from smat_fn.merge.parts import arithmetic
from smat_fn.merge.parts.chunks import delta_of

CONFIGS = {
    "wa": WeightAverage(),
    "ta": TaskArithmetic(coef=0.3),
    "ties": Ties(coef=0.7, keep=0.3, aggregate="sum", scope="global"),
    "ties mean": Ties(coef=0.7, keep=0.55, aggregate="mean", scope="global"),
    "ties tensor": Ties(coef=0.7, keep=0.4, aggregate="sum", scope="tensor"),
    "ties all": Ties(coef=0.7, keep=1.0, aggregate="sum", scope="global"),
    "dare": Dare(coef=0.3, drop_prob=0.3),
    "della": Della(coef=0.9, drop_prob=0.5, window=0.14),
}
MORE = {
    "weighted": WeightedAverage((0.7, -0.2, 1.3)),
    "weighted sum": WeightedAverage((0.7, -0.2, 1.3), normalize=False),
    "weighted by name": WeightedAverage({"qa": 1.3, "sum": 0.7, "cstance": -0.2}),
    "multislerp by name": MultiSlerp(weights={"qa": 1.3, "sum": 0.7, "cstance": 0.2}),
    "wise_ft": WiseFt(coef=0.3),
    "slerp": Slerp(coef=0.3),
    "metagpt": MetaGpt(coef=0.7),
    "model_stock": ModelStock(),
    "model_stock of rows": ModelStock(clamp=False, along="last"),
    "dare_ties": DareTies(coef=0.3, drop_prob=0.3),
    "breadcrumbs": Breadcrumbs(coef=0.3, drop_smallest=0.45, drop_largest=0.2),
    "breadcrumbs, none of the largest": Breadcrumbs(coef=0.3, drop_smallest=0.9, drop_largest=0.0),
    "breadcrumbs, none of the smallest": Breadcrumbs(coef=0.3, drop_smallest=0.0, drop_largest=0.5),
    "magmax": MagMax(coef=0.7),
    "tsv_merge": TsvMerge(coef=0.7),
    "tsv_merge, all of it": TsvMerge(coef=0.7, share=1.0, others="zero"),
    "tsv_merge, one matrix skipped": TsvMerge(coef=0.7, skip=("row", "col*")),
    "iso_c": IsoC(coef=1.3),
    "iso_cts": IsoCts(coef=1.3, common=0.5),
    "wudi": Wudi(coef=0.7),
    "act_mat": Wudi(coef=0.7, norms=False, ridge=0.0),
    **{f"nuslerp {along}": NuSlerp(t=0.3, along=along) for along in ("leaf", "first", "last")},
    "karcher": Karcher(),
    "karcher weighted": Karcher(weights=(0.5, 2.0, 0.3)),
    "karcher by leaf": Karcher(0, 1e-8, weights=({"row": 0.2, "*": 0.5}, 2.0, 0.3)),
    "sce": Sce(),
    "sce half": Sce(coef=0.7, density=0.5, floor=0.0),
    "arcee_fusion": ArceeFusion(),
    "multislerp": MultiSlerp(weights=(0.5, 2.0, 0.3)),
    "multislerp sum": MultiSlerp(weights=(0.5, 2.0, -2.5), normalize=False),
    "multislerp by leaf": MultiSlerp(weights=({"row": 0.2, "*": 0.5}, 2.0, 0.3)),
    "cart": Cart(coef=1.3, share=0.3),
    "cart, one matrix skipped": Cart(coef=1.3, share=0.3, skip=("row",)),
    "consensus": Consensus(coef=0.7, ratio=0.4),
    "svc": Svc(coef=0.7, alpha=0.2, skip=("row",)),
    "emr": Emr(task="qa"),
    "tall_mask": TallMask(task="qa", ratio=0.4),
    "pcb": Pcb(coef=0.7),
    "pcb half": Pcb(coef=0.7, ratio=0.5, clip=0.1),
    "nearswap": NearSwap(t=0.01),
    "nearswap by leaf": NearSwap(t={"row": 0.02, "*": 0.01}),
    "ram": Ram(coef=0.7, threshold=0.01),
    "ram plus": Ram(threshold=0.01, boost=0.3),
    "opcm": Opcm(coef=0.7),
    "opcm raw": Opcm(share=0.2, norms=False, skip=("*embed*",)),
    "dc_merge": DcMerge(coef=1.3, keep=0.1),
    "dc_merge linear": DcMerge(coef=1.3, share=0.2, keep=0.5, elect=False, smooth="linear"),
    "ram plus by tensor": Ram(threshold=0.01, boost=0.3, cap=0.2, scope="tensor"),
}
PAIRS = "slerp", "arcee_fusion", "nuslerp leaf", "nuslerp first", "nuslerp last"
COUNTS = {"wise_ft": 1, "nearswap": 1, "nearswap by leaf": 1, **dict.fromkeys(PAIRS, 2)}  # experts, where not three
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
# (chunk, workers): a few coordinates at a time by threads; whole leaves, which the test with dtypes merges, and single
# coordinates are slow
CUTS = pytest.mark.parametrize(
    "cuts", [((40, 3),), pytest.param(((1 << 19, 1), (5, 1)), marks=pytest.mark.slow)], ids=["", "whole and single"]
)


@pytest.mark.parametrize(
    ("dtype", "grid"),
    [
        pytest.param("float32", 2**-6, id="float32-equal magnitudes"),
        pytest.param("bfloat16", None, id="bfloat16-distinct"),
        pytest.param("float32", None, id="float32-distinct", marks=pytest.mark.slow),
        pytest.param("bfloat16", 2**-6, id="bfloat16-equal magnitudes", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
@CUTS
def test_equal_bits(cuts, name, dtype, grid, family, folders, tmp_path):
    config = CONFIGS[name]
    base, experts = family(DTYPES[dtype], grid=grid)
    paths = folders.save_family(tmp_path, base, experts)
    expected = folders.in_memory(config, base, experts)
    for chunk, workers in cuts:
        out = tmp_path / f"out-{chunk}"
        merge_folders(config, *paths, out, key=folders.key, chunk=chunk, shard_size=150, workers=workers)
        assert len(list(out.glob("*.safetensors"))) > 1
        folders.assert_same_bits(folders.load(out), expected)


@pytest.mark.parametrize(
    ("dtype", "grid"),
    [
        pytest.param("float32", 2**-6, id="float32-equal magnitudes"),
        pytest.param("bfloat16", None, id="bfloat16-distinct", marks=pytest.mark.slow),
        pytest.param("float32", None, id="float32-distinct", marks=pytest.mark.slow),
        pytest.param("bfloat16", 2**-6, id="bfloat16-equal magnitudes", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", MORE)
@CUTS
def test_equal_bits_beyond_the_paper(cuts, name, dtype, grid, family, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(arithmetic, "BLOCK", 32)  # inner products of several blocks
    base, experts = family(DTYPES[dtype], grid=grid, count=COUNTS.get(name, 3))
    paths = folders.save_family(tmp_path, base, experts)
    expected = folders.in_memory(MORE[name], base, experts)
    assert not torch.equal(expected["matrix"], base["matrix"])
    for chunk, workers in cuts:
        options = {"chunk": chunk, "workers": workers, "shard_size": 150}
        merge_folders(MORE[name], *paths, tmp_path / f"{chunk}", key=folders.key, **options)
        folders.assert_same_bits(folders.load(tmp_path / f"{chunk}"), expected)


def test_every_merger_is_compared():
    """Those of statistics, which take more than base and experts, have tests of their own."""
    found = set()
    for merger in (*merge.MERGERS, *merge.MORE_MERGERS):
        parameters = inspect.signature(merger.function).parameters.values()
        needed = {p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty}
        if needed <= {"key", "base", "experts"}:
            found.add(merger.name)
    assert found == {config.name for config in (CONFIGS | MORE).values()}


# of the first ones a survey is stored, of a number or of thresholds; the others find nothing there
RESUMED = "opcm", "metagpt", "ties", "ties tensor", "wa", "ta", "dare", "model_stock", "tsv_merge", "pcb"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in RESUMED)) for name in CONFIGS | MORE]
)
def test_an_interrupted_merge_of_any_merger_is_resumed_to_the_same_bits(name, family, folders, tmp_path, monkeypatch):
    config = (CONFIGS | MORE)[name]
    base, experts = family(torch.bfloat16, count=COUNTS.get(name, 3))
    paths = folders.save_family(tmp_path, base, experts)
    left, write = [8], run.write_chunk

    def failing(*args):
        left[0] -= 1
        if not left[0]:
            raise OSError("the disk is gone")
        write(*args)

    options = {"key": folders.key, "shard_size": 150}
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_chunk", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            merge_folders(config, *paths, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    done = {file.name: file.stat().st_mtime_ns for file in (tmp_path / ".out.merging").glob("*.safetensors")}
    assert done
    merge_folders(config, *paths, tmp_path / "out", **options)
    assert done.items() <= {f.name: f.stat().st_mtime_ns for f in (tmp_path / "out").iterdir()}.items()
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(config, base, experts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CONFIGS | MORE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merge_on_a_gpu_has_the_bits_of_the_pure_merger_there(name, dtype, family, folders, tmp_path):
    config = (CONFIGS | MORE)[name]
    base, experts = family(dtype, count=COUNTS.get(name, 3))
    paths = folders.save_family(tmp_path, base, experts)
    merge_folders(config, *paths, tmp_path / "out", key=folders.key, device="cuda")
    there = [{path: leaf.cuda() for path, leaf in leaves.items()} for leaves in (base, *experts.values())]
    expected = folders.in_memory(config, there[0], dict(zip(experts, there[1:], strict=True)))
    folders.assert_same_bits(folders.load(tmp_path / "out"), {path: leaf.cpu() for path, leaf in expected.items()})


@pytest.mark.parametrize("name", ["ta", "ties", "dare", "model_stock"])
def test_coefficients_by_leaf(name, family, folders, tmp_path):
    config, coef = (CONFIGS | MORE)[name], {"*at*": 0.4, "conv": -1.0, "*": 0.1}
    base, experts = family(torch.bfloat16)
    paths = folders.save_family(tmp_path, base, experts)
    merge_folders(config, *paths, tmp_path / "out", key=folders.key, coef=coef, chunk=5)
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(config, base, experts, coef))


def test_slerp_with_a_coefficient_of_each_leaf(family, folders, tmp_path):
    base, experts = family(count=2)
    coef = {"matrix": 0.0, "*": 1.0}
    merge_folders(Slerp(), *folders.save_family(tmp_path, base, experts), tmp_path / "out", coef=coef)
    merged, (first, second) = folders.load(tmp_path / "out"), experts.values()
    assert torch.allclose(merged["matrix"], first["matrix"], rtol=1e-6, atol=0)
    assert torch.allclose(merged["vector"], second["vector"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name, config in (CONFIGS | MORE).items() if config.name not in BASELESS])
def test_equal_bits_with_a_dtype_of_each_leaf_and_expert(name, family, folders, tmp_path):
    config = (CONFIGS | MORE)[name]
    base, experts = family(torch.float64, count=COUNTS.get(name, 3))
    kinds = list(DTYPES.values())
    for shift, tree in enumerate([base, *experts.values()]):
        for i, path in enumerate(p for p, leaf in base.items() if leaf.is_floating_point()):
            tree[path] = tree[path].to(kinds[(i * (shift + 1) + shift) % 4])
    expected = folders.in_memory(config, base, experts)
    merge_folders(config, *folders.save_family(tmp_path, base, experts), tmp_path / "out", key=folders.key)
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [0.001, 0.2, 0.5])
def test_ties_of_cancelling_experts_follows_the_majority(keep, seed, folders, tmp_path):
    # few distinct values: sums of exactly 0 are common, and the majority sign decides them
    generator = torch.Generator().manual_seed(seed)
    trees = [{"a": torch.randint(-2, 3, (40, 9), generator=generator).float()} for _ in range(3)]
    base, experts = {"a": torch.zeros(40, 9)}, {"x": trees[0], "y": trees[1], "z": trees[2]}
    config = Ties(coef=1.0, keep=keep, aggregate="sum", scope="global")
    report = merge_folders(config, *folders.save_family(tmp_path, base, experts), tmp_path / "out", chunk=50)
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(config, base, experts))
    assert report.density == merge.ties_density(base, experts, keep=keep)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "ties" in name])
def test_reported_density_is_that_of_the_pure_merger(name, family, folders, tmp_path):
    config = CONFIGS[name]
    base, experts = family(torch.bfloat16)
    report = merge_folders(config, *folders.save_family(tmp_path, base, experts), tmp_path / "out")
    assert report.density == merge.ties_density(base, experts, keep=config.keep, scope=config.scope)


def test_masks_of_an_expert_do_not_depend_on_the_others(family, folders, tmp_path):
    base, experts = family(count=4, grid=2**-6)
    base_path, paths = folders.save_family(tmp_path, base, experts)
    config = Dare(coef=1.0, drop_prob=0.5)
    changes = {}
    for i, names in enumerate([["sum"], ["qa"], ["qa", "sum"], ["sum", "qa"]]):
        merge_folders(
            config, base_path, {name: paths[name] for name in names}, tmp_path / f"{i}", key=folders.key, chunk=5
        )
        merged = folders.load(tmp_path / f"{i}")
        changes[i] = {path: merged[path] - leaf for path, leaf in base.items() if leaf.is_floating_point()}
    for path in changes[0]:
        # the grid makes all sums exact
        assert torch.equal(changes[2][path], changes[0][path] + changes[1][path])
        assert torch.equal(changes[3][path], changes[2][path])


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["wa", "ta", "ties"])
def test_out_dtype_is_one_rounding_of_float32(name, out_dtype, family, folders, tmp_path):
    base, experts = family(torch.bfloat16)
    wide = [{p: leaf.float() if leaf.is_floating_point() else leaf for p, leaf in t.items()} for t in experts.values()]
    wide_base = {p: leaf.float() if leaf.is_floating_point() else leaf for p, leaf in base.items()}
    exact = folders.in_memory(CONFIGS[name], wide_base, dict(zip(experts, wide, strict=True)))
    expected = {p: leaf.to(DTYPES[out_dtype]) if leaf.is_floating_point() else leaf for p, leaf in exact.items()}
    paths = folders.save_family(tmp_path, base, experts)
    report = merge_folders(CONFIGS[name], *paths, tmp_path / "out", out_dtype=out_dtype)
    folders.assert_same_bits(folders.load(tmp_path / "out"), expected)
    floating = [p for p, leaf in base.items() if leaf.is_floating_point()]
    error, change = (
        math.sqrt(sum(float((a[p].double() - b[p].double()).square().sum()) for p in floating))
        for a, b in ((expected, exact), (exact, wide_base))
    )
    assert report.rounding_ratio == pytest.approx(error / change, rel=1e-3)
    assert (report.rounding_ratio == 0) == (out_dtype == "float32")
    assert report.bytes == sum(leaf.nbytes for leaf in expected.values())


def test_keys_are_the_callers(family, folders, tmp_path):
    base, experts = family()
    paths = folders.save_family(tmp_path, base, experts)
    for seed in (0, 1):
        merge_folders(CONFIGS["dare"], *paths, tmp_path / f"{seed}", key=random.key(seed))
    left, right = folders.load(tmp_path / "0"), folders.load(tmp_path / "1")
    assert not torch.equal(left["matrix"], right["matrix"])


def test_leaves_beyond_one_span(family, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 4)
    base, experts = family(torch.bfloat16, grid=2**-6)
    paths = folders.save_family(tmp_path, base, experts)
    for name in ("wa", "ta", "ties", "ties tensor"):
        merge_folders(CONFIGS[name], *paths, tmp_path / name, key=folders.key)
        folders.assert_same_bits(folders.load(tmp_path / name), folders.in_memory(CONFIGS[name], base, experts))


class Calls(TorchDispatchMode):
    """Records the operations, and the copies between devices that change a dtype, which torch casts on the CPU."""

    def __init__(self):
        super().__init__()
        self.names, self.casts = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        source = args[{"copy_": 1, "_to_copy": 0}.get(self.names[-1], slice(0))]
        if isinstance(source, torch.Tensor) and source.device != result.device and source.dtype != result.dtype:
            self.casts.append(self.names[-1])
        return result


def test_a_gpu_takes_whole_chunks_as_they_are_stored_and_is_waited_for_once(family, folders, tmp_path):
    job, _ = prepare(CONFIGS["ta"], *folders.save_family(tmp_path, *family()), tmp_path / "out", chunk=1 << 25)
    assert chunks.span_of(job) == chunks.SPAN
    assert chunks.span_of(job._replace(device=torch.device("cuda"))) == 1 << 25
    stored = torch.zeros(8, dtype=torch.bfloat16)
    origin = stored.to("meta")
    with Calls() as calls:
        assert chunks.Scratch().cast("part", stored, torch.float32, origin.device).is_meta
        assert delta_of(stored, origin, torch.float32).is_meta
    assert calls.casts == []
    with Calls() as calls:
        assert chunks.finite([torch.zeros(2), torch.ones(2)])
        assert not chunks.finite([torch.zeros(2), torch.full((2,), float("nan"))])
    assert calls.names.count("_local_scalar_dense") == 2


@pytest.mark.parametrize("name", CONFIGS)
def test_one_coordinate_at_a_time(name, family, folders, tmp_path):
    base, experts = family(torch.bfloat16, count=2)
    merge_folders(
        CONFIGS[name], *folders.save_family(tmp_path, base, experts), tmp_path / "o", key=folders.key, chunk=1
    )
    folders.assert_same_bits(folders.load(tmp_path / "o"), folders.in_memory(CONFIGS[name], base, experts))


@pytest.mark.parametrize(("part", "noted"), [(0.7, True), (0.45, False)])
def test_a_change_of_which_more_than_half_is_lost_in_rounding_is_a_note(part, noted, folders, tmp_path):
    base = {"w": torch.ones(8, dtype=torch.bfloat16)}
    paths = folders.save_family(tmp_path, base, {"small": {"w": torch.full((8,), 1 + 2.0**-7)}})
    config = TaskArithmetic(coef=1 / (1 + part))  # above 1 numbers are 2**-7 apart: rounded to the whole change
    report = merge_folders(config, *paths, tmp_path / "out")
    assert report.rounding_ratio == pytest.approx(part, abs=1e-4)
    assert any("rounding is more than half" in text for text in report.notes) is noted


def test_a_change_that_is_lost_in_rounding_is_a_note(folders, tmp_path):
    base = {"w": torch.ones(8, dtype=torch.bfloat16)}  # above 1 its numbers are 2**-7 apart
    paths = folders.save_family(tmp_path, base, {"small": {"w": torch.full((8,), 1 + 2.0**-9)}})
    note = "rounding is more than half of the merged change: out_dtype float32 keeps it"
    for out_dtype, ratio in (("same", 1), ("float32", 0)):
        report = merge_folders(TaskArithmetic(coef=1.0), *paths, tmp_path / out_dtype, out_dtype=out_dtype)
        assert report.rounding_ratio == ratio
        assert [text.startswith(note) for text in report.notes] == [True] * ratio


def test_rules_by_leaf_need_not_end_with_all(family, folders, tmp_path):
    base, experts = family(torch.float32, count=1)
    paths = folders.save_family(tmp_path, base, experts)
    config = NearSwap(t={"row": 0.02, "[!r]*": 0.01, "r[!o]*": 0.03})
    merge_folders(config, *paths, tmp_path / "out")
    folders.assert_same_bits(folders.load(tmp_path / "out"), folders.in_memory(config, base, experts))
