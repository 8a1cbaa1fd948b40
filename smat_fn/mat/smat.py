"""SMAT: the task loss at simulated merged states, every t-th step or mixed into every step."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from .. import random, tree
from ..grad import value_and_grad
from ..simulation.apply import reweight
from ..simulation.draws import Draw, all_off, check_strengths, draw
from ..simulation.losses import check_lam
from ..types import Aux, Batch, Engine, LossFn, Method, Noise, Offload, Optimizer, Params, Where
from . import step as _step
from .offload import simulated as _simulated
from .offload.simulated import Result
from .step import State

__all__ = ["Info", "State", "build", "is_simulated"]


class Info(NamedTuple):
    """What is only looked at."""

    loss: Tensor  # shape=(), the loss that was differentiated
    aux: Aux
    grad_norm: Tensor  # shape=(), float32, after reweighting, before clipping
    scale: Tensor  # alpha, shape=(), float32; 1 on a clean step
    simulated: bool


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    alpha_min: float = 0.2,
    drop_prob: float = 0.5,
    sigma: float = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
    lam: float | None = None,
    offload: Offload | None = None,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Merge-aware training by Scale, Mask and Perturb.

    ``(1 - lambda) L(theta) + lambda E L(theta~)``, ``theta~ = theta_0 + alpha m (.) (theta - theta_0) + epsilon``
    (Eqs. smat-objective, smat-state). Periodic (default): step s, counted from 0, takes the gradient
    ``alpha m (.) grad L(theta~)`` (Eq. smat-gradient) when ``(s + 1) % period == 0``, else ``grad L(theta)``: one
    forward and one backward pass a step, lambda = 1 / period. Mixed (``lam`` given): both, weighted, in every step.
    The draw of step s is ``draw(fold_in(key, s), ...)``, one for all micro-batches of the step. With Scale, Mask and
    Perturb all off every step is clean: the bits of `finetune`.

    Args: loss_fn: (params, batch) -> (loss, aux); base: theta_0; where: the masked set S, None masks every leaf;
        max_grad_norm: clip by global norm after reweighting; alpha_min, drop_prob, sigma, noise: as in `smat_fn.draw`;
        period: t >= 1, 1 simulates every step; lam: lambda in [0, 1], replaces the schedule; offload: where
        theta_0 and theta~ live, bits being equal. None: base as it is, theta~ a new tree. "cpu": theta_0 in pinned
        memory, prefetched during clean steps into one reusable buffer that becomes theta~. "recompute": theta_0 on the
        device, theta~ rebuilt block by block in forward and backward, no second copy. "stream": the same with
        theta_0 streamed from pinned memory, no copy at all. engine: of `value_and_grad`;
        donate: reuse the state's buffers (the state passed in is then spent), same bits.
    Returns: Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``.
    Raises: ValueError that lists every bad argument, and in ``init`` for params that do not match base.
    Source: paper sections 4.1 to 4.3.
    """
    problems = _step.check(optimizer, max_grad_norm, engine) + check_strengths(alpha_min, drop_prob, sigma, noise)
    if not (isinstance(period, int) and period >= 1):
        problems.append(f"period is {period}, must be an integer of at least 1 (1 simulates every step)")
    if lam is not None:
        try:
            check_lam(lam)
        except ValueError as error:
            problems.append(str(error))
    problems += _simulated.problems(loss_fn, offload, engine)
    if problems:
        raise ValueError("smat: " + "; ".join(problems))
    at = value_and_grad(loss_fn, engine=engine)
    at_simulated = _simulated.build(
        loss_fn, base, where=where, offload=offload, period=1 if lam is not None else period, engine=engine
    )
    off = all_off(alpha_min, drop_prob, sigma)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        weight = float(is_simulated(state.step, period)) if lam is None else lam
        weight = 0.0 if off else weight
        drawn, clean, merged = None, None, None
        if weight < 1:
            if not off:
                at_simulated.idle(state.params)
            clean = _step.accumulate(at, state.params, batch)
        if weight > 0:
            drawn = draw(
                random.fold_in(key, state.step), alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise
            )
            merged = at_simulated.gradient(state.params, batch, drawn)
        scale = torch.ones(()) if drawn is None else drawn.scale
        if clean is not None and merged is not None and drawn is not None:
            (loss, aux, grads), drawn = _mix(weight, clean, merged, drawn, where), None
        else:
            loss, aux, grads = merged or cast(Result, clean)
        state, norm = _step.apply(
            optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate, drawn=drawn, where=where
        )
        return state, Info(loss, aux, norm, scale, weight > 0)

    if offload in ("cpu", "stream"):
        # only names and shapes are needed for init: the caller's base must not stay alive here
        base = tree.tree_map(lambda leaf: leaf.detach().to("meta"), base)
    return Method(_step.init(optimizer, base, donate=donate), update)


def is_simulated(step: int, period: int) -> bool:
    """Whether step ``step``, counted from 0, is simulated: t - 1 expert steps, then one simulated step."""
    return (step + 1) % period == 0


def _mix(weight: float, clean: Result, merged: Result, drawn: Draw, where: Where | None) -> Result:
    (loss, aux, grads), (merged_loss, merged_aux, raw) = clean, merged

    def mean(a: Tensor, b: Tensor) -> Tensor:
        dtype = tree.compute_dtype(a)
        return ((1 - weight) * a.to(dtype) + weight * b.to(dtype)).to(a.dtype)

    grads = tree.tree_map(mean, grads, reweight(raw, drawn, where=where))
    return (1 - weight) * loss + weight * merged_loss, (aux, merged_aux), grads
