"""EMR-Merging: one merged vector for all tasks; a mask and a scale make it a model for one of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .parts import looped
from .parts.arithmetic import absolute_sums, add, block_sums, zeroed
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.masked import Masked
from .parts.merger import Mapped, Rule, merged, vector_function


def emr(base: Params, experts: Experts, *, task: str, coef: float = 1.0) -> Params:
    """θ₀ + γ λ_t m_t ⊙ τ, τ = s max_i max(s Δ_i, 0), s the sign of Σ_i Δ_i (0 counts as −), m_t = 1 where s Δ_t > 0.

    ``λ_t = Σ_l mean |Δ_t,l| / Σ_l mean |m_t ⊙ τ|_l`` over all leaves l, in float64. τ, and a mask and a number for each
    task, are all that the experts' models need: one model for each task.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        task: name of the expert that the model is for.
        coef: γ, finite; 1 in the paper.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Huang et al., "EMR-Merging: tuning-free high-performance model merging", 2024;
        merge_vit/src/main_emr_merging.py of harveyhuang18/EMR_Merging at cc225ec.
    """
    return merged(Emr, **locals())


def fuse(piece: Piece, place: int, scale: float) -> Tensor:
    """The merged vector of a chunk."""
    return _own(piece.deltas, place).mul_(scale)


def magnitudes(delta: Tensor, own: Tensor) -> list[float]:
    """Σ |Δ_t| and Σ |m_t ⊙ τ| of a block."""
    return [block_sums(absolute_sums(values))[0] for values in (delta, own)]


def added(blocks: Sequence[Sequence[float]], count: int) -> list[float]:
    """The `magnitudes` of a leaf: those of its blocks added, ``count`` numbers."""
    return [math.fsum(block[i] for block in blocks) for i in range(count)]


def scale_from(leaves: Iterable[tuple[int, Sequence[float]]]) -> float:
    """λ_t, from the size and the `magnitudes` of every leaf, in any order."""
    means = [[part / max(size, 1) for part in sums] for size, sums in leaves]
    before, after = (math.fsum(mean[i] for mean in means) for i in range(2))
    return before / after if after else 0.0


def _shared(deltas: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """τ and its sign s; max_i s Δ_i is never negative, s being the sign of the sum."""
    sign = (add(deltas) > 0).to(deltas[0].dtype).mul_(2).sub_(1)
    largest = reduce(torch.maximum, (delta * sign for delta in deltas))
    return largest.mul_(sign).add_(0.0), sign  # no −0


def _own(deltas: Sequence[Tensor], place: int) -> Tensor:
    """m_t ⊙ τ."""
    vector, sign = _shared(deltas)
    return zeroed(vector, deltas[place] * sign > 0)


@dataclass(frozen=True)
class Emr(Masked):
    """EMR-Merging: one vector of the largest changes with the elected sign; a mask and a scale fit it to one task."""

    name = "emr"
    scaled: ClassVar = True
    task: str | None = None
    """Expert whose model is written. Without it, the output is one folder: the vector, and a mask for each task."""
    coef: float = 1.0
    """Factor of the merged change (gamma); the authors take 1."""

    def rule(self, leaves: Mapped) -> Rule:
        place = self.place(leaves)

        def sums(path: str) -> list[float]:
            if (found := leaves.each_window(partial(looped.norms_of_task, place=place), path)) is not None:
                return [math.fsum(block_sums(torch.from_numpy(own))) for (own,) in looped.joined(found)]
            return added([magnitudes(deltas[place], _own(deltas, place)) for deltas in leaves.blocks(path)], 2)

        scale = scale_from((leaves.shape(path).numel(), sums(path)) for path in leaves.coefs)
        return Rule(
            lambda _: lambda piece: fuse(piece, place, scale),
            loop=lambda _: partial(looped.combined, kind="EMR", one=place, two=scale),
        )

    def shared(self, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        vector, sign = _shared(deltas)
        return vector, [delta * sign > 0 for delta in deltas]

    def shared_by_loop(self) -> looped.Shared:
        return partial(looped.of_all_tasks, kind="EMR", summed=True)

    def scale(self, leaves: Iterable[tuple[int, Sequence[float]]]) -> float:
        return scale_from(leaves)


emr_vector = vector_function(Emr)
