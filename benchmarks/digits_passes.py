"""FT, SMAT, MSAM and ASAM on digits with one budget of backward passes, by docs/protocols/digits_passes.md."""

from smat_fn.config import DIGITS, Msam

from .methods import replaced
from .study.grids import Axis, Grid
from .study.on_digits import command, study

BASE = DIGITS.training
FT, SMAT, ASAM = (DIGITS.methods[name] for name in ("ft", "smat", "asam"))
RATES = Axis("lr", (1.25e-4, 2.5e-4, 5e-4))
HIGHER = Axis("lr", (2.5e-4, 5e-4, 1e-3))
STEPS = Axis("steps", (400, 800, 1600), most=1600)
HALF = Axis("steps", (200, 400, 800), most=800)  # of two passes each

GRIDS = {
    "FT": Grid(FT, BASE, HIGHER, STEPS, (5e-4, 800)),
    "SMAT": Grid(SMAT, BASE, RATES, STEPS, (2.5e-4, 800)),
    "MSAM": Grid(Msam(rho=1.0), BASE, RATES, STEPS, (2.5e-4, 800)),
    "ASAM": Grid(replaced(ASAM, rho=1.0), BASE, RATES, HALF, (2.5e-4, 400)),
}

STUDY = study("digits_passes", GRIDS, tuning=(321, 322), evaluation=tuple(range(331, 341)))
main = command("digits-passes", STUDY.run)
