"""ASAM, as in SAFT, and SAM: the gradient after an ascent step along the gradient, two passes a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from .. import ops, tree
from ..errors import flag_problems, raise_problems
from ..execution import no_grad
from ..grad import keyed, value_and_grad
from ..types import Aux, Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import step
from .step import State

__all__ = ["Asam", "Info", "State", "build", "climb"]


class Info(NamedTuple):
    """Per-step diagnostics. Nothing here feeds the next step.

    Attributes:
        loss: the loss at theta, shape ().
        aux: of the loss at theta.
        grad_norm: norm of the gradient at theta + e before clipping, float32, shape ().
        climbed_loss: the loss at theta + e, shape ().
    """

    loss: Tensor
    aux: Aux
    grad_norm: Tensor
    climbed_loss: Tensor


def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    rho: float = 0.25,
    adaptive: bool = True,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Adaptive sharpness-aware minimisation.

    ``g = grad L(theta)``; ``e = rho theta^2 (.) g / (|| |theta| (.) g || + 1e-12)``; the update uses
    ``grad L(theta + e)`` at theta, on the same batch (all micro-batches of a step climb together).
    The norm runs over all coordinates.

    Args:
        rho: radius, >= 0.
        adaptive: False is plain SAM, |theta| replaced by 1; the others as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base.

    Source: Kwon et al., 2021; Foret et al., 2021; Lee et al., 2025 (SAFT); paper section 5.1.
    """
    raise_problems(
        step.check(optimizer, max_grad_norm, engine, donate=donate)
        + step.check_not_negative(rho=rho)
        + flag_problems(adaptive=adaptive),
        "asam",
    )
    at = value_and_grad(keyed(loss_fn), engine=engine)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        loss, aux, grads = step.accumulate(at, state.params, batch)
        climbed = climb(state.params, grads, rho=rho, adaptive=adaptive, donate=donate)
        del grads  # the climbed weights stand in their memory, or they are freed
        climbed_loss, _, grads = step.accumulate(at, climbed, batch)
        state, norm = step.apply(optimizer, state, grads, max_grad_norm=max_grad_norm, donate=donate)
        return state, Info(loss, aux, norm, climbed_loss)

    return Method(step.init(optimizer, base, donate=donate), step.with_keys(update, base))


@no_grad
def climb(
    params: Params,
    grads: Params,
    *,
    rho: float,
    adaptive: bool = True,
    donate: bool = False,
    out: Mapping[str, Tensor] | None = None,
) -> Params:
    """``theta + e``, in float32 (float64 for float64 leaves), rounded once to the dtype of params.

    Args: rho: radius, finite and >= 0; donate: may write into grads; out: receives the result, by paths, of params'
        shapes, dtypes and devices.
    Raises: ValueError for a bad rho, trees that do not match, and leaves that are not floating-point tensors.
    """
    if not isinstance(rho, Tensor):  # a tensor may be on a device that the host would wait for
        raise_problems(step.check_not_negative(rho=rho), "climb")
    leaves, slopes = tree.flatten(params), tree.flatten(grads)
    tree.check_floating(leaves, "params")
    tree.check_floating(slopes, "grads")
    tree.check_same(leaves, "params", grads=slopes)  # compiled loops would read beyond the end of a shorter leaf
    along = [slopes[path] for path in leaves]
    into = None if out is None else [out[path] for path in leaves]
    moved = ops.climb(list(leaves.values()), along, rho=rho, adaptive=adaptive, donate=donate, out=into)
    return tree.unflatten(params, dict(zip(leaves, moved, strict=True)))


@dataclass(frozen=True)
class Asam:
    """ASAM: the gradient after an ascent step along the gradient, two passes a step."""

    name: ClassVar[str] = "asam"

    rho: float | None = None
    """Length of the ascent step."""
    adaptive: bool | None = None
    """Scale the ascent step by the weights' magnitudes; False is plain SAM."""
