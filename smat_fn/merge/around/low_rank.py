"""The nearest matrix of a rank, or of the rank that holds a share of the squared norm, as two factors."""

import torch
from torch import Tensor

ROWS = 4096  # of a matrix that are in float64 at a time


def low_rank(matrix: Tensor, rank: int | None = None, energy: float | None = None) -> tuple[Tensor, Tensor]:
    """(left, right) float32, (rows, r) and (r, columns): the nearest product of a matrix that is not zero.

    Args: rank, energy: as of `extract_lora`; r is at most the number of rows and of columns.
    """
    if matrix.shape[0] < matrix.shape[1]:
        left, right = low_rank(matrix.T, rank, energy)
        return right.T, left.T
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for rows in matrix.split(ROWS):
        gram.addmm_(rows.double().T, rows.double())
    squares, vectors = torch.linalg.eigh(gram)  # ascending
    count = matrix.shape[1] if rank is None else min(rank, matrix.shape[1])
    if energy is not None:
        held = squares.clamp(min=0).flip(0).cumsum(0)
        count = min(count, 1 + int((held < energy * held[-1]).sum()))
    vectors = vectors[:, -count:].flip(1)
    left = torch.cat([rows.double() @ vectors for rows in matrix.split(ROWS)])
    # an eigenvalue is the square of a length, and less exact
    share = left.square().sum(0).sqrt_().sqrt_()
    return (left / share.where(share > 0, 1)).float(), (vectors * share).T.float()


def square(values: Tensor) -> float:
    """The squared Frobenius norm."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def remainder(matrix: Tensor, left: Tensor, right: Tensor) -> float:
    """`square` of matrix - left @ right."""
    parts = zip(matrix.split(ROWS), left.split(ROWS), strict=True)
    return sum(square(part.double() - rows.double() @ right.double()) for part, rows in parts)
