"""The thresholds of TIES over mapped folders, in a form that JSON holds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import tree
from ...config import Ties
from .._common import _delta
from ..ties import _Cut
from .pieces import Cuts, Job, refuse_values, spans
from .thresholds import Order, position, select, value_of


class Trim(NamedTuple):
    """What one expert keeps of one group of leaves: see ``_Cut``; ``kept`` counts the coordinates."""

    bits: int
    double: bool
    last: int | None
    kept: int

    def cut(self) -> _Cut:
        return _Cut(value_of(self.bits, torch.float64 if self.double else torch.float32), self.last)


def find(job: Job) -> list[list[Trim]]:
    """One trim for every group of leaves (`_groups`) and, in their order, every expert. Raises: as `write_order`."""
    return [[_trim(job, name, group) for name in job.experts] for group in _groups(job)]


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
    kinds = {path: tree.compute_dtype(job.base.leaves[path], folder.leaves[path]) for path in group}
    wide = torch.float64 if torch.float64 in kinds.values() else torch.float32
    size = sum(job.base.leaves[path].numel() for path in group)

    def scan() -> Iterator[Tensor]:
        for path in group:
            for start, stop in spans(job.base.leaves[path], job.chunk):
                delta = _delta(folder.read(path, start, stop), job.base.read(path, start, stop), kinds[path])
                yield delta.abs_().to(wide)

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
