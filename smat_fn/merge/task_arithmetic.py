"""Task arithmetic: the sum of the task vectors."""

from dataclasses import dataclass, field
from functools import partial

from ..types import Aggregate, Params
from .parts import looped
from .parts.arithmetic import add
from .parts.inputs import Experts
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Own, Summed


def task_arithmetic(
    base: Params, experts: Experts, *, coef: float, weights: Numbers | None = None, aggregate: Aggregate = "sum"
) -> Params:
    """θ₀ + γ Σ_i w_i (θ_i − θ₀), in float32 (float64 where a leaf is float64), rounded once to base's dtypes.

    Args:
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        weights: w_i by expert, finite: a number, or {glob: number} by leaf; 1 for those not named.
        aggregate: "mean" divides by Σ_i w_i where that is not 0, as mergekit's normalize.

    Returns:
        a new tree of base's structure; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Ilharco et al., "Editing models with task arithmetic", 2023.
    """
    return merged(TaskArithmetic, **locals())


@dataclass(frozen=True)
class TaskArithmetic(Summed):
    """TA: base + coef * sum of the task vectors."""

    name = "ta"
    same_on_gpu = True
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    aggregate: Aggregate = field(default="sum", kw_only=True)
    """Sum of the weighted changes, or their mean over the weights."""

    def plain(self, leaves: Mapped) -> Rule:
        return Rule(total=partial(add, into_first=True), loop=partial(self.looped, leaves))

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask:
        return looped.ByMagnitude([looped.ALL] * len(own.names))


task_arithmetic_vector = vector_function(TaskArithmetic)
