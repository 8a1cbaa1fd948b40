"""Trials whose experts are merged by all mergers that need data, each from rows of its own; never from test."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from smat_fn import checkpoint, merge
from smat_fn.config import Fisher, RegMean
from smat_fn.evaluate import Result, Scorer, score_model
from smat_fn.evaluate.results import EXPERT
from smat_fn.merge.parts.inputs import Leaves
from smat_fn.suites import Suite

from .trial import Trial
from .trials import OUTCOME, Outcome

CONFIGS = Fisher(), RegMean()  # RegMean++ and AdaMerging have no options class
TRAINING, STEPS, DEV = "256 training rows a task", "every training step", "250 dev rows a task, no labels"
SEES = {  # what each looks at, beside the labelled dev rows that choose a coefficient
    "FISHER": TRAINING,
    "FISHER_ADAM": STEPS,
    "REG_MEAN": TRAINING,
    "REG_MEAN_PLUS": TRAINING,
    "ADAMERGING_TASK": DEV,
    "ADAMERGING_LAYER": DEV,
}


class Model(NamedTuple):
    """A merged model."""

    params: Leaves
    dev: Mapping[str, float]  # score by task
    coef: float | None  # chosen on dev; None: by the merger itself
    facts: Mapping[str, Any] = {}


def run_by_data(trial: Trial, work: Path, test: bool, keep: bool) -> Outcome:
    """Train the experts, merge them by all of `SEES` but AdaMerging, score all: in place of `run_trial`.

    Under Muon Adam holds moments of some weights only, so there is no FISHER_ADAM. Experts stay for `adapt_trial`
    if ``keep`` is set.
    """
    from smat_fn.scripts.merge.experts.inputs import load_inputs
    from smat_fn.scripts.merge.settings import RegMeanPlus
    from smat_fn.scripts.merge.subcommands.by_data import regress
    from smat_fn.scripts.merge.subcommands.statistics import statistics_of_run
    from smat_fn.scripts.run_folder import find_inputs
    from smat_fn.scripts.train.options import RunOptions
    from smat_fn.scripts.train.training import train_run

    folder, started = trial.folder(work), time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    suite, moments = trial.load(), trial.training.optimizer != "muon"
    run = RunOptions(folder, suite.tasks, trial.seed, label=trial.label, keep_moments=moments)
    places = train_run(suite, trial.method, trial.training, run)
    seconds = sum(checkpoint.load_manifest(path)["seconds"] for path in places)
    for _ in statistics_of_run(suite, places, kinds=("fisher", "gram"), seed=0):
        pass
    models = searched(trial, folder, moments=moments)
    for _ in regress(RegMeanPlus(run=folder, out=folder / "merged")):
        pass
    models["REG_MEAN_PLUS"] = stretched(suite, checkpoint.load_leaves(folder / "merged" / "reg_mean_plus")[0])
    experts = {EXPERT + task: params for task, params in load_inputs(*find_inputs(folder)).experts.items()}
    found: Outcome = {
        "label": trial.label,
        "trial": trial.facts(),
        "dev": {},
        "coefs": {},
        "facts": {},
        "test": [asdict(row) for row in tested(trial, suite, experts, {})] if test else None,
        "training_seconds": round(seconds, 3),
        "seconds": 0.0,
        "peak_bytes": None,
    }
    return add_models(found, folder, trial, suite, models, time.perf_counter() - started, keep=keep)


def adapt_trial(trial: Trial, work: Path, found: Outcome, keep: bool) -> Outcome:
    """The outcome of a trial whose experts were kept, with AdaMerging by task and by layer, which takes longest."""
    from smat_fn.scripts.merge.settings import AdaMerging
    from smat_fn.scripts.merge.subcommands.by_data import adapt

    folder, started, models = trial.folder(work), time.perf_counter(), dict[str, Model]()
    for kind in ("task", "layer"):
        asked = AdaMerging(run=folder, out=folder / kind, layer_wise=kind == "layer", overwrite=True)
        for _ in adapt(asked):
            pass
        params, manifest = checkpoint.load_leaves(folder / kind / "adamerging")
        means = {task: fmean(own.values()) for task, own in manifest["coefs"].items()}
        facts = {"coefs": means, "entropy": manifest["entropy"]}
        models[f"ADAMERGING_{kind.upper()}"] = Model(params, manifest["dev"], None, facts)
    return add_models(found, folder, trial, trial.load(), models, time.perf_counter() - started, keep=keep)


def is_adapted(found: Outcome) -> bool:
    """Whether `adapt_trial` has been here."""
    return "ADAMERGING_LAYER" in found["dev"]


def add_models(
    found: Outcome, folder: Path, trial: Trial, suite: Suite, models: Mapping[str, Model], seconds: float, *, keep: bool
) -> Outcome:
    """Write the outcome with merged models, their test scores too where it has those of experts."""
    coefs = {name: model.coef for name, model in models.items() if model.coef is not None}
    dev = found["dev"] | {name: dict(model.dev) for name, model in models.items()}
    rows = found["test"]
    if rows is not None:
        params = {name: model.params for name, model in models.items()}
        rows = rows + [asdict(row) for row in tested(trial, suite, params, coefs)]
    found = found | {
        "dev": dev,
        "coefs": found["coefs"] | coefs,
        "facts": found["facts"] | {name: dict(model.facts) for name, model in models.items() if model.facts},
        "five": fmean(fmean(scores.values()) for scores in dev.values()),
        "test": rows,
        "seconds": round(found["seconds"] + seconds, 3),
    }
    checkpoint.write_text(folder / OUTCOME, json.dumps(found, indent=1) + "\n")
    for file in () if keep else folder.rglob("*.safetensors"):  # statistics too
        file.unlink()
    return found


def tested(trial: Trial, suite: Suite, models: Mapping[str, Leaves], coefs: Mapping[str, float]) -> list[Result]:
    """Test scores."""
    scorer, rows = Scorer(suite), list[Result]()
    for name, params in models.items():
        tasks = [name.removeprefix(EXPERT)] if name.startswith(EXPERT) else suite.tasks
        coef = coefs.get(name)
        rows += score_model(
            scorer, params, "test", method=trial.label, model=name, seed=trial.seed, tasks=tasks, coef=coef
        )
    return rows


def searched(trial: Trial, folder: Path, *, moments: bool) -> dict[str, Model]:
    """Fisher averaging and RegMean from statistics beside the experts, the coefficient chosen on dev."""
    from smat_fn.scripts.merge.in_memory import Request, merge_run
    from smat_fn.scripts.run_folder import find_inputs

    found, inputs = dict[str, Model](), find_inputs(folder)
    ways = {"merged": CONFIGS, **({"adam": (Fisher(weights_from="adam"),)} if moments else {})}
    for name, configs in ways.items():
        made = merge_run(Request(configs, *inputs, out=folder / name, search=True, widen=trial.widen, seed=0))
        ending = "" if name == "merged" else f"_{name}"
        for path, own in made.items():
            found[f"{path.name}{ending}".upper()] = Model(own.params, own.dev, own.coef, {"edge": own.edge})
    return found


def stretched(suite: Suite, params: Leaves) -> Model:
    """θ₀ + γ (θ − θ₀) of a merged model θ, γ chosen on dev as that of other mergers."""
    base: Leaves = suite.base
    vector = {path: params[path] - leaf for path, leaf in base.items()}

    @cache
    def dev(coef: float) -> dict[str, float]:
        merged = merge.apply_vector(base, vector, coef=coef)
        return {task: suite.score(merged, task, "dev") for task in suite.tasks}

    found, edge = merge.choose_coef(lambda coef: fmean(dev(coef).values()), RegMean.grid, widen=True)
    best = found.best
    return Model(merge.apply_vector(base, vector, coef=best), dev(best), best, {"edge": edge})
