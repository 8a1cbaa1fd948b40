"""A report as files: Markdown, CSV, PNG, and one HTML page: styles inline, images as data URIs, no scripts."""

import base64
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import errors
from ..evaluate.results import Result, Run
from . import details, sections
from .found import Found, find
from .section import Section, Table, markdown, words
from .tables import plain

HEAD = '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
STYLE = Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def build_report(
    rows: Iterable[Result],
    runs: Iterable[Run] = (),
    *,
    split: str = "test",
    reference: str = "FT",
    facts: Mapping[str, Any] | None = None,
    notes: str = "",
    extra: Iterable[tuple[Any, ...]] = (),
) -> list[Section]:
    """The sections that scores and runs give, in order; without runs there are fewer.

    Args: reference: the label that others are compared with, for Muon's runs its namesake among them; facts: command,
        commit, hardware, versions as of `machine.describe`, and a study's ``dev`` with ``lr`` or ``chosen``;
        notes: Markdown below the summary; extra: more sections, or (title, Markdown, table, png), before the settings.
    Raises: ValueError as `find`.
    """
    found, facts = find(rows, runs, split=split, reference=reference), facts or {}
    parted: list[Section | None] = [
        sections.summary(found, notes),
        sections.main_results(found, "Main results", muon=False),
        sections.main_results(found, "Muon", muon=True),
        sections.mergers(found, facts),
        sections.paired_differences(found),
        sections.ablation(found),
        sections.noise(found),
        *(Section(*part) for part in extra),
        details.other_tasks(found),
        details.per_task(found),
        details.coefficients(found),
        details.cost_section(found.costs, {x: found.base(muon=found.muon(x)) for x in found.costs}),
        details.dev_curves(found),
        details.tuning(facts),
        details.settings(found),
        details.provenance(found, facts),
        scores(found),
    ]
    return [section for section in parted if section is not None]


def scores(found: Found) -> Section:
    """Where all scores are: one tidy CSV, a line a score, with the settings of its experts."""
    records = []
    for row in found.rows:
        setting = found.settings.get(row.method)
        records.append(
            {
                "label": row.method, "seed": row.seed, "model": row.model, "task": row.task, "split": row.split,
                "score": row.score, "coef": row.coef, "method": setting and setting.method,
                "optimizer": setting and setting.training.get("optimizer"),
                "lr": setting and setting.training.get("lr"),
                "hyperparameters": setting and words(setting.described),
            }
        )  # fmt: skip
    text = f"{len(records)} scores, a line each with its experts' settings: `scores.csv`."
    return Section("Scores", text, Table((), (), records))


def write_report(out: str | Path, title: str, sections: Iterable[Section]) -> Path:
    """``report.html`` (its path is returned), ``report.md``, and a CSV and a PNG per section that has one.

    Tables and figures of a report that was there before are removed if this one has none of their names.

    Raises: ValueError for files of these names that neither a report nor an analysis wrote.
    """
    from ..checkpoint import write_bytes, write_text

    folder, sections = Path(out), _told_apart(sections)
    text = "\n".join(markdown(section) for section in sections)
    images = {}
    for section in sections:
        if section.png is not None:
            png = section.png.read_bytes() if isinstance(section.png, Path) else section.png
            images[f"{section.slug}.png"] = png
    html_page = page(title, text, images)
    tables = {f"{section.slug}.csv": section.table.csv for section in sections if section.table is not None}
    known = _written(folder)
    errors.raise_problems(_foreign_problems(folder, known, tables, images))
    outdated = known - tables.keys() - images.keys()
    for name, table in tables.items():
        write_text(folder / name, table)
    for name, png in images.items():
        write_bytes(folder / name, png)
    write_text(folder / "report.html", html_page)
    write_text(folder / "report.md", f"# {plain(title)}\n\n{text}")
    for name in outdated:
        (folder / name).unlink(missing_ok=True)
    return folder / "report.html"


def _foreign_problems(
    folder: Path, known: set[str], tables: Mapping[str, str], images: Mapping[str, bytes]
) -> list[str]:
    """Errors for files that would be replaced and are not a report's. Args: known: names of an older report's files."""
    from ..checkpoint import foreign_problems

    begins = {name: table.partition("\n")[0].encode() for name, table in tables.items()}
    begins |= dict.fromkeys(images, b"\x89PNG\r\n")
    begins = {name: begin for name, begin in begins.items() if name not in known} | {"report.html": HEAD.encode()}
    if not (folder / "report.html").exists():  # which is written before the text
        begins["report.md"] = b"\0"
    return foreign_problems({folder / name: begin for name, begin in begins.items()})


def _written(folder: Path) -> set[str]:
    """Names that tables of the report in a folder may have, by its headings, and of the figures that it shows."""
    if not ((folder / "report.html").is_file() and (folder / "report.md").is_file()):
        return set()
    text = (folder / "report.md").read_text(encoding="utf-8")
    slugs = [Section(line.removeprefix("## ")).slug for line in text.splitlines() if line.startswith("## ")]
    return {f"{slug}.csv" for slug in slugs} | {f"{slug}.png" for slug in slugs if f"]({slug}.png)" in text}


def _told_apart(sections: Iterable[Section]) -> list[Section]:
    """Sections whose files have different names: a second "Title" is "Title 2"."""
    found: dict[str, Section] = {}
    for section in sections:
        number, title = 1, section.title
        while section.slug in found:
            number += 1
            section = section._replace(title=f"{title} {number}")
        found[section.slug] = section
    return list(found.values())


def write_full_report(
    out: str | Path, rows: Iterable[Result], runs: Iterable[Run] = (), *, title: str = "Results", **options: Any
) -> Path:
    """`build_report` with its options, then `write_report`."""
    return write_report(out, title, build_report(rows, runs, **options))


def page(title: str, text: str, images: Mapping[str, bytes]) -> str:
    """A self-contained HTML page.

    Args: text: what follows the title, in Markdown (CommonMark and tables; HTML in it is escaped); images:
        PNGs by the name that the text gives them.
    Raises: ValueError for an image that is none of them.
    """
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = reader.parse(text)
    links = []
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and token.tag == "h2" and following is not None:
            anchor = "".join(c if c.isalnum() else "-" for c in following.content.lower()).strip("-")
            token.attrSet("id", anchor)
            links.append(f'<a href="#{anchor}">{html.escape(following.content)}</a>')
        if token.type == "td_open" and following is not None and len(following.content) > 60:
            token.attrSet("class", "long")
        for child in token.children or ():
            if child.type == "image":
                name = str(child.attrGet("src"))
                if name not in images:
                    raise ValueError(
                        f"the text has the image {name!r}, which the page would lack: give it as a Section's png"
                    )
                picture = images[name]
                child.attrSet("src", "data:image/png;base64," + base64.b64encode(picture).decode())
                if width := _width(picture):
                    child.attrSet("width", str(width))
    body = reader.renderer.render(tokens, reader.options, {})
    body = body.replace("<table>", '<div class="table" tabindex="0"><table>').replace("</table>", "</table></div>")
    return (
        f"{HEAD}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<nav>{' '.join(links)}</nav>\n{body}</body>\n</html>\n"
    )


def _width(png: bytes) -> int | None:
    """The width at which a figure's 9 points at 200 dots an inch are the page's 15 pixels; None for no PNG."""
    return round(0.6 * int.from_bytes(png[16:20], "big")) if png[12:16] == b"IHDR" else None
