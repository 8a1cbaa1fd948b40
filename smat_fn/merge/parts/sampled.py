"""Order statistics of numbers that are computed block by block and never in memory together.

A sample brackets them, as in `looped_ranks`, and one pass of a compiled loop finds them; else `ranks.ordered` does.
"""

from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from ... import execution
from . import looped_ranks
from . import ranks as plain
from .looped import sources
from .looped_ranks import Bracket, Counts, bracket, order

KEPT = 1 << 20  # numbers between two others that are kept, at most
WORTH = 1 << 26  # numbers that repay numba's start
_FACTORS = numpy.ones(1, numpy.float32)


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


Counter: TypeAlias = Callable[[Tensor | Scaled], Any]


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
    return _by_digits(over, ranks, sample) if found is None else found


def _by_digits(over: Callable[[Counter], Iterable[Any]], ranks: Sequence[int], like: Tensor) -> list[Tensor]:
    def tensors(count: Callable[[Tensor], Any]) -> Iterable[Any]:
        return over(lambda block: count(block if isinstance(block, Tensor) else block.numbers()[None]))

    return plain.ordered(tensors, ranks, like)


def _by_loops(
    loops: ModuleType, over: Callable[[Counter], Iterable[Any]], ranks: Sequence[int], size: int, sample: Tensor
) -> list[Tensor] | None:
    """None where the sample misleads. Of very many numbers those that are kept of a pass are the sample of another."""
    places = [rank + 1 for _ in sample for rank in ranks]
    likely = [(keys, (rank + 1) / size) for keys in _keys(sample.numpy()) for rank in ranks]
    for _ in range(2):
        limits = [bracket(keys[: len(keys) // loops.RUN * loops.RUN].reshape(-1, loops.RUN), p) for keys, p in likely]
        counts = _count(loops, over, limits, len(ranks))
        found = list(map(order, counts, limits, places))
        known = [each.bits for each in found if each is not None]
        if len(known) == len(places):
            return list(torch.from_numpy(_numbers(known)).view(-1, len(ranks)).double().T[..., None])
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

    def count(block: Tensor | Scaled) -> tuple[Any, list[Any]]:
        size = block.shape[1] if isinstance(block, Tensor) else len(block.vectors[0])
        hits, counts = numpy.empty((*pairs.shape[:2], size + 1), numpy.uint32), numpy.empty((*pairs.shape[:2], 4), int)
        for i, given in enumerate(zip(pairs, hits, counts, strict=True)):
            if isinstance(block, Tensor):
                loops.among(sources([block[i]]), 0, size, 1, _FACTORS, *given)
            else:
                factors = execution.array(block.factors)
                loops.among(sources(block.vectors), block.start, size, block.length, factors, *given)
        flat = counts.reshape(-1, 4)
        rows = zip(hits.reshape(len(flat), -1), flat[:, 2], strict=True)
        return flat, [row[:inside].copy() for row, inside in rows]

    total, kept = numpy.zeros((len(limits), 4), numpy.int64), [[numpy.empty(0, numpy.uint32)] for _ in limits]
    steps = [1] * len(limits)
    for counts, hits in over(count):
        total += counts
        for i, own in enumerate(hits):
            kept[i].append(own[:: steps[i]])
            while total[i, 2] > KEPT * steps[i]:
                kept[i], steps[i] = [numpy.concatenate(kept[i])[::2]], 2 * steps[i]
    return [Counts._make([*row, numpy.concatenate(own)]) for row, own in zip(total.tolist(), kept, strict=True)]


def _keys(values: Any) -> Any:
    """Integers in the order of the numbers (uint32 of float32)."""
    bits = values.view(numpy.uint32)
    return bits ^ numpy.where(bits >> 31, numpy.uint32(0xFFFFFFFF), numpy.uint32(1 << 31))


def _numbers(keys: Sequence[int]) -> Any:
    """The inverse of `_keys`."""
    bits = numpy.array(keys, numpy.uint32)
    return (bits ^ numpy.where(bits >> 31, numpy.uint32(1 << 31), numpy.uint32(0xFFFFFFFF))).view(numpy.float32)
