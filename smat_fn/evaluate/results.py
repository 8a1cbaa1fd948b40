"""One score as one row, and rows as JSON lines."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint import write_text

Row = TypeVar("Row")


@dataclass(frozen=True)
class Result:
    """The score of one model on one task.

    Raises: ValueError for a score outside 0 to 100.
    """

    method: str  # that trained the experts
    model: str  # "expert:<task>" or the name of a merger
    task: str
    split: str
    score: float  # 0 to 100
    seed: int  # of the training run
    coef: float | None = None  # gamma of a merged model
    extra: Mapping[str, Any] = field(default_factory=dict)  # anything else, JSON values

    def __post_init__(self) -> None:
        if not 0 <= self.score <= 100:
            raise ValueError(f"score of {self.method}, {self.model} on {self.task}: {self.score} is outside [0, 100]")


def write_results(path: str | Path, rows: Iterable[Any]) -> None:
    """Replace a JSON lines file atomically. Args: rows: `Result`, or dataclasses of another kind."""
    lines = (json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(Path(path), "".join(lines))


def read_results(path: str | Path) -> list[Result]:
    """The rows of a JSON lines file. Raises: ValueError that lists every line that is no `Result`."""
    return read_rows(path, Result)


def read_rows(path: str | Path, kind: type[Row]) -> list[Row]:
    """`read_results` for a dataclass of any kind."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    rows, problems = [], []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            if unknown := set(values) - known:
                raise ValueError(f"unknown fields {sorted(unknown)}")
            rows.append(kind(**values))
        except (ValueError, TypeError) as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        raise ValueError("; ".join(problems) + ": remove these lines or write the file again")
    return rows
