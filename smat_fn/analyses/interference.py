"""How experts' updates agree, block by block: their sizes, the angles between them, and their signs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..where import block_prefix

Updates: TypeAlias = tuple[str, Sequence[Tensor]]  # a leaf's path; the update of every expert, float32 (n,) each
OUTSIDE = "outside"  # of blocks


class Layer(NamedTuple):
    """The updates of a block.

    Attributes:
        layer: the block's number, or its name ("encoder.block.3") where a model has several stacks; "outside" of
            blocks; "all".
        size: coordinates of one model.
        rms: RMS of the update of every expert.
        cosine: mean over pairs of experts; None where fewer than two moved.
        lowest: smallest cosine of a pair; None as ``cosine``.
        highest: largest cosine of a pair; None as ``cosine``.
        agreement: Σ |Σ_i sign Δ_i| / Σ Σ_i |sign Δ_i|: 1 where all signs agree; None where nothing moved.
    """

    layer: str
    size: int
    rms: tuple[float, ...]
    cosine: float | None
    lowest: float | None
    highest: float | None
    agreement: float | None


def interference(updates: Iterable[Updates]) -> list[Layer]:
    """Sizes, cosines and agreement of signs of task vectors: a `Layer` for each block, and last of all leaves.

    Blocks come by stack (encoder, decoder) and number, after the leaves outside of them. Sums are
    float64, so leaves may come in chunks.

    Args:
        updates: pairs of a leaf's path and Δ_i of every expert i, in one order, float tensors of equal size.

    Returns:
        The layers; of nothing, an empty list.

    Raises:
        ValueError: pairs differ in the number of experts, or an update is not finite.
    """
    sums: dict[str, _Sums] = {}
    count = None
    for path, parts in updates:
        block, count = block_prefix(path), len(parts) if count is None else count
        if len(parts) != count or not count:
            raise ValueError(f"{path} has {len(parts)} updates, leaves before it {count}: give every expert's")
        if len(sizes := {part.numel() for part in parts}) > 1:
            raise ValueError(
                f"the updates of {path} have {', '.join(map(str, sorted(sizes)))} coordinates: give equal ones"
            )
        own = sums.setdefault(block, _Sums(count))
        own.add([part.flatten() for part in parts])
        if lost := [place for place, square in enumerate(own.squares, 1) if not math.isfinite(square)]:
            raise ValueError(
                f"the update of {path} of expert {lost[0]} of {len(parts)} is not finite: check its weights"
            )
    if not sums:
        return []
    stacks, numbers = ({block: block.rpartition(".")[end] for block in sums if block} for end in (0, 2))
    order = list(dict.fromkeys(stacks.values()))
    names = {block: number if len(order) == 1 else block for block, number in numbers.items()}
    found = [sums[""].layer(OUTSIDE)] if "" in sums else []
    found += [sums[b].layer(names[b]) for b in sorted(names, key=lambda b: (order.index(stacks[b]), int(numbers[b])))]
    whole = _Sums(len(found[0].rms))
    for part in sums.values():
        whole.merge(part)
    return [*found, whole.layer("all")]


class _Sums:
    def __init__(self, count: int) -> None:
        self.size, self.grams = 0, torch.zeros(count, count, dtype=torch.float64)
        self.agreeing, self.moved = 0.0, 0.0

    def add(self, parts: Sequence[Tensor]) -> None:
        stacked = torch.stack([part.to(torch.float64) for part in parts])
        signs = stacked.sign()
        self.size += stacked.shape[1]
        self.grams += stacked @ stacked.T
        self.agreeing += float(signs.sum(0).abs().sum())
        self.moved += float(signs.abs().sum())

    def merge(self, other: "_Sums") -> None:
        self.size += other.size
        self.grams += other.grams
        self.agreeing += other.agreeing
        self.moved += other.moved

    @property
    def squares(self) -> list[float]:
        return self.grams.diagonal().tolist()

    def layer(self, name: str) -> Layer:
        squares = self.squares
        pairs = [
            float(self.grams[i, j]) / math.sqrt(squares[i] * squares[j])
            for i, j in combinations(range(len(squares)), 2)
            if squares[i] and squares[j]
        ]
        return Layer(
            name,
            self.size,
            tuple(math.sqrt(square / self.size) if self.size else 0.0 for square in squares),
            math.fsum(pairs) / len(pairs) if pairs else None,
            min(pairs, default=None),
            max(pairs, default=None),
            self.agreeing / self.moved if self.moved else None,
        )


def as_rows(layers: Iterable[Layer], experts: Sequence[str], **more: object) -> list[dict[str, object]]:
    """Layers as JSON values, the sizes by expert."""
    return [{**more, **layer._asdict(), "rms": dict(zip(experts, layer.rms, strict=True))} for layer in layers]


def mean_rms(row: Mapping[str, Mapping[str, float]]) -> float:
    """Root of the mean square over experts of a row of `as_rows`."""
    values = list(row["rms"].values())
    return math.sqrt(math.fsum(value * value for value in values) / len(values))
