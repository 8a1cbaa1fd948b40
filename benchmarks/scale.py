"""SMAT against FT on the CPU, as a scale model: time of a period of a Llama of 124M parameters, and where it goes.

Periods (t = 4 steps) of FT and SMAT alternate on one state with torch's fused AdamW and clipping. Of a simulated step
everything counts as simulation that a clean one does not have: drawing, simulating, and what reweighting adds to the
pass that clips.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch

from smat_fn import random
from smat_fn.mat import finetune, smat
from smat_fn.mat import simulated as at_simulated
from smat_fn.types import Method

from . import timing
from .shapes import SHAPES, Setup, set_up
from .steps import PERIOD, interval

RESULTS = timing.RESULTS / "scale.json"
SIZES = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "vocab_size": 50304, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {**TINY, "num_key_value_heads": 2, "vocab_size": 512}
PARTS = "gradient", "clip", "optimizer"
Width = Literal["bfloat16", "float32"]


class Parts:
    """Seconds of the parts of steps, clean and simulated ones apart; "rest" is what no part counts."""

    def __init__(self) -> None:
        self.seconds: dict[bool, dict[str, float]] = {kind: dict.fromkeys(PARTS, 0.0) for kind in (False, True)}
        self.totals, self.counts = {False: 0.0, True: 0.0}, {False: 0, True: 0}
        self._now: dict[str, float] = {}

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """The parts of the steps that run inside are counted."""
        with contextlib.ExitStack() as stack:
            for owner, name, part in (
                (smat, "accumulate", "gradient"),
                (at_simulated, "accumulate", "gradient"),
                (smat, "reweight_and_clip", "clip"),
                (smat.step, "advance", "optimizer"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._timed(part, getattr(owner, name))))
            yield

    def step(self, seconds: float, simulated: bool) -> None:
        """Record the time of a step and of its parts."""
        self.counts[simulated] += 1
        self.totals[simulated] += seconds
        for part, spent in self._now.items():
            self.seconds[simulated][part] += spent
        self._now = {}

    def mean(self, simulated: bool) -> dict[str, float]:
        """Seconds of a step by part."""
        count = self.counts[simulated]
        found = {part: spent / count for part, spent in self.seconds[simulated].items()}
        return {**found, "rest": self.totals[simulated] / count - sum(found.values())}

    def simulation(self) -> float:
        """Seconds of a period that are simulation's."""
        clean, simulated = self.mean(False), self.mean(True)
        return sum(simulated[part] - clean[part] for part in ("rest", "clip"))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - start
            return result

        return run


def main(
    *,
    rows: int = 8,
    length: int = 512,
    dtypes: tuple[Width, ...] = get_args(Width),
    rounds: int = 5,
    threads: int | None = None,
    dry_run: bool = False,
    out: Path = RESULTS,
) -> None:
    """Measure, print a table, write the results after each dtype.

    Args:
        rows: sequences a batch.
        length: tokens a sequence.
        dtypes: of parameters and optimizer; rows of other dtypes stay in the file if machine and settings are equal.
        rounds: periods of each method that count; two more of each warm up.
        threads: of torch; default: its own choice.
        dry_run: a tiny model, no result file.
        out: file of the results.
    """
    if min(rows, length, rounds) < 1 or (threads is not None and threads < 1):
        raise SystemExit("benchmarks scale: rows, length, rounds and threads must be at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
    found: dict[str, dict[str, Any]] = {}
    setting = {"threads": torch.get_num_threads(), "model": SIZES, "batch": [rows, length], "period": PERIOD}
    facts = {**timing.describe("python -m benchmarks scale"), **setting}
    commit = facts.pop("commit")
    stored = {} if dry_run else _stored(out, facts)
    for name in dtypes:
        found[name] = measure(getattr(torch, name), rows, length, rounds, dry_run)
        stored[name] = {**found[name], "commit": commit}
        if not dry_run:
            timing.store(out, {**facts, "rows": list(stored.values())})
    print(timing.markdown(list(found.values())), flush=True)


def _stored(file: Path, facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of a file by dtype, if they were measured on such a machine with these settings."""
    if not file.exists():
        return {}
    result = json.loads(file.read_text())
    rows = {row["dtype"]: row for row in result.pop("rows")}
    return rows if result == facts else {}


def measure(dtype: torch.dtype, rows: int, length: int, rounds: int, dry_run: bool) -> dict[str, Any]:
    """The row of one dtype."""
    shape = SHAPES["llama-3.2-1b"]
    shape = shape._replace(sizes={**shape.sizes, **SIZES}, tiny=TINY, batch=(rows, length), dtype=dtype)
    setup = set_up(shape, torch.device("cpu"), dry_run)
    options: dict[str, Any] = {"max_grad_norm": shape.clip, "engine": "autograd", "donate": True}
    size = sum(leaf.numel() for leaf in setup.state.params.values())
    base = {path: leaf.clone() for path, leaf in setup.state.params.items()}
    own: dict[str, Any] = {"where": setup.where, "period": PERIOD, "drop_prob": 0.5, **shape.hyperparameters}
    methods = {
        "FT": finetune.build(setup.loss, setup.optimizer, base, **options),
        "SMAT": smat.build(setup.loss, setup.optimizer, base, **own, **options),
    }
    times, parts = alternate(setup, methods, rounds)
    ratio, low, high = interval(times["SMAT"], times["FT"])
    clean, simulated = parts.mean(False), parts.mean(True)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": size,
        "rounds": rounds,
        "FT s a step": timing.quartiles(times["FT"], 1 / PERIOD),
        "SMAT s a step": timing.quartiles(times["SMAT"], 1 / PERIOD),
        "SMAT / FT": round(ratio, 4),
        "95 %": f"{low:.4f} to {high:.4f}",
        "simulation, % of a period": round(100 * parts.simulation() * rounds / sum(times["SMAT"]), 3),
        **{f"clean step, {part} ms": round(1e3 * spent, 3) for part, spent in clean.items()},
        **{f"simulated step, {part} ms": round(1e3 * spent, 3) for part, spent in simulated.items()},
    }


def alternate(setup: Setup, methods: dict[str, Method], rounds: int) -> tuple[dict[str, list[float]], Parts]:
    """Seconds of periods by method, each first every other time, and the parts of SMAT's steps."""
    state, key, parts = setup.state, random.key(0), Parts()
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(-2, rounds):
        for name in methods if number % 2 else reversed(methods):
            begin = time.perf_counter()
            with parts.counted() if name == "SMAT" and number >= 0 else contextlib.nullcontext():
                for _ in range(PERIOD):
                    start = time.perf_counter()
                    state, info = methods[name].update(key, state, setup.batch)
                    if name == "SMAT" and number >= 0:
                        parts.step(time.perf_counter() - start, bool(info.simulated))
            if number >= 0:
                times[name].append(time.perf_counter() - begin)
    return times, parts
