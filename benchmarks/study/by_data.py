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
from smat_fn.evaluate import score_models
from smat_fn.evaluate.results import EXPERT
from smat_fn.merge.inputs import Leaves
from smat_fn.suites import Suite

from .trial import Trial
from .trials import OUTCOME, Outcome

CONFIGS = Fisher(), RegMean()  # RegMean++ and AdaMerging have no options class
WIDER = 10  # coefficients of RegMean++ beyond its grid, at most, as in a search of the others
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
    """Train the experts, merge them by every merger of `SEES`, score all: in place of `run_trial`.

    Under Muon Adam holds moments of some weights only, so there is no FISHER_ADAM.
    """
    from smat_fn.scripts.merge.inputs import find_inputs, load_inputs
    from smat_fn.scripts.merge.statistics import statistics_of_run
    from smat_fn.scripts.train.options import RunOptions
    from smat_fn.scripts.train.training import train_run

    folder, started = trial.folder(work), time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    suite, moments = trial.load(), trial.training.optimizer != "muon"
    run = RunOptions(folder, suite.tasks, trial.seed, label=trial.label, keep_moments=moments)
    places = train_run(suite, trial.method, trial.training, run)
    seconds = sum(checkpoint.load_manifest(path)["seconds"] for path in places)
    for _ in statistics_of_run(suite, folder, places, kinds=("fisher", "gram"), seed=0):
        pass
    models = {**searched(trial, folder, moments=moments), **looking(suite, folder)}
    every = {EXPERT + task: params for task, params in load_inputs(*find_inputs(folder)).experts.items()}
    every |= {name: model.params for name, model in models.items()}
    coefs = {name: model.coef for name, model in models.items() if model.coef is not None}
    rows = score_models(suite, every, "test", method=trial.label, seed=trial.seed, coefs=coefs) if test else None
    dev = {name: dict(model.dev) for name, model in models.items()}
    found = {
        "label": trial.label,
        "trial": trial.facts(),
        "dev": dev,
        "coefs": coefs,
        "facts": {name: dict(model.facts) for name, model in models.items() if model.facts},
        "five": fmean(fmean(scores.values()) for scores in dev.values()),
        "test": None if rows is None else [asdict(row) for row in rows],
        "training_seconds": round(seconds, 3),
        "seconds": round(time.perf_counter() - started, 3),
        "peak_bytes": None,
    }
    checkpoint.write_text(folder / OUTCOME, json.dumps(found, indent=1) + "\n")
    for file in () if keep else folder.rglob("*.safetensors"):  # statistics too
        file.unlink()
    return found


def searched(trial: Trial, folder: Path, *, moments: bool) -> dict[str, Model]:
    """Fisher averaging and RegMean from statistics beside the experts, the coefficient chosen on dev."""
    from smat_fn.scripts.merge.inputs import find_inputs
    from smat_fn.scripts.merge.merging import merge_run

    found, inputs = dict[str, Model](), find_inputs(folder)
    ways = {"merged": CONFIGS, **({"adam": (Fisher(weights_from="adam"),)} if moments else {})}
    for name, configs in ways.items():
        made = merge_run(configs, *inputs, out=folder / name, search=True, widen=trial.widen, seed=0)
        ending = "" if name == "merged" else f"_{name}"
        for path, own in made.items():
            found[f"{path.name}{ending}".upper()] = Model(own.params, own.dev, own.coef, {"edge": own.edge})
    return found


def looking(suite: Suite, folder: Path) -> dict[str, Model]:
    """RegMean++ and AdaMerging, which look at rows while they merge."""
    from smat_fn.scripts.merge.by_data import adapt, regress
    from smat_fn.scripts.merge.commands import AdaMerging, RegMeanPlus

    found = dict[str, Model]()
    lines = list(regress(RegMeanPlus(folder, folder / "merged")))
    found["REG_MEAN_PLUS"] = stretched(suite, checkpoint.load_leaves(folder / "merged" / "reg_mean_plus")[0])
    for kind in ("task", "layer"):
        lines += adapt(AdaMerging(folder, folder / kind, layer_wise=kind == "layer"))
        params, manifest = checkpoint.load_leaves(folder / kind / "adamerging")
        means = {task: fmean(own.values()) for task, own in manifest["coefs"].items()}
        facts = {"coefs": means, "entropy": manifest["entropy"]}
        found[f"ADAMERGING_{kind.upper()}"] = Model(params, manifest["dev"], None, facts)
    return found


def stretched(suite: Suite, params: Leaves) -> Model:
    """θ₀ + γ (θ − θ₀) of a merged model θ, γ chosen on dev as that of other mergers."""
    base: Leaves = suite.base
    vector = {path: params[path] - leaf for path, leaf in base.items()}

    @cache
    def dev(coef: float) -> dict[str, float]:
        merged = merge.apply_vector(base, vector, coef=coef)
        return {task: suite.score(merged, task, "dev") for task in suite.tasks}

    coefs = RegMean.grid
    for _ in range(WIDER + 1):
        best = merge.choose(coefs, lambda coef: fmean(dev(coef).values())).best
        edge = merge.edge_of(best, coefs)
        if not edge or len(coefs) == len(RegMean.grid) + WIDER:
            break
        coefs = tuple(sorted((*coefs, merge.beyond(coefs, edge))))
    return Model(merge.apply_vector(base, vector, coef=best), dev(best), best, {"edge": edge})
