"""Mixout: the gradient at weights of which a random part is reset to the base's."""

from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

from torch import Tensor

from ..errors import raise_problems
from ..execution import unread
from ..simulation.state import Number
from ..types import Engine, LossFn, Method, Optimizer, Params, Where
from . import smat, step
from .smat import Info
from .step import State

__all__ = ["Info", "Mixout", "State", "build"]


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    drop_prob: Number = 0.5,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Dropout of the update instead of the weights, in every step.

    ``m (.) grad L(theta_0 + m (.) (theta - theta_0))``, m 0 with probability p and else ``1 / (1 - p)``: the same as
    its source's ``((1 - b) (.) theta_0 + b (.) theta - p theta_0) / (1 - p)`` with ``b = (1 - p) m``. That is
    `smat_fn.mat.smat` with Mask alone and period 1, which it calls. One pass a step, no buffer in the state; the mixed
    weights are a copy of params while the gradient runs.

    Args:
        where: the leaves that are mixed; None: all. train.py gives the masked set of the suite.
        drop_prob: p in [0, 1), the probability of taking the base's weight.
        others: as in `smat_fn.mat.smat.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``.

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base.

    Source: Lee, Cho and Kang, 2020.
    """
    problems = step.check(optimizer, max_grad_norm, engine, donate=donate)
    if not (unread(drop_prob) or (isinstance(drop_prob, Real | Tensor) and 0 <= drop_prob < 1)):
        problems.append(f"drop_prob is {drop_prob}, must lie in [0, 1): the probability of taking the base's weight")
    raise_problems(problems, "mixout")
    return smat.build(
        loss_fn, optimizer, base, where=where, max_grad_norm=max_grad_norm, alpha_min=1.0, drop_prob=drop_prob,
        sigma=0.0, period=1, engine=engine, donate=donate,
    )  # fmt: skip


@dataclass(frozen=True)
class Mixout:
    """Mixout: in every step a random part of the weights is reset to the base's."""

    name: ClassVar[str] = "mixout"

    drop_prob: float | None = None
    """Probability of taking the base's weight."""
