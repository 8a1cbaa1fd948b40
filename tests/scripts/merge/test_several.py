"""merge.py emr and tall_mask for all tasks: one folder, verified, exported per task, scored per task."""

import json
import shutil

import pytest
import torch

from smat_fn import checkpoint
from smat_fn.config import Emr, TallMask
from smat_fn.scripts.evaluate import evaluation
from smat_fn.scripts.merge import on_disk
from smat_fn.scripts.merge.provenance import finished
from smat_fn.scripts.merge.subcommands.exporting import export
from smat_fn.scripts.run_folder import find_inputs

ALL = [Emr(), TallMask(0.4)]


@pytest.fixture(scope="module")
def inputs(runs):
    return find_inputs(runs["smat"])


@pytest.fixture(scope="module")
def merged(inputs, tmp_path_factory):
    """A folder with a folder of each merger, of two experts."""
    base, experts = inputs
    out = tmp_path_factory.mktemp("several")
    list(on_disk.stream_run(ALL, on_disk.order(base, experts[:2], out=out, seed=0)))
    return out


def stored(folder):
    return checkpoint.load_leaves(folder)[0]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_a_task_is_exported_with_the_bits_of_its_own_merge(config, inputs, merged, tmp_path):
    base, experts = inputs
    for task in (path.name for path in experts[:2]):
        one = type(config)(**{**vars(config), "task": task})
        list(on_disk.stream_run([one], on_disk.order(base, experts[:2], out=tmp_path / task, seed=0)))
        export(merged / config.name, base, tmp_path / task / "exported", task=task)
        own = (tmp_path / task / config.name / checkpoint.WEIGHTS).read_bytes()
        assert (tmp_path / task / "exported" / checkpoint.WEIGHTS).read_bytes() == own
        assert finished.verify(tmp_path / task / "exported")[1] == []
        manifest = checkpoint.load_manifest(tmp_path / task / "exported")
        assert (manifest["kind"], manifest["task"], manifest["merger"]) == ("exported", task, config.name)
        card = (tmp_path / task / "exported" / "README.md").read_text()
        assert f"merged by {config.name.upper()}: the model of {task}" in card
        assert "Not one model" not in card


def test_manifest_card_and_verification(inputs, merged):
    base, experts = inputs
    manifest = checkpoint.load_manifest(merged / "emr")
    assert list(manifest["scales"]) == [path.name for path in experts[:2]]
    assert manifest["scales"] == json.loads((merged / "emr" / "tasks.json").read_text())["scales"]
    assert manifest["hyperparameters"] == {"coef": 1.0}
    assert set(manifest["files"]) == {"vector.safetensors", "tasks.json"}
    card = (merged / "emr" / "README.md").read_text()
    assert "Not one model but one for each task" in card
    assert manifest["notes"] == []  # such as that no parameter differs from base
    assert all(f"{task} {scale:.6g}" in card for task, scale in manifest["scales"].items())
    count, problems = finished.verify(merged / "emr")
    assert (count, problems) == (2 + 3, [])  # files, and the weights of base and of two experts
    again = on_disk.stream_run(ALL, on_disk.order(base, experts[:2], out=merged, seed=0))
    assert [report for _, report in again] == [None, None]  # done before
    with pytest.raises(ValueError, match="holds another merge"):
        list(on_disk.stream_run([Emr(coef=0.5)], on_disk.order(base, experts[:2], out=merged, seed=0)))


def test_masks_that_have_changed_are_exported_nowhere(inputs, merged, tmp_path):
    base, experts = inputs
    folder, task = tmp_path / "emr", experts[0].name
    shutil.copytree(merged / "emr", folder)
    file = folder / "vector.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert len(finished.verify(folder)[1]) == 1
    with pytest.raises(ValueError, match=r"vector\.safetensors is not the file that its manifest names"):
        export(folder, base, tmp_path / "out", task=task)
    shutil.copyfile(merged / "emr" / "vector.safetensors", file)
    facts = json.loads((folder / "tasks.json").read_text())
    facts["scales"][task] *= 2
    (folder / "tasks.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"tasks\.json is not the file that its manifest names"):
        export(folder, base, tmp_path / "out", task=task)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emr"]


def test_another_base_a_part_and_a_task_of_one_model_are_refused(inputs, merged, tmp_path):
    base, experts = inputs
    with pytest.raises(ValueError, match="was made from another base"):
        export(merged / "emr", experts[2], tmp_path / "out", task=experts[0].name)
    with pytest.raises(ValueError, match="has no task 'nine', one of"):
        export(merged / "emr", base, tmp_path / "out", task="nine")
    with pytest.raises(ValueError, match="is one model: leave out --task"):
        export(experts[0], base, tmp_path / "out", task="nine")
    part = on_disk.chosen_part("1/2", dry_run=False, push=None)
    with pytest.raises(ValueError, match="--part requires one model: give --task"):
        list(on_disk.stream_run([Emr()], on_disk.order(base, experts[:2], out=tmp_path, seed=0, part=part)))
    assert list(tmp_path.iterdir()) == []


def test_a_plan_counts_the_vector_and_the_masks(inputs, merged, tmp_path):
    base, experts = inputs
    planned = on_disk.plan_run([Emr()], on_disk.order(base, experts[:2], out=tmp_path, seed=0))
    assert planned[tmp_path / "emr"].disk == (merged / "emr" / "vector.safetensors").stat().st_size
    assert list(tmp_path.iterdir()) == []


def test_every_task_is_scored_by_its_own_model(inputs, suite, merged, tmp_path):
    base, experts = inputs
    rows = evaluation.evaluate([merged / "emr"], split="dev")
    for row, path in zip(rows, experts[:2], strict=True):
        export(merged / "emr", base, tmp_path / path.name, task=path.name)
        params = stored(tmp_path / path.name)
        assert (row.task, row.model, row.score) == (path.name, "emr", suite.score(params, path.name, "dev"))
    assert any(
        not torch.equal(a, b) for a, b in zip(*(stored(tmp_path / p.name).values() for p in experts[:2]), strict=True)
    )


def test_a_model_for_one_task_is_scored_on_it_and_models_for_all_tasks_as_their_folder(inputs, merged, tmp_path):
    base, experts = inputs
    tasks = [path.name for path in experts[:2]]
    for task in tasks:
        list(on_disk.stream_run([Emr(task=task)], on_disk.order(base, experts[:2], out=tmp_path / task, seed=0)))
    alone = [tmp_path / task / "emr" for task in tasks]
    whole = evaluation.evaluate([merged / "emr"], split="dev")
    assert evaluation.evaluate(alone[:1], split="dev") == whole[:1]
    assert evaluation.evaluate(alone, split="dev") == whole
    with pytest.raises(ValueError, match=f"SMAT, EMR, seed 21 lacks task '{tasks[1]}', which others have: add it, or"):
        evaluation.evaluate([*experts[:2], alone[0]])
    with pytest.raises(ValueError, match=f"other_tasks names '{tasks[1]}', a task of the checkpoints"):
        evaluation.evaluate(alone[:1], other_tasks=[tasks[1]])
    for one, two in (merged / "emr", alone[0]), (alone[0], merged / "emr"):
        with pytest.raises(ValueError, match="are both SMAT emr of seed 21: evaluate each alone"):
            evaluation.evaluate([one, two])
