"""Output of a command: lines of text; ``--quiet``, no progress on stderr; ``--json``, one JSON object."""

import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import redirect_stdout
from contextvars import ContextVar
from typing import Any

from .. import progress
from ..errors import printable

WORDS = "--quiet", "--json"
HELPS = frozenset({"-h", "--help", "--help-all"})
HELP = """options of every command
  --quiet    no progress on stderr, only results, notes and warnings
  --json     print one JSON object to stdout at the end, all else to stderr
"""
_facts: ContextVar[dict[str, list[Any]] | None] = ContextVar("facts", default=None)


def add(kind: str, fact: Any) -> None:
    """Add to the JSON object that ``--json`` prints; without it, do nothing.

    Args:
        kind: name of the list that the fact belongs to, such as "experts".
        fact: JSON values; paths and other objects become texts.
    """
    if (facts := _facts.get()) is not None:
        facts.setdefault(kind, []).append(fact)


def line(text: str) -> None:
    """Print a result or a note, with control characters of paths and input files as text."""
    print(printable(text), flush=True)


def counted(things: Collection[object], one: str, several: str) -> str:
    """The number of things and what they are: "1 module", "2 modules"."""
    return f"{len(things)} {one if len(things) == 1 else several}"


def called(words: Sequence[str], call: Callable[[list[str]], None]) -> None:
    """Call a command with its words, without `WORDS`; with ``--json`` print its object, also where it fails.

    Args:
        words: of the command line.
        call: parses the remaining words and does the work.
    """
    left = [word for word in words if word not in WORDS]
    if "--quiet" in words:
        progress.silence()
    if "--json" not in words or HELPS & set(words):  # help is text, with and without torch
        return call(left)
    facts: dict[str, list[Any]] = {}
    token, ended = _facts.set(facts), dict[str, Any]()
    try:
        with redirect_stdout(sys.stderr):
            call(left)
    except SystemExit as error:
        if error.code:
            status = f"status {error.code}, the error is on stderr"  # a number where words do not parse
            ended = {"error": status if isinstance(error.code, int) else str(error.code)}
        raise
    except BaseException as error:
        ended = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        _facts.reset(token)
        if os.environ.get("RANK", "0") == "0":
            text = json.dumps({**facts, **ended}, default=str)
            print(json.dumps(json.loads(text, parse_constant=lambda _: None)), flush=True)  # JSON has no NaN
    return None
