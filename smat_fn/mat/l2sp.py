"""L2-SP: fine-tuning with a pull towards the base."""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .. import tree
from ..errors import raise_problems
from ..grad import keyed, value_and_grad
from ..grouped import elementwise
from ..types import Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import step
from .finetune import Info
from .step import State

__all__ = ["Info", "L2sp", "State", "build"]


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    pull: float = 0.1,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Fine-tuning with a penalty on the distance from the base.

    ``grad L(theta) + pull (theta - theta_0)``, the gradient of ``L(theta) + pull / 2 ||theta - theta_0||^2``. One pass
    a step, no buffer. The loss of an `Info` is the task's alone, its norm is that of the gradient with the pull.

    Args:
        pull: >= 0.
        others: as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base.

    Source: Li, Grandvalet and Davoine, 2018, without heads of their own.
    """
    raise_problems(
        step.check(optimizer, max_grad_norm, engine, donate=donate) + step.check_not_negative(pull=pull), "l2sp"
    )
    at = value_and_grad(keyed(loss_fn), engine=engine)

    def pulled(g: Any, theta: Any, theta_0: Any) -> Any:
        return g + pull * (theta - theta_0)

    check_base = tree.unchanged(base)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        check_base()
        loss, aux, grads = step.accumulate(at, state.params, batch)
        grads = elementwise(pulled, grads, state.params, base)
        state, norm = step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm)

    return Method(step.init(optimizer, base, donate=donate), step.with_keys(update, base))


@dataclass(frozen=True)
class L2sp:
    """L2-SP: fine-tuning with a penalty on the distance from the base."""

    name: ClassVar[str] = "l2sp"

    pull: float | None = None
    """Coefficient of the penalty on the distance to the base."""
