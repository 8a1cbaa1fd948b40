"""Model Breadcrumbs: drop the smallest and the largest changes of every leaf, then task arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ..types import Aggregate, Params
from .parts import looped
from .parts.arithmetic import add
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.per_expert import ExpertPart, Numbers, Own, Sparse, Sparsify, number

Count: TypeAlias = Literal["dropped", "kept"]
_End: TypeAlias = tuple[Tensor, int]  # a magnitude and its position


# over 60 lines: its docstring explains every argument
def breadcrumbs(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    drop_smallest: float,
    drop_largest: float,
    count: Count = "dropped",
    aggregate: Aggregate = "sum",
    elect: bool = False,
    weights: Numbers | None = None,
    densities: Numbers | None = None,
    largest: Numbers | None = None,
    rescale: bool = False,
) -> Params:
    """θ₀ + γ Σ_i m_i ⊙ Δ_i, m_i = 0 on the smallest and the largest magnitudes of every leaf, else 1; rounded once.

    Of a leaf of n coordinates, sorted by |Δ| with equal ones by position, the first ⌊n · drop_smallest⌋ and the last
    ⌊n · drop_largest⌋ go; nothing is rescaled. In the paper's symbols: drop_smallest is β, drop_largest is 1 − γ; the
    authors' code calls the kept share beta and drop_largest gamma, and takes every fibre of the last axis by itself.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ of task arithmetic (α there), finite.
        drop_smallest, drop_largest: shares in [0, 1), together below 1.
        count: "kept", as mergekit: ⌊n · density⌋ coordinates stay, density = 1 − drop_smallest − drop_largest to 12
            decimals, those just below the last ⌊n · drop_largest⌋; or the largest where those are too few.
        aggregate: "mean" divides by the weights that take part.
        elect: take only what agrees in sign with the weighted sum.
        weights: w_i by expert, a number or {glob: number} by leaf; 1 for those not named.
        densities, largest: 1 − drop_smallest − drop_largest and drop_largest by expert in the same way.
        rescale: give each leaf of m_i ⊙ Δ_i the L1 norm of Δ_i.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Davari & Belilovsky, "Model Breadcrumbs", 2024; "kept": mergekit 0.1.5, sparsify.py.
    """
    return merged(Breadcrumbs, **locals())


def bounds(size: int, drop_smallest: float, drop_largest: float, count: Count) -> tuple[int, int]:
    """The ranks [low, high) by magnitude that stay, of ``size`` coordinates."""
    if count == "dropped":
        return int(size * drop_smallest), size - int(size * drop_largest)
    # of decimal shares the float that one would write
    return _around(size, round(1 - drop_smallest - drop_largest, 12), drop_largest)


def _around(size: int, density: float, drop_largest: float) -> tuple[int, int]:
    kept = int(density * size)
    low = max(0, size - kept - int(drop_largest * size)) if density < 1 else 0
    return low, low + kept


@dataclass(frozen=True)
class Breadcrumbs(Sparse):
    """Model Breadcrumbs: drop the smallest and the largest changes of every parameter, then task arithmetic."""

    name = "breadcrumbs"
    same_on_gpu = True
    semantics: ClassVar = {
        "mergekit": {"count": "kept"},
        "original": "the authors' code drops from every row by itself, not from the whole parameter",
    }
    drop_smallest: float
    """Fraction of each parameter to drop, smallest magnitudes first."""
    drop_largest: float
    """Fraction of each parameter to drop, largest magnitudes first."""
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    count: Count = "dropped"
    """Which number of coordinates is rounded down: that of the dropped ones, or of the kept ones as in mergekit."""
    aggregate: Aggregate = field(default="sum", kw_only=True)
    """Sum of the weighted changes, or their mean over the weights."""
    elect: bool = field(default=False, kw_only=True)
    """Keep only entries that agree in sign with the weighted sum."""
    largest: Mapping[str, float] = field(default_factory=dict, hash=False, kw_only=True)
    """Value of --drop-largest by expert name."""

    def density(self, name: str) -> float | None:
        largest: Any = self.largest.get(name, self.drop_largest)
        return None if isinstance(largest, Mapping) else round(1 - self.drop_smallest - largest, 12)

    def problems(self, experts: Experts) -> list[str]:
        shares = {"drop_smallest": self.drop_smallest, "drop_largest": self.drop_largest}
        problems = [
            f"{name} is {share}, must be in [0, 1): it is the removed share of a parameter"
            for name, share in shares.items()
            if not 0 <= share < 1
        ]
        if not problems and not sum(shares.values()) < 1:
            first, last = shares.values()
            problems.append(f"drop_smallest {first} and drop_largest {last} leave nothing: lower one")
        if self.count not in ("dropped", "kept"):
            problems.append(f"count is {self.count!r}, must be 'dropped' or 'kept'")
        return [*problems, *super().problems(experts)] or [
            f"drop_smallest {self.drop_smallest} and largest {share} of {name!r} leave nothing: lower one"
            for name, rules in self.largest.items()
            for share in (rules.values() if isinstance(rules, Mapping) else [rules])
            if name not in self.densities and not self.drop_smallest + share < 1
        ]

    def sparsify(self, leaves: Mapped) -> Sparsify:
        ends = self._ends(leaves)

        def kept(part: ExpertPart, plain: bool) -> Tensor:
            first, last = ends(part.path)[part.place]
            mask = torch.ones_like(part.delta, dtype=torch.bool)
            if first is not None:
                mask = _above(part.delta, part.start, *first)
            return part.delta.where(mask if last is None else mask & ~_above(part.delta, part.start, *last), 0)

        return kept

    def plain(self, leaves: Mapped) -> Rule:
        kept, names = self.sparsify(leaves), list(leaves.experts)

        def fuse(piece: Piece) -> Tensor:
            shape = leaves.shape(piece.path)
            return add(
                kept(ExpertPart(i, name, piece.path, shape, piece.start, delta, None, None), True)
                for i, (name, delta) in enumerate(zip(names, piece.deltas, strict=True))
            )

        return Rule(lambda _: fuse, loop=partial(self.looped, leaves))

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask:
        return looped.ByMagnitude([_band(*limits) for limits in self._ends(leaves)(own.path)])

    def _ends(self, leaves: Mapped) -> Callable[[str], list[tuple[_End | None, _End | None]]]:
        """Of a leaf, by expert: the last one below those that stay, and the last one of them; None: there is none."""
        names = list(leaves.experts)

        @lru_cache(maxsize=4)
        def ends(path: str) -> list[tuple[_End | None, _End | None]]:
            size = leaves.shape(path).numel()
            limits = [self._limits(size, name, path) for name in names]
            wanted = [[low] * bool(low) + [high] * (0 < high < size) for low, high in limits]
            found = leaves.ranked(path, wanted)
            none = torch.zeros(()), -1  # it ends before all coordinates
            return [
                (row[0] if low else None, (row[-1] if high else none) if high < size else None)
                for (low, high), row in zip(limits, found, strict=True)
            ]

        return ends

    def _limits(self, size: int, name: str, path: str) -> tuple[int, int]:
        """The ranks [low, high) of an expert's leaf that stay."""
        density, high = number(self.densities, name, path), number(self.largest, name, path, self.drop_largest)
        if density is None:
            return bounds(size, self.drop_smallest, high, self.count)
        if self.count == "kept":
            return _around(size, density, high)
        high = min(high, 1 - density)  # the largest go only as far as they may
        return bounds(size, max(0.0, round(1 - density - high, 12)), high, self.count)


def _band(first: _End | None, last: _End | None) -> looped.Band:
    """The magnitudes above one and up to another, equal ones by position."""
    low, i = (-1, 0) if first is None else (looped.bits_of(first[0]), first[1] + 1)
    high, j = (looped.INFINITE, 0) if last is None else (looped.bits_of(last[0]), last[1] + 1)
    return (low + 1, max(low, 0), high + 1, high), (i, j)


def _above(delta: Tensor, start: int, value: Tensor, position: int) -> Tensor:
    """Flat coordinates from ``start`` on that rank above a magnitude at a position of their leaf."""
    magnitude = delta.abs()
    later = torch.arange(start, start + delta.numel(), device=delta.device) > position
    return (magnitude > value) | ((magnitude == value) & later)


breadcrumbs_vector = vector_function(Breadcrumbs)
