"""WiSE-FT: a point on the line from the base to one expert."""

from dataclasses import dataclass

from ..types import Params
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Merger, Rule, merged, vector_function


def wise_ft(base: Params, experts: Experts, *, coef: float) -> Params:
    """(1 − γ) θ₀ + γ θ₁, computed as θ₀ + γ (θ₁ − θ₀), rounded once to base's dtypes.

    Args:
        experts: {name: tree} or a list, of one tree.
        coef: γ, finite; 0 gives base.

    Returns: a new tree of base's structure; non-floating leaves are base's.
    Raises: ValueError that lists every problem of values, structure and shapes, and for more than one expert.
    Source: Wortsman et al., "Robust fine-tuning of zero-shot models", 2022.
    """
    return merged(WiseFt, **locals())


@dataclass(frozen=True)
class WiseFt(Merger):
    """WiSE-FT: base + coef * the task vector of one expert."""

    name = "wise_ft"
    same_on_gpu = True
    coef: float | None = None
    """gamma, 0 gives the base, 1 the expert. Presets have none: set it, or use --search."""

    def problems(self, experts: Experts) -> list[str]:
        return count_problems(experts, "wise_ft", least=1, most=1)

    def rule(self, leaves: Mapped) -> Rule:
        return Rule(total=next)


wise_ft_vector = vector_function(WiseFt)
