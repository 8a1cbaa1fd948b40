"""The vision experiment as a user runs it, on a tiny model and images that the tests write themselves."""

import json
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from smat_fn import checkpoint
from smat_fn.suites import load_suite

ROOT = Path(__file__).parents[2]
TASKS = ("MNIST", "shapes")
NAMES = ("dark", "light")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folders of a model and of images."""
    root = tmp_path_factory.mktemp("inputs")
    for task in TASKS:
        (root / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "test"):
            images = np.random.default_rng(len(split)).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
            labels = (images.mean((1, 2, 3)) > 127).astype(np.int64)
            np.savez(root / "rows" / task / f"{split}.npz", images=images, labels=labels, class_names=np.array(NAMES))
    example = runpy.run_path(str(ROOT / "examples/clip_tiny.py"))
    texts = [text for task in TASKS for own in example["task_prompts"](root / "rows", task) for text in own]
    example["write_model"](root / "model", texts, width=16, layers=1, image=8, patch=4, seed=0)
    return root


def test_a_dry_run_prints_what_would_be_trained_and_writes_nothing(inputs, exits, tmp_path, capsys):
    words = ("--preset", "clip-vit-l14", "--model", inputs / "model", "--data", inputs / "rows")
    assert exits("train.py", "smat", *words, "--out", tmp_path / "out", "--dry-run") is None
    told = capsys.readouterr().out
    for part in (
        f"model {inputs / 'model'}", "batch_size 128", "dtype float32",
        "method smat: alpha_min 0.1, drop_prob 0.5, sigma 0.001, period 4, noise uniform",
        "lr 1e-05, optimizer adam, schedule cosine, weight_decay 0.0", "run seed 0",
        "encoder.layers.0.mlp.fc1.weight", "in 6 tensors", "MNIST: 4000 steps", "8000 steps in all",
    ):  # fmt: skip
        assert part in told
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_told_in_one_line_before_training(inputs, exits, tmp_path):
    def refused(*words, model=inputs / "model", data=inputs / "rows"):
        out = ("--out", tmp_path / "out", "--preset", "clip-vit-b32", "--model", model, "--data", data)
        text = exits("train.py", "ft", *out, *words)
        assert text.startswith("train.py:")
        assert all(line.startswith("  ") for line in text.split("\n")[1:])
        return text

    assert "there is no folder" in refused(model=tmp_path / "model")
    assert "task 'SVHN' is unknown" in refused("--tasks", "SVHN")
    assert "'a photo' is not a prompt with {} for the class" in refused("--suite-options", "templates", "a photo")
    (tmp_path / "rows" / "mine").mkdir(parents=True)
    np.savez(tmp_path / "rows" / "mine" / "train.npz", images=np.zeros((2, 8, 8), np.uint8), labels=np.zeros(1))
    text = refused(data=tmp_path / "rows")
    assert "lacks ['class_names']" in text
    assert not (tmp_path / "out").exists()


def test_tasks_that_are_named_are_the_configs_of_a_dataset_of_the_hub(inputs, exits, tmp_path, monkeypatch, capsys):
    import datasets

    def load_dataset(source, name, split):
        if name not in ("cats", "dogs"):
            raise ValueError(f"BuilderConfig '{name}' not found. Available: ['cats', 'dogs']")
        images = [Image.fromarray(np.full((8, 8, 3), 99 * i + len(split), np.uint8)) for i in range(2)]
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
        return datasets.Dataset.from_dict({"image": images, "label": [0, 1]}, features=kinds)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    words = ("--preset", "images", "--model", inputs / "model", "--data", "some/pets", "--out", tmp_path, "--dry-run")
    assert "Available: ['cats', 'dogs']): name its own by --tasks, go online" in exits("train.py", "ft", *words)
    capsys.readouterr()
    assert exits("train.py", "mergopt", *words, "--tasks", "dogs", "cats") is None
    told = capsys.readouterr().out
    assert "dogs: 10 steps" in told
    assert "k_max 2" in told
    assert "'SVHN'" in exits("train.py", "ft", *words, "--tasks", "cats", "--suite-options", "tasks", "SVHN")


def test_a_merged_tower_is_exported_as_the_whole_model(inputs, exits, tmp_path, capsys):
    from transformers import CLIPModel

    words = ("--preset", "clip-vit-b32", "--model", inputs / "model", "--data", inputs / "rows", "--steps", "2")
    run = tmp_path / "run"
    assert exits("train.py", "ft", *words, "--out", run, "--lr", "0.01", "--suite-options", "device", "cpu") is None
    assert exits("merge.py", "ta", "--run", run, "--coef", "0.4", "--out", run / "merged") is None
    merged = run / "merged/ta"
    out = ("--base", inputs / "model", "--out", tmp_path / "whole")
    assert exits("merge.py", "export", merged, *out, "--shard-size", "20KB") is None
    assert "kB, bit for bit\nnote: expert 'ta' lacks " in capsys.readouterr().out
    whole = dict(CLIPModel.from_pretrained(tmp_path / "whole").named_parameters())
    base = dict(CLIPModel.from_pretrained(inputs / "model").named_parameters())
    tower = {f"vision_model.{name}": leaf for name, leaf in checkpoint.load_leaves(merged)[0].items()}
    assert 0 < len(tower) < len(base) == len(whole)
    for name, leaf in whole.items():
        assert torch.equal(leaf, tower.get(name, base[name]))
    assert not torch.equal(whole[f"{next(iter(tower))}"], base[next(iter(tower))])
    assert {file.name for file in inputs.glob("model/*.json")} <= {file.name for file in tmp_path.glob("whole/*")}
    assert exits("merge.py", "verify", tmp_path / "whole") is None
    assert "exists: choose another folder" in exits("merge.py", "export", merged, *out)
    # of another base, and of another kind of model
    CLIPModel(CLIPModel.from_pretrained(inputs / "model").config).save_pretrained(tmp_path / "other")
    out = ("--base", tmp_path / "other", "--out", tmp_path / "no")
    assert "was made from another base than" in exits("merge.py", "export", merged, *out)
    out = ("--base", run / "base", "--out", tmp_path / "no")
    assert "parameters, 'logit_scale' the first, that match nowhere in base" in exits(
        "merge.py", "export", tmp_path / "whole", *out
    )
    assert not (tmp_path / "no").exists()


def test_whole_models_of_other_tools_are_searched_and_scored_by_their_tower(inputs, exits, tmp_path):
    from transformers import CLIPModel, CLIPVisionModel

    def tuned(name, part):
        model = CLIPModel.from_pretrained(inputs / "model")
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for leaf in getattr(model, part).parameters():
                leaf += 0.3 * torch.randn(leaf.shape, generator=generator)
        model.save_pretrained(tmp_path / name)

    for task in TASKS:
        tuned(task, "vision_model")
        CLIPVisionModel.from_pretrained(tmp_path / task).save_pretrained(tmp_path / f"{task}-tower")
    data = ("--preset", "images", "--data", inputs / "rows")
    found = {}
    for kind in ("", "-tower"):
        experts = [f"{task}={tmp_path / task}{kind}" for task in TASKS]
        search = ("--base", inputs / "model", "--experts", *experts, "--search", "--grid", "0.3", "0.7", *data)
        assert exits("merge.py", "ta", *search, "--out", tmp_path / f"merged{kind}") is None
        found[kind], manifest = checkpoint.load_leaves(tmp_path / f"merged{kind}/ta")
    for path, leaf in found[""].items():
        assert torch.equal(leaf, found["-tower"][path])
    suite = load_suite(**manifest["suite"])
    tower = {path: found[""][f"vision_model.{path}"] for path in suite.base}
    assert manifest["dev"] == {task: suite.score(tower, task, "dev") for task in TASKS}
    words = (tmp_path / "merged", *data, "--model", inputs / "model", "--out", tmp_path / "scores")
    assert exits("eval.py", *words) is None
    rows = [json.loads(line) for line in (tmp_path / "scores/results.jsonl").read_text().splitlines()]
    assert {row["task"]: row["score"] for row in rows} == {task: suite.score(tower, task, "test") for task in TASKS}
    # the heads are those of base's text encoder
    tuned("text", "text_model")
    words = ("--base", inputs / "model", "--experts", f"MNIST={tmp_path / 'text'}", f"shapes={tmp_path / 'shapes'}")
    text = exits("merge.py", "ta", *words, "--search", *data, "--out", tmp_path / "no")
    assert "expert 'MNIST' differs from its base in 'text_model." in text
    assert not (tmp_path / "no").exists()
    # rows that may have trained an expert of another tool are no split to search or to score it on
    shutil.copytree(inputs / "rows", tmp_path / "rows")
    for split in ("dev", "test"):
        (tmp_path / "rows" / "shapes" / f"{split}.npz").unlink()
    data = ("--preset", "images", "--data", tmp_path / "rows")
    search = ("--base", inputs / "model", "--experts", *(f"{task}={tmp_path / task}" for task in TASKS), "--search")
    text = exits("merge.py", "ta", *search, *data, "--out", tmp_path / "no")
    assert "shapes has no dev split, and one made of its training rows may hold rows that expert 'shapes'" in text
    scored = (*data, "--model", inputs / "model", "--out", tmp_path / "alone")
    text = exits("eval.py", f"shapes={tmp_path / 'shapes'}", *scored)
    assert "shapes has no test split, and one made of its training rows may hold rows that expert 'shapes'" in text
    assert exits("eval.py", f"shapes={inputs / 'model'}", *scored) is None  # the base was trained on none of them
