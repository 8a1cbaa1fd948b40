"""Windows of leaves for compiled loops, in memory and of folders, and the threads that merge them."""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from ... import execution
from .arithmetic import BLOCK, products_of
from .chunks import groups, mask_keys, row_length
from .looped import NORMED, Window, sources

T = TypeVar("T")
AHEAD = 2  # tasks per thread that wait in line
SPAN = 1 << 18  # coordinates of a leaf at a time, at most: more would only leave the processor's cache
ROWS = 1 << 15  # the same where a loop ranks rows


class NotFinite(ArithmeticError):
    """Loops met a value that is not finite, which only torch's operations merge."""


class Read(Protocol):
    """Where loops read coordinates [start, stop) of some leaves: `looped.sources`, and what owns the memory."""

    span: int  # coordinates at a time, at most

    def __call__(self, start: int, stop: int) -> tuple[Any, object]: ...


class InPlace:
    """`Read` of leaves in memory, flat and at even addresses.

    They are not touched by torch, whose every call lets another thread run, and waits for it.
    """

    span = 4 * SPAN  # windows take no memory, and each costs as much as 20,000 coordinates

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves, self._known = leaves, sources(leaves)
        self._steps = numpy.array([[leaf.itemsize, 0] for leaf in leaves], numpy.uint64)

    def __call__(self, start: int, stop: int) -> tuple[Any, object]:
        return self._known + self._steps * numpy.uint64(start), self._leaves


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

    def free(self) -> None:
        """Forget the tensors of this thread."""
        self._held.clear()

    def cast(self, name: str, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``values.to(device, dtype)``, a copy in the memory of this name where it is one."""
        if values.dtype == dtype and values.device == device:
            return values
        # to the device first: torch casts what it copies there on the CPU, and more bytes would travel
        return self.take(name, len(values), dtype, device).copy_(values.to(device))


def windows(
    read: Read,
    key: Tensor | None,
    names: Iterable[str],
    path: str,
    coef: float | None,
    room: Callable[[str, int, torch.dtype], Tensor],
) -> Callable[[int, int, Tensor], Window]:
    """Coordinates [start, stop) of a leaf for a loop, which writes what is merged into the last argument.

    Args: read: of base and all experts; key, names: of the experts' mask streams; others: as of `Window`.
    """
    loops = execution.loops()
    assert loops is not None
    drawn = None if key is None else mask_keys(key, list(names), [path])
    keys = None if drawn is None else execution.array(drawn.contiguous()).reshape(-1, 2)
    return lambda start, stop, out: Window(loops, start, stop - start, *read(start, stop), keys, coef, out, room)


def products_by_loops(read: Read, size: int, *, based: bool, diagonal: bool) -> Iterator[Callable[[], Tensor]]:
    """Tasks that give the `arithmetic.products` of a leaf's blocks, in order. Args: as of `products_of`."""
    loops = execution.loops()
    assert loops is not None

    def block(start: int, stop: int) -> Tensor:
        where, _held = read(start, stop)
        return products_of(loops, where, stop - start, based=based, diagonal=diagonal)

    return (partial(block, start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def each_window(
    window: Callable[[int, int, Tensor], Window],
    function: Callable[[Window], T],
    leaf: Tensor,
    size: int,
    most: int,
    *,
    rows: bool,
) -> Iterator[Callable[[], T]] | None:
    """Tasks that call a function, such as `looped.ByField.norms`, on a leaf's windows that loops read, in order.

    Args: size: coordinates at a time; most: the same of rows; rows: no row is cut.
    Returns: None where ``most`` does not hold rows that begin and end with blocks.
    """
    step = math.lcm(NORMED, row_length(leaf.shape)) if rows else NORMED
    if rows and min(step, leaf.numel()) > most:
        return None
    nothing = torch.empty(0, device="cpu")

    def task(start: int, stop: int) -> T:
        return function(window(start, stop, nothing))

    limit = max((min(most, ROWS) if rows else size) // step, 1) * step
    return (partial(task, *cut) for cut in spans(leaf, limit, rows=rows))


def spans(leaf: Tensor, limit: int, *, rows: bool = False) -> Iterator[tuple[int, int]]:
    """Flat ranges of at most ``limit`` coordinates (or one row) that cover a leaf; with ``rows`` no row is cut."""
    return ((start, stop) for group in groups([leaf], max(1, limit), rows) for _, start, stop in group)


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
        """`in_order` by these threads; inside of one of them one task after the other."""
        if self._workers == 1 or hasattr(self._inside, "started"):
            return (task() for task in tasks)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, initializer=lambda: setattr(self._inside, "started", True))
        return _taken(self._pool, tasks, self._workers)
