"""Suites of tasks: a base model, one loss and one score per task, batches by random access.

Torch is imported with the first suite, not here: ``--help`` lists a suite's options without it.
"""

import ast
from collections.abc import Collection
from dataclasses import MISSING, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import suggestion
from ..types import Suite

SUITES = {"digits": "Digits", "trace": "Trace", "clip8": "Clip8", "short_text": "ShortText"}  # module -> its class

__all__ = ["SUITES", "Suite", "describe_options", "has_heads", "load_suite", "task_names"]


def load_suite(name: str, *, seed: int, needed: Collection[str] | None = None, **options: Any) -> Suite:
    """The suite of a name.

    Args:
        seed: of splits, base and heads, as the suite uses it.
        needed: tasks whose rows are read and checked, if the suite can skip other tasks; default: all. Names of no
            task are ignored.
        options: fields of the suite's ``Options``.

    Raises: ValueError for a name not in `SUITES`, unknown, missing or bad options, and whatever the suite cannot load.
    """
    suite = _class(name, options)
    required = [field.name for field in fields(suite.Options) if field.default is MISSING]
    if lacking := [option for option in required if options.get(option) in (None, "")]:
        way = f"--{lacking[0]}, or --suite-options {lacking[0]} where a command has no such option"
        raise ValueError(f"{name} needs {' and '.join(lacking)}: a folder, or a name on the hub ({way})")
    if needed is not None and "only" in {field.name for field in fields(suite.Options)}:
        options["only"] = tuple(task for task in suite.task_names(**options) if task in needed) or None
    return suite(seed=seed, **options)


def task_names(name: str, **options: Any) -> tuple[str, ...]:
    """The tasks of a suite, without loading it. Raises: ValueError for unknown names, and data without tasks."""
    return _class(name, options).task_names(**options)


def has_heads(name: str) -> bool:
    """Whether a suite scores models under frozen heads that it makes itself, whatever head a model has."""
    return bool(_class(name, {}).OWN_HEADS)


def describe_options(name: str) -> dict[str, tuple[str | None, str]]:
    """Every option of a suite with its default as written (None: it is required) and its help text."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == f"{SUITES[name]}Options")
    return {
        ast.unparse(node.target): (ast.unparse(node.value) if node.value else None, str(text.value.value))
        for node, text in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _class(name: str, options: dict[str, Any]) -> Any:
    if name not in SUITES:
        raise ValueError(f"suite {name!r} is unknown, the suites are {', '.join(map(repr, SUITES))}")
    suite = getattr(import_module(f".{name}", __package__), SUITES[name])
    known = [field.name for field in fields(suite.Options)]
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(f"{name} has no options {unknown}{suggestion(unknown[0], known) or ':'} they are {known}")
    return suite
