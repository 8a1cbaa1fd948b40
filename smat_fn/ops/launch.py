"""Launches of the grouped kernels: leaves of one dtype and alignment share one, whatever their number."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..compiled import constant
from .cpu import Drawn, Numbers, first_blocks, first_tiles, kept_scale, noise_step, plain_gradient, tiles

LAUNCHES: Counter[str] = Counter()  # by kernel name
VARIANTS: set[tuple[Any, ...]] = set()  # what a compiled kernel is specialised on
# a fused multiply-add would round once where the equation rounds twice
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


class _Group(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    aligned: bool
    members: list[int]


def simulate(params: Sequence[Tensor], base: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """`cpu.simulate` by kernels: one launch per dtype, and one more for leaves that are not aligned."""
    from . import kernels

    numbers, masked, starts = drawn
    uniform = not numbers.quantiles.numel()
    factors, cutoff = _factors(numbers, noise_step(numbers.sigma, uniform, torch.float32))
    # kernels read them by address: of a batch of draws they may be strided
    streams, quantiles = numbers.streams.contiguous(), numbers.quantiles.contiguous()
    for group in _groups((params, base, out), starts):
        columns = [[leaves[i].data_ptr() for i in group.members] for leaves in (params, base, out)]
        table, owner, programs = _table(group, columns, out, masked, starts)
        _launch(
            kernels.simulate_kernel,
            programs,
            (table, owner, *streams, factors, cutoff, quantiles if not uniform else factors),
            DTYPE=_triton(group.dtypes[0]),
            BASE=_triton(group.dtypes[1]),
            MASKED=any(masked[i] for i in group.members),
            NOISE=1 if uniform else 2,
            ALIGNED=group.aligned,
        )


def reweight(
    grads: Sequence[Tensor],
    out: Sequence[Tensor],
    drawn: Drawn,
    *,
    sums: Tensor | None = None,
    clip: Tensor | None = None,
    store: bool = True,
) -> None:
    """`cpu.reweight` by kernels, and its fusions with the clip of the global norm.

    Args: sums: float32 (blocks of all leaves), receives each block's sum of squares of the reweighted gradient;
        clip: float32 (1,), a factor that the reweighted gradient is multiplied by; store: write the result to out.
    """
    from . import kernels

    numbers, masked, starts = drawn
    factors, cutoff = _factors(numbers)
    streams = numbers.streams.contiguous()
    first = first_tiles([g.numel() for g in grads], starts)
    for group in _groups((grads, out), starts):
        columns = [[g.data_ptr() for g in (grads[i] for i in group.members)], [first[i] for i in group.members]]
        columns.append([out[i].data_ptr() for i in group.members])
        table, owner, programs = _table(group, columns, grads, masked, starts)
        _launch(
            kernels.reweight_kernel,
            programs,
            (
                table,
                owner,
                streams[0],
                factors,
                cutoff,
                factors if sums is None else sums,
                factors if clip is None else clip,
            ),
            DTYPE=_triton(group.dtypes[0]),
            MASKED=any(masked[i] for i in group.members),
            NORM=sums is not None,
            CLIP=clip is not None,
            STORE=store,
            ALIGNED=group.aligned,
        )


def squares(leaves: Sequence[Tensor]) -> Tensor:
    """`smat_fn.tree.block_squares` by a kernel: float32 (blocks,) of leaves of one device."""
    drawn = plain_gradient(len(leaves), leaves[0].device)
    sums = room(leaves)
    reweight(leaves, leaves, drawn, sums=sums, store=False)
    return sums


def room(leaves: Sequence[Tensor]) -> Tensor:
    """An empty tensor for the sums of all blocks of the leaves."""
    return torch.empty(first_blocks(leaves)[-1], dtype=torch.float32, device=leaves[0].device)


def climb(
    params: Sequence[Tensor],
    slopes: Sequence[Tensor],
    out: Sequence[Tensor],
    *,
    adaptive: bool,
    length: Tensor | None = None,
) -> Tensor:
    """The two passes of `smat_fn.ops.climb`.

    Args: length: float32 (1,), of the step written to out; None measures instead, nothing is written.
    Returns: float32 (blocks of all leaves), sums of squares of ``|theta| s`` where length is None.
    """
    from . import kernels

    starts, device = [0] * len(params), params[0].device
    first = first_blocks(params)
    sums = torch.empty(first[-1] if length is None else 0, dtype=torch.float32, device=device)
    for group in _groups((params, slopes, out), starts):
        columns = [[leaves[i].data_ptr() for i in group.members] for leaves in (params, slopes, out)]
        table, owner, programs = _table(group, columns, params, first, starts)
        _launch(
            kernels.climb_kernel,
            programs,
            (table, owner, sums if length is None else length, sums if length is None else length),
            DTYPE=_triton(group.dtypes[0]),
            SLOPE=_triton(group.dtypes[1]),
            ADAPTIVE=adaptive,
            NORM=length is None,
            ALIGNED=group.aligned,
        )
    return sums


def _groups(trees: tuple[Sequence[Tensor], ...], starts: Sequence[int]) -> Iterator[_Group]:
    groups: dict[tuple[tuple[torch.dtype, ...], bool], list[int]] = {}
    for i, leaf in enumerate(trees[0]):
        if not leaf.numel():
            continue
        pointers = [leaves[i].data_ptr() for leaves in trees]
        aligned = starts[i] % 8 == leaf.numel() % 8 == 0 and all(pointer % 16 == 0 for pointer in pointers)
        groups.setdefault((tuple(leaves[i].dtype for leaves in trees), aligned), []).append(i)
    for (dtypes, aligned), members in groups.items():
        yield _Group(dtypes, aligned, members)


def _table(
    group: _Group, columns: list[list[int]], leaves: Sequence[Tensor], flags: Sequence[int], starts: Sequence[int]
) -> tuple[Tensor, Tensor, int]:
    sizes, offsets = [leaves[i].numel() for i in group.members], [starts[i] for i in group.members]
    counts = [tiles(size, start) for size, start in zip(sizes, offsets, strict=True)]
    first = first_tiles(sizes, offsets)
    own = [int(flags[i]) for i in group.members]
    rows = list(zip(*columns, sizes, offsets, first[:-1], own, group.members, strict=True))
    device = leaves[group.members[0]].device
    return _send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device), _owner(tuple(counts), device), first[-1]


_owners: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _owner(counts: tuple[int, ...], device: torch.device) -> Tensor:
    # the largest table, and the same at every step
    if (found := _owners.get((counts, device))) is None:
        if len(_owners) >= 32:
            _owners.pop(next(iter(_owners)))
        places = numpy.arange(len(counts), dtype=numpy.int32).repeat(counts)
        found = constant(places, _owners, (counts, device), device)
    if device.type == "cuda":
        # its memory is of the stream that asked first: what is popped is written to after all that read it
        found.record_stream(torch.cuda.current_stream(device))
    return found


def _factors(numbers: Numbers, *more: Tensor) -> tuple[Tensor, Tensor]:
    kept = kept_scale(numbers.scale, numbers.cutoff, torch.float32)
    return torch.stack((numbers.scale.to(torch.float32), kept, *more)), numbers.cutoff.to(torch.int32).view(1)


def _send(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "kernels of smat_fn in a CUDA graph: they read a table of addresses in host memory, which has other "
            "contents when the graph is replayed: leave simulate, reweight, norms, clipping and climbs out of the graph"
        )
    return table.pin_memory().to(device, non_blocking=True)  # pinned, so that the host does not wait


def _launch(kernel: Any, programs: int, tensors: tuple[Tensor, ...], **constants: Any) -> None:
    from . import kernels

    LAUNCHES[kernel.__name__] += 1
    VARIANTS.add(
        (
            kernel.__name__,
            tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
            tuple((name, str(value)) for name, value in constants.items()),
        )
    )
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, **constants, ROWS=kernels.ROWS, INTERPRET=kernels.INTERPRET, **OPTIONS)


def _triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
