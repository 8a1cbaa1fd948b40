"""Model Stock: from base towards the experts' mean, by a ratio computed from the angle between the experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ..types import Params
from .parts import arithmetic, looped
from .parts.arithmetic import add, cosine, gram_memory, halved, largest, weighted
from .parts.chunks import Fuse, row_length
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Merger, Rule, merged, vector_function

Along: TypeAlias = Literal["leaf", "last"]
_LEAST = 1e-6  # of products of norms, and of the denominator of t, without ``clamp``


def model_stock(
    base: Params, experts: Experts, *, coef: float = 1.0, clamp: bool = True, along: Along = "leaf"
) -> Params:
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
        along: "leaf" takes one t for a whole leaf; "last" one for each row, the fibres of the last axis, mergekit's
            ``filter_wise``.

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
    return count * cos / below if abs(below) >= _LEAST else 0.0


def _cosine(products: list[list[float]], left: int, right: int, *, clamp: bool) -> float:
    if clamp:
        return cosine(products, left, right)
    size = max((products[left][left] * products[right][right]) ** 0.5, _LEAST)
    return min(max(products[left][right] / size, -1.0), 1.0)


def ratios_of(rows: Sequence[Tensor], *, clamp: bool) -> Tensor:
    """`ratio_of` of every row, float64. Args: rows: (n, length) of every expert."""
    count, squares = len(rows), [halved(own.double().square_()) for own in rows]
    found = []
    for i, j in combinations(range(count), 2):
        size = (squares[i] * squares[j]).sqrt_()
        product = halved(rows[i].double().mul_(rows[j]))
        found.append((product / size).where(size > 0, 0) if clamp else (product / size.clamp(min=_LEAST)).clamp_(-1, 1))
    cos = add(torch.stack(found).sort(0).values) / len(found)  # sorted: the experts' order plays no part
    cos = cos.clamp(min=0) if clamp else cos
    below = 1 + (count - 1) * cos
    return (count * cos / below).where(below.abs() >= _LEAST, 0)


def stocked(rows: Sequence[Tensor], *, clamp: bool) -> Tensor:
    """t · mean_i Δ_i, flat, with a t for each row. Args: rows: (n, length) of every expert."""
    share = (ratios_of(rows, clamp=clamp) / len(rows)).to(rows[0].dtype)[:, None]
    return add(own * share for own in rows).view(-1)


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
    along: Along = field(default="leaf", kw_only=True)
    """One ratio for a whole parameter (leaf), or one for each row (last)."""

    def problems(self, experts: Experts) -> list[str]:
        problems = count_problems(experts, "model_stock", least=2)
        return problems + ([] if self.along in ("leaf", "last") else [f"along is {self.along!r}, must be leaf or last"])

    def rule(self, leaves: Mapped) -> Rule:
        def shares(path: str) -> list[float]:
            products = leaves.gram(path)
            return [ratio_of(products, clamp=self.clamp) / len(products)] * len(products)

        def fuse(path: str) -> Fuse:
            parts = shares(path)
            return lambda piece: weighted(piece.deltas, parts)

        def by_row(path: str) -> Fuse:
            length = row_length(leaves.shape(path))
            return lambda piece: stocked([delta.view(-1, length) for delta in piece.deltas], clamp=self.clamp)

        if self.along == "last":
            return Rule(by_row, rows=True)
        return Rule(fuse, loop=lambda path: looped.weighted_sum(shares(path)))

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        if self.along == "leaf":
            return gram_memory(leaves, experts)
        longest = max((row_length(leaf.shape) for leaf in leaves.values()), default=0)
        return 64 * max(min(largest(leaves), arithmetic.BLOCK), longest * experts)


model_stock_vector = vector_function(ModelStock)
