"""Inputs of a merge: their names in its files, and where they lie on this machine."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import checkpoint
from ...folders.inputs.hub import repository_of
from ...folders.inputs.reading import SUFFIXES, is_single
from ...folders.inputs.stacks import adapted_by, stack_of, stack_parts

MERGES = "merges"  # folder of a file of several merges, with a folder for each one that has a name


def placed(given: str, places: Sequence[Path]) -> Path:
    """The path of an input that a recipe names: where it lies here, if that is known, else as it is given.

    Args: places: folders of this machine in which it may be.
    """
    near = (folder for place in places for folder in (place, place.parent))  # modules lie in folders of their own
    if here := next((folder for folder in near if _is_named(folder, given)), None):  # also "a[0:2]" and "a+b"
        return here
    if parts := stack_parts(Path(given)):
        return stack_of([part._replace(path=placed(str(part.path), places)) for part in parts])
    if pair := adapted_by(Path(given)):
        return Path("+".join(str(placed(str(own), places)) for own in pair))
    for place in places:
        if is_single(file := place / Path(given).name):
            return file
    return Path(given)


def _is_named(place: Path, given: str) -> bool:
    """Whether a folder is that of a name in a recipe, and not of another one that was written there since."""
    own = Path(given).parts
    if place.parts[max(0, len(place.parts) - len(own)) :] == own:
        return True
    repository, _, revision = given.partition("@")
    cached = place.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    if repository_of(Path(given)) is None or cached.name != f"models--{repository.replace('/', '--')}":
        return False
    ref = cached / "refs" / revision
    return place.name.startswith(ref.read_text().strip() if revision and ref.is_file() else revision)


def folders_beside(folder: Path) -> dict[str, list[Path]]:
    """Where the inputs of a merge in this folder lie, by label."""
    found = {
        label: [place for file in files.values() if (place := Path(os.path.abspath(Path(file).parent))).is_dir()]
        for label, files in sources(folder).items()
    }
    return {label: list(dict.fromkeys(places)) for label, places in found.items() if places}


def placed_by_name(path: Path, depth: int = 1) -> str:
    """An input without its place on this machine: a hub name, or the name of its folder, of each part of a stack.

    Args: depth: names of folders above it, and its own, that are given; of different parts of one name as many as tell
        them from each other.
    """
    if parts := stack_parts(path):
        given = {part.path for part in parts}
        while len({placed_by_name(own, depth) for own in given}) < len({os.path.abspath(own) for own in given}):
            depth += 1
        return str(stack_of([part._replace(path=Path(placed_by_name(part.path, depth))) for part in parts]))
    if pair := adapted_by(path):
        return "+".join(placed_by_name(own, depth) for own in pair)
    if repository_of(path):
        return str(path)
    parents = Path(os.path.abspath(path)).parents
    if len(parents) > 1 and parents[1].name == checkpoint.SNAPSHOTS:  # its own name is that of the finished expert
        depth = max(depth, 3)
    if len(parents) > 1 and parents[1].name == MERGES:  # its own name is that of the merger
        depth = max(depth, 2)
    return "/".join(Path(os.path.abspath(path)).parts[-depth:])


def folder_name(path: Path) -> str:
    """The name of a folder, that of the working directory too; of a file of weights, without its suffix."""
    if is_single(path) or (path.suffix in SUFFIXES and repository_of(path)):
        return path.stem
    return path.name if path.name not in ("", "..") else path.resolve().name


def named(files: Iterable[Path]) -> dict[str, Path]:
    """The files of one input by name, with the names of so many of their folders as tell them from each other."""
    files = sorted(files)
    depth = next(d for d in range(1, 99) if len({file.parts[-d:] for file in files}) == len(files))
    return {"/".join(file.parts[-depth:]): file for file in files}


def sources_text(inputs: Mapping[str, Sequence[Path]], suite: Mapping[str, str]) -> str:
    """`SOURCES`: where the inputs of a merge lie on this machine, which neither manifest nor model card says.

    Args: suite: the folders of its suite, by option.
    """
    places = {label: {name: str(file.absolute()) for name, file in named(own).items()} for label, own in inputs.items()}
    places |= {"suite": dict(suite)} if suite else {}
    return json.dumps(places, indent=2) + "\n"


def sources(folder: Path) -> dict[str, dict[str, str]]:
    """Where the inputs of a merge lie, by label and name; nothing where that is not known."""
    try:
        found: Any = json.loads((folder / checkpoint.SOURCES).read_text(encoding="utf-8"))
        return {str(label): {str(name): str(file) for name, file in own.items()} for label, own in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}
