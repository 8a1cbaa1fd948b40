"""Scores of checkpoints: the suite's own numbers, on the right tasks, and the report of them."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from smat_fn import checkpoint, machine
from smat_fn.config import Adapters, Dare, Della, TaskArithmetic, Ties, Training, WeightAverage
from smat_fn.evaluate import Result, read_results
from smat_fn.report.tables import main_table, markdown
from smat_fn.scripts.analyse import runs as reading
from smat_fn.scripts.analyse.pictures import Interference, check_picture, interference
from smat_fn.scripts.analyse.runs import load_runs
from smat_fn.scripts.analyse.scores import ExpertsCurve, experts_curve
from smat_fn.scripts.evaluate import evaluation, models, notes, outputs, weights
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.outputs import verdict, write_report
from smat_fn.scripts.merge.experts import suite as merge_suite
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.suites import load_suite
from smat_fn.testing import assert_trees_equal

RECIPE = {"seed": 21, "images_per_task": 120}
FIXED = [
    WeightAverage(),
    TaskArithmetic(coef=0.3),
    Ties(coef=0.3, keep=0.5, aggregate="sum", scope="global"),
    Dare(coef=0.3, drop_prob=0.3),
    Della(coef=0.3, drop_prob=0.1, window=0.14),
]


@pytest.fixture(scope="module")
def merged(runs, tmp_path_factory):
    """Models merged at a fixed coefficient, by run: all five mergers of FT, two of SMAT."""
    out = tmp_path_factory.mktemp("merged")
    for name, run in runs.items():
        merge_run(
            Request(FIXED if name == "ft" else FIXED[:2], *find_inputs(run), out=out / name, search=False, seed=0)
        )
    return {name: out / name for name in runs}


@pytest.fixture(scope="module")
def folders(runs, merged):
    return find_checkpoints([runs["ft"], merged["ft"], runs["smat"], merged["smat"]])


@pytest.fixture(scope="module")
def rows(folders):
    return evaluate(folders)


def test_checkpoints_are_found_below_folders_once_and_without_bases(runs, merged, tmp_path, monkeypatch):
    inside = find_checkpoints([runs["ft"], runs["ft"] / "rot90", merged["ft"].parent])
    experts = [runs["ft"] / task for task in ("mirror", "negative", "rot90", "stripes")]
    assert inside[:4] == experts
    assert len(inside) == 4 + 5 + 2
    with pytest.raises(ValueError, match=r"holds no expert or merged checkpoint: give.*missing is not a folder: give"):
        find_checkpoints([tmp_path, runs["ft"], tmp_path / "missing"])
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=f"or name the task of an expert of another tool: TASK={tmp_path}"):
        find_checkpoints([tmp_path])
    checkpoint.save_expert(tmp_path / "exported", {"w": torch.zeros(1)}, {"kind": "exported", "label": "FT"})
    monkeypatch.chdir(tmp_path)
    assert find_checkpoints([Path("rot90=exported")]) == [Path("rot90=exported")]
    with pytest.raises(ValueError, match=f"^{runs['ft'] / 'rot90'} is a checkpoint of train.py or merge.py: give it w"):
        find_checkpoints([Path(f"x={runs['ft'] / 'rot90'}")])


def test_the_base_is_a_line_of_its_own(runs, suite, folders, rows):
    more = evaluate(folders, base=True)
    assert more[: len(rows)] == rows
    wanted = [
        Result("BASE", f"expert:{t}", t, "test", suite.score(suite.base, t, "test"), 21) for t in sorted(suite.tasks)
    ]
    assert more[len(rows) :] == wanted
    line = main_table(more).cells["BASE"]
    assert list(line) == ["Expert"]
    assert line["Expert"].mean == pytest.approx(sum(row.score for row in wanted) / len(wanted))


def test_several_bases_have_no_line(runs, tmp_path, train, suite):
    other = load_suite("digits", progress=False, **{**RECIPE, "pretrain_steps": 12})
    train(tmp_path / "other", "ft", suite=other, tasks=("rot90",), training=Training(steps=1, lr=5e-4), label="OTHER")
    both = find_checkpoints([runs["ft"] / "rot90", tmp_path / "other"])
    told = list[str]()
    assert len(evaluate(both, report=told.append)) == 2
    assert told == [f"note: {both[0]} and {both[1]} have different bases, which their scores depend on too"]
    with pytest.raises(ValueError, match="have different bases, and seed 21 has one line BASE: evaluate them one by"):
        evaluate(both, base=True)


def test_a_checkpoint_that_a_link_leads_to_is_scored_once_by_its_own_name(runs, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to(runs["ft"])
    of_run = find_checkpoints([runs["ft"]])
    assert find_checkpoints([tmp_path / "a", runs["ft"]]) == of_run
    assert [path.relative_to(tmp_path / "a" / "link") for path in find_checkpoints([tmp_path / "a"])] == [
        path.relative_to(runs["ft"]) for path in of_run
    ]


def test_runs_of_one_training_seed_and_two_suite_seeds_are_not_compared(runs, suite, tmp_path, monkeypatch):
    def load(*, seed, **recipe):  # of equal bases, as those of texts and images, whose heads differ
        return suite.replace(recipe={**suite.recipe, "seed": seed})

    for module in (models, merge_suite):
        monkeypatch.setattr(module, "load_suite", load)
    other = {"suite": {**suite.recipe, "seed": 3}}
    shutil.copytree(runs["smat"] / "base", tmp_path / "smat" / "base")
    for task in ("mirror", "rot90"):
        copied(runs["smat"] / task, tmp_path / "smat" / task, **other)
        copied(runs["ft"] / task, tmp_path / "ft" / task)
    shutil.copytree(runs["ft"] / "base", tmp_path / "ft" / "base")
    one, two = tmp_path / "ft" / "mirror", tmp_path / "smat" / "mirror"
    told = rf"^{one} \(suite seed 21\) and {two} \(suite seed 3\) are both of training seed 21, but of different bases"
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "score_model", lambda *a, **k: pytest.fail("nothing is scored"))
        with pytest.raises(ValueError, match=told):
            evaluate([one, two])
    with pytest.raises(ValueError, match=r"smat and .*ft are both of seed 21 but differ in suite seed: compare runs"):
        load_runs([tmp_path / "ft", tmp_path / "smat"])
    with pytest.raises(ValueError, match=rf"^--suite-options seed 21: {two} was trained with 3, by which its base or"):
        evaluate([one, two], options={"seed": 21})
    with pytest.raises(ValueError, match="--suite-options seed 3: expert 'mirror' was trained with 21, by which"):
        merge_suite.scoring_suite(load_inputs(tmp_path / "ft" / "base", [one]), {"seed": 3}, {})
    assert len(evaluate([one], options={"seed": 21})) == 1
    # suites may differ from one training seed to another
    assert len(evaluate([one, copied(one, tmp_path / "22", seed=22, **other)])) == 2


def test_a_base_with_two_ways_to_score_it_says_which(runs, tmp_path, train, suite):
    other = suite.replace(recipe={**suite.recipe, "logit_scale": 5.0})
    train(tmp_path, "ft", suite=other, tasks=("rot90",), training=Training(steps=1, lr=5e-4), label="OTHER")
    both, notes = find_checkpoints([runs["ft"] / "rot90", tmp_path]), list[str]()
    evaluate(both, report=notes.append)
    assert notes == []
    evaluate(both, base=True, report=notes.append)
    told = f"{runs['ft'] / 'rot90'}, {tmp_path / 'rot90'} otherwise: logit_scale 5.0, of the first 20.0"
    assert notes == [f"note: line BASE is scored as {told}"]


def test_the_label_of_the_bases_line_is_refused(tmp_path, train):
    train(tmp_path, "ft", tasks=("rot90",), training=Training(steps=1, lr=5e-4), label="BASE")
    assert len(evaluate([tmp_path / "rot90"])) == 1
    with pytest.raises(ValueError, match=r"rot90 have the label BASE, that of the base's line: leave out --base"):
        evaluate([tmp_path / "rot90"], base=True)


def test_tasks_without_an_expert_are_named(runs, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs["ft"], run)
    shutil.rmtree(run / "mirror")  # its log stays
    (run / "merged").mkdir()  # whose models were deleted
    lacking = [f"{run / 'mirror'} holds no finished expert: it is not scored"]
    assert models.lacking_experts([run, run / "rot90"]) == lacking
    assert models.lacking_experts([tmp_path, Path("task=folder")]) == lacking
    assert models.lacking_experts([runs["ft"]]) == []


def test_experts_are_scored_on_their_task_and_merged_models_on_theirs(rows, folders, suite):
    expected = []
    for folder in folders:
        params, manifest = checkpoint.load_expert(folder, suite.base)
        tasks = [manifest["task"]] if manifest["kind"] == "expert" else list(manifest["experts"])
        expected += [(manifest["label"], folder.name, task, suite.score(params, task, "test")) for task in tasks]
    assert [(row.method, row.model.removeprefix("expert:"), row.task, row.score) for row in rows] == expected
    assert len(rows) == 2 * 4 + (5 + 2) * 4
    assert {row.coef for row in rows if row.model not in ("wa",) and ":" not in row.model} == {0.3}
    assert {row.coef for row in rows if row.model == "wa" or ":" in row.model} == {None}
    assert {(row.seed, row.split) for row in rows} == {(21, "test")}


def test_a_merge_of_two_experts_is_scored_on_two_tasks(runs, suite, tmp_path):
    experts = [runs["ft"] / "stripes", runs["ft"] / "mirror"]
    merge_run(Request([TaskArithmetic(coef=0.5)], runs["ft"] / "base", experts, out=tmp_path, search=False, seed=0))
    named = []
    rows = evaluate([tmp_path / "ta"], split="dev", on_model=named.append)
    params, _ = checkpoint.load_leaves(tmp_path / "ta")
    assert [(row.task, row.split, row.score) for row in rows] == [
        (task, "dev", suite.score(params, task, "dev")) for task in ("stripes", "mirror")
    ]
    assert named == [str(tmp_path / "ta")]


def test_checkpoints_that_cannot_be_scored_are_told_before_any_is(runs, suite, tmp_path, monkeypatch):
    facts = {"kind": "expert", "label": "FT", "seed": 21, "hyperparameters": {}}
    recipe = dict(suite.recipe)
    for name, more in {
        "foreign": {"task": "mirror", "suite": recipe, "base_fingerprint": "0" * 64},
        "bare": {"task": "negative"},
        "twin": {"task": "rot90", "suite": recipe, "base_fingerprint": checkpoint.fingerprint(suite.base)},
    }.items():
        checkpoint.save_expert(tmp_path / name, suite.base, facts | more)
    monkeypatch.setattr(evaluation, "score_model", lambda *a, **k: pytest.fail("nothing is scored"))
    with pytest.raises(ValueError, match="foreign was made from another base than suite 'digits' gives") as error:
        evaluate([runs["ft"] / "rot90", *(tmp_path / name for name in ("foreign", "bare", "twin"))])
    assert "bare names no suite to be scored on: pass --preset lm" in str(error.value)
    twins = f"twin and {runs['ft'] / 'rot90'} are both FT expert:rot90 of seed 21"
    assert f"{twins}: evaluate each alone, with its own --out, or rename one of them: its" in str(error.value)


def copied(folder, place, **facts):
    """A checkpoint with another manifest."""
    shutil.copytree(folder, place)
    manifest = json.loads((place / "manifest.json").read_text()) | facts
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def test_the_whole_model_of_a_suite_is_read_for_merges_of_whole_models_alone(merged, suite, monkeypatch):
    folder, asked = merged["ft"] / "ta", []
    manifest = checkpoint.load_manifest(folder)
    monkeypatch.setattr(models, "whole_base", asked.append)
    models.suited({folder: manifest}, {}, {}, "test")
    assert not asked
    with pytest.raises(ValueError, match="ta was made from another base than suite 'digits' gives"):
        models.suited({folder: manifest | {"base_fingerprint": "0" * 64}}, {}, {}, "test")
    assert len(asked) == 1


def test_what_cannot_be_averaged_is_told_before_any_is_scored(runs, merged, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "score_model", lambda *a, **k: pytest.fail("nothing is scored"))
    ft = [runs["ft"] / task for task in ("mirror", "rot90")]
    with pytest.raises(ValueError, match=r"different tasks .*FT on mirror, rot90; SMAT on mirror\)"):
        evaluate([*ft, runs["smat"] / "mirror"])
    second = copied(ft[0], tmp_path / "second", seed=22)
    with pytest.raises(ValueError, match="FT, Expert, seed 22 lacks task 'rot90'"):
        evaluate([*ft, second])
    with pytest.raises(ValueError, match="FT, Expert, seed 21 lacks task 'negative'"):
        evaluate([*ft, merged["ft"] / "ta"])


def test_a_merge_of_experts_that_were_trained_anew_is_refused(runs, merged, tmp_path, monkeypatch):
    names = {"label": "FT", "method": "ft"}
    anew = copied(runs["smat"] / "mirror", tmp_path / "mirror", **names)
    others = [runs["ft"] / task for task in ("negative", "rot90", "stripes")]
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "score_model", lambda *a, **k: pytest.fail("nothing is scored"))
        stale = f"{merged['ft'] / 'ta'} was merged from other weights of 'mirror' than {anew} holds now"
        with pytest.raises(ValueError, match=stale):
            evaluate([*others, anew, merged["ft"] / "ta"])
        # without its experts either: a --overwrite that was interrupted between two mergers
        new = copied(merged["smat"] / "wa", tmp_path / "wa", label="FT")
        old = merged["ft"] / "ta"
        with pytest.raises(ValueError, match=f"{new} was merged from other weights of 'mirror' than {old}: merge"):
            evaluate([old, new])
        mark = runs["ft"] / f".mirror{checkpoint.REPLACED}"
        mark.touch()
        compared = Interference(runs=(runs["ft"],))
        for call in (evaluate, lambda _: load_runs([runs["ft"]]), lambda _: interference(compared)):
            with pytest.raises(ValueError, match=f"to replace: end the training by .*, or delete {mark} to keep"):
                call([runs["ft"] / "mirror"])
        mark.unlink()
    # its own snapshots are no other weights
    copied(runs["ft"] / "mirror", tmp_path / "snapshots" / "1" / "mirror", kind="snapshot")
    assert len(evaluate([*others, anew, merged["ft"] / "ta"])) == 4 + 4


def test_a_merge_in_a_narrower_dtype_is_scored_in_that_of_its_suite(merged, suite, tmp_path):
    leaves, manifest = checkpoint.load_leaves(merged["ft"] / "ta")
    narrow = {path: leaf.bfloat16() for path, leaf in leaves.items()}
    checkpoint.save_expert(tmp_path / "ta", narrow, {**manifest, "fingerprint": checkpoint.fingerprint(narrow)})
    said = []
    rows = evaluate([tmp_path / "ta"], report=said.append)
    wide = {path: leaf.float() for path, leaf in narrow.items()}
    assert [row.score for row in rows] == [suite.score(wide, row.task, "test") for row in rows]
    assert said == [f"note: {tmp_path / 'ta'} has parameters in bfloat16: scored in the wider dtype of its suite"]
    double = {path: leaf.double() for path, leaf in leaves.items()}
    checkpoint.save_expert(tmp_path / "wide", double, {**manifest, "fingerprint": checkpoint.fingerprint(double)})
    with pytest.raises(ValueError, match="float64"):
        evaluate([tmp_path / "wide"])


@pytest.mark.parametrize("kind", ["expert", "merged", "adapters", "adapters of earlier code"])
def test_weights_that_their_manifest_does_not_name_are_not_scored(runs, merged, train, tmp_path, kind):
    folder, weights = tmp_path / "one", checkpoint.WEIGHTS
    if kind.startswith("adapters"):
        train(tmp_path, "ft", tasks=("rot90",), training=Training(steps=2, lr=5e-4, lora=Adapters(2, 4.0)))
        folder, weights = tmp_path / "rot90", "adapter_model.safetensors"
    else:
        shutil.copytree(runs["ft"] / "rot90" if kind == "expert" else merged["ft"] / "ta", folder)
    evaluate([folder])
    if kind == "adapters of earlier code":
        known = {name: value for name, value in checkpoint.load_manifest(folder).items() if name != "files"}
        (folder / checkpoint.MANIFEST).write_text(json.dumps(known))
    bits = bytearray((folder / weights).read_bytes())
    bits[-1] ^= 1
    (folder / weights).write_bytes(bits)
    if kind == "adapters of earlier code":  # nothing tells
        evaluate([folder])
        return
    with pytest.raises(ValueError, match=f"the weights in {folder} are not those that its manifest.json names: put"):
        evaluate([folder])


def test_only_files_that_an_evaluation_wrote_are_written_to(folders, rows, tmp_path):
    write_report(tmp_path, rows, main_table(rows, split="test"), checkpoints=folders)
    evaluate(folders[:1], keep=tmp_path)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["results.json", "results.jsonl", "runs.jsonl", "scores.jsonl", "table.md"]
    assert outputs.foreign_problems(tmp_path) == []
    (tmp_path / "table.md").write_text("")
    assert outputs.foreign_problems(tmp_path) == []
    for name in (*names, "answers.jsonl"):
        (tmp_path / name).write_text("mine")
        (problem,) = outputs.foreign_problems(tmp_path)
        assert (
            problem == f"{tmp_path / name} holds something else than is written there: move it, or choose another place"
        )
        (tmp_path / name).unlink()
    (tmp_path / "plot.png").write_text("mine")
    with pytest.raises(ValueError, match=r"plot\.png holds something else"):
        check_picture(tmp_path / "plot.png")


def test_manifests_of_others_are_passed_over_and_fields_that_lack_are_named(runs, merged, tmp_path):
    shutil.copytree(runs["ft"], tmp_path / "ft")
    expected = len(find_checkpoints([tmp_path / "ft"]))
    for name, text in {"list": '["a"]', "site": '{"name": "x"}'}.items():
        (tmp_path / "ft" / name).mkdir()
        (tmp_path / "ft" / name / checkpoint.MANIFEST).write_text(text)
    assert len(find_checkpoints([tmp_path / "ft"])) == expected
    assert len(find_inputs(tmp_path / "ft")[1]) == 4
    file = tmp_path / "ft" / "rot90" / checkpoint.MANIFEST
    file.write_text('{"kind": "expert", "seed": 1}')
    with pytest.raises(ValueError, match=f"{file} lacks task, label, hyperparameters: put back the one written with"):
        evaluate(find_checkpoints([tmp_path / "ft"]))
    with pytest.raises(ValueError, match=f"{file} lacks task, label, hyperparameters, method: put back"):
        load_runs([tmp_path / "ft"])
    shutil.copytree(merged["ft"] / "ta", tmp_path / "ta")
    (tmp_path / "ta" / checkpoint.MANIFEST).write_text('{"kind": "merged", "label": "FT", "seed": 1}')
    with pytest.raises(ValueError, match="lacks merger, experts, hyperparameters: put back"):
        evaluate(find_checkpoints([tmp_path / "ta"]))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"suite": 3}, "suite is 3, must be Mapping"),
        ({"suite": {"name": "digits", "seed": [1]}}, r"suite\['seed'\] is \[1\], must be int"),
        ({"suite": {"seed": 1}}, "suite lacks name"),
        ({"hyperparameters": [1]}, r"hyperparameters is \[1\], must be Mapping"),
        ({"label": None}, "label is None, must be str"),
        ({"files": {"model.safetensors": 3}}, r"files\['model.safetensors'\] is 3, must be str"),
    ],
)
def test_values_of_other_types_in_a_manifest_are_named_with_file_and_way_out(runs, tmp_path, changed, told):
    shutil.copytree(runs["ft"], tmp_path / "ft")
    file = tmp_path / "ft" / "rot90" / checkpoint.MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | changed))
    told = f"^{file}: {told}: put back the one written with the weights, or move the folder$"
    for called in (find_inputs, lambda run: find_checkpoints([run])):
        with pytest.raises(ValueError, match=told):
            called(tmp_path / "ft")
    file.write_text(json.dumps(manifest | {"training": None, "peak_memory_bytes": None}))
    assert find_inputs(tmp_path / "ft")[1]
    file.write_text(json.dumps(manifest | {"training": {"steps": "x"}}))
    with pytest.raises(ValueError, match=rf"{file}: training\['steps'\] is 'x', must be int or null: put back"):
        evaluate(find_checkpoints([tmp_path / "ft"]))


def test_a_merger_of_two_experts_is_refused_for_more_before_any_is_read(runs, monkeypatch):
    monkeypatch.setattr(reading, "load_runs", lambda *args, **options: pytest.fail("reads the experts"))
    with pytest.raises(ValueError, match="the number of experts is 3: slerp takes exactly 2"):
        experts_curve(ExpertsCurve(runs=(runs["ft"],), merger="slerp"))


def test_a_write_that_was_cut_off_is_no_expert(runs, tmp_path):
    shutil.copytree(runs["ft"], tmp_path / "ft")
    shutil.copytree(tmp_path / "ft" / "rot90", tmp_path / "ft" / ".rot90.old-1")
    assert len(find_inputs(tmp_path / "ft")[1]) == len(find_checkpoints([tmp_path / "ft"])) == 4


def test_an_expert_in_a_folder_that_cannot_be_read_is_not_left_out(runs, monkeypatch):
    closed, listed = runs["ft"] / "rot90", os.listdir

    def denied(place):
        if Path(place) == closed:
            raise PermissionError(13, "Permission denied", str(closed))
        return listed(place)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(PermissionError, match="rot90"):
        find_inputs(runs["ft"])


def test_of_an_expert_of_another_tool_a_suite_takes_its_own_part(tmp_path):
    base = {"vision_model.w": torch.zeros(2, 3), "text_model.w": torch.ones(4)}
    experts = {"tower": {"vision_model.w": torch.ones(2, 3)}, "whole": {name: leaf + 1 for name, leaf in base.items()}}
    for name, leaves in {"base": {}, **experts}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({**base, **leaves}, tmp_path / name / "model.safetensors")
    suite = SimpleNamespace(
        name="own", recipe={"model": str(tmp_path / "base")}, base={"w": base["vision_model.w"]}, reads=None
    )
    for name, tokens in (("base", {"a": 0}), ("tower", {"a": 0, "b": 1})):
        (tmp_path / name / "vocab.json").write_text(json.dumps(tokens))
    notes = list[str]()
    found = weights._foreign_leaves(tmp_path / "tower", "a", suite, notes.append)
    assert [note.partition(": ")[2].partition(": ")[2] for note in notes] == ["it is scored with base's tokenizer"]
    assert {name: leaf.tolist() for name, leaf in found.items()} == {"w": torch.ones(2, 3).tolist()}
    with pytest.raises(ValueError, match=r"whole differs from its base in 'text_model.w', which suite 'own' takes"):
        weights._foreign_leaves(tmp_path / "whole", "a", suite, print)


@pytest.mark.parametrize("trained", [True, False])
def test_what_no_score_depends_on_may_differ_from_the_base(trained, tmp_path):
    names = ("embed_tokens.weight", "lm_head.weight", "proj_out.weight", "layers.0.w", "mtp.norm", "rope.inv_freq")
    start, other = ({name: torch.randn(4, 4) for name in names} for _ in range(2))
    for label, leaves in {"base": start, "own": other, "tied": other}.items():
        (tmp_path / label).mkdir()
        (tmp_path / label / "config.json").write_text("{}")
        ties = {} if label == "own" else dict.fromkeys(names[1:3], leaves[names[0]])
        save_file({n: leaf.clone() for n, leaf in {**leaves, **ties}.items()}, tmp_path / label / "model.safetensors")
    base = {name: start[name] for name in ("embed_tokens.weight", "layers.0.w")[not trained :]}
    suite = SimpleNamespace(name="own", recipe={"model": str(tmp_path / "base")}, base=base, reads=None)
    if trained:
        found = weights._foreign_leaves(tmp_path / "tied", "a", suite, print)
        assert_trees_equal(found, {name: other[name] for name in base})
    for label in ("own", "tied")[: 1 + (not trained)]:  # a head of its own, embeddings that are frozen
        with pytest.raises(ValueError, match=rf"{label} differs from its base in '"):
            weights._foreign_leaves(tmp_path / label, "a", suite, print)


def test_results_name_the_suite_that_they_were_scored_on(runs, tmp_path):
    recipes, folder = {}, runs["ft"] / "rot90"
    rows = evaluate([folder], options={"batch_size": 8}, recipes=recipes)
    write_report(tmp_path, rows, main_table(rows), checkpoints=[folder], recipes=recipes)
    trained = checkpoint.load_manifest(folder)["suite"]
    scored = {**trained, "batch_size": 8}
    assert trained != scored
    assert json.loads((tmp_path / "results.json").read_text())["suites"] == [scored]
    assert json.loads((tmp_path / "runs.jsonl").read_text())["suite"] == scored


def test_experts_that_were_trained_on_other_rows_are_notes(runs, tmp_path):
    folders, told = [], []
    for name, rows in (("ft", "a"), ("smat", "b")):
        folders.append(shutil.copytree(runs[name] / "rot90", tmp_path / name))
        manifest = json.loads((folders[-1] / "manifest.json").read_text())
        manifest["train_rows"] = {"hash": rows, "count": 120, "from": "train.jsonl"}
        (folders[-1] / "manifest.json").write_text(json.dumps(manifest))
    evaluate(folders, report=told.append)
    different = (
        "the experts of rot90 were trained on different rows: FT, seed 21 on 120 rows; SMAT, seed 21 on 120 rows"
    )
    assert told == [f"note: {different}"]
    manifests = {folder: checkpoint.load_manifest(folder) for folder in folders}
    rows = {"hash": "a", "classes": ["x"]}
    now = SimpleNamespace(
        OWN_HEADS=True, tasks=("rot90",), recipe=manifests[folders[0]]["suite"], train_rows=lambda task: rows
    )
    manifests[folders[0]]["train_rows"]["classes"] = ["y"]
    named, changed, last = notes.other_rows([models.Model(folder, manifests[folder], now, "") for folder in folders])
    assert changed.startswith(
        "the expert of rot90 of SMAT, seed 21 was trained on other rows than train.jsonl holds now"
    )
    assert named == "the expert of rot90 of FT, seed 21 was trained under other class names than rot90 has now"
    assert last == different


def test_a_suite_is_loaded_once_for_all_its_checkpoints(runs, monkeypatch):
    loads = []
    load = models.load_suite
    monkeypatch.setattr(models, "load_suite", lambda **recipe: loads.append(recipe) or load(**recipe))
    evaluate([runs["ft"] / task for task in ("rot90", "mirror")])
    assert len(loads) == 1


def test_checkpoints_of_the_same_tasks_share_a_suite_and_what_it_has_computed(runs, suite, monkeypatch):
    monkeypatch.setattr(models, "load_suite", lambda **recipe: suite)
    folders, tasks = [runs["ft"] / task for task in ("rot90", "mirror")], ["rot90", "mirror"]
    known = {folder: checkpoint.load_manifest(folder) for folder in folders}
    manifests = {folder: own | {"suite": {**own["suite"], "tasks": tasks}} for folder, own in known.items()}
    one, other = models.suited(manifests, {}, {}, "test")
    assert one.suite is other.suite is not suite
    assert one.suite.tasks == (*tasks,)


def test_what_was_scored_is_not_scored_again(runs, suite, tmp_path, monkeypatch):
    calls = []

    def score(params, task, split):
        calls.append((task, split))
        return suite.score(params, task, split)

    monkeypatch.setattr(models, "load_suite", lambda **recipe: suite.replace(score=score))
    one, two = runs["ft"] / "rot90", runs["ft"] / "mirror"
    first = evaluate([one], keep=tmp_path)
    assert evaluate([one, two], keep=tmp_path)[:1] == first
    assert calls == [("rot90", "test"), ("mirror", "test")]
    assert evaluate([one], split="dev", keep=tmp_path) != first
    assert evaluate([one]) == first
    assert calls[2:] == [("rot90", "dev"), ("rot90", "test")]
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl"]


def test_the_report_has_every_score_the_table_and_the_means(rows, folders, tmp_path):
    table = main_table(rows)
    write_report(tmp_path / "report", rows, table, checkpoints=folders)
    names = ["results.json", "results.jsonl", "runs.jsonl", "table.md"]
    assert sorted(p.name for p in (tmp_path / "report").iterdir()) == names
    assert read_results(tmp_path / "report" / "results.jsonl") == rows
    assert (tmp_path / "report" / "table.md").read_text() == markdown(table)
    summary = json.loads((tmp_path / "report" / "results.json").read_text())
    manifest = checkpoint.load_manifest(folders[0])
    assert summary["suites"] == [manifest["suite"]]
    assert summary["versions"] == machine.describe("")["versions"]  # that scored; runs.jsonl has those that trained
    assert summary["learning_rates"] == {"FT": 5e-4, "SMAT": 5e-4}
    assert summary["split"] == "test"
    ta = [row.score for row in rows if (row.method, row.model) == ("SMAT", "ta")]
    assert summary["means"]["SMAT"]["TA"] == {"mean": sum(ta) / 4, "sd": None, "by_seed": {"21": sum(ta) / 4}}
    assert summary["coefs"] == dict.fromkeys(
        [*(f"FT {name} seed 21" for name in ("ta", "ties", "dare", "della")), "SMAT ta seed 21"], 0.3
    )


def test_the_table_on_disk_names_means_over_other_seeds(rows, folders, tmp_path):
    rows = [row for row in rows if row.model.startswith("expert:")]
    rows += [replace(row, seed=22) for row in rows if row.method == "FT"]
    write_report(tmp_path, rows, table := main_table(rows), checkpoints=folders)
    told = "Note: labels have different seeds (FT 21, 22; SMAT 21).\n"
    assert (tmp_path / "table.md").read_text() == f"{markdown(table)}\n{told}"


def test_the_verdict_is_the_five_merger_mean_and_its_difference():
    def made(method, scores):
        models = ("wa", "ta", "ties", "dare", "della")
        return [Result(method, model, "a", "test", score, 0) for model, score in zip(models, scores, strict=False)]

    both = main_table(made("FT", (10, 20, 30, 40, 50)) + made("SMAT", (11, 21, 31, 41, 51.5)))
    assert verdict(both) == "mean over five mergers: FT 30.00, SMAT 31.10, SMAT - FT +1.10"
    assert verdict(main_table(made("FT", (10, 20, 30, 40, 50)))) == "mean over five mergers: FT 30.00"
    few = main_table([*made("FT", (10, 20)), *made("SMAT", (12,)), Result("FT", "expert:a", "a", "test", 90.0, 0)])
    assert verdict(few) == "best merged model: FT 20.00 by TA, SMAT 12.00 by WA"
    assert verdict(main_table([Result("FT", "expert:a", "a", "test", 90.0, 0)])).startswith("no merged models: ")
    # one has a seed more, and differences are those of the seeds that both have
    more = [replace(row, seed=1, score=90.0) for row in made("FT", (10, 20, 30, 40, 50))]
    part = main_table(made("FT", (10, 20, 30, 40, 50)) + more + made("SMAT", (11, 21, 31, 41, 51)))
    assert verdict(part) == "mean over five mergers: FT 60.00, SMAT 31.00, SMAT - FT +1.00 over the 1 common seed"
