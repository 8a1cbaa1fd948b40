"""The coefficient γ, and the sparsity, that do best on dev data; candidates live in memory only."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ..types import Params
from .common import apply_vector

T = TypeVar("T")

COEFS = tuple(i / 10 for i in range(1, 11))

# sparsity calibration on plainly fine-tuned experts, candidates from less to more pruning, at these coefficients
TIES_KEEPS = (0.5, 0.3, 0.2, 0.1)
DROP_PROBS = (0.1, 0.3, 0.5, 0.7, 0.9)
CALIBRATION_COEFS = {
    "language": {"ties": 0.3, "dare": 0.3, "della": 1.0},
    "vision": {"ties": 0.2, "dare": 0.2, "della": 1.0},
}


class Selection(NamedTuple, Generic[T]):
    """The chosen candidate, its score, and every (candidate, score) in the order tried."""

    best: T
    score: float
    curve: tuple[tuple[T, float], ...]


def choose(candidates: Sequence[T], score: Callable[[T], float]) -> Selection[T]:
    """The candidate of the largest score, the earlier of equal ones; each is scored once, in order.

    Raises: ValueError without candidates, or for a score that is NaN.
    """
    if not candidates:
        raise ValueError("candidates is empty: pass at least one")
    curve = []
    for candidate in candidates:
        value = float(score(candidate))
        if math.isnan(value):
            raise ValueError(f"the score of candidate {candidate!r} is NaN: score must return a number")
        curve.append((candidate, value))
    best, value = max(curve, key=lambda entry: entry[1])
    return Selection(best, value, tuple(curve))


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
    return choose(sorted(coefs), lambda coef: score(apply_vector(base, vector, coef=coef)))
