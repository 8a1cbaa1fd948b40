"""The two losses of the SMAT objective and their mixture, as loss functions."""

from collections.abc import Callable
from numbers import Real

from torch import Tensor

from ..execution import unread
from ..grad import loss_and_aux
from ..types import Aux, Batch, LossFn, Params, Where
from .state import Draw, Number, simulate

SimulatedLoss = Callable[[Params, Params, Batch, Draw], tuple[Tensor, Aux]]


def clean_loss(loss_fn: LossFn) -> Callable[[Params, Batch], tuple[Tensor, Aux]]:
    """L(theta), the expert loss (Eq. task-loss): ``clean_loss(loss_fn)(params, batch) -> (loss, aux)``."""
    return lambda params, batch: loss_and_aux(loss_fn(params, batch))


def simulated_loss(loss_fn: LossFn, *, where: Where | None = None) -> SimulatedLoss:
    """L(theta~) at one simulated state (Eq. smat-objective): ``(params, base, batch, draw) -> (loss, aux)``.

    Differentiable in params (Eq. smat-gradient), base, draw.scale and draw.sigma; where: as in `simulate`.
    """
    return lambda params, base, batch, draw: loss_and_aux(loss_fn(simulate(params, base, draw, where=where), batch))


def mixed_loss(loss_fn: LossFn, lam: Number, *, where: Where | None = None) -> SimulatedLoss:
    """``(1 - lam) L(theta) + lam L(theta~)``, one sample of Eq. smat-objective.

    Args:
        lam: lambda in [0, 1].
        where: the masked set.

    Returns:
        ``(params, base, batch, draw) -> (loss, (aux of the clean loss, aux of the simulated loss))``.

    Raises:
        ValueError: for lam outside [0, 1].
    """
    check_lam(lam)
    simulated = simulated_loss(loss_fn, where=where)

    def loss(params: Params, base: Params, batch: Batch, draw: Draw) -> tuple[Tensor, Aux]:
        clean, clean_aux = loss_and_aux(loss_fn(params, batch))
        merged, merged_aux = simulated(params, base, batch, draw)
        return (1 - lam) * clean + lam * merged, (clean_aux, merged_aux)

    return loss


def check_lam(lam: Number) -> None:
    """Raises: ValueError for lam outside [0, 1]."""
    if not (unread(lam) or (isinstance(lam, Real | Tensor) and 0 <= lam <= 1)):
        raise ValueError(f"lam is {lam!r}, the weight of the simulated loss must lie in [0, 1]")
