"""Arithmetic of mergers on task vectors: sums in a fixed order, signs, and inner products."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.functional import pad

from ... import tree
from ...execution import array, loops_for
from .looped import NORMED, sources

PART = 4096  # coordinates whose products are added by halves: part of the definition of `gram`
PARTS = 64  # of those sums, the same
BLOCK = PARTS * PART
AWAY = 32  # blocks of all tensors in one pass on a GPU, where a launch takes longer than a block


def add(tensors: Iterable[Tensor], *, into_first: bool = False) -> Tensor:
    """The sum in the order given, in new memory or in that of the first."""
    rest = iter(tensors)
    total = next(rest) if into_first else next(rest).clone()
    for tensor in rest:
        total += tensor
    return total


def plain_sum(numbers: Iterable[float]) -> float:
    """Numbers added one after the other: Python's ``sum`` compensates errors from 3.12 on, which changes last bits."""
    return reduce(operator.add, numbers, 0.0)


def divided(tensor: Tensor, number: float) -> Tensor:
    """``tensor.div_(number)``, bit-identical on every device."""
    return tensor.div_(divisor(number, tensor))


def divisor(number: float, like: Tensor) -> Tensor:
    """A number as a tensor that ``like`` is divided by: by a number CUDA multiplies with its rounded reciprocal."""
    return torch.full((), number, dtype=like.dtype, device=like.device)


def weighted(tensors: Iterable[Tensor], weights: Iterable[float]) -> Tensor:
    """Σ_i w_i t_i, in new memory."""
    return add(tensor * weight for tensor, weight in zip(tensors, weights, strict=True))


def elected(tensors: Sequence[Tensor]) -> Tensor:
    """+ where the sum is at least 0, and else −, as 1 and −1."""
    return (add(tensors) >= 0).to(tensors[0].dtype).mul_(2).sub_(1)


def agreeing(tensors: Sequence[Tensor], sign: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of the non-zero entries whose sign is ``sign``; 0 where there are none."""
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    loops = loops_for(sign, *tensors) if sign.dtype == torch.float32 else None
    for tensor in tensors:
        if loops is not None:
            loops.agree(*map(array, (tensor, sign, total, count)))
            continue
        agrees = tensor * sign > 0
        total += zeroed(tensor, agrees)
        if mean:
            count += agrees.to(count.dtype)
    return total / count.clamp(min=1) if mean else total


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """``values.where(keep, 0)``, by bits: a branch a coordinate takes ten times as long."""
    kind = torch.int64 if values.itemsize == 8 else torch.int32
    return keep.to(kind).neg_().bitwise_and_(values.view(kind)).view(values.dtype)


def gram(leaves: Sequence[Tensor], start: Tensor | None = None) -> list[list[float]]:
    """All inner products of N tensors, or of their differences from ``start``, as float64 numbers.

    The float64 products of 4,096 coordinates are added by halves, coordinate i to coordinate i + half, so are 64 of
    these sums, and then one after the other: no chunk size, thread count or device changes a bit.
    """
    first, others = leaves[0], ([] if start is None else [start])
    dtype = tree.compute_dtype(*leaves, *others)
    flat = [leaf.reshape(-1) for leaf in leaves]
    origin = None if start is None else start.reshape(-1)

    def block(begin: int, end: int) -> Tensor:
        rows = torch.stack([leaf[begin:end].to(first.device, dtype) for leaf in flat])
        return rows if origin is None else rows.sub_(origin[begin:end].to(first.device, dtype))

    size, step = first.numel(), step_on(first.device, len(flat))
    return gram_sum((products(block(begin, min(begin + step, size))) for begin in range(0, size, step)), len(flat))


def step_on(device: torch.device, count: int) -> int:
    """Coordinates of each of ``count`` tensors that inner products read in one pass: whole blocks."""
    return BLOCK if device.type == "cpu" else max(1, AWAY // max(1, count)) * BLOCK


def gram_sum(blocks: Iterable[Tensor], count: int) -> list[list[float]]:
    """`gram` of ``count`` tensors by the `products` of their blocks."""
    total = torch.zeros(count, count, dtype=torch.float64, device="cpu")
    for block in chain.from_iterable(blocks):
        total = total.to(block.device).add_(block)  # once: the host waits for a leaf, not for its blocks
    return total.tolist()


def squares(blocks: Iterable[Sequence[Tensor]]) -> list[float]:
    """The diagonal of `gram`: squared norms of flat tensors of one size, given in whole blocks."""
    sums = (torch.stack([products(row[None])[:, 0, 0] for row in rows], 1) for rows in blocks)
    return add(chain.from_iterable(sums)).tolist()


def products(rows: Tensor) -> Tensor:
    """All inner products of n rows of coordinates, block by block: float64 (blocks, n, n)."""
    size = rows.shape[1]
    if (loops := loops_for(rows)) is not None and rows.dtype == torch.float32 and size <= BLOCK:
        rows = rows.contiguous()
        return products_of(loops, sources([rows[0], *rows]), size, based=False, diagonal=False)
    wide = pad(rows, (0, -size % (BLOCK if size > BLOCK else PART))).double()
    parts = min(wide.shape[1] // PART, PARTS)

    def sums(row: Tensor) -> Tensor:
        return halved(halved((wide * row).view(-1, PART)).view(-1, parts)).view(len(rows), -1)

    return torch.stack([sums(row) for row in wide]).movedim(-1, 0)


def products_of(loops: ModuleType, read: Any, size: int, *, based: bool, diagonal: bool) -> Tensor:
    """`products` of a block by a loop.

    Args: read: `sources`, base first; based: of differences from it, or without; diagonal: no others.
    """
    found = numpy.empty((1, len(read) - 1, len(read) - 1))
    loops.gram(read, size, based, diagonal, found[0])
    return torch.from_numpy(found)


def halved(rows: Tensor) -> Tensor:
    """The sum of each row, added by halves, coordinate i to coordinate i + half: no thread count changes a bit."""
    rows = pad(rows, (0, (1 << (rows.shape[1] - 1).bit_length()) - rows.shape[1]))
    if (half := rows.shape[1] // 2) > 0:
        rows = rows[:, :half] + rows[:, half:]
    while half > 1:
        half //= 2
        rows[:, :half] += rows[:, half : 2 * half]  # memory that is taken and given back costs more than the sums
    return rows[:, 0]


class Norm:
    """The L1 norm of a float vector that is given part by part, whatever the parts, as a float64 number.

    Magnitudes of a block of 4,096 coordinates are added by halves in float64, and the blocks' sums exactly.
    """

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self._sums: list[Tensor] = []  # on devices that the host need not wait for
        self._rest: Tensor | None = None

    def add(self, part: Tensor) -> None:
        """Take the next coordinates."""
        if self._rest is not None:
            part = torch.cat([self._rest, part])
        whole = len(part) // NORMED * NORMED
        self._rest = part[whole:].clone() if whole < len(part) else None
        if whole and part.device.type == "cpu":  # small tensors between large ones that go would fragment memory
            self._numbers += absolute_sums(part[:whole]).tolist()
        elif whole:
            self._sums.append(absolute_sums(part[:whole]).clone())

    def value(self) -> float:
        """The norm of all so far."""
        rest = [] if self._rest is None else [absolute_sums(self._rest)]
        return math.fsum((*self._numbers, *(number for sums in (*self._sums, *rest) for number in sums.tolist())))


def absolute_sums(values: Tensor) -> Tensor:
    """Sums of the magnitudes of blocks of `NORMED` coordinates, each added by halves: float64."""
    if (loops := loops_for(values)) is None or values.dtype != torch.float32:
        return halved(pad(values, (0, -len(values) % NORMED)).view(-1, NORMED).abs().double())
    sums = numpy.empty((1, -(-len(values) // NORMED)))
    loops.absolute_sums(array(values)[None], sums)
    return torch.from_numpy(sums[0])


def block_sums(sums: Tensor) -> list[float]:
    """Sums of `BLOCK` coordinates from `absolute_sums`, added by halves."""
    return halved(pad(sums, (0, -len(sums) % PARTS)).view(-1, PARTS)).tolist()


def largest(leaves: Mapping[str, Tensor]) -> int:
    """The number of coordinates of the largest leaf."""
    return max((leaf.numel() for leaf in leaves.values()), default=0)


def gram_memory(leaves: Mapping[str, Tensor], experts: int) -> int:
    """`Merger.memory` of what calls `Mapped.gram`."""
    return 32 * experts * min(largest(leaves), BLOCK)


def blocks_memory(leaves: Mapping[str, Tensor], experts: int) -> int:
    """`Merger.memory` of what calls `Mapped.blocks`."""
    return (8 * experts + 64) * min(largest(leaves), BLOCK)


def cosine(products: Sequence[Sequence[float]], left: int, right: int) -> float:
    """The cosine of the angle between two tensors of a `gram`; 0 where one of them is zero."""
    size = (products[left][left] * products[right][right]) ** 0.5
    return products[left][right] / size if size else 0.0
