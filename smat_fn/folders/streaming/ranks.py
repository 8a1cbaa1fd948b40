"""Order statistics of task vectors by compiled loops: upper 16 bits of magnitudes are counted, then the others."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

from ... import compiled
from ...merge.parts.looped import sources
from ...merge.parts.ranks import Order
from .chunks import SPAN, Job, parts_of, spans

SMALL = 1 << 15  # coordinates that are sorted rather than counted
FULL = 1 << 32  # coordinates that a table may count
_NOT_FINITE = 0x7F800000


def orders(job: Job, name: str, group: Sequence[str], ranks: Sequence[int], workers: int) -> list[Order] | None:
    """The magnitudes of some ranks (from 1) of all task vectors of a group of leaves; None if one is not finite."""
    if sum(job.base.leaves[path].numel() for path in group) <= SMALL:
        ordered = numpy.sort(_magnitudes(job, name, group))
        found = [int(ordered[rank - 1]) for rank in ranks]
        ends = [(int(ordered.searchsorted(bits)), int(ordered.searchsorted(bits, "right"))) for bits in found]
        finite = ordered[-1] < _NOT_FINITE
        return [Order(b, low, high - low) for b, (low, high) in zip(found, ends, strict=True)] if finite else None
    loops = compiled.loops()
    assert loops is not None
    high = _pass(job, name, group, workers, (2, 1 << 16), loops.count_high)
    if high[_NOT_FINITE >> 15 :].any():
        return None
    upto, lows = high.cumsum(), {}
    result = []
    for rank in ranks:
        top = int(upto.searchsorted(rank))
        left = rank - int(upto[top] - high[top])
        if top not in lows:
            lows[top] = _pass(job, name, group, workers, 1 << 15, _between(loops, top << 15))
        within = lows[top].cumsum()
        bottom = int(within.searchsorted(left))
        equal = int(lows[top][bottom])
        below = rank - left + int(within[bottom]) - equal
        result.append(Order(top << 15 | bottom, below, equal))
    return result


def position(job: Job, name: str, group: Sequence[str], bits: int, count: int) -> int:
    """The flat position, in the leaves one after the other, of the ``count``-th (from 1) magnitude of these bits."""
    start, loops = 0, compiled.loops()
    assert loops is not None
    for pair, size in _pairs(job, name, group):
        found, met = loops.nth_equal(sources(pair), size, numpy.uint32(bits), count)
        if found >= 0:
            return start + int(found)
        start, count = start + size, count - int(met)
    raise AssertionError("fewer equal magnitudes than counted")


def _between(loops: Any, low: int) -> Callable[[Any, int, Any], None]:
    return lambda read, size, table: loops.count_between(read, size, numpy.uint32(low), table)


def _pass(
    job: Job, name: str, group: Sequence[str], workers: int, shape: Any, count: Callable[[Any, int, Any], None]
) -> Any:
    """Sum of the workers' counts (int64); each counts into a table of its own that fits its cache."""
    pairs, lock = _pairs(job, name, group), threading.Lock()

    def work() -> Any:
        total, table, counted = 0, numpy.zeros(shape, numpy.uint32), 0
        while True:
            with lock:
                pair, size = next(pairs, (None, 0))
            if pair is None:
                return total + _folded(table)
            if counted + size >= FULL:
                total, counted = total + _folded(table), 0
                table[...] = 0
            count(sources(pair), size, table)
            counted += size

    if workers == 1:
        return work()
    with ThreadPoolExecutor(workers) as pool:
        return sum(future.result() for future in [pool.submit(work) for _ in range(workers)])


def _folded(table: Any) -> Any:
    return table.reshape(-1, table.shape[-1]).sum(0, dtype=numpy.int64)


def _pairs(job: Job, name: str, group: Sequence[str]) -> Iterator[tuple[Any, int]]:
    """Base's and the expert's parts of the leaves."""
    for path in group:
        for start, stop in spans(job.base.leaves[path], min(job.chunk, SPAN)):
            yield parts_of(job, path, start, stop, (name,)), stop - start


def _magnitudes(job: Job, name: str, group: Sequence[str]) -> Any:
    loops = compiled.loops()
    assert loops is not None
    out, end = numpy.empty(sum(job.base.leaves[path].numel() for path in group), numpy.uint32), 0
    for pair, size in _pairs(job, name, group):
        loops.magnitudes(sources(pair), size, out[end : end + size])
        end += size
    return out
