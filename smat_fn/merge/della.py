"""DELLA: drop changes at random, small ones more often, rescale the others, elect signs, take the mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from .. import random
from ..execution import array, loops_for
from ..types import Aggregate, Params
from .parts import looped
from .parts.arithmetic import agreeing, divisor, elected, zeroed
from .parts.chunks import BYTES_PER_COORDINATE, Fuse, Piece, row_length
from .parts.inputs import Experts, drop_problems
from .parts.merger import L1_NORMS, Mapped, Rule, merged, vector_function
from .parts.per_expert import ExpertPart, Numbers, Own, Sparse, Sparsify, number

CPU = torch.device("cpu")
_SLACK = 1e-12  # an end of the keep probabilities that is 0 or 1 up to float64 rounding counts as 0 or 1


# over 60 lines: its docstring explains every argument
def della(
    key: Tensor,
    base: Params,
    experts: Experts,
    *,
    coef: float,
    drop_prob: float,
    window: float,
    aggregate: Aggregate = "mean",
    elect: bool = True,
    weights: Numbers | None = None,
    densities: Numbers | None = None,
    windows: Numbers | None = None,
    rescale: bool = False,
) -> Params:
    """θ₀ + γ · mean over i of the δ̂_i ≠ 0 whose sign is s; δ̂ = m ⊙ Δ / q̂, s = + where Σ_i δ̂_i ≥ 0 and else −.

    Along each row of n coordinates (last axis; vectors are one row), the one of rank r = 0..n − 1 by ascending |Δ|,
    equal ones by position, is kept with probability ``q = (1 − drop_prob) − window/2 + r/(n − 1)·window``
    (1 − drop_prob if n = 1), realised as ``q̂ = 1 − T/65536``, T = ``random.threshold(1 − q)``, on the fields of `dare`.

    Args:
        key: int64 (2,).
        experts: {name: tree} or a list of trees (names are positions).
        coef: γ, finite.
        drop_prob: in [0, 1).
        window: full width of the range of q, both ends of which lie in (0, 1].
        aggregate: "mean" of the agreeing entries, or their "sum".
        elect: False takes all entries, whatever their sign.
        weights: w_i by expert, a number or {glob: number} by leaf; 1 for those not named. w_i δ̂_i is elected and
            added, a mean is over the weights that take part.
        densities, windows: 1 − drop_prob and window by expert in the same way; of density 1 everything stays.
        rescale: give each leaf of m ⊙ Δ the L1 norm of Δ, instead of dividing by q̂.

    Returns:
        a new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Deep et al., "DELLA-Merging", 2024; its code's epsilon is window/2.
    """
    return merged(Della, **locals())


def fuse(piece: Piece, by_rank: Tensor) -> Tensor:
    """The merged vector of whole rows. Args: by_rank: `thresholds` of their length."""
    masked = [_masked(d, f, by_rank) for d, f in zip(piece.deltas, piece.fields, strict=True)]
    return agreeing(masked, elected(masked), mean=True)


@lru_cache(maxsize=16)
def thresholds(length: int, drop_prob: float, window: float, device: torch.device = CPU) -> Tensor:
    """T of the ranks 0..length − 1 of a row, ``random.threshold(1 − q)``: int32 (length,)."""
    rank = torch.arange(length, dtype=torch.float64, device="cpu")
    share = rank / divisor(max(length - 1, 1), rank)
    keep = (1 - drop_prob) - window / 2 + share * window if length > 1 else 1 - drop_prob + 0 * rank
    return random.threshold(1 - keep).to(device, torch.int32)


def _masked(delta: Tensor, fields: Tensor, by_rank: Tensor) -> Tensor:
    loops = loops_for(delta, fields, by_rank) if delta.dtype == torch.float32 and delta.numel() else None
    if loops is not None and by_rank[0] <= looped.MOST:
        cutoffs, vector = numpy.empty((1, len(delta)), numpy.uint16), delta.contiguous()
        looped.ranked(loops, looped.sources([vector]), array(by_rank).astype(numpy.uint16)[None], cutoffs)
        drop = torch.from_numpy(cutoffs[0]).to(torch.int32)
    else:
        order = ascending(delta.view(-1, len(by_rank)).abs())
        drop = by_rank.new_empty(order.shape).scatter_(-1, order, by_rank.expand_as(order)).view(-1)
    kept = 1 - drop.to(delta.dtype) / 65536
    return zeroed(delta / kept, fields >= drop)


def sparse(part: ExpertPart, plain: bool, *, drop_prob: float, window: float, windows: Numbers) -> Tensor:
    """m ⊙ Δ / q̂ of whole rows with a density and a window of their own; without the division where ``plain``."""
    assert part.fields is not None
    if part.density is not None and not 0 < part.density < 1:
        return part.delta.clone() if part.density else torch.zeros_like(part.delta)
    shares = _shares(part.name, part.path, part.density, drop_prob, window, windows)
    masked = _masked(part.delta, part.fields, thresholds(row_length(part.shape), *shares, part.delta.device))
    return zeroed(part.delta, masked != 0) if plain else masked


def _shares(
    name: str, path: str, density: float | None, drop_prob: float, window: float, windows: Numbers
) -> tuple[float, float]:
    """The drop probability and the window of an expert's leaf."""
    drop, width = drop_prob if density is None else 1 - density, number(windows, name, path, window)
    if problems := _problems(drop, width):
        raise ValueError(f"expert {name!r}, parameter {path!r}: {problems[0]}")
    return drop, width


def ascending(magnitudes: Tensor) -> Tensor:
    """``magnitudes.argsort(dim=-1, stable=True)`` of non-negative numbers, int64.

    Bits of non-negative floats are ordered as the floats are, and NumPy sorts 16 bits by radix: two stable passes,
    lower half first, take a quarter of the time of a comparison sort.
    """
    if magnitudes.dtype != torch.float32 or magnitudes.device.type != "cpu" or not magnitudes.numel():
        return magnitudes.argsort(dim=-1, stable=True)
    bits = magnitudes.contiguous().view(torch.int32)
    low = bits.to(torch.int16).numpy().view(numpy.uint16)
    order = torch.from_numpy(numpy.argsort(low, axis=-1, kind="stable"))
    high = (bits >> 16).to(torch.int16).gather(-1, order).numpy()
    return order.gather(-1, torch.from_numpy(numpy.argsort(high, axis=-1, kind="stable")))


def _problems(drop_prob: float, window: float) -> list[str]:
    problems = drop_problems(drop_prob)
    low, high = 1 - drop_prob - window / 2, 1 - drop_prob + window / 2
    if not window >= 0:
        problems.append(f"window is {window}, must be at least 0: it is the full width of the keep probabilities")
    elif not problems and not (low > _SLACK and high <= 1 + _SLACK):
        problems.append(
            f"drop_prob {drop_prob} and window {window} give keep probabilities from {low:g} to {high:g}, "
            "both must be in (0, 1]: take a smaller window"
        )
    return problems


@dataclass(frozen=True)
class Della(Sparse):
    """DELLA: drop at random by rank of magnitude, elect signs, average the changes that agree."""

    name = "della"
    same_on_gpu = True
    random = True
    semantics: ClassVar = {"mergekit": L1_NORMS}
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    drop_prob: float | None = None
    """Mean probability of removing a coordinate."""
    window: float | None = None
    """Full width of the range of keep probabilities."""
    aggregate: Aggregate = field(default="mean", kw_only=True)
    """Mean or sum of the agreeing entries."""
    elect: bool = field(default=True, kw_only=True)
    """True: take entries that have the elected sign; False: take all entries, whatever their sign."""
    windows: Mapping[str, float] = field(default_factory=dict, hash=False, kw_only=True)
    """Value of --window by expert name."""

    rows = True

    def density_limits(self, name: str) -> tuple[float, float]:
        rules: Any = self.windows.get(name, self.window)
        half = max(rules.values()) / 2 if isinstance(rules, Mapping) else rules / 2
        return half + 1 / 65536, 1 - half  # keep probabilities are multiples of 1/65536 above 0

    def problems(self, experts: Experts) -> list[str]:
        assert self.drop_prob is not None
        assert self.window is not None
        return [*_problems(self.drop_prob, self.window), *super().problems(experts)]

    def sparsify(self, leaves: Mapped) -> Sparsify:
        assert self.drop_prob is not None
        assert self.window is not None
        return partial(sparse, drop_prob=self.drop_prob, window=self.window, windows=self.windows)

    def plain(self, leaves: Mapped) -> Rule:
        assert self.drop_prob is not None
        assert self.window is not None
        shares = self.drop_prob, self.window

        def own(path: str) -> Fuse:
            length = row_length(leaves.shape(path))
            return lambda piece: fuse(piece, thresholds(length, *shares, piece.deltas[0].device))

        return Rule(own, rows=True, loop=partial(self.looped, leaves))

    def mask(self, leaves: Mapped, own: Own) -> looped.Mask | None:
        assert self.drop_prob is not None
        assert self.window is not None
        by_rank = numpy.zeros((len(own.names), row_length(own.shape)), numpy.int32)
        for row, name, density in zip(by_rank, own.names, own.densities, strict=True):
            if density not in (0, 1):
                shares = _shares(name, own.path, density, self.drop_prob, self.window, self.windows)
                row[:] = thresholds(len(row), *shares).numpy()
        if by_rank.max(initial=0) > looped.MOST:
            return None
        cutoffs = [1 << 16 if density == 0 else 0 for density in own.densities]
        alike = (by_rank == by_rank[0]).all()
        return looped.ByRank(by_rank[: 1 if alike else None].astype(numpy.uint16), cutoffs, divide=not self.rescale)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return max(
            super().memory(leaves, experts),
            BYTES_PER_COORDINATE * experts * max((row_length(leaf.shape) for leaf in leaves.values()), default=0),
        )


della_vector = vector_function(Della)
