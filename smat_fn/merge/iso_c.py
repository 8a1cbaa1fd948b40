"""Iso-C: the sum of the task matrices with all singular values made equal."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..types import Params
from .parts import tall
from .parts.arithmetic import add
from .parts.inputs import Experts
from .parts.merger import merged, vector_function
from .parts.per_expert import Numbers
from .parts.spectral import Mix, Others, Spectral, svd


def iso_c(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    others: Others = "mean",
    skip: Sequence[str] = (),
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ σ̄ U Vᵀ, per matrix Σ_i Δ_i = U Σ Vᵀ, σ̄ the mean of its min(rows, columns) singular values.

    Directions whose singular value is 0 up to rounding are left out, they have no unique vectors.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ (α in the paper), finite.
        others: of leaves that are not matrices: "mean" of the task vectors, as the authors, or "zero".
        skip: globs of matrices that count as such leaves; the authors skip "*text_projection*".
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: Marczak et al., "No task left behind: isotropic model merging with common and task-specific subspaces",
        2025; src/utils/iso.py of danielm1405/iso-merging at d34010a.
    """
    return merged(IsoC, **locals())


def isotropic(deltas: list[Tensor]) -> Tensor:
    """σ̄ U Vᵀ of a matrix."""
    left, values, right = svd(add(deltas))
    return (left @ right).mul_(values.mean())


def isotropic_rows(blocks: tall.Blocks, rows: int) -> Mix:
    """`isotropic` of a tall matrix, from the experts' rows of a block."""
    upper = tall.triangle(map(add, blocks()))
    found = tall.right(upper, rows, len(upper))
    outer = (found.inverse @ found.vectors.mT).mul_(found.values.mean())
    return lambda deltas: add(deltas) @ outer


@dataclass(frozen=True)
class IsoC(Spectral):
    """Iso-C: the sum of the experts' changes, with all singular values of each matrix made equal."""

    name = "iso_c"

    def mix(self) -> Mix:
        return isotropic

    def streams(self, shape: Sequence[int], experts: int) -> bool:
        return tall.is_tall(shape)

    def mix_rows(self, blocks: tall.Blocks, shape: Sequence[int], experts: int) -> Mix:
        return isotropic_rows(blocks, shape[0])


iso_c_vector = vector_function(IsoC)
