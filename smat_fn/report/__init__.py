"""Reports: scores and runs in, sections with words, tables and figures out; Markdown, CSV, PNG and one HTML page."""

from .found import with_muon
from .section import Section, Table
from .write import build_report, write_full_report, write_report

__all__ = ["Section", "Table", "build_report", "with_muon", "write_full_report", "write_report"]
