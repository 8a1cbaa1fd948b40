"""Model Stock: from base towards the experts' mean, by a ratio computed from the angle between the experts."""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from ..types import Params
from .parts import looped
from .parts.arithmetic import cosine, weighted
from .parts.chunks import Fuse
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Merger, Rule, merged, vector_function


def model_stock(base: Params, experts: Experts, *, coef: float = 1.0, clamp: bool = True) -> Params:
    """θ₀ + γ t · mean_i Δ_i, per leaf ``t = N cos ω / (1 + (N − 1) cos ω)``, ω the angle between the Δ_i.

    cos ω is the mean cosine over all pairs, in float64; a pair with a zero Δ_i counts as 0. A mean below 0, which the
    derivation excludes (t would run to −∞), counts as 0 too: the leaf stays base's.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list, of at least two trees.
        coef: γ, finite, 1 in the paper.
        clamp: False takes a mean below 0 as it is, as mergekit does: t is negative down to cos ω = −1/(N − 1), and
            above 1 beyond it. As there, products of norms count as 1e-6 at least, and t is 0 where its denominator
            is within 1e-6 of 0.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes, and for a single expert.

    Source: Jang et al., "Model Stock: all we need is just a few fine-tuned models", 2024; without ``clamp``: mergekit
        0.1.5, merge_methods/model_stock.py.
    """
    return merged(ModelStock, **locals())


def ratio_of(products: list[list[float]], *, clamp: bool) -> float:
    """t of a leaf, from the inner products of its task vectors."""
    count = len(products)
    pairs = [_cosine(products, i, j, clamp=clamp) for i, j in combinations(range(count), 2)]
    cos = math.fsum(pairs) / len(pairs)  # fsum: the experts' order plays no part
    cos = max(cos, 0.0) if clamp else cos
    below = 1 + (count - 1) * cos
    return count * cos / below if abs(below) >= 1e-6 else 0.0


def _cosine(products: list[list[float]], left: int, right: int, *, clamp: bool) -> float:
    if clamp:
        return cosine(products, left, right)
    size = max((products[left][left] * products[right][right]) ** 0.5, 1e-6)
    return min(max(products[left][right] / size, -1.0), 1.0)


@dataclass(frozen=True)
class ModelStock(Merger):
    """Model Stock: move from base towards the experts' mean, by a ratio computed from the angles between experts."""

    name = "model_stock"
    grams = uneven = True
    semantics: ClassVar = {"mergekit": {"clamp": False}}
    coef: float = 1.0
    """Factor of the step (gamma); the authors take 1."""
    clamp: bool = True
    """True: a negative mean cosine counts as 0, as in the derivation; False: take a negative mean cosine as it is."""

    def problems(self, experts: Experts) -> list[str]:
        return count_problems(experts, "model_stock", least=2)

    def rule(self, leaves: Mapped) -> Rule:
        def shares(path: str) -> list[float]:
            products = leaves.gram(path)
            return [ratio_of(products, clamp=self.clamp) / len(products)] * len(products)

        def fuse(path: str) -> Fuse:
            parts = shares(path)
            return lambda piece: weighted(piece.deltas, parts)

        return Rule(fuse, loop=lambda path: looped.weighted_sum(shares(path)))


model_stock_vector = vector_function(ModelStock)
