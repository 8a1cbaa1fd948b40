"""What manifests tell of models, as rows beside the scores: a report needs no weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

EXPERT, SET = "expert:", "experts"
RUNS = "runs.jsonl"  # its name beside results.jsonl


@dataclass(frozen=True)
class Run:
    """How one model was trained or merged. Label, model and seed are those of its `Result` rows."""

    label: str
    model: str  # "expert:<task>", "experts" where one row is of the whole set, or the name of a merger
    seed: int
    method: str = ""  # that trained an expert
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)  # of the method, or of the merger
    training: Mapping[str, Any] = field(default_factory=dict)  # optimizer, lr, steps, ... of an expert
    seconds: float | None = None  # of the training loop
    peak_memory_bytes: int | None = None
    peak_memory_of: str = ""
    suite: Mapping[str, Any] = field(default_factory=dict)
    dev: Mapping[str, float] = field(default_factory=dict)  # score of a merged model per task
    dev_curve: Sequence[Sequence[float]] = field(default_factory=list)  # (coefficient, mean dev score) of a search
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""  # of the weights

    @property
    def trains(self) -> bool:
        """Whether this is an expert or a set of them."""
        return self.model == SET or self.model.startswith(EXPERT)


def run_of(manifest: Mapping[str, Any]) -> Run:
    """The facts of an expert's or a merged model's manifest."""
    model = EXPERT + manifest["task"] if manifest["kind"] == "expert" else manifest["merger"]
    known = {f.name for f in fields(Run)} - {"model"}
    return Run(model=model, **{name: value for name, value in manifest.items() if name in known and value is not None})


def once(runs: Iterable[Run]) -> list[Run]:
    """The first row of every model; where one row is of a whole set, no rows of its experts."""
    runs = list(runs)
    sets = {(run.label, run.seed) for run in runs if run.model == SET}
    kept: dict[tuple[str, str, int], Run] = {}
    for run in runs:
        if run.trains and run.model != SET and (run.label, run.seed) in sets:
            continue
        kept.setdefault((run.label, run.model, run.seed), run)
    return list(kept.values())
