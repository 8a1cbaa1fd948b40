"""Progress of long work on stderr: a bar of tqdm on a terminal, a line every few per cent elsewhere. No torch here."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Self

SHARE, SECONDS = 0.05, 5.0  # between lines, at least
SILENT = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # tqdm's own; child processes inherit them


def silence() -> None:
    """Show no progress in this process and its children: bars, lines, and those of tqdm in other packages."""
    os.environ.update(SILENT)


def silent() -> bool:
    """Whether `silence` was called, or the environment asks for it."""
    return os.environ.get("TQDM_DISABLE", "0") not in ("", "0")


def say(text: str) -> None:
    """A line on stderr about what begins, unless that is silenced."""
    if not silent():
        print(text, file=sys.stderr, flush=True)


def starting(script: str, words: Sequence[str]) -> None:
    """Print to stderr that a script loads its libraries, which takes seconds."""
    if os.environ.get("RANK", "0") != "0" or "--quiet" in words:
        return
    first = words[0] if words else "-"
    folder = first.startswith("-") or "=" in first or os.path.exists(first)  # or TASK=FOLDER, or options
    command = script if folder else f"{script} {first}"
    say(f"{command}: loading libraries")


class Lines:
    """The part of tqdm that this package uses, for a log file: a line after every 5 % that took 5 seconds or more.

    Work of less than 5 seconds writes nothing.
    """

    def __init__(self, *, total: float | None, desc: str, initial: float = 0) -> None:
        self.total, self.n, self._desc, self._text = total, initial, desc, ""
        self._begin = self._since = monotonic()
        self._first = self._shown = initial
        self._advanced = False  # at least once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        """Advance by ``n``, and write a line if one is due."""
        self.n += n
        now, begin, first = monotonic(), self._begin, self._first
        if not self._advanced:  # what comes first often compiles or loads: it does not count in what is left
            self._advanced, self._begin, self._first = True, now, self.n
        if not self.total or now - self._since < SECONDS or self.n - self._shown < SHARE * self.total or silent():
            return
        self._since, self._shown = now, self.n
        left = (now - begin) * (self.total - self.n) / (self.n - first)
        text = f", {self._text}" if self._text else ""
        line = f"{self._desc}: {self.n / self.total:.0%} of {self.total:g}{text}, about {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """Text of the next line."""
        self._text = text

    def refresh(self) -> None:
        """Do nothing: `update` writes the lines."""

    def close(self) -> None:
        """Do nothing: no terminal line is open."""


def bar(total: float | None = None, *, desc: str, shown: bool | None = None, **options: Any) -> Any:
    """A progress bar to use in ``with``, with tqdm's ``update``, ``total`` and ``n``.

    Args:
        total: steps, which may be set later.
        desc: what advances.
        shown: True: a bar; False: nothing; None: a bar on a terminal, `Lines` elsewhere.
        options: of tqdm.
    """
    from tqdm import tqdm

    if shown is None and sys.stderr is not None and not sys.stderr.isatty():
        return Lines(total=total, desc=desc, initial=options.get("initial", 0))
    return tqdm(total=total, desc=desc, disable=shown is False or silent() or sys.stderr is None, **options)


@contextmanager
def downloading(source: str | Path, kind: Literal["models", "datasets"] = "models") -> Iterator[None]:
    """Progress lines of a hub download where stderr is not a terminal; on a terminal the hub shows its own bars.

    Args: source: a folder, of which nothing is said, or a name on the hub.
    """
    if sys.stderr is None or sys.stderr.isatty() or silent() or Path(source).expanduser().exists():
        yield
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"{kind}--{str(source).replace('/', '--')}" / "blobs"
    there, done = _bytes(blobs), threading.Event()

    def watch() -> None:
        shown = there
        while not done.wait(SECONDS):
            if (now := _bytes(blobs)) > shown:
                shown = now
                print(f"downloading {source}: {(now - there) / 1e6:.0f} MB so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes(folder: Path) -> int:
    """The size of the files in a folder, those that vanish meanwhile left out."""
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total
