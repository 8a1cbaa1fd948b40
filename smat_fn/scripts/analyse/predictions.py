"""Analysis of predictions: weight disentanglement. No torch until it runs."""

import math
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ... import errors
from . import weights
from .commands import RUNS, Batched, progress

if TYPE_CHECKING:
    from ...analyses.results import Result


@dataclass(frozen=True, kw_only=True)
class Disentanglement(Batched):
    """Compare the predictions of base + a1 * update 1 + a2 * update 2 with those of each update alone, on its task."""

    runs: Annotated[Positional[tuple[Path, ...]], RUNS]
    """Run folders of train.py, of classifiers (digits, text, images)."""
    tasks: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: all)")] = ()
    """Tasks whose experts are compared, in pairs."""
    coef: float = 0.3
    """gamma: the point (gamma, gamma) is a merge by task arithmetic, and a column of the table."""
    a: tuple[float, float] = (-1.0, 2.0)
    """Range of a1 and of a2."""
    points: int = 13
    """Points along each axis."""
    batches: int = 8
    """Maximum number of dev batches per task; the same batches at every point and for every method."""
    seed: int = 0
    """Seed of training batches, which are used if a suite has no dev batches."""


def disentanglement(options: Disentanglement) -> "Result":
    """`analyses.disentanglement` of every pair of experts of every run; a row per point.

    The predictions of a run are those of its own suite: of a linearised run those of its linear model.

    Raises: ValueError as `load_runs` does; for a suite without classes, tasks that the runs lack, fewer than two tasks,
        a range that does not rise, a coef that is not finite, and points whose logits are not numbers.
    """
    from ... import analyses
    from ...suites import has_heads
    from .runs import load_runs, result_of

    coef, axis = options.coef, _axis(options)
    runs = load_runs(options.runs, options=options.suite_options)
    known = runs[0].tasks
    chosen = [task for task in known if task in options.tasks] if options.tasks else list(known)
    problems = [
        f"runs have no task {task!r}, they have {', '.join(known)}" for task in options.tasks if task not in known
    ]
    if not problems and len(chosen) < 2:
        problems.append(f"tasks are {', '.join(chosen)}: a pair takes two")
    problems += [
        f"{run.path} is of suite {run.suite.name!r}, whose models predict no classes: give runs of digits, "
        "text or images"
        for run in runs
        if not has_heads(run.suite.name)
    ]
    errors.raise_problems(problems)
    merged = (coef, coef)
    points = list(dict.fromkeys([*product(axis, axis), merged]))
    pairs = list(combinations(chosen, 2))
    rows: list[dict[str, Any]] = []
    split = "dev"
    with progress("score", 2 * len(points) * len(pairs) * len(runs)) as done:
        for run in runs:
            batches = {}
            for task in chosen:
                split, batches[task] = weights.samples(run.suite, task, batches=options.batches, seed=options.seed)
            predict = analyses.predictions({task: run.suite.loss_fn(task) for task in chosen}, batches)
            for first, second in pairs:
                experts = {task: run.inputs.experts[task] for task in (first, second)}
                found = analyses.disentanglement(
                    run.inputs.base, experts, predict, points, memory=options.memory_bytes, done=done
                )
                line = {"method": run.label, "seed": run.seed, "first": first, "second": second}
                rows += [
                    {**line, "a1": a, "a2": b, "on_first": own[first], "on_second": own[second]}
                    for (a, b), own in zip(points, found, strict=True)
                ]
    lost = [row for row in rows if math.isnan(row["on_first"] + row["on_second"])]
    if lost:
        where = ", ".join("{first} {second} {method} ({a1:g}, {a2:g})".format(**row) for row in lost[:5])
        raise ValueError(f"logits are not numbers at {len(lost)} of {len(rows)} points ({where}): narrow --a")
    origin = {"split": split, "batches": options.batches, "seed": options.seed}
    return result_of("disentanglement", runs, rows, coef=coef, a=axis, tasks=chosen, samples=origin)


def _axis(options: Disentanglement) -> list[float]:
    """The points of both axes. Raises: ValueError that lists bad options."""
    count, (low, high) = options.points, options.a
    problems = [f"points is {count}, must be at least 2"] if count < 2 else []
    problems += [f"batches is {options.batches}, must be at least 1"] if options.batches < 1 else []
    coef = options.coef
    problems += [] if abs(coef) <= weights.MOST else [f"coef is {coef}, must be finite, from -1e38 to 1e38"]
    problems += weights.range_problems("a", low, high)
    errors.raise_problems(problems)
    return weights.spaced(low, high, count)
