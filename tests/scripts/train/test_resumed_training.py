"""Training that ended early resumes to the same bits: weights, log, nothing twice, nothing lost."""

import errno
import json
import os
import random as python_random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from smat_fn import checkpoint, machine, optim, testing
from smat_fn.config import DIGITS, Adapters, Msam, Talos, Training
from smat_fn.folders.writing import locked
from smat_fn.mat.finetune import State
from smat_fn.scripts.run_folder import all_inputs
from smat_fn.scripts.train import resuming, training
from smat_fn.scripts.train.logs import Log
from smat_fn.scripts.train.resuming import Interrupted, Saver, Stop

ROOT = Path(__file__).parents[3]
TIMED = {
    "seconds", "examples_per_second", "clean_step_seconds", "simulated_step_seconds", "peak_memory_bytes",
    "simulation_share",
}  # fmt: skip
OPTIONS = ("--suite-options", "pretrain_steps", "10", "images_per_task", "120")
METHODS = {name: DIGITS.methods[name] for name in ("smat", "ft", "asam", "mergopt", "orthoreg")}
METHODS |= {
    "msam": Msam(rho=0.5),
    "msam gradient": Msam(rho=0.5, along="gradient"),
    "smat climbing": replace(METHODS["smat"], climb="both", rho=0.5),
    "smat by depth in pairs": replace(METHODS["smat"], period=2, alpha_depth=(0.5, 1.5), antithetic=True),
    "smat by leaf": replace(METHODS["smat"], period=2, sigma=0.5, sigma_of="leaf", alpha_max=1.5),
    "talos": Talos(sparsity=0.5, rounds=2, calibration=5),  # killed while it calibrates
}


def log_of(folder, task):
    rows = [json.loads(line) for line in (folder / f"{task}.log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


def weights_of(folder, task):
    return checkpoint.load_manifest(folder / task)["fingerprint"]


def after(monkeypatch, step, act):
    """``act()`` once, when a step of this number has been logged."""
    original, done = Log.step, []

    def stepped(self, number, info, batch):
        original(self, number, info, batch)
        if number == step and not done:
            done.append(number)
            act()

    monkeypatch.setattr(Log, "step", stepped)


class Killed(Exception):
    """Nothing is saved after it, as after SIGKILL."""


def kill():
    raise Killed


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"optimizer": "adamw", "weight_decay": 0.1, "max_grad_norm": 0.5, "accumulate": 2, "average": "swa:50%"},
        pytest.param(
            {"optimizer": "muon", "muon_lr": 1e-2, "schedule": "constant", "precision": "mixed"}, marks=pytest.mark.slow
        ),
        pytest.param({"precision": "bf16", "lora": Adapters(3, 6.0)}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "adamw", "weight_decay": 0.1, "decay_matrices": True, "schedule": "linear", "warmup": 6},
            marks=pytest.mark.slow,
        ),
        pytest.param({"average": "ema:0.5"}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16", "lora": Adapters(3, 6.0), "average": "swa:50%"}, marks=pytest.mark.slow),
    ],
    ids=[
        "adam",
        "adamw accumulated, average",
        "muon mixed",
        "adapters bf16",
        "groups, warmup",
        "average",
        "average of adapters",
    ],
)
def test_a_killed_run_goes_on_from_its_last_snapshot_to_the_same_bits(train, tmp_path, monkeypatch, change):
    training = replace(Training(steps=9, lr=5e-4), **change)
    options = {"training": training, "tasks": ("rot90", "mirror"), "save_every_steps": 4}
    train(tmp_path / "whole", **options)
    after(monkeypatch, 6, kill)
    with pytest.raises(Killed):
        train(tmp_path / "cut", **options)
    path = resuming.path_of(tmp_path / "cut", "rot90")
    assert resuming.read(path).step == 4
    assert len(log_of(tmp_path / "cut", "rot90")) == 7
    told = []
    train(tmp_path / "cut", **options, resume=True, report=told.append)
    assert told[0] == "rot90: resumes after step 4 of 9"
    for task in ("rot90", "mirror"):
        assert weights_of(tmp_path / "cut", task) == weights_of(tmp_path / "whole", task)
        assert log_of(tmp_path / "cut", task) == log_of(tmp_path / "whole", task)
    assert {p.name for p in (tmp_path / "cut").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_where_smat_keeps_its_base_changes_no_bit_and_belongs_to_no_comparison(train, tmp_path, monkeypatch):
    options = {"tasks": ("rot90", "mirror"), "save_every_steps": 2, "training": Training(steps=9, lr=5e-4)}
    train(tmp_path / "whole", **options)
    after(monkeypatch, 6, kill)
    with pytest.raises(Killed):
        train(tmp_path / "cut", **options, offload="cpu")
    known = resuming.read(resuming.path_of(tmp_path / "cut", "rot90")).settings
    assert "offload" not in known["hyperparameters"]
    train(tmp_path / "cut", **options, resume=True, offload="stream")
    train(tmp_path / "cut", **options, resume=True, offload="device")  # finds what it would train
    for task in options["tasks"]:
        assert weights_of(tmp_path / "cut", task) == weights_of(tmp_path / "whole", task)
        assert log_of(tmp_path / "cut", task) == log_of(tmp_path / "whole", task)


@pytest.mark.parametrize("known", ["files", "fingerprint"])
@pytest.mark.parametrize("adapters", [None, Adapters(2, 4.0)], ids=["whole", "adapters"])
def test_a_damaged_expert_is_not_taken_for_a_finished_one(train, tmp_path, known, adapters):
    options = {"name": "ft", "tasks": ("rot90",), "training": Training(steps=2, lr=5e-4, lora=adapters)}
    train(tmp_path, **options)
    folder = tmp_path / "rot90"
    file = folder / ("model.safetensors" if adapters is None else "adapter_model.safetensors")
    bits = file.read_bytes()
    if known == "fingerprint":  # as earlier code wrote it
        facts = {name: value for name, value in checkpoint.load_manifest(folder).items() if name != "files"}
        (folder / "manifest.json").write_text(json.dumps(facts))
    other = f"the weights in {folder} are not those that its manifest.json names"
    cut = {"files": other, "fingerprint": "cannot be read" if adapters is None else "is not a readable adapter"}[known]
    gone = {"files": f"{file} is missing: put it back, or delete {folder}", "fingerprint": "cannot be read"}[known]
    gone = gone if adapters is None or known == "files" else "holds no adapters"
    damages = [(bits[:-9], cut), (None, gone)]
    damages += [(bits[:-1] + bytes([bits[-1] ^ 1]), other)] if adapters is None or known == "files" else []
    for damage, told in damages:
        file.unlink() if damage is None else file.write_bytes(damage)
        with pytest.raises(ValueError, match=re.escape(told)):
            train(tmp_path, **options, resume=True)
    file.write_bytes(bits)
    said = []
    train(tmp_path, **options, resume=True, report=said.append)
    assert said == ["rot90: already finished"]


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}], ids=repr)
def test_a_log_that_is_not_one_of_training_stays(train, tmp_path, how):
    (tmp_path / "rot90.log.jsonl").write_text("my notes")
    with pytest.raises(ValueError, match=r"rot90\.log\.jsonl holds something else than is written there: move it"):
        train(tmp_path, "ft", tasks=("rot90",), training=Training(steps=2, lr=5e-4), **how)
    assert (tmp_path / "rot90.log.jsonl").read_text() == "my notes"


def test_what_stands_in_the_place_of_an_expert_is_trained_into_or_named(train, tmp_path):
    options = {"name": "ft", "tasks": ("rot90", "mirror"), "training": Training(steps=2, lr=5e-4)}
    train(tmp_path / "whole", **options)
    run, folder = tmp_path / "run", tmp_path / "run" / "mirror"
    shutil.copytree(tmp_path / "whole", run)
    manifest = (folder / "manifest.json").read_text()
    for kept in (None, "[]", '{"name": "site"}', '{"kind": "exported"}'):
        (folder / "manifest.json").unlink() if kept is None else (folder / "manifest.json").write_text(kept)
        told = f"{folder} is not the folder of an expert of train.py: move it to train mirror there"
        with pytest.raises(ValueError, match=told):
            train(run, **options, resume=True)
        way = f"log but no expert of mirror, and {folder} cannot take it: move that away; end the training by"
        with pytest.raises(ValueError, match=way):
            all_inputs(run)
    (folder / "manifest.json").write_text(manifest)
    assert len(all_inputs(run)[1]) == 2
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"log but no expert of mirror; end the training by train\.py"):
        all_inputs(run)
    for file in (run / "base").iterdir():
        file.unlink()
    train(run, **options, resume=True)
    assert weights_of(run, "mirror") == weights_of(tmp_path / "whole", "mirror")
    assert weights_of(run, "base") == weights_of(tmp_path / "whole", "base")


@pytest.mark.parametrize("name", ["ft", pytest.param("orthoreg", marks=pytest.mark.slow)])
def test_methods_without_a_choice_take_the_option_of_a_script_that_trains_all(name, train, tmp_path):
    for place in ("auto", "cpu"):
        train(tmp_path / place, name, tasks=("rot90",), offload=place)
    assert weights_of(tmp_path / "cpu", "rot90") == weights_of(tmp_path / "auto", "rot90")


def test_an_average_over_steps_is_what_is_kept(train, tmp_path):
    for name, average in (("last", None), ("one step", "ema:0"), ("all steps", "swa:100%")):
        train(tmp_path / name, tasks=("rot90",), training=Training(steps=3, lr=5e-4, average=average))
    assert weights_of(tmp_path / "one step", "rot90") == weights_of(tmp_path / "last", "rot90")
    assert log_of(tmp_path / "all steps", "rot90") == log_of(tmp_path / "last", "rot90")
    steps = []
    for count in (1, 2, 3):  # a constant rate: shorter runs are the longer ones' beginnings
        training = Training(steps=count, lr=5e-4, schedule="constant")
        train(tmp_path / str(count), "ft", tasks=("rot90",), training=training)
        steps.append(checkpoint.load_leaves(tmp_path / str(count) / "rot90")[0])
    training = Training(steps=3, lr=5e-4, schedule="constant", average="swa:100%")
    train(tmp_path / "mean", "ft", tasks=("rot90",), training=training)
    for path, leaf in checkpoint.load_leaves(tmp_path / "mean" / "rot90")[0].items():
        torch.testing.assert_close(leaf, sum(own[path] for own in steps) / 3, rtol=1e-5, atol=1e-7)


@pytest.fixture
def dropping(suite):
    """The suite whose model drops a fifth in train mode."""
    layers = [m for m in suite.loss_fn("rot90").module.modules() if isinstance(m, torch.nn.Dropout)]
    for layer in layers:
        layer.p = 0.2
    yield suite
    for layer in layers:
        layer.p = 0.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param("smat", {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("asam", {"precision": "mixed"}, marks=pytest.mark.slow),
        ("smat", {"lora": Adapters(3, 6.0)}),
    ],
    ids=["smat accumulated", "asam mixed", "smat adapters"],
)
def test_training_with_dropout_goes_on_to_the_same_bits(train, dropping, tmp_path, monkeypatch, name, change):
    training = replace(Training(steps=6, lr=5e-4, dropout=True), **change)
    options = {"name": name, "training": training, "tasks": ("rot90",), "save_every_steps": 3}
    torch.manual_seed(1)
    train(tmp_path / "whole", **options)
    torch.manual_seed(2)
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path / "cut", **options)
    train(tmp_path / "cut", **options, resume=True)
    assert weights_of(tmp_path / "cut", "rot90") == weights_of(tmp_path / "whole", "rot90")
    assert log_of(tmp_path / "cut", "rot90") == log_of(tmp_path / "whole", "rot90")
    assert checkpoint.load_manifest(tmp_path / "whole" / "rot90")["training"]["dropout"] is True
    assert not dropping.loss_fn("rot90").module.training
    train(tmp_path / "without", **{**options, "training": replace(training, dropout=False)})
    assert weights_of(tmp_path / "without", "rot90") != weights_of(tmp_path / "whole", "rot90")


def test_dropout_of_a_model_without_any_is_refused_before_training(train, tmp_path):
    with pytest.raises(ValueError, match="dropout: the model of rot90 has none above 0"):
        train(tmp_path / "run", tasks=("rot90",), training=Training(steps=6, lr=5e-4, dropout=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow)
        if name in ("msam gradient", "smat climbing", "smat by leaf")
        else name
        for name in METHODS
    ],
)
def test_every_method_goes_on(train, tmp_path, monkeypatch, name):
    options = {"method": METHODS[name], "tasks": ("stripes",), "save_every_steps": 3, "log_every": 2}
    train(tmp_path / "whole", **options)
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path / "cut", **options)
    train(tmp_path / "cut", **options, resume=True)
    assert weights_of(tmp_path / "cut", "stripes") == weights_of(tmp_path / "whole", "stripes")
    assert log_of(tmp_path / "cut", "stripes") == log_of(tmp_path / "whole", "stripes")


def test_asked_to_stop_it_saves_at_once_and_says_where(train, tmp_path, monkeypatch):
    stop = Stop()
    after(monkeypatch, 2, lambda: setattr(stop, "signal", signal.SIGTERM))
    with pytest.raises(Interrupted, match=r"stopped by signal 15 after 3 steps of rot90; .*--resume$") as caught:
        train(tmp_path, tasks=("rot90",), stop=stop)
    assert caught.value.status == 143
    assert resuming.read(resuming.path_of(tmp_path, "rot90")).step == 3
    assert [row["step"] for row in log_of(tmp_path, "rot90")] == [0, 1, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_what_comes_before_the_first_step_at_once(runs, train, suite, tmp_path, monkeypatch, number):
    asked, batch = [], suite.batch

    def prepares(task, key, step):
        asked.append(step)
        if len(asked) == 1:
            signal.raise_signal(number)
            asked.append("on")
        return batch(task, key, step)

    monkeypatch.setattr(suite, "batch", prepares)
    with (
        pytest.raises(
            Interrupted, match=rf"^stopped by signal {number:d} before step 1 of rot90: continue with --resume$"
        ) as caught,
        resuming.on_signals() as stop,
    ):
        train(tmp_path, tasks=("rot90",), stop=stop)
    assert (asked, caught.value.status) == ([0], 128 + number)
    train(tmp_path, tasks=("rot90",), resume=True)
    assert weights_of(tmp_path, "rot90") == weights_of(runs["smat"], "rot90")


@pytest.mark.parametrize("number", resuming.ASKING)
def test_a_second_signal_ends_at_once_unless_it_may_be_the_first_passed_on(number):
    ended = []
    before = signal.signal(number, lambda *_: ended.append(number))
    try:
        for second_ends in (True, False):
            with resuming.on_signals(second_ends=second_ends) as stop:
                signal.raise_signal(number)
                assert (stop.signal, ended) == (number, [])
                signal.raise_signal(number)
                assert ended == [number] * second_ends
            ended.clear()
            signal.raise_signal(number)  # after it, what it was before
            assert ended == [number]
            ended.clear()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("ignored", [False, True], ids=["terminal", "nohup"])
def test_training_stops_with_its_terminal_and_not_under_nohup(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
    try:
        with resuming.on_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.signal == (None if ignored else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_killed_before_any_snapshot_it_starts_anew(runs, train, tmp_path, monkeypatch):
    after(monkeypatch, 3, kill)
    with pytest.raises(Killed):
        train(tmp_path, tasks=("rot90",), save_every_minutes=60)
    # a write that was cut off, of the log and of an expert
    with open(tmp_path / "rot90.log.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    (tmp_path / ".rot90.new-1").mkdir()
    (tmp_path / ".rot90.new-1" / "manifest.json").write_text("{}")
    train(tmp_path, tasks=("rot90",), resume=True)
    assert weights_of(tmp_path, "rot90") == weights_of(runs["smat"], "rot90")
    assert log_of(tmp_path, "rot90") == log_of(runs["smat"], "rot90")
    assert not (tmp_path / ".rot90.new-1").exists()


def test_finished_experts_are_left_alone_and_other_settings_listed(train, tmp_path, monkeypatch):
    train(tmp_path, tasks=("rot90",))
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path, tasks=("mirror",), save_every_steps=2)
    before = (tmp_path / "rot90" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ValueError, match="belongs to an unfinished expert: pass --resume") as error:
        train(tmp_path, tasks=("rot90", "mirror"))
    assert "rot90 exists" in str(error.value)
    other = replace(DIGITS.methods["smat"], sigma=0.02)
    with pytest.raises(ValueError, match="other settings") as error:
        train(tmp_path, method=other, tasks=("rot90", "mirror", "stripes"), seed=22, resume=True)
    assert str(error.value).count("hyperparameters.sigma was 0.01, is 0.02, seed was 21, is 22") == 2
    assert "choose another --out" in str(error.value)
    assert not (tmp_path / "stripes").exists()
    told = []
    train(tmp_path, tasks=("rot90", "mirror"), resume=True, report=told.append)
    assert told[:2] == ["rot90: already finished", "mirror: resumes after step 4 of 6"]
    train(tmp_path, tasks=("rot90", "mirror"), resume=True, label="NEW", report=told.append)
    assert told[-2:] == [f"{task}: already finished, label SMAT is now NEW" for task in ("rot90", "mirror")]
    assert checkpoint.load_manifest(tmp_path / "mirror")["label"] == "NEW"
    with pytest.raises(ValueError, match=r"mirror in .* was trained with other settings: label was NEW, is SMAT; g"):
        train(tmp_path, tasks=("mirror",), resume=True)
    assert (tmp_path / "rot90" / "model.safetensors").stat().st_mtime_ns == before


def test_a_resumed_run_tells_what_other_code_has_made(train, tmp_path, monkeypatch):
    train(tmp_path, "ft", tasks=("rot90",))
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path, "ft", tasks=("mirror",), save_every_steps=2)
    before, told = machine.code(), []
    monkeypatch.setattr(machine, "code", lambda: "0.2.0+new")
    train(tmp_path, "ft", tasks=("rot90", "mirror"), resume=True, report=told.append)
    other = f", by other code ({before}, now 0.2.0+new; --overwrite makes it anew)"
    assert told == [f"rot90: already finished{other}", f"mirror: resumes after step 4 of 6{other}"]
    assert [checkpoint.load_manifest(tmp_path / task)["code"] for task in ("rot90", "mirror")] == [before, "0.2.0+new"]


def test_overwrite_forgets_what_was_unfinished(runs, train, tmp_path, monkeypatch):
    after(monkeypatch, 4, kill)
    write = checkpoint.save_shared
    monkeypatch.setattr(checkpoint, "save_shared", lambda *a, **k: time.sleep(0.2) or write(*a, **k))
    with pytest.raises(Killed):
        train(tmp_path, "ft", tasks=("rot90",), save_every_steps=2)
    assert {p.name for p in tmp_path.iterdir()} == {"base", "rot90.log.jsonl", "rot90.resume.safetensors"}
    with pytest.raises(ValueError, match="resume and overwrite exclude each other"):
        train(tmp_path, tasks=("rot90",), resume=True, overwrite=True)
    train(tmp_path, tasks=("rot90",), overwrite=True)
    assert weights_of(tmp_path, "rot90") == weights_of(runs["smat"], "rot90")


def test_an_interrupted_overwrite_resumes_and_replaces_the_experts_of_before(runs, train, tmp_path, monkeypatch):
    train(tmp_path, "ft", tasks=("rot90", "mirror"))
    before, stop = weights_of(tmp_path, "rot90"), Stop()
    after(monkeypatch, 2, lambda: setattr(stop, "signal", 15))
    monkeypatch.setattr(checkpoint, "save_shared", full := Full())
    with pytest.raises(Interrupted, match=r"rot90; nothing could be saved: continue with"):
        train(tmp_path, tasks=("rot90", "mirror"), overwrite=True, stop=stop)
    assert (weights_of(tmp_path, "rot90"), full.asked) == (before, 1)
    with pytest.raises(
        ValueError, match=r"has experts of mirror, rot90 that an interrupted --overwrite has yet to rep"
    ):
        all_inputs(tmp_path)
    told = []
    train(tmp_path, tasks=("rot90", "mirror"), resume=True, report=told.append)
    assert not any("already finished" in line for line in told)
    for task in ("rot90", "mirror"):
        assert weights_of(tmp_path, task) == weights_of(runs["smat"], task)
    assert all_inputs(tmp_path)[1] == [tmp_path / "mirror", tmp_path / "rot90"]
    assert not list(tmp_path.glob(".*"))
    shutil.rmtree(tmp_path / "rot90")
    with pytest.raises(
        ValueError, match=r"no expert of rot90; end the .*, or move \S+/rot90.log.jsonl away to merge m"
    ):
        all_inputs(tmp_path)


class Full:
    """Writes nothing, as on a full disk."""

    asked = 0

    def __call__(self, *args, **options):
        self.asked += 1
        raise OSError("no space left")


def test_one_process_at_a_time_trains_a_task_in_a_folder(train, tmp_path):
    held = "rot90 is trained in .* by another process"
    with locked(tmp_path / ".rot90.lock", ""), pytest.raises(ValueError, match=held):
        train(tmp_path, tasks=("rot90",), resume=True)
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time_writes_the_base_and_removes_what_killed_ones_left(train, tmp_path, monkeypatch):
    left = tmp_path / ".base.new-1"
    left.mkdir()
    monkeypatch.setattr(training, "WAIT", 0.01)
    options = {"name": "ft", "tasks": ("rot90",), "resume": True}
    with locked(tmp_path / ".base.lock", ""), pytest.raises(ValueError, match="base is written by another process: wa"):
        train(tmp_path, **options)
    assert left.exists()  # of the process that holds the lock
    train(tmp_path, **options)
    assert not list(tmp_path.glob(".*"))


def test_an_expert_that_cannot_be_written_names_its_checkpoint(runs, train, tmp_path, monkeypatch):
    options = {"name": "ft", "tasks": ("rot90",), "save_every_steps": 4}
    with monkeypatch.context() as patch:
        patch.setattr(training, "save", lambda *args, **options: full_disk())
        path = resuming.path_of(tmp_path, "rot90")
        told = (
            rf"rot90 cannot be written \(No space left .*\); the last good state, after 4 steps, is {path}: free space"
        )
        with pytest.raises(ValueError, match=f"{told} there, and rerun with --resume$"):
            train(tmp_path, **options)
    train(tmp_path, **options, resume=True)
    assert weights_of(tmp_path, "rot90") == weights_of(runs["ft"], "rot90")


def full_disk():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_is_a_link_to_nowhere_is_an_error_before_training(train, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "disk-that-is-not-mounted")
    with pytest.raises(ValueError, match=r"out is .*/run, a link that leads nowhere: make the folder that it"):
        train(tmp_path / "run", "ft", tasks=("rot90",))


def test_lines_that_the_log_lost_are_named(train, tmp_path, monkeypatch):
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path, "ft", tasks=("rot90",), save_every_steps=4)
    log, told = tmp_path / "rot90.log.jsonl", []
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))  # as after a power cut
    train(tmp_path, "ft", tasks=("rot90",), resume=True, report=told.append)
    assert f"note: {log} lacks the lines of steps 2 to 3, lost in a crash: the expert is not affected" in told


def test_a_bad_loss_keeps_the_last_good_state_and_says_where(suite, train, tmp_path):
    def broken(task, key, step):
        images, labels = suite.batch(task, key, step)
        return (images * float("nan") if step == 4 else images), labels

    with pytest.raises(ValueError, match=r"loss of mirror is nan at step 4, on training rows \d+(, \d+)+: ") as error:
        train(tmp_path, suite=suite.replace(batch=broken), tasks=("mirror",), save_every_steps=3, log_every=6)
    path = resuming.path_of(tmp_path, "mirror")
    assert str(error.value).endswith(f"the last good state, after 3 steps, is {path}")
    assert resuming.read(path).step == 3


def test_a_state_that_is_not_finite_is_never_kept(tmp_path):
    optimizer, params = optim.adam(0.1), {"w": torch.ones(2)}
    saver = Saver(tmp_path / "a.safetensors", {})
    for step, value in ((1, 1.0), (2, float("inf"))):
        saver.save(State({"w": torch.full((2,), value)}, optimizer.init(params), step), {})
    saver.wait()
    assert resuming.read(saver.path).step == 1
    assert saver.where() == f"the last good state, after 1 steps, is {saver.path}"


def test_a_snapshot_holds_the_whole_state_and_is_a_copy(tmp_path):
    shapes = {"a": (3, 4), "b": (4,)}
    params = testing.random_tree(0, shapes)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.muon(0.1, rest=optim.adamw(0.1, weight_decay=0.1)))
    state = optimizer.init(params)
    for seed in (1, 2):
        params, state = optimizer.update(testing.random_tree(seed, shapes), state, params)
    saver = Saver(tmp_path / "a.safetensors", {"seed": 1}, every_steps=2)
    assert [saver.due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    saver.save(State(params, state, 2), {"x": 1})
    want = {path: leaf.clone() for path, leaf in params.items()}
    for leaf in params.values():
        leaf.zero_()  # as a donated step would
    saver.wait()
    fresh = State({path: torch.zeros_like(leaf) for path, leaf in params.items()}, optimizer.init(params), 0)
    back = resuming.restore(saver.path, fresh)
    testing.assert_trees_equal(back.params, want)
    muon = back.opt_state.optimizer
    assert (back.step, muon.step, muon.rest.step) == (2, 2, 2)
    testing.assert_trees_equal(muon.momentum, state.optimizer.momentum)
    testing.assert_trees_equal(muon.rest.nu, state.optimizer.rest.nu)
    assert resuming.read(saver.path) == (2, {"seed": 1}, {"x": 1}, machine.code(), "a.safetensors")
    with pytest.raises(ValueError, match="is the state of another optimizer or model"):
        resuming.restore(saver.path, State(fresh.params, optim.adam(0.1).init(params), 0))
    saver.path.write_bytes(saver.path.read_bytes()[:50])
    with pytest.raises(ValueError, match="cannot be read"):
        resuming.read(saver.path)
    saver.discard()
    assert list(tmp_path.iterdir()) == []
    assert saver.where() is None


def test_a_flipped_bit_in_a_checkpoint_is_an_error(tmp_path):
    saver = Saver(tmp_path / "a.safetensors", {})
    fresh = State({"w": torch.zeros(3)}, (), 0)
    saver.save(State({"w": torch.ones(3)}, (), 1), {})
    saver.wait()
    saver.path.write_bytes(saver.path.read_bytes()[:-1] + b"\xbf")  # -1.0
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged \(CRC-32 .*: put back a copy, or remove"):
        resuming.restore(saver.path, fresh)
    with safe_open(saver.path, framework="pt") as store:
        leaves, facts = {name: store.get_tensor(name) for name in store.keys()}, store.metadata()["facts"]  # noqa: SIM118
    save_file(leaves, saver.path, metadata={"facts": facts})
    with pytest.raises(ValueError, match=r"a\.safetensors cannot be read \('crc32'\)"):
        resuming.restore(saver.path, fresh)


def test_a_damaged_checkpoint_is_not_resumed_and_not_called_the_last_good_state(train, tmp_path, monkeypatch):
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path, "ft", tasks=("rot90",), save_every_steps=4)
    file = resuming.path_of(tmp_path, "rot90")
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"rot90\.resume\.safetensors is damaged .* from the start$"):
        train(tmp_path, "ft", tasks=("rot90",), resume=True)
    assert not (tmp_path / "rot90").exists()


def swap(first, second):
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def test_what_is_another_tasks_is_neither_resumed_nor_taken_for_finished(train, tmp_path, monkeypatch):
    options = {"name": "ft", "training": Training(steps=3, lr=5e-4), "save_every_steps": 1}
    with monkeypatch.context() as patch:
        for task in ("rot90", "mirror"):
            after(patch, 1, kill)
            with pytest.raises(Killed):
                train(tmp_path, **options, tasks=(task,))
    files = [resuming.path_of(tmp_path, task) for task in ("rot90", "mirror")]
    swap(*files)
    with pytest.raises(ValueError, match=rf"{files[0]} is of task mirror: .*; {files[1]} is of task rot90: "):
        train(tmp_path, **options, tasks=("rot90", "mirror"), resume=True)
    swap(*files)
    train(tmp_path, **options, tasks=("rot90", "mirror"), resume=True)
    folders = [tmp_path / task for task in ("rot90", "mirror")]
    swap(*folders)
    with pytest.raises(ValueError, match=rf"{folders[0]} is of task mirror: give it back the name .* to train rot90; "):
        train(tmp_path, **options, tasks=("rot90", "mirror"), resume=True)


@pytest.mark.parametrize("facts", [None, "[]", '{"step": "1", "settings": {}, "progress": {}}', '{"step": 1}'])
def test_a_file_of_something_else_is_not_a_checkpoint(tmp_path, facts):
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(2)}, file, metadata=None if facts is None else {"facts": facts})
    with pytest.raises(ValueError, match=r"a\.safetensors (cannot be read|does not say which training)"):
        resuming.read(file)


class FirstRows:
    """Stands for `smat_fn.parallel.Sharded`, in the first of two processes: what is stored has six rows."""

    def stored_shape(self, place, leaf):
        return torch.Size([2 * len(leaf), *leaf.shape[1:]])

    def own(self, place, leaf, stored):
        return stored[: len(leaf)]


def test_a_process_takes_its_own_rows_of_a_stored_state(tmp_path):
    saver, stored = Saver(tmp_path / "a.safetensors", {}), testing.random_tree(1, {"w": (6, 2), "v": (2,)})
    saver.save(State(stored, (), 1), {})
    saver.wait()
    fresh = State({"w": torch.zeros(3, 2), "v": torch.zeros(1)}, (), 0)
    back = resuming.restore(saver.path, fresh, FirstRows())
    assert back.step == 1
    testing.assert_trees_equal(back.params, {"w": stored["w"][:3], "v": stored["v"][:1]})
    assert all(back.params[path] is leaf for path, leaf in fresh.params.items())  # no other memory
    with pytest.raises(ValueError, match=r"a\.safetensors holds \.params\['[vw]'\] in another shape or dtype"):
        resuming.restore(saver.path, State({"w": torch.zeros(6, 2), "v": torch.zeros(2)}, (), 0), FirstRows())


@pytest.mark.parametrize("leaf", [torch.zeros(1), torch.zeros(3).double()], ids=["shape", "dtype"])
def test_a_state_of_another_shape_or_dtype_is_an_error(tmp_path, leaf):
    saver = Saver(tmp_path / "a.safetensors", {})
    saver.save(State({"w": leaf}, (), 1), {})
    saver.wait()
    with pytest.raises(ValueError, match=r"a\.safetensors holds \.params\['w'\] in another shape or dtype"):
        resuming.restore(saver.path, State({"w": torch.zeros(3)}, (), 0))


def test_a_checkpoint_that_cannot_be_opened_is_not_called_missing(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"cannot be opened \(Is a directory\): .* make it readable and rerun$"):
        resuming.read(tmp_path / "a.safetensors")


def test_a_checkpoint_has_the_permissions_of_other_files_and_no_leftovers(train, tmp_path, monkeypatch):
    left = tmp_path / ".rot90.resume.safetensors.new-1"
    left.mkdir()
    (left / ".tmpAbC").write_bytes(b"of a process that was killed")  # as safetensors names its own
    after(monkeypatch, 4, kill)
    with pytest.raises(Killed):
        train(tmp_path, "ft", tasks=("rot90",), save_every_steps=2, resume=True)
    (tmp_path / "plain").touch()
    assert resuming.path_of(tmp_path, "rot90").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_overwrites_removes_what_killed_ones_of_its_tasks_left(train, tmp_path):
    names = ".rot90.resume.safetensors.new-1", ".rot90.old-1", "snapshots/1/.rot90.new-1", ".mirror.new-1"
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ".tmpAbC").touch()
    train(tmp_path, "ft", tasks=("rot90",), overwrite=True, keep_snapshots=1)
    assert [name for name in names if (tmp_path / name).exists()] == [".mirror.new-1"]  # perhaps another's


def test_what_an_expert_was_trained_beside_is_in_its_manifest_and_not_another_when_it_is_resumed(
    suite, train, tmp_path
):
    one, other = (suite.replace(untrained={"w": torch.full((2,), float(i))}) for i in (1, 2))
    train(tmp_path, "ft", tasks=("rot90",), suite=one)
    manifest = checkpoint.load_manifest(tmp_path / "rot90")
    assert manifest["untrained_fingerprint"] == checkpoint.fingerprint(one.untrained)
    with pytest.raises(ValueError, match=r"untrained_fingerprint was \w+, is \w+"):
        train(tmp_path, "ft", tasks=("rot90",), suite=other, resume=True)


def test_a_snapshot_is_written_beside_training_and_replaces_the_last_one_whole(tmp_path, monkeypatch):
    begun, go, write = threading.Event(), threading.Event(), checkpoint.save_shared
    saver = Saver(tmp_path / "a.safetensors", {})
    saver.save(State({"w": torch.ones(2)}, (), 1), {})
    saver.wait()

    def held(*args):
        write(*args)
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(checkpoint, "save_shared", held)
    saver.save(State({"w": torch.ones(2)}, (), 2), {})  # comes back while the file is being written
    assert begun.wait(60)
    assert resuming.read(saver.path).step == 1
    go.set()
    saver.wait()
    assert resuming.read(saver.path).step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_snapshot_is_due_by_steps_or_by_minutes_since_the_last_one(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resuming.time, "monotonic", lambda: now[0])
    saver = Saver(tmp_path / "a.safetensors", {}, every_steps=10, every_minutes=2.0)
    assert [saver.due(step) for step in (9, 10)] == [False, True]
    now[0] = 120.0
    assert saver.due(3)
    saver.save(State({"w": torch.ones(2)}, (), 3), {})
    saver.wait()
    now[0] = 239.0
    assert not saver.due(4)


def test_a_full_disk_costs_the_snapshot_alone(tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_shared", full)
    saver = Saver(tmp_path / "a.safetensors", {})

    def save():
        saver.save(State({"w": torch.ones(2)}, (), 1), {})
        saver.wait()

    save()
    assert caplog.messages == [
        f"{tmp_path / 'a.safetensors'} cannot be written (no space left): training continues without it"
    ]
    assert list(tmp_path.iterdir()) == []


def command(out, *more):
    return [sys.executable, "-W", "error", str(ROOT / "train.py"), "smat", "--out", str(out), *OPTIONS, *more]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def kill_after(out, process, lines, number):
    """Send a signal once the logs have so many lines; whether that ended the process."""
    while process.poll() is None:
        if sum(log.read_bytes().count(b"\n") for log in out.glob("*.log.jsonl")) >= lines:
            process.send_signal(number)
            break
        time.sleep(0.002)
    return process.wait() != 0


@pytest.mark.slow
def test_a_process_ended_by_signals_ends_with_the_same_weights_and_log(suite, tmp_path, monkeypatch, capsys):
    more = ("--tasks", "rot90", "--steps", "40", "--save-every-steps", "8")
    before = signal.getsignal(signal.SIGINT)

    def here(out, *words):
        monkeypatch.setattr(sys, "argv", command(out, *more, *words)[3:])
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code
        return 0

    cut = tmp_path / "cut"
    process = subprocess.Popen(command(cut, *more), env=environment())
    assert kill_after(cut, process, 18, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert here(tmp_path / "whole") == 0
    after(monkeypatch, 35, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert here(cut, "--resume") == 130
    told = capsys.readouterr()
    assert "rot90: resumes after step " in told.out
    assert "train.py: stopped by signal 2 after 36 steps of rot90; the last good state, after 36 " in told.err
    assert signal.getsignal(signal.SIGINT) is before
    assert here(cut, "--resume") == 0
    assert weights_of(cut, "rot90") == weights_of(tmp_path / "whole", "rot90")
    assert log_of(cut, "rot90") == log_of(tmp_path / "whole", "rot90")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_number_of_signals_at_random_moments(suite, tmp_path, seed):
    more = ("--steps", "120", "--tasks", "rot90", "mirror", "--save-every-minutes", "0.01")
    source = python_random.Random(seed)
    subprocess.run(command(tmp_path / "whole", *more), env=environment(), check=True, capture_output=True)
    cut, ended = tmp_path / "cut", True
    for kills in range(8):
        process = subprocess.Popen([*command(cut, *more), "--resume"], env=environment(), stderr=subprocess.PIPE)
        number = source.choice((signal.SIGKILL, signal.SIGTERM))
        ended = kill_after(cut, process, source.randrange(30 * kills, 30 * kills + 40), number)
        error = process.stderr.read().decode()
        process.stderr.close()
        if not ended:
            break
        assert process.returncode in (-number, 143), error
        assert "Traceback" not in error
    if ended:
        subprocess.run([*command(cut, *more), "--resume"], env=environment(), check=True, capture_output=True)
    for task in ("rot90", "mirror"):
        assert weights_of(cut, task) == weights_of(tmp_path / "whole", task)
        assert log_of(cut, task) == log_of(tmp_path / "whole", task)
