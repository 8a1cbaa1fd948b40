"""Singular values of a tall matrix by blocks of its rows: the triangle of QR has them, and the right vectors too.

The condition number is not squared, as it is in AᵀA: a block and the triangle of the rows above it are decomposed
together, so that only a few squares of the columns are in memory. Left vectors are U = A V Σ⁻¹, for a block of rows at
a time. Their error is that of V over σ / σ_max, which is above `negligible`: 0.05 % in float32 if columns are at most
4096.

Source: Demmel et al., "Communication-optimal parallel and sequential QR and LU factorizations", 2012 (flat-tree TSQR).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .merger import Mapped

Blocks: TypeAlias = Callable[[], Iterator[list[Tensor]]]  # the experts' rows, block by block, the same at each call
LARGE = 1 << 26  # coordinates; up to them matrices are decomposed whole
STEEP = 8  # rows for a column
HELD = 96  # bytes for each number of a square of the columns, beside 12 for each expert
LONG = 4096  # so much of a long side counts in `negligible`


def negligible(shape: Sequence[int], dtype: torch.dtype) -> float:
    """Singular values up to this share of the largest are 0 up to rounding: eps · the long side.

    Of it 4096 count, or the short side if that is more: rounding errors do not grow with the rows (measured in float32
    of rank 1 and 4: below 15 eps from 8 × 8 to 65,536 × 64), and eps · 262,144 rows would be 3 %.
    """
    return torch.finfo(dtype).eps * min(max(shape), max(LONG, min(shape)))


def rounding(shape: Sequence[int], dtype: torch.dtype, norm: float) -> float:
    """Bound of what rounding leaves of a matrix that a projection takes to 0: 8 eps √(long side) · its Frobenius norm.

    Measured in float32: 3.5 eps · norm of 8 × 8, 7 of 1024 × 1024, 24 of 65,536 × 64.
    """
    return 8 * torch.finfo(dtype).eps * math.sqrt(max(shape)) * norm


def norms(matrices: Sequence[Tensor]) -> list[float]:
    """The Frobenius norms, in float64."""
    return torch.stack([torch.linalg.vector_norm(matrix, dtype=torch.float64) for matrix in matrices]).tolist()


def is_tall(shape: Sequence[int]) -> bool:
    """Whether a matrix is decomposed by blocks of rows."""
    return len(shape) == 2 and shape[0] * shape[1] > LARGE and shape[0] >= STEEP * shape[1]


def row_blocks(leaves: Mapped, path: str) -> Iterator[list[Tensor]]:
    """The experts' task matrices, as many rows at a time as they have columns; valid until the next block."""
    columns, buffer, filled = leaves.shape(path)[1], torch.empty(0), 0
    for deltas in leaves.blocks(path):
        if not len(buffer):
            buffer = deltas[0].new_empty(len(deltas), columns**2)
        start, size = 0, len(deltas[0])
        while start < size:
            count = min(columns**2 - filled, size - start)
            for rows, delta in zip(buffer, deltas, strict=True):
                rows[filled : filled + count] = delta[start : start + count]
            start, filled = start + count, (filled + count) % columns**2
            if not filled:
                yield [rows.view(-1, columns) for rows in buffer]
    if filled:
        yield [rows[:filled].view(-1, columns) for rows in buffer]


class Right(NamedTuple):
    """Leading singular triplets of a tall matrix A but for U = A @ inverse; those of 0 up to rounding are 0."""

    values: Tensor  # (count,)
    vectors: Tensor  # V (columns, count)
    inverse: Tensor  # V Σ⁻¹ (columns, count)


def triangle(blocks: Iterable[Tensor]) -> Tensor:
    """R of Q R = the blocks one below the other; (columns, columns), fewer rows if there are fewer in all."""
    total: Tensor | None = reduce(_below, blocks, None)
    assert total is not None
    return total


def _below(upper: Tensor | None, block: Tensor) -> Tensor:
    return torch.linalg.qr(block if upper is None else torch.cat([upper, block]), mode="r").R


def right(upper: Tensor, rows: int, count: int, floor: float = 0.0) -> Right:
    """Triplets from R. Args: rows: of the matrix; floor: singular values up to it are 0 too."""
    _, values, vectors = torch.linalg.svd(upper, full_matrices=False)
    least = negligible((rows, upper.shape[1]), values.dtype) * values[0]
    real = ((values > least) & (values > floor))[:count]
    values, vectors = values[:count] * real, vectors[:count].mT * real
    return Right(values, vectors, vectors / torch.where(real, values, 1))


def polar(upper: Tensor, rows: int) -> Tensor:
    """H with A H the nearest matrix with orthonormal columns to A (`spectral.orthonormal`), from R of A."""
    found = right(upper, rows, len(upper))
    return found.inverse @ found.vectors.mT


def held(columns: int, experts: int) -> int:
    """Bytes that the decompositions of a tall matrix take."""
    return (12 * experts + HELD) * columns**2


def triangles(blocks: Blocks) -> list[Tensor]:
    """R of each expert's matrix, in one pass."""
    found: list[Tensor] = []
    for deltas in blocks():
        for i, delta in enumerate(deltas):
            if i == len(found):
                found.append(_below(None, delta))
            else:
                found[i] = _below(found[i], delta)
    return found
