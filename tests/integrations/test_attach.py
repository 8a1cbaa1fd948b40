"""`attach` is SMAT or an error: models that come later, second attaches, shared memory, other loops and optimizers."""

import copy
import gc
import inspect
import json
import logging
import weakref
from functools import partial
from itertools import pairwise

import numpy
import pytest
import torch
from torch import nn

from smat_fn import errors, optim, random
from smat_fn.grad import ModuleLoss, trained
from smat_fn.integrations import checks
from smat_fn.integrations.trainer import attach
from smat_fn.mat import smat
from smat_fn.mat.offload import storage
from smat_fn.simulation import simulate
from smat_fn.types import Optimizer
from smat_fn.where import block_linear

from ..parallel import worker
from .test_trainer import KEY, LR, STEPS, STRENGTHS, Stream, Weights, rows, saved, tiny_llama, trainer_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
SGD = {"optim": "sgd", "max_grad_norm": 0.0}


def copies(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(model, weights):
    return all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def own_trainer(module, tmp_path, **options):
    """Whose loss is `mean_loss`, so that no bit depends on how the Trainer weights micro-batches."""
    trainer = trainer_of(module, tmp_path, **SGD | options)
    trainer.model_accepts_loss_kwargs = False
    return trainer


def mean_loss(module, batch):
    return module(**batch).loss, {}


def sgd(lr=LR):
    def update(grads, state, params, donate=False):
        return {path: torch.add(leaf, grads[path], alpha=-lr) for path, leaf in params.items()}, state

    return Optimizer(lambda params: None, update)


def by_build(module, *, base=None, key=KEY, lr=LR, steps=STEPS, **changed):
    """The weights that `smat.build` trains the module to, on the batches of the trainers here."""
    params = copies(module)
    method = smat.build(
        ModuleLoss(module, mean_loss), sgd(lr), params if base is None else base, where=block_linear(module),
        **STRENGTHS | changed,
    )  # fmt: skip
    state, data = method.init(params), rows(4 * STEPS)
    for step in range(steps):
        own = data[4 * step : 4 * step + 4]
        state, _ = method.update(key, state, {name: torch.stack([row[name] for row in own]) for name in own[0]})
    return state.params


def by_literal_steps(module):
    params = copies(module)
    options = {"loss_fn": ModuleLoss(module, mean_loss), "base": params, "where": block_linear(module), **STRENGTHS}
    state, data, after = smat.State(params, None, 0), rows(4 * STEPS), []
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        batch = {name: torch.stack([row[name] for row in own]) for name in own[0]}
        state, _ = smat.literal_step(KEY, state, batch, optimizer=sgd(), **options)
        after.append(state.params)
    return after


@pytest.mark.parametrize("base", ["host", "given", pytest.param(None, marks=pytest.mark.slow)])
def test_every_step_is_the_papers_literal_step_bit_for_bit(base, tmp_path):
    weights, module = Weights(), tiny_llama()
    trainer = own_trainer(module, tmp_path, callbacks=[weights])
    attach(trainer, key=KEY, base=copies(module) if base == "given" else base, **STRENGTHS)
    trainer.train()
    wanted = by_literal_steps(tiny_llama())
    assert len(weights.seen) == STEPS
    for step, (seen, want) in enumerate(zip(weights.seen, wanted, strict=True)):
        assert all(torch.equal(seen[name], leaf) for name, leaf in want.items()), step
    assert all(torch.equal(leaf, wanted[-1][name]) for name, leaf in by_build(tiny_llama()).items())


class Squares(nn.Sequential):
    """The network and the loss of the sharded runs, as a model for the Trainer."""

    def forward(self, x, y):
        return {"loss": ((super().forward(x) - y) ** 2).mean()}


def test_options_beyond_the_papers_are_those_of_build(tmp_path, caplog):
    factors = {"model.layers.0.mlp.up_proj.weight": 0.5}
    more = {"alpha_max": 1.5, "antithetic": True}
    expected = by_build(tiny_llama(), alpha_depth=factors, **more)
    trainer = own_trainer(tiny_llama(), tmp_path)
    attach(trainer, key=KEY, factors=factors, **STRENGTHS | more)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert same(trainer.model, expected)
    assert not same(trainer.model, by_build(tiny_llama()))
    said = f"Scale alpha from {STRENGTHS['alpha_min']} to 1.5; times a factor in 1 parameters; Mask"
    assert [line for line in caplog.messages if "in antithetic pairs: " in line and said in line]
    record = trainer.state.stateful_callbacks["smat_fn"]
    plain = {name: value for name, value in record.items() if name not in ("alpha_max", "factors", "antithetic")}
    assert checks.resume_problems(plain, record)[:3] == [
        "antithetic was False when the checkpoint was saved, is True",
        "alpha_max was 1.0 when the checkpoint was saved, is 1.5",
        "factors of alpha differ from those when the checkpoint was saved: model.layers.0.mlp.up_proj.weight was 1.0, "
        "is 0.5",
    ]
    many = {f"layers.{i}": 0.5 for i in range(300)}
    assert len(checks.resume_problems(record, record | {"factors": many})[0]) < 1000
    assert checks.resume_problems(record | {"factors": {}}, record | {"factors": {"layers.0": 1.0}}) == []
    assert checks.resume_problems(json.loads(json.dumps(record)), record) == []
    other = own_trainer(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match="factors of alpha name 'mlp', which no parameter here has"):
        attach(other, key=KEY, factors={"mlp": 0.5}, **STRENGTHS)


def test_the_hook_takes_the_literal_steps_that_shards_of_fsdp2_take(tmp_path):
    batches = [dict(zip("xy", (part.float() for part in worker.batch(step)), strict=True)) for step in range(STEPS)]
    trainer = trainer_of(
        Squares(*worker.model(torch.float32)), tmp_path, batch=1, learning_rate=0.1, max_steps=worker.STEPS, **SGD,
        more={"train_dataset": Stream(batches), "data_collator": lambda rows: rows[0]},
    )  # fmt: skip
    attach(trainer, key=worker.KEY, where=worker.masked, period=2, **worker.STRENGTHS)
    trainer.train()
    assert same(trainer.model, worker.literally())  # as tests/parallel finds of the shards


def test_adamw_of_the_trainer_is_that_of_the_library_bit_for_bit(tmp_path):
    module = tiny_llama()
    trainer = own_trainer(module, tmp_path, optim="adamw_torch")
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    start = tiny_llama()
    params, data = copies(start), rows(4 * STEPS)
    method = smat.build(
        ModuleLoss(start, mean_loss), optim.adamw(LR, weight_decay=0.0), params, where=block_linear(start), **STRENGTHS
    )
    state = method.init(params)
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        state, _ = method.update(KEY, state, {name: torch.stack([row[name] for row in own]) for name in own[0]})
    assert same(module, state.params)


def seeded():
    """A model_init that gives other weights every time."""
    made = []

    def model_init(trial=None):
        module = tiny_llama()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.01 * len(made))
        made.append(copies(module))
        return module

    return model_init, made


@pytest.mark.parametrize("base", [None, pytest.param("host", marks=pytest.mark.slow)])
def test_a_model_that_model_init_makes_later_is_the_one_that_is_simulated(base, tmp_path):
    model_init, made = seeded()
    trainer = own_trainer(None, tmp_path, more={"model_init": model_init})
    handle = attach(trainer, key=KEY, base=base, **STRENGTHS)
    for run in (1, 2):  # made[0] is the model of the trainer's own start
        trainer.train()
        assert handle.draw is not None
        start = tiny_llama()
        start.load_state_dict(made[run], strict=False)
        assert len(made) == run + 1
        assert same(trainer.model, by_build(start))


def test_a_resumed_run_of_model_init_keeps_its_base(tmp_path):
    often = {"save_strategy": "steps", "save_steps": 2}
    whole = own_trainer(None, tmp_path, more={"model_init": tiny_llama}, **often)
    attach(whole, key=KEY, **STRENGTHS)
    whole.train()
    again = own_trainer(None, tmp_path, more={"model_init": tiny_llama})
    attach(again, key=KEY, **STRENGTHS)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same(again.model, copies(whole.model))


class Trials:
    """A search like the ones of transformers: train a trial, score it, let go of its model."""

    name = "optuna"

    def ensure_available(self):
        pass

    def run(self, trainer, n_trials, direction, **options):
        for number in range(n_trials):
            trainer.args.learning_rate = LR * (number + 1)
            trainer.train()
            trainer.ended(trainer)
            trainer.model_wrapped = trainer.model = None
        return transformers.trainer_utils.BestRun("0", 0.0, {})

    def default_hp_space(self, trial):
        return trial


def test_every_trial_of_a_hyperparameter_search_is_smat(tmp_path, monkeypatch):
    from transformers import hyperparameter_search

    search = {hyperparameter_search.HPSearchBackend.OPTUNA: Trials}
    monkeypatch.setattr(transformers.trainer, "ALL_HYPERPARAMETER_SEARCH_BACKENDS", search)
    model_init, made = seeded()
    trainer = own_trainer(None, tmp_path, more={"model_init": model_init})
    ended, models = [], []

    def keep(trainer):
        ended.append(copies(trainer.model))
        models.append(weakref.ref(trainer.model))

    trainer.ended = keep
    handle = attach(trainer, key=KEY, **STRENGTHS)
    trainer.hyperparameter_search(n_trials=2, backend="optuna")
    for number, weights in enumerate(ended):
        start = tiny_llama()
        start.load_state_dict(made[number + 1], strict=False)
        assert all(torch.equal(weights[n], p) for n, p in by_build(start, lr=LR * (number + 1)).items())
    with pytest.raises(ValueError, match="model is None"):
        attach(trainer, key=KEY)
    trainer.optimizer = trainer.lr_scheduler = trainer.callback_handler.model = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    trainer.accelerator.free_memory()
    handle._model = None
    gc.collect()
    assert models[0]() is None  # no trial's model is kept by the next one's


def test_a_second_attach_replaces_the_first_and_keeps_its_base(tmp_path):
    module = tiny_llama()
    start = copies(module)
    trainer = own_trainer(module, tmp_path)
    names = ("training_step", "compute_loss", "log", "call_model_init")
    plain = {name: getattr(trainer, name) for name in names}
    attach(trainer, key=random.key(9), **STRENGTHS | {"sigma": 1.0})
    second = attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    assert same(module, by_build(tiny_llama()))
    # the cell again, after training: theta_0 stays what it was
    trained = copies(module)
    third = attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    again = tiny_llama()
    again.load_state_dict(trained, strict=False)
    assert same(module, by_build(again, base=start))
    assert not same(module, by_build(again))
    trainer.model = torch.nn.DataParallel(module)  # wrapped, as accelerate's FSDP2 leaves a model that it compiles
    third = attach(trainer, key=KEY, **STRENGTHS)
    trainer.model = module
    second.detach()
    assert "replaces" not in repr(third)
    assert repr(second) == "SMAT: detached"
    assert trainer.training_step != plain["training_step"]  # the third is still there
    third.detach()
    assert {name: getattr(trainer, name) for name in names} == plain
    assert not set(vars(trainer)) & {*names, "_smat_attached"}


def test_layers_that_are_frozen_and_trained_again_keep_their_base(tmp_path):
    model = tiny_llama()
    trainer = own_trainer(model, tmp_path, max_steps=1)
    layer = model.model.layers[0]
    wanted = copies(model)
    for free in (True, False, False, True):
        layer.requires_grad_(free)
        trainer.optimizer = None
        handle = attach(trainer, key=KEY, **STRENGTHS)
        trainer.train()
    assert handle._own.keys() == wanted.keys()
    assert all(torch.equal(leaf, wanted[name]) for name, leaf in handle._own.items())
    assert not same(layer, {name: wanted["model.layers.0." + name] for name, _ in layer.named_parameters()})


def test_a_model_that_another_trainer_has_trained_needs_its_base(tmp_path):
    model = tiny_llama()
    pretrained = copies(model)
    trainer = own_trainer(model, tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)  # not trained yet
    trainer.train()
    trainer = own_trainer(model, tmp_path)  # a notebook's cell run again
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight, .* more: trained with SMAT by another trainer"):
        attach(trainer, key=KEY, **STRENGTHS)
    attach(trainer, key=KEY, base=pretrained, **STRENGTHS)
    model.load_state_dict(pretrained, strict=False)  # a head tied to the embedding is not in it
    trainer = own_trainer(model, tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    assert same(model, by_build(tiny_llama()))


@pytest.mark.parametrize("kind", [numpy.float32, torch.tensor])
def test_numbers_of_numpy_and_torch_are_those_of_checkpoints_too(kind, tmp_path):
    model = tiny_llama()
    numbers = {name: kind(value) if isinstance(value, float) else value for name, value in STRENGTHS.items()}
    trainer = own_trainer(model, tmp_path, save_strategy="steps", save_steps=2)
    handle = attach(trainer, key=KEY, **numbers)
    trainer.train()
    assert "Scale alpha from 0.200000002" in repr(handle)
    kept = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["stateful_callbacks"]["smat_fn"]
    assert [kept[name] for name in ("alpha_min", "drop_prob", "sigma")] == [
        float(n) for n in list(numbers.values())[:3]
    ]


class Stepping(transformers.Trainer):
    """Updates the weights by itself, before the backward pass."""

    def compute_loss(self, model, *args, **options):
        with torch.no_grad():
            for p in model.parameters():
                self.update(p)
        return super().compute_loss(model, *args, **options)


def replace_data(p):
    p.data = 0.9 * p.data


@pytest.mark.parametrize("update", [lambda p: p.mul_(0.9), lambda p: p.data.mul_(0.9), replace_data])
def test_an_update_that_the_end_of_a_simulated_step_would_undo_is_refused(update, tmp_path):
    model = tiny_llama()
    trainer = trainer_of(model, tmp_path, kind=Stepping, max_steps=3, **SGD)
    trainer.update = update
    weights = Weights()
    trainer.add_callback(weights)
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match="written to while they held theta~"):
        trainer.train()
    assert same(model, weights.seen[0])  # step 1 is the first simulated one


class Adversarial(transformers.Trainer):
    """A second loss at an embedding that was moved aside and is put back (FGM)."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        weight = model.get_input_embeddings().weight
        self.at.append(weight.detach().clone())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.at.append(weight.detach().clone())
        backup = weight.data.clone()
        weight.data.add_(0.1 * weight.grad.sign())
        self.accelerator.backward(self.compute_loss(model, inputs))
        self.put_back(weight, backup)
        return loss

    def put_back(self, weight, backup):
        weight.data = backup


class AdversarialByCopies(Adversarial):
    def put_back(self, weight, backup):
        weight.data.copy_(backup)


class AdversarialInPlace(Adversarial):
    @torch.no_grad()
    def put_back(self, weight, backup):
        weight.copy_(backup)


@pytest.mark.parametrize("kind", [Adversarial, AdversarialByCopies])
def test_weights_that_are_moved_aside_and_put_back_leave_theta_of_a_step_what_it_was(kind, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, kind=kind, batch=2, accumulate=2, max_steps=1)
    trainer.at = []
    attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    trainer.train()
    theta, first, again, second = trainer.at
    assert torch.equal(again, theta)
    assert not torch.equal(first, theta)
    assert torch.equal(second, first)  # one theta~ for both micro-batches


def test_weights_that_are_put_back_in_place_are_refused(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, kind=AdversarialInPlace, max_steps=1)
    trainer.at = []
    attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    with pytest.raises(ValueError, match=r"those that are moved and put back: through p.data alone, not in place"):
        trainer.train()


def test_a_complex_parameter_is_told_at_attach(tmp_path):
    model = tiny_llama()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="'phase' of the trainer's model has dtype complex64"):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


def test_parameters_whose_values_are_in_other_tensors_are_told_at_attach(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    model = tiny_llama()
    projection = model.model.layers[0].mlp.up_proj
    projection.weight = nn.Parameter(TwoTensor(projection.weight.detach(), projection.weight.detach()))
    with pytest.raises(ValueError, match=r"up_proj.weight' is a TwoTensor, whose values are in other tensors"):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


def test_parameters_that_share_memory_are_told_at_attach(tmp_path):
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach())
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' share memory.*tie them"):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


@pytest.mark.parametrize("part", ["frozen", "buffer", "overlap"])
def test_trained_parameters_that_share_memory_with_other_tensors_are_told_at_attach(part, tmp_path):
    model = tiny_llama()
    weight = model.model.embed_tokens.weight.detach()
    message = r"'model.embed_tokens.weight' shares memory with '\S+', which is not trained and would stay at theta"
    if part == "buffer":
        model.register_buffer("table", weight[1:])
    elif part == "frozen":
        model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    else:
        model.extra = nn.Parameter(weight[1:])
        message = r"'extra' and 'model.embed_tokens.weight' share memory.*tie them"
    with pytest.raises(ValueError, match=message):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


def test_views_with_gaps_between_each_others_coordinates_are_not_shared_memory(tmp_path):
    model = tiny_llama()
    columns = torch.zeros(4, 2)
    model.left, model.right = (nn.Parameter(columns[:, i]) for i in range(2))
    attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


class Loading(transformers.TrainerCallback):
    """Changes the model at an event."""

    def __init__(self, event, change):
        setattr(self, event, lambda args, state, control, model=None, **_: state.global_step or change(model))


def load_others(model):
    model.load_state_dict({name: leaf + 1 for name, leaf in model.state_dict().items()})


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_begin"])
@pytest.mark.parametrize("late", [False, True], ids=["given before", "given after"])
def test_callbacks_that_load_other_weights_after_attach_are_told(event, late, tmp_path):
    callback = Loading(event, load_others)
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[] if late else [callback])
    attach(trainer, key=KEY, **STRENGTHS)
    if late:
        trainer.add_callback(callback)
    with pytest.raises(ValueError, match="have changed between attach, which copied them as theta_0, and the first"):
        trainer.train()


@pytest.mark.parametrize("base", [None, "host"])
def test_a_model_that_is_converted_while_it_is_trained_is_told(base, tmp_path):
    callback = Loading("on_step_begin", lambda model: model.to(torch.bfloat16))
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[callback])
    attach(trainer, key=KEY, base=base, **STRENGTHS)
    with pytest.raises(ValueError, match=r"is torch.bfloat16, and was torch.float32 when training began"):
        trainer.train()


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0), (1, 1, 0)])
def test_detach_in_any_order_gives_plain_training_back(order, tmp_path):
    plain, detached = own_trainer(tiny_llama(), tmp_path), own_trainer(tiny_llama(), tmp_path)
    handles = [attach(detached, key=KEY, **STRENGTHS)]
    inner, calls = detached.training_step, []

    def profiled(*args, **options):  # somebody's wrapper between the two
        calls.append(1)
        return inner(*args, **options)

    detached.training_step = profiled
    handles.append(attach(detached, key=KEY, **STRENGTHS))
    for index in {*order} | {1}:
        handles[index].detach()
    for index in order:
        handles[index].detach()
    for trainer in (plain, detached):
        trainer.train()
    assert same(detached.model, copies(plain.model))
    assert len(calls) == STEPS
    assert {handle.draw for handle in handles} == {None}


@pytest.mark.parametrize(
    "share",
    [
        lambda model: dict(model.named_parameters()),
        lambda model: {name: p.detach() for name, p in model.named_parameters()},
        lambda model: {name: p.detach().view(-1).view(p.shape) for name, p in model.named_parameters()},
        lambda model: {name: torch.from_numpy(p.detach().numpy()) for name, p in model.named_parameters()},
        lambda model: copies(model) | {"model.norm.weight": model.model.layers[0].mlp.up_proj.weight.detach()[0]},
    ],
    ids=["parameters", "detached", "views", "numpy", "another parameter's row"],
)
def test_a_base_that_shares_memory_with_the_model_is_refused(share, tmp_path):
    model = tiny_llama()
    trainer = own_trainer(model, tmp_path)
    with pytest.raises(ValueError, match=r"base shares memory with the model \('model.*clone its tensors"):
        attach(trainer, key=KEY, base=share(model), **STRENGTHS)
    attach(trainer, key=KEY, base=copies(model), **STRENGTHS)


def test_a_base_that_the_model_comes_to_share_is_refused_before_a_step(tmp_path):
    model = tiny_llama()
    base, trainer = copies(model), own_trainer(model, tmp_path)
    attach(trainer, key=KEY, base=base, **STRENGTHS)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.data = base[name]
    with pytest.raises(ValueError, match="base shares memory"):
        trainer.train()


def test_a_base_that_is_written_to_after_attach_ends_the_training(tmp_path):
    class Move(transformers.TrainerCallback):
        def on_step_end(self, *args, **options):
            base["model.norm.weight"].mul_(0.5)

    model, weights = tiny_llama(), Weights()
    base, trainer = copies(model), own_trainer(model, tmp_path, callbacks=[weights, Move()])
    attach(trainer, key=KEY, base=base, **STRENGTHS)
    with pytest.raises(ValueError, match=r"base was written to since .*\(model.norm.weight\)"):
        trainer.train()
    assert len(weights.seen) == 1
    assert same(model, weights.seen[0])


class At(transformers.TrainerCallback):
    """Does something to the model at the beginning of a step, or before the first one."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            self.act(model)


def freeze(model):
    model.model.layers[0].requires_grad_(False)


def unfreeze(model):
    model.lm_head.requires_grad_(True)


def replace(model):
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.detach().clone())


def test_parts_of_one_model_that_are_trained_after_each_other_are_experts(tmp_path):
    """As adapters of one model, a trainer each; a new part is no trained one."""
    model, parts = tiny_llama(), ("self_attn", "mlp")
    pretrained = copies(model)
    for part in parts:
        for name, p in model.named_parameters():
            p.requires_grad_(part in name)
        trainer = own_trainer(model, tmp_path)
        attach(trainer, key=KEY, **STRENGTHS)
        trainer.train()
    alone = tiny_llama()
    for name, p in alone.named_parameters():
        p.requires_grad_("mlp" in name)
    alone.load_state_dict({**pretrained, **{n: p for n, p in copies(model).items() if "self_attn" in n}}, strict=False)
    trainer = own_trainer(alone, tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    assert same(alone, copies(model))
    model.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight, .*: trained with SMAT by another trainer"):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


@pytest.mark.parametrize("step", [0, 1, 3], ids=["first", "clean or not", "later"])
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (freeze, "'model.layers.0.self_attn.q_proj.weight' was trained when training began, and is not now"),
        (unfreeze, "'model.embed_tokens.weight' is trained now, and was not"),
        (replace, "'model.norm.weight' is another tensor"),
    ],
)
def test_parameters_that_change_while_training_end_it_before_the_step(act, message, step, tmp_path):
    module, weights = tiny_llama(), Weights()
    module.model.embed_tokens.requires_grad_(False)
    trainer = own_trainer(module, tmp_path, callbacks=[weights, At(step, act)])
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert len(weights.seen) == step
    last = weights.seen[-1] if step else copies(tiny_llama())
    assert same(module, last)


@pytest.mark.parametrize("act", [freeze, unfreeze])
def test_parameters_that_change_before_training_end_it_before_the_first_step(act, tmp_path):
    module = tiny_llama()
    module.model.embed_tokens.requires_grad_(False)
    trainer = own_trainer(module, tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    act(module)
    with pytest.raises(ValueError, match=r"at attach.*freeze, unfreeze and resize before attach"):
        trainer.train()
    assert same(module, copies(tiny_llama()))
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    start = tiny_llama()
    start.model.embed_tokens.requires_grad_(False)
    act(start)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    wanted = by_some(start, set(trained))
    assert all(torch.equal(p, wanted[name]) for name, p in trained.items())


def test_embeddings_that_are_resized_need_another_attach(tmp_path):
    module = tiny_llama()
    trainer = own_trainer(module, tmp_path, max_steps=2)
    attach(trainer, key=KEY, **STRENGTHS)
    module.resize_token_embeddings(40)
    with pytest.raises(ValueError, match=r"embed_tokens.weight' is another tensor.*resize before attach"):
        trainer.train()
    start = copies(module)
    handle = attach(trainer, key=KEY, **STRENGTHS)
    assert all(torch.equal(handle._own[name], leaf) for name, leaf in start.items())
    trainer.train()
    module.resize_token_embeddings(48)
    with pytest.raises(ValueError, match=r"has trained for 2 steps.*or give base="):
        attach(trainer, key=KEY, **STRENGTHS)


def by_some(module, names):
    """As `by_build`, of some parameters; the others stay."""
    params, rest = {n: p for n, p in copies(module).items() if n in names}, copies(module)
    loss = ModuleLoss(module, mean_loss)
    method = smat.build(
        lambda tree, batch: loss({**rest, **tree}, batch), sgd(), params, where=block_linear(module), **STRENGTHS
    )
    state, data = method.init(params), rows(4 * STEPS)
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        state, _ = method.update(KEY, state, {name: torch.stack([row[name] for row in own]) for name in own[0]})
    return state.params


def test_another_model_in_the_trainer_is_refused(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.model = trainer.model_wrapped = tiny_llama()
    with pytest.raises(ValueError, match="model was replaced after attach"):
        trainer.train()


@pytest.mark.parametrize(
    "name",
    [
        *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        *("apollo_adamw_layerwise", "lomo", "adalomo"),
    ],
)
def test_optimizers_that_step_inside_backward_are_refused_by_name(name, tmp_path):
    known = {item.value for item in transformers.training_args.OptimizerNames}
    assert {n for n in known if n.endswith("layerwise") or "lomo" in n} <= {
        *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"),
        *("apollo_adamw_layerwise", "lomo", "adalomo"),
    }
    trainer = trainer_of(tiny_llama(), tmp_path, optim=name, optim_target_modules=["mlp"])
    with pytest.raises(ValueError, match=f"optim='{name}' acts on gradients inside the backward pass"):
        attach(trainer, key=KEY, **STRENGTHS)


class InHooks(transformers.Trainer):
    """Its optimizer steps in hooks of the parameters, as the layerwise ones do."""

    def create_optimizer(self, *args):
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        return super().create_optimizer(*args)


class Fused(torch.optim.SGD):
    def fused_backward(self, loss, lr):
        loss.backward()


class InBackward(transformers.Trainer):
    def create_optimizer(self, *args):
        self.optimizer = Fused(self.model.parameters(), lr=LR)
        return self.optimizer


@pytest.mark.parametrize(("kind", "what"), [(InHooks, "hook of 'model.embed"), (InBackward, "Fused acts")])
def test_optimizers_of_ones_own_that_step_inside_backward_are_refused_before_a_step(kind, what, tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, kind=kind)
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match=what):
        trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


def test_weights_that_the_optimizer_does_not_have_are_refused_and_those_beside_the_model_told(tmp_path, caplog):
    def given(module, trained, *others):
        optimizer = torch.optim.SGD([*filter(trained, module.parameters()), *others], lr=LR)
        return own_trainer(module, tmp_path, max_steps=2, more={"optimizers": (optimizer, None)})

    with pytest.raises(ValueError, match=r"does not have 15 of 20 parameters .*\('model.embed.* 9 more\).* freeze"):
        attach(given(tiny_llama(), lambda p: p.ndim == 1), key=KEY, **STRENGTHS)
    module = tiny_llama()
    for others, told in ((), False), ((nn.Parameter(torch.ones(3)),), True):
        caplog.clear()
        trainer = given(module, lambda p: True, *others)
        attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS)
        trainer.train()
        assert ("also trains parameters that are not the model's, of shapes (3,): they" in caplog.text) is told


def test_processes_with_other_draws_or_another_theta_0_are_refused(tmp_path, monkeypatch):
    trainer = own_trainer(tiny_llama(), tmp_path)
    attach(trainer, key=KEY, **STRENGTHS)
    for changed, way_out in (
        ({"theta_0": "b"}, "the same whole base="),
        ({"key": [4, 0]}, "the same arguments in all"),
    ):
        monkeypatch.setattr(
            checks, "of_all_processes", lambda own, changed=changed: [own, own, {**own, **changed}, {**own, **changed}]
        )
        with pytest.raises(ValueError, match=r"in process 0, and .* in process 2; .*" + way_out):
            trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


def test_a_copy_of_a_trainer_trains_its_own_model(tmp_path):
    module = tiny_llama()
    trainer = own_trainer(module, tmp_path, max_steps=2)
    attach(trainer, key=KEY, **STRENGTHS)
    other = copy.deepcopy(trainer)
    other.train()
    assert same(module, copies(tiny_llama()))
    trainer.train()
    wanted = by_build(tiny_llama(), steps=2)
    assert same(other.model, wanted)
    assert same(module, wanted)


def test_a_copy_of_the_model_made_in_the_loss_is_saved_by_itself(tmp_path):
    copied = []

    class Copying(transformers.Trainer):
        def compute_loss(self, model, *args, **options):
            copied.append(copy.deepcopy(model))
            return super().compute_loss(model, *args, **options)

    trainer = trainer_of(tiny_llama(), tmp_path, kind=Copying)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    own = copied[STRENGTHS["period"] - 1]  # in a simulated step
    with torch.no_grad():
        own.model.norm.weight.fill_(7)
    own.save_pretrained(tmp_path / "copy")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "copy")
    assert torch.equal(found.model.norm.weight, torch.full_like(found.model.norm.weight, 7))
    assert own.generate.__self__ is own


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (0, r"key is 0, must be one key: key=smat_fn.random.key\(0\)"),
        (42, r"random.key\(42\)"),
        (None, "key is None"),
        (torch.zeros(2), "must be one key"),
        (torch.zeros(3, 2, dtype=torch.int64), "must be one key"),
        (torch.Generator(), "must be one key"),
    ],
    ids=["0", "42", "None", "floats", "three", "generator"],
)
def test_a_key_of_another_kind_is_told_at_attach(key, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        attach(trainer_of(tiny_llama(), tmp_path), key=key, **STRENGTHS)


def test_all_problems_of_an_attach_are_told_at_once(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path, optim="lomo")
    with pytest.raises(ValueError, match=r"sigma is -1.*key is 0.*where is a set.*base is 'cpu'"):
        attach(trainer, key=0, sigma=-1.0, where={"model.norm.weight"}, base="cpu")
    handles = [name for name in ("training_step", "compute_loss", "_smat_attached") if name in vars(trainer)]
    assert not handles


class Bare(nn.Module):
    """A language model whose blocks are attributes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.block1, self.block2 = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.block2(self.block1(self.embed(input_ids))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_a_mask_with_nothing_to_act_on_is_refused_with_what_was_looked_at(tmp_path):
    trainer = own_trainer(Bare(), tmp_path)
    message = (
        "drop_prob is 0.5, but Mask has nothing to act on: where picks none of 7 parameters.*"
        "it found none in Bare, whose linear layers are block1.0, block2.0, head.*`drop_prob=0`.*where, a function"
    )
    with pytest.raises(ValueError, match=message):
        attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match=r"It was asked for embed.weight"):
        attach(trainer, key=KEY, where=lambda path, p: "layers" in path, **STRENGTHS)
    attach(trainer, key=KEY, **STRENGTHS | {"drop_prob": 0.0}).detach()
    attach(trainer, key=KEY, where=lambda path, p: "block" in path and p.ndim == 2, **STRENGTHS)
    trainer.train()


def test_where_no_masked_parameter_is_trained_mask_is_refused_too(tmp_path):
    module = tiny_llama()
    module.model.layers.requires_grad_(False)
    with pytest.raises(ValueError, match=r"picks none of 2 parameters.*in model.layers in LlamaForCausalLM"):
        attach(own_trainer(module, tmp_path), key=KEY, **STRENGTHS)


class LogsLosses(transformers.Trainer):
    """Logs the loss of every micro-batch, under the name that the trainer's own log of their mean has."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.log({"loss": loss.item(), "aux": 1.0})
        return loss


def test_the_trainers_logs_say_what_was_simulated(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path, max_steps=5)
    attach(trainer, key=KEY, **STRENGTHS | {"period": 2})
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["smat/simulated"] for line in lines] == [0.0, 1.0, 0.0, 1.0, 0.0]
    drawn = [STRENGTHS["alpha_min"] + 0.8 * alpha_of(step) for step in (1, 3)]
    assert [line["smat/alpha"] for line in lines if "smat/alpha" in line] == pytest.approx(drawn, rel=1e-6)
    assert all("grad_norm" in line for line in lines)
    seldom = trainer_of(tiny_llama(), tmp_path, max_steps=5, logging_steps=4)
    attach(seldom, key=KEY, **STRENGTHS | {"period": 2})
    seldom.train()
    (line,) = [line for line in seldom.state.log_history if "loss" in line]
    assert (line["smat/simulated"], line["smat/alpha"]) == (0.5, pytest.approx(sum(drawn) / 2))
    own = trainer_of(tiny_llama(), tmp_path, kind=LogsLosses, max_steps=5, logging_steps=4)
    attach(own, key=KEY, **STRENGTHS | {"period": 2})
    own.train()
    *_, line = lines = [line for line in own.state.log_history if "smat/simulated" in line]
    assert (len(lines), "aux" in line, line["smat/simulated"]) == (1, False, 0.5)
    plain = trainer_of(tiny_llama(), tmp_path)
    attach(plain, key=KEY).detach()
    plain.train()
    assert not any(name.startswith("smat") for line in plain.state.log_history for name in line)


def moved(sigma, by, tmp_path, caplog, host=False):
    """What the end of a training logs, whose updates are all ``by``."""
    model = tiny_llama()
    trainer = trainer_of(model, tmp_path, max_steps=2)
    caplog.set_level(logging.INFO, logger="smat_fn")
    base = "host" if host else None
    attach(trainer, key=KEY, base=base, **STRENGTHS | {"sigma": sigma, "period": 2})

    class Constant(torch.optim.Optimizer):
        def step(self, closure=None):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(by / 2)  # in two steps

    trainer.optimizer = Constant(model.parameters(), {"lr": 1.0})
    trainer.train()
    record = caplog.records[-1]
    return record.levelno, record.getMessage()


@pytest.mark.parametrize("host", [False, True])
def test_the_end_of_a_training_says_how_large_sigma_was_beside_the_update(host, tmp_path, caplog):
    assert moved(0.25, 0.125, tmp_path, caplog, host) == (
        logging.INFO,
        "SMAT: sigma 0.25 is 2 times the RMS of the update, 0.12",
    )
    level, said = moved(0.25, 2**-9, tmp_path, caplog, host)
    assert level == logging.WARNING
    assert said.startswith("SMAT: sigma 0.25 is 1.3e+02 times the RMS of the update, 0.002, far from 1: docs/")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_adapters_of_peft_are_told_that_their_factors_are_simulated(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    hadamard = peft.LoHaConfig(r=2, target_modules=["q_proj"])
    for wrap, told in (
        (lambda m: m, ""),
        (lambda m: peft.get_peft_model(m, peft.LoraConfig(r=2)), "act on the adapter's A and B"),
        (lambda m: peft.get_peft_model(m, hadamard), "act on the parameters of the adapter (LOHA) themselves"),
    ):
        caplog.clear()
        trainer = trainer_of(wrap(tiny_llama()), tmp_path, max_steps=2)
        attach(trainer, key=KEY, where=lambda name, p: True, **STRENGTHS)
        trainer.train()
        assert told in caplog.text
        assert ("SMAT: Scale, Mask and Perturb act" in caplog.text) is bool(told)


def alpha_of(step):
    """U[0, 1) of a step's alpha."""
    return random.uniform(random.fold_in(random.fold_in(KEY, step), 0), dtype=torch.float64).item()


def test_one_line_says_at_the_start_what_is_masked(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="smat_fn")
    trainer = trainer_of(tiny_llama(), tmp_path, max_steps=4)
    handle = attach(trainer, key=KEY, **STRENGTHS | {"period": 4})
    assert not caplog.records
    trainer.train()
    line, last = [record.getMessage() for record in caplog.records if record.name.startswith("smat_fn")]
    assert line == repr(handle)
    assert last.startswith(f"SMAT: sigma {STRENGTHS['sigma']:g} is ")
    assert line.startswith("SMAT simulates every step s with (s + 1) % 4 == 0: Scale alpha from 0.2 to 1; Mask removes")
    assert "probability 0.5 in 14 of 20 trained parameters (5,120 of 5,712 values)" in line
    assert "model.layers.*.self_attn.q_proj.weight (2)" in line
    assert line.endswith("Perturb uniform noise of RMS 0.02")
    off = attach(trainer, key=KEY, alpha_min=1.0, drop_prob=0.0, sigma=0.0)
    assert repr(off) == "SMAT: Scale, Mask and Perturb are off, every step is clean"
    factors = {"model.layers.0.mlp.up_proj.weight": 0.5}
    alone = attach(trainer, key=KEY, alpha_min=1.0, drop_prob=0.0, sigma=0.0, factors=factors)
    assert repr(alone).endswith(": Scale only by a factor in 1 parameters; Mask off; Perturb off")


class Online(transformers.Trainer):
    """Generates its batches inside training_step, as GRPO does, and a sample in its loss."""

    def _prepare_inputs(self, inputs):
        self.prepared = copies(self.model)
        with torch.no_grad():
            self.model.generate(inputs["input_ids"][:, :4], max_new_tokens=1)
        return super()._prepare_inputs(inputs)

    def compute_loss(self, model, inputs, **options):
        self.at.append(copies(self.model))
        with torch.no_grad():
            self.model.generate(inputs["input_ids"][:, :4], max_new_tokens=1)
        self.after.append(copies(self.model))
        return super().compute_loss(model, inputs, **options)


def test_what_is_generated_inside_training_step_is_generated_at_theta(tmp_path):
    module = tiny_llama()
    module.generation_config.pad_token_id = 0
    weights, generated = Weights(), []
    trainer = own_trainer(module, tmp_path, kind=Online, callbacks=[weights], max_steps=4)
    trainer.at, trainer.after = [], []
    original = module.generate

    def generate(*args, **options):
        generated.append(copies(module))
        return original(*args, **options)

    module.generate = generate
    handle = attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    start = copies(module)
    trainer.train()
    assert module.generate is generate
    for step, before in enumerate([start, *weights.seen[:-1]]):
        for found in generated[2 * step : 2 * step + 2]:  # of the batch, and of the loss
            assert all(torch.equal(found[name], leaf) for name, leaf in before.items())
        state = simulate(before, start, handle._schedule.draw(KEY, step), where=block_linear(module))
        for found in (trainer.at[step], trainer.after[step]):
            assert all(torch.equal(found[name], leaf) for name, leaf in state.items())


class Generated(Bare):
    """Whose loss uses what a method `generate` computes, and one `predict`."""

    def generate(self, x):
        return self.block1(x)

    def predict(self, x):
        return self.head(self.block2(x))

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.predict(self.generate(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Predicted(Generated):
    generate = None

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.predict(self.block1(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_generate_with_gradients_is_told_and_other_methods_of_modules_are_left_alone(tmp_path):
    where = {"where": lambda path, p: p.ndim == 2}
    trainer = own_trainer(Generated(), tmp_path)
    attach(trainer, key=KEY, **STRENGTHS, **where)
    with pytest.raises(ValueError, match=r"generate of Generated gives the loss tensors with gradients.*otherwise"):
        trainer.train()
    ends = []
    for kind in (Bare, Predicted):
        torch.manual_seed(0)
        trainer = own_trainer(kind(), tmp_path)
        attach(trainer, key=KEY, **STRENGTHS, **where)
        trainer.train()
        ends.append(copies(trainer.model))
    assert same(trainer.model, ends[0])


def test_a_loss_that_is_replaced_after_attach_is_taken_at_theta_tilde_as_a_whole(tmp_path):
    ends = []
    for late in (False, True):
        trainer = own_trainer(tiny_llama(), tmp_path, max_steps=2)
        if late:
            attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
        inner = trainer.compute_loss

        def twice(model, inputs, *args, inner=inner, **options):
            return model(**inputs).loss + inner(model, inputs, *args, **options)

        trainer.compute_loss = twice
        if not late:
            attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
        trainer.train()
        ends.append(copies(trainer.model))
        assert trainer.compute_loss == twice or not late
    assert same(trainer.model, ends[0])


class Halving(transformers.Trainer):
    """Takes a batch in halves where it does not fit."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if len(inputs["labels"]) < 4:
            return super().training_step(model, inputs, num_items_in_batch)
        halves = ({name: value[at : at + 2] for name, value in inputs.items()} for at in (0, 2))
        return sum(self.training_step(model, half, num_items_in_batch) for half in halves) / 2


def test_a_training_step_that_calls_itself_is_one_step(tmp_path):
    halving = own_trainer(tiny_llama(), tmp_path, kind=Halving, max_steps=2, learning_rate=LR / 2)  # of a sum
    accumulating = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2, max_steps=2)
    for trainer in (halving, accumulating):
        attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
        trainer.train()
    assert same(halving.model, copies(accumulating.model))


def test_a_training_step_that_runs_again_after_its_gradient_is_reweighted_is_refused(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2)
    attach(trainer, key=KEY, **STRENGTHS)
    once = trainer.training_step
    trainer.training_step = lambda *args: (once(*args) + once(*args)) / 2  # the first micro-batch is summed twice
    with pytest.raises(ValueError, match="training_step of Trainer begins again after the last micro-batch of step 0"):
        trainer.train()
    assert same(trainer.model, copies(tiny_llama()))


class Busy(transformers.Trainer):
    """Evaluates and saves inside training_step."""

    def training_step(self, *args, **options):
        self.evaluate(rows(2))
        loss = super().training_step(*args, **options)
        self.evaluate(rows(2))
        self.save_model(f"{self.args.output_dir}/saved{self.state.global_step}")
        self.model.save_pretrained(f"{self.args.output_dir}/pretrained{self.state.global_step}")
        self.accelerator.save_state(f"{self.args.output_dir}/state{self.state.global_step}")
        return loss

    def prediction_step(self, *args, **options):
        self.at.append(copies(self.model))
        return super().prediction_step(*args, **options)


def test_evaluations_and_saved_files_inside_training_step_are_those_of_theta(tmp_path):
    module, weights = tiny_llama(), Weights()
    trainer = own_trainer(module, tmp_path, kind=Busy, callbacks=[weights], max_steps=2)
    trainer.at = []
    attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    trainer.train()
    for step, before in enumerate([copies(tiny_llama()), weights.seen[0]]):
        found = [*trainer.at[2 * step : 2 * step + 2], saved(tmp_path / f"saved{step}")]
        for own in (*found, saved(tmp_path / f"pretrained{step}"), saved(tmp_path / f"state{step}")):
            assert all(torch.equal(own[name], leaf) for name, leaf in before.items())
    assert same(module, by_build(tiny_llama(), steps=2, period=1))
    assert not {"evaluate", "predict", "save_model"} & set(vars(trainer))


class OwnStep(transformers.Trainer):
    """Takes its loss in training_step itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


class ZerothOrder(transformers.Trainer):
    """Takes its gradient without a backward pass, as MeZO does."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        with torch.no_grad():
            loss = self.compute_loss(model, inputs)
        for p in model.parameters():
            p.grad = loss * torch.ones_like(p)
        return loss


class TwoLosses(transformers.Trainer):
    """Takes another loss before the one of compute_loss."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.accelerator.backward(sum(p.square().sum() for p in model.parameters()))
        return super().training_step(model, inputs, num_items_in_batch)


class PartBefore(transformers.Trainer):
    """Runs a part of the model for a term that compute_loss adds."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.states = model.model(input_ids=inputs["input_ids"]).last_hidden_state
        return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) + self.states.square().mean()


class TwoPasses(transformers.Trainer):
    """Compares two passes, as R-Drop does, of which compute_loss has the second one."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        first = model(**inputs).logits
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        self.accelerator.backward(loss + (first - outputs.logits).square().mean())
        return loss.detach()


class OwnLoop(transformers.Trainer):
    """Has a loop of its own, with the trainer's events."""

    def _inner_training_loop(self, *args, **options):
        self._prepare_for_training(1, self.get_train_dataloader(), None)
        self.callback_handler.on_train_begin(self.args, self.state, self.control)
        for inputs in self.get_train_dataloader():
            self.model(**inputs).loss.backward()
            self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
            self.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OwnStep, "training_step of OwnStep runs the model with gradients before or without compute_loss.*at theta, "),
        (TwoPasses, "training_step of TwoPasses runs the model with gradients before or without compute_loss"),
        (PartBefore, "training_step of PartBefore runs the model with gradients before or without compute_loss"),
        (ZerothOrder, "training step of ZerothOrder does not call compute_loss with gradients enabled"),
        (TwoLosses, "gradients were summed before the first compute_loss .* take all losses of a step in compute_loss"),
        (OwnLoop, "OwnLoop updates the weights without a complete training_step"),
    ],
)
def test_trainers_whose_loss_is_taken_elsewhere_are_refused_before_an_update(kind, message, tmp_path):
    module = tiny_llama()
    trainer = own_trainer(module, tmp_path, kind=kind)
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert same(module, copies(tiny_llama()))


class Skipping(transformers.Trainer):
    """Leaves out the batches of some steps, in which the loss or what comes before it fails."""

    skipped, early = (), False

    def training_step(self, model, inputs, num_items_in_batch=None):
        try:
            if self.early and self.state.global_step in self.skipped:
                raise MemoryError
            return super().training_step(model, inputs, num_items_in_batch)
        except MemoryError:
            model.zero_grad()
            return torch.zeros(())

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs)
        if self.state.global_step in self.skipped:
            raise MemoryError
        return loss


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("period", [1, 2])
def test_a_batch_that_training_step_leaves_out_is_a_step_without_gradient(early, period, tmp_path):
    model, weights = tiny_llama(), Weights()
    trainer = own_trainer(
        model, tmp_path, kind=Skipping, callbacks=[weights], logging_strategy="steps", logging_steps=1
    )
    trainer.skipped, trainer.early = (1, 2), early
    attach(trainer, key=KEY, **STRENGTHS | {"period": period})
    trainer.train()
    assert len(weights.seen) == STEPS
    told = [line["smat/simulated"] for line in trainer.state.log_history if "smat/simulated" in line]
    # where only compute_loss fails the state was simulated
    gone = trainer.skipped if early else ()
    assert told == [float(step % period == period - 1 and step not in gone) for step in range(STEPS)]
    for step in trainer.skipped:
        assert all(torch.equal(weights.seen[step][name], leaf) for name, leaf in weights.seen[step - 1].items())
    assert not same(model, weights.seen[2])


class SkippingSome(transformers.Trainer):
    """Leaves out one of the micro-batches of a step, and keeps the gradient of the other."""

    skipped, count = (), -1

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.count += 1
        if self.count in self.skipped:
            return torch.zeros(())
        return super().training_step(model, inputs, num_items_in_batch)


class Zeroing(SkippingSome):
    """Gives those micro-batches the gradient 0."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.count += 1
        return transformers.Trainer.training_step(self, model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return 0 * loss if self.count in self.skipped else loss


@pytest.mark.parametrize("skipped", [(2,), (3,), (3, 4)])
@pytest.mark.parametrize("period", [1, 2])
def test_one_micro_batch_of_a_step_may_be_left_out(skipped, period, tmp_path):
    model = tiny_llama()
    trainer = own_trainer(model, tmp_path, kind=SkippingSome, gradient_accumulation_steps=2, max_steps=3)
    trainer.skipped = skipped
    attach(trainer, key=KEY, **STRENGTHS | {"period": period})
    trainer.train()
    assert trainer.state.global_step == 3
    expected = tiny_llama()
    other = own_trainer(expected, tmp_path / "other", kind=Zeroing, gradient_accumulation_steps=2, max_steps=3)
    other.skipped = skipped
    attach(other, key=KEY, **STRENGTHS | {"period": period})
    other.train()
    assert same(model, copies(expected))
    assert not same(model, copies(tiny_llama()))


@pytest.mark.parametrize("period", [1, 3])
def test_a_batch_that_is_left_out_may_leave_zeros(period, tmp_path):
    class Zeros(Skipping):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.state.global_step in self.skipped:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                return torch.zeros(())
            return super().training_step(model, inputs, num_items_in_batch)

    trainer = own_trainer(tiny_llama(), tmp_path, kind=Zeros)
    trainer.skipped = (1, 2)
    attach(trainer, key=KEY, **STRENGTHS | {"period": period})
    trainer.train()
    assert trainer.state.global_step == STEPS


def test_a_training_step_that_updates_the_weights_itself_in_some_steps_is_refused(tmp_path):
    class Sometimes(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if self.state.global_step % 2 == 0:
                return super().training_step(model, inputs, num_items_in_batch)
            loss = model.model(input_ids=inputs["input_ids"]).last_hidden_state.square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(p.grad)
            model.zero_grad()
            return loss.detach()

    trainer = own_trainer(tiny_llama(), tmp_path, kind=Sometimes)
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match="does not call compute_loss with gradients enabled"):
        trainer.train()


def test_a_first_step_without_a_loss_is_refused(tmp_path):
    trainer = own_trainer(tiny_llama(), tmp_path, kind=Skipping)
    trainer.skipped, trainer.early = (0,), True
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match="a batch that is left out must leave no gradient"):
        trainer.train()


def test_a_hook_inside_backward_that_comes_later_is_refused(tmp_path):
    def hook(model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)

    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[At(2, hook)])
    attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match=r"hook of 'model.layers.0.self_attn.k_proj.weight' was registered"):
        trainer.train()


def test_a_base_beside_frozen_weights_whose_values_are_in_other_tensors(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    model = tiny_llama()
    head = model.lm_head.weight.detach().clone()
    model.lm_head.weight = nn.Parameter(TwoTensor(head, head), requires_grad=False)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert checks.base_problems(base, model, trained.leaves_of(model)) == []
    with pytest.raises(ValueError, match="base shares memory"):
        errors.raise_problems(checks.base_problems(dict(trained.leaves_of(model)), model, trained.leaves_of(model)))


def test_an_embedding_that_clips_its_rows_is_refused(tmp_path):
    model = tiny_llama()
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ValueError, match=r"'model.embed_tokens' writes to its weight in the forward pass"):
        attach(own_trainer(model, tmp_path), key=KEY, **STRENGTHS)


@pytest.mark.parametrize("climb", [None, "both"])
def test_batch_norms_have_no_running_statistics_of_simulated_states(climb, tmp_path):
    inner = worker.model(torch.float32)
    module = Squares(inner[0], nn.BatchNorm1d(inner[0].out_features), *inner[1:])
    means = [module[1].running_mean.clone()]

    class Means(transformers.TrainerCallback):
        def on_step_end(self, *args, **others):
            means.append(module[1].running_mean.clone())

    batches = [dict(zip("xy", (part.float() for part in worker.batch(step)), strict=True)) for step in range(STEPS)]
    more = {"train_dataset": Stream(batches), "data_collator": lambda rows: rows[0]}
    options = SGD | {"optim": "adamw_torch" if climb else "sgd"}
    trainer = trainer_of(module, tmp_path, batch=1, max_steps=4, callbacks=[Means()], more=more, **options)
    attach(trainer, key=KEY, where=worker.masked, climb=climb, **STRENGTHS | {"period": 2})
    trainer.train()
    moved = [not torch.equal(before, after) for before, after in pairwise(means)]
    assert moved == [True, False, True, False]  # steps 1 and 3 are simulated
    assert module[1].momentum == 0.1


def test_trainers_known_to_have_a_loop_of_their_own_are_refused_by_name(tmp_path):
    class PPOTrainer(transformers.Trainer):
        pass

    class Mine(PPOTrainer):
        pass

    with pytest.raises(ValueError, match="training step of Mine does not call compute_loss"):
        attach(own_trainer(tiny_llama(), tmp_path, kind=Mine), key=KEY)


class Switching(torch.optim.SGD):
    """Moves the weights when training goes on after an evaluation, as schedule-free optimizers do."""

    def train(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.5)


def test_an_optimizer_that_switches_weights_at_the_start_of_a_step_switches_theta(tmp_path):
    class Own(transformers.Trainer):
        def create_optimizer(self, *args):
            self.optimizer = Switching(self.model.parameters(), lr=0.0)
            return self.optimizer

    trainer = own_trainer(tiny_llama(), tmp_path, kind=Own, max_steps=2)
    attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    trainer.train()
    wanted = {name: p + 0.5 + 0.5 for name, p in copies(tiny_llama()).items()}
    assert same(trainer.model, wanted)


def test_detach_between_micro_batches_of_a_simulated_step_is_refused(tmp_path):
    class Leave(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 1:
                handle.detach()

    trainer = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2, callbacks=[Leave()])
    handle = attach(trainer, key=KEY, **STRENGTHS)
    with pytest.raises(ValueError, match="detach between two steps"):
        trainer.train()


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_attach_in_a_callback_begins_with_the_next_step(event, tmp_path):
    class Join(transformers.TrainerCallback):
        pass

    def join(self, args, state, control, **_):
        if state.global_step == 2 and trainer.state.stateful_callbacks.get("smat_fn") is None:
            handles.append(attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS | {"period": 1}))

    setattr(Join, event, join)
    weights, handles = Weights(), []
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[Join(), weights], max_steps=4)
    trainer.train()
    assert len(handles) == 1
    lines = [line.get("smat/simulated", 0.0) for line in trainer.state.log_history if "loss" in line]
    assert lines == [0.0, 0.0, 0.0 if event == "on_pre_optimizer_step" else 1.0, 1.0]


def test_attach_after_the_last_step_that_would_be_simulated_says_so(tmp_path, caplog):
    class Join(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:  # its steps are 3 and 4, and steps 2 and 5 those of period 3
                attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS | {"period": 3})

    caplog.set_level(logging.WARNING, logger="smat_fn")
    trainer = own_trainer(tiny_llama(), tmp_path, callbacks=[Join()], max_steps=5)
    trainer.train()
    assert "no step is simulated, period is 3 and training ends after step 5" in caplog.text


def test_the_defaults_are_those_of_build():
    own, other = (inspect.signature(function).parameters for function in (attach, smat.build))
    names = "alpha_min", "drop_prob", "sigma", "period", "noise", "where"
    assert {name: own[name].default for name in names} == {name: other[name].default for name in names}


def test_attach_between_micro_batches_is_refused(tmp_path):
    class Join(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **_):
            if state.global_step == 1:
                attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS)

    trainer = own_trainer(tiny_llama(), tmp_path, batch=2, accumulate=2, callbacks=[Join()])
    with pytest.raises(ValueError, match="attach between two steps"):
        trainer.train()


@pytest.mark.slow
def test_host_memory_gives_the_same_bits_with_accumulation_and_another_dtype(tmp_path):
    found = []
    for base in (None, "host"):
        trainer = trainer_of(tiny_llama(), tmp_path, batch=2, accumulate=2)
        attach(trainer, key=KEY, base=base, **STRENGTHS | {"period": 3})
        trainer.model.to(torch.bfloat16)  # theta_0 is what it was
        trainer.train()
        found.append(copies(trainer.model))
    assert {leaf.dtype for leaf in found[1].values()} == {torch.bfloat16}
    assert all(torch.equal(leaf, found[1][name]) for name, leaf in found[0].items())


def test_only_the_copies_of_theta_0_in_host_memory_start_from_are_pinned(tmp_path, monkeypatch):
    trainer = trainer_of(tiny_llama(), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: pytest.fail("pinned, and again for the copies"))
    attach(trainer, key=KEY, base="host", **STRENGTHS)


def test_theta_0_is_in_host_memory_once(tmp_path, monkeypatch):
    pinned = []

    class Runtime(storage.HostRuntime):
        def pin(self, leaves):  # a copy in other memory, as CUDA's
            pinned.append(storage.Arena(leaves, partial(torch.empty, dtype=torch.uint8), least=1 << 10))
            return pinned[-1]

    monkeypatch.setattr(storage, "runtime_for", Runtime)
    plain = trainer_of(tiny_llama(), tmp_path)
    attach(plain, key=KEY, **STRENGTHS)
    plain.train()
    trainer = trainer_of(tiny_llama(), tmp_path)
    handle = attach(trainer, key=KEY, base="host", **STRENGTHS)
    trainer.train()
    assert same(trainer.model, copies(plain.model))
    (arena,) = pinned
    memory = {block.untyped_storage().data_ptr() for block in arena._blocks}
    across = [leaf for leaf in handle._own.values() if leaf.untyped_storage().data_ptr() not in memory]
    assert len(across) < len(memory) < len(handle._own)
    assert same(tiny_llama(), handle._own)


@pytest.mark.parametrize("base", [pytest.param(None, marks=pytest.mark.slow), "host"])
def test_a_parameter_that_is_not_contiguous_has_gradients_in_its_own_layout(base, tmp_path):
    ends = []
    for strided in (False, True):
        model = tiny_llama()
        projection = model.model.layers[0].self_attn.q_proj
        if strided:
            projection.weight = nn.Parameter(projection.weight.detach().T.contiguous().T)
        trainer = own_trainer(model, tmp_path, optim="adamw_torch_fused")
        attach(trainer, key=KEY, base=base, **STRENGTHS)
        trainer.train()
        ends.append(copies(model))
    assert same(model, ends[0])


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda m: torch.compile(m, backend="eager"), marks=pytest.mark.slow), nn.DataParallel],
    ids=["compiled", "DP"],
)
def test_a_wrapped_model_has_the_draws_and_names_of_the_model_itself(wrap, tmp_path):
    # the Trainer looks for columns in the signature of forward, which wrappers hide
    model = tiny_llama()
    model.generate = model.generate  # as of programs that wrap it
    trainer = own_trainer(wrap(model), tmp_path, remove_unused_columns=False)
    handle = attach(trainer, key=KEY, base=copies(tiny_llama()), **STRENGTHS)
    assert "_orig_mod" not in repr(handle)
    assert "module." not in repr(handle)
    trainer.train()
    assert same(trained.bare(trainer.model), by_build(tiny_llama()))
    assert "generate" in vars(model)


def test_wrapped_blocks_have_the_names_of_the_model_itself(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, plain, texts = tiny_llama(), copies(tiny_llama()), []
    for wrap in (None, checkpoint_wrapper, lambda block: torch.compile(block, backend="eager")):
        for i, block in enumerate(model.model.layers if wrap else ()):
            model.model.layers[i] = wrap(block)
        trainer = own_trainer(model, tmp_path, remove_unused_columns=False)
        texts.append(repr(attach(trainer, key=KEY, base=plain, **STRENGTHS)))
        assert trained.leaves_of(model).keys() == plain.keys()
        attach(trainer, key=KEY, base=copies(model), **STRENGTHS)
    assert len({*texts}) == 1


def test_a_state_dict_with_tied_weights_twice_is_refused_with_what_to_give(tmp_path):
    given = {name: leaf.clone() for name, leaf in tiny_llama().state_dict().items()}
    with pytest.raises(ValueError, match=r"'lm_head.weight' that .* lacks; base holds .* tied ones once"):
        attach(own_trainer(tiny_llama(), tmp_path), key=KEY, base=given, **STRENGTHS)
