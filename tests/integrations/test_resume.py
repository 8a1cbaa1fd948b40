"""Runs that are resumed wrongly, trained before, or have no simulated step are an error or a warning."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import random
from smat_fn.integrations import theta_0
from smat_fn.integrations.trainer import attach
from smat_fn.testing import assert_trees_equal

from .test_attach import copies, own_trainer, same
from .test_trainer import KEY, STEPS, STRENGTHS, tiny_llama, trainer_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
FILE = "smat_theta_0.safetensors"
OFTEN = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with its checkpoints, to be read only."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = own_trainer(tiny_llama(), folder, **OFTEN)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    return folder, copies(trainer.model)


def copied(folder, out):
    """A copy of the checkpoint from which `resume` begins, to be changed."""
    shutil.copytree(folder / "checkpoint-2", out / "copied" / "checkpoint-2")
    return out / "copied"


def resume(folder, out, module=None, *, checkpoint="checkpoint-2", **changed):
    trainer = own_trainer(tiny_llama() if module is None else module, out)
    attach(trainer, **{"key": KEY, **STRENGTHS, **changed})
    trainer.train(resume_from_checkpoint=str(folder / checkpoint))
    return trainer.model


def test_a_resumed_run_has_the_settings_of_the_one_that_was_stopped(whole, tmp_path):
    folder, weights = whole
    assert same(resume(folder, tmp_path), weights)
    other = {"key": random.key(4), "sigma": 0.01, "period": 3, "where": lambda path, p: "mlp" in path}
    with pytest.raises(ValueError, match=r"key was \[.*\] when the checkpoint was saved, is \[") as error:
        resume(folder, tmp_path, **other)
    for text in ("sigma was 0.02", "is 0.01", "period was 2", "hash of the masked parameters", "delete 'smat_fn' in"):
        assert text in str(error.value)
    assert "theta_0" not in str(error.value)


def test_a_resumed_run_whose_simulated_steps_are_all_done_does_not_warn(whole, tmp_path, caplog):
    folder, _ = whole
    caplog.set_level(logging.WARNING, logger="smat_fn")
    trainer = own_trainer(tiny_llama(), tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS}"))
    assert "no step is simulated" not in caplog.text


def test_a_resumed_run_has_the_theta_0_of_the_one_that_was_stopped(whole, tmp_path):
    folder, weights = whole

    def later():
        return transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2")

    for base in (None, "host", copies(tiny_llama())):
        assert same(resume(folder, tmp_path, later(), base=base), weights)
    with pytest.raises(ValueError, match=r"hash of theta_0 was .*build the model as before.*or give base="):
        resume(folder, tmp_path, base=copies(later()))  # stays what is given
    other = copied(folder, tmp_path)
    (other / "checkpoint-2" / FILE).unlink()  # as of an older version
    with pytest.raises(ValueError, match=r"hash of theta_0 was .*build the model as before.*or give base="):
        resume(other, tmp_path, later())
    wide = {name: leaf.double() for name, leaf in copies(tiny_llama()).items()}
    resume(folder, tmp_path, base=wide)  # the same values in another dtype


def redrawn():
    """A model whose head and norm are others than at the start of the run, as without a seed."""
    module = tiny_llama()
    with torch.no_grad():
        module.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1))
        module.model.norm.weight.mul_(2)
    return module


@pytest.mark.parametrize("base", [None, "host"])
def test_a_head_that_is_made_at_random_resumes_with_its_theta_0_of_the_run_that_was_stopped(
    base, whole, tmp_path, caplog
):
    folder, weights = whole
    caplog.set_level(logging.INFO, logger="smat_fn")
    trainer = own_trainer(redrawn(), tmp_path, **OFTEN)
    handle = attach(trainer, key=KEY, base=base, **STRENGTHS)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert same(trainer.model, weights)
    assert_trees_equal(handle._own, copies(tiny_llama()))
    assert "theta_0 of 2 parameters is that of the checkpoint: model.embed_tokens.weight, model.norm.w" in caplog.text
    files = [(place / "checkpoint-4" / FILE).read_bytes() for place in (folder, tmp_path)]
    assert files[0] == files[1]
    caplog.clear()
    resume(tmp_path, tmp_path / "again", base=base, checkpoint="checkpoint-4")
    assert "is that of the checkpoint" not in caplog.text


def test_checkpoints_hold_theta_0_of_small_parameters_alone_and_none_that_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(theta_0, "_LARGEST", 16)
    trainer = own_trainer(tiny_llama(), tmp_path, **OFTEN)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    own = {name: leaf for name, leaf in copies(tiny_llama()).items() if leaf.numel() <= 16}
    assert_trees_equal(load_file(tmp_path / "checkpoint-2" / FILE), dict(sorted(own.items())))
    with pytest.raises(ValueError, match=r"call transformers.set_seed before adapters or heads are made"):
        resume(tmp_path, tmp_path / "again", redrawn())  # its head is too large
    trainer = own_trainer(tiny_llama(), tmp_path / "given", **OFTEN)
    attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS)
    trainer.train()
    assert (tmp_path / "given" / "checkpoint-2").is_dir()
    assert not (tmp_path / "given" / "checkpoint-2" / FILE).exists()


def test_a_checkpoint_without_a_record_is_accepted(whole, tmp_path):
    folder = copied(whole[0], tmp_path)
    path = folder / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"].pop("smat_fn")["sigma"] == 0.02
    path.write_text(json.dumps(state))
    assert same(resume(folder, tmp_path, period=100, key=random.key(9)), copies(by_plain(folder, tmp_path)))
    trainer, other = own_trainer(redrawn(), tmp_path, max_steps=3), copies(redrawn())
    handle = attach(trainer, key=KEY, **STRENGTHS)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert_trees_equal(handle._own, other)  # of the file in the checkpoint nothing is read


def by_plain(folder, out):
    trainer = own_trainer(tiny_llama(), out, **OFTEN)
    attach(trainer, key=KEY, **STRENGTHS).detach()
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return trainer.model


def test_checkpoints_after_detach_say_nothing_of_smat(tmp_path):
    class Leave(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                handle.detach()

    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[Leave()], **OFTEN)
    handle = attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    states = [json.loads((tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()) for step in (2, 4)]
    assert ["smat_fn" in state["stateful_callbacks"] for state in states] == [True, False]


def test_weights_that_the_trainer_has_trained_are_not_taken_for_pretrained_ones(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path)
    trainer.train()
    for base in (None, "host"):
        with pytest.raises(ValueError, match=f"has trained for {STEPS} steps.*attach before train.*or give base="):
            attach(trainer, key=KEY, base=base, **STRENGTHS)
    attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS).detach()
    again = own_trainer(None, tmp_path, more={"model_init": tiny_llama})
    again.train()
    attach(again, key=KEY, **STRENGTHS)  # the next training has a new model
    again.train()


@pytest.mark.parametrize("base", [None, "host"])
def test_weights_that_are_loaded_after_attach_are_told_before_the_first_step(base, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path)
    handle = attach(trainer, key=KEY, base=base, **STRENGTHS)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] += 0.1
    message = r"1 of 20 parameters \(model.norm.weight\) have changed between attach.*handle.detach.*or give base="
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            trainer.train()
        handle = attach(trainer, key=KEY, base=base, **STRENGTHS)  # keeps the theta_0 of the first, as after a training
    assert trainer.state.global_step == 0
    handle.detach()
    trainer.model.model.norm.weight.data[0] = torch.nan  # equals itself here
    handle = attach(trainer, key=KEY, base=base, **STRENGTHS)
    trainer.model.bfloat16()  # as the trainer does for an evaluation with bf16_full_eval
    handle._begin()


class NoTrainer:
    """As setfit's, which trains without one of transformers."""


NoTrainer.__module__, NoTrainer.__qualname__ = "setfit.trainer", "Trainer"


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (tiny_llama, "transformers.models.llama.modeling_llama.LlamaForCausalLM"),
        (lambda: transformers.TrainingArguments(use_cpu=True), "transformers.training_args.TrainingArguments"),
        (NoTrainer, "setfit.trainer.Trainer"),
        (dict, "dict"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_is_not_a_trainer_is_named(what, kind):
    with pytest.raises(ValueError, match=f"trainer is a {kind}: give the transformers.Trainer"):
        attach(what(), key=KEY)


@pytest.mark.parametrize(("period", "warned"), [(STEPS, False), (STEPS + 1, True)])
def test_a_training_without_a_simulated_step_says_so(period, warned, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="smat_fn")
    trainer = trainer_of(tiny_llama(), tmp_path)
    attach(trainer, key=KEY, **STRENGTHS | {"period": period})
    trainer.train()
    text = f"no step is simulated, period is {period} and training ends after step {STEPS}"
    assert (text in caplog.text) is warned


def test_offloaded_parameters_are_listed_in_one_sentence_with_the_way_out(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path)
    trainer.model.model.layers.to("meta")
    with pytest.raises(ValueError, match=r"on the meta device here: 'model.layers.0.*more: use a device_map") as error:
        attach(trainer, key=KEY, **STRENGTHS)
    assert str(error.value).count("meta") == 1


def test_record_tells_an_other_value_in_a_small_parameter_and_in_a_large_one():
    from smat_fn.integrations.checks import hash_of, samples_of

    base = {"small": torch.zeros(3), "large": torch.zeros(100, 100), "none": torch.zeros(0)}
    hashes = {hash_of(samples_of(base))}
    for path, place in (("small", 2), ("large", 0)):
        other = {**base, path: base[path].clone()}
        other[path].view(-1)[place] = 1e-30
        hashes.add(hash_of(samples_of(other)))
    assert len(hashes) == 3
