"""One CPU thread: the operations against torch's own random numbers and a copy; both gradient engines; options of
training against plain fine-tuning."""

import functools
import gc
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smat_fn.checkpoint import write_text
from smat_fn.scripts.train.memory import process_peak, reset_process_peak
from smat_fn.types import Engine

from . import timing
from .kernels import copy_of, make, ours, plain

ROOT = Path(__file__).parent.parent
COMMAND = "python -m benchmarks cpu"
SIZES = (10**6, 10**7)
ENGINES: tuple[Engine, ...] = ("autograd", "func")
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8192}
TOKENS = 8, 128
# name -> (simulated in every 4th step, micro-batches, precision); the first is the measure of the others
OPTIONS: dict[str, tuple[bool, int, str]] = {
    "FT": (False, 1, "fp32"),
    "FT, 4 micro-batches": (False, 4, "fp32"),
    "FT, bf16": (False, 1, "bf16"),
    "FT, mixed": (False, 1, "mixed"),
    "SMAT": (True, 1, "fp32"),
    "SMAT, 4 micro-batches": (True, 4, "fp32"),
    "SMAT, mixed": (True, 1, "mixed"),
}


def main(arguments: list[str]) -> None:
    """Print the tables; ``--dry-run`` takes tiny sizes and writes no file."""
    dry_run = "--dry-run" in arguments
    torch.set_num_threads(1)
    rows, engines, options = operations(dry_run), gradients(dry_run), training(dry_run)
    print(timing.markdown(rows), timing.markdown(engines), timing.markdown(options), sep="\n\n")
    if not dry_run:
        facts = {"threads": 1, "rows": rows, "model": MODEL, "engines": engines, "training": options}
        result = {**timing.describe(COMMAND), **facts}
        write_text(ROOT / "benchmarks/results/cpu.json", json.dumps(result, indent=1) + "\n")


def operations(dry_run: bool) -> list[dict[str, Any]]:
    """CPU nanoseconds per coordinate, and ratios of neighbouring runs."""
    rows, device = [], torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1000,) if dry_run else SIZES:
            leaves = make({"layers.w": (size,)}, dtype, device)
            candidates = {name: run for name, run in ours(leaves, device).items() if name in ("simulate", "reweight")}
            baseline = plain(leaves)
            candidates |= {f"{name}, torch.rand": baseline[name] for name in tuple(candidates)}
            candidates["copy"] = copy_of(2 * leaves.bytes, device)
            rounds = 2 if dry_run else 9
            times = timing.interleaved(candidates, rounds=rounds, clock=timing.cpu_time)
            for name in candidates:
                row = {"dtype": str(dtype).removeprefix("torch."), "coordinates": size, "what": name}
                row["ns per coordinate"] = timing.quartiles(times[name], 1e9 / size)
                if f"{name}, torch.rand" in times:
                    row["torch.rand / time"] = timing.ratios(times[f"{name}, torch.rand"], times[name])
                rows.append(row)
    return rows


def gradients(dry_run: bool) -> list[dict[str, Any]]:
    """CPU seconds of a gradient of a small Llama by each engine, and the peak of memory above its start."""
    # a peak is of a process: each engine gets its own
    context = multiprocessing.get_context("spawn")
    rows = []
    for engine in ENGINES:
        with context.Pool(1) as pool:
            rows.append(pool.apply(_gradient, (engine, dry_run)))
    return rows


def _gradient(engine: Engine, dry_run: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    run = _step(engine, dry_run)
    gc.collect()
    reset_process_peak()
    start = process_peak() or 0
    times = timing.interleaved({"": run}, rounds=2 if dry_run else 5, clock=timing.cpu_time)[""]
    return {
        "engine": engine,
        "s": timing.quartiles(times),
        "peak MiB above start": round(((process_peak() or 0) - start) / 2**20, 1),
    }


def _step(engine: Engine, dry_run: bool) -> Callable[[], Any]:
    from smat_fn.grad import ModuleLoss, value_and_grad
    from smat_fn.models.modules import parameters

    model, tokens = _llama(dry_run)
    loss = ModuleLoss(model, lambda module: (module(input_ids=tokens, labels=tokens).loss, None))
    gradient, weights = value_and_grad(loss, engine=engine), parameters(model)
    return lambda: gradient(weights)


def _llama(dry_run: bool) -> tuple[Any, torch.Tensor]:
    """A small Llama with random weights, and a batch of tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: value // 32 + 2 if dry_run else value for name, value in MODEL.items()}
    sizes["hidden_size"] = 64 if dry_run else sizes["hidden_size"]
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    torch.manual_seed(0)
    return LlamaForCausalLM(config), torch.randint(sizes["vocab_size"], (4, 8) if dry_run else TOKENS)


def training(dry_run: bool) -> list[dict[str, Any]]:
    """Speed and memory of options of training, relative to plain fine-tuning."""
    runs = {name: _period(name, *_llama(dry_run)) for name in OPTIONS}
    times = timing.interleaved(runs, rounds=2 if dry_run else 5, clock=timing.cpu_time)
    del runs
    context, peaks = multiprocessing.get_context("spawn"), {}
    for name in OPTIONS:
        with context.Pool(1) as pool:
            peaks[name] = pool.apply(_memory, (name, dry_run))
    return [
        {
            "training": name,
            "s a period": timing.quartiles(times[name]),
            "steps a second / FT": timing.ratios(times["FT"], times[name]),
            "MiB of state and step": round(peak / 2**20, 1),
            "memory / FT": round(peak / max(peaks["FT"], 1), 3),
        }
        for name, peak in peaks.items()
    ]


def _memory(name: str, dry_run: bool) -> int:
    torch.set_num_threads(1)
    model, tokens = _llama(dry_run)
    _period(name, model, tokens)  # imports are not to be counted
    gc.collect()
    reset_process_peak()
    start = process_peak() or 0
    _period(name, model, tokens)()
    return (process_peak() or 0) - start


def _period(name: str, model: Any, tokens: torch.Tensor) -> Callable[[], Any]:
    """Four steps of one of `OPTIONS`, going on from the last ones."""
    from smat_fn import optim, random, tree
    from smat_fn.data.batching import split_rows
    from smat_fn.grad import with_master_weights
    from smat_fn.mat import finetune, smat
    from smat_fn.models import FullLoss
    from smat_fn.models.modules import parameters
    from smat_fn.where import block_linear

    simulated, parts, precision = OPTIONS[name]
    loss: Any = FullLoss(model, lambda module, ids: (module(input_ids=ids, labels=ids).loss, None))
    base = tree.cast(parameters(model), torch.float32 if precision == "fp32" else torch.bfloat16)
    params = tree.cast(base, torch.float32) if precision == "mixed" else base
    loss = with_master_weights(loss) if precision == "mixed" else loss
    build = functools.partial(smat.build, period=4) if simulated else finetune.build
    method = build(loss, optim.adam(1e-5, fused=True), base, where=block_linear(model), donate=True)
    state, key = [method.init(params)], random.key(0)
    batch = split_rows(tokens, parts) if parts > 1 else tokens

    def run() -> None:
        for _ in range(4):
            state[0], _info = method.update(key, state[0], batch)

    return run
