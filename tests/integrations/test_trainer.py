"""transformers.Trainer with SMAT attached does what the library's own loop does, and never keeps theta~."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import IterableDataset

from smat_fn import random
from smat_fn.grad import ModuleLoss
from smat_fn.integrations.trainer import attach
from smat_fn.mat import asam, smat
from smat_fn.models.causal_lm import next_token_loss
from smat_fn.optim import adamw
from smat_fn.simulation import simulate
from smat_fn.suites import load_suite
from smat_fn.types import Micro
from smat_fn.where import block_linear

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STRENGTHS = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 0.02, "period": 2}
STEPS, LR = 5, 1e-2
KEY = random.key(3)
ROOT = Path(__file__).parents[2]
CHECKPOINTING = next(  # the newer name first: the older one warns where both are known
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if hasattr(transformers.TrainingArguments, name)
)


def tiny_llama():
    return llama(32)


def llama(size, *, tied=True):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(count):
    ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


class Stream(IterableDataset):
    """Rows in their own order."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def trainer_of(module, tmp_path, *, batch=4, accumulate=1, callbacks=(), kind=None, more=None, **options):
    given = {
        "output_dir": str(tmp_path), "max_steps": STEPS, "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulate, "learning_rate": LR, "lr_scheduler_type": "constant",
        "optim": "adamw_torch", "weight_decay": 0.0, "max_grad_norm": 0.5, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", **options,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**given)
    data = Stream(rows(4 * STEPS))
    given = {"train_dataset": data, "callbacks": list(callbacks), **(more or {})}
    return (kind or transformers.Trainer)(module, arguments, **given)


class Weights(transformers.TrainerCallback):
    """The weights after every optimizer step, and whatever else looks at them."""

    def __init__(self):
        self.seen, self.before = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.before.append({n: p.detach().clone() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model=None, **_):
        self.seen.append({n: p.detach().clone() for n, p in model.named_parameters()})


class Alternating:
    """ASAM in clean steps, SMAT in simulated ones, with one optimizer."""

    def __init__(self, loss, optimizer, params, *, where, rho, **options):
        self.clean = asam.build(loss, optimizer, params, rho=rho, **options)
        self.simulated = smat.build(loss, optimizer, params, where=where, **options, **STRENGTHS)
        self.init = self.clean.init

    def update(self, key, state, batch):
        simulated = (state.step + 1) % STRENGTHS["period"] == 0
        return (self.simulated if simulated else self.clean).update(key, state, batch)


def by_our_loop(module, micro_batches=1, climb=None):
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    given = ModuleLoss(module, next_token_loss), adamw(LR, weight_decay=0.0), params
    options = {"where": block_linear(module), "max_grad_norm": 0.5}
    if climb == "asam":
        method = Alternating(*given, rho=0.25, **options)
    else:
        method = smat.build(*given, climb=climb, **options, **STRENGTHS)
    state, after, data = method.init(params), [], rows(4 * STEPS)
    for step in range(STEPS):
        own = data[4 * step : 4 * step + 4]
        size = 4 // micro_batches
        batches = [
            {name: torch.stack([row[name] for row in own[i : i + size]]) for name in own[0]} for i in range(0, 4, size)
        ]
        state, _ = method.update(KEY, state, [Micro(one) for one in batches] if micro_batches > 1 else batches[0])
        after.append(state.params)
    return after


@pytest.mark.parametrize(
    ("batch", "accumulate", "options"),
    [(4, 1, {}), (2, 2, {}), (2, 2, {CHECKPOINTING: True})],
    ids=["whole", "accumulated", "checkpointed"],
)
def test_every_step_is_that_of_the_librarys_own_loop(batch, accumulate, options, tmp_path):
    weights = Weights()
    trainer = trainer_of(tiny_llama(), tmp_path, batch=batch, accumulate=accumulate, callbacks=[weights], **options)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    wanted = by_our_loop(tiny_llama(), accumulate)
    start = {n: p.detach() for n, p in tiny_llama().named_parameters()}
    assert len(weights.seen) == STEPS
    for step, (seen, want) in enumerate(zip(weights.seen, wanted, strict=True)):
        for name, leaf in want.items():
            torch.testing.assert_close(seen[name], leaf, rtol=0, atol=2e-5, msg=f"{name} after step {step}")
    # the optimizer updates theta, not theta~: before step s the weights are those after step s - 1
    for before, after in zip(weights.before, [start, *weights.seen[:-1]], strict=True):
        assert all(torch.equal(before[name], leaf) for name, leaf in after.items())


def test_all_off_is_the_plain_trainer_bit_for_bit(tmp_path):
    plain, off = trainer_of(tiny_llama(), tmp_path), trainer_of(tiny_llama(), tmp_path)
    handle = attach(off, key=KEY, alpha_min=1.0, drop_prob=0.0, sigma=0.0, period=1)
    for trainer in (plain, off):
        trainer.train()
    assert handle.draw is None
    assert all(torch.equal(p, q) for p, q in zip(plain.model.parameters(), off.model.parameters(), strict=True))


def test_training_again_simulates_the_weights_of_now(tmp_path):
    seen = []

    def watched(*args, **options):
        seen.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        return inner(*args, **options)

    trainer = trainer_of(tiny_llama(), tmp_path, max_steps=1)
    inner, trainer.compute_loss = trainer.compute_loss, watched
    handle = attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(2):
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        wanted = simulate(before, base, handle.draw, where=block_linear(trainer.model))
        assert all(torch.equal(seen[-1][name], leaf) for name, leaf in wanted.items())
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(1.0)
    assert len(seen) == 2


def test_a_step_that_fails_simulates_anew_when_it_is_tried_again(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path, max_steps=1)
    inner, seen = trainer.compute_loss, []

    def failing(*args, **options):
        seen.append(trainer.model.model.norm.weight.detach().clone())
        if len(seen) == 1:
            raise RuntimeError("out of memory")
        return inner(*args, **options)

    trainer.compute_loss = failing
    attach(trainer, key=KEY, **STRENGTHS | {"period": 1})
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    with torch.no_grad():
        trainer.model.model.norm.weight.add_(1.0)
    trainer.train()
    assert not torch.allclose(seen[0], seen[1], atol=0.1)


def test_the_base_may_have_another_dtype_than_the_model(tmp_path):
    module = tiny_llama()
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = trainer_of(module.to(torch.bfloat16), tmp_path)
    attach(trainer, key=KEY, base=base, **STRENGTHS)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def saved(folder):
    leaves = load_file(folder / "model.safetensors")
    return {name: leaf for name, leaf in leaves.items() if name != "lm_head.weight"}


def test_evaluation_and_checkpoints_see_the_expert_and_a_run_goes_on_from_one(tmp_path):
    module, weights, evaluated = tiny_llama(), Weights(), []

    def look(layer, inputs):
        if not module.training:
            evaluated.append(layer.weight.detach().clone())

    module.model.norm.register_forward_pre_hook(look)
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    more, strengths = {"eval_dataset": rows(4)}, STRENGTHS | {"period": 1}
    trainer = trainer_of(module, tmp_path, callbacks=[weights], more=more, per_device_eval_batch_size=4, **often)
    attach(trainer, key=KEY, **strengths)
    trainer.train()
    assert len(evaluated) == STEPS
    for step, (seen, gain) in enumerate(zip(weights.seen, evaluated, strict=True)):
        assert torch.equal(gain, seen["model.norm.weight"])
        kept = saved(tmp_path / f"checkpoint-{step + 1}")
        assert set(kept) == set(seen)
        assert all(torch.equal(leaf, seen[name]) for name, leaf in kept.items())
    again = trainer_of(tiny_llama(), tmp_path)
    attach(again, key=KEY, **strengths)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(p, weights.seen[-1][name]) for name, p in again.model.named_parameters())


def test_a_trainer_with_its_own_training_step_and_loss_like_trls(tmp_path):
    calls = []

    class Own(transformers.Trainer):
        def training_step(self, *args, **options):
            with contextlib.nullcontext():
                calls.append("step")
                return super().training_step(*args, **options)

        def compute_loss(self, model, inputs, return_outputs=False, **options):
            calls.append("loss")
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
            return (loss, outputs) if return_outputs else loss

    weights = Weights()
    trainer = trainer_of(tiny_llama(), tmp_path, batch=2, accumulate=2, callbacks=[weights], kind=Own)
    attach(trainer, key=KEY, **STRENGTHS)
    trainer.train()
    assert calls == ["step", "loss"] * 2 * STEPS
    for seen, want in zip(weights.seen, by_our_loop(tiny_llama(), 2), strict=True):
        for name, leaf in want.items():
            torch.testing.assert_close(seen[name], leaf, rtol=0, atol=2e-5)


def test_every_step_is_that_of_train_py(tmp_path, monkeypatch):
    words = ["the", "council", "voted", "to", "keep", "plan", "as", "it", "is", "and", "nothing", "more", "was", "said"]
    (tmp_path / "rows" / "task").mkdir(parents=True)
    for split in ("train", "dev", "eval"):
        lines = [{"prompt": f"{split} {i}: {' '.join(words[i:])}", "answer": words[i]} for i in range(12)]
        (tmp_path / "rows" / "task" / f"{split}.json").write_text(json.dumps(lines))
    example = runpy.run_path(str(ROOT / "examples/trace_tiny.py"))
    texts = example["row_texts"](tmp_path / "rows", ["task"])
    example["write_model"](tmp_path / "model", texts, vocabulary=300, width=16, layers=1)
    model, data, steps, lr = tmp_path / "model", tmp_path / "rows", 8, 1e-3
    command = f"train.py smat --preset llama-3.2-1b --model {model} --data {data} --out {tmp_path / 'run'} --seed 5"
    command += f" --precision fp32 --steps {steps} --lr {lr} --suite-options device cpu"
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    ours = [json.loads(line) for line in (tmp_path / "run" / "task.log.jsonl").read_text().splitlines()]
    suite = load_suite("trace", seed=5, model=str(model), data=str(data), dtype="float32", device="cpu")
    key = random.fold_in(random.key(5), "task")
    data = Stream([suite.batch("task", key, step) for step in range(steps)])
    trainer = trainer_of(
        transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path / "hf", batch=1,
        max_steps=steps, learning_rate=lr, weight_decay=1e-3, max_grad_norm=1.0,
        more={"train_dataset": data, "data_collator": lambda batches: batches[0]},
    )  # fmt: skip
    trainer.model.eval()
    attach(trainer, key=key, alpha_min=0.2, drop_prob=0.5, sigma=2e-3, period=4)
    trainer.train()
    theirs = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["simulated"] for line in ours] == [(step + 1) % 4 == 0 for step in range(steps)]
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4), step
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3), step
    expert = saved(tmp_path / "run" / "task")
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.detach(), expert[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_processes_of_torchrun_do_what_one_does(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.integrations.worker", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    for climb, own in first.items():
        for name, leaf in by_our_loop(tiny_llama(), climb=climb)[-1].items():
            assert torch.equal(own[name], second[climb][name])
            torch.testing.assert_close(own[name], leaf, rtol=0, atol=2e-5)


def test_plain_training_differs_and_detach_gives_it_back(tmp_path):
    plain, detached = trainer_of(tiny_llama(), tmp_path), trainer_of(tiny_llama(), tmp_path)
    attach(detached, key=KEY, **STRENGTHS).detach()
    attached = trainer_of(tiny_llama(), tmp_path)
    attach(attached, key=KEY, **STRENGTHS)
    for trainer in (plain, detached, attached):
        trainer.train()
    same, other = (
        [torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True)]
        for trainer in (detached, attached)
    )
    assert all(same)
    assert not any(other)


def test_an_exception_in_a_simulated_step_leaves_the_weights_of_the_expert(tmp_path):
    module, weights = tiny_llama(), Weights()
    trainer = trainer_of(module, tmp_path, callbacks=[weights])
    attach(trainer, key=KEY, **STRENGTHS)
    seen = []

    def fail(layer, inputs):
        if trainer.state.global_step == 3:
            seen.append(module.model.norm.weight.detach().clone())
            raise RuntimeError("out of memory")

    module.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    after = weights.seen[-1]
    assert not torch.equal(seen[0], after["model.norm.weight"])  # theta~ was in place when it happened
    assert all(torch.equal(p, after[name]) for name, p in module.named_parameters())


def test_bfloat16_autocast_keeps_float32_weights(tmp_path):
    trainer = trainer_of(tiny_llama(), tmp_path, bf16=True)
    handle = attach(trainer, key=KEY, **STRENGTHS)
    assert trainer.train().training_loss < 4
    assert handle.draw is not None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_bad_input_is_told_at_once(tmp_path, monkeypatch):
    trainer = trainer_of(tiny_llama(), tmp_path)
    with pytest.raises(ValueError, match=r"sigma is -1.*; period is 0"):
        attach(trainer, key=KEY, sigma=-1.0, period=0)
    with pytest.raises(ValueError, match="lm_head"):
        attach(trainer, key=KEY, base={"lm_head": torch.zeros(1)})
    model = tiny_llama()
    model.model.embed_tokens.sparse = True
    told = r"'model.embed_tokens' gives sparse gradients, which cannot be reweighted: make the Embedding with sparse=F"
    with pytest.raises(ValueError, match=told):
        attach(trainer_of(model, tmp_path), key=KEY)
    for name in ("fsdp", "fsdp_xla", "deepspeed"):
        monkeypatch.setattr(trainer, f"is_{name}_enabled", True)
        with pytest.raises(ValueError, match=f"shards its weights by {name}:"):
            attach(trainer, key=KEY)
