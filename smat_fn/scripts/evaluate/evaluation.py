"""Evaluate checkpoints on disk: scores as JSON lines, the main table, a summary and a plot."""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checkpoint, errors, lora, machine, tree
from ...checkpoint import MOVING
from ...errors import problems_of
from ...evaluate import Records, Result, Scorer, score_bar, score_model, write_results
from ...evaluate.metrics import TRACE_METRICS
from ...evaluate.records import ANSWERS, SCORES
from ...evaluate.results import EXPERT, OTHERS, RUNS, model_of, run_of
from ...evaluate.statistics import differences
from ...folders.inputs.adapters import is_adapter
from ...folders.inputs.opening import local_folder, read_inputs
from ...folders.inputs.reading import open_folder
from ...folders.multi_task import is_several, task_params
from ...report.tables import JOINT, MainTable, main_table, markdown, other_table, other_tasks_of, plain
from ...suites import Suite, load_suite
from ...types import Params
from ..manifests import AGAIN, check_weights, incomplete, manifest_of, with_tasks_of
from ..merge.given import named
from ..merge.suite import made_problems, unlike
from ..merge.whole_models import lacking_problems, own_dtype, suite_part, whole_base
from ..run_folder import unreplaced

# kinds of manifests that tell the tasks; an exported model is as one of another tool
SCORED = "expert", checkpoint.JOINT, "merged"
RESULTS = "results.jsonl"
BASE = "BASE"  # label of the base in tables
_OF_SCORES = "metric", "rows", "max_new_tokens", "repeats"  # options of suites that say what a score is of
_OF_TEXTS = "max_length", "rows"  # the same of plain texts
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
        return _tasks(self.manifest)


def foreign_problems(out: Path) -> list[str]:
    """Errors for files in a folder that `evaluate` and `write_report` would write to, and that they did not write."""
    begins = {
        RESULTS: b'{"method": ',
        RUNS: b'{"label": ',
        "results.json": b'{\n  "command": ',
        "table.md": b"| Method |",
        SCORES: b'{"key": ',
        ANSWERS: b'{"key": ',
    }
    return checkpoint.foreign_problems({out / name: begin for name, begin in begins.items()})


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
    return list(found)


def lacking_experts(paths: Sequence[Path]) -> list[str]:
    """Notes on tasks of runs in these folders that are not scored: what a run began is there, but no expert."""
    notes = []
    for path in (path for path in paths if path.is_dir()):
        begun = {*checkpoint.logs_below(path)}
        runs = {path, *(expert.parent for expert in begun)}
        begun |= {run / mark.name[1:].removesuffix(MOVING) for run in runs for mark in run.glob(f".*{MOVING}")}
        empty = {place for run in runs for place in run.iterdir() if place.is_dir() and not any(place.iterdir())}
        lacking = {place for place in begun | empty if not manifest_of(place) and not place.name.startswith(".")}
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


# over 60 lines: its docstring explains every argument
def evaluate(
    folders: Sequence[Path],
    *,
    split: str = "test",
    on_model: Callable[[str], None] | None = None,
    options: Mapping[str, Any] | None = None,
    implied: Mapping[str, Any] = MappingProxyType({}),
    keep: Path | None = None,
    recipes: dict[Path, dict[str, Any]] | None = None,
    check: Callable[[MainTable], object] = lambda table: None,
    report: Callable[[str], None] = lambda line: None,
    base: bool = False,
    other_tasks: Sequence[str] | None = None,
) -> list[Result]:
    """Score checkpoints: experts on their own task, merged models on every task of the experts merged into them.

    A multi-task model of train.py is scored on all of its tasks, in a column of its own.

    A folder of one model for each task is scored on each by that task's model.

    The suite is rebuilt from each manifest, and must give the base that the checkpoint was made from.

    Args:
        split: "dev" or "test".
        on_model: called with each folder's name before it is scored.
        options: of the suites, instead of those in the manifests.
        implied: name and options of the suite of checkpoints whose manifest names none; its dtype is theirs.
        keep: folder for ``scores.jsonl`` and, of language tasks, ``answers.jsonl``, written during scoring. Scores
            found there for the same weights, recipe and data are reused: an interrupted run resumes, with equal rows.
        recipes: gets the recipe of the suite that each checkpoint is scored on, with ``options``.
        check: called with the table to come, of zeros, before anything is scored: raises where its cells do not do.
        report: called with each line of notes on the suites, before anything is scored.
        base: also score the base of the experts on their tasks, as the experts of label `BASE`.
        other_tasks: also score every model, and the base, on these other tasks of its suite, or on all of them if none
            is named: rows whose model begins with `OTHERS`.

    Raises:
        ValueError: lists every checkpoint without a suite, of another base, merged from other experts than those that
            are scored beside it, or of one label, model and seed with another, before any is scored; for scores that
            `main_table` cannot average, before they are computed; for weights that are not finite or not those that
            their manifest names, and scores that are not numbers.
    """
    manifests = manifests_of(folders)
    models = _models(manifests, options or {}, implied, split)
    errors.raise_problems(_base_problems(models) if base else [])
    check(main_table(planned(manifests.values(), split=split), split=split))
    notes = [note for model in models for note in model.suite.notes]
    if other_tasks is not None:
        models = _with_other_tasks(models, other_tasks, split)
        several = [model.folder for model in models if is_several(model.folder)]
        notes += [f"{folder} has a model for each task: it is not scored on other tasks" for folder in several]
    if recipes is not None:
        recipes.update({model.folder: dict(model.suite.recipe) for model in models})
    notes += _other_rows(models) + _other_scores(models) + (_other_options(models) if base else [])
    for line in dict.fromkeys(f"note: {note}" for note in notes):
        report(line)
    rows, records = [], Records(keep)
    with score_bar() as bar:

        def scorer_of(model: Model) -> Scorer:
            return Scorer(model.suite, records, about={"base": model.base}, answers=keep is not None, bar=bar)

        for model in models:
            scorer_of(model).expect(sum(model.suite.repeats.get(task, 1) for task in (*model.tasks, *model.others)))
        for model in models:
            if on_model is not None:
                on_model(str(model.folder))
            for tasks, params, known in _weights(model, report):
                tree.check_finite(tree.flatten(params), str(model.folder))
                rows += score_model(
                    scorer_of(model), params, split, method=model.manifest["label"], model=model.name, seed=model.seed,
                    tasks=tasks, others=model.others, coef=model.manifest["hyperparameters"].get("coef"),
                    fingerprint=known,
                )  # fmt: skip
        if base:
            rows += _of_bases(models, scorer_of, split)
    return rows


def _with_other_tasks(models: Sequence[Model], named: Sequence[str], split: str) -> list[Model]:
    """The models with the other tasks that each is scored on; folders of a model for each task have none.

    Args: named: tasks that no checkpoint here is of; empty: all of them in a suite.
    Raises: ValueError for unknown names, tasks of the checkpoints, and where no model or no task is left.
    """
    made = dict.fromkeys(task for model in models for task in model.tasks)
    every = dict.fromkeys(task for model in models for task in model.suite.tasks if task not in made)
    several = [model.folder for model in models if is_several(model.folder)]
    problems = [
        f"other_tasks names {task!r}, a task of the checkpoints, which the first table has: leave it out"
        for task in named
        if task in made
    ]
    if not every:
        problems.append(
            f"other_tasks: all tasks of the suite ({', '.join(made)}) are tasks of the checkpoints: name those "
            f"that the data has besides, --suite-options tasks {','.join(made)},OTHER, or leave the option out"
        )
    elif len(several) == len(models):
        problems.append(
            f"other_tasks: {errors.and_more(map(str, several))}: a model for each of its tasks and none for other "
            "tasks: leave the option out"
        )
    for task in named if every else ():
        if task not in made:
            with errors.collected(problems):
                errors.check_member("other task", task, list(every))
    errors.raise_problems(problems)
    chosen = list(dict.fromkeys(named)) or list(every)
    models = [
        model._replace(
            others=() if model.folder in several else tuple(task for task in chosen if task in model.suite.tasks)
        )
        for model in models
    ]
    with errors.collected(problems, "other tasks"):
        other_table(
            (
                Result(model.manifest["label"], OTHERS + model.name, task, split, 0.0, model.seed)
                for model in models
                for task in model.others
            ),
            split=split,
        )
    errors.raise_problems(problems)
    return models


def _of_bases(models: Sequence[Model], scorer_of: Callable[[Model], Scorer], split: str) -> list[Result]:
    """The scores of the bases on all tasks of their models, once for every seed, as experts of `BASE`."""
    found: dict[tuple[int, str], Result] = {}
    for model in models:
        for task in (*model.tasks, *model.others):
            if (model.seed, task) in found:
                continue
            scorer = scorer_of(model)
            scorer.expect(model.suite.repeats.get(task, 1))
            tasks = {"tasks": (), "others": (task,)} if task in model.others else {"tasks": (task,)}
            (found[model.seed, task],) = score_model(
                scorer, model.suite.base, split, method=BASE, model=EXPERT + task, seed=model.seed,
                fingerprint=model.base, **tasks,
            )  # fmt: skip
    return [*found.values()]


def _base_problems(models: Sequence[Model]) -> list[str]:
    """Errors for checkpoints of one seed that have several bases, which one line cannot show, or with its label."""
    of: dict[int, dict[str, Path]] = {}
    for model in models:
        of.setdefault(model.seed, {}).setdefault(model.base, model.folder)
    labelled = [str(model.folder) for model in models if model.manifest["label"] == BASE]
    taken = [f"{errors.and_more(labelled)} have the label {BASE}, that of the base's line: leave out --base"]
    return (taken if labelled else []) + [
        f"{' and '.join(map(str, found.values()))} have different bases, and seed {seed} has one line {BASE}: evaluate "
        "them one by one, or leave out --base"
        for seed, found in of.items()
        if len(found) > 1
    ]


def _other_scores(models: Sequence[Model]) -> list[str]:
    """Notes on checkpoints of one task whose scores are of another metric, or of other rows and decodes."""
    first: dict[str, Model] = {}
    others: dict[tuple[Path, str], dict[Path, None]] = {}
    for model in models:
        for task in model.tasks:
            before = first.setdefault(task, model)
            fixed = model.suite.name == "trace" and task in TRACE_METRICS  # its metric is not an option
            names = [name for name in _OF_SCORES if name != "metric" or not fixed]
            names = list(_OF_TEXTS) if task in getattr(model.suite, "plain", ()) else names
            one, other = ({name: own.suite.recipe.get(name) for name in names} for own in (before, model))
            if differ := unlike(one, other, task):
                others.setdefault((before.folder, ", ".join(differ)), {})[model.folder] = None
    return [
        f"scores of {errors.and_more(map(str, found))} cannot be compared with those of {before}: {differ}; "
        "--suite-options sets one value for all"
        for (before, differ), found in others.items()
    ]


def _other_options(models: Sequence[Model]) -> list[str]:
    """Notes on checkpoints of one seed and task whose suites differ: the base is scored as the first of them."""
    first: dict[tuple[int, str], Model] = {}
    notes: dict[tuple[Path, Path], str] = {}
    for model in models:
        for task in (*model.tasks, *model.others):
            before = first.setdefault((model.seed, task), model)
            pair = before.folder, model.folder
            if (differ := unlike(before.suite.recipe, model.suite.recipe, task)) and pair not in notes:
                notes[pair] = f"line {BASE} is scored as {pair[0]}, {pair[1]} otherwise: {', '.join(differ)}"
    return [*notes.values()]


def _models(
    manifests: Mapping[Path, dict[str, Any]], options: Mapping[str, Any], implied: Mapping[str, Any], split: str
) -> list[Model]:
    """The checkpoints with their suites.

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
    rows_of: dict[tuple[Any, ...], Path] = {}
    problems = unreplaced(folder for folder, m in manifests.items() if m["kind"] != "merged") + _stale(manifests)
    for folder, manifest in manifests.items():
        line = manifest["label"], model_of(manifest), manifest["seed"]
        if (other := rows_of.setdefault(line, folder)) != folder:
            problems.append(_named_alike(folder, other, line, manifest))
        if not (recipe := named_by[folder]):
            problems.append(
                f"{folder} names no suite to be scored on: pass --preset lm (language models), text (text encoders) or "
                "images, with --model BASE --data DATA"
            )
            continue
        suite, base = _loaded(recipe, named_by.values(), options, loaded)
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
        elif strange := [task for task in _tasks(manifest) if task not in suite.tasks]:
            problems.append(
                f"{folder} is of {', '.join(strange)}, which are not tasks of suite {suite.name!r}: merge again with "
                f"experts named as its tasks, NAME=FOLDER, {', '.join(suite.tasks)}"
            )
    errors.raise_problems(problems)
    return models


def _named_alike(folder: Path, other: Path, line: tuple[Any, ...], manifest: Mapping[str, Any]) -> str:
    """The error for two models of one label, name and seed."""
    moved = "transport" in manifest
    made = "its merge.py transport command with --overwrite" if moved else "its train.py command with --resume"
    way = "" if manifest["kind"] == "merged" else f", or rename one of them: {made} --label NAME"
    label, model, seed = line
    return f"{folder} and {other} are both {label} {model} of seed {seed}: evaluate each alone, with its own --out{way}"


def _loaded(
    recipe: Mapping[str, Any],
    every: Iterable[Mapping[str, Any] | None],
    options: Mapping[str, Any],
    loaded: dict[str, tuple[Suite, str]],
) -> tuple[Suite, str]:
    """The suite of a recipe, of a model that is loaded once for all recipes that differ in tasks alone."""
    if (kind := _but_tasks({**recipe, **options})) not in loaded:
        alike = (other for other in every if other and _but_tasks({**other, **options}) == kind)
        suite = load_suite(**{**(with_tasks_of(alike) or recipe), **options})
        loaded[kind] = suite, checkpoint.fingerprint(suite.base)
    suite, base = loaded[kind]
    tasks = tuple(() if "tasks" in options else recipe.get("tasks") or ())
    if not tasks or tasks == suite.tasks:
        return suite, base
    if (own := json.dumps([kind, *tasks])) not in loaded:  # once, since a suite keeps what it has computed
        loaded[own] = suite.replace(tasks=tasks, recipe={**suite.recipe, "tasks": list(tasks)}), base
    return loaded[own]


def _but_tasks(recipe: Mapping[str, Any]) -> str:
    """A recipe without its tasks, as a key."""
    return json.dumps({name: value for name, value in recipe.items() if name != "tasks"}, default=repr)


def planned(manifests: Iterable[Mapping[str, Any]], *, split: str, score: float = 0.0) -> list[Result]:
    """The rows that `evaluate` will return for checkpoints, all with one score."""
    return [
        Result(manifest["label"], model_of(manifest), task, split, score, manifest["seed"])
        for manifest in manifests
        for task in _tasks(manifest)
    ]


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


def _other_rows(models: Sequence[Model]) -> list[str]:
    """Notes on experts of one task that were trained on different rows, or on others than their data hold now."""
    found: dict[str, dict[str, list[str]]] = {}
    notes = []
    for _, manifest, suite, *_ in models:
        rows = manifest.get("train_rows") or {}
        if manifest["kind"] != "expert" or "hash" not in rows:
            continue
        task, name = manifest["task"], f"{manifest['label']}, seed {manifest['seed']}"
        found.setdefault(task, {}).setdefault(rows["hash"], []).append(f"{name} on {rows.get('count')} rows")
        # a language suite would tokenize them all
        known = getattr(suite, "OWN_HEADS", False) and suite.recipe == manifest["suite"]
        now = suite.train_rows(task) if known and suite.train_rows is not None else rows
        if now["hash"] != rows["hash"]:
            notes.append(
                f"the expert of {task} of {name} was trained on other rows than {rows['from']} holds now: rows of test "
                "may have been among them"
            )
        if now.get("classes", ()) != rows.get("classes", now.get("classes", ())):
            notes.append(f"the expert of {task} of {name} was trained under other class names than {task} has now")
    for task, own in found.items():
        if len(own) > 1:
            each = "; ".join(map(errors.and_more, own.values()))
            notes.append(f"the experts of {task} were trained on different rows: {each}")
    return notes


def _snapshots(expert: Path) -> list[str | None]:
    """The fingerprints of an expert's snapshots, which a merge of its run may take."""
    manifests = map(manifest_of, checkpoint.snapshots_of(expert))
    return [manifest.get("fingerprint") for manifest in manifests if manifest]


def _implied_suite(folder: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The suite of a checkpoint whose manifest names none: that of the options, in the dtype of the checkpoint."""
    if "name" not in options:
        return None
    try:
        leaves = open_folder(str(folder), local_folder(str(folder), folder)).leaves
    except ValueError:  # a folder of several models, or an adapter
        leaves = {}
    return {"seed": 0, **options, **own_dtype(options["name"], leaves)}


def _tasks(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    if manifest["kind"] == "expert":
        return (manifest["task"],)
    return tuple(manifest["tasks" if manifest["kind"] == checkpoint.JOINT else "experts"])


def _weights(model: Model, report: Callable[[str], None]) -> Iterator[tuple[tuple[str, ...], Params, str]]:
    """The weights in a folder, their tasks, and their fingerprint if it is known; of several models one for each task.

    Raises: ValueError for weights that are not those of the manifest.
    """
    folder, manifest, suite, *_ = model
    base = suite.base
    if manifest["kind"] == "merged" and manifest["base_fingerprint"] != model.base:
        base = whole_base(suite) or base  # merged from whole models, as `_models` has checked
    if is_several(folder):
        check_weights(folder, manifest)
        for task in model.tasks:
            yield (task,), _of_suite(folder, task_params(folder, task, base), suite, base), ""
        return
    known = ""
    if FOREIGN in manifest:
        leaves = _foreign_leaves(Path(manifest[FOREIGN]), manifest["task"], suite, report)
    elif manifest["kind"] == "merged":
        read = checkpoint.load_leaves(folder)[0]
        known = _checked(folder, manifest, read)
        leaves = _of_suite(folder, read, suite, base)
        known = known if leaves is read else ""
    else:
        params = lora.load_expert(folder, suite.base)[0]
        yield model.tasks, params, _checked(folder, manifest, params)
        return
    if narrow := _narrower(leaves, suite.base):
        names = ", ".join(sorted({tree.dtype_name(leaf) for leaf in narrow.values()}))
        report(f"note: {folder} has parameters in {names}: scored in the wider dtype of its suite")
    leaves |= {path: leaf.to(suite.base[path].dtype) for path, leaf in narrow.items()}
    tree.check_same(suite.base, "the base", **{str(folder): leaves})
    for path, leaf in leaves.items():
        if leaf.dtype != (dtype := suite.base[path].dtype):
            raise ValueError(f"{folder} has {path!r} in {leaf.dtype}, its suite in {dtype}: merge again in that dtype")
    yield model.tasks, leaves, "" if narrow else known


def _checked(folder: Path, manifest: Mapping[str, Any], params: Params) -> str:
    """The fingerprint of weights that were read. Raises: ValueError for others than those of the manifest."""
    found = checkpoint.fingerprint(params)
    check_weights(folder, manifest, None if is_adapter(folder) else found)
    return found


def _foreign_leaves(folder: Path, task: str, suite: Suite, report: Callable[[str], None]) -> dict[str, Tensor]:
    """The leaves of an expert of another tool, as a merge in memory reads them. Raises: ValueError as `read_inputs`."""
    if "model" not in suite.recipe:
        raise ValueError(f"{folder} cannot be read as an expert of suite {suite.name!r}, which has no model's folder")
    notes = list[str]()
    stand_ins: dict[str, list[str]] | None = {} if getattr(suite, "OWN_HEADS", False) else None
    start, found = read_inputs(Path(suite.recipe["model"]), {task: folder}, notes, stand_ins=stand_ins)
    part = None if start.keys() == suite.base.keys() else suite_part(suite, start)
    errors.raise_problems(lacking_problems(str(folder), (stand_ins or {}).get(task, ()), suite, part))
    leaves = _of_suite(folder, found[task], suite, start)
    rounded = {
        tree.dtype_name(suite.base[path])
        for path, leaf in leaves.items()
        if leaf.is_floating_point() and path in suite.base
        if torch.promote_types(leaf.dtype, suite.base[path].dtype) != suite.base[path].dtype
    }
    notes += [f"{folder} is rounded to {', '.join(sorted(rounded))}, the dtype of its suite"] if rounded else []
    for line in notes:
        report(f"note: {line}")
    return {
        path: leaf.to(suite.base[path].dtype) if leaf.is_floating_point() and path in suite.base else leaf
        for path, leaf in leaves.items()
    }


def _of_suite(folder: Path, leaves: dict[str, Tensor], suite: Suite, base: dict[str, Tensor]) -> dict[str, Tensor]:
    """The leaves that a suite takes of a model. Raises: ValueError as `suite_part` and `SuitePart.check` do."""
    if base.keys() == suite.base.keys():
        return leaves
    part = suite_part(suite, base)
    part.check(str(folder), leaves)
    return part.of(leaves)


def _narrower(leaves: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point leaves that base's dtype holds exactly and that have another, as --out-dtype writes them."""
    return {
        path: leaf
        for path, leaf in leaves.items()
        if leaf.is_floating_point() and path in base and leaf.dtype != base[path].dtype
        if torch.promote_types(leaf.dtype, base[path].dtype) == base[path].dtype
    }


def write_report(
    out: Path,
    rows: Sequence[Result],
    table: MainTable,
    *,
    checkpoints: Sequence[Path],
    recipes: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
    relative: MainTable | None = None,
    other: MainTable | None = None,
) -> None:
    """``results.jsonl`` (a line a score), ``table.md`` and ``results.json`` (means, what was scored) in a folder.

    ``runs.jsonl`` beside them has what the manifests say: eval.py report needs no checkpoint.

    Args: recipes: the suite that each checkpoint was scored on, as `evaluate` fills it in (default: its manifest's);
        relative: scores in % of the experts', a second table; other: scores on other tasks, `other_table`.
    """
    write_results(out / RESULTS, rows)
    manifests = [
        {**manifest, "suite": recipes.get(folder, manifest.get("suite"))}
        for folder, manifest in manifests_of(checkpoints).items()
    ]
    write_results(out / RUNS, map(run_of, manifests))
    tasks = other_tasks_of(rows)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = machine.describe(shlex.join(["python", *sys.argv]), gpu=gpu)
    summary: dict[str, Any] = {
        **{name: facts[name] for name in ("command", "commit", "hardware", "versions")},
        "suites": list({json.dumps(m["suite"]): m["suite"] for m in manifests}.values()),
        "learning_rates": {m["label"]: m["training"]["lr"] for m in manifests if "lr" in (m.get("training") or {})},
        "split": table.split,
        "means": _means(table),
        **({} if relative is None else {"relative": _means(relative)}),
        **({} if other is None else {"other_tasks": {"tasks": tasks, "means": _means(other)}}),
        "coefs": {
            f"{row.method} {row.model} seed {row.seed}": row.coef
            for row in rows
            if row.coef is not None and not row.model.startswith(OTHERS)
        },
    }
    text = markdown(table)
    if relative is not None:
        text += f"\nIn % of the expert's score, mean over tasks:\n\n{markdown(relative)}"
    if other is not None:
        text += f"\nOther tasks ({', '.join(map(plain, tasks))}), mean over tasks:\n\n{markdown(other)}"
    for name, content in {"table.md": text, "results.json": json.dumps(summary, indent=2) + "\n"}.items():
        checkpoint.write_text(out / name, content)


def _means(table: MainTable) -> dict[str, Any]:
    return {
        method: {column: {"mean": cell.mean, "sd": cell.sd, "by_seed": cell.by_seed} for column, cell in line.items()}
        for method, line in table.cells.items()
    }


def verdict(table: MainTable) -> str:
    """One line: each method's mean over the five mergers, and its difference from the first method's, by seed.

    Where no method has all five, each method's best merged model.
    """
    besides = {"Expert", JOINT}
    five = {method: line["Avg"] for method, line in table.cells.items() if "Avg" in line}
    if not five:
        merged = {
            method: max((cell.mean, name) for name, cell in line.items() if name not in besides)
            for method, line in table.cells.items()
            if line.keys() - besides
        }
        best = ", ".join(f"{method} {mean:.2f} by {name}" for method, (mean, name) in merged.items())
        return f"best merged model: {best}" if best else "no merged models: merge the experts with merge.py"
    first, *others = five
    parts = [f"{method} {cell.mean:.2f}" for method, cell in five.items()]
    for method in others:
        got = differences(five[first].by_seed, five[method].by_seed)
        common = 0 if got is None or five[first].by_seed.keys() == five[method].by_seed.keys() else len(got.values)
        over = f" over the {common} common seed{'s' * (common != 1)}" if common else ""
        parts.append(f"{method} - {first} {'has no seed in common' if got is None else f'{got.mean:+.2f}{over}'}")
    return "mean over five mergers: " + ", ".join(parts)
