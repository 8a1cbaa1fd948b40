"""Order statistics of numbers that are computed block by block and never in memory together.

A sample brackets them, as in `looped_ranks`, and one pass of a compiled loop finds them; else `ranks.ordered` does.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy
import torch
from torch import Tensor

from ... import execution
from . import looped_ranks
from . import ranks as plain
from .looped import sources
from .looped_ranks import Bracket, Counts, bracket, order
from .ranks import Order

KEPT = 1 << 20  # numbers between two others that are kept, at most
WORTH = 1 << 26  # numbers that repay numba's start
_FACTORS = numpy.ones(1, numpy.float32)


Found: TypeAlias = tuple[Any, list[Any]]  # int64 (rows, pairs, 4), as `looped_ranks.Counts`; the hits of each


class Formed(Protocol):
    """Numbers of a block, computed only when they are read."""

    def numbers(self) -> Tensor:
        """All of them: (rows, n), or flat ones of one row."""

    def among(self, loops: ModuleType, limits: Any) -> Found:
        """How many lie beside and between pairs of numbers. Args: limits: uint32 (rows, pairs, 2), as by `_keys`."""


class Scaled(NamedTuple):
    """The magnitudes of the differences of two vectors, upcast, times a number for each row of their leaf."""

    vectors: Sequence[Tensor]  # coordinates of the leaf from ``start`` on
    start: int
    length: int  # of a row
    factors: Tensor

    def numbers(self) -> Tensor:
        """These magnitudes, flat."""
        dtype, length = self.factors.dtype, self.length
        one, two = (vector.to(dtype) for vector in self.vectors)
        first, skipped = divmod(self.start, length)
        rows = self.factors[first : -(-(self.start + len(one)) // length), None].expand(-1, length).reshape(-1)
        return (two - one).abs_().mul_(rows[skipped : skipped + len(one)])

    def among(self, loops: ModuleType, limits: Any) -> Found:
        """As of `Formed`."""
        size, factors = len(self.vectors[0]), execution.array(self.factors)
        return _among(loops, [sources(self.vectors)], size, limits, self.start, self.length, factors)


Counter: TypeAlias = Callable[[Tensor | Formed], Any]


def among(loops: ModuleType, rows: Tensor, limits: Any) -> Found:
    """`Formed.among` of numbers in memory."""
    return _among(loops, [sources([row]) for row in rows], rows.shape[1], limits, 0, 1, _FACTORS)


def _among(
    loops: ModuleType, rows: Sequence[Any], size: int, limits: Any, start: int, length: int, factors: Any
) -> Found:
    hits = numpy.empty((*limits.shape[:2], size + 1), numpy.uint32)
    counts = numpy.empty((*limits.shape[:2], 4), numpy.int64)
    for row, *given in zip(rows, limits, hits, counts, strict=True):
        loops.among(row, start, size, length, factors, *given)
    flat = hits.reshape(-1, size + 1)
    return counts, [own[:inside].copy() for own, inside in zip(flat, counts[..., 2].reshape(-1), strict=True)]


def step_of(size: int) -> int:
    """Every how many of so many numbers are a sample for `ordered`; odd, to meet all columns of most matrices."""
    return 1 if size <= looped_ranks.SMALL else int(size ** (1 / 3)) | 1


def ordered(over: Callable[[Counter], Iterable[Any]], ranks: Sequence[int], size: int, sample: Tensor) -> list[Tensor]:
    """The values of these ranks, from 0, of every row of numbers: (rows, 1) float64 each.

    Args: over: calls a function on all blocks, (rows, n), or one row that is `Scaled`, the same ones at each call;
        size: of a row; sample: (rows, m), one of every `step_of` numbers.
    """
    if sample.shape[1] == size:
        every = torch.stack([torch.stack(plain.at_places(row, ranks)) for row in sample])
        return list(every.double().T[..., None])
    worth = execution.started() or size * len(sample) >= WORTH
    loops = execution.loops_for(sample) if worth and sample.dtype == torch.float32 else None
    found = None if loops is None else _by_loops(loops, over, ranks, size, sample)
    if found is None:
        return _by_digits(over, ranks, sample)
    return list(torch.from_numpy(from_keys([each.bits for each in found])).view(-1, len(ranks)).double().T[..., None])


def _by_digits(over: Callable[[Counter], Iterable[Any]], ranks: Sequence[int], like: Tensor) -> list[Tensor]:
    def tensors(count: Callable[[Tensor], Any]) -> Iterable[Any]:
        return over(lambda block: count(block if isinstance(block, Tensor) else torch.atleast_2d(block.numbers())))

    return plain.ordered(tensors, ranks, like)


def _by_loops(
    loops: ModuleType, over: Callable[[Counter], Iterable[Any]], ranks: Sequence[int], size: int, sample: Tensor
) -> list[Order] | None:
    """The ranks of the first row, then those of the others, their bits as by `_keys`.

    None where the sample misleads. Of very many numbers those that are kept of a pass are the sample of another."""
    places = [rank + 1 for _ in sample for rank in ranks]
    likely = [(keys, (rank + 1) / size) for keys in _keys(sample.numpy()) for rank in ranks]
    for _ in range(2):
        limits = [bracket(keys[: len(keys) // loops.RUN * loops.RUN].reshape(-1, loops.RUN), p) for keys, p in likely]
        counts = _count(loops, over, limits, len(ranks))
        found = list(map(order, counts, limits, places))
        known = [each for each in found if each is not None]
        if len(known) == len(places):
            return known
        shares = [(p - c.below - c.at_low) / max(c.inside, 1) for c, p in zip(counts, places, strict=True)]
        if not all(each or 0 < share <= 1 for each, share in zip(found, shares, strict=True)):
            break
        likely = [(each.hits, share) for each, share in zip(counts, shares, strict=True)]
    return None


def _count(
    loops: ModuleType, over: Callable[[Counter], Iterable[Any]], limits: Sequence[Bracket], each: int
) -> list[Counts]:
    """The counts of every bracket, ``each`` in a row; of more than `KEPT` hits every second, fourth and so on stays."""
    pairs = numpy.array(limits, numpy.uint32).reshape(-1, each, 2)

    def count(block: Tensor | Formed) -> Found:
        return among(loops, block, pairs) if isinstance(block, Tensor) else block.among(loops, pairs)

    total, kept = numpy.zeros((len(limits), 4), numpy.int64), [[numpy.empty(0, numpy.uint32)] for _ in limits]
    steps = [1] * len(limits)
    for counts, hits in over(count):
        total += counts.reshape(-1, 4)
        for i, own in enumerate(hits):
            kept[i].append(own[:: steps[i]])
            while total[i, 2] > KEPT * steps[i]:
                kept[i], steps[i] = [numpy.concatenate(kept[i])[::2]], 2 * steps[i]
    return [Counts._make([*row, numpy.concatenate(own)]) for row, own in zip(total.tolist(), kept, strict=True)]


def _keys(values: Any) -> Any:
    """Integers in the order of the numbers (uint32 of float32)."""
    bits = values.view(numpy.uint32)
    return bits ^ numpy.where(bits >> 31, numpy.uint32(0xFFFFFFFF), numpy.uint32(1 << 31))


def from_keys(keys: Any) -> Any:
    """The inverse of `_keys`."""
    bits = numpy.asarray(keys, numpy.uint32)
    return (bits ^ numpy.where(bits >> 31, numpy.uint32(1 << 31), numpy.uint32(0xFFFFFFFF))).view(numpy.float32)
