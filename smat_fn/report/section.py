"""The parts of a report as values: a section has words, and perhaps a table and a figure."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .tables import Cell, plain

DASH = "–"  # noqa: RUF001 (what is not there)
BOLD = re.compile(r"\*\*[\d.]+( ± [\d.]+)?\*\*")  # the best of a column


class Table(NamedTuple):
    """A table as it is read, and the numbers behind it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]  # texts; a float is shown with four digits, None as a dash
    records: Sequence[Mapping[str, object]] = ()  # for the CSV, unrounded; none: the rows as they stand

    @property
    def csv(self) -> str:
        """The records, or the rows, as CSV."""
        return csv_text(self.records or [dict(zip(self.columns, row, strict=True)) for row in self.rows])


class Section(NamedTuple):
    """One part of a report, with a heading of its own."""

    title: str
    text: str = ""  # Markdown
    table: Table | None = None
    png: bytes | Path | None = None  # a figure, after the table

    @property
    def slug(self) -> str:
        """The title as a file's name, "section" where it has no Latin letter and no digit."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


def markdown(section: Section) -> str:
    """A heading, the text, the table, and the figure as the file ``<slug>.png``."""
    parts = [f"## {section.title}", section.text.strip()]
    parts += [markdown_table(section.table)] if section.table and section.table.rows else []
    parts += [f"![{section.title}]({section.slug}.png)"] if section.png else []
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(table: Table) -> str:
    """The rows; columns that hold numbers alone stand to the right."""
    texts = [[_text(value) for value in row] for row in table.rows]
    right = [all(row[place][:1] in "0123456789+-−–*" for row in texts) for place in range(len(table.columns))]  # noqa: RUF001
    rules = ["---:" if number else "---" for number in right]
    return "\n".join(f"| {' | '.join(line)} |" for line in ([*map(_text, table.columns)], rules, *texts))


def csv_text(records: Sequence[Mapping[str, object]]) -> str:
    """Records as CSV with a header, a column for every name."""
    file = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def spread(line: Mapping[str, Cell]) -> dict[str, object]:
    """Means and standard deviations of a row of cells, as fields of a record."""
    out: dict[str, object] = {}
    for column, cell in line.items():
        out |= {column: cell.mean, f"{column}_sd": cell.sd}
    return out


def words(values: Mapping[str, Any]) -> str:
    """``name value, name value``."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, {}))


def size(count: int) -> str:
    """Bytes in MiB, from 1 GiB on in GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _text(value: object) -> str:
    if value is None:
        return DASH
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if BOLD.fullmatch(text) else plain(text)
