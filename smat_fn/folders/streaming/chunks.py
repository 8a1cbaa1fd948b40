"""Merging of one leaf of mapped folders, chunk by chunk, with the arithmetic of the pure mergers."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ... import errors, execution, tree
from ...merge.parts.chunks import BYTES_PER_COORDINATE, CHUNK, Piece, fields_of, mask_keys
from ...merge.parts.looped import INFINITE, KINDS, Loop, Window, sources
from ...merge.parts.merger import Mapped, Merger, Rule
from ...merge.parts.windows import ROWS, SPAN, InPlace, Scratch, spans, windows
from ...merge.parts.windows import each_window as each_of
from ..files import Identity
from ..inputs.reading import Folder
from ..inputs.stored import Stored

T = TypeVar("T")
ON_DEVICE = 1 << 27  # coordinates of a chunk on a GPU: of fewer the launches take longer than the work


class Job(NamedTuple):
    """The checked inputs and settings of one merge."""

    config: Merger
    coefs: dict[str, float]  # γ of every floating-point leaf; empty for mergers without one
    key: Tensor | None
    base: Folder
    experts: dict[str, Folder]
    dtype: torch.dtype | None  # of the floating-point output; None: base's
    chunk: int  # coordinates, over all experts together, of one worker
    device: torch.device  # that chunks are merged on
    scratch: Scratch  # of this merge
    notes: tuple[str, ...] = ()  # what a user should know of the inputs
    workers: int = 1  # threads
    unlike: frozenset[str] = frozenset()  # leaves, not floating-point, that differ among experts: base's are taken
    seen: Mapping[Path, Identity | None] = MappingProxyType({})  # the inputs' files as they were opened
    beside: Mapping[str, Path | bytes] = MappingProxyType({})  # the output's other files, to be copied or as they are


class Written(NamedTuple):
    """Output coordinates from ``start`` on, valid until this thread merges its next chunk.

    Beside them squared norms of the rounding error and of the merged change.
    """

    start: int
    values: Tensor
    error: float = 0.0
    change: float = 0.0


def written(job: Job) -> Folder:
    """The model whose leaves, shapes and dtypes the output has: base, or the one that it is within."""
    return job.base.within or job.base


def target(job: Job, path: str) -> torch.dtype:
    """The dtype that a leaf is written in."""
    leaf = written(job).leaves[path]
    return job.dtype if job.dtype is not None and leaf.is_floating_point() else leaf.dtype


def compute_dtype(job: Job, path: str) -> torch.dtype:
    """The dtype that a leaf is merged in."""
    folders = [*([job.base] if job.config.based else []), *job.experts.values()]
    return tree.compute_dtype(*(folder.leaves[path] for folder in folders))


def weights_of(job: Job, path: str, start: int, stop: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Flat coordinates [start, stop) of every expert's leaf, not to be written to, until the thread's next chunk."""
    for i, folder in enumerate(job.experts.values()):
        if path not in folder.absent:
            yield job.scratch.cast(f"part {i}", folder.read(path, start, stop), dtype, job.device)


def vectors_of(job: Job, path: str, start: int, stop: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Flat coordinates [start, stop) of every expert's task vector, until the thread's next chunk."""
    return _vectors(job, path, start, _origin(job, path, start, stop, dtype))


def blocks_of(job: Job, path: str) -> Callable[[int, int], list[Tensor]]:
    """Flat coordinates [start, stop) of all task vectors of a leaf, or weights without a base, for a survey.

    Weights that loops read are as they are stored. Raises: as `write_order`, which alone looks at those weights.
    """
    based, dtype = job.config.based, compute_dtype(job, path)

    def plain(start: int, stop: int) -> list[Tensor]:
        found = list((vectors_of if based else weights_of)(job, path, start, stop, dtype))
        if not finite(found):
            refuse_values(job, path, found)  # decompositions would name a leaf, and no expert
        return found

    if not looped(job, path):
        return plain
    read, loops = Sources(job, path, job.experts), execution.loops()
    assert loops is not None

    def vectors(start: int, stop: int) -> list[Tensor]:
        shape = len(job.experts), stop - start
        rows = job.scratch.take("rows", math.prod(shape), torch.float32, job.device).view(shape)
        where, _held = read(start, stop)
        if loops.vectors(where, stop - start, rows.numpy()) >= INFINITE:
            refuse_values(job, path, list(rows))
        return list(rows)

    def weights(start: int, stop: int) -> list[Tensor]:
        return [aligned(folder.read(path, start, stop)) for folder in job.experts.values()]

    return vectors if based else weights


def _vectors(job: Job, path: str, start: int, origin: Tensor) -> Iterator[Tensor]:
    stop, dtype = start + len(origin), origin.dtype
    for i, weights in enumerate(weights_of(job, path, start, stop, dtype)):
        yield torch.sub(weights, origin, out=job.scratch.take(f"part {i}", len(origin), dtype, job.device))


def vector_of(job: Job, path: str, name: str, *, rows: bool) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """One expert's task vector as `merger.Mapped.vector` gives it, until the thread's next chunk."""
    leaf, dtype, folder = job.base.leaves[path], compute_dtype(job, path), job.experts[name]
    keys = None if job.key is None else mask_keys(job.key, [name], [path])
    for start, stop in spans(leaf, min(job.chunk, span_of(job)), rows=rows):
        weights = job.scratch.cast("part", folder.read(path, start, stop), dtype, job.device)
        origin = _origin(job, path, start, stop, dtype)
        drawn = None if keys is None else fields_of(keys, [(0, start, stop)], job.device)[0][0]
        yield start, torch.sub(weights, origin, out=job.scratch.take("part", stop - start, dtype, job.device)), drawn


def usual_chunk(device: torch.device) -> int:
    """The chunk of all threads together, which takes at most half of a GPU's free memory."""
    if device.type == "cpu":
        return CHUNK
    return max(CHUNK, min(ON_DEVICE, torch.cuda.mem_get_info(device)[0] // (2 * BYTES_PER_COORDINATE)))


def span_of(job: Job) -> int:
    """Coordinates of a leaf that torch's operations take at a time, at most: a GPU takes whole chunks."""
    return SPAN if job.device.type == "cpu" else job.chunk


def finite(parts: Sequence[Tensor]) -> bool:
    """Whether the sums of all parts are finite; the host waits once for a device, and not for each part."""
    return bool(torch.stack([part.sum() for part in parts]).isfinite().all())


def _origin(job: Job, path: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    return job.scratch.cast("origin", job.base.read(path, start, stop), dtype, job.device)


def _in_turn(job: Job, path: str, start: int, origin: Tensor, *, based: bool) -> Iterator[Tensor]:
    """`vectors_of`, or `weights_of`, for a sum: the first may be written to, each other one only until the next."""
    stop, dtype = start + len(origin), origin.dtype
    for i, folder in enumerate(job.experts.values()):
        values = folder.read(path, start, stop)
        room = job.scratch.take("part" if i else "total", stop - start, dtype, job.device)
        if based:
            yield room.copy_(values).sub_(origin)
        else:
            yield job.scratch.cast("part", values, dtype, job.device) if i else room.copy_(values)


def rule_of(job: Job, leaves: Mapped) -> Rule:
    """The merger's rule; sums of few weights without a loop, since starting numba takes more time than it saves."""
    weights = sum(leaf.numel() for leaf in job.base.leaves.values()) * len(job.experts)
    return job.config.rule(leaves).worth(weights)


def write_order(job: Job, rule: Rule, path: str) -> Iterator[Callable[[], Written]]:
    """Tasks that give every coordinate of one output leaf, in order, on the CPU; independent of each other.

    Tasks raise: ValueError that lists all values of all inputs that are not finite on meeting one.
    """
    if path not in job.base.leaves:
        return _kept(job, path)
    if not job.base.leaves[path].is_floating_point():
        return _copied(job, path)
    loop = None if rule.loop is None or not looped(job, path) else rule.loop(path)
    return _merged(job, rule, path) if loop is None else _by_loop(job, rule, path, loop)


def looped(job: Job, path: str) -> bool:
    """Whether compiled loops read a leaf of base and of all experts, and write what it becomes."""
    folders = job.base, *job.experts.values()
    dtypes = {folder.leaves[path].dtype for folder in folders} | {target(job, path)}
    takes = job.device.type == "cpu" and job.base.leaves[path].numel() and dtypes <= set(KINDS)
    return bool(takes) and not any(path in folder.absent for folder in folders) and execution.loops() is not None


class Sources:
    """`Read` of a leaf of base and of experts, which may be stored or formed when it is read."""

    def __init__(self, job: Job, path: str, names: Iterable[str]) -> None:
        self._reads = [folder.reads[path] for folder in (job.base, *(job.experts[name] for name in names))]
        self._leaves = [read.mapped() if isinstance(read, Stored) else None for read in self._reads]
        stored = [leaf for leaf in self._leaves if leaf is not None]
        self._stored = InPlace(stored) if len(stored) == len(self._reads) else None
        self.span = min(job.chunk, SPAN) if self._stored is None else min(4 * job.chunk, self._stored.span)

    def __call__(self, start: int, stop: int) -> tuple[Any, object]:
        if self._stored is not None:
            return self._stored(start, stop)
        parts = [
            read(start, stop) if leaf is None else leaf[start:stop]
            for read, leaf in zip(self._reads, self._leaves, strict=True)
        ]
        parts = list(map(aligned, parts))
        return sources(parts), parts


def aligned(part: Tensor) -> Tensor:
    """A flat tensor as loops read it: a file may place leaves at odd addresses."""
    return part.clone() if part.data_ptr() % part.itemsize else part.contiguous()


def _by_loop(job: Job, rule: Rule, path: str, loop: Loop) -> Iterator[Callable[[], Written]]:
    leaf, out, read = job.base.leaves[path], target(job, path), Sources(job, path, job.experts)
    window = window_of(job, path, read)

    def merge(start: int, stop: int) -> Written:
        values = job.scratch.take("values", stop - start, out, job.device)
        done = loop(window(start, stop, values))
        if not done.finite:
            refuse_values(job, path, list(vectors_of(job, path, start, stop, torch.float32)))
        if not done.fits:
            raise _too_wide(path, out)
        return Written(start, values, done.error, done.change)

    limit = _of_rows(job) if rule.rows else read.span
    return (partial(merge, *span) for span in spans(leaf, limit, rows=rule.rows))


def window_of(job: Job, path: str, read: Sources | None = None) -> Callable[[int, int, Tensor], Window]:
    """`windows.windows` of a leaf of all experts. Args: read: its `Sources`, if the caller has them."""
    room = partial(job.scratch.take, device=job.device)
    read = Sources(job, path, job.experts) if read is None else read
    return windows(read, job.key, job.experts, path, job.coefs.get(path, 1.0), room)


def each_window(
    job: Job, path: str, function: Callable[[Window], T], *, rows: bool
) -> Iterator[Callable[[], T]] | None:
    """`windows.each_window` of a leaf."""
    read = Sources(job, path, job.experts)
    sizes = job.base.leaves[path], read.span, job.chunk // len(job.experts)
    return each_of(window_of(job, path, read), function, *sizes, rows=rows)


def _of_rows(job: Job) -> int:
    """Coordinates of whole rows at a time."""
    return min(max(1, job.chunk // len(job.experts)), ROWS)


def _too_wide(path: str, out: torch.dtype) -> ValueError:
    return ValueError(f"parameter {path!r}: merged values exceed the range of {out}: choose a wider out_dtype")


def _merged(job: Job, rule: Rule, path: str) -> Iterator[Callable[[], Written]]:
    leaf, out = job.base.leaves[path], target(job, path)
    dtype, based = compute_dtype(job, path), job.config.based
    drawn = None if job.key is None else mask_keys(job.key, list(job.experts), [path])
    fuse = None if rule.fuse is None else rule.fuse(path)

    def merge(start: int, stop: int) -> Written:
        origin = _origin(job, path, start, stop, dtype)

        def parts() -> Iterator[Tensor]:
            return _vectors(job, path, start, origin) if based else weights_of(job, path, start, stop, dtype)

        if rule.total is not None:
            merged = rule.total(_in_turn(job, path, start, origin, based=based))
        else:
            assert fuse is not None
            every = list(parts())
            if not finite(every):
                refuse_values(job, path, every)
            fields = [] if drawn is None else fields_of(drawn, [(0, start, stop)], job.device)[0]
            merged = fuse(Piece(path, start, every, fields))
        room = job.scratch.take("change", stop - start, merged.dtype, job.device)
        if not based:
            change = torch.sub(merged, origin, out=room)
        elif fuse is None:  # a total, which nobody else has
            change = merged.mul_(job.coefs[path])
        else:
            change = torch.mul(merged, job.coefs[path], out=room)
        size = _square(change)
        if fuse is None and not math.isfinite(size):  # sums keep what is not finite
            refuse_values(job, path, list(parts()))
        exact = change.add_(origin) if based else merged
        values = job.scratch.cast("values", exact, out, job.device)
        # sub_ would take new memory to widen the values
        error = 0.0 if out == dtype else _square(exact.sub_(job.scratch.cast("part", values, exact.dtype, job.device)))
        if not (math.isfinite(error or values.sum()) or bool(values.isfinite().all())):
            raise _too_wide(path, out)
        return Written(start, values.cpu(), error, size)

    room = job.chunk if fuse is None else job.chunk // len(job.experts)  # a sum holds one expert at a time
    limit = rule.at_once(job.base.leaves, path) or min(room, span_of(job))
    return (partial(merge, *span) for span in spans(leaf, limit, rows=rule.rows))


def _copied(job: Job, path: str) -> Iterator[Callable[[], Written]]:
    held = job.base if job.config.based or path in job.unlike else next(iter(job.experts.values()))

    def copy(start: int, stop: int) -> Written:
        return Written(start, held.read(path, start, stop))

    return (partial(copy, *span) for span in spans(job.base.leaves[path], job.chunk))


def _kept(job: Job, path: str) -> Iterator[Callable[[], Written]]:
    """A leaf of the whole model outside of the part that is merged."""
    whole, out = written(job), target(job, path)

    def copy(start: int, stop: int) -> Written:
        values = whole.read(path, start, stop)
        if not tree.is_finite(values):
            raise ValueError(f"parameter {path!r} of {whole.label} holds values that are NaN or infinite")
        if not tree.is_finite(narrow := values.to(out)):
            raise _too_wide(path, out)
        return Written(start, narrow)

    return (partial(copy, *span) for span in spans(whole.leaves[path], min(job.chunk, SPAN)))


def unlike(base: Folder, experts: Iterable[Folder], chunk: int) -> frozenset[str]:
    """Leaves, not floating-point, that differ among experts, as BatchNorm's counts of batches do."""
    first, *rest = experts
    return frozenset(
        path
        for path, leaf in base.leaves.items()
        if not leaf.is_floating_point()
        for span in spans(leaf, chunk)
        if not all(torch.equal(first.read(path, *span), folder.read(path, *span)) for folder in rest)
    )


def refuse_values(job: Job, path: str, parts: list[Tensor]) -> None:
    """Read everything and list what cannot be merged. Raises: ValueError, unless only a sum was too large."""
    errors.raise_problems(list(_value_problems(job)))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError(
            f"parameter {path!r}: expert - base overflows float32; was the expert fine-tuned from this base?"
        )


def _value_problems(job: Job) -> Iterator[str]:
    for folder in (job.base, *job.experts.values()):
        for path, leaf in folder.leaves.items():
            if leaf.is_floating_point():
                bad = sum(int((~folder.read(path, *span).isfinite()).sum()) for span in spans(leaf, job.chunk))
                if bad:
                    yield f"parameter {path!r} of {folder.label} holds {bad} values that are NaN or infinite"


def _square(values: Tensor) -> float:
    """Σ v²; in float64, a third as fast, only where float32 cannot hold it."""
    found = float(values.dot(values))
    return found if 1e-30 < found < 1e30 else float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
