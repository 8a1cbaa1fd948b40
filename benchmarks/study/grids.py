"""Grids of candidates over two axes, and tuning that widens those whose choice lies at an edge."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from smat_fn.config import MethodConfig, Training

from ..methods import Candidate, Facts, Protocol, Stage, evaluate, say, tune

WIDENINGS = 2  # of a method's grid, at most
ROUNDED = 12  # significant digits of a rate or strength made by doubling


class Axis(NamedTuple):
    """Values of one field of a method or of its training, in ascending order or, where they are words, in any."""

    field: str
    values: tuple[Any, ...]
    most: float | None = None  # no value lies above it

    def widened(self, chosen: Any) -> "Axis":
        """The axis, extended by a factor of two beyond the edge chosen, up to `most`; one value stays alone."""
        if isinstance(chosen, str) or len(self.values) == 1 or chosen not in (self.values[0], self.values[-1]):
            return self
        beyond = chosen / 2 if chosen == self.values[0] else chosen * 2
        beyond = int(beyond) if isinstance(chosen, int) else float(f"{beyond:.{ROUNDED}g}")
        if self.most is not None and beyond > self.most:
            return self
        return self._replace(values=tuple(sorted((*self.values, beyond))))


class Grid(NamedTuple):
    """A method with all combinations of two axes, the first one outermost, or with those of a cross."""

    method: MethodConfig
    training: Training
    first: Axis
    second: Axis
    center: tuple[Any, Any] | None = None  # of the cross: values of the axes, one of which every candidate has

    def candidates(self) -> list[Candidate]:
        """The candidates in ascending order, so that of equal ones the smaller comes first."""
        return [self._candidate({self.first.field: a, self.second.field: b})
                for a in self.first.values for b in self.second.values
                if self.center is None or a == self.center[0] or b == self.center[1]]  # fmt: skip

    def widened(self, chosen: Candidate) -> "Grid":
        """The grid, extended on every axis at whose edge the choice lies; unchanged if it lies at none."""
        return self._replace(first=self._beyond(self.first, chosen), second=self._beyond(self.second, chosen))

    def _candidate(self, values: Mapping[str, Any]) -> Candidate:
        own = {name: value for name, value in values.items() if hasattr(self.method, name)}
        others = {name: value for name, value in values.items() if name not in own}
        return Candidate(replace(self.method, **own), replace(self.training, **others))

    def _beyond(self, axis: Axis, chosen: Candidate) -> Axis:
        return axis.widened(getattr(chosen.method if hasattr(self.method, axis.field) else chosen.training, axis.field))


class Widening(NamedTuple):
    """A protocol whose grids are extended before evaluation, until no choice lies at an edge."""

    protocol: Protocol  # its grids are those of `grids`
    grids: Mapping[str, Grid]

    def run(self, folder: Path, jobs: int, facts: Facts, only: Stage | None = None) -> None:
        """Both stages, or one of them; without seeds of tuning the evaluation of the candidates, one of each method.

        Raises: ValueError where a tuning is asked for that the protocol does not have.
        """
        if not self.protocol.tuning:
            if only == "tuning":
                raise ValueError(f"{self.protocol.name} has no tuning: leave --only out")
            chosen = {label: grid.candidates()[0] for label, grid in self.grids.items()}
            evaluate(self.protocol, folder, jobs, facts, chosen)
            return
        if only != "evaluation":
            tune_widening(self.protocol, self.grids, folder, jobs, facts)
        if only != "tuning":
            choices = stored_choices(self.protocol, self.grids)
            evaluate(self.protocol._replace(grids=choices), folder, jobs, facts)


def widening(protocol: Protocol, grids: Mapping[str, Grid]) -> Widening:
    """The protocol with the candidates of the grids."""
    return Widening(protocol._replace(grids={label: grid.candidates() for label, grid in grids.items()}), grids)


def tune_widening(protocol: Protocol, grids: Mapping[str, Grid], folder: Path, jobs: int, facts: Facts) -> None:
    """Tune, and again with wider grids of the methods whose choice lies at an edge; finished trials are kept."""
    for _ in range(WIDENINGS + 1):
        chosen = tune(protocol._replace(grids={x: grid.candidates() for x, grid in grids.items()}), folder, jobs, facts)
        wider = {label: grid.widened(chosen[label]) for label, grid in grids.items()}
        edges = [label for label in grids if wider[label] != grids[label]]
        say(f"at an edge of its grid: {', '.join(edges) or 'none'}")
        if not edges:
            return
        grids = wider


def stored_choices(protocol: Protocol, grids: Mapping[str, Grid]) -> dict[str, list[Candidate]]:
    """The choice of every method alone: the extended grids can be read off the stored tuning only."""
    file = protocol.file("_tuning.json")
    if not file.exists():
        raise ValueError(f"{file} is not there: run the tuning first")
    stored = json.loads(file.read_text(encoding="utf-8"))["chosen"]
    classes = {label: type(grid.method) for label, grid in grids.items()}
    adapters = {label: grid.training.lora for label, grid in grids.items()}
    return {
        label: [
            Candidate(
                classes[label](**facts["hyperparameters"]), Training(**{**facts["training"], "lora": adapters[label]})
            )
        ]
        for label, facts in stored.items()
    }
