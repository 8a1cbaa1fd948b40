"""A tower of a model of several (CLIP's vision or text model) merged with the whole model, leaves matched by name."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...errors import and_more
from .optional_leaves import predicts_ahead
from .reading import Folder, config_of

Config = Mapping[str, Any]


def part_config(whole: Config, part: Config) -> Config | None:
    """The configuration in that of a whole model which a tower's configuration stands for; None for any other model."""
    kind = part.get("model_type")
    if not kind or kind == whole.get("model_type"):
        return None
    for name, own in whole.items():
        if name.endswith("_config") and isinstance(own, dict):
            implied = f"{whole.get('model_type')}_{name.removesuffix('_config')}_model"
            if own.get("model_type", implied) == kind:
                return own
    return None


def compared(base: Config, expert: Config) -> tuple[Config, Config]:
    """The configurations of base and an expert, where one is a tower of the other only that of the tower."""
    if (own := part_config(base, expert)) is not None:
        return own, expert
    if (own := part_config(expert, base)) is not None:
        return base, own
    return base, expert


def prefix_of(base: Folder, part: Folder) -> str:
    """The prefix of a part's leaf names in base: "" for a language model, "vision_model." for a tower of CLIP.

    Raises: ValueError unless exactly one place in base has leaves of these names and shapes.
    """
    first = next(iter(part.leaves), "")
    ends = [path for path in base.leaves if path == first or path.endswith(f".{first}")]
    prefixes = [path.removesuffix(first) for path in ends]
    found = [prefix for prefix in prefixes if _fits(base.leaves, prefix, part.leaves)]
    if len(found) != 1:
        where = f"in {len(found)} places ({', '.join(map(repr, found))})" if found else "nowhere"
        raise ValueError(
            f"{part.label} has {len(part.leaves)} parameters, {first!r} the first, that match {where} in base: give "
            "the model that it was trained from, as it was saved"
        )
    return found[0]


def fitted(base: Folder, expert: Folder) -> Folder:
    """An expert with base's leaves and a note, where one is a tower of the other by config.json; others as they are.

    Base's leaves that a tower has no place for are base's; leaves of a whole model outside of base's tower are left
    out.

    Raises: ValueError for a tower that fits nowhere in the whole model, or lacks leaves of its tower there.
    """
    own, other = config_of(base.root), config_of(expert.root)
    if part_config(own, other) is not None:
        return _raised(base, expert, f"{other['model_type']}")
    if part_config(other, own) is not None:
        return _lowered(base, expert, f"{own['model_type']}")
    if own.get("model_type") == other.get("model_type") and any(name.endswith("_config") for name in own):
        _refuse_unclear(base, expert)
    return expert


def _raised(base: Folder, tower: Folder, kind: str) -> Folder:
    """A tower as a whole model: base with the tower's leaves in their place."""
    prefix = _place(base, tower, kind)
    known = {f"{prefix}{name}": name for name in tower.leaves if f"{prefix}{name}" in base.leaves}
    rest = [path for path in base.leaves if path not in known]
    whole = base._replace(label=tower.label, root=tower.root, stores=tower.stores, config={})
    leaves = {path: tower.leaves[known[path]] if path in known else leaf for path, leaf in base.leaves.items()}
    reads = {path: tower.reads[known[path]] if path in known else base.reads[path] for path in leaves}
    few = and_more(map(repr, rest)) or "nothing"
    note = f"{tower.label} is a tower of base ({kind}): what it lacks is base's ({few})"
    return whole._replace(leaves=leaves, reads=reads, note=note)


def _lowered(base: Folder, whole: Folder, kind: str) -> Folder:
    """The leaves of a whole model that base, a tower of it, has."""
    prefix = _place(whole, base, kind)
    leaves, reads = dict[str, Tensor](), {}
    for path, leaf in base.leaves.items():
        name = f"{prefix}{path}"
        leaves[path] = whole.leaves.get(name, leaf)  # base's integer buffers, which some versions do not save
        reads[path] = whole.reads[name] if name in whole.leaves else base.reads[path]
    rest = [name for name in whole.leaves if not name.startswith(prefix) or name.removeprefix(prefix) not in leaves]
    few = and_more(map(repr, rest)) or "nothing"
    note = f"base is a tower of {whole.label} ({kind}): the rest of the expert is left out ({few})"
    return whole._replace(leaves=leaves, reads=reads, outputs=base.outputs, note=note)


def _place(whole: Folder, tower: Folder, kind: str) -> str:
    """The prefix of a tower's names in a whole model that has all its leaves, and no others in that place."""
    floating = {path: leaf for path, leaf in tower.leaves.items() if leaf.is_floating_point()}
    try:
        prefix = prefix_of(whole, tower._replace(leaves=floating))
    except ValueError as error:
        raise ValueError(
            f"{tower.label} is a tower ({kind}) of {whole.label}, by config.json, but its parameters, "
            f"{next(iter(floating), '')!r} the first, match no or several parameters there by name and shape: merge "
            "models of one size, or save the whole model and merge that"
        ) from error
    modules = {f"{prefix}{path}".partition(".")[0] + "." for path in floating}
    lacking = [
        path
        for path, leaf in whole.leaves.items()
        if path.startswith(tuple(modules)) and leaf.is_floating_point() and path.removeprefix(prefix) not in floating
    ]
    if lacking:
        raise ValueError(
            f"{tower.label} is a tower ({kind}) of {whole.label} but lacks {and_more(map(repr, lacking))}: download "
            "it, or save it, again"
        )
    return prefix


def _refuse_unclear(base: Folder, expert: Folder) -> None:
    """Raises: ValueError for a model that lacks whole modules of base and does not say that it is a tower."""
    modules = {path.partition(".")[0] for path in base.leaves if "." in path}
    theirs = {path.partition(".")[0] for path in expert.leaves}
    rows = (path for path in base.leaves if ".layers." in path or ".layer." in path)
    towers = {path.partition(".")[0] for path in rows if not predicts_ahead(path, config_of(base.root))}
    if (lacking := sorted((modules - theirs) & towers)) and theirs & modules:
        raise ValueError(
            f"{expert.label} lacks base's {' and '.join(lacking)}, but its config.json is that of a whole model "
            f"({config_of(expert.root).get('model_type')}): if it is a tower, save that module of it by itself, "
            "model.vision_model.save_pretrained or the like, and merge that"
        )


def _fits(base: Mapping[str, Tensor], prefix: str, part: Mapping[str, Tensor]) -> bool:
    return all(f"{prefix}{name}" in base and base[f"{prefix}{name}"].shape == leaf.shape for name, leaf in part.items())
