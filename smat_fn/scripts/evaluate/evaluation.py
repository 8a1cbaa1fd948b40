"""Score checkpoints on disk."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ... import errors, tree
from ...evaluate import Records, Result, Scorer, score_bar, score_model
from ...evaluate.results import EXPERT, OTHERS, model_of
from ...folders.multi_task import is_several
from ...report.tables import MainTable, main_table, other_table
from .models import BASE, Model, manifests_of, suited, tasks_of
from .notes import apart, other_bases, other_options, other_rows, other_scores
from .weights import weights_of


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
            are scored beside it, of one label, model and seed with another, or of one seed with another and of another
            suite seed, before any is scored; for scores that `main_table` cannot average, before they are computed;
            for weights that are not finite or not those that their manifest names, and scores that are not numbers.
    """
    manifests = manifests_of(folders)
    models = suited(manifests, options or {}, implied, split, other_tasks=other_tasks is not None)
    errors.raise_problems(_seed_problems(models) + (_base_problems(models) if base else []))
    check(main_table(planned(manifests.values(), split=split), split=split))
    notes = [note for model in models for note in model.suite.notes]
    if other_tasks is not None:
        models = _with_other_tasks(models, other_tasks, split)
        several = [model.folder for model in models if is_several(model.folder)]
        notes += [f"{folder} has a model for each task: it is not scored on other tasks" for folder in several]
    if recipes is not None:
        recipes.update({model.folder: dict(model.suite.recipe) for model in models})
    notes += other_rows(models) + other_scores(models) + (other_options(models) if base else other_bases(models))
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
            for tasks, params, known in weights_of(model, report):
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
    made = dict.fromkeys(task for model in models for task in (*model.tasks, *model.manifest.get("experts", ())))
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


def _seed_problems(models: Sequence[Model]) -> list[str]:
    """Errors for checkpoints of one training seed that have several suite seeds."""
    return [
        f"{' and '.join(f'{folder} (suite seed {of})' for of, folder in found.items())} are both of training seed "
        f"{seed}, but of different bases, heads or rows: train them with one --suite-seed, or evaluate them one by one"
        for seed, found in apart(models, lambda model: model.suite.recipe.get("seed"))
    ]


def _base_problems(models: Sequence[Model]) -> list[str]:
    """Errors for checkpoints of one seed that have several bases, which one line cannot show, or with its label."""
    labelled = [str(model.folder) for model in models if model.manifest["label"] == BASE]
    taken = [f"{errors.and_more(labelled)} have the label {BASE}, that of the base's line: leave out --base"]
    return (taken if labelled else []) + [
        f"{' and '.join(map(str, found.values()))} have different bases, and seed {seed} has one line {BASE}: evaluate "
        "them one by one, or leave out --base"
        for seed, found in apart(models, lambda model: model.base)
    ]


def planned(manifests: Iterable[Mapping[str, Any]], *, split: str, score: float = 0.0) -> list[Result]:
    """The rows that `evaluate` will return for checkpoints, all with one score."""
    return [
        Result(manifest["label"], model_of(manifest), task, split, score, manifest["seed"])
        for manifest in manifests
        for task in tasks_of(manifest)
    ]
