"""The suite that scores a merge: of the experts' manifests, or of the options of a call."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .... import checkpoint, errors
from ....errors import problems_of
from ....suites import Suite, describe_options, load_suite
from ....suites.trace_rows import given_metric
from ...manifests import value_for, with_tasks_of
from .inputs import Inputs
from .whole_models import SuitePart, lacking_problems, of_whole_models, own_dtype, suite_part


def common_suite(inputs: Inputs, options: Mapping[str, Any], *, known: Suite | None = None) -> Suite:
    """The suite of experts that have all leaves which it trains, and no others. Args, Raises: as `suite_and_part`."""
    return suite_and_part(inputs, options, known=known, whole=False)[0]


def scoring_suite(inputs: Inputs, options: Mapping[str, Any], implied: Mapping[str, Any]) -> Suite:
    """The suite that scores whole models, of which it may train a part. Args, Raises: as `suite_and_part`."""
    suite, part = suite_and_part(inputs, options, implied=implied, preset=True)
    return suite if part is None else of_whole_models(suite, part)


def suite_and_part(
    inputs: Inputs,
    options: Mapping[str, Any],
    *,
    known: Suite | None = None,
    implied: Mapping[str, Any] = MappingProxyType({}),
    whole: bool = True,
    preset: bool = False,
) -> tuple[Suite, SuitePart | None]:
    """The suite that all experts were trained on, with some options changed, and which part of base it trains.

    Where no expert names one, it is the implied one. Its dtype is that of base unless it is given.

    Args:
        known: the suite, already loaded.
        whole: it may train a part of base; else, and where it trains all of base, the part is None.
        preset: the command has --preset, which an error may advise.

    Raises: ValueError that lists experts of no suite and of another than the first; for a suite of another base.
    """
    # experts that are not of train.py follow the others, or the options
    recipes = {task: manifest.get("suite") for task, manifest in inputs.manifests.items() if manifest}
    other = options.get("name", implied.get("name")) != implied.get("name")
    asked = {"seed": 0, **({} if other else implied)} if implied or "name" in options else None
    first = with_tasks_of(recipes.values()) or asked
    problems = _suite_problems(recipes, first, options, preset=preset)
    errors.raise_problems(problems)
    assert first is not None
    asked = {**first, **own_dtype({**first, **options}.get("name"), inputs.base), **options}
    suite = known or load_suite(**asked, needed=inputs.experts)
    errors.raise_problems(
        [
            *given_metric(suite, options),
            *(
                f"expert {task!r} has no task of suite {suite.name!r}: name it as its task, NAME=FOLDER, of "
                f"{', '.join(suite.tasks)}"
                for task in inputs.experts
                if task not in suite.tasks
            ),
        ]
    )
    # merge.py export wrote experts of train.py as whole models
    whole = whole and all(manifest.get("kind") == "exported" for manifest in inputs.manifests.values() if manifest)
    scores_whole = whole and "model" in suite.recipe and suite.base.keys() != inputs.base.keys()
    part = suite_part(suite, inputs.base) if scores_whole else None
    trained = inputs.base if part is None else part.of(inputs.base)
    if not checkpoint.same(suite.base, trained):
        raise ValueError(
            f"suite {suite.name!r} gives another base here than the experts': train again with these versions, or, of "
            "experts that train.py did not make, give their own base and its dtype as --suite-options model, dtype"
        )
    for name, path in inputs.places.items():
        problems += lacking_problems(str(path), inputs.stand_ins.get(name, ()), suite, part)
    if part is not None:
        for name, leaves in inputs.experts.items():
            problems += problems_of(part.check, f"expert {name!r}", leaves)
    errors.raise_problems(problems)
    return suite, part


def made_problems(suite: Suite, experts: Sequence[str], split: str) -> list[str]:
    """Errors for experts of other tools whose task has no such split: it is made of rows that may have trained them."""
    return [
        f"{task} has no {split} split, and one made of its training rows may hold rows that expert {task!r}, which "
        f"train.py did not make, was trained on: give a file {task}/{split} of DATA with other rows"
        for task in experts
        if split in suite.made.get(task, ())
    ]


_OF_HEADS = "seed", "per_class", "head_c"  # options of a suite that its base or its frozen heads depend on
_OF_ROWS = "model", "data", "columns", "chat", "rows"  # options of a suite that its training rows depend on


def rows_now(suite: Suite, task: str, manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Facts of the rows that the data hold now for an expert, as of those in its manifest; None where not known.

    Suites that would have to read images or tokenize for that are not asked.
    """
    rows_hash: Any = getattr(suite, "rows_hash", None)
    recipe = manifest.get("suite") or {}
    if "hash" not in (manifest.get("train_rows") or {}) or task not in suite.tasks:
        return None
    if rows_hash is not None and all(suite.recipe.get(name) == recipe.get(name) for name in _OF_ROWS):
        return {"hash": rows_hash(task)}
    if getattr(suite, "OWN_HEADS", False) and suite.recipe == recipe and suite.train_rows is not None:
        return suite.train_rows(task)
    return None


def changed_rows(suite: Suite, task: str, manifest: Mapping[str, Any], split: str) -> str:
    """A note on an expert whose training rows are not `rows_now`, without its name; "" for none.

    Args: split: that it is scored on.
    """
    now = rows_now(suite, task, manifest)
    if now is None or now["hash"] == manifest["train_rows"]["hash"]:
        return ""
    place = f"{manifest['train_rows']['from']} holds now, or in another order"
    return f"was trained on other rows than {place}: rows of {split} may have been among them"


def row_notes(suite: Suite, manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """`changed_rows` of the experts that are scored on dev."""
    found = {name: changed_rows(suite, own.get("task", name), own, "dev") for name, own in manifests.items()}
    return [f"expert {name!r} {text}" for name, text in found.items() if text]


OF_OTHERS = (  # a suite, for commands without --preset
    "--suite-options name NAME model BASE data DATA, NAME trace (texts), short_text or clip8 (images), and name each "
    "expert after its task, TASK=FOLDER"
)


def head_problems(label: str, recipe: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Errors for options under which an expert would be scored with other heads than it was trained with."""
    return [
        f"--suite-options {name} {options[name]}: {label} was trained with {recipe[name]}, by which its base or head "
        "was made: leave this option out"
        for name in _OF_HEADS
        if name in options and name in recipe and options[name] != recipe[name]
    ]


def _suite_problems(
    recipes: Mapping[str, Mapping[str, Any] | None],
    first: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    *,
    preset: bool,
) -> list[str]:
    """Errors for experts of no suite, and of another than the first."""
    problems = [f"expert {task!r} names no suite" for task, r in recipes.items() if not r]
    problems += [
        f"expert {task!r} is of another suite than the first ({', '.join(differ)}): --data and --suite-options set one "
        "for all"
        for task, r in recipes.items()
        if r and first and (differ := unlike({**first, **options}, {**r, **options}, task))
    ]
    problems += [text for task, r in recipes.items() if r for text in head_problems(f"expert {task!r}", r, options)]
    if first is None and not recipes:
        own = "--preset lm, text or images with --data DATA, and name each expert after its task, TASK=FOLDER"
        problems.append(f"no expert names a suite: pass {own if preset else OF_OTHERS}")
    return problems


def unlike(first: Mapping[str, Any], other: Mapping[str, Any], task: str) -> list[str]:
    """The options in which two recipes of suites differ, but for tasks, and for what they say of other tasks.

    Gradient checkpointing is an option of the backward pass, which no score needs.
    """
    both = {name: [value_for(task, name, r) for r in (first, other)] for name in dict.fromkeys((*first, *other))}
    ignored = "tasks", "gradient_checkpointing"
    return [f"{name} {b}, of the first {a}" for name, (a, b) in both.items() if name not in ignored and a != b]


def of_base(implied: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """An implied suite, if it has a model, with that of base."""
    has = "name" in implied and "model" in describe_options(implied["name"])
    return {**implied, **({"model": str(base)} if has else {})}
