"""The values of weights in 8-bit floats with scales, and in MXFP4, read in flat ranges."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .stored import FLOAT8, Read

STANDARD = 128, 128  # blocks of DeepSeek and transformers, whose files may come without a configuration
GROUP = 32  # weights of MXFP4 that share a power of two
_FP4 = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_PAIRS = [[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)]  # the two weights of each byte


class Grid(NamedTuple):
    """How scales lie over a weight: matrices, each with blocks of rows and columns that share a scale."""

    matrix: tuple[int, int]  # rows and columns of a matrix of the weight
    scales: tuple[int, int]  # blocks of rows, and of columns
    block: tuple[int, int]  # rows and columns of a block

    @classmethod
    def of(cls, shape: torch.Size, scales: torch.Size, block: tuple[int, int] | None) -> "Grid | None":
        """The grid of scales of a shape; None where they do not fit.

        Blocks of rows and columns are those of ``block``, of which the last ones may be smaller. Else they are rows,
        the whole weight or, where nothing says what they are (``block`` is None), `STANDARD` or equal ones.
        """
        size, matrix = shape.numel(), ((1, 1, *shape)[-2], (1, *shape)[-1])
        if not size or not scales.numel():
            return None
        if scales.numel() == 1:
            return cls((size // matrix[1], matrix[1]), (1, 1), (size, matrix[1]))
        if len(scales) == 1:
            scales = torch.Size([*scales, 1])
        if len(scales) != len(shape) or scales[:-2] != shape[:-2]:
            return None
        grid = scales[-2], scales[-1]
        known = block or STANDARD
        if all(-(-n // size) == k for n, size, k in zip(matrix, known, grid, strict=True)):
            return cls(matrix, grid, known)
        rows = grid == (matrix[0], 1)
        if any(n % k for n, k in zip(matrix, grid, strict=True)) or not (block is None or rows):
            return None
        return cls(matrix, grid, (matrix[0] // grid[0], matrix[1] // grid[1]))


@dataclass(frozen=True)
class Scaled:
    """Reads coordinates of 8-bit floats, each times the scale of its block in float32, rounded once."""

    values: Read
    scales: Read
    grid: Grid
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        (height, width), (high, wide), (rows, columns) = self.grid
        first, last = start // width, -(-stop // width)
        row = torch.arange(first, last)
        places = row // height * high + row % height // rows
        held = slice(int(places[0]) * wide, (int(places[-1]) + 1) * wide) if len(row) else slice(0, 0)
        scales = _float(self.scales(held.start, held.stop)).view(-1, wide)[places - places[:1], :, None]
        factors = scales.expand(-1, -1, min(columns, width)).reshape(len(row), wide * min(columns, width))[:, :width]
        own = factors.reshape(-1)[start - first * width :][: stop - start]
        return _float(self.values(start, stop)).mul_(own).to(self.dtype)


@dataclass(frozen=True)
class Widened:
    """Reads coordinates of 8-bit floats that have no scales."""

    values: Read
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        return _float(self.values(start, stop)).to(self.dtype)


@dataclass(frozen=True)
class Unpacked:
    """Reads coordinates of MXFP4, whose rows are stored as columns: (experts, columns, groups, bytes of a group)."""

    blocks: Read
    powers: Read
    packed: torch.Size
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        experts, width, groups, _ = self.packed
        height, both = groups * GROUP, torch.tensor(_PAIRS)
        blocks = self.blocks(0, self.packed.numel()).view(self.packed)
        powers = self.powers(0, experts * width * groups).view(experts, width, groups)
        first, last, found = start // width, -(-stop // width), [torch.empty(0, width, dtype=self.dtype)]
        while first < last:  # the rows of one expert at a time
            expert, row = divmod(first, height)
            end = min(row + last - first, height)
            cut = slice(row // GROUP, -(-end // GROUP))
            scales = _float(powers[expert, :, cut])
            pairs = both.index_select(0, blocks[expert, :, cut].reshape(-1).int())
            values = pairs.view(width, -1, GROUP).mul_(scales[..., None]).view(width, -1).t()
            found.append(values[row - cut.start * GROUP :][: end - row].to(self.dtype))
            first += end - row
        return torch.cat(found).view(-1)[start % width :][: stop - start]


def _float(stored: Tensor) -> Tensor:
    """8-bit floats, or scales, in float32; bytes are the exponents of powers of two."""
    kind = torch.float8_e8m0fnu if stored.dtype is torch.uint8 else stored.dtype
    if kind not in FLOAT8.values():
        return stored.float()
    found = _table(kind).index_select(0, stored.contiguous().view(torch.uint8).view(-1).int())
    return found.view(stored.shape)


def _table(kind: torch.dtype) -> Tensor:
    """The values of all bytes, to look them up, which is faster than torch's conversion."""
    return torch.arange(256, dtype=torch.uint8).view(kind).float()
