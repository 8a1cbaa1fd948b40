"""Every merger for four experts that needs no data, on the methods that digits-onepass chose: a table, a heat map.

Only coefficients are chosen, on dev, from each merger's own grid, which is extended while the best one is at its edge.
Other options are the preset's, the defaults, or those of the sources. The seeds are the first ones of that evaluation,
so the table compares mergers and is no new evidence for a method.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tyro.conf import Positional

from smat_fn import machine
from smat_fn.checkpoint import write_bytes
from smat_fn.config import (
    DIGITS,
    Breadcrumbs,
    Cart,
    Consensus,
    DareTies,
    IsoC,
    IsoCts,
    Karcher,
    MagMax,
    ModelStock,
    MultiSlerp,
    Pcb,
    Sce,
    TsvMerge,
    Wudi,
)
from smat_fn.report.plots import merger_plot
from smat_fn.report.tables import MainTable, cell_of

from .digits_onepass import GRIDS, STUDY
from .methods import evaluate
from .readme import ROOT, Scores, ordered, stored, with_data
from .study.grids import stored_choices

FIGURE = ROOT / "docs/results/digits_mergers.png"
MERGERS = (
    *DIGITS.mergers.values(),
    DareTies(drop_prob=0.3),
    Breadcrumbs(drop_smallest=0.85, drop_largest=0.01),
    MagMax(),
    Sce(),
    Consensus(ratio=0.4),
    Pcb(),
    ModelStock(),
    Karcher(),
    MultiSlerp(),
    TsvMerge(),
    IsoC(),
    IsoCts(),
    Wudi(),
    Cart(),
)


def main(folder: Positional[Path], *, jobs: int = 2, seeds: int = 3) -> None:
    """Train, merge, score, and draw the heat map.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        jobs: processes of one thread each.
        seeds: of the evaluation of digits-onepass, from the first.
    """
    choices = stored_choices(STUDY.protocol, GRIDS)
    own = STUDY.protocol._replace(
        name="digits_mergers", grids=choices, evaluation=STUDY.protocol.evaluation[:seeds], mergers=MERGERS
    )
    facts = machine.describe("python -m benchmarks digits-mergers FOLDER")
    evaluate(own, folder, jobs, facts, {label: chosen for label, (chosen,) in choices.items()})
    draw()


def draw() -> None:
    """The heat map of the stored scores, of mergers that need data too; these say what they see."""
    found = stored("digits_mergers")
    heat_map(FIGURE, found["seeds"], *with_data(found["test"]))


def heat_map(file: Path, seeds: Sequence[int], lines: Scores, sees: Mapping[str, str]) -> None:
    """Means by method and merger, over these seeds or the first of them; ``sees`` stands behind a merger's name."""
    names = {name: f"{name} ({sees[name]})" if name in sees else name for name in ordered(lines) if name != "Expert"}
    cells = {
        label: {names[x]: cell_of(dict(zip(seeds, scores, strict=False))) for x, scores in line.items() if x in names}
        for label, line in lines.items()
    }
    write_bytes(file, merger_plot(MainTable("test", cells), list(names.values())))
