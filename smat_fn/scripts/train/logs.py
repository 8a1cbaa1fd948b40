"""The log of one expert: a JSON line every few steps, a progress bar, trackers; a loss that is not finite ends it."""

import json
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ... import progress
from ...checkpoint import named_in_errors, write_text
from ...types import Batch
from .memory import peak_memory
from .stopwatch import KINDS, Stopwatch
from .trackers import Tracker, open_tracker


@dataclass(kw_only=True)
class Log:
    """Lines of one expert, ``with Log(...) as log``: `step` after every step, `finish` after the last one.

    A line is read from the device, and written, when the next one is due, so that a step never waits for its own
    numbers; a loss that is not finite is met then. `progress`, `cost` and the end write what is there.

    A line: step, loss, grad_norm, learning rates, simulated, scale, seconds of training so far, examples or tokens per
    second since the line before, peak memory, and ``simulation_share`` (`Stopwatch.simulation_share` so far). The last
    one also has what `finish` was given.

    """

    path: Path = field(kw_only=False)  # of the JSON lines
    task: str
    total: int  # steps
    every: int = 1  # steps between lines, the last is always one
    device: torch.device  # of training
    rates: Callable[[int], Mapping[str, float]]  # step -> learning rates by name
    rows: Callable[[int], Sequence[int]] | None = None  # step -> rows of the training split in its batch
    start: int = 0  # steps of the run that this one resumes, and
    before: Mapping[str, Any] | None = None  # its `progress`
    trackers: Sequence[str] = ()
    run: str = ""  # the expert's name there
    config: Mapping[str, Any] = field(default_factory=dict)  # its settings, for trackers
    report: Callable[[str], None] = lambda line: None  # gets a line where ``path`` lacks lines

    def __post_init__(self) -> None:
        known = self.before or {"run_id": uuid.uuid4().hex, "totals": {}, "peak_memory_bytes": 0}
        self._run_id, self._peak, self._totals = (known[name] for name in ("run_id", "peak_memory_bytes", "totals"))
        self._losses: list[tuple[int, Tensor]] = []  # since the last line
        self._amount: int | Tensor = 0
        self._due: Callable[..., None] | None = None  # reads the line before, of step
        self._due_at = known.get("logged", -1)
        self._newest: tuple[int, Any] = (self.start - 1, math.nan)  # step and loss
        self._last: dict[str, Any] | None = None
        self._rest: Callable[[], None] = lambda: None  # makes a line of the newest step due, if it has none
        self.largest_norm: float | None = None  # of the gradients in lines so far

    def __enter__(self) -> "Log":
        last = keep_lines(self.path, before=self.start)
        if last < self._due_at:
            lost = f"step {self._due_at}" if last + 1 == self._due_at else f"steps {last + 1} to {self._due_at}"
            self.report(f"note: {self.path} lacks the lines of {lost}, lost in a crash: the expert is not affected")
        facts = {"out": self.path.parent, "run": self.run, "run_id": self._run_id, "start": self.start}
        self._trackers: list[Tracker] = []
        with ExitStack() as begun:  # those before one that cannot begin are closed
            for name in self.trackers:
                self._trackers.append(open_tracker(name, **facts, config=self.config))
                begun.callback(self._trackers[-1].close)
            begun.pop_all()
        self._file = open(self.path, "a", buffering=1)
        self._bar = progress.bar(self.total, desc=f"train {self.task}", leave=False, initial=self.start)
        self.watch = Stopwatch(self.device, self._totals)
        self._seconds = self.watch.seconds()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._read(check=kind is None)
            self._write()
        finally:
            for thing in (self._bar, self._file, *self._trackers):
                thing.close()

    def step(self, step: int, info: Any, batch: Batch) -> None:
        """Log a step. Raises: ValueError where the line before, or the last one, meets a loss that is not finite."""
        simulated = bool(getattr(info, "simulated", False))
        self.watch.lap(KINDS[simulated])
        self._bar.update()
        self._losses.append((step, info.loss))
        self._newest = step, info.loss
        unit, amount = amount_of(batch)
        self._amount = self._amount + amount
        self._rest = partial(self._end_line, step, info, unit)
        if not ((step + 1) % self.every and step + 1 < self.total):
            self._rest()
        if step + 1 == self.total:
            self._read()

    def _end_line(self, step: int, info: Any, unit: str) -> None:
        """End the line of the steps since the last one, which is read and written."""
        self._rest = lambda: None
        memory = {name: value for name, value in self._memory().items() if name == "peak_memory_bytes"}
        line = partial(self._line, step, info, unit, self._amount, self.watch.laps, memory, self._losses)
        self._amount, self._losses = 0, []
        self._read()
        self._write()
        self._due, self._due_at = line, step

    def _line(
        self,
        step: int,
        info: Any,
        unit: str,
        amount: int | Tensor,
        laps: int,
        memory: Mapping[str, Any],
        losses: list[tuple[int, Tensor]],
        *,
        check: bool,
    ) -> None:
        """Read a line from the device."""
        if check:
            self._check(losses)
        seconds = self.watch.seconds(laps)
        simulated = bool(getattr(info, "simulated", False))
        self._last = {
            "step": step,
            "loss": float(info.loss),
            "grad_norm": float(info.grad_norm),
            **self.rates(step),
            "simulated": simulated,
            "scale": float(getattr(info, "scale", 1.0)),
            "seconds": round(seconds, 4),
            f"{unit}_per_second": round(int(amount) / max(seconds - self._seconds, 1e-9), 2),
            **memory,
        }
        if (share := self.watch.simulation_share(laps)) is not None:
            self._last["simulation_share"] = round(share, 4)
        self._seconds = seconds
        self.largest_norm = max(self.largest_norm or 0.0, self._last["grad_norm"])
        kind, loss, norm = KINDS[simulated], self._last["loss"], self._last["grad_norm"]
        self._bar.set_postfix_str(f"loss {loss:.3f}, grad {norm:.2f}, {kind}", refresh=False)

    def note(self, step: int, **facts: float) -> None:
        """A separate line after a step, with occasional measurements; their time does not count as training.

        A line of an earlier step comes first: wandb drops those of steps before its last one.
        """
        if self._due is not None and self._due_at < step:
            self._read()
            self._write()
        self._put({"step": step, "loss": float(self._newest[1]), **facts})
        for tracker in self._trackers:
            tracker.log(facts, step)
        self._bar.set_postfix_str(", ".join(f"{name} {value:.4g}" for name, value in facts.items()), refresh=False)
        self.watch.skip()

    def cost(self) -> dict[str, Any]:
        """The cost of training so far, for the manifest."""
        totals = self.watch.totals()
        per_step = {
            f"{kind}_step_seconds": round(totals[f"{kind}_seconds"] / totals[f"{kind}_steps"], 6)
            for kind in KINDS
            if totals[f"{kind}_steps"]
        }
        return {"seconds": round(self.watch.seconds(), 3), **per_step, **self._memory()}

    def end(self) -> None:
        """Read the last line: of a training that ended before its last step too."""
        self._rest()
        self._read()

    def finish(self, **facts: Any) -> None:
        """The last line, with these facts."""
        self.end()
        self._last = {**(self._last or {"step": self._newest[0]}), **facts}
        self._write()

    def progress(self) -> dict[str, Any]:
        """JSON values that a resumed run continues from. Raises: ValueError as `step`, of all steps so far."""
        self._read()
        self._check(self._losses)
        self._write()
        os.fsync(self._file.fileno())  # as the checkpoint is
        return {
            "run_id": self._run_id,
            "logged": self._due_at,
            "totals": self.watch.totals(),
            "peak_memory_bytes": self._memory().get("peak_memory_bytes", 0),
        }

    def _memory(self) -> dict[str, Any]:
        now = peak_memory(self.device)
        return {**now, "peak_memory_bytes": max(self._peak, now["peak_memory_bytes"])} if now else {}

    def _read(self, *, check: bool = True) -> None:
        due, self._due = self._due, None
        if due is not None:
            due(check=check)

    def _check(self, losses: list[tuple[int, Tensor]]) -> None:
        check_losses(self.task, losses, self.rows)

    def _write(self) -> None:
        row, self._last = self._last, None
        if row is None:
            return
        self._put(row)
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
        step = int(numbers.pop("step", self.total - 1))
        for tracker in self._trackers:
            tracker.log(numbers, step)

    def _put(self, row: Mapping[str, Any]) -> None:
        with named_in_errors(self.path):
            self._file.write(json.dumps(row) + "\n")


def check_losses(task: str, losses: Sequence[tuple[int, Tensor]], rows: Callable[[int], Sequence[int]] | None) -> None:
    """Raises: ValueError for the first loss that is not finite, with its step and training rows."""
    if not losses:
        return
    values = torch.stack([loss.detach().double() for _, loss in losses]).tolist()  # read at once
    for (step, _), value in zip(losses, values, strict=True):
        if not math.isfinite(value):
            of = "" if rows is None else f", on training rows {', '.join(map(str, rows(step)))}"
            way = "lower the learning rate" if step else "no step was trained yet: check the base and the rows"
            raise ValueError(f"loss of {task} is {value} at step {step}{of}: {way}")


def amount_of(batch: Batch) -> tuple[str, int | Tensor]:
    """("tokens", those of its attention mask), or ("examples", rows of its first tensor)."""
    if isinstance(batch, Mapping) and "attention_mask" in batch:
        return "tokens", batch["attention_mask"].sum()
    return "examples", next((len(t) for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.ndim), 1)


def keep_lines(path: Path, *, before: int) -> int:
    """The log without lines of step ``before`` and later, and without a partly written line.

    Returns: the step of the last line, -1 without one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    kept, last = [], -1
    text = path.read_text(encoding="utf-8", errors="replace") if before and path.exists() else ""
    for line in text.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        if row["step"] < before:
            kept.append(line)
            last = row["step"]
    write_text(path, "".join(kept))
    return last
