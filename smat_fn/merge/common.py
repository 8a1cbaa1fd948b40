"""What the mergers share: task vectors, piece by piece, and the last line, base + coef * vector."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import errors, random, tree
from ..compiled import array, loops_for
from ..errors import problems_of
from ..ops.cpu import centered_fields
from ..types import Params
from .inputs import Leaves, coef_problems, kind_problems

Fuse: TypeAlias = Callable[["Piece"], Tensor]  # the merged task vector (n,) of a piece

CHUNK = 1 << 19  # coordinates, over all experts together, that are worked on at a time


class Piece(NamedTuple):
    """Coordinates [start, start + n) of one leaf, for every expert: flat tensors (n,)."""

    path: str
    start: int
    deltas: list[Tensor]  # task vectors in compute dtype
    fields: list[Tensor]  # int32 in [0, 65536); none without a key


def task_vector(params: Params, base: Params) -> Params:
    """Δ = θ − θ₀.

    Args: params, base: trees of the same leaf paths and shapes.
    Returns: a tree of base's structure, float32 (float64 where a leaf is float64); other leaves are zeros.
    Raises: ValueError that lists every missing, unknown or misshapen leaf.
    """
    start, leaves = tree.flatten(base), tree.flatten(params)
    problems = problems_of(lambda: tree.check_same(start, "base", params=leaves))
    errors.raise_problems(problems + kind_problems(start, "base", leaves, "params"))

    def delta(path: str, leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return torch.zeros_like(leaf)
        return delta_of(leaves[path], leaf, tree.compute_dtype(leaves[path], leaf))

    return tree.unflatten(base, {path: delta(path, leaf) for path, leaf in start.items()})


def apply_vector(base: Params, vector: Mapping[str, Tensor], *, coef: float, out: Params | None = None) -> Params:
    """θ₀ + γ τ, rounded once to the dtype of each leaf of base.

    Args: vector: a merged task vector τ, one flat entry for every floating-point leaf of base; coef: γ, finite; out: a
        tree like base, written to instead of a new one: one pass over the weights, the same bits.
    Returns: a tree of base's structure, shapes and dtypes; other leaves are copies of base's.
    Raises: ValueError for a coef that is not finite and for a vector, or an ``out``, that does not fit base.
    """
    leaves = tree.flatten(base)
    floating = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    problems = coef_problems(coef) + problems_of(lambda: tree.check_same(floating, "base", vector=vector))
    merged = {} if out is None else tree.flatten(out)
    if out is not None:
        problems += problems_of(lambda: tree.check_same(leaves, "base", out=merged))
        problems += [
            f"leaf {path!r} of out is {merged[path].dtype}, base's is {leaf.dtype}"
            for path, leaf in leaves.items()
            if path in merged and merged[path].dtype != leaf.dtype
        ]
    errors.raise_problems(problems)
    for path, leaf in leaves.items():
        if path not in merged:
            merged[path] = torch.empty_like(leaf, memory_format=torch.contiguous_format)
        if path in floating:
            _write_scaled(merged[path], vector[path].detach(), leaf.detach(), float(coef))
        else:
            merged[path].copy_(leaf)
    return tree.unflatten(base, merged)


def merge_pieces(
    base: Leaves,
    experts: Mapping[str, Leaves],
    fuse: Fuse,
    *,
    key: Tensor | None = None,
    rows: bool = False,
) -> Leaves:
    """A merged task vector: ``fuse(piece)`` (n,) at the coordinates of every piece of every floating-point leaf."""
    vector = {
        path: torch.empty(leaf.shape, dtype=compute_dtype(path, base, experts), device=leaf.device)
        for path, leaf in base.items()
        if leaf.is_floating_point()
    }
    for piece in pieces(base, experts, key=key, rows=rows):
        flat = vector[piece.path].view(-1)
        flat[piece.start : piece.start + piece.deltas[0].numel()] = fuse(piece)
    return vector


def pieces(
    base: Leaves, experts: Mapping[str, Leaves], *, key: Tensor | None = None, rows: bool = False
) -> Iterator[Piece]:
    """All floating-point coordinates once, small leaves together, large ones cut; with ``rows`` no row is cut.

    With a key, the fields of an expert's leaf are its mask stream, ``leaf_streams(fold_in(key, name), paths)[0]``.
    """
    paths = [path for path, leaf in base.items() if leaf.is_floating_point()]
    flat = {path: (base[path].reshape(-1), [leaves[path].reshape(-1) for leaves in experts.values()]) for path in paths}
    keys = mask_keys(key, list(experts), paths) if key is not None else None
    for group in groups([base[path] for path in paths], max(1, CHUNK // len(experts)), rows):
        fields = fields_of(keys, group, base[paths[group[0][0]]].device) if keys is not None else [[] for _ in group]
        for (index, start, stop), field in zip(group, fields, strict=True):
            origin, others = flat[paths[index]]
            dtype = compute_dtype(paths[index], base, experts)
            deltas = [delta_of(other[start:stop], origin[start:stop], dtype) for other in others]
            yield Piece(paths[index], start, deltas, [f.to(origin.device) for f in field])


def add(tensors: Iterable[Tensor], *, into_first: bool = False) -> Tensor:
    """The sum in the order given, in new memory or in that of the first."""
    rest = iter(tensors)
    total = next(rest) if into_first else next(rest).clone()
    for tensor in rest:
        total += tensor
    return total


def elected(tensors: Sequence[Tensor]) -> Tensor:
    """+ where the sum is at least 0, and else −, as 1 and −1."""
    return (add(tensors) >= 0).to(tensors[0].dtype).mul_(2).sub_(1)


def agreeing(tensors: Sequence[Tensor], sign: Tensor, *, mean: bool) -> Tensor:
    """Sum, or mean, of the non-zero entries whose sign is ``sign``; 0 where there are none."""
    total, count = torch.zeros_like(sign), torch.zeros_like(sign)
    loops = loops_for(sign, *tensors) if sign.dtype == torch.float32 else None
    for tensor in tensors:
        if loops is not None:
            loops.agree(*map(array, (tensor, sign, total, count)))
            continue
        agrees = tensor * sign > 0
        total += zeroed(tensor, agrees)
        if mean:
            count += agrees.to(count.dtype)
    return total / count.clamp(min=1) if mean else total


def zeroed(values: Tensor, keep: Tensor) -> Tensor:
    """``values.where(keep, 0)``, by bits: a branch a coordinate takes ten times as long."""
    kind = torch.int64 if values.itemsize == 8 else torch.int32
    return keep.to(kind).neg_().bitwise_and_(values.view(kind)).view(values.dtype)


def row_length(leaf: Tensor) -> int:
    """Length of the rows of a leaf: its last axis; a vector, or a 0-d tensor, is one row."""
    return leaf.shape[-1] if leaf.ndim else 1


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
            length = row_length(leaf)
            for ((_, start, stop),) in tree.spans([leaf.numel()], max(1, limit // length) * length):
                yield [(index, start, stop)]


def mask_keys(key: Tensor, names: Sequence[str], paths: Sequence[str]) -> Tensor:
    """The mask streams of every expert's leaves: int64 (experts, leaves, 2)."""
    hashes = [torch.tensor(random.name_hashes(tuple(words)), dtype=torch.int64) for words in (names, paths)]
    experts, leaves = (part.to(key.device) for part in hashes)
    return random.split(random.fold_in(random.fold_in(key, experts)[:, None], leaves))[0]


def fields_of(keys: Tensor, group: Sequence[tuple[int, int, int]], device: torch.device) -> list[list[Tensor]]:
    """The fields of a group's windows, for every expert: those of window w are the w-th list."""
    chosen = keys[:, [index for index, _, _ in group]].reshape(-1, 2).to(device)
    centered = centered_fields(list(chosen), [(start, stop) for _, start, stop in group] * len(keys))
    drawn = [field.to(torch.int32).add_(32768) for field in centered]
    return [drawn[position :: len(group)] for position in range(len(group))]


def compute_dtype(path: str, base: Leaves, experts: Mapping[str, Leaves]) -> torch.dtype:
    """The dtype that a leaf is merged in."""
    return tree.compute_dtype(base[path], *(leaves[path] for leaves in experts.values()))


def delta_of(leaf: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    """θ − θ₀ in compute dtype, where θ₀ is."""
    return leaf.to(start.device, dtype) - start.to(dtype)


def _write_scaled(out: Tensor, vector: Tensor, leaf: Tensor, coef: float) -> None:
    """In pieces that stay in the processor's cache: one pass, no copy of the leaf in compute dtype."""
    dtype = tree.compute_dtype(vector, leaf)
    target, flat, start = out.view(-1), vector.reshape(-1), leaf.reshape(-1)
    for first in range(0, leaf.numel(), CHUNK):
        piece = slice(first, first + CHUNK)
        scaled = flat[piece].to(leaf.device, dtype) * coef
        target[piece] = scaled.add_(start[piece])
