"""Task vectors chunk by chunk: the same coordinates of every expert, with their fields of random bits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ... import random, tree
from ...ops.cpu import centered_fields
from ...types import Params
from .inputs import Experts, Leaves, check_variances

Fuse: TypeAlias = Callable[["Piece"], Tensor]  # the merged task vector (n,) of a piece
CHUNK = 1 << 19  # coordinates, over all experts together, that are worked on at a time
BYTES_PER_COORDINATE = 80  # of a chunk, at the peak of the greediest merger, DELLA: its sort and its 64-bit fields


class Piece(NamedTuple):
    """Coordinates [start, start + n) of one leaf, for every expert: flat tensors (n,)."""

    path: str
    start: int
    deltas: list[Tensor]  # task vectors in compute dtype
    fields: list[Tensor]  # int32 in [0, 65536); none without a key


def pieces(
    base: Leaves,
    experts: Mapping[str, Leaves],
    *,
    key: Tensor | None = None,
    rows: bool = False,
    at_once: Callable[[str], int] | None = None,
) -> Iterator[Piece]:
    """All floating-point coordinates once, small leaves together, large ones cut; with ``rows`` no row is cut.

    Leaves that ``at_once`` has a number for are cut at its multiples.

    With a key, the fields of an expert's leaf are its mask stream, ``leaf_streams(fold_in(key, name), paths)[0]``.
    """
    sizes = {path: 0 if at_once is None else at_once(path) for path in base}
    paths = [path for path, leaf in base.items() if leaf.is_floating_point()]
    paths.sort(key=lambda path: sizes[path] > 0)  # those come last
    flat = {path: (base[path].reshape(-1), [leaves[path].reshape(-1) for leaves in experts.values()]) for path in paths}
    keys = mask_keys(key, list(experts), paths) if key is not None else None
    uncut = [
        [(i, start, min(start + sizes[path], base[path].numel()))]
        for i, path in enumerate(paths)
        if sizes[path]
        for start in range(0, base[path].numel(), sizes[path])
    ]
    cut = [base[path] for path in paths if not sizes[path]]
    for group in chain(groups(cut, max(1, CHUNK // len(experts)), rows), uncut):
        fields = fields_of(keys, group, base[paths[group[0][0]]].device) if keys is not None else [[] for _ in group]
        for (index, start, stop), field in zip(group, fields, strict=True):
            origin, others = flat[paths[index]]
            dtype = compute_dtype(paths[index], base, experts)
            deltas = [delta_of(other[start:stop], origin[start:stop], dtype) for other in others]
            yield Piece(paths[index], start, deltas, [f.to(origin.device) for f in field])


def row_length(shape: Sequence[int]) -> int:
    """Length of the rows of a leaf: its last axis; a vector, or a 0-d tensor, is one row."""
    return shape[-1] if shape else 1


def groups(leaves: Sequence[Tensor], limit: int, rows: bool) -> Iterator[list[tuple[int, int, int]]]:
    """Windows (leaf, start, stop) of at most ``limit`` coordinates together (or one row) that cover all leaves.

    With ``rows`` no row is cut.
    """
    if not rows:
        yield from tree.spans([leaf.numel() for leaf in leaves], limit)
        return
    small = [leaf.numel() if leaf.numel() <= limit else 0 for leaf in leaves]
    yield from tree.spans(small, limit)
    for index, leaf in enumerate(leaves):
        if leaf.numel() > limit:
            length = row_length(leaf.shape)
            for ((_, start, stop),) in tree.spans([leaf.numel()], max(1, limit // length) * length):
                yield [(index, start, stop)]


def mask_keys(key: Tensor, names: Sequence[str], paths: Sequence[str]) -> Tensor:
    """The mask streams of every expert's leaves: int64 (experts, leaves, 2)."""
    numbers = [random.name_hashes(tuple(words)) for words in (names, paths)]
    experts, leaves = (torch.tensor(own, dtype=torch.int64, device=key.device) for own in numbers)
    return random.split(random.fold_in(random.fold_in(key, experts)[:, None], leaves))[0]


def fields_of(keys: Tensor, group: Sequence[tuple[int, int, int]], device: torch.device) -> list[list[Tensor]]:
    """The fields of a group's windows, for every expert: those of window w are the w-th list."""
    chosen = keys[:, [index for index, _, _ in group]].reshape(-1, 2)
    chosen = chosen.to(device, non_blocking=device.type == "cuda")  # the host does not wait
    centered = centered_fields(list(chosen), [(start, stop) for _, start, stop in group] * len(keys))
    drawn = [field.to(torch.int32).add_(32768) for field in centered]
    return [drawn[position :: len(group)] for position in range(len(group))]


def compute_dtype(path: str, base: Leaves, experts: Mapping[str, Leaves]) -> torch.dtype:
    """The dtype that a leaf is merged in."""
    return tree.compute_dtype(base[path], *(leaves[path] for leaves in experts.values()))


def delta_of(leaf: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """θ − θ₀ in compute dtype, where θ₀ is."""
    # one after the other: torch casts what it copies to a GPU on the CPU, and more bytes would travel
    return leaf.to(start.device).to(dtype) - start.to(dtype)


def merge_weights(
    experts: Experts, flat: Mapping[str, Leaves], fuse: Callable[[str, Iterator[Tensor]], Tensor]
) -> Params:
    """A merged tree without a base: ``fuse(path, weights)`` of every floating-point leaf, rounded once.

    Args:
        experts: whose first has the structure and the other leaves of the merged tree.
        flat: their leaves by `check_alone`.
        fuse: of a leaf's path, and its weights in compute dtype, which it must not write to, one for each expert.
    """
    start = next(iter(flat.values()))

    def merged(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf.clone()
        dtype = tree.compute_dtype(leaf)
        done = fuse(path, (leaves[path].to(leaf.device, dtype) for leaves in flat.values())).to(leaf.dtype)
        check_variances(path, done)
        return done

    first = next(iter(experts.values() if isinstance(experts, Mapping) else experts))
    return tree.unflatten(first, {path: merged(path, leaf) for path, leaf in start.items()})
