"""What every method does around its gradient: micro-batches, clipping, the optimizer, donation."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from .. import tree
from ..optim.chain import check_max_norm
from ..simulation.apply import finish
from ..simulation.draws import Draw
from ..types import Aux, Batch, Engine, Optimizer, Params, Where


class State(NamedTuple):
    """What the next step needs."""

    params: Params  # expert parameters theta
    opt_state: Any  # of the optimizer
    step: int  # optimizer steps done


Gradient = Callable[[Params, Batch], tuple[tuple[Tensor, Aux], Params]]


def init(optimizer: Optimizer, base: Params, *, donate: bool) -> Callable[[Params], State]:
    """``Method.init``: checks params against the base and starts the optimizer; a donating method owns a copy."""

    def start(params: Params) -> State:
        leaves = tree.flatten(params)
        tree.check_floating(leaves, "params")
        origins = tree.flatten(base)
        tree.check_floating(origins, "base")
        tree.check_same(origins, "base", params=leaves)
        params = tree.clone(params) if donate else tree.tree_map(Tensor.detach, params)
        return State(params, optimizer.init(params), 0)

    return start


def accumulate(gradient: Gradient, params: Params, batch: Batch) -> tuple[Tensor, Aux, Params]:
    """(loss, aux, grads), averaged with equal weights over a list of micro-batches; aux is then the list of theirs.

    Sums run in float32 (float64 for float64 leaves) and are rounded once to the gradient's dtype.
    """
    if not isinstance(batch, list):
        (loss, aux), grads = gradient(params, batch)
        return loss, aux, grads
    if not batch:
        raise ValueError("the list of micro-batches is empty: give one batch, or at least one micro-batch")
    total, losses, auxes = None, [], []
    for micro in batch:
        (loss, aux), grads = gradient(params, micro)
        losses.append(loss)
        auxes.append(aux)
        wide = tree.tree_map(lambda g: g.to(tree.compute_dtype(g)), grads)
        total = wide if total is None else tree.tree_map(torch.add, total, wide)
    mean = tree.tree_map(lambda s, g: (s / len(batch)).to(g.dtype), total, grads)
    return torch.stack(losses).mean(), auxes, mean


def apply(
    optimizer: Optimizer,
    state: State,
    grads: Params,
    *,
    max_grad_norm: float | None,
    donate: bool,
    drawn: Draw | None = None,
    where: Where | None = None,
) -> tuple[State, Tensor]:
    """Reweight (with a draw), clip, then the optimizer on theta: (next state, gradient norm before clipping)."""
    grads, norm = finish(grads, drawn, where=where, max_norm=max_grad_norm, donate=donate)
    options = {"donate": True} if donate else {}
    params, opt_state = optimizer.update(grads, state.opt_state, state.params, **options)
    return State(params, opt_state, state.step + 1), norm


def check_strengths(**strengths: float) -> list[str]:
    """Problems of strengths that must be finite and not negative."""
    return [
        f"{name} is {value}, must be finite and not negative"
        for name, value in strengths.items()
        if not (math.isfinite(value) and value >= 0)
    ]


def check(optimizer: Any, max_grad_norm: float | None, engine: str) -> list[str]:
    """Problems of the arguments that all methods share."""
    problems = []
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        problems.append(f"optimizer is a {type(optimizer).__name__}: give one with init and update (smat_fn.optim)")
    if engine not in get_args(Engine):
        problems.append(f"engine is {engine!r}, choose one of {', '.join(get_args(Engine))}")
    try:
        check_max_norm(max_grad_norm)
    except ValueError as error:
        problems.append(str(error))
    return problems
