"""Consensus TA: task arithmetic without the coordinates that too few experts need, by their TALL masks."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .common import UNKNOWN, Mapped, Merger, Piece, Rule, add, apply_vector, merge_pieces, zeroed
from .inputs import Experts, Leaves, check, coef_problems


def consensus(base: Params, experts: Experts, *, coef: float, ratio: float, least: int = 2) -> Params:
    """θ₀ + γ 1[Σ_i m_i ≥ least] ⊙ τ, τ = Σ_i Δ_i, m_i = 1 where |Δ_i| > ratio · |τ − Δ_i| (TALL masks), else 0.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        ratio: λ of the masks, at least 0. The authors choose one for each task among 0.2 to 0.6 on validation data;
            here all have one.
        least: experts that must need a coordinate, at least 0; 2 in the paper, 1 removes what none needs.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Wang et al., "Localizing task information for improved model merging and compression", 2024;
        src/utils/tallmask_utils.py of nik-dim/tall_masks at d10af8b.
    """
    check(base, experts, [*coef_problems(coef), *_problems(ratio, least)])
    return apply_vector(base, consensus_vector(base, experts, ratio=ratio, least=least), coef=coef)


def consensus_vector(base: Params, experts: Experts, *, ratio: float, least: int = 2) -> Leaves:
    """1[Σ_i m_i ≥ least] ⊙ τ: flat, floating-point leaves only, for `apply_vector`."""
    return merge_pieces(*check(base, experts, _problems(ratio, least)), lambda piece: fuse(piece, ratio, least))


def fuse(piece: Piece, ratio: float, least: int) -> Tensor:
    """The merged vector of a piece."""
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


def _problems(ratio: float, least: int) -> list[str]:
    return ratio_problems(ratio) + ([] if least >= 0 else [f"least is {least}, must be at least 0"])


@dataclass(frozen=True)
class Consensus(Merger):
    """Consensus TA: task arithmetic without the coordinates that too few experts need."""

    name = "consensus"
    function = staticmethod(consensus_vector)
    semantics: ClassVar = {"mergekit": UNKNOWN}
    ratio: float
    """An expert needs a coordinate where its change is more than this times what the others add up to."""
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""
    least: int = 2
    """Experts that must need a coordinate that stays."""

    def rule(self, leaves: Mapped) -> Rule:
        return Rule(lambda _: lambda piece: fuse(piece, self.ratio, self.least))
