"""Standard experts with some replaced by another method's (paper section 5.3, Compatibility with Standard Experts)."""

from collections.abc import Mapping, Sequence
from functools import partial

from .. import errors, merge
from ..types import Params
from .experts_curve import Scored, Scores, cyclic_subsets, reference_problems, scored
from .stacked import Job


def replacement_sets(tasks: Sequence[str]) -> list[tuple[str, ...]]:
    """The tasks to replace, for q = 0..N of them: the N cyclic windows of each q, in which every task occurs q times.

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
        return merge.task_arithmetic(base, experts, coef=coef)

    jobs = [Job(partial(mixed, replaced), tasks) for replaced in sets]
    return scored([(len(replaced), replaced) for replaced in sets], scores(jobs), reference)
