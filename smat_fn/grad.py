"""Loss functions of modules, and `value_and_grad` with two engines behind one signature."""

from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from . import tree
from .types import Aux, Engine, LossFn, Params


def value_and_grad(loss_fn: LossFn, *, engine: Engine = "func") -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    """``((loss, aux), grads)`` of ``loss_fn(params, *args) -> (loss, aux)`` in its first argument.

    ``engine="func"`` is ``torch.func.grad_and_value``: composable with every torch.func transform. ``"autograd"`` is
    ``torch.autograd.grad`` on fresh leaves: bit-equal to ``loss.backward()``, about half the memory, works with
    gradient checkpointing (non-reentrant) when ``loss_fn`` is a `ModuleLoss`. They agree within rounding.

    Returns: a function of (params, *args); grads have the structure, shapes and dtypes of params, zero for leaves that
        the loss does not touch; the loss of "autograd" is detached, that of "func" if no leaf requires grad.
    Raises: ValueError for an unknown engine, and for leaves that are no floating-point tensors.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"value_and_grad: engine {engine!r} is unknown, choose one of {get_args(Engine)}")
    return _func_engine(loss_fn) if engine == "func" else _autograd_engine(loss_fn)


def _func_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any) -> tuple[tuple[Tensor, Aux], Params]:
        tree.check_floating(tree.flatten(params), "params")
        parts: list[Any] = []

        def tensors_apart(params: Params, *args: Any) -> tuple[Tensor, list[Tensor]]:
            loss, aux = loss_fn(params, *args)
            parts[:] = pytree.tree_flatten(aux)
            return loss, [leaf for leaf in parts[0] if isinstance(leaf, Tensor)]

        # torch refuses aux leaves that are no tensors
        grads, (loss, tensors) = torch.func.grad_and_value(tensors_apart, has_aux=True)(params, *args)
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in parts[0]]
        aux = pytree.tree_unflatten(leaves, parts[1])
        return (loss, aux), grads

    return run


def _autograd_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any) -> tuple[tuple[Tensor, Aux], Params]:
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        leaves = {path: leaf.detach().requires_grad_() for path, leaf in flat.items()}

        def differentiate(loss: Tensor, aux: Aux) -> tuple[tuple[Tensor, Aux], tuple[Tensor, ...]]:
            if not loss.requires_grad:  # it touches no leaf
                return (loss, aux), tuple(torch.zeros_like(leaf) for leaf in flat.values())
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            return (loss.detach(), aux), grads

        with torch.enable_grad():
            if isinstance(loss_fn, ModuleLoss):
                # inside the swap of weights: checkpointed layers run again in backward and must meet the same weights
                value, grads = loss_fn.within(leaves, lambda module: differentiate(*loss_fn.loss(module, *args)))
            else:
                value, grads = differentiate(*loss_fn(tree.unflatten(params, leaves), *args))
        return value, tree.unflatten(params, dict(zip(leaves, grads, strict=True)))

    return run


class ModuleLoss:
    """A LossFn over a module: ``loss(module, *args) -> (loss, aux)`` run on given weights by ``functional_call``.

    Parameters are a flat dict named as in ``module.named_parameters()`` (tied weights once); names left out keep the
    module's own (frozen) values. The module itself is never changed.

    Raises: ValueError for names that the module does not have, and for other shapes than its own.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., tuple[Tensor, Aux]]) -> None:
        self.loss = loss
        self._shell = _Shell(module)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}

    def __call__(self, params: Mapping[str, Tensor], *args: Any) -> tuple[Tensor, Aux]:
        return self.within(params, lambda module: self.loss(module, *args))

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``."""
        self.check(params)
        # functional_call alone would ignore unknown names in silence
        return functional_call(self._shell, {f"module.{name}": value for name, value in params.items()}, (fn,))

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._shell.module

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError that lists names that the module does not have, and other shapes than its own."""
        problems = [
            f"leaf {name!r} is no parameter of the module"
            if name not in self._shapes
            else f"leaf {name!r} has shape {tuple(value.shape)}, the module's is {tuple(self._shapes[name])}"
            for name, value in params.items()
            if self._shapes.get(name) != value.shape
        ]
        if problems:
            raise ValueError("; ".join(problems) + ": take names and shapes from module.named_parameters()")


def reparametrised(loss_fn: LossFn, weights: Callable[[Params], Params]) -> LossFn:
    """``L(f(phi))`` as a loss of phi, f differentiable; a `ModuleLoss` stays one, so that checkpointed layers are safe.

    Args: weights: f, from the new parameters to those of ``loss_fn``.
    """
    if isinstance(loss_fn, ModuleLoss):
        return _Reparametrised(loss_fn, weights)
    return lambda params, *args: loss_fn(weights(params), *args)


def apply_fn(module: nn.Module) -> Callable[..., Any]:
    """``apply(params, *args, **kwargs)``: the module's forward on given weights, checked like `ModuleLoss`."""

    def apply(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return run.within(params, lambda inner: inner(*args, **kwargs))

    run = ModuleLoss(module, lambda inner, *args: inner(*args))
    return apply


class _Reparametrised(ModuleLoss):
    """The module runs on a function of the parameters."""

    def __init__(self, inner: ModuleLoss, weights: Callable[[Any], Any]) -> None:
        super().__init__(inner.module, inner.loss)
        self._inner, self._weights = inner, weights

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's weights are that function's value."""
        return self._inner.within(self._weights(params), fn)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss function inside."""
        self._inner.check(self._weights(params))


class _Shell(nn.Module):
    """Runs any function of the module where ``functional_call`` has put the weights in place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[[nn.Module], Any]) -> Any:
        return fn(self.module)
