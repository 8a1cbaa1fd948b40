"""Order statistics of task vectors by compiled loops.

A sample says between which magnitudes a rank lies; one pass counts what is outside of them and collects what is inside.
If the sample misleads, two passes count all magnitudes: by their upper 16 bits, then those of one bin by the others.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy

from ... import execution
from .ranks import Order
from .windows import Read

T = TypeVar("T")
Windows: TypeAlias = Iterator[tuple[Any, object, int]]  # `Read` of base and the expert, how many coordinates

SMALL = 1 << 15  # coordinates that are sorted rather than counted
ROOM = 1 << 22  # magnitudes that are collected, at most
FULL = 1 << 32  # coordinates that a table may count
ERRORS = 3.5  # standard errors of the sample that a rank may be off
_NOT_FINITE, _LAST = 0x7F800000, 0xFFFFFFFF  # bits


class Bracket(NamedTuple):
    """Two magnitudes, as bits, low < high; one of some rank is likely to be between them, or equal to one."""

    low: int
    high: int


class Counts(NamedTuple):
    """How many magnitudes are where, beside a bracket."""

    below: int
    at_low: int
    inside: int
    at_high: int
    hits: Any  # uint32: those inside, or not all of them


class Group(NamedTuple):
    """Some leaves of one expert, one after the other, the magnitudes of whose task vector are ranked together."""

    size: int  # coordinates
    leaves: Callable[[], Iterable[tuple[int, Read]]]  # size and place of each, of base and the expert
    workers: int = 1  # threads


def orders(group: Group, ranks: Sequence[int]) -> list[Order] | None:
    """The magnitudes of some ranks (from 1) of a group; None if one is not finite."""
    size = group.size
    if size <= SMALL:
        ordered = numpy.sort(_magnitudes(group))
        found = [int(ordered[rank - 1]) for rank in ranks]
        ends = [(int(ordered.searchsorted(bits)), int(ordered.searchsorted(bits, "right"))) for bits in found]
        finite = ordered[-1] < _NOT_FINITE
        return [Order(b, low, high - low) for b, (low, high) in zip(found, ends, strict=True)] if finite else None
    sample = _sample(group, size)
    brackets = [bracket(sample, rank / size) for rank in ranks]
    if (counted := _counted(group, brackets)) is None:
        return None
    likely = [order(*each) for each in zip(counted, brackets, ranks, strict=True)]
    others = _by_tables(group, [r for r, found in zip(ranks, likely, strict=True) if not found])
    return [found or next(others) for found in likely]


def bracket(sample: Any, share: float) -> Bracket:
    """Where the magnitude lies that has a share of all below it.

    Args: sample: uint32 (runs, RUN). Neighbours may be alike, so errors are those of the runs.
    """
    runs, length = sample.shape
    if not runs:  # all leaves are shorter than a run
        return Bracket(0, 1)
    ordered, count = numpy.sort(sample, None), runs * length
    center = min(int(share * count), count - 1)
    spread = max(float((sample < ordered[center]).mean(1).std()), 0.5 / length)
    reach = math.ceil(ERRORS * spread * count / math.sqrt(runs))
    low = int(ordered[center - reach]) if reach <= center else 0
    high = int(ordered[center + reach]) if center + reach < count else _LAST
    return Bracket(low, max(high, low + 1))


def order(counts: Counts, limits: Bracket, rank: int) -> Order | None:
    """The magnitude of a rank (from 1), None if it is not known."""
    left = rank - counts.below
    if 0 < left <= counts.at_low:
        return Order(limits.low, counts.below, counts.at_low)
    below = counts.below + counts.at_low + counts.inside
    if below < rank <= below + counts.at_high:
        return Order(limits.high, below, counts.at_high)
    left -= counts.at_low
    if left <= 0 or below < rank or len(counts.hits) < counts.inside:
        return None
    counts.hits.partition(left - 1)
    bits = int(counts.hits[left - 1])
    smaller, equal = (int(numpy.count_nonzero(found)) for found in (counts.hits < bits, counts.hits == bits))
    return Order(bits, counts.below + counts.at_low + smaller, equal)


def position(group: Group, bits: int, count: int) -> int:
    """The flat position, in the leaves one after the other, of the ``count``-th (from 1) magnitude of these bits."""
    start, loops = 0, _loops()
    for read, _, size in _windows(group):
        found, met = loops.nth_equal(read, size, numpy.uint32(bits), count)
        if found >= 0:
            return start + int(found)
        start, count = start + size, count - int(met)
    raise AssertionError("fewer equal magnitudes than counted")


def _sample(group: Group, size: int) -> Any:
    """Runs of magnitudes. Their number balances the time to sort them and that to sort what is in a bracket."""
    loops, offset, found = _loops(), 0, 0
    step = int(16 * size ** (1 / 3))
    out = numpy.empty((size // step + 1, loops.RUN), numpy.uint32)
    for read, _, length in _windows(group):
        found += loops.sampled(read, length, offset, step, out[found:])
        offset += length
    return out[:found]


def _counted(group: Group, brackets: Sequence[Bracket]) -> list[Counts] | None:
    """None if a magnitude is not finite."""
    loops, limits = _loops(), [(numpy.uint32(low), numpy.uint32(high)) for low, high in brackets]

    def work(windows: Windows) -> tuple[Any, list[list[Any]], int]:
        totals, largest, room = numpy.zeros((len(limits), 4), numpy.int64), 0, numpy.empty(0, numpy.uint32)
        hits: list[list[Any]] = [[room] for _ in limits]
        for read, _, size in windows:
            if len(room) <= size:
                room = numpy.empty(size + 1, numpy.uint32)
            for total, kept, between in zip(totals, hits, limits, strict=True):
                *counted, top = loops.between(read, size, *between, room)
                total += counted
                if total[2] <= ROOM:
                    kept.append(room[: counted[2]].copy())
                largest = max(largest, int(top))
        return totals, hits, largest

    totals, hits, largest = zip(*_shared(group, work), strict=True)
    if max(largest) >= _NOT_FINITE:
        return None
    every = [numpy.concatenate([part for parts in each for part in parts]) for each in zip(*hits, strict=True)]
    return [Counts._make([*total, found]) for total, found in zip(sum(totals).tolist(), every, strict=True)]


def _by_tables(group: Group, ranks: Sequence[int]) -> Iterator[Order]:
    """The same of finite magnitudes: counts by the upper 16 bits, then of those of one bin by the others."""
    if not ranks:
        return
    high = _table(group, (2, 1 << 16), _loops().count_high)
    upto, lows = high.cumsum(), {}
    for rank in ranks:
        top = int(upto.searchsorted(rank))
        left = rank - int(upto[top] - high[top])
        if top not in lows:
            lows[top] = _table(group, (1, 1 << 15), partial(_count_from, numpy.uint32(top << 15)))
        within = lows[top].cumsum()
        bottom = int(within.searchsorted(left))
        equal = int(lows[top][bottom])
        below = rank - left + int(within[bottom]) - equal
        yield Order(top << 15 | bottom, below, equal)


def _count_from(low: Any, read: Any, size: int, table: Any) -> None:
    _loops().count_between(read, size, low, table[0])


def _table(group: Group, shape: Any, count: Callable[[Any, int, Any], None]) -> Any:
    """Sum of the workers' counts (int64); each counts into a table of its own that fits its cache."""

    def work(windows: Windows) -> Any:
        total, table, counted = 0, numpy.zeros(shape, numpy.uint32), 0
        for read, _, size in windows:
            if counted + size >= FULL:
                total, counted = total + _folded(table), 0
                table[...] = 0
            count(read, size, table)
            counted += size
        return total + _folded(table)

    return sum(_shared(group, work))


def _folded(table: Any) -> Any:
    return table.sum(0, dtype=numpy.int64)


def _shared(group: Group, work: Callable[[Windows], T]) -> list[T]:
    """The results of workers that share the windows of a group."""
    windows, lock = _windows(group), threading.Lock()

    def take() -> Windows:
        while True:
            with lock:
                window = next(windows, None)
            if window is None:
                return
            yield window

    if group.workers == 1:
        return [work(windows)]
    with ThreadPoolExecutor(group.workers) as pool:
        return [future.result() for future in [pool.submit(work, take()) for _ in range(group.workers)]]


def _windows(group: Group) -> Windows:
    """Base's and the expert's parts of the leaves."""
    for size, read in group.leaves():
        for start in range(0, size, read.span):
            stop = min(start + read.span, size)
            yield *read(start, stop), stop - start


def _magnitudes(group: Group) -> Any:
    out, end = numpy.empty(group.size, numpy.uint32), 0
    for read, _, size in _windows(group):
        _loops().magnitudes(read, size, out[end : end + size])
        end += size
    return out


def _loops() -> ModuleType:
    loops = execution.loops()
    assert loops is not None
    return loops
