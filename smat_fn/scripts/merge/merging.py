"""Merge experts on disk: checked inputs, an optional search on dev, merged checkpoints with a card each."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import checkpoint, errors, merge, random
from ...config import MergerConfig, Ties, settings
from ...errors import problems_of
from ...evaluate import Records, Scorer, score_bar
from ...suites import Suite, load_suite
from .card import card
from .choosing import Merged, about, calibrate, is_open, merge_one, total
from .finished import differences, is_merged, verify
from .inputs import Inputs, find_inputs, load_inputs

__all__ = ["Inputs", "Merged", "common_suite", "find_inputs", "load_inputs", "merge_run", "write_merged"]

CARD = "README.md"


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
    coefs: Sequence[float] = (),
) -> dict[Path, Merged]:
    """Merge by each merger into ``out/<merger>``.

    Scores of a search are kept in ``out/scores.jsonl`` as they come: a search that was ended goes on from there, and
    the next one on the same inputs finds them (`Scorer`). A folder that holds this very merge, by its manifest and its
    bytes, stays as it is. Not so with ``overwrite``.

    Args: search: choose open coefficients on dev, and score every merged model there; calibration: first choose the
        sparsity of TIES, DARE and DELLA on dev at these coefficients; seed: of random masks; options: of the suite,
        instead of those in the experts' manifests; coefs: that a search tries, none: `merge.COEFS`.
    Returns: merged models by folder.
    Raises: ValueError that lists all problems of inputs, options and outputs before any merging.
    """
    problems = [f"coefficient {coef} to search is not finite" for coef in coefs if not math.isfinite(coef)]
    problems += [f"coefficients to search are {list(coefs)}: name each once"] if len({*coefs}) < len(coefs) else []
    for config in configs:
        if not search and is_open(config):
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
        problems += problems_of(_check_options, config, len(experts))
    try:
        inputs = load_inputs(base, experts)
        suite = common_suite(inputs, options or {}) if search or calibration else None
        sources = _sources(inputs, seed, suite)
    except ValueError as error:
        problems.append(str(error))
        sources = {}
    asked = {
        config.name: {
            "settings": settings(config),
            "search": search,
            "calibration": (calibration or {}).get(config.name),
            "suite": dict(options or {}),
            **({"coefs": sorted(coefs)} if coefs else {}),
        }
        for config in configs
    }
    kept = {}
    for name in asked if not overwrite else ():
        folder = out / name
        others = differences(folder, {"merger": name, "asked": asked[name], **sources}) if is_merged(folder) else []
        if sources and is_merged(folder) and not (others := others or verify(folder)[1]):
            kept[folder] = _read(folder)
        else:
            problems += [f"{folder} holds another merge: {other}" for other in others[:1] if sources]
            problems += problems_of(checkpoint.refuse_existing, folder, overwrite=False)
    errors.raise_problems(problems)
    done = dict[Path, Merged]()
    with score_bar() as bar:
        scorer = None if suite is None else Scorer(suite, Records(out), about=about(inputs), bar=bar)
        for config in configs:
            if (folder := out / config.name) in kept:
                done[folder] = kept[folder]
                continue
            found = None
            if calibration and config.name in calibration:
                assert scorer is not None
                found = calibrate(config, inputs, scorer, coef=calibration[config.name], seed=seed)
                config = found.config
            merged = merge_one(config, inputs, seed=seed, scorer=scorer, coefs=coefs or merge.COEFS)
            merged = merged._replace(calibration=found)
            facts = {**sources, "asked": asked[config.name]}
            write_merged(folder, config, inputs, merged, seed=seed, overwrite=overwrite, facts=facts)
            done[folder] = merged
    return done


def _check_options(config: MergerConfig, experts: int) -> None:
    one = {"w": torch.zeros(1)}
    several = {str(i): one for i in range(max(1, experts))}
    coef = 0.0 if is_open(config) else None
    merge.merge_by(config, one, several, key=random.key(0), coef=coef)


def common_suite(inputs: Inputs, options: Mapping[str, Any], *, known: Suite | None = None) -> Suite:
    """The suite that all experts were trained on, with some options changed; ``known`` is it, already loaded.

    Raises: ValueError that lists experts of no suite and of another than the first; for a suite of another base.
    """
    # experts that are not of train.py follow the others, or the options
    recipes = {task: manifest.get("suite") for task, manifest in inputs.manifests.items() if manifest}
    first = next(iter(recipes.values()), {"seed": 0} if "name" in options else None)
    problems = [f"expert {task!r} names no suite, so nothing to search on" for task, r in recipes.items() if not r]
    problems += [
        f"expert {task!r} is of another suite than the first" for task, r in recipes.items() if r and r != first
    ]
    if first is None and not recipes:
        problems.append("no expert names a suite: say --suite-options name NAME, of one whose tasks the experts are")
    errors.raise_problems(problems)
    assert first is not None
    suite = known or load_suite(**{**first, **options})
    errors.raise_problems(
        [
            f"expert {task!r} is of no task of suite {suite.name!r}: say which one, as NAME=FOLDER, of "
            f"{', '.join(suite.tasks)}"
            for task in inputs.experts
            if task not in suite.tasks
        ]
    )
    if checkpoint.fingerprint(suite.base) != checkpoint.fingerprint(inputs.base):
        raise ValueError(
            f"suite {suite.name!r} gives another base here than the experts': train again with these versions, or, of "
            "experts that train.py did not make, give their own base and its dtype as --suite-options model, dtype"
        )
    return suite


def write_merged(
    path: Path,
    config: MergerConfig,
    inputs: Inputs,
    merged: Merged,
    *,
    seed: int,
    overwrite: bool = False,
    facts: Mapping[str, Any],
) -> None:
    """Save a merged model with its manifest and a card for people.

    Args: facts: more of the manifest, what it is made of among them.
    """
    manifests = inputs.manifests.values()
    facts = {
        **facts,
        "kind": "merged",
        "merger": config.name,
        "hyperparameters": {**settings(config), **({} if merged.coef is None else {"coef": merged.coef})},
        "label": "+".join(dict.fromkeys(manifest.get("label", "?") for manifest in manifests)),
        "seed": next((manifest["seed"] for manifest in manifests if "seed" in manifest), seed),
        **_density(config, inputs),
        "dev": merged.dev,
        "dev_curve": [list(point) for point in merged.curve],
        **({"dev_finals": [list(point) for point in merged.finals]} if merged.finals else {}),
    }
    if (found := merged.calibration) is not None:
        curve = [list(point) for point in found.curve]
        facts["calibration"] = {"field": found.field, "coef": found.coef, "curve": curve}
    if merged.tried is not None:
        tried = total(merged.tried, *([found.tried] if found else []))
        facts["tried"] = {name: round(value, 3) for name, value in tried._asdict().items()}
    manifest = checkpoint.describe(merged.params, **facts)
    checkpoint.save_expert(path, merged.params, manifest, overwrite=overwrite, files={CARD: card(manifest)})


def _density(config: MergerConfig, inputs: Inputs) -> dict[str, Any]:
    if not isinstance(config, Ties):
        return {}
    options = {name: value for name, value in settings(config).items() if name in ("keep", "scope")}
    return {"density": merge.ties_density(inputs.base, inputs.experts, **options)}


def _read(folder: Path) -> Merged:
    """A merged model that was written before."""
    params, manifest = checkpoint.load_leaves(folder)
    curve, finals = (
        tuple((point[0], point[1]) for point in manifest.get(name, ())) for name in ("dev_curve", "dev_finals")
    )
    return Merged(params, manifest["hyperparameters"].get("coef"), manifest["dev"], curve, finals, kept=True)


def _sources(inputs: Inputs, seed: int, suite: Suite | None = None) -> dict[str, Any]:
    """What a merge is made of, beside its settings; ``suite`` is that of experts which name none."""
    named = [manifest["suite"] for manifest in inputs.manifests.values() if manifest.get("suite")]
    return {
        "merge_seed": seed,
        "suite": named[0] if named else None if suite is None else dict(suite.recipe),
        "base_fingerprint": checkpoint.fingerprint(inputs.base),
        "experts": {
            task: manifest.get("fingerprint") or checkpoint.fingerprint(inputs.experts[task])
            for task, manifest in inputs.manifests.items()
        },
    }
