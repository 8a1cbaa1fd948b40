"""Estimate the cost of a merge: an upper bound of its memory, and its speed measured on one chunk."""

import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint import STATISTICS
from ...merge.parts.chunks import BYTES_PER_COORDINATE, row_length
from ...merge.parts.windows import in_order
from ..inputs.reading import Folder
from ..inputs.stored import reader_of_tensor
from .chunks import Job, rule_of, write_order
from .survey import Survey

FIXED = 32 << 20  # histograms, headers, allocator
SAMPLED = 64  # leaves at most of the trial that gives the time of a merge


def chunk_of(memory: int) -> int:
    """The chunk of `merge_folders` whose bound is ``memory`` bytes. Raises: ValueError where they are too few."""
    if memory <= FIXED:
        raise ValueError(f"{memory >> 20} MiB are too little memory for a merge: give more than {FIXED >> 20} MiB")
    return (memory - FIXED) // BYTES_PER_COORDINATE


def memory_bound(job: Job) -> int:
    """Bytes of anonymous memory at the peak: see `merge_folders`."""
    least = job.config.memory(job.base.leaves, len(job.experts))
    return job.workers * max(BYTES_PER_COORDINATE * job.chunk, least) + FIXED


def memory_problems(job: Job) -> list[str]:
    """Errors for leaves that the merger cannot take, and for a merge that needs more memory than is available.

    Of memory none where the system does not report it.
    """
    if problems := job.config.size_problems(job.base.leaves, len(job.experts)):
        return problems
    least = job.workers * job.config.memory(job.base.leaves, len(job.experts)) + FIXED
    free = _available()
    if free is None or least <= free:
        return []
    skip = "exclude large matrices that need no decomposition by `skip`, e.g. '*embed*', or "
    skip = skip if hasattr(job.config, "skip") else ""
    return [
        f"{job.config.name} needs {least / 2**30:.1f} GiB of memory for {job.workers} of the largest parameters, "
        f"{free / 2**30:.1f} GiB are available: {skip}use fewer `workers` or a larger machine"
    ]


def _available() -> int | None:
    """Bytes that can be taken without swapping."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        return None
    return None if found is None else int(found[1]) << 10


class _Statistics(dict[str, Tensor]):
    @property
    def names(self) -> list[str]:
        return list(self)

    def get_tensor(self, path: str) -> Tensor:
        return self[path]


def seconds_of(job: Job) -> float:
    """Seconds of computation, from a chunk of noise in the dtype and row length of the largest leaf.

    A chunk holds several of small leaves, of which each takes longer alone than one of many.
    """
    floating = [leaf for leaf in job.base.leaves.values() if leaf.is_floating_point()]
    if not floating:
        return 0.0
    like = max(floating, key=Tensor.numel)
    length = max(row_length(like.shape), 1)
    shape = max(1, min(like.numel(), job.chunk * job.workers) // length), length
    count = max(1, min(len(floating), SAMPLED, job.chunk * job.workers // math.prod(shape)))
    paths = [f"w{i}" for i in range(count)]
    generator = torch.Generator().manual_seed(0)

    def folder(label: str) -> Folder:
        noise = torch.randn(shape, generator=generator).mul_(0.02).to(like.dtype)
        stores: dict[Path, Any] = {}
        if (kind := job.config.statistics()) is not None:
            own = torch.eye(length) if kind == "gram" else torch.rand(shape, generator=generator)
            stores[Path(STATISTICS[kind])] = _Statistics(dict.fromkeys(paths, own))
        return Folder(
            label, dict.fromkeys(paths, noise.to("meta")), dict.fromkeys(paths, reader_of_tensor(noise)), stores
        )

    trial = job._replace(
        base=folder("base"), experts={name: folder(name) for name in job.experts}, coefs=dict.fromkeys(paths, 0.5)
    )
    times = []
    for _ in range(2):  # the first one loads libraries and takes memory
        begin = time.perf_counter()
        rule = rule_of(job, Survey(trial, {}))
        for _ in in_order((task for path in paths for task in write_order(trial, rule, path)), trial.workers):
            pass
        times.append(time.perf_counter() - begin)
    leaves = job.base.leaves.values()
    return min(times) * sum(job.config.work(leaf.shape) for leaf in leaves) / (count * job.config.work(shape))
