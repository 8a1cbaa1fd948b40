"""Pieces of work in several threads: torch and numpy let go of the interpreter while they compute."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
AHEAD = 2  # tasks a thread that wait in line


def in_order(tasks: Iterable[Callable[[], T]], workers: int) -> Iterator[T]:
    """The results of tasks in their order; with one worker each is run when its result is asked for."""
    if workers == 1:
        yield from (task() for task in tasks)
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(workers) as pool:
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
