"""Launches of the grouped kernels: leaves of one dtype and alignment share one, whatever their number."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..execution import constant
from .cpu import Drawn, Numbers, first_blocks, kept_scale, noise_step, tiles

LAUNCHES: Counter[str] = Counter()  # by kernel name
VARIANTS: set[tuple[Any, ...]] = set()  # what a compiled kernel is specialised on
# a fused multiply-add would round once where the equation rounds twice
OPTIONS = {"enable_fp_fusion": False, "num_warps": 4}


class _Part(NamedTuple):
    """Leaves that share a launch."""

    dtypes: tuple[torch.dtype, torch.dtype]
    aligned: bool
    flagged: bool  # any of its leaves
    table: Tensor
    owner: Tensor
    programs: int


def simulate(params: Sequence[Tensor], base: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """`cpu.simulate` by kernels: one launch per dtype, and one more for leaves that are not aligned."""
    from . import kernels

    numbers, masked, starts = drawn
    uniform = not numbers.quantiles.numel()
    factors, cutoff = _factors(numbers, noise_step(numbers.sigma, uniform, torch.float32))
    # kernels read them by address: of a batch of draws they may be strided
    streams, quantiles = numbers.streams.contiguous(), numbers.quantiles.contiguous()
    for part in _parts(params, base, out, masked, starts):
        _launch(
            kernels.simulate_kernel,
            part,
            (*streams, factors, cutoff, quantiles if not uniform else factors),
            DTYPE=_triton(part.dtypes[0]),
            BASE=_triton(part.dtypes[1]),
            MASKED=part.flagged,
            NOISE=1 if uniform else 2,
        )


def reweight(grads: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn) -> None:
    """`cpu.reweight` by kernels."""
    Reweighting(grads, out, drawn)()


class Reweighting:
    """`cpu.reweight` by kernels, and its fusions with the clip of the global norm, in one pass or several.

    Args: drawn: None for a gradient that is not reweighted.
    """

    def __init__(self, grads: Sequence[Tensor], out: Sequence[Tensor], drawn: Drawn | None) -> None:
        self._grads, self._device = grads, grads[0].device
        if drawn is not None:
            self._numbers = drawn.numbers.streams.contiguous()[0], *_factors(drawn.numbers)
            self._parts = _parts(grads, None, out, drawn.masked, drawn.starts)
            return
        unread = torch.zeros(2, dtype=torch.int64, device=self._device)  # no leaf is masked
        self._numbers = unread, torch.ones(2, device=self._device), unread.to(torch.int32)
        self._parts = _parts(grads, None, out, [False] * len(grads), [0] * len(grads))

    def __call__(self, *, sums: Tensor | None = None, clip: Tensor | None = None, store: bool = True) -> None:
        """One pass.

        Args: sums: float32 (blocks of all leaves), receives each block's sum of squares of the reweighted gradient;
            clip: float32 (1,), a factor that the reweighted gradient is multiplied by; store: write the result to out.
        """
        from . import kernels

        factors = self._numbers[1]
        for part in self._parts:
            _launch(
                kernels.reweight_kernel,
                part,
                (*self._numbers, factors if sums is None else sums, factors if clip is None else clip),
                DTYPE=_triton(part.dtypes[0]),
                MASKED=part.flagged,
                NORM=sums is not None,
                CLIP=clip is not None,
                STORE=store,
            )

    def squares(self, *, store: bool = False) -> Tensor:
        """A pass that returns the sums of squares of all blocks."""
        sums = torch.empty(first_blocks(self._grads)[-1], dtype=torch.float32, device=self._device)
        self(sums=sums, store=store)
        return sums


def squares(leaves: Sequence[Tensor]) -> Tensor:
    """`smat_fn.tree.block_squares` by a kernel: float32 (blocks,) of leaves of one device."""
    return Reweighting(leaves, leaves, None).squares()


class Climbing:
    """The two passes of `smat_fn.ops.climb` by kernels."""

    def __init__(
        self, params: Sequence[Tensor], slopes: Sequence[Tensor], out: Sequence[Tensor], adaptive: bool
    ) -> None:
        self._blocks, self._device, self._adaptive = first_blocks(params)[-1], params[0].device, adaptive
        self._parts = _parts(params, slopes, out, None, [0] * len(params))

    def squares(self) -> Tensor:
        """Sums of squares of ``|theta| s`` by blocks, float32 (blocks of all leaves)."""
        sums = torch.empty(self._blocks, dtype=torch.float32, device=self._device)
        self._pass(sums, norm=True)
        return sums

    def move(self, length: Tensor) -> None:
        """Write the climbed weights: length is a 0-d tensor."""
        self._pass(length.to(self._device, torch.float32).view(1), norm=False)

    def _pass(self, number: Tensor, *, norm: bool) -> None:
        from . import kernels

        for part in self._parts:
            dtype, slope = map(_triton, part.dtypes)
            options = {"DTYPE": dtype, "SLOPE": slope, "ADAPTIVE": self._adaptive, "NORM": norm}
            _launch(kernels.climb_kernel, part, (number, number), **options)


def _parts(
    leaves: Sequence[Tensor],
    others: Sequence[Tensor] | None,
    out: Sequence[Tensor],
    flags: Sequence[bool] | None,
    starts: Sequence[int],
) -> list[_Part]:
    """The launches of some leaves and their tables; where others or flags is None, a leaf's first block stands there.

    The only loop over the leaves that a step makes here, so it asks each tensor as little as it can.
    """
    rows_of: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[tuple[int, ...]], list[int]]] = {}
    block = 0
    for i, (leaf, other, target, start) in enumerate(
        zip(leaves, out if others is None else others, out, starts, strict=True)
    ):
        if not (size := leaf.numel()):
            continue
        first, second, third = leaf.data_ptr(), other.data_ptr(), target.data_ptr()
        aligned = not ((start | size) % 8 or (first | second | third) % 16)
        rows, counts = rows_of.setdefault((leaf.dtype, other.dtype, aligned), ([], []))
        program = rows[-1][5] + counts[-1] if rows else 0
        flag = block if flags is None else flags[i]
        rows.append((first, block if others is None else second, third, size, start, program, flag, i))
        counts.append(tiles(size, start))
        block += counts[-1]
    parts = []
    for (dtype, other_dtype, aligned), (rows, counts) in rows_of.items():
        device = leaves[rows[0][7]].device
        table = _send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        flagged, programs = any(row[6] for row in rows), rows[-1][5] + counts[-1]
        parts.append(_Part((dtype, other_dtype), aligned, flagged, table, _owner(tuple(counts), device), programs))
    return parts


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


def _launch(kernel: Any, part: _Part, numbers: tuple[Tensor, ...], **constants: Any) -> None:
    from . import kernels

    tensors, constants = (part.table, part.owner, *numbers), {**constants, "ALIGNED": part.aligned}
    LAUNCHES[kernel.__name__] += 1
    VARIANTS.add(
        (
            kernel.__name__,
            tuple((t.dtype, t.data_ptr() % 16 == 0) for t in tensors),
            tuple((name, str(value)) for name, value in constants.items()),
        )
    )
    with torch.cuda.device_of(tensors[0]):
        kernel[(part.programs,)](*tensors, **constants, ROWS=kernels.ROWS, INTERPRET=kernels.INTERPRET, **OPTIONS)


def _triton(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
