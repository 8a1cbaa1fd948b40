"""Losses whose module is compiled by torch.compile, forward and backward; the method around it is not compiled."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .modules import ModuleLoss, WrappedLoss


class Compiled(WrappedLoss):
    """A `ModuleLoss` that runs its module compiled; made by `compiled`."""

    def __init__(self, inner: ModuleLoss) -> None:
        super().__init__(inner)
        self._call = torch.compile(inner.module._call_impl)  # as nn.Module.compile does, for good

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)``, compiled, while the module's parameters are ``params``; not compiled any more afterwards."""
        module: Any = self.inner.module
        before, module._compiled_call_impl = module._compiled_call_impl, self._call
        try:
            return self.inner.within(params, fn)
        finally:
            module._compiled_call_impl = before


def compiled(loss_fn: ModuleLoss) -> Compiled:
    """The loss with its module's forward and backward pass compiled by torch.compile, for the "autograd" engine.

    Weights stay arguments: one program for all steps, clean or simulated, and for all experts of a shape. It agrees
    with the module itself within rounding. Layers whose hooks come and go (adapters, offload "recompute" and "stream")
    would be compiled anew in every step: do not use it for them. Other uses of the module run it as it is.
    """
    return Compiled(loss_fn)
