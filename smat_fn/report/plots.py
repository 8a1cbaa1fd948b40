"""Figures: the main table as points and as a heat map, paired differences, curves over the noise."""

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from itertools import cycle
from textwrap import wrap
from typing import Any, Literal

import numpy as np

from ..evaluate.statistics import Estimate
from .tables import JOINT, Cell, MainTable

log = logging.getLogger(__name__)

# Okabe and Ito's palette: distinct with any colour vision
COLOURS = {"ft": "#C7C7C7", "smat": "#0072B2", "asam": "#E69F00", "mergopt": "#009E73", "orthoreg": "#CC79A7"}
FONT = 9  # points
LETTERS = 60  # of a label in a line of a legend
NUMBERED = 6  # methods
SPARE = ("#56B4E9", "#D55E00", "#F0E442", "#FFFFFF", "#000000")


def colours(methods: Iterable[str]) -> dict[str, str | None]:
    """A colour for each method: its own in `COLOURS`, of Muon's its namesake's where that is free, else a spare one.

    None where spare ones have run out.
    """
    found: dict[str, str | None] = {}
    for method in dict.fromkeys(methods):
        own = COLOURS.get(method.lower())
        found[method] = None if own in found.values() else own
    for method in found:
        namesake = COLOURS.get(method.lower().removesuffix("(muon)").removesuffix("muon").rstrip(" -"))
        if namesake not in found.values():
            found[method] = found[method] or namesake
    spare = iter(SPARE)
    return {method: colour or next(spare, None) for method, colour in found.items()}


def drawable(table: MainTable) -> bool:
    """Whether `main_plot` has a line to draw and a colour for each."""
    return len(table.scored) > 0 and None not in colours(table.cells).values()


def check_colours(methods: Iterable[str]) -> dict[str, str | None]:
    """`colours`. Raises: ValueError where there are too few for `main_plot`."""
    if None in (palette := colours(methods)).values():
        raise ValueError(f"cannot draw methods {list(palette)}: give at most {len(SPARE)} beside {list(COLOURS)}")
    return palette


def main_plot(table: MainTable, *, title: str = "") -> bytes:
    """Means of experts, mergers and the mean of the paper's five, grouped by column: a PNG of 1800 x 900 pixels.

    Every point of at most six methods carries its number, the mean over seeds; whiskers are one standard deviation. The
    axes show the part of 0 to 100 that is needed, and say so.

    Raises:
        ValueError: the table is empty, or more than five methods have no colour of their own in `COLOURS`.
    """
    if not table.scored:
        raise ValueError(f"cannot draw methods {list(table.cells)}: they have no scores of experts or mergers")
    palette = check_colours(table.cells)
    columns = table.columns
    # panels of one scale, for experts are far above what is merged; of nothing there is none
    parts = [columns[:1], columns[1:]] if columns[0] == "Expert" else [columns]
    parts = [part for part in parts if table.scored.intersection(part)]
    reaches = [reach(cell for line in table.cells.values() for c, cell in line.items() if c in part) for part in parts]
    span = max(high - low for low, high in reaches)
    figure, grid = new_figure(9, 4.5, ncols=len(parts), squeeze=False, width_ratios=list(map(len, parts)))
    for axes, part, (low, high) in zip(grid[0], parts, reaches, strict=True):
        middle, count = (low + high) / 2, len(table.cells)
        _points(axes, table, part, palette)
        axes.set_ylim(middle - span / 2, middle + span * (0.57 if count < 4 else 0.68))  # room for the numbers
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 100 and abs(tick - middle) <= span / 2])
        tidy(axes, "y")
    grid[0][0].set_ylabel(f"mean {table.split} score over tasks")
    deviate = any(cell.sd for line in table.cells.values() for cell in line.values())
    means = "points: means over seeds; whiskers: one standard deviation; " if deviate else ""
    middles = [(low + high) / 2 for low, high in reaches]
    cut = " and ".join(f"{max(0, x - span / 2):.0f} to {min(100, x + span / 2):.0f}" for x in middles)
    figure.supxlabel(f"{means}scores are 0 to 100, shown are {cut}")
    legend(figure, *axes.get_legend_handles_labels(), columns=min(count, 5), loc="outside upper right")
    grid[0][0].set_title(title, loc="left")
    return png(figure)


def _points(axes: Any, table: MainTable, columns: Sequence[str], palette: Mapping[str, str | None]) -> None:
    """Some columns of the table, methods beside each other."""
    from matplotlib.patheffects import withStroke

    count = len(table.cells)
    for index, (method, line) in enumerate(table.cells.items()):
        cells = {columns.index(column): cell for column, cell in line.items() if column in columns}
        x = np.array(list(cells)) + (index - (count - 1) / 2) * 0.86 / count
        means, errors = [cell.mean for cell in cells.values()], [cell.sd or 0.0 for cell in cells.values()]
        axes.errorbar(
            x, means, errors if any(errors) else None, fmt="o", label=legible(method), color=palette[method],
            ecolor="black", elinewidth=0.9, capsize=2.5, markersize=7, markeredgecolor="black", markeredgewidth=0.5,
        )  # fmt: skip
        # numbers of more methods would lie upon each other
        for place, mean, error in zip(x, means, errors, strict=True) if count <= NUMBERED else ():
            axes.annotate(
                f"{mean:.1f}", (place, mean + error), (0, 3 if error else 6), textcoords="offset points", ha="center",
                va="bottom", rotation=0 if count < 4 else 90,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )  # fmt: skip
    if "Avg" in columns[1:]:  # apart from what it is a mean of
        axes.axvline(columns.index("Avg") - 0.5, color="0.6", linewidth=0.8, linestyle=(0, (4, 3)))
    names = {"Expert": "Experts", "Avg": "Avg of 5", JOINT: "Joint"}
    axes.set_xticks(range(len(columns)), [names.get(column, column) for column in columns])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(columns) - 0.5)


def reach(cells: Iterable[Cell], *more: float) -> tuple[float, float]:
    """The ends of whiskers, and more numbers, with some room; at least a point."""
    ends = [cell.mean + sign * (cell.sd or 0.0) for cell in cells for sign in (-1, 1)] + list(more)
    room = max(0.08 * (max(ends) - min(ends)), 0.5)
    return min(ends) - room, max(ends) + room


def merger_plot(table: MainTable, mergers: Sequence[str]) -> bytes:
    """A PNG heat map of mean scores, a line a merger, a column a method. Colours range over the scores present."""
    from matplotlib.patheffects import withStroke

    methods = list(table.cells)
    means = np.array([[line[m].mean if m in line else np.nan for line in table.cells.values()] for m in mergers])
    longest = width_of(methods)
    turned = len(methods) > 2 or longest > 0.8
    more = max(0.0, longest - 1.2) if turned else 0.0  # inches, of which a turned label takes a part in each direction
    figure, axes = new_figure(2.4 + 0.8 * len(methods) + 0.9 * more, 1.6 + 0.28 * len(mergers) + 0.5 * more)
    drawn = axes.imshow(means, cmap="cividis", aspect="auto")
    for (y, x), mean in np.ndenumerate(means):
        if not np.isnan(mean):
            axes.text(x, y, f"{mean:.1f}", ha="center", va="center", color="black",
                      path_effects=[withStroke(linewidth=2, foreground="white")])  # fmt: skip
    axes.set_xticks(
        range(len(methods)),
        methods,
        rotation=30 if turned else 0,
        ha="right" if turned else "center",
    )
    axes.set_yticks(range(len(mergers)), mergers)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    low, high = np.nanmin(means), np.nanmax(means)
    figure.colorbar(drawn, ax=axes, label=f"mean {table.split} score over tasks,\ncolours from {low:.1f} to {high:.1f}")
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
    names = max(1.2 * width_of(blocks), width_of(name for name, _ in lines))  # those of blocks are bold
    figure, axes = new_figure(max(6.4, 3.6 + names), 0.8 + 0.25 * top)
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
                      fontweight="bold", va="center", ha="right")  # fmt: skip
    axes.set_yticks(places, [name for name, _ in lines])
    axes.set_ylim(top - 0.6, -0.8)
    axes.set_xlabel("difference in points\ndots: seeds; bars: 95 % intervals (blue: zero is outside)")
    axes.tick_params(axis="y", length=0)
    tidy(axes, "x", shade="0.9")
    axes.spines["left"].set_visible(False)
    return png(figure)


def noise_plot(curves: Mapping[str, Mapping[float, Cell]], *, reference: tuple[str, Cell] | None = None) -> bytes:
    """Mean ± sd over the RMS of the noise, a line per family; the reference without noise as a level.

    Returns: a PNG; the horizontal axis is logarithmic; whiskers stand beside each other, a few points from their RMS.
    """
    figure, axes = new_figure(6.4, 3.6)
    sigmas = sorted({sigma for points in curves.values() for sigma in points})
    cells = [cell for points in curves.values() for cell in points.values()]
    ends = reach(cells, *([reference[1].mean] if reference else []))
    # matplotlib finds no limits of what stands aside
    axes.set(xscale="log", xlim=(sigmas[0] / 1.3, sigmas[-1] * 1.3), ylim=ends)
    styles = {"uniform": ("#0072B2", "o"), "gaussian": ("#D55E00", "s"), "laplace": ("#009E73", "^")}
    spare = cycle([("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"), ("#000000", "X")])
    for index, (family, points) in enumerate(curves.items()):
        colour, marker = styles.get(family) or next(spare)
        means, errors = [cell.mean for cell in points.values()], [cell.sd or 0.0 for cell in points.values()]
        axes.errorbar(
            list(points), means, errors if any(errors) else None, color=colour, marker=marker, markersize=5,
            capsize=2.5, label=legible(family), transform=axes.transData + aside(figure, index, len(curves)),
        )  # fmt: skip
    if reference:
        name, cell = reference
        axes.axhline(cell.mean, color="0.4", linewidth=1, linestyle=(0, (4, 3)), label=legible(name))
    axes.set_xticks(sigmas, [f"{sigma:g}" for sigma in sigmas])
    axes.minorticks_off()
    axes.set_xlabel("RMS of the noise, in units of the weights")
    axes.set_ylabel("score, mean of five mergers\n± standard deviation over seeds")
    tidy(axes, "both", shade="0.9")
    legend(axes, columns=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return png(figure)


def new_figure(width: float, height: float, **subplots: Any) -> tuple[Any, Any]:
    """A figure of a size in inches, and its axes (`matplotlib.figure.Figure.subplots`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=200, layout="constrained")
    return figure, figure.subplots(**subplots)


def aside(figure: Any, index: int, count: int) -> Any:
    """A shift that sets whiskers of ``count`` lines beside each other, 4 points apart."""
    from matplotlib.transforms import ScaledTranslation

    return ScaledTranslation((index - (count - 1) / 2) * 4 / 72, 0, figure.dpi_scale_trans)


def legible(label: str, letters: int = LETTERS) -> str:
    """A label for a legend, in lines of that many letters.

    matplotlib leaves out those that begin with an underscore, so an empty space leads them.
    """
    label = "\n".join(wrap(label, letters)) if len(label) > letters else label
    return f"\u200b{label}" if label.startswith("_") else label


def width_of(texts: Iterable[str]) -> float:
    """The width of the longest text of a figure, in inches."""
    from matplotlib.textpath import TextPath

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # `png` names them
        paths = [TextPath((0, 0), text.replace("$", "S"), size=FONT) for text in texts if text.strip()]
    return max((path.get_extents().width / 72 for path in paths), default=0.0)


def legend(owner: Any, *drawn: Any, columns: int, **options: Any) -> None:
    """A legend of a figure or of axes, in as many columns as fit into the figure. Args: drawn: handles and labels."""
    for count in range(columns, 0, -1):
        made = owner.legend(*drawn, ncols=count, frameon=False, **options)
        for text in made.get_texts():  # as `png` will
            text.set(fontsize=FONT, parse_math=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")
            if made.get_window_extent().width < made.figure.bbox.width - 0.1 * made.figure.dpi or count == 1:
                return
        made.remove()


def tidy(axes: Any, grid: Literal["x", "y", "both"], *, shade: str = "0.88") -> None:
    """Grey grid lines behind the drawing, no frame at the top and on the right."""
    axes.grid(axis=grid, color=shade, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def png(figure: Any) -> bytes:
    """The figure as a file's content, its words in one size, dollars in them shown; no version of a library in it."""
    from matplotlib.text import Text

    powers = set[Any]()  # matplotlib writes 10^-3 as mathematics
    for axes in figure.axes:
        axes.tick_params(labelsize=FONT)  # of ticks that are yet to come
        logarithmic = (axis for axis in (axes.xaxis, axes.yaxis) if axis.get_scale() == "log")
        powers |= {text for axis in logarithmic for text in axis.findobj(Text) if text is not axis.label}
    for text in figure.findobj(Text):
        text.set_fontsize(FONT)
        text.set_parse_math(text in powers)
    file = BytesIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.savefig(file, metadata={"Software": None})
    told = dict.fromkeys(str(warning.message) for warning in caught)
    glyphs = {text: chr(int(found[1])) for text in told if (found := re.match(r"Glyph (\d+) ", text))}
    lost = "".join(glyphs.values())
    for note in ([f"shows boxes instead of {lost}, which its font lacks"] if lost else []) + [
        f"may be cut ({text})" for text in told if text not in glyphs
    ]:
        log.warning("note: a figure %s: the tables have all labels", note)
    return file.getvalue()
