"""Iso-CTS: Iso-C with some directions taken from each expert, outside of the common subspace."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import Params
from .parts import tall
from .parts.arithmetic import add
from .parts.inputs import Experts
from .parts.merger import merged, vector_function
from .parts.per_expert import Numbers
from .parts.spectral import Mix, Others, Spectral, leading, orthonormal, svd


def iso_cts(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    others: Others = "mean",
    skip: Sequence[str] = (),
    common: float = 0.8,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ σ̄ Û V̂ᵀ, per matrix; U holds the k leading left vectors U_c of Σ_i Δ_i and s of each expert's own part.

    The own part of an expert is ``Δ_i − U_c U_cᵀ Δ_i``; V and the singular values are those of the same triplets, Û and
    V̂ the nearest orthonormal matrices (`tsv_merge`), σ̄ the mean of all singular values taken. Of r = min(rows, columns)
    directions each expert has s = round((r − ⌊r · common⌋) / N), at most ⌊r / N⌋, and k = r − N s.
    Directions whose singular value is 0 up to rounding are left out; of an own part that is what rounding leaves of an
    expert that lies wholly in U_c, 8 eps √max(rows, columns) ‖Δ_i‖ (Frobenius).

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ (α in the paper), finite.
        others: of leaves that are not matrices: "mean" of the task vectors, as the authors, or "zero".
        skip: globs of matrices that count as such leaves; the authors skip "*text_projection*".
        common: share of directions for what the experts have in common, in [0, 1]; 0.8 in the paper.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: as `iso_c`.
    """
    return merged(IsoCts, **locals())


def own_of(least: int, experts: int, common: float) -> int:
    """Directions of each expert's own part, of ``least`` in all."""
    return min(round((least - int(least * common)) / experts), least // experts)


def isotropic(deltas: list[Tensor], *, common: float) -> Tensor:
    """σ̄ Û V̂ᵀ of a matrix."""
    least = min(deltas[0].shape)
    own = own_of(least, len(deltas), common)
    together = svd(add(deltas))
    parts = [leading(together, least - own * len(deltas))]
    shared = parts[0][0]
    if own:
        norms = tall.norms(deltas)
        floors = [tall.rounding(delta.shape, delta.dtype, norm) for delta, norm in zip(deltas, norms, strict=True)]
        rests = (delta - shared @ (shared.mT @ delta) for delta in deltas)
        parts += [leading(svd(rest, floor), own) for rest, floor in zip(rests, floors, strict=True)]
    left, values, right = (torch.cat(part, -1) for part in zip(*parts, strict=True))
    return (orthonormal(left) @ orthonormal(right).mT).mul_(values.mean())


def isotropic_rows(blocks: tall.Blocks, shape: Sequence[int], experts: int, common: float) -> Mix:
    """`isotropic` of a tall matrix, from the experts' rows of a block."""
    rows, least = shape
    own = own_of(least, experts, common)
    together = tall.right(tall.triangle(map(add, blocks())), rows, least - own * experts)
    parts, seen, norms = [together], list[Tensor](), [0.0] * experts  # U_cᵀ Δ_i, ‖Δ_i‖

    def shared(deltas: list[Tensor]) -> Tensor:
        return add(deltas) @ together.inverse

    def others(deltas: list[Tensor]) -> list[Tensor]:
        known = shared(deltas)
        return [delta - known @ inside for delta, inside in zip(deltas, seen, strict=True)]

    if own:
        for deltas in blocks():
            inside = [shared(deltas).mT @ delta for delta in deltas]
            seen = [a + b for a, b in zip(seen, inside, strict=True)] if seen else inside
            norms = [math.hypot(norm, more) for norm, more in zip(norms, tall.norms(deltas), strict=True)]
        uppers = tall.triangles(lambda: map(others, blocks()))
        floors = [tall.rounding(shape, upper.dtype, norm) for upper, norm in zip(uppers, norms, strict=True)]
        parts += [tall.right(upper, rows, own, floor) for upper, floor in zip(uppers, floors, strict=True)]

    def left(deltas: list[Tensor]) -> Tensor:
        found = [shared(deltas)]
        if own:
            found += [rest @ part.inverse for rest, part in zip(others(deltas), parts[1:], strict=True)]
        return torch.cat(found, 1)

    values = torch.cat([part.values for part in parts])
    outer = tall.polar(tall.triangle(map(left, blocks())), rows)
    outer = (outer @ orthonormal(torch.cat([part.vectors for part in parts], 1)).mT).mul_(values.mean())
    return lambda deltas: left(deltas) @ outer


@dataclass(frozen=True)
class IsoCts(Spectral):
    """Iso-CTS: Iso-C with some directions taken from each single expert."""

    name = "iso_cts"
    common: float = 0.8
    """Share of directions for the common subspace; the others are divided among the experts."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [] if 0 <= self.common <= 1 else [f"common is {self.common}, must be in [0, 1]"]
        return problems + super().problems(experts)

    def mix(self) -> Mix:
        return partial(isotropic, common=self.common)

    def streams(self, shape: Sequence[int], experts: int) -> bool:
        return tall.is_tall(shape)

    def mix_rows(self, blocks: tall.Blocks, shape: Sequence[int], experts: int) -> Mix:
        return isotropic_rows(blocks, shape, experts, self.common)

    def held(self, shape: Sequence[int], experts: int) -> int:
        return super().held(shape, experts * (2 if self.streams(shape, experts) else 1))


iso_cts_vector = vector_function(IsoCts)
