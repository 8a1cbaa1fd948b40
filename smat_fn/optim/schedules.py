"""Learning rates as functions of the step number, counted from 0: an integer, or inside transforms a 0-d tensor."""

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..execution import unread
from ..types import PerStep


def constant(lr: float, *, warmup: int = 0) -> PerStep:
    """``lr`` at every step, after a linear warm-up ``lr (s + 1) / warmup`` for s < warmup.

    Args:
        lr: learning rate, finite and >= 0.
        warmup: steps of linear warm-up, at least 0.

    Returns:
        ``schedule(step) -> lr``.

    Raises:
        ValueError: lr is negative or not finite, warmup negative.
    """
    errors.raise_problems(
        _lr_problems(lr) + ([] if warmup >= 0 else [f"constant: warmup is {warmup}, must not be negative"])
    )

    def schedule(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor) and warmup:
            return torch.where(step < warmup, lr * (step.double() + 1) / warmup, lr)
        return lr * (step + 1) / warmup if not isinstance(step, Tensor) and step < warmup else lr

    return schedule


def cosine(lr: float, steps: int, *, warmup: int = 0) -> PerStep:
    r"""Linear warm-up, then cosine decay to 0 over the steps after it.

    ``lr (s + 1) / warmup`` for s < warmup, then ``lr (1 + cos(pi (s - warmup) / (steps - warmup))) / 2``, 0 from
    ``steps`` on. Without warm-up these are the values of ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=steps)``;
    with it, from step ``warmup`` on, those of ``optax.warmup_cosine_decay_schedule`` and of transformers'
    ``get_cosine_schedule_with_warmup``, whose warm-up is ``lr s / warmup`` and so begins with a step of rate 0.

    Args:
        lr: peak learning rate, finite and >= 0.
        steps: step at which the rate reaches 0, at least 1; warm-up steps count.
        warmup: steps of linear warm-up, in [0, steps].

    Returns:
        ``schedule(step) -> float``, step counted from 0.

    Raises:
        ValueError: lr, steps or warmup is out of range.

    Example:
        >>> [round(cosine(1.0, 6, warmup=2)(step), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    return _decaying("cosine", lr, steps, warmup, lambda done, total: lr * 0.5 * (1 + _cos(math.pi * done / total)))


def linear(lr: float, steps: int, *, warmup: int = 0) -> PerStep:
    r"""Linear warm-up, then linear decay to 0.

    ``lr (s + 1) / warmup`` for s < warmup, then ``lr (1 - (s - warmup) / (steps - warmup))``, 0 from ``steps`` on: from
    step ``warmup`` on the values of transformers' ``get_linear_schedule_with_warmup``.

    Args:
        lr: peak learning rate, finite and >= 0.
        steps: step at which the rate reaches 0, at least 1; warm-up steps count.
        warmup: steps of linear warm-up, in [0, steps].

    Returns:
        ``schedule(step) -> float``, step counted from 0.

    Raises:
        ValueError: lr, steps or warmup is out of range.

    Example:
        >>> [linear(1.0, 6, warmup=2)(step) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _decaying("linear", lr, steps, warmup, lambda done, total: lr * ((total - done) / total))


def _decaying(name: str, lr: float, steps: int, warmup: int, decay: Callable[[Any, int], Any]) -> PerStep:
    """Linear warm-up, then a function of the steps of decay that are done and of all of them, then 0."""
    problems = _lr_problems(lr)
    if steps < 1:
        problems.append(f"{name}: steps is {steps}, must be at least 1")
    elif not 0 <= warmup <= steps:
        problems.append(f"{name}: warmup is {warmup}, must lie in [0, steps = {steps}]")
    errors.raise_problems(problems)

    def schedule(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):
            now = step.double()
            decayed = torch.where(step < steps, decay(now - warmup, max(steps - warmup, 1)), 0.0)
            return torch.where(step < warmup, lr * (now + 1) / max(warmup, 1), decayed)
        if step < warmup:
            return lr * (step + 1) / warmup
        return decay(step - warmup, steps - warmup) if step < steps else 0.0

    return schedule


def _cos(angle: float | Tensor) -> float | Tensor:
    return torch.cos(angle) if isinstance(angle, Tensor) else math.cos(angle)


def schedule_of(lr: float | PerStep, problems: list[str], **values: float) -> PerStep:
    """The schedule of ``lr``. Raises: ValueError that lists problems, a bad lr, and values that are not finite >= 0."""
    problems = problems + [
        f"{name} is {value}, must be finite and not negative"
        for name, value in values.items()
        if not (math.isfinite(value) and value >= 0)
    ]
    wanted = "a number or a function of the step"
    errors.raise_problems(problems + ([] if callable(lr) else _lr_problems(lr, wanted)))
    if not callable(lr):
        return constant(lr)

    def checked(step: int | Tensor) -> float | Tensor:
        rate = lr(step)
        if not isinstance(rate, Tensor):  # a tensor may be on a device that the host would wait for
            errors.raise_problems([f"step {step} of the schedule: {text}" for text in _lr_problems(rate)])
        return rate

    return checked


def _lr_problems(lr: float | Tensor, wanted: str = "a number") -> list[str]:
    if unread(lr):
        return []
    if not isinstance(lr, Tensor | Real):
        return [f"learning rate is {lr!r}, must be {wanted}"]
    return [] if 0 <= lr < math.inf else [f"learning rate is {lr}, must be finite and not negative"]
