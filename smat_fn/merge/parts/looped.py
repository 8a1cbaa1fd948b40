"""Windows of leaves merged by compiled loops: what a merger's `merger.Rule` calls in place of its torch operations.

They read weights as they are stored, a tile at a time, and write merged ones: no float32 copy of a tensor is made.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from ...execution import array
from ...ops.cpu import place

KINDS = torch.float32, torch.bfloat16, torch.float16  # that the loops read and write, by their number
VECTOR = 3  # kind of a target that gets the task vector itself
NEVER = 1 << 62  # a position that no coordinate has
INFINITE = 0x7F800000  # bits of infinity, above all others
NO_RANKS = numpy.empty((0, 0), numpy.uint16)
MOST = (1 << 16) - 1  # a threshold of ranks, at most
SHORT = 256  # a row whose magnitudes are distributed rather than counted
NORMED = 4096  # coordinates whose magnitudes are added by halves: part of the definition of `arithmetic.Norm`
BALANCED = 1 << 18  # coordinates over all experts of which PCB's exponentials are computed at a time


class Window(NamedTuple):
    """Coordinates of one leaf, on the CPU, of the dtypes `KINDS`."""

    loops: ModuleType
    start: int  # flat coordinate of the first one in its leaf
    size: int
    read: Any  # `sources` of base, then of the experts
    held: object  # owns their memory
    keys: Any  # uint64 (experts, 2), mask streams of the leaf; None where nothing is random
    coef: float | None  # None: the task vector itself is written, float32
    out: Tensor  # what is merged is written here
    room: "Room"  # memory of a name, which it gave before: taking new costs time
    weights: Sequence[float] | None = None  # of task vectors, for `combined` and `balanced`; None: all are 1


class Merged(NamedTuple):
    """Squared norms of the rounding error and of the change; whether all differences, and all results, are finite."""

    error: float
    change: float
    finite: bool
    fits: bool


Room: TypeAlias = Callable[[str, int, torch.dtype], Tensor]
Loop: TypeAlias = Callable[[Window], Merged]
Band: TypeAlias = tuple[tuple[int, int, int, int], tuple[int, int]]  # see `ByMagnitude`
ALL: Band = (0, 0, INFINITE, INFINITE), (NEVER, NEVER)


def sources(parts: Sequence[Tensor]) -> Any:
    """Addresses and kinds of tensors, which must be alive as long as they are used: uint64 (n, 2)."""
    return numpy.array([[part.data_ptr(), KINDS.index(part.dtype)] for part in parts], numpy.uint64)


def bits_of(value: Tensor) -> int:
    """The bits of a float32 number that is not negative."""
    return int(value.cpu().view(torch.int32))


class Terms(NamedTuple):
    """How sparse task vectors are combined: multiplied by both numbers of their expert, then added."""

    ratios: Sequence[float]
    weights: Sequence[float]
    elect: bool = False  # add what has the sign of the sum, else all
    mean: bool = False  # over the weights of what is elected, or without election of what is not 0
    divisor: float = 1.0  # of the sum of all
    majority: int = 1  # the sign of a zero sum

    def scales(self) -> tuple[Any, Any]:
        """Ratios and weights as the loops take them."""
        return numpy.array(self.ratios, numpy.float32), numpy.array(self.weights, numpy.float32)


class ByMagnitude(NamedTuple):
    """Of every expert the magnitudes from ``low`` on and below ``high``, as bits."""

    bands: Sequence[Band]  # ((low, low', high, high'), (i, j)): low' from flat position i of the leaf on, high' from j

    def merge(self, window: Window, terms: Terms) -> Merged:
        """The merged window."""
        where = window.read, window.start, window.size, *_limits(self.bands), *terms.scales()
        numbers = numpy.float32(terms.majority), numpy.float32(terms.divisor)
        return _merged(window.loops.banded(*where, terms.elect, terms.mean, *numbers, *_written(window)))

    def norms(self, window: Window) -> Any:
        """Sums of magnitudes as of `ByField.norms`."""
        return _norms(window, self.bands, numpy.empty((0, 2), numpy.uint64), [])


class ByField(NamedTuple):
    """The coordinates that mask streams keep, divided by the keep probability; a zero sum elects +."""

    thresholds: Sequence[int]  # of the experts; 65536 keeps nothing
    divide: bool = True

    def merge(self, window: Window, terms: Terms) -> Merged:
        """The merged window."""
        kept = [1 - t / 65536 if self.divide else 1.0 for t in self.thresholds]
        return _masked(window, terms, self.thresholds, kept, NO_RANKS)

    def norms(self, window: Window) -> Any:
        """Sums of magnitudes by blocks of `NORMED`: float64 (2, experts, blocks), of all, then of what stays.

        Args: window: from a multiple of `NORMED` on.
        """
        return _norms(window, [ALL] * len(self.thresholds), window.keys, self.thresholds)


class ByRank(NamedTuple):
    """As `ByField`, of whole rows, with a threshold for each rank of a magnitude in its row."""

    by_rank: Any  # uint16 (experts, length of a row), or one row for all
    thresholds: Sequence[int]  # of the experts: 0, or 65536 where nothing stays
    divide: bool = True

    def merge(self, window: Window, terms: Terms) -> Merged:
        """The merged window."""
        share = 1 / 65536 if self.divide else 0.0
        return _masked(window, terms, self.thresholds, [1.0] * len(self.thresholds), self._ranked(window), share)

    def norms(self, window: Window) -> Any:
        """Sums of magnitudes as of `ByField.norms`, of whole rows."""
        return _norms(window, [ALL] * len(self.thresholds), window.keys, self.thresholds, self._ranked(window))

    def _ranked(self, window: Window) -> Any:
        """The threshold of each coordinate."""
        shape = len(self.thresholds), window.size
        out = array(window.room("ranked", math.prod(shape), torch.int16)).view(numpy.uint16).reshape(shape)
        ranked(window.loops, window.read, self.by_rank, out, window.room)
        return out


def _masked(
    window: Window, terms: Terms, thresholds: Sequence[int], kept: Sequence[float], ranked: Any, share: float = 0.0
) -> Merged:
    numbers = numpy.array(thresholds, numpy.int32), numpy.array(kept, numpy.float32), ranked, numpy.float32(share)
    where = window.read, *place(window.start), window.size, window.keys
    combine = terms.elect, terms.mean, numpy.float32(terms.divisor)
    return _merged(window.loops.masked(*where, *numbers, *terms.scales(), *combine, *_written(window)))


def weighted_sum(weights: Sequence[float]) -> Loop:
    """Adds weighted task vectors."""
    return partial(ByMagnitude([ALL] * len(weights)).merge, terms=Terms([1.0] * len(weights), weights))


Mask: TypeAlias = ByMagnitude | ByField | ByRank


def _norms(window: Window, bands: Sequence[Band], keys: Any, thresholds: Sequence[int], ranked: Any = NO_RANKS) -> Any:
    sums = numpy.empty((2, len(bands), -(-window.size // NORMED)))
    limits, cutoffs = _limits(bands), numpy.array(thresholds, numpy.int32)
    window.loops.norms(window.read, window.start, window.size, *limits, keys, cutoffs, ranked, sums)
    return sums


def averaged(window: Window, weights: Sequence[float], divisor: float = 1.0, *, line: bool = False) -> Merged:
    """The sum of the weighted experts, without base, over a number.

    Args: line: instead add the weighted differences of the others from the first one to it.
    """
    numbers = numpy.array(weights, numpy.float32), numpy.float32(divisor), line, sources([window.out])
    return _merged(window.loops.averaged(window.read, window.size, *numbers))


def fused(window: Window, length: int, divergences: Tensor, threshold: float) -> Merged:
    """Arcee Fusion of two experts, without base. Args: length: of a row; divergences: of each row."""
    numbers = length, array(divergences), numpy.float32(threshold), numpy.float32(window.coef)
    return _merged(window.loops.fused(window.read, window.start, window.size, *numbers, sources([window.out])))


def combined(
    window: Window, kind: str, one: float = 0.0, two: float = 0.0, *, by_expert: Sequence[float] = ()
) -> Merged:
    """All task vectors by the arithmetic of one merger. Args: kind: a constant of the loops; others: its numbers."""
    numbers = getattr(window.loops, kind), numpy.array([one, two, *by_expert], numpy.float32)
    return _merged(window.loops.combined(window.read, window.size, _weights(window), *numbers, *_written(window)))


def balanced(window: Window, bounds: Any, less: float) -> Merged:
    """PCB's mean of task vectors. Args: bounds: float64 (experts, 4), finite; less: as of `competing`.

    Exponentials and hyperbolic tangents are torch's own, of the coordinates that may be above the floor.
    """
    loops, count, weights = window.loops, len(bounds), _weights(window)
    step = max(min(BALANCED // count, window.size), 1)
    factors = [window.room(name, count * step, torch.float64).view(count, step) for name in ("exponents", "products")]
    places = array(window.room("places", count * (step + 1), torch.int32)).reshape(count, step + 1)
    exponents, products = (factor.numpy() for factor in factors)

    def merge(begin: int) -> Merged:
        where, written = (window.read, weights, begin, min(begin + step, window.size)), numpy.zeros(count, numpy.int64)
        largest = loops.competing(*where, bounds, less, exponents, products, places, written)
        for own, other, some in zip(*factors, written.tolist(), strict=True):
            own[:some].exp_()
            other[:some].tanh_()
        error, change, most = loops.balanced(*where, bounds, exponents, products, places, written, *_written(window))
        return _merged((error, change, largest, most))

    error, change, finite, fits = zip(*map(merge, range(0, window.size, step)), strict=True)
    return Merged(sum(error), sum(change), all(finite), all(fits))


def counted(window: Window, threshold: float) -> Any:
    """Coordinates that each expert changes by more than the threshold, with others, then alone: (2, experts, 1)."""
    counts = numpy.empty((2, len(window.read) - 1, 1))
    window.loops.counted(window.read, window.size, numpy.float32(threshold), counts)
    return counts


def variances(window: Window) -> Tensor:
    """N times the variance of each coordinate over N task vectors; valid until the thread's next window."""
    out = window.room("variances", window.size, torch.float32)
    window.loops.variances(window.read, window.size, _weights(window), array(out))
    return out.abs_()  # a NaN may have a sign


def sampled_variances(window: Window, step: int) -> Any:
    """The bits of some `variances`: runs of neighbours, one in every ``step`` coordinates of the leaf."""
    out = numpy.empty((window.size // step + 2, window.loops.RUN), numpy.uint32)  # a window may cut two steps
    found = window.loops.sampled_variances(window.read, window.size, _weights(window), window.start, step, out)
    return out[:found]


def variances_between(window: Window, low: int, high: int) -> tuple[list[int], Any]:
    """How many `variances` are below low, equal to low, between both, equal to high, and 0; those between both.

    Args: low, high: bits, low < high. Returns: of those between both the bits, uint32.
    """
    room = array(window.room("hits", window.size + 1, torch.int32)).view(numpy.uint32)
    where = window.read, window.size, _weights(window), numpy.uint32(low), numpy.uint32(high), room
    counts = list(map(int, window.loops.variances_between(*where)))
    return counts, room[: counts[2]].copy()


def nth_equal_variance(window: Window, bits: int, count: int) -> int:
    """The position in the leaf of the ``count``-th (from 1) of the window's `variances` of these bits."""
    where = window.read, window.size, _weights(window)
    return window.start + int(window.loops.nth_equal_variance(*where, numpy.uint32(bits), count))


def varying_squares(window: Window, bits: int, last: int) -> Any:
    """Squared norms, by blocks of `NORMED`, of the coordinates that `varying` keeps: (experts, blocks).

    Args: window: from a multiple of `NORMED` on.
    """
    sums = numpy.empty((len(window.read) - 1, -(-window.size // NORMED)))
    where = window.read, window.start, window.size, _weights(window)
    window.loops.varying_squares(*where, numpy.uint32(bits), last, sums)
    return sums


def varying(window: Window, shares: Sequence[float], bits: int, last: int, floor: float) -> Merged:
    """SCE of coordinates whose variance has bits above these, or equal ones up to a position; 0 in the others."""
    where = window.read, window.start, window.size, _weights(window), numpy.array(shares, numpy.float32)
    limits = numpy.uint32(bits), last, numpy.float32(floor)
    return _merged(window.loops.varying(*where, *limits, *_written(window)))


def joined(sums: Iterable[Any]) -> Any:
    """The sums of windows, one after the other."""
    return numpy.concatenate(list(sums), -1)


def norms_of_task(window: Window, place: int) -> Any:
    """Sums of magnitudes by blocks of `NORMED`: (2, 1, blocks), of a task vector, then of EMR's vector for that task.

    Args: window: from a multiple of `NORMED` on.
    """
    sums = numpy.empty((2, 1, -(-window.size // NORMED)))
    window.loops.norms_of_task(window.read, window.size, place, sums)
    return sums


class Tasks(NamedTuple):
    """Results of `of_all_tasks` for a window; their memory is taken again by the thread's next window."""

    vector: Tensor  # float32, that all tasks share
    masks: Tensor  # uint8 (experts, bytes), as numpy packs them
    sums: list[float]  # by expert, of magnitudes of its task vector and of what its mask leaves; 0 where not asked for
    finite: bool  # all differences are
    fits: bool  # the vector is finite


def of_all_tasks(window: Window, kind: str, ratio: float = 0.0, *, summed: bool = False) -> Tasks:
    """One vector for all tasks, and their masks. Args: window: of at most 64 blocks of `NORMED`."""
    count, size = len(window.read) - 1, window.size
    vector = window.room("vector", size, torch.float32)
    masks = window.room("masks", count * -(-size // 8), torch.uint8).view(count, -1)
    sums = numpy.empty((count * summed, 2))
    numbers = getattr(window.loops, kind), numpy.float32(ratio)
    largest, written = window.loops.of_all_tasks(window.read, size, *numbers, array(vector), masks.numpy(), sums)
    return Tasks(vector, masks, sums.ravel().tolist() or [0.0] * (2 * count), largest < INFINITE, written < INFINITE)


Shared: TypeAlias = Callable[[Window], Tasks]


def votes(loops: ModuleType, read: Any, start: int, size: int, bands: Sequence[Band]) -> int:
    """The sum of the signs of the sums that `ByMagnitude` elects by; arguments as `Window`'s."""
    return int(loops.votes(read, start, size, *_limits(bands)))


def _limits(bands: Sequence[Band]) -> tuple[Any, Any]:
    limits, splits = [limits for limits, _ in bands], [splits for _, splits in bands]
    return numpy.array(limits, numpy.uint32).reshape(-1, 4), numpy.array(splits, numpy.int64).reshape(-1, 2)


def ranked(loops: ModuleType, read: Any, by_rank: Any, out: Any, room: Room | None = None) -> None:
    """The number of its rank for each coordinate: of its magnitude in its row, equal ones by position.

    Args: read: `sources` of base and experts, or of one vector; by_rank: uint16 (experts, length of a row), or one row
        for all; out: uint16 (experts, size), whole rows; room: as of `Window`.
    """
    (count, size), length, room = out.shape, by_rank.shape[1], room or _room
    like = numpy.empty(0, numpy.uint16 if length <= MOST else numpy.uint32)
    if length >= SHORT and loops.ranked_by_counts(read, size, by_rank, like, out):
        return
    vectors = array(room("vectors", count * size, torch.float32)).reshape(count, size)
    if len(read) > count:  # base is read once for all experts
        loops.vectors(read, size, vectors)
    else:
        loops.magnitudes(read, size, vectors[0].view(numpy.uint32))
    bits = min((length - 1).bit_length() + 3, 16)  # eight buckets for each coordinate of a row, or more
    for own, numbers, to in zip(vectors, numpy.broadcast_to(by_rank, (count, length)), out, strict=True):
        sizes, numbers = own.view(numpy.uint32), numpy.ascontiguousarray(numbers)
        if length > MOST or not loops.ranked_by_buckets(sizes, numbers, bits, to):
            order = array(room("order", size, torch.int64))
            loops.items(sizes, length, order)
            order.reshape(-1, length).sort(axis=-1)
            loops.ranked_in_order(order, numbers, to)


def _room(_: str, count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device="cpu")


def _weights(window: Window) -> Any:
    return numpy.array(window.weights or [1.0] * (len(window.read) - 1), numpy.float32)


def _written(window: Window) -> tuple[Any, Any]:
    target = sources([window.out])
    if window.coef is None:
        target[0, 1] = VECTOR
    return numpy.float32(1 if window.coef is None else window.coef), target


def _merged(found: tuple[float, float, int, int]) -> Merged:
    error, change, largest, written = found
    return Merged(float(error), float(change), largest < INFINITE, written < INFINITE)
