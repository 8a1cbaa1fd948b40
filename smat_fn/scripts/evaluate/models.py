"""Checkpoints to score: found in folders, checked against each other, each with its suite."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ... import checkpoint, errors
from ...checkpoint import MOVING
from ...errors import problems_of
from ...evaluate.results import model_of, run_of
from ...folders.inputs.adapters.peft import is_adapter
from ...folders.inputs.opening import local_folder
from ...folders.inputs.reading import open_folder
from ...suites import Suite, load_suite
from ...suites.trace_rows import given_metric
from ..manifests import AGAIN, incomplete, manifest_of, with_tasks_of
from ..merge.experts.given import named
from ..merge.experts.suite import head_problems, made_problems
from ..merge.experts.whole_models import own_dtype, whole_base
from ..run_folder import unreplaced

# kinds of manifests that tell the tasks; an exported model is as one of another tool
SCORED = "expert", checkpoint.JOINT, "merged"
BASE = "BASE"  # label of the base in tables
FOREIGN = "folder"  # of an expert of another tool, in what `manifests_of` makes up as its manifest: where it lies


class Model(NamedTuple):
    """A checkpoint that is to be scored, and the suite to score it on."""

    folder: Path
    manifest: Mapping[str, Any]
    suite: Suite
    base: str  # the fingerprint of the suite's base
    others: tuple[str, ...] = ()  # tasks to score it on that it was not made for

    @property
    def name(self) -> str:
        """Its name in rows of scores."""
        return model_of(self.manifest)

    @property
    def seed(self) -> int:
        """The seed of the training run."""
        return self.manifest["seed"]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it was made for."""
        return tasks_of(self.manifest)


def find_checkpoints(paths: Sequence[Path]) -> list[Path]:
    """Checkpoints of experts and merged models at or below the given folders, in order, each once.

    TASK=FOLDER is an expert of another tool, and stays as it is.

    Raises: ValueError that lists every folder without one.
    """
    found: dict[Path, None] = {}
    problems = []
    for path in paths:
        name, folder = named(path)
        if name is not None:
            if manifest_of(folder).get("kind") in SCORED:
                problems.append(f"{folder} is a checkpoint of train.py or merge.py: give it without a name")
            found[path] = None
            continue
        folders = [manifest.parent for manifest in checkpoint.files_below(path, checkpoint.MANIFEST)]
        folders = [f for f in folders if manifest_of(f).get("kind") in SCORED]
        if not folders:
            way = "give folders of train.py or merge.py"
            if (path / "config.json").is_file() or is_adapter(path):
                way += f", or name the task of an expert of another tool: TASK={path}"
            lack = "holds no expert or merged checkpoint" if path.is_dir() else "is not a folder"
            problems.append(f"{path} {lack}: {way}")
        found.update(dict.fromkeys(folders))
    errors.raise_problems(problems)
    first: dict[str, Path] = {}  # a link in one of the folders may lead to another one
    for path in sorted(found, key=lambda path: os.path.abspath(path) != os.path.realpath(path)):
        first.setdefault(os.path.realpath(path) if named(path)[0] is None else str(path), path)
    kept = {*first.values()}
    return [path for path in found if path in kept]


def lacking_experts(paths: Sequence[Path]) -> list[str]:
    """Notes on tasks of runs in these folders that are not scored: what a run began is there, but no expert."""
    notes = []
    for path in (path for path in paths if path.is_dir()):
        begun = {*checkpoint.logs_below(path)}
        runs = {path, *(expert.parent for expert in begun)}
        begun |= {run / mark.name[1:].removesuffix(MOVING) for run in runs for mark in run.glob(f".*{MOVING}")}
        lacking = {place for place in begun if not manifest_of(place) and not place.name.startswith(".")}
        notes += [f"{place} holds no finished expert: it is not scored" for place in sorted(lacking)]
    return list(dict.fromkeys(notes))


def manifests_of(folders: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The manifests of checkpoints as `find_checkpoints` gives them, and what stands for those of other tools' experts.

    The latter have label and seed of the first model merged from experts of their names: they share its line.
    """
    given = {folder: name for folder in folders if (name := named(folder)[0]) is not None}
    found = {folder: checkpoint.load_manifest(folder) for folder in folders if folder not in given}
    errors.raise_problems(incomplete(found))
    errors.raise_problems(
        [f"{at / checkpoint.MANIFEST}: {text}: {AGAIN}" for at, m in found.items() for text in problems_of(run_of, m)]
    )
    names = set(given.values())
    merged = [m for m in found.values() if m["kind"] == "merged" and names <= set(m["experts"])]
    line = merged[0] if merged else {"label": "+".join(given.values()), "seed": 0}
    suite = next((m["suite"] for m in merged if m.get("suite")), None)
    of_all = {"kind": "expert", "label": line["label"], "seed": line["seed"], "hyperparameters": {}, "suite": suite}
    others = {folder: {**of_all, "task": name, FOREIGN: str(named(folder)[1])} for folder, name in given.items()}
    return {folder: others.get(folder) or found[folder] for folder in folders}


def suited(
    manifests: Mapping[Path, dict[str, Any]],
    options: Mapping[str, Any],
    implied: Mapping[str, Any],
    split: str,
    *,
    other_tasks: bool = False,
) -> list[Model]:
    """The checkpoints with their suites.

    Args: other_tasks: read the rows of all tasks of the suites, not only of those that the checkpoints are of.
    Raises: ValueError that lists everything that keeps the checkpoints from being scored together.
    """
    # third-party experts name no suite, nor does a model merged from them
    named_by = {
        folder: manifest.get("suite") or _implied_suite(Path(manifest.get(FOREIGN, folder)), {**implied, **options})
        for folder, manifest in manifests.items()
    }
    models = list[Model]()
    loaded: dict[str, tuple[Suite, str]] = {}  # one model for the recipes that differ in tasks alone
    wholes: dict[str, str | None] = {}
    needed = None if other_tasks else list(dict.fromkeys(task for m in manifests.values() for task in tasks_of(m)))
    problems = unreplaced(folder for folder, m in manifests.items() if m["kind"] != "merged") + _stale(manifests)
    problems += _named_alike(manifests)
    for folder, manifest in manifests.items():
        if not (recipe := named_by[folder]):
            problems.append(
                f"{folder} names no suite to be scored on: pass --preset lm (language models), text (text encoders) or "
                "images, with --model BASE --data DATA"
            )
            continue
        if wrong := head_problems(str(folder), manifest.get("suite") or {}, options):
            problems += wrong
            continue
        suite, base = _loaded(recipe, named_by.values(), {**options, "needed": needed}, loaded)
        models.append(Model(folder, manifest, suite, base))
        fits = FOREIGN in manifest or manifest.get("base_fingerprint") == base
        if not fits and manifest["kind"] == "merged":  # perhaps of whole models of other tools
            if (kind := _but_tasks(recipe)) not in wholes:
                whole = whole_base(suite)
                wholes[kind] = None if whole is None else checkpoint.fingerprint(whole)
            fits = manifest.get("base_fingerprint", "") == wholes[kind]
        if not fits:
            problems.append(
                f"{folder} was made from another base than suite {suite.name!r} gives here: "
                "other library versions or threads pretrain another one, train again (third-party experts: give their "
                "own base as --model, its dtype as --suite-options dtype)"
            )
        if FOREIGN in manifest:
            with errors.collected(problems):
                errors.check_member(f"{folder}: task", manifest["task"], suite.tasks)
            if os.path.realpath(manifest[FOREIGN]) != os.path.realpath(str(suite.recipe.get("model", ""))):
                problems += made_problems(suite, [manifest["task"]], split)
        elif strange := [task for task in tasks_of(manifest) if task not in suite.tasks]:
            problems.append(
                f"{folder} is of {', '.join(strange)}, which are not tasks of suite {suite.name!r}: merge again with "
                f"experts named as its tasks, NAME=FOLDER, {', '.join(suite.tasks)}"
            )
    errors.raise_problems(problems)
    return models


def _named_alike(manifests: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Errors for models of one label, name and seed; those of emr for single tasks are together one of all tasks."""
    known: dict[tuple[Any, ...], dict[str | None, Path]] = {}
    problems = []
    for folder, manifest in manifests.items():
        label, model, seed = line = manifest["label"], model_of(manifest), manifest["seed"]
        same, alone = known.setdefault(line, {}), manifest["hyperparameters"].get("task")
        if other := next((at for of, at in same.items() if alone is None or of in (None, alone)), None):
            moved = "transport" in manifest
            made = "its merge.py transport command with --overwrite" if moved else "its train.py command with --resume"
            way = "" if manifest["kind"] == "merged" else f", or rename one of them: {made} --label NAME"
            problems.append(
                f"{folder} and {other} are both {label} {model} of seed {seed}: evaluate each alone, with its own "
                f"--out{way}"
            )
        same.setdefault(alone, folder)
    return problems


def _loaded(
    recipe: Mapping[str, Any],
    every: Iterable[Mapping[str, Any] | None],
    options: Mapping[str, Any],
    loaded: dict[str, tuple[Suite, str]],
) -> tuple[Suite, str]:
    """The suite of a recipe, of a model that is loaded once for all recipes that differ in tasks and memory alone."""
    if (kind := _but_tasks({**recipe, **options})) not in loaded:
        alike = (other for other in every if other and _but_tasks({**other, **options}) == kind)
        suite = load_suite(**{**(with_tasks_of(alike) or recipe), **options})
        errors.raise_problems(given_metric(suite, options))
        loaded[kind] = suite, checkpoint.fingerprint(suite.base)
    suite, base = loaded[kind]
    tasks = tuple(() if "tasks" in options else recipe.get("tasks") or ())
    if not tasks or tasks == suite.tasks:
        return suite, base
    if (own := json.dumps([kind, *tasks])) not in loaded:  # once, since a suite keeps what it has computed
        loaded[own] = suite.replace(tasks=tasks, recipe={**suite.recipe, "tasks": list(tasks)}), base
    return loaded[own]


def _but_tasks(recipe: Mapping[str, Any]) -> str:
    """A recipe without its tasks, as a key; without an option of the backward pass too, unless it changes the forward.

    Of top layers alone (``train_layers``) the states of the others are kept only without gradient checkpointing.
    """
    ignored = ("tasks",) if recipe.get("train_layers") else ("tasks", "gradient_checkpointing")
    return json.dumps({name: value for name, value in recipe.items() if name not in ignored}, default=repr)


def _implied_suite(folder: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The suite of a checkpoint whose manifest names none: that of the options, in the dtype of the checkpoint."""
    if "name" not in options:
        return None
    try:
        leaves = open_folder(str(folder), local_folder(str(folder), folder)).leaves
    except ValueError:  # a folder of several models, or an adapter
        leaves = {}
    return {"seed": 0, **options, **own_dtype(options["name"], leaves)}


def tasks_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The tasks that a checkpoint was made for; of a merge for one of its tasks (emr --task) this one."""
    if manifest["kind"] == "expert":
        return (manifest["task"],)
    if manifest["kind"] == checkpoint.JOINT:
        return tuple(manifest["tasks"])
    alone = manifest["hyperparameters"].get("task")
    return (alone,) if alone else tuple(manifest["experts"])


def _stale(manifests: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Errors for models merged from other weights than the expert of the same label, seed and task given here.

    Without the expert, than the first merged model: a --overwrite of some mergers that was interrupted.
    """
    trained = {
        (manifest["label"], manifest["seed"], manifest["task"]): (folder, manifest.get("fingerprint"))
        for folder, manifest in manifests.items()
        if manifest["kind"] == "expert"
    }
    first: dict[tuple[str, int, str], tuple[Path, str]] = {}
    problems = []
    for folder, manifest in manifests.items():
        experts = manifest["experts"] if manifest["kind"] == "merged" else {}
        for task, merged in experts.items():
            line = manifest["label"], manifest["seed"], task
            expert, found = trained.get(line, (None, None))
            if merged is None:
                continue
            if expert is not None:
                wrong = found is not None and merged not in (found, *_snapshots(expert))
                other = f"{expert} holds now"
            elif "snapshot" in manifest:  # each merger chose its own
                continue
            else:
                before, found = first.setdefault(line, (folder, merged))
                wrong, other = merged != found, f"{before}"
            if wrong:
                problems.append(
                    f"{folder} was merged from other weights of {task!r} than {other}: merge again (--overwrite), or "
                    "evaluate them apart"
                )
                break
    return problems


def _snapshots(expert: Path) -> list[str | None]:
    """The fingerprints of an expert's snapshots, which a merge of its run may take."""
    manifests = map(manifest_of, checkpoint.snapshots_of(expert))
    return [manifest.get("fingerprint") for manifest in manifests if manifest]
