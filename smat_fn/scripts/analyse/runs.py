"""Runs of train.py read for an analysis: experts, suites and chosen mergers, checked against each other."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ... import checkpoint, errors, merge
from ...analyses import Job, scores_of
from ...analyses.results import Result
from ...config import MERGERS, MORE_MERGERS, MergerConfig, WeightedAverage, preset_of, resolve
from ...evaluate import Scorer
from ...merge.parts.masked import Masked
from ...suites import Suite
from ...types import Params
from ..manifests import incomplete, manifest_of
from ..merge.experts.given import manifests_of
from ..merge.experts.inputs import Inputs, like_base, load_inputs, mask_key
from ..merge.experts.suite import common_suite
from ..merge.search.choosing import is_open, merge_one
from ..run_folder import find_inputs, trained_by, unreplaced


class Run(NamedTuple):
    """The experts of one method and seed, and the suite that they were trained on."""

    path: Path
    label: str
    method: str
    seed: int
    inputs: Inputs  # tasks in the suite's order, the suite's base
    suite: Suite

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks in the suite's order."""
        return tuple(self.inputs.experts)


def load_runs(paths: Sequence[Path], *, options: Mapping[str, Any] | None = None) -> list[Run]:
    """Runs of train.py of the same tasks; those of one suite share one `Suite`, and those of one seed one base.

    Args: options: of the suites, instead of those in the manifests.
    Raises: ValueError that lists folders without experts, runs of several labels, methods or seeds, labels that come
        twice with one seed, runs of one seed that differ in base or suite seed, and runs that differ in tasks.
    """
    problems: list[str] = [] if paths else ["no runs: give at least one folder of train.py"]
    found: list[Run] = []
    suites: dict[str, Suite] = {}
    for path in paths:
        with errors.collected(problems):
            found.append(_load(path, suites, options or {}))
    lone = [run for run in found if set(run.tasks) != set(found[0].tasks)]
    problems += [
        f"{run.path} has experts of {', '.join(run.tasks)}, {found[0].path} of {', '.join(found[0].tasks)}: "
        "means over different tasks cannot be compared, give runs of the same tasks"
        for run in lone
    ]
    first: dict[int, Run] = {}
    names: dict[tuple[str, int], Path] = {}
    for run in found:
        other = first.setdefault(run.seed, run)
        same = {"base": _fingerprint(run) == _fingerprint(other), "suite seed": _suite_seed(run) == _suite_seed(other)}
        if differ := [name for name, equal in same.items() if not equal]:
            problems.append(
                f"{run.path} and {other.path} are both of seed {run.seed} but differ in {' and '.join(differ)}: "
                "compare runs of one suite"
            )
        if (twin := names.get((run.label, run.seed))) is not None:
            problems.append(
                f"{run.path} and {twin} are both {run.label} of seed {run.seed}: give one, or another --label"
            )
        names[run.label, run.seed] = run.path
    errors.raise_problems(problems)
    return found


def standard_runs(runs: Sequence[Run]) -> dict[int, Run]:
    """The run of plain fine-tuning of every seed. Raises: ValueError that lists seeds without one or with several."""
    standard: dict[int, list[Run]] = {run.seed: [] for run in runs}
    for run in runs:
        if run.method == "ft":
            standard[run.seed].append(run)
    errors.raise_problems(
        [
            f"seed {seed} has {len(own)} runs of method ft: give one, its experts are what scores are divided by"
            for seed, own in standard.items()
            if len(own) != 1
        ]
    )
    return {seed: run for seed, (run,) in standard.items()}


def chosen_merger(run: Run, merger: str, *, coef: float | None, preset: str | None) -> MergerConfig:
    """A merger with the settings stored with this run.

    Those of the merged checkpoint of this merger and all of the run's experts below the run's folder, if there is one,
    else those of the preset, by default that of the experts. A given coef goes first; where nothing gives one it is
    None, for `with_coef`.

    Raises: ValueError as `check_merger`, for a coef for a merger that has none, such as WA, for experts that it does
        not merge, and for several merged checkpoints that differ in settings.
    """
    config = _default(merger, preset or trained_by(run.inputs.manifests))
    counts = range(2, len(run.tasks) + 1)
    errors.raise_problems([text for n in counts for text in config.problems({task: {} for task in run.tasks[:n]})])
    if not hasattr(config, "coef") and coef is not None:
        raise ValueError(f"coef is {coef}, but {merger.upper()} has none: leave --coef out")
    stored = [
        manifest["hyperparameters"]
        for file in checkpoint.files_below(run.path, checkpoint.MANIFEST)
        if (manifest := manifest_of(file.parent)).get("kind") == "merged"
        and manifest["merger"] == merger
        and manifest["hyperparameters"].keys() <= {field.name for field in fields(config)}  # no coefs, no lines
        and manifest["experts"] == {task: m.get("fingerprint") for task, m in run.inputs.manifests.items()}
    ]
    apart = [{name: value for name, value in own.items() if name != "coef"} for own in stored]
    found = sorted({json.dumps(own, sort_keys=True) for own in (stored if coef is None else apart)})
    if len(found) > 1:
        alike = all(own == apart[0] for own in apart)
        way = "pass --coef" if alike else "move those that are not meant to another folder"
        raise ValueError(f"{run.path} holds {merger} models of several settings, {' and '.join(found)}: {way}")
    if stored:
        config = type(config)(**stored[0])
    return config if coef is None else replace(config, coef=coef)


def check_merger(paths: Iterable[Path], merger: str, preset: str | None) -> None:
    """Check a merger against the runs in these folders, of which only manifests are read.

    Raises: ValueError for a merger that needs more than the experts, and for numbers of experts that it does not merge.
    """
    problems: list[str] = []
    for _, experts in map(find_inputs, paths):
        config = _default(merger, preset or trained_by(manifests_of(experts)))
        tasks, coef = [expert.name for expert in experts], 0.0 if is_open(config) else None
        for count in range(2, len(tasks) + 1):
            found = errors.problems_of(merge.check_options, config, tasks[:count], key=mask_key(0), coef=coef)
            problems += [text for text in found if "number of experts" in text]  # stored settings may be others
    errors.raise_problems(problems)


def _default(merger: str, preset: str) -> Any:
    """A merger with the settings of a preset. Raises: ValueError as `_kind`."""
    usual = preset_of(preset).mergers
    return usual[merger] if merger in usual else resolve(_kind(merger)(), usual)


def _kind(name: str) -> type[MergerConfig]:
    """The options of a merger by its name. Raises: ValueError for one that needs data or has options to be given."""
    known = {
        kind.name: kind
        for kind in (*MERGERS, *MORE_MERGERS)
        if kind.statistics is MergerConfig.statistics and not issubclass(kind, (Masked, WeightedAverage))
        if not any(own.default is MISSING is own.default_factory for own in fields(kind))
    }
    if name not in known:
        near = errors.suggestion(name, known)
        raise ValueError(
            f"--merger is {name!r}{near}: must be one of {', '.join(known)} (others need data, or options that are not "
            "given here)"
        )
    return known[name]


def with_coef(run: Run, config: MergerConfig, *, seed: int, memory: int | None) -> MergerConfig:
    """The merger with the coefficient of the largest mean dev score where it takes one and has none.

    The search is in memory, a grid of γ in one batched evaluation where the suite allows it.
    """
    if getattr(config, "coef", 0.0) is not None:  # given, or there is none
        return config
    suite, inputs = run.suite, run.inputs
    found: Any = config
    if suite.score_tensor is None or not config.based:
        return replace(found, coef=merge_one(config, inputs, seed=seed, scorer=Scorer(suite)).coef)
    vector = merge.vector_by(config, inputs.base, inputs.experts, key=mask_key(seed))
    grid = config.grid
    jobs = [Job(partial(merge.apply_vector, inputs.base, vector, coef=c), run.tasks) for c in grid]
    tried = scores_of(suite, "dev", memory=memory)(jobs)
    means = {c: fmean(scores.values()) for c, scores in zip(grid, tried, strict=True)}
    return replace(found, coef=merge.choose(grid, means.__getitem__).best)


def merged_params(config: MergerConfig, run: Run, tasks: Sequence[str], *, seed: int) -> Params:
    """The merged model of some of a run's experts; masks as merge.py draws them."""
    inputs = run.inputs._replace(experts={task: run.inputs.experts[task] for task in tasks})
    if not config.based:
        return like_base(inputs.base, merge.merge_by(config, inputs.base, inputs.experts))
    return merge.merge_by(config, inputs.base, inputs.experts, key=mask_key(seed))


def facts(run: Run) -> dict[str, Any]:
    """Facts of a run's manifests, as JSON values."""
    first = next(iter(run.inputs.manifests.values()))
    names = ("label", "method", "hyperparameters", "seed", "suite", "base_fingerprint", "training", "versions")
    experts = {task: manifest.get("fingerprint") for task, manifest in run.inputs.manifests.items()}
    scored = {"suite": dict(run.suite.recipe)}  # with the options of this analysis
    return {"path": str(run.path), **{n: first[n] for n in names if n in first}, **scored, "experts": experts}


def result_of(analysis: str, runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], **settings: Any) -> Result:
    """A result: settings, what is known of the runs, versions, rows."""
    versions = checkpoint.describe({})["versions"]
    return {
        "analysis": analysis,
        "settings": settings,
        "runs": [facts(run) for run in runs],
        "versions": versions,
        "rows": list(rows),
    }


def _load(path: Path, suites: dict[str, Suite], options: Mapping[str, Any]) -> Run:
    base, folders = find_inputs(path)
    errors.raise_problems(unreplaced(folders))
    errors.raise_problems(incomplete({folder: manifest_of(folder) for folder in folders}, "label", "method", "seed"))
    inputs = load_inputs(base, folders)
    lines = {(m["label"], m["method"], m["seed"]) for m in inputs.manifests.values()}
    if len(lines) > 1:
        raise ValueError(f"{path} holds experts of {sorted(map(str, lines))}: give a run of one method and seed")
    ((label, method, seed),) = lines
    recipe = json.dumps({task: manifest.get("suite") for task, manifest in inputs.manifests.items()})
    suite = suites[recipe] = common_suite(inputs, options, known=suites.get(recipe))
    order = [task for task in suite.tasks if task in inputs.experts]
    experts = {task: inputs.experts[task] for task in order}
    manifests = {task: inputs.manifests[task] for task in order}
    return Run(path, label, method, seed, Inputs(suite.base, experts, manifests), suite)


def _fingerprint(run: Run) -> str:
    return next(iter(run.inputs.manifests.values())).get("base_fingerprint", "")


def _suite_seed(run: Run) -> int | None:
    return run.suite.recipe.get("seed")
