"""The mergers that need data on the text encoder's experts by FT and SMAT, at the choices of `studies --name text`.

Experts are trained anew, since statistics need their weights; seeds are the first ones of that evaluation. The results
stand in one table with the mergers that need no data.
"""

from pathlib import Path

from tyro.conf import Positional

from smat_fn import machine

from .digits_data_mergers import write
from .digits_mergers import heat_map
from .methods import say
from .readme import ROOT, stored, without_means
from .studies import study
from .study.by_data import CONFIGS, adapt_trial, is_adapted, run_by_data
from .study.by_data import SEES as SEES_ON_DIGITS
from .study.grids import stored_choices
from .study.trial import Trial
from .study.trials import Outcome, run_trials

FIGURE = ROOT / "docs/results/text_mergers.png"
DEV = "200 dev rows a task, no labels"
SEES = {name: DEV if name.startswith("ADAMERGING") else rows for name, rows in SEES_ON_DIGITS.items()}


def main(folder: Positional[Path], *, model: str, data: str, jobs: int = 1, seeds: int = 3) -> None:
    """Train, merge, score; a seed is published when all its trials are there.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        model: folder of the text encoder (`benchmarks backbones`).
        data: folder of the tasks' rows.
        jobs: processes of one thread each.
        seeds: of the evaluation of the study, from the first.
    """
    own = study("text", model, data, {})
    choices = {label: found for label, found in stored_choices(*own).items() if label in ("FT", "SMAT")}
    planned = own.protocol.evaluation[:seeds]
    protocol = own.protocol._replace(
        name="text_data_mergers", grids=choices, evaluation=planned, mergers=CONFIGS, others=()
    )
    trials = [protocol.trial(label, choices[label][0], seed) for seed in planned for label in choices]
    facts = machine.describe("python -m benchmarks text-data-mergers FOLDER --model MODEL --data DATA")
    found: dict[tuple[str, int], Outcome] = {}
    for trial, outcome in run_trials(trials, folder, jobs=jobs, report=say, test=True, run_one=run_and_adapt):
        found[trial.label, trial.seed] = outcome
        whole = tuple(seed for seed in planned if all((label, seed) in found for label in choices))
        if whole:
            write(protocol, [found[label, seed] for label in choices for seed in whole], whole, facts, SEES)
            draw()


def draw() -> None:
    """The heat map of the stored scores of the study's experts, by mergers without data and with."""
    whole, found = stored("text_onepass"), stored("text_data_mergers")
    lines = without_means(whole["test"])
    for label, line in found["test"].items():
        lines[label] |= {name: scores for name, scores in line.items() if name != "Expert"}
    sees = {name: f"{rows}; {len(found['seeds'])} seeds" for name, rows in found["sees"].items()}
    heat_map(FIGURE, whole["seeds"], lines, sees)


def run_and_adapt(trial: Trial, work: Path, test: bool, keep: bool) -> Outcome:
    """`run_by_data`, and AdaMerging in the same process."""
    found = run_by_data(trial, work, test, True)
    return found if is_adapted(found) else adapt_trial(trial, work, found, keep=keep)
