"""The weights of a base that a module of an adapter means, by either of its names, whole or fused with others."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from . import original_names
from .reading import Folder, config_of

_FUSED = ".in_proj_weight"  # of OpenCLIP: queries, keys and values below each other
Rows: TypeAlias = tuple[int, int]  # the first one and the one after the last


class Place(NamedTuple):
    """A weight of base that a module changes, or rows of it that are changed by rows of the module's product."""

    leaf: str
    rows: Rows | None = None  # None: the whole weight, by the whole product
    start: int = 0  # of the product
    height: int = 0  # of the product


# by a module's path: what it changes, in one list; several lists where it is unclear which one, none if base lacks it
Find: TypeAlias = Callable[[str], list[list[Place]]]


def finder(base: Folder, prefix: str) -> Find:
    """A function of a module's path or flat name: what it changes of the leaves of base that begin with a prefix."""
    of_blocks = config_of(base.root / prefix).get("layers_per_block", 2) == 2  # of all models with both kinds of names
    own_names, other_names = dict[str, list[Place]](), dict[str, list[Place]]()
    for leaf, own in base.leaves.items():
        path = leaf.removeprefix(prefix)
        end = next((end for end in (".weight", _FUSED) if path.endswith(end)), "")
        if not leaf.startswith(prefix) or not end or own.ndim < 2:
            continue
        name = original_names.flat(path.removesuffix(end), of_blocks=of_blocks)
        if end == _FUSED:
            known = [tuple(f"{name}_{part}_proj" for part in "qkv")]
        else:
            own_names.setdefault(name, []).append(Place(leaf))
            known = original_names.of_diffusers(name)
        for parts in known:
            for part, place in zip(parts, _fused(leaf, len(parts), own.shape), strict=True):
                other_names.setdefault(part, []).append(place)

    def find(path: str) -> list[list[Place]]:
        if (exact := f"{prefix}{path}.weight") in base.leaves:
            return [[Place(exact)]]
        name = original_names.flat(path, of_blocks=of_blocks)
        if found := own_names.get(name) or other_names.get(name):
            return [[place] for place in found]
        for parts in original_names.of_diffusers(name):
            if all(len(own_names.get(part, ())) == 1 for part in parts):
                return [_split([own_names[part][0].leaf for part in parts], base)]
        return []

    return find


def module_of(leaf: str) -> str:
    """The path of the module that has a weight."""
    return leaf.removesuffix(_FUSED).removesuffix(".weight")


def overlap(one: Rows | None, two: Rows | None) -> bool:
    """Whether two places in a weight have a row in common. Args: one, two: as in `Place`."""
    return one is None or two is None or (one[0] < two[1] and two[0] < one[1])


def _fused(leaf: str, parts: int, shape: Sequence[int]) -> list[Place]:
    """The places of modules that are fused in a weight: all but the last are square, as queries, keys and values."""
    if parts == 1:
        return [Place(leaf)]
    starts = [part * shape[1] for part in range(parts)]
    return [Place(leaf, rows, 0, rows[1] - rows[0]) for rows in zip(starts, [*starts[1:], shape[0]], strict=True)]


def _split(leaves: Sequence[str], base: Folder) -> list[Place]:
    """The places of a fused module: weights of base, by rows of its product that follow each other."""
    if len(leaves) == 1:
        return [Place(leaves[0])]
    heights = [len(base.leaves[leaf]) for leaf in leaves]
    starts = itertools.accumulate(heights[:-1], initial=0)
    return [
        Place(leaf, (0, height), start, sum(heights))
        for leaf, height, start in zip(leaves, heights, starts, strict=True)
    ]
