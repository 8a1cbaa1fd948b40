"""What a merge needs: a bound of its memory, and its speed on a trial chunk."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import Della, Ties
from .._common import row_length
from . import trimming
from .pieces import Job, fuse_of, net_sign, write_order
from .reading import Folder

BYTES_PER_COORDINATE = 80  # at the peak of the greediest merger, DELLA: its sort and its 64-bit fields
FIXED = 32 << 20  # histograms, headers, allocator


def memory_bound(job: Job) -> int:
    """Bytes of anonymous memory at the peak: see `merge_folders`."""
    rows = 0
    if isinstance(job.config, Della):
        rows = len(job.experts) * max((row_length(leaf) for leaf in job.base.leaves.values()), default=0)
    return BYTES_PER_COORDINATE * max(job.chunk, rows) + FIXED


class _Noise(dict[str, Tensor]):
    def get_tensor(self, path: str) -> Tensor:
        return self[path]


def seconds_per_coordinate(job: Job) -> float:
    """Seconds of computation a coordinate, from a chunk of noise in the dtype and row length of the largest leaf."""
    floating = [leaf for leaf in job.base.leaves.values() if leaf.is_floating_point()]
    if not floating:
        return 0.0
    like = max(floating, key=Tensor.numel)
    length = max(row_length(like), 1)
    shape = max(1, min(like.numel(), job.chunk) // length), length
    generator = torch.Generator().manual_seed(0)

    def folder(label: str) -> Folder:
        noise: Any = _Noise(w=torch.randn(shape, generator=generator).mul_(0.02).to(like.dtype))
        return Folder(label, {"w": torch.empty(shape, dtype=like.dtype, device="meta")}, {"w": Path()}, {Path(): noise})

    trial = job._replace(base=folder("base"), experts={name: folder(name) for name in job.experts})
    begin = time.perf_counter()
    cuts, majority = {}, 1
    if isinstance(job.config, Ties):
        cuts = trimming.cuts(trial, trimming.find(trial))
        majority = net_sign(trial, cuts)
    for _ in write_order(trial, fuse_of(trial, cuts, majority), "w"):
        pass
    return (time.perf_counter() - begin) / (shape[0] * shape[1])
