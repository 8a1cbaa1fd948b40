"""Gradient transforms in front of an optimizer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import ops, tree
from ..types import Optimizer, Params

Transform: TypeAlias = Callable[[Params], Params]


class ChainState(NamedTuple):
    """State of a chain: that of its optimizer."""

    optimizer: Any


def clip(grads: Params, max_norm: float | None, *, donate: bool = False) -> tuple[Params, Tensor]:
    """Gradients scaled to a global norm of at most ``max_norm``, and the norm before clipping.

    ``g * min(1, max_norm / (norm + 1e-6))`` with `smat_fn.tree.global_norm`, the factor of
    ``torch.nn.utils.clip_grad_norm_``; ``max_norm=None`` only measures. The host never waits for the norm.

    Args: donate: may write into grads, same bits.
    Returns: (grads, 0-d float32 norm).
    Raises: ValueError unless max_norm is None, or positive and finite.
    """
    check_max_norm(max_norm)
    leaves, norm = ops.reweight_and_clip(tree.flatten(grads), None, [], max_norm=max_norm, donate=donate)
    return tree.unflatten(grads, leaves), norm


def clip_by_global_norm(max_norm: float) -> Transform:
    """`clip` as a transform for `chain`. Raises: ValueError unless max_norm is positive and finite."""
    check_max_norm(max_norm)
    return lambda grads: clip(grads, max_norm)[0]


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Gradient transforms, then an optimizer, as one optimizer: ``chain(clip_by_global_norm(1.0), adamw(...))``.

    Raises: ValueError unless the last part, and no other, is an optimizer.
    """
    *transforms, optimizer = parts if parts else (None,)
    if not isinstance(optimizer, Optimizer) or any(isinstance(t, Optimizer) for t in transforms):
        raise ValueError("chain: give gradient transforms first and one optimizer last")

    def update(grads: Params, state: ChainState, params: Params, **options: Any) -> tuple[Params, ChainState]:
        for transform in transforms:
            grads = transform(grads)  # type: ignore[operator]
        params, inner = optimizer.update(grads, state.optimizer, params, **options)
        return params, ChainState(inner)

    return Optimizer(lambda params: ChainState(optimizer.init(params)), torch.no_grad()(update))


def check_max_norm(max_norm: float | None) -> None:
    """Raises: ValueError unless max_norm is None or positive and finite."""
    if max_norm is not None and not (math.isfinite(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm is {max_norm}, must be positive and finite, or None for no clipping")
