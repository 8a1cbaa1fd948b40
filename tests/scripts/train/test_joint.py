"""The multi-task model: the batches of the experts in turn, bits after a resume, no input of a merge, its scores."""

import json
import re
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from smat_fn import checkpoint, random
from smat_fn.checkpoint import same
from smat_fn.config import DIGITS, Adapters, Dev, Training
from smat_fn.evaluate import read_results
from smat_fn.report.tables import main_table, relative_table
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.outputs import verdict, write_report
from smat_fn.scripts.evaluate.sources import read_sources
from smat_fn.scripts.run_folder import all_inputs
from smat_fn.scripts.train import resuming, sweep
from smat_fn.scripts.train.joint import joint_run
from smat_fn.scripts.train.options import RunOptions, check_run
from smat_fn.scripts.train.resuming import Interrupted, Stop
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite
from smat_fn.suites.joint import joint, joint_loss

from ..conftest import RECIPE

TWO = Training(steps=2, lr=5e-4)
TASKS = ("rot90", "mirror", "negative", "stripes")


@pytest.fixture(scope="session")
def train_joint(suite):
    """``train_joint(out, name, ...)``: a model of two steps of each task, by a method of the preset."""

    def run(out, name="ft", *, tasks=suite.tasks, training=TWO, stop=None, method=None, **options):
        method = method or DIGITS.methods[name]
        given = joint_run(suite, training, RunOptions(out, ("joint",), 21, joint=tasks, **options))
        return train_run(given[0], method, *given[1:], stop=stop)

    return run


@pytest.fixture(scope="module")
def finished(runs, train, train_joint, tmp_path_factory):
    """A run of ft with the multi-task model beside its experts."""
    out = tmp_path_factory.mktemp("joint") / "ft"
    train(out, "ft")
    assert train_joint(out, training=replace(TWO, steps=6)) == [out / "joint"]
    return out


def test_its_batches_are_those_of_the_experts_in_turn(suite):
    steps = {"rot90": 3, "mirror": 1, "stripes": 2}
    turns = [("rot90", 0), ("mirror", 0), ("stripes", 0), ("rot90", 1), ("stripes", 1), ("rot90", 2)]
    together = joint(suite, steps, seed=21)
    losses = set()
    for step, (task, n) in enumerate(turns):
        wanted = suite.batch(task, random.fold_in(random.key(21), task), n)
        place, found = together.batch("joint", random.key(step), step)
        assert list(steps)[place] == task
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        value = together.loss_fn("joint")(suite.base, (mine := together.batch("joint", random.key(0), step)))[0]
        assert torch.equal(value, suite.loss_fn(task)(suite.base, wanted)[0])
        assert [part.weight for part in together.split(mine, 2)] == [8, 8]
        losses.add(float(value))
    assert len(losses) == len(turns)
    with pytest.raises(IndexError):
        together.batch("joint", random.key(0), len(turns))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch: forward derivatives import it
def test_linearised_losses_stay_linearised(suite):
    tangent = load_suite("digits", progress=False, linearised=True, **RECIPE)
    together = joint(tangent, dict.fromkeys(TASKS, 1), seed=21)
    moved = {name: 1.2 * leaf for name, leaf in suite.base.items()}
    value = together.loss_fn("joint")(moved, together.batch("joint", random.key(0), 1))[0]
    batch = suite.batch("mirror", random.fold_in(random.key(21), "mirror"), 0)
    assert torch.equal(value, tangent.loss_fn("mirror")(moved, batch)[0])
    assert value != suite.loss_fn("mirror")(moved, batch)[0]
    with pytest.raises(ValueError, match="--joint needs a suite whose tasks run one module"):
        joint_loss([suite.loss_fn("mirror"), tangent.loss_fn("rot90")], suite.base)


def test_its_dev_score_is_the_mean_over_tasks_and_its_dev_loss_that_over_rows(suite):
    together = joint(suite, dict.fromkeys(TASKS, 1), seed=21)
    assert together.score(suite.base, "joint", "dev") == fmean(suite.score(suite.base, t, "dev") for t in TASKS)
    loss = together.loss_fn("joint")
    found = [float(loss(suite.base, part)[0]) for part, _ in together.dev_batches("joint")]
    wanted = [float(suite.loss_fn(t)(suite.base, part)[0]) for t in TASKS for part, _ in suite.dev_batches(t)]
    assert found == wanted


def test_of_one_task_it_is_the_expert_of_ft(runs, train_joint, tmp_path):
    train_joint(tmp_path, tasks=("mirror",), training=replace(TWO, steps=6))
    alone, expert = (checkpoint.load_leaves(at)[0] for at in (tmp_path / "joint", runs["ft"] / "mirror"))
    assert same(alone, expert)


def test_its_manifest_names_its_tasks_in_the_order_of_the_suite(suite, train_joint, tmp_path):
    train_joint(tmp_path, "smat", tasks=("stripes", "rot90"), label="mine")
    manifest = checkpoint.load_manifest(tmp_path / "joint")
    assert (manifest["kind"], manifest["label"], manifest["method"]) == ("joint", "mine", "smat")
    assert [*manifest["tasks"].items()] == [("rot90", 2), ("stripes", 2)]
    assert manifest["training"]["steps"] == 4
    log = [json.loads(line) for line in (tmp_path / "joint.log.jsonl").read_text().splitlines()]
    assert [row["simulated"] for row in log] == [False] * 3 + [True]
    assert [row["lr"] for row in log] == sorted((row["lr"] for row in log), reverse=True)  # one schedule over all


@pytest.mark.parametrize(
    "training",
    [
        replace(TWO, accumulate=2, average="ema:0.9", dev=Dev(3, "loss", None)),
        replace(TWO, optimizer="muon", muon_lr=0.01, lora=Adapters(2, 4, simulate="factors")),
    ],
)
def test_it_resumes_to_the_same_bits(train_joint, tmp_path, monkeypatch, training):
    train_joint(tmp_path / "whole", "smat", training=training)
    stop, step_of = Stop(), training_log(monkeypatch)
    step_of[4] = lambda: stop.ask(15)
    with pytest.raises(Interrupted, match=r"stopped by signal 15 after 5 steps of joint"):
        train_joint(tmp_path / "parts", "smat", training=training, stop=stop)
    assert resuming.read(resuming.path_of(tmp_path / "parts", "joint")).step == 5
    train_joint(tmp_path / "parts", "smat", training=training, resume=True)
    whole, parts = (checkpoint.load_manifest(tmp_path / name / "joint")["fingerprint"] for name in ("whole", "parts"))
    assert whole == parts
    with pytest.raises(ValueError, match=r"joint in .* was trained with other settings: tasks.mirror was 2"):
        train_joint(tmp_path / "parts", "smat", training=training, resume=True, tasks=("rot90",))


def training_log(monkeypatch):
    """A dict of functions that are called once, when the step of their key has been logged."""
    from smat_fn.scripts.train.logs import Log

    original, due = Log.step, {}

    def stepped(self, number, info, batch):
        original(self, number, info, batch)
        due.pop(number, lambda: None)()

    monkeypatch.setattr(Log, "step", stepped)
    return due


def test_no_merge_of_the_run_takes_it_or_waits_for_it(finished, train_joint, tmp_path):
    base, experts = all_inputs(finished)
    assert (base, [path.name for path in experts]) == (finished / "base", sorted(TASKS))
    (finished / "joint").rename(tmp_path / "away")  # training has not ended
    try:
        assert all_inputs(finished)[1] == experts
    finally:
        (tmp_path / "away").rename(finished / "joint")
    train_joint(tmp_path / "alone")
    with pytest.raises(ValueError, match="holds no experts"):
        all_inputs(tmp_path / "alone")
    assert [*resuming.begun(tmp_path / "alone", TASKS)] == []


def test_its_scores_are_a_column_beside_those_of_the_experts(finished, suite, tmp_path):
    folders = find_checkpoints([finished])
    assert finished / "joint" in folders
    rows = evaluate(folders)
    params = checkpoint.load_leaves(finished / "joint")[0]
    scores = {task: suite.score(params, task, "test") for task in suite.tasks}
    assert {row.task: row.score for row in rows if row.model == "joint"} == scores
    table = main_table(rows)
    assert table.columns[-1] == "JOINT"
    assert table.cells["FT"]["JOINT"].mean == pytest.approx(fmean(scores.values()))
    assert verdict(table) == "no merged models: merge the experts with merge.py"
    experts = {row.task: row.score for row in rows if row.model != "joint"}
    shares = [100 * scores[task] / experts[task] for task in TASKS]
    assert relative_table(rows).cells["FT"]["JOINT"].mean == pytest.approx(fmean(shares))
    write_report(tmp_path, rows, table, checkpoints=folders)
    assert read_results(tmp_path / "results.jsonl") == rows
    assert "joint" in {run.model for run in read_sources([tmp_path]).runs}


def test_status_counts_it_where_it_is(finished):
    rows = sweep.progress(finished)
    assert {(row.task, row.done) for row in rows} == {(task, True) for task in (*TASKS, "joint")}
    others = [row._replace(run="other") for row in rows if row.task != "joint"]
    alone = [row._replace(run="alone") for row in rows if row.task == "joint"]
    shown = sweep.table([*rows, *others, *alone])
    assert list(shown.columns[-1].cells) == ["5/5", "4/4", "1/1"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"probe": 2}, "probe is for experts, which joint does not train: leave one of them out"),
        ({"statistics": ("fisher",)}, "statistics is for experts"),
        ({"keep_snapshots": 1}, "keep_snapshots is for experts"),
        ({"keep_moments": True}, "keep_moments is for experts"),
        ({"joint": ("rot90", "rot90")}, "task 'rot90' is named twice"),
        ({"joint": ("rot90", "other")}, "task 'other' is unknown"),
        ({"method": replace(DIGITS.methods["smat"], sigma="auto")}, "sigma auto is measured on experts: give joint"),
        ({"training": replace(TWO, warmup=9)}, r"warmup is 9, must lie in \[0, steps = 8\]"),
        ({"training": replace(TWO, steps=None)}, "task 'mirror' has no number of epochs"),
    ],
)
def test_what_does_not_fit_is_an_error_before_any_work(tmp_path, options, text):
    given = {"method": DIGITS.methods["ft"], "training": TWO, "joint": TASKS, **options}
    method, training = given.pop("method"), given.pop("training")
    with pytest.raises(ValueError, match=text):
        check_run(method, training, RunOptions(tmp_path, ("joint",), 0, **given), known=TASKS)


def test_its_folder_is_no_task_and_a_finished_one_is_an_error(finished, train_joint, tmp_path):
    with pytest.raises(ValueError, match="task 'joint' is named like a folder of every run"):
        check_run(DIGITS.methods["ft"], TWO, RunOptions(tmp_path, ("joint",), 0), known=("joint",))
    run = RunOptions(finished, ("joint",), 21, joint=TASKS)
    with pytest.raises(ValueError, match=re.escape(f"{finished / 'joint'} exists, trained with these settings: pass")):
        check_run(DIGITS.methods["ft"], replace(TWO, steps=6), run, known=TASKS)
    with pytest.raises(ValueError, match=r"trained with other settings \(training.steps was 24, is 8\)"):
        check_run(DIGITS.methods["ft"], TWO, run, known=TASKS)
    with pytest.raises(ValueError, match="flag --joint: a sweep trains experts"):
        sweep.jobs(sweep.Sweep(tmp_path, flags="--joint"), script=("train.py",))
