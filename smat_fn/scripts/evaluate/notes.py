"""Notes on checkpoints whose scores cannot be compared."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from ... import errors
from ...evaluate.metrics import TRACE_METRICS
from ..merge.experts.suite import changed_rows, rows_now, unlike
from .models import BASE, Model

_OF_SCORES = "metric", "rows", "max_new_tokens", "repeats"  # options of suites that say what a score is of
_OF_TEXTS = "max_length", "rows"  # the same of plain texts


def apart(models: Sequence[Model], of: Callable[[Model], Hashable]) -> list[tuple[int, dict[Hashable, Path]]]:
    """The training seeds whose models differ in something: of each value the first folder."""
    found: dict[int, dict[Hashable, Path]] = {}
    for model in models:
        found.setdefault(model.seed, {}).setdefault(of(model), model.folder)
    return [(seed, own) for seed, own in found.items() if len(own) > 1]


def other_bases(models: Sequence[Model]) -> list[str]:
    """Notes on checkpoints of one seed that have several bases."""
    return [
        f"{' and '.join(map(str, found.values()))} have different bases, which their scores depend on too"
        for _, found in apart(models, lambda model: model.base)
    ]


def other_rows(models: Sequence[Model]) -> list[str]:
    """Notes on experts of one task that were trained on different rows, or on others than their data hold now."""
    found: dict[str, dict[str, list[str]]] = {}
    notes = []
    for _, manifest, suite, *_ in models:
        rows = manifest.get("train_rows") or {}
        if manifest["kind"] != "expert" or "hash" not in rows:
            continue
        task, name = manifest["task"], f"{manifest['label']}, seed {manifest['seed']}"
        found.setdefault(task, {}).setdefault(rows["hash"], []).append(f"{name} on {rows.get('count')} rows")
        if text := changed_rows(suite, task, manifest, "test"):
            notes.append(f"the expert of {task} of {name} {text}")
        now = rows_now(suite, task, manifest) or rows
        if now.get("classes", ()) != rows.get("classes", now.get("classes", ())):
            notes.append(f"the expert of {task} of {name} was trained under other class names than {task} has now")
    for task, own in found.items():
        if len(own) > 1:
            each = "; ".join(map(errors.and_more, own.values()))
            notes.append(f"the experts of {task} were trained on different rows: {each}")
    return notes


def other_scores(models: Sequence[Model]) -> list[str]:
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


def other_options(models: Sequence[Model]) -> list[str]:
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
