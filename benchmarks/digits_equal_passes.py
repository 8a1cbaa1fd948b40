"""The methods of digits_passes.py at equal passes, on its seeds, by docs/protocols/digits_equal_passes.md."""

from dataclasses import replace

from smat_fn.config import MethodConfig

from .digits_passes import BASE, FT, GRIDS, SMAT
from .study.grids import Axis, Grid
from .study.on_digits import command, study


def alone(method: MethodConfig, lr: float, steps: int) -> Grid:
    """One candidate, at the learning rate that dev chose at these steps."""
    return Grid(method, replace(BASE, lr=lr, steps=steps), Axis("lr", (lr,)), Axis("steps", (steps,)))


METHODS = {
    "FT": alone(FT, 2.5e-4, 800),
    "SMAT": alone(SMAT, 1.25e-4, 800),
    "MSAM": alone(GRIDS["MSAM"].method, 2.5e-4, 800),
    "ASAM": alone(GRIDS["ASAM"].method, 2.5e-4, 400),
    "ASAM, all the steps": alone(GRIDS["ASAM"].method, 2.5e-4, 800),
}

STUDY = study("digits_equal_passes", METHODS, tuning=(), evaluation=tuple(range(331, 341)))
main = command("digits-equal-passes", STUDY.run)
