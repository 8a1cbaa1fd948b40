"""All methods on digits by docs/protocols/digits_methods.md: tuning on dev, then test scores on fresh seeds."""

from dataclasses import replace
from functools import partial

from smat_fn.config import DIGITS

from .methods import Candidate, Protocol, grid, run
from .study.on_digits import command

RATES = DIGITS.lr_grid


def muon_grid(name: str) -> list[Candidate]:
    """Three rates of the matrices by two of the other leaves."""
    method = DIGITS.methods[name]
    return [
        Candidate(method, replace(DIGITS.training, optimizer="muon", muon_lr=muon_lr, lr=lr))
        for muon_lr in (1e-3, 2e-3, 4e-3)
        for lr in (2.5e-4, 5e-4)
    ]


PROTOCOL = Protocol(
    name="digits_methods",
    preset="digits",
    grids={
        "FT": grid("digits", "ft", (3.125e-5, 6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3)),
        "SMAT": grid("digits", "smat", RATES, "sigma", (0.01, 0.02)),
        "ASAM": grid("digits", "asam", RATES, "rho", (0.25, 0.5)),
        "MergOPT": grid("digits", "mergopt", RATES, "b", (2e-3, 4e-3)),
        "OrthoReg": grid("digits", "orthoreg", RATES, "lambda_reg", (0.1, 0.2)),
        "FT-Muon": muon_grid("ft"),
        "SMAT-Muon": muon_grid("smat"),
    },
    tuning=(31, 32, 33),
    evaluation=tuple(range(41, 51)),
    ablations={
        "SMAT without Scale": {"alpha_min": 1.0},
        "SMAT without Mask": {"drop_prob": 0.0},
        "SMAT without Perturb": {"sigma": 0.0},
    },
    kept=(41, 42),
)

main = command("digits-methods", partial(run, PROTOCOL))
