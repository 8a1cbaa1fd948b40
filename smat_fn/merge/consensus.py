"""Consensus TA: task arithmetic without the coordinates that too few experts need, by their TALL masks."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .parts import looped
from .parts.arithmetic import add, zeroed
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.merger import UNKNOWN, Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted


def consensus(
    base: Params, experts: Experts, *, coef: float, ratio: float, least: int = 2, weights: Numbers | None = None
) -> Params:
    """θ₀ + γ 1[Σ_i m_i ≥ least] ⊙ τ, τ = Σ_i Δ_i, m_i = 1 where |Δ_i| > ratio · |τ − Δ_i| (TALL masks), else 0.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        ratio: λ of the masks, at least 0. The authors choose one for each task among 0.2 to 0.6 on validation data;
            here all have one.
        least: experts that must need a coordinate, at least 0; 2 in the paper, 1 removes what none needs.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Wang et al., "Localizing task information for improved model merging and compression", 2024;
        src/utils/tallmask_utils.py of nik-dim/tall_masks at d10af8b.
    """
    return merged(Consensus, **locals())


def fuse(piece: Piece, ratio: float, least: int) -> Tensor:
    """The merged vector of a chunk."""
    total = add(piece.deltas)
    needed = torch.zeros(total.shape, dtype=torch.int32, device=total.device)
    for delta in piece.deltas:
        needed += needs(delta, total, ratio)
    return zeroed(total, needed >= least)


def needs(delta: Tensor, total: Tensor, ratio: float) -> Tensor:
    """The TALL mask of an expert."""
    return delta.abs() > (total - delta).abs_().mul_(ratio)


def ratio_problems(ratio: float) -> list[str]:
    """Validation errors for ``ratio``."""
    return [] if 0 <= ratio < float("inf") else [f"ratio is {ratio}, must be finite and at least 0"]


@dataclass(frozen=True)
class Consensus(Weighted):
    """Consensus TA: task arithmetic without the coordinates that too few experts need."""

    name = "consensus"
    same_on_gpu = True
    semantics: ClassVar = {"mergekit": UNKNOWN}
    ratio: float
    """An expert needs a coordinate if its change exceeds this factor times the sum of the others' changes."""
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    least: int = 2
    """Minimum number of experts that must need a coordinate; it is dropped otherwise."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [] if self.least >= 0 else [f"least is {self.least}, must be at least 0"]
        return ratio_problems(self.ratio) + problems + super().problems(experts)

    def plain(self, leaves: Mapped) -> Rule:
        return Rule(
            lambda _: lambda piece: fuse(piece, self.ratio, self.least),
            loop=lambda _: partial(looped.combined, kind="CONSENSUS", one=self.ratio, two=self.least),
        )


consensus_vector = vector_function(Consensus)
