"""Multi-SLERP: the weighted mean of the directions of all task vectors, at their mean norm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..types import Params
from .parts import looped
from .parts.arithmetic import plain_sum, weighted
from .parts.chunks import Fuse
from .parts.inputs import Experts, type_problems
from .parts.merger import Mapped, Merger, Rule, merged, vector_function
from .weighted_average import given_weights, no_sum

Weights = Mapping[str, float] | Sequence[float]
_EPS = 1e-8
_CANCELS = 1e-6  # far above sqrt(2^-52), the size that rounding of inner products leaves of 0


def multislerp(
    base: Params, experts: Experts, *, coef: float = 1.0, weights: Weights = (), normalize: bool = True
) -> Params:
    """θ₀ + γ (Σ_i w_i ‖Δ_i‖) m / ‖m‖ per leaf, m = Σ_i w_i Δ_i / ‖Δ_i‖, Σ_i w_i = 1.

    mergekit's method continues from m along the mean of the tangent vectors at m; that mean is 0, for the weights are
    the same. Norms count as 1e-8 more than they are, as there. One expert is itself. Where the directions cancel out,
    ‖m‖ up to 1e-6 Σ_i |w_i|, as for a scalar that half of the experts raise, a leaf gets Σ_i w_i Δ_i.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; mergekit has none, which is 1.
        weights: {name: w} or a list of them in the experts' order, finite; none: equal.
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


def _weights(experts: Experts, weights: Weights, *, normalize: bool) -> tuple[list[str], list[float]]:
    """Problems, and weights, that sum to 1 with ``normalize``."""
    equal = hasattr(weights, "__len__") and not len(weights) and isinstance(experts, (Mapping, list, tuple))
    problems, given = given_weights(experts, [1.0] * len(experts) if equal else weights, False)
    numbers = [weight for weight in given.values() if not isinstance(weight, Mapping)]
    if len(numbers) < len(given):
        problems.append("weights differ by parameter: multislerp takes one number for each expert")
    total = plain_sum(numbers) if normalize else 1.0
    if not problems and numbers and normalize:
        problems += type_problems(**{"the sum of weights": total})
        problems += ["the sum of weights is 0: give other weights"] if no_sum(numbers) else []
    return problems, [weight / total for weight in numbers] if not problems else []


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
        return _weights(experts, self.weights, normalize=self.normalize)[0]

    def rule(self, leaves: Mapped) -> Rule:
        _, weights = _weights(dict.fromkeys(leaves.experts), self.weights, normalize=self.normalize)

        def fuse(path: str) -> Fuse:
            shares = shares_of(leaves.gram(path), weights)
            return lambda piece: weighted(piece.deltas, shares)

        return Rule(fuse, loop=lambda path: looped.weighted_sum(shares_of(leaves.gram(path), weights)))


multislerp_vector = vector_function(MultiSlerp)
