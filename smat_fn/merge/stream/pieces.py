"""Merging of one leaf of mapped folders, piece by piece, with the arithmetic of the pure mergers."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ... import random, tree
from ...config import Dare, Della, MergerConfig, TaskArithmetic, Ties, WeightAverage
from .._common import Piece, _delta, _fields, _groups, _mask_keys, add, agreeing, row_length
from ..della import _masked, thresholds
from ..ties import _Cut, _trimmed
from .reading import Folder

Cuts = dict[str, list[_Cut]]
Fuse = Callable[[Piece], Tensor]


class Job(NamedTuple):
    """What is merged, checked."""

    config: MergerConfig
    coef: float
    key: Tensor | None
    base: Folder
    experts: dict[str, Folder]
    dtype: torch.dtype | None  # of the floating-point output; None: base's
    chunk: int  # coordinates, over all experts together


class Written(NamedTuple):
    """Output coordinates from ``start`` on; norms of the rounding error and of the merged change."""

    start: int
    values: Tensor
    error: float = 0.0
    change: float = 0.0


def target(job: Job, path: str) -> torch.dtype:
    """The dtype that a leaf is written in."""
    leaf = job.base.leaves[path]
    return job.dtype if job.dtype is not None and leaf.is_floating_point() else leaf.dtype


def spans(leaf: Tensor, limit: int, *, rows: bool = False) -> Iterator[tuple[int, int]]:
    """Flat ranges of at most ``limit`` coordinates (or one row) that cover a leaf; with ``rows`` no row is cut."""
    return ((start, stop) for group in _groups([leaf], max(1, limit), rows) for _, start, stop in group)


def write_order(job: Job, fuse: Fuse | None, path: str) -> Iterator[Written]:
    """Every coordinate of one output leaf, in order. ``fuse``: of `fuse_of`, None for WA.

    Raises: ValueError that lists all values of all inputs that are not finite (or, for WA, differ) on meeting one.
    """
    if job.base.leaves[path].is_floating_point():
        return _merged(job, fuse, path)
    return _copied(job, path)


def _merged(job: Job, fuse: Fuse | None, path: str) -> Iterator[Written]:
    leaf, folders = job.base.leaves[path], list(job.experts.values())
    leaves = [folder.leaves[path] for folder in folders]
    dtype = tree.compute_dtype(*leaves) if fuse is None else tree.compute_dtype(leaf, *leaves)
    drawn = None if job.key is None else _mask_keys(job.key, list(job.experts), [path])
    out = target(job, path)
    for start, stop in spans(leaf, job.chunk // len(folders), rows=isinstance(job.config, Della)):
        origin = job.base.read(path, start, stop).to(dtype)
        read = (folder.read(path, start, stop) for folder in folders)
        if fuse is None:
            parts = [values.to(dtype) for values in read]
            exact = add(parts).div_(len(parts))
            change = exact - origin
        else:
            parts = [_delta(values, origin, dtype) for values in read]
            fields = [] if drawn is None else _fields(drawn, [(0, start, stop)], origin.device)[0]
            change = fuse(Piece(path, start, parts, fields)) * job.coef
            exact = change + origin
        if not all(math.isfinite(part.sum()) for part in parts):
            refuse_values(job, path, parts)
        values = exact.to(out)
        error = _norm(values.to(dtype) - exact)
        if not (math.isfinite(error) or bool(values.isfinite().all())):
            raise ValueError(f"leaf {path!r}: merged values exceed the range of {out}: choose a wider out_dtype")
        yield Written(start, values, error, _norm(change))


def _copied(job: Job, path: str) -> Iterator[Written]:
    average = isinstance(job.config, WeightAverage)
    first, *rest = job.experts.values() if average else (job.base,)
    for start, stop in spans(job.base.leaves[path], job.chunk):
        values = first.read(path, start, stop)
        if not all(torch.equal(values, folder.read(path, start, stop)) for folder in rest):
            refuse_values(job, path, [])
        yield Written(start, values)


def fuse_of(job: Job, cuts: Cuts, majority: int) -> Fuse | None:
    """The merged task vector of a piece, as the pure merger computes it; None for WA, which has none."""
    match job.config:
        case WeightAverage():
            return None
        case TaskArithmetic():
            return lambda piece: add(piece.deltas)
        case Dare():
            return _dare(job.config)
        case Della():
            return _della(job.config, job.base.leaves)
        case Ties():
            mean = job.config.aggregate == "mean"

            def fuse(piece: Piece) -> Tensor:
                trimmed = _trimmed(piece, cuts)
                sign = add(trimmed).sign()
                return agreeing(trimmed, sign.where(sign != 0, majority), mean=mean)

            return fuse


def net_sign(job: Job, cuts: Cuts) -> int:
    """The majority sign of TIES, sgn Σ_k sgn(Σ_i δ̂_ik)."""
    net = 0
    for path, leaf in job.base.leaves.items():
        if leaf.is_floating_point():
            dtype = tree.compute_dtype(leaf, *(folder.leaves[path] for folder in job.experts.values()))
            for start, stop in spans(leaf, job.chunk // len(job.experts)):
                origin = job.base.read(path, start, stop).to(dtype)
                deltas = [_delta(folder.read(path, start, stop), origin, dtype) for folder in job.experts.values()]
                net += int(add(_trimmed(Piece(path, start, deltas, []), cuts)).sign().sum(dtype=torch.int64))
    return (net > 0) - (net < 0)


def _dare(config: Dare) -> Fuse:
    assert config.drop_prob is not None
    threshold = int(random.threshold(config.drop_prob))
    kept = 1 - threshold / 65536

    def fuse(piece: Piece) -> Tensor:
        return add([(d / kept).where(f >= threshold, 0) for d, f in zip(piece.deltas, piece.fields, strict=True)])

    return fuse


def _della(config: Della, leaves: Mapping[str, Tensor]) -> Fuse:
    drop_prob, window = config.drop_prob, config.window
    assert drop_prob is not None
    assert window is not None
    table = lru_cache(maxsize=8)(lambda length: thresholds(length, drop_prob=drop_prob, window=window))

    def fuse(piece: Piece) -> Tensor:
        by_rank = table(row_length(leaves[piece.path]))
        masked = [_masked(d, f, by_rank) for d, f in zip(piece.deltas, piece.fields, strict=True)]
        sign = torch.where(add(masked) >= 0, 1.0, -1.0).to(masked[0].dtype)
        return agreeing(masked, sign, mean=True)

    return fuse


def refuse_values(job: Job, path: str, parts: list[Tensor]) -> None:
    """Read everything and list what cannot be merged. Raises: ValueError, unless only a sum was too large."""
    tree.raise_problems(list(_value_problems(job)))
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError(f"leaf {path!r}: the difference of an expert and base overflows: they are no relatives")


def _value_problems(job: Job) -> Iterator[str]:
    for folder in (job.base, *job.experts.values()):
        for path, leaf in folder.leaves.items():
            if leaf.is_floating_point():
                bad = sum(int((~folder.read(path, *span).isfinite()).sum()) for span in spans(leaf, job.chunk))
                if bad:
                    yield f"leaf {path!r} of {folder.label} holds {bad} values that are NaN or infinite"
    if isinstance(job.config, WeightAverage):
        first, *rest = job.experts.values()
        for folder in rest:
            for path, leaf in folder.leaves.items():
                if not leaf.is_floating_point() and not all(
                    torch.equal(first.read(path, *span), folder.read(path, *span)) for span in spans(leaf, job.chunk)
                ):
                    yield (
                        f"leaf {path!r} differs between {first.label} and {folder.label}: only floating-point leaves "
                        "are averaged, make it equal"
                    )


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
