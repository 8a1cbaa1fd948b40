"""`attach` with climb="asam": clean steps of two passes, the second one at theta + e along the first one's gradient."""

import contextlib
import json
import logging
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from smat_fn import optim
from smat_fn.grad import ModuleLoss
from smat_fn.integrations import checks
from smat_fn.integrations.trainer import attach
from smat_fn.mat import asam
from smat_fn.where import block_linear

from .test_attach import Bare, Busy, Halving, Skipping, SkippingSome, Zeroing, copies, mean_loss, own_trainer, same
from .test_by_hand import Seeded, assert_bit_identical, load, scaled_by_hand
from .test_climbing import ADAMW, OFF, RHO, assert_steps, by_method
from .test_trainer import (
    CHECKPOINTING,
    KEY,
    LR,
    STEPS,
    STRENGTHS,
    Alternating,
    Weights,
    rows,
    saved,
    tiny_llama,
    trainer_of,
)  # fmt: skip

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
ASAM = {"key": KEY, "climb": "asam", "rho": RHO, **OFF}


def pure(module, rho=RHO):
    return asam.build(ModuleLoss(module, mean_loss), optim.adamw(LR, weight_decay=0.0), copies(module), rho=rho)


def train(tmp_path, module=None, *, resume=None, kind=None, hyper=ASAM, **options):
    """(trainer, the weights before and after every step)."""
    weights = Weights()
    callbacks = [weights, *options.pop("callbacks", ())]
    module = tiny_llama() if module is None else module
    trainer = own_trainer(module, tmp_path, callbacks=callbacks, kind=kind, **ADAMW | options)
    attach(trainer, **hyper)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, weights


@pytest.mark.parametrize(
    ("micro", "base", "options"),
    [(1, None, {}), (2, None, {}), (4, "host", {}), (2, None, {CHECKPOINTING: True})],
    ids=["whole", "accumulated", "host", "checkpointed"],
)
def test_every_step_is_that_of_asam_build_bit_for_bit(micro, base, options, tmp_path):
    hyper = ASAM | {"base": base}
    _, weights = train(tmp_path, hyper=hyper, batch=4 // micro, gradient_accumulation_steps=micro, **options)
    module = tiny_llama()
    assert_steps(weights.seen, by_method(module, pure(module), micro))
    assert_steps(weights.before, [copies(module), *weights.seen[:-1]])  # the optimizer updates theta
    plain = by_method(module, pure(module, 0.0))
    assert not torch.equal(weights.seen[0]["model.norm.weight"], plain[0]["model.norm.weight"])


@pytest.mark.parametrize("base", [None, "host"])
@pytest.mark.parametrize("micro", [1, 2])
def test_clean_steps_beside_simulated_ones_take_two_passes(micro, base, tmp_path):
    hyper = ASAM | STRENGTHS | {"base": base}
    trainer, weights = train(tmp_path, hyper=hyper, batch=4 // micro, gradient_accumulation_steps=micro)
    module = tiny_llama()
    loss, optimizer = ModuleLoss(module, mean_loss), optim.adamw(LR, weight_decay=0.0)
    method = Alternating(loss, optimizer, copies(module), where=block_linear(module), rho=RHO)
    wanted = by_method(module, method, micro)
    for seen, want in zip(weights.seen, wanted, strict=True):
        for name, leaf in want.items():
            torch.testing.assert_close(seen[name], leaf, rtol=0, atol=2e-5 * (micro - 1))
    logged = [line["smat/simulated"] for line in trainer.state.log_history if "smat/simulated" in line]
    assert logged == [0.0, 1.0, 0.0, 1.0, 0.0]


def by_hand(module, backward, *, micro=1, rho=RHO, unscale=lambda: None, step=None, optimizer=None):
    """The weights after every step of a plain loop, whose passes of a step begin with the same random state."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    seen, data, size = [], rows(4 * STEPS), 4 // micro

    def gradient(number):
        torch.manual_seed(number)
        own = data[4 * number : 4 * number + 4]
        for at in range(0, 4, size):
            backward({name: torch.stack([row[name] for row in own[at : at + size]]) for name in own[0]})
        return {name: p.grad for name, p in module.named_parameters()}

    for number in range(STEPS):
        theta = copies(module)
        climbed = asam.climb(theta, gradient(number), rho=rho)
        optimizer.zero_grad()
        load(module, climbed)
        gradient(number)
        load(module, theta)
        unscale()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        (step or optimizer.step)()
        optimizer.zero_grad()
        seen.append(copies(module))
    return seen


def dropping(rate=0.3):
    module = tiny_llama()
    for layer in module.model.layers:
        layer.self_attn.attention_dropout = rate
    return module


@pytest.mark.parametrize("micro", [1, 2])
def test_both_passes_drop_the_same_units_and_norms_are_clipped_afterwards(micro, tmp_path):
    options = {"batch": 4 // micro, "gradient_accumulation_steps": micro, "max_grad_norm": 0.5}
    _, weights = train(tmp_path, dropping(), callbacks=[Seeded()], **options)
    module = dropping().train()
    wanted = by_hand(module, lambda b: (module(**b, use_cache=False).loss / micro).backward(), micro=micro)
    assert_bit_identical(weights.seen, wanted)
    _, plain = train(tmp_path, callbacks=[Seeded()], **options)
    assert not torch.equal(plain.seen[0]["model.norm.weight"], wanted[0]["model.norm.weight"])


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**20], ids=["no step skipped", "two steps skipped"])
def test_a_scaled_gradient_climbs_to_the_same_point_and_one_that_overflows_is_skipped(scale, micro, tmp_path):
    weights = Weights()
    trainer = trainer_of(tiny_llama(), tmp_path, batch=4 // micro, accumulate=micro, fp16=True, callbacks=[weights])
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
    attach(trainer, **ASAM)
    trainer.train()
    module, optimizer, scaler, backward, parts = scaled_by_hand(scale)
    wanted = by_hand(module, backward, micro=micro, optimizer=optimizer, **parts)
    assert_bit_identical(weights.seen, wanted)
    assert trainer.accelerator.scaler.get_scale() == scaler.get_scale() == min(scale, 2.0**18)
    skipped = [torch.equal(own["model.norm.weight"], torch.ones(16)) for own in wanted[:3]]
    assert skipped == [scale > 2.0**16] * 2 + [False]


def test_autocast_to_bfloat16_is_that_of_a_loop_by_hand(tmp_path):
    _, weights = train(tmp_path, bf16=True, max_grad_norm=0.5)
    module = tiny_llama().train()

    def backward(batch):
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(**batch, use_cache=False).loss
        loss.backward()

    assert_bit_identical(weights.seen, by_hand(module, backward))


def test_a_run_that_resumes_is_the_run_that_was_not_interrupted(tmp_path):
    often = {"save_strategy": "steps", "save_steps": 2, "batch": 2, "gradient_accumulation_steps": 2}
    whole, _ = train(tmp_path, dropping(), **often)
    checkpoint = str(tmp_path / "checkpoint-2")
    again, _ = train(tmp_path / "again", dropping(), resume=checkpoint, **often)
    assert same(again.model, copies(whole.model))
    for changed, said in (
        ({"climb": "clean"}, "climb was asam when the checkpoint was saved, is clean"),
        ({"rho": None}, f"rho was {RHO} when the checkpoint was saved, is 0.25"),
    ):
        with pytest.raises(ValueError, match=said):
            train(tmp_path / "other", resume=checkpoint, hyper=ASAM | changed)


class Online(transformers.Trainer):
    """Generates a batch from random numbers every second time, counts, logs and keeps metrics, as GRPO does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.calls, self.prepared, self.total, self._metrics = 0, [], None, {"train": []}

    def _prepare_inputs(self, inputs):
        if not self.model.training:
            return super()._prepare_inputs(inputs)
        if self.calls % 2 == 0:
            self.shift = torch.randint(0, 32, ())
        self.prepared.append(copies(self.model))
        ids = (inputs["input_ids"] + self.shift) % 32
        return {"input_ids": ids, "labels": ids, "extra": self.calls}

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.calls += 1
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert inputs.pop("extra") == self.calls
        loss = model(**inputs).loss * (1 + self.calls % 3)
        if model.training:
            self.total = loss.detach() + (0 if self.total is None else self.total)
            self._metrics["train"].append(loss.item())
            self.log({"own": loss.item()})
            self.last.append(self.accelerator.sync_gradients)
        return loss

    last = ()


def test_a_batch_is_prepared_once_and_counters_and_metrics_are_those_of_the_first_pass(tmp_path):
    """With a climb of length 0 all of them are those of plain training."""
    found = []
    for climb in ("asam", None):
        Online.last = []
        torch.manual_seed(7)
        hyper = ASAM | {"climb": climb, "rho": 0.0 if climb else None}
        options = {"batch": 2, "gradient_accumulation_steps": 2}
        found.append((*train(tmp_path, dropping(), kind=Online, hyper=hyper, **options), Online.last))
    (twice, ours, order), (once, plain, _) = found
    assert_steps(ours.seen, plain.seen)
    assert order == [False, True, False, True] * STEPS
    for own in (twice, once):
        assert (own.calls, len(own.prepared), len(own._metrics["train"])) == (2 * STEPS, 2 * STEPS, 2 * STEPS)
    assert twice._metrics == once._metrics
    assert torch.equal(twice.total, once.total)
    for name, count in (("loss", STEPS), ("own", 2 * STEPS)):
        logged = [[line[name] for line in own.state.log_history if name in line] for own in (twice, once)]
        assert logged[0] == logged[1]
        assert len(logged[0]) == count


class Components(transformers.Trainer):
    """Sums the parts of its loss by name, counts them in place, and logs their means, as sentence-transformers does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.accum_loss_components = {"train": {}, "eval": {}}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        own = self.accum_loss_components["train" if model.training else "eval"]
        own["half"] = own.get("half", 0) + loss / 2  # older versions keep the graph
        own.setdefault("steps", torch.tensor(0)).add_(1)
        return loss

    def log(self, logs, *args, **options):
        own = self.accum_loss_components["train"]
        if "loss" in logs:
            logs = {**logs, "half": own["half"].item() / own["steps"].item()}
            self.accum_loss_components["train"] = {}
        super().log(logs, *args, **options)


@pytest.mark.parametrize("micro", [1, 2])
def test_parts_of_a_loss_that_are_logged_are_those_of_the_first_pass(micro, tmp_path):
    trainer, _ = train(tmp_path, kind=Components, batch=4 // micro, gradient_accumulation_steps=micro)
    logged = [(line["loss"], 2 * line["half"]) for line in trainer.state.log_history if "loss" in line]
    assert len(logged) == STEPS
    for loss, both in logged:
        assert both == pytest.approx(loss, rel=1e-6)


def test_batches_are_prepared_at_theta_and_the_logged_loss_is_that_at_theta(tmp_path):
    Online.last = []
    trainer, weights = train(tmp_path, kind=Online, max_steps=3)
    for at, before in zip(trainer.prepared, [copies(tiny_llama()), *weights.seen[:2]], strict=True):
        assert all(torch.equal(at[name], leaf) for name, leaf in before.items())
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(trainer._metrics["train"])
    ids = rows(4)
    batch = {name: torch.stack([row[name] for row in ids]) for name in ids[0]}
    module = tiny_llama()
    trainer, _ = train(tmp_path, max_steps=1)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(module.train()(**batch).loss.item())


def test_weights_that_hold_theta_plus_e_are_theta_wherever_else_they_are_read(tmp_path):
    weights = Weights()
    trainer = own_trainer(tiny_llama(), tmp_path, kind=Busy, callbacks=[weights], max_steps=2, **ADAMW)
    trainer.at, inside, loss = [], [], trainer.compute_loss

    def looked_at(*args, **options):
        if torch.is_grad_enabled():
            inside.append(copies(trainer.model))
        return loss(*args, **options)

    trainer.compute_loss = looked_at
    attach(trainer, **ASAM)
    trainer.train()
    assert len(trainer.at) == 8  # two evaluations in both passes of two steps
    for step, before in enumerate([copies(tiny_llama()), weights.seen[0]]):
        found = [*trainer.at[4 * step : 4 * step + 4], saved(tmp_path / f"saved{step}"), inside[2 * step]]
        for own in (*found, saved(tmp_path / f"pretrained{step}"), saved(tmp_path / f"state{step}")):
            assert all(torch.equal(own[name], leaf) for name, leaf in before.items())
        assert not any(torch.equal(inside[2 * step + 1][name], leaf) for name, leaf in before.items())
    module = tiny_llama()
    assert same(trainer.model, by_method(module, pure(module))[1])


class Drawing(transformers.Trainer):
    """Draws before the batch is prepared, and once more in the second pass of the first step."""

    calls = 0

    def training_step(self, model, inputs, num_items_in_batch=None):
        Drawing.calls += 1
        inputs = {**inputs, "labels": (inputs["labels"] + torch.randint(0, 32, ())) % 32}
        loss = super().training_step(model, inputs, num_items_in_batch)
        if Drawing.calls == 4:
            torch.rand(())
        return loss


class Normed(Bare):
    def __init__(self):
        super().__init__()
        self.block1.append(nn.BatchNorm1d(8))  # of sequences of eight tokens


def test_batch_norms_move_their_statistics_in_the_first_pass_alone(tmp_path):
    torch.manual_seed(0)
    module = Normed()
    start = Normed()
    start.load_state_dict(module.state_dict())
    trainer, _ = train(tmp_path, module, max_steps=1)
    data = rows(4)
    start.train()(**{name: torch.stack([row[name] for row in data]) for name in data[0]})
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(trainer.model.block1[2], name), getattr(start.block1[2], name))


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
def test_an_exception_in_either_pass_leaves_theta_and_the_next_training_begins_anew(fails, tmp_path):
    class Failing(transformers.Trainer):
        calls = 0

        def compute_loss(self, model, *args, **options):
            loss = super().compute_loss(model, *args, **options)
            seen.append(copies(model))
            if len(seen) == 4 + fails:
                raise RuntimeError("out of memory")
            return loss

    seen, weights = [], Weights()
    options = {"kind": Failing, "batch": 2, "accumulate": 2, "max_steps": 2, "callbacks": [weights], **ADAMW}
    trainer = own_trainer(tiny_llama(), tmp_path, **options)
    attach(trainer, **ASAM)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert len(weights.seen) == 1
    assert same(trainer.model, weights.seen[0])
    assert torch.equal(seen[-1]["model.norm.weight"], weights.seen[0]["model.norm.weight"]) is (fails <= 2)
    load(trainer.model, copies(tiny_llama()))
    trainer.model.zero_grad()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.train()
    module = tiny_llama()
    assert same(trainer.model, by_method(module, pure(module), 2)[1])


def test_a_second_try_of_a_step_whose_second_pass_failed_is_refused(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2)
    loss, calls = trainer.compute_loss, []

    def failing(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError
        return loss(*args, **options)

    trainer.compute_loss = failing
    attach(trainer, **ASAM)
    once = trainer.training_step

    def again(*args):
        with contextlib.suppress(MemoryError):
            return once(*args)
        return once(*args)

    trainer.training_step = again
    with pytest.raises(ValueError, match="begins again after the last micro-batch of step 0, whose gradient is "):
        trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


@pytest.mark.parametrize("early", [False, True])
def test_a_batch_that_training_step_leaves_out_is_a_step_without_gradient(early, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, kind=Skipping, callbacks=[weights := Weights()])
    trainer.skipped, trainer.early = (1, 2), early
    attach(trainer, **ASAM)
    trainer.train()
    for step in range(1, STEPS):
        left = torch.equal(weights.seen[step]["model.norm.weight"], weights.seen[step - 1]["model.norm.weight"])
        assert left is (step in trainer.skipped)


def test_a_batch_that_is_left_out_in_the_second_pass_alone_is_a_step_without_gradient(tmp_path):
    class Sometimes(Skipping):
        early = True

        def training_step(self, *args, **options):
            calls.append(1)
            self.skipped = (self.state.global_step,) if len(calls) == 4 else ()
            return super().training_step(*args, **options)

    calls = []
    _, weights = train(tmp_path, kind=Sometimes)
    norms = [own["model.norm.weight"] for own in weights.seen]
    assert [torch.equal(*pair) for pair in pairwise(norms)] == [True, False, False, False]


@pytest.mark.parametrize("kind", [Halving, Drawing])
def test_random_numbers_are_the_same_in_both_passes_and_go_on_as_in_plain_training(kind, tmp_path):
    """With a climb of length 0 nothing differs: dropout, batches that training_step splits, and its own numbers."""
    ends = []
    for climb in ("asam", None):
        Drawing.calls = 0 if climb else 4  # which has no such pass
        torch.manual_seed(5)
        hyper = ASAM | {"climb": climb, "rho": 0.0 if climb else None}
        trainer, _ = train(tmp_path, dropping(), kind=kind, hyper=hyper, batch=4, gradient_accumulation_steps=2)
        ends.append((copies(trainer.model), torch.rand(3)))
    assert same(trainer.model, ends[0][0])
    assert torch.equal(ends[0][1], ends[1][1])


class Consuming(transformers.Trainer):
    """Takes entries out of its batch, before and in the loss, and changes tensors in place."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.factor = inputs.pop("factor", 1.0)
        inputs["labels"].add_(1).remainder_(32)
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["input_ids"].add_(1).remainder_(32)
        (weight,) = inputs.pop("nested")["weights"]
        loss = super().compute_loss(model, inputs) * self.factor * weight.add_(1.0)
        return loss * 2.0 if "names" in inputs and inputs.pop("names") == ["a"] else loss


def encoded(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    batch |= {"factor": 3.0, "nested": {"weights": (torch.ones(()),)}, "names": ["a"]}
    return transformers.BatchEncoding(batch)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_batch_that_is_changed_by_the_first_pass_is_as_before_in_the_second(micro, tmp_path):
    """With a climb of length 0 all steps are those of plain training."""
    more = {"data_collator": encoded, "train_dataset": rows(4 * STEPS)}
    options = {"kind": Consuming, "more": more, "remove_unused_columns": False, "optim": "sgd"}
    options |= {"batch": 4 // micro, "gradient_accumulation_steps": micro}
    _, twice = train(tmp_path, hyper=ASAM | {"rho": 0.0}, **options)
    _, once = train(tmp_path, hyper=ASAM | {"climb": None, "rho": None}, **options)
    assert_steps(twice.seen, once.seen)


class Mixing(transformers.Trainer):
    """A loss that depends on generators of its own, on a flag, and on an average of losses."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.numpy, self.old, self.python = np.random.default_rng(1), np.random.RandomState(1), random.Random(1)
        self.torch, self.first, self.average = torch.Generator().manual_seed(1), True, torch.ones(())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        shift = torch.randint(0, 32, (), generator=self.torch) + self.python.randrange(32)
        inputs["labels"] = (inputs["labels"] + shift) % 32
        loss = super().compute_loss(model, inputs) * float(self.numpy.random() + self.old.random_sample())
        self.average = 0.5 * self.average + loss.detach()
        if self.first:
            loss, self.first = 2.0 * loss, False
        return loss * self.average


@pytest.mark.parametrize("micro", [1, 2])
def test_generators_flags_and_averages_of_a_trainer_are_the_same_in_both_passes(micro, tmp_path):
    """With a climb of length 0 all steps are those of plain training."""
    options = {"kind": Mixing, "optim": "sgd", "batch": 4 // micro, "gradient_accumulation_steps": micro}
    twice, ours = train(tmp_path, hyper=ASAM | {"rho": 0.0}, **options)
    once, plain = train(tmp_path, hyper=ASAM | {"climb": None, "rho": None}, **options)
    assert_steps(ours.seen, plain.seen)
    assert torch.equal(twice.average, once.average)
    assert (twice.first, once.first) == (False, False)
    assert twice.numpy.random() == once.numpy.random()


@pytest.mark.parametrize("skipped", [(2,), (3,), (3, 4)])
def test_one_micro_batch_of_a_step_may_be_left_out(skipped, tmp_path):
    ends = []
    for kind in (SkippingSome, Zeroing):  # which decide by a count of their calls
        trainer = own_trainer(tiny_llama(), tmp_path, kind=kind, gradient_accumulation_steps=2, max_steps=3)
        trainer.skipped = skipped
        attach(trainer, **ASAM)
        trainer.train()
        ends.append(copies(trainer.model))
    assert same(trainer.model, ends[0])
    assert not same(trainer.model, copies(tiny_llama()))


def test_parameters_of_a_loss_have_the_gradient_of_the_second_pass_alone(tmp_path):
    class Weighted(transformers.Trainer):
        def compute_loss(self, *args, **options):
            return super().compute_loss(*args, **options) + self.extra.square().sum()

    module, extra = tiny_llama(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*module.parameters(), extra], lr=0.25)
    trainer = own_trainer(module, tmp_path, kind=Weighted, max_steps=1, more={"optimizers": (optimizer, None)})
    trainer.extra = extra
    attach(trainer, **ASAM)
    trainer.train()
    assert torch.equal(extra, torch.full((3,), 0.5))


def test_any_optimizer_will_do_and_detach_gives_plain_training_back(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, more={}, optim="adagrad")
    handle = attach(trainer, **ASAM)
    trainer.train()
    assert not same(trainer.model, copies(tiny_llama()))
    handle.detach()
    assert not {"training_step", "compute_loss", "_prepare_inputs"} & set(vars(trainer))
    ends = []
    for attached in (True, False):
        trainer = own_trainer(tiny_llama(), tmp_path, **ADAMW)
        if attached:
            attach(trainer, **ASAM).detach()
        trainer.train()
        ends.append(copies(trainer.model))
    assert same(trainer.model, ends[0])


def test_detaching_between_the_passes_of_a_step_is_refused(tmp_path):
    class Detach(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **options):
            self.handle.detach()

    callback = Detach()
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[callback], batch=2, accumulate=2, **ADAMW)
    callback.handle = attach(trainer, **ASAM)
    with pytest.raises(ValueError, match="detach inside an optimizer step: its gradient is half summed"):
        trainer.train()


class Shrinking(transformers.TrainerCallback):
    """Halves the gradient after the first micro-batch of a step."""

    def on_substep_end(self, args, state, control, model=None, **_):
        for p in model.parameters():
            p.grad.mul_(0.5)


@pytest.mark.parametrize("by", ["callback", "wrapper"])
def test_gradients_that_change_between_micro_batches_are_refused(by, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2)
    attach(trainer, **ASAM)
    once = trainer.training_step

    def decayed(model, *args):
        loss = once(model, *args)
        model.model.norm.weight.square().sum().backward()
        return loss

    if by == "callback":
        trainer.add_callback(Shrinking())
    else:
        trainer.training_step = decayed
    with pytest.raises(ValueError, match=r"changed between two micro-batches of step 0 .* which the second pass of"):
        trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


def test_a_climb_that_never_comes_and_writes_to_climbed_weights_are_told(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, **ADAMW)
    with pytest.raises(ValueError, match="climb 'asam' needs clean steps, period 1 has none: take climb 'both', or a"):
        attach(trainer, **ASAM | STRENGTHS | {"period": 1})
    with pytest.raises(ValueError, match="climb is 'sam', choose clean, both or asam, or None for no climb"):
        attach(trainer, **ASAM | {"climb": "sam"})

    class Stepping(transformers.Trainer):
        def compute_loss(self, model, *args, **options):
            model.model.norm.weight.data.mul_(0.9)
            return super().compute_loss(model, *args, **options)

    trainer = own_trainer(tiny_llama(), tmp_path, kind=Stepping, **ADAMW)
    attach(trainer, **ASAM)
    with pytest.raises(ValueError, match=r"written to while .* \(model.norm.weight\), or theta \+ e of a climb"):
        trainer.train()


def test_the_line_at_the_start_and_the_record_say_how_clean_steps_climb(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="smat_fn")
    trainer, _ = train(tmp_path, hyper=ASAM | {"rho": None}, max_steps=1)
    line = "every step is clean; clean steps climb along their gradient, in two passes, rho 0.25"
    assert caplog.messages[0].endswith(line)
    record = json.loads(json.dumps(trainer.state.stateful_callbacks["smat_fn"]))
    assert (record["climb"], record["rho"]) == ("asam", 0.25)
    assert checks.resume_problems(record, record) == []
