"""Errors for fields and parameters of mergekit's recipes that are malformed or have no meaning here, each once."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import check_member, problems_of, suggestion
from ...folders.inputs.stacks import adapted_by
from .forms import number_of
from .methods import METHODS, Method
from .resolve import entries
from .templates import TEMPLATES

FIELDS = (
    "merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template", "name",
)  # fmt: skip
IGNORED = ("int8_mask",)  # wherever it stands
# of methods, with the only value that is implemented: mergekit's default
VARIANTS = {("multislerp", "eps"): 1e-8}
DEFAULTS = {"filter_wise": False, "normalize_weights": True, "eps": 1e-8}  # which change nothing beside any method
_HERE = "mergekit 0.1.5 ignores it here"
_OF_TOKENIZER = "pad_to_multiple_of", "tokens"
_OF_METHODS = {name for method in METHODS.values() for name in (*method.per_model, *method.shared)}
PARAMETERS = frozenset(_OF_METHODS | {name for _, name in VARIANTS})
SLICE = {
    "merge_method": "all slices are merged by one method: write a file for each method, and stack what they make",
    "base_model": "all slices have one base: give base_model once, beside slices",
    "residual_weight": "mergekit 0.1.5 never reads it: delete it",
}  # why a slice has no such field
NAMED = "auto", *TEMPLATES
DTYPES = "float32", "bfloat16", "float16", "float64"


def misspelled(name: object, known: Iterable[str]) -> str:
    """ ", did you mean 'density'?" for a name that is nearly one of ``known``: others are ignored."""
    return suggestion(str(name), known, alike=0.8, beginning=False)


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
            f"{file} is a search of mergekit-evolve (genome), not a merge: write a recipe, or choose a coefficient "
            "by lm_eval or another program: merge.py MERGER --search --score COMMAND"
        )
    return ""


def recipe_problems(found: Mapping[str, Any], notes: list[str]) -> Iterator[str]:
    """Errors for the fields of a mergekit recipe; no model is read. Appends to ``notes`` what has no effect."""
    if found.get("modules") is not None:  # it is in a configuration that was written with its defaults
        yield (
            "modules is not supported: only the module default is read, with slices or models alone: give models or "
            "slices"
        )
    yield from _unknown_fields([name for name in found if name != "modules"], notes)
    method = METHODS.get(str(found.get("merge_method")))
    if found.get("merge_method") is None:
        yield f"merge_method is missing: give one of {', '.join(METHODS)}"
    elif method is None:
        yield from problems_of(check_member, "merge_method", str(found["merge_method"]), list(METHODS))
    for name in ("dtype", "out_dtype"):
        if found.get(name) is not None:
            yield from problems_of(check_member, name, str(found[name]), list(DTYPES))
    yield from _beside_problems(found)
    if found.get("models") and found.get("slices"):
        yield "models and slices are both given: leave one out"
    elif not (found.get("models") or found.get("slices") or found.get("modules")):
        yield "models is missing: list the models to merge, or slices of them"
    origin = found.get("base_model")
    if not (origin is None or isinstance(origin, str)):
        yield f"base_model is {origin!r}: must be a folder or a hub name, or MODEL+ADAPTER"
    if method and origin is None and (method.pair or (method.based and method.alone is None)):
        yield f"base_model is missing: {found['merge_method']} needs one"
    slices = found.get("slices") or []
    if not isinstance(slices, list) or any(not isinstance(part, dict) for part in slices):
        yield "slices must be a list of slices, each with sources"
        slices = []
    for name in dict.fromkeys(name for part in slices for name in part if name not in ("sources", "parameters")):
        yield f"slices.{name} is not supported: {SLICE.get(name, 'a slice has sources and parameters, delete it')}"
    parts: list[Mapping[str, Any]] = [{"slices": [part]} for part in slices]
    parts += [found] if found.get("models") else []
    if any(not list(entries(part)) for part in parts):
        yield "models, and sources of every slice, must be lists of models"
    for place, entry in enumerate(entries(found)):
        yield from _entry_problems(place, entry, sliced=bool(slices))
    yield from _misplaced(list(entries(found)), notes)
    yield from _settings_problems(found, method, notes)


def _beside_problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a recipe's tokenizer and chat template."""
    given = found.get("tokenizer")
    if given is not None and found.get("tokenizer_source") is not None:
        yield "tokenizer and tokenizer_source are both given: leave one out"
    if given is not None and not isinstance(given, dict):
        yield f"tokenizer is {given!r}: must have source"
    elif given:
        yield from _token_problems(given)
    source = found.get("tokenizer_source") or (given.get("source") if isinstance(given, dict) else None)
    if source is not None and not isinstance(source, str):
        yield f"tokenizer_source is {source!r}: must be base, union or a model"
    template = found.get("chat_template")
    if template is not None and not (isinstance(template, str) and ("{" in template or template in NAMED)):
        yield f"chat_template is {template!r}: must be a template in Jinja, or one of {', '.join(NAMED)}"


def _token_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the fields of a recipe's tokenizer."""
    for name in given.keys() - {"source", "tokens", "pad_to_multiple_of"}:
        yield f"tokenizer.{name} is not supported: it has source, tokens and pad_to_multiple_of"
    pad, tokens = given.get("pad_to_multiple_of"), given.get("tokens")
    if pad is not None and (type(pad) is not int or pad < 1):
        yield f"tokenizer.pad_to_multiple_of is {pad!r}: must be a number above 0"
    if tokens is not None and not isinstance(tokens, dict):
        yield f"tokenizer.tokens is {tokens!r}: must be tokens with source"
        return
    for token, own in (tokens or {}).items():
        label = f"tokenizer.tokens.{token}"
        if not isinstance(own, dict) or own.keys() - {"source", "force"}:
            yield f"{label} is {own!r}: must have source, and may have force"
            continue
        if type(own.get("force", False)) is not bool:
            yield f"{label}.force is {own['force']!r}: must be true or false"
        source = own.get("source")
        if isinstance(source, dict):
            kind, places = source.get("kind"), source.keys() & {"token", "token_id"}
            model = kind == "model_token" and isinstance(source.get("model"), str) and len(places) == 1
            if not (model or source == {"kind": "zero"}) or source.keys() - {"kind", "model", *places}:
                yield f"{label}.source is {source!r}: kind zero, or model_token of a model with token or token_id"
        elif source is not None and not isinstance(source, str):
            yield f"{label}.source is {source!r}: must be a model, or have kind"


def _entry_problems(place: int, entry: Any, *, sliced: bool) -> Iterator[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        yield f"model {place} is {entry!r}: must have model, a folder or a hub name"
        return
    ref, layers = entry["model"], entry.get("layer_range")
    if sliced and not (isinstance(layers, list) and len(layers) == 2 and all(type(layer) is int for layer in layers)):
        yield f"layer_range of model {ref} is {layers!r}: must be two numbers, [first, last + 1]"
    if "+" in ref and adapted_by(Path(ref)) is None and not Path(ref).exists():
        yield f"model {ref}: must be MODEL+ADAPTER, two folders or hub names"


def _misplaced(found: Sequence[Any], notes: list[str]) -> Iterator[str]:
    """Errors for fields beside ``model`` that have another place, each once; notes on those that have none."""
    where = dict[str, list[str]]()
    for entry in found:
        for name in entry if isinstance(entry, dict) and isinstance(entry.get("model"), str) else ():
            if name not in ("model", "parameters", "layer_range"):
                where.setdefault(name, []).append(entry["model"])
    for name, refs in where.items():
        whose = f"{name} stands beside model {' and '.join(dict.fromkeys(refs))}"
        if name == "revision":
            yield f"{whose}: write model: {refs[0]}@REVISION, or delete it; {_HERE}"
        elif name in PARAMETERS:
            yield f"{whose}: put it under parameters there, or delete it; {_HERE}"
        elif near := misspelled(name, ("model", "parameters", "layer_range")):
            yield f"{whose}, which has no such field{near}"
        else:
            notes.append(f"{whose}: ignored, as in mergekit")


def _unknown_fields(names: Iterable[str], notes: list[str]) -> Iterator[str]:
    """Errors for fields beside ``merge_method`` that stand in a wrong place or are misspelled; notes on others."""
    rest = list[str]()
    for name in names:
        if name in FIELDS or name in IGNORED:
            continue
        if name in _OF_TOKENIZER:
            yield f"{name} is a field of tokenizer: put it there, as tokenizer: {{{name}: ...}}, or delete it; {_HERE}"
        elif name in PARAMETERS:
            yield f"{name} is a parameter: put it under parameters, or delete it; {_HERE}"
        elif near := misspelled(name, FIELDS):
            yield f"{name} is not a field of a recipe{near}"
        else:
            rest.append(str(name))
    if rest:
        what = f"{rest[0]} is not a field" if len(rest) == 1 else f"{', '.join(rest)} are not fields"
        notes.append(f"{what} of a recipe: ignored, as in mergekit")


def _settings_problems(found: Mapping[str, Any], method: Method | None, notes: list[str]) -> Iterator[str]:
    """Errors for the parameters of a recipe, of its slices and of its models; notes on those that a method lacks.

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
            if name in own or name in IGNORED or (method is None and name in PARAMETERS):
                yield from _setting_problems(f"parameters.{name}{whose}", value)
            elif method is not None and not _is_default(name, value):
                foreign.setdefault(name, []).append(whose)
    if method is not None and foreign:
        yield from _foreign(foreign, found["merge_method"], method, notes)


def _is_default(name: str, value: Any) -> bool:
    """Whether a parameter has mergekit's default, so that it changes nothing."""
    return name in DEFAULTS and number_of(value) == DEFAULTS[name]


def _foreign(names: Mapping[str, Sequence[str]], called: str, method: Method, notes: list[str]) -> Iterator[str]:
    """Errors for parameters in a wrong place, or misspelled; notes on others, which a method does not have.

    Args: names: whose they are, by name.
    """
    own, rest = [*method.per_model, *(name for name in method.shared if name not in IGNORED)], dict[str, str]()
    for name, whose in names.items():
        models = [text.removeprefix(" of model ") for text in dict.fromkeys(whose) if text]
        where = f"parameters.{name}" + (f" of model {' and '.join(models)}" if models else "")
        if (called, name) in VARIANTS:
            yield f"{where}: {called} is implemented with {name} {VARIANTS[called, name]} alone, delete it"
        elif name in method.shared:
            yield f"{where}: {name} is one of the whole merge, put it under parameters beside merge_method"
        elif name not in PARAMETERS and (near := misspelled(name, own)):
            yield f"{where} is not a parameter of {called}{near}"
        else:
            rest[str(name)] = where
    if rest:
        has = f", it has {', '.join(own)}" if own else ""
        notes.append(f"{', '.join(rest.values())}: ignored, as in mergekit: {called} has no {' or '.join(rest)}{has}")


def _setting_problems(label: str, value: Any) -> Iterator[str]:
    if _is_scalar(value):
        try:
            finite = math.isfinite(float(value))
        except (ValueError, OverflowError):
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
