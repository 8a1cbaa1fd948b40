"""Arcee Fusion: the most important differences of one model from another."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import all_at_once
from ..types import Params
from .parts.arithmetic import largest
from .parts.chunks import Fuse, merge_weights, row_length
from .parts.inputs import Experts, check_alone, coef_problems, count_problems
from .parts.merger import Mapped, Merger, Rule
from .parts.ranks import at_places

CACHED = 1 << 16  # coordinates that stay in a core's cache through all operations


def arcee_fusion(experts: Experts, *, coef: float = 1.0) -> Params:
    """θ₁ + γ m ⊙ (θ₂ − θ₁), m = 1 where the importance is at least Q₂ + 1.5 (Q₃ − Q₁) of its leaf, else 0.

    The importance of a coordinate is |θ₂ − θ₁| · KL of its row, ``KL = Σ p log(p / q)``, p and q the softmax of the row
    of θ₂ and of θ₁ along the last axis, each plus 1e-8. The quartile Q_k is the entry ⌊k (n − 1) / 4⌋ of the n
    importances in order; mergekit draws a random million of them where a leaf has more.

    Args:
        experts: {name: tree} or a list, of two trees: the one that changes, mergekit's base, and the other.
        coef: γ, finite; mergekit has none, which is 1.

    Returns:
        A new tree of the first expert's structure, rounded once.

    Raises:
        ValueError: lists every leaf that does not agree, and for another number of experts.

    Source: mergekit 0.1.5, merge_methods/arcee_fusion.py.
    """
    problems = [*coef_problems(coef), *count_problems(experts, "arcee_fusion", least=2, most=2)]
    flat = all_at_once(problems, lambda: check_alone(experts))
    return merge_weights(experts, flat, lambda _, values: fused(values, float(coef)))


def fused(values: Iterable[Tensor], coef: float) -> Tensor:
    """The merged leaf of two."""
    one, two = (value.contiguous() for value in values)
    if not one.numel():
        return one.clone()
    flat = [value.view(-1, row_length(value.shape)) for value in (two, one)]
    rows = max(1, CACHED // flat[0].shape[1])
    importance = torch.cat([_importance(*part) for part in zip(*(value.split(rows) for value in flat), strict=True)])
    places = [int(quarter / 4 * (importance.numel() - 1)) for quarter in (1, 2, 3)]
    first, second, third = at_places(importance.view(-1), places)
    keep = (importance.view_as(one) >= second + 1.5 * (third - first)).to(one.dtype).mul_(coef)
    return (two - one).mul_(keep).add_(one)


def _importance(two: Tensor, one: Tensor) -> Tensor:
    """|θ₂ − θ₁| KL(θ₂ ‖ θ₁) of rows."""
    left, right = torch.softmax(two, -1).add_(1e-8), torch.softmax(one, -1).add_(1e-8)
    return (two - one).abs_().mul_((left / right).log_().mul_(left).sum(-1, keepdim=True))


@dataclass(frozen=True)
class ArceeFusion(Merger):
    """Arcee Fusion: the first of two experts plus the most important differences of the second."""

    name = "arcee_fusion"
    function = staticmethod(arcee_fusion)
    based = False
    coef: float = 1.0
    """gamma, a factor of the differences; 1 is mergekit's."""

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            shape, coef = leaves.shape(path), leaves.coefs[path]
            return lambda piece: fused((part.view(shape) for part in piece.deltas), coef).reshape(-1)

        return Rule(fuse, whole=lambda _: True)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return 64 * largest(leaves)
