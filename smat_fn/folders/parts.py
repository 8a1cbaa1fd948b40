"""Models that hold a part of base's leaves, as train.py and merge.py write them: the others are base's."""

from collections.abc import Mapping

from torch import Tensor

from .reading import Folder
from .vocabulary import HEAD


def prefix_of(base: Folder, part: Folder) -> str:
    """What goes before a part's leaf names in base: "" for a language model, "vision_model." for a tower of CLIP.

    Raises: ValueError unless exactly one place in base has leaves of these names and shapes.
    """
    first = next(iter(part.leaves), "")
    ends = [path for path in base.leaves if path == first or path.endswith(f".{first}")]
    prefixes = [path.removesuffix(first) for path in ends]
    found = [prefix for prefix in prefixes if _fits(base.leaves, prefix, part.leaves)]
    if len(found) != 1:
        where = f"in {len(found)} places ({', '.join(map(repr, found))})" if found else "nowhere"
        raise ValueError(
            f"{part.label} has {len(part.leaves)} leaves, {first!r} the first, that fit {where} in base: give the "
            "model that it was trained from, as it was saved"
        )
    return found[0]


def placed(base: Folder, part: Folder) -> Folder:
    """Base with the leaves of a part in their place. A head that may be tied is left to `vocabulary.one_head`.

    Raises: as `prefix_of`.
    """
    prefix = prefix_of(base, part)
    own = {f"{prefix}{name}": name for name in part.leaves}
    paths = [path for path in base.leaves if path in own or path != HEAD]
    leaves = {path: part.leaves[own[path]] if path in own else base.leaves[path] for path in paths}
    made = {path: part.reader(own[path]) if path in own else base.reader(path) for path in paths}
    return Folder(part.label, leaves, {}, part.stores, part.root, made)


def _fits(base: Mapping[str, Tensor], prefix: str, part: Mapping[str, Tensor]) -> bool:
    return all(f"{prefix}{name}" in base and base[f"{prefix}{name}"].shape == leaf.shape for name, leaf in part.items())
