"""SCE: select the coordinates that vary most, weigh experts by their squares, erase minority signs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from ..types import Params
from .parts import looped, ranks
from .parts.arithmetic import BLOCK, add, block_sums, blocks_memory, divided, elected, gram_memory, plain_sum, squares
from .parts.chunks import Fuse
from .parts.inputs import Experts
from .parts.looped_ranks import Counts, bracket, order
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted
from .parts.sampled import step_of

Value = TypeVar("Value")
LEAST = 1e-6  # of the weights that a coordinate is divided by
HITS = 1 << 22  # variances between two others that are kept, at most


def sce(
    base: Params,
    experts: Experts,
    *,
    coef: float = 1.0,
    density: float = 1.0,
    floor: float = 1e-6,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ Σ_i a_i w_i Δ_i / max(Σ_i a_i w_i, 1e-6) in every coordinate that stays; 0 in the others.

    Of a leaf ⌊density · v⌋ coordinates stay, those whose variance over the experts is largest, equal ones by position;
    v is the number of variances above 0, and the product is rounded to float32, as in mergekit. a_i is 1 where Δ_i has
    the sign of Σ_i Δ_i, where 0 counts as +, else 0. ``w_i`` is the mean of Δ_i² over the leaf, what does not stay
    counting as 0, divided by the sum of these means; or 1/N where that sum is below ``floor`` or not finite.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; mergekit has none, which is 1.
        density: in [0, 1]; mergekit's ``select_topk``. 1 keeps the coordinates without variance too.
        floor: at least 0. mergekit's 1e-6 is above what many fine-tunes change: they get equal weights.
        weights: by expert, finite: Δ_i is multiplied by it first. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Wan et al., "FuseChat: knowledge fusion of chat models", 2024; mergekit 0.1.5, merge_methods/sce.py.
    """
    return merged(Sce, **locals())


class Limit(NamedTuple):
    """Coordinates of a leaf stay whose variance is above these bits, or equal to them up to a flat position."""

    bits: int
    last: int


class Each(Protocol):
    """Calls a function on the variances of the parts of a leaf, in their order; valid until it returns."""

    def __call__(self, function: Callable[[Tensor], Value], /) -> Iterable[Value]: ...


def limit_of(each: Each, size: int, density: float, *, held: bool) -> Limit:
    """The limit of a leaf, whose variances are computed three or four times.

    Args: size: of the leaf; held: keep them in memory instead.
    """

    def scan() -> Iterable[Tensor]:
        return each(Tensor.clone)

    step = 1 if held else step_of(size)
    varying, parts = zip(*each(lambda part: (part.count_nonzero(), part[::step].clone())), strict=True)
    sample = torch.cat(parts)
    if not (count := _count(int(add(varying)), density)):
        return Limit((1 << (8 * sample.itemsize - 1)) - 1, -1)
    if len(sample) == size:
        order, last = ranks.largest(sample, count)
        return Limit(order.bits, last)
    found, _ = ranks.select(scan, size - count + 1, sample.dtype)
    wanted = count - (size - found.below - found.equal)  # of the equal ones
    return Limit(found.bits, size - 1 if wanted == found.equal else ranks.position(scan, found.bits, wanted))


def _count(varying: int, density: float) -> int:
    """How many of so many variances above 0 stay: the product is rounded to float32."""
    return int(torch.tensor(varying, device="cpu").float() * density)


class Windows(Protocol):
    """Calls a function on the windows of a leaf that compiled loops read, in their order."""

    def __call__(self, function: Callable[[looped.Window], Value], /) -> Iterable[Value]: ...


class Between(NamedTuple):
    """The variances of a window beside a bracket."""

    start: int  # of the window
    counts: Counts
    none: int  # how many are 0


def limit_by_loops(windows: Windows, size: int, density: float) -> Limit | None:
    """`limit_of` by one pass over the leaf; None where a sample of the variances misleads."""

    def between(window: looped.Window) -> Between:
        (*counts, none), hits = looped.variances_between(window, *limits)
        return Between(window.start, Counts._make([*counts, hits]), none)

    def equal(counts: Counts) -> int:
        """How many are equal to the least one that stays."""
        numbers = {limits.low: counts.at_low, limits.high: counts.at_high}
        return numbers[bits] if bits in numbers else int(numpy.count_nonzero(counts.hits == bits))

    def position(window: looped.Window) -> int:
        """The position of the last of the equal ones that stay, if it is in this window."""
        return looped.nth_equal_variance(window, bits, wanted) if window.start == last.start else -1

    step, every, inside = int(16 * size ** (1 / 3)), list[Between](), 0
    sample = numpy.concatenate(list(windows(lambda window: looped.sampled_variances(window, step))))
    varying = numpy.count_nonzero(sample) / max(sample.size, 1)
    limits = bracket(sample, 1 - density * varying)
    for own in windows(between):
        inside += own.counts.inside
        every.append(own if inside <= HITS else own._replace(counts=own.counts._replace(hits=own.counts.hits[:0])))
    if not (count := _count(size - sum(own.none for own in every), density)):
        return Limit(looped.INFINITE - 1, -1)
    total = [sum(numbers) for numbers in zip(*(own.counts[:4] for own in every), strict=True)]
    hits = numpy.concatenate([own.counts.hits for own in every])
    found = order(Counts._make([*total, hits]), limits, size - count + 1)
    if found is None:
        return None
    bits, wanted = found.bits, count - (size - found.below - found.equal)  # of the equal ones
    if wanted == found.equal:
        return Limit(bits, size - 1)
    for last in every:
        if wanted <= (number := equal(last.counts)):
            break
        wanted -= number
    return Limit(bits, max(windows(position)))


def kept(deltas: Sequence[Tensor], start: int, limit: Limit) -> list[Tensor]:
    """Coordinates from ``start`` on, with 0 where they do not stay."""
    stays = ranks.above(_variance(deltas), *limit, start).to(deltas[0].dtype)
    return [delta * stays for delta in deltas]


def shares_of(norms: Sequence[float], size: int, floor: float) -> list[float]:
    """w of every expert, from the squared norms of a leaf's task vectors."""
    means = [norm / max(size, 1) for norm in norms]
    total = plain_sum(means)
    if not (total and total >= floor and math.isfinite(total)):  # values that are not finite are named when written
        return [1 / len(means)] * len(means)
    return [mean / total for mean in means]


def erased(deltas: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The merged vector of a chunk: weighted means without minority signs."""
    sign = elected(deltas)
    above, below = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in zip(deltas, shares, strict=True):
        share = (delta.sign() == sign).to(sign.dtype).mul_(weight)
        above += delta * share
        below += share
    return above / below.clamp_(min=LEAST)


def _variance(deltas: Sequence[Tensor]) -> Tensor:
    """The variance over the experts times their number."""
    # from the first one: a sum of equal changes, divided by their number, may be rounded to another change
    mean = divided(add(delta - deltas[0] for delta in deltas), len(deltas))
    return add((delta - deltas[0]).sub_(mean).square_() for delta in deltas).abs_()  # a NaN may have a sign


@dataclass(frozen=True)
class Sce(Weighted):
    """SCE: keep coordinates of largest variance, drop minority signs, weight experts by their mean squared change."""

    name = "sce"
    uneven = True
    coef: float = 1.0
    """gamma; 1 is mergekit's."""
    density: float = 1.0
    """Share of each parameter's coordinates to keep, largest variance over the experts first."""
    floor: float = 1e-6
    """Weight experts equally in parameters where their mean squared changes sum to less than this; 0: never."""

    def problems(self, experts: Experts) -> list[str]:
        density, floor = self.density, self.floor
        problems = [] if 0 <= density <= 1 else [f"density is {density}, must be in [0, 1]: it is the kept share"]
        problems += [] if 0 <= floor < float("inf") else [f"floor is {floor}, must be finite and at least 0"]
        return problems + super().problems(experts)

    def plain(self, leaves: Mapped) -> Rule:
        def shares(path: str, norms: Sequence[float] | None = None) -> list[float]:
            if norms is None:
                norms = [row[i] for i, row in enumerate(leaves.gram(path, diagonal=True))]
            return shares_of(norms, leaves.shape(path).numel(), self.floor)

        def fuse(path: str) -> Fuse:
            if self.density == 1:
                own = shares(path)
                return lambda piece: erased(piece.deltas, own)
            if not leaves.shape(path).numel():
                return lambda piece: piece.deltas[0]

            def each(function: Callable[[Tensor], Value]) -> Iterator[Value]:
                return leaves.each_block(lambda block: function(_variance(block.deltas)), [path])

            limit = self._limit(leaves, path, each)
            stays = leaves.each_block(lambda block: kept(block.deltas, block.start, limit), [path])
            some = shares(path, squares(stays))
            return lambda piece: erased(kept(piece.deltas, piece.start, limit), some)

        def loop(path: str) -> looped.Loop:
            if self.density == 1:
                return partial(looped.combined, kind="SCE", one=LEAST, by_expert=shares(path))

            def windows(function: Callable[[looped.Window], Value]) -> Iterator[Value]:
                found = leaves.each_window(function, path)
                assert found is not None
                return found

            def each(function: Callable[[Tensor], Value]) -> Iterator[Value]:
                return windows(lambda window: function(looped.variances(window)))

            size = leaves.shape(path).numel()
            limit = limit_by_loops(windows, size, self.density) if size > BLOCK else None
            limit = limit or self._limit(leaves, path, each)
            sums = looped.joined(windows(lambda window: looped.varying_squares(window, *limit)))
            some = shares(path, [plain_sum(block_sums(own)) for own in torch.from_numpy(sums)])
            return partial(looped.varying, shares=some, bits=limit.bits, last=limit.last, floor=LEAST)

        return Rule(fuse, loop=loop)

    def _limit(self, leaves: Mapped, path: str, each: Each) -> Limit:
        size = leaves.shape(path).numel()
        return limit_of(each, size, self.density, held=leaves.device.type != "cpu" or size <= BLOCK)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return blocks_memory(leaves, experts) if self.density < 1 else gram_memory(leaves, experts)


sce_vector = vector_function(Sce)
