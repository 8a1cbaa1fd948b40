"""Which runs belong together: what a label stands for, told from the settings of its experts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import raise_problems
from ..evaluate.results import Result
from ..evaluate.runs import Run

PARTS = ("Scale", "Mask", "Perturb")
MUON = " (Muon)"
BUDGET = ("steps", "epochs")  # differ from task to task


class Setting(NamedTuple):
    """How the experts of one label were trained, in all seeds and tasks."""

    label: str
    method: str
    hyperparameters: Mapping[str, Any]
    training: Mapping[str, Any]  # without steps and epochs

    @property
    def parts(self) -> tuple[str, ...] | None:
        """Those of Scale, Mask and Perturb that are on; None for other methods than SMAT."""
        if self.method != "smat":
            return None
        values = self.hyperparameters
        on = values.get("alpha_min", 0) < 1, values.get("drop_prob", 1) > 0, values.get("sigma", 1) > 0
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
        names = {"Scale": ("alpha_min",), "Mask": ("drop_prob",), "Perturb": ("sigma", "noise")}
        off = {name for part in PARTS if part not in (self.parts or ()) for name in names[part]}
        mine, other = ({k: v for k, v in s.hyperparameters.items() if k not in off} for s in (self, full))
        return full.parts == PARTS and self.training == full.training and mine == other


def settings_of(runs: Iterable[Run]) -> dict[str, Setting]:
    """The setting of every label that has experts among the runs.

    Raises: ValueError that lists the labels whose experts were not all trained in one way, and what differs.
    """
    found: dict[str, Setting] = {}
    problems: dict[str, None] = {}
    for run in runs:
        if not run.trains:
            continue
        training = {k: v for k, v in run.training.items() if k not in BUDGET and v is not None}
        mine = Setting(run.label, run.method, dict(run.hyperparameters), training)
        first = found.setdefault(run.label, mine)
        if first != mine:
            told = sorted(name for name, value in _flat(mine).items() if _flat(first).get(name) != value)
            problems[f"experts of {run.label!r} differ in {', '.join(told) or 'settings that only some have'}"] = None
    raise_problems([f"{problem}: train each setting with its own --label" for problem in problems])
    return found


def with_muon(rows: Sequence[Result], runs: Sequence[Run]) -> tuple[list[Result], list[Run]]:
    """Rows and runs, the labels of those trained with Muon ending in " (Muon)": they meet AdamW's in one report."""
    experts = [run for run in runs if run.trains]
    others = {run.label for run in experts if run.training.get("optimizer") != "muon"}
    muon = {run.label for run in experts} - others
    new = {label: label if "muon" in label.lower() else label + MUON for label in muon}
    return (
        [replace(row, method=new.get(row.method, row.method)) for row in rows],
        [replace(run, label=new.get(run.label, run.label)) for run in runs],
    )


def words(values: Mapping[str, Any]) -> str:
    """``name value, name value``."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, {}))


def _flat(setting: Setting) -> dict[str, Any]:
    return {"method": setting.method, **setting.hyperparameters, **setting.training}
