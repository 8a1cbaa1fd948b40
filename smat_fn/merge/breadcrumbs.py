"""Model Breadcrumbs: drop the smallest and the largest changes of every leaf, then task arithmetic."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ..types import Params
from .common import Fuse, Mapped, Merger, Rule, add, apply_vector, merge_leaves
from .inputs import Experts, Leaves, check, coef_problems

Count: TypeAlias = Literal["dropped", "kept"]


def breadcrumbs(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    drop_smallest: float,
    drop_largest: float,
    count: Count = "dropped",
) -> Params:
    """θ₀ + γ Σ_i m_i ⊙ Δ_i, m_i = 0 on the smallest and the largest magnitudes of every leaf, else 1; rounded once.

    Of a leaf of n coordinates, sorted by |Δ| with equal ones by position, the first ⌊n · drop_smallest⌋ and the last
    ⌊n · drop_largest⌋ go; nothing is rescaled. In the paper's symbols: drop_smallest is β, drop_largest is 1 − γ.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ of task arithmetic (α there), finite.
        drop_smallest, drop_largest: shares in [0, 1), together below 1.
        count: "kept", as mergekit: ⌊n · density⌋ coordinates stay, density = 1 − drop_smallest − drop_largest to 12
            decimals, those just below the last ⌊n · drop_largest⌋; or the largest where those are too few.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Davari & Belilovsky, "Model Breadcrumbs", 2024; "kept": mergekit 0.1.5, sparsify.py.
    """
    check(base, experts, [*coef_problems(coef), *_problems(drop_smallest, drop_largest, count)])
    shares = {"drop_smallest": drop_smallest, "drop_largest": drop_largest}
    vector = breadcrumbs_vector(base, experts, **shares, count=count)
    return apply_vector(base, vector, coef=coef)


def breadcrumbs_vector(
    base: Params, experts: Experts, *, drop_smallest: float, drop_largest: float, count: Count = "dropped"
) -> Leaves:
    """The merged task vector of `breadcrumbs`: flat, floating-point leaves only, for `apply_vector`."""
    start, flat = check(base, experts, _problems(drop_smallest, drop_largest, count))

    def masked(delta: Tensor) -> Tensor:
        low, high = bounds(delta.numel(), drop_smallest, drop_largest, count)
        kept = delta.abs().reshape(-1).argsort(stable=True)[low:high]
        mask = torch.zeros(delta.numel(), dtype=torch.bool, device=delta.device).index_fill_(0, kept, True)
        return delta.where(mask.view(delta.shape), 0)

    return merge_leaves(start, flat, lambda _, deltas: add(map(masked, deltas)))


def bounds(size: int, drop_smallest: float, drop_largest: float, count: Count) -> tuple[int, int]:
    """The ranks [low, high) by magnitude that stay, of ``size`` coordinates."""
    if count == "dropped":
        return int(size * drop_smallest), size - int(size * drop_largest)
    density = round(1 - drop_smallest - drop_largest, 12)  # of decimal shares the float that one would write
    kept = int(density * size)
    low = max(0, size - kept - int(drop_largest * size)) if density < 1 else 0
    return low, low + kept


def _problems(drop_smallest: float, drop_largest: float, count: str) -> list[str]:
    shares = {"drop_smallest": drop_smallest, "drop_largest": drop_largest}
    problems = [
        f"{name} is {share}, must be in [0, 1): it is the removed share of a leaf"
        for name, share in shares.items()
        if not 0 <= share < 1
    ]
    if not problems and not drop_smallest + drop_largest < 1:
        problems.append(f"drop_smallest {drop_smallest} and drop_largest {drop_largest} leave nothing: lower one")
    if count not in ("dropped", "kept"):
        problems.append(f"count is {count!r}, must be 'dropped' or 'kept'")
    return problems


@dataclass(frozen=True)
class Breadcrumbs(Merger):
    """Model Breadcrumbs: leave out the smallest and the largest changes of every leaf, then task arithmetic."""

    name = "breadcrumbs"
    function = staticmethod(breadcrumbs_vector)
    semantics: ClassVar = {"mergekit": {"count": "kept"}}
    drop_smallest: float
    """Share of a leaf that goes, smallest magnitudes first."""
    drop_largest: float
    """Share of a leaf that goes, largest magnitudes first."""
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""
    count: Count = "dropped"
    """Which number of coordinates is rounded down: of those dropped, or, as in mergekit, of those kept."""

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            size = leaves.shape(path).numel()
            low, high = bounds(size, self.drop_smallest, self.drop_largest, self.count)
            first = leaves.ranked(path, low) if low else None
            last = leaves.ranked(path, high) if high < size else None

            def kept(i: int, delta: Tensor, start: int) -> Tensor:
                mask = torch.ones_like(delta, dtype=torch.bool) if first is None else _above(delta, start, *first[i])
                return delta.where(mask if last is None else mask & ~_above(delta, start, *last[i]), 0)

            return lambda piece: add(kept(i, delta, piece.start) for i, delta in enumerate(piece.deltas))

        return Rule(fuse)


def _above(delta: Tensor, start: int, value: Tensor, position: int) -> Tensor:
    """Flat coordinates from ``start`` on that rank above a magnitude at a position of their leaf."""
    magnitude, value = delta.abs(), value.to(delta.device)
    later = torch.arange(start, start + delta.numel(), device=delta.device) > position
    return (magnitude > value) | ((magnitude == value) & later)
