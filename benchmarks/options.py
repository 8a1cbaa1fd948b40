"""Tables of a command's options from its dataclass: ``python -m benchmarks readme`` writes them into the pages."""

import ast
import inspect
import re
from dataclasses import MISSING, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from smat_fn.scripts.merge.settings import Export, MergeAdapters, Statistics
from smat_fn.scripts.train.settings import Sweep

# marks -> (page, options)
PAGES = {
    "options-export": ("docs/own_model.md", Export),
    "options-sweep": ("docs/own_model.md", Sweep),
    "options-statistics": ("docs/merging.md", Statistics),
    "options-adapters": ("docs/merging.md", MergeAdapters),
}
MANY = 4  # values of an option that are not listed: another table explains them


def table(options: type) -> str:
    """The Markdown table of all options, in the words of ``--help``."""
    body = next(node.body for node in ast.parse(inspect.getsource(options)).body if isinstance(node, ast.ClassDef))
    texts = {
        ast.unparse(node.target): " ".join(text.value.value.split())
        for node, text in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }
    hints = get_type_hints(options, include_extras=True)
    lines = ["| Option | Meaning | Default |", "| --- | --- | --- |"]
    for own in fields(options):
        kind, *more = get_args(hints[own.name]) if get_origin(hints[own.name]) is Annotated else (hints[own.name],)
        default = own.default if own.default_factory is MISSING else own.default_factory()
        assert default is not True, f"--help shows {own.name} as --no-{own.name}, this table does not"
        places = [arg.metavar for arg in more if Positional in more and hasattr(arg, "metavar")]
        name = f"`{places[0] if places else '--' + own.name.replace('_', '-')}`"
        cells = f"{name}{_values(kind)}", _code(texts[own.name]), _code(_default(default, more))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """The text with options, and a command before one, as code."""
    return re.sub(r"((?:merge\.py \w+ )?--[a-z][\w-]*(?:=\"[^\"]*\")?)", r"`\1`", text)


def _values(kind: Any) -> str:
    """The words that an option takes, if they are few."""
    found = next((get_args(part) for part in (kind, *get_args(kind)) if get_origin(part) is Literal), ())
    return "" if not 0 < len(found) <= MANY else " " + ", ".join(f"`{value}`" for value in found)


def _default(default: Any, more: list[Any]) -> str:
    hint = next((arg.help_behavior_hint for arg in more if getattr(arg, "help_behavior_hint", None)), None)
    if hint is not None:
        return str(hint).strip("()").removeprefix("default: ")
    if default is MISSING:
        return "required"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    if default is False:
        return "off"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"
