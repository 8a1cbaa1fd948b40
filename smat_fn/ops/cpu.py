"""The operations on the CPU by compiled loops, for leaves of float32 and bfloat16.

What all implementations share stands here too: a draw as the operations take it, and the cuts into blocks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from .. import random, tree
from ..compiled import array, loops_for

BLOCK = 4096  # coordinates of one partial sum of the global norm, and of one program of a kernel


class Numbers(NamedTuple):
    """A draw as the operations take it: small tensors on the device of the leaves."""

    streams: Tensor  # keys of the mask and noise streams, shape=(2, leaves, 2), int64
    scale: Tensor  # alpha, shape=(), float32
    cutoff: Tensor  # T = 65536 p realised, shape=(), int64; -T: the opposite mask, dropped from 65536 - T on
    sigma: Tensor  # shape=(), float64
    quantiles: Tensor  # of unit noise by field, shape=(65536,) float32, or empty for uniform


class Drawn(NamedTuple):
    """A draw of some leaves."""

    numbers: Numbers
    masked: Sequence[bool]  # by leaf
    starts: Sequence[int]  # by leaf, its first coordinate in the whole one

    def rows(self, rows: list[int]) -> "Drawn":
        """The draw of some of the leaves."""
        if len(rows) == len(self.masked):
            return self
        index = torch.tensor(rows, device="cpu").to(self.numbers.streams.device, non_blocking=True)
        numbers = self.numbers._replace(streams=self.numbers.streams.index_select(1, index))
        return Drawn(numbers, [self.masked[i] for i in rows], [self.starts[i] for i in rows])


def kept_scale(scale: Tensor, cutoff: Tensor, dtype: torch.dtype) -> Tensor:
    """c of a kept coordinate: ``alpha * 1 / (1 - T / 65536)``, both factors rounded to dtype, then their product."""
    return scale.to(dtype) * (65536.0 / (65536 - cutoff.abs()).to(torch.float64)).to(dtype)


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


def first_blocks(leaves: Sequence[Tensor]) -> list[int]:
    """`first_tiles` of whole leaves."""
    return first_tiles([leaf.numel() for leaf in leaves], [0] * len(leaves))


DTYPES = torch.float32, torch.bfloat16
SPAN = 1 << 19  # coordinates of one task of a thread


def centered_fields(keys: Sequence[Tensor], windows: Sequence[tuple[int, int]]) -> list[Tensor]:
    """``field - 32768`` of the coordinates [start, stop) of each stream, int16: `smat_fn.random.streams`, faster."""
    sizes = [stop - start for start, stop in windows]
    if (loops := loops_for(*keys)) is None:
        drawn = random.streams(torch.stack(list(keys)), sizes, starts=[start for start, _ in windows])
        return [(field - 32768).to(torch.int16) for field in drawn]
    blocks, skips = (numpy.array(column) for column in zip(*(place(start) for start, _ in windows), strict=True))
    pairs = array(torch.stack(list(keys))).reshape(-1, 2)
    out = torch.empty(sum(sizes), dtype=torch.int16, device=keys[0].device)
    loops.fields(pairs, blocks, skips, numpy.array(sizes), out.numpy())
    return list(out.split(sizes))


def simulate(params: Sequence[Tensor], base: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """Eq. smat-state written into ``out``, which may be params or base; see `smat_fn.simulate`."""
    (numbers, masked, starts), loops = drawn, _loops(*params)
    masks, noises = array(numbers.streams.contiguous()).reshape(2, -1, 2)
    scale, kept, cutoff = _factors(numbers)
    quantiles = array(numbers.quantiles.contiguous())
    step = numpy.float32(float(noise_step(numbers.sigma, not len(quantiles), torch.float32)))

    def run(leaf: int, start: int, stop: int) -> None:
        window = place(starts[leaf] + start)
        parts = [array(leaves[leaf])[start:stop] for leaves in (params, base, out)]
        loops.simulate(masks[leaf], noises[leaf], *window, *parts, masked[leaf], scale, kept, cutoff, step, quantiles)

    _spread(run, out)


def reweight(grads: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """Eq. smat-gradient written into ``out``, which may be grads; see `smat_fn.reweight`."""
    (numbers, masked, starts), loops = drawn, _loops(*grads)
    masks, factors = array(numbers.streams.contiguous()).reshape(2, -1, 2)[0], _factors(numbers)

    def run(leaf: int, start: int, stop: int) -> None:
        parts = [array(leaves[leaf])[start:stop] for leaves in (grads, out)]
        loops.reweight(masks[leaf], *place(starts[leaf] + start), *parts, masked[leaf], *factors)

    _spread(run, out)


def squares(leaves: Sequence[Tensor]) -> Tensor:
    """`smat_fn.tree.block_squares` of leaves that compiled loops take: float32 (blocks,)."""
    loops, first = _loops(*leaves), first_blocks(leaves)
    sums = torch.empty(first[-1], dtype=torch.float32, device="cpu")
    into, flat = array(sums), [array(leaf) for leaf in leaves]

    def run(leaf: int, start: int, stop: int) -> None:
        at, part = first[leaf] + start // BLOCK, flat[leaf][start:stop]
        loops.slope_squares(part, part, False, into[at : at + -(-len(part) // BLOCK)])

    _spread(run, leaves)
    return sums


def _loops(*leaves: Tensor) -> ModuleType:
    loops = loops_for(*leaves)
    assert loops is not None
    return loops


def _factors(numbers: Numbers) -> tuple[numpy.float32, numpy.float32, numpy.int32]:
    kept = kept_scale(numbers.scale, numbers.cutoff, torch.float32)
    return numpy.float32(float(numbers.scale)), numpy.float32(float(kept)), numpy.int32(int(numbers.cutoff))


def place(start: int) -> tuple[numpy.uint64, int]:
    """The block, modulo 2**64, and the field in it of a coordinate."""
    return numpy.uint64(start // 8 % 2**64), start % 8


def _spread(run: Callable[[int, int, int], None], leaves: Sequence[Tensor]) -> None:
    """``run(leaf, start, stop)`` for all coordinates of leaves, on as many threads as torch has."""
    groups = list(tree.spans([leaf.numel() for leaf in leaves], SPAN))

    def work(group: list[tuple[int, int, int]]) -> None:
        for span in group:
            run(*span)

    threads = min(torch.get_num_threads(), len(groups))
    if threads < 2:
        list(map(work, groups))
    else:
        # a pool for each call: threads that stay would be missing in a forked process
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, groups))
