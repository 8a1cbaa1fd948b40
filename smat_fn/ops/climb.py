"""The climb of ASAM: a step of given length along a slope, scaled by the weights."""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .. import tree
from ..compiled import array, loops_for

_LOOPED = torch.float32, torch.bfloat16


def climb(params: Sequence[Tensor], slopes: Sequence[Tensor], *, rho: float, adaptive: bool) -> list[Tensor]:
    """``theta + rho theta^2 (.) s / (|| |theta| (.) s || + 1e-12)``; not adaptive: ``|theta|`` is replaced by 1.

    In float32 (float64 for float64 leaves), rounded once; norm by `smat_fn.tree.global_norm`. On the CPU compiled loops
    read weights and slopes twice, once for the norm, and write the result once; all ways have the same bits.
    """
    looped = all(t.dtype in _LOOPED and t.is_contiguous() for group in (params, slopes) for t in group)
    if looped and (loops := loops_for(*params, *slopes)) is not None:
        return _looped(loops, params, slopes, rho, adaptive)
    weighted = [_weighted(theta, slope, adaptive) for theta, slope in zip(params, slopes, strict=True)]
    length = rho / (tree.global_norm(dict(enumerate(weighted))) + 1e-12)
    return [_moved(theta, slope, length, adaptive) for theta, slope in zip(params, weighted, strict=True)]


def _looped(
    loops: ModuleType, params: Sequence[Tensor], slopes: Sequence[Tensor], rho: float, adaptive: bool
) -> list[Tensor]:
    pairs = [(array(theta), array(slope)) for theta, slope in zip(params, slopes, strict=True)]
    sums = torch.empty(sum(-(-theta.numel() // tree.NORM_BLOCK) for theta in params), dtype=torch.float32)
    first, out = 0, [torch.empty_like(theta) for theta in params]
    for theta, slope in pairs:
        blocks = -(-len(theta) // tree.NORM_BLOCK)
        loops.slope_squares(theta, slope, adaptive, array(sums[first : first + blocks]))
        first += blocks
    length = rho / (tree.sum_by_halves(sums.double()).sqrt() + 1e-12) if first else torch.zeros(())
    for (theta, slope), target in zip(pairs, out, strict=True):
        loops.climb(theta, slope, adaptive, length.float().numpy()[()], array(target))
    return out


def _weighted(theta: Tensor, slope: Tensor, adaptive: bool) -> Tensor:
    wide = slope.to(tree.compute_dtype(theta))
    return theta.to(wide.dtype).abs() * wide if adaptive else wide


def _moved(theta: Tensor, weighted: Tensor, length: Tensor, adaptive: bool) -> Tensor:
    wide = theta.to(weighted.dtype)
    step = wide.abs() * weighted if adaptive else weighted
    return (wide + step * length.to(step.device, step.dtype)).to(theta.dtype)
