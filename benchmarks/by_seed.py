"""Differences from FT by seed in the studies of one pass against two: ``python -m benchmarks readme`` draws them."""

from collections.abc import Mapping, Sequence
from typing import Any

from smat_fn.evaluate.statistics import estimate
from smat_fn.report.plots import new_figure, png, tidy


def by_seed(studies: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> bytes:
    """A panel for each study, with an axis of its own: seeds as dots, above them mean and 95 % interval as a bar.

    Args: studies: by title the stored results; labels: methods, which a study may lack.
    Returns: a PNG.
    """
    figure, panels = new_figure(2.3 * len(studies), 2.6, ncols=len(studies), sharey=True, squeeze=False)
    for axes, (title, result) in zip(panels[0], studies.items(), strict=True):
        axes.axvline(0, color="0.35", linewidth=1)
        for y, label in enumerate(labels):
            if label not in result["paired"]:
                continue
            got = estimate(result["paired"][label]["differences"])
            colour = "#0072B2" if got.settled else "0.45"
            if got.interval:
                axes.plot(got.interval, (y - 0.2, y - 0.2), color=colour, linewidth=2, solid_capstyle="butt")
            axes.plot([got.mean], [y - 0.2], marker="|", markersize=8, markeredgewidth=2, color=colour)
            axes.plot(got.values, [y + 0.15] * len(got.values), "o", markersize=3.5, color=colour, markeredgewidth=0)
        axes.set_title(f"{title}, {len(result['seeds'])} seeds", fontsize=9)
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        tidy(axes, "x", shade="0.9")
    panels[0][0].set_ylim(len(labels) - 0.5, -0.7)
    figure.supxlabel("merged score minus FT's; dots: seeds; bars: single 95 % intervals (blue: zero is outside)")
    return png(figure)
