"""MagMax: for each coordinate, the expert's change of largest magnitude."""

from dataclasses import dataclass
from functools import partial, reduce
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .parts import looped
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.merger import UNKNOWN, Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted


def magmax(base: Params, experts: Experts, *, coef: float, weights: Numbers | None = None) -> Params:
    """θ₀ + γ τ, τ = Δ_i of ``i = argmax_i |Δ_i|`` in every coordinate; of two opposite ones the positive.

    Args:
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns: a new tree of base's structure and dtypes; non-floating leaves are base's.
    Raises: ValueError that lists every problem of values, structure and shapes.
    Source: Marczak et al., "MagMax: leveraging model merging for seamless continual learning", 2024.
    """
    return merged(MagMax, **locals())


def fuse(piece: Piece) -> Tensor:
    """τ of a chunk."""
    # the largest magnitude belongs to the largest or to the smallest number, whatever the experts' order
    high, low = reduce(torch.maximum, piece.deltas), reduce(torch.minimum, piece.deltas)
    return torch.where(high >= -low, high, low).add_(0.0)  # no −0: torch says not which zero is larger


@dataclass(frozen=True)
class MagMax(Weighted):
    """MagMax: in each coordinate, the experts' change of largest magnitude."""

    name = "magmax"
    same_on_gpu = True
    semantics: ClassVar = {"mergekit": UNKNOWN}
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""

    def plain(self, leaves: Mapped) -> Rule:
        return Rule(lambda _: fuse, loop=lambda _: partial(looped.combined, kind="MAGMAX"))


magmax_vector = vector_function(MagMax)
