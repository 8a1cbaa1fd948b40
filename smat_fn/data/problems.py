"""Rows in error messages."""

from collections.abc import Sequence
from pathlib import Path

_SHOWN = 10


def name_rows(indices: Sequence[int]) -> str:
    """Rows in an error message: "row 3", "rows 3, 5 and 7", the first ten of many."""
    shown, more = [str(i) for i in indices[:_SHOWN]], len(indices) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def complain(where: str | Path, problems: Sequence[str]) -> None:
    """Raises: ValueError that lists the problems of a source, if there are any."""
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)} (rows count from 0)")
