"""TSV-Merge: the leading singular vectors of every expert's task matrices, made orthogonal to each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import Params
from .parts import tall
from .parts.inputs import Experts
from .parts.merger import merged, vector_function
from .parts.per_expert import Numbers
from .parts.spectral import Mix, Others, Spectral, leading, orthonormal, rest, svd


def tsv_merge(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    others: Others = "mean",
    skip: Sequence[str] = (),
    share: float = 0.0,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ Û Σ V̂ᵀ, per matrix Δ_i = U_i Σ_i V_iᵀ; U = [U_1 … U_N], V, Σ hold the k leading triplets of each.

    ``Û = P Qᵀ`` for the decomposition U = P D Qᵀ, the orthonormal matrix nearest to U (Procrustes); V̂ likewise.
    ``k = ⌊min(rows, columns) / N⌋``, or ⌊share · min(rows, columns)⌋. Matrices with k = 0 count as other leaves.
    Directions whose singular value is 0 up to rounding (in Δ_i, U or V) are left out, they have no unique vectors:
    experts that are zero, of low rank, or equal do no harm.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ (α in the paper), finite.
        others: of leaves that are not matrices: "mean" of the task vectors, as the authors, or "zero".
        skip: globs of matrices that count as such leaves; the authors skip "*text_projection*".
        share: of every expert's singular values: 1 is the authors' lossless variant; 0: 1/N, as in the paper.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: Gargiulo et al., "Task Singular Vectors: reducing task interference in model merging", 2025.
    """
    return merged(TsvMerge, **locals())


def count_of(shape: Sequence[int], experts: int, share: float) -> int:
    """Singular triplets that are taken of each expert."""
    return int(min(shape) * share) if share else min(shape) // experts


def aligned(deltas: list[Tensor], *, others: Others, share: float) -> Tensor:
    """Û Σ V̂ᵀ of a matrix."""
    count = count_of(deltas[0].shape, len(deltas), share)
    if not count:
        return rest(deltas, others)
    parts = [leading(svd(delta), count) for delta in deltas]
    left, values, right = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return (orthonormal(left) * values) @ orthonormal(right).mT


def aligned_rows(blocks: tall.Blocks, rows: int, count: int) -> Mix:
    """`aligned` of a tall matrix, from the experts' rows of a block."""
    parts = [tall.right(upper, rows, count) for upper in tall.triangles(blocks)]

    def left(deltas: list[Tensor]) -> Tensor:
        return torch.cat([delta @ part.inverse for delta, part in zip(deltas, parts, strict=True)], 1)

    middle = tall.polar(tall.triangle(map(left, blocks())), rows) * torch.cat([part.values for part in parts])
    outer = middle @ orthonormal(torch.cat([part.vectors for part in parts], 1)).mT
    return lambda deltas: left(deltas) @ outer


@dataclass(frozen=True)
class TsvMerge(Spectral):
    """TSV-Merge: the leading singular vectors of every expert's matrices, orthogonalized."""

    name = "tsv_merge"
    share: float = 0.0
    """Share of each expert's singular values to keep; 0: 1 / number of experts."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [] if 0 <= self.share <= 1 else [f"share is {self.share}, must be in [0, 1]"]
        return problems + super().problems(experts)

    def mix(self) -> Mix:
        return partial(aligned, others=self.others, share=self.share)

    def streams(self, shape: Sequence[int], experts: int) -> bool:
        return tall.is_tall(shape) and 1 <= count_of(shape, experts, self.share) * experts <= min(shape)

    def mix_rows(self, blocks: tall.Blocks, shape: Sequence[int], experts: int) -> Mix:
        return aligned_rows(blocks, shape[0], count_of(shape, experts, self.share))

    def held(self, shape: Sequence[int], experts: int) -> int:
        return super().held(shape, experts) * max(1, round(experts * self.share))


tsv_merge_vector = vector_function(TsvMerge)
