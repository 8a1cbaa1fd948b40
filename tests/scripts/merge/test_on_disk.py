"""Merging on disk as the scripts do it: the bits and masks of a merge in memory, manifest, card, verification."""

import hashlib
import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint, execution, lora, merge, random
from smat_fn.config import (
    DIGITS,
    Breadcrumbs,
    Consensus,
    Dare,
    DareTies,
    IsoC,
    IsoCts,
    Karcher,
    MagMax,
    ModelStock,
    MultiSlerp,
    Sce,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    Wudi,
)
from smat_fn.folders import writing
from smat_fn.folders.files import Hashing
from smat_fn.scripts.evaluate import evaluation
from smat_fn.scripts.merge import on_disk
from smat_fn.scripts.merge.experts.given import model_names, named, weight_of
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.merge.on_disk import plan_text
from smat_fn.scripts.merge.provenance import fingerprints, finished
from smat_fn.scripts.merge.search.choosing import merge_one
from smat_fn.scripts.merge.subcommands import exporting
from smat_fn.scripts.merge.subcommands.exporting import export
from smat_fn.scripts.run_folder import find_inputs

TA = TaskArithmetic(coef=0.4)
TIES = Ties(coef=0.4, keep=0.5, aggregate="sum", scope="global")
PAPER = [type(config)(**{**vars(config), "coef": 0.4}) for config in DIGITS.mergers.values() if config.name != "wa"]
MORE = [
    ModelStock(),
    DareTies(0.3, coef=0.4),
    Breadcrumbs(0.3, 0.1, coef=0.4),
    MagMax(coef=0.4),
    TsvMerge(coef=0.4),
    IsoC(coef=0.4),
    IsoCts(coef=0.4),
    Wudi(coef=0.4),
    Karcher(),
    Sce(),
    MultiSlerp(),
    Consensus(0.4, coef=0.4),
]


@pytest.fixture
def inputs(runs):
    return find_inputs(runs["smat"])


@pytest.fixture
def copied(inputs, tmp_path):
    """Base and two experts that a test may change."""
    base, experts = inputs
    for path in (base, *experts[:2]):
        shutil.copytree(path, tmp_path / "in" / path.name)
    return tmp_path / "in" / base.name, [tmp_path / "in" / path.name for path in experts[:2]]


def stored(folder):
    return checkpoint.load_leaves(folder)[0]


@pytest.mark.parametrize(
    "configs", [[WeightAverage(), *PAPER], pytest.param(MORE, marks=pytest.mark.slow)], ids=["paper", "more"]
)
def test_the_bits_and_masks_of_a_merge_in_memory(configs, inputs, tmp_path):
    """Mergers one by one, on small leaves: tests/folders/test_bits.py."""
    base, experts = inputs
    order = on_disk.order(base, experts[:2], out=tmp_path, seed=5, chunk=1 << 15)
    done = dict(on_disk.stream_run(configs, order))
    loaded = load_inputs(base, experts[:2])
    assert list(done) == [tmp_path / config.name for config in configs]
    for config in configs:
        if config.name in merge.BASELESS:
            expected = merge.merge_by(config, loaded.base, loaded.experts)
        else:
            expected = merge_one(config, loaded, seed=5).params
        merged = stored(tmp_path / config.name)
        assert merged.keys() == expected.keys()
        assert all(torch.equal(leaf, expected[path]) for path, leaf in merged.items()), config.name


def test_coefficients_by_leaf_and_one_for_the_rest(inputs, tmp_path):
    coefs = {"*layernorm*": 0.0, "*attention*": 1.0}
    list(on_disk.stream_run([TA], on_disk.order(*inputs, out=tmp_path, seed=0, coefs=coefs)))
    base, experts, *_ = load_inputs(*inputs)
    expected = merge.apply_rules(base, merge.task_arithmetic_vector(base, experts), coef={**coefs, "*": 0.4})
    assert all(torch.equal(leaf, expected[path]) for path, leaf in stored(tmp_path / "ta").items())
    assert checkpoint.load_manifest(tmp_path / "ta")["hyperparameters"] == {"coef": 0.4, "coefs": coefs}


def test_the_manifest_says_what_was_read_written_and_how(inputs, tmp_path):
    base, experts = inputs
    order = on_disk.order(base, experts[:2], out=tmp_path, seed=7, semantics="original", out_dtype="bfloat16")
    ((_, report),) = on_disk.stream_run([TIES], order)
    folder = tmp_path / "ties"
    manifest, card = checkpoint.load_manifest(folder), (folder / "README.md").read_text()
    assert (manifest["kind"], manifest["merger"], manifest["merge_seed"]) == ("merged", "ties", 7)
    assert manifest["hyperparameters"] == {"coef": 0.4, "keep": 0.5, "aggregate": "sum", "scope": "global"}
    assert (manifest["semantics"], manifest["out_dtype"]) == ("original", "bfloat16")
    assert manifest["density"] == report.density
    assert manifest["rounding_ratio"] == report.rounding_ratio > 0
    assert manifest["fingerprint"] == checkpoint.fingerprint(stored(folder))
    assert manifest["base_fingerprint"] == checkpoint.fingerprint(stored(base))
    prints = {path.name: checkpoint.load_manifest(path)["fingerprint"] for path in experts[:2]}
    assert manifest["experts"] == prints
    files = {"base": base, **{f"expert {path.name!r}": path for path in experts[:2]}}
    digest = lambda file: hashlib.sha256(file.read_bytes()).hexdigest()  # noqa: E731
    weights = "model.safetensors"
    assert manifest["inputs"] == {name: {weights: digest(path / weights)} for name, path in files.items()}
    assert json.loads((folder / "sources.json").read_text()) == {
        name: {weights: str(path.absolute() / weights)} for name, path in files.items()
    }
    assert not any(
        str(path) in text for path in (tmp_path, *files.values()) for text in (card, json.dumps(manifest["inputs"]))
    )
    assert manifest["files"] == {weights: digest(folder / weights)}
    for part in (
        "# SMAT experts merged by TIES\n",
        "(coef 0.4, keep 0.5, aggregate sum, scope global), semantics original.",
        f"rounding is {report.rounding_ratio:.2%} of the merged change (RMS); dtypes: bfloat16.",
        f"{experts[0].name} {report.density[experts[0].name]:.6f}",
        f"| {weights} | `{digest(folder / weights)}` |",
        *prints.values(),
        manifest["base_fingerprint"],
        f"torch {version('torch')}",
    ):
        assert part in card


def test_a_merge_on_disk_is_evaluated_like_one_in_memory(inputs, suite, tmp_path):
    base, experts = inputs
    list(on_disk.stream_run([TA], on_disk.order(base, experts[:2], out=tmp_path, seed=0)))
    rows = evaluation.evaluate([tmp_path / "ta"], split="dev")
    tasks = [path.name for path in experts[:2]]
    expected = merge_one(TA, load_inputs(base, experts[:2]), seed=0).params
    assert [(row.task, row.score) for row in rows] == [(t, suite.score(expected, t, "dev")) for t in tasks]
    assert {(row.method, row.model, row.seed, row.coef) for row in rows} == {("SMAT", "ta", 21, 0.4)}


def test_folders_of_a_suite_stand_in_the_file_of_this_machine_alone(copied, tmp_path):
    base, experts = copied
    for expert in experts:
        manifest = checkpoint.load_manifest(expert)
        manifest["suite"]["data"] = str(tmp_path / "data")
        (expert / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    order = on_disk.order(base, experts, out=tmp_path / "out", seed=0)
    list(on_disk.stream_run([TA], order))
    made = tmp_path / "out/ta"
    published = [made / name for name in (checkpoint.MANIFEST, checkpoint.RECIPE, "README.md")]
    assert all(str(tmp_path) not in file.read_text() for file in published)
    assert json.loads((made / checkpoint.MANIFEST).read_text())["suite"]["data"] == "data"
    assert checkpoint.load_manifest(made)["suite"]["data"] == str(tmp_path / "data")
    assert [report for _, report in on_disk.stream_run([TA], order)] == [None]
    (made / checkpoint.SOURCES).unlink()
    assert checkpoint.load_manifest(made)["suite"]["data"] == "data"


def test_the_metadata_of_a_card_name_models_on_the_hub(copied, tmp_path, monkeypatch):
    base, experts = copied
    (base / "config.json").write_text("{}")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path / "out", seed=0)))
    card = ModelCard.load(tmp_path / "out/ta/README.md")
    assert (card.data.base_model, card.data.library_name, card.data.license) == (["base"], "transformers", "mit")
    (base / "config.json").write_text('{"architecture": "resnet18", "pretrained_cfg": {}}')
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path / "timm", seed=0)))
    export(experts[0], base, tmp_path / "exported")
    for folder in "timm/ta", "exported":
        assert ModelCard.load(tmp_path / folder / "README.md").data.library_name == "timm"
    monkeypatch.chdir(tmp_path)
    given = [Path("a=org/expert@main"), experts[0], Path("org/expert"), Path("org/other.v2")]
    assert model_names(Path("org/base@v1"), given) == ["org/base", "org/expert", "org/other.v2"]
    assert model_names(Path(".")) == [tmp_path.name]


@pytest.mark.parametrize("text", [None, "---\na: [\n---\n# Lost\n", "# Plain\n", "---\nbase_model: x/y\n---\n# Own\n"])
def test_an_exported_model_has_the_card_of_its_model(text, copied, tmp_path):
    base, (expert, _) = copied
    (base / "config.json").write_text("{}")
    (base / "README.md").write_text("---\nlicense: [mit, cc0-1.0]\n---\n")
    if text is not None:
        (expert / "README.md").write_text(text)
    export(expert, base, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    title = "# SMAT expert of " if text is None or "Lost" in text else text.rpartition("# ")[2]
    assert title in card.text
    assert card.text.endswith("hashes what was read and written again.\n")
    assert (card.data.library_name, card.data.license) == ("transformers", ["mit", "cc0-1.0"])
    assert card.data.base_model == {"P": None, "O": "x/y"}.get(title[0], ["base"])


def test_an_expert_like_its_base_is_exported_in_a_narrower_dtype(copied, tmp_path, monkeypatch):
    base, _ = copied
    (base / "config.json").write_text("{}")
    shutil.copytree(base, tmp_path / "same" / "in")
    monkeypatch.chdir(tmp_path / "same" / "in")
    report = export(Path("."), base, tmp_path / "out", out_dtype="bfloat16")
    assert checkpoint.load_manifest(tmp_path / "out")["source"] == "in"
    assert set(checkpoint.load_manifest(tmp_path / "out")["inputs"]) == {"base", "expert 'in'"}
    assert (report.rounding_ratio, report.rounding) == (math.inf, None)
    assert checkpoint.load_manifest(tmp_path / "out")["rounding_ratio"] is None
    assert "Infinity" not in (tmp_path / "out" / checkpoint.MANIFEST).read_text()


@pytest.mark.parametrize(
    ("stored", "made"),
    [
        *(("float32", own) for own in ("float32", "bfloat16", "float16", "float64")),
        *(("bfloat16", "float32"), ("float16", "bfloat16"), ("float64", "bfloat16"), ("float64", "by way of float32")),
    ],
)
@pytest.mark.parametrize("prefix", ["", "vision_model."])
def test_a_base_is_the_right_one_in_whatever_dtype_it_was_loaded(stored, made, prefix, tmp_path):
    generator = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(40, 5, generator=generator, dtype=torch.float64) for name in ("b.w", "a.w", "c")}
    leaves = {name: leaf.to(getattr(torch, stored)) for name, leaf in leaves.items()}
    through = [torch.float32, torch.bfloat16] if made == "by way of float32" else [getattr(torch, made)]
    if stored == "float64":
        leaves["c"][:] = 1 + 2**-8 + 2**-40  # in float32 a tie between two numbers of bfloat16

    def cast(leaf):
        for kind in through:
            leaf = leaf.to(kind)
        return leaf

    origin = {name: cast(leaf) for name, leaf in leaves.items()}
    trained = {name: leaf + 1 for name, leaf in origin.items()}
    facts = {"kind": "expert", "task": "t", "base_fingerprint": checkpoint.fingerprint(origin)}
    checkpoint.save_expert(tmp_path / "expert", trained, checkpoint.describe(trained, **facts))
    for name, change in (("base", 0.0), ("other", 1.0)):
        whole = {f"{prefix}{path}": leaf + change for path, leaf in leaves.items()}
        (tmp_path / name).mkdir()
        save_file({**whole, "other.w": torch.ones(3)} if prefix else whole, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=f"expert was made from another base than {tmp_path / 'other'}: give the model"
    ):
        export(tmp_path / "expert", tmp_path / "other", tmp_path / "out")
    export(tmp_path / "expert", tmp_path / "base", tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(got[f"{prefix}{path}"], leaf.to(leaves[path].dtype)) for path, leaf in trained.items())


def test_a_base_is_the_right_one_of_a_part_that_was_merged_into_another_dtype(tmp_path):
    generator = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(7, 5, generator=generator).half() for name in ("b.w", "a.w")}
    origin = {name: leaf.bfloat16() for name, leaf in leaves.items()}  # as it was trained
    merged = {name: leaf.float() + 1 for name, leaf in origin.items()}
    facts = {"kind": "merged", "task": "t", "base_fingerprint": checkpoint.fingerprint(origin), "out_dtype": "float32"}
    checkpoint.save_expert(tmp_path / "part", merged, checkpoint.describe(merged, **facts))
    for name, change in (("base", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        save_file({path: leaf + change for path, leaf in leaves.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"part was made from another base than .*other"):
        exporting._check_base(tmp_path / "part", tmp_path / "other", facts)
    exporting._check_base(tmp_path / "part", tmp_path / "base", facts)
    with pytest.raises(ValueError, match=r"part was made from another base than .*base"):
        exporting._check_base(tmp_path / "part", tmp_path / "base", {**facts, "out_dtype": "same"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_exported_into_the_base_they_were_trained_from_alone(dtype, tmp_path):
    generator = torch.Generator().manual_seed(0)
    leaves = {f"a.{i}.weight": torch.randn(6, 4, generator=generator) for i in range(2)} | {"c.weight": torch.ones(3)}
    adapted = lora.Lora(("a.0.weight", "a.1.weight"), rank=2, transposed=frozenset({"a.1.weight"}), saved=("c.weight",))
    found = {path: leaf.to(dtype) for path, leaf in leaves.items()}  # as it was trained
    facts = {"kind": "expert", "base_fingerprint": "of all", checkpoint.ADAPTED: checkpoint.fingerprint(found)}
    factors = lora.init(random.key(0), found, adapted)
    factors |= {name: torch.ones_like(leaf) for name, leaf in factors.items() if name.endswith("lora_B.weight")}
    lora.save_peft(tmp_path / "expert", factors, adapted, base="x", manifest=facts)
    for name, change in (("base", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        whole = {path: leaf + change for path, leaf in leaves.items()} | {"rest": torch.full((2,), change)}
        save_file(whole, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"expert was made from another base than {tmp_path / 'other'}: give the"):
        export(tmp_path / "expert", tmp_path / "other", tmp_path / "out")
    export(tmp_path / "expert", tmp_path / "base", tmp_path / "out")
    assert not load_file(tmp_path / "out" / "model.safetensors")["a.0.weight"].equal(leaves["a.0.weight"])
    assert checkpoint.ADAPTED not in checkpoint.load_manifest(tmp_path / "out")
    # a manifest of earlier code does not say
    facts.pop(checkpoint.ADAPTED)
    (tmp_path / "expert" / checkpoint.MANIFEST).write_text(json.dumps(facts))
    export(tmp_path / "expert", tmp_path / "other", tmp_path / "old")


def when(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}


def test_a_merge_that_is_done_stays_and_the_others_follow(copied, tmp_path):
    base, experts = copied
    (base / "config.json").write_text("{}")
    order = on_disk.order(base, experts, out=tmp_path / "out", seed=0)
    list(on_disk.stream_run([TA], order))
    folder = tmp_path / "out" / "ta"
    before = when(folder)
    (tmp_path / "out" / ".ta.lock").write_text("")  # of a process that ended between the last two steps
    with writing.exclusive(folder), pytest.raises(ValueError, match=r"another merge into .* is running"):
        list(on_disk.stream_run([TA], order))
    (tmp_path / "out" / ".ta.lock").write_text("")
    assert list(on_disk.stream_run([TA], order)) == [(folder, None)]
    assert not (tmp_path / "out" / ".ta.lock").exists()
    assert [plan is None for plan in on_disk.plan_run([TA, TIES], order).values()] == [True, False]
    done = dict(on_disk.stream_run([TA, TIES], order))
    assert done.pop(folder) is None
    assert [report.bytes > 0 for report in done.values()] == [True]
    assert when(folder) == before
    again = order._replace(options=order.options | {"overwrite": True})
    assert [report is None for _, report in on_disk.stream_run([TA], again)] == [False]


def test_sums_of_few_weights_start_no_compiled_loops(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "_imported", lambda: pytest.fail("numba would be imported"))
    monkeypatch.setattr(execution, "started", lambda: False)
    order = on_disk.order(*copied, out=tmp_path / "out", seed=3)
    assert len(list(on_disk.stream_run([TA, WeightAverage()], order))) == 2


def test_mergers_of_a_call_hash_an_input_once_unless_it_changes(copied, tmp_path, monkeypatch):
    weights = [folder / "model.safetensors" for folder in (copied[0], *copied[1])]
    read, digest = [], Hashing._digest
    monkeypatch.setattr(Hashing, "_digest", lambda own, file: read.append(file) or digest(own, file))
    named, leaves_of = [], fingerprints.leaves_of
    monkeypatch.setattr(fingerprints, "leaves_of", lambda folder: named.append(folder) or leaves_of(folder))
    order = on_disk.order(*copied, out=tmp_path / "out", seed=0)
    run = on_disk.stream_run([TA, WeightAverage(), MagMax(coef=0.4)], order)
    next(run), next(run)
    assert [read.count(file) for file in weights] == [1, 1, 1]
    assert named.count(copied[0]) == 1  # the fingerprint of base
    read.clear()
    assert [report for _, report in on_disk.stream_run([TA, WeightAverage()], order)] == [None, None]
    assert [read.count(file) for file in weights] == [1, 1, 1]
    manifest = copied[1][1] / checkpoint.MANIFEST
    text = manifest.read_text()
    manifest.unlink()  # it names the old weights
    flip(weights[2])
    folder, _ = next(run)
    found = checkpoint.load_manifest(folder)["inputs"][f"expert {copied[1][1].name!r}"]
    assert found == {"model.safetensors": hashlib.sha256(weights[2].read_bytes()).hexdigest()}
    manifest.write_text(text)


@pytest.mark.parametrize("known", ["files", "fingerprint"])
@pytest.mark.parametrize("place", [0, 1], ids=["base", "expert"])
def test_weights_that_their_manifest_does_not_name_leave_no_merge(copied, tmp_path, monkeypatch, known, place):
    base, experts = copied
    folder = (base, *experts)[place]
    for expert in experts:  # as earlier code wrote them, without the hash of their file
        facts = checkpoint.load_manifest(expert)
        assert facts["files"].keys() == {"model.safetensors"}
        kept = {name: value for name, value in facts.items() if name != "files" or known == "files"}
        (expert / checkpoint.MANIFEST).write_text(json.dumps(kept))
    flip(folder / "model.safetensors")
    if known == "files":  # the hash that the merge makes anyway is compared
        monkeypatch.setattr(checkpoint, "load_leaves", lambda path: pytest.fail(f"{path} is read again"))
    order = on_disk.order(*copied, out=tmp_path / "out", seed=0)
    with pytest.raises(ValueError, match=f"the weights in {folder} are not those that its manifest.json names: put"):
        next(on_disk.stream_run([TA], order))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f, base, expert: {"seed": 1}, "its merge_seed is 0, this merge's would be 1"),
        (lambda f, base, expert: {"coefs": {"*norm*": 0.1}}, "its hyperparameters.coef"),
        (lambda f, base, expert: {"out_dtype": "float16"}, "its out_dtype is same, this merge's would be float16"),
        (lambda f, base, expert: {"shard_size": 10**5}, "its shard_size is 5000000000, this merge's would be 100000"),
        (lambda f, base, expert: {"experts": [expert]}, "it was made of another expert 'negative'"),
        (
            lambda f, base, expert: {"experts": [*{*expert.parent.iterdir()} - {base, expert}, expert]},
            "it was made of experts in the order mirror, negative",
        ),
        (lambda f, base, expert: (base / "config.json").write_text('{"a": 1}'), "its config.json is not base's"),
        (lambda f, base, expert: (base / "vocab.txt").write_text("a"), "its vocab.txt is not base's"),
        (lambda f, base, expert: flip(f / "model.safetensors"), "model.safetensors has changed: SHA-256"),
        (lambda f, base, expert: flip(expert / "model.safetensors"), "it was made of another expert"),
        (lambda f, base, expert: (f / "config.json").unlink(), "its config.json is not base's"),
        (lambda f, base, expert: older(f / "manifest.json"), "smat_fn 0.0.1 made it"),
    ],
)
def test_a_merge_of_other_inputs_or_settings_is_refused(change, told, copied, tmp_path):
    base, experts = copied
    (base / "config.json").write_text("{}")
    options = {"base": base, "experts": experts, "out": tmp_path / "out", "seed": 0}
    list(on_disk.stream_run([TA], on_disk.order(**options)))
    folder = tmp_path / "out" / "ta"
    changed = change(folder, base, experts[0])
    order = on_disk.order(**options | (changed if isinstance(changed, dict) else {}))
    before = when(folder)
    with pytest.raises(ValueError, match="ta exists: choose another folder or pass `overwrite=True`") as caught:
        list(on_disk.stream_run([TA], order))
    assert f"{folder} holds another merge: " in str(caught.value)
    assert told in str(caught.value)
    assert when(folder) == before


def flip(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def older(file):
    manifest = json.loads(file.read_text())
    manifest["versions"]["smat_fn"] = "0.0.1"
    file.write_text(json.dumps(manifest))


def test_verify_lists_every_file_that_has_changed(copied, tmp_path):
    base, experts = copied
    (base / "config.json").write_text("{}")
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path, seed=0, shard_size=10**5)))
    folder = tmp_path / "ta"
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    count = len(shards) + 2 + 3  # index and config.json; an input each
    for path in (folder, folder / "README.md"):
        assert finished.verify(path) == (count, [])
    changed = bytearray((folder / shards[-1]).read_bytes())
    changed[-1] ^= 1
    (folder / shards[-1]).write_bytes(changed)
    (folder / "config.json").unlink()
    (experts[1] / "model.safetensors").write_bytes(b"")
    found, problems = finished.verify(folder)
    assert found == count
    assert [problem.partition(" ")[0] for problem in problems] == [
        str(folder / shards[-1]),
        str(folder / "config.json"),
        str((experts[1] / "model.safetensors").absolute()),
    ]
    assert " has changed: SHA-256 " in problems[0]
    assert problems[1].endswith(" is missing")


def test_verify_of_a_merge_in_memory_compares_the_fingerprint(inputs, tmp_path):
    params = stored(inputs[0])
    checkpoint.save_expert(tmp_path / "m", params, checkpoint.describe(params, kind="merged"))
    assert finished.verify(tmp_path / "m") == (1, [])
    manifest = checkpoint.load_manifest(tmp_path / "m") | {"fingerprint": "0" * 64}
    (tmp_path / "m" / "manifest.json").write_text(json.dumps(manifest))
    assert finished.verify(tmp_path / "m")[1] == [
        f"{tmp_path / 'm' / 'model.safetensors'} does not hold the weights that were written"
    ]
    with pytest.raises(ValueError, match="is not a checkpoint"):
        finished.verify(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", '"text"', "3", "{", '{"files": 3}', '{"files": {"a": 1}}', '{"files": {}, "inputs": 3}',
             '{"files": {}, "inputs": {"base": []}}', "\xff",
             '{"files": {"/etc/hostname": "a"}}', '{"files": {"a/../../b": "a"}}'],
)  # fmt: skip
def test_verify_refuses_a_manifest_that_is_none(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"manifest\.json is (not a manifest of smat_fn|not JSON)"):
        finished.verify(tmp_path)


def test_verify_elsewhere_does_not_look_for_the_inputs(copied, tmp_path):
    base, experts = copied
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path, seed=0)))
    count, _ = finished.verify(tmp_path / "ta")
    (tmp_path / "ta" / "sources.json").unlink()
    assert finished.verify(tmp_path / "ta") == (count - 1 - len(experts), [])


def test_coefficients_for_a_merger_without_one(inputs, tmp_path):
    order = on_disk.order(*inputs, out=tmp_path, seed=0, coefs={"*": 0.3})
    with pytest.raises(ValueError, match="wa takes no coefficient: leave out --coefs"):
        list(on_disk.stream_run([WeightAverage()], order))


def test_experts_of_others_have_a_fingerprint_of_their_files(copied, tmp_path):
    base, experts = copied
    for expert in experts:
        (expert / "manifest.json").unlink()
    list(on_disk.stream_run([TA], on_disk.order(base, experts, out=tmp_path, seed=0)))
    prints = checkpoint.load_manifest(tmp_path / "ta")["experts"]
    assert len({*prints.values()}) == len(experts)
    assert all(len(print_) == 64 for print_ in prints.values())


def test_the_fingerprint_of_anothers_expert_is_of_its_weights_alone():
    inputs = {"expert 'a'": {"model.safetensors": "1", "config.json": "2"}}
    (own,) = fingerprints.expert_prints({"a": None}, {"inputs": inputs}).values()
    for kind in checkpoint.STATISTICS.values():
        more = {"expert 'a'": {**inputs["expert 'a'"], f"a/{kind}": "3"}}
        assert fingerprints.expert_prints({"a": None}, {"inputs": more}) == {"a": own}
    other = {"expert 'a'": {**inputs["expert 'a'"], "model.safetensors": "3"}}
    assert fingerprints.expert_prints({"a": None}, {"inputs": other}) != {"a": own}


def test_a_plan_has_the_checks_and_writes_nothing(inputs, tmp_path):
    order = on_disk.order(*inputs, out=tmp_path / "new", seed=0, shard_size=10**5)
    plans = on_disk.plan_run([WeightAverage(), TIES], order)
    assert list(tmp_path.iterdir()) == []
    assert list(plans) == [tmp_path / "new" / "wa", tmp_path / "new" / "ties"]
    base = stored(inputs[0])
    (plan, _) = plans.values()
    assert (plan.leaves, plan.parameters) == (len(base), sum(leaf.numel() for leaf in base.values()))
    text = plan_text(tmp_path / "new" / "wa", plan)
    for part in (
        "all checks passed",
        f"{plan.parameters:,} parameters",
        "72 MiB",
        f"1.1 MB in {len(plan.shards)} files",
    ):
        assert part in text


def test_problems_of_all_mergers_are_told_once_and_together(inputs, tmp_path):
    base, experts = inputs
    (tmp_path / "dare").mkdir()
    order = on_disk.order(base / "no", experts, out=tmp_path, seed=0)
    configs = [TaskArithmetic(), Ties(keep=2.0, aggregate="sum", scope="global"), Dare(coef=1.0, drop_prob=1.0)]
    for run in (on_disk.stream_run, on_disk.plan_run):
        with pytest.raises(ValueError, match="ta needs a coefficient: give --coef") as error:
            dict(run(configs, order))
        problems = str(error.value).split("; ")
        assert len(problems) == len(set(problems)) == 6
        for part in (
            "ties needs a coefficient",
            "keep is 2.0",
            "drop_prob is 1.0",
            f"{base / 'no'} is no",
            "dare exists",
        ):
            assert part in str(error.value)


def test_experts_of_one_name_or_another_base_are_refused(inputs, runs, copied, tmp_path):
    base, experts = copied
    manifest = checkpoint.load_manifest(experts[1]) | {"base_fingerprint": "0" * 64}
    (experts[1] / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="there is another expert named") as error:
        on_disk.order(base, [*experts, inputs[1][0]], out=tmp_path / "out", seed=0)
    assert f"{experts[1]} was trained from another base than {base}" in str(error.value)
    on_disk.order(base, experts, out=tmp_path / "out", seed=0, based=False)
    (experts[1] / "manifest.json").write_text(json.dumps(manifest | {"kind": "merged"}))
    on_disk.order(base, experts, out=tmp_path / "out", seed=0)
    own = checkpoint.load_manifest(base) | {"base_fingerprint": "0" * 64}  # merged, of models of another base
    (base / "manifest.json").write_text(json.dumps(own))
    on_disk.order(base, {"base": base, "a": experts[0]}, out=tmp_path / "out", seed=0)
    (base / "manifest.json").unlink()
    (experts[1] / "manifest.json").write_text(json.dumps(manifest | {"base_fingerprint": "x"}))
    with pytest.raises(ValueError, match="was trained from another base than"):
        on_disk.order(base, experts, out=tmp_path / "out", seed=0)


def test_trained_experts_are_merged_on_the_base_that_they_were_trained_from(tmp_path, monkeypatch):
    base = {f"layers.{i}.mlp.weight": torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)}
    for name, change in (("stored", 0.0), ("other", 1.0)):
        (tmp_path / name).mkdir()
        save_file({path: leaf + change for path, leaf in base.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")

    def expert(run, origin):
        facts = {"kind": "expert", "task": "t", "base_fingerprint": checkpoint.fingerprint(origin)}
        params = {path: leaf + 1 for path, leaf in origin.items()}
        checkpoint.save_expert(tmp_path / run / "t", params, checkpoint.describe(params, **facts))
        return tmp_path / run / "t"

    def order(of, trained, **options):
        return on_disk.order(tmp_path / of, [trained], out=tmp_path / "out", seed=0, **options)

    whole, rounded = expert("whole", base), expert("rounded", {path: leaf.bfloat16() for path, leaf in base.items()})
    ((_, report),) = on_disk.stream_run([TaskArithmetic(coef=0.5)], order("stored", whole))
    assert report.hashes
    with pytest.raises(
        ValueError, match=f"{rounded} was trained from .*stored rounded to its dtypes, and the rou.*ge$"
    ):
        order("stored", rounded)
    order("stored", rounded, based=False)
    hashed = []
    with monkeypatch.context() as patch:  # experts of one run share one pass over base
        plain = checkpoint.fingerprint_of
        patch.setattr(checkpoint, "fingerprint_of", lambda *args: hashed.append(args) or plain(*args))
        on_disk.order(tmp_path / "stored", {"a": whole, "b": whole}, out=tmp_path / "out", seed=0)
    assert len(hashed) == 1
    checkpoint.save_expert(tmp_path / "whole" / "base", base, checkpoint.describe(base, kind="base"))
    way = f"pass --base {tmp_path / 'whole/base'}, or --run {tmp_path / 'whole'} instead of --base and --experts$"
    with pytest.raises(ValueError, match=f"{whole} was trained from another base than .*other: {way}"):
        order("other", whole)
    (tmp_path / "other" / "manifest.json").write_text('{"name": "of another tool"}')
    with pytest.raises(ValueError, match=f"{whole} was trained from another base"):
        order("other", whole)
    order("whole/base", whole)
    named = {f"model.{path}": leaf for path, leaf in base.items()}
    save_file(named | {"head.weight": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ValueError, match=f"{whole} is of train.py, and its parameters are not those that .*: {way}"):
        list(on_disk.stream_run([TaskArithmetic(coef=0.5)], order("other", whole)))


def test_experts_of_several_bases_merge_without_a_base_alone(tmp_path):
    """On disk and in memory; adapters add to base by any merger."""
    torch.manual_seed(0)
    base = {f"layers.{i}.mlp.weight": torch.randn(20, 30) for i in range(2)}
    checkpoint.save_expert(tmp_path / "base", base, checkpoint.describe(base, kind="base"))
    facts = {"kind": "expert", "base_fingerprint": "0" * 64}
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    params = {path: leaf + 1 for path, leaf in base.items()}
    checkpoint.save_expert(whole, params, checkpoint.describe(params, task="whole", **facts))
    own = lora.init(random.key(0), base, rank := lora.Lora(tuple(base), rank=3, alpha=6.0))
    own = {path: torch.randn_like(leaf) for path, leaf in own.items()}
    lora.save_peft(adapter, own, rank, base="x", manifest=lambda: checkpoint.describe(own, task="adapter", **facts))

    def merged(config, expert, out):
        order = on_disk.order(tmp_path / "base", [expert], out=out / "disk", seed=0, based=config.based)
        list(on_disk.stream_run([config], order))
        merge_run(Request([config], tmp_path / "base", [expert], out=out / "memory", search=False, seed=0))
        return [stored(out / place / config.name) for place in ("disk", "memory")]

    found = merged(WeightAverage(), whole, tmp_path / "out")
    assert all(torch.equal(leaf, params[path]) for own in found for path, leaf in own.items())
    for config, expert in (WeightAverage(), adapter), (TaskArithmetic(coef=1.0), whole):
        with pytest.raises(ValueError, match=f"{expert} was trained from another base than"):
            merged(config, expert, tmp_path / "none")
        with pytest.raises(ValueError, match=f"{expert} was trained from another base than"):
            merge_run(Request([config], tmp_path / "base", [expert], out=tmp_path / "none", search=False, seed=0))


def test_experts_may_be_given_names(inputs, tmp_path, monkeypatch):
    base, experts = inputs
    given = [Path(f"x{i}={path}") for i, path in enumerate(experts)]
    order = on_disk.order(base, given, out=tmp_path / "out", seed=0)
    assert order.experts == {f"x{i}": path for i, path in enumerate(experts)}
    assert list(load_inputs(base, given).experts) == list(order.experts)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert named(Path("a=b")) == (None, Path("a=b"))  # it is there
    assert named(Path("a=org/model@main")) == ("a", Path("org/model@main"))
    assert named(Path("a=~/b")) == ("a", Path.home() / "b")
    for path in (Path("runs/lr=3/x"), Path("=x"), Path("x="), Path("x")):
        assert named(path) == (None, path)


def test_a_number_at_the_end_of_a_folders_name_is_no_weight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step").mkdir()
    assert weight_of(Path("step@100")) == (Path("step"), 100.0)
    assert weight_of(Path("x=step@100")) == (Path("x=step"), 100.0)
    (tmp_path / "step@100").mkdir()
    assert weight_of(Path("step@100")) == (Path("step@100"), None)
    assert weight_of(Path("x=step@100")) == (Path("x=step@100"), None)
    assert weight_of(Path("x=step@100@2")) == (Path("x=step@100"), 2.0)


def test_a_manifest_of_something_else_is_none_of_ours(copied, tmp_path):
    base, experts = copied
    for path, text in zip(experts, ("[]", '{"task": "x"}'), strict=True):
        (path / "manifest.json").write_text(text)
    order = on_disk.order(base, experts, out=tmp_path / "out", seed=0)
    assert order.experts == {path.name: path for path in experts}
    assert list(order.manifests.values()) == [{}, {}]
    (experts[0] / "manifest.json").write_text('{"kind": "expert", "task": ["x"]}')
    with pytest.raises(ValueError, match=r"manifest\.json: task is \['x'\], must be str: put back the one written"):
        on_disk.order(base, experts, out=tmp_path / "out", seed=0)


def test_experts_of_parts_of_different_models_are_refused(copied, tmp_path):
    base, experts = copied
    for path, other in zip(experts, ("0f", "0e"), strict=True):
        manifest = {"kind": "expert", "task": path.name, "untrained_fingerprint": other}
        (path / "manifest.json").write_text(json.dumps(manifest))
        if path == experts[0]:
            on_disk.order(base, experts, out=tmp_path / "out", seed=0)
    told = f"{experts[1]} was trained beside other frozen weights than {experts[0]}: merge experts of one model"
    with pytest.raises(ValueError, match=told):
        on_disk.order(base, experts, out=tmp_path / "out", seed=0)
