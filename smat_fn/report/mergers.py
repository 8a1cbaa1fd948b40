"""Every merger with every way to train, in one table and one heat map."""

from collections.abc import Mapping
from typing import Any

from .found import Found
from .section import Section, Table
from .sections import with_interval
from .tables import MORE


def mergers(found: Found, facts: Mapping[str, Any]) -> Section | None:
    """Every merger with every way to train, where there are more mergers than the paper's."""
    from .plots import merger_plot

    if not found.table.scored.intersection(MORE):
        return None
    table = found.part([label for label in found.table.cells if found.kind(label) != "noise"])
    names = [column for column in table.columns if column not in ("Expert", "Avg") and column in table.scored]
    pairs = [(label, other) for label in table.cells if (other := found.compared_with(label))]
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    for name in names:
        cells = {label: line[name] for label, line in table.cells.items() if name in line}
        best = max(cell.mean for cell in cells.values())
        texts = {
            x: f"**{cell.text()}**" if cell.mean == best and len(cells) > 1 else cell.text()
            for x, cell in cells.items()
        }
        gains = {pair: got for pair in pairs if (got := found.difference(pair[0], name, pair[1]))}
        seeds = sorted({len(cell.scores) for cell in cells.values()})
        counts = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
        changes = [with_interval(gains.get(pair)) for pair in pairs]
        shown = [f"{mean} ({interval})" if interval else mean for mean, interval in changes]
        rows.append([name, _coef(found, name), counts, *map(texts.get, table.cells), *shown])
        for label, cell in cells.items():
            other = found.compared_with(label)
            got = gains.get((label, other or ""))
            low, high = (got and got.interval) or (None, None)
            records.append(
                {
                    "merger": name, "method": label, "mean": cell.mean, "sd": cell.sd, "n": len(cell.scores),
                    "reference": other, "difference": got and got.mean, "low": low, "high": high,
                }
            )  # fmt: skip
    tuned = list(facts.get("chosen") or facts.get("lr") or {})
    text = (
        "Mean ± standard deviation over seeds; the best of each line in bold, whatever its interval. Differences are "
        "paired by seed, with their 95 % interval. Coefficient: the smallest and the largest of all models, "
        '"dev" where each was chosen on dev. '
    )
    training = f"chosen on dev for {', '.join(tuned)}" if tuned else "tuned or not, which is not recorded here"
    text += f"Learning rate and strength of training: {training}."
    columns = ["Merger", "Coefficient", "Seeds", *table.cells, *(f"{label} - {other}" for label, other in pairs)]
    return Section("Trainers and mergers", text, Table(columns, rows, records), merger_plot(table, names))


def _coef(found: Found, merger: str) -> str | None:
    """The range of a merger's coefficients, and whether dev chose them all."""
    coefs = [row.coef for row in found.rows if row.model.upper() == merger and row.coef is not None]
    if not coefs:
        return None
    runs = [run for run in found.runs if run.model.upper() == merger]
    text = f"{min(coefs):g}" + (f" to {max(coefs):g}" if max(coefs) > min(coefs) else "")
    return text + " dev" * (bool(runs) and all(len(run.dev_curve) > 1 for run in runs))
