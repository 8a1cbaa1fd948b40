"""All methods on a pretrained text encoder by docs/protocols/minilm.md: tuning on dev, then test scores on fresh seeds.

``--steps``, ``--rows`` and ``--tasks`` make a trial run of the command: on one seed outside the protocol, with two
candidates a method, and with its results in FOLDER.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from . import timing
from .methods import Protocol, Stage, grid, run, write_report

RATES = (2e-4, 4e-4)
TRIAL_SEED = 10

PROTOCOL = Protocol(
    name="minilm_methods",
    preset="minilm",
    grids={
        "FT": grid("minilm", "ft", (1e-4, *RATES, 8e-4)),
        "SMAT": grid("minilm", "smat", RATES, "sigma", (0.005, 0.01)),
        "ASAM": grid("minilm", "asam", RATES, "rho", (0.25, 0.5)),
        "MergOPT": grid("minilm", "mergopt", RATES, "b", (1e-3, 2e-3)),
        "OrthoReg": grid("minilm", "orthoreg", RATES, "lambda_reg", (0.1, 0.2)),
    },
    tuning=(61,),
    evaluation=(71, 72, 73, 74, 75),
    kept=(71, 72),
    tuned_on=(("tasks", ("trec", "banking77", "clinc150")),),
)


def main(
    folder: Positional[Path],
    *,
    model: str,
    data: str,
    jobs: int = 2,
    only: Stage | None = None,
    report: Path | None = None,
    steps: int | None = None,
    rows: int | None = None,
    tasks: tuple[str, ...] = (),
) -> None:
    """Run the protocol.

    Args:
        folder: keeps the trials; a stopped run resumes from it.
        model: folder of all-MiniLM-L6-v2, or its name on the hub.
        data: folder of TASK/{train,dev,test}.json, or see suite short_text.
        jobs: processes of one thread each.
        only: one of its two stages.
        report: where to write the curve over the number of experts and a page of all results.
        steps: a trial run: steps of an expert.
        rows: a trial run: rows of a split.
        tasks: a trial run: some of the tasks.
    """
    if report and only == "tuning":
        sys.exit("--report is of the evaluation: leave out --only tuning")
    tried = {name: value for name, value in {"rows": rows, "tasks": tasks}.items() if value}
    protocol = PROTOCOL._replace(options=(*_absolute(model, data), *tried.items()))
    facts = timing.describe("python -m benchmarks minilm-methods FOLDER --model MODEL --data DATA")
    if steps is not None or tried:
        protocol = trial_run(protocol, folder, steps)
        facts = {**facts, "trial_run": {"steps": steps, **tried}}
    run(protocol, folder, jobs, facts, only)
    if report:
        write_report(protocol, folder, report, ("experts-curve",))


def trial_run(protocol: Protocol, folder: Path, steps: int | None) -> Protocol:
    """The protocol on one seed of no stage, with two candidates a method, its results in the folder."""
    few = {
        label: [c._replace(training=replace(c.training, steps=steps or c.training.steps)) for c in candidates[:2]]
        for label, candidates in protocol.grids.items()
    }
    name, only = str((folder / protocol.name).resolve()), (TRIAL_SEED,)
    return protocol._replace(name=name, grids=few, tuning=only, evaluation=only, kept=only, tuned_on=())


def _absolute(model: str, data: str) -> tuple[tuple[str, Any], ...]:
    # a trial is named by its options: the same files under another name are the same trial
    from smat_fn.suites.short_text import resolve_data
    from smat_fn.suites.sources import absolute

    found = resolve_data(data)
    return ("model", absolute(model)), ("data", found if isinstance(found, str) else dict(found))
