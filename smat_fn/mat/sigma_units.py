"""Gradients at simulated states whose noise is in units of the update so far."""

from typing import Literal, get_args

from .. import tree
from ..grad import value_and_grad
from ..simulation import Draw
from ..simulation.relative import in_units_of, simulate_by_leaf, update_rms
from ..types import Batch, Engine, LossFn, Offload, Params, Where
from .simulated import Result, SimulatedGradient
from .step import accumulate

SigmaOf = Literal["weights", "update", "leaf"]


def relative_gradient(
    loss_fn: LossFn, at_simulated: SimulatedGradient, base: Params, *, where: Where | None, of: SigmaOf, engine: Engine
) -> SimulatedGradient:
    """The gradient at simulated states whose sigma is in the units that ``of`` names; see `smat_fn.mat.smat.build`."""
    if of == "update":
        return _ByUpdate(at_simulated, base)
    return _ByLeaf(loss_fn, base, where, engine) if of == "leaf" else at_simulated


def sigma_problems(of: str, offload: Offload | None) -> list[str]:
    """Error messages for units of sigma that are unknown, or need a base that is elsewhere."""
    if of not in get_args(SigmaOf):
        return [f"sigma_of is {of!r}, choose weights, update or leaf"]
    if of != "weights" and offload is not None:
        return [f"sigma_of {of!r} reads base as it is: leave out offload {offload!r}"]
    return []


class _ByUpdate(SimulatedGradient):
    """sigma times the RMS of the update of all leaves together."""

    def __init__(self, at_simulated: SimulatedGradient, base: Params) -> None:
        self._at_simulated, self._base = at_simulated, base

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        return self._at_simulated(params, batch, in_units_of(update_rms(params, self._base), drawn))


class _ByLeaf(SimulatedGradient):
    """sigma times the RMS of the update of each leaf."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine) -> None:
        self._at, self._base, self._where = value_and_grad(loss_fn, engine=engine), base, where
        self._check_base = tree.unchanged(base)

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        self._check_base()
        return accumulate(self._at, simulate_by_leaf(params, self._base, drawn, where=self._where), batch)
