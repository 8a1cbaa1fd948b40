"""SLERP: two models, interpolated leaf by leaf along the arc between them."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, TypeAlias, get_args

from torch import Tensor

from ..errors import all_at_once, flag_problems
from ..types import Params
from .nuslerp import between, shares_of
from .parts import looped
from .parts.arithmetic import cosine, gram, largest
from .parts.chunks import Fuse
from .parts.inputs import Experts, check_alone, coef_problems, count_problems
from .parts.merger import Mapped, Merger, Rule, merge_alone

_SMALL = 1e-8  # a norm that counts as 1
_PARALLEL = 0.9995  # |cos ω| above which an arc counts as a line

Arc: TypeAlias = Literal["slerp", "leaf", "first", "last"]


def slerp(experts: Experts, *, coef: float, arc: Arc = "slerp", zeros: bool = False) -> Params:
    """sin((1 − γ) ω)/sin ω · θ₁ + sin(γ ω)/sin ω · θ₂, ω the angle between the two leaves; rounded once.

    Where |cos ω| > 0.9995, or a leaf is zero: θ₁ + γ (θ₂ − θ₁). Two fine-tunes of one base are often that close in
    most leaves. ω is computed in float64, the sum in float32 (float64 where a leaf is float64).

    Args:
        experts: {name: tree} or a list, of two trees of the same names, shapes, dtypes and non-floating values.
        coef: γ, finite; 0 gives the first, 1 the second.
        arc: "leaf", "first" or "last" is `nuslerp` without a base, with its ``along``: lines only where leaves, or
            their fibres, are parallel or opposite.
        zeros: a leaf of norm 0 is at a right angle to the other, one of norm up to 1e-8 nearly so, as in mergekit.

    Returns:
        a new tree of the first expert's structure.

    Raises:
        ValueError: lists every leaf that does not agree, and for another number of experts.

    Source: Shoemake, "Animating rotation with quaternion curves", 1985; mergekit 0.1.5, merge_methods/slerp.py and
        nuslerp.py.
    """
    problems = [*coef_problems(coef), *count_problems(experts, "slerp", least=2, most=2)]
    problems += [] if arc in get_args(Arc) else [f"arc is {arc!r}, must be one of {', '.join(get_args(Arc))}"]
    problems += flag_problems(zeros=zeros)
    flat = all_at_once(problems, lambda: check_alone(experts, batches=arc in ("first", "last")))

    def fuse(_: str, values: Iterator[Tensor]) -> Tensor:
        one, two = values
        if arc in ("first", "last"):
            return between(one, two, t=float(coef), along=arc)
        return along_arc(gram([one, two]), float(coef), arc, zeros)(one, two)

    return merge_alone(Slerp(float(coef), arc=arc, zeros=zeros), experts, flat, fuse, float(coef))


def shares_along(products: list[list[float]], coef: float, arc: Arc, zeros: bool) -> tuple[float, float] | None:
    """The factors of two leaves whose inner products are those of `gram`; None where the arc is a line."""
    if arc == "leaf":
        return shares_of(products, coef)
    cos = _unscaled(products) if zeros else cosine(products, 0, 1)
    if abs(cos) > _PARALLEL or not (zeros or (products[0][0] and products[1][1])):
        return None
    angle = math.acos(cos)
    return math.sin((1 - coef) * angle) / math.sin(angle), math.sin(coef * angle) / math.sin(angle)


def along_arc(products: list[list[float]], coef: float, arc: Arc, zeros: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that interpolates coordinates of two leaves whose inner products are those of `gram`."""
    if (shares := shares_along(products, coef, arc, zeros)) is None:
        return lambda left, right: left + (right - left) * coef
    near, far = shares
    return lambda left, right: left * near + right * far


def _unscaled(products: list[list[float]]) -> float:
    """The cosine of an angle, where mergekit does not divide by norms up to 1e-8."""
    sizes = [products[i][i] ** 0.5 for i in range(2)]
    if min(sizes) > _SMALL:
        return cosine(products, 0, 1)
    return products[0][1] / math.prod(size for size in sizes if size > _SMALL)


@dataclass(frozen=True)
class Slerp(Merger):
    """SLERP: spherical interpolation between two experts, parameter by parameter."""

    name = "slerp"
    grams = True
    function = staticmethod(slerp)
    based = False
    semantics: ClassVar = {"mergekit": {"zeros": True}}
    coef: float = 0.5
    """gamma, 0 gives the first expert, 1 the second."""
    arc: Arc = field(default="slerp", kw_only=True)
    """slerp, or NuSLERP without a base with one angle per parameter (leaf), per column (first) or per row (last)."""
    zeros: bool = field(default=False, kw_only=True)
    """Parameters of norm up to 1e-8 are orthogonal to others, as in mergekit; else zeros are interpolated linearly."""

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            coef = leaves.coefs[path]
            if self.arc in ("first", "last"):
                shape = leaves.shape(path)
                return lambda piece: between(
                    *(weights.view(shape) for weights in piece.deltas),
                    t=coef,
                    along=self.arc,  # type: ignore[arg-type]
                ).reshape(-1)
            interpolate = along_arc(leaves.gram(path), coef, self.arc, self.zeros)
            return lambda piece: interpolate(*piece.deltas)

        def loop(path: str) -> looped.Loop:
            coef = leaves.coefs[path]
            shares = shares_along(leaves.gram(path), coef, self.arc, self.zeros)
            return partial(looped.averaged, weights=shares or (1.0, coef), line=shares is None)

        fibres = self.arc in ("first", "last")
        return Rule(fuse, whole=lambda _: fibres, loop=None if fibres else loop)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        least = super().memory(leaves, experts)
        if self.arc not in ("first", "last"):
            return least
        return max(least, 64 * largest(leaves))
