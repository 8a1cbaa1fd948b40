"""Weighted average: the experts' mean with a weight for each."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import all_at_once, flag_problems
from ..types import Params
from .parts import looped
from .parts.arithmetic import divided, weighted
from .parts.coefs import Rules, coef_of
from .parts.inputs import Experts, check_alone, type_problems
from .parts.merger import Mapped, Merger, Rule, merge_alone
from .parts.per_expert import names_of

_OTHERS = "give other weights, or normalize False where a merger has it"


def weighted_average(
    experts: Experts, *, weights: Mapping[str, Rules] | Sequence[Rules], normalize: bool = True
) -> Params:
    """Σ_i w_i θ_i / Σ_i w_i, summed in the experts' order in float32 (float64 where a leaf is float64), rounded once.

    Args:
        experts: {name: tree} or a list of trees, of the same parameter names, shapes, dtypes and non-floating values.
        weights: {name: w} or a list of them in the experts' order, finite; a w may be {glob: number} by leaf.
        normalize: False leaves out the division.

    Returns:
        a new tree of the first expert's structure.

    Raises:
        ValueError: lists every weight and every leaf that does not fit, and for weights whose sum is 0.

    Source: Wortsman et al., "Model soups", 2022; `weight_average` is the case of equal weights.
    """
    problems, given = given_weights(experts, weights, normalize)
    problems += flag_problems(normalize=normalize)
    flat = all_at_once(problems, lambda: check_alone(experts, batches=True))

    shares, own = list(given.values()), WeightedAverage(weights=given, normalize=normalize)  # type: ignore[arg-type]
    return merge_alone(own, experts, flat, lambda path, values: mean_of(values, _of(path, shares), normalize=normalize))


def _of(path: str, weights: Iterable[Rules]) -> list[float]:
    return [coef_of(path, rules) for rules in weights]


def mean_of(values: Iterable[Tensor], weights: Sequence[float], *, normalize: bool) -> Tensor:
    """Σ_i w_i v_i / Σ_i w_i, the weights in the values' order. Raises: as `divisor_of`."""
    return divided(weighted(values, weights), divisor_of(weights, normalize=normalize))


def divisor_of(weights: Sequence[float], *, normalize: bool) -> float:
    """The sum of weights, or 1, by which a weighted sum is divided. Raises: ValueError for a sum of 0."""
    if normalize and no_sum(weights):
        raise ValueError(f"the sum of weights {list(weights)} of a parameter is 0: {_OTHERS}")
    return math.fsum(weights) if normalize else 1.0


def no_sum(weights: Sequence[float]) -> bool:
    """Whether the sum of weights is 0 up to rounding."""
    return abs(math.fsum(weights)) <= 1e-12 * math.fsum(map(abs, weights))


def given_weights(
    experts: Experts, weights: Mapping[str, Rules] | Sequence[Rules], normalize: bool
) -> tuple[list[str], dict[str, Rules]]:
    """Problems, and the weight of every expert in the experts' order."""
    if not isinstance(experts, (Mapping, list, tuple)):
        return [], {}  # `check_alone` says it
    names = names_of(experts)
    if not isinstance(weights, (Mapping, Sequence)) and not hasattr(weights, "tolist"):  # of tensors and arrays
        return [f"weights is {weights!r}, must be a mapping {{expert's name: number}} or a list of numbers"], {}
    own: Iterable[tuple[object, Rules]] = weights.items() if isinstance(weights, Mapping) else enumerate(weights)
    wrong = [
        text
        for name, rules in own
        for w in (rules.values() if isinstance(rules, Mapping) else [rules])
        for text in type_problems(**{f"the weight of {str(name)!r}": w})
    ]
    if wrong:
        return wrong, {}
    if isinstance(weights, Mapping):
        table = {str(name): _number(weight) for name, weight in weights.items()}
        problems = [f"weights lacks expert {name!r}: 0 leaves it out" for name in names if name not in table]
        problems += [
            f"weights names {name!r}, which is not an expert: remove it" for name in table if name not in names
        ]
    else:
        table = {name: _number(weight) for name, weight in zip(names, weights, strict=False)}
        problems = []
        if len(weights) != len(names):
            problems.append(f"weights holds {len(weights)} numbers for {len(names)} experts: give one for each")
    problems += [
        f"the weight of {name!r} is {w}, must be finite"
        for name, rules in table.items()
        for w in (rules.values() if isinstance(rules, Mapping) else [rules])
        if not math.isfinite(w)
    ]
    numbers = [w for w in table.values() if not isinstance(w, Mapping)]
    if not problems and names and normalize and len(numbers) == len(table):
        problems += type_problems(**{"the sum of weights": math.fsum(numbers)})
        if no_sum(numbers):
            problems.append(f"the sum of weights is 0: {_OTHERS}")
    return problems, {name: table[name] for name in names if name in table}


def equal_or_given(
    experts: Experts, weights: Mapping[str, Rules] | Sequence[Rules], *, normalize: bool = True
) -> tuple[list[str], dict[str, Rules]]:
    """`given_weights`, with equal ones of sum 1 for none. Args: normalize: they will be divided by their sum."""
    none = hasattr(weights, "__len__") and not len(weights) and isinstance(experts, (Mapping, list, tuple))
    return given_weights(experts, [1.0] * len(experts) if none else weights, normalize)


def _number(weight: Rules) -> Rules:
    return weight if isinstance(weight, Mapping) else float(weight)


@dataclass(frozen=True)
class WeightedAverage(Merger):
    """Weighted average: the mean of the experts, each with its own weight."""

    name = "weighted_average"
    function = staticmethod(weighted_average)
    based = False
    weights: tuple[float, ...] = ()
    """One number for each expert, in their order; or give them as FOLDER@NUMBER."""
    normalize: bool = True
    """True: divide weights by their sum; False: take weights as they are, not divided by their sum."""

    def rule(self, leaves: Mapped) -> Rule:
        given: Any = self.weights  # a function's may be by name
        shares = [given[name] for name in leaves.experts] if isinstance(given, Mapping) else given

        def loop(path: str) -> looped.Loop:
            weights = _of(path, shares)
            return partial(looped.averaged, weights=weights, divisor=divisor_of(weights, normalize=self.normalize))

        if any(isinstance(weight, Mapping) for weight in shares):  # of a recipe
            return Rule(
                lambda path: lambda piece: mean_of(piece.deltas, _of(path, shares), normalize=self.normalize), loop=loop
            )
        return Rule(total=lambda parts: mean_of(parts, shares, normalize=self.normalize), loop=loop)
