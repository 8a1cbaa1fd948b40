"""`value_and_grad`: the gradient of a loss function, with two engines behind one signature."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import tree
from ..types import Aux, Engine, LossFn, Params
from .modules import ModuleLoss


def value_and_grad(loss_fn: LossFn, *, engine: Engine = "func") -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    """``((loss, aux), grads)`` of ``loss_fn(params, *args) -> (loss, aux)`` in its first argument.

    ``engine="func"`` is ``torch.func.grad_and_value``: composable with every torch.func transform. ``"autograd"`` is
    ``torch.autograd.grad`` on fresh leaves: bit-identical to ``loss.backward()``, about half the memory, works with
    gradient checkpointing (non-reentrant) when ``loss_fn`` is a `ModuleLoss`, and under ``torch.inference_mode``. They
    agree within rounding.

    Returns: a function of (params, *args); grads have the structure, shapes and dtypes of params, zero for leaves that
        the loss does not touch. Nothing that comes back holds the graph of this gradient: loss, grads and tensors of
        aux (any pytree) are detached by "autograd", those of "func" have the graph of transforms and leaves outside.
    Raises: ValueError for an unknown engine, for leaves that are no floating-point tensors, and for a loss function
        that does not return a pair (0-d loss, aux).
    """
    if engine not in get_args(Engine):
        raise ValueError(f"value_and_grad: engine {engine!r} is unknown, choose one of {get_args(Engine)}")
    return _func_engine(loss_fn) if engine == "func" else _autograd_engine(loss_fn)


def _func_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any) -> tuple[tuple[Tensor, Aux], Params]:
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        parts: list[Any] = []

        def tensors_apart(leaves: dict[str, Tensor], *args: Any) -> tuple[Tensor, list[Tensor]]:
            loss, aux = loss_and_aux(loss_fn(tree.unflatten(params, leaves), *args))
            parts[:] = pytree.tree_flatten(aux)
            return loss, [leaf for leaf in parts[0] if isinstance(leaf, Tensor)]

        # torch refuses leaves that are no tensors, in params and in aux
        grads, (loss, tensors) = torch.func.grad_and_value(tensors_apart, has_aux=True)(flat, *args)
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in parts[0]]
        aux = pytree.tree_unflatten(leaves, parts[1])
        return (loss, aux), tree.unflatten(params, grads)

    return run


def _autograd_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any) -> tuple[tuple[Tensor, Aux], Params]:
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad():
            leaves = {path: _recorded(leaf).detach().requires_grad_() for path, leaf in flat.items()}
            if inference:
                args = pytree.tree_map_only(Tensor, _recorded, args)

            def differentiate(result: Any) -> tuple[tuple[Tensor, Aux], tuple[Tensor, ...]]:
                loss, aux = loss_and_aux(result)
                if loss.requires_grad:
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
                else:  # it touches no leaf
                    grads = tuple(torch.zeros_like(leaf) for leaf in flat.values())
                return (loss.detach(), detached(aux)), grads

            if isinstance(loss_fn, ModuleLoss):
                # inside the swap of weights: checkpointed layers run again in backward and must meet the same weights
                value, grads = loss_fn.within(leaves, lambda module: differentiate(loss_fn.loss(module, *args)))
            else:
                value, grads = differentiate(loss_fn(tree.unflatten(params, leaves), *args))
        return value, tree.unflatten(params, dict(zip(leaves, grads, strict=True)))

    return run


def _recorded(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that autograd cannot save since it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def detached(aux: Aux) -> Aux:
    """aux with its tensors, in any pytree, off the graph."""
    return pytree.tree_map_only(Tensor, Tensor.detach, aux)


def loss_and_aux(result: Any) -> tuple[Tensor, Aux]:
    """What a loss function returned. Raises: ValueError unless it is a pair of a 0-d loss and anything."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise ValueError(f"the loss function returned {got}: return (loss, aux), or (loss, None)")
    loss, aux = result
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
        raise ValueError(f"the loss {got}: must be a 0-d tensor, take its mean or sum")
    return loss, aux
