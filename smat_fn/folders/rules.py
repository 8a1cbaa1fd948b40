"""How each merger sees the leaves of mapped folders."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from ..config import (
    Breadcrumbs,
    Dare,
    DareTies,
    Della,
    MagMax,
    ModelStock,
    Slerp,
    TaskArithmetic,
    Ties,
    TsvMerge,
    WeightAverage,
    WeightedAverage,
    WiseFt,
)
from ..merge.common import Fuse, Piece, add, row_length
from ..merge.dare_ties import fused as dare_ties
from ..merge.della import fused as della
from ..merge.della import thresholds
from ..merge.leaves import gram_of
from ..merge.magmax import fused as magmax
from ..merge.model_stock import ratio_of
from ..merge.slerp import arc
from ..merge.ties import Cuts, trimmed, votes
from ..merge.ties import fused as ties
from ..merge.tsv_merge import fused as tsv_merge
from ..merge.weighted_average import mean_of
from . import trimming
from .pieces import SPAN, Job, Rule, compute_dtype, spans, vectors_of, weights_of
from .workers import in_order


def rule_of(job: Job, cuts: Cuts, majority: int) -> Rule:
    """The arithmetic of the pure merger, on pieces. Args: cuts, majority: what TIES has found out before."""
    match job.config:
        case WeightAverage():
            return Rule(total=lambda parts: add(parts, into_first=True).div_(len(job.experts)), based=False)
        case WeightedAverage(weights, normalize):
            return Rule(total=lambda parts: mean_of(parts, weights, normalize=normalize), based=False)
        case Slerp():
            return Rule(lambda path: _slerp(job, path), based=False)
        case TaskArithmetic() | WiseFt():
            return Rule(total=partial(add, into_first=True))
        case MagMax():
            return Rule(lambda _: magmax)
        case ModelStock():
            return Rule(lambda path: _model_stock(job, path))
        case TsvMerge():
            return Rule(lambda path: _tsv_merge(job, path), whole=True)
        case Breadcrumbs():
            return Rule(lambda path: _breadcrumbs(job, path))
        case Ties(aggregate=how):
            assert how is not None
            return Rule(lambda _: lambda piece: ties(piece, cuts, majority, how))
        case Dare(drop_prob=drop_prob):
            assert drop_prob is not None
            return Rule(drop_prob=drop_prob)
        case DareTies(drop_prob=share, aggregate=aggregate):
            return Rule(lambda _: lambda piece: dare_ties(piece, share, aggregate))
        case Della():
            return _della(job, job.config)


def net_sign(job: Job, cuts: Cuts) -> int:
    """The majority sign of TIES, sgn Σ_k sgn(Σ_i δ̂_ik)."""

    def count(path: str, start: int, stop: int) -> int:
        piece = Piece(path, start, list(vectors_of(job, path, start, stop, compute_dtype(job, path))), [])
        return votes(add(trimmed(piece, cuts)))

    floating = {path: leaf for path, leaf in job.base.leaves.items() if leaf.is_floating_point()}
    limit = min(job.chunk // len(job.experts), SPAN)
    tasks = (partial(count, path, *span) for path, leaf in floating.items() for span in spans(leaf, limit))
    net = sum(in_order(tasks, job.workers))
    return (net > 0) - (net < 0)


def _della(job: Job, config: Della) -> Rule:
    drop_prob, window = config.drop_prob, config.window
    assert drop_prob is not None
    assert window is not None

    @lru_cache(maxsize=8)
    def table(length: int) -> Tensor:
        return thresholds(length, drop_prob=drop_prob, window=window).to(job.device)

    return Rule(
        lambda path: lambda piece: della(piece, table(row_length(job.base.leaves[path]))),
        rows=True,
    )


def _slerp(job: Job, path: str) -> Fuse:
    dtype = compute_dtype(job, path, based=False)

    def block(start: int, stop: int) -> Tensor:
        return torch.stack(list(weights_of(job, path, start, stop, dtype)))

    between = arc(gram_of(block, 2, job.base.leaves[path].numel()), job.coefs[path])
    return lambda piece: between(*piece.deltas)


def _model_stock(job: Job, path: str) -> Fuse:
    dtype, count = compute_dtype(job, path), len(job.experts)

    def block(start: int, stop: int) -> Tensor:
        return torch.stack(list(vectors_of(job, path, start, stop, dtype)))

    share = ratio_of(gram_of(block, count, job.base.leaves[path].numel())) / count
    return lambda piece: add(piece.deltas) * share


def _tsv_merge(job: Job, path: str) -> Fuse:
    shape = job.base.leaves[path].shape
    return lambda piece: tsv_merge(path, (delta.view(shape) for delta in piece.deltas)).reshape(-1)


def _breadcrumbs(job: Job, path: str) -> Fuse:
    bands = trimming.bands(job, path)
    return lambda piece: add(
        delta.where(band.mask(delta, piece.start), 0) for band, delta in zip(bands, piece.deltas, strict=True)
    )
