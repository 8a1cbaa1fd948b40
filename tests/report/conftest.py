"""A study of all kinds of runs whose scores are formulas."""

import pytest

from smat_fn.evaluate import Result
from smat_fn.evaluate.results import Run
from smat_fn.report import build_report, plots

MERGERS = ("wa", "ta", "ties", "dare", "della")


@pytest.fixture
def full():
    """Full SMAT."""
    return {"alpha_min": 0.1, "drop_prob": 0.5, "sigma": 0.01, "period": 4, "noise": "uniform"}


@pytest.fixture
def make():
    """``make(label, scores, method, ...)``: rows and runs of two tasks; seed s scores ``scores[s]`` after every merger,
    10 more as an expert, task "b" 2 more than "a"; an expert takes ``seconds`` and ``peak`` bytes.
    """

    def study(label, scores, method="ft", hyperparameters=None, *, optimizer="adam", seconds=None, peak=None):
        rows, runs = [], []
        for seed, score in enumerate(scores):
            for task, more in (("a", -1.0), ("b", 1.0)):
                rows.append(Result(label, f"expert:{task}", task, "test", score + 10 + more, seed))
                rows += [
                    Result(label, name, task, "test", score + more, seed, None if name == "wa" else 0.3)
                    for name in MERGERS
                ]
                training = {"optimizer": optimizer, "lr": 1e-3, "steps": 50, "precision": None}
                runs.append(
                    Run(label, f"expert:{task}", seed, method, hyperparameters or {}, training, seconds, peak,
                        suite={"name": "toy", "seed": seed}, versions={"torch": "2.0"})
                )  # fmt: skip
        return rows, runs

    return study


@pytest.fixture
def _undrawn(monkeypatch):
    """Figures are the names of the functions that draw them: drawing takes long."""
    for name in ("main_plot", "merger_plot", "paired_plot", "noise_plot"):
        monkeypatch.setattr(plots, name, lambda *args, name=name, **options: name.encode())


@pytest.fixture
def sections(_undrawn):
    """``sections(*studies, ...)``: the report's sections by title, from rows and runs of ``make``."""

    def build(*studies, **options):
        rows, runs = ([x for study in studies for x in study[place]] for place in (0, 1))
        return {section.title: section for section in build_report(rows, runs, **options)}

    return build
