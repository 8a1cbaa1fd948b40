"""NuSLERP: two task vectors, interpolated along the arc between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..types import Params
from .parts import looped
from .parts.arithmetic import largest, weighted
from .parts.chunks import Fuse
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Merger, Rule, merged, vector_function

Along: TypeAlias = Literal["leaf", "first", "last"]
_PARALLEL = 1e-16  # sin² ω up to which two vectors lie on a line
_OPPOSITE = 1e-12  # the same of opposite ones, whose factors 1 / sin ω would multiply the rounding of cos ω


def nuslerp(base: Params, experts: Experts, *, coef: float = 1.0, t: float = 0.5, along: Along = "leaf") -> Params:
    """θ₀ + γ (sin((1 − t) ω) Δ₁ + sin(t ω) Δ₂) / sin ω, ω the angle between the two, of a leaf or of its fibres.

    Where they are parallel, or opposite with sin ω up to 1e-6: (1 − t) Δ₁ + t Δ₂. ω is computed in float64; norms
    count as 1e-7 at least.

    Args:
        base: tree that the experts were trained from; without one it is `slerp`.
        experts: {name: tree} or a list, of two trees.
        coef: γ, finite; mergekit has none, which is 1.
        t: share of the second, finite; of mergekit's weights w₁, w₂ it is w₂ / (w₁ + w₂).
        along: "leaf" takes the angle of the whole leaf; "last" one of each row, the fibres of the last axis; "first"
            one of each column, those of the first axis, which mergekit calls ``nuslerp_row_wise``.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes, and for another number of experts.

    Source: mergekit 0.1.5, merge_methods/nuslerp.py.
    """
    return merged(NuSlerp, **locals())


def shares_of(products: list[list[float]], t: float) -> tuple[float, float]:
    """How much of both goes into a leaf, from the inner products of `gram`."""
    sizes = [max(products[i][i] ** 0.5, 1e-7) for i in (0, 1)]
    cos = min(max(products[0][1] / sizes[0] / sizes[1], -1.0), 1.0)
    if 1 - cos * cos <= (_OPPOSITE if cos < 0 else _PARALLEL):
        return 1 - t, t
    angle = math.acos(cos)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


def between(one: Tensor, two: Tensor, *, t: float, along: Along) -> Tensor:
    """`shares_of` for every fibre of a leaf."""
    axis = 0 if along == "first" else -1
    one, two = one.contiguous(), two.contiguous()
    sizes = [leaf.double().norm(dim=axis, keepdim=True).clamp(min=1e-7) for leaf in (one, two)]
    cos = ((one.double() * two).sum(axis, keepdim=True) / sizes[0] / sizes[1]).clamp(-1, 1)
    square = 1 - cos.square()
    line = (square <= _PARALLEL) | ((square <= _OPPOSITE) & (cos < 0))
    angle = cos.masked_fill(line, 0).acos()
    near, far = (torch.sin(part * angle) / torch.sin(angle) for part in (1 - t, t))
    near, far = near.masked_fill(line, 1 - t).to(one.dtype), far.masked_fill(line, t).to(one.dtype)
    return one * near + two * far


@dataclass(frozen=True)
class NuSlerp(Merger):
    """NuSLERP: spherical interpolation between the task vectors of two experts."""

    name = "nuslerp"
    grams = True
    coef: float = 1.0
    """gamma; 1 is mergekit's."""
    t: float = 0.5
    """0 gives the first expert, 1 the second."""
    along: Along = "leaf"
    """One angle for a whole parameter (leaf), for each column (first) or for each row (last)."""

    def problems(self, experts: Experts) -> list[str]:
        problems = count_problems(experts, "nuslerp", least=2, most=2)
        problems += [] if math.isfinite(self.t) else [f"t is {self.t}, must be finite"]
        known = self.along in ("leaf", "first", "last")
        return problems + ([] if known else [f"along is {self.along!r}, must be 'leaf', 'first' or 'last'"])

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            if self.along == "leaf":
                shares = shares_of(leaves.gram(path), self.t)
                return lambda piece: weighted(piece.deltas, shares)
            shape = leaves.shape(path)
            return lambda piece: between(
                *(delta.view(shape) for delta in piece.deltas), t=self.t, along=self.along
            ).reshape(-1)

        def loop(path: str) -> looped.Loop:
            return looped.weighted_sum(shares_of(leaves.gram(path), self.t))

        return Rule(fuse, whole=lambda _: self.along != "leaf", loop=loop if self.along == "leaf" else None)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        if self.along == "leaf":
            return super().memory(leaves, experts)
        return 64 * largest(leaves)


nuslerp_vector = vector_function(NuSlerp)
