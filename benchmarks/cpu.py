"""One CPU thread: the operations against torch's own random numbers and a copy; engines; merges in memory."""

import gc
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from smat_fn import execution, merge, random
from smat_fn.scripts.train.memory import process_peak, reset_process_peak
from smat_fn.types import Engine

from . import timing
from .kernels import copy_of, make, ours, plain
from .shapes import llama

COMMAND = "python -m benchmarks cpu"
SIZES = (10**6, 10**7)
ENGINES: tuple[Engine, ...] = ("autograd", "func")
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8192}
TOKENS = 8, 128
EXPERTS, MERGED = 4, (2048, 2048)
MERGERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "task_arithmetic": (merge.task_arithmetic, {}),
    "ties": (merge.ties, {"keep": 0.2}),
    "ties, threshold per tensor": (merge.ties, {"keep": 0.2, "scope": "tensor"}),
    "dare": (partial(merge.dare, random.key(0)), {"drop_prob": 0.5}),
    "della": (partial(merge.della, random.key(0)), {"drop_prob": 0.5, "window": 0.2}),
    "breadcrumbs": (merge.breadcrumbs, {"drop_smallest": 0.85, "drop_largest": 0.01}),
}


def main(*, dry_run: bool = False) -> None:
    """Print the tables.

    Args: dry_run: tiny sizes, no result file.
    """
    torch.set_num_threads(1)
    rows, engines, merged = operations(dry_run), gradients(dry_run), merges(dry_run)
    print(*map(timing.markdown, (rows, engines, merged)), sep="\n\n")
    if not dry_run:
        facts = {**timing.describe(COMMAND), "threads": 1}
        timing.store(timing.RESULTS / "cpu.json", {**facts, "rows": rows, "model": MODEL, "engines": engines})
        timing.store(timing.RESULTS / "cpu_merges.json", {**facts, "merges": merged})


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


def merges(dry_run: bool) -> list[dict[str, Any]]:
    """CPU nanoseconds per coordinate and expert of merges in memory, with loops and by torch alone."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        base, *experts = ({"w": torch.randn((64, 64) if dry_run else MERGED).to(dtype)} for _ in range(EXPERTS + 1))
        copy = copy_of((EXPERTS + 1) * base["w"].nbytes, torch.device("cpu"))
        for name, (merger, options) in MERGERS.items():
            run = partial(merger, base, experts, coef=0.5, **options)
            times = timing.interleaved(
                {"loops": run, "torch": partial(_by_torch, run), "copy": copy},
                rounds=2 if dry_run else 5,
                clock=timing.cpu_time,
            )
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "merger": name,
                    "ns per coordinate and expert": timing.quartiles(times["loops"], 1e9 / base["w"].numel() / EXPERTS),
                    "torch / time": timing.ratios(times["torch"], times["loops"]),
                    "time / copy": timing.ratios(times["loops"], times["copy"]),
                }
            )
    return rows


def _by_torch(run: Callable[[], Any]) -> Any:
    with execution.off():
        return run()


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
    """The gradient of a small Llama on a batch of tokens."""
    from smat_fn.grad import ModuleLoss, value_and_grad
    from smat_fn.models.modules import parameters

    sizes = {name: value // 32 + 2 if dry_run else value for name, value in MODEL.items()}
    sizes["hidden_size"] = 64 if dry_run else sizes["hidden_size"]
    torch.manual_seed(0)
    model = llama({**sizes, "num_attention_heads": 4, "num_key_value_heads": 2})
    tokens = torch.randint(sizes["vocab_size"], (4, 8) if dry_run else TOKENS)
    loss = ModuleLoss(model, lambda module: (module(input_ids=tokens, labels=tokens).loss, None))
    gradient, weights = value_and_grad(loss, engine=engine), parameters(model)
    return lambda: gradient(weights)
