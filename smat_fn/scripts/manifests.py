"""Manifests of train.py and merge.py: read, checked, and compared with the weights beside them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from .. import checkpoint, errors, lora, machine
from ..errors import problems_of
from ..evaluate.results import Run, check_type
from ..folders.inputs.adapters.peft import is_adapter

FIELDS = {  # of manifests by kind
    "expert": ("task", "label", "seed", "hyperparameters"),
    checkpoint.JOINT: ("tasks", "label", "seed", "hyperparameters"),
    "merged": ("merger", "experts", "label", "seed", "hyperparameters"),
}
KINDS = ("base", "expert", checkpoint.JOINT, "snapshot", "merged")  # of manifests whose values `manifest_of` checks
TYPES = {  # of values in these manifests, as JSON; any may be absent, and null where `FIELDS` does not name it
    **get_type_hints(Run),
    "task": str,
    "tasks": Mapping[str, int],
    "merger": str,
    "preset": str,
    "base_fingerprint": str,
    checkpoint.UNTRAINED: str,
    "experts": Mapping[str, str | None],
    "files": Mapping[str, str],
    "inputs": Mapping[str, Mapping[str, str]],
    "suite": {"name": str, "seed": int, "tasks": Sequence[str]},
}
BY_TASK = ("templates", "data")  # options of suites that may be a mapping with a value for each task
AGAIN = "put back the one written with the weights, or move the folder"


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of train.py or merge.py; empty for other folders, even with a file of this name.

    Raises: ValueError that lists the values of other types than were written.
    """
    file = path / checkpoint.MANIFEST
    found: Any = checkpoint.load_manifest(path) if file.is_file() else {}
    if not isinstance(found, dict) or "kind" not in found:
        return {}
    if (kind := found["kind"]) in KINDS:
        own = {name: value for name, value in found.items() if value is not None or name in FIELDS.get(kind, ())}
        problems = _mistyped(own, TYPES)
        if isinstance(suite := own.get("suite"), dict) and suite:
            problems += [f"suite lacks {name}" for name in ("name", "seed") if suite.get(name) is None]
        errors.raise_problems([f"{file}: {text}: {AGAIN}" for text in problems])
    return found


def by_other_code(manifest: Mapping[str, Any]) -> str:
    """The end of a line on what was made before, where it was made by other code; else an empty text."""
    made = manifest.get("code")
    if made == machine.code():
        return ""
    return f", by other code ({made or 'unknown'}, now {machine.code()}; --overwrite makes it anew)"


def _mistyped(values: Mapping[str, Any], types: Mapping[str, Any], of: str = "") -> list[str]:
    """Errors for values of other types, by name."""
    problems: list[str] = []
    for name in values.keys() & types.keys():
        kind, place = types[name], f"{of}[{name!r}]" if of else name
        nested = isinstance(kind, dict)
        problems += problems_of(check_type, place, values[name], Mapping[str, Any] if nested else kind)
        if nested and isinstance(values[name], dict):
            own = {option: value for option, value in values[name].items() if value is not None}
            problems += _mistyped(own, kind, place)
    return sorted(problems)


def incomplete(manifests: Mapping[Path, Mapping[str, Any]], *more: str) -> list[str]:
    """Errors for manifests of train.py and merge.py, by folder, without `FIELDS` or some of ``more``."""
    lacking = {
        folder: [
            name for name in dict.fromkeys((*FIELDS.get(manifest.get("kind", ""), ()), *more)) if name not in manifest
        ]
        for folder, manifest in manifests.items()
    }
    return [
        f"{folder / checkpoint.MANIFEST} lacks {', '.join(names)}: {AGAIN}"
        for folder, names in lacking.items()
        if names
    ]


def check_weights(path: Path, manifest: Mapping[str, Any], found: str | None = None) -> None:
    """Raises: ValueError for weights that are missing, or not those that the manifest of their folder names: another
    program wrote them, or they are damaged. Finished merges, statistics and scores would be taken for theirs.

    Adapters of earlier code are only read: their manifest has no hash of their file, and its fingerprint is of what
    they add up to with base.

    Args: found: the fingerprint of the weights as they were read; None: their file is hashed, or read.
    """
    stated, files = manifest.get("fingerprint"), _weights_named(manifest)
    if found is not None and stated in (None, found):
        return
    if gone := [path / name for name in files if not (path / name).is_file()]:
        raise ValueError(f"{gone[0]} is missing: put it back, or delete {path} to make it again")
    if files:
        same = checkpoint.file_hashes(path, *files) == files
    elif is_adapter(path):
        same = bool(lora.load_peft(path))
    else:
        same = stated in (None, found or checkpoint.fingerprint(checkpoint.load_leaves(path)[0]))
    if not same:
        raise ValueError(other_weights(path))


def rewritten_meanwhile(
    experts: Mapping[str, Path], inputs: Mapping[str, Iterable[Path]], hashes: Mapping[Path, str]
) -> list[str]:
    """Errors as those of `check_weights` for the experts of a merge that has read and hashed its inputs.

    No file is read again, but those of whole models of earlier code, whose manifests have no hash of them.

    Args: experts: folders by name; inputs: the files that were read, by label; hashes: SHA-256 of these files.
    """
    problems = []
    for name, path in experts.items():
        manifest = manifest_of(path)
        if not (files := _weights_named(manifest)):
            problems += problems_of(check_weights, path, manifest) if manifest and not is_adapter(path) else []
            continue
        read = {str(f.relative_to(path)): hashes[f] for f in inputs[f"expert {name!r}"] if path in f.parents}
        if not (both := files.keys() & read.keys()) or any(files[file] != read[file] for file in both):
            problems.append(other_weights(path))
    return problems


def _weights_named(manifest: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files of weights that a manifest names."""
    files = manifest.get("files")
    return {n: h for n, h in files.items() if n.endswith(".safetensors")} if isinstance(files, dict) else {}


def other_weights(path: Path) -> str:
    """The error for weights that are not those of their manifest."""
    return (
        f"the weights in {path} are not those that its {checkpoint.MANIFEST} names: put these back, or delete the "
        f"folder to make it again, or remove {checkpoint.MANIFEST} to take the new ones as those of another program"
    )


def with_tasks_of(recipes: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The first recipe of a suite with the tasks of all: experts of new tasks may have come beside the first ones.

    Options that have a value for each task get those of new tasks too.
    """
    found = [recipe for recipe in recipes if recipe]
    if not found:
        return None
    tasks = dict.fromkeys(task for recipe in found for task in recipe.get("tasks") or ())
    values: dict[str, Any] = {}
    for name in BY_TASK:
        if all(isinstance(recipe.get(name), Mapping) for recipe in found):
            values[name] = {task: value for recipe in reversed(found) for task, value in recipe[name].items()}
    return {**found[0], **values, **({"tasks": list(tasks)} if tasks else {})}


def value_for(task: str, option: str, recipe: Mapping[str, Any]) -> Any:
    """The value of a suite's option for a task: where it has one for each task, that of this task alone."""
    value = recipe.get(option)
    return value.get(task) if option in BY_TASK and isinstance(value, Mapping) else value


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their dotted names."""
    if not isinstance(value, Mapping):
        return {name: value}
    inner = (flat(child, f"{name}.{key}".strip(".")) for key, child in value.items())
    return {path: leaf for leaves in inner for path, leaf in leaves.items()}
