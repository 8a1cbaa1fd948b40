"""Figures: the main table as bars, paired differences, curves over the noise."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, Literal

import numpy as np

from ..evaluate.statistics import Estimate
from .tables import Cell, MainTable

# Okabe and Ito's palette: distinct with any colour vision
COLOURS = {"ft": "#C7C7C7", "smat": "#0072B2", "asam": "#E69F00", "mergopt": "#009E73", "orthoreg": "#CC79A7"}
SPARE = ("#56B4E9", "#D55E00", "#F0E442", "#FFFFFF", "#000000")


def colours(methods: Iterable[str]) -> dict[str, str | None]:
    """A colour for each method: its own in `COLOURS`, of Muon's its namesake's where that is free, else a spare one.

    None where spare ones have run out.
    """
    methods = list(methods)
    found = {method: COLOURS.get(method.lower()) for method in methods}
    for method in methods:
        namesake = COLOURS.get(method.lower().removesuffix("(muon)").removesuffix("muon").rstrip(" -"))
        if namesake not in found.values():
            found[method] = found[method] or namesake
    spare = iter(SPARE)
    return {method: colour or next(spare, None) for method, colour in found.items()}


def drawable(table: MainTable) -> bool:
    """Whether `main_plot` has a line to draw and a colour for each."""
    return len(table.cells) > 0 and None not in colours(table.cells).values()


def main_plot(table: MainTable, *, title: str = "") -> bytes:
    """Bars of experts, mergers and the mean of the paper's five, grouped by column: a PNG of 1800 x 900 pixels.

    Every bar carries its number, the mean over seeds; whiskers are one standard deviation. The axis is 0 to 100.

    Raises:
        ValueError: the table is empty, or more than five methods have no colour of their own in `COLOURS`.
    """
    palette = colours(table.cells)
    if not drawable(table):
        raise ValueError(
            f"cannot draw methods {list(table.cells)}: give at least one, at most {len(SPARE)} beside {list(COLOURS)}"
        )
    from matplotlib.patheffects import withStroke

    figure, axes = new_figure(9, 4.5)
    count, columns = len(table.cells), table.columns
    width = 0.86 / count
    for index, (method, line) in enumerate(table.cells.items()):
        x = np.array([columns.index(column) for column in line]) + (index - (count - 1) / 2) * width
        means = [cell.mean for cell in line.values()]
        errors = [cell.sd or 0.0 for cell in line.values()]
        look = {"color": palette[method], "edgecolor": "black", "linewidth": 0.5}
        axes.bar(x, means, 0.92 * width, label=method, **look)
        if any(errors):
            axes.errorbar(x, means, errors, fmt="none", ecolor="black", elinewidth=0.9, capsize=2.5)
        for place, mean, error in zip(x, means, errors, strict=True):
            axes.annotate(
                f"{mean:.1f}",
                (place, mean + error),
                (0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=9 if count < 4 else 8,
                rotation=0 if count < 4 else 90,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )
    # mergers stand apart from the experts before them and the mean after them
    for border in [0.5] * ("Expert" in columns) + [len(columns) - 1.5] * ("Avg" in columns):
        axes.axvline(border, ymax=100 / 106, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
    names = {"Expert": "Experts", "Avg": "Avg of 5"}
    axes.set_xticks(range(len(columns)), [names.get(column, column) for column in columns], fontsize=10)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(0, 106), yticks=range(0, 101, 20))
    axes.set_ylabel(f"mean {table.split} score over tasks (0 to 100)", fontsize=10)
    if any(cell.sd for line in table.cells.values() for cell in line.values()):
        axes.set_xlabel("bars: means over seeds; whiskers: one standard deviation", fontsize=8)
    tidy(axes, "y")
    axes.spines["left"].set_bounds(0, 100)
    axes.legend(ncols=count, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=10, borderaxespad=0.2)
    axes.set_title(title, loc="left", fontsize=11)
    return png(figure)


def paired_plot(differences: Mapping[str, Mapping[str, Estimate]]) -> bytes:
    """Differences per seed as dots, above them their mean and 95 % interval as a bar.

    Args: differences: by name of a block, then by name of a line.
    Returns: a PNG; the axis is points, zero is marked.
    Raises: ValueError for nothing to draw.
    """
    lines = [(name, got) for block in differences.values() for name, got in block.items()]
    if not lines:
        raise ValueError("no differences to draw: give at least one")
    # a line of room above each block for its name
    places, top = [], 0.0
    blocks = {}
    for name, block in differences.items():
        blocks[name] = top
        places += [top + 1 + i for i in range(len(block))]
        top += len(block) + 1.4
    figure, axes = new_figure(6.4, 0.8 + 0.25 * top)
    axes.axvline(0, color="0.35", linewidth=1)
    for (_, got), y in zip(lines, places, strict=True):
        colour = "#0072B2" if got.settled else "0.45"
        if got.interval:
            axes.plot(got.interval, (y - 0.2, y - 0.2), color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot([got.mean], [y - 0.2], marker="|", markersize=8, markeredgewidth=2, color=colour)
        below = [y + (0.15 if got.interval else 0.0)] * len(got.values)
        axes.plot(got.values, below, "o", markersize=3.5, color=colour, markeredgewidth=0, alpha=0.6)
    for name, y in blocks.items():
        axes.annotate(name, (0, y), (-4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=9, fontweight="bold", va="center", ha="right")  # fmt: skip
    axes.set_yticks(places, [name for name, _ in lines], fontsize=8)
    axes.set_ylim(top - 0.6, -0.8)
    axes.set_xlabel("difference in points; dots: seeds, bars: 95 % intervals (blue: zero is outside)", fontsize=8)
    axes.tick_params(axis="y", length=0)
    tidy(axes, "x", shade="0.9")
    axes.spines["left"].set_visible(False)
    return png(figure)


def noise_plot(curves: Mapping[str, Mapping[float, Cell]], *, reference: tuple[str, Cell] | None = None) -> bytes:
    """Mean ± sd over the RMS of the noise, a line per family; the reference without noise as a level.

    Returns: a PNG; the horizontal axis is logarithmic; whiskers stand beside each other, a few points from their RMS.
    """
    from matplotlib.transforms import ScaledTranslation

    figure, axes = new_figure(6.4, 3.6)
    sigmas = sorted({sigma for points in curves.values() for sigma in points})
    cells = [cell for points in curves.values() for cell in points.values()]
    ends = [cell.mean + sign * (cell.sd or 0.0) for cell in cells for sign in (-1, 1)]
    ends += [reference[1].mean] if reference else []
    room = 0.08 * (max(ends) - min(ends)) or 1.0
    # matplotlib finds no limits of what stands aside
    axes.set(xscale="log", xlim=(sigmas[0] / 1.3, sigmas[-1] * 1.3), ylim=(min(ends) - room, max(ends) + room))
    styles = {"uniform": ("#0072B2", "o"), "gaussian": ("#D55E00", "s"), "laplace": ("#009E73", "^")}
    for index, (family, points) in enumerate(curves.items()):
        aside = ScaledTranslation((index - (len(curves) - 1) / 2) * 4 / 72, 0, figure.dpi_scale_trans)
        colour, marker = styles.get(family, ("#CC79A7", "D"))
        means, errors = [cell.mean for cell in points.values()], [cell.sd or 0.0 for cell in points.values()]
        axes.errorbar(
            list(points), means, errors if any(errors) else None, color=colour, marker=marker, markersize=5,
            capsize=2.5, label=family, transform=axes.transData + aside,
        )  # fmt: skip
    if reference:
        name, cell = reference
        axes.axhline(cell.mean, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=name)
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.minorticks_off()
    axes.set_xlabel("RMS of the noise, in units of the weights", fontsize=9)
    axes.set_ylabel("score, mean of five mergers\n± standard deviation over seeds", fontsize=9)
    tidy(axes, "both", shade="0.9")
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return png(figure)


def new_figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """A figure of a size in inches, and its axes (`matplotlib.figure.Figure.subplots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    return figure, figure.subplots(**subplots)


def tidy(axes: Any, grid: Literal["x", "y", "both"], *, shade: str = "0.88") -> None:
    """Grey grid lines behind what is drawn, no frame at the top and on the right."""
    axes.grid(axis=grid, color=shade, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Any) -> bytes:
    """The figure as a file's content; no version of a library in it."""
    file = BytesIO()
    figure.savefig(file, metadata={"Software": None})
    return file.getvalue()
