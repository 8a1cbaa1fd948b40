"""What trials cost: seconds reckoned from a few steps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

from smat_fn.config import PRESETS, Preset, WeightAverage
from smat_fn.merge import COEFS

from .trial import Trial


def time_kinds(trials: Sequence[Trial], steps: int = 12) -> dict[tuple[str, str], float]:
    """Seconds that each trial would take alone: a few steps and a dev score of every task, times how many there are.

    The suites' bases must be in the cache. The first steps, which warm up, do not count.
    """
    from smat_fn.scripts.train.loop import budget, train_expert

    found = {}
    for trial in trials:
        preset, suite, total = PRESETS[trial.preset], trial.load(), 0.0
        period = getattr(trial.method, "period", None) or 1
        taken, whole = whole_periods(steps, period)
        short = replace(trial.training, steps=taken)
        for task in suite.tasks:
            stamps: list[float] = []
            tick = partial(_tick, stamps)
            train_expert(suite, task, trial.method, short, seed=trial.seed, on_step=tick)
            step = (stamps[-1] - stamps[-1 - whole]) / whole
            scores = [time.perf_counter()]
            for _ in range(3):
                suite.score(suite.base, task, "dev")
                scores.append(time.perf_counter())
            score = median(b - a for a, b in pairwise(scores))
            total += (budget(suite, task, trial.training).steps or 0) * step + _candidates(preset) * score
        found[trial.kind()] = total
    return found


def whole_periods(steps: int, period: int) -> tuple[int, int]:
    """(steps to take, how many of them to time): clean and simulated ones in their true proportion, the first not."""
    taken = max(steps, period + 1)
    return taken, (taken - 1) // period * period


def _tick(stamps: list[float], *step: object) -> None:
    stamps.append(time.perf_counter())


def _candidates(preset: Preset) -> int:
    return sum(1 if isinstance(c, WeightAverage) else len(COEFS) + 1 for c in preset.mergers.values())
