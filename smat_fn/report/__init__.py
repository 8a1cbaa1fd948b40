"""Reports: scores and runs in, sections with words, tables and figures out; Markdown, CSV, PNG and one HTML page."""

from .section import Section, Table
from .settings import with_muon
from .write import build_report, write_full_report, write_report

__all__ = ["Section", "Table", "build_report", "with_muon", "write_full_report", "write_report"]
