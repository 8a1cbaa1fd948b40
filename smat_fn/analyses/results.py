"""The result of an analysis as JSON values: printed, written, and drawn again without running anything.

A result has ``analysis`` (its name), ``settings``, ``runs`` (what the manifests say), ``versions`` and ``rows``.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from ..report.tables import Cell, cell_of
from .interference import mean_rms

Result = dict[str, Any]
Row = Mapping[str, Any]


class Summary(NamedTuple):
    """A small table: title, column names, and rows of text cells."""

    title: str
    columns: list[str]
    lines: list[list[str]]


def as_json(result: Result) -> str:
    """JSON with a line for each row."""
    head = json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1, allow_nan=False)
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in result["rows"])
    return f'{head[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def records(result: Result) -> list[dict[str, Any]]:
    """The rows, sequences joined by "+", and a number by name as a field ``KEY NAME``."""
    return [dict(_fields(row)) for row in result["rows"]]


def _fields(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from ((f"{key} {name}", own) for name, own in value.items())
        else:
            yield key, "+".join(value) if isinstance(value, (list, tuple)) else value


def summary(result: Result) -> Summary:
    """The table of a result, means over seeds with their standard deviation."""
    return ANALYSES[result["analysis"]](result)


def methods(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by method, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def curves(rows: Sequence[Row]) -> dict[str, dict[int, Cell]]:
    """Mean relative score over tasks and subsets by method and count, one number a seed."""
    found: dict[str, dict[int, Cell]] = {}
    for method, own in methods(rows).items():
        by_seed: dict[int, dict[int, list[float]]] = {}
        for row in own:
            by_seed.setdefault(row["experts"], {}).setdefault(row["seed"], []).append(row["relative"])
        found[method] = {
            count: cell_of({seed: fmean(values) for seed, values in sorted(seeds.items())})
            for count, seeds in sorted(by_seed.items())
        }
    return found


def _of_seeds(rows: Sequence[Row]) -> str:
    """The end of a title where methods have different seeds: their means are not of the same runs."""
    own = {method: sorted({row["seed"] for row in some}) for method, some in methods(rows).items()}
    if len({*map(tuple, own.values())}) < 2:
        return ""
    each = "; ".join(f"{method} {', '.join(map(str, seeds))}" for method, seeds in own.items())
    return f"; methods have different seeds ({each})"


def _curve(result: Result) -> Summary:
    found, merged = curves(result["rows"]), result["analysis"] == "experts-curve"
    counts = sorted({count for line in found.values() for count in line})
    what = f"{result['settings']['merger'].upper()} of K experts" if merged else "FT experts, q replaced"
    return Summary(
        f"{what}: mean {result['settings']['split']} score, % of the independent FT experts'"
        + _of_seeds(result["rows"]),
        ["Method", *(f"{'K' if merged else 'q'} = {count}" for count in counts)],
        [[name, *(line[c].text() if c in line else "-" for c in counts)] for name, line in found.items()],
    )


def _gains(result: Result) -> Summary:
    fields = ("expert", "merged", "drop")
    cells = {
        method: [cell_of({row["seed"]: row[name] for row in own}).text() for name in fields]
        for method, own in methods(result["rows"]).items()
    }
    title = f"mean {result['settings']['split']} score over tasks, 0 to 100{_of_seeds(result['rows'])}"
    return Summary(
        title, ["Method", "Expert", "Five mergers", "Drop"], [[name, *texts] for name, texts in cells.items()]
    )


def _landscape(result: Result) -> Summary:
    lines = []
    for task in dict.fromkeys(row["task"] for row in result["rows"]):
        for method, own in methods([row for row in result["rows"] if row["task"] == task]).items():
            losses = {(row["a"], row["b"]): row["loss"] for row in own}
            lowest = min(losses.values())
            near = sum(value <= lowest + 0.1 for value in losses.values()) / len(losses)
            expert = losses.get((1.0, 0.0))
            lines.append([task, method, "-" if expert is None else f"{expert:.3f}", f"{lowest:.3f}", f"{near:.1%}"])
    samples = result["settings"]["samples"]
    return Summary(
        f"loss on the {samples['split']} split (at most {samples['batches']} batches)",
        ["Task", "Method", "at (1, 0)", "lowest", "at most 0.1 above it"],
        lines,
    )


def _diagnose(result: Result) -> Summary:
    settings = result["settings"]
    sigma, suggested = settings["sigma"], settings["suggested_sigma"]
    title = f"RMS of updates, and of {settings['coef']:g} x the sum of the other experts'"
    title += "" if sigma is None else f"; sigma {sigma:g} ({settings['sigma_origin']})"
    title += "; no sigma suggested: it takes two experts that moved" if suggested is None else ""
    title += "" if suggested is None or suggested == sigma else f"; suggested sigma {suggested:g}"
    numbers = ("delta", "partners", "sigma_by_delta", "sigma_by_partners")
    lines = []
    for row in result["rows"]:
        texts = ["-" if row[name] is None else f"{row[name]:.3g}" for name in numbers]
        lines.append(
            [row["kind"], f"{row['size']:,}", *texts, "-" if row["unmoved"] is None else f"{row['unmoved']:.2%}"]
        )
    return Summary(
        title, ["Kind", "Weights", "Update", "Others", "Sigma / update", "Sigma / others", "Not moved"], lines
    )


def _interference(result: Result) -> Summary:
    lines = []
    seeds: dict[str, set[Any]] = {}
    for row in result["rows"]:
        seeds.setdefault(row["method"], set()).add(row.get("seed"))
    for row in result["rows"]:
        several = len(seeds[row["method"]]) > 1
        name = f"{row['method']}, seed {row['seed']}" if several else row["method"]
        angles = ("-" if row[name] is None else f"{row[name]:.3f}" for name in ("cosine", "lowest", "highest"))
        signs = "-" if row["agreement"] is None else f"{row['agreement']:.3f}"
        lines.append([name, row["layer"], f"{row['size']:,}", f"{mean_rms(row):.3g}", *angles, signs])
    columns = ["Experts", "Block", "Weights", "Update", "Cosine", "Lowest", "Highest", "Signs"]
    title = "updates by block: RMS, cosines of pairs of experts, agreement of signs (1: all agree)"
    return Summary(title, columns, lines)


def _disentanglement(result: Result) -> Summary:
    coef, axis = result["settings"]["coef"], result["settings"]["a"]
    lines = []
    for method, own in methods(result["rows"]).items():
        by_seed: dict[int, tuple[list[float], list[float]]] = {}
        for row in own:
            merged, grid = by_seed.setdefault(row["seed"], ([], []))
            if row["a1"] == row["a2"] == coef:
                merged.append(disagreement(row))
            if row["a1"] in axis and row["a2"] in axis:
                grid.append(disagreement(row))
        cells = [cell_of({seed: fmean(values[place]) for seed, values in by_seed.items()}) for place in (0, 1)]
        lines.append([method, *(cell.text() for cell in cells)])
    title = f"% of {result['settings']['samples']['split']} predictions that another task's update changes"
    return Summary(
        f"{title}, mean over pairs of tasks{_of_seeds(result['rows'])}",
        ["Method", f"at ({coef:g}, {coef:g})", "mean over the grid"],
        lines,
    )


def disagreement(row: Row) -> float:
    """50 ξ of a row of disentanglement: predictions that differ in %, mean over both tasks."""
    return 50.0 * (float(row["on_first"]) + float(row["on_second"]))


# the analyses by the names of their commands and files
ANALYSES: Mapping[str, Callable[[Result], Summary]] = {
    "experts-curve": _curve,
    "replacement": _curve,
    "gains": _gains,
    "landscape": _landscape,
    "diagnose": _diagnose,
    "interference": _interference,
    "disentanglement": _disentanglement,
}
