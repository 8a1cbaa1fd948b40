"""How merged models fare as more experts are merged (paper section 5.3, Effect of the Number of Experts)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from .. import errors
from ..types import Params
from .stacked import Job

Scores = Callable[[Sequence[Job]], list[dict[str, float]]]


class Scored(NamedTuple):
    """A merged model on one of its tasks."""

    experts: int  # how many are merged, or replaced
    subset: tuple[str, ...]  # their tasks
    task: str  # what was scored
    score: float  # 0 to 100
    relative: float  # 100 * score / score of the independent FT expert


def cyclic_subsets(tasks: Sequence[str], count: int) -> list[tuple[str, ...]]:
    """The N windows of ``count`` neighbours in a cyclic order of N tasks, or the whole order for count N.

    Every task is in ``count`` of the N windows, so that all tasks weigh alike. The tasks of a window stand in the
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
    tasks: Sequence[str],
    merge: Callable[[tuple[str, ...]], Params],
    scores: Scores,
    *,
    reference: Mapping[str, float],
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
    return scored([(len(subset), subset) for subset in subsets], scores(jobs), reference)


def by_count(rows: Sequence[Scored]) -> dict[int, float]:
    """Mean relative score for each count, over tasks and subsets."""
    return {
        count: fmean(row.relative for row in rows if row.experts == count)
        for count in sorted({r.experts for r in rows})
    }


def scored(
    subsets: Sequence[tuple[int, tuple[str, ...]]], found: Sequence[Mapping[str, float]], reference: Mapping[str, float]
) -> list[Scored]:
    """A row for every subset and task that was scored."""
    return [
        Scored(count, subset, task, score, 100 * score / reference[task])
        for (count, subset), scores in zip(subsets, found, strict=True)
        for task, score in scores.items()
    ]


def reference_problems(tasks: Sequence[str], reference: Mapping[str, float]) -> list[str]:
    """Tasks whose scores cannot be divided by their reference, in words."""
    return [
        f"the FT expert's score of {task!r} is {reference.get(task)}: a score above 0 is needed to divide by"
        for task in tasks
        if not reference.get(task, 0) > 0
    ]
