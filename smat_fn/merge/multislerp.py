"""Multi-SLERP: the weighted mean of the directions of all task vectors, at their mean norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..types import Params
from .parts import looped
from .parts.arithmetic import plain_sum, weighted
from .parts.chunks import Fuse
from .parts.coefs import Rules, coef_of
from .parts.inputs import Experts
from .parts.merger import Mapped, Merger, Rule, merged, vector_function
from .weighted_average import divisor_of, equal_or_given

Weights = Mapping[str, Rules] | Sequence[Rules]
_EPS = 1e-8
_CANCELS = 1e-6  # far above sqrt(2^-52), the size that rounding of inner products leaves of 0


def multislerp(
    base: Params, experts: Experts, *, coef: float = 1.0, weights: Weights = (), normalize: bool = True
) -> Params:
    """θ₀ + γ (Σ_i w_i ‖Δ_i‖) m / ‖m‖ per leaf, m = Σ_i w_i Δ_i / ‖Δ_i‖, Σ_i w_i = 1.

    mergekit's method continues from m along the mean of the tangent vectors at m; that mean is 0, for the weights are
    the same. Norms count as 1e-8 more than they are, as there. One expert is itself. Where the directions cancel out,
    ‖m‖ up to 1e-6 Σ_i |w_i|, as for a scalar that half of the experts raise, a leaf gets Σ_i w_i Δ_i.
    Without a base it is `karcher` with ``max_iter`` 0.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; mergekit has none, which is 1.
        weights: {name: w} or a list of them in the experts' order, finite; a w may be {glob: number} by leaf; none:
            equal.
        normalize: False takes the w_i as they are, whatever their sum; none: 1.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: mergekit 0.1.5, merge_methods/multislerp.py.
    """
    return merged(MultiSlerp, **locals())


def shares_of(products: list[list[float]], weights: Sequence[float]) -> list[float]:
    """How much of each task vector goes into a leaf, from the inner products of `gram`."""
    norms = [products[i][i] ** 0.5 for i in range(len(products))]
    if len(norms) == 1 or not any(norms):
        return [1.0] * len(norms)
    # without _EPS, which gives opposite vectors of two norms a direction
    exact = [weight / norm if norm else 0.0 for weight, norm in zip(weights, norms, strict=True)]
    live = plain_sum(abs(weight) for weight, norm in zip(weights, norms, strict=True) if norm)
    if _size(exact, products) <= _CANCELS * live:  # not for NaN: who reads the values lists them
        return list(weights)
    parts = [weight / (norm + _EPS) for weight, norm in zip(weights, norms, strict=True)]
    scale = plain_sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / _size(parts, products)
    return [scale * part for part in parts]


def _size(parts: Sequence[float], products: list[list[float]]) -> float:
    """The norm of Σ_i parts_i Δ_i."""
    square = plain_sum(
        x * p * y for x, row in zip(parts, products, strict=True) for p, y in zip(row, parts, strict=True)
    )
    return max(square, 0.0) ** 0.5


@dataclass(frozen=True)
class MultiSlerp(Merger):
    """Multi-SLERP: for every parameter the mean direction of all task vectors, at their mean norm."""

    name = "multislerp"
    grams = True
    coef: float = 1.0
    """gamma; 1 is mergekit's."""
    weights: tuple[float, ...] = ()
    """One number for each expert, in their order; none: equal."""
    normalize: bool = field(default=True, kw_only=True)
    """Divide the weights by their sum."""

    def problems(self, experts: Experts) -> list[str]:
        return equal_or_given(experts, self.weights, normalize=self.normalize)[0]

    def rule(self, leaves: Mapped) -> Rule:
        _, given = equal_or_given(dict.fromkeys(leaves.experts), self.weights, normalize=self.normalize)

        def shares(path: str) -> list[float]:
            weights = [coef_of(path, own) for own in given.values()]
            total = divisor_of(weights, normalize=self.normalize)
            return shares_of(leaves.gram(path), [weight / total for weight in weights])

        def fuse(path: str) -> Fuse:
            found = shares(path)
            return lambda piece: weighted(piece.deltas, found)

        return Rule(fuse, loop=lambda path: looped.weighted_sum(shares(path)))


multislerp_vector = vector_function(MultiSlerp)
