"""Methods compared by a protocol: equal tuning on dev, then test scores on fresh seeds at the frozen choices.

Trials are kept in a folder, so that a stopped run resumes. The summary covers the seeds that are complete and is
written again after each.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from benchmarks.study.trial import Trial
from benchmarks.study.trials import Outcome, rows_of, run_trials
from smat_fn import merge
from smat_fn.checkpoint import write_text
from smat_fn.config import PRESETS, MergerConfig, MethodConfig, Training, settings
from smat_fn.evaluate import Result, write_results
from smat_fn.evaluate.statistics import paired
from smat_fn.report.tables import main_table, markdown

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
REFERENCE = "FT"  # what differences are taken from
ABLATED = "SMAT"
COMPARED = "FT", "SMAT", "ASAM", "MergOPT", "OrthoReg"  # in the analyses, all with Adam
ANALYSES = "experts-curve", "replacement", "landscape"
Facts = Mapping[str, Any]
Name = TypeVar("Name", str, int)
Stage = Literal["tuning", "evaluation"]
Options = tuple[tuple[str, Any], ...]
Place = tuple[int, str, int]  # seed, label, number of the candidate


class Candidate(NamedTuple):
    """A method with its hyperparameters, and how it is trained."""

    method: MethodConfig
    training: Training

    def facts(self) -> dict[str, Any]:
        """The method, its hyperparameters and its training options as JSON values."""
        return {"method": self.method.name, "hyperparameters": settings(self.method), "training": asdict(self.training)}

    def is_stored(self, facts: Facts) -> bool:
        """Whether these are its facts; training options newer than the stored facts count as their defaults."""
        stored = {**facts, "training": asdict(Training(**facts["training"]))}
        return json.loads(json.dumps(self.facts())) == json.loads(json.dumps(stored))


class Protocol(NamedTuple):
    """A study: candidates tuned on some seeds, and evaluated on others."""

    name: str  # of the files of results
    preset: str
    grids: Mapping[str, list[Candidate]]  # by label, as many candidates each
    tuning: tuple[int, ...]  # seeds
    evaluation: tuple[int, ...]
    ablations: Mapping[str, Mapping[str, Any]] = {}  # label -> hyperparameters of `ABLATED` at its choice
    kept: tuple[int, ...] = ()  # evaluation seeds whose experts stay, for the number of experts and the landscape
    options: Options = ()  # of the suite, beside and over those of the preset
    tuned_on: Options = ()  # the same, for tuning alone
    mergers: tuple[MergerConfig, ...] = ()  # none: the paper's five, as in the preset
    others: tuple[MergerConfig, ...] = ()  # scored in the evaluation beside them, in no mean and no choice
    coefs: tuple[float, ...] = ()  # none: the grid of each merger
    widen: bool = False  # the search of coefficients goes on beyond them

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the methods, then those of the ablations."""
        return (*self.grids, *self.ablations)

    def file(self, ending: str) -> Path:
        """A file of results; a name with a folder of its own is one there."""
        return ROOT / RESULTS / f"{self.name}{ending}"

    def trial(self, label: str, candidate: Candidate, seed: int, *, tuning: bool = False) -> Trial:
        """The trial of a candidate."""
        own = {**dict(self.options), **dict(self.tuned_on if tuning else ())}
        mergers = self.mergers if tuning else (*self.mergers, *self.others)
        return Trial(label, self.preset, *candidate, seed, tuple(own.items()), mergers, self.coefs, self.widen)


def replaced(method: MethodConfig, **hyperparameters: Any) -> MethodConfig:
    """The method with other hyperparameters."""
    return replace(method, **hyperparameters)


def grid(
    preset: str, name: str, rates: Iterable[float], strength: str | None = None, values: Iterable[float] = ()
) -> list[Candidate]:
    """Every learning rate with every value of a hyperparameter, in ascending order: ties go to the smaller."""
    own = PRESETS[preset]
    method = own.methods[name]
    methods = [replaced(method, **{strength: value}) for value in values] if strength else [method]
    return [Candidate(m, replace(own.training, lr=lr)) for lr in rates for m in methods]


def run(protocol: Protocol, work: Path, jobs: int, facts: Facts, only: Stage | None = None) -> None:
    """The protocol, or one of its two stages."""
    number = (
        len(protocol.tuning) * sum(map(len, protocol.grids.values())),
        len(protocol.evaluation) * len(protocol.labels),
    )
    say(f"{number[0]} trials of tuning and {number[1]} of evaluation, kept in {work}")
    if only != "evaluation":
        tune(protocol, work, jobs, facts)
    if only != "tuning":
        evaluate(protocol, work, jobs, facts)


def tune(protocol: Protocol, work: Path, jobs: int, facts: Facts) -> dict[str, Candidate]:
    """Dev scores of every candidate and the choice of each method, as <name>_tuning.json; returns the choices."""
    grids, outcomes = protocol.grids, tried(protocol, work / "tuning", jobs, keep=False)
    dev = dev_scores(protocol, outcomes)
    chosen = choices(protocol, dev)
    result = {
        **facts,
        "seeds": protocol.tuning,
        "chosen": {label: candidate.facts() for label, candidate in chosen.items()},
        "dev": {
            label: [{**c.facts(), "dev": s} for c, s in zip(grids[label], scores, strict=True)]
            for label, scores in dev.items()
        },
        "runs": [run_line(outcome) for outcome in outcomes.values()],
    }
    write_text(protocol.file("_tuning.json"), json.dumps(result, indent=1) + "\n")
    for label, candidate in chosen.items():
        say(f"{label}: {settings(candidate.method)}, lr {candidate.training.lr:g}")
    return chosen


def tried(protocol: Protocol, folder: Path, jobs: int, *, keep: bool) -> dict[Place, Outcome]:
    """The outcomes of all candidates at all seeds of the tuning, kept in a folder."""
    grids = protocol.grids
    places = [(seed, label, i) for seed in protocol.tuning for label in grids for i in range(len(grids[label]))]
    trials = [protocol.trial(label, grids[label][i], seed, tuning=True) for seed, label, i in places]
    running = run_trials(trials, folder, jobs=jobs, report=say, keep=lambda trial: keep)
    found = {trial.folder(folder): outcome for trial, outcome in running}
    return {place: found[trial.folder(folder)] for place, trial in zip(places, trials, strict=True)}


def dev_scores(protocol: Protocol, outcomes: Mapping[Place, Outcome]) -> dict[str, list[list[float]]]:
    """The five-merger mean on dev, by label a list for each candidate, by seed."""
    return {
        label: [[outcomes[seed, label, i]["five"] for seed in protocol.tuning] for i in range(len(candidates))]
        for label, candidates in protocol.grids.items()
    }


def choices(protocol: Protocol, dev: Mapping[str, list[list[float]]]) -> dict[str, Candidate]:
    """The candidate of every label that dev chooses."""
    return {label: protocol.grids[label][choose(scores)] for label, scores in dev.items()}


def choose(dev: list[list[float]]) -> int:
    """The place of the largest mean over seeds, the first of equal ones."""
    return merge.choose(range(len(dev)), lambda place: fmean(dev[place])).best


def frozen(protocol: Protocol) -> dict[str, Candidate]:
    """The chosen candidates of the stored tuning and the ablations. Raises: ValueError where nothing was chosen."""
    file = protocol.file("_tuning.json")
    if not file.exists():
        raise ValueError(f"{file} is not there: run the tuning first")
    chosen = json.loads(file.read_text(encoding="utf-8"))["chosen"]
    found = {}
    for label, candidates in protocol.grids.items():
        same = [c for c in candidates if label in chosen and c.is_stored(chosen[label])]
        if not same:
            raise ValueError(f"{file}: the choice of {label} is not in its grid: run the tuning again")
        found[label] = same[0]
    if not protocol.ablations:
        return found
    method, training = found[ABLATED]
    return found | {label: Candidate(replaced(method, **off), training) for label, off in protocol.ablations.items()}


def evaluate(
    protocol: Protocol, work: Path, jobs: int, facts: Facts, candidates: Mapping[str, Candidate] | None = None
) -> None:
    """Test scores at the given or frozen choices; a summary after every seed that is complete."""
    candidates = frozen(protocol) if candidates is None else candidates
    trials = [
        protocol.trial(label, candidates[label], seed) for seed in protocol.evaluation for label in protocol.labels
    ]
    running = run_trials(
        trials, work / "evaluation", jobs=jobs, report=say, test=True, keep=lambda trial: trial.seed in protocol.kept
    )
    for outcomes in complete_seeds(protocol.evaluation, protocol.labels, ((t.seed, t.label, o) for t, o in running)):
        publish(protocol, outcomes, facts)


def complete_seeds(
    seeds: Sequence[int], names: Sequence[Name], running: Iterable[tuple[int, Name, Outcome]]
) -> Iterator[dict[tuple[int, Name], Outcome]]:
    """Outcomes of all seeds that have every name, by (seed, name) in order, again after each further seed."""
    found: dict[tuple[int, Name], Outcome] = {}
    for seed, name, outcome in running:
        found[seed, name] = outcome
        if all((seed, own) in found for own in names):
            complete = [s for s in seeds if all((s, own) in found for own in names)]
            yield {(s, own): found[s, own] for s in complete for own in names}


def publish(protocol: Protocol, outcomes: Mapping[tuple[int, str], Outcome], facts: Facts) -> None:
    """Rows, runs and summary of complete seeds in benchmarks/results, the table on the terminal."""
    seeds = tuple(dict.fromkeys(seed for seed, _ in outcomes))
    rows = [row for label in protocol.labels for seed in seeds for row in rows_of(outcomes[seed, label])]
    runs = [run_line(outcomes[seed, label]) for label in protocol.labels for seed in seeds]
    write_results(protocol.file(".jsonl"), rows)
    write_text(protocol.file("_runs.jsonl"), "".join(json.dumps(line) + "\n" for line in runs))
    found = summary(protocol.labels, rows, [config.name.upper() for config in protocol.mergers])
    result = {**facts, "seeds": seeds, "planned_seeds": protocol.evaluation, **found}
    write_text(protocol.file(".json"), json.dumps(result, indent=1) + "\n")
    say(f"complete seeds: {', '.join(map(str, seeds))}\n{markdown(main_table(rows))}{text(result['paired'])}")


def summary(labels: tuple[str, ...], rows: list[Result], mergers: Sequence[str] = ()) -> dict[str, Any]:
    """Scores per seed, drop and paired difference from the reference, by method.

    Differences and drop are of Avg, the mean of the paper's five mergers, or of All, that of the ``mergers`` given;
    there are none without the reference.
    """
    cells = main_table(rows, methods=labels).cells
    test = {label: {column: list(cell.scores) for column, cell in line.items()} for label, line in cells.items()}
    mean = "All" if mergers else "Avg"
    for line in test.values():
        if mergers:
            line[mean] = [fmean(scores) for scores in zip(*(line[name] for name in mergers), strict=True)]
        line["Drop"] = [expert - merged for expert, merged in zip(line["Expert"], line[mean], strict=True)]
    others = {label: line for label, line in test.items() if label != REFERENCE} if REFERENCE in test else {}
    return {
        "test": test,
        "paired": {label: paired(test[REFERENCE][mean], line[mean]) for label, line in others.items()},
    }


def text(differences: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a method: its difference from the reference."""
    lines = []
    for label, p in differences.items():
        spread = f", sd {p['sd']:.2f}, 95 % {p['interval'][0]:+.2f} to {p['interval'][1]:+.2f}" if "sd" in p else ""
        lines.append(f"{label} - {REFERENCE}: {p['mean']:+.2f}{spread}\n")
    return "".join(lines)


def run_line(outcome: Outcome) -> dict[str, Any]:
    """Settings and cost of a trial."""
    facts = outcome["trial"]
    kept = {name: facts[name] for name in ("method", "hyperparameters", "training", "seed")}
    costs = ["five", "coefs", "training_seconds", "seconds", "peak_bytes"]
    costs += [name for name in ("geometry",) if name in outcome]  # older trials have none
    return {"label": outcome["label"], **kept, **{name: outcome[name] for name in costs}}


def say(line: str) -> None:
    """Print at once, also into a file."""
    print(line, flush=True)


def write_report(protocol: Protocol, work: Path, out: Path, analyses: Sequence[str] = ANALYSES) -> None:
    """The analyses anew, kept beside the trials, and the report."""
    candidates, folder = frozen(protocol), work / "analyses"
    experts = {
        label: [protocol.trial(label, candidates[label], seed).folder(work / "evaluation") for seed in protocol.kept]
        for label in COMPARED
    }
    others = [path for label in COMPARED[1:] for path in experts[label]]
    first = [experts[label][0] for label in COMPARED[1:]]
    runs: dict[str, Sequence[str | Path]] = {
        "experts-curve": [*experts["FT"], *others],
        "replacement": ["--ft", *experts["FT"], "--other", *others],
        "landscape": ["--ft", experts["FT"][0], "--methods", *first],
    }
    for name in analyses:
        run_eval(name, *runs[name], "--out", folder / name)
    run_eval("report", protocol.file(".jsonl"), folder, "--out", out, "--title", f"{protocol.preset}: all methods")


def run_eval(*words: str | Path) -> None:
    """A command of eval.py; its folder --out is made anew."""
    out = Path(words[list(words).index("--out") + 1])
    shutil.rmtree(out, ignore_errors=True)
    command: Sequence[str] = [sys.executable, str(ROOT / "eval.py"), *map(str, words)]
    say(f"eval.py {words[0]}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
