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


@dataclass(frozen=True)
class WeightedAverage:
    """Weighted average: the mean of the experts with a weight for each."""

    name: ClassVar[str] = "weighted_average"
    weights: tuple[float, ...]
    """One number for each expert, in their order."""
    normalize: bool = True
    """Divide by the sum of the weights; with --no-normalize take them as they are."""


@dataclass(frozen=True)
class WiseFt:
    """WiSE-FT: base + coef * the task vector of one expert."""

    name: ClassVar[str] = "wise_ft"
    coef: float | None = None
    """gamma, 0 gives the base, 1 the expert. No preset holds one: --search chooses it on dev."""


@dataclass(frozen=True)
class Slerp:
    """SLERP: two experts, leaf by leaf along the arc between them."""

    name: ClassVar[str] = "slerp"
    coef: float = 0.5
    """gamma, 0 gives the first expert, 1 the second."""


@dataclass(frozen=True)
class ModelStock:
    """Model Stock: towards the experts' mean, as far as the angles between them say."""

    name: ClassVar[str] = "model_stock"
    coef: float = 1.0
    """gamma, a factor of the step; 1 is the source's."""


@dataclass(frozen=True)
class DareTies:
    """DARE with the sign election of TIES."""

    name: ClassVar[str] = "dare_ties"
    drop_prob: float
    """Probability of removing a coordinate."""
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""
    aggregate: Aggregate = "sum"
    """Sum or mean of the agreeing entries."""


@dataclass(frozen=True)
class Breadcrumbs:
    """Model Breadcrumbs: leave out the smallest and the largest changes of every leaf, then task arithmetic."""

    name: ClassVar[str] = "breadcrumbs"
    drop_smallest: float
    """Share of a leaf that goes, smallest magnitudes first."""
    drop_largest: float
    """Share of a leaf that goes, largest magnitudes first."""
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""


@dataclass(frozen=True)
class MagMax:
    """MagMax: of all experts' changes of a coordinate the largest."""

    name: ClassVar[str] = "magmax"
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""


@dataclass(frozen=True)
class TsvMerge:
    """TSV-Merge: the leading singular vectors of every expert's matrices, made orthogonal."""

    name: ClassVar[str] = "tsv_merge"
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""


PaperMerger: TypeAlias = WeightAverage | TaskArithmetic | Ties | Dare | Della
MoreMerger: TypeAlias = WeightedAverage | WiseFt | Slerp | ModelStock | DareTies | Breadcrumbs | MagMax | TsvMerge
MergerConfig: TypeAlias = PaperMerger | MoreMerger
MERGERS: tuple[type[PaperMerger], ...] = (WeightAverage, TaskArithmetic, Ties, Dare, Della)
MORE_MERGERS: tuple[type[MoreMerger], ...] = (
    WeightedAverage,
    WiseFt,
    Slerp,
    ModelStock,
    DareTies,
    Breadcrumbs,
    MagMax,
    TsvMerge,
)
