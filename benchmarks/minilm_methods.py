"""All methods on a pretrained text encoder by docs/protocols/minilm.md: tuning on dev, then test scores on fresh seeds.

``--report OUT`` writes, after them, the curve over the number of experts and a page of all into OUT.
``--steps``, ``--rows`` and ``--tasks`` make a trial run of the command: on one seed outside the protocol, with two
candidates a method, and with its results in FOLDER.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from smat_fn import machine

from .methods import Protocol, grid, run, write_report

COMMAND = "python -m benchmarks minilm-methods"
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


def main(arguments: list[str]) -> None:
    """Run the protocol, or one of its two stages, or try the command."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=Path, help="keeps the trials; a stopped run resumes from it")
    parser.add_argument("--model", required=True, help="folder of all-MiniLM-L6-v2, or its name on the hub")
    parser.add_argument("--data", required=True, help="folder of TASK/{train,dev,test}.json, or see suite short_text")
    parser.add_argument("--jobs", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--only", choices=("tuning", "evaluation"))
    parser.add_argument("--report", type=Path, metavar="OUT", help="where to write analyses and a page of all results")
    parser.add_argument("--steps", type=int, help="a trial run: steps of an expert")
    parser.add_argument("--rows", type=int, help="a trial run: rows of a split")
    parser.add_argument("--tasks", nargs="+", help="a trial run: some of the tasks")
    asked = parser.parse_args(arguments)
    if asked.report and asked.only == "tuning":
        parser.error("--report is of the evaluation: leave out --only tuning")
    tried = {name: value for name in ("rows", "tasks") if (value := getattr(asked, name)) is not None}
    protocol = PROTOCOL._replace(options=(*_absolute(asked.model, asked.data), *tried.items()))
    facts = machine.describe(f"{COMMAND} FOLDER --model MODEL --data DATA")
    if asked.steps is not None or tried:
        protocol = trial_run(protocol, asked.folder, asked.steps)
        facts = {**facts, "trial_run": {"steps": asked.steps, **tried}}
    run(protocol, asked.folder, asked.jobs, facts, asked.only)
    if asked.report:
        write_report(protocol, asked.folder, asked.report, ("experts-curve",))


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
