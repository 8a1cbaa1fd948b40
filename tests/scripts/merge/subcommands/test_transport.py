"""Experts of a run moved to another base: the pure functions, a run that merges and scores, and what is refused."""

from dataclasses import replace

import pytest

from smat_fn import checkpoint, random
from smat_fn.checkpoint import same
from smat_fn.config import Finetune, Training
from smat_fn.data.batching import split_rows
from smat_fn.merge import ta
from smat_fn.scripts.evaluate import evaluation, models
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.experts.suite import common_suite
from smat_fn.scripts.merge.settings import Transport
from smat_fn.scripts.merge.subcommands.statistics import batches_of
from smat_fn.scripts.merge.subcommands.transport import transport
from smat_fn.scripts.run_folder import all_inputs, find_inputs
from smat_fn.scripts.train.options import RunOptions, check_run
from smat_fn.suites import load_suite
from smat_fn.transport import alignments, descent_signs, gradfix, theseus

OTHER = {"pretrain_steps": 12}
SIX = Training(steps=6, lr=5e-4)
TASKS = "mirror", "negative", "rot90", "stripes"


@pytest.fixture(scope="module")
def new(suite):
    return load_suite(**{**suite.recipe, **OTHER})


def moved(runs, out, **options):
    return list(transport(Transport(runs["ft"], out, suite_options=OTHER, **options)))


def test_changes_are_added_and_the_run_merges(runs, new, tmp_path):
    lines = moved(runs, tmp_path / "run", coefs=(0.8,))
    assert lines == [f"moved: {tmp_path / 'run' / task}, coefficient 0.8" for task in TASKS]
    inputs = load_inputs(*find_inputs(tmp_path / "run"))
    old = load_inputs(*find_inputs(runs["ft"]))
    assert same(inputs.base, new.base)
    for task, expert in inputs.experts.items():
        wanted = ta(old.base, {"new": new.base, task: old.experts[task]}, coef=1.0, weights={task: 0.8})
        assert all((expert[path] - leaf).abs().max() < 1e-6 for path, leaf in wanted.items())
        manifest, before = inputs.manifests[task], old.manifests[task]
        assert manifest["label"] == "FT by add"
        assert manifest["suite"]["pretrain_steps"] == 12
        assert manifest["base_fingerprint"] == checkpoint.fingerprint(new.base)
        assert manifest["transport"]["from"] == before["fingerprint"]
        assert manifest["training"] == before["training"]
        assert "seconds" not in manifest
    scored = common_suite(load_inputs(*all_inputs(tmp_path / "run")), {})
    assert scored.recipe == new.recipe


@pytest.mark.parametrize("vote", ["mean", "majority"])
def test_gradfix_reads_the_new_base(runs, suite, new, tmp_path, vote):
    moved(runs, tmp_path, method="gradfix", vote=vote, rows=20, seed=3)
    old = load_inputs(*find_inputs(runs["ft"]))
    key = random.fold_in(random.fold_in(random.key(3), "transport"), "rot90")
    batches = batches_of(suite, "rot90", "train", 20, key)
    assert sum(len(labels) for _, labels in batches) == 32  # whole batches of 16
    rows = [row for batch in batches for row in split_rows(batch, 16 if vote == "majority" else 1)]
    signs = descent_signs(new.loss_fn("rot90"), new.base, rows, vote=vote)
    found = checkpoint.load_leaves(tmp_path / "rot90")[0]
    assert same(found, gradfix(new.base, old.base, old.experts["rot90"], signs))
    assert not same(found, new.base)


def test_theseus_compares_both_bases(runs, suite, new, tmp_path):
    moved(runs, tmp_path, method="theseus", rows=16, split="dev", label="moved")
    old = load_inputs(*find_inputs(runs["ft"]))
    key = random.fold_in(random.fold_in(random.key(0), "transport"), "rot90")
    batches = batches_of(suite, "rot90", "dev", 16, key)
    maps = alignments(suite.loss_fn("rot90"), suite.base, new.loss_fn("rot90"), new.base, batches)
    found, manifest = checkpoint.load_leaves(tmp_path / "rot90")
    assert same(found, theseus(new.base, old.base, old.experts["rot90"], maps))
    assert manifest["label"] == "moved"
    assert (manifest["transport"]["split"], manifest["transport"]["coef"]) == ("dev", 1.0)
    assert "vote" not in manifest["transport"]


def test_each_task_gets_its_best_coefficient(runs, new, tmp_path):
    coefs = (0.0, 0.5, 1.0, 3.0)
    lines = moved(runs, tmp_path, coefs=coefs)
    old = load_inputs(*find_inputs(runs["ft"]))
    for line, task in zip(lines, TASKS, strict=True):
        own = old.experts[task]
        scores = {
            c: new.score(ta(old.base, {"new": new.base, task: own}, coef=1.0, weights={task: c}), task, "dev")
            for c in coefs
        }
        best = max(coefs, key=scores.__getitem__)
        facts = checkpoint.load_manifest(tmp_path / task)["transport"]
        assert facts["dev_curve"] == [[c, scores[c]] for c in coefs]
        assert (facts["coef"], facts["base_dev"]) == (best, scores[0.0])
        assert line.endswith(f"coefficient {best:g}, dev {scores[best]:.2f} (the new base {scores[0.0]:.2f})")


def test_finished_experts_are_kept_and_others_are_not_replaced(runs, tmp_path):
    moved(runs, tmp_path)
    before = checkpoint.load_manifest(tmp_path / "rot90")
    again = moved(runs, tmp_path)
    assert again == [f"kept: {tmp_path / task}: already finished" for task in TASKS]
    assert checkpoint.load_manifest(tmp_path / "rot90") == before
    with pytest.raises(ValueError, match="rot90 exists"):
        moved(runs, tmp_path, coefs=(0.5,))
    moved(runs, tmp_path, coefs=(0.5,), overwrite=True)
    assert checkpoint.load_manifest(tmp_path / "rot90")["transport"]["coef"] == 0.5
    (file,) = (tmp_path / "rot90").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ValueError, match="rot90"):
        moved(runs, tmp_path, coefs=(0.5,))


def test_another_label_or_suite_is_not_finished(runs, tmp_path):
    moved(runs, tmp_path, coefs=(1.0, 0.5))
    before = checkpoint.load_manifest(tmp_path / "rot90")
    assert before["transport"]["coefs"] == [0.5, 1.0]
    assert all(line.startswith("kept: ") for line in moved(runs, tmp_path, coefs=(0.5, 1.0)))
    with pytest.raises(ValueError, match="rot90 exists"):
        moved(runs, tmp_path, coefs=(0.5, 1.0), label="other")
    asked = Transport(runs["ft"], tmp_path, suite_options=OTHER | {"batch_size": 8}, coefs=(0.5, 1.0))
    moved(runs, tmp_path / "two")
    with pytest.raises(ValueError, match=r"its merge.py transport command with --overwrite --label NAME"):
        evaluation.evaluate([tmp_path / "rot90", tmp_path / "two" / "rot90"])
    with pytest.raises(ValueError, match=r"base exists[\s\S]*rot90 exists"):
        list(transport(asked))
    list(transport(replace(asked, overwrite=True)))
    assert all(checkpoint.load_manifest(tmp_path / name)["suite"]["batch_size"] == 8 for name in ("base", *TASKS))


def test_an_interrupted_run_is_not_merged_before_it_is_ended(runs, tmp_path):
    lines = transport(Transport(runs["ft"], tmp_path, suite_options=OTHER))
    next(lines)
    next(lines)
    lines.close()
    with pytest.raises(ValueError, match=r"yet to get the experts of rot90, stripes .*: rerun it, or delete .*rot90"):
        all_inputs(tmp_path)
    assert models.lacking_experts([tmp_path]) == [
        f"{tmp_path / task} holds no finished expert: it is not scored" for task in TASKS[2:]
    ]
    assert moved(runs, tmp_path)[:2] == [f"kept: {tmp_path / task}: already finished" for task in TASKS[:2]]
    assert len(all_inputs(tmp_path)[1]) == 4
    next(transport(Transport(runs["ft"], tmp_path, suite_options=OTHER, coefs=(0.5,), overwrite=True)))
    with pytest.raises(ValueError, match=r"stripes is the expert .* transport has yet to replace: rerun it"):
        evaluation.evaluate([tmp_path / task for task in TASKS])
    with pytest.raises(ValueError, match="yet to get the experts of negative, rot90, stripes"):
        all_inputs(tmp_path)


def test_training_takes_no_moved_expert_for_one_of_its_own(runs, train, new, tmp_path):
    moved(runs, tmp_path, label="FT")
    with pytest.raises(ValueError, match=r"rot90 was moved by merge.py transport, not trained: choose another --out"):
        train(tmp_path, "ft", suite=new, resume=True)
    with pytest.raises(ValueError, match=r"rot90 was moved by merge.py transport, not trained: pass another --out"):
        check_run(Finetune(), SIX, RunOptions(tmp_path, ("rot90",), 21), known=TASKS)


def test_bad_input_is_refused_before_anything_is_written(runs, tmp_path):
    with pytest.raises(ValueError, match="rows is 0, must be at least 1") as error:
        list(transport(Transport(tmp_path / "run", tmp_path / "run", rows=0, coefs=(float("nan"),))))
    assert "coefs is nan, must be finite" in str(error.value)
    assert "nothing says which base is the new one: pass --model NEW" in str(error.value)
    assert "--out and --run are both" in str(error.value)
    with pytest.raises(ValueError, match=r"coefs are \[0.5, 1.0, 0.5\]: name each once"):
        moved(runs, tmp_path / "out", coefs=(0.5, 1.0, 0.5))
    with pytest.raises(ValueError, match="suite 'digits' has no model to choose: leave out --model"):
        list(transport(Transport(runs["ft"], tmp_path / "out", model="NEW")))
    with pytest.raises(ValueError, match="--suite-options seed would give other tasks or splits"):
        list(transport(Transport(runs["ft"], tmp_path / "out", suite_options={"seed": 3})))
    for place in (runs["ft"] / "rot90", runs["ft"] / "rot90" / "moved"):
        with pytest.raises(ValueError, match=r"--out is .*, but .*rot90 is a checkpoint: choose a folder outside"):
            moved(runs, place)
    with pytest.raises(ValueError, match="the new base has the weights of the old one"):
        list(transport(Transport(runs["ft"], tmp_path / "out", suite_options={"batch_size": 8})))
    assert not any(tmp_path.iterdir())
