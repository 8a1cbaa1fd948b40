"""FT: plain fine-tuning, the baseline of the paper."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from ..errors import raise_problems
from ..grad import keyed, value_and_grad
from ..types import Aux, Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import step
from .step import State

__all__ = ["Finetune", "Info", "State", "build"]


class Info(NamedTuple):
    """Per-step diagnostics. Nothing here feeds the next step.

    Attributes:
        loss: shape ().
        aux: of the loss.
        grad_norm: norm of the gradient before clipping, float32, shape ().
    """

    loss: Tensor
    aux: Aux
    grad_norm: Tensor


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Minimise the task loss at the expert's own parameters: the gradient of L at theta.

    Args:
        loss_fn: (params, batch) -> (loss, aux).
        base: theta_0, only its structure is used.
        where: unused here, the masked set of methods that have one.
        max_grad_norm: clip by global norm.
        engine: of `value_and_grad`.
        donate: reuse the state's buffers (the state passed in is then spent), bit-identical.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: for bad arguments, and in ``init`` for params that do not match base.

    Source: paper Eq. task-loss.
    """
    raise_problems(step.check(optimizer, max_grad_norm, engine, donate=donate), "finetune")
    gradient = value_and_grad(keyed(loss_fn), engine=engine)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        loss, aux, grads = step.accumulate(gradient, state.params, batch)
        state, norm = step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm)

    return Method(step.init(optimizer, base, donate=donate), step.with_keys(update, base))


@dataclass(frozen=True)
class Finetune:
    """FT: plain fine-tuning."""

    name: ClassVar[str] = "ft"
