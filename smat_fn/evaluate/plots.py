"""Figures of the main table."""

from pathlib import Path

import numpy as np

from .tables import COLUMNS, MainTable

# Okabe and Ito's palette: told apart with any colour vision
COLOURS = {"ft": "#C7C7C7", "smat": "#0072B2", "asam": "#E69F00", "mergopt": "#009E73", "orthoreg": "#CC79A7"}
SPARE = ("#56B4E9", "#D55E00", "#F0E442", "#FFFFFF", "#000000")


def main_plot(table: MainTable, path: str | Path, *, title: str = "") -> None:
    """Bars of experts, the five mergers and their mean, methods beside each other: a PNG of 1800 x 900 pixels.

    Every bar carries its number, the mean over seeds; whiskers are one standard deviation. The axis is 0 to 100.
    Raises: ValueError for an empty table and for more than five methods that have no colour of their own in `COLOURS`.
    """
    others = [method for method in table.cells if method.lower() not in COLOURS]
    if not table.cells or len(others) > len(SPARE):
        raise ValueError(
            f"cannot draw methods {list(table.cells)}: give at least one, at most {len(SPARE)} of {others}"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    colours = COLOURS | dict(zip(map(str.lower, others), SPARE, strict=False))
    figure = Figure(figsize=(9, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    count = len(table.cells)
    width = 0.86 / count
    for index, (method, line) in enumerate(table.cells.items()):
        x = np.array([COLUMNS.index(column) for column in line]) + (index - (count - 1) / 2) * width
        means = [cell.mean for cell in line.values()]
        errors = [cell.sd or 0.0 for cell in line.values()]
        axes.bar(x, means, 0.92 * width, label=method, color=colours[method.lower()], edgecolor="black", linewidth=0.5)
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
    for border in (0.5, len(COLUMNS) - 1.5):
        axes.axvline(border, ymax=100 / 106, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(COLUMNS)), ["Experts", *COLUMNS[1:-1], "Avg of 5"], fontsize=10)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.5, len(COLUMNS) - 0.5), ylim=(0, 106), yticks=range(0, 101, 20))
    axes.set_ylabel(f"mean {table.split} score over tasks (0 to 100)", fontsize=10)
    axes.grid(axis="y", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["left"].set_bounds(0, 100)
    axes.legend(ncols=count, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=10, borderaxespad=0.2)
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(path, metadata={"Software": None})
