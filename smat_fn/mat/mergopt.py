"""MergOPT: the gradient at randomly perturbed weights in every step, one pass."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import random
from ..errors import count_problem, raise_problems
from ..execution import no_grad
from ..grad import keyed, value_and_grad
from ..simulation.state import Draw, Number, draw, simulate
from ..types import Aux, Batch, Engine, LossFn, Method, Optimizer, Params, Where
from ..where import never
from . import step
from .step import State

__all__ = ["Info", "Mergopt", "State", "build", "offset"]

STRENGTHS = 6  # a is uniform on {0.1, ..., 0.6}


class Info(NamedTuple):
    """Per-step diagnostics. Nothing here feeds the next step.

    Attributes:
        loss: the loss at the offset point, shape ().
        aux: of the loss.
        grad_norm: norm of the gradient before clipping, float32, shape ().
        offset: c, float64, shape ().
    """

    loss: Tensor
    aux: Aux
    grad_norm: Tensor
    offset: Tensor


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    b: Number = 5e-4,
    k_max: int = 7,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Training at sampled merge offsets.

    ``c = k a - 1`` with k uniform on {1..k_max} and a uniform on {0.1, ..., 0.6}; ``z ~ Laplace(0, b)`` per coordinate;
    the update uses ``grad L(theta + c z)`` at theta. c and z of step s come from ``fold_in(key, s)``, one for all
    micro-batches. MergOPT's paper describes this; its released code perturbs after the backward pass.

    Args:
        b: scale of the Laplace noise, >= 0 (its RMS is sqrt(2) b); may be a 0-d tensor, with a derivative.
        k_max: number of experts to be merged, >= 1; the others as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``.

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base.

    Source: Yang et al., 2026; paper section 5.1.
    """
    raise_problems(step.check(optimizer, max_grad_norm, engine, donate=donate) + _problems(b, k_max), "mergopt")
    at = value_and_grad(keyed(loss_fn), engine=engine)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        drawn = offset(random.step_key(key, state.step), b=b, k_max=k_max)
        # base = theta leaves theta + epsilon of the simulated state
        moved = no_grad(simulate)(state.params, state.params, drawn, where=never)
        loss, aux, grads = step.accumulate(at, moved, batch)
        state, norm = step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, _factor(drawn.key, k_max))

    return Method(step.init(optimizer, base, donate=donate), step.with_keys(update, base))


def offset(key: Tensor, *, b: Number, k_max: int) -> Draw:
    """The draw whose noise is c z: sigma is ``c sqrt(2) b``, of either sign; c from the child 1 of the key.

    Raises: ValueError for b and k_max as `build`.
    """
    raise_problems(_problems(b, k_max), "offset")
    drawn = draw(key, alpha_min=1.0, drop_prob=0.0, sigma=math.sqrt(2) * b, noise="laplace")
    return drawn._replace(sigma=drawn.sigma * _factor(key, k_max))


def _problems(b: Number, k_max: int) -> list[str]:
    counted = [f"{text}: the number of experts" for text in count_problem("k_max", k_max)]
    return step.check_not_negative(b=b) + counted


def _factor(key: Tensor, k_max: int) -> Tensor:
    """``c = k a - 1`` of a step's key."""
    units = random.uniform(random.fold_in(key, 1), (2,), dtype=torch.float64)
    k, a = ((units[i] * count).floor() + 1 for i, count in enumerate((k_max, STRENGTHS)))
    # by a tensor: a GPU multiplies by the reciprocal of a number, which is not always the quotient
    return k * a / torch.full_like(a, 10.0) - 1


@dataclass(frozen=True)
class Mergopt:
    """MergOPT: the gradient at randomly perturbed weights in every step."""

    name: ClassVar[str] = "mergopt"

    b: float | None = None
    """Scale of the Laplace noise, in units of the weights."""
    k_max: int | None = None
    """Number of experts that will be merged. Without one in the preset: the number of the data's tasks, at least 2."""
