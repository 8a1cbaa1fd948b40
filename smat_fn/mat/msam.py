"""MSAM: ASAM's ascent step along the optimizer's momentum, one pass a step."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import tree
from ..errors import flag_problems, raise_problems
from ..execution import no_grad
from ..grad import keyed, value_and_grad
from ..optim import momentum_of
from ..types import Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import step
from .asam import climb
from .finetune import Info

__all__ = ["Along", "Info", "Msam", "State", "build"]

Along = Literal["momentum", "gradient"]


class State(NamedTuple):
    """State of the method between steps.

    Attributes:
        params: theta, the expert's parameters.
        opt_state: of the optimizer.
        step: optimizer steps done; 0-d int64 inside vmap and torch.compile.
        previous: the gradient of the last step, as params, where the climb follows it; else empty.
    """

    params: Params
    opt_state: Any
    step: int | Tensor
    previous: Params = ()


# over 60 lines: its docstring states equation, cost and arguments
def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    rho: float = 0.5,
    adaptive: bool = True,
    along: Along = "momentum",
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Sharpness-aware minimisation along the momentum.

    ``e = rho theta^2 (.) d / (|| |theta| (.) d || + 1e-12)``; the update uses ``grad L(theta + e)`` at theta. d is the
    optimizer's momentum (Adam's first moments, Muon's and SGD's momentum) before the step, or the gradient of the step
    before, before clipping; in the first step both are 0, and so is e. The loss and the norm of an `Info` are those at
    theta + e.

    One forward and one backward pass a step, as plain fine-tuning. The momentum needs no buffer of its own, the
    gradient one of the size of params in the state; theta + e is a copy of params for the time of the pass.

    Args:
        rho: radius, >= 0.
        adaptive: False replaces |theta| by 1.
        along: "momentum" or "gradient".
        others: as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base, and for an optimizer
            without a momentum.

    Source: Becker, Altrock and Risse, 2024 (Momentum-SAM); Kwon et al., 2021 (the climb in units of the weights).
    """
    problems = step.check(optimizer, max_grad_norm, engine, donate=donate) + step.check_not_negative(rho=rho)
    problems += flag_problems(adaptive=adaptive)
    if along not in get_args(Along):
        problems.append(f"along is {along!r}, choose one of {', '.join(get_args(Along))}")
    raise_problems(problems, "msam")
    at, start = value_and_grad(keyed(loss_fn), engine=engine), step.init(optimizer, base, donate=donate)

    def init(params: Params) -> State:
        state = start(params)
        if along == "gradient":
            return State(*state, tree.tree_map(torch.zeros_like, state.params))
        momentum_of(state.opt_state, state.params)  # raises before the first step
        return State(*state)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        plain = step.State(*state[:3])
        slope = momentum_of(state.opt_state, state.params) if along == "momentum" else state.previous
        climbed = climb(state.params, slope, rho=rho, adaptive=adaptive)
        loss, aux, grads = step.accumulate(at, climbed, batch)
        previous = _kept(grads, state.previous, donate) if along == "gradient" else ()
        plain, norm = step.apply(optimizer, plain, grads, max_grad_norm=max_grad_norm, donate=donate)
        return State(*plain, previous), Info(loss, aux, norm)

    return Method(init, step.with_keys(update, base))


@no_grad
def _kept(grads: Params, previous: Params, donate: bool) -> Params:
    # donated: clipping may write into a gradient, and autograd may give out one tensor for two leaves
    return tree.tree_map(lambda old, new: old.copy_(new), previous, grads) if donate else grads


@dataclass(frozen=True)
class Msam:
    """MSAM: the gradient after an ascent step along the optimizer's momentum, one pass a step."""

    name: ClassVar[str] = "msam"

    rho: float | None = None
    """Length of the ascent step."""
    adaptive: bool | None = None
    """Scale the ascent step by the weights' magnitudes."""
    along: Along | None = None
    """Direction of the ascent step: the optimizer's momentum, or the last gradient, which needs a buffer."""
