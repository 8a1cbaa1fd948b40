"""`value_and_grad`: the gradient of a loss function, with two engines behind one signature."""

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import tree
from ..compiled import transformed
from ..types import Aux, Engine, LossFn, Params
from .modules import ModuleLoss


def value_and_grad(loss_fn: LossFn, *, engine: Engine = "func") -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    """``((loss, aux), grads)`` of ``loss_fn(params, *args) -> (loss, aux)`` in its first argument.

    ``engine="func"`` is ``torch.func.grad_and_value``: composable with every torch.func transform. ``"autograd"`` is
    ``torch.autograd.grad`` on fresh leaves: bit-identical to ``loss.backward()``, about half the memory, works with
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
        if transformed():
            raise ValueError("engine 'autograd' cannot be transformed or compiled: take engine='func'")
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
