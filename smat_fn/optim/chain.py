"""Gradient transforms in front of an optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from .. import tree
from ..execution import no_grad, refuse_donation
from ..simulation import reweight_and_clip
from ..simulation.state import check_max_norm
from ..types import Optimizer, Params

Transform: TypeAlias = Callable[[Params], Params]


class ChainState(NamedTuple):
    """State of a `chain`.

    Attributes:
        optimizer: state of its optimizer.
    """

    optimizer: Any


def clip(grads: Params, max_norm: float | None, *, donate: bool = False) -> tuple[Params, Tensor]:
    """Scale gradients to a global norm of at most ``max_norm``; also measures the norm. The host does not wait for it.

    ``g * min(1, max_norm / (norm + 1e-6))`` with `smat_fn.tree.global_norm`: the factor of
    ``torch.nn.utils.clip_grad_norm_``.

    Args:
        grads: any tree of tensors.
        max_norm: positive and finite; None only measures.
        donate: allow writing into grads; results are bit-identical.

    Returns:
        (grads, norm): the scaled tree, and the norm before clipping as a 0-d float32 tensor.

    Raises:
        ValueError: max_norm is neither None nor positive and finite.

    Example:
        >>> clip({"w": torch.tensor([3.0, 4.0])}, 1.0)
        ({'w': tensor([0.6000, 0.8000])}, tensor(5.))
    """
    check_max_norm(max_norm)
    refuse_donation("clip", donate)
    return reweight_and_clip(grads, None, max_norm=max_norm, donate=donate)


def clip_by_global_norm(max_norm: float) -> Transform:
    """`clip` as a gradient transform for `chain`.

    Args:
        max_norm: bound of the global norm, positive and finite.

    Returns:
        ``transform(grads) -> grads``.

    Raises:
        ValueError: max_norm is not positive and finite.
    """
    if max_norm is None:
        raise ValueError("max_norm is None, must be positive and finite: leave the transform out for no clipping")
    check_max_norm(max_norm)
    return lambda grads: clip(grads, max_norm)[0]


def chain(*parts: Transform | Optimizer) -> Optimizer:
    """Gradient transforms, then an optimizer, as one optimizer: ``chain(clip_by_global_norm(1.0), adamw(...))``.

    Args:
        parts: functions ``grads -> grads`` in the order they are applied, and last an `Optimizer`.

    Returns:
        An `Optimizer` whose state is a `ChainState`.

    Raises:
        ValueError: the last part is not an optimizer, or another part is one.
    """
    *transforms, optimizer = parts or (None,)
    if not isinstance(optimizer, Optimizer) or any(isinstance(t, Optimizer) for t in transforms):
        raise ValueError("chain: give gradient transforms first and one optimizer last")

    def update(grads: Params, state: ChainState, params: Params, **options: Any) -> tuple[Params, ChainState]:
        refuse_donation("chain", options.get("donate", False))
        tree.check_kind(state, "optimizer")
        for transform in transforms:
            grads = transform(grads)  # type: ignore[operator]
        params, inner = optimizer.update(grads, state.optimizer, params, **options)
        return params, ChainState(inner)

    return Optimizer(lambda params: ChainState(optimizer.init(params)), no_grad(update))
