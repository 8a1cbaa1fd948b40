"""Arcee Fusion: the most important differences of one model from another."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ..errors import all_at_once
from ..tree import compute_dtype
from ..types import Params
from .parts import arithmetic, looped
from .parts.arithmetic import largest, step_on
from .parts.chunks import Fuse, Piece, row_length
from .parts.inputs import Experts, check_alone, coef_problems, count_problems
from .parts.merger import Mapped, Merger, Rule, merge_alone
from .parts.sampled import Counter, Scaled, ordered, step_of

CACHED = 1 << 16  # coordinates that stay in a core's cache through all operations
Value = TypeVar("Value")


class Each(Protocol):
    """Calls a function on blocks of a leaf, the same ones at each call."""

    def __call__(self, function: Callable[[Piece], Value], /) -> Iterable[Value]: ...


def arcee_fusion(experts: Experts, *, coef: float = 1.0) -> Params:
    """θ₁ + γ m ⊙ (θ₂ − θ₁), m = 1 where the importance is at least Q₂ + 1.5 (Q₃ − Q₁) of its leaf, else 0.

    The importance of a coordinate is |θ₂ − θ₁| · KL of its row, ``KL = Σ p log(p / q)``, p and q the softmax of the row
    of θ₂ and of θ₁ along the last axis, each plus 1e-8. The quartile Q_k is the entry ⌊k (n − 1) / 4⌋ of the n
    importances in order; mergekit draws a random million of them where a leaf has more.

    Args:
        experts: {name: tree} or a list, of two trees: the one that changes, mergekit's base, and the other.
        coef: γ, finite; mergekit has none, which is 1.

    Returns:
        A new tree of the first expert's structure, rounded once.

    Raises:
        ValueError: lists every leaf that does not agree, and for another number of experts.

    Source: mergekit 0.1.5, merge_methods/arcee_fusion.py.
    """
    problems = [*coef_problems(coef), *count_problems(experts, "arcee_fusion", least=2, most=2)]
    flat = all_at_once(problems, lambda: check_alone(experts))
    return merge_alone(
        ArceeFusion(float(coef)), experts, flat, lambda _, values: fused(values, float(coef)), float(coef)
    )


class Found(NamedTuple):
    """The numbers that a whole leaf determines."""

    length: int  # of a row
    divergences: Tensor  # KL of every row
    threshold: Tensor  # 0-d, of the importance

    def fuse(self, piece: Piece, coef: float) -> Tensor:
        """The merged weights of a chunk."""
        one, two = piece.deltas
        important = Scaled(piece.deltas, piece.start, self.length, self.divergences).numbers() >= self.threshold
        keep = important.to(one.dtype).mul_(coef)
        return (two - one).mul_(keep).add_(one)


def fused(values: Iterable[Tensor], coef: float) -> Tensor:
    """The merged leaf of two."""
    one, two = values
    if not one.numel():
        return one.clone()
    length = row_length(one.shape)
    size = max(1, (CACHED if one.device.type == "cpu" else step_on(one.device, 2)) // length) * length
    parts = zip(one.reshape(-1).split(size), two.reshape(-1).split(size), strict=True)
    blocks = [Piece("", size * i, list(part), []) for i, part in enumerate(parts)]
    found = find(cast(Each, lambda function: map(function, blocks)), one.shape, step=1)
    return torch.cat([found.fuse(block, coef) for block in blocks]).view(one.shape)


def find(each: Each, shape: Sequence[int], step: int) -> Found:
    """Read a leaf twice, once with a step of 1.

    Args: each: calls a function on blocks of whole rows of both models, stored or upcast; step: of importances that are
        in memory together, 1 or `step_of` the leaf.
    """
    length, size = row_length(shape), math.prod(shape)

    def rows_of(block: Piece) -> tuple[Tensor, Tensor]:
        one, two = block.deltas
        divergences = _divergences(two.view(-1, length), one.view(-1, length))
        if step == 1:
            return divergences, Scaled(block.deltas, 0, length, divergences).numbers()
        dtype, rows = divergences.dtype, torch.arange(0, len(one), step, device=one.device) // length
        return divergences, (two[::step].to(dtype) - one[::step].to(dtype)).abs_().mul_(divergences[rows])

    divergences, sample = map(torch.cat, zip(*each(rows_of), strict=True))

    def over(count: Counter) -> Iterable[Any]:
        return each(lambda block: count(Scaled(block.deltas, block.start, length, divergences)))

    places = [int(quarter / 4 * (size - 1)) for quarter in (1, 2, 3)]
    first, second, third = (found[0, 0].to(sample.dtype) for found in ordered(over, places, size, sample[None]))
    return Found(length, divergences, second + 1.5 * (third - first))


def _divergences(two: Tensor, one: Tensor) -> Tensor:
    """KL(θ₂ ‖ θ₁) of rows."""
    rows = max(1, CACHED // one.shape[1]) if one.device.type == "cpu" else len(one)
    dtype = compute_dtype(one, two)
    parts = zip(two.split(rows), one.split(rows), strict=True)
    return torch.cat([_divergence(*(part.to(dtype) for part in each)) for each in parts])


def _divergence(two: Tensor, one: Tensor) -> Tensor:
    left, right = torch.softmax(two, -1).add_(1e-8), torch.softmax(one, -1).add_(1e-8)
    terms = (left / right).log_().mul_(left)
    # threads of torch would share a single row, and add its parts in another order
    return terms.sum(-1) if len(terms) > 1 else terms.expand(2, -1).sum(-1)[:1]


@dataclass(frozen=True)
class ArceeFusion(Merger):
    """Arcee Fusion: the first of two experts plus the most important differences of the second."""

    name = "arcee_fusion"
    function = staticmethod(arcee_fusion)
    based = False
    coef: float = 1.0
    """gamma, a factor of the differences; 1 is mergekit's."""

    def rule(self, leaves: Mapped) -> Rule:
        def found(path: str) -> Found:
            each, shape = cast(Each, partial(leaves.each_block, paths=[path], rows=True)), leaves.shape(path)
            return find(each, shape, step_of(shape.numel()))

        def fuse(path: str) -> Fuse:
            if not leaves.shape(path).numel():
                return lambda piece: piece.deltas[0]
            own, coef = found(path), leaves.coefs[path]
            return lambda piece: own.fuse(piece, coef)

        def loop(path: str) -> looped.Loop:
            length, divergences, threshold = found(path)
            return partial(looped.fused, length=length, divergences=divergences, threshold=float(threshold))

        return Rule(fuse, loop=loop)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        longest = max((row_length(leaf.shape) for leaf in leaves.values()), default=0)
        return 64 * max(min(largest(leaves), arithmetic.BLOCK), longest)
