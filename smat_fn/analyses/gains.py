"""Where a gain after merging comes from: better experts, or less lost (paper section 5.3, Sources of Merging Gains)."""

from typing import NamedTuple

from ..report.tables import Cell, MainTable, cell_of


class Gain(NamedTuple):
    """Expert score, five-merger mean, and the difference of the two, by seed."""

    expert: Cell
    merged: Cell
    drop: Cell  # expert - merged


def gains(table: MainTable) -> dict[str, Gain]:
    """Expert score, five-merger mean and merging drop of every method of the table.

    Raises: ValueError that lists methods without experts or without all five mergers.
    """
    lacking = {method: [c for c in ("Expert", "Avg") if c not in line] for method, line in table.cells.items()}
    problems = [
        f"{method} has no {' and no '.join(columns)}: score its experts and all five mergers (merge.py all)"
        for method, columns in lacking.items()
        if columns
    ]
    if problems:
        raise ValueError("; ".join(problems))
    found = {}
    for method, line in table.cells.items():
        expert, merged = line["Expert"], line["Avg"]
        drop = cell_of({seed: score - merged.by_seed[seed] for seed, score in expert.by_seed.items()})
        found[method] = Gain(expert, merged, drop)
    return found
