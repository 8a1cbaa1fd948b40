"""What was found, and the main table; None where there is nothing to show."""

from collections.abc import Mapping
from io import BytesIO

from .costs import size, times
from .found import Found
from .section import DASH, Section, Table, spread
from .tables import Cell, MainTable, cell_of
from .words import NOTE, experts, finding


def summary(found: Found, notes: str = "") -> Section:
    """A sentence per label on what was found."""
    alone = found.labels("noise")
    told = [_told(found, label) for label in found.table.cells if label not in alone] + _alone(found, alone)
    bullets = "\n".join(f"- {line}" for line in told)
    seeds = sorted({seed for line in found.table.cells.values() for cell in line.values() for seed in cell.by_seed})
    what = (
        f"{found.table.split.capitalize()} scores from 0 to 100, means over tasks; seeds {', '.join(map(str, seeds))}."
    )
    return Section("Summary", f"{bullets}\n\n{what} {NOTE}" + (f"\n\n{notes.strip()}" if notes.strip() else ""))


def _told(found: Found, label: str) -> str:
    line, others = found.table.cells[label], found.comparisons(label)
    column = "Avg" if "Avg" in line else "Expert"
    place = "the mean of five mergers" if column == "Avg" else "the experts, for not all five mergers are there"
    if not others:
        role = "is the reference" if label == found.base(muon=found.muon(label)) else "has no reference here"
        mean = f": {line[column].text()} on {place}" if column in line else ""
        return f"**{label}** {role}{mean}."
    parts = [finding(label, other, found.difference(label, column, other), of=place) for other in others]
    if column == "Avg":
        parts.insert(1, experts(found.difference(label, "Expert", others[0])))
    if cost := times(found.costs.get(label), found.costs.get(others[0])):
        parts.append(f"Its training took {cost.text(3)} times as long as that of {others[0]}.")
    return " ".join(part for part in parts if part)


def _alone(found: Found, labels: list[str]) -> list[str]:
    differences = [got for x in labels if (got := found.difference(x, "Avg", found.compared_with(x)))]
    if not differences:
        return []
    above, below = (sum(got.settled and sign * got.mean > 0 for got in differences) for sign in (1, -1))
    return [
        f"**Perturb alone**, {len(differences)} settings of its noise: the interval of the difference from "
        f"{found.compared_with(labels[0])} lies above zero for {above}, below zero for {below}, and contains it for "
        f"{len(differences) - above - below}."
    ]


def main_results(found: Found, title: str, *, muon: bool) -> Section | None:
    """The paper's main table, and its bars."""
    table = found.part(found.labels("main", muon=muon))
    if not table.cells:
        return None
    base = found.base(muon=muon)
    columns = table.columns
    best = {c: max(line[c].mean for line in table.cells.values() if c in line) for c in columns if _has(table, c)}
    rows, records = [], []
    for label, line in table.cells.items():
        change = found.difference(label, "Avg", base)
        cost, other = found.costs.get(label), found.costs.get(base or "")
        ratio = times(cost, other)
        row: list[object] = [label]
        for column in columns:
            text = line[column].text() if column in line else DASH
            row.append(
                f"**{text}**" if column in line and len(table.cells) > 1 and line[column].mean == best[column] else text
            )
        drop = _drop(line)
        row += [
            drop and drop.text(),
            f"{change.mean:+.2f}" if change and label != base else None,
            ratio and ("1" if label == base else ratio.text(3)),
            cost and cost.peak and size(cost.peak),
        ]
        rows.append(row)
        records.append(
            {
                "method": label,
                **spread({**line, "Drop": drop} if drop else line),
                "avg_change": change and change.mean,
                "times_reference": ratio and ratio.mean,
                "peak_memory_bytes": cost and cost.peak,
            }
        )
    against = base or found.reference
    head = ["Method", *columns, "Drop", f"Avg - {against}", f"Time x {against}", "Peak memory"]
    text = (
        "Expert: mean score of the experts on their own tasks, before merging. Avg: mean of the five mergers. Drop: "
        "Expert - Avg, what merging costs. Mean ± standard deviation over seeds; the best of each column in bold, "
        "whatever its interval."
    )
    return Section(title, text, Table(head, rows, records), _bars(table, title))


def _drop(line: Mapping[str, Cell]) -> Cell | None:
    if "Avg" not in line or "Expert" not in line:
        return None
    merged = line["Avg"].by_seed
    return cell_of({seed: score - merged[seed] for seed, score in line["Expert"].by_seed.items()})


def _has(table: MainTable, column: str) -> bool:
    return any(column in line for line in table.cells.values())


def _bars(table: MainTable, title: str) -> bytes | None:
    from .plots import drawable, main_plot

    if not drawable(table):
        return None
    file = BytesIO()
    main_plot(table, file, title=title)
    return file.getvalue()
