"""train.py with adapters and with several processes, as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import checkpoint, lora
from smat_fn.config import DIGITS, Adapters, Asam, Dev, Finetune, Mergopt, Msam, Orthoreg, Smat, resolve
from smat_fn.models import FullLoss
from smat_fn.parallel import World
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train import resuming
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.options import RunOptions, check_run
from smat_fn.scripts.train.training import train_run
from smat_fn.scripts.train.variants import adapters_of, offload_of, problems, training_settings
from smat_fn.suites import load_suite

ROOT = Path(__file__).parents[2]
TINY = {"pretrain_steps": 10, "images_per_task": 120}
SHORT = ("--steps", "6", "--suite-options", *(str(word) for pair in TINY.items() for word in pair))


def training(**changes):
    return DIGITS.training.__class__(**{**vars(DIGITS.training), "steps": 6, "lr": 1e-2, **changes})


@pytest.fixture(scope="module")
def suite(_own_cache):
    return load_suite("digits", seed=21, progress=False, **TINY)


@pytest.mark.usefixtures("_own_cache")
def test_adapters_are_of_the_layers_that_are_trained():
    loss = load_suite("digits", seed=21, progress=False, train="attention", **TINY).loss_fn("rot90")
    assert all(".attention." in path for path in adapters_of(loss, training(lora=Adapters(3, 6.0))).paths)
    assert len(adapters_of(loss, training(lora=Adapters(3, 6.0, ("q_proj",)))).paths) == 2
    with pytest.raises(ValueError, match=r"frozen by train or train_layers: layers\.0\.mlp\.fc1\.weight, layers"):
        adapters_of(loss, training(lora=Adapters(3, 6.0, ("fc1",))))
    outside = load_suite("digits", seed=21, progress=False, train="layernorm.*", **TINY).loss_fn("rot90")
    with pytest.raises(ValueError, match="in blocks: all are frozen by train or train_layers, leave that out"):
        adapters_of(outside, training(lora=Adapters(3, 6.0)))
    without = FullLoss(torch.nn.Linear(2, 2), lambda module, batch: (module(batch).sum(), None))
    with pytest.raises(ValueError, match="in blocks: the model has none, or leave out `lora_rank`"):
        adapters_of(without, training(lora=Adapters(3, 6.0)))


@pytest.mark.usefixtures("_own_cache")
def test_frozen_parameters_in_float32_train_mixed_and_not_in_bf16(tmp_path):
    some = load_suite("digits", seed=21, progress=False, train="attention", **TINY)
    ft, run = Finetune(), RunOptions(tmp_path / "run", ["rot90"], 4)
    with pytest.raises(ValueError, match="digits keeps frozen parameters in float32, take mixed or fp32"):
        train_run(some, ft, training(precision="bf16"), run)
    assert train_run(some, ft, training(precision="mixed"), run)


@pytest.mark.parametrize(
    ("config", "simulate"),
    [
        (Smat, "merged"),
        (Smat, "factors"),
        *(pytest.param(Asam, simulate, marks=pytest.mark.slow) for simulate in ("merged", "factors")),
        *(
            pytest.param(config, simulate, marks=pytest.mark.slow)
            for config in (Finetune, Mergopt, Orthoreg) for simulate in ("merged", "factors")
        ),
    ],
)  # fmt: skip
def test_every_method_trains_adapters_that_are_read_as_experts(config, simulate, suite, tmp_path):
    method, own = resolve(config(), DIGITS.methods), Adapters(3, 6.0, ("*attention*",), simulate)
    train_run(suite, method, training(lora=own, accumulate=2), RunOptions(tmp_path / "run", ["rot90"], 4))
    folder = tmp_path / "run" / "rot90"
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    adapters, spec = lora.load_peft(folder)
    assert (spec.rank, spec.alpha) == (3, 6.0)
    assert all("attention" in path for path in spec.paths)
    assert all(leaf.abs().max() > 0 for name, leaf in adapters.items() if "lora_B" in name)
    manifest = checkpoint.load_manifest(folder)
    assert manifest["training"]["lora"] == {"rank": 3, "alpha": 6.0, "targets": ["*attention*"], "simulate": simulate}
    inputs = load_inputs(*find_inputs(tmp_path / "run"))
    changed = {p for p, leaf in inputs.experts["rot90"].items() if not torch.equal(leaf, suite.base[p])}
    assert changed == set(spec.paths)
    assert manifest["fingerprint"] == checkpoint.fingerprint(inputs.experts["rot90"])
    assert 0 <= evaluate([folder])[0].score <= 100


def test_smat_at_the_merged_weight_is_another_training_than_at_the_factors(suite, tmp_path):
    found = {}
    for simulate in ("merged", "factors"):
        own = training(lora=Adapters(3, 6.0, (), simulate))
        train_run(suite, DIGITS.methods["smat"], own, RunOptions(tmp_path / simulate, ["rot90"], 4))
        found[simulate] = lora.load_peft(tmp_path / simulate / "rot90")[0]
    assert not any(torch.equal(found["merged"][name], leaf) for name, leaf in found["factors"].items())


def test_what_does_not_go_together_is_listed():
    smat = DIGITS.methods["smat"]
    alone, several = World(), World(0, 2)
    assert problems(smat, training(), alone) == []
    assert problems(smat, training(independent_draws=True), several) == []
    both = training(lora=Adapters(0, -1.0), independent_draws=True)
    texts = "; ".join(problems(resolve(Smat(lam=0.5), DIGITS.methods), both, alone, "cpu"))
    for part in (
        "rank is 0",
        "alpha is -1.0",
        "`lam=0.5` is not supported with",
        "`offload='cpu'`",
        "start with torchrun",
        "require the method smat without adapters",
    ):
        assert part in texts
    assert problems(smat, training(lora=Adapters(0, 0)), alone) == ["lora rank is 0, must be at least 1"]
    twice = resolve(Smat(lam=0.5, period=2), DIGITS.methods)
    assert problems(twice, training(), alone) == ["lam 0.5 replaces the period: leave out --lam or --period 2"]
    assert problems(smat, training(), several, "recompute") == [
        "`offload='recompute'` is not supported with several processes: leave it out"
    ]


def test_options_of_a_climb_and_of_pairs_are_of_their_own(suite):
    alone, smat = World(), DIGITS.methods["smat"]
    assert problems(replace(smat, rho=0.9), training(), alone) == [
        "rho 0.9 is the length of a climb, and there is none: give --climb, or leave out --rho"
    ]
    assert problems(replace(smat, rho=0.9, climb="both"), training(), alone) == []
    paired = replace(smat, antithetic=True, alpha_depth=(0.5, 1.5))
    assert problems(paired, training(), alone) == problems(paired, training(shard=True), World(0, 2)) == []


def test_the_number_of_processes_is_a_setting_where_draws_depend_on_it():
    for changes in ({"independent_draws": True}, {"dropout": True}, {"lora": Adapters(2, 4.0, dropout=0.1)}):
        own = training(**changes)
        assert training_settings(own, World(0, 2)) == {**training_settings(own), "processes": 2}
        one, two = ({"training": training_settings(own, World(0, size))} for size in (1, 2))
        assert resuming.differences(two, one) == ["training.processes was 2, is left out"]
    assert training_settings(training(), World(0, 2)) == training_settings(training())


def test_modules_that_are_trained_whole_beside_factors_are_masked_as_without_adapters(suite):
    own, base = training(lora=Adapters(3, 6.0, (), "factors", save=("layernorm",)), schedule="constant"), suite.base
    masking = Smat(alpha_min=1.0, drop_prob=0.9, sigma=0.0, period=1, noise="uniform")
    trained = train_expert(suite, "rot90", masking, replace(own, steps=1), seed=4)
    saved = [path for path in trained if ".lora_" not in path]
    assert saved
    assert all((trained[path] != base[path]).all() for path in saved)


def started(*words):
    """train.py in two processes; they find each other on a port of their own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / "train.py",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*map(str, command), *map(str, words)], stdout=pipe, stderr=pipe, text=True, env=environment
    )


def torchrun(*words):
    process = started(*words)
    out, error = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, out, error)


def test_what_shards_do_not_go_with_is_named(tmp_path):
    smat, sharded = DIGITS.methods["smat"], training(shard=True)
    all_but = replace(sharded, optimizer="muon", average="ema:0.9", dropout=True, precision="mixed")
    for method in (smat, DIGITS.methods["asam"], Msam(), replace(smat, lam=0.3, period=None, climb="both")):
        assert problems(method, all_but, World(0, 2)) == []
    assert problems(smat, sharded, World()) == ["`shard` needs several processes: start with torchrun"]
    other = replace(sharded, lora=Adapters(2, 4.0), independent_draws=True, compiled=True, dev=Dev(2, "loss", None))
    texts = problems(DIGITS.methods["orthoreg"], other, World(0, 2), "cpu")
    names = "`compile`", "independent draws", "`offload='cpu'`"
    assert {f"`shard` is not supported with {name}: leave one of them out" for name in names} <= set(texts)
    orthoreg, adapters = DIGITS.methods["orthoreg"], replace(sharded, lora=Adapters(2, 4.0))
    texts = problems(orthoreg, sharded, World(0, 2))
    assert texts == ["`shard` is not supported with orthoreg, which looks at whole parameters: leave it out"]
    assert problems(orthoreg, adapters, World(0, 2)) == []
    assert problems(smat, replace(sharded, dev=Dev(2, "loss", None)), World(0, 2)) == []
    run = RunOptions(tmp_path, ["rot90"], 0, keep_snapshots=1)
    check_run(smat, adapters, run, known=("rot90",), world=World(0, 2))
    check_run(smat, sharded, replace(run, keep_moments=True), known=("rot90",), world=World(0, 2))
    probed = RunOptions(tmp_path, ["rot90"], 0, probe=2, probe_at=smat)
    check_run(Finetune(), sharded, probed, known=("rot90",), world=World(0, 2))
    probed = replace(probed, probe_at=replace(smat, sigma="auto"))
    check_run(Finetune(), sharded, probed, known=("rot90",), world=World(0, 2))
    assert problems(replace(smat, sigma="auto"), sharded, World(0, 2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--shard",)], ids=["replicas", "shards"])
def test_two_processes_train_the_expert_of_one(how, suite, tmp_path):
    words = ("smat", "--tasks", "rot90", "mirror", "--seed", "21", *how, *SHORT)
    process = torchrun(*words, "--out", tmp_path / "two")
    assert process.returncode == 0, process.stderr
    first, *rest = process.stdout.splitlines()
    kind = "sharded, 2 processes" if how else "2 processes"
    assert first == f"smat on digits: learning rate 0.0005 (preset digits), 6 steps, {kind}, seed 21"
    trained = [line for line in rest if line.startswith("expert: ")]  # beside warnings of so short a run
    assert trained == [f"expert: {tmp_path / 'two' / task}" for task in ("rot90", "mirror")]
    own = DIGITS.training.__class__(**{**vars(DIGITS.training), "steps": 6, "lr": 5e-4})
    train_run(suite, DIGITS.methods["smat"], own, RunOptions(tmp_path / "one", ["rot90", "mirror"], 21))
    logs = {}
    for name in ("one", "two"):
        lines = (tmp_path / name / "mirror.log.jsonl").read_text().splitlines()
        logs[name] = [row for row in map(json.loads, lines) if "step" in row]
    assert [row["step"] for row in logs["two"]] == list(range(6))
    for a, b in zip(logs["one"], logs["two"], strict=True):
        assert a["simulated"] == b["simulated"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
    for task in ("rot90", "mirror"):
        one, two = (load_file(tmp_path / name / task / "model.safetensors") for name in ("one", "two"))
        # Adam turns rounding of a gradient near zero into a step of its learning rate
        moved = sum((one[path] - leaf).square().sum() for path, leaf in suite.base.items())
        apart = sum((one[path] - two[path]).square().sum() for path in one)
        assert apart < 1e-3 * moved
    assert checkpoint.load_manifest(tmp_path / "two" / "mirror")["processes"] == 2
    # and again: nothing is trained a second time
    again = torchrun(*words, "--out", tmp_path / "two", "--resume")
    assert again.returncode == 0, again.stderr
    assert "mirror: already finished" in again.stdout


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_once_and_the_run_goes_on_to_the_same_bits(suite, tmp_path):
    length = ("--steps", "40", *SHORT[2:], "--save-every-minutes", "inf")
    words = ("smat", "--tasks", "rot90", "--seed", "21", *length)
    whole = torchrun(*words, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    process, log = started(*words, "--out", tmp_path / "cut"), tmp_path / "cut" / "rot90.log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert error.count("train.py: stopped by signal 15 after ") == 1, error
    snapshot = resuming.read(resuming.path_of(tmp_path / "cut", "rot90"))
    assert 5 < snapshot.step < 40
    again = torchrun(*words, "--out", tmp_path / "cut", "--resume")
    assert again.returncode == 0, again.stderr
    assert f"rot90: resumes after step {snapshot.step} of 40" in again.stdout
    prints = {checkpoint.load_manifest(tmp_path / name / "rot90")["fingerprint"] for name in ("whole", "cut")}
    assert len(prints) == 1


class _OnGpu:
    is_cuda = True


def test_the_papers_memory_is_the_default_where_it_costs_neither_bits_nor_waits():
    smat, gpu = DIGITS.methods["smat"], {"w": _OnGpu()}
    assert offload_of(smat, training(), "auto", gpu) == "cpu"
    assert offload_of(smat, training(), "device", gpu) is None
    assert offload_of(smat, training(), "stream", gpu) == "stream"
    for own, how, base in (
        (smat, training(), {"w": torch.zeros(2)}),
        (smat, training(), None),
        (smat, training(lora=Adapters(2, 4.0)), gpu),
        (smat, training(independent_draws=True), gpu),
        (replace(smat, lam=0.3, period=None), training(), gpu),
        (replace(smat, period=1), training(), gpu),
        (replace(smat, sigma_of="leaf"), training(), gpu),
        (DIGITS.methods["orthoreg"], training(), gpu),
    ):
        assert offload_of(own, how, "auto", base) is None
    assert offload_of(DIGITS.methods["ft"], training(), "cpu", gpu) is None
