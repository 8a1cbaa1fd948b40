"""OPCM: experts are added one after the other, each without what lies in the directions of those before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..types import Params
from .parts import tall
from .parts.arithmetic import add, blocks_memory
from .parts.inputs import Experts
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted
from .parts.spectral import OfMatrices, is_matrix, matrices_of, matrix_rule, of_matrix, skip_problems, svd


def opcm(
    base: Params,
    experts: Experts,
    *,
    coef: float = 1.0,
    share: float = 0.5,
    skip: Sequence[str] = (),
    norms: bool = True,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ c S_N; S_1 = Δ_1, per matrix S_t = S_{t−1} + Δ_t − U (K ⊙ Uᵀ Δ_t V) Vᵀ, with S_{t−1} = U Σ Vᵀ.

    K is 1 on the diagonal and on the r × r entries of the leading directions, whose singular values add up to ``share``
    of all at most; 0 elsewhere. Other leaves are summed. ``c = (1/N) Σ_i ‖Δ_i‖ / ‖S_N‖``, norms over the whole model.
    Experts are taken in their order, and the result depends on it.
    Directions of S_{t−1} whose singular value is 0 up to rounding have no unique vectors: nothing of Δ_t is left out.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; 1 in the paper.
        share: α of the paper, in [0, 1); 0.5 in the source.
        skip: globs of matrices that are summed; the source takes the weights of linear layers alone.
        norms: False leaves out c, for which every matrix is decomposed twice.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: Tang et al., "Merging models on the fly without retraining: a sequential approach to scalable continual
        model merging", 2025; method/opcm/opcm.py of tanganke/fusion_bench at 54c9e8c.
    """
    return merged(Opcm, **locals())


def accumulated(deltas: list[Tensor], *, share: float) -> Tensor:
    """S_N of a matrix, in new memory."""
    total = deltas[0].clone()
    for delta in deltas[1:]:
        left, values, right = svd(total)
        inside = left.mT @ delta @ right.mT
        sums = list(accumulate(values.tolist()))
        count = sum(value <= share * sums[-1] for value in sums)
        taken = torch.diag_embed(inside.diagonal())
        taken[:count, :count] = inside[:count, :count]
        total += delta - left @ taken @ right
    return total


@dataclass(frozen=True)
class Opcm(Weighted, OfMatrices):
    """OPCM: add the experts one by one, each without its component along the directions of the earlier ones."""

    name = "opcm"
    coef: float = 1.0
    """gamma; 1 is the paper's."""
    share: float = 0.5
    """An expert adds nothing along the leading directions that hold up to this share of all singular values so far."""
    skip: tuple[str, ...] = ()
    """Globs of matrices that are summed, such as embeddings too large to decompose: "*embed*"."""
    norms: bool = True
    """True: scale to the task vectors' mean norm; False: do not scale to task vectors' mean norm; halves the time."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [] if 0 <= self.share < 1 else [f"share is {self.share}, must be at least 0 and below 1"]
        return problems + skip_problems(self.skip) + super().problems(experts)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        # for c, of leaves that are not matrices too
        return max(super().memory(leaves, experts), blocks_memory(leaves, experts) if self.norms else 0)

    def plain(self, leaves: Mapped) -> Rule:
        scale = leaves.once("scale", partial(self._scale, leaves)) if self.norms else 1.0
        mix = partial(accumulated, share=self.share)
        return matrix_rule(
            leaves, self.skip, lambda _: lambda deltas: mix(deltas).mul_(scale), lambda deltas: add(deltas).mul_(scale)
        )

    def _scale(self, leaves: Mapped) -> float:
        def squares(path: str) -> list[float]:
            """Of the norms of a leaf's task vectors, and of their merged vector."""
            shape, blocks = leaves.shape(path), leaves.blocks(path)
            if not is_matrix(path, shape, self.skip):
                found = [[size**2 for size in tall.norms([*deltas, add(deltas)])] for deltas in blocks]
                return [math.fsum(each) for each in zip(*found, strict=True)]
            deltas = matrices_of(blocks, shape)
            together = of_matrix(path, deltas, partial(accumulated, share=self.share))
            return [size**2 for size in tall.norms([*deltas, together])]

        found = [each for each in leaves.each(squares, leaves.coefs) if each]  # a leaf may have no coordinates
        sizes = [math.sqrt(math.fsum(each)) for each in zip(*found, strict=True)]
        return math.fsum(sizes[:-1]) / len(sizes[:-1]) / sizes[-1] if sizes and sizes[-1] else 1.0


opcm_vector = vector_function(Opcm)
