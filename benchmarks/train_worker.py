"""One variant of training in a process of its own, one period for each command on its stdin; for `train_features`.

Most variants are the loop of train.py itself (`train_expert` with its log), on a small Llama with random weights.
"""

import gc
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from smat_fn import draw, optim, parallel, random, where
from smat_fn.config import Adapters, Finetune, MethodConfig, Smat, Training
from smat_fn.data import text
from smat_fn.grad import ModuleLoss
from smat_fn.mat import smat
from smat_fn.mat.smat import is_simulated
from smat_fn.models.causal_lm import next_token_loss
from smat_fn.scripts.train.logs import Log
from smat_fn.scripts.train.loop import train_expert
from smat_fn.scripts.train.resuming import Saver
from smat_fn.suites.suite import BaseSuite

from .shapes import llama

PERIOD, CLIP, LR, DECAY = 4, 1.0, 2e-5, 1e-3
STRENGTHS: dict[str, Any] = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3}
SIZES = {
    "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 64,
}  # fmt: skip
ROWS, LENGTH = 8, 64
FT, SMAT = Finetune(), Smat(period=PERIOD, noise="uniform", **STRENGTHS)
LORA = {kind: Adapters(rank=16, alpha=32.0, simulate=kind) for kind in ("merged", "factors")}


class Gate:
    """Lets a period of steps run for every line of input, and tells how long it took."""

    def __init__(self) -> None:
        self._steps, self._start = 0, 0.0

    def wait(self) -> None:
        """Wait for the next line on stdin; end the process when there are no more."""
        if not sys.stdin.readline():
            os._exit(0)  # other processes of the group may be gone
        self._start = time.perf_counter()

    def step(self, *_: object) -> None:
        """Count a step; after every period print its seconds and wait."""
        self._steps += 1
        if self._steps % PERIOD == 0:
            print(f"done {time.perf_counter() - self._start}", flush=True)
            self.wait()


class Variant(NamedTuple):
    """A way to train, and the variant that differs from it in one thing."""

    run: Callable[[Gate], None]
    twin: str = "FT"
    processes: int = 1


def model(**sizes: int) -> nn.Module:
    """The model, or one of other sizes."""
    torch.manual_seed(0)
    return llama({**SIZES, **sizes}).eval()


def batches() -> list[dict[str, torch.Tensor]]:
    """Some batches that come again and again."""
    ids = torch.randint(SIZES["vocab_size"], (4, ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one} for one in ids]


def scripted(method: MethodConfig, *, every: int | None = None, **changes: Any) -> Callable[[Gate], None]:
    """The loop of train.py."""

    def run(gate: Gate) -> None:
        module, data = model(), batches()
        loss_fn = ModuleLoss(module, next_token_loss)
        suite = BaseSuite(
            name="random",
            tasks=("task",),
            base={name: p.detach() for name, p in module.named_parameters()},
            where=where.block_linear(module),
            loss_fn=lambda task: loss_fn,
            batch=lambda task, key, step: data[step % len(data)],
            recipe={},
            seed=0,
            split=text.split,
        )
        training = Training(
            steps=1 << 30,
            lr=LR,
            optimizer="adamw",
            schedule="constant",
            weight_decay=DECAY,
            max_grad_norm=CLIP,
            **changes,
        )
        with tempfile.TemporaryDirectory(prefix="features-") as name, parallel.joined() as world:
            log = Log(
                Path(name) / "log.jsonl", task="task", total=1 << 30, device=torch.device("cpu"), rates=lambda step: {}
            )
            with log:
                saver = None if every is None else Saver(Path(name) / "state.safetensors", {}, every_steps=every)
                gate.wait()
                train_expert(
                    suite, "task", method, training, seed=0, on_step=gate.step, log=log, saver=saver, world=world
                )

    return run


def plain(gate: Gate) -> None:
    """A PyTorch loop without this library."""
    module, data = model(), batches()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    gate.wait()
    for step in range(1 << 30):
        next_token_loss(module, data[step % len(data)])[0].backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        gate.step()


def sharded(simulate: bool) -> Callable[[Gate], None]:
    """FSDP2 in your own loop, as in docs/parallel.md."""

    def run(gate: Gate) -> None:
        from torch.distributed.fsdp import fully_shard

        module, data, key = model(), batches(), random.key(0)
        masked = where.block_linear(module)
        with parallel.joined() as world:
            for layer in module.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(module)
            base = parallel.base_shards(module)
            optimizer = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY, fused=True)
            gate.wait()
            for step in range(1 << 30):
                own = {name: rows[world.rank :: world.size] for name, rows in data[step % len(data)].items()}
                if simulate and is_simulated(step, PERIOD):
                    drawn = draw(random.fold_in(key, step), **STRENGTHS)
                    with parallel.simulated_shards(module, base, drawn, where=masked):
                        next_token_loss(module, own)[0].backward()
                    parallel.reweight_grads(module, drawn, where=masked)
                else:
                    next_token_loss(module, own)[0].backward()
                nn.utils.clip_grad_norm_(module.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
                gate.step()

    return run


def trainer(attached: bool) -> Callable[[Gate], None]:
    """transformers.Trainer, with or without SMAT attached."""

    def run(gate: Gate) -> None:
        import transformers

        from smat_fn.integrations.trainer import attach

        class Told(transformers.TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                gate.step()

        rows = [{name: part[i] for name, part in one.items()} for one in batches() for i in range(ROWS)]
        with tempfile.TemporaryDirectory(prefix="features-") as name:
            arguments = transformers.TrainingArguments(
                name, max_steps=1 << 20, per_device_train_batch_size=ROWS, learning_rate=LR, weight_decay=DECAY,
                lr_scheduler_type="constant", max_grad_norm=CLIP, report_to=[], use_cpu=True, disable_tqdm=True,
                logging_strategy="no", save_strategy="no",
            )  # fmt: skip
            own = transformers.Trainer(model(), arguments, train_dataset=rows, callbacks=[Told()])
            if attached:
                attach(own, key=random.key(0), period=PERIOD, **STRENGTHS)
            gate.wait()
            own.train()

    return run


VARIANTS = {
    "FT": Variant(scripted(FT), "plain PyTorch loop"),
    "plain PyTorch loop": Variant(plain),
    "SMAT": Variant(scripted(SMAT)),
    "FT, 4 micro-batches": Variant(scripted(FT, accumulate=4)),
    "SMAT, 4 micro-batches": Variant(scripted(SMAT, accumulate=4), "SMAT"),
    "SMAT, saved every 8 steps": Variant(scripted(SMAT, every=8), "SMAT"),
    "FT, bf16": Variant(scripted(FT, precision="bf16")),
    "SMAT, bf16": Variant(scripted(SMAT, precision="bf16"), "FT, bf16"),
    "FT, mixed": Variant(scripted(FT, precision="mixed")),
    "SMAT, mixed": Variant(scripted(SMAT, precision="mixed"), "FT, mixed"),
    "FT, adapters": Variant(scripted(FT, lora=LORA["merged"])),
    "SMAT, adapters, at the merged weight": Variant(scripted(SMAT, lora=LORA["merged"]), "FT, adapters"),
    "SMAT, adapters, at the factors": Variant(scripted(SMAT, lora=LORA["factors"]), "FT, adapters"),
    "FT, 2 replicas": Variant(scripted(FT), processes=2),
    "SMAT, 2 replicas": Variant(scripted(SMAT), "FT, 2 replicas", 2),
    "SMAT, 2 replicas, own draws": Variant(scripted(SMAT, independent_draws=True), "FT, 2 replicas", 2),
    "FT, FSDP2, 2 shards": Variant(sharded(False), processes=2),
    "SMAT, FSDP2, 2 shards": Variant(sharded(True), "FT, FSDP2, 2 shards", 2),
    "Trainer": Variant(trainer(False)),
    "Trainer, SMAT attached": Variant(trainer(True), "Trainer"),
}
GROUPS = (
    ("FT", "plain PyTorch loop", "SMAT", "FT, 4 micro-batches", "SMAT, 4 micro-batches", "SMAT, saved every 8 steps"),
    ("FT", "FT, bf16", "SMAT, bf16", "FT, mixed", "SMAT, mixed"),
    ("FT", "FT, adapters", "SMAT, adapters, at the merged weight", "SMAT, adapters, at the factors"),
    ("FT", "FT, 2 replicas", "SMAT, 2 replicas", "SMAT, 2 replicas, own draws"),
    ("FT", "FT, FSDP2, 2 shards", "SMAT, FSDP2, 2 shards"),
    ("FT", "Trainer", "Trainer, SMAT attached"),
)


def main(name: str) -> None:
    """Run a variant, after all that is loaded on the way has been loaded: its memory is that of no variant."""
    torch.set_num_threads(1)
    if name.startswith("Trainer"):
        importlib.import_module("accelerate")
    small, ids = model(hidden_size=12, intermediate_size=16, vocab_size=8), torch.zeros(1, 4, dtype=torch.int64)
    base = {path: p.detach() for path, p in small.named_parameters()}
    loss_fn = ModuleLoss(small, next_token_loss)
    optimizer = optim.adamw(LR, weight_decay=DECAY, fused=True)
    method = smat.build(loss_fn, optimizer, base, where=where.block_linear(small), max_grad_norm=CLIP, period=1)
    method.update(random.key(0), method.init(base), {"input_ids": ids, "attention_mask": ids + 1, "labels": ids})
    importlib.import_module("torch.optim").AdamW(small.parameters(), fused=True)
    importlib.import_module("tqdm")
    del small, base, loss_fn, method
    gc.collect()
    print("ready", flush=True)
    VARIANTS[name].run(Gate())


if __name__ == "__main__":
    main(sys.argv[1])
