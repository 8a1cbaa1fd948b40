"""DARE with the election of TIES: drop changes at random, rescale, add the changes that agree with the elected sign."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..types import Aggregate, Params
from .common import L1_NORMS, Mapped, Merger, Piece, Rule, agreeing, apply_vector, elected, merge_pieces
from .dare import dropped
from .inputs import Experts, Leaves, check, coef_problems, drop_problems, key_problems


def dare_ties(
    key: Tensor, base: Params, experts: Experts, *, coef: float, drop_prob: float, aggregate: Aggregate = "sum"
) -> Params:
    """θ₀ + γ Σ_i δ̂_i [sgn δ̂_i = s], δ̂_i the masked, rescaled task vectors of `dare`; s = + where Σ_i δ̂_i ≥ 0, else −.

    Nothing is trimmed: the masks have made the vectors sparse.

    Args: key, drop_prob: as in `dare`; coef: γ, finite; aggregate: "sum" of the agreeing entries, or their "mean".
    Returns: a new tree of base's structure and dtypes; non-floating leaves are base's.
    Raises: ValueError that lists every problem of values, structure and shapes.
    Source: Yu et al., "Language models are super Mario", 2024, with Yadav et al., "TIES-Merging", 2023.
    """
    check(base, experts, [*key_problems(key), *coef_problems(coef), *_problems(drop_prob, aggregate)])
    return apply_vector(base, dare_ties_vector(key, base, experts, drop_prob=drop_prob, aggregate=aggregate), coef=coef)


def dare_ties_vector(
    key: Tensor, base: Params, experts: Experts, *, drop_prob: float, aggregate: Aggregate = "sum"
) -> Leaves:
    """The merged task vector of `dare_ties`: flat, floating-point leaves only, for `apply_vector`."""
    start, flat = check(base, experts, [*key_problems(key), *_problems(drop_prob, aggregate)])
    return merge_pieces(start, flat, lambda piece: fuse(piece, drop_prob, aggregate), key=key)


def fuse(piece: Piece, drop_prob: float, aggregate: Aggregate) -> Tensor:
    """The merged vector of a piece."""
    masked = dropped(piece, drop_prob)
    return agreeing(masked, elected(masked), mean=aggregate == "mean")


def _problems(drop_prob: float, aggregate: str) -> list[str]:
    problems = drop_problems(drop_prob)
    if aggregate not in ("sum", "mean"):
        problems.append(f"aggregate is {aggregate!r}, must be 'sum' or 'mean'")
    return problems


@dataclass(frozen=True)
class DareTies(Merger):
    """DARE with the sign election of TIES."""

    name = "dare_ties"
    function = staticmethod(dare_ties_vector)
    random = True
    semantics: ClassVar = {"mergekit": L1_NORMS}
    drop_prob: float
    """Probability of removing a coordinate."""
    coef: float | None = None
    """gamma. No preset holds one: --search chooses it on dev."""
    aggregate: Aggregate = "sum"
    """Sum or mean of the agreeing entries."""

    def rule(self, leaves: Mapped) -> Rule:
        return Rule(lambda _: lambda piece: fuse(piece, self.drop_prob, self.aggregate))
