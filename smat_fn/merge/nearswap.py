"""NearSwap: the base moves towards one expert, each coordinate by at most t."""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import ClassVar

from ..types import Params
from .parts import looped
from .parts.chunks import Fuse
from .parts.coefs import Rules, coef_of
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Merger, Rule, merged, named, vector_function


def nearswap(base: Params, experts: Experts, *, t: Rules, coef: float = 1.0) -> Params:
    """θ₀ + γ clamp(θ₁ − θ₀, −t, t) in every coordinate: what differs by at most t is the expert's.

    Args:
        base: the tree that is changed a little.
        experts: {name: tree} or a list, of one tree.
        t: above 0, in units of the weights, or {glob: t} by leaf; 0.0001 in the source.
        coef: γ, finite; 1 in the source.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes, and for more than one expert.

    Source: QuartetAnemoi-70B-t0.0001 by alchemonaut, 2024; mergekit, merge_methods/nearswap.py, whose weights
        t / |θ₁ − θ₀|, at most 1, are the same but for t below 1e-6 and infinite changes.
    """
    return merged(NearSwap, **locals())


@dataclass(frozen=True)
class NearSwap(Merger):
    """NearSwap: the base, moved towards one expert by at most t in each coordinate."""

    name = "nearswap"
    by_leaf: ClassVar = ("t",)
    t: float
    """Largest change of a weight, such as 0.0001."""
    coef: float = 1.0
    """Factor of the merged change (gamma); the authors take 1."""

    def problems(self, experts: Experts) -> list[str]:
        wrong = [
            f"{name} is {t}, must be finite and above 0: the largest change"
            for name, t in named("t", self.t).items()
            if not 0 < t < inf
        ]
        return wrong + count_problems(experts, "nearswap", least=1, most=1)

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            t = coef_of(path, self.t)
            return lambda piece: piece.deltas[0].clamp(-t, t)

        return Rule(fuse, loop=lambda path: partial(looped.combined, kind="NEARSWAP", one=coef_of(path, self.t)))


nearswap_vector = vector_function(NearSwap)
