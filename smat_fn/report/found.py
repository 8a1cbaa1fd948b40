"""Facts behind a report: scores, settings and costs by label, and which labels are compared with which."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import raise_problems
from ..evaluate.results import EXPERT, SET, Result, Run, once
from ..evaluate.statistics import Estimate, differences
from .tables import Cell, MainTable, cell_of, main_table

PARTS = {  # of SMAT, with their hyperparameters
    "Scale": ("alpha_min", "alpha_max", "alpha_depth"),
    "Mask": ("drop_prob",),
    "Perturb": ("sigma", "noise"),
}
MUON = " (Muon)"
BUDGET = ("steps", "epochs")  # differ from task to task


class Setting(NamedTuple):
    """How the experts of one label were trained, in all seeds and tasks."""

    label: str
    method: str
    hyperparameters: Mapping[str, Any]
    training: Mapping[str, Any]  # without steps and epochs
    sigmas: tuple[
        float, ...
    ] = ()  # that --sigma auto found in the runs, ascending; the first run's is in hyperparameters

    @property
    def described(self) -> Mapping[str, Any]:
        """The hyperparameters, with the range of sigma where --sigma auto found several."""
        if len(self.sigmas) < 2:
            return self.hyperparameters
        return {**self.hyperparameters, "sigma": f"{self.sigmas[0]:g} to {self.sigmas[-1]:g} (auto)"}

    @property
    def sigma(self) -> float:
        """The RMS of the noise; the mean of those that --sigma auto found."""
        found = self.sigmas or (self.hyperparameters["sigma"],)
        return float(found[0] if len(found) == 1 else f"{fmean(found):.3g}")

    @property
    def parts(self) -> tuple[str, ...] | None:
        """Those of Scale, Mask and Perturb that are on; None for other methods than SMAT."""
        if self.method != "smat":
            return None
        values = self.hyperparameters
        scale = values.get("alpha_min", 0) < 1 or values.get("alpha_max", 1) != 1 or "alpha_depth" in values
        on = scale, values.get("drop_prob", 1) > 0, values.get("sigma", 1) > 0
        return tuple(part for part, present in zip(PARTS, on, strict=True) if present)

    @property
    def kind(self) -> str:
        """ "noise": Perturb alone; "ablation": another choice of SMAT's parts; "main": all else."""
        if self.parts is None or len(self.parts) in (0, 3):
            return "main"
        return "noise" if self.parts == ("Perturb",) else "ablation"

    @property
    def muon(self) -> bool:
        """Whether Muon trained the matrices."""
        return self.training.get("optimizer") == "muon"

    def ablates(self, full: "Setting") -> bool:
        """Whether all but the parts that are off is as in another setting that has them all."""
        off = {name for part, names in PARTS.items() if part not in (self.parts or ()) for name in names}
        off |= {"sigma"} if self.sigmas and full.sigmas else set()  # found in every run anew
        mine, other = ({k: v for k, v in s.hyperparameters.items() if k not in off} for s in (self, full))
        return full.parts == tuple(PARTS) and self.training == full.training and mine == other


def settings_of(runs: Iterable[Run]) -> dict[str, Setting]:
    """The setting of every label that has experts among the runs; values that --sigma auto found may differ.

    Raises: ValueError that lists the labels whose experts were not all trained in one way, and what differs.
    """
    found: dict[str, Setting] = {}
    problems: dict[str, None] = {}
    for run in runs:
        if not run.trains:
            continue
        training = {k: v for k, v in run.training.items() if k not in BUDGET and v is not None}
        values = dict(run.hyperparameters)
        mine = Setting(run.label, run.method, values, training, (values["sigma"],) if run.sigma_from else ())
        first = found.setdefault(run.label, mine)
        if first.sigmas and mine.sigmas:
            first = found[run.label] = first._replace(sigmas=tuple(sorted({*first.sigmas, *mine.sigmas})))
            values["sigma"] = first.hyperparameters["sigma"]
        mine = mine._replace(sigmas=first.sigmas)
        if first != mine:
            one, other = _flat(first), _flat(mine)
            differ = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
            problems[f"experts of {run.label!r} differ in {', '.join(differ)}"] = None
    raise_problems([f"{problem}: train each setting with its own --label" for problem in problems])
    return found


def with_muon(rows: Sequence[Result], runs: Sequence[Run]) -> tuple[list[Result], list[Run]]:
    """Rows and runs, the labels of those trained with Muon ending in " (Muon)", beside AdamW's in one report."""
    experts = [run for run in runs if run.trains]
    others = {run.label for run in experts if run.training.get("optimizer") != "muon"}
    muon = {run.label for run in experts} - others
    new = {label: label if "muon" in label.lower() else label + MUON for label in muon}
    return (
        [replace(row, method=new.get(row.method, row.method)) for row in rows],
        [replace(run, label=new.get(run.label, run.label)) for run in runs],
    )


def _flat(setting: Setting) -> dict[str, Any]:
    return {"method": setting.method, **setting.hyperparameters, **setting.training}


class Cost(NamedTuple):
    """The cost of one label's expert sets; what was not recorded for all experts is None."""

    tasks: frozenset[str]
    seconds: Cell | None  # of the training loops, summed over the experts
    per_step: Cell | None
    peak: int | None  # bytes, the largest over experts and seeds
    peak_of: str  # what these bytes are


def costs_of(runs: Iterable[Run], rows: Iterable[Result] = ()) -> dict[str, Cost]:
    """Costs by label. Args: rows: scores, which tell which experts a set has."""
    experts: dict[tuple[str, int], set[str]] = {}
    for row in rows:
        if row.model.startswith(EXPERT):
            experts.setdefault((row.method, row.seed), set()).add(row.model)
    sets: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        if run.trains:
            sets.setdefault(run.label, {}).setdefault(run.seed, []).append(run)
    return {label: _cost(dict(sorted(by_seed.items())), experts) for label, by_seed in sets.items()}


def _cost(by_seed: dict[int, list[Run]], scored: Mapping[tuple[str, int], set[str]]) -> Cost:
    experts = [run for runs in by_seed.values() for run in runs]
    tasks = frozenset(run.model for run in experts)

    def whole(runs: list[Run]) -> bool:
        # a sum over some of the experts is not the cost of the set
        own = {run.model for run in runs}
        return SET in own or own >= (tasks - {SET}) | scored.get((runs[0].label, runs[0].seed), set())

    def steps_of(run: Run) -> int:
        # steps of a row of a whole set are those of one expert
        count = len(scored.get((run.label, run.seed), ())) if run.model == SET else 1
        evaluated = run.evaluations.get("curve")  # the last one ends training
        return count * (evaluated[-1][0] if evaluated else run.training.get("steps") or 0)

    steps = {seed: sum(map(steps_of, runs)) for seed, runs in by_seed.items()}
    seconds = per_step = None
    complete = all(map(whole, by_seed.values()))
    if complete and all(run.seconds is not None for run in experts):
        seconds = cell_of({seed: sum(run.seconds or 0.0 for run in runs) for seed, runs in by_seed.items()})
        if all(steps.values()):
            per_step = cell_of({seed: total / steps[seed] for seed, total in seconds.by_seed.items()})
    peaks = [run.peak_memory_bytes for run in experts]
    peak = None if None in peaks or not complete else max(p for p in peaks if p is not None)
    peak_of = ", ".join(sorted({run.peak_memory_of for run in experts} - {""}))
    return Cost(tasks, seconds, per_step, peak, peak_of)


def times(cost: Cost | None, reference: Cost | None) -> Cell | None:
    """Seconds over the reference's, per seed that both have; None for other tasks or where they were not recorded."""
    if cost is None or reference is None or cost.tasks != reference.tasks:
        return None
    if cost.seconds is None or reference.seconds is None:
        return None
    mine, other = cost.seconds.by_seed, reference.seconds.by_seed
    ratios = {seed: mine[seed] / other[seed] for seed in mine if other.get(seed)}
    return cell_of(ratios) if ratios else None


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
        """The labels of a kind, in the table's order."""
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

    Raises: ValueError as `main_table` and `settings_of`; for no scores of the split, for runs of several suites, and
        for a reference other than FT that is not there.
    """
    rows = list(rows)
    scores, facts = with_muon(_distinct(row for row in rows if row.split == split), list(runs))
    scored = {(row.method, row.seed) for row in scores}
    # one model may have rows under two labels, from before with_muon
    facts = [run for run in once(facts) if (run.label, run.seed) in scored]
    others = sorted({row.split for row in rows} - {split})
    way = f"pass --split {others[0]}, or evaluate some with eval.py" if others else "evaluate some with eval.py"
    problems = [] if scores else [f"no {split} scores of any model: {way}"]
    problems += [f"{problem}: make a report for each suite" for problem in _suite_differences(facts)]
    raise_problems(problems)
    table, costs = main_table(scores, split=split), costs_of(facts, scores)
    found = Found(scores, facts, table, settings_of(facts), costs, reference)
    if reference != "FT" and not any(found.base(muon=muon) for muon in (False, True)):
        labels = ", ".join(map(repr, found.labels("main")))
        raise ValueError(f"reference {reference!r} is none of the labels to compare with: choose one of {labels}")
    return found


def _suite_differences(runs: Iterable[Run]) -> list[str]:
    """Differences between suites, except for memory and devices, and tasks, which the scores tell.

    The seed may differ from one training seed to another.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.suite.items():
            name = f"suite seed, with training seed {run.seed}" if name == "seed" else name
            values.setdefault(name, set()).add(json.dumps(value))
    ignored = ("device", "decode_batch", "gradient_checkpointing", "tasks")
    return [
        f"runs differ in {name} ({', '.join(sorted(found))})"
        for name, found in values.items()
        if len(found) > 1 and name not in ignored
    ]


def _distinct(rows: Iterable[Result]) -> list[Result]:
    # two different scores of one thing stay, for `main_table` to refuse
    kept: dict[tuple[Any, ...], Result] = {}
    for row in rows:
        kept.setdefault((row.method, row.model, row.task, row.seed, row.score, row.coef), row)
    return list(kept.values())
