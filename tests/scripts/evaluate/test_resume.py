"""An evaluation that was ended goes on where it stopped, with the rows it would have had; nothing is mixed."""

import json
import math
import os
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smat_fn import checkpoint
from smat_fn.config import TaskArithmetic, preset_of
from smat_fn.evaluate import read_results
from smat_fn.evaluate.decoding import generator
from smat_fn.scripts.analyse.predictions import Disentanglement, disentanglement
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite

ROOT = Path(__file__).parents[3]
TASKS = {"FOMC": 1, "MeetingBank": 3}  # decodes
ROWS = 7
EXAMPLE = runpy.run_path(str(ROOT / "examples/trace_tiny.py"))
WORDS = ["the", "council", "voted", "to", "keep", "the", "plan", "as", "it", "is", "and", "nothing", "more"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A tiny model, rows of a greedy and of a sampled task, two experts and a merged model of them."""
    root = tmp_path_factory.mktemp("world")
    for task in TASKS:
        (root / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "eval"):
            rows = [
                {"prompt": f"{split} {i}: {' '.join(WORDS[i:])}", "answer": f"{'ABCD'[i % 4]} {WORDS[i].upper()}"}
                for i in range(ROWS)
            ]
            (root / "rows" / task / f"{split}.json").write_text(json.dumps(rows))
    EXAMPLE["write_model"](
        root / "model", EXAMPLE["row_texts"](root / "rows", TASKS), vocabulary=300, width=16, layers=1
    )
    given = {"model": str(root / "model"), "data": str(root / "rows"), "device": "cpu", "max_new_tokens": 4}
    suite, preset = load_suite("trace", seed=3, **given), preset_of("llama-3.2-1b")
    training = replace(preset.training, steps=2, epochs={}, lr=1e-2)
    train_run(suite, preset.methods["ft"], training, RunOptions(root / "run", suite.tasks, 3))
    merge_run(Request([TaskArithmetic(0.5)], *find_inputs(root / "run"), out=root / "run/merged", search=False, seed=0))
    return root


class Counting:
    """The built-in engine, that counts the rows it answers, and is ended after some batches."""

    def __repr__(self):
        return "counting"

    def __init__(self):
        self.rows, self.batches, self.stop = 0, 0, None

    def __call__(self, model, tokenizer, params, *, batch_size):
        inner = generator(model, tokenizer, params, batch_size=batch_size)

        def generate(prompts, settings, seed, *, repeat=0, rows=None):
            if self.batches == self.stop:
                raise KeyboardInterrupt
            self.batches += 1
            self.rows += len(prompts)
            return inner(prompts, settings, seed, repeat=repeat, rows=rows)

        return generate


def score(world, keep, *, stop=None, folders=("run/FOMC", "run/MeetingBank", "run/merged/ta"), **options):
    """(rows of the report, rows that were decoded)."""
    engine = Counting()
    engine.stop = stop
    given = {"device": "cpu", "decode_batch": 3, "engine": engine, **options}
    rows = evaluate([world / folder for folder in folders], options=given, keep=keep)
    return rows, engine.rows


ALL = ROWS * (1 + 3 + 4)  # an expert each on its own task, the merged model on both


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    rows, decoded = score(world, folder)
    assert decoded == ALL
    return rows, (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("stop", [0, 4, 23, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (1, 10))])
def test_an_evaluation_that_was_ended_goes_on_to_the_same_rows(world, whole, tmp_path, stop):
    with pytest.raises(KeyboardInterrupt):
        score(world, tmp_path, stop=stop)
    # 7 rows of a decode are batches of 3, 3 and 1
    done = 7 * (stop // 3) + 3 * (stop % 3)
    answers = tmp_path / "answers.jsonl"
    assert (len(answers.read_text(encoding="utf-8").splitlines()) if stop else 0) == done
    rows, decoded = score(world, tmp_path)
    assert decoded == ALL - done
    assert rows == whole[0]
    assert answers.read_text(encoding="utf-8").splitlines() == whole[1]
    assert score(world, tmp_path) == (rows, 0)


def test_a_line_that_was_broken_off_costs_its_batch_alone(world, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        score(world, tmp_path, stop=5)
    answers = tmp_path / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-9])
    rows, decoded = score(world, tmp_path)
    assert rows == whole[0]
    assert decoded == ALL - 10


def test_answers_stand_there_to_be_read(world, whole):
    lines = [json.loads(line) for line in whole[1]]
    assert len(lines) == ALL
    expert = checkpoint.load_manifest(world / "run/FOMC")["fingerprint"]
    (mine,) = [line for line in lines if line["name"] == "FT expert:FOMC, seed 3" and line["row"] == 2]
    assert mine["model"] == {"fingerprint": expert}
    assert (mine["task"], mine["split"], mine["repeat"], mine["reference"]) == ("FOMC", "test", 0, "C VOTED")
    merged = {(line["task"], line["repeat"], line["row"]) for line in lines if line["name"] == "FT ta, seed 3"}
    assert merged == {(task, r, row) for task, repeats in TASKS.items() for r in range(repeats) for row in range(ROWS)}


def named_anew(manifest, params):
    return {**manifest, "fingerprint": checkpoint.fingerprint(params), "files": {}}


def test_a_language_model_is_decoded_on_other_tasks_too(world, tmp_path):
    engine = Counting()
    given = {"device": "cpu", "decode_batch": 3, "engine": engine}
    rows = evaluate([world / "run/FOMC"], options=given, keep=tmp_path, other_tasks=())
    names = [("expert:FOMC", "FOMC"), ("other:expert:FOMC", "MeetingBank")]
    assert [(row.model, row.task) for row in rows] == names
    assert engine.rows == ROWS * (1 + 3)


def test_disentanglement_takes_no_language_models(world):
    options = Disentanglement(runs=(world / "run",), suite_options={"device": "cpu"})
    with pytest.raises(
        ValueError, match="run is of suite 'trace', whose models predict no classes: give runs of digits"
    ):
        disentanglement(options)


def test_another_checkpoint_recipe_or_data_is_scored_anew(world, whole, tmp_path):
    one = ("run/FOMC",)
    assert score(world, tmp_path, folders=one)[1] == ROWS
    assert score(world, tmp_path, folders=one)[1] == 0
    assert score(world, tmp_path, folders=one, decode_batch=2)[1] == 0
    assert score(world, tmp_path, folders=one, max_new_tokens=3)[1] == ROWS
    # the same path, other rows: one reference more
    rows = json.loads((world / "rows/FOMC/eval.json").read_text())
    (world / "rows/FOMC/eval.json").write_text(json.dumps([*rows[:-1], rows[-1] | {"answer": "other"}]))
    try:
        assert score(world, tmp_path, folders=one)[1] == ROWS
    finally:
        (world / "rows/FOMC/eval.json").write_text(json.dumps(rows))
    # the same manifest but for the fingerprint, other weights
    params, manifest = checkpoint.load_leaves(world / "run/FOMC")
    moved = {path: leaf + 0.5 for path, leaf in params.items()}
    checkpoint.save_expert(tmp_path / "moved", moved, named_anew(manifest, moved))
    assert score(world, tmp_path, folders=[tmp_path / "moved"])[1] == ROWS
    assert score(world, tmp_path, folders=one)[1] == 0


def test_another_tokenizer_or_engine_is_not_taken_for_this_one(world, tmp_path):
    suites = [
        load_suite("trace", seed=3, model=str(world / "model"), data=str(world / "rows"), device="cpu", **options)
        for options in ({}, {"engine": Counting()}, {"max_new_tokens": 3})
    ]
    assert len({suite.content("FOMC", "test") for suite in suites}) == 3
    assert (
        suites[0].content("FOMC", "dev")
        != suites[0].content("FOMC", "test")
        != suites[0].content("MeetingBank", "test")
    )
    tokenizer = world / "model/tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    values = json.loads(text)
    values["model"]["merges"] = values["model"]["merges"][:-1]
    try:
        tokenizer.write_text(json.dumps(values), encoding="utf-8")
        given = {"model": str(world / "model"), "data": str(world / "rows"), "device": "cpu"}
        assert load_suite("trace", seed=3, **given).content("FOMC", "test") != suites[0].content("FOMC", "test")
    finally:
        tokenizer.write_text(text, encoding="utf-8")


def test_weights_that_are_not_finite_are_told_before_they_are_scored(world, tmp_path):
    params, manifest = checkpoint.load_leaves(world / "run/FOMC")
    params["model.norm.weight"][0] = math.nan
    checkpoint.save_expert(tmp_path / "nan", params, named_anew(manifest, params))
    with pytest.raises(ValueError, match=r"parameter 'model\.norm\.weight' of .*nan holds 1 values? that"):
        score(world, tmp_path, folders=[tmp_path / "nan"])


def test_a_split_without_rows_is_told_before_the_model_is_loaded(world, tmp_path, monkeypatch):
    from smat_fn.models import causal_lm

    monkeypatch.setattr(causal_lm, "load", lambda *a, **k: pytest.fail("the model is not needed"))
    for split in ("train", "dev", "eval"):
        (tmp_path / "FOMC").mkdir(exist_ok=True)
        (tmp_path / "FOMC" / f"{split}.json").write_text("[]")
    with pytest.raises(
        ValueError, match=r"train\.json: there are no rows.*dev\.json: there are.*eval\.json: there are"
    ):
        load_suite("trace", seed=0, model=str(world / "model"), data=str(tmp_path))


@pytest.mark.slow
def test_a_killed_process_is_continued_by_the_same_command(world, whole, tmp_path):
    command = [sys.executable, "-W", "error", ROOT / "eval.py", world / "run", "--out", tmp_path / "out"]
    command += ["--suite-options", "device", "cpu", "decode_batch", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    answers = tmp_path / "out" / "answers.jsonl"
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (answers.exists() and answers.stat().st_size > 500):
        time.sleep(0.01)
    process.kill()
    assert process.wait() < 0, "the process ended before it was killed"
    kept = answers.read_text(encoding="utf-8").splitlines()
    assert 0 < len(kept) < ALL
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=True)
    assert "scores:" not in done.stderr
    assert read_results(tmp_path / "out" / "results.jsonl") == whole[0]
    assert answers.read_text(encoding="utf-8").splitlines()[: len(kept) - 1] == kept[:-1]
