"""The operations on the CPU by compiled loops: one pass over memory, the bits of `chunked`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy
import torch
from torch import Tensor

from .. import tree
from ..compiled import array, loops_for
from .plan import Numbers, kept_scale, noise_step

DTYPES = torch.float32, torch.bfloat16
SPAN = 1 << 19  # coordinates of one task of a thread


def centered_fields(keys: Sequence[Tensor], windows: Sequence[tuple[int, int]]) -> list[Tensor] | None:
    """`chunked.centered_fields`; None where the loops do not take the keys."""
    if (loops := loops_for(*keys)) is None:
        return None
    sizes = numpy.array([stop - start for start, stop in windows])
    blocks, skips = (numpy.array(column) for column in zip(*(place(start) for start, _ in windows), strict=True))
    pairs = array(torch.stack(list(keys))).reshape(-1, 2)
    out = torch.empty(int(sizes.sum()), dtype=torch.int16, device=keys[0].device)
    loops.fields(pairs, blocks, skips, sizes, out.numpy())
    return list(out.split(sizes.tolist()))


def simulate(
    params: Sequence[Tensor],
    base: Sequence[Tensor],
    out: Sequence[Tensor],
    numbers: Numbers,
    masked: Sequence[bool],
    starts: Sequence[int],
) -> list[int]:
    """`chunked.simulate` of the leaves that the loops take. Returns: the positions of the others."""
    loops, taken, others = _taken((params, base, out), numbers)
    if loops is not None:
        masks, noises = array(numbers.streams.contiguous()).reshape(2, -1, 2)
        scale, kept, cutoff = _factors(numbers)
        quantiles = array(numbers.quantiles.contiguous())
        step = numpy.float32(float(noise_step(numbers.sigma, not len(quantiles), torch.float32)))

        def run(leaf: int, start: int, stop: int) -> None:
            window = place(starts[leaf] + start)
            parts = [array(leaves[leaf])[start:stop] for leaves in (params, base, out)]
            loops.simulate(
                masks[leaf], noises[leaf], *window, *parts, masked[leaf], scale, kept, cutoff, step, quantiles
            )

        _spread(run, taken, out)
    return others


def reweight(
    grads: Sequence[Tensor],
    out: Sequence[Tensor],
    numbers: Numbers,
    masked: Sequence[bool],
    starts: Sequence[int],
) -> list[int]:
    """`chunked.reweight` of the leaves that the loops take. Returns: the positions of the others."""
    loops, taken, others = _taken((grads, out), numbers)
    if loops is not None:
        masks, factors = array(numbers.streams.contiguous()).reshape(2, -1, 2)[0], _factors(numbers)

        def run(leaf: int, start: int, stop: int) -> None:
            parts = [array(leaves[leaf])[start:stop] for leaves in (grads, out)]
            loops.reweight(masks[leaf], *place(starts[leaf] + start), *parts, masked[leaf], *factors)

        _spread(run, taken, out)
    return others


def _taken(trees: Sequence[Sequence[Tensor]], numbers: Numbers) -> tuple[ModuleType | None, list[int], list[int]]:
    loops = loops_for(*numbers, *(leaf for leaves in trees for leaf in leaves))
    every = range(len(trees[0]))
    taken = [i for i in every if loops is not None and all(leaves[i].dtype in DTYPES for leaves in trees)]
    return loops if taken else None, taken, [i for i in every if i not in set(taken)]


def _factors(numbers: Numbers) -> tuple[numpy.float32, numpy.float32, numpy.int32]:
    kept = kept_scale(numbers.scale, numbers.cutoff, torch.float32)
    return numpy.float32(float(numbers.scale)), numpy.float32(float(kept)), numpy.int32(int(numbers.cutoff))


def place(start: int) -> tuple[numpy.uint64, int]:
    """The block, modulo 2**64, and the field in it of a coordinate."""
    return numpy.uint64(start // 8 % 2**64), start % 8


def _spread(run: Callable[[int, int, int], None], taken: Sequence[int], leaves: Sequence[Tensor]) -> None:
    """``run(leaf, start, stop)`` for all coordinates of the leaves taken, on as many threads as torch has."""
    groups = list(tree.spans([leaf.numel() if i in set(taken) else 0 for i, leaf in enumerate(leaves)], SPAN))

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
