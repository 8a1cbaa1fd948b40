"""The rows of a weight that an adapter changes, formed some at a time."""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....execution import unrounded
from ..stored import Read
from . import products

BLOCK = 1 << 15  # coordinates of one matrix product: its shape decides the last bit, so it is not an option


class Magnitude(NamedTuple):
    """DoRA: the norms that rows of the changed weight get, or columns, which in a convolution are input channels."""

    name: str  # in the file
    of_columns: bool = False
    eps: float = 0.0  # added to the norms that the changed weight has, by which it is divided


class Change(NamedTuple):
    """ΔW = scale · the product of tensors, or its transpose."""

    parts: Mapping[str, str]  # by what they are -> names in the file
    transposed: bool
    scale: float
    magnitude: Magnitude | None = None


def changed(store: Any, change: Change, origin: Read, leaf: Tensor) -> Read:
    """A reader of a weight with its change.

    Args: store: has the tensors of the change; origin: reads the weight of base; leaf: its shape and the dtype to read.
    """
    columns = math.prod(leaf.shape[1:])
    height = max(1, BLOCK // columns)

    def blocks(start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Of the change, the first row and the values of whole blocks, always the same ones: of another shape the last
        bits of a product differ."""
        parts = {part: store.get_tensor(name) for part, name in change.parts.items()}
        device = next(iter(parts.values())).device
        with unrounded(device):
            rows = products.rows_of(parts, transposed=change.transposed)
        for first in range(start // columns // height * height, -(-stop // columns), height):
            with unrounded(device):
                yield first, rows(first, first + height).mul_(change.scale)

    def whole(first: int, block: Tensor) -> Tensor:
        """Rows of base, changed by a block."""
        begin = first * columns
        return (origin(begin, begin + block.numel()).to(leaf.dtype) + block.view(-1)).view(-1, columns)

    @cache
    def of_columns() -> Tensor:
        """The norm of each column of the changed weight, in a convolution of all of each input channel: (columns,)."""
        channels = leaf.shape[1]
        total = torch.zeros(channels, dtype=torch.float64)
        for first, block in blocks(0, leaf.numel()):
            total += whole(first, block).double().square_().sum(0).view(channels, -1).sum(1).to(total.device)
        return total.sqrt_().to(leaf.dtype).repeat_interleave(columns // channels)

    def normed(first: int, block: Tensor, magnitude: Magnitude) -> Tensor:
        """Rows of the changed weight with the norms of its magnitude."""
        made, size = whole(first, block), store.get_tensor(magnitude.name).float()
        if magnitude.of_columns:
            norms, size = of_columns().to(made.device), size.view(-1).repeat_interleave(columns // size.numel())
        else:
            norms, size = torch.linalg.vector_norm(made, dim=1, keepdim=True), size.view(-1, 1)[first : first + height]
        return made.mul_(size / (norms + magnitude.eps))

    def read(start: int, stop: int) -> Tensor:
        out = origin(start, stop).to(leaf.dtype, copy=True)
        for first, block in blocks(start, stop):
            begin = first * columns
            low, high = max(start, begin), min(stop, begin + block.numel())
            if change.magnitude is None:
                out[low - start : high - start] += block.view(-1)[low - begin : high - begin]
            else:
                made = normed(first, block, change.magnitude)
                out[low - start : high - start] = made.view(-1)[low - begin : high - begin]
        return out

    return read
