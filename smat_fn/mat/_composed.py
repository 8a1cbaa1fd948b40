"""SMAT whose simulated gradient comes from the chain rule: for parameters that are not the weights themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import random
from ..grad import value_and_grad
from ..simulation.draws import Draw, all_off, check_strengths, draw
from ..types import Batch, Engine, LossFn, Method, Noise, Optimizer, Params
from . import step as _step
from .smat import Info, is_simulated


def build(
    clean: LossFn,
    at: Callable[[Draw], LossFn],
    optimizer: Optimizer,
    like: Params,
    *,
    max_grad_norm: float | None = None,
    alpha_min: float = 0.2,
    drop_prob: float = 0.5,
    sigma: float = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
    engine: Engine = "autograd",
    donate: bool = False,
    key_of: Callable[[Tensor], Tensor] = lambda key: key,
) -> Method:
    """Periodic SMAT of two losses: ``clean``, and ``at(draw)`` in every period-th step.

    Args: like: tree of the parameters' names and shapes; key_of: from the step's key to that of the draw.
    Raises: ValueError that lists every bad argument, and in ``init`` for other names or shapes.
    """
    problems = _step.check(optimizer, max_grad_norm, engine) + check_strengths(alpha_min, drop_prob, sigma, noise)
    if not (isinstance(period, int) and period >= 1):
        problems.append(f"period is {period}, must be an integer of at least 1 (1 simulates every step)")
    if problems:
        raise ValueError("smat: " + "; ".join(problems))
    gradient = value_and_grad(clean, engine=engine)
    off = all_off(alpha_min, drop_prob, sigma)

    def update(key: Tensor, state: _step.State, batch: Batch) -> tuple[_step.State, Info]:
        simulated, here, scale = not off and is_simulated(state.step, period), gradient, torch.ones(())
        if simulated:
            own = key_of(random.fold_in(key, state.step))
            drawn = draw(own, alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise)
            here, scale = value_and_grad(at(drawn), engine=engine), drawn.scale
        result: tuple[Any, ...] = _step.accumulate(here, state.params, batch)
        loss, aux, grads = result
        state, norm = _step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, scale, simulated)

    return Method(_step.init(optimizer, like, donate=donate), update)
