"""Files by content and by identity: hashes, made beside other work, and checks that a file has not changed."""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import NamedTuple

from ..errors import Problems

BLOCK = 1 << 16  # bytes that are read at a time
FOLLOWED = 1 << 18  # the same beside threads that merge: every block waits for the interpreter's lock
SAMPLES = 256  # blocks that `sampled` reads: the first and the last are among them
UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "kB": 10**3}


class Identity(NamedTuple):
    """Facts of a file that change when it is written to, replaced, moved or truncated."""

    size: int  # bytes
    modified: int  # nanoseconds
    changed: int  # nanoseconds; of the inode, which no tool sets back
    inode: int


def identity(file: Path) -> Identity | None:
    """The identity of a file as it is now; None where there is none."""
    with suppress(OSError):
        stat = file.stat()
        return Identity(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return None


class Changed(Problems):
    """Input files changed while they were read. What was noted as finished before is of unchanged files."""


def check_unchanged(seen: Mapping[Path, Identity | None]) -> None:
    """Raises: `Changed` for files that are no longer those that were seen."""
    texts = []
    for file, was in seen.items():
        if (now := identity(file)) != was:
            how = "is gone" if now is None else "was written to or replaced"
            if was is not None and now is not None and now.size != was.size:
                how = f"has {now.size} bytes, it had {was.size}"
            texts.append(f"{file} {how} while it was read: nothing is written, leave inputs unchanged and rerun")
    if texts:
        raise Changed(texts)


class Hashing:
    """Hashes files (SHA-256) in threads beside other work; a file that does not change is hashed once.

    At the end of the block what is not asked for is given up.
    """

    def __init__(self, workers: int) -> None:
        self._pool, self._stopped = ThreadPoolExecutor(workers), Event()
        self._found: dict[tuple[Path, Identity | None], Future[str]] = {}

    def __enter__(self) -> "Hashing":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

    def begin(self, files: Iterable[Path]) -> dict[Path, Future[str]]:
        """Start on files that have not been started as they are now."""
        begun = {}
        for file in files:
            key = file.absolute(), identity(file)
            if key not in self._found:
                self._found[key] = self._pool.submit(self._digest, file)
            begun[file] = self._found[key]
        return begun

    def know(self, file: Path, digest: str) -> None:
        """Take over the digest of a file."""
        found: Future[str] = Future()
        found.set_result(digest)
        self._found[file.absolute(), identity(file)] = found

    def digests(self, files: Iterable[Path]) -> dict[Path, str]:
        """SHA-256 of files, waited for. Raises: OSError for one that cannot be read."""
        return {file: digest.result() for file, digest in self.begin(files).items()}

    def _digest(self, file: Path) -> str:
        digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
        with file.open("rb", buffering=0) as opened:
            while not self._stopped.is_set() and (count := opened.readinto(block)):
                digest.update(block[:count])  # releases the GIL
        return digest.hexdigest()


@contextmanager
def followed(descriptor: int) -> Iterator[tuple[Future[str], Callable[[int], None]]]:
    """SHA-256 of an open file while it is written from its start on, in a thread.

    Yields: the hash, there once the block ends; and ``reached(end)``, to be called when all bytes below ``end`` are
        written, the last time with the file's size.
    """
    ends = SimpleQueue[int | None]()

    def follow() -> str:
        digest, block, start = hashlib.sha256(), memoryview(bytearray(FOLLOWED)), 0
        for end in iter(ends.get, None):
            while start < end:
                count = os.preadv(descriptor, [block[: end - start]], start)
                if not count:
                    raise OSError(f"a file that is written was cut to {start} bytes by another process")
                digest.update(block[:count])
                start += count
        return digest.hexdigest()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(follow)
        try:
            yield found, ends.put
        finally:
            ends.put(None)


def digests(files: Iterable[Path], workers: int) -> dict[Path, str]:
    """SHA-256 of every file, each file once, in several threads. Raises: OSError for one that cannot be read."""
    with Hashing(workers) as hashing:
        return hashing.digests(files)


def shared(hashing: Hashing | None, workers: int) -> AbstractContextManager[Hashing]:
    """``hashing``, which the caller closes, or a new one that ends with the block."""
    return Hashing(workers) if hashing is None else nullcontext(hashing)


def sampled(file: Path) -> str:
    """SHA-256 of a file's size and of at most `SAMPLES` of its blocks: the same on all machines that read the file."""
    size = file.stat().st_size
    blocks = -(-size // BLOCK)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb", buffering=0) as opened:
        for i in range(min(blocks, SAMPLES)):
            opened.seek(i * max(blocks - 1, 1) // max(min(blocks, SAMPLES) - 1, 1) * BLOCK)
            digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def size_text(count: int) -> str:
    """A number of bytes in its unit: "5.0 GB", "812 bytes"."""
    unit = next((unit for unit, size in UNITS.items() if count >= size), None)
    return f"{count} bytes" if unit is None else f"{count / UNITS[unit]:.1f} {unit}"


def bytes_of(size: str) -> int:
    """ "5GB", "200MB", "4kB" or a number of bytes. Raises: ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]B)?", size.strip().upper().replace("K", "k"))
    if not found:
        raise ValueError(f"shard_size is {size!r}: write 5GB, 200MB or a number of bytes")
    return int(float(found[1]) * UNITS.get(found[2] or "", 1))
