"""Errors for fields and parameters of mergekit's recipes that have no meaning here, each reported once."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import suggestion
from .recipe_forms import number_of
from .recipe_methods import METHODS, Method
from .recipe_resolve import entries

FIELDS = (
    "merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template", "name",
)  # fmt: skip
IGNORED = ("int8_mask",)  # wherever it stands
# of methods, with the only value that is implemented: mergekit's default
VARIANTS = {
    ("model_stock", "filter_wise"): False,
    ("multislerp", "normalize_weights"): True,
    ("multislerp", "eps"): 1e-8,
}
_NEAR = 0.8  # how much of two words must agree for one to be proposed
_OF_TOKENIZER = "pad_to_multiple_of", "tokens"
_OF_METHODS = {name for method in METHODS.values() for name in (*method.per_model, *method.shared)}
PARAMETERS = frozenset(_OF_METHODS | {name for _, name in VARIANTS})


def foreign_file(found: Mapping[str, Any], file: Path) -> str:
    """The error for a file of another of mergekit's commands, or of FusionBench; empty for a recipe."""
    targets = [own["_target_"] for own in (found, *found.values()) if isinstance(own, Mapping) and "_target_" in own]
    if targets:
        return (
            f"{file} configures {targets[0]} (_target_), it is not a recipe: docs/from_mergekit.md maps FusionBench's "
            "methods to mergers here, as merge.py MERGER"
        )
    if "experts" in found and str(found.get("merge_method", "moe")) == "moe":
        return f"{file} describes a mixture of experts: run merge.py moe {file}"
    if "genome" in found:
        return (
            f"{file} is a search of mergekit-evolve (genome), not a merge: write a recipe, or choose a coefficient on "
            "dev data by merge.py MERGER --run RUN --search"
        )
    return ""


def unknown_fields(names: Iterable[str]) -> Iterator[str]:
    """Errors for fields beside ``merge_method`` that a recipe does not have."""
    rest = list[str]()
    for name in names:
        if name in FIELDS or name in IGNORED:
            continue
        if name in _OF_TOKENIZER:
            yield f"{name} is a field of tokenizer: put it there, as tokenizer: {{{name}: ...}}"
        elif name in PARAMETERS:
            yield f"{name} is a parameter: put it under parameters"
        elif near := suggestion(str(name), FIELDS, alike=_NEAR):
            yield f"{name} is not a field of a recipe{near}"
        else:
            rest.append(str(name))
    if rest:
        one = len(rest) == 1
        what = f"{rest[0]} is not a field" if one else f"{', '.join(rest)} are not fields"
        yield (
            f"{what} of a recipe, which has {', '.join(FIELDS)}: delete {'it' if one else 'them'}, mergekit ignores "
            f"{'it' if one else 'them'} too"
        )


def settings_problems(found: Mapping[str, Any], method: Method | None) -> Iterator[str]:
    """Errors for the parameters of a recipe, of its slices and of its models.

    Args: method: None: unknown, so that every parameter may be one of it.
    """
    slices = found.get("slices")
    parts = [part for part in slices if isinstance(part, dict)] if isinstance(slices, list) else []
    models = [entry for entry in entries(found) if isinstance(entry, dict) and isinstance(entry.get("model"), str)]
    scopes = [("", scope) for scope in (found.get("parameters"), *(part.get("parameters") for part in parts))]
    scopes += [(f" of model {entry['model']}", entry.get("parameters")) for entry in models]
    foreign = dict[str, list[str]]()  # name -> whose
    for whose, scope in scopes:
        if scope is not None and not isinstance(scope, dict):
            yield f"parameters{whose} is {scope!r}: must be parameters by name"
            continue
        for name, value in (scope or {}).items():
            own = () if method is None else (*method.per_model, *(() if whose else method.shared))
            if name in own or name in IGNORED or method is None:
                yield from _setting_problems(f"parameters.{name}{whose}", value)
            elif not _is_default(name, value):
                foreign.setdefault(name, []).append(whose)
    if method is not None and foreign:
        yield from _foreign(foreign, found["merge_method"], method)


def _is_default(name: str, value: Any) -> bool:
    """Whether a parameter of a variant has mergekit's default, so that it changes nothing."""
    return any(name == own and number_of(value) == default for (_, own), default in VARIANTS.items())


def _foreign(names: Mapping[str, Sequence[str]], called: str, method: Method) -> Iterator[str]:
    """Errors for parameters that a method does not have. Args: names: whose they are, by name."""
    own, rest = [*method.per_model, *(name for name in method.shared if name not in IGNORED)], dict[str, str]()
    for name, whose in names.items():
        models = [text.removeprefix(" of model ") for text in dict.fromkeys(whose) if text]
        where = f"parameters.{name}" + (f" of model {' and '.join(models)}" if models else "")
        if (called, name) in VARIANTS:
            yield f"{where}: {called} is implemented with {name} {VARIANTS[called, name]} alone, delete it"
        elif name in method.shared:
            yield f"{where}: {name} is one of the whole merge, put it under parameters beside merge_method"
        elif name not in PARAMETERS and (near := suggestion(str(name), own, alike=_NEAR)):
            yield f"{where} is not a parameter of {called}{near}"
        else:
            rest[str(name)] = where
    if rest:
        has, it = f" (it has {', '.join(own)})" if own else "", "it" if len(rest) == 1 else "them"
        yield (
            f"{', '.join(rest.values())}: {called} has no {' or '.join(rest)}{has}, and mergekit ignores {it}: "
            f"delete {it}"
        )


def _setting_problems(label: str, value: Any) -> Iterator[str]:
    if _is_scalar(value):
        try:
            finite = math.isfinite(float(value))
        except ValueError:
            finite = False
        if isinstance(value, str) and value.lower() in ("true", "false"):
            yield f"{label} is the text {value!r}: write {value.lower()} without quotes"
        elif not finite:
            yield f"{label} is {value!r}: must be a finite number"
    elif isinstance(value, dict):
        if "value" not in value or value.keys() - {"value", "filter"}:
            yield f"{label} holds {value!r}: must have value, and may have filter"
        elif not isinstance(value.get("filter", ""), str | None):
            yield f"{label} has the filter {value['filter']!r}: must be a part of a parameter's name"
        elif not isinstance(value["value"], list) and not _is_scalar(value["value"]):
            yield f"{label} has the value {value['value']!r}: must be a number, or a list of numbers"
        else:
            yield from _setting_problems(label, value["value"])
    elif isinstance(value, list) and value:
        if any(isinstance(entry, dict) for entry in value) and not all(isinstance(entry, dict) for entry in value):
            yield f"{label} mixes numbers and filters"
        elif not all(isinstance(entry, dict) or _is_scalar(entry) for entry in value):
            yield f"{label} is {value!r}: must be a number, a list of numbers, or filters with values"
            return
        for entry in value:
            yield from _setting_problems(label, entry)
    else:
        yield f"{label} is {value!r}: must be a number, a list of numbers, or filters with values"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))
