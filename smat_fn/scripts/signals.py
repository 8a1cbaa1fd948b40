"""Signals that end a command as an exception does, so that it ends what it started."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit inside, so that a launcher ends the processes it started."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    asking = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # as nohup sets
    for number in asking:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in asking:
            signal.signal(number, before[number])
