"""What is looked at before a run of training, so that bad input costs no work."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ... import checkpoint, errors, optim
from ...config import MethodConfig, Training
from ...errors import check_member, problems_of
from ...grad import ModuleLoss
from ...parallel import ALONE, World
from ...types import Batch
from . import snapshots, trackers
from .loop import make_optimizer
from .variants import build_method
from .variants import problems as of_variant


def check_run(
    method: MethodConfig,
    training: Training,
    *,
    known: tuple[str, ...],
    tasks: Sequence[str],
    out: Path,
    log_every: int,
    overwrite: bool,
    resume: bool = False,
    save_every_steps: int | None = None,
    save_every_minutes: float | None = None,
    log_to: Sequence[str] = (),
    probe: int = 0,
    world: World = ALONE,
) -> None:
    """Raises: ValueError that lists bad numbers, tasks not in ``known`` or named twice, and folders that exist."""
    steps = training.steps
    problems = [f"steps is {steps}, must be at least 1"] if steps is not None and steps < 1 else []
    if steps is None:
        for task in dict.fromkeys(tasks):
            if (epochs := training.epochs.get(task)) is None:
                problems.append(f"task {task!r} has no number of epochs: give --epochs or --steps")
            elif epochs < 1:
                problems.append(f"epochs of {task} is {epochs}, must be at least 1")
    counts = {"log_every": log_every, "accumulate": training.accumulate, "save_every_steps": save_every_steps}
    problems += [f"{name} is {n}, must be at least 1" for name, n in counts.items() if n is not None and n < 1]
    if save_every_minutes is not None and not save_every_minutes > 0:
        problems.append(f"save_every_minutes is {save_every_minutes}, must be positive")
    problems += [f"probe is {probe}, must not be negative"] if probe < 0 else []
    problems += ["resume and overwrite exclude each other: choose one"] if resume and overwrite else []
    problems += trackers.problems(log_to)
    problems += of_variant(method, training, world)
    optimizer, limit = optim.adam(0.0), training.max_grad_norm
    try:
        optimizer = make_optimizer(replace(training, steps=max(steps or 1, 1)))
    except ValueError as error:
        problems.append(str(error))
    problems += problems_of(
        build_method, method, optimizer, ModuleLoss(nn.Module(), _no_loss), {}, where=None, max_grad_norm=limit
    )
    problems += ["no tasks: name at least one"] if not tasks else []
    problems += [f"task {task!r} is named twice" for task in dict.fromkeys(tasks) if tasks.count(task) > 1]
    for task in dict.fromkeys(tasks):
        problems += problems_of(check_member, "task", task, known)
        if resume:
            continue
        problems += problems_of(checkpoint.refuse_existing, out / task, overwrite=overwrite)
        if (unfinished := snapshots.path_of(out, task)).exists() and not overwrite:
            problems.append(f"{unfinished} is of an unfinished expert: go on with --resume, or say --overwrite")
    errors.raise_problems(problems)


def _no_loss(module: nn.Module, batch: Batch) -> tuple[Any, None]:
    raise AssertionError("built to check its options, not to run")
