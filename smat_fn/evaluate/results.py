"""Scores (`Result`) and the facts of models (`Run`) as rows of JSON lines: a report needs no weights."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..checkpoint import JOINT, write_text
from ..errors import shortened

Row = TypeVar("Row")
EXPERT, SET = "expert:", "experts"
OTHERS = "other:"  # begins the name of a model in scores on other tasks (eval.py --other-tasks)
RUNS = "runs.jsonl"  # its name beside results.jsonl
_OF_JSON: Mapping[Any, Any] = MappingProxyType({float: (int, float), Mapping: dict, Sequence: list})
_OF_DEV = {"curve": Sequence[Sequence[float]], "by": str, "step": int, "best": float}  # of ``Run.evaluations``


@dataclass(frozen=True)
class Result:
    """The score of one model on one task.

    A score that is a 0-d tensor or a NumPy number becomes a float.

    Raises: ValueError for a score that is not a number, or outside 0 to 100.
    """

    method: str  # that trained the experts
    model: str  # "expert:<task>", "joint" or the name of a merger, perhaps after `OTHERS`
    task: str
    split: str
    score: float  # 0 to 100
    seed: int  # of the training run
    coef: float | None = None  # gamma of a merged model
    extra: Mapping[str, Any] = field(default_factory=dict)  # anything else, JSON values

    def __post_init__(self) -> None:
        if not isinstance(self.score, (int, float)):
            try:
                object.__setattr__(self, "score", float(self.score.item()))
            except (AttributeError, RuntimeError, ValueError):
                where = f"score of {self.method}, {self.model} on {self.task}"
                raise ValueError(f"{where}: {self.score!r} is not a number") from None
        if not 0 <= self.score <= 100:
            raise ValueError(f"score of {self.method}, {self.model} on {self.task}: {self.score} is outside [0, 100]")


@dataclass(frozen=True)
class Run:
    """How one model was trained or merged. Label, model and seed are those of its `Result` rows."""

    label: str
    model: str  # "expert:<task>", "experts" where one row is of the whole set, "joint", or the name of a merger
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
    evaluations: Mapping[str, Any] = field(default_factory=dict)  # of an expert on dev while it trained: curve, best
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""  # of the weights
    sigma_from: Mapping[str, Any] = field(default_factory=dict)  # origin of a sigma that --sigma auto found

    @property
    def trains(self) -> bool:
        """Whether this is an expert or a set of them."""
        return self.model == SET or self.model.startswith(EXPERT)


def write_results(path: str | Path, rows: Iterable[Any]) -> None:
    """Replace a JSON lines file atomically. Args: rows: `Result`, or dataclasses of another kind."""
    lines = (json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    write_text(Path(path), "".join(lines))


def read_results(path: str | Path) -> list[Result]:
    """The rows of a JSON lines file. Raises: ValueError that lists every line that is not a `Result`."""
    return read_rows(path, Result)


def read_rows(path: str | Path, kind: type[Row]) -> list[Row]:
    """`read_results` for a dataclass of any kind."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    rows, problems = [], []
    for number, line in enumerate(text_lines(path), 1):
        try:
            values = json.loads(line)
            if unknown := set(values) - known:
                raise ValueError(f"unknown fields {sorted(unknown)}")
            rows.append(checked(kind(**values)))
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        few = shortened(problems, "and {} more lines")
        raise ValueError("; ".join(few) + ": remove these lines or write the file again")
    return rows


def checked(row: Row) -> Row:
    """A row whose fields have the types of JSON values that its class names. Raises: ValueError for the first other."""
    for name, hint in get_type_hints(type(row)).items():
        check_type(name, getattr(row, name), hint)
    if isinstance(row, Run):
        _check_inside(row)
    return row


def _check_inside(run: Run) -> None:
    """Raises: ValueError for a value that reports compute with, in a field of any values, and that has another type."""
    check_type("training['steps']", run.training.get("steps"), int | None)
    for name in ("alpha_min", "drop_prob", "sigma"):
        if (name == "sigma" and run.sigma_from) or (run.method == "smat" and name in run.hyperparameters):
            check_type(f"hyperparameters[{name!r}]", run.hyperparameters.get(name), float)
    for name, hint in _OF_DEV.items() if run.evaluations else ():
        check_type(f"evaluations[{name!r}]", value := run.evaluations.get(name), hint)
        if name == "curve" and (not value or any(len(pair) != 2 for pair in value)):
            raise ValueError(f"evaluations['curve'] is {value!r}, must hold pairs of a step and a number")


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raises: ValueError, which names the place, unless a JSON value and all inside it have the types of ``hint``."""
    if hint is Any:
        return
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    fit = [kind for kind in kinds if isinstance(value, _OF_JSON.get(own := get_origin(kind) or kind, own))]
    if isinstance(value, bool) or not fit:
        raise ValueError(f"{name} is {value!r}, must be {' or '.join(map(_name, kinds))}")
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, own in inside:
        if of := get_args(fit[0]):
            check_type(f"{name}[{key!r}]", own, of[-1])


def _name(kind: Any) -> str:
    kind = get_origin(kind) or kind
    return "null" if kind is NoneType else getattr(kind, "__name__", str(kind))


def text_lines(path: str | Path) -> list[str]:
    """The lines of a file. str.splitlines would also end one at characters that JSON leaves in texts, as U+2028."""
    with open(path, encoding="utf-8") as file:
        return list(file)


def model_of(manifest: Mapping[str, Any]) -> str:
    """The name of an expert, a multi-task model or a merged model in rows of scores."""
    if manifest["kind"] == JOINT:
        return JOINT
    return EXPERT + manifest["task"] if manifest["kind"] == "expert" else manifest["merger"]


def run_of(manifest: Mapping[str, Any]) -> Run:
    """The facts of the manifest of an expert, a multi-task model or a merged model."""
    check_type(own := "merger" if manifest["kind"] == "merged" else "task", manifest[own], str)
    known = {f.name for f in fields(Run)} - {"model"}
    given = {name: value for name, value in manifest.items() if name in known and value is not None}
    return checked(Run(model=model_of(manifest), **given))


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
