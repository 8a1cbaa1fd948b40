"""Task arithmetic: the sum of the task vectors."""

from dataclasses import dataclass
from functools import partial

from ..types import Params
from .common import Mapped, Merger, Rule, add, apply_vector, merge_pieces
from .inputs import Experts, Leaves, check, coef_problems


def task_arithmetic(base: Params, experts: Experts, *, coef: float) -> Params:
    """θ₀ + γ Σ_i (θ_i − θ₀), in float32 (float64 where a leaf is float64), rounded once to base's dtypes.

    Args:
        experts: {name: tree} or a list of trees.
        coef: γ, finite.

    Returns:
        a new tree of base's structure; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Ilharco et al., "Editing models with task arithmetic", 2023.
    """
    check(base, experts, coef_problems(coef))
    return apply_vector(base, task_arithmetic_vector(base, experts), coef=coef)


def task_arithmetic_vector(base: Params, experts: Experts) -> Leaves:
    """Σ_i Δ_i, summed in the experts' order: flat, floating-point leaves only, for `apply_vector`."""
    return merge_pieces(*check(base, experts), lambda piece: add(piece.deltas))


@dataclass(frozen=True)
class TaskArithmetic(Merger):
    """TA: base + coef * sum of the task vectors."""

    name = "ta"
    function = staticmethod(task_arithmetic_vector)
    coef: float | None = None
    """gamma. The preset leaves it open: --search chooses it on dev."""

    def rule(self, leaves: Mapped) -> Rule:
        return Rule(total=partial(add, into_first=True))
