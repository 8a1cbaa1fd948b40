"""DARE with the election of TIES: drop changes at random, rescale, add the changes that agree with the elected sign."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from ..types import Aggregate, Params
from .dare import dropped, mask_of, sparse
from .parts import looped
from .parts.arithmetic import agreeing, elected
from .parts.chunks import Piece
from .parts.inputs import Experts, drop_problems
from .parts.merger import L1_NORMS, Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Own, Sparse, Sparsify


def dare_ties(
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
    """θ₀ + γ Σ_i δ̂_i [sgn δ̂_i = s], δ̂_i the masked, rescaled task vectors of `dare`; s = + where Σ_i δ̂_i ≥ 0, else −.

    Nothing is trimmed: the masks have made the vectors sparse. Weighted changes w_i δ̂_i are elected and added, and a
    mean is over the weights that agree.

    Args:
        key, experts, drop_prob, weights, densities, rescale: as in `dare`.
        coef: γ, finite.
        aggregate: "sum" of the agreeing entries, or their "mean".

    Returns: a new tree of base's structure and dtypes; non-floating leaves are base's.
    Raises: ValueError that lists every problem of values, structure and shapes.
    Source: Yu et al., "Language models are super Mario", 2024, with Yadav et al., "TIES-Merging", 2023.
    """
    return merged(DareTies, **locals())


def fuse(piece: Piece, drop_prob: float, aggregate: Aggregate) -> Tensor:
    """The merged vector of a chunk."""
    masked = dropped(piece, drop_prob)
    return agreeing(masked, elected(masked), mean=aggregate == "mean")


@dataclass(frozen=True)
class DareTies(Sparse):
    """DARE-TIES: DARE with the sign election of TIES."""

    name = "dare_ties"
    same_on_gpu = True
    random = True
    semantics: ClassVar = {"mergekit": L1_NORMS}
    drop_prob: float
    """Probability of removing a coordinate."""
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    aggregate: Aggregate = "sum"
    """Sum or mean of the agreeing entries."""

    elect = True

    def problems(self, experts: Experts) -> list[str]:
        return [*drop_problems(self.drop_prob), *super().problems(experts)]

    def sparsify(self, leaves: Mapped) -> Sparsify:
        return partial(sparse, drop_prob=self.drop_prob)

    def plain(self, leaves: Mapped) -> Rule:
        return Rule(
            lambda _: lambda piece: fuse(piece, self.drop_prob, self.aggregate), loop=partial(self.looped, leaves)
        )

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask:
        return mask_of(own, self.drop_prob, rescale=self.rescale)


dare_ties_vector = vector_function(DareTies)
