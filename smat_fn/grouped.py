"""Elementwise arithmetic on trees, in a number of calls that does not grow with that of the leaves."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from . import tree
from .execution import levels, recorded, transformed
from .types import Params

GROUP = 1 << 26  # coordinates that one call takes: copies of all of them would take more memory
WIDE = 1 << 24  # where several float32 copies of them are in memory


class _Many:
    """Leaves of one device and dtype, with the arithmetic of one."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self.leaves = list(leaves)

    def __add__(self, other: Self) -> Self:
        return type(self)(torch._foreach_add(self.leaves, other.leaves))

    def __sub__(self, other: Self) -> Self:
        return type(self)(torch._foreach_sub(self.leaves, other.leaves))

    def __rmul__(self, number: float | Tensor) -> Self:
        if isinstance(number, Tensor):
            return type(self)(map(tree.as_vectors(lambda leaf: number * leaf), self.leaves))
        return type(self)(torch._foreach_mul(self.leaves, number))

    def copy_(self, other: Self) -> Self:
        torch._foreach_copy_(self.leaves, other.leaves)
        return self

    def to(self, dtype: torch.dtype) -> Self:
        if self.leaves[0].dtype == dtype:
            return self
        if any(map(recorded, self.leaves)):  # by a number that is learned
            return type(self)(leaf.to(dtype) for leaf in self.leaves)
        made = [torch.empty_like(leaf, dtype=dtype) for leaf in self.leaves]
        torch._foreach_copy_(made, self.leaves)
        return type(self)(made)


def elementwise(
    fn: Callable[..., Any], first: Params, *rest: Params, wide: bool = False, donate: bool = False
) -> Params:
    """``fn(leaf, *other_leaves)`` in float32 (float64 where a leaf is), rounded once to the first tree's dtypes.

    Args:
        fn: sums, differences, and products with numbers on the left; may be called with many leaves at once.
        first: a tree.
        rest: trees of its structure and shapes.
        wide: do not round.
        donate: write over the leaves of ``first``, which are the result; not under a transform.

    Raises:
        ValueError: for trees of other leaves.
    """
    trees = [tree.flatten(leaves) for leaves in (first, *rest)]

    def whole(*leaves: Any) -> Any:
        kinds = [leaf.leaves[0] if isinstance(leaf, _Many) else leaf for leaf in leaves]
        dtype = tree.compute_dtype(*kinds)
        made = fn(*(leaf.to(dtype) for leaf in leaves))
        if donate:
            return leaves[0].copy_(made)
        return made if wide else made.to(kinds[0].dtype)

    alike = all(leaves.keys() == trees[0].keys() for leaves in trees)  # else `tree_map` says what differs
    if not alike or not all(map(plain, trees)):
        return tree.tree_map(tree.as_vectors(whole), first, *rest)
    found: dict[str, Tensor] = {}
    for paths in groups(*trees, limit=WIDE):
        made = whole(*(_Many([leaves[path] for path in paths]) for leaves in trees))
        found.update(zip(paths, made.leaves, strict=True))
    return tree.unflatten(first, found)


def plain(leaves: Mapping[str, Tensor]) -> bool:
    """Whether one call may take many of these: ordinary tensors that nothing differentiates."""
    return not (transformed() or levels()) and all(
        type(leaf) in tree.PLAIN and not recorded(leaf) for leaf in leaves.values()
    )


def groups(first: Mapping[str, Tensor], *rest: Mapping[str, Tensor], limit: int | None = None) -> Iterator[list[str]]:
    """Paths of leaves of one device and dtype in every tree, at most so many coordinates together, or one leaf.

    Args: limit: None: `GROUP`.
    """
    limit = GROUP if limit is None else limit
    kinds: dict[Any, list[str]] = {}
    for path in first:
        kinds.setdefault(tuple((leaves[path].device, leaves[path].dtype) for leaves in (first, *rest)), []).append(path)
    for paths in kinds.values():
        group, size = list[str](), 0
        for path in paths:
            if group and size + first[path].numel() > limit:
                yield group
                group, size = [], 0
            group.append(path)
            size += first[path].numel()
        yield group
