"""Adapters by fine-tuning, SMAT and ASAM on digits, by docs/protocols/digits_lora.md: tuning, then fresh seeds."""

from dataclasses import replace

from smat_fn.config import DIGITS, Adapters

from .study.grids import Axis, Grid
from .study.on_digits import command, study

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

STUDY = study("digits_lora", GRIDS, tuning=(301,), evaluation=tuple(range(311, 319)))
main = command("digits-lora", STUDY.run)
