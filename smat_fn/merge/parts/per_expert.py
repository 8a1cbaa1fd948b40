"""Weights and densities of single experts: task vectors that are sparsified and weighted one by one, then combined."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .arithmetic import Norm, add, divided, elected, zeroed
from .chunks import Fuse, Piece
from .coefs import Rules, coef_of
from .inputs import Experts, type_problems
from .looped import Loop, Mask, Terms, Window, joined
from .merger import Mapped, Merger, Rule, Value

Numbers: TypeAlias = Mapping[str, Rules]  # by expert: a number, or {glob: number} as in `coefs.coef_of`

NONE: Numbers = MappingProxyType({})
_SMALL = 1e-7  # an L1 norm below it is not divided by
_ZERO = 1e-8  # nor is a sum of weights


class ExpertPart(NamedTuple):
    """Coordinates of one expert's leaf."""

    place: int  # of the expert
    name: str
    path: str
    shape: torch.Size  # of the leaf
    start: int
    delta: Tensor  # flat, in compute dtype
    fields: Tensor | None
    density: float | None  # None: the merger's own


class Own(NamedTuple):
    """A leaf, and what is set for it by expert."""

    path: str
    shape: torch.Size
    names: list[str]
    weights: list[float]
    densities: list[float | None]  # None: the merger's own

    def part(self, place: int, start: int, delta: Tensor, drawn: Tensor | None) -> ExpertPart:
        """Coordinates of one of the experts."""
        return ExpertPart(place, self.names[place], self.path, self.shape, start, delta, drawn, self.densities[place])


# a part with zeros for what goes; divided by keep probabilities, or, with True, as it is
Sparsify: TypeAlias = Callable[[ExpertPart, bool], Tensor]


def combined(
    vectors: Sequence[Tensor], weights: Sequence[float], *, elect: bool, mean: bool, present: bool = False
) -> Tensor:
    """The sum of weighted vectors, or of those entries that agree with its sign; ``mean``: over their weights.

    Args: present: a mean of all entries is over the weights of those that are not 0.
    """
    if not elect:
        total, divisor = add(vectors), math.fsum(weights)
        if mean and present:
            share = add((vector != 0).to(total.dtype) * weight for vector, weight in zip(vectors, weights, strict=True))
            return total / share.where(share != 0, 1)
        return divided(total, divisor) if mean and abs(divisor) >= _ZERO else total
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


class Scaled:
    """`Mapped` leaves whose task vectors Δ_i are multiplied by weights, as those of the experts θ₀ + w_i Δ_i.

    It has the members of `Mapped` that need no other numbers: a rule that asks for more fails.
    """

    def __init__(self, leaves: Mapped, weights: Numbers) -> None:
        self._leaves, self._weights = leaves, weights
        self.experts, self.coefs, self.device = leaves.experts, leaves.coefs, leaves.device
        self.shape, self.names, self.each, self.once = leaves.shape, leaves.names, leaves.each, leaves.once

    def weights(self, path: str) -> list[float] | None:
        """The weights of the experts that have a leaf; None: all are 1."""
        found = [number(self._weights, name, path, 1.0) for name in self.names(path)]
        return None if all(weight == 1 for weight in found) else found

    def gram(self, path: str, *, diagonal: bool = False) -> list[list[float]]:
        products, weights = self._leaves.gram(path, diagonal=diagonal), self.weights(path)
        if weights is None:
            return products
        return [
            [own * w * v for own, v in zip(row, weights, strict=True)] for row, w in zip(products, weights, strict=True)
        ]

    def blocks(self, path: str) -> Iterator[list[Tensor]]:
        weights = self.weights(path)
        return (times(deltas, weights) for deltas in self._leaves.blocks(path))

    def each_block(
        self, function: Callable[[Piece], Value], paths: Iterable[str], *, rows: bool = False
    ) -> Iterator[Value]:
        def of(piece: Piece) -> Value:
            return function(piece._replace(deltas=times(piece.deltas, self.weights(piece.path))))

        return self._leaves.each_block(of, paths, rows=rows)

    def each_window(
        self, function: Callable[[Window], Value], path: str, *, rows: bool = False
    ) -> Iterator[Value] | None:
        weights = self.weights(path)
        own = function if weights is None else lambda window: function(window._replace(weights=weights))
        return self._leaves.each_window(own, path, rows=rows)

    def rule(self, plain: Rule) -> Rule:
        """A rule of these leaves that gets their task vectors, also from compiled loops."""
        fuse_of, loop_of = plain.fuse, plain.loop
        assert fuse_of is not None

        def fuse(path: str) -> Fuse:
            own, weights = fuse_of(path), self.weights(path)
            return own if weights is None else lambda piece: own(piece._replace(deltas=times(piece.deltas, weights)))

        def loop(path: str) -> Loop | None:
            own, weights = None if loop_of is None else loop_of(path), self.weights(path)
            return None if own is None else lambda window: own(window._replace(weights=weights))

        return plain._replace(fuse=fuse, loop=loop)


def times(deltas: list[Tensor], weights: Sequence[float] | None) -> list[Tensor]:
    """Task vectors multiplied by the weights of their experts, in place: a chunk and a block have their own memory."""
    if weights is None:
        return deltas
    return [delta if weight == 1 else delta.mul_(weight) for delta, weight in zip(deltas, weights, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Weighted(Merger):
    """A merger whose experts may have weights: it merges θ₀ + w_i Δ_i in place of the experts θ₀ + Δ_i.

    Where all weights are 1, results are bit-identical to those of the plain rule.
    """

    weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weight of experts by name, negative to subtract one; 1 for those not named."""

    def __post_init__(self) -> None:
        for option in fields(self):  # None, the functions' default, is no number for any expert
            if option.default_factory is dict and getattr(self, option.name) is None:
                object.__setattr__(self, option.name, {})

    def plain(self, leaves: Mapped) -> Rule:
        """The rule without options by expert."""
        raise NotImplementedError

    def problems(self, experts: Experts) -> list[str]:
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.default_factory is dict}
        return [*super().problems(experts), *number_problems(experts, **own)]

    def rule(self, leaves: Mapped) -> Rule:
        if all(weight == 1 for weight in self.weights.values()):
            return self.plain(leaves)
        scaled: Any = Scaled(leaves, self.weights)  # not all of `Mapped`
        rule: Rule = scaled.rule(self.plain(scaled))
        return rule


@dataclass(frozen=True, kw_only=True)
class Summed(Weighted):
    """A merger that adds weighted task vectors; without options by expert, with the bits of the plain rule.

    With any of its keyword-only options it is Σ_i w_i δ̂_i, δ̂_i the sparsified task vectors: with ``elect`` of what
    agrees in sign with Σ_i w_i δ̂_i (+ where it is 0) alone; of aggregate "mean" divided by the sum of the weights that
    take part, where that is not 0. With ``rescale`` δ̂_i = m ⊙ Δ_i · ‖Δ_i‖₁ / ‖m ⊙ Δ_i‖₁ in every leaf.

    Source: mergekit 0.1.5, merge_methods/generalized_task_arithmetic.py and sparsify.py.
    """

    densities, elect, rescale = NONE, False, False
    present = False  # whether a mean without election is over the entries that are not 0
    rows = False  # whether `sparsify` needs whole rows

    def sparsify(self, leaves: Mapped) -> Sparsify | None:
        """The function that makes a task vector sparse; None: it stays dense."""
        return None

    def mask(self, leaves: Mapped, own: Own) -> Mask | None:
        """The mask of a leaf for compiled loops, with options by expert or without; None: it is none of theirs."""
        return None

    def looped(self, leaves: Mapped, path: str, *, majority: int = 1) -> Loop | None:
        """The compiled loop that merges a leaf by the options that are set. Args: majority: the sign of a zero sum."""
        own = self._own(leaves, path)
        if (mask := self.mask(leaves, own)) is None:
            return None
        mean, share = vars(self)["aggregate"] == "mean", math.fsum(own.weights)
        ratios = self._ratios(leaves, own, mask) if self.rescale else [1.0] * len(own.names)
        all_of_them = mean and not self.elect and not self.present
        divisor = share if all_of_them and abs(share) >= _ZERO else 1.0
        terms = Terms(ratios, own.weights, self.elect, mean and not all_of_them, divisor, majority)
        return partial(mask.merge, terms=terms)

    def problems(self, experts: Experts) -> list[str]:
        return [*super().problems(experts), *aggregate_problems(vars(self)["aggregate"])]

    def special(self) -> bool:
        """Whether anything differs from the plain merger."""
        return any(getattr(self, name) != value for name, value in self._plain_options().items())

    def rule(self, leaves: Mapped) -> Rule:
        if not self.special():
            return self.plain(leaves)
        return Rule(
            lambda path: self._fuse(leaves, self._own(leaves, path)),
            rows=self.rows,
            loop=lambda path: self.looped(leaves, path),
        )

    def _own(self, leaves: Mapped, path: str) -> Own:
        names = list(leaves.experts)
        weights = [number(self.weights, name, path, 1.0) for name in names]
        return Own(path, leaves.shape(path), names, weights, [number(self.densities, name, path) for name in names])

    def _fuse(self, leaves: Mapped, own: Own) -> Fuse:
        """The function that merges a chunk of a leaf."""
        mean, sparsify = vars(self)["aggregate"] == "mean", self.sparsify(leaves)
        ratios = self._ratios(leaves, own) if self.rescale else []

        def fuse(piece: Piece) -> Tensor:
            vectors = []
            for i, (delta, weight) in enumerate(zip(piece.deltas, own.weights, strict=True)):
                if sparsify is not None:
                    drawn = piece.fields[i] if piece.fields else None
                    delta = sparsify(own.part(i, piece.start, delta, drawn), self.rescale)
                vectors.append((delta * ratios[i] if self.rescale else delta) * weight)
            return combined(vectors, own.weights, elect=self.elect, mean=mean, present=self.present)

        return fuse

    def _ratios(self, leaves: Mapped, own: Own, mask: Mask | None = None) -> list[float]:
        """‖Δ_i‖₁ / ‖m ⊙ Δ_i‖₁ of a leaf by expert, 1 where one of them is about 0."""
        if mask is not None and (sums := leaves.each_window(mask.norms, own.path, rows=self.rows)) is not None:
            return [_ratio(math.fsum(every), math.fsum(kept)) for every, kept in zip(*joined(sums), strict=True)]
        sparsify = self.sparsify(leaves)
        assert sparsify is not None

        def ratio(name: str) -> float:
            place, dense, kept = own.names.index(name), Norm(), Norm()
            for start, delta, drawn in leaves.vector(own.path, name, rows=self.rows):
                dense.add(delta)
                kept.add(sparsify(own.part(place, start, delta, drawn), True))
            return _ratio(dense.value(), kept.value())

        return list(leaves.each(ratio, own.names))


def _ratio(before: float, after: float) -> float:
    return 1.0 if before < _SMALL or after < _SMALL else before / after


@dataclass(frozen=True, kw_only=True)
class Sparse(Summed):
    """A merger whose experts may have weights and densities."""

    densities: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Density (fraction of coordinates kept) of experts by name; other experts use the merger's own."""
    rescale: bool = False
    """Scale kept entries to the original L1 norm of each parameter; dare and della then divide by no probability."""

    def density(self, name: str) -> float | None:
        """The fraction of coordinates that is kept of an expert without a density of its own; None: no single one."""
        drop_prob = vars(self)["drop_prob"]
        return None if drop_prob is None else round(1 - drop_prob, 12)

    def density_limits(self, name: str) -> tuple[float, float]:
        """The least and the largest density that an expert may have."""
        return 0.0, 1.0
