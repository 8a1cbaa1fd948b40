"""PCB-Merging: coordinates weighted by how large they are in their expert, and how far experts agree on them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor

from ..types import Params
from .parts import arithmetic, looped
from .parts.arithmetic import add, divided, largest
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.looped import INFINITE, sources
from .parts.merger import UNKNOWN, WIDE, Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted
from .parts.ranks import BINS
from .parts.sampled import Counter, Found, among, from_keys, ordered, step_of

_EXPERTS = 88  # the largest N whose exp(N) is below infinity in float32
CACHED = 1 << 16  # coordinates over all experts


class Bounds(NamedTuple):
    """Bounds of one expert over all of its coordinates."""

    low: float  # magnitudes are clamped to [low, high]
    high: float
    floor: float = 0.0  # β at or below it counts as 0
    top: float = 0.0  # the largest β


def pcb(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    ratio: float = 0.1,
    clip: float = 1e-4,
    weights: Numbers | None = None,
) -> Params:
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
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Du et al., "Parameter competition balancing for model merging", 2024; ``PCB_merge`` in pcb-merging.py of
        duguodong7/pcb-merging at 5897888. The scripts of its experiments have other definitions: they clamp 1 % at each
        end, and those for vision take the normalised changes of the other experts inside tanh.
    """
    return merged(Pcb, **locals())


class Betas(NamedTuple):
    """β of every expert in a block, rounded to the dtype of the leaf: floor and top are among those."""

    deltas: Sequence[Tensor]
    bounds: Sequence[Bounds]
    dtype: torch.dtype  # of `numbers`

    def numbers(self) -> Tensor:
        """(experts, n)."""
        out = torch.empty(len(self.deltas), len(self.deltas[0]), dtype=self.dtype, device=self.deltas[0].device)
        for part, rows in zip(_cached(self.deltas), out.split(_step(self.deltas), 1), strict=True):
            for row, (*_, beta) in zip(rows, _balance(part, self.bounds), strict=True):
                row.copy_(beta)
        return out

    def among(self, loops: ModuleType, limits: Any) -> Found:
        """As of `sampled.Formed`: exponentials of those numbers alone whose place is in doubt."""
        count, edges, given = len(self.deltas), from_keys(limits), numpy.array(self.bounds)
        for place, beyond in enumerate((-math.inf, math.inf)):  # keys of no number
            edges[..., place][numpy.isnan(edges[..., place])] = beyond
        shape, written = (count, len(self.deltas[0])), numpy.zeros(count, numpy.int64)
        exponents, products = (torch.empty(shape, dtype=torch.float64, device="cpu") for _ in range(2))
        counts, hits = numpy.zeros((*limits.shape[:2], 4), numpy.int64), list[Any]()
        where = sources(self.deltas), given, _less(count), limits, edges
        if not (
            numpy.isfinite(given).all()
            and loops.betas_among(*where, exponents.numpy(), products.numpy(), written, counts) < INFINITE
        ):
            return among(loops, self.numbers(), limits)
        for i, some in enumerate(written.tolist()):
            betas = exponents[i, :some].exp_().mul_(products[i, :some].tanh_()).to(torch.float32)
            own, found = among(loops, betas[None], limits[i : i + 1])
            counts[i] += own[0]
            hits += found
        return counts, hits


def fuse(piece: Piece, bounds: Sequence[Bounds]) -> Tensor:
    """The merged vector of a chunk. Args: bounds: of every expert."""
    return torch.cat([_fused(deltas, bounds) for deltas in _cached(piece.deltas)])


def bounds_of(leaves: Mapped, ratio: float, clip: float) -> list[Bounds]:
    """The bounds of every expert, exact; task vectors are read three times, and never in memory together."""
    if not (size := sum(leaves.shape(path).numel() for path in leaves.coefs)):
        return []
    step = step_of(size)
    some = list(leaves.each_block(lambda block: [delta[::step].clone() for delta in block.deltas], leaves.coefs))
    wide = max((deltas[0].dtype for deltas in some), key=lambda dtype: dtype.itemsize)

    def ends(numbers: Callable[[Sequence[Tensor]], Tensor | Betas], *places: int) -> list[list[float]]:
        def over(count: Counter) -> Iterator[Any]:
            return leaves.each_block(lambda block: count(numbers(block.deltas)), leaves.coefs)

        drawn = [found if isinstance(found, Tensor) else found.numbers() for found in map(numbers, some)]
        return torch.cat(ordered(over, places, size, torch.cat(drawn, 1)), 1).tolist()

    first = int(size * clip)
    sizes = partial(_sizes, dtype=wide)
    found = [Bounds(*pair) for pair in ends(sizes, first, max(first, int(size * (1 - clip) - 1)))]
    betas = partial(Betas, bounds=found, dtype=wide)
    ends_of_beta = ends(betas, min(int(size * (1 - ratio)), size - 1), size - 1)
    return [own._replace(floor=floor, top=top) for own, (floor, top) in zip(found, ends_of_beta, strict=True)]


def _fused(deltas: Sequence[Tensor], bounds: Sequence[Bounds]) -> Tensor:
    merged = total = torch.zeros((), dtype=torch.float64, device=deltas[0].device)
    for i, (own, (delta, size, beta)) in enumerate(zip(bounds, _balance(deltas, bounds), strict=True)):
        scale = _share(beta.double(), own.floor, own.top).clamp_(min=0).abs_()  # no −0
        change = size.mul_(delta.sign_()).mul_(scale)
        merged, total = (merged.add_(change), total.add_(scale)) if i else (change, scale)
    return merged.div_(total.clamp_(min=1e-12)).to(deltas[0].dtype)


def _sizes(deltas: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([delta.to(dtype) for delta in deltas]).abs_()


def _less(count: int) -> float:
    """A number that the squares in all exponents are less by: β exp(-N), since a factor of all β is not in s."""
    return 1.0 if count > _EXPERTS else 0.0


def _balance(deltas: Sequence[Tensor], bounds: Sequence[Bounds]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Δ and |δ̃| of each expert, in float64, and its β, rounded to the dtype of the leaf."""
    wide = [delta.double() for delta in deltas]
    total = add(wide)
    for delta, (low, high, *_) in zip(wide, bounds, strict=True):
        size = delta.abs().clamp_(low, high)
        inside = _share(size, low, high).square_()
        if len(deltas) > _EXPERTS:  # β exp(-N): a factor of all β is not in s
            inside -= 1
        beta = inside.mul_(len(deltas)).exp_().mul_((delta * total).tanh_())
        yield delta, size, beta.to(deltas[0].dtype)


def _share(values: Tensor, low: float, high: float) -> Tensor:
    """The relative position of values between two bounds; 0 where these are equal."""
    return divided(values - low, high - low if high > low else math.inf)


def _cached(deltas: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Task vectors, on the CPU as many coordinates as stay in a core's cache through all operations."""
    return zip(*(delta.split(_step(deltas)) for delta in deltas), strict=True)


def _step(deltas: Sequence[Tensor]) -> int:
    return max(CACHED // len(deltas), 1) if deltas[0].device.type == "cpu" else max(len(deltas[0]), 1)


@dataclass(frozen=True)
class Pcb(Weighted):
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
        problems += [] if 0 <= clip < 0.5 else [f"clip is {clip}, must be in [0, 0.5)"]
        return problems + super().problems(experts)

    def plain(self, leaves: Mapped) -> Rule:
        found = bounds_of(leaves, self.ratio, self.clip)
        given = numpy.array(found)
        loop = partial(looped.balanced, bounds=given, less=_less(len(found))) if numpy.isfinite(given).all() else None
        return Rule(lambda _: lambda piece: fuse(piece, found), loop=lambda _: loop)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return 64 * experts * min(largest(leaves), arithmetic.BLOCK) + 64 * experts * BINS


pcb_vector = vector_function(Pcb)
