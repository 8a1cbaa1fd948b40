"""Learning rates as functions of the step number, counted from 0."""

import math

from ..types import Schedule


def constant(lr: float) -> Schedule:
    """``lr`` at every step. Raises: ValueError for a negative or non-finite lr."""
    _check(lr)
    return lambda step: lr


def cosine(lr: float, steps: int, *, warmup: int = 0) -> Schedule:
    r"""Linear warm-up, then a cosine from lr to 0.

    ``lr (s + 1) / warmup`` for s < warmup, then ``lr (1 + cos(pi s / steps)) / 2``, 0 from ``steps`` on; with warmup 0
    the values of ``torch.optim.lr_scheduler.CosineAnnealingLR(T_max=steps)``.

    Raises: ValueError for a bad lr, steps < 1, or warmup outside [0, steps].
    """
    _check(lr)
    if steps < 1:
        raise ValueError(f"cosine: steps is {steps}, must be at least 1")
    if not 0 <= warmup <= steps:
        raise ValueError(f"cosine: warmup is {warmup}, must lie in [0, steps = {steps}]")

    def schedule(step: int) -> float:
        if step < warmup:
            return lr * (step + 1) / warmup
        return lr * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))

    return schedule


def _check(lr: float) -> None:
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"learning rate is {lr}, must be finite and not negative")
