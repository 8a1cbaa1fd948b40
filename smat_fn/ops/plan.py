"""What the operations need to know of a tree, and the cuts into blocks that all implementations share."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 4096  # coordinates of one partial sum of the global norm, and of one program of a kernel


class Numbers(NamedTuple):
    """A draw as the operations take it: small tensors on the device of the leaves."""

    streams: Tensor  # keys of the mask and noise streams, shape=(2, leaves, 2), int64
    scale: Tensor  # alpha, shape=(), float32
    cutoff: Tensor  # T = 65536 p realised, shape=(), int64
    sigma: Tensor  # shape=(), float64
    quantiles: Tensor  # of unit noise by field, shape=(65536,) float32, or empty for uniform


def kept_scale(scale: Tensor, cutoff: Tensor, dtype: torch.dtype) -> Tensor:
    """c of a kept coordinate: ``alpha * 1 / (1 - T / 65536)``, both factors rounded to dtype, then their product."""
    return scale.to(dtype) * (65536.0 / (65536 - cutoff).to(torch.float64)).to(dtype)


def noise_step(sigma: Tensor, uniform: bool, dtype: torch.dtype) -> Tensor:
    """The factor of ``field - 32767.5`` (uniform) or of a table's quantile."""
    return (sigma * (3**0.5 / 32768)).to(dtype) if uniform else sigma.to(dtype)


def tiles(size: int, start: int) -> int:
    """Number of blocks of the full leaf that the coordinates [start, start + size) meet."""
    return (start % BLOCK + size + BLOCK - 1) // BLOCK if size else 0


def first_tiles(sizes: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Position of each leaf's first block among all blocks in leaf order, and last the total."""
    first = [0]
    for size, start in zip(sizes, starts, strict=True):
        first.append(first[-1] + tiles(size, start))
    return first
