"""What a run keeps beside its experts: snapshots of earlier steps, and Adam's second moments."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import checkpoint, lora, optim, random, testing
from smat_fn.checkpoint import same
from smat_fn.config import DIGITS, Adapters, Training
from smat_fn.grad import value_and_grad
from smat_fn.scripts.evaluate import models
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train import training
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.resuming import Interrupted, Stop
from smat_fn.scripts.train.training import Kept

CONSTANT = Training(steps=6, lr=5e-4, schedule="constant")


def weights(folder):
    return checkpoint.load_leaves(folder)[0]


def stop_at(monkeypatch, step, stop):
    """A signal after so many steps."""
    original = Kept.__call__

    def called(self, number, *rest):
        if number == step:
            stop.signal = 15
        return original(self, number, *rest)

    monkeypatch.setattr(Kept, "__call__", called)


@pytest.mark.parametrize("average", [None, pytest.param("swa:100%", marks=pytest.mark.slow)])
def test_snapshots_are_the_experts_of_shorter_runs(train, suite, tmp_path, average):
    training = replace(CONSTANT, average=average)
    train(tmp_path / "run", tasks=("rot90", "mirror"), training=training, keep_snapshots=2)
    for index, steps in ((1, 2), (2, 4)):
        base, folders = find_inputs(tmp_path / "run" / "snapshots" / str(index))
        assert base == tmp_path / "run" / "base"
        assert [folder.name for folder in folders] == ["mirror", "rot90"]
        short = train_expert(suite, "rot90", DIGITS.methods["smat"], replace(training, steps=steps), seed=21)
        kept, manifest = checkpoint.load_leaves(folders[1])
        assert same(kept, short)
        assert manifest["snapshot"] == {"index": index, "of": 2, "step": steps}
        assert manifest["fingerprint"] == checkpoint.fingerprint(kept)
    plain = train_expert(suite, "rot90", DIGITS.methods["smat"], training, seed=21)
    assert same(weights(tmp_path / "run" / "rot90"), plain)
    assert [path.name for path in find_inputs(tmp_path / "run")[1]] == ["mirror", "rot90"]


def test_before_an_average_begins_a_snapshot_is_the_weights_of_then(train, suite, tmp_path):
    average, method = replace(CONSTANT, average="swa:50%"), DIGITS.methods["smat"]
    train(tmp_path / "run", tasks=("rot90",), training=average, keep_snapshots=2)
    for index, steps in ((1, 2), (2, 4)):  # the average is over steps 3, 4 and 5
        plain = train_expert(suite, "rot90", method, replace(CONSTANT, steps=steps), seed=21)
        assert same(weights(tmp_path / "run" / "snapshots" / str(index) / "rot90"), plain)


def test_a_resumed_run_keeps_the_same(train, tmp_path, monkeypatch):
    options = {"tasks": ("rot90",), "training": CONSTANT, "keep_snapshots": 3, "keep_moments": True}
    train(tmp_path / "whole", **options)
    stop = Stop()
    stop_at(monkeypatch, 4, stop)
    with pytest.raises(Interrupted):
        train(tmp_path / "cut", **options, stop=stop)
    assert not (tmp_path / "cut" / "rot90").exists()
    train(tmp_path / "cut", **options, resume=True)
    places = ["rot90", *(f"snapshots/{i}/rot90" for i in (1, 2, 3))]
    assert all(same(*(weights(tmp_path / run / place) for run in ("whole", "cut"))) for place in places)
    moments = [(tmp_path / run / "rot90" / "adam.safetensors").read_bytes() for run in ("whole", "cut")]
    assert moments[0] == moments[1]
    with pytest.raises(ValueError, match="trained with other settings: keep_snapshots was 3"):
        train(tmp_path / "cut", **options | {"keep_snapshots": 2}, resume=True)


def test_moments_are_the_mean_of_squared_gradients_with_adams_weights(train, suite, tmp_path):
    train(tmp_path / "run", "ft", tasks=("rot90",), training=replace(CONSTANT, steps=2), keep_moments=True)
    run_key = random.fold_in(random.key(21), "rot90")
    first = train_expert(suite, "rot90", DIGITS.methods["ft"], replace(CONSTANT, steps=1), seed=21)
    squares = []
    for step, params in enumerate((suite.base, first)):
        grads = value_and_grad(suite.loss_fn("rot90"))(params, suite.batch("rot90", run_key, step))[1]
        norm = float(sum(leaf.double().square().sum() for leaf in grads.values()) ** 0.5)
        limit = CONSTANT.max_grad_norm or float("inf")
        squares.append({path: (leaf * min(1, limit / norm)).square() for path, leaf in grads.items()})
    expected = {path: (0.999 * leaf + squares[1][path]) / 1.999 for path, leaf in squares[0].items()}
    file = tmp_path / "run" / "rot90" / "adam.safetensors"
    found = load_file(file)
    assert {leaf.dtype for leaf in found.values()} == {torch.bfloat16}
    assert set(found) == set(suite.base)
    for path, leaf in found.items():
        scale = float(expected[path].max())
        torch.testing.assert_close(leaf.float(), expected[path], rtol=2**-7, atol=1e-4 * scale)
    facts = checkpoint.statistics_facts(file)
    assert facts["expert"] == checkpoint.load_manifest(file.parent)["fingerprint"]


@pytest.mark.parametrize("name", ["smat", "asam", "mergopt", "orthoreg"])
def test_every_method_keeps_moments(train, suite, tmp_path, name):
    training = replace(CONSTANT, steps=2, optimizer="adamw", weight_decay=0.1, decay_matrices=True, average="ema:0.5")
    train(tmp_path / name, name, tasks=("rot90",), training=training, keep_moments=True)
    found = load_file(tmp_path / name / "rot90" / "adam.safetensors")
    assert set(found) == set(suite.base)
    assert all(leaf.isfinite().all() for leaf in found.values())


def test_what_cannot_be_kept_is_refused_before_training(train, suite, tmp_path):
    plain = suite.replace(loss_fn=lambda task: lambda params, batch: (params["head"].sum(), None))
    with pytest.raises(ValueError, match=r"^statistics gram: Gram matrices need the layers of a module"):
        train(tmp_path / "no", suite=plain, statistics=("gram",))
    muon = {"optimizer": "muon", "muon_lr": 1e-2}
    for change, what in (({"lora": Adapters(3, 6.0)}, "adapters"), (muon, "matrices under muon")):
        with pytest.raises(ValueError, match=f"keep_moments: {what} have none"):
            train(tmp_path / "no", training=replace(CONSTANT, **change), keep_moments=True)
    with pytest.raises(ValueError, match=r"keep_snapshots is 6, must be below the steps of rot90 \(6 steps\)"):
        train(tmp_path / "no", training=CONSTANT, tasks=("rot90",), keep_snapshots=6)
    with pytest.raises(ValueError, match="keep_snapshots is -1, must not be negative"):
        train(tmp_path / "no", training=CONSTANT, keep_snapshots=-1)
    assert not (tmp_path / "no").exists()


def test_snapshots_of_an_earlier_run_are_not_replaced_unasked(train, tmp_path):
    options = {"tasks": ("rot90",), "training": replace(CONSTANT, steps=2), "keep_snapshots": 1}
    train(tmp_path / "run", **options)
    (tmp_path / "run" / "rot90").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="snapshots/1/rot90 exists"):
        train(tmp_path / "run", **options)
    train(tmp_path / "run", **options, overwrite=True)
    old, mark = tmp_path / "run/snapshots/1/rot90", tmp_path / f"run/.rot90{checkpoint.REPLACED}"
    copy = shutil.copytree(old, tmp_path / "copy")
    train(tmp_path / "run", **options | {"keep_snapshots": 0}, overwrite=True)
    assert not old.exists()  # they would count as the new expert's
    # killed after the new expert was written
    shutil.copytree(copy, old)
    mark.write_text("the old one's fingerprint")
    train(tmp_path / "run", **options | {"keep_snapshots": 0}, resume=True)
    assert (old.exists(), mark.exists()) == (False, False)


def test_adapters_have_snapshots_too_and_tell_which_leaves_they_change(train, suite, tmp_path):
    training = replace(CONSTANT, steps=2, lora=Adapters(3, 6.0))
    train(tmp_path / "run", tasks=("rot90",), training=training, keep_snapshots=1)
    snapshot = tmp_path / "run" / "snapshots" / "1" / "rot90"
    assert (snapshot / "adapter_model.safetensors").exists()
    own = checkpoint.fingerprint({path: suite.base[path] for path in lora.load_peft(snapshot)[1].paths})
    for folder in (snapshot, tmp_path / "run" / "rot90"):
        assert checkpoint.load_manifest(folder)[checkpoint.ADAPTED] == own


def test_second_moments_are_corrected_for_their_start():
    optimizer, params = optim.adam(1e-3), {"w": torch.ones(3)}
    _, state = optimizer.update({"w": torch.tensor([1.0, 2.0, 0.0])}, optimizer.init(params), params)
    testing.assert_trees_close(optim.second_moments(state), {"w": torch.tensor([1.0, 4.0, 0.0])}, rtol=1e-5)


def test_the_name_of_a_task_is_no_pattern(tmp_path):
    for folder in (tmp_path / "a[1]", tmp_path / "snapshots" / "1" / "a[1]", tmp_path / "snapshots" / "1" / "a1"):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(
            json.dumps({"kind": "expert", "label": "old", "fingerprint": folder.name})
        )
    said = training._relabelled(RunOptions(tmp_path, ("a[1]",), 0, label="new"), "a[1]")
    assert said == ", label old is now new"
    labels = [json.loads(file.read_text())["label"] for file in sorted(tmp_path.rglob("manifest.json"))]
    assert sorted(labels) == ["new", "new", "old"]
    assert models._snapshots(tmp_path / "a[1]") == ["a[1]"]
