"""The thresholds of TIES, in a form that JSON holds, and of Breadcrumbs, over mapped folders."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import Breadcrumbs, Ties
from ..merge.common import delta_of
from ..merge.ties import Cut, Cuts
from .pieces import SPAN, Job, compute_dtype, refuse_values, spans
from .thresholds import Order, position, select, value_of
from .workers import in_order


class Trim(NamedTuple):
    """What one expert keeps of one group of leaves: see ``Cut``; ``kept`` counts the coordinates."""

    bits: int
    double: bool
    last: int | None
    kept: int

    def cut(self) -> Cut:
        return Cut(value_of(self.bits, torch.float64 if self.double else torch.float32), self.last)


class Band(NamedTuple):
    """What Breadcrumbs keeps of one expert's leaf: what comes, by magnitude and position, after one and up to another.

    Bounds are (magnitude, flat position), None where there is no bound.
    """

    low: tuple[Tensor, int] | None
    high: tuple[Tensor, int] | None

    def mask(self, delta: Tensor, start: int) -> Tensor:
        """Of the flat coordinates from ``start`` on."""
        magnitude, place = delta.abs(), torch.arange(start, start + delta.numel(), device=delta.device)

        def after(bound: tuple[Tensor, int]) -> Tensor:
            value = bound[0].to(delta.device)
            return (magnitude > value) | ((magnitude == value) & (place > bound[1]))

        kept = torch.ones_like(delta, dtype=torch.bool) if self.low is None else after(self.low)
        return kept if self.high is None else kept & ~after(self.high)


def bands(job: Job, path: str) -> list[Band]:
    """What Breadcrumbs keeps of a leaf, of every expert in their order. Raises: as `write_order`."""
    config, leaf, dtype = job.config, job.base.leaves[path], compute_dtype(job, path)
    assert isinstance(config, Breadcrumbs)
    size = leaf.numel()
    low, high = int(size * config.drop_smallest), size - int(size * config.drop_largest)

    def band(name: str) -> Band:
        def scan() -> Iterator[Tensor]:
            for start, stop in spans(leaf, job.chunk):
                origin = job.base.read(path, start, stop).to(job.device)
                yield delta_of(job.experts[name].read(path, start, stop), origin, dtype).abs_()

        def bound(rank: int) -> tuple[Tensor, int]:
            order = _finite(job, [path], select(scan, rank, dtype))
            value = value_of(order.bits, dtype)
            return value, position(scan, value, rank - order.below)

        return Band(bound(low) if low else None, bound(high) if high < size else None)

    return [band(name) for name in job.experts]


def find(job: Job) -> list[list[Trim]]:
    """One trim for every group of leaves (`_groups`) and, in their order, every expert. Raises: as `write_order`."""
    trims = in_order((partial(_trim, job, name, group) for group in _groups(job) for name in job.experts), job.workers)
    return [[next(trims) for _ in job.experts] for _ in _groups(job)]


def cuts(job: Job, trims: Sequence[Sequence[Trim]]) -> Cuts:
    """What each expert keeps of each leaf, in their order."""
    return {path: [t.cut() for t in row] for group, row in zip(_groups(job), trims, strict=True) for path in group}


def density(job: Job, trims: Sequence[Sequence[Trim]]) -> dict[str, float]:
    """The fraction of coordinates that is kept of every expert."""
    size = sum(leaf.numel() for leaf in job.base.leaves.values() if leaf.is_floating_point())
    return {name: sum(row[i].kept for row in trims) / max(size, 1) for i, name in enumerate(job.experts)}


def _groups(job: Job) -> list[list[str]]:
    """The leaves that share a threshold."""
    assert isinstance(job.config, Ties)
    paths = [path for path, leaf in job.base.leaves.items() if leaf.is_floating_point() and leaf.numel()]
    return [[path] for path in paths] if job.config.scope == "tensor" else [paths] if paths else []


def _trim(job: Job, name: str, group: Sequence[str]) -> Trim:
    config, folder = job.config, job.experts[name]
    assert isinstance(config, Ties)
    assert config.keep is not None
    kinds = {path: compute_dtype(job, path) for path in group}
    wide = torch.float64 if torch.float64 in kinds.values() else torch.float32
    size = sum(job.base.leaves[path].numel() for path in group)

    def scan() -> Iterator[Tensor]:
        for path in group:
            for start, stop in spans(job.base.leaves[path], min(job.chunk, SPAN)):
                origin = job.base.read(path, start, stop).to(job.device)
                yield delta_of(folder.read(path, start, stop), origin, kinds[path]).abs_().to(wide)

    count = int(size * config.keep)
    if config.scope == "tensor":
        count = max(count, 1)
        order = _finite(job, group, select(scan, size - count + 1, wide))
        wanted = count - (size - order.below - order.equal)  # of the equal magnitudes
        last = None if wanted == order.equal else position(scan, value_of(order.bits, wide), wanted)
        return Trim(order.bits, wide == torch.float64, last, count)
    order = _finite(job, group, select(scan, max(size - count, 1), wide))
    return Trim(order.bits, wide == torch.float64, None, size - order.below)


def _finite(job: Job, group: Sequence[str], order: Order | None) -> Order:
    if order is None:
        refuse_values(job, group[0], [])
        raise ValueError("the difference of an expert and base overflows: they are no relatives")
    return order
