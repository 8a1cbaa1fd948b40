"""Adapters by fine-tuning, SMAT and ASAM on digits, by docs/protocols/digits_lora.md: tuning, then fresh seeds."""

from dataclasses import replace
from pathlib import Path

from tyro.conf import Positional

from smat_fn import machine
from smat_fn.config import DIGITS, Adapters, IsoC, TsvMerge, Wudi

from .methods import Protocol, Stage
from .study.grids import Axis, Grid, widening

MERGED = replace(DIGITS.training, lora=Adapters(rank=8, alpha=16.0))
FACTORS = replace(DIGITS.training, lora=Adapters(rank=8, alpha=16.0, simulate="factors"))
HALF = replace(MERGED, steps=200)  # ASAM with as many passes as the others have
FT, SMAT, ASAM = (DIGITS.methods[name] for name in ("ft", "smat", "asam"))
MIDDLE = 1e-3
RATES = Axis("lr", (MIDDLE / 2, MIDDLE, MIDDLE * 2))
NOISE, RADII = Axis("sigma", (0.005, 0.01, 0.02)), Axis("rho", (0.25, 0.5, 1.0))

GRIDS = {
    "FT": Grid(FT, MERGED, Axis("lr", (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)), Axis("steps", (400,))),
    "SMAT": Grid(SMAT, MERGED, RATES, NOISE, (MIDDLE, 0.01)),
    "SMAT at the factors": Grid(SMAT, FACTORS, RATES, NOISE, (MIDDLE, 0.01)),
    "ASAM": Grid(ASAM, MERGED, RATES, RADII, (MIDDLE, 0.5)),
    "ASAM, half the steps": Grid(ASAM, HALF, RATES, RADII, (MIDDLE, 0.5)),
}

STUDY = widening(
    Protocol(
        name="digits_lora",
        preset="digits",
        grids={},
        tuning=(301,),
        evaluation=tuple(range(311, 319)),
        mergers=(*DIGITS.mergers.values(), TsvMerge(), IsoC(), Wudi()),
        widen=True,
    ),
    GRIDS,
)


def main(folder: Positional[Path], *, jobs: int = 2, only: Stage | None = None) -> None:
    """Run the protocol.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        jobs: processes of one thread each.
        only: one of its two stages.
    """
    STUDY.run(folder, jobs, machine.describe("python -m benchmarks digits-lora FOLDER"), only)
