"""SMAT against FT on true model shapes with random weights: time of a period, its phases, and peak memory.

Blocks of one period (t steps) of FT and SMAT alternate in one process and on one state, so that drift cancels; a row of
FT against FT says how small a difference can be told.
"""

import contextlib
import functools
import gc
import operator
import random as python_random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from smat_fn import random
from smat_fn.mat import finetune, smat
from smat_fn.mat import simulated as at_simulated
from smat_fn.mat.offload import storage
from smat_fn.ops import library
from smat_fn.scripts.train.stopwatch import Clock
from smat_fn.types import Method

from . import timing
from .shapes import SHAPES, Setup, by_hand, set_up

PERIOD = 4
SECONDS, LIMIT = 8, 300  # of rounds for a row; after the limit no other row is started
# times that the state is simulated (rebuilt weights once more in backward) and the base copied, by offload
OFFLOADS = {None: (1, 0), "cpu": (1, 1), "recompute": (2, 0), "stream": (2, 2)}
PHASES = "simulate", "finish", "copies", "rest"
RESULTS = timing.RESULTS / "steps.json"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def simulated(setup: Setup, offload: Any) -> Method:
    """SMAT with the paper's hyperparameters; its base is where the offload wants it."""
    kept_there = offload in (None, "recompute")
    base = {path: leaf.clone() if kept_there else leaf.cpu() for path, leaf in setup.state.params.items()}
    hyperparameters = {"period": PERIOD, "drop_prob": 0.5, "offload": offload, **setup.shape.hyperparameters}
    return smat.build(setup.loss, setup.optimizer, base, where=setup.where, **hyperparameters, **_shared(setup))


def _shared(setup: Setup) -> dict[str, Any]:
    return {"max_grad_norm": setup.shape.clip, "engine": "autograd", "donate": True}


def trainer(setup: Setup) -> Callable[[Method], None]:
    """A function that trains the one state by whichever method for PERIOD steps, the last one simulated."""
    state, key = setup.state, random.key(0)  # on the host, as train.py's: the seed of dropout is read there

    def period(method: Method) -> None:
        nonlocal state
        assert state.step % PERIOD == 0
        for _ in range(PERIOD):
            state, _ = method.update(key, state, setup.batch)

    return period


def alternate(
    first: Callable[[], None], second: Callable[[], None], *, seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of both, in turns and each first every other time; at least 3 rounds."""
    clock, begin = Clock(DEVICE), time.monotonic()
    times: tuple[list[float], list[float]] = ([], [])
    while len(times[0]) < 3 or (time.monotonic() - begin < seconds and len(times[0]) < 200):
        order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
        marks = [clock.now()]
        for which in order:
            (first, second)[which]()
            marks.append(clock.now())
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        for which, start, stop in zip(order, marks, marks[1:], strict=False):
            times[which].append(clock.between(start, stop))
    return times


@contextlib.contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds of what runs inside, by phase; filled at the end. Copies run beside the other phases."""
    clock = Clock(DEVICE)
    spans: list[tuple[str, Any, Any]] = []
    totals: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock.now()
            result = function(*args, **kwargs)
            spans.append((name, start, clock.now()))
            return result

        return run

    def copied(kind: Any) -> Callable[..., Any]:
        copy = kind.copy

        def run(self: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
            stream = getattr(self, "_stream", None)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())  # not to count the wait
            start = clock.now(stream)
            ticket = copy(self, targets, sources)
            spans.append(("copies", start, clock.now(stream)))
            return ticket

        return run

    simulator = at_simulated._simulator
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in (
            (at_simulated, "simulate", timed("simulate", at_simulated.simulate)),
            (library, "simulate", timed("simulate", library.simulate)),  # of offload None
            (at_simulated, "_simulator", lambda *args: timed("simulate", simulator(*args))),
            (smat, "reweight_and_clip", timed("finish", smat.reweight_and_clip)),
            (storage.CudaRuntime, "copy", copied(storage.CudaRuntime)),
            (storage.HostRuntime, "copy", copied(storage.HostRuntime)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        start = clock.now()
        yield totals
        stop = clock.now()
    for name, begin, end in spans:
        totals[name] = totals.get(name, 0.0) + clock.between(begin, end)
    totals["rest"] = clock.between(start, stop) - sum(v for name, v in totals.items() if name != "copies")


def interval(times: Sequence[float], reference: Sequence[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of sums, and the 95 % interval of a bootstrap over rounds."""
    source, rounds = python_random.Random(0), list(zip(times, reference, strict=True))
    found = []
    for _ in range(draws):
        sample = source.choices(rounds, k=len(rounds))
        found.append(sum(a for a, _ in sample) / sum(b for _, b in sample))
    points = statistics.quantiles(found, n=40)
    return sum(times) / sum(reference), points[0], points[-1]


def bandwidths(device: torch.device, size: int) -> dict[str, float]:
    """Measured bytes a second: a copy on the device (read and written), and from pinned memory to it."""
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pieces = storage.runtime_for(device).pin({"": source}).pieces("", 0, size)
    rates = {}

    def copy(origins: Sequence[storage.Piece]) -> None:
        for start, stop, memory in origins:
            target[start:stop].copy_(memory, non_blocking=True)

    for name, origins, factor in (("device", [(0, size, source)], 2), ("link", pieces, 1)):
        run = functools.partial(copy, origins)
        times = [timing.device_time(run) for _ in range(6)]
        rates[name] = factor * size / min(times[1:])
    return rates


def measure(
    name: str, device: torch.device, *, seconds: float, deadline: float, dry_run: bool
) -> Iterator[dict[str, Any]]:
    """Rows of one model: FT, a loop in torch, then SMAT by offload, each against FT.

    None is started after the deadline. The peak of the loop in torch includes FT's state.
    """
    setup = set_up(SHAPES[name], device, dry_run)
    train, rates = trainer(setup), bandwidths(device, 1 << (16 if dry_run else 30))
    ft = finetune.build(setup.loss, setup.optimizer, setup.state.params, **_shared(setup))
    size = sum(leaf.nbytes for leaf in setup.state.params.values())
    common = {"model": name, "layers": setup.layers, "GB of weights": size / 1e9}
    memory = None
    for offload in ("FT", "torch", *OFFLOADS):
        if time.monotonic() > deadline:
            print(f"steps: {name}, offload {offload}, not started, {LIMIT} s are over")
            break
        baseline = functools.partial(train, ft)
        if offload == "torch":
            if device.type == "cuda" and 5 * size > torch.cuda.mem_get_info(device)[0]:
                continue  # no room for a second model with its gradients and moments
            period = _four_times(by_hand(SHAPES[name], device, dry_run))
        else:
            period = functools.partial(train, ft if offload == "FT" else simulated(setup, offload))
        baseline()
        period()
        peak = _peak(period)
        memory = memory or peak
        times, reference = alternate(period, baseline, seconds=seconds)
        with phases() as parts:
            period()
        ratio, low, high = interval(times, reference)
        row = {
            **common,
            "method": {"FT": "FT", "torch": "a loop in torch"}.get(str(offload), "SMAT"),
            "offload": str(offload) if offload not in ("FT", "torch") else "",
            "ms a step": timing.quartiles(times, 1e3 / PERIOD),
            "FT ms": timing.quartiles(reference, 1e3 / PERIOD),
            "ratio": round(ratio, 5),
            "median ratio": round(statistics.median(map(operator.truediv, times, reference)), 5),
            "95 %": f"{low:.4f} to {high:.4f}",
            "rounds": len(times),
            **{f"{part} ms a period": round(1e3 * parts.get(part, 0.0), 4) for part in PHASES},
            "peak GB": peak / 1e9,
            "memory ratio": peak / memory if memory else 1.0,
        }
        if offload == "FT":
            row["resolves 0.2 %"] = str(0.998 <= low <= 1 <= high <= 1.002)
        elif offload != "torch":
            passes, copies = OFFLOADS[offload]
            # theta and theta_0 read, theta~ written
            row["simulate floor ms"] = round(1e3 * passes * 3 * size / rates["device"], 4)
            row["copies floor ms"] = round(1e3 * copies * size / rates["link"], 4)
        yield {**row, **{f"{key} GB/s": rate / 1e9 for key, rate in rates.items()}}
        del period
        gc.collect()


def _four_times(step: Callable[[], None]) -> Callable[[], None]:
    def period() -> None:
        for _ in range(PERIOD):
            step()

    return period


def _peak(period: Callable[[], None]) -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    period()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def main(
    *, dry_run: bool = False, only: tuple[str, ...] = tuple(SHAPES), seconds: float = SECONDS, out: Path = RESULTS
) -> list[dict[str, Any]]:
    """Measure, print a table, write the results; returns the rows of all models.

    Args:
        dry_run: tiny widths, needs no GPU, no result file.
        only: models, of `SHAPES`.
        seconds: of rounds a row.
        out: file of the results.
    """
    if not (dry_run or torch.cuda.is_available()):
        sys.exit("benchmarks steps: needs a CUDA device; --dry-run takes every path on tiny widths on the CPU")
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE.type == "cuda" else DEVICE
    rows: list[dict[str, Any]] = []
    deadline = time.monotonic() + LIMIT
    for name in only:
        if time.monotonic() > deadline:
            print(f"steps: {name} not started, {LIMIT} s are over")
            continue
        for row in measure(name, device, seconds=0.0 if dry_run else seconds, deadline=deadline, dry_run=dry_run):
            rows.append(row)
            if not dry_run:  # at once, should the next one run out of memory
                timing.store(out, {**timing.describe("python -m benchmarks steps"), "period": PERIOD, "rows": rows})
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(timing.markdown(rows), flush=True)
    return rows
