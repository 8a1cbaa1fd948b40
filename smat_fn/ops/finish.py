"""From a gradient to the optimizer: reweight, global norm and clip, in no more passes over memory than a clip."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import tree
from . import launch
from .library import reweight_into
from .plan import Numbers, first_tiles

_PIECE = 1 << 20  # coordinates that are widened at a time


@torch.no_grad()
def finish(
    grads: Mapping[str, Tensor],
    numbers: Numbers | None,
    masked: Sequence[bool],
    *,
    max_norm: float | None,
    donate: bool,
) -> tuple[dict[str, Tensor], Tensor]:
    """``clip(alpha m (.) g)`` and the norm before clipping; ``numbers=None`` for a gradient that is not reweighted.

    ``g' min(1, max_norm / (norm + 1e-6))``, the factor of ``torch.nn.utils.clip_grad_norm_``, norm by
    `smat_fn.tree.global_norm`. On the kernels one pass reweights and sums squares; with a clip that pass only sums, and
    a second one draws the mask again, reweights and clips.

    Args: max_norm: None only measures; donate: may write into grads, same bits.
    Returns: (leaves by path, 0-d float32 norm); nothing waits for the device.
    """
    raw = {path: g if g.is_contiguous() else g.contiguous() for path, g in grads.items()}
    if numbers is None and max_norm is None:
        out = dict(grads)
    else:
        owned = _owned(raw) if donate else set()
        out = {path: g if path in owned else torch.empty_like(g) for path, g in raw.items()}
    sources, targets = list(raw.values()), list(out.values())
    if launch.by_kernel(sources, targets):
        return out, _by_kernels(sources, targets, numbers, list(masked), max_norm)
    if numbers is not None:
        starts = [0] * len(sources)
        reweight_into(sources, targets, numbers.streams, numbers.scale, numbers.cutoff, list(masked), starts)
        sources = targets
    norm = tree.global_norm(sources)
    if max_norm is not None:
        factor = clip_factor(norm, max_norm)
        for source, target in zip(sources, targets, strict=True):
            _scale(source, factor.to(source.device, tree.compute_dtype(source)), target)
    return out, norm.float()


def _scale(source: Tensor, factor: Tensor, target: Tensor) -> None:
    """``source * factor``, rounded once: on a device torch would round a 0-d factor to the dtype of source first."""
    if source.dtype == factor.dtype:
        torch.mul(source, factor, out=target)
        return
    for own, there in zip(source.view(-1).split(_PIECE), target.view(-1).split(_PIECE), strict=True):
        there.copy_(own.to(factor.dtype).mul_(factor))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _by_kernels(
    sources: list[Tensor], targets: list[Tensor], numbers: Numbers | None, masked: list[bool], max_norm: float | None
) -> Tensor:
    device, starts = sources[0].device, [0] * len(sources)
    store = max_norm is None and numbers is not None
    if numbers is None:
        numbers, masked = _plain_gradient(len(sources), device), [False] * len(sources)
    sums = torch.empty(first_tiles([g.numel() for g in sources], starts)[-1], dtype=torch.float32, device=device)
    launch.reweight(sources, targets, numbers, masked, starts, sums=sums, store=store)
    norm = tree.sum_by_halves(sums.double()).sqrt()
    if max_norm is not None:
        launch.reweight(sources, targets, numbers, masked, starts, clip=clip_factor(norm, max_norm).float().view(1))
    return norm.float()


def _owned(grads: Mapping[str, Tensor]) -> set[str]:
    # autograd may hand out one tensor for two leaves, or an expanded one: in place would change those twice
    users = Counter(g.untyped_storage().data_ptr() for g in grads.values())
    return {path for path, g in grads.items() if users[g.untyped_storage().data_ptr()] == 1}


def _plain_gradient(leaves: int, device: torch.device) -> Numbers:
    return Numbers(
        torch.zeros((2, leaves, 2), dtype=torch.int64, device=device),
        torch.ones((), device=device),
        torch.zeros((), dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.float64, device=device),
        torch.empty(0, device=device),
    )
