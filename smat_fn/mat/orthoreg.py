"""OrthoReg: a penalty that keeps the columns of every update matrix orthonormal."""

import functools
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from .. import tree
from ..errors import collected, flag_problems, raise_problems, some_of
from ..execution import no_grad, transformed, unrounded
from ..grad import keyed, value_and_grad
from ..types import Aux, Batch, Engine, LossFn, Method, Optimizer, Params, Predicate, Where
from ..where import never
from . import step
from .step import State

__all__ = ["Info", "Orthoreg", "State", "build", "penalty", "penalty_and_grad"]


class Info(NamedTuple):
    """Per-step diagnostics. Nothing here feeds the next step.

    Attributes:
        loss: the task loss, shape ().
        aux: of the task loss.
        grad_norm: norm of the gradient of the whole objective before clipping, float32, shape ().
        penalty: the penalty before lambda_reg, float32 (float64), shape ().
    """

    loss: Tensor
    aux: Aux
    grad_norm: Tensor
    penalty: Tensor


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

    Args:
        lambda_reg: weight, >= 0.
        where: the leaves of ``block_only``; unused without it.
        block_only: only leaves that ``where`` picks; the others as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: lists every bad argument, a ``where`` of ``block_only`` that picks no matrix (but for
            `smat_fn.where.never`), and in ``init`` for params that do not match base.

    Source: Liu et al., 2026; paper section 5.1.
    """
    problems = step.check(optimizer, max_grad_norm, engine, donate=donate)
    problems += step.check_not_negative(lambda_reg=lambda_reg) + flag_problems(block_only=block_only)
    if block_only and where not in (None, never):
        with collected(problems):
            leaves, picks = tree.flatten(base), cast(Predicate, tree.predicate(where))
            if not any(picks(path, leaf) for path, leaf in leaves.items() if leaf.ndim == 2):
                few = some_of(map(repr, leaves))
                problems.append(
                    f"block_only is True, but where picks no matrix among {few}: pick some, or leave it out"
                )
    raise_problems(problems, "orthoreg")
    at = value_and_grad(keyed(loss_fn), engine=engine)
    picked = where if block_only else None

    check_base = tree.unchanged(base)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        check_base()
        loss, aux, grads = step.accumulate(at, state.params, batch)
        value, pull = penalty_and_grad(state.params, base, where=picked)
        flat = tree.flatten(grads)
        pulled = {path: (flat[path].to(r.dtype) + lambda_reg * r).to(flat[path].dtype) for path, r in pull.items()}
        grads = tree.unflatten(grads, {**flat, **pulled})
        state, norm = step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, value)

    return Method(step.init(optimizer, base, donate=donate), step.with_keys(update, base))


def penalty(params: Params, base: Params, *, where: Where | None = None) -> Tensor:
    """``sum_W || dW^T dW - I ||_F`` over the 2-D leaves that ``where`` picks (None: all), in float32 (float64).

    Differentiable; where a Gram matrix is the identity, and the norm has no gradient, the gradient is zero.

    Raises: ValueError for trees that do not match, and leaves that are not floating-point tensors.
    """
    terms = [torch.linalg.matrix_norm(_excess(delta)) for delta in _updates(params, base, where).values()]
    return _sum(terms)


@no_grad
def penalty_and_grad(params: Params, base: Params, *, where: Where | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """`penalty` and its gradient ``2 dW (dW^T dW - I) / || . ||_F`` by path, of the leaves that have one.

    One product a matrix for the gradient; autograd, which does not know that ``dW^T dW - I`` is symmetric, takes two.
    """
    terms, pull = [], {}
    for path, delta in _updates(params, base, where).items():
        excess = _excess(delta)
        terms.append(torch.linalg.matrix_norm(excess))
        with unrounded(delta.device):
            product = excess @ delta if delta.shape[0] < delta.shape[1] else delta @ excess
        if transformed():
            positive = terms[-1] > 0
            pull[path] = product * torch.where(positive, 2 / torch.where(positive, terms[-1], 1.0), 0.0)
        else:
            pull[path] = product.mul_(torch.where(terms[-1] > 0, 2 / terms[-1], 0))
    return _sum(terms), pull


def _sum(terms: list[Tensor]) -> Tensor:
    # leaves may lie on several devices
    none = torch.zeros((), dtype=torch.float32)
    return functools.reduce(lambda total, term: total + term.to(total.device), terms) if terms else none


def _updates(params: Params, base: Params, where: Where | None) -> dict[str, Tensor]:
    leaves, origins, found, picks = tree.flatten(params), tree.flatten(base), {}, tree.predicate(where)
    tree.check_same(leaves, "params", base=origins)
    tree.check_floating(leaves, "params")
    tree.check_floating(origins, "base")
    for path, leaf in leaves.items():
        if leaf.ndim == 2 and leaf.numel() and (picks is None or picks(path, leaf)):
            dtype = tree.compute_dtype(leaf, origins[path])
            found[path] = leaf.to(dtype) - origins[path].to(dtype)
    return found


def _excess(delta: Tensor) -> Tensor:
    with unrounded(delta.device):
        gram = delta @ delta.T if delta.shape[0] < delta.shape[1] else delta.T @ delta
    return gram - torch.eye(len(gram), dtype=delta.dtype, device=delta.device)


@dataclass(frozen=True)
class Orthoreg:
    """OrthoReg: a penalty that keeps the columns of every update matrix orthonormal."""

    name: ClassVar[str] = "orthoreg"

    lambda_reg: float | None = None
    """Weight of the penalty."""
    block_only: bool | None = None
    """Only the linear weights of blocks, instead of every matrix."""
