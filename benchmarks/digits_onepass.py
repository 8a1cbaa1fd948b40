"""One backward pass against two on digits, by docs/protocols/digits_onepass.md: tuning on dev, then fresh seeds."""

from dataclasses import replace

from smat_fn.config import DIGITS, Msam

from .methods import replaced
from .study.grids import Axis, Grid
from .study.on_digits import command, study

BASE = DIGITS.training
MUON = replace(BASE, optimizer="muon")
HALF = replace(BASE, steps=200)  # ASAM with as many passes as the others have
FT, SMAT, ASAM = (DIGITS.methods[name] for name in ("ft", "smat", "asam"))
CLIMBING = replaced(SMAT, climb="both", rho=0.5)
LOW, MIDDLE, HIGH = (Axis("lr", tuple(rate * f for f in (1, 2, 4))) for rate in (6.25e-5, 1.25e-4, 2.5e-4))
RADII = Axis("rho", (0.25, 0.5, 1.0))
LARGER = Axis("rho", (0.5, 1.0, 2.0))
MUON_RATES = Axis("muon_lr", (5e-4, 1e-3, 2e-3))

GRIDS = {
    "FT": Grid(FT, BASE, LOW, Axis("steps", (200, 400, 800))),
    "FT, averaged": Grid(FT, BASE, MIDDLE, Axis("average", ("ema:0.98", "swa:25%", "swa:75%"))),
    "SMAT": Grid(SMAT, BASE, LOW, Axis("sigma", (0.005, 0.01, 0.02))),
    "SMAT climbing": Grid(CLIMBING, BASE, MIDDLE, RADII),
    "MSAM": Grid(Msam(), BASE, MIDDLE, RADII),
    "ASAM": Grid(ASAM, BASE, MIDDLE, LARGER),
    "ASAM, half the steps": Grid(ASAM, HALF, HIGH, LARGER),
    "FT-Muon": Grid(FT, MUON, MUON_RATES, HIGH),
    "SMAT-Muon": Grid(SMAT, MUON, MUON_RATES, MIDDLE),
    "SMAT-Muon climbing": Grid(CLIMBING, MUON, MUON_RATES, MIDDLE),
}

STUDY = study("digits_onepass", GRIDS, tuning=(131, 132), evaluation=tuple(range(141, 151)))
main = command("digits-onepass", STUDY.run)
