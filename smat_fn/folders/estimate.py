"""What a merge needs: a bound of its memory, and its speed on a trial chunk."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Della, ModelStock, Slerp, Ties, TsvMerge
from ..merge.common import row_length
from ..merge.leaves import BLOCK
from . import trimming
from .pieces import Job, write_order
from .reading import Folder
from .rules import net_sign, rule_of
from .workers import in_order

BYTES_PER_COORDINATE = 80  # at the peak of the greediest merger, DELLA: its sort and its 64-bit fields
FIXED = 32 << 20  # histograms, headers, allocator


def chunk_of(memory: int) -> int:
    """The chunk of `merge_folders` whose bound is ``memory`` bytes. Raises: ValueError where they are too few."""
    if memory <= FIXED:
        raise ValueError(f"{memory >> 20} MiB are too little memory to merge in: give more than {FIXED >> 20}")
    return (memory - FIXED) // BYTES_PER_COORDINATE


def memory_bound(job: Job) -> int:
    """Bytes of anonymous memory at the peak: see `merge_folders`."""
    leaves, count, least = list(job.base.leaves.values()), len(job.experts), 0
    largest = max((leaf.numel() for leaf in leaves), default=0)
    match job.config:
        case Della():
            least = BYTES_PER_COORDINATE * count * max(map(row_length, leaves), default=0)
        case ModelStock() | Slerp():
            least = 32 * count * min(largest, BLOCK)  # blocks of `gram_of`
        case TsvMerge():
            least = (4 * count + 64) * largest  # all task vectors of a leaf, and its decomposition
    return job.workers * max(BYTES_PER_COORDINATE * job.chunk, least) + FIXED


class _Noise(dict[str, Tensor]):
    def get_tensor(self, path: str) -> Tensor:
        return self[path]


def seconds_of(job: Job) -> float:
    """Seconds of computation, from a chunk of noise in the dtype and row length of the largest leaf."""
    floating = [leaf for leaf in job.base.leaves.values() if leaf.is_floating_point()]
    if not floating:
        return 0.0
    like = max(floating, key=Tensor.numel)
    length = max(row_length(like), 1)
    shape = max(1, min(like.numel(), job.chunk * job.workers) // length), length
    generator = torch.Generator().manual_seed(0)

    def folder(label: str) -> Folder:
        noise: Any = _Noise(w=torch.randn(shape, generator=generator).mul_(0.02).to(like.dtype))
        return Folder(label, {"w": torch.empty(shape, dtype=like.dtype, device="meta")}, {"w": Path()}, {Path(): noise})

    trial = job._replace(base=folder("base"), experts={name: folder(name) for name in job.experts}, coefs={"w": 0.5})
    times = []
    for _ in range(2):  # the first one loads libraries and takes memory
        begin = time.perf_counter()
        cuts, majority = {}, 1
        if isinstance(job.config, Ties):
            cuts = trimming.cuts(trial, trimming.find(trial))
            majority = net_sign(trial, cuts)
        for _ in in_order(write_order(trial, rule_of(trial, cuts, majority), "w"), trial.workers):
            pass
        times.append(time.perf_counter() - begin)
    seconds = min(times)

    def work(shape: tuple[int, ...]) -> float:
        size = float(torch.Size(shape).numel())
        return size * min(shape) if isinstance(job.config, TsvMerge) and len(shape) == 2 else size

    return seconds * sum(work(tuple(leaf.shape)) for leaf in job.base.leaves.values()) / work(shape)
