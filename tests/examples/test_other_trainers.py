"""The examples for accelerate, Lightning, axolotl and LLaMA-Factory: SMAT's gradients, or its hook in the last two.

The last three frameworks are replaced by modules with the names and classes that the examples use (docs/trainer.md says
with which versions the examples were run themselves).
"""

import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers
import yaml
from torch.func import functional_call

from smat_fn import Schedule, draw, grad, reweight, simulate
from smat_fn.random import fold_in, key
from smat_fn.where import block_linear

FOLDER = Path(__file__).parents[2] / "examples"
SETTINGS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3}


@pytest.fixture
def accelerated():
    from accelerate.state import AcceleratorState, GradientState

    yield runpy.run_path(str(FOLDER / "accelerate_loop.py"))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def literal(model, *, steps, batch, accumulate, lr, period, rows=None):
    """The same training by pure functions; the rows are those that the example draws after making its model."""
    rows = torch.randint(0, 64, (steps * accumulate * batch, 8)) if rows is None else rows
    base = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    masked = block_linear(model)
    params = {name: p.clone().requires_grad_() for name, p in base.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=lr)

    def loss_fn(own, ids):
        return functional_call(model, own, (), {"input_ids": ids, "labels": ids}).loss, None

    for step, part in enumerate(rows.split(batch * accumulate)):
        at, drawn = {name: p.detach() for name, p in params.items()}, None
        if (step + 1) % period == 0:
            drawn = draw(fold_in(key(0), step), **SETTINGS)
            at = simulate(at, base, drawn, where=masked)
        found = [grad.value_and_grad(loss_fn)(at, ids)[1] for ids in part.split(batch)]
        grads = {name: sum(g[name] for g in found) / accumulate for name in at}
        grads = grads if drawn is None else reweight(grads, drawn, where=masked)
        for name, p in params.items():
            p.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


def test_the_loop_of_accelerate_takes_the_steps_of_smat(accelerated, capsys):
    whole = accelerated["tiny_model"]

    def frozen():  # a part that is frozen is not simulated
        model = whole()
        model.model.layers[0].requires_grad_(False)
        return model

    accelerated["main"].__globals__["tiny_model"] = frozen
    options = {"steps": 8, "batch": 3, "accumulate": 2, "lr": 1e-3, "period": 4}
    found = accelerated["main"](**options)
    assert capsys.readouterr().out == "8 steps in 1 process(es)\n"
    expected = literal(frozen(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    plain = literal(frozen(), **{**options, "period": 100})
    assert max((plain[name] - leaf).abs().max() for name, leaf in found.items()) > 1e-4


@pytest.mark.slow
def test_the_loop_of_accelerate_in_two_processes():
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(FOLDER / "accelerate_loop.py")], capture_output=True, text=True
    )
    assert done.stdout == "8 steps in 2 process(es)\n", done.stderr


@pytest.fixture
def stand_in(monkeypatch):
    def make(name, **members):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:depth]))
            if depth == len(parts):
                vars(module).update(members)
            if module.__name__ not in sys.modules or depth == len(parts):
                monkeypatch.setitem(sys.modules, module.__name__, module)
        return sys.modules[name]

    return make


def arguments(folder, model):
    options = transformers.Seq2SeqTrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True, logging_steps=1,
        save_strategy="no", disable_tqdm=True, seed=3,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 6))]
    return {"model": model, "args": options, "train_dataset": rows}


def simulated(trainer):
    return [row["smat/simulated"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture
def tiny():
    return runpy.run_path(str(FOLDER / "accelerate_loop.py"))["tiny_model"]()


def test_the_plugin_of_axolotl_attaches_to_the_trainer(stand_in, tiny, tmp_path, monkeypatch):
    stand_in("axolotl.integrations.base", BasePlugin=type("BasePlugin", (), {}))
    recipe = yaml.safe_load((FOLDER / "axolotl/smat.yml").read_text(encoding="utf-8"))
    monkeypatch.syspath_prepend(FOLDER / "axolotl")
    module, _, name = recipe["plugins"][0].rpartition(".")
    plugin = runpy.run_module(module)[name]()
    trainer = transformers.Trainer(**arguments(tmp_path, tiny))
    plugin.post_trainer_create(SimpleNamespace(seed=None), trainer)
    trainer.train()
    assert simulated(trainer) == [0, 0, 0, 1]


def test_the_trainer_for_llama_factory_attaches_itself(stand_in, tiny, tmp_path):
    made = []
    workflow = stand_in("llamafactory.train.sft.workflow", CustomSeq2SeqTrainer=transformers.Seq2SeqTrainer)
    sys.modules["llamafactory.train.sft"].workflow = workflow

    def run_exp():  # as its workflow: the class is looked up when training begins
        made.append(workflow.CustomSeq2SeqTrainer(**arguments(tmp_path, tiny)))
        made[0].train()

    stand_in("llamafactory.train.tuner", run_exp=run_exp)
    runpy.run_path(str(FOLDER / "llamafactory/train_smat.py"), run_name="__main__")
    assert simulated(made[0]) == [0, 0, 0, 1]


class Module(torch.nn.Module):
    automatic_optimization = True


class Fit:
    """The hooks of Lightning 2.6.6 in automatic optimization, in its order."""

    def __init__(self, *, accumulate_grad_batches, gradient_clip_val, callbacks, **_):
        self.accumulate, self.clip, (self.callback,) = accumulate_grad_batches, gradient_clip_val, callbacks
        self.global_step = 0

    def fit(self, module, loader):
        self.callback.setup(self, module, "fit")
        getattr(module, "configure_model", lambda: None)()
        self.callback.on_fit_start(self, module)
        optimizer = module.configure_optimizers()
        for place, batch in enumerate(loader):
            self.callback.on_train_batch_start(self, module, batch, place)
            loss = module.training_step(batch, place)
            if loss is not None:
                (loss / self.accumulate).backward()
                self.callback.on_after_backward(self, module)
            if (place + 1) % self.accumulate == 0:
                self.callback.on_before_optimizer_step(self, module, optimizer)
                torch.nn.utils.clip_grad_norm_(module.parameters(), self.clip)
                optimizer.step()
                optimizer.zero_grad()
                self.global_step += 1
            self.callback.on_train_batch_end(self, module, None, batch, place)


def lightning_example(stand_in):
    stand_in("lightning", Callback=object, LightningModule=Module, Trainer=Fit)
    return runpy.run_path(str(FOLDER / "lightning_callback.py"))


def test_the_callback_of_lightning_takes_the_steps_of_smat(stand_in, capsys):
    example = lightning_example(stand_in)
    options = {"steps": 8, "batch": 3, "accumulate": 2, "period": 4}
    found = example["main"](**options)
    assert capsys.readouterr().out == "8 steps\n"
    rows = example["rows"](8 * 2 * 3)
    expected = literal(example["Model"](), **options, lr=1e-3, rows=rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_callback_of_lightning_puts_theta_back_after_an_exception(stand_in):
    example = lightning_example(stand_in)
    model, trainer = example["Model"](), SimpleNamespace(global_step=3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    callback = example["Smat"](key(0), Schedule(**SETTINGS, period=4))
    callback.setup(trainer, model, "fit")
    callback.on_fit_start(trainer, model)
    callback.on_train_batch_start(trainer, model, None, 6)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    callback.on_exception(trainer, model, KeyboardInterrupt())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_callback_of_lightning_leaves_out_batches_without_a_loss(stand_in):
    example = lightning_example(stand_in)

    class Skips(example["Model"]):
        def training_step(self, ids, batch_idx):
            return None if batch_idx in (6, 7, 12) else super().training_step(ids, batch_idx)

    example["main"].__globals__["Model"] = Skips
    found = example["main"](
        steps=8, batch=3, accumulate=2, period=4
    )  # batches 6 and 7 are those of the first simulated
    assert all(p.isfinite().all() for p in found.values())


def test_the_callback_of_lightning_refuses_what_it_cannot_train(stand_in):
    example = lightning_example(stand_in)
    model = example["Model"]

    class Manual(model):
        automatic_optimization = False

    class Late(model):
        def __init__(self):
            super().__init__()
            self.whole, self.model = [self.model], None

        def configure_model(self):
            (self.model,) = self.whole

    for kind, said in (
        (Manual, "^Smat needs automatic_optimization: its steps are those of trainer.global_step"),
        (Late, r"^21 parameters \(model.model.embed_tokens.weight, ...\) were made or unfrozen after setup"),
    ):
        example["main"].__globals__["Model"] = kind
        with pytest.raises(ValueError, match=said):
            example["main"]()
