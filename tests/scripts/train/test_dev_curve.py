"""Dev scores while training: the best state is the expert, patience ends it, a resumed run is the same."""

import json
from dataclasses import replace

import pytest
import torch

from smat_fn import checkpoint
from smat_fn.checkpoint import same
from smat_fn.config import Adapters, Dev, Finetune, Talos, Training
from smat_fn.parallel import ALONE
from smat_fn.scripts.train.dev_curve import DevCurve
from smat_fn.scripts.train.logs import Log
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.options import RunOptions, check_run
from smat_fn.scripts.train.resuming import Interrupted, Stop

SIX = Training(steps=6, lr=5e-4)


@pytest.mark.parametrize(
    ("by", "values", "kept", "length"),
    [("score", [1, 3, 3, 2, 9], 3, 4), ("loss", [3, 1, 1, 2, 0], 1, 4), ("score", [1, 2, 3, 4, 5], 5, 5)],
)
def test_the_earliest_best_is_kept_and_patience_counts_from_it(by, values, kept, length):
    told = iter(values)
    curve = DevCurve(lambda params: next(told), Dev(2, by, patience=2))
    params = {"w": torch.zeros(1)}
    for number in range(len(values)):
        if curve.ended():
            break
        params["w"].fill_(number)  # as a method that donates its buffers does
        curve.add(2 * number + 2, params, ALONE)
    assert len(curve.points) == length
    assert curve.facts()["best"] == kept
    assert curve.best["w"].item() == values.index(kept)
    assert curve.facts()["step"] == 2 * values.index(kept) + 2
    assert [curve.due(step, 5) for step in range(1, 6)] == [False, True, False, True, True]
    held = DevCurve(lambda params: 0.0, Dev(2, by), held=3)
    assert [held.due(step, 5) for step in range(1, 6)] == [False, False, False, True, True]


def scored(suite, values):
    """The suite with other dev scores, and the parameters that were scored."""
    told, seen = iter(values), []

    def score(params, task, split):
        assert split == "dev"
        seen.append({path: leaf.clone() for path, leaf in params.items()})
        return next(told)

    return suite.replace(score=score), seen


def test_the_expert_is_the_best_state_and_the_manifest_has_the_curve(suite, train, tmp_path):
    own, seen = scored(suite, [50.0, 70.0, 60.0])
    told = []
    train(tmp_path, "ft", suite=own, tasks=("rot90",), training=replace(SIX, dev=Dev(2)), report=told.append)
    manifest = checkpoint.load_manifest(tmp_path / "rot90")
    assert same(checkpoint.load_leaves(tmp_path / "rot90")[0], seen[1])
    assert not same(seen[1], seen[2])
    assert manifest["evaluations"] == {
        "by": "score",
        "curve": [[2, 50.0], [4, 70.0], [6, 60.0]],
        "step": 4,
        "best": 70.0,
    }
    assert manifest["training"]["dev"] == {"every": 2, "by": "score", "patience": None}
    assert "rot90: dev score 70 after 4 of 6 steps is the best of 3, and is kept" in told
    rows = [json.loads(line) for line in (tmp_path / "rot90.log.jsonl").read_text().splitlines()]
    assert [(row["step"], row["dev_score"]) for row in rows if "dev_score" in row] == [(1, 50.0), (3, 70.0), (5, 60.0)]
    plain = train_expert(suite, "rot90", Finetune(), SIX, seed=21)
    assert same(plain, seen[2]), "evaluations change no step"


def test_nothing_is_evaluated_before_talos_moves_a_parameter(suite, train, tmp_path):
    own, seen = scored(suite, [50.0, 70.0])
    talos, training = Talos(sparsity=0.5, rounds=2, calibration=3), replace(SIX, dev=Dev(2, patience=1))
    train(tmp_path, method=talos, suite=own, tasks=("rot90",), training=training)
    assert [step for step, _ in checkpoint.load_manifest(tmp_path / "rot90")["evaluations"]["curve"]] == [4, 6]
    assert not same(seen[0], suite.base)
    with pytest.raises(ValueError, match=r"talos moves no parameter in its first 6 steps, and rot90 .6 steps. have no"):
        train(tmp_path / "six", method=replace(talos, calibration=6), tasks=("rot90",), training=SIX)
    assert [Talos().held, Talos(sparsity=0.0).held, Talos(calibration=7).held] == [20, 0, 7]


def test_patience_ends_training(suite, train, tmp_path):
    own, seen = scored(suite, [50.0, 40.0])
    told = []
    training = replace(SIX, dev=Dev(2, patience=1))
    train(tmp_path, "ft", suite=own, tasks=("rot90",), training=training, report=told.append, log_every=5)
    assert same(checkpoint.load_leaves(tmp_path / "rot90")[0], seen[0])
    assert any("after 2 of 4 steps (of 6) is the best of 2" in line for line in told)
    last = json.loads((tmp_path / "rot90.log.jsonl").read_text().splitlines()[-1])
    assert (last["step"], "seconds" in last) == (3, True)


@pytest.mark.parametrize(
    "lora", [pytest.param(None, marks=pytest.mark.slow), Adapters(2, 4.0, dropout=0.3)], ids=["weights", "adapters"]
)
def test_a_resumed_run_keeps_the_curve_and_the_best_state(suite, train, tmp_path, monkeypatch, lora):
    training, stop = replace(SIX, lora=lora, dev=Dev(2, by="loss")), Stop()
    train(tmp_path / "whole", tasks=("rot90",), training=training)
    original = Log.note

    def ends(self, step, **facts):
        original(self, step, **facts)
        stop.signal = 15 if step == 1 else None

    monkeypatch.setattr(Log, "note", ends)
    with pytest.raises(Interrupted):
        train(tmp_path / "cut", tasks=("rot90",), training=training, stop=stop)
    monkeypatch.undo()
    train(tmp_path / "cut", tasks=("rot90",), training=training, resume=True)
    whole, cut = (checkpoint.load_manifest(tmp_path / name / "rot90") for name in ("whole", "cut"))
    assert whole["evaluations"] == cut["evaluations"]
    assert [step for step, _ in cut["evaluations"]["curve"]] == [2, 4, 6]
    assert whole["fingerprint"] == cut["fingerprint"]


def test_a_value_that_is_not_finite_ends_training_and_says_when(suite, train, tmp_path):
    own, _ = scored(suite, [50.0, float("nan")])
    with pytest.raises(ValueError, match="the dev score is nan after 4 steps: check the weights"):
        train(tmp_path / "run", "ft", suite=own, tasks=("rot90",), training=replace(SIX, dev=Dev(2)))
    assert not (tmp_path / "run" / "rot90").exists()


def test_before_an_average_begins_the_weights_of_then_are_evaluated(suite, train, tmp_path):
    own, seen = scored(suite, [50.0, 40.0, 30.0])
    train(tmp_path, "ft", suite=own, tasks=("rot90",), training=replace(SIX, dev=Dev(2), average="swa:50%"))
    plain, alone = scored(suite, [50.0, 40.0, 30.0])
    train(tmp_path / "plain", "ft", suite=plain, tasks=("rot90",), training=replace(SIX, dev=Dev(2)))
    assert [same(one, other) for one, other in zip(seen, alone, strict=True)] == [True, True, False]
    assert not same(seen[0], suite.base)


def test_bad_numbers_and_a_suite_without_dev_batches_are_told(suite, train, tmp_path):
    run = RunOptions(tmp_path, ("rot90",), 1)
    with pytest.raises(ValueError, match="eval_every is 0, must be at least 1; patience is 0"):
        check_run(Finetune(), replace(SIX, dev=Dev(0, patience=0)), run, known=suite.tasks)
    own = suite.replace(dev_batches=None)
    with pytest.raises(ValueError, match="no batches of its dev split: evaluate by score"):
        train(tmp_path / "run", "ft", suite=own, tasks=("rot90",), training=replace(SIX, dev=Dev(2, by="loss")))
