"""Merging of checkpoint folders: all checks first, then shard by shard, whole or not at all."""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ... import __version__
from ...config import MergerConfig, Ties, settings
from . import trimming
from .estimate import memory_bound, seconds_per_coordinate
from .pieces import Cuts, Job, fuse_of, net_sign, target, write_order
from .prepare import OutDtype, prepare
from .writing import (
    Shard,
    exclusive,
    finish,
    load_progress,
    save_progress,
    shard_file,
    work_folder,
    write_piece,
)

CHUNK = 1 << 19  # as the pure mergers
SHARD_SIZE = 5 * 10**9


class Report(NamedTuple):
    """What a merge did."""

    density: dict[str, float]  # TIES: the fraction of coordinates kept of every expert, else empty
    rounding_ratio: float  # RMS of the last rounding / RMS of the merged change of base; above 1 it drowns the change
    seconds: float
    bytes: int  # of tensor data written


class Plan(NamedTuple):
    """What a merge would need, from headers and a trial on one chunk."""

    memory: int  # bytes, a bound of the anonymous memory at its peak, above that of an idle process
    disk: int  # bytes that are written; twice as many are taken where a merge of the same name is replaced
    seconds: float  # of computation on this machine with its present threads; disks slower than that add to it
    shards: tuple[str, ...]


def merge_folders(
    config: MergerConfig,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    coef: float | None = None,
    key: Tensor | None = None,
    out_dtype: OutDtype = "same",
    shard_size: int = SHARD_SIZE,
    chunk: int = CHUNK,
    overwrite: bool = False,
) -> Report:
    """θ₀ + γ τ(Δ₁, …, Δ_N) of folders on disk, bit for bit what the pure merger of ``config`` gives in memory.

    The output has base's leaves, shapes and dtypes, its configuration and its tokenizer. It appears whole or not at
    all; an interrupted merge, called again, goes on after its last whole shard. Anonymous memory stays below
    80 bytes x max(chunk, rows) + 32 MiB, where rows is 0, but for DELLA, which sorts whole rows, experts x the longest
    row. So it grows neither with the model nor, those rows apart, with the number of experts.

    Args: experts: name to folder; the name decides the masks of DARE and DELLA. coef: γ, else ``config.coef``.
        key: int64 (2,), for DARE and DELLA. out_dtype: of the floating-point leaves, "same" as base's.
        shard_size: bytes of tensor data in one file. chunk: coordinates in memory at a time, all experts together;
        it changes no bit.
    Raises: ValueError that lists every problem of options and headers before any work; later for values that are not
        finite, with all their leaves, and if another merge into ``out`` is running. Nothing is left in ``out`` then.
    """
    begin = time.perf_counter()
    job, shards = prepare(
        config,
        base,
        experts,
        out,
        coef=coef,
        key=key,
        out_dtype=out_dtype,
        shard_size=shard_size,
        chunk=chunk,
        overwrite=overwrite,
    )
    size = sum(sum(_nbytes(job, path) for path in shard.offsets) for shard in shards)
    with exclusive(out):
        folder = work_folder(out)
        progress = load_progress(folder, _recipe(job, shard_size))
        _check_room(folder, shards)
        try:
            trims, cuts, majority = _trimmings(job, folder, progress)
            fuse = fuse_of(job, cuts, majority)
            for shard in shards:
                if shard.file not in progress["shards"]:
                    with shard_file(folder, shard) as descriptor:
                        sums = [0.0, 0.0]
                        for path, offset in shard.offsets.items():
                            for piece in write_order(job, fuse, path):
                                write_piece(descriptor, piece.values, offset + piece.start * piece.values.itemsize)
                                sums = [sums[0] + piece.error**2, sums[1] + piece.change**2]
                    progress["shards"][shard.file] = sums
                    save_progress(folder, progress)
        except ValueError:
            shutil.rmtree(folder, ignore_errors=True)  # it would fail again
            raise
        error, change = (math.sqrt(sum(sums[i] for sums in progress["shards"].values())) for i in (0, 1))
        finish(folder, out, base, shards, job.dtype, size)
    ratio = error / change if change else math.inf if error else 0.0
    density = trimming.density(job, trims) if isinstance(config, Ties) else {}
    return Report(density, ratio, time.perf_counter() - begin, size)


def plan(
    config: MergerConfig,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    coef: float | None = None,
    key: Tensor | None = None,
    out_dtype: OutDtype = "same",
    shard_size: int = SHARD_SIZE,
    chunk: int = CHUNK,
    overwrite: bool = False,
) -> Plan:
    """The checks of `merge_folders`, and what it would need; nothing is written. Raises: as `merge_folders` does."""
    job, shards = prepare(
        config,
        base,
        experts,
        out,
        coef=coef,
        key=key,
        out_dtype=out_dtype,
        shard_size=shard_size,
        chunk=chunk,
        overwrite=overwrite,
    )
    count = sum(leaf.numel() for leaf in job.base.leaves.values())
    disk = sum(shard.size for shard in shards)
    return Plan(memory_bound(job), disk, count * seconds_per_coordinate(job), tuple(shard.file for shard in shards))


def _trimmings(job: Job, folder: Path, progress: dict[str, Any]) -> tuple[list[list[trimming.Trim]], Cuts, int]:
    if not isinstance(job.config, Ties):
        return [], {}, 0
    if "trims" not in progress:
        progress["trims"] = trimming.find(job)
        save_progress(folder, progress)
    trims = [[trimming.Trim(*trim) for trim in row] for row in progress["trims"]]
    cuts = trimming.cuts(job, trims)
    if "majority" not in progress:
        progress["majority"] = 1 if job.config.scope == "tensor" else net_sign(job, cuts)
        save_progress(folder, progress)
    return trims, cuts, progress["majority"]


def _recipe(job: Job, shard_size: int) -> str:
    """A digest of all that decides the output's bytes; input files count by path, size and time of change."""
    files = []
    for name, folder in {"": job.base, **job.experts}.items():
        for file in folder.stores:
            stat = file.stat()
            files.append([name, str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    key = None if job.key is None else job.key.tolist()
    parts = [__version__, job.config.name, settings(job.config), job.coef, key, str(job.dtype), shard_size, files]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _check_room(folder: Path, shards: list[Shard]) -> None:
    present = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            present += file.stat().st_blocks * 512
    needed, free = sum(shard.size for shard in shards), shutil.disk_usage(folder).free
    if needed - present > free:
        raise ValueError(
            f"{folder.parent} has {free / 1e9:.1f} GB free, {(needed - present) / 1e9:.1f} GB are needed: make room, "
            "or write elsewhere"
        )


def _nbytes(job: Job, path: str) -> int:
    return job.base.leaves[path].numel() * target(job, path).itemsize
