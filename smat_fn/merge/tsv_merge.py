"""TSV-Merge: the leading singular vectors of every expert's task matrices, made orthogonal to each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .common import UNKNOWN, WIDE, Fuse, Mapped, Merger, Rule, add, apply_vector, merge_leaves
from .inputs import Experts, Leaves, check, coef_problems


def tsv_merge(base: Params, experts: Experts, *, coef: float) -> Params:
    """θ₀ + γ Û Σ V̂ᵀ, per matrix Δ_i = U_i Σ_i V_iᵀ; U = [U_1 … U_N], V, Σ hold the k leading triplets of each.

    ``Û = P Qᵀ`` for the decomposition U = P D Qᵀ, the orthonormal matrix nearest to U (Procrustes); V̂ likewise.
    ``k = ⌊min(rows, columns) / N⌋``. Leaves that are no matrices, and matrices with k = 0, take mean_i Δ_i.
    Directions whose singular value is 0 up to rounding (in Δ_i, U or V) are left out, they have no unique vectors:
    experts that are zero, of low rank, or equal do no harm.

    Args: experts: {name: tree} or a list of trees; coef: γ (α in the paper), finite.
    Returns: a new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are
        those of the library that computes the SVD.
    Raises: ValueError that lists every problem of values, structure and shapes; and for a matrix that is not finite.
    Source: Gargiulo et al., "Task Singular Vectors: reducing task interference in model merging", 2025.
    """
    check(base, experts, coef_problems(coef))
    return apply_vector(base, tsv_merge_vector(base, experts), coef=coef)


def tsv_merge_vector(base: Params, experts: Experts) -> Leaves:
    """Û Σ V̂ᵀ, or the mean: flat, floating-point leaves only, for `apply_vector`."""
    return merge_leaves(*check(base, experts), fuse)


def fuse(path: str, deltas: Iterable[Tensor]) -> Tensor:
    """The merged vector of a leaf."""
    every = list(deltas)
    shape = every[0].shape
    count = min(shape) // len(every) if len(shape) == 2 else 0
    if not count:
        return add(every).div_(len(every))
    try:
        parts = [_leading(delta, count) for delta in every]
        left, values, right = (torch.cat(part, -1) for part in zip(*parts, strict=True))
        return (_orthonormal(left) * values) @ _orthonormal(right).mT
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"leaf {path!r} has no singular values, are all of its values finite? {error}") from error


def _leading(delta: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (rows, count), the diagonal of Σ, V (columns, count)."""
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    real = _real(values, delta)[:count]
    return left[:, :count] * real, values[:count] * real, right[:count].mT * real


def _orthonormal(matrix: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left * _real(values, matrix)) @ right


def _real(values: Tensor, matrix: Tensor) -> Tensor:
    return values > torch.finfo(values.dtype).eps * max(matrix.shape) * values[0]


@dataclass(frozen=True)
class TsvMerge(Merger):
    """TSV-Merge: the leading singular vectors of every expert's matrices, made orthogonal."""

    name = "tsv_merge"
    function = staticmethod(tsv_merge_vector)
    semantics: ClassVar = {"mergekit": UNKNOWN}
    grid: ClassVar = WIDE
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""

    def rule(self, leaves: Mapped) -> Rule:
        def whole(path: str) -> Fuse:
            shape = leaves.shape(path)
            return lambda piece: fuse(path, (delta.view(shape) for delta in piece.deltas)).reshape(-1)

        return Rule(whole, whole=True)

    def memory(self, leaves: Sequence[Tensor], experts: int) -> int:
        largest = max((leaf.numel() for leaf in leaves), default=0)
        return (4 * experts + 64) * largest  # all task vectors of a leaf, and its decomposition

    def work(self, shape: Sequence[int]) -> float:
        return super().work(shape) * (min(shape) if len(shape) == 2 else 1)
