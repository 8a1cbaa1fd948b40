"""MetaGPT: task arithmetic with a coefficient for each expert, from the norms of the task vectors alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import fsum
from typing import ClassVar

from ..types import Params
from .parts import looped
from .parts.arithmetic import weighted
from .parts.inputs import Experts
from .parts.merger import UNKNOWN, Mapped, Merger, Rule, merged, vector_function


def metagpt(base: Params, experts: Experts, *, coef: float = 1.0) -> Params:
    """θ₀ + γ Σ_i λ_i Δ_i, λ_i = ‖Δ_i‖² / Σ_k ‖Δ_k‖², the norms over all floating-point leaves.

    The λ minimize a bound on the mean loss difference between the merged model and each expert on its own task, if
    models are linear in their weights around θ₀ and task vectors are orthogonal. Their sum is 1: with task vectors of
    one norm, this is the experts' mean. Where all task vectors are 0 they are equal.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; the authors have none, which is 1.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Zhou, Song, Wang and Chen, "MetaGPT: merging large language models using model exclusive task arithmetic",
        2024.
    """
    return merged(MetaGpt, **locals())


def shares_of(squares: Sequence[float]) -> list[float]:
    """λ of every expert, from the squared norms of the task vectors."""
    total = fsum(squares)
    return [square / total for square in squares] if total else [1 / len(squares)] * len(squares)


@dataclass(frozen=True)
class MetaGpt(Merger):
    """MetaGPT: base + the experts' changes, each times its share of the sum of their squared norms."""

    name = "metagpt"
    grams = True
    semantics: ClassVar = {"mergekit": UNKNOWN}
    coef: float = 1.0
    """gamma; 1 is the authors'."""

    def rule(self, leaves: Mapped) -> Rule:
        products = cache(lambda: [leaves.gram(path, diagonal=True) for path in leaves.coefs])

        def square(place: int) -> float:
            return fsum(own[place][place] for own in products())

        shares = shares_of(
            [leaves.once(f"square of {name}", partial(square, i)) for i, name in enumerate(leaves.experts)]
        )
        return Rule(lambda _: lambda piece: weighted(piece.deltas, shares), loop=lambda _: looped.weighted_sum(shares))


metagpt_vector = vector_function(MetaGpt)
