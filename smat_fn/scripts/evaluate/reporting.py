"""``eval.py report``: a report on finished runs. No torch until it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .. import outcome


@dataclass(frozen=True)
class Report:
    """Report on finished runs, from stored results: one HTML page, Markdown, CSV and PNG; nothing is evaluated."""

    sources: Annotated[Positional[tuple[Path, ...]], arg(metavar="PATH...", help_behavior_hint="(at least one)")]
    """Folders of eval.py --out, of studies, of analyses; or files of scores (JSON lines)."""
    out: Path
    """Folder for report.html, report.md, tables as CSV and figures as PNG."""
    title: str = "Results"
    """Title of the page."""
    split: Literal["test", "dev"] = "test"
    """Split whose scores are reported."""
    reference: str = "FT"
    """Label of the reference that others are compared with."""
    overwrite: bool = False
    """Replace a report that exists."""


def report(options: Report) -> None:
    """Find the results and write the report. Raises: ValueError as `read_sources`; for no sources."""
    if not options.sources:
        raise ValueError("give at least one folder of scores")
    if (page := options.out / "report.html").exists() and not options.overwrite:
        raise ValueError(f"{page} exists: choose another --out or pass --overwrite")
    from ...report import write_full_report
    from .sources import read_sources

    found = read_sources(options.sources, besides=options.out)
    page = write_full_report(
        options.out,
        found.rows,
        found.runs,
        title=options.title,
        split=options.split,
        reference=options.reference,
        facts=found.facts,
        extra=found.analyses,
    )
    outcome.line(f"report: {page}")
    outcome.add("written", page)
