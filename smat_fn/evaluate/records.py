"""Score cache: scores and decoded answers by a hash of their inputs, as JSON lines."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import json_lines

log = logging.getLogger(__name__)

SCORES, ANSWERS = "scores.jsonl", "answers.jsonl"


class Scored(NamedTuple):
    """A score and the seconds that it took."""

    score: float
    seconds: float


class Answer(NamedTuple):
    """The decoded answer to one row, with its reference."""

    row: int
    prediction: str
    reference: str


class Journal(NamedTuple):
    """Cached answers of one decode, and where a suite writes new ones."""

    known: Mapping[int, str]  # predictions by row
    add: Callable[[Sequence[Answer], int, int], None]  # (new answers of a batch, rows done, rows)


def content_key(facts: Mapping[str, Any]) -> str:
    """128-bit BLAKE2b of JSON values; the order of a mapping does not count, that of a list does."""
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Records:
    """Scores and answers by key: in memory, and with a folder in its ``scores.jsonl`` and ``answers.jsonl`` too.

    What is added is a line at once, so that a program that is ended finds it the next time. Several programs may add to
    one folder: each writes whole lines at the end, in one call, and none cuts the file. A last line without an end is
    passed over, since another program may be writing it; other lines that are not records too, with a warning in the
    log. Nothing is written, nor the folder made, before the first record.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._scores: dict[str, Scored] = {}
        self._answers: dict[str, dict[int, str]] = {}
        if folder is not None:
            json_lines.read(folder / SCORES, self._take_score, log)
            json_lines.read(folder / ANSWERS, self._take_answer, log)

    def score(self, key: str) -> Scored | None:
        """The score of a key, or None."""
        return self._scores.get(key)

    def answers(self, key: str) -> Mapping[int, str]:
        """Predictions of a key by row."""
        return self._answers.get(key, {})

    def add_score(self, key: str, kept: Scored, about: Mapping[str, Any]) -> None:
        """Keep a score; ``about`` are JSON values that describe the score."""
        self._take_score(line := {"key": key, **about, "score": kept.score, "seconds": round(kept.seconds, 3)})
        self._append(SCORES, [line])

    def add_answers(self, key: str, answers: Sequence[Answer], about: Mapping[str, Any]) -> None:
        """Keep the answers of one batch, in one write."""
        lines = [{"key": key, **about, **answer._asdict()} for answer in answers]
        for line in lines:
            self._take_answer(line)
        self._append(ANSWERS, lines)

    def _take_score(self, line: Mapping[str, Any]) -> None:
        kept = Scored(float(line["score"]), float(line["seconds"]))
        if not 0 <= kept.score <= 100:
            raise ValueError(f"score is {kept.score}")
        self._scores[str(line["key"])] = kept

    def _take_answer(self, line: Mapping[str, Any]) -> None:
        row, text = int(line["row"]), line["prediction"]
        if not isinstance(text, str):
            raise TypeError(f"prediction is {text!r}, not a text")
        self._answers.setdefault(str(line["key"]), {})[row] = text

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if self._folder is not None and lines:
            json_lines.append(self._folder / name, lines)
