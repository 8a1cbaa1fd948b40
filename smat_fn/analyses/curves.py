"""Scores over sets of experts (paper section 5.3): number of experts, replaced experts, sources of merging gains."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from .. import errors
from .. import merge as mergers
from ..report.tables import Cell, MainTable, drop
from ..types import Params
from .stacked import Job

Scores = Callable[[Sequence[Job]], list[dict[str, float]]]


class Scored(NamedTuple):
    """A merged model on one of its tasks.

    Attributes:
        experts: how many are merged, or replaced.
        subset: their tasks.
        task: the task that was scored.
        score: 0 to 100.
        relative: 100 * score / score of the independent FT expert.
    """

    experts: int
    subset: tuple[str, ...]
    task: str
    score: float
    relative: float


def cyclic_subsets(tasks: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """The N windows of ``count`` neighbours in a cyclic order of N tasks, or the whole order for count N.

    Every task is in ``count`` of the N windows, so that all tasks weigh alike. The tasks of a window are in the
    given order. Count 0 is one empty window.

    Raises: ValueError for a count outside 0 to N, and for tasks named twice.
    """
    size = len(tasks)
    problems = [] if 0 <= count <= size else [f"count is {count}, must be from 0 to {size}, the number of tasks"]
    problems += [f"tasks are {list(tasks)}: name each once"] if len(set(tasks)) < size else []
    errors.raise_problems(problems)
    if count in (0, size):
        return [tuple(tasks[:count])]
    windows = [{(start + step) % size for step in range(count)} for start in range(size)]
    return [tuple(task for place, task in enumerate(tasks) if place in window) for window in windows]


def experts_curve(
    tasks: Sequence[str], merge: Callable[[tuple[str, ...]], Params], scores: Scores, *, reference: Mapping[str, float]
) -> list[Scored]:
    """Scores of merges of K = 2..N experts, the cyclic subsets of each K, on their own tasks alone.

    Args: tasks: in a fixed order; merge: the merged model of a subset's experts; scores: of jobs, by task
        (`score_jobs`); reference: score of the independent FT expert by task.
    Raises: ValueError for fewer than two tasks, and tasks whose reference is missing or not positive.
    """
    problems = [] if len(tasks) > 1 else [f"tasks are {list(tasks)}: a merge takes at least two"]
    errors.raise_problems(problems + reference_problems(tasks, reference))
    subsets = [subset for count in range(2, len(tasks) + 1) for subset in cyclic_subsets(tasks, count)]
    jobs = [Job(partial(merge, subset), subset) for subset in subsets]
    return _scored([(len(subset), subset) for subset in subsets], scores(jobs), reference)


def replacement_sets(tasks: Sequence[str]) -> list[tuple[str, ...]]:
    """The tasks to replace, for q = 0..N of them: the cyclic windows of each q, in which all tasks occur equally often.

    For q = 1..N - 1 these are N windows; for q = 0 one, without a task; for q = N one, of all tasks.

    They depend on the tasks alone, so that all methods are compared on the same sets.
    """
    return [subset for count in range(len(tasks) + 1) for subset in cyclic_subsets(tasks, count)]


def replacement_curve(
    base: Params,
    ft: Mapping[str, Params],
    other: Mapping[str, Params],
    scores: Scores,
    *,
    reference: Mapping[str, float],
    coef: float = 0.3,
) -> list[Scored]:
    """Scores on all tasks of θ₀ + γ (Σ_{i∉R} Δ_i^FT + Σ_{i∈R} Δ_i^other) for every set R of `replacement_sets`.

    Args: ft, other: experts by task, the same tasks; scores: of jobs, by task (`score_jobs`); reference: score of the
        independent FT expert by task; coef: γ of every merge.
    Raises: ValueError that lists tasks that one of the two lacks, and tasks whose reference is not positive.
    """
    tasks = tuple(ft)
    problems = [f"task {task!r} has only one of the two experts: give both" for task in set(ft) ^ set(other)]
    errors.raise_problems(problems + reference_problems(tasks, reference))
    sets = replacement_sets(tasks)

    def mixed(replaced: tuple[str, ...]) -> Params:
        experts = {task: (other if task in replaced else ft)[task] for task in tasks}
        return mergers.task_arithmetic(base, experts, coef=coef)

    jobs = [Job(partial(mixed, replaced), tasks) for replaced in sets]
    return _scored([(len(replaced), replaced) for replaced in sets], scores(jobs), reference)


def _scored(
    subsets: Sequence[tuple[int, tuple[str, ...]]], found: Sequence[Mapping[str, float]], reference: Mapping[str, float]
) -> list[Scored]:
    """A row for every subset and task that was scored. Raises: ValueError for scores that are NaN."""
    errors.raise_problems(
        [
            f"the score of {'+'.join(subset) or 'no expert'} on {task} is NaN, its weights overflow: lower the coef"
            for (_, subset), scores in zip(subsets, found, strict=True)
            for task, score in scores.items()
            if math.isnan(score)
        ]
    )
    return [
        Scored(count, subset, task, score, 100 * score / reference[task])
        for (count, subset), scores in zip(subsets, found, strict=True)
        for task, score in scores.items()
    ]


def reference_problems(tasks: Sequence[str], reference: Mapping[str, float]) -> list[str]:
    """Errors for tasks whose scores cannot be divided by their reference."""
    return [
        f"the FT expert's score of {task!r} is {reference.get(task)}: a score above 0 is needed to divide by"
        for task in tasks
        if not reference.get(task, 0) > 0
    ]


class Gain(NamedTuple):
    """Scores of a method before and after merging.

    Attributes:
        expert: mean score of the experts, by seed.
        merged: mean score of the five mergers, by seed.
        drop: expert - merged, by seed.
    """

    expert: Cell
    merged: Cell
    drop: Cell


def gains(table: MainTable) -> dict[str, Gain]:
    """Expert score, five-merger mean and merging drop of every method of the table.

    Raises: ValueError that lists methods without experts or without all five mergers.
    """
    lacking = {method: [c for c in ("Expert", "Avg") if c not in line] for method, line in table.cells.items()}
    problems = [
        f"{method} has no {' and no '.join(columns)}: score its experts and all five mergers (merge.py all)"
        for method, columns in lacking.items()
        if columns
    ]
    errors.raise_problems(problems)
    return {x: Gain(line["Expert"], line["Avg"], cast(Cell, drop(line))) for x, line in table.cells.items()}
