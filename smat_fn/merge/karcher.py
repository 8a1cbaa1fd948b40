"""Karcher mean: the point on the sphere whose squared arcs to all experts are smallest, at their mean norm."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from ..errors import all_at_once, count_problem
from ..types import Params
from .parts import looped
from .parts.arithmetic import gram, plain_sum, weighted
from .parts.chunks import Fuse
from .parts.coefs import Rules, coef_of
from .parts.inputs import Experts, check_alone, type_problems
from .parts.merger import Mapped, Merger, Rule, merge_alone
from .weighted_average import divisor_of, equal_or_given, no_sum

Products = list[list[float]]
_OPPOSITE = 1e-7  # a cosine of -1 that was rounded to the next number is 1.5e-8 from pi


def karcher(
    experts: Experts,
    *,
    max_iter: int = 10,
    tol: float = 1e-5,
    weights: Mapping[str, Rules] | Sequence[Rules] = (),
) -> Params:
    """Σ_i w_i ‖θ_i‖ · u of every leaf, u the Karcher mean of the θ_i / ‖θ_i‖ on the unit sphere, Σ_i w_i = 1.

    From u = Σ_i w_i u_i, normalised, at most ``max_iter`` steps ``u ← exp_u(Σ_i w_i log_u(u_i))`` until one is shorter
    than ``tol``; with ``max_iter`` 0 it is `multislerp` without a base. All of it happens in the plane that the experts
    span: their inner products, float64, decide how much of each goes into the leaf. Experts of a norm up to ``tol``
    have no direction and count in the mean norm alone; where all are, the leaf is their mean (mergekit's is 0). One
    opposite to u pulls nowhere.

    Args:
        experts: {name: tree} or a list of trees of the same parameter names, shapes, dtypes and non-floating values.
        max_iter: at least 0.
        tol: above 0.
        weights: {name: w} or a list of them in the experts' order, finite; they are divided by their sum; a w may be
            {glob: number} by leaf; none: equal.

    Returns:
        A new tree of the first expert's structure, rounded once.

    Raises:
        ValueError: lists every problem of options, structure and shapes, and for weights whose sum is 0.

    Source: mergekit 0.1.5, merge_methods/karcher.py, whose defaults are these, without weights; Karcher, "Riemannian
        center of mass and mollifier smoothing", 1977.
    """
    problems, given = equal_or_given(experts, weights)
    flat = all_at_once(_problems(max_iter, tol) + problems, lambda: check_alone(experts))

    def mean(path: str, values: Iterator[Tensor]) -> Tensor:
        every = list(values)
        return weighted(every, shares_of(gram(every), max_iter, tol, [coef_of(path, own) for own in given.values()]))

    own = Karcher(max_iter, tol, weights=given)  # type: ignore[arg-type]
    return merge_alone(own, experts, flat, mean)


def shares_of(products: Products, max_iter: int, tol: float, weights: Sequence[float]) -> list[float]:
    """How much of each expert goes into a leaf, from the inner products of `gram`. Raises: as `divisor_of`."""
    norms = [products[i][i] ** 0.5 for i in range(len(products))]
    live = [i for i, norm in enumerate(norms) if norm > tol]
    total = divisor_of(weights, normalize=True)
    if len(norms) == 1 or not live:
        return [weight / total for weight in weights]
    own = [weights[i] for i in live]
    whole = total if no_sum(own) else math.fsum(own)
    cosines = [[products[i][j] / norms[i] / norms[j] for j in live] for i in live]

    def norm(part: Sequence[float]) -> float:
        rows = (plain_sum(c * y for c, y in zip(row, part, strict=True)) for row in cosines)
        return max(plain_sum(x * row for x, row in zip(part, rows, strict=True)), 0.0) ** 0.5

    start = [weight / whole for weight in own]
    size = norm(start)
    if size < tol and not max_iter:  # where no step follows, the first expert's direction is as good as any
        return [weight / total for weight in weights]
    point = [part / size for part in start] if size >= tol else [1.0] + [0.0] * (len(live) - 1)
    for _ in range(max_iter):
        step = [0.0] * len(live)
        for i, (row, weight) in enumerate(zip(cosines, own, strict=True)):
            cos = min(max(plain_sum(c * x for c, x in zip(row, point, strict=True)), -1.0), 1.0)
            angle = math.acos(cos)
            if angle < tol or math.pi - angle < max(tol, _OPPOSITE):
                continue
            pull = angle / math.sin(angle) * weight / whole
            step = [s - pull * cos * x for s, x in zip(step, point, strict=True)]
            step[i] += pull
        length = norm(step)
        if length < tol:
            break
        point = [math.cos(length) * x + math.sin(length) * s / length for x, s in zip(point, step, strict=True)]
        size = norm(point)
        point = [x / size for x in point]
    scale = math.fsum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / total
    shares = [0.0] * len(norms)
    for i, x in zip(live, point, strict=True):
        shares[i] = scale * x / norms[i]
    return shares


def _problems(max_iter: int, tol: float) -> list[str]:
    problems = count_problem("max_iter", max_iter, 0)
    if wrong := type_problems(tol=tol):
        return problems + wrong
    return problems + ([] if 0 < tol < math.inf else [f"tol is {tol}, must be above 0 and finite"])


@dataclass(frozen=True)
class Karcher(Merger):
    """Karcher mean: for every parameter the point on the sphere nearest to all experts, at their mean norm."""

    name = "karcher"
    grams = uneven = True
    function = staticmethod(karcher)
    based = False
    max_iter: int = 10
    """Maximum number of steps towards the mean."""
    tol: float = 1e-5
    """Stop when a step is shorter than this, in radians."""
    weights: tuple[float, ...] = field(default=(), kw_only=True)
    """One number for each expert, in their order; none: equal."""

    def rule(self, leaves: Mapped) -> Rule:
        _, given = equal_or_given(dict.fromkeys(leaves.experts), self.weights)

        def shares(path: str) -> list[float]:
            weights = [coef_of(path, given[name]) for name in leaves.names(path)]
            return shares_of(leaves.gram(path), self.max_iter, self.tol, weights)

        def fuse(path: str) -> Fuse:
            found = shares(path)
            return lambda piece: weighted(piece.deltas, found)

        return Rule(fuse, loop=lambda path: partial(looped.averaged, weights=shares(path)))
