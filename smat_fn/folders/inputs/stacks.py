"""Stacks of layers of several models, as ``A[0:3]+B[1:4]``: views of their folders; nothing is copied.

A last part without layers, ``C[4:4]``, gives the last norm and the head alone. ``A[0:3]~`` only holds the place of
layers that a model does not have: mergers that can leave an expert out of a leaf (`Merger.uneven`) do. In
``A+L[0:3]`` the model is A with the adapter L.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ... import errors
from .reading import Folder, config_of
from .vocabulary import by_token

COUNTS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"  # what config.json calls the number of layers
_PART = re.compile(r"(.+?)\[(\d+):(\d+)\](~?)(?:\+|$)")
_LAYER = re.compile(r"(.*?\.|)(\d+)\.(.+)")
_FIRST = "embed", "wte", "wpe", "shared"  # leaves before the layers, by their names; all others come after them


class StackPart(NamedTuple):
    """Layers of a model."""

    path: Path  # its folder or hub name, or MODEL+ADAPTER (`adapted_by`)
    start: int
    stop: int
    absent: bool = False


def stack_parts(path: Path) -> list[StackPart]:
    """The parts of a stack ``A[0:3]+B[1:4]``; none for anything that exists or is written otherwise."""
    text, parts, place = str(path), list[StackPart](), 0
    if not text.endswith(("]", "]~")) or path.exists():
        return []
    while found := _PART.match(text, place):
        parts.append(StackPart(Path(found[1]), int(found[2]), int(found[3]), bool(found[4])))
        place = found.end()
    return parts if place == len(text) else []


def adapted_by(path: Path) -> tuple[Path, Path] | None:
    """The model and the adapter of ``MODEL+ADAPTER``; None for anything that exists or is written otherwise."""
    model, plus, adapter = str(path).partition("+")
    return (Path(model), Path(adapter)) if plus and model and adapter and not path.exists() else None


def stack_of(parts: Sequence[StackPart]) -> Path:
    """A stacked model as `stack_parts` reads it."""
    return Path("+".join(f"{p.path}[{p.start}:{p.stop}]{'~' * p.absent}" for p in parts))


def folders_of(path: Path) -> list[Path]:
    """The folders, or hub names, that an input is read from."""
    models = [part.path for part in stack_parts(path)] or [path]
    return list(dict.fromkeys(folder for model in models for folder in adapted_by(model) or [model]))


def layers_read(path: Path) -> list[list[int]]:
    """The layers that a stack reads: of each part the place of its folder among them, start, stop, absent."""
    parts = stack_parts(path)
    places = list(dict.fromkeys(part.path for part in parts))
    return [[places.index(part.path), part.start, part.stop, int(part.absent)] for part in parts]


def layer_of(path: str) -> tuple[str, int, str] | None:
    """Name before, number and name after it of a layer's leaf: the first number in its name."""
    found = _LAYER.fullmatch(path)
    return None if found is None else (found[1], int(found[2]), found[3])


def layers_of(folder: Folder) -> int:
    """The number of layers of a model.

    Raises: ValueError for a model whose layers stand in several places, as encoder and decoder, or in none.
    """
    places: dict[str, int] = {}
    for path in folder.leaves:
        if found := layer_of(path):
            places[found[0]] = max(places.get(found[0], 0), found[1] + 1)
    if len(places) != 1:
        where = f"in several places ({', '.join(map(repr, sorted(places)))})" if places else "nowhere"
        raise ValueError(f"{folder.label} has numbered layers {where}: only models with one list of layers are stacked")
    return next(iter(places.values()))


def is_first(path: str) -> bool:
    """Whether a leaf outside the layers comes before them."""
    return any(word in path for word in _FIRST)


def stacked(label: str, parts: Sequence[tuple[Folder, int, int]], absent: Sequence[bool] = ()) -> Folder:
    """Layers [start, stop) of models one after another, numbered anew.

    Embeddings are those of the first part, the last norm and the head those of the last one; folder, configuration and
    tokenizer are the first one's, with the new number of layers (`Folder.config`).

    Args: absent: which parts only hold the place; default: none.

    Raises: ValueError that lists ranges that a model has not, and leaves that differ between the parts.
    """
    problems = list[str]()
    for place, (folder, start, stop) in enumerate(parts):
        count = layers_of(folder)
        empty = start == stop and place == len(parts) - 1  # there for the last norm and the head
        if not (start < stop or empty) or stop > count:
            problems.append(f"{label}: {folder.root} has layers [0:{count}], not [{start}:{stop}]")
    errors.raise_problems(problems)
    origins = _origins(parts)
    problems = list(dict.fromkeys(_unlike(label, parts)))
    errors.raise_problems(problems)
    leaves = {path: folder.leaves[name] for path, (folder, name) in origins.items()}
    reads = {path: folder.reads[name] for path, (folder, name) in origins.items()}
    stores = {file: store for folder, *_ in parts for file, store in folder.stores.items()}
    absent = absent or [False] * len(parts)
    root, changes, outputs = parts[0][0].root, _config(label, parts), parts[0][0].outputs
    found = Folder(label, leaves, reads, stores, root, changes, outputs, absent=_absent(leaves, parts, absent))
    return found.noted(*dict.fromkeys(folder.note for folder, *_ in parts))


def _absent(
    leaves: Mapping[str, Tensor], parts: Sequence[tuple[Folder, int, int]], absent: Sequence[bool]
) -> frozenset[str]:
    """The leaves of parts that only hold the place."""
    rows = [gone for (_, start, stop), gone in zip(parts, absent, strict=True) for _ in range(start, stop)]
    place = {path: layer_of(path) for path in leaves}
    return frozenset(
        path for path, own in place.items() if (rows[own[1]] if own else absent[0] if is_first(path) else absent[-1])
    )


def _origins(parts: Sequence[tuple[Folder, int, int]]) -> dict[str, tuple[Folder, str]]:
    """The folder and the name there of every leaf of a stack, in its order."""
    first, last = parts[0][0], parts[-1][0]
    found = {path: (first, path) for path in first.leaves if layer_of(path) is None and is_first(path)}
    place = 0
    for folder, start, stop in parts:
        for path in folder.leaves:
            if (own := layer_of(path)) and start <= own[1] < stop:
                found[f"{own[0]}{place + own[1] - start}.{own[2]}"] = folder, path
        place += stop - start
    return found | {path: (last, path) for path in last.leaves if layer_of(path) is None and not is_first(path)}


def _unlike(label: str, parts: Sequence[tuple[Folder, int, int]]) -> list[str]:
    """Leaves outside the layers that the first or the last part lacks, and leaves of equal names and other shapes.

    Of parts in between nothing but layers is read, so that their vocabularies may differ.
    """
    shapes, problems = dict[str, tuple[Tensor, Folder]](), []
    first, last = parts[0][0], parts[-1][0]
    outside = [{path for path in folder.leaves if layer_of(path) is None} for folder in (first, last)]
    if lone := outside[0] ^ outside[1]:
        problems.append(f"{label}: parameter {min(lone)!r} is in {first.root} or {last.root} alone")
    for place, (folder, *_) in enumerate(parts):
        for path, leaf in folder.leaves.items():
            found = layer_of(path)
            if found is None and 0 < place < len(parts) - 1:
                continue
            name = found[2] if found else path
            like, where = shapes.setdefault(name, (leaf, folder))
            if where is not folder and like.shape != leaf.shape:
                sizes = f"{tuple(leaf.shape)} in {folder.root}, {tuple(like.shape)} in {where.root}"
                why = ": the first and the last slice must have one vocabulary" if by_token(path) and not found else ""
                problems.append(f"{label}: parameter {path!r} is {sizes}{why}")
    return problems


def _config(label: str, parts: Sequence[tuple[Folder, int, int]]) -> dict[str, Any]:
    """Fields of config.json that a stack changes. Raises: ValueError where they cannot be determined."""
    configs = [config_of(folder.root) for folder, *_ in parts]
    if not configs[0]:
        return {}
    if not any(name in configs[0] for name in COUNTS) and isinstance(configs[0].get("text_config"), dict):
        own = _counted(label, parts, [config.get("text_config", {}) for config in configs])
        return {"text_config": configs[0]["text_config"] | own}
    return _counted(label, parts, configs)


def _counted(
    label: str, parts: Sequence[tuple[Folder, int, int]], configs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    total = sum(stop - start for _, start, stop in parts)
    changed: dict[str, Any] = {name: total for name in COUNTS if name in configs[0]}
    if not changed:
        raise ValueError(
            f"{label}: config.json of {parts[0][0].root} has none of {', '.join(COUNTS)}, so that the number of layers "
            "cannot be written: add the one that the model's class reads"
        )
    for name, values in configs[0].items():
        if "layer" in name and isinstance(values, list) and values:  # one entry a layer, as layer_types
            own = [config.get(name) for config in configs]
            fits = [
                isinstance(entry, list) and len(entry) == layers_of(part[0])
                for entry, part in zip(own, parts, strict=True)
            ]
            if not all(fits):
                raise ValueError(f"{label}: {name} in config.json is not a list of one entry a layer in all parts")
            changed[name] = [
                value for entry, (_, start, stop) in zip(own, parts, strict=True) for value in (entry or ())[start:stop]
            ]
    return changed
