"""Linearised models: the first-order Taylor expansion of a module in its weights, as a loss for any method."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from .. import tree
from ..types import LossFn, Params
from .modules import ModuleLoss, WrappedLoss


def linearised(loss_fn: LossFn, base: Params) -> ModuleLoss:
    r"""The loss of a module in its tangent space: ``l(f(theta_0; x) + J_f(theta_0; x) (theta - theta_0))``.

    f is the module's forward, l what the loss makes of its outputs (scaling, head, cross entropy), which stays as it
    is. The outputs are affine in theta, so those at ``theta_0 + sum_i gamma_i (theta_i - theta_0)`` are f(theta_0) plus
    the gamma-weighted changes of the experts' outputs. For any method and engine: ``finetune.build(linearised(loss_fn,
    base), ...)`` is linearised fine-tuning, and aux of the same loss at a merged theta are the outputs to score. A pass
    is a forward pass with its derivative (`torch.func.jvp`), and the backward pass through both: about twice the time
    and activations of a plain one. One more copy of the trained weights, theta - theta_0, while the loss runs.

    Args:
        loss_fn: a `ModuleLoss` whose loss calls the module itself: parts of it would not be linearised and are out of
            reach. Attention runs without fused kernels, which have no forward derivative.
        base: theta_0, the trained parameters by name.

    Returns:
        A `ModuleLoss` of the same parameters.

    Raises:
        ValueError: for a loss of another kind; when it runs, for a module with gradient checkpointing, and a base that
            was written to.

    Source: Ortiz-Jimenez, Favero and Frossard, "Task arithmetic in the tangent space", 2023.
    """
    if getattr(type(loss_fn), "within", None) is not ModuleLoss.within:  # what others do there would be left out
        raise ValueError(
            f"linearised: the loss is a {type(loss_fn).__name__}, where the model ends in it is unknown: give a "
            "smat_fn.ModuleLoss, and take with_master_weights or replicated of the linearised loss, not the other way "
            "round"
        )
    assert isinstance(loss_fn, ModuleLoss)
    return Linearised(loss_fn, base)


class Linearised(WrappedLoss):
    """The loss runs on a module whose outputs are linear in the parameters."""

    def __init__(self, inner: ModuleLoss, base: Params) -> None:
        super().__init__(inner, training=inner.training)
        self._base = {path: leaf.detach() for path, leaf in tree.flatten(base).items()}
        self._check_base = tree.unchanged(self._base)
        self.check(self._base)

    def within(self, params: Mapping[str, Tensor], fn: Any) -> Any:
        """``fn(module)`` of the module's expansion around the base."""
        self.check(params)
        self._check_base()
        if any(getattr(part, "gradient_checkpointing", False) for part in self.module.modules()):
            raise ValueError("linearised: gradient checkpointing has no forward derivative, switch it off")
        # those that are frozen may be among them, and stay as they are
        start = {path: self._base.get(path, leaf.detach()).to(leaf) for path, leaf in params.items()}
        moved = {path: leaf - start[path] for path, leaf in params.items()}
        with self.inner.running():
            return fn(_Expansion(self.module, start, moved))


class _Expansion(nn.Module):
    """``f(theta_0) + J_f(theta_0) delta`` in the place of a module; its parts are out of reach."""

    def __init__(self, module: nn.Module, start: dict[str, Tensor], moved: dict[str, Tensor]) -> None:
        super().__init__()
        self.inner, self._start, self._moved = module, start, moved
        self.training = module.training

    def forward(self, *args: Any, **options: Any) -> Any:
        parts: list[Any] = []

        def tensors(weights: dict[str, Tensor]) -> list[Tensor]:
            out = functional_call(self.inner, weights, args, options, strict=False)
            parts[:] = pytree.tree_flatten(out)
            return [leaf for leaf in parts[0] if _moves(leaf)]

        with sdpa_kernel(SDPBackend.MATH):
            values, changes, *_ = torch.func.jvp(tensors, (self._start,), (self._moved,))
        found = iter(value + change for value, change in zip(values, changes, strict=True))
        leaves = [next(found) if _moves(leaf) else leaf for leaf in parts[0]]
        return pytree.tree_unflatten(leaves, parts[1])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(self.inner, name)
        if isinstance(found, nn.Module | nn.Parameter) or callable(found):
            raise ValueError(
                f"linearised: the loss takes {name!r} of the module, which is not linearised: call the module itself"
            )
        return found


def _moves(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
