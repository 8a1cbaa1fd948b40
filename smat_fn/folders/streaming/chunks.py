"""Merging of one leaf of mapped folders, chunk by chunk, with the arithmetic of the pure mergers."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor

from ... import errors, execution, tree
from ...merge.parts.chunks import BYTES_PER_COORDINATE, CHUNK, Piece, fields_of, groups, mask_keys, row_length
from ...merge.parts.looped import KINDS, NORMED, Loop, Window, sources
from ...merge.parts.merger import Mapped, Merger, Rule
from ..files import Identity
from ..inputs.reading import Folder, Stored

T = TypeVar("T")
AHEAD = 2  # tasks per thread that wait in line
SPAN = 1 << 18  # coordinates of a leaf at a time, at most: more would only leave the processor's cache
ROWS = 1 << 15  # the same where a loop sorts rows
ON_DEVICE = 1 << 27  # coordinates of a chunk on a GPU: of fewer the launches take longer than the work
STARTED = 1 << 31  # weights of all experts whose sum by a loop saves the 0.3 s that numba takes to start


class Scratch(threading.local):
    """Flat tensors by name, of each thread its own: taking new ones costs as much as the arithmetic on them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``count`` numbers of any value; they are the ones that this name gave before, of this dtype and device."""
        key = name, dtype, device
        held = self._held.get(key)
        if held is None or len(held) < count:
            held = self._held[key] = torch.empty(count, dtype=dtype, device=device)
        return held[:count]

    def cast(self, name: str, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``values.to(device, dtype)``, a copy in the memory of this name where it is one."""
        if values.dtype == dtype and values.device == device:
            return values
        # to the device first: torch casts what it copies there on the CPU, and more bytes would travel
        return self.take(name, len(values), dtype, device).copy_(values.to(device))


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


def spans(leaf: Tensor, limit: int, *, rows: bool = False) -> Iterator[tuple[int, int]]:
    """Flat ranges of at most ``limit`` coordinates (or one row) that cover a leaf; with ``rows`` no row is cut."""
    return ((start, stop) for group in groups([leaf], max(1, limit), rows) for _, start, stop in group)


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
    rule = job.config.rule(leaves)
    weights = sum(leaf.numel() for leaf in job.base.leaves.values()) * len(job.experts)
    keep = rule.total is None or weights >= STARTED or execution.started()
    return rule if keep else rule._replace(loop=None)


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
    """Where compiled loops read a leaf of base and of experts: `sources`, and what owns the memory.

    What is stored is not touched by torch, whose every call lets another thread run, and waits for it.
    """

    def __init__(self, job: Job, path: str, names: Iterable[str]) -> None:
        self._reads = [folder.reads[path] for folder in (job.base, *(job.experts[name] for name in names))]
        self._leaves = [read.mapped() if isinstance(read, Stored) else None for read in self._reads]
        stored = [leaf for leaf in self._leaves if leaf is not None]
        self._known, steps = sources(stored), [[leaf.itemsize, 0] for leaf in stored]
        self._steps, self._all = numpy.array(steps, numpy.uint64), len(stored) == len(self._reads)
        # windows of what is stored take no memory, and each costs as much as 20,000 coordinates
        self.span = min(4 * job.chunk, 4 * SPAN) if self._all else min(job.chunk, SPAN)

    def __call__(self, start: int, stop: int) -> tuple[Any, object]:
        if self._all:
            return self._known + self._steps * numpy.uint64(start), self._leaves
        parts = [
            read(start, stop) if leaf is None else leaf[start:stop]
            for read, leaf in zip(self._reads, self._leaves, strict=True)
        ]
        # a file may place leaves at odd addresses
        parts = [part.clone() if part.data_ptr() % part.itemsize else part.contiguous() for part in parts]
        return sources(parts), parts


def _by_loop(job: Job, rule: Rule, path: str, loop: Loop) -> Iterator[Callable[[], Written]]:
    leaf, out, read = job.base.leaves[path], target(job, path), Sources(job, path, job.experts)
    window = _windows(job, path, read)

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


def _windows(job: Job, path: str, read: Sources) -> Callable[[int, int, Tensor], Window]:
    """Coordinates [start, stop) of a leaf for a loop, whose merged values are written into the last argument."""
    loops, coef, room = execution.loops(), job.coefs.get(path, 1.0), partial(job.scratch.take, device=job.device)
    assert loops is not None
    drawn = None if job.key is None else mask_keys(job.key, list(job.experts), [path])
    keys = None if drawn is None else execution.array(drawn.contiguous()).reshape(-1, 2)
    return lambda start, stop, values: Window(loops, start, stop - start, *read(start, stop), keys, coef, values, room)


def sums_of(job: Job, path: str, sums: Callable[[Window], Any], *, rows: bool) -> Iterator[Callable[[], Any]] | None:
    """Tasks that give the sums of a leaf's windows that loops read, such as `looped.ByField.norms`, in order.

    Args: rows: no row is cut. Returns: None where a chunk does not hold rows that begin and end with blocks.
    """
    leaf, read = job.base.leaves[path], Sources(job, path, job.experts)
    window, nothing = _windows(job, path, read), torch.empty(0)
    step, most = (math.lcm(NORMED, row_length(leaf.shape)), _of_rows(job)) if rows else (NORMED, read.span)
    if rows and min(step, leaf.numel()) > job.chunk // len(job.experts):
        return None

    def task(start: int, stop: int) -> Any:
        return sums(window(start, stop, nothing))

    return (partial(task, *span) for span in spans(leaf, max(most // step, 1) * step, rows=rows))


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
        if not bool(values.isfinite().all()):
            raise ValueError(f"parameter {path!r} of {whole.label} holds values that are NaN or infinite")
        if not bool((narrow := values.to(out)).isfinite().all()):
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


def in_order(tasks: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """The results of tasks in their order; with one worker each is run when its result is asked for."""
    if workers == 1:
        yield from (task() for task in tasks)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from _taken(pool, tasks, workers)


def _taken(pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    waiting: deque[Future[T]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)


class Threads:
    """Threads that a survey keeps: new ones for every leaf would each keep memory that they have given back."""

    def __init__(self, workers: int) -> None:
        self._workers, self._inside = workers, threading.local()
        self._pool: ThreadPoolExecutor | None = None

    def in_order(self, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
        """`chunks.in_order` by these threads; inside of one of them one task after the other."""
        if self._workers == 1 or hasattr(self._inside, "started"):
            return (task() for task in tasks)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, initializer=lambda: setattr(self._inside, "started", True))
        return _taken(self._pool, tasks, self._workers)
