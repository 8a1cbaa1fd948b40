"""Forms in which mergekit itself writes recipes, into model cards and as the result of a search."""

from collections.abc import Mapping
from typing import Any


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe whose models are strings, and the slices or models of its one module in their usual place.

    What has another form stays as it is.
    """
    out = dict(found)
    modules = out.get("modules")
    if isinstance(modules, dict) and modules.keys() == {"default"} and _is_lifted(own := modules["default"], out):
        out = {name: value for name, value in out.items() if name != "modules"} | own
    return {name: _plain(value, name) for name, value in out.items()}


def _is_lifted(own: Any, found: Mapping[str, Any]) -> bool:
    return isinstance(own, dict) and own.keys() in ({"slices"}, {"models"}) and not own.keys() & found.keys()


def _plain(value: Any, name: str = "") -> Any:
    if name in ("base_model", "model", "source", "tokenizer_source"):
        value = _reference(value)
    if isinstance(value, dict) and name != "parameters":
        return {key: _plain(entry, str(key)) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


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
