"""The paper's language experiments from their scripts, on a tiny model and a few rows: everything but the size."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint
from smat_fn.config import PRESETS
from smat_fn.evaluate import read_results

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data/trace"
TASKS = ("FOMC", "MeetingBank")  # greedy; sampled
MERGERS = ("wa", "ta", "ties", "dare", "della")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folders of a model and of rows that it learns in a few steps."""
    root = tmp_path_factory.mktemp("inputs")
    for task in TASKS:
        (root / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "eval"):
            rows = [{"prompt": f"is it {letter}", "answer": "A"} for letter in "abcd"]
            (root / "rows" / task / f"{split}.json").write_text(json.dumps(rows))
    example = runpy.run_path(str(ROOT / "examples/trace_tiny.py"))
    example["write_model"](root / "model", example["row_texts"](root / "rows", TASKS), width=16, layers=1)
    return root


@pytest.fixture(scope="module")
def experiment(inputs, run):
    """``experiment(script, **variables)``: what it prints; what one has trained the next finds."""

    def call(script, **variables):
        given = {"MODEL": inputs / "model", "DATA": inputs / "rows", "OUT": inputs / "out"}
        short = {"STEPS": 24, "ROWS": 2, "SEEDS": "0", "METHODS": "ft smat"}
        more = "--lr 0.02 --suite-options max_new_tokens 2 dtype float32 device cpu"
        return run(f"examples/{script}", **given | short | {"MORE": more} | variables).splitlines()

    return call


def manifest(folder):
    return checkpoint.load_manifest(folder)


@pytest.mark.slow
def test_llama_main_trains_merges_and_tabulates(experiment, inputs):
    out = inputs / "out"
    # what the preset says holds where nothing else is given
    lines = experiment("llama_main.sh", METHODS="smat", STEPS="4", MORE="--suite-options max_new_tokens 2 device cpu",
                       OUT=out / "preset")  # fmt: skip
    run = out / "preset" / "seed0" / "smat"
    rounded = "float32 weights rounded to bfloat16 (--precision fp32 keeps them)"
    notes = [line for line in lines if line.startswith("note: ")]
    assert (
        sum(line.startswith("note: 2 of the 2 dev rows and 2 of ") for line in notes) == 6
    )  # of both tasks, by three commands
    headline = next(line for line in lines if line not in notes)
    assert headline == f"smat on trace: learning rate 2e-05 (preset llama-3.2-1b), 4 steps, {rounded}, seed 0"
    assert [line for line in lines if line.startswith("expert: ")] == [f"expert: {run / task}" for task in TASKS]
    own, preset = manifest(run / "MeetingBank"), PRESETS["llama-3.2-1b"]
    assert own["hyperparameters"] == {
        "alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3, "period": 4, "noise": "uniform",
    }  # fmt: skip
    recipe = own["suite"]
    assert (recipe["model"], recipe["data"]) == (str(inputs / "model"), str(inputs / "rows"))
    assert (recipe["tasks"], recipe["rows"], recipe["max_length"]) == (list(TASKS), 2, 512)
    assert recipe["dtype"] == preset.options["dtype"] == "bfloat16"
    assert "device" not in recipe
    log = [json.loads(line) for line in (run / "FOMC.log.jsonl").read_text().splitlines()]
    assert [row["simulated"] for row in log] == [False, False, False, True]
    for name in MERGERS:
        merged = manifest(run / "merged" / name)
        assert list(merged["dev"]) == list(TASKS)
        assert len(merged.get("dev_finals", ())) == (0 if name == "wa" else 2)
    rows = read_results(out / "preset" / "results.jsonl")
    assert len(rows) == 2 + 5 * 2
    assert lines[-2].startswith("mean over five mergers: SMAT ")
    assert lines[-1] == f"report: {out / 'preset/./report/report.html'}"
    assert "**SMAT** has no reference here" in (out / "preset/report/report.md").read_text(encoding="utf-8")
    assert (out / "preset" / "merging.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "preset" / "table.md").exists()


@pytest.mark.slow
def test_llama_main_has_all_methods_by_itself_and_goes_on_where_it_stopped(experiment, inputs):
    out = inputs / "all"
    few = {"OUT": out, "TASKS": "FOMC", "STEPS": "1"}
    experiment("llama_main.sh", METHODS="", **few)
    table = (out / "table.md").read_text(encoding="utf-8")
    methods = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][2:]
    assert methods == ["FT", "ASAM", "MERGOPT", "ORTHOREG", "SMAT"]
    again = experiment("llama_main.sh", METHODS="ft", **few)
    assert "FOMC: already finished" in again
    assert not any(line.startswith("merged: ") for line in again)


@pytest.mark.slow
def test_ablations_have_the_parts_that_they_name(experiment, inputs):
    experiment("ablations.sh", TASKS="FOMC", STEPS="1", OUT=inputs / "parts")
    settings = {
        label: manifest(inputs / "parts" / "seed0" / label / "FOMC")["hyperparameters"]
        for label in ("smat", "smat-no-scale", "smat-no-mask", "smat-no-perturb")
    }
    whole = settings.pop("smat")
    assert list(settings.values()) == [whole | part for part in ({"alpha_min": 1}, {"drop_prob": 0}, {"sigma": 0})]
    for merger in ("wa", "ta", "ties", "dare", "della"):
        own, full = (
            manifest(inputs / "parts" / "seed0" / run / "merged" / merger)["hyperparameters"]
            for run in ("smat-no-mask", "smat")
        )
        assert own.get("coef") == full.get("coef")
        assert ("coef" in own) == (merger != "wa")
    text = (inputs / "parts" / "ablations" / "report" / "report.md").read_text(encoding="utf-8")
    assert "SMAT without Perturb" in text


@pytest.mark.slow
def test_muon_trains_its_matrices_and_the_other_leaves_each_at_their_rate(experiment, inputs):
    experiment("muon.sh", METHODS="smat", TASKS="FOMC", STEPS="1", MORE="--suite-options max_new_tokens 2 device cpu",
               OUT=inputs / "muon")  # fmt: skip
    training = manifest(inputs / "muon" / "seed0" / "muon-smat" / "FOMC")["training"]
    assert (training["optimizer"], training["lr"], training["muon_lr"]) == ("muon", 2e-5, 4e-4)
    assert (inputs / "muon" / "muon" / "report" / "report.html").exists()


@pytest.mark.slow
def test_the_noise_curve_has_a_point_for_each_kind_and_size(experiment, inputs):
    out = inputs / "noise"
    experiment("noise_curve.sh", SIGMAS="0.01", NOISES="uniform laplace", TASKS="FOMC", STEPS="4", OUT=out)
    own = manifest(out / "seed0" / "perturb-laplace-0.01" / "FOMC")["hyperparameters"]
    assert own == {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.01, "period": 4, "noise": "laplace"}
    text = (out / "noise" / "report" / "report.md").read_text(encoding="utf-8")
    assert "| laplace | 0.01 |" in text
    assert "| uniform | 0.01 |" in text


@pytest.mark.slow
def test_the_analyses_take_the_runs_that_stand(experiment, inputs):
    out = inputs / "out"
    experiment("experts_curve.sh")
    curve = json.loads((out / "experts-curve" / "experts-curve.json").read_text())
    assert {(row["method"], row["experts"]) for row in curve["rows"]} == {("FT", 2), ("SMAT", 2)}
    gains = json.loads((out / "experts-curve" / "gains.json").read_text())
    assert all(row["expert"] > 0 for row in gains["rows"])
    lines = experiment("replacement.sh", METHODS="smat", COEF="0.4")
    assert lines.count("FOMC: already finished") == 2
    rows = json.loads((out / "replacement" / "replacement.json").read_text())["rows"]
    assert {row["experts"] for row in rows} == {0, 1, 2}
    lines = experiment("landscape.sh", METHODS="smat", LANDSCAPE="--points 2 --batches 1 --tasks FOMC")
    assert lines.count("FOMC: already finished") == 2
    landscape = json.loads((out / "landscape" / "landscape.json").read_text())
    assert {row["method"] for row in landscape["rows"]} == {"FT", "SMAT"}
    assert json.loads((out / "landscape" / "diagnose.json").read_text())["rows"]


@pytest.mark.slow
def test_scores_do_not_depend_on_how_many_rows_are_decoded_together(experiment, inputs, run, tmp_path):
    out = inputs / "out"
    experiment("llama_main.sh", METHODS="ft")
    options = ("--suite-options", "decode_batch", "1", "device", "cpu")
    run("eval.py", out / "seed0/ft/MeetingBank", "--out", tmp_path, *options)
    (again,) = read_results(tmp_path / "results.jsonl")
    assert again in read_results(out / "results.jsonl")


@pytest.mark.slow
def test_llama_main_takes_an_encoder_decoder_as_it_takes_other_models(experiment, inputs):
    from transformers import T5Config, T5ForConditionalGeneration

    (inputs / "t5").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(inputs / "model" / file, inputs / "t5")
    size = json.loads((inputs / "model" / "config.json").read_text())["vocab_size"]
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": size}
    ids = {"pad_token_id": 2, "eos_token_id": 1, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(**sizes, **ids)).save_pretrained(inputs / "t5")
    out = inputs / "pairs"
    lines = experiment("llama_main.sh", MODEL=inputs / "t5", OUT=out)
    headline = next(line for line in lines if not line.startswith("note: "))
    assert headline.startswith("ft on trace: learning rate 0.02 (given), 24 steps")
    for method in ("ft", "smat"):
        log = [json.loads(line) for line in (out / f"seed0/{method}/FOMC.log.jsonl").read_text().splitlines()]
        losses = [row["loss"] for row in log]
        assert sum(losses[16:]) < 0.5 * sum(losses[:8])
        assert [row["simulated"] for row in log[:8]] == [method == "smat" and step % 4 == 3 for step in range(8)]
    rows = read_results(out / "results.jsonl")
    assert len(rows) == 2 * (2 + 5 * 2)
    assert sum(row.score for row in rows if row.model.startswith("expert:")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["own", pytest.param("real", marks=pytest.mark.skipif(
    not DATA.is_dir(), reason="no ../shared"))])  # fmt: skip
def test_the_tiny_example_lowers_the_loss_on_its_rows(source, inputs, run, tmp_path):
    data, tasks = (inputs / "rows", TASKS) if source == "own" else (DATA, ("C-STANCE",))
    short = ("--tasks", *tasks, "--steps", "6", "--rows", "8", "--new-tokens", "4")
    printed = run("examples/trace_tiny.py", "--data", data, "--out", tmp_path, *short)
    losses = re.findall(r"loss on its rows (\d\.\d+) -> (\d\.\d+) in", printed)
    assert len(losses) == 2 * len(tasks)
    assert all(float(after) < float(before) for before, after in losses)
    assert "| SMAT |" in printed
    assert "mean over five mergers: FT " in printed


def test_every_script_is_run_here_or_with_images_and_says_how():
    files = [
        Path(__file__).parent / f"test_{name}.py"
        for name in ("language", "minimal", "other_trainers", "search_weights", "vision")
    ]
    files.append(ROOT / "tests/transforms/test_methods.py")  # of experts trained as one batched program
    sources = [file.read_text(encoding="utf-8") for file in files]
    elsewhere = {
        "common.sh",
        "vllm_engine.py",  # a module for eval.py: tests/docs/test_serving.py
    }
    for path in sorted((ROOT / "examples").iterdir()):
        if path.name in elsewhere or path.is_dir():  # recipes for other programs: tests/examples/test_other_trainers.py
            continue
        assert any(f'{path.name}"' in source for source in sources), path.name
        command = "bash" if path.suffix == ".sh" else "python"
        assert f"{command} examples/{path.name}" in path.read_text(encoding="utf-8")
