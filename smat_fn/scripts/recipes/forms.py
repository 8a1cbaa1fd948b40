"""Forms in which mergekit itself writes recipes, into model cards and as the result of a search."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def number_of(found: Any) -> Any:
    """A value with numbers for ``1e-8``, which PyYAML reads as text since the number has no point."""
    if isinstance(found, str) and _NUMBER.fullmatch(found):
        return float(found)
    if isinstance(found, dict):
        return {name: number_of(value) for name, value in found.items()}
    return [number_of(value) for value in found] if isinstance(found, list) else found


def plain(found: Mapping[str, Any], file: Path, notes: list[str]) -> dict[str, Any]:
    """A recipe whose models are strings, and the slices or models of its one module in their usual place.

    What has another form stays as it is. Appends to ``notes`` which revisions of folders are left out.

    Raises: ValueError that names the file, for an alias that holds itself.
    """
    out = dict(found)
    modules = out.get("modules")
    if isinstance(modules, dict) and modules.keys() == {"default"} and _is_lifted(own := modules["default"], out):
        out = {name: value for name, value in out.items() if name != "modules"} | own
    try:
        return _lifted({name: _plain(value, notes, name) for name, value in out.items()})
    except RecursionError:
        raise ValueError(f"{file}: an alias (*name) is a part of what it stands for (&name): leave it out") from None


def _lifted(found: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose base and method stand beside its slices, where all slices have the same ones."""
    parts = found.get("slices")
    if not (isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)):
        return found
    for name in "base_model", "merge_method":
        own = [part.get(name) for part in parts]
        if isinstance(own[0], str) and own.count(own[0]) == len(own) and found.get(name) in (None, own[0]):
            parts = [{key: value for key, value in part.items() if key != name} for part in parts]
            found = {**found, name: own[0], "slices": parts}
    return found


def _is_lifted(own: Any, found: Mapping[str, Any]) -> bool:
    return isinstance(own, dict) and own.keys() in ({"slices"}, {"models"}) and not own.keys() & found.keys()


def _plain(value: Any, notes: list[str], name: str = "") -> Any:
    if name in ("base_model", "model", "source", "tokenizer_source"):
        value = _reference(value)
        if isinstance(value, str):
            return "+".join(_without_revision(part, notes) for part in value.split("+"))
    if isinstance(value, dict) and name != "parameters":
        return {key: _plain(entry, notes, str(key)) for key, entry in value.items()}
    if name in ("dtype", "out_dtype") and isinstance(value, str):
        return value.removeprefix("torch.")
    return [_plain(entry, notes) for entry in value] if isinstance(value, list) else value


def _without_revision(ref: str, notes: list[str]) -> str:
    """A folder without the revision that mergekit reads from hub repositories alone."""
    folder, at, revision = ref.rpartition("@")
    if not at or Path(ref).exists() or not Path(folder).is_dir():
        return ref
    note = f"{ref}: {folder} is a folder, which has no revisions: @{revision} is ignored"
    notes += [] if note in notes else [note]
    return folder


def _reference(found: Any) -> Any:
    """``{model: {path: A}, lora: {path: B}}`` as A+B."""
    if not isinstance(found, dict) or not {"model"} <= found.keys() <= {"model", "lora"}:
        return found
    parts = [_place(found[name]) for name in ("model", "lora") if found.get(name) is not None]
    return "+".join(parts) if all(isinstance(part, str) for part in parts) else found


def _place(found: Any) -> Any:
    """``{path: A, revision: main}`` as A@main."""
    if isinstance(found, dict) and {"path"} <= found.keys() <= {"path", "revision"}:
        return "@".join(str(part) for part in (found["path"], found.get("revision")) if part)
    return found
