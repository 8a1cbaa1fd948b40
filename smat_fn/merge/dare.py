"""DARE: drop changes at random, rescale the others, then task arithmetic."""

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy
import torch
from torch import Tensor

from .. import random
from ..execution import array, loops_for
from ..types import Aggregate, Params
from .parts import looped
from .parts.arithmetic import add, divisor, zeroed
from .parts.chunks import Piece
from .parts.inputs import Experts, drop_problems
from .parts.merger import L1_NORMS, Mapped, Rule, merged, vector_function
from .parts.per_expert import ExpertPart, Numbers, Own, Sparse, Sparsify


# over 60 lines: its docstring explains every argument
def dare(
    key: Tensor,
    base: Params,
    experts: Experts,
    *,
    coef: float,
    drop_prob: float,
    aggregate: Aggregate = "sum",
    weights: Numbers | None = None,
    densities: Numbers | None = None,
    rescale: bool = False,
) -> Params:
    """θ₀ + γ Σ_i w_i m_i ⊙ Δ_i / (1 − p̂), m_i = 0 with probability p̂ and else 1, rounded once to base's dtypes.

    ``p̂ = T / 65536``, T = ``random.threshold(drop_prob)``; coordinate k of a leaf is dropped iff field k of its mask
    stream under ``fold_in(key, name of the expert)`` is below T: other experts, their order and devices play no part.

    Args:
        key: int64 (2,).
        experts: {name: tree} or a list of trees (names are positions).
        coef: γ, finite.
        drop_prob: in [0, 1).
        aggregate: "mean" divides by Σ_i w_i where that is not 0.
        weights: w_i by expert, a number or {glob: number} by leaf; 1 for those not named.
        densities: 1 − drop_prob by expert in the same way, in [0, 1].
        rescale: give each leaf of m_i ⊙ Δ_i the L1 norm of Δ_i, instead of dividing by 1 − p̂.

    Returns:
        a new tree of base's structure; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Yu et al., "Language models are super Mario", 2024.
    """
    return merged(Dare, **locals())


def dropped(piece: Piece, drop_prob: float) -> list[Tensor]:
    """m ⊙ Δ / (1 − p̂) of every expert."""
    threshold = int(random.threshold(drop_prob))
    kept = 1 - threshold / 65536
    return [_dropped(d, f, threshold, kept) for d, f in zip(piece.deltas, piece.fields, strict=True)]


def sparse(part: ExpertPart, plain: bool, *, drop_prob: float) -> Tensor:
    """`dropped` of one part with a density of its own; without the division where ``plain``."""
    assert part.fields is not None
    if part.density == 0:
        return torch.zeros_like(part.delta)
    threshold = int(random.threshold(drop_prob if part.density is None else 1 - part.density))
    return _dropped(part.delta, part.fields, threshold, 1.0 if plain else 1 - threshold / 65536)


def mask_of(own: Own, drop_prob: float, *, rescale: bool) -> looped.ByField:
    """The mask of a leaf by thresholds of its experts."""
    thresholds = [
        1 << 16 if density == 0 else int(random.threshold(drop_prob if density is None else 1 - density))
        for density in own.densities
    ]
    return looped.ByField(thresholds, divide=not rescale)


def _dropped(delta: Tensor, fields: Tensor, threshold: int, kept: float) -> Tensor:
    if (loops := loops_for(delta, fields)) is None or delta.dtype != torch.float32:
        return zeroed(delta / divisor(kept, delta), fields >= threshold)
    out = torch.empty_like(delta)
    loops.dropped(*map(array, (delta, fields)), numpy.int32(threshold), numpy.float32(kept), array(out))
    return out


@dataclass(frozen=True)
class Dare(Sparse):
    """DARE: drop and rescale at random, then task arithmetic."""

    name = "dare"
    same_on_gpu = True
    random = True
    semantics: ClassVar = {"mergekit": L1_NORMS}
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    drop_prob: float | None = None
    """Probability of removing a coordinate."""
    aggregate: Aggregate = field(default="sum", kw_only=True)
    """Sum of the weighted changes, or their mean over the weights."""

    def problems(self, experts: Experts) -> list[str]:
        assert self.drop_prob is not None
        return [*drop_problems(self.drop_prob), *super().problems(experts)]

    def sparsify(self, leaves: Mapped) -> Sparsify:
        assert self.drop_prob is not None
        return partial(sparse, drop_prob=self.drop_prob)

    def plain(self, leaves: Mapped) -> Rule:
        assert self.drop_prob is not None
        own = self.drop_prob
        return Rule(fuse=lambda _: lambda piece: add(dropped(piece, own)), loop=partial(self.looped, leaves))

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask:
        assert self.drop_prob is not None
        return mask_of(own, self.drop_prob, rescale=self.rescale)


dare_vector = vector_function(Dare)
