"""Exact order statistics of magnitudes that are never in memory together: histograms of their bit patterns.

The bit patterns of non-negative floats are ordered as the floats are. Each level counts 16 bits of the magnitudes that
agree with the target in all higher bits: two passes for float32, four for float64.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_BINS = 1 << 16
_INTS = {torch.float32: (torch.int32, 32, 0x7F80), torch.float64: (torch.int64, 64, 0x7FF0)}

Scan = Callable[[], Iterator[Tensor]]  # magnitudes, flat tensors of one dtype, the same ones at each call


class Order(NamedTuple):
    """The magnitude of one rank, as bits, and how many others there are below it and equal to it."""

    bits: int
    below: int
    equal: int


def select(scan: Scan, rank: int, dtype: torch.dtype) -> Order | None:
    """The ``rank``-th smallest (from 1) of all magnitudes of ``dtype``; None if one of them is not finite."""
    integer, width, not_finite = _INTS[dtype]
    prefix, left, equal = 0, rank, 0
    for shift in range(width - 16, -1, -16):
        counts = torch.zeros(_BINS, dtype=torch.int64)
        for magnitudes in scan():
            bits = magnitudes.view(integer)
            if shift < width - 16:
                bits = _matching(bits, shift + 16, prefix) >> shift
                counts += torch.bincount(bits.bitwise_and_(_BINS - 1), minlength=_BINS).cpu()
            else:
                counts += torch.bincount(bits >> shift, minlength=_BINS).cpu()
        if shift == width - 16 and bool(counts[not_finite:].any()):
            return None
        upto = counts.cumsum(0)
        found = int(torch.searchsorted(upto, left))
        equal = int(counts[found])
        left -= int(upto[found]) - equal
        prefix = prefix << 16 | found
    return Order(prefix, rank - left, equal)


def _matching(bits: Tensor, shift: int, prefix: int) -> Tensor:
    high = bits >> shift
    if bits.device.type != "cpu":
        return bits[high == prefix]
    return torch.from_numpy(bits.numpy()[high.numpy() == prefix])  # in a quarter of torch's time


def value_of(bits: int, dtype: torch.dtype) -> Tensor:
    """The 0-d float of a bit pattern."""
    return torch.tensor(bits, dtype=_INTS[dtype][0]).view(dtype)


def position(scan: Scan, value: Tensor, count: int) -> int:
    """The flat position of the ``count``-th (from 1) magnitude that equals ``value``."""
    start = 0
    for magnitudes in scan():
        equal = (magnitudes == value).nonzero().squeeze(1)
        if count <= len(equal):
            return start + int(equal[count - 1])
        count, start = count - len(equal), start + magnitudes.numel()
    raise AssertionError("fewer equal magnitudes than counted")
