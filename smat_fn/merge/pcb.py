"""PCB-Merging: coordinates weighted by how large they are in their expert, and how far experts agree on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..types import Params
from .parts import arithmetic
from .parts.arithmetic import add, largest
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.merger import UNKNOWN, WIDE, Mapped, Merger, Rule, merged, vector_function
from .parts.ranks import BINS, ordered

_EXPERTS = 88  # the largest N whose exp(N) is below infinity in float32


class Bounds(NamedTuple):
    """Bounds of every expert over all of its coordinates, each of shape (experts, 1) in float64."""

    low: Tensor  # magnitudes are clamped to [low, high]
    high: Tensor
    floor: Tensor  # β at or below it counts as 0
    top: Tensor  # the largest β


def pcb(base: Params, experts: Experts, *, coef: float, ratio: float = 0.1, clip: float = 1e-4) -> Params:
    """θ₀ + γ Σ_i s_i ⊙ δ̃_i / Σ_i s_i, s_i = (max(β_i, floor_i) − floor_i) / (top_i − floor_i) in [0, 1].

    β_i = exp(N n(|δ̃_i|)²) ⊙ tanh(Δ_i ⊙ Σ_j Δ_j), n(x) = (x − low_i) / (high_i − low_i); δ̃_i = sgn(Δ_i) |Δ_i| clamped to
    [low_i, high_i]. Over all d coordinates of an expert, counted from 0, low and high are the ⌊clip d⌋-th and the
    ⌊(1 − clip) d − 1⌋-th smallest magnitude, floor is the ⌊(1 − ratio) d⌋-th smallest β, top the largest. 0 / 0 is 0.
    β is computed in float64 and rounded to float32 (in float64 leaves it is not).

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        ratio: share of every expert's coordinates that takes part, in (0, 1].
        clip: share of magnitudes that is clamped at each end, in [0, 0.5).

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Du et al., "Parameter competition balancing for model merging", 2024; ``PCB_merge`` in pcb-merging.py of
        duguodong7/pcb-merging at 5897888. The scripts of its experiments have other definitions: they clamp 1 % at each
        end, and those for vision take the normalised changes of the other experts inside tanh.
    """
    return merged(Pcb, **locals())


def fuse(piece: Piece, bounds: Bounds) -> Tensor:
    """The merged vector of a chunk."""
    deltas, dtype = torch.stack(piece.deltas).double(), piece.deltas[0].dtype
    bounds = Bounds(*(bound.to(deltas.device) for bound in bounds))
    scales = _share(_balance(deltas, bounds, dtype).double(), bounds.floor, bounds.top).clamp_(min=0)
    clamped = deltas.abs().clamp_(bounds.low, bounds.high).mul_(deltas.sign())
    total = add(scales).clamp_(min=1e-12)
    return add(clamped.mul_(scales)).div_(total).to(dtype)


def bounds_of(blocks: Callable[[], Iterable[list[Tensor]]], ratio: float, clip: float) -> Bounds:
    """The bounds of task vectors that are never in memory together, exact: ``blocks()`` gives them anew each time."""
    size, wide, count = 0, False, 0
    for deltas in blocks():
        size, count = size + deltas[0].numel(), len(deltas)
        wide |= deltas[0].dtype == torch.float64
    if not size:
        return Bounds(*torch.zeros(4, count, 1, dtype=torch.float64))
    dtype = torch.float64 if wide else torch.float32
    first = int(size * clip)
    ranks = [first, max(first, int(size * (1 - clip) - 1))]
    low, high = ordered(lambda: (torch.stack(d).abs().to(dtype) for d in blocks()), ranks)
    partial = Bounds(low, high, low, high)

    def betas() -> Iterator[Tensor]:  # each rounded to its leaf's dtype, as in `fuse`: floor and top are among those
        for deltas in blocks():
            yield _balance(torch.stack(deltas).double(), partial, deltas[0].dtype).to(dtype)

    floor, top = ordered(betas, [min(int(size * (1 - ratio)), size - 1), size - 1])
    return Bounds(low, high, floor, top)


def _balance(deltas: Tensor, bounds: Bounds, dtype: torch.dtype) -> Tensor:
    """β of every expert (experts, n), of task vectors in float64."""
    inside = _share(deltas.abs().clamp_(bounds.low, bounds.high), bounds.low, bounds.high).square_()
    if len(deltas) > _EXPERTS:  # β exp(-N): a factor of all β is not in s
        inside -= 1
    return inside.mul_(len(deltas)).exp_().mul_((deltas * add(deltas)).tanh_()).to(dtype)


def _share(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The relative position of values between two bounds; 0 where these are equal."""
    width = high - low
    return (values - low).div_(width.where(width > 0, 1)).mul_(width > 0)


@dataclass(frozen=True)
class Pcb(Merger):
    """PCB-Merging: weight coordinates by their size and by agreement with the other experts, keep the best share."""

    name = "pcb"
    semantics: ClassVar = {"mergekit": UNKNOWN}
    grid: ClassVar = WIDE
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    ratio: float = 0.1
    """Share of every expert's coordinates that is merged."""
    clip: float = 1e-4
    """Share of an expert's magnitudes that is clamped at each end."""

    def problems(self, experts: Experts) -> list[str]:
        ratio, clip = self.ratio, self.clip
        problems = [] if 0 < ratio <= 1 else [f"ratio is {ratio}, must be in (0, 1]: the share that takes part"]
        return problems if 0 <= clip < 0.5 else [*problems, f"clip is {clip}, must be in [0, 0.5)"]

    def rule(self, leaves: Mapped) -> Rule:
        found = bounds_of(lambda: chain.from_iterable(map(leaves.blocks, leaves.coefs)), self.ratio, self.clip)
        return Rule(lambda _: lambda piece: fuse(piece, found))

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return 64 * experts * min(largest(leaves), arithmetic.BLOCK) + 32 * experts * BINS


pcb_vector = vector_function(Pcb)
