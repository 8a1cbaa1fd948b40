"""One trial as a value: a method at a seed, all that decides its outcome, and the seconds it takes."""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from smat_fn import machine
from smat_fn.config import PRESETS, MergerConfig, MethodConfig, Training, WeightAverage, settings
from smat_fn.merge import COEFS

if TYPE_CHECKING:
    from smat_fn.suites import Suite

Kind = tuple[str, str]  # trials of one kind take equally long


class Trial(NamedTuple):
    """A method with its hyperparameters, a training configuration and a seed, on the suite and mergers of a preset."""

    label: str  # in tables
    preset: str
    method: MethodConfig
    training: Training
    seed: int
    options: tuple[tuple[str, Any], ...] = ()  # of the suite, beside and over those of the preset
    mergers: tuple[MergerConfig, ...] = ()  # none: those of the preset
    coefs: tuple[float, ...] = ()  # to search on dev, none: those of the search
    widen: bool = False  # the search goes on beyond them while the best one is at an edge

    def facts(self) -> dict[str, Any]:
        """All that decides the outcome, the code too, as JSON values; without the label, which only names it."""
        preset = PRESETS[self.preset]
        return {
            "preset": self.preset,
            "suite": {"name": preset.suite, **preset.options, **dict(self.options)},
            "method": self.method.name,
            "hyperparameters": settings(self.method),
            "training": asdict(self.training),
            "mergers": {config.name: settings(config) for config in self.merging()},
            "seed": self.seed,
            "code": [machine.code(), machine.code(Path(__file__).parent)],
            **({"coefs": list(self.coefs)} if self.coefs else {}),
            **({"widen": True} if self.widen else {}),
        }

    def merging(self) -> list[MergerConfig]:
        """The mergers of the trial, by default those of the preset."""
        return list(self.mergers or PRESETS[self.preset].mergers.values())

    def folder(self, work: Path) -> Path:
        """The folder of its experts, merged models and outcome, named by a hash of `facts` and the label."""
        text = json.dumps([self.label, self.facts()], sort_keys=True)
        slug = re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")
        return work / f"{slug}-seed{self.seed}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"

    def load(self) -> "Suite":
        """Load the suite of the trial."""
        from smat_fn.suites import describe_options, load_suite

        recipe = self.facts()["suite"]
        if "progress" in describe_options(recipe["name"]):
            recipe = {**recipe, "progress": False}
        return load_suite(**recipe, seed=self.seed)

    def kind(self) -> Kind:
        """The method with its climb and the optimizer, which determine the time of a step."""
        return kind_of(self.method, self.training)

    def __str__(self) -> str:
        """Label, learning rates and seed; the hyperparameters that differ from the preset's."""
        default = settings(PRESETS[self.preset].methods.get(self.method.name, type(self.method)()))
        own = {name: value for name, value in settings(self.method).items() if default.get(name) != value}
        if self.training.muon_lr is not None:
            own["muon_lr"] = self.training.muon_lr
        shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in own.items()}
        values = "".join(f", {name} {value}" for name, value in {"lr": f"{self.training.lr:g}", **shown}.items())
        return f"{self.label}{values}, seed {self.seed}"


class Seconds(NamedTuple):
    """Time of one trial that runs alone, all tasks together."""

    step: float  # a step of each task's training
    scores: float  # of all models that are scored


def kind_of(method: MethodConfig, training: Training) -> Kind:
    """`Trial.kind` of every trial of a method and its training."""
    return f"{method.name} {getattr(method, 'climb', None) or ''}".strip(), training.optimizer


def time_kinds(trials: Sequence[Trial], steps: int = 12, *, test: bool = False) -> dict[Kind, Seconds]:
    """Seconds of a step by kind, and of the scores: a few steps and one score of every task, times how many there are.

    The suites' bases must be in the cache. The first steps, which warm up, do not count. Merging is left out.

    Args: test: experts and merged models are also scored on test.
    """
    from smat_fn.scripts.train.loop import train_expert

    found = dict[Kind, Seconds]()
    suites, scores = dict[str, Any](), dict[str, float]()
    for trial in trials:
        recipe, total = json.dumps([trial.facts()["suite"], trial.seed]), 0.0
        suite = suites[recipe] = suites.get(recipe) or trial.load()
        if recipe not in scores:  # the methods' experts take equally long
            numbers = {"dev": _candidates(trial), **({"test": 1 + len(trial.merging())} if test else {})}
            scores[recipe] = sum(n * _score(suite, task, name) for task in suite.tasks for name, n in numbers.items())
        period = getattr(trial.method, "period", None) or 1
        taken, whole = whole_periods(steps, period)
        short = replace(trial.training, steps=taken)
        for task in suite.tasks:
            stamps: list[float] = []
            tick = partial(_tick, stamps)
            train_expert(suite, task, trial.method, short, seed=trial.seed, on_step=tick)
            total += (stamps[-1] - stamps[-1 - whole]) / whole
        found[trial.kind()] = Seconds(total, scores[recipe])
    return found


def _score(suite: Any, task: str, split: str) -> float:
    """Seconds of a score: the median of three, of slow ones fewer."""
    stamps = [time.perf_counter()]
    while len(stamps) < 4 and stamps[-1] - stamps[0] < 2:
        suite.score(suite.base, task, split)
        stamps.append(time.perf_counter())
    return median(b - a for a, b in pairwise(stamps))


def whole_periods(steps: int, period: int) -> tuple[int, int]:
    """(steps to take, how many of them to time): clean and simulated ones in their true proportion, the first not."""
    taken = max(steps, period + 1)
    return taken, (taken - 1) // period * period


def _tick(stamps: list[float], step: int, info: Any) -> None:
    info.loss.cpu()  # the host runs ahead of a GPU
    stamps.append(time.perf_counter())


def _candidates(trial: Trial) -> int:
    return sum(1 if isinstance(c, WeightAverage) else len(trial.coefs or COEFS) + 1 for c in trial.merging())
