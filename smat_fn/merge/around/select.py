"""The coefficient γ that does best by any score, one for all weights or for each block, and what there is to try."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from ...errors import count_problem, raise_problems
from ...types import Params
from ...where import blocks_of
from ..parts.inputs import type_problems
from ..parts.merger import COEFS
from ..parts.vectors import apply_vector

T = TypeVar("T")
WIDER = 10  # coefficients that a search adds beyond the edges of its grid, at most
_ROUNDING = 1e-12  # relative; of means of equal numbers in another order

# sparsity calibration on plainly fine-tuned experts, candidates from less to more pruning, at these coefficients
TIES_KEEPS = (0.5, 0.3, 0.2, 0.1)
DROP_PROBS = (0.1, 0.3, 0.5, 0.7, 0.9)
CALIBRATION_COEFS = {
    "language": {"ties": 0.3, "dare": 0.3, "della": 1.0},
    "vision": {"ties": 0.2, "dare": 0.2, "della": 1.0},
}


class Selection(NamedTuple, Generic[T]):
    """A choice among candidates by their scores.

    Attributes:
        best: the chosen candidate.
        score: its score.
        curve: (candidate, score) of every candidate, in the order tried.
    """

    best: T
    score: float
    curve: tuple[tuple[T, float], ...]


class Tuned(NamedTuple):
    """One combination of the options that a search tries, with its best coefficient."""

    options: dict[str, Any]
    coef: float | None  # None for a merger without one
    score: float  # on dev the mean score, over the decodes too where answers are sampled
    curve: tuple[tuple[float, float], ...]  # (coefficient, score) of every candidate, empty where none is searched


def combinations(over: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of values by option, those of the last option first; one without options where there are none.

    Args: over: values to try by option.
    """
    return [dict(zip(over, values, strict=True)) for values in product(*over.values())]


def exceeds(value: float, other: float) -> bool:
    """Whether a score is larger than another by more than the rounding of a mean of the same numbers."""
    return value > other and not math.isclose(value, other, rel_tol=_ROUNDING, abs_tol=0.0)


def choose(candidates: Sequence[T], score: Callable[[T], float]) -> Selection[T]:
    """The candidate of the largest score, the earlier of equal ones (`exceeds`); each is scored once, in order.

    Raises: ValueError without candidates, or for a score that is NaN.
    """
    candidates = list(candidates)  # of an array too
    if not candidates:
        raise ValueError("candidates is empty: pass at least one")
    curve = []
    for candidate in candidates:
        given = score(candidate)
        try:
            value = float(given)
        except (TypeError, ValueError, RuntimeError):  # the last one of tensors
            raise ValueError(
                f"the score of candidate {candidate!r} is a {type(given).__name__}: score must return a number"
            ) from None
        if math.isnan(value):
            raise ValueError(f"the score of candidate {candidate!r} is NaN: score must return a number")
        curve.append((candidate, value))
    return Selection(*best_of(curve), tuple(curve))


def best_of(curve: Sequence[tuple[T, float]]) -> tuple[T, float]:
    """The candidate of the largest score, the earlier of equal ones (`exceeds`), and its score."""
    best = curve[0]
    for point in curve:
        best = point if exceeds(point[1], best[1]) else best
    return best


def grid_problems(coefs: Sequence[float]) -> list[str]:
    """Errors for coefficients to search that are not finite, or given twice."""
    problems = [f"coefficient {coef} to search is not finite" for coef in coefs if not math.isfinite(coef)]
    twice = len({*coefs}) < len(coefs)
    return problems + ([f"coefficients to search are {list(coefs)}: name each once"] if twice else [])


def grid_edge(coef: float, coefs: Sequence[float]) -> str:
    """Whether a chosen coefficient is the "smallest" or the "largest" of several; an empty text if neither."""
    if len(coefs) < 2 or coef not in (min(coefs), max(coefs)):
        return ""
    return "largest" if coef == max(coefs) else "smallest"


def next_coef(coefs: Sequence[float], edge: str) -> float:
    """The next coefficient beyond an edge of a grid: one last step on, or half of the smallest.

    A smallest one that is not positive has the next one a step below.

    Args:
        coefs: two at least.
        edge: "smallest" or "largest", as `grid_edge` gives it.

    Raises:
        ValueError: there are fewer coefficients, or another edge.
    """
    ordered = sorted(coefs)
    if len(ordered) < 2 or edge not in ("smallest", "largest"):
        raise ValueError(f"edge is {edge!r} of {ordered}: give 'smallest' or 'largest', of two coefficients at least")
    if edge == "largest":
        return round(2 * ordered[-1] - ordered[-2], 12)
    return ordered[0] / 2 if ordered[0] > 0 else round(2 * ordered[0] - ordered[1], 12)


def select_coef(
    base: Params, vector: Mapping[str, Tensor], score: Callable[[Params], float], coefs: Sequence[float] = COEFS
) -> Selection[float]:
    """γ of the largest ``score(θ₀ + γ τ)``, the smaller of equal ones: one pass over the weights per candidate.

    Args:
        vector: τ, a merged task vector (`ties_vector` and its like).
        score: of a merged tree, the larger the better, the mean dev score over tasks.
        coefs: candidates, finite.

    Raises:
        ValueError: as `choose` and `apply_vector` do.
    """
    return choose(_ordered(coefs), lambda coef: score(apply_vector(base, vector, coef=coef)))


def _ordered(coefs: Sequence[float]) -> list[float]:
    """Candidates from small to large. Raises: ValueError that lists those that are not finite numbers."""
    if isinstance(coefs, str) or not isinstance(coefs, Iterable):
        raise ValueError(f"coefs are {coefs!r}: give several numbers")
    given = list(coefs)
    problems = [text for c in given for text in type_problems(coef=c)]
    raise_problems(problems or [f"coef is {c}, must be finite" for c in given if not math.isfinite(c)])
    return sorted(given)


def choose_coef(
    score: Callable[[float], float], coefs: Sequence[float], *, widen: bool = False
) -> tuple[Selection[float], str]:
    """The coefficient of the largest ``score(coef)``, the smaller of equal ones, and the edge of those tried it is at.

    Args:
        score: called once a coefficient, from small to large.
        coefs: candidates, finite.
        widen: try `next_coef` beyond an edge, at most `WIDER` in all, as long as the score rises there.

    Returns:
        The choice, whose curve is from small to large, and its `grid_edge`.

    Raises:
        ValueError: as `choose` does, or for coefficients that are not finite numbers.
    """
    grid, known = _ordered(coefs), dict[float, float]()
    most = len(grid) + WIDER

    def once(coef: float) -> float:
        if coef not in known:
            known[coef] = score(coef)
        return known[coef]

    while True:
        found = choose(grid, once)
        edge = grid_edge(found.best, grid)
        beside = grid[1 if edge == "smallest" else -2] if edge else found.best
        if not (widen and len(grid) < most and exceeds(found.score, known[beside])):
            return found, edge
        grid = sorted([*grid, next_coef(grid, edge)])


class Layered(NamedTuple):
    """A choice of a coefficient for each block.

    Attributes:
        coefs: γ by block, "" outside of blocks.
        score: of these coefficients.
        curve: (block, coefficient, score) of every candidate, in the order tried.
    """

    coefs: dict[str, float]
    score: float
    curve: tuple[tuple[str, float, float], ...]


def apply_blocks(base: Params, vector: Mapping[str, Tensor], coefs: Mapping[str, float]) -> Params:
    """θ₀ + γ_b τ of every block b, as `apply_vector` does with one γ.

    Args:
        vector: τ, one flat entry for every floating-point leaf of base.
        coefs: γ by block (`smat_fn.where.blocks_of`).

    Raises:
        ValueError: as `apply_vector`; or a block has no coefficient.
    """
    blocks = blocks_of(vector)
    known = set(blocks.values())
    missing, strange = sorted(known - coefs.keys()), sorted(coefs.keys() - known)
    problems = [f"blocks {missing} have no coefficient: give one for each"] if missing else []
    problems += [f"coefs name blocks {strange}, which the vector does not have: leave them out"] if strange else []
    for name, c in coefs.items():
        wrong = type_problems(**{f"coef of block {name!r}": c})
        problems += wrong or ([] if math.isfinite(c) else [f"coef of block {name!r} is {c}, must be finite"])
    raise_problems(problems)
    scaled = {path: leaf * coefs[blocks[path]] for path, leaf in vector.items()}
    return apply_vector(base, scaled, coef=1.0)


def select_coefs(
    vector: Mapping[str, Tensor],
    score: Callable[[Mapping[str, float]], float],
    coefs: Sequence[float] = COEFS,
    *,
    start: float,
    sweeps: int = 1,
) -> Layered:
    """γ by block, by coordinate ascent: block by block the γ of the largest score, all others as they are.

    A coefficient is replaced by a better one alone, so that the score is never below that of ``start`` for all blocks.

    Args:
        vector: τ, flat, whose paths name the blocks (`smat_fn.where.blocks_of`), in their order.
        score: of coefficients by block, the larger the better: the mean dev score of `apply_blocks`.
        coefs: candidates, finite.
        start: γ of all blocks at first, the best single one.
        sweeps: over all blocks, at most: one without a change is the last.

    Raises:
        ValueError: there are no candidates, or sweeps is below 1; or a score is NaN.
    """
    coefs = _ordered(coefs)
    if not coefs or count_problem("sweeps", sweeps):
        raise ValueError(f"coefs are {coefs} and sweeps is {sweeps}: give at least one of each")
    now = dict.fromkeys(blocks_of(vector).values(), start)
    best, curve = choose([now], score).score, list[tuple[str, float, float]]()
    for _ in range(sweeps):
        before = dict(now)
        for block in now:
            candidates = [{**now, block: coef} for coef in coefs if coef != now[block]]
            if not candidates:
                continue
            found = choose(candidates, score)
            curve += [(block, own[block], value) for own, value in found.curve]
            if exceeds(found.score, best):
                now, best = found.best, found.score
        if now == before:
            break
    return Layered(now, best, tuple(curve))
