"""A base and its experts, read from folders and checked against each other."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ... import checkpoint, errors, lora, tree
from ...folders import read_inputs


class Inputs(NamedTuple):
    """A base and its experts, checked against each other."""

    base: dict[str, Tensor]
    experts: dict[str, dict[str, Tensor]]  # by task
    manifests: dict[str, dict[str, Any]]  # of the experts, by task


def find_inputs(run: Path) -> tuple[Path, list[Path]]:
    """The base and the experts of a folder that train.py wrote. Raises: ValueError if it holds none."""
    experts = [
        path.parent
        for path in sorted(run.glob(f"*/{checkpoint.MANIFEST}"))
        if checkpoint.load_manifest(path.parent).get("kind") == "expert"
    ]
    if not experts:
        raise ValueError(f"{run} holds no experts: give the --out folder of train.py")
    return run / checkpoint.BASE, experts


def trained_by(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """The name of the preset in the manifests of experts, "digits" where none has one.

    Raises: ValueError that lists the names of several.
    """
    named = {expert: manifest.get("preset") for expert, manifest in manifests.items()}
    found = dict.fromkeys(name for name in named.values() if name)
    if len(found) > 1:
        each = ", ".join(f"{expert} by {name}" for expert, name in named.items())
        raise ValueError(f"the experts were trained by several presets ({each}): say --preset")
    return next(iter(found), "digits")


def manifests_of(experts: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The manifests of those experts that train.py wrote, by folder."""
    return {str(path): manifest for _, path in map(named, experts) if (manifest := manifest_of(path))}


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of train.py or merge.py; nothing for other folders, whatever their file of this name is."""
    found: Any = checkpoint.load_manifest(path) if (path / checkpoint.MANIFEST).is_file() else {}
    return found if isinstance(found, dict) and "kind" in found else {}


def named(expert: Path) -> tuple[str | None, Path]:
    """An expert as it is given, ``FOLDER`` or ``NAME=FOLDER``: its name, if it has one, and its folder or hub name."""
    name, _, rest = str(expert).partition("=")
    if not rest or not name or "/" in name or expert.exists():
        return None, expert
    return name, Path(rest).expanduser()


def load_inputs(base: Path, experts: Sequence[Path]) -> Inputs:
    """Read a base and experts, and check all of them before anything is merged.

    Folders of train.py are known by their manifests. All others are read as a merge on disk reads them: sharded ones,
    hub names, LoRA adapters; such an expert is of the task that its folder is named after, or `named`.

    Raises: ValueError that lists every folder that cannot be read, every expert of another base, shape or dtype, values
        that are not finite, and every task that comes twice.
    """
    problems = [] if experts else ["no experts: give at least one folder"]
    origin: dict[str, Tensor] | None = None
    try:
        origin = checkpoint.load_leaves(base)[0] if manifest_of(base) else _as_it_is(base)[0]
        tree.check_finite(origin, str(base))
    except ValueError as error:
        problems.append(str(error))
    fingerprint = None if origin is None else checkpoint.fingerprint(origin)
    loaded: dict[str, dict[str, Tensor]] = {}
    manifests: dict[str, dict[str, Any]] = {}
    for name, path in map(named, experts):
        try:
            if manifest_of(path):
                like = checkpoint.load_leaves(path)[0] if origin is None else origin
                params, manifest = lora.load_expert(path, like)
            else:
                params, manifest = _as_it_is(base, path)[1], dict[str, Any]()
            tree.check_finite(params, str(path))
        except ValueError as error:
            problems += str(error).split("; ")
            continue
        task = name or manifest.get("task", path.name)
        if task in loaded:
            problems.append(f"{path}: there is another expert named {task!r}, give each once, or name it: NAME={path}")
        if fingerprint is not None and manifest.get("base_fingerprint", fingerprint) != fingerprint:
            problems.append(f"{path} was trained from another base than {base}")
        loaded[task], manifests[task] = params, manifest
    errors.raise_problems(list(dict.fromkeys(problems)))
    assert origin is not None
    return Inputs(origin, loaded, manifests)


def _as_it_is(base: Path, expert: Path | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The leaves of base and of an expert, by the rules of a merge on disk."""
    problems: list[str] = []
    start, found = read_inputs(base, {} if expert is None else {expert.name: expert}, problems)
    errors.raise_problems(problems)
    assert start is not None
    return start, {} if expert is None else found[expert.name]
