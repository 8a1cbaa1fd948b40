"""Differences between methods, paired by seed."""

from itertools import product

from ..evaluate.statistics import Estimate
from .found import Found
from .section import Section, Table
from .words import NOTE

FEW = 4  # pairs that are shown in every column


def paired_differences(found: Found) -> Section | None:
    """Differences seed by seed; of many pairs the experts and the mean alone are shown, the CSV has every column.

    Perturb alone is shown where there is nothing else: it has a section of its own.
    """
    from .plots import paired_plot

    pairs = [(label, other) for label in found.table.cells for other in found.comparisons(label)]
    shown = [pair for pair in pairs if found.kind(pair[0]) != "noise"] or pairs
    few = len(shown) <= FEW
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    drawn: dict[str, dict[str, Estimate]] = {}
    for (label, other), column in product(pairs, found.table.columns):
        got = found.difference(label, column, other)
        if got is None:
            continue
        pair, (above, equal, below), (low, high) = f"{label} - {other}", got.signs, got.interval or (None, None)
        records.append(
            {
                "method": label, "reference": other, "column": column, "mean": got.mean, "sd": got.sd, "low": low,
                "high": high, "n": len(got.values), "above": above, "equal": equal, "below": below,
                "differences": " ".join(map(repr, got.values)),
            }
        )  # fmt: skip
        if (label, other) in shown and (few or column in ("Expert", "Avg")):
            block, line = (pair, column) if few else (column, pair)
            drawn.setdefault(block, {})[line] = got
            rows.append([pair, column, *_texts(got)])
    if not rows:
        return None
    columns = ["Difference", "Scores", "Mean", "sd", "95 % interval", "Contains 0", "n", "Signs", "By seed"]
    text = f"Dots are seeds, bars 95 % intervals of the mean. {NOTE}"
    left_out = [*([] if few else ["every merger"]), *([] if shown == pairs else ["Perturb alone"])]
    text += f" `paired-differences.csv` has {' and '.join(left_out)} too." if left_out else ""
    return Section("Paired differences", text, Table(columns, rows, records), paired_plot(drawn))


def _texts(got: Estimate) -> list[object]:
    above, equal, below = got.signs
    return [
        f"{got.mean:+.2f}",
        None if got.sd is None else f"{got.sd:.2f}",
        None if got.interval is None else f"{got.interval[0]:+.2f} to {got.interval[1]:+.2f}",
        None if got.interval is None else "no" if got.settled else "yes",
        len(got.values),
        f"{above} + / {below} -" + (f" / {equal} =" if equal else ""),
        ", ".join(f"{value:+.2f}" for value in got.values),
    ]
