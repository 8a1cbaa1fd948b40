"""`attach` with a climb: clean steps at theta + e, along the momentum of the trainer's optimizer."""

import json
import logging

import pytest
import torch

from smat_fn import optim
from smat_fn.grad import ModuleLoss
from smat_fn.integrations import checks
from smat_fn.integrations.trainer import attach
from smat_fn.mat import msam, smat
from smat_fn.types import Micro
from smat_fn.where import block_linear

from .test_attach import Busy, TwoLosses, copies, mean_loss, own_trainer, same
from .test_trainer import KEY, LR, STEPS, STRENGTHS, Weights, rows, saved, tiny_llama

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
RHO = 0.3
OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}
ADAMW = {"optim": "adamw_torch"}
CLIMBS = pytest.mark.parametrize("climb", ["clean", "both"])


def pure(module, **hyper):
    """`smat.build`, or `msam.build` without hyperparameters of it, on a copy of the module's weights."""
    loss, optimizer = ModuleLoss(module, mean_loss), optim.adamw(LR, weight_decay=0.0)
    if not hyper:
        return msam.build(loss, optimizer, copies(module), rho=RHO)
    rho = RHO if hyper.get("climb") else None
    return smat.build(loss, optimizer, copies(module), where=block_linear(module), rho=rho, **hyper)


def by_method(module, method, micro=1):
    """The weights after every step, on the batches of the trainers here."""
    state, data, seen, size = method.init(copies(module)), rows(4 * STEPS), [], 4 // micro
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        parts = [own[at : at + size] for at in range(0, 4, size)]
        batches = [{name: torch.stack([row[name] for row in part]) for name in own[0]} for part in parts]
        state, _ = method.update(KEY, state, [Micro(batch) for batch in batches] if micro > 1 else batches[0])
        seen.append(state.params)
    return seen


def train(tmp_path, *, climb, base=None, rho=RHO, hyper=STRENGTHS, resume=None, **options):
    """(trainer, the weights before and after every step) of a training that climbs."""
    weights = Weights()
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[weights], **ADAMW | options)
    attach(trainer, key=KEY, base=base, climb=climb, rho=None if climb is None else rho, **hyper)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, weights


def assert_steps(found, wanted):
    assert len(found) == len(wanted) == STEPS
    for step, (seen, want) in enumerate(zip(found, wanted, strict=True)):
        assert all(torch.equal(seen[name], leaf) for name, leaf in want.items()), step


@pytest.mark.parametrize("base", [None, "host"])
@CLIMBS
def test_every_step_that_climbs_is_that_of_build_bit_for_bit(climb, base, tmp_path):
    _, weights = train(tmp_path, climb=climb, base=base)
    assert_steps(weights.seen, by_method(tiny_llama(), pure(tiny_llama(), climb=climb, **STRENGTHS)))
    start = copies(tiny_llama())
    assert_steps(weights.before, [start, *weights.seen[:-1]])  # the optimizer updates theta
    plain = by_method(tiny_llama(), pure(tiny_llama(), **STRENGTHS))
    assert same(tiny_llama(), start)
    assert not torch.equal(weights.seen[-1]["model.norm.weight"], plain[-1]["model.norm.weight"])


@CLIMBS
def test_with_scale_mask_and_perturb_off_it_is_msam_bit_for_bit(climb, tmp_path):
    _, weights = train(tmp_path, climb=climb, hyper=OFF)
    assert_steps(weights.seen, by_method(tiny_llama(), pure(tiny_llama())))


@CLIMBS
def test_without_a_radius_every_step_is_that_without_a_climb(climb, tmp_path):
    (_, zero), (_, none) = train(tmp_path, climb=climb, rho=0.0), train(tmp_path, climb=None)
    assert_steps(zero.seen, none.seen)


@CLIMBS
def test_micro_batches_of_a_step_climb_to_one_point(climb, tmp_path):
    _, weights = train(tmp_path, climb=climb, batch=2, accumulate=2)
    wanted = by_method(tiny_llama(), pure(tiny_llama(), climb=climb, **STRENGTHS), micro=2)
    for seen, want in zip(weights.seen, wanted, strict=True):
        for name, leaf in want.items():
            torch.testing.assert_close(seen[name], leaf, rtol=0, atol=2e-5)


@CLIMBS
def test_a_run_that_resumes_is_the_run_that_was_not_interrupted(climb, tmp_path):
    often = {"save_strategy": "steps", "save_steps": 2}
    whole, weights = train(tmp_path, climb=climb, **often)
    assert all(torch.equal(leaf, weights.seen[1][name]) for name, leaf in saved(tmp_path / "checkpoint-2").items())
    checkpoint = str(tmp_path / "checkpoint-2")
    again, _ = train(tmp_path / "again", climb=climb, resume=checkpoint)
    assert same(again.model, copies(whole.model))
    for options, said in (
        ({"climb": None}, f"climb was {climb} when the checkpoint was saved, is None; rho was {RHO} .*, is None"),
        ({"climb": climb, "rho": 0.1}, f"rho was {RHO} when the checkpoint was saved, is 0.1; attach with the same"),
    ):
        with pytest.raises(ValueError, match=said):
            train(tmp_path / "other", resume=checkpoint, **options)


def test_records_written_before_there_was_a_climb_are_those_of_runs_without_one(tmp_path):
    records = []
    for climb in None, "both":
        trainer, _ = train(tmp_path, climb=climb, rho=None, max_steps=1)
        records.append(json.loads(json.dumps(trainer.state.stateful_callbacks["smat_fn"])))
    old = {name: value for name, value in records[0].items() if name not in ("climb", "rho")}
    assert checks.resume_problems(old, records[0]) == []
    assert checks.resume_problems(old, records[1])[:2] == [
        "climb was None when the checkpoint was saved, is both",
        "rho was None when the checkpoint was saved, is 0.5",
    ]


@pytest.mark.parametrize("base", [None, "host"])
def test_weights_that_hold_theta_plus_e_are_theta_wherever_else_they_are_read(base, tmp_path):
    weights = Weights()
    trainer = own_trainer(tiny_llama(), tmp_path, kind=Busy, callbacks=[weights], max_steps=3, **ADAMW)
    trainer.at, inside, loss = [], [], trainer.compute_loss

    def looked_at(*args, **options):
        inside.append(copies(trainer.model))
        return loss(*args, **options)

    trainer.compute_loss = looked_at
    attach(trainer, key=KEY, base=base, climb="clean", rho=RHO, **OFF)
    trainer.train()
    for step, before in enumerate([copies(tiny_llama()), *weights.seen[:2]]):
        found = [*trainer.at[2 * step : 2 * step + 2], saved(tmp_path / f"saved{step}")]
        for own in (*found, saved(tmp_path / f"pretrained{step}"), saved(tmp_path / f"state{step}")):
            assert all(torch.equal(own[name], leaf) for name, leaf in before.items())
        moved = [not torch.equal(inside[step][name], leaf) for name, leaf in before.items()]
        assert all(moved) is any(moved) is bool(step)


def test_a_loss_that_is_taken_before_compute_loss_is_told_where_only_clean_steps_climb(tmp_path):
    class Early(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model(**inputs)
            return super().training_step(model, inputs, num_items_in_batch)

    for kind, said in ((Early, "runs the model with gradients before"), (TwoLosses, "gradients were summed before")):
        trainer = own_trainer(tiny_llama(), tmp_path, kind=kind, **ADAMW)
        attach(trainer, key=KEY, climb="clean", **OFF)
        with pytest.raises(ValueError, match=said):
            trainer.train()
        trainer = own_trainer(tiny_llama(), tmp_path, kind=kind, max_steps=1, **ADAMW)
        attach(trainer, key=KEY, **OFF)
        trainer.train()


def test_writes_to_weights_that_hold_theta_plus_e_are_refused(tmp_path):
    class Stepping(transformers.Trainer):
        def compute_loss(self, model, *args, **options):
            if self.state.global_step:
                model.model.norm.weight.data.mul_(0.9)
            return super().compute_loss(model, *args, **options)

    weights = Weights()
    trainer = own_trainer(tiny_llama(), tmp_path, kind=Stepping, callbacks=[weights], **ADAMW)
    attach(trainer, key=KEY, climb="clean", **OFF)
    with pytest.raises(ValueError, match=r"written to while .* \(model.norm.weight\), or theta \+ e of a climb"):
        trainer.train()
    assert same(trainer.model, weights.seen[0])


class Eighth(torch.optim.AdamW):
    """Whose states have other names, as bitsandbytes'."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["state1"] = state.pop("exp_avg")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "sgd"}, "SGD keeps no momentum, momentum is 0"),
        ({"optim": "rmsprop"}, "RMSprop keeps no momentum, momentum is 0"),
        ({"optim": "adagrad"}, "Adagrad keeps no momentum of 'model.embed_tokens.weight', but sum"),
        ({"optim": "adafactor"}, "Adafactor keeps no momentum, beta1 is None"),
        ({"adam_beta1": 0.0}, r"AdamW keeps no momentum, betas is \(0\.0, 0\.999\)"),
    ],
    ids=["sgd", "rmsprop", "adagrad", "adafactor", "beta1"],
)
def test_optimizers_without_a_momentum_are_told_before_the_first_step(options, said, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, **ADAMW | options)
    attach(trainer, key=KEY, climb="clean", **STRENGTHS)
    with pytest.raises(ValueError, match=f"{said}.*climb=None needs none"):
        trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


def test_an_optimizer_that_is_given_is_checked_at_attach_and_its_states_after_its_first_update(tmp_path):
    model = tiny_llama()
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match="SGD keeps no momentum, momentum is 0"):
        attach(own_trainer(model, tmp_path, more={"optimizers": (plain, None)}), key=KEY, climb="both", **STRENGTHS)
    weights, late = Weights(), Eighth(model.parameters(), lr=LR)
    trainer = own_trainer(model, tmp_path, callbacks=[weights], more={"optimizers": (late, None)})
    attach(trainer, key=KEY, climb="both", **STRENGTHS)
    with pytest.raises(
        ValueError, match=r"Eighth keeps no momentum of 'model.embed_tokens.weight', but exp_avg_sq, state1"
    ):
        trainer.train()
    assert len(weights.seen) == 1
    assert same(model, weights.seen[0])


@pytest.mark.parametrize(("climb", "rho", "said"), [("all", 0.5, "climb is 'all', choose"), ("clean", -1, "rho is -1")])
def test_other_values_of_climb_and_rho_are_told(climb, rho, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        attach(own_trainer(tiny_llama(), tmp_path, **ADAMW), key=KEY, climb=climb, rho=rho, **STRENGTHS)


def test_a_radius_without_a_climb_and_a_climb_in_clean_steps_that_never_come_are_told(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, **ADAMW)
    with pytest.raises(
        ValueError, match=r"rho is 0\.5, the radius of a climb, and there is none: give climb too, or leave"
    ):
        attach(trainer, key=KEY, rho=0.5, **STRENGTHS)
    with pytest.raises(ValueError, match="climb 'clean' needs clean steps, period 1 has none: take climb 'both', or a"):
        attach(trainer, key=KEY, climb="clean", **STRENGTHS | {"period": 1})
    attach(trainer, key=KEY, climb="clean", **OFF | {"period": 1}).detach()


def test_the_line_at_the_start_says_which_steps_climb_and_logs_count_simulated_ones_alone(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="smat_fn")
    trainer, _ = train(tmp_path, climb="clean")
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("smat_fn")]
    assert lines[0].startswith("SMAT simulates every step s with (s + 1) % 2 == 0: Scale")
    assert lines[0].endswith("; clean steps climb along the optimizer's momentum, rho 0.3")
    logged = [line["smat/simulated"] for line in trainer.state.log_history if "smat/simulated" in line]
    assert logged == [0.0, 1.0, 0.0, 1.0, 0.0]
    handle = attach(own_trainer(tiny_llama(), tmp_path, **ADAMW), key=KEY, climb="both", **OFF)
    assert repr(handle).endswith("every step is clean; all steps climb along the optimizer's momentum, rho 0.5")


def test_the_momentum_is_that_of_the_optimizer_that_the_trainer_has_in_a_step(tmp_path):
    class Swapped(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                own = trainer.optimizer.optimizer
                trainer.optimizer = trainer.accelerator.prepare(type(own)(own.param_groups))
                trainer.optimizer.load_state_dict(own.state_dict())
                own.state.clear()

    points = []
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[Swapped()], max_steps=3, **ADAMW)
    loss = trainer.compute_loss

    def looked_at(*args, **options):
        points.append(copies(trainer.model))
        return loss(*args, **options)

    weights = Weights()
    trainer.add_callback(weights)
    trainer.compute_loss = looked_at
    attach(trainer, key=KEY, climb="clean", **OFF)
    trainer.train()
    assert not torch.equal(points[2]["model.norm.weight"], weights.seen[1]["model.norm.weight"])


def test_detaching_between_the_micro_batches_of_a_clean_step_that_climbs_is_refused(tmp_path):
    class Detach(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **options):
            if state.global_step == 2:  # its first half is at theta + e, the second would be at theta
                self.handle.detach()

    callback = Detach()
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[callback], batch=2, accumulate=2, **ADAMW)
    callback.handle = attach(trainer, key=KEY, climb="clean", rho=RHO, **STRENGTHS)
    with pytest.raises(ValueError, match="detach inside an optimizer step: its gradient is half summed"):
        trainer.train()
    assert trainer.state.global_step == 2
