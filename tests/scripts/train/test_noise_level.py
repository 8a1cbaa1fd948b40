"""Sigma from the size of updates: measured on a run of ft beside, estimated by short ones, kept when resumed."""

import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from smat_fn import analyses, checkpoint, lora
from smat_fn.config import DIGITS, Adapters, Finetune, Training
from smat_fn.parallel import ALONE
from smat_fn.scripts.analyse import weights
from smat_fn.scripts.train import noise_level
from smat_fn.scripts.train.options import RunOptions, check_run, experts_to_merge
from smat_fn.scripts.train.resuming import Interrupted, Stop, on_signals
from smat_fn.scripts.train.training import train_run

SMAT = replace(DIGITS.methods["smat"], sigma="auto")
SIX = Training(steps=6, lr=5e-4)


def manifest(folder):
    return checkpoint.load_manifest(folder)


def test_sigma_is_that_of_a_run_of_ft_beside_it(suite, runs, train, tmp_path):
    shutil.copytree(runs["ft"], tmp_path / "other-steps")
    shutil.copytree(runs["smat"], tmp_path / "another-method")
    shutil.copytree(runs["ft"], tmp_path / "a-other-rate")
    shutil.copytree(runs["ft"], tmp_path / "ft")
    changes = {"other-steps": ('"steps": 6', '"steps": 7'), "a-other-rate": ('"lr": 0.0005', '"lr": 0.001')}
    for task in suite.tasks:  # no longer what this run would be compared with
        for name, change in changes.items():
            path = tmp_path / name / task / "manifest.json"
            path.write_text(path.read_text().replace(*change))
    told = []
    train(tmp_path / "smat", method=SMAT, tasks=("rot90",), report=told.append)
    experts = {task: checkpoint.load_leaves(runs["ft"] / task)[0] for task in suite.tasks}
    whole = analyses.diagnose(suite.base, experts, dict.fromkeys(suite.base, "other"))[-1]
    stored = manifest(tmp_path / "smat/rot90")
    assert stored["hyperparameters"]["sigma"] == analyses.suggested_sigma(whole)
    assert (stored["sigma_from"]["run"], stored["sigma_from"]["update"]) == ("ft", whole.delta)
    sigma = stored["hyperparameters"]["sigma"]
    assert told[0] == f"sigma auto: {sigma:g}, the RMS of the other experts' updates in ft at gamma 0.3"
    shutil.rmtree(tmp_path / "ft")
    train(tmp_path / "again", method=SMAT, tasks=("rot90",), report=told.append)
    said = next(line for line in told[1:] if line.startswith("sigma auto"))
    assert said.endswith("updates in a-other-rate (learning rate 0.001, here 0.0005) at gamma 0.3")


def test_a_run_of_ft_with_the_same_seed_comes_before_one_with_the_same_learning_rate(suite, runs, tmp_path):
    changes = {"a-seed": ('"seed": 21', '"seed": 22'), "b-rate": ('"lr": 0.0005', '"lr": 0.001')}
    for name, change in changes.items():
        shutil.copytree(runs["ft"], tmp_path / name)
        for path in (tmp_path / name).glob("*/manifest.json"):
            path.write_text(path.read_text().replace(*change))
    run = RunOptions(tmp_path / "smat", ("rot90",), 21)
    assert noise_level.with_sigma(suite, SMAT, SIX, run)[1]["run"] == "b-rate"
    assert noise_level.with_sigma(suite, SMAT, SIX, replace(run, seed=22))[1]["run"] == "a-seed"


def test_a_signal_ends_the_estimate_at_once(train, tmp_path, monkeypatch):
    monkeypatch.setattr(noise_level, "train_expert", lambda *a, **options: signal.raise_signal(signal.SIGTERM))
    told = r"^stopped by signal 15 before the first step: rerun the command$"
    with pytest.raises(Interrupted, match=told), on_signals() as stop:
        train(tmp_path / "smat", method=SMAT, tasks=("rot90",), stop=stop)


def test_a_run_beside_it_with_a_damaged_manifest_is_no_error(train, tmp_path):
    (tmp_path / "damaged/rot90").mkdir(parents=True)
    (tmp_path / "damaged/rot90/manifest.json").write_text('{"kind": "expert", "suite": 3}')
    told = []
    train(tmp_path / "smat", method=SMAT, tasks=("rot90", "mirror"), report=told.append)
    assert "holds no matching run of ft (damaged has a manifest that cannot be read); estimating it" in told[0]


def test_sigma_is_estimated_where_there_is_no_run_of_ft(suite, train, tmp_path):
    told = []
    train(tmp_path / "smat", method=SMAT, tasks=("rot90", "mirror"), report=told.append)
    stored = manifest(tmp_path / "smat/rot90")
    assert told[0].startswith(f"sigma auto: {tmp_path} holds no matching run of ft; estimating it from 9 steps of ft")
    # others: the suite's tasks, not the run's
    expected = noise_level.COEF * (len(suite.tasks) - 1) ** 0.5 * stored["sigma_from"]["update"]
    assert stored["hyperparameters"]["sigma"] == float(f"{expected:.2g}") > 0
    given = replace(SMAT, sigma=stored["hyperparameters"]["sigma"])
    train(tmp_path / "given", method=given, tasks=("rot90",))
    assert "sigma_from" not in manifest(tmp_path / "given/rot90")
    assert manifest(tmp_path / "given/rot90")["fingerprint"] == stored["fingerprint"]
    for tasks in (("rot90",), ("mirror",)):  # before anything is measured
        with pytest.raises(ValueError, match=f"experts of sigma {given.sigma:g}, .*: give sigma {given.sigma:g}, or"):
            noise_level.with_sigma(suite, SMAT, SIX, RunOptions(tmp_path / "given", tasks, 21))


def test_sigma_of_adapters_is_over_the_weights_that_they_change(suite, train, tmp_path):
    training, told = replace(SIX, lora=Adapters(2, 4.0, targets=("q_proj",))), []
    train(tmp_path / "ft", "ft", training=training)
    train(tmp_path / "smat", method=SMAT, tasks=("rot90",), training=training, report=told.append)
    (tmp_path / "alone").mkdir()
    train(tmp_path / "alone/smat", method=SMAT, tasks=("rot90", "mirror"), training=training)
    found = {task: lora.load_expert(tmp_path / "ft" / task, suite.base)[0] for task in suite.tasks}
    paths = lora.load_peft(tmp_path / "ft/rot90")[1].paths
    assert 0 < len(paths) < len(suite.base)
    base = {path: suite.base[path] for path in paths}
    experts = {task: {path: own[path] for path in paths} for task, own in found.items()}
    whole = analyses.diagnose(base, experts, dict.fromkeys(paths, "other"))[-1]
    stored = manifest(tmp_path / "smat/rot90")
    assert stored["hyperparameters"]["sigma"] == analyses.suggested_sigma(whole)
    suggested = weights.diagnose(weights.Diagnose(run=tmp_path / "ft"))["settings"]["suggested_sigma"]
    assert suggested == stored["hyperparameters"]["sigma"]
    estimate = manifest(tmp_path / "alone/smat/rot90")["sigma_from"]["update"]
    assert 0.5 < estimate / whole.delta < 4  # over all weights of the model it would be a tenth
    update = float(
        next(line for line in told if "times the RMS of the update" in line).split("the update, ")[1].split(",")[0]
    )
    own = lora.load_expert(tmp_path / "smat/rot90", suite.base)[0]
    moved = torch.cat([(own[path] - suite.base[path]).flatten() for path in paths])
    assert update == pytest.approx(moved.square().mean().sqrt().item(), rel=0.05)


def test_a_probe_has_a_sigma_of_its_own(suite, train, tmp_path):
    given, told = replace(SMAT, sigma=0.02), []
    options = {"method": given, "probe": 1, "probe_at": SMAT, "report": told.append}
    train(tmp_path / "smat", tasks=("rot90",), **options)
    first = manifest(tmp_path / "smat/rot90")
    train(tmp_path / "smat", tasks=("rot90",), resume=True, **options)
    assert told[-1] == "rot90: already finished"
    train(tmp_path / "smat", tasks=("mirror",), **options)
    second = manifest(tmp_path / "smat/mirror")
    assert first["hyperparameters"]["sigma"] == second["hyperparameters"]["sigma"] == 0.02
    assert first["probe"]["sigma"] == second["probe"]["sigma"] != 0.02


def test_runs_of_ft_that_do_not_fit_say_why(suite, runs, train, tmp_path):
    for name in ("another", "partly", "steps"):
        shutil.copytree(runs["ft"], tmp_path / name)
    shutil.copytree(runs["smat"], tmp_path / "smat0")
    shutil.rmtree(tmp_path / "partly/mirror")
    for name, old, new in [("another", '"base_fingerprint": "', '"base_fingerprint": "x'), ("steps", ": 6", ": 7")]:
        path = tmp_path / name / "rot90/manifest.json"
        path.write_text(path.read_text().replace(old, new))
    told = []
    train(tmp_path / "smat", method=SMAT, tasks=("rot90",), report=told.append)
    assert told[0].startswith(
        f"sigma auto: {tmp_path} holds no matching run of ft (another has another base, partly lacks mirror, "
        "steps trained rot90 for 7 steps, here 6); estimating it from 9 steps of ft a task"
    )


def test_a_learning_rate_at_which_a_short_run_diverges_is_named(suite, tmp_path):
    run = RunOptions(tmp_path / "smat", ("rot90",), 21)
    huge = replace(SIX, lr=1e25)
    with pytest.raises(
        ValueError, match=r"^sigma auto, a short run of ft: loss of rot90 is nan at step 1, on training r"
    ):
        noise_level.with_sigma(suite, SMAT, huge, run)
    # one step: its loss is that of the base, but its weights are not finite
    with pytest.raises(
        ValueError, match=r"update of rot90 is (nan|inf) after 1 steps of ft at learning rate 1e\+39: low"
    ):
        noise_level._moved(suite, "rot90", replace(SIX, lr=1e39), 1, 21, ALONE)


def test_messages_on_rates_and_estimates_take_muons_own(suite, runs, tmp_path):
    run, muon = RunOptions(tmp_path / "smat", ("rot90",), 21), replace(SIX, lr=0.0, optimizer="muon", muon_lr=0.01)
    assert 0 < noise_level.with_sigma(suite, SMAT, muon, run)[0].sigma < 1
    still = r"no parameter moves in 6 steps of ft on rot90 at learning rate 0 with muon_lr 0: give another one"
    with pytest.raises(ValueError, match=still):
        noise_level.with_sigma(suite, SMAT, replace(muon, muon_lr=0.0), run)
    shutil.copytree(runs["ft"], tmp_path / "ft")
    said = noise_level.with_sigma(suite, SMAT, replace(SIX, optimizer="muon", muon_lr=0.01), run)[1]["from"]
    assert said.endswith("updates in ft (learning rate 0.0005, here 0.0005 with muon_lr 0.01) at gamma 0.3")


def test_an_estimate_is_near_the_update_of_the_whole_run(suite, tmp_path):
    training = Training(steps=20, lr=5e-4)
    run = RunOptions(tmp_path / "smat", ("rot90",), 21)
    method, origin = noise_level.with_sigma(suite, SMAT, training, run)
    again, _ = noise_level.with_sigma(suite, SMAT, training, run)
    assert method == again
    train_run(suite, Finetune(), training, RunOptions(tmp_path / "whole", ("rot90",), 21))
    params = checkpoint.load_leaves(tmp_path / "whole/rot90")[0]
    assert 1 / 1.5 < origin["update"] / noise_level.update_rms(params, suite.base) < 1.5


@pytest.mark.parametrize("steps", [7, 230, 400])  # short runs of 7 and 3, 11 and 5, 20 and 10 steps
def test_a_power_of_the_steps_is_extrapolated_exactly(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(noise_level, "_moved", lambda suite, task, training, steps, seed, world: 1e-3 * steps**0.75)
    stub = SimpleNamespace(tasks=("a", "b"), epoch_steps=None)
    training, run = Training(steps=steps, lr=1e-3, schedule="constant"), RunOptions(tmp_path, ("a", "b"), 0)
    _, origin = noise_level._estimated(stub, training, run, lambda line: None, "", ALONE)
    assert origin["update"] == pytest.approx(1e-3 * steps**0.75, rel=1e-5)


@pytest.mark.parametrize(("power", "taken"), [(0.2, 0.5), (2.0, 1.0)])
def test_a_power_is_at_least_that_of_random_steps_and_at_most_that_of_equal_ones(power, taken, tmp_path, monkeypatch):
    monkeypatch.setattr(noise_level, "_moved", lambda suite, task, training, steps, seed, world: 1e-3 * steps**power)
    stub = SimpleNamespace(tasks=("a", "b"), epoch_steps=None)
    training, run = Training(steps=400, lr=1e-3, schedule="constant"), RunOptions(tmp_path, ("a", "b"), 0)
    _, origin = noise_level._estimated(stub, training, run, lambda line: None, "", ALONE)
    assert origin["update"] == pytest.approx(1e-3 * 20**power * (400 / 20) ** taken, rel=1e-5)


def test_a_short_run_is_not_averaged(suite):
    moved = [noise_level._moved(suite, "rot90", replace(SIX, average=name), 2, 21, ALONE) for name in (None, "ema:0.9")]
    assert moved[0] == moved[1] > 0


def test_a_resumed_run_keeps_its_sigma(suite, runs, train, tmp_path):
    stop = Stop()

    def ends(line):
        stop.signal = 15 if line.startswith("sigma auto") and "ft trains" not in line else None

    with pytest.raises(Interrupted):  # before its first step: no snapshot without a log of one
        train(tmp_path / "smat", method=SMAT, tasks=("rot90",), report=ends, stop=stop)
    train(tmp_path / "whole", method=SMAT, tasks=("rot90",))
    shutil.copytree(runs["ft"], tmp_path / "ft")  # would give another sigma by now
    train(tmp_path / "smat", method=SMAT, tasks=("rot90",), resume=True)
    assert manifest(tmp_path / "smat/rot90")["fingerprint"] == manifest(tmp_path / "whole/rot90")["fingerprint"]
    assert manifest(tmp_path / "smat/rot90")["sigma_from"] == manifest(tmp_path / "whole/rot90")["sigma_from"]
    more = RunOptions(tmp_path / "smat", ("mirror",), 21, resume=True)  # experts of one run have one sigma
    kept = manifest(tmp_path / "smat/rot90")["hyperparameters"]["sigma"]
    assert noise_level.with_sigma(suite, SMAT, SIX, more)[0] == replace(SMAT, sigma=kept)
    own, later, said = suite.replace(tasks=("mirror",)), replace(more, resume=False), list[str]()
    assert noise_level.with_sigma(own, SMAT, SIX, later, report=said.append)[0] == replace(SMAT, sigma=kept)
    assert said[0].startswith(f"sigma auto: {kept:g}, that of the experts in {tmp_path / 'smat'}: 0.3 times the root")
    anew = replace(later, overwrite=True)  # of another task, then of the only one that the folder has
    assert noise_level.with_sigma(suite, SMAT, SIX, anew)[0] == replace(SMAT, sigma=kept)
    assert noise_level.with_sigma(suite, SMAT, SIX, replace(anew, tasks=("rot90",)))[1]["run"] == "ft"
    assert experts_to_merge(later, ("mirror",), said.append) == 2
    manifest_file = tmp_path / "smat/rot90/manifest.json"
    manifest_file.write_text(
        manifest_file.read_text().replace('"hyperparameters": {', '"hyperparameters": {"k_max": 5,')
    )
    assert [experts_to_merge(x, ("mirror",), said.append) for x in (later, anew)] == [5, 5]
    for name, kind in {"whole": "exported", ".left": "expert"}.items():  # beside it, and left by a run that was killed
        text = manifest_file.read_text().replace('"kind": "expert"', f'"kind": "{kind}"')
        (tmp_path / "smat" / name).mkdir()
        (tmp_path / "smat" / name / "manifest.json").write_text(text)
    assert experts_to_merge(replace(anew, tasks=("rot90",)), ("mirror",), said.append) == 2


@pytest.mark.parametrize(
    ("method", "training", "told"),
    [
        (replace(SMAT, sigma_of="update"), SIX, "leave out sigma_of update"),
        (SMAT, replace(SIX, lora=Adapters(2, 4.0, simulate="factors")), "not of the factors of adapters"),
    ],
)
def test_other_units_are_refused(suite, tmp_path, method, training, told):
    with pytest.raises(ValueError, match=told):
        check_run(method, training, RunOptions(tmp_path, ("rot90",), 1), known=suite.tasks)
    check_run(SMAT, SIX, RunOptions(tmp_path, ("rot90",), 1), known=suite.tasks)


def test_a_mask_without_anything_to_act_on_is_told_before_a_sigma_is_looked_for(suite, train, tmp_path):
    told = []
    own = suite.replace(where=lambda path, leaf: False)
    with pytest.raises(ValueError, match="Mask has nothing to act on"):
        train(tmp_path, method=SMAT, suite=own, tasks=("rot90",), report=told.append)
    assert told == []


def test_rows_of_tasks_that_are_not_trained_are_not_needed(suite, runs, train, tmp_path, monkeypatch):
    shutil.copytree(runs["ft"], tmp_path / "ft")
    real = noise_level.budget

    def budget(own, task, training):
        if task != "rot90":
            raise KeyError((task, "train"))  # as suites of rows that read those of --tasks alone
        return real(own, task, training)

    monkeypatch.setattr(noise_level, "budget", budget)
    train(tmp_path / "smat", method=SMAT, tasks=("rot90",))
    assert manifest(tmp_path / "smat/rot90")["sigma_from"]["run"] == "ft"
