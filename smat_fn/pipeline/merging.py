"""Merge experts on disk: checked inputs, an optional search on dev, merged checkpoints with a card each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checkpoint, merge, random, tree
from ..config import Dare, Della, MergerConfig, TaskArithmetic, Ties, WeightAverage, settings
from ..data import Suite, load_suite
from ..types import Params
from .card import card
from .search import Decode, Reranked, rerank
from .training import BASE, mean, refusals

CARD = "README.md"


class Inputs(NamedTuple):
    """A base and its experts, checked against each other."""

    base: dict[str, Tensor]
    experts: dict[str, dict[str, Tensor]]  # by task
    manifests: dict[str, dict[str, Any]]  # of the experts, by task


class Merged(NamedTuple):
    """A merged model and how its coefficient was found."""

    params: Params
    coef: float | None  # None for WA
    dev: dict[str, float]  # score per task on dev, empty without a search
    curve: tuple[tuple[float, float], ...]  # (coef, mean dev score) of every candidate
    finals: tuple[tuple[float, float], ...] = ()  # of those that were decoded again, where answers are sampled


def find_inputs(run: Path) -> tuple[Path, list[Path]]:
    """The base and the experts of a folder that train.py wrote. Raises: ValueError if it holds none."""
    experts = [
        path.parent
        for path in sorted(run.glob(f"*/{checkpoint.MANIFEST}"))
        if checkpoint.load_manifest(path.parent).get("kind") == "expert"
    ]
    if not experts:
        raise ValueError(f"{run} holds no experts: give the --out folder of train.py")
    return run / BASE, experts


def load_inputs(base: Path, experts: Sequence[Path]) -> Inputs:
    """Read a base and experts, and check all of them before anything is merged.

    Raises: ValueError that lists every folder that cannot be read, every expert of another base, shape or dtype, values
        that are not finite, and every task that comes twice.
    """
    problems = [] if experts else ["no experts: give at least one folder"]
    origin: dict[str, Tensor] | None = None
    try:
        origin, _ = checkpoint.load_leaves(base)
        tree.check_finite(origin, str(base))
    except ValueError as error:
        problems.append(str(error))
    fingerprint = None if origin is None else checkpoint.fingerprint(origin)
    loaded: dict[str, dict[str, Tensor]] = {}
    manifests: dict[str, dict[str, Any]] = {}
    for path in experts:
        try:
            like = checkpoint.load_leaves(path)[0] if origin is None else origin
            params, manifest = checkpoint.load_expert(path, like)
            tree.check_finite(params, str(path))
        except ValueError as error:
            problems.append(str(error))
            continue
        task = manifest.get("task", path.name)
        if task in loaded:
            problems.append(f"{path}: there is another expert named {task!r}, give each task once")
        if fingerprint is not None and manifest.get("base_fingerprint", fingerprint) != fingerprint:
            problems.append(f"{path} was trained from another base than {base}")
        loaded[task], manifests[task] = params, manifest
    tree.raise_problems(problems)
    assert origin is not None
    return Inputs(origin, loaded, manifests)


def merged_vector(config: MergerConfig, key: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    """The merged task vector of a merger that has a coefficient."""
    base, experts, options = inputs.base, inputs.experts, settings(config)
    options.pop("coef", None)
    match config:
        case TaskArithmetic():
            return merge.task_arithmetic_vector(base, experts)
        case Ties():
            return merge.ties_vector(base, experts, **options)
        case Dare():
            return merge.dare_vector(key, base, experts, **options)
        case Della():
            return merge.della_vector(key, base, experts, **options)
        case _:
            raise AssertionError(config)


def merge_one(config: MergerConfig, inputs: Inputs, *, seed: int, suite: Suite | None = None) -> Merged:
    """One merged model; with a suite, a coefficient that is left open is searched on its dev split.

    The score of a candidate is the mean dev score over the experts' tasks; ties go to the smaller coefficient. Where
    the suite samples answers, the two best of one decode are decoded as often as its score wants (`rerank`). Random
    masks come from ``fold_in(key(seed), "merge")``.
    """
    scores: dict[str, float] = {}

    def score(params: Params) -> float:
        assert suite is not None
        scores.clear()
        scores.update({task: suite.score(params, task, "dev") for task in inputs.experts})
        return mean(list(scores.values()))

    if isinstance(config, WeightAverage):
        params = merge.weight_average(inputs.experts)
        if suite is not None:
            score(params)
        return Merged(params, None, dict(scores), ())
    key = random.fold_in(random.key(seed), "merge")
    vector = merged_vector(config, key, inputs)
    curve: tuple[tuple[float, float], ...] = ()
    coef = config.coef
    if coef is None:
        assert suite is not None, "merge_run checks this"
        if suite.repeats:
            found = _rerank(suite, inputs, merge.COEFS, lambda c: merge.apply_vector(inputs.base, vector, coef=c))
            params = merge.apply_vector(inputs.base, vector, coef=found.best)
            return Merged(params, found.best, found.scores, found.curve, found.finals)
        selection = merge.select_coef(inputs.base, vector, score)
        coef, curve = selection.best, selection.curve
    params = merge.apply_vector(inputs.base, vector, coef=coef)
    if suite is not None:
        score(params)
    return Merged(params, coef, dict(scores), curve)


def _rerank(
    suite: Suite, inputs: Inputs, candidates: Sequence[float], build: Callable[[float], Params]
) -> Reranked[float]:
    assert suite.score_once is not None
    once = suite.score_once

    def score(candidate: float, decodes: Sequence[Decode]) -> list[float]:
        params = build(candidate)
        return [once(params, task, "dev", repeat) for task, repeat in decodes]

    return rerank(candidates, score, tasks=list(inputs.experts), repeats=suite.repeats)


def calibrate(config: MergerConfig, inputs: Inputs, suite: Suite, *, coef: float, seed: int) -> MergerConfig:
    """The merger with the sparsity of the largest mean dev score at a fixed coefficient, ties to less pruning.

    TIES keeps 0.5, 0.3, 0.2 or 0.1; DARE and DELLA drop 0.1, 0.3, 0.5, 0.7 or 0.9 (paper, sparse-merger calibration).
    Sampled answers are decoded as in `merge_one`.
    """
    field, candidates = ("keep", merge.TIES_KEEPS) if isinstance(config, Ties) else ("drop_prob", merge.DROP_PROBS)

    def at(value: float, **options: float) -> MergerConfig:
        changes: dict[str, Any] = {field: value, **options}
        return replace(config, **changes)

    if suite.repeats:
        models = lambda value: merge_one(at(value, coef=coef), inputs, seed=seed).params  # noqa: E731
        return at(_rerank(suite, inputs, candidates, models).best)

    def score(value: float) -> float:
        return mean(list(merge_one(at(value, coef=coef), inputs, seed=seed, suite=suite).dev.values()))

    return at(merge.choose(candidates, score).best)


def merge_run(
    configs: Sequence[MergerConfig],
    base: Path,
    experts: Sequence[Path],
    *,
    out: Path,
    search: bool,
    calibration: Mapping[str, float] | None = None,
    seed: int,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
) -> dict[Path, Merged]:
    """Merge by each merger into ``out/<merger>``.

    Args: search: choose open coefficients on dev, and score every merged model there; calibration: first choose the
        sparsity of TIES, DARE and DELLA on dev at these coefficients; seed: of random masks; options: of the suite,
        instead of those in the experts' manifests.
    Returns: merged models by folder.
    Raises: ValueError that lists all problems of inputs, options and outputs before any merging.
    """
    problems = []
    for config in configs:
        if not search and "coef" in vars(config) and config.coef is None:  # type: ignore[union-attr]
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
        problems += refusals(_check_options, config)
        problems += refusals(checkpoint.refuse_existing, out / config.name, overwrite=overwrite)
    try:
        inputs = load_inputs(base, experts)
        suite = _common_suite(inputs, options or {}) if search or calibration else None
    except ValueError as error:
        problems.append(str(error))
    tree.raise_problems(problems)
    done = {}
    for config in configs:
        if calibration and config.name in calibration:
            assert suite is not None
            config = calibrate(config, inputs, suite, coef=calibration[config.name], seed=seed)
        merged = merge_one(config, inputs, seed=seed, suite=suite)
        write_merged(out / config.name, config, inputs, merged, seed=seed, overwrite=overwrite)
        done[out / config.name] = merged
    return done


def _check_options(config: MergerConfig) -> None:
    if not isinstance(config, WeightAverage):
        one = {"w": torch.zeros(1)}
        vector = merged_vector(config, random.key(0), Inputs(one, {"a": one}, {}))
        merge.apply_vector(one, vector, coef=0.0 if config.coef is None else config.coef)


def _common_suite(inputs: Inputs, options: Mapping[str, Any]) -> Suite:
    recipes = {task: manifest.get("suite") for task, manifest in inputs.manifests.items()}
    first = next(iter(recipes.values()))
    problems = [f"expert {task!r} names no suite, so nothing to search on" for task, r in recipes.items() if not r]
    problems += [
        f"expert {task!r} is of another suite than the first" for task, r in recipes.items() if r and r != first
    ]
    tree.raise_problems(problems)
    assert first is not None
    suite = load_suite(**{**first, **options})
    if checkpoint.fingerprint(suite.base) != checkpoint.fingerprint(inputs.base):
        raise ValueError(
            f"suite {suite.name!r} gives another base here than the experts': train again, with these versions"
        )
    return suite


def write_merged(
    path: Path, config: MergerConfig, inputs: Inputs, merged: Merged, *, seed: int, overwrite: bool = False
) -> None:
    """Save a merged model with its manifest and a card for people."""
    first = next(iter(inputs.manifests.values()))
    facts = {
        "kind": "merged",
        "merger": config.name,
        "hyperparameters": {**settings(config), **({} if merged.coef is None else {"coef": merged.coef})},
        "label": "+".join(dict.fromkeys(m.get("label", "?") for m in inputs.manifests.values())),
        "seed": first.get("seed", seed),
        "merge_seed": seed,
        "suite": first.get("suite"),
        "base_fingerprint": checkpoint.fingerprint(inputs.base),
        "experts": {task: manifest.get("fingerprint") for task, manifest in inputs.manifests.items()},
        "dev": merged.dev,
        "dev_curve": [list(point) for point in merged.curve],
        **({"dev_finals": [list(point) for point in merged.finals]} if merged.finals else {}),
    }
    manifest = checkpoint.describe(merged.params, **facts)
    checkpoint.save_expert(path, merged.params, manifest, overwrite=overwrite, files={CARD: card(manifest)})
