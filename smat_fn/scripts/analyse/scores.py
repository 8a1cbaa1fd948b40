"""Analyses of scores: number of experts, replaced experts, sources of gains. No torch until one runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from .commands import RUNS, SPLIT, Batched, OfSuite, progress

if TYPE_CHECKING:
    from ...analyses import Scored
    from ...analyses.results import Result
    from .runs import Run


@dataclass(frozen=True, kw_only=True)
class ExpertsCurve(Batched):
    """Merge K = 2..N experts of each run, score each merge on its own tasks, divide by the FT experts' scores."""

    runs: Annotated[Positional[tuple[Path, ...]], RUNS]
    """Run folders of train.py. Each seed needs a run of method ft."""
    merger: Annotated[str, arg(metavar="NAME")] = "ta"
    """Merger of the experts: any that needs no data and has a default for each of its options."""
    coef: Annotated[tuple[float, ...], arg(help_behavior_hint="(default: the run's own, else searched on dev)")] = ()
    """One coefficient for all runs, or one per run. A run's own coefficient is that of its stored merged model."""
    preset: Annotated[str | None, arg(help_behavior_hint="(default: that of the experts, else digits)")] = None
    """Preset with the merger's other settings, for runs without a stored merged model."""
    seed: int = 0
    """Seed of the random masks of DARE and DELLA."""
    split: SPLIT = "test"
    """Split to score."""


def experts_curve(options: ExpertsCurve) -> "Result":
    """`analyses.experts_curve` of every run; a row per merged model and task.

    Raises: ValueError as `check_merger`, `load_runs`, `standard_runs` and `chosen_merger`; for another number of coefs.
    """
    from ... import analyses
    from ...config import settings
    from .runs import check_merger, chosen_merger, load_runs, merged_params, result_of, standard_runs, with_coef

    merger, split, seed, coef = options.merger, options.split, options.seed, options.coef
    if len(coef) not in (0, 1, len(options.runs)):
        raise ValueError(f"{len(coef)} coefs for {len(options.runs)} runs: give none, one for all, or one each")
    check_merger(options.runs, merger, options.preset)
    runs = load_runs(options.runs, options=options.suite_options)
    standard = standard_runs(runs)
    coefs = [None] * len(runs) if not coef else list(coef) * (len(runs) if len(coef) == 1 else 1)
    chosen = [chosen_merger(run, merger, coef=c, preset=options.preset) for run, c in zip(runs, coefs, strict=True)]
    reference = _reference(standard, split)
    configs = [
        with_coef(run, config, seed=seed, memory=options.memory_bytes) for run, config in zip(runs, chosen, strict=True)
    ]
    rows = []
    sizes = [(run.tasks, count) for run in runs for count in range(2, len(run.tasks) + 1)]
    total = sum(count * len(analyses.cyclic_subsets(tasks, count)) for tasks, count in sizes)
    with progress("score", total) as done:
        for run, config in zip(runs, configs, strict=True):
            found = analyses.experts_curve(
                run.tasks,
                partial(merged_params, config, run, seed=seed),
                analyses.scores_of(run.suite, split, memory=options.memory_bytes, done=done),
                reference=reference[run.seed],
            )
            rows += _lines(found, run, coef=getattr(config, "coef", None))
    how = [settings(config) for config in configs]
    return result_of("experts-curve", runs, rows, merger=merger, split=split, merge_seed=seed, merger_settings=how)


@dataclass(frozen=True, kw_only=True)
class Replacement(Batched):
    """Replace q = 0..N FT experts by another method's experts of the same tasks, merge by TA, score on all tasks."""

    ft: tuple[Path, ...]
    """Run folders of train.py of method ft, one for each seed."""
    other: tuple[Path, ...]
    """Run folders of train.py, of the same seeds, whose experts replace those of --ft."""
    coef: float = 0.3
    """gamma of all merges."""
    split: SPLIT = "test"
    """Split to score."""


def replacement(options: Replacement) -> "Result":
    """`analyses.replacement_curve` of every other run against the standard run of its seed; rows as `experts_curve`.

    Raises: ValueError as `load_runs` and `standard_runs` do; for a standard run of another method than ft, for no other
        runs, and for a coef that is not finite.
    """
    from ... import analyses, errors
    from .runs import load_runs, result_of, standard_runs

    count, split, coef = len(options.ft), options.split, options.coef
    problems = [] if options.other else ["no runs in --other: give those whose experts replace the ones of --ft"]
    errors.raise_problems(problems + ([] if math.isfinite(coef) else [f"coef is {coef}, must be finite"]))
    runs = load_runs([*options.ft, *options.other], options=options.suite_options)
    ft, rest = standard_runs(runs), runs[count:]
    wrong = [run for run in runs[:count] if run.method != "ft"]
    errors.raise_problems([f"{run.path} is of method {run.method}, not ft: give runs of ft as --ft" for run in wrong])
    reference = _reference(ft, split)
    rows = []
    total = sum(len(analyses.replacement_sets(run.tasks)) * len(run.tasks) for run in rest)
    with progress("score", total) as done:
        for run in rest:
            found = analyses.replacement_curve(
                run.inputs.base,
                ft[run.seed].inputs.experts,
                run.inputs.experts,
                analyses.scores_of(run.suite, split, memory=options.memory_bytes, done=done),
                reference=reference[run.seed],
                coef=coef,
            )
            rows += _lines(found, run, coef=coef)
    return result_of("replacement", runs, rows, coef=coef, split=split)


@dataclass(frozen=True, kw_only=True)
class Gains(OfSuite):
    """Compare experts' scores with the mean of the five mergers; the difference is the merging drop."""

    runs: Annotated[Positional[tuple[Path, ...]], RUNS]
    """Checkpoints, or folders with them: experts of every method and their five merged models (merge.py all)."""
    split: SPLIT = "test"
    """Split to score."""


def gains(options: Gains) -> "Result":
    """`analyses.gains` of experts and merged checkpoints at or below the paths; a row per method and seed.

    Raises: ValueError as `evaluate`, `main_table` and `analyses.gains` do.
    """
    from ... import analyses
    from ...report.tables import main_table
    from ..evaluate.evaluation import evaluate
    from ..evaluate.models import find_checkpoints, manifests_of
    from .runs import result_of

    split, folders = options.split, find_checkpoints(options.runs)
    with progress("checkpoint", len(folders)) as done:
        recipes: dict[Path, dict[str, Any]] = {}
        shared: dict[str, Any] = {"options": options.suite_options, "recipes": recipes, "check": analyses.gains}
        scores = evaluate(folders, split=split, on_model=lambda name: done(1), **shared)
    rows = [
        {
            "method": method,
            "seed": seed,
            "expert": gain.expert.by_seed[seed],
            "merged": gain.merged.by_seed[seed],
            "drop": drop,
        }
        for method, gain in analyses.gains(main_table(scores, split=split)).items()
        for seed, drop in gain.drop.by_seed.items()
    ]
    kept = ("label", "kind", "task", "merger", "hyperparameters", "seed", "suite", "fingerprint", "versions")
    manifests = {folder: {**m, "suite": recipes[folder]} for folder, m in manifests_of(folders).items()}
    models = [{"path": str(f), **{name: m[name] for name in kept if name in m}} for f, m in manifests.items()]
    return {**result_of("gains", [], rows, split=split), "runs": models}


def _reference(standard: Mapping[int, "Run"], split: str) -> dict[int, dict[str, float]]:
    """Scores of the FT experts by seed and task. Raises: ValueError for scores that nothing can be divided by."""
    from ... import errors
    from ...analyses.curves import reference_problems
    from ..merge.experts.inputs import like_base

    found: dict[int, dict[str, float]] = {}
    for seed, run in standard.items():
        found[seed] = {
            task: run.suite.score(like_base(run.inputs.base, params), task, split)
            for task, params in run.inputs.experts.items()
        }
        errors.raise_problems(reference_problems(run.tasks, found[seed]))
    return found


def _lines(found: Sequence["Scored"], run: "Run", *, coef: float | None) -> list[dict[str, Any]]:
    return [
        {"method": run.label, "seed": run.seed, **row._asdict(), "subset": "+".join(row.subset), "coef": coef}
        for row in found
    ]
