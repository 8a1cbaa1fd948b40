"""All methods on digits by docs/protocols/digits_methods.md: tuning on dev, then test scores on fresh seeds.

``python -m benchmarks digits-methods FOLDER`` keeps trials there, so that a stopped run goes on; it says in advance how
long it takes. The summary covers the seeds that are complete and is written again after each.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from smat_fn import merge
from smat_fn.checkpoint import write_text
from smat_fn.config import DIGITS, MethodConfig, Training, settings
from smat_fn.evaluate import Result, main_table, markdown, write_results
from smat_fn.pipeline.study import paired
from smat_fn.pipeline.training import mean
from smat_fn.pipeline.trials import Outcome, Trial, rows_of, run_trials

from . import machine

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
COMMAND = "python -m benchmarks digits-methods"
TUNING, EVALUATION = (31, 32, 33), tuple(range(41, 51))
KEPT = EVALUATION[:2]  # seeds whose experts stay, for the number of experts and the landscape


class Candidate(NamedTuple):
    """A method with its strengths, and how it is trained."""

    method: MethodConfig
    training: Training

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "method": self.method.name,
            "hyperparameters": settings(self.method),
            "training": asdict(self.training),
        }


def replaced(method: MethodConfig, **strengths: Any) -> MethodConfig:
    """The method with other strengths."""
    return replace(method, **strengths)


def grid(
    name: str, rates: Iterable[float], strength: str | None = None, values: Iterable[float] = ()
) -> list[Candidate]:
    """Every rate with every value of a strength, in ascending order: the earlier of equal ones is the smaller."""
    method = DIGITS.methods[name]
    methods = [replaced(method, **{strength: value}) for value in values] if strength else [method]
    return [Candidate(m, replace(DIGITS.training, lr=lr)) for lr in rates for m in methods]


def muon_grid(name: str) -> list[Candidate]:
    """Three rates of the matrices by two of the other leaves."""
    method = DIGITS.methods[name]
    return [
        Candidate(method, replace(DIGITS.training, optimizer="muon", muon_lr=muon_lr, lr=lr))
        for muon_lr in (1e-3, 2e-3, 4e-3)
        for lr in (2.5e-4, 5e-4)
    ]


GRIDS: Mapping[str, list[Candidate]] = {
    "FT": grid("ft", (3.125e-5, 6.25e-5, 1.25e-4, 2.5e-4, 5e-4, 1e-3)),
    "SMAT": grid("smat", DIGITS.lr_grid, "sigma", (0.01, 0.02)),
    "ASAM": grid("asam", DIGITS.lr_grid, "rho", (0.25, 0.5)),
    "MergOPT": grid("mergopt", DIGITS.lr_grid, "b", (2e-3, 4e-3)),
    "OrthoReg": grid("orthoreg", DIGITS.lr_grid, "lambda_reg", (0.1, 0.2)),
    "FT-Muon": muon_grid("ft"),
    "SMAT-Muon": muon_grid("smat"),
}
ABLATIONS = {
    "SMAT without Scale": {"alpha_min": 1.0},
    "SMAT without Mask": {"drop_prob": 0.0},
    "SMAT without Perturb": {"sigma": 0.0},
}
LABELS = (*GRIDS, *ABLATIONS)


def main(arguments: list[str]) -> None:
    """Run the protocol, or one of its two stages."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=Path, help="keeps the trials; a stopped run goes on from it")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--only", choices=("tuning", "evaluation"))
    asked = parser.parse_args(arguments)
    facts = machine.describe(f"{COMMAND} FOLDER")
    number = len(TUNING) * sum(map(len, GRIDS.values())), len(EVALUATION) * len(LABELS)
    say(f"{number[0]} trials of tuning and {number[1]} of evaluation, 4 experts each, kept in {asked.folder}")
    if asked.only != "evaluation":
        tune(asked.folder, asked.jobs, facts)
    if asked.only != "tuning":
        evaluate(asked.folder, asked.jobs, facts)


def tune(work: Path, jobs: int, facts: Mapping[str, Any]) -> None:
    """Dev scores of every candidate and the choice of each method, as digits_methods_tuning.json."""
    places = [(seed, label, i) for seed in TUNING for label in GRIDS for i in range(len(GRIDS[label]))]
    trials = {place: tuning_trial(*place) for place in places}
    running = run_trials(list(trials.values()), work / "tuning", jobs=jobs, report=say, keep=lambda trial: False)
    found = {trial.folder(work): outcome for trial, outcome in running}
    five = {place: found[trial.folder(work)]["five"] for place, trial in trials.items()}
    dev = {label: [[five[seed, label, i] for seed in TUNING] for i in range(len(GRIDS[label]))] for label in GRIDS}
    result = {
        **facts,
        "seeds": TUNING,
        "chosen": {label: GRIDS[label][choose(scores)].facts() for label, scores in dev.items()},
        "dev": {
            label: [{**c.facts(), "dev": s} for c, s in zip(GRIDS[label], scores, strict=True)]
            for label, scores in dev.items()
        },
        "runs": [run_line(found[trial.folder(work)]) for trial in trials.values()],
    }
    write_text(ROOT / RESULTS / "digits_methods_tuning.json", json.dumps(result, indent=1) + "\n")
    for label, candidate in result["chosen"].items():
        say(f"{label}: {candidate['hyperparameters']}, lr {candidate['training']['lr']:g}")


def tuning_trial(seed: int, label: str, place: int) -> Trial:
    """The trial of a candidate by its place in the grid."""
    return Trial(label, "digits", *GRIDS[label][place], seed)


def choose(dev: list[list[float]]) -> int:
    """The place of the largest mean over seeds, the first of equal ones."""
    return merge.choose(range(len(dev)), lambda place: mean(dev[place])).best


def frozen() -> dict[str, Candidate]:
    """The chosen candidates of the stored tuning and SMAT's ablations. Raises: ValueError where nothing was chosen."""
    file = ROOT / RESULTS / "digits_methods_tuning.json"
    if not file.exists():
        raise ValueError(f"{file} is not there: run the tuning first")
    chosen = json.loads(file.read_text(encoding="utf-8"))["chosen"]
    found = {}
    for label, candidates in GRIDS.items():
        same = [c for c in candidates if c.facts() == chosen.get(label)]
        if not same:
            raise ValueError(f"{file}: the choice of {label} is not in its grid: run the tuning again")
        found[label] = same[0]
    method, training = found["SMAT"]
    return found | {label: Candidate(replaced(method, **off), training) for label, off in ABLATIONS.items()}


def evaluate(work: Path, jobs: int, facts: Mapping[str, Any]) -> None:
    """Test scores at the frozen choices; a summary after every seed that is complete."""
    candidates = frozen()
    trials = [Trial(label, "digits", *candidates[label], seed) for seed in EVALUATION for label in LABELS]
    running = run_trials(
        trials, work / "evaluation", jobs=jobs, report=say, test=True, keep=lambda trial: trial.seed in KEPT
    )
    for outcomes in complete_seeds(running):
        publish(outcomes, facts)


def complete_seeds(running: Iterable[tuple[Trial, Outcome]]) -> Iterator[dict[tuple[int, str], Outcome]]:
    """Outcomes of all seeds that have every label, by (seed, label) in order, again after each further seed."""
    found: dict[tuple[int, str], Outcome] = {}
    for trial, outcome in running:
        found[trial.seed, trial.label] = outcome
        if all((trial.seed, label) in found for label in LABELS):
            seeds = [s for s in EVALUATION if all((s, label) in found for label in LABELS)]
            yield {(seed, label): found[seed, label] for seed in seeds for label in LABELS}


def publish(outcomes: Mapping[tuple[int, str], Outcome], facts: Mapping[str, Any]) -> None:
    """Rows, runs and summary of complete seeds in benchmarks/results, the table on the terminal."""
    seeds = tuple(dict.fromkeys(seed for seed, _ in outcomes))
    rows = [row for label in LABELS for seed in seeds for row in rows_of(outcomes[seed, label])]
    runs = [run_line(outcomes[seed, label]) for label in LABELS for seed in seeds]
    write_results(ROOT / RESULTS / "digits_methods.jsonl", rows)
    write_text(ROOT / RESULTS / "digits_methods_runs.jsonl", "".join(json.dumps(line) + "\n" for line in runs))
    result = {**facts, "seeds": seeds, "planned_seeds": EVALUATION, **summary(rows)}
    write_text(ROOT / RESULTS / "digits_methods.json", json.dumps(result, indent=1) + "\n")
    say(f"complete seeds: {', '.join(map(str, seeds))}\n{markdown(main_table(rows))}{text(result['paired'])}")


def summary(rows: list[Result]) -> dict[str, Any]:
    """By method: scores per seed of every column, the drop, and the paired difference of Avg from FT's."""
    cells = main_table(rows, methods=LABELS).cells
    test = {label: {column: list(cell.scores) for column, cell in line.items()} for label, line in cells.items()}
    for line in test.values():
        line["Drop"] = [expert - five for expert, five in zip(line["Expert"], line["Avg"], strict=True)]
    differences = {label: paired(test["FT"]["Avg"], line["Avg"]) for label, line in test.items() if label != "FT"}
    return {"test": test, "paired": differences}


def text(differences: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a method: its difference from FT."""
    lines = []
    for label, p in differences.items():
        spread = f", sd {p['sd']:.2f}, 95 % {p['interval'][0]:+.2f} to {p['interval'][1]:+.2f}" if "sd" in p else ""
        lines.append(f"{label} - FT: {p['mean']:+.2f}{spread}\n")
    return "".join(lines)


def run_line(outcome: Outcome) -> dict[str, Any]:
    """What was run and what it cost."""
    facts, costs = outcome["trial"], ("five", "coefs", "training_seconds", "seconds", "peak_bytes")
    kept = {name: facts[name] for name in ("method", "hyperparameters", "training", "seed")}
    return {"label": outcome["label"], **kept, **{name: outcome[name] for name in costs}}


def say(line: str) -> None:
    """Print at once, also into a file."""
    print(line, flush=True)
