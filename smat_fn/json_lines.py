"""Files of JSON lines that several programs may add to: a line at once, and broken ones are passed over."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .checkpoint import named_in_errors


def append(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Add lines at the end of a file in one write; a last line without an end gets one. Folders are made."""
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    with named_in_errors(path), open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        broken = file.read(1) not in (b"", b"\n")  # off by a kill, or another program has not written its end
        left = memoryview(("\n" * broken + text).encode())
        while left:  # more than one call on a full disk alone, where the next one raises the error
            left = left[file.write(left) :]


def read(path: Path, take: Callable[[Mapping[str, Any]], None], log: logging.Logger) -> None:
    """Call ``take`` with every line that has an end; those that it refuses are a warning in the log."""
    if not path.exists():
        return
    skipped = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        if not line:  # another program ended it meanwhile
            continue
        try:
            take(json.loads(line))
        except (ValueError, TypeError, KeyError):
            skipped.append(number)
    if skipped:
        log.warning("%s: lines %s are not valid records and are skipped", path, skipped)
