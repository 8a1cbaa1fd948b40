"""Mixed precision with float32 master weights: the loss runs on a copy rounded to a narrower dtype."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import tree
from ..types import Aux, LossFn, Params
from .modules import ModuleLoss, WrappedLoss, takes_key


class MasterWeights:
    """A LossFn of master weights: ``loss_fn`` at params rounded to ``dtype``; made by `with_master_weights`."""

    def __init__(self, loss_fn: LossFn, dtype: torch.dtype) -> None:
        self.loss_fn, self.dtype = loss_fn, dtype

    def __call__(self, params: Params, *args: Any, **options: Any) -> tuple[Tensor, Aux]:
        return self.loss_fn(tree.cast(params, self.dtype), *args, **options)

    @property
    def takes_key(self) -> bool:
        """Whether the loss inside takes a key."""
        return takes_key(self.loss_fn)


class ModuleMasterWeights(MasterWeights, WrappedLoss):
    """`MasterWeights` of a `ModuleLoss`, itself one: the module runs forward and backward on the rounded weights."""

    def __init__(self, loss_fn: ModuleLoss, dtype: torch.dtype) -> None:
        WrappedLoss.__init__(self, loss_fn, training=loss_fn.training)
        self.loss_fn: ModuleLoss = loss_fn
        self.dtype = dtype

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``, rounded."""
        return self.inner.within(tree.cast(params, self.dtype), fn)


class FrozenRounded(WrappedLoss):
    """The loss where the module's frozen parameters are rounded too, while it runs: layers take inputs of one dtype."""

    def __init__(self, inner: ModuleLoss, dtype: torch.dtype) -> None:
        super().__init__(inner, training=inner.training)
        self._dtype = dtype

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``."""
        rest = {
            name: p.to(self._dtype)
            for name, p in self.module.named_parameters()
            if name not in params and not p.requires_grad and p.is_floating_point()
        }
        return self.inner.within({**rest, **params}, fn)


def with_master_weights(loss_fn: LossFn, dtype: torch.dtype = torch.bfloat16) -> MasterWeights:
    r"""A loss of float32 master weights, computed in a narrower dtype: for any method and engine.

    ``L(round(theta))``, one rounding to ``dtype``; its gradient is ``grad L`` at the rounded parameters, taken in
    ``dtype`` and upcast, so that methods, clipping and optimizer work in the dtype of theta. SMAT rounds theta~, not
    theta: ``L(round(theta_0 + alpha m (.) (theta - theta_0) + epsilon))``, written straight into the rounded copy.
    Frozen parameters of a module in another dtype are rounded too, in every call, while its loss runs.

    Args:
        loss_fn: (params, ...) -> (loss, aux), or a `ModuleLoss`, whose inputs must fit weights of ``dtype``.

    Returns:
        a LossFn; give float32 params to ``Method.init``. The base may have either dtype.

    Raises:
        ValueError: for a dtype that is not floating-point.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"with_master_weights: dtype {dtype} is not a floating-point dtype, choose torch.bfloat16")
    if not isinstance(loss_fn, ModuleLoss):
        return MasterWeights(loss_fn, dtype)
    rest = [p for p in loss_fn.module.parameters() if not p.requires_grad and p.is_floating_point()]
    mixed = any(p.dtype != dtype for p in rest)
    return ModuleMasterWeights(FrozenRounded(loss_fn, dtype) if mixed else loss_fn, dtype)
