"""Windows of leaves merged by compiled loops: what a merger's `merger.Rule` calls in place of its torch operations.

They read weights as they are stored, a tile at a time, and write merged ones: no float32 copy of a tensor is made.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from ...compiled import array
from ...ops.cpu import place

KINDS = torch.float32, torch.bfloat16  # that the loops read and write
NEVER = 1 << 62  # a position that no coordinate has
INFINITE = 0x7F800000  # bits of infinity, above all others


class Window(NamedTuple):
    """Coordinates of one leaf, on the CPU, of the dtypes `KINDS`."""

    loops: ModuleType
    start: int  # flat coordinate of the first one in its leaf
    size: int
    read: Any  # `sources` of base, then of the experts
    held: object  # owns their memory
    keys: Any  # uint64 (experts, 2), mask streams of the leaf; None where nothing is random
    coef: float
    out: Tensor  # what is merged is written here
    room: Callable[[str, int, torch.dtype], Tensor]  # memory of a name, which it gave before: taking new costs time


class Merged(NamedTuple):
    """Squared norms of the rounding error and of the change; whether all differences, and all results, are finite."""

    error: float
    change: float
    finite: bool
    fits: bool


Loop: TypeAlias = Callable[[Window], Merged]
Band: TypeAlias = tuple[tuple[int, int, int, int], tuple[int, int]]  # see `banded`


def sources(parts: Sequence[Tensor]) -> Any:
    """Addresses and kinds of tensors, which must be alive as long as they are used: uint64 (n, 2)."""
    return numpy.array([[part.data_ptr(), part.dtype == torch.bfloat16] for part in parts], numpy.uint64)


def bits_of(value: Tensor) -> int:
    """The bits of a float32 number that is not negative."""
    return int(value.cpu().view(torch.int32))


def banded(
    window: Window, bands: Sequence[Band], *, elect: bool = False, mean: bool = False, majority: int = 1
) -> Merged:
    """Merges the magnitudes from ``low`` on and below ``high``, as bits, of every expert.

    Args:
        bands: of the experts: ((low, low', high, high'), (i, j)), where low' holds from flat position i of the leaf on,
            high' from j on.
        elect: take what has the sign of the sum, else all.
        mean: of what is added.
        majority: the sign of a zero sum.
    """
    options = elect, mean, numpy.float32(majority)
    read = window.read, window.start, window.size, *_limits(bands)
    return _merged(window.loops.banded(*read, *options, *_written(window)))


def votes(loops: ModuleType, read: Any, start: int, size: int, bands: Sequence[Band]) -> int:
    """The sum of the signs of the sums that `banded` elects by; arguments as `Window`'s."""
    return int(loops.votes(read, start, size, *_limits(bands)))


def _limits(bands: Sequence[Band]) -> tuple[Any, Any]:
    limits, splits = [limits for limits, _ in bands], [splits for _, splits in bands]
    return numpy.array(limits, numpy.uint32).reshape(-1, 4), numpy.array(splits, numpy.int64).reshape(-1, 2)


def masked(window: Window, threshold: int, *, elect: bool = False, mean: bool = False) -> Merged:
    """Merges what the mask streams keep, divided by the keep probability; ``elect`` takes + for a zero sum."""
    numbers = numpy.int32(threshold), numpy.float32(1 - threshold / 65536)
    where = *place(window.start), window.size, window.keys
    return _merged(window.loops.masked(window.read, *where, *numbers, elect, mean, *_written(window)))


def ranked(window: Window, by_rank: Tensor) -> Merged:
    """Merges whole rows of which ``by_rank`` gives the threshold of each rank: the mean of what has the sum's sign."""
    loops, size = window.loops, window.size
    vectors = window.room("vectors", (len(window.read) - 1) * size, torch.float32).numpy().reshape(-1, size)
    delta = window.room("delta", size, torch.float32).numpy()
    fields = window.room("fields", size, torch.int16).numpy()
    items = array(window.room("items", size, torch.int64))
    largest, read = 0, window.read
    where = [numpy.array([number]) for number in (*place(window.start), size)]
    for i, (vector, key) in enumerate(zip(vectors, window.keys, strict=True)):
        largest = max(largest, int(loops.deltas(read[[0, i + 1]], size, delta)))
        loops.fields(key[None], *where, fields)
        drop_by_rank(loops, delta, fields, array(by_rank), vector, items)
    done = loops.elected(vectors, read[:1], size, True, *_written(window))
    return _merged((*done[:2], largest, done[3]))


def drop_by_rank(loops: ModuleType, delta: Any, fields: Any, by_rank: Any, out: Any, items: Any) -> None:
    """Rows of ``delta`` divided by the keep probabilities of their ranks, 0 where the field is below the threshold.

    Args: delta, out: float32, memory of their own; fields: int16, less 32768; by_rank: int32, one a coordinate of a
        row; items: uint64.
    """
    loops.items(delta, len(by_rank), items)
    if len(by_rank) > 1:
        items.reshape(-1, len(by_rank)).sort(axis=-1)  # by the vector units of the processor
    loops.dropped_by_rank(delta, items, fields, by_rank, out)


def _written(window: Window) -> tuple[Any, Any]:
    return numpy.float32(window.coef), sources([window.out])


def _merged(found: tuple[float, float, int, int]) -> Merged:
    error, change, largest, written = found
    return Merged(float(error), float(change), largest < INFINITE, written < INFINITE)
