"""Weight averaging: the mean of the experts."""

from dataclasses import dataclass
from functools import partial

from ..types import Params
from .parts import looped
from .parts.arithmetic import add, divided
from .parts.inputs import Experts, check_alone
from .parts.merger import Mapped, Merger, Rule, merge_alone


def weight_average(experts: Experts) -> Params:
    """(θ₁ + … + θ_N) / N, summed in the experts' order in float32 (float64 where a leaf is float64), rounded once.

    Args:
        experts: {name: tree} or a list of trees, of the same parameter names, shapes, dtypes and non-floating values.

    Returns:
        a new tree of the first expert's structure.

    Raises:
        ValueError: lists every leaf that does not agree.

    Source: Wortsman et al., "Model soups", 2022.
    """
    flat = check_alone(experts, batches=True)
    return merge_alone(WeightAverage(), experts, flat, lambda _, values: divided(add(values), len(experts)))


@dataclass(frozen=True)
class WeightAverage(Merger):
    """WA: the mean of the experts."""

    name = "wa"
    same_on_gpu = True
    function = staticmethod(weight_average)
    based = False

    def rule(self, leaves: Mapped) -> Rule:
        count = len(leaves.experts)
        loop = partial(looped.averaged, weights=[1.0] * count, divisor=count)
        return Rule(total=lambda parts: divided(add(parts, into_first=True), count), loop=lambda _: loop)
