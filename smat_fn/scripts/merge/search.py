"""The best candidate on dev where some scores are sampled: every candidate once, the best ones several times."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from ...merge import choose

T = TypeVar("T")
Decode = tuple[str, int]  # task, repeat


class Reranked(NamedTuple, Generic[T]):
    """The chosen candidate and what it was chosen by."""

    best: T
    scores: dict[str, float]  # of the best, by task, means over its decodes
    curve: tuple[tuple[T, float], ...]  # mean over tasks of one decode, every candidate
    finals: tuple[tuple[T, float], ...]  # mean over tasks of the means over decodes, the best candidates


def rerank(
    candidates: Sequence[T],
    score: Callable[[T, Sequence[Decode]], Sequence[float]],
    *,
    tasks: Sequence[str],
    repeats: Mapping[str, int],
    top: int = 2,
) -> Reranked[T]:
    """The candidate of the largest mean score over decodes, among the ``top`` that are best in the first decode.

    All tasks count alike; a task without repeats keeps its score. Ties go to the earlier candidate in both stages.

    Args: score: ``score(candidate, decodes)``, one number a (task, repeat), repeats counted from 0; called once a
        candidate with repeat 0 of every task, and once more for the best with the other repeats; repeats: decodes of
        a task, 1 where it is not named.
    Raises: ValueError without candidates, or where a mean is NaN.
    """
    first = [(task, 0) for task in tasks]
    more = [(task, r) for task in tasks for r in range(1, repeats.get(task, 1))]
    found: dict[int, dict[str, list[float]]] = {}

    def decode(place: int, decodes: Sequence[Decode]) -> float:
        own = found.setdefault(place, {task: [] for task in tasks})
        for (task, _), value in zip(decodes, score(candidates[place], decodes) if decodes else (), strict=True):
            own[task].append(value)
        return fmean(fmean(values) for values in own.values())

    places = range(len(candidates))
    once = choose(places, lambda place: decode(place, first))
    best = sorted(places, key=lambda place: -once.curve[place][1])[:top]  # stable: the earlier of equal ones
    several = choose(sorted(best), lambda place: decode(place, more))
    return Reranked(
        candidates[several.best],
        {task: fmean(values) for task, values in found[several.best].items()},
        tuple((candidates[place], value) for place, value in once.curve),
        tuple((candidates[place], value) for place, value in several.curve),
    )
