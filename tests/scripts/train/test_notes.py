"""Lines of a run that say what a user should know: sigma beside the update, steps that are never simulated, epochs."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from smat_fn.checkpoint import load_manifest
from smat_fn.config import DIGITS, Adapters, Dev, Finetune, Smat, Training
from smat_fn.data.text import Cut
from smat_fn.scripts.train.describe import headline
from smat_fn.scripts.train.noise_level import update_rms
from smat_fn.scripts.train.notes import coarse_line, cut_notes, never_simulated, sigma_line, still_line
from smat_fn.scripts.train.options import RunOptions, check_run

TRAINING = Training(steps=8, lr=1e-3)
SIX = Training(steps=6, lr=5e-4)
BASE = {"a": torch.zeros(3), "b": torch.zeros(1), "n": torch.tensor([7])}


def moved(step):
    return {"a": torch.full((3,), step), "b": torch.full((1,), -step), "n": torch.tensor([9])}


def test_the_rms_of_an_update_is_over_coordinates_of_floating_point_leaves():
    params = {**BASE, "a": torch.tensor([3.0, 0.0, 4.0])}
    assert update_rms(params, BASE) == math.sqrt(25 / 4)


def test_sigma_stands_beside_the_update_and_far_from_it_warns():
    smat = Smat(sigma=2e-3, period=4)
    assert sigma_line(smat, TRAINING, moved(1e-3), BASE) == "sigma 0.002 is 2 times the RMS of the update, 0.001"
    far = sigma_line(smat, TRAINING, moved(1e-5), BASE)
    assert far.startswith("warning: sigma 0.002 is 2e+02 times the RMS of the update, 1e-05, far from 1 for this run; ")
    assert "eval.py diagnose" in far
    assert sigma_line(smat, TRAINING, moved(1.0), BASE).startswith("warning: ")
    assert sigma_line(smat, TRAINING, BASE, BASE) == ""
    factors = Training(steps=8, lr=1e-3, lora=Adapters(2, 4.0, simulate="factors"))
    assert sigma_line(smat, factors, moved(1e-3), BASE) == sigma_line(Finetune(), TRAINING, moved(1e-3), BASE) == ""


def test_weights_too_coarse_for_the_noise_are_counted_in_the_dtype_and_noise_of_the_run():
    base = {"gain": torch.tensor([1.0, 1.5, 3.0]), "n": torch.tensor([0.1])}
    coarse = {path: leaf.bfloat16() for path, leaf in base.items()}
    smat, mixed = Smat(sigma=2e-3, noise="uniform"), replace(TRAINING, precision="mixed")
    line = "Perturb cannot move 2 of 4 parameters: their dtype is too coarse there"  # 1 moves towards 0
    assert coarse_line(coarse, smat, TRAINING) == coarse_line(base, smat, mixed) == line
    assert coarse_line(coarse, smat, TRAINING, above=0.4) == line
    assert coarse_line(coarse, smat, TRAINING, above=0.5) == ""
    assert coarse_line(base, smat, TRAINING) == ""
    assert coarse_line(coarse, replace(smat, noise="laplace"), TRAINING) == ""
    assert coarse_line(coarse, replace(smat, sigma_of="leaf"), TRAINING) == ""
    assert coarse_line(coarse, smat, replace(TRAINING, lora=Adapters(2, 4.0))) == ""
    assert coarse_line(coarse, Smat(sigma="auto"), TRAINING) == coarse_line(coarse, Finetune(), TRAINING) == ""


def test_an_expert_that_equals_the_base_says_why():
    def told(training=TRAINING, params=BASE, norm=1.0):
        return still_line(training, params, BASE, norm)

    assert told(params=moved(1e-30)) == ""
    assert told(replace(TRAINING, lr=0.0), moved(1e-30)) == ""
    start = "training changed no parameter, the expert equals the base: "
    assert told(replace(TRAINING, lr=0.0)).startswith(f"{start}the learning rate is 0 in every step")
    assert told(norm=0.0).startswith(f"{start}every gradient is 0")
    assert told().startswith(f"{start}updates are smaller than the weights' dtype resolves")
    for norm in (1.0, None):  # None: a resumed run has read none
        assert "the best evaluation" in told(replace(TRAINING, dev=Dev(2, "loss")), norm=norm)


@pytest.mark.parametrize("name", ["ft", pytest.param("asam", marks=pytest.mark.slow)])
def test_a_run_without_a_learning_rate_warns_in_report_log_and_manifest(name, train, tmp_path):
    told = []
    train(tmp_path, name, tasks=("rot90",), training=replace(SIX, lr=0.0), report=told.append)
    warning = load_manifest(tmp_path / "rot90")["warning"]
    assert warning.startswith("training changed no parameter")
    assert told[0] == f"rot90: warning: {warning}"
    last = json.loads((tmp_path / "rot90.log.jsonl").read_text().splitlines()[-1])
    assert last["warning"] == warning


def test_fewer_steps_than_a_period_warn():
    (line,) = never_simulated(Smat(sigma=0.1, period=4), {"x": 3, "y": 4})
    assert line.startswith("warning: no step of x (3 steps) is simulated with period 4; ")
    assert never_simulated(Smat(sigma=0.1, period=4), {"y": 4}) == []
    assert never_simulated(Smat(sigma=0.1, lam=0.5), {"x": 1}) == []
    assert never_simulated(Finetune(), {"x": 1}) == []


def test_training_rows_that_lose_their_end_are_notes(suite, train, tmp_path):
    cuts = {
        "rot90": Cut(8, 0.5, 0.25, 0.125, 700),
        "mirror": Cut(8, 0.0, 0.0, 0.0, 90),
        "invert": Cut(8, 0, 0.5, 0, 99),
    }
    own = suite.replace(cuts=cuts.get, recipe={"max_length": 64, "truncate": "right"})
    start = "training rows of rot90 are cut at max_length 64, 1 of them within the answer, 1 before it: --max-length"
    notes = [
        f"note: 4 of the 8 {start} 700, or --suite-options truncate prompt-middle, keeps answers",
        "note: 4 of the 8 training rows of invert are cut at max_length 64, 4 of them within the answer, 0 before it: "
        "--max-length 99 keeps answers",
    ]
    assert cut_notes(own, ("rot90", "mirror", "invert")) == notes
    one = own.replace(cuts=lambda task: Cut(48, 1 / 48, 1 / 48, 1 / 48, 309))
    assert cut_notes(one, ("hawk",))[0].startswith(
        "note: 1 of the 48 training rows of hawk is cut at max_length 64, 0 of them within the answer, 1 before it: "
    )
    some = own.replace(cuts=lambda task: Cut(8, 0.5, 0.5, 0.125, 700, middle=0.25))
    assert cut_notes(some, ("hawk",))[0].endswith(
        "--max-length 700 keeps answers, --suite-options truncate prompt-middle those of 2 of these rows"
    )
    for truncate in ("left", "prompt-middle"):
        other = own.replace(recipe={"max_length": 64, "truncate": truncate})
        assert cut_notes(other, ("rot90",))[0].endswith(" 1 before it: --max-length 700 keeps answers")
    none = own.replace(cuts=lambda task: Cut(8, 0.5, 0.5, 0, 700, middle=0.5))
    assert cut_notes(none, ("hawk",))[0].endswith(
        " 4 of them within the answer, 0 before it: --max-length 700 keeps answers"
    )
    assert cut_notes(suite, ("rot90",)) == []
    told = []
    train(tmp_path, tasks=("rot90",), suite=own, report=told.append)
    assert told[0] == notes[0]


def test_a_run_whose_noise_is_lost_in_rounding_warns(suite, train, tmp_path):
    told, method = [], Smat(alpha_min=0.1, drop_prob=0.5, sigma=1e-7, period=2, noise="uniform")
    training = replace(SIX, precision="mixed")
    train(tmp_path, method=method, tasks=("rot90",), training=training, report=told.append)
    line = coarse_line(suite.base, method, training)
    assert told[0] == f"warning: {line}; --precision fp32 keeps the noise, and small updates too"


def test_a_run_of_which_under_half_is_lost_in_rounding_does_not_warn(suite, train, tmp_path):
    told, method = [], Smat(alpha_min=0.1, drop_prob=0.5, sigma=1e-4, period=2, noise="uniform")
    training = Training(steps=1, lr=5e-4, precision="mixed")
    assert coarse_line(suite.base, method, training) > "" == coarse_line(suite.base, method, training, above=0.5)
    train(tmp_path, method=method, tasks=("rot90",), training=training, report=told.append)
    assert not any("Perturb cannot move" in line for line in told)


def test_a_run_says_sigma_the_probe_and_steps_that_are_never_simulated(train, tmp_path):
    told, method = [], Smat(alpha_min=0.1, drop_prob=0.5, sigma=0.01, period=7, noise="uniform")
    train(tmp_path, method=method, tasks=("rot90",), probe=2, probe_at=method, report=told.append)
    assert told[0].startswith("warning: no step of rot90 (6 steps)")
    assert told[1].startswith("rot90: dev loss ")
    assert "at 2 simulated states " in told[1]
    assert "sigma 0.01 is " in told[2]


def test_the_headline_says_epochs(suite):
    def line(epochs):
        return headline(suite, Finetune(), Training(steps=None, lr=0.1, epochs=epochs), origin="given", seed=0)

    assert "(given), 1 epoch, seed" in line({"x": 1, "y": 1})
    assert "(given), 3 epochs, seed" in line({"x": 3})
    assert "epochs 5 (x), 3 (y)" in line({"x": 5, "y": 3})


def test_the_headline_has_both_rates_of_muon(suite):
    training = replace(TRAINING, lr=5e-4, optimizer="muon", muon_lr=0.01)
    line = headline(suite, Finetune(), training, origin="given", seed=0)
    assert "learning rate 0.0005 (given), muon_lr 0.01 of matrices, 8 steps" in line


@pytest.mark.parametrize(
    ("stored", "dtype", "precision", "told"),
    [
        ("float32", "bfloat16", None, "float32 weights rounded to bfloat16 (--precision fp32 keeps them), seed"),
        ("float16", "bfloat16", None, "float16 weights rounded to bfloat16 (--precision fp32 keeps them), seed"),
        ("float64", "float32", None, "float64 weights rounded to float32, seed"),
        ("float32", "float32", None, "1 epoch, seed"),
        ("float32", "bfloat16", "bf16", "precision bf16, seed"),
        (
            "float32",
            "bfloat16",
            "mixed",
            "precision mixed, float32 master weights while training, experts stored in bfloat16, float32 weights "
            "rounded to bfloat16 (--precision fp32 keeps them), seed",
        ),
        ("float32", "float32", "mixed", "master weights while training, experts stored in float32, seed"),
        ("bfloat16", "bfloat16", None, "1 epoch, seed"),
        ("float16", "float32", None, "1 epoch, seed"),
    ],
)
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_headline_says_that_weights_are_rounded(
    suite, tmp_path, monkeypatch, stored, dtype, precision, told, hub, file
):
    folder, name = tmp_path, str(tmp_path)
    if hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        folder, name = tmp_path / "models--me--model" / "snapshots" / ("a" * 40), "me/model"
        folder.mkdir(parents=True)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs" / "main").write_text("a" * 40)
    leaves = {"w": torch.ones(2, dtype=getattr(torch, stored)), "untrained": torch.ones(2, dtype=torch.float64)}
    (save_file if file.endswith("safetensors") else torch.save)(leaves, folder / file)
    (folder / "config.json").write_text("{}")  # names no dtype
    own = suite.replace(base={"w": torch.ones(2, dtype=getattr(torch, dtype))}, recipe={"model": name})
    training = Training(steps=None, lr=0.1, epochs={"x": 1}, precision=precision)
    assert told in headline(own, Finetune(), training, origin="given", seed=0)


def test_an_expert_that_is_there_says_which_setting_differs(runs, suite):
    def told(method="ft", training=SIX, **options):
        run = RunOptions(runs["ft"], ("rot90",), options.pop("seed", 21), **options)
        with pytest.raises(ValueError, match="exists") as error:
            check_run(DIGITS.methods[method], training, run, known=suite.tasks)
        return str(error.value)

    path = runs["ft"] / "rot90"
    way = "pass --resume to keep it, or --overwrite to train it again"
    assert told() == f"{path} exists, trained with these settings: {way}"
    assert "(training.lr was 0.0005, is 0.1, seed was 21, is 3): pass another" in told(
        training=replace(SIX, lr=0.1), seed=3
    )
    assert "method was ft, is smat, hyperparameters.alpha_min was left out, is 0.1" in told("smat")
    assert "trained with these settings" in told(training=replace(SIX, steps=None, epochs={"rot90": 1}))
