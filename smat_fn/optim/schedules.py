"""Learning rates as functions of the step number, counted from 0: an integer, or inside transforms a 0-d tensor."""

import math

import torch
from torch import Tensor

from .. import errors
from ..compiled import unread
from ..types import Schedule


def constant(lr: float) -> Schedule:
    """``lr`` at every step.

    Args:
        lr: learning rate, finite and >= 0.

    Returns:
        ``schedule(step) -> lr``.

    Raises:
        ValueError: lr is negative or not finite.
    """
    errors.raise_problems(_lr_problems(lr))
    return lambda step: lr


def cosine(lr: float, steps: int, *, warmup: int = 0) -> Schedule:
    r"""Linear warm-up, then cosine decay to 0.

    ``lr (s + 1) / warmup`` for s < warmup, then ``lr (1 + cos(pi s / steps)) / 2``, 0 from ``steps`` on. Without
    warm-up these are the values of ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=steps)``.

    Args:
        lr: peak learning rate, finite and >= 0.
        steps: step at which the rate reaches 0, at least 1; warm-up steps count.
        warmup: steps of linear warm-up, in [0, steps].

    Returns:
        ``schedule(step) -> float``, step counted from 0.

    Raises:
        ValueError: lr, steps or warmup is out of range.

    Example:
        >>> [round(cosine(1.0, 4, warmup=1)(step), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    errors.raise_problems(_lr_problems(lr))
    if steps < 1:
        raise ValueError(f"cosine: steps is {steps}, must be at least 1")
    if not 0 <= warmup <= steps:
        raise ValueError(f"cosine: warmup is {warmup}, must lie in [0, steps = {steps}]")

    def schedule(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):
            now = step.double()
            decayed = lr * 0.5 * (1 + torch.cos(math.pi * now.clamp(max=steps) / steps))
            return torch.where(step < warmup, lr * (now + 1) / max(warmup, 1), decayed)
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))

    return schedule


def schedule_of(lr: float | Schedule, problems: list[str], **values: float) -> Schedule:
    """The schedule of ``lr``. Raises: ValueError that lists problems, a bad lr, and values that are not finite >= 0."""
    problems = problems + [
        f"{name} is {value}, must be finite and not negative"
        for name, value in values.items()
        if not (math.isfinite(value) and value >= 0)
    ]
    errors.raise_problems(problems + ([] if callable(lr) else _lr_problems(lr)))
    return lr if callable(lr) else constant(lr)


def _lr_problems(lr: float | Tensor) -> list[str]:
    if unread(lr):
        return []
    return [] if math.isfinite(lr) and lr >= 0 else [f"learning rate is {lr}, must be finite and not negative"]
