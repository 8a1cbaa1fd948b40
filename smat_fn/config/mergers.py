"""Mergers as frozen dataclasses. A field that is ``None`` takes the preset's value."""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from ..types import Aggregate, Scope


@dataclass(frozen=True)
class WeightAverage:
    """WA: the mean of the experts."""

    name: ClassVar[str] = "wa"


@dataclass(frozen=True)
class TaskArithmetic:
    """TA: base + coef * sum of the task vectors."""

    name: ClassVar[str] = "ta"
    coef: float | None = None
    """gamma. The preset leaves it open: --search chooses it on dev."""


@dataclass(frozen=True)
class Ties:
    """TIES: trim, elect signs, add what agrees."""

    name: ClassVar[str] = "ties"
    coef: float | None = None
    """gamma. The preset leaves it open: --search chooses it on dev."""
    keep: float | None = None
    """Fraction of coordinates that stays, by magnitude."""
    aggregate: Aggregate | None = None
    """Sum or mean of the agreeing entries."""
    scope: Scope | None = None
    """One threshold per expert (global), or one per tensor."""


@dataclass(frozen=True)
class Dare:
    """DARE: drop and rescale at random, then task arithmetic."""

    name: ClassVar[str] = "dare"
    coef: float | None = None
    """gamma. The preset leaves it open: --search chooses it on dev."""
    drop_prob: float | None = None
    """Probability of removing a coordinate."""


@dataclass(frozen=True)
class Della:
    """DELLA: drop by rank of magnitude, elect signs, mean of what agrees."""

    name: ClassVar[str] = "della"
    coef: float | None = None
    """gamma. The preset leaves it open: --search chooses it on dev."""
    drop_prob: float | None = None
    """Mean probability of removing a coordinate."""
    window: float | None = None
    """Full width of the range of keep probabilities."""


MergerConfig: TypeAlias = WeightAverage | TaskArithmetic | Ties | Dare | Della
MERGERS: tuple[type[MergerConfig], ...] = (WeightAverage, TaskArithmetic, Ties, Dare, Della)
