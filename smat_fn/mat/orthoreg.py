"""OrthoReg: a penalty that keeps the columns of every update matrix orthonormal."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..grad import value_and_grad
from ..types import Aux, Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import _step
from ._step import State

__all__ = ["Info", "State", "build", "penalty"]


class Info(NamedTuple):
    """What is only looked at."""

    loss: Tensor  # shape=(), the task loss
    aux: Aux
    grad_norm: Tensor  # shape=(), float32, of the whole objective, before clipping
    penalty: Tensor  # shape=(), before lambda_reg


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    lambda_reg: float = 0.1,
    block_only: bool = False,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Regularise the Gram matrices of the update.

    ``L(theta) + lambda sum_W || dW^T dW - I ||_F``, dW = W - W_0, over all 2-D leaves (embeddings too, as in the
    released code), by the smaller Gram matrix (dW dW^T when rows < columns); the norm is not squared. The penalty
    enters a step once, whatever the micro-batches.

    Args: lambda_reg: weight, >= 0; block_only: only leaves that ``where`` picks; the others as in
        `smat_fn.mat.finetune.build`.
    Returns: Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``; no key.
    Raises: ValueError that lists every bad argument, and in ``init`` for params that do not match base.
    Source: Liu et al., 2026; paper section 5.1.
    """
    problems = _step.check(optimizer, max_grad_norm, engine)
    problems += _step.check_strengths(lambda_reg=lambda_reg)
    if problems:
        raise ValueError("orthoreg: " + "; ".join(problems))
    at = value_and_grad(loss_fn, engine=engine)
    picked = where if block_only else None
    regularizer = value_and_grad(lambda params: (penalty(params, base, where=picked), {}), engine="autograd")

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        loss, aux, grads = _step.accumulate(at, state.params, batch)
        wide = tree.tree_map(lambda leaf: leaf.to(tree.compute_dtype(leaf)), state.params)
        (value, _), pull = regularizer(wide)
        grads = tree.tree_map(lambda g, r: (g.to(r.dtype) + lambda_reg * r).to(g.dtype), grads, pull)
        state, norm = _step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, value)

    return Method(_step.init(optimizer, base, donate=donate), update)


def penalty(params: Params, base: Params, *, where: Where | None = None) -> Tensor:
    """``sum_W || dW^T dW - I ||_F`` over the 2-D leaves that ``where`` picks (None: all), in float32 (float64).

    Differentiable; where a Gram matrix is the identity, and the norm has no gradient, the gradient is zero.
    """
    leaves, origins = tree.flatten(params), tree.flatten(base)
    terms = [
        _distance(leaf, origins[path])
        for path, leaf in leaves.items()
        if leaf.ndim == 2 and leaf.numel() and (where is None or where(path, leaf))
    ]
    return functools.reduce(torch.add, terms) if terms else torch.zeros(())


def _distance(leaf: Tensor, origin: Tensor) -> Tensor:
    dtype = tree.compute_dtype(leaf, origin)
    delta = leaf.to(dtype) - origin.to(dtype)
    gram = delta @ delta.T if delta.shape[0] < delta.shape[1] else delta.T @ delta
    return torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=dtype, device=delta.device))
