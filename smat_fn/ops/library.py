"""The registered operations on lists of leaves, ``smat_fn::simulate`` and others, and their dispatch.

They have no autograd formulas of their own: `autograd` wraps them. `reweight_and_clip` is what a training step calls.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar

import numpy
import torch
from torch import Tensor

from .. import tree
from ..errors import raise_problems
from ..execution import loops_for, over_shards, transformed
from . import cpu, launch, plain
from .cpu import Drawn, Numbers, first_blocks

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that the kernels compute in float32
_forced = False
TAGS = (torch.Tag.cudagraph_unsafe,)  # torch.compile leaves these out of CUDA graphs, see `launch`
Path = TypeVar("Path", bound=Hashable)


@contextmanager
def forced() -> Iterator[None]:
    """Kernels on CPU tensors too, in Triton's interpreter (TRITON_INTERPRET=1 before its first import)."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before


def by_kernel(*leaves: Sequence[Tensor]) -> bool:
    """Whether these leaves go to the kernels: on CUDA (or forced), in a dtype that they compute in float32."""
    every = [leaf for group in leaves for leaf in group]
    on_device = bool(every) and every[0].is_cuda and all(leaf.device == every[0].device for leaf in every)
    if not (on_device or (_forced and bool(every))):
        return False
    # fake tensors, DTensors and other types that dispatch themselves have no memory at their address
    return all(leaf.dtype in SUPPORTED and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__ for leaf in every)


def by_loops(*leaves: Sequence[Tensor]) -> bool:
    """Whether compiled loops take all of these leaves."""
    every = [leaf for group in leaves for leaf in group]
    return all(leaf.dtype in cpu.DTYPES for leaf in every) and loops_for(*every) is not None


@torch.library.custom_op("smat_fn::simulate_into", mutates_args=("out",), tags=TAGS)
def simulate_into(
    params: list[Tensor],
    base: list[Tensor],
    out: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    sigma: Tensor,
    quantiles: Tensor,
    masked: list[bool],
    starts: list[int],
) -> None:
    """`smat_fn.simulate` written into ``out``: contiguous leaves of params' dtypes, may be params or base.

    Raises: ValueError that lists the leaves of out that cannot be written to.
    """
    check_out(out, params)
    drawn = Drawn(Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)
    _write("simulate", (params, base), out, drawn)


@torch.library.custom_op("smat_fn::simulate", mutates_args=(), tags=TAGS)
def simulate(
    params: list[Tensor],
    base: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    sigma: Tensor,
    quantiles: Tensor,
    masked: list[bool],
    starts: list[int],
) -> list[Tensor]:
    """`smat_fn.simulate` on the leaves of a tree; results have the strides of params."""
    out = _new(params)
    drawn = Drawn(Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)
    _write("simulate", (params, base), out, drawn)
    return out


@torch.library.custom_op("smat_fn::reweight_into", mutates_args=("out",), tags=TAGS)
def reweight_into(
    grads: list[Tensor],
    out: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    masked: list[bool],
    starts: list[int],
) -> None:
    """`smat_fn.reweight` written into ``out``: contiguous leaves of grads' dtypes, may be grads.

    Raises: ValueError that lists the leaves of out that cannot be written to.
    """
    check_out(out, grads)
    _write("reweight", (grads,), out, _gradient(streams, scale, cutoff, masked, starts))


@torch.library.custom_op("smat_fn::reweight", mutates_args=(), tags=TAGS)
def reweight(
    grads: list[Tensor], streams: Tensor, scale: Tensor, cutoff: Tensor, masked: list[bool], starts: list[int]
) -> list[Tensor]:
    """`smat_fn.reweight` on the leaves of a tree; results have the strides of grads."""
    out = _new(grads)
    _write("reweight", (grads,), out, _gradient(streams, scale, cutoff, masked, starts))
    return out


def _new(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(leaf) for leaf in leaves]


for _made, _written in ((simulate, simulate_into), (reweight, reweight_into)):
    _made.register_fake(lambda leaves, *rest: _new(leaves))
    _written.register_fake(lambda *given: None)


@torch.library.custom_op("smat_fn::choose_into", mutates_args=("merged",), tags=TAGS)
def choose_into(chosen: Tensor, merged: list[Tensor], own: list[Tensor]) -> None:
    """Leaves of ``own`` written into ``merged`` unless a 0-d bool says that the step is simulated."""
    if chosen.is_cpu:
        if not chosen:
            torch._foreach_copy_(merged, own)
        return
    flags = {device: chosen.to(device) for device in {leaf.device for leaf in own}}
    for into, leaf in zip(merged, own, strict=True):
        torch.where(flags[leaf.device], into, leaf, out=into)


choose_into.register_fake(lambda *given: None)


@torch.library.custom_op("smat_fn::block_squares", mutates_args=(), tags=TAGS)
def block_squares(leaves: list[Tensor]) -> Tensor:
    """`smat_fn.tree.block_squares`: a launch, or a pass of compiled loops, for each device and dtype that has one."""
    whole = [leaf if leaf.is_contiguous() else leaf.reshape(-1) for leaf in leaves]
    if not by_kernel(whole) and by_loops(whole):
        return cpu.squares(whole).double()
    ways: dict[tuple[torch.device, Callable[[list[Tensor]], Tensor]], list[int]] = {}
    for i, leaf in enumerate(whole):
        ways.setdefault((leaf.device, _squares_by(leaf)), []).append(i)
    return in_order([(way([whole[i] for i in rows]), rows) for (_, way), rows in ways.items()], leaves)


def in_order(found: Sequence[tuple[Tensor, Sequence[int]]], leaves: Sequence[Tensor]) -> Tensor:
    """Sums by blocks, each with the leaves it is of, in the order of all leaves: float64, on the first one's device."""
    place = leaves[0].device
    sums = [part.double().to(place) for part, _ in found]
    if len(sums) == 1:
        return sums[0]
    first = first_blocks(leaves)
    blocks = numpy.concatenate([numpy.arange(first[i], first[i + 1]) for _, rows in found for i in rows])
    order = numpy.empty_like(blocks)
    order[blocks] = numpy.arange(len(blocks))
    # the host does not wait for the copy
    return torch.cat(sums).index_select(0, torch.from_numpy(order).to(place, non_blocking=place.type == "cuda"))


@block_squares.register_fake
def _(leaves):  # type: ignore[no-untyped-def]
    return leaves[0].new_empty(first_blocks(leaves)[-1], dtype=torch.float64)


def _squares_by(leaf: Tensor) -> Callable[[list[Tensor]], Tensor]:
    if by_kernel([leaf]):
        return launch.squares
    return cpu.squares if by_loops([leaf]) else tree.block_squares


def check_out(out: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raises: ValueError that lists the leaves of out, by position, that are strided or of another size or dtype."""
    problems = []
    for i, (target, leaf) in enumerate(zip(out, like, strict=True)):
        if not target.is_contiguous():
            problems.append(f"leaf {i} of out has strides {target.stride()}, must be contiguous")
        if (target.dtype, target.shape) != (leaf.dtype, leaf.shape):
            problems.append(
                f"leaf {i} of out is {target.dtype} {tuple(target.shape)}, must be {leaf.dtype} {tuple(leaf.shape)}"
            )
    if problems:
        raise_problems(problems)


def _gradient(streams: Tensor, scale: Tensor, cutoff: Tensor, masked: list[bool], starts: list[int]) -> Drawn:
    # a gradient has no noise: neither sigma nor quantiles is read
    return Drawn(Numbers(streams, scale, cutoff, sigma=scale, quantiles=scale), masked, starts)


def _write(operation: str, trees: Sequence[list[Tensor]], out: list[Tensor], drawn: Drawn) -> None:
    with written(out) as flat:
        every = [*([leaf.contiguous() for leaf in leaves] for leaves in trees), flat]
        for way, rows in _ways(drawn.numbers, *every).items():
            *given, into = ([leaves[i] for i in rows] for leaves in every)
            getattr(way, operation)(*given, out=into, drawn=drawn.rows(rows))


@contextmanager
def written(out: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Contiguous leaves to write into; what others than ``out`` received is copied there at the end."""
    flat = [to if to.is_contiguous() else torch.empty_like(to, memory_format=torch.contiguous_format) for to in out]
    yield flat
    for to, made in zip(out, flat, strict=True):
        if to is not made:
            to.copy_(made)


def _ways(numbers: Numbers, *trees: list[Tensor]) -> dict[ModuleType, list[int]]:
    """Leaves that kernels, loops and plain torch take; a float64 one keeps none of its neighbours from the others."""
    if by_kernel(*trees):
        return {launch: list(range(len(trees[0])))}
    readable = loops_for(*numbers) is not None
    if readable and by_loops(*trees):
        return {cpu: list(range(len(trees[0])))}
    found: dict[ModuleType, list[int]] = {}
    for i, leaves in enumerate(zip(*trees, strict=True)):
        looped = readable and by_loops(leaves)
        found.setdefault(launch if by_kernel(leaves) else cpu if looped else plain, []).append(i)
    return found


@torch.no_grad()
def reweight_and_clip(
    grads: Mapping[str, Tensor],
    numbers: Numbers | None,
    masked: Sequence[bool],
    starts: Sequence[int] = (),
    *,
    max_norm: float | None,
    donate: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """``clip(alpha m (.) g)`` and the norm before clipping; ``numbers=None`` for a gradient that is not reweighted.

    ``g' min(1, max_norm / (norm + 1e-6))``, the factor of ``torch.nn.utils.clip_grad_norm_``, norm by
    `smat_fn.tree.global_norm`. On the kernels one pass reweights and sums squares; with a clip that pass only sums, and
    a second one draws the mask again, reweights and clips.

    Not inside transforms, where `autograd.reweight_and_clip` does the same without a write.

    Args: starts: by leaf, its first coordinate in the whole one (default: 0); max_norm: None only measures; donate:
        may write into grads, bit-identical.
    Returns: (leaves by path, of the strides of grads, 0-d float32 norm); nothing waits for the device.
    """
    assert not transformed(), "derivatives would be lost"
    raw = {path: g if g.is_contiguous() else g.contiguous() for path, g in grads.items()}
    if numbers is None and max_norm is None:
        out = dict(grads)
    else:
        free = owned(raw) if donate else set()
        out = {path: g if path in free else torch.empty_like(g) for path, g in raw.items()}
    sources, targets = list(raw.values()), list(out.values())
    starts = starts or [0] * len(sources)
    if by_kernel(sources, targets):
        drawn = None if numbers is None else Drawn(numbers, list(masked), list(starts))
        norm = _by_kernels(sources, targets, drawn, max_norm)
        return _laid(out, grads), norm
    if numbers is not None:
        given = list(masked), list(starts)
        reweight_into(sources, targets, numbers.streams, numbers.scale, numbers.cutoff, *given)
        sources = targets
    norm = tree.global_norm(sources)
    if max_norm is not None:
        _scale(sources, targets, clip_factor(norm, max_norm))
    return _laid(out, grads), norm.float()


def _laid(made: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Results with the strides of other leaves."""
    return {p: g if g.stride() == like[p].stride() else torch.empty_like(like[p]).copy_(g) for p, g in made.items()}


def _scale(sources: list[Tensor], targets: list[Tensor], factor: Tensor) -> None:
    """``source * factor``, rounded once."""
    for rows, given in _factors(sources, factor):
        own, into = ([leaves[i] for i in rows] for leaves in (sources, targets))
        reweight_into(own, into, *given)


def scaled(leaves: list[Tensor], factor: Tensor) -> list[Tensor]:
    """``leaf * factor`` in new memory, rounded once, for compiled code."""
    found: dict[int, Tensor] = {}
    for rows, given in _factors(leaves, factor):
        found.update(zip(rows, reweight([leaves[i] for i in rows], *given), strict=True))
    return [found[i] for i in range(len(leaves))]


def _factors(
    leaves: Sequence[Tensor], factor: Tensor
) -> Iterator[tuple[list[int], tuple[Tensor, Tensor, Tensor, list[bool], list[int]]]]:
    """The leaves of each device, and arguments that make their reweighting a product, since nothing is masked."""
    devices: dict[torch.device, list[int]] = {}
    for i, leaf in enumerate(leaves):
        devices.setdefault(leaf.device, []).append(i)
    for device, rows in devices.items():
        streams = torch.zeros((2, len(rows), 2), dtype=torch.int64, device=device)
        yield rows, (streams, factor.to(device), streams.new_zeros(()), [False] * len(rows), [0] * len(rows))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _by_kernels(sources: list[Tensor], targets: list[Tensor], drawn: Drawn | None, max_norm: float | None) -> Tensor:
    passes = launch.Reweighting(sources, targets, drawn)
    squares = passes.squares(store=max_norm is None and drawn is not None).double()
    norm = over_shards(tree.sum_by_halves(squares)).sqrt()
    if max_norm is not None:
        passes(clip=clip_factor(norm, max_norm).float().view(1))
    return norm.float()


def owned(grads: Mapping[Path, Tensor]) -> set[Path]:
    """The tensors that may be written to: no other one of these is in their memory."""
    # autograd may hand out one tensor for two leaves, or an expanded one: in place would change those twice; averaged
    # gradients are views of one buffer, side by side
    shared, end = set[Path](), 0
    holder: Path | None = None  # of the memory up to end
    for start, stop, path in sorted(((*_extent(g), path) for path, g in grads.items()), key=lambda span: span[:2]):
        if holder is not None and start < end:
            shared |= {path, holder}
        if stop > end:
            holder, end = path, stop
    return grads.keys() - shared


def _extent(leaf: Tensor) -> tuple[int, int]:
    """Addresses of a leaf's values; of one that is not contiguous, those of its storage."""
    storage = leaf.untyped_storage()
    if not leaf.is_contiguous():
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start = storage.data_ptr() + int(leaf.storage_offset()) * leaf.itemsize
    return start, start + int(leaf.nbytes)
