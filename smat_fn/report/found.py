"""What a report is made from: scores, runs, and which labels are compared with which."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import raise_problems
from ..evaluate.results import Result
from ..evaluate.runs import Run, once
from ..evaluate.statistics import Estimate, differences
from .costs import Cost, costs_of
from .settings import MUON, Setting, settings_of, with_muon
from .tables import MainTable, main_table


class Found(NamedTuple):
    """Everything that sections are computed from."""

    rows: Sequence[Result]  # of one split
    runs: Sequence[Run]
    table: MainTable  # of all labels
    settings: dict[str, Setting]  # of the labels whose runs are known
    costs: dict[str, Cost]
    reference: str  # as it was named

    def kind(self, label: str) -> str:
        """`Setting.kind`; a label whose runs are not known counts as one of the main results."""
        return self.settings[label].kind if label in self.settings else "main"

    def muon(self, label: str) -> bool:
        """`Setting.muon`."""
        return label in self.settings and self.settings[label].muon

    def labels(self, kind: str, *, muon: bool | None = None) -> list[str]:
        """Those of a kind, in order."""
        return [x for x in self.table.cells if self.kind(x) == kind and muon in (None, self.muon(x))]

    def part(self, labels: Sequence[str]) -> MainTable:
        """The lines of some labels."""
        return MainTable(self.table.split, {label: self.table.cells[label] for label in labels})

    def base(self, *, muon: bool) -> str | None:
        """The reference among the main results of one optimizer."""
        labels = self.labels("main", muon=muon)
        named = [label for label in labels if label in (self.reference, self.reference + MUON)]
        methods = [x for x in labels if x in self.settings and self.settings[x].method == self.reference.lower()]
        return next(iter(named + methods), None)

    def full(self, label: str) -> str | None:
        """SMAT with all its parts, all else as in this label's setting."""
        mine = self.settings.get(label)
        others = {x: s for x, s in self.settings.items() if x != label and x in self.table.cells}
        return next((x for x, setting in others.items() if mine and mine.ablates(setting)), None)

    def compared_with(self, label: str) -> str | None:
        """Ablations with full SMAT where it is there, all others with the reference; None for the reference itself."""
        full = self.full(label) if self.kind(label) == "ablation" else None
        other = full or self.base(muon=self.muon(label))
        return None if other == label else other

    def comparisons(self, label: str) -> list[str]:
        """`compared_with`, and then, for ablations and Muon, the reference of the runs without Muon."""
        others = [self.compared_with(label), self.base(muon=False)]
        return [other for other in dict.fromkeys(others) if other not in (None, label)]

    def difference(self, label: str, column: str, other: str | None) -> Estimate | None:
        """``label - other`` in one column, paired by seed; None where a score is missing."""
        cells = self.table.cells
        if other is None or column not in cells[label] or column not in cells[other]:
            return None
        return differences(cells[other][column].by_seed, cells[label][column].by_seed)


def find(rows: Iterable[Result], runs: Iterable[Run], *, split: str, reference: str) -> Found:
    """Scores of one split with the facts of their runs. What is there twice counts once.

    Raises: ValueError as `main_table` and `settings_of`; for no scores of the split, and for runs of several suites.
    """
    scores, facts = with_muon(_once(row for row in rows if row.split == split), list(runs))
    scored = {(row.method, row.seed) for row in scores}
    # one model may have been told of under two labels, before its Muon was
    facts = [run for run in once(facts) if (run.label, run.seed) in scored]
    problems = [] if scores else [f"no {split} scores of any model: evaluate some with eval.py"]
    problems += [f"{problem}: make a report for each suite" for problem in _several(facts)]
    raise_problems(problems)
    return Found(scores, facts, main_table(scores, split=split), settings_of(facts), costs_of(facts), reference)


def _several(runs: Iterable[Run]) -> list[str]:
    """What suites differ in, but for seeds and places of computation."""
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.suite.items():
            values.setdefault(name, set()).add(json.dumps(value))
    ignored = ("seed", "device", "decode_batch")
    return [
        f"runs differ in {name} ({', '.join(sorted(found))})"
        for name, found in values.items()
        if len(found) > 1 and name not in ignored
    ]


def _once(rows: Iterable[Result]) -> list[Result]:
    # two different scores of one thing stay, for `main_table` to refuse
    kept: dict[tuple[Any, ...], Result] = {}
    for row in rows:
        kept.setdefault((row.method, row.model, row.task, row.seed, row.score, row.coef), row)
    return list(kept.values())
