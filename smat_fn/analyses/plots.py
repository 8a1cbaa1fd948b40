"""Figures of the analyses, from their results alone, and results as files."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..evaluate.statistics import signed
from ..report.plots import aside, colours, legend, legible, new_figure, png, reach, tidy
from ..report.section import csv_text
from .interference import OUTSIDE, mean_rms
from .results import Result, Row, as_json, curves, disagreement, methods, records

MARKERS = "osD^vP"
STEP = 0.1  # between contours
CONTOURS = 100  # at most, counted from the lowest: above them colour alone


def write(out: Path, result: Result) -> list[Path]:
    """``<analysis>.json`` (all of it), ``.csv`` (the rows) and ``.png`` in a folder; each file is replaced whole."""
    contents = {".json": as_json(result).encode(), ".csv": csv_text(records(result)).encode(), ".png": draw(result)}
    files = {out / f"{result['analysis']}{suffix}": content for suffix, content in contents.items()}
    for path, content in files.items():
        checkpoint.write_bytes(path, content)
    return list(files)


def foreign_problems(out: Path, analysis: str) -> list[str]:
    """Errors for files in a folder that `write` would replace, and that it did not write."""
    numbers, table, figure = (out / f"{analysis}{suffix}" for suffix in (".json", ".csv", ".png"))
    begins = {numbers: b'{\n "analysis": ', figure: b"\x89PNG\r\n"}
    if not numbers.exists():  # which is written first
        begins[table] = b"\0"
    file = [f"{out} is a file, not a folder: move it, or choose another folder"] if out.is_file() else []
    return file + checkpoint.foreign_problems(begins)


def draw(result: Result) -> bytes:
    """The figure of a result as PNG."""
    return png(DRAWN[result["analysis"]](result))


def _curve(result: Result) -> Any:
    figure, axes = new_figure(6, 4)
    found = curves(result["rows"])
    palette = colours(found)
    for index, (method, line) in enumerate(found.items()):
        counts = list(line)
        means, errors = [cell.mean for cell in line.values()], [cell.sd or 0.0 for cell in line.values()]
        axes.errorbar(
            counts, means, errors if any(errors) else None, label=legible(method), color=palette[method], capsize=2.5,
            marker=MARKERS[index % len(MARKERS)], markersize=6, markeredgecolor="black", markeredgewidth=0.5,
            transform=axes.transData + aside(figure, index, len(found)),
        )  # fmt: skip
    counts = sorted({count for line in found.values() for count in line})
    axes.set_xticks(counts)
    # matplotlib finds no limits of what stands aside
    ends = reach(cell for line in found.values() for cell in line.values())
    axes.set(xlim=(counts[0] - 0.3, counts[-1] + 0.3), ylim=ends)
    merged = result["analysis"] == "experts-curve"
    settings = result["settings"]
    axes.set_xlabel(
        f"experts merged (K), {settings['merger'].upper()}" if merged
        else f"FT experts replaced (q), coefficient {settings['coef']:g}"
    )  # fmt: skip
    spread = any(cell.sd for line in found.values() for cell in line.values())
    axes.set_ylabel(f"{settings['split']} score, % of the FT experts'" + "\n± standard deviation over seeds" * spread)
    tidy(axes, "y")
    legend(axes, columns=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), columnspacing=1)
    return figure


def _gains(result: Result) -> Any:
    found = methods(result["rows"])
    figure, axes = new_figure(6, 1.2 + 0.5 * len(found))
    palette = colours(found)
    for place, (method, own) in enumerate(found.items()):
        expert, merged, drop = (float(np.mean([row[name] for row in own])) for name in ("expert", "merged", "drop"))
        axes.plot([merged, expert], [place, place], color="0.6", zorder=1)
        style: dict[str, Any] = {"s": 60, "edgecolors": "black", "linewidths": 0.8, "zorder": 2}
        axes.scatter([expert], [place], color="white", label="" if place else "experts", **style)
        axes.scatter([merged], [place], color=palette[method], label="" if place else "mean of five mergers", **style)
        axes.annotate(signed(-drop, 1), ((merged + expert) / 2, place), (0, 5), textcoords="offset points", ha="center")
    axes.set_yticks(range(len(found)), [legible(method, 32) for method in found])
    axes.set(ylim=(len(found) - 0.5, -0.6))
    axes.set_xlabel(f"mean {result['settings']['split']} score over tasks")
    tidy(axes, "x")
    axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def _landscape(result: Result) -> Any:
    rows = result["rows"]
    tasks, names = (list(dict.fromkeys(row[field] for row in rows)) for field in ("task", "method"))
    shape: dict[str, Any] = {"nrows": len(tasks), "ncols": len(names), "squeeze": False, "sharex": True, "sharey": True}
    figure, grid = new_figure(1 + 2.6 * len(names), 0.5 + 2.3 * len(tasks), **shape)
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
        line[0].set_ylabel(f"{task}\nb, others")
        figure.colorbar(drawn, ax=list(line), label="loss")
    for axes, name in zip(grid[0], names, strict=True):
        axes.set_title(legible(name, 32))
    for axes in grid[-1]:
        axes.set_xlabel("a, own update")
    figure.supxlabel(f"contours: every {STEP:g}; star: the expert alone, (1, 0)")
    return figure


def _diagnose(result: Result) -> Any:
    rows, settings = result["rows"], result["settings"]
    figure, axes = new_figure(6, 1.5 + 0.35 * len(rows))
    others = f"{settings['coef']:g} x sum of the others"
    dots = {"delta": ("updates", "#56B4E9", "o"), "partners": (others, "#E69F00", "s")}
    for field, (label, colour, marker) in dots.items():
        drawn = {place: row[field] for place, row in enumerate(rows) if row[field]}
        axes.scatter(drawn.values(), drawn.keys(), s=45, color=colour, marker=marker, edgecolors="black", label=label)
    if settings["sigma"]:
        label = f"sigma {settings['sigma']:g} ({settings['sigma_origin']})"
        axes.axvline(settings["sigma"], color="black", linestyle="--", label=label)
    if settings["sigma"] or any(row["delta"] or row["partners"] for row in rows):  # zeros have no logarithm
        axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row["kind"] for row in rows])
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("root mean square over weights")
    tidy(axes, "both")
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return figure


def _interference(result: Result) -> Any:
    figure, (sizes, angles, signs) = new_figure(9, 3.2, ncols=3, sharex=True)
    _by_block(sizes, angles, signs, result["rows"])
    return figure


def _by_block(sizes: Any, angles: Any, signs: Any, rows: Sequence[Row]) -> None:
    """Three axes: sizes of updates, cosines and agreement of signs over blocks, a line for each method."""
    runs: dict[tuple[str, Any], list[Row]] = {}
    for row in rows:
        if row["layer"] != "all":
            runs.setdefault((row["method"], row.get("seed")), []).append(row)
    counts = Counter(method for method, _ in runs)
    palette, names = colours(counts), _blocks(own["layer"] for run in runs.values() for own in run)
    for index, ((method, seed), own) in enumerate(runs.items()):
        style: dict[str, Any] = {"color": palette[method], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        style |= {"markeredgecolor": "black", "markeredgewidth": 0.5}
        style |= {"label": legible(f"{method}, seed {seed}" if counts[method] > 1 else method)}
        places = [names[row["layer"]] for row in own]
        sizes.plot(places, [mean_rms(row) or np.nan for row in own], **style)
        for axes, field in ((angles, "cosine"), (signs, "agreement")):
            axes.plot(places, [np.nan if row[field] is None else row[field] for row in own], **style)
        low, high = ([np.nan if row[end] is None else row[end] for row in own] for end in ("lowest", "highest"))
        angles.fill_between(places, low, high, color=palette[method], alpha=0.25, linewidth=0)
    heights = [size for own in runs.values() for row in own if (size := mean_rms(row))]
    if heights and max(heights) > 20 * min(heights):
        sizes.set_yscale("log")
    else:
        sizes.set_ylim(0, 1.1 * max(heights, default=1))
    angles.axhline(0, color="0.6", linewidth=0.8)
    signs.set_ylim(0, 1)
    sizes.set_ylabel("update, root mean square")
    angles.set_ylabel("cosine of two experts: mean, range")
    signs.set_ylabel("agreement of signs (1: all agree)")
    shown = sorted(names, key=names.__getitem__)[:: -(-len(names) // 8)]
    turned = {"rotation": 45, "ha": "right"} if any("." in name for name in names) else {}
    for axes in (sizes, angles, signs):
        ticks = ["rest" if name == OUTSIDE else name for name in shown]
        axes.set_xticks([names[name] for name in shown], ticks, **turned)
        axes.set_xlabel("block")
        tidy(axes, "y")
    if len(runs) > 1:
        sizes.legend(frameon=False)


def _blocks(layers: Iterable[str]) -> dict[str, int]:
    """The place of every block on the axis: its number, or of several stacks its place among all."""
    every = dict.fromkeys(layers)
    found = [layer for layer in every if layer != OUTSIDE]
    numbered = all(layer.isdecimal() for layer in found)
    places = {layer: int(layer) if numbered else place for place, layer in enumerate(found)}
    return {OUTSIDE: -1, **places} if OUTSIDE in every else places


def _disentanglement(result: Result) -> Any:
    found, settings = methods(result["rows"]), result["settings"]
    axis = settings["a"]
    grids = {}
    for method, own in found.items():
        values: dict[tuple[float, float], list[float]] = {}
        for row in own:
            values.setdefault((row["a1"], row["a2"]), []).append(disagreement(row))
        grids[method] = np.array([[np.mean(values[a, b]) for a in axis] for b in axis])
    high = max(1.0, *(grid.max() for grid in grids.values()))
    shape: dict[str, Any] = {"ncols": len(grids), "squeeze": False, "sharey": True}
    figure, (line,) = new_figure(1.2 + 2.6 * len(grids), 2.9, **shape)
    for axes, (method, grid) in zip(line, grids.items(), strict=True):
        drawn = axes.pcolormesh(axis, axis, grid, vmin=0, vmax=high, cmap="viridis_r", shading="nearest")
        axes.plot([settings["coef"]], [settings["coef"]], marker="*", markersize=11, color="white",
                  markeredgecolor="black", linestyle="none")  # fmt: skip
        axes.set_title(legible(method, 32))
        axes.set_xlabel("a1, first task")
    line[0].set_ylabel("a2, second task")
    figure.colorbar(drawn, ax=list(line), label="predictions that differ, %")
    figure.supxlabel(f"star: the merge by task arithmetic, coefficient {settings['coef']:g}")
    return figure


def merge_picture(rows: Sequence[Row], curves: Mapping[str, Mapping[float, float]]) -> bytes:
    """Experts' updates by block and, after a search, the mean score over the coefficient of each merger: a PNG.

    Args:
        rows: of the analysis interference.
        curves: merger -> coefficient -> score.
    """
    figure, axes = new_figure(9 + 3 * bool(curves), 3.2, ncols=3 + bool(curves))
    _by_block(axes[0], axes[1], axes[2], rows)
    for index, (name, curve) in enumerate(sorted(curves.items())):
        coefs = sorted(curve)
        (line,) = axes[3].plot(coefs, [curve[c] for c in coefs], marker=MARKERS[index % len(MARKERS)], label=name)
        best = max(coefs, key=lambda c: (curve[c], -c))
        axes[3].plot([best], [curve[best]], marker="o", markersize=10, fillstyle="none", color=line.get_color())
    if curves:
        axes[3].set_xlabel("coefficient; circle: the best")
        axes[3].set_ylabel("mean score of the search")
        tidy(axes[3], "both")
        axes[3].legend(frameon=False)
    return png(figure)


def surface(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Axes a and b, and the losses with a row for each b."""
    a, b = (np.array(sorted({row[axis] for row in rows})) for axis in ("a", "b"))
    found = {(row["a"], row["b"]): row["loss"] for row in rows}
    return a, b, np.array([[found[x, y] for x in a.tolist()] for y in b.tolist()])


# by the names of the analyses
DRAWN = {
    "experts-curve": _curve, "replacement": _curve, "gains": _gains, "landscape": _landscape, "diagnose": _diagnose,
    "interference": _interference, "disentanglement": _disentanglement,
}  # fmt: skip
