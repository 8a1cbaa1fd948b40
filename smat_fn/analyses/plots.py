"""Figures of the analyses, from their results alone, and results as files."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..report.plots import COLOURS, SPARE
from .results import Result, Row, as_csv, as_json, curves, methods

MARKERS = "osD^vP"
STEP = 0.1  # between contours
CONTOURS = 100  # at most, counted from the lowest: above them colour alone


def write(out: Path, result: Result) -> list[Path]:
    """``<analysis>.json`` (all of it), ``.csv`` (the rows) and ``.png`` in a folder; each file is replaced whole."""
    contents = {".json": as_json(result).encode(), ".csv": as_csv(result).encode(), ".png": draw(result)}
    files = {out / f"{result['analysis']}{suffix}": content for suffix, content in contents.items()}
    for path, content in files.items():
        checkpoint.write_bytes(path, content)
    return list(files)


def draw(result: Result) -> bytes:
    """The figure of a result as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    {
        "experts-curve": _curve,
        "replacement": _curve,
        "gains": _gains,
        "landscape": _landscape,
        "diagnose": _diagnose,
    }[result["analysis"]](figure, result)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _curve(figure: Any, result: Result) -> None:
    figure.set_size_inches(6, 4)
    axes = figure.add_subplot()
    found = curves(result["rows"])
    colours = _colours(list(found))
    for index, (method, line) in enumerate(found.items()):
        counts = list(line)
        means, errors = [cell.mean for cell in line.values()], [cell.sd or 0.0 for cell in line.values()]
        axes.errorbar(
            counts, means, errors if any(errors) else None, label=method, color=colours[method], capsize=2.5,
            marker=MARKERS[index % len(MARKERS)], markersize=6, markeredgecolor="black", markeredgewidth=0.5,
        )  # fmt: skip
    counts = sorted({count for line in found.values() for count in line})
    axes.set_xticks(counts)
    merged = result["analysis"] == "experts-curve"
    settings = result["settings"]
    axes.set_xlabel(
        f"experts merged (K), {settings['merger'].upper()}" if merged
        else f"FT experts replaced (q), coefficient {settings['coef']:g}"
    )  # fmt: skip
    spread = any(cell.sd for line in found.values() for cell in line.values())
    axes.set_ylabel(f"{settings['split']} score, % of the FT experts'" + "\n± standard deviation over seeds" * spread)
    _tidy(axes)
    axes.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, columnspacing=1)


def _gains(figure: Any, result: Result) -> None:
    found = methods(result["rows"])
    figure.set_size_inches(6, 1.2 + 0.5 * len(found))
    axes = figure.add_subplot()
    colours = _colours(list(found))
    for place, (method, own) in enumerate(found.items()):
        expert, merged, drop = (float(np.mean([row[name] for row in own])) for name in ("expert", "merged", "drop"))
        axes.plot([merged, expert], [place, place], color="0.6", zorder=1)
        style: dict[str, Any] = {"s": 60, "edgecolors": "black", "linewidths": 0.8, "zorder": 2}
        axes.scatter([expert], [place], color="white", label="" if place else "experts", **style)
        axes.scatter([merged], [place], color=colours[method], label="" if place else "mean of five mergers", **style)
        axes.annotate(
            f"{-drop:+.1f}", ((merged + expert) / 2, place), (0, 5), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.set(ylim=(len(found) - 0.5, -0.6))
    axes.set_xlabel(f"mean {result['settings']['split']} score over tasks")
    _tidy(axes, "x")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _landscape(figure: Any, result: Result) -> None:
    rows = result["rows"]
    tasks, names = (list(dict.fromkeys(row[field] for row in rows)) for field in ("task", "method"))
    figure.set_size_inches(1 + 2.6 * len(names), 0.5 + 2.3 * len(tasks))
    grid = figure.subplots(len(tasks), len(names), squeeze=False, sharex=True, sharey=True)
    for line, task in zip(grid, tasks, strict=True):
        own = [row for row in rows if row["task"] == task]
        low, high = min(row["loss"] for row in own), max(row["loss"] for row in own)
        high = max(high, low + STEP)
        for axes, name in zip(line, names, strict=True):
            a, b, loss = surface([row for row in own if row["method"] == name])
            drawn = axes.pcolormesh(a, b, loss, vmin=low, vmax=high, cmap="viridis_r", shading="gouraud")
            levels = np.arange(np.ceil(low / STEP), np.ceil(low / STEP) + CONTOURS) * STEP
            levels = levels[(levels > loss.min()) & (levels < loss.max())]
            if len(levels):
                axes.contour(a, b, loss, levels, colors="black", linewidths=0.4, alpha=0.6)
            axes.plot([1], [0], marker="*", markersize=11, color="white", markeredgecolor="black", linestyle="none")
            axes.set(xlim=(a.min(), a.max()), ylim=(b.min(), b.max()))
        line[0].set_ylabel(f"{task}\nb, partners")
        figure.colorbar(drawn, ax=list(line), label="loss")
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(name, fontsize=11)
    for axes in grid[-1]:
        axes.set_xlabel("a, own update")
        axes.tick_params(axis="x", labelsize=8)
    figure.supxlabel(f"contours: every {STEP:g}; star: the expert alone, (1, 0)", fontsize=9)


def _diagnose(figure: Any, result: Result) -> None:
    rows, settings = result["rows"], result["settings"]
    figure.set_size_inches(6, 1.5 + 0.35 * len(rows))
    axes = figure.add_subplot()
    dots = {"delta": ("updates", "#56B4E9", "o"), "partners": (f"{settings['coef']:g} x partners' sum", "#E69F00", "s")}
    for field, (label, colour, marker) in dots.items():
        drawn = {place: row[field] for place, row in enumerate(rows) if row[field]}
        axes.scatter(drawn.values(), drawn.keys(), s=45, color=colour, marker=marker, edgecolors="black", label=label)
    if settings["sigma"]:
        label = f"sigma {settings['sigma']:g} ({settings['sigma_origin']})"
        axes.axvline(settings["sigma"], color="black", linestyle="--", label=label)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["kind"] for row in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("root mean square over weights")
    _tidy(axes, "both")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=9)


def surface(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Axes a and b, and the losses with a row for each b."""
    a, b = (np.array(sorted({row[axis] for row in rows})) for axis in ("a", "b"))
    found = {(row["a"], row["b"]): row["loss"] for row in rows}
    return a, b, np.array([[found[x, y] for x in a.tolist()] for y in b.tolist()])


def _colours(names: Sequence[str]) -> Mapping[str, str]:
    """The colours of the main figure; for other names, the spare ones in turn."""
    others = [name for name in names if name.lower() not in COLOURS]
    spare = {name: SPARE[index % len(SPARE)] for index, name in enumerate(others)}
    return {name: spare[name] if name in spare else COLOURS[name.lower()] for name in names}


def _tidy(axes: Any, axis: str = "y") -> None:
    axes.grid(axis=axis, color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
