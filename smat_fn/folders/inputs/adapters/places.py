"""The weights of a base that a module of an adapter means, by either of its names, whole or fused with others."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ..reading import Folder, config_of
from . import original_names
from .original_names import Names

_FUSED = ".in_proj_weight"  # of OpenCLIP: queries, keys and values below each other


class Part(NamedTuple):
    """Rows of a weight, changed by as many rows of a module's product."""

    start: int
    stop: int  # the row after the last
    of_product: int  # its first row of these
    height: int  # of the whole product


class Place(NamedTuple):
    """A weight of base that a module changes, or a part of it."""

    leaf: str
    part: Part | None = None  # None: the whole weight, by the whole product


# by a module's path: the places that it changes; several lists where it is unclear which, none where base lacks it
Find: TypeAlias = Callable[[str], list[list[Place]]]


def finder(base: Folder, prefix: str) -> Find:
    """A function of a module's path or flat name: what it changes of the leaves of base that begin with a prefix."""
    of_blocks = config_of(base.root / prefix).get("layers_per_block", 2) == 2  # of all models with both kinds of names
    own_names, other_names = dict[str, list[str]](), dict[str, list[list[Place]]]()
    for leaf, own in base.leaves.items():
        path = leaf.removeprefix(prefix)
        end = next((end for end in (".weight", _FUSED) if path.endswith(end)), "")
        if not leaf.startswith(prefix) or not end or own.ndim < 2:
            continue
        name = original_names.flat(path.removesuffix(end), of_blocks=of_blocks)
        if end == _FUSED:
            known = [Names(tuple(f"{name}_{part}_proj" for part in "qkv"))]
        else:
            own_names.setdefault(name, []).append(leaf)
            known = original_names.of_diffusers(name)
        for names in known:
            for other, places in zip(names.parts, _of_parts(leaf, names, own.shape), strict=True):
                other_names.setdefault(other, []).append(places)

    def find(path: str) -> list[list[Place]]:
        if (exact := f"{prefix}{path}.weight") in base.leaves:
            return [[Place(exact)]]
        name = original_names.flat(path, of_blocks=of_blocks)
        if found := [[Place(leaf)] for leaf in own_names.get(name, ())] or other_names.get(name):
            return found
        for names in original_names.of_diffusers(name):
            if all(len(own_names.get(part, ())) == 1 for part in names.parts):
                return [_of_whole([own_names[part][0] for part in names.parts], names, base)]
        return []

    return find


def module_of(leaf: str) -> str:
    """The path of the module that has a weight."""
    return leaf.removesuffix(_FUSED).removesuffix(".weight")


def overlap(one: Place, two: Place) -> bool:
    """Whether two places in one weight have a row in common."""
    a, b = one.part, two.part
    return a is None or b is None or (a.start < b.stop and b.start < a.stop)


def _of_parts(leaf: str, names: Names, shape: Sequence[int]) -> list[list[Place]]:
    """The places of each module of diffusers in a weight: all but the last are square, as queries, keys and values."""
    if len(names.parts) == 1:
        return [_halves(leaf, shape[0]) if names.swapped else [Place(leaf)]]
    starts = [part * shape[1] for part in range(len(names.parts))]
    ends = zip(starts, [*starts[1:], shape[0]], strict=True)
    return [[Place(leaf, Part(start, stop, 0, stop - start))] for start, stop in ends]


def _of_whole(leaves: Sequence[str], names: Names, base: Folder) -> list[Place]:
    """The places of a module of the original code in weights of base: its rows follow each other in them."""
    heights = [len(base.leaves[leaf]) for leaf in leaves]
    if len(leaves) == 1:
        return _halves(leaves[0], heights[0]) if names.swapped else [Place(leaves[0])]
    starts = itertools.accumulate(heights[:-1], initial=0)
    return [
        Place(leaf, Part(0, height, start, sum(heights)))
        for leaf, height, start in zip(leaves, heights, starts, strict=True)
    ]


def _halves(leaf: str, height: int) -> list[Place]:
    """Both halves of a weight, each changed by the other half of the product."""
    half = height // 2
    return [Place(leaf, Part(0, half, half, height)), Place(leaf, Part(half, height, 0, height))]
