"""The operations on the CPU by compiled loops, for leaves of float32 and bfloat16.

What all implementations share stands here too: a draw as the operations take it, and the cuts into blocks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from .. import random, tree
from ..execution import array, loops_for

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
    blocks, skips = zip(*(place(start) for start, _ in windows), strict=True)
    pairs = array(torch.stack(list(keys))).reshape(-1, 2)
    out = torch.empty(sum(sizes), dtype=torch.int16, device=keys[0].device)
    loops.fields(pairs, numpy.array(blocks, numpy.uint64), numpy.array(skips), numpy.array(sizes), out.numpy())
    return list(out.split(sizes))


def simulate(params: Sequence[Tensor], base: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """Eq. smat-state written into ``out``, which may be params or base; see `smat_fn.simulate`."""
    numbers, masked, starts = drawn
    masks, noises = array(numbers.streams.contiguous()).reshape(2, -1, 2)
    quantiles = array(numbers.quantiles.contiguous())
    step = numpy.float32(float(noise_step(numbers.sigma, not len(quantiles), torch.float32)))
    given = masks, noises, numpy.array(masked, bool), *_factors(numbers), step, quantiles
    _each(_loops(*params).simulate, (params, base), out, lambda leaf, start: place(starts[leaf] + start), *given)


def reweight(grads: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """Eq. smat-gradient written into ``out``, which may be grads; see `smat_fn.reweight`."""
    numbers, masked, starts = drawn
    masks = array(numbers.streams.contiguous()).reshape(2, -1, 2)[0]
    given = masks, numpy.array(masked, bool), *_factors(numbers)
    _each(_loops(*grads).reweight, (grads,), out, lambda leaf, start: place(starts[leaf] + start), *given)


def squares(leaves: Sequence[Tensor]) -> Tensor:
    """`smat_fn.tree.block_squares` of leaves that compiled loops take: float32 (blocks,)."""
    return slope_squares(leaves, leaves, adaptive=False)


def slope_squares(params: Sequence[Tensor], slopes: Sequence[Tensor], *, adaptive: bool) -> Tensor:
    """Sums of squares of ``|theta| s``, or of s, by blocks of all leaves: float32 (blocks,)."""
    first = first_blocks(slopes)
    sums = torch.empty(first[-1], dtype=torch.float32, device="cpu")
    loop, into = _loops(*slopes).slope_squares, array(sums)
    _each(loop, (params, slopes), None, lambda leaf, start: (first[leaf] + start // BLOCK,), adaptive, into)
    return sums


def climb(
    params: Sequence[Tensor], slopes: Sequence[Tensor], out: Sequence[Tensor], *, adaptive: bool, length: Tensor
) -> None:
    """``theta + theta^2 s length``, or ``theta + s length``, written into ``out``."""
    size = length.float().numpy()[()]
    _each(_loops(*params).climb, (params, slopes), out, lambda leaf, start: (), adaptive, size)


def _loops(*leaves: Tensor) -> ModuleType:
    loops = loops_for(*leaves)
    assert loops is not None
    return loops


def _factors(numbers: Numbers) -> tuple[numpy.float32, numpy.float32, numpy.int32]:
    kept = kept_scale(numbers.scale, numbers.cutoff, torch.float32)
    return numpy.float32(float(numbers.scale)), numpy.float32(float(kept)), numpy.int32(int(numbers.cutoff))


def place(start: int) -> tuple[int, int]:
    """The block, modulo 2**64, and the field in it of a coordinate."""
    return start // 8 % 2**64, start % 8


_LIKE = {torch.float32: numpy.empty(0, numpy.float32), torch.bfloat16: numpy.empty(0, numpy.uint16)}


def _each(
    loop: Callable[..., None],
    inputs: Sequence[Sequence[Tensor]],
    out: Sequence[Tensor] | None,
    more: Callable[[int, int], tuple[int, ...]],
    *given: Any,
) -> None:
    """``loop(windows, *given, *likes)`` for all coordinates of leaves, on as many threads as torch has.

    Args: out: of the dtypes of the first inputs; more: (leaf, start) -> further columns of a window.
    """
    # a file may place leaves at odd addresses
    trees = [[leaf if leaf.data_ptr() % leaf.itemsize == 0 else leaf.clone() for leaf in leaves] for leaves in inputs]
    kinds: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i, leaves in enumerate(zip(*trees, strict=True)):
        kinds.setdefault(tuple(leaf.dtype for leaf in leaves), []).append(i)
    tasks = []
    for dtypes, rows in kinds.items():
        likes = [_LIKE[dtype] for dtype in dtypes]
        every, own = (trees, dtypes) if out is None else ([*trees, out], (*dtypes, dtypes[0]))
        widths, places = [dtype.itemsize for dtype in own], [[leaves[i].data_ptr() for leaves in every] for i in rows]
        for group in tree.spans([trees[0][i].numel() for i in rows], SPAN):
            windows = [
                (*_moved(places[row], widths, start), stop - start, rows[row], *more(rows[row], start))
                for row, start, stop in group
            ]
            tasks.append(partial(loop, numpy.array(windows, numpy.uint64), *given, *likes))
    threads = min(torch.get_num_threads(), len(tasks))
    if threads < 2:
        for task in tasks:
            task()
    else:
        # a pool for each call: threads that stay would be missing in a forked process
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()


def _moved(addresses: Sequence[int], widths: Sequence[int], start: int) -> Sequence[int]:
    return [at + start * width for at, width in zip(addresses, widths, strict=True)] if start else addresses
