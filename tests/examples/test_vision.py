"""The paper's vision experiment from its script, on a tiny model and a few images."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from smat_fn import checkpoint
from smat_fn.evaluate import read_results

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data/vision"
TASKS = ("MNIST", "shapes")
NAMES = ("dark", "light")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folders of a model and of images."""
    root = tmp_path_factory.mktemp("inputs")
    for task in TASKS:
        (root / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            labels = np.arange(12) % 2
            images = (
                np.random.default_rng(len(split)).integers(0, 100, (12, 8, 8, 3)) + 155 * labels[:, None, None, None]
            )
            arrays = {"images": images.astype(np.uint8), "labels": labels, "class_names": np.array(NAMES)}
            np.savez(root / "rows" / task / f"{split}.npz", **arrays)
    example = runpy.run_path(str(ROOT / "examples/clip_tiny.py"))
    texts = [text for task in TASKS for own in example["task_prompts"](root / "rows", task) for text in own]
    example["write_model"](root / "model", texts, width=16, layers=1, image=8, patch=4, seed=0)
    return root


@pytest.mark.slow
def test_clip_main_trains_merges_and_tabulates(inputs, run, tmp_path):
    printed = run(
        "examples/clip_main.sh",
        **{"MODEL": inputs / "model", "DATA": inputs / "rows", "OUT": tmp_path, "STEPS": 4, "ROWS": 6, "SEEDS": 0},
        **{"METHODS": "smat", "TASKS": "shapes", "MORE": "--suite-options device cpu templates {}!"},
    )
    run_folder, lines = tmp_path / "seed0" / "smat", printed.splitlines()
    assert lines[0] == "smat on clip8: learning rate 1e-05 (preset clip-vit-b32), 4 steps, seed 0"
    assert f"expert: {run_folder / 'shapes'}" in lines
    manifest = checkpoint.load_manifest(run_folder / "shapes")
    assert manifest["hyperparameters"] == {
        "alpha_min": 0.1, "drop_prob": 0.5, "sigma": 1e-3, "period": 4, "noise": "uniform",
    }  # fmt: skip
    recipe = manifest["suite"]
    assert (recipe["model"], recipe["data"]) == (str(inputs / "model"), str(inputs / "rows"))
    assert (recipe["batch_size"], recipe["rows"], recipe["templates"]["shapes"]) == (128, 6, ["{}!"])
    log = [json.loads(line) for line in (run_folder / "shapes.log.jsonl").read_text().splitlines()]
    assert [row["simulated"] for row in log] == [False, False, False, True]
    # DELLA as the preset of images has it
    assert checkpoint.load_manifest(run_folder / "merged" / "della")["hyperparameters"]["drop_prob"] == 0.1
    assert len(read_results(tmp_path / "results.jsonl")) == 1 + 5
    assert lines[-2].startswith("mean over five mergers: SMAT ")
    assert lines[-1] == f"report: {tmp_path / './report/report.html'}"


@pytest.mark.slow
def test_clip_main_takes_another_image_model_as_it_takes_a_clip(inputs, run, tmp_path):
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes)).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    run(
        "examples/clip_main.sh",
        **{"MODEL": tmp_path / "vit", "DATA": inputs / "rows", "OUT": tmp_path / "out", "STEPS": 4, "SEEDS": 0},
        **{"METHODS": "ft smat", "MORE": "--suite-options device cpu"},
    )
    leaves, manifest = checkpoint.load_leaves(tmp_path / "out/seed0/smat/MNIST")
    assert not any("classifier" in name for name in leaves)
    assert manifest["suite"]["templates"] == {}
    rows = read_results(tmp_path / "out" / "results.jsonl")
    assert len(rows) == 2 * (2 + 5 * 2)
    # heads of a few rows tell classes apart that brightness does
    assert all(row.score > 90 for row in rows if row.model.startswith("expert:"))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["own", pytest.param("real", marks=[pytest.mark.skipif(
    not DATA.is_dir(), reason="no ../shared")])])  # fmt: skip
def test_the_tiny_example_lowers_the_loss_on_its_rows(source, inputs, run, tmp_path):
    data, tasks = (inputs / "rows", TASKS[1:]) if source == "own" else (DATA, ("MNIST", "EuroSAT"))
    short = ("--tasks", *tasks, "--pretrain-steps", "1" if source == "own" else "6", "--steps", "8", "--rows", "24")
    printed = run("examples/clip_tiny.py", "--data", data, "--out", tmp_path, *short)
    losses = re.findall(r"loss on its rows (\d\.\d+) -> (\d\.\d+) in", printed)
    assert len(losses) == 2 * len(tasks)
    assert all(float(after) < float(before) for before, after in losses)
    assert "| SMAT |" in printed
    assert "mean over five mergers: FT " in printed
