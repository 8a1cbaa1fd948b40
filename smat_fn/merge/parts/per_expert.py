"""Weights and densities of single experts: task vectors that are sparsified and weighted one by one, then combined."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .arithmetic import add, divided, elected, halved, largest, zeroed
from .chunks import BYTES_PER_COORDINATE, Fuse, Piece
from .coefs import Rules, coef_of
from .inputs import Experts, type_problems
from .merger import Mapped, Merger, Rule

Numbers: TypeAlias = Mapping[str, Rules]  # by expert: a number, or {glob: number} as in `coefs.coef_of`

NONE: Numbers = MappingProxyType({})
_SMALL = 1e-7  # an L1 norm below it is not divided by


class Part(NamedTuple):
    """Coordinates of one expert's leaf."""

    place: int  # of the expert
    name: str
    path: str
    shape: torch.Size  # of the leaf
    start: int
    delta: Tensor  # flat, in compute dtype
    fields: Tensor | None
    density: float | None  # None: the merger's own


# a part with zeros for what goes; divided by keep probabilities, or, with True, as it is
Sparsify: TypeAlias = Callable[[Part, bool], Tensor]


def combined(vectors: Sequence[Tensor], weights: Sequence[float], *, elect: bool, mean: bool) -> Tensor:
    """The sum of weighted vectors, or of those entries that agree with its sign; ``mean``: over their weights."""
    if not elect:
        divisor = math.fsum(weights)
        total = add(vectors)
        return divided(total, divisor) if mean and abs(divisor) >= 1e-8 else total
    sign = elected(vectors)
    total, share = torch.zeros_like(sign), torch.zeros_like(sign)
    for vector, weight in zip(vectors, weights, strict=True):
        agrees = vector.sign() == sign
        total += zeroed(vector, agrees)
        share += agrees.to(share.dtype) * weight
    return total / share.where(share != 0, 1) if mean else total


def number(numbers: Numbers, name: str, path: str, default: Any = None) -> Any:
    """An expert's number for a leaf."""
    return coef_of(path, numbers[name]) if name in numbers else default


def names_of(experts: Experts) -> list[str]:
    """The names that `inputs.check` gives experts."""
    if isinstance(experts, (Mapping, list, tuple)):
        return [str(name) for name in (experts if isinstance(experts, Mapping) else range(len(experts)))]
    return []


def number_problems(experts: Experts, weights: Numbers = NONE, **given: Numbers) -> list[str]:
    """Errors for numbers of experts that are none, and for numbers out of their range."""
    names, problems = names_of(experts), []
    for label, numbers in {"weights": weights, **given}.items():
        if not isinstance(numbers, Mapping):
            problems.append(f"{label} is {numbers!r}, must be a mapping {{expert's name: number}}")
            continue
        for name, rules in numbers.items():
            if name not in names:
                known = ", ".join(map(repr, names))
                problems.append(f"{label} names {name!r}, which is not an expert: they are {known}")
            what = f"the weight of {name!r}" if label == "weights" else f"{label} of {name!r}"
            for value in rules.values() if isinstance(rules, Mapping) else [rules]:
                if wrong := type_problems(**{what: value}):
                    problems += wrong
                elif label == "weights" and not math.isfinite(value):
                    problems.append(f"{what} is {value}, must be finite")
                elif label != "weights" and not 0 <= value <= 1:
                    problems.append(f"{what} is {value}, must be in [0, 1]")
    return list(dict.fromkeys(problems))


def aggregate_problems(aggregate: str) -> list[str]:
    """Errors for a value that is neither "sum" nor "mean"."""
    return [] if aggregate in ("sum", "mean") else [f"aggregate is {aggregate!r}, must be 'sum' or 'mean'"]


@dataclass(frozen=True, kw_only=True)
class Weighted(Merger):
    """A merger whose experts may have weights; without weights results are bit-identical to those of the plain rule.

    With any of its keyword-only options it is Σ_i w_i δ̂_i, δ̂_i the sparsified task vectors: with ``elect`` of what
    agrees in sign with Σ_i w_i δ̂_i (+ where it is 0) alone; of aggregate "mean" divided by the sum of the weights that
    take part, where that is not 0. With ``rescale`` δ̂_i = m ⊙ Δ_i · ‖Δ_i‖₁ / ‖m ⊙ Δ_i‖₁ in every leaf.

    Source: mergekit 0.1.5, merge_methods/generalized_task_arithmetic.py and sparsify.py.
    """

    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weight of experts by name, negative to subtract one; 1 for those not named."""

    densities, elect, rescale = NONE, False, False
    whole, rows = False, False  # whether `sparsify` needs whole leaves, or whole rows

    def __post_init__(self) -> None:
        for option in fields(self):  # None, the functions' default, is no number for any expert
            if option.default_factory is dict and getattr(self, option.name) is None:
                object.__setattr__(self, option.name, {})

    def sparsify(self, leaves: Mapped) -> Sparsify | None:
        """The function that makes a task vector sparse; None: it stays dense."""
        return None

    def plain(self, leaves: Mapped) -> Rule:
        """The rule without options by expert."""
        raise NotImplementedError

    def problems(self, experts: Experts) -> list[str]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.default_factory is dict}
        return [*number_problems(experts, **own), *aggregate_problems(vars(self)["aggregate"])]

    def special(self) -> bool:
        """Whether anything differs from the plain merger."""
        return any(getattr(self, name) != value for name, value in self._plain_options().items())

    def rule(self, leaves: Mapped) -> Rule:
        if not self.special():
            return self.plain(leaves)
        sparsify, names, whole = self.sparsify(leaves), list(leaves.experts), self.whole or self.rescale
        return Rule(
            lambda path: self._fuse(sparsify, names, path, leaves.shape(path)),
            rows=self.rows and not whole,
            whole=(lambda _: True) if whole else None,
        )

    def _fuse(self, sparsify: Sparsify | None, names: Sequence[str], path: str, shape: torch.Size) -> Fuse:
        """The function that merges a chunk of a leaf."""
        weights = [number(self.weights, name, path, 1.0) for name in names]
        densities = [number(self.densities, name, path) for name in names]
        mean = vars(self)["aggregate"] == "mean"

        def fuse(piece: Piece) -> Tensor:
            vectors = []
            for i, (name, delta, weight) in enumerate(zip(names, piece.deltas, weights, strict=True)):
                drawn = piece.fields[i] if piece.fields else None
                part = Part(i, name, path, shape, piece.start, delta, drawn, densities[i])
                vectors.append((delta if sparsify is None else self._sparse(sparsify, part)) * weight)
            return combined(vectors, weights, elect=self.elect, mean=mean)

        return fuse

    def _sparse(self, sparsify: Sparsify, part: Part) -> Tensor:
        if not self.rescale:
            return sparsify(part, False)
        masked = sparsify(part, True)
        if not len(masked):
            return masked
        before, after = torch.cat([halved(v.abs().double()[None]) for v in (part.delta, masked)]).tolist()
        return masked if min(before, after) < _SMALL else masked * (before / after)


@dataclass(frozen=True, kw_only=True)
class Sparse(Weighted):
    """A merger whose experts may have weights and densities."""

    densities: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Density (fraction of coordinates kept) of experts by name; other experts use the merger's own."""
    rescale: bool = False
    """Scale kept entries to the original L1 norm of each parameter, instead of dividing by keep probabilities."""

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        """The bytes that a chunk cannot bound: those of a whole leaf if the merger needs one."""
        least = super().memory(leaves, experts)
        if not (self.rescale or (self.special() and self.whole)):
            return least
        return max(least, BYTES_PER_COORDINATE * experts * largest(leaves))
