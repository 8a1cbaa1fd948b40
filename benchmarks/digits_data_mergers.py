"""The mergers that need data, on the experts of digits-mergers: Fisher, RegMean, AdaMerging and their variants.

Experts, seeds and the choice of coefficients on dev are those of `digits_mergers`; the experts are trained anew, since
statistics need their weights. The results stand beside the others, in one table and one heat map.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tyro.conf import Positional

from smat_fn import machine
from smat_fn.checkpoint import write_text
from smat_fn.evaluate import Result, write_results
from smat_fn.evaluate.results import EXPERT

from . import digits_mergers
from .digits_onepass import GRIDS, STUDY
from .methods import Facts, Protocol, run_line, say
from .study.by_data import CONFIGS, SEES, adapt_trial, is_adapted, run_by_data
from .study.grids import stored_choices
from .study.trials import Outcome, rows_of, run_trials

FIRST = "FT", "SMAT", "SMAT climbing", "MSAM", "ASAM"  # trained before the others, should a run be stopped


def main(folder: Positional[Path], *, jobs: int = 1, seeds: int = 3) -> None:
    """Train, merge, score, and draw the heat map of all mergers; AdaMerging, which takes longest, comes last.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        jobs: processes of one thread each.
        seeds: of the evaluation of digits-onepass, from the first.
    """
    choices = stored_choices(STUDY.protocol, GRIDS)
    own = STUDY.protocol._replace(
        name="digits_data_mergers", grids=choices, evaluation=STUDY.protocol.evaluation[:seeds], mergers=CONFIGS
    )
    order = sorted(choices, key=lambda label: label not in FIRST)
    trials = [own.trial(label, choices[label][0], seed) for label in order for seed in own.evaluation]
    facts = machine.describe("python -m benchmarks digits-data-mergers FOLDER")
    found: dict[tuple[str, int], Outcome] = {}
    running = run_trials(trials, folder, jobs=jobs, report=say, test=True, run_one=run_by_data)
    for trial, outcome in running:
        found[trial.label, trial.seed] = outcome
        publish(own, found, facts)
    for trial in trials:
        outcome = found[trial.label, trial.seed]
        if not is_adapted(outcome):
            found[trial.label, trial.seed] = adapt_trial(trial, folder, outcome, keep=False)
            say(f"AdaMerging: {trial}")
            publish(own, found, facts)


def publish(protocol: Protocol, found: Mapping[tuple[str, int], Outcome], facts: Facts) -> None:
    """`write` of the methods whose seeds are all there, in the protocol's order, and the heat map."""
    seeds = protocol.evaluation
    labels = [label for label in protocol.labels if all((label, seed) in found for seed in seeds)]
    if labels:
        write(protocol, [found[label, seed] for label in labels for seed in seeds], seeds, facts, SEES)
        digits_mergers.draw()


def write(
    protocol: Protocol, outcomes: Sequence[Outcome], seeds: Sequence[int], facts: Facts, sees: Mapping[str, str]
) -> None:
    """Rows, runs and scores of trials, and what each merger sees."""
    rows = [row for outcome in outcomes for row in rows_of(outcome)]
    write_results(protocol.file(".jsonl"), rows)
    lines = [{**run_line(outcome), "facts": outcome["facts"]} for outcome in outcomes]
    write_text(protocol.file("_runs.jsonl"), "".join(json.dumps(line) + "\n" for line in lines))
    planned = protocol.evaluation
    result = {**facts, "seeds": seeds, "planned_seeds": planned, "sees": sees, "test": scores(rows, seeds)}
    write_text(protocol.file(".json"), json.dumps(result, indent=1) + "\n")


def scores(rows: Sequence[Result], seeds: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """By method and merger, Expert first, the mean over tasks of every seed, of mergers that have them all."""
    found: dict[str, Any] = {}
    for row in rows:
        column = "Expert" if row.model.startswith(EXPERT) else row.model
        found.setdefault(row.method, {}).setdefault(column, {}).setdefault(row.seed, []).append(row.score)
    return {
        label: {
            column: [fmean(by_seed[seed]) for seed in seeds]
            for column, by_seed in line.items()
            if all(seed in by_seed for seed in seeds)
        }
        for label, line in found.items()
    }
