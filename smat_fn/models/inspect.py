"""The table of a dry run: leaves that would be trained and masked."""

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from torch import nn

from .. import tree
from ..lora import Lora
from ..lora.adapters import A, B, layer_of
from ..types import Where

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Leaf(NamedTuple):
    """One parameter of a module."""

    name: str
    shape: tuple[int, ...]
    size: int
    dtype: str
    trained: bool
    masked: bool
    tied: tuple[str, ...]  # its other names


def describe_leaves(module: nn.Module, where: Where | None) -> list[Leaf]:
    """Every parameter, tied weights once, in the module's order.

    Args: where: the masked set, None masks every leaf; only a trained leaf can be masked.
    """
    names: dict[int, list[str]] = {}
    picks = tree.predicate(where)
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return [
        Leaf(
            name,
            tuple(p.shape),
            p.numel(),
            tree.dtype_name(p),
            p.requires_grad,
            p.requires_grad and (picks is None or picks(name, p)),
            tuple(other for other in names[id(p)] if other != name),
        )
        for name, p in module.named_parameters()
    ]


def with_adapters(leaves: Iterable[Leaf], adapters: Lora, *, merged: bool, dtype: str | None = None) -> list[Leaf]:
    """The leaves with A and B behind each adapted weight: these are trained, and what is trained whole beside them.

    Args: merged: Mask acts on the merged weights, not on A and B; dtype: of A and B, None: that of their weight.
    """
    found = []
    for leaf in leaves:
        adapted, saved = leaf.name in adapters.paths, leaf.name in adapters.saved
        found.append(leaf._replace(trained=saved, masked=leaf.masked and (saved or (adapted and merged))))
        if adapted:
            out, into = reversed(leaf.shape) if leaf.name in adapters.transposed else leaf.shape
            for half, shape in ((A, (adapters.rank, into)), (B, (out, adapters.rank))):
                name = layer_of(leaf.name) + half
                found.append(Leaf(name, shape, shape[0] * shape[1], dtype or leaf.dtype, True, not merged, ()))
    return found


def table(leaves: Iterable[Leaf]) -> str:
    """Leaves as text, one line for those of equal kind in all blocks (``layers.*``), and the sums below."""
    leaves = list(leaves)
    lines: list[tuple[str, ...]] = [("tensor", "shape", "dtype", "trained", "masked", "parameters")]

    def kind(leaf: Leaf) -> tuple[str, ...]:
        shape = " x ".join(map(str, leaf.shape)) or "()"
        return NUMBER.sub("*", leaf.name), shape, leaf.dtype, _yes(leaf.trained), _yes(leaf.masked)

    order = {key: index for index, key in reversed(list(enumerate(map(kind, leaves))))}
    for key, group in groupby(sorted(leaves, key=lambda leaf: order[kind(leaf)]), key=kind):
        same = list(group)
        name = f"{key[0]} ({len(same)})" if len(same) > 1 else same[0].name
        name += "".join(f" = {NUMBER.sub('*', other) if len(same) > 1 else other}" for other in same[0].tied)
        lines.append((name, *key[1:], f"{sum(leaf.size for leaf in same):,}"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    trained, masked = [leaf for leaf in leaves if leaf.trained], [leaf for leaf in leaves if leaf.masked]
    parts = {"all": leaves, "trained": trained, "masked": masked}
    total = sum(leaf.size for leaf in leaves)
    text += [
        f"{name}: {(size := sum(leaf.size for leaf in part)):,} parameters in {len(part)} tensors"
        + (f", {size / total:.1%}" if total and part is not leaves else "")
        for name, part in parts.items()
    ]
    return "\n".join(text)


def _yes(value: bool) -> str:
    return "yes" if value else "-"
