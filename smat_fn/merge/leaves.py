"""What mergers share that see a leaf as a whole: its task vectors, its angles."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .. import tree
from .common import delta_of
from .inputs import Experts, Leaves

T = TypeVar("T")

BLOCK = 1 << 18  # coordinates whose products are added by halves: part of the definition of `gram`, unlike CHUNK


def count_problems(experts: Experts, merger: str, *, least: int, most: int | None = None) -> list[str]:
    """What `check` cannot know: how many experts a merger is defined for."""
    if not isinstance(experts, (Mapping, list, tuple)) or not experts:
        return []
    if len(experts) < least or (most is not None and len(experts) > most):
        wanted = f"exactly {most}" if least == most else f"at least {least}"
        return [f"experts holds {len(experts)} trees: {merger} takes {wanted}"]
    return []


def merge_leaves(
    base: Leaves, experts: Mapping[str, Leaves], fuse: Callable[[str, Iterator[Tensor]], Tensor]
) -> Leaves:
    """A merged task vector: ``fuse(path, task vectors)`` of every floating-point leaf; they are made one by one."""
    return {path: fuse(path, _deltas(path, base, experts)) for path, leaf in base.items() if leaf.is_floating_point()}


def gram(leaves: Sequence[Tensor], start: Tensor | None = None) -> list[list[float]]:
    """All inner products of N tensors, or of their differences from ``start``, as float64 numbers.

    The float64 products of a block of 262,144 coordinates are added by halves, coordinate i to coordinate i + half,
    then block by block: no chunk size, thread count or device changes a bit.
    """
    first, others = leaves[0], ([] if start is None else [start])
    dtype = tree.compute_dtype(*leaves, *others)
    flat = [leaf.reshape(-1) for leaf in leaves]
    origin = None if start is None else start.reshape(-1)

    def block(begin: int, end: int) -> Tensor:
        rows = torch.stack([leaf[begin:end].to(first.device, dtype) for leaf in flat])
        return rows if origin is None else rows.sub_(origin[begin:end].to(first.device, dtype))

    return gram_of(block, len(flat), first.numel())


def gram_of(block: Callable[[int, int], Tensor], count: int, size: int) -> list[list[float]]:
    """`gram` of ``count`` flat tensors of ``size`` coordinates; ``block(begin, end)`` gives theirs as rows."""
    total = torch.zeros(count, count, dtype=torch.float64)
    for begin in range(0, size, BLOCK):
        rows = block(begin, min(begin + BLOCK, size)).double()
        rows = torch.nn.functional.pad(rows, (0, (1 << (rows.shape[1] - 1).bit_length()) - rows.shape[1]))
        for index, row in enumerate(rows):
            products = rows * row
            while products.shape[1] > 1:
                half = products.shape[1] // 2
                products = products[:, :half] + products[:, half:]
            total[index] += products[:, 0].cpu()
    return total.tolist()


def cosine(products: Sequence[Sequence[float]], left: int, right: int) -> float:
    """The cosine of the angle between two tensors of a `gram`; 0 where one of them is zero."""
    size = (products[left][left] * products[right][right]) ** 0.5
    return products[left][right] / size if size else 0.0


def _deltas(path: str, base: Leaves, experts: Mapping[str, Leaves]) -> Iterator[Tensor]:
    start = base[path]
    dtype = tree.compute_dtype(start, *(leaves[path] for leaves in experts.values()))
    return (delta_of(leaves[path], start, dtype) for leaves in experts.values())
