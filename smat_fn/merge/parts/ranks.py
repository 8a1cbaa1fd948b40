"""Order statistics of magnitudes by their bit patterns, which are ordered as the floats are: exact, on every device.

Each level counts 16 bits of the magnitudes that agree with the target in all higher bits: two passes for float32, four
for float64. ``torch.kthvalue`` on CUDA has no deterministic form and counts in 32 bits; its sort takes 2³¹ − 1 numbers.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy
import torch
from torch import Tensor

SMALL = 1 << 15  # numbers that are sorted rather than counted
STEP = 1 << 19  # numbers that are counted at a time
AWAY = 1 << 24  # the same where the host waits for each count
SORTED = 2**31 - 1  # numbers that CUDA sorts
BINS = 1 << 16
INFINITE = {torch.float32: 0x7F800000, torch.float64: 0x7FF0 << 48}  # bits that exceed those of all numbers
_INTS = {torch.float32: (torch.int32, 32, 0x7F80), torch.float64: (torch.int64, 64, 0x7FF0)}

Scan: TypeAlias = Callable[[], Iterable[Tensor]]  # parts of one dtype, the same ones at each call
Value = TypeVar("Value")


class Over(Protocol):
    """Calls a function on every part of some rows of numbers, (rows, n), the same parts at each call."""

    def __call__(self, function: Callable[[Tensor], Value], /) -> Iterable[Value]: ...


class Order(NamedTuple):
    """The magnitude of one rank, as bits, and how many others there are below it and equal to it."""

    bits: int
    below: int
    equal: int


def select(scan: Scan, rank: int, dtype: torch.dtype) -> tuple[Order, bool]:
    """The ``rank``-th smallest (from 1) of all magnitudes of ``dtype``; and whether all of them are finite.

    Args: scan: of flat tensors.
    """
    integer, width, not_finite = _INTS[dtype]
    prefix, left, equal, finite = 0, rank, 0, True
    for shift in range(width - 16, -1, -16):
        counted: list[Tensor] = []
        for magnitudes in scan():
            bits = magnitudes.view(integer)
            if shift < width - 16:
                bits = (_matching(bits, shift + 16, prefix) >> shift).bitwise_and_(BINS - 1)
            else:
                bits = bits >> shift
            own = torch.bincount(bits, minlength=BINS)
            counted = [counted[0].add_(own) if counted else own]
        counts = counted[0].cpu()
        if shift == width - 16:
            finite = not bool(counts[not_finite:].any())
        upto = counts.cumsum(0)
        found = int(torch.searchsorted(upto, left))
        equal = int(counts[found])
        left -= int(upto[found]) - equal
        prefix = prefix << 16 | found
    return Order(prefix, rank - left, equal), finite


def _matching(bits: Tensor, shift: int, prefix: int) -> Tensor:
    high = bits >> shift
    if bits.device.type != "cpu":
        return bits[high == prefix]
    return torch.from_numpy(bits.numpy()[high.numpy() == prefix])  # in a quarter of torch's time


def position(scan: Scan, bits: int, count: int) -> int:
    """The flat position of the ``count``-th (from 1) magnitude of these bits."""
    start = 0
    for magnitudes in scan():
        equal = (_keys(magnitudes) == bits).nonzero().squeeze(1)
        if count <= len(equal):
            return start + int(equal[count - 1])
        count, start = count - len(equal), start + magnitudes.numel()
    raise AssertionError("fewer equal magnitudes than counted")


def value_of(bits: int, dtype: torch.dtype) -> Tensor:
    """The 0-d float of a bit pattern, on the CPU: tensors of every device compare with it without a wait."""
    return torch.tensor(bits, dtype=_INTS[dtype][0], device="cpu").view(dtype)


def order_of(magnitudes: Tensor, rank: int) -> Order:
    """The ``rank``-th smallest (from 1) of the magnitudes of a flat tensor; NaN is above all numbers."""
    if magnitudes.numel() > SMALL:
        return select(_steps(magnitudes), rank, magnitudes.dtype)[0]
    ordered = numpy.sort(_keys(magnitudes).cpu().numpy())
    found = ordered[rank - 1]
    first, last = (int(ordered.searchsorted(found, side)) for side in ("left", "right"))
    return Order(int(found), first, last - first)


def position_of(magnitudes: Tensor, bits: int, count: int) -> int:
    """`position` in a flat tensor."""
    return position(_steps(magnitudes), bits, count)


def _steps(magnitudes: Tensor) -> Scan:
    return partial(magnitudes.split, STEP if magnitudes.device.type == "cpu" else AWAY)


def largest(magnitudes: Tensor, count: int) -> tuple[Order, int]:
    """The least of the ``count`` (at least 1) largest magnitudes of a flat tensor, and the last position of its bits.

    Of equal ones the first positions count.
    """
    size = magnitudes.numel()
    order = order_of(magnitudes, size - count + 1)
    return order, position_of(magnitudes, order.bits, count - (size - order.below - order.equal))


def among_largest(magnitudes: Tensor, count: int) -> Tensor:
    """The mask of the ``count`` largest magnitudes of a flat tensor; of equal ones the first positions count."""
    if count < 1:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    order, last = largest(magnitudes, count)
    return above(magnitudes, order.bits, last)


def above(magnitudes: Tensor, bits: int, last: int, start: int = 0) -> Tensor:
    """The mask of magnitudes above these bits, or equal to them up to position ``last``. Args: start: of the first."""
    keys, upto = _keys(magnitudes), max(last + 1 - start, 0)
    mask = keys > bits
    mask[:upto] |= keys[:upto] == bits
    return mask


def at_places(values: Tensor, places: Sequence[int]) -> list[Tensor]:
    """``values.sort().values[place]`` of a flat tensor, without a NaN where there are more than `SORTED` of them."""
    if len(values) > SORTED:
        parts = values[None].split(STEP, 1)
        return [found[0, 0].to(values.dtype) for found in ordered(lambda count: map(count, parts), places, parts[0])]
    if values.device.type == "cpu":
        every = torch.from_numpy(numpy.sort(values.detach().numpy()))  # in vector registers: a tenth of torch's time
    else:
        every = values.sort().values
    return [every[place] for place in places]


def ordered(over: Over, ranks: Sequence[int], like: Tensor) -> list[Tensor]:
    """The values of these ranks, from 0, of every row: (rows, 1) float64 each.

    Args: over: calls what counts on parts, whose numbers may be negative; like: of their rows and dtype.
    """
    (integer, bits, _), rows = _INTS[like.dtype], len(like)
    found = [[(0, rank) for rank in ranks] for _ in range(rows)]  # the bits that are known, the rank among their like
    for shift in range(bits - 16, -1, -16):
        highest = shift == bits - 16

        def count(values: Tensor, shift: int = shift, highest: bool = highest) -> Tensor:
            keys = _flipped(values.view(integer), bits)
            if highest:
                digits = [[(own >> shift).add_(BINS // 2)] for own in keys]
            else:
                digits = [
                    [(_matching(own, shift + 16, known) >> shift).bitwise_and_(BINS - 1) for known, _ in places]
                    for own, places in zip(keys, found, strict=True)
                ]
            return torch.stack([torch.stack([torch.bincount(d, minlength=BINS) for d in row]) for row in digits])

        counts = reduce(Tensor.add_, over(count)).cpu().expand(-1, len(ranks), -1)
        sums = counts.cumsum(-1)
        for row, places in enumerate(found):
            for column, (known, rank) in enumerate(places):
                digit = int(torch.searchsorted(sums[row, column], rank, right=True))
                below = int(sums[row, column, digit] - counts[row, column, digit])
                known = digit - BINS // 2 if highest else known << 16 | digit
                places[column] = known, rank - below
    keys = _flipped(torch.tensor([[known for known, _ in places] for places in found], device="cpu"), bits)
    values = keys.view(torch.float64) if bits == 64 else keys.to(torch.int32).view(torch.float32)
    return list(values.T[..., None].double().to(like.device))


def _flipped(keys: Tensor, bits: int) -> Tensor:
    """Integers in the order of the floats whose bits they hold, and back."""
    return keys ^ ((keys >> (bits - 1)) & ((1 << (bits - 1)) - 1))


def _keys(magnitudes: Tensor) -> Tensor:
    return magnitudes.view(_INTS[magnitudes.dtype][0])
