"""Methods compared over seeds: each method's learning rate chosen on dev, test scores at that choice alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from smat_fn import merge
from smat_fn.config import PRESETS
from smat_fn.evaluate import Result
from smat_fn.evaluate.statistics import paired

from .trial import Trial
from .trials import rows_of, run_trials

__all__ = ["Study", "as_json", "choose_lr", "paired", "preset_trial", "run_study"]


class Study(NamedTuple):
    """What a study found."""

    dev: dict[str, dict[float, list[float]]]  # method -> learning rate -> five-merger dev mean per seed
    lr: dict[str, float]  # chosen per method
    rows: list[Result]  # test scores at the chosen learning rates


def preset_trial(preset: str, method: str, lr: float, seed: int) -> Trial:
    """A method of a preset at a learning rate."""
    own = PRESETS[preset]
    return Trial(method.upper(), preset, own.methods[method], replace(own.training, lr=lr), seed)


def run_study(
    preset: str, methods: Sequence[str], seeds: Sequence[int], *, work: Path, jobs: int, report: Callable[[str], None]
) -> Study:
    """Train and merge every (method, learning rate of the grid, seed), choose on dev, score the choice on test.

    Trials that stand in ``work``, made by this very code, are not run again.

    Args: jobs: processes, one thread each (1: this one); report: gets a line per finished trial.
    """
    grid = sorted(PRESETS[preset].lr_grid)
    places = [(seed, method, lr) for seed in seeds for method in methods for lr in grid]
    trials = [preset_trial(preset, method, lr, seed) for seed, method, lr in places]
    five = {
        str(trial.folder(work)): found["five"] for trial, found in run_trials(trials, work, jobs=jobs, report=report)
    }
    dev = {
        m: {lr: [five[str(preset_trial(preset, m, lr, seed).folder(work))] for seed in seeds] for lr in grid}
        for m in methods
    }
    lr = {method: choose_lr(by_lr) for method, by_lr in dev.items()}
    chosen = [preset_trial(preset, method, lr[method], seed) for method in methods for seed in seeds]
    scored = {
        str(trial.folder(work)): rows_of(found)
        for trial, found in run_trials(chosen, work, jobs=jobs, report=report, test=True)
    }
    return Study(dev, lr, [row for trial in chosen for row in scored[str(trial.folder(work))]])


def choose_lr(dev: Mapping[float, Sequence[float]]) -> float:
    """The learning rate of the largest mean dev score over seeds, the smaller of equal ones."""
    return merge.choose(sorted(dev), lambda lr: fmean(dev[lr])).best


def as_json(study: Study) -> Mapping[str, Any]:
    """The dev scores and chosen learning rates as JSON values."""
    return {"dev": {m: {f"{lr:g}": v for lr, v in by_lr.items()} for m, by_lr in study.dev.items()}, "lr": study.lr}
