"""How SMAT takes a gradient at the simulated state: where theta_0 and theta~ live decides memory and transfers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from .. import ops, tree
from ..grad import ModuleLoss, value_and_grad
from ..ops.rebuild import rebuilding
from ..ops.storage import BaseBuffer, ResidentBase, StreamedBase
from ..simulation.apply import parts_of, simulate
from ..simulation.draws import Draw
from ..types import Aux, Batch, Engine, LossFn, Params, Residence, Where
from . import _step

Result = tuple[Tensor, Aux, Params]


class AtSimulated(Protocol):
    """Gradients at simulated states."""

    def idle(self, params: Params) -> None:
        """Called before the gradient of a clean step."""

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~ before reweighting)."""


def build(
    loss_fn: LossFn, base: Params, *, where: Where | None, residence: Residence | None, period: int, engine: Engine
) -> AtSimulated:
    """The implementation of a residence; all of them give the same bits."""
    if residence is None:
        return _Fresh(loss_fn, base, where, engine)
    if residence == "host":
        return _Buffered(loss_fn, base, where, engine, slices=period - 1)
    assert isinstance(loss_fn, ModuleLoss)
    return _Rebuilt(loss_fn, base, where, streamed=residence == "stream")


def problems(loss_fn: LossFn, residence: Residence | None, engine: Engine) -> list[str]:
    """What speaks against a residence, in words."""
    if residence not in (None, "host", "device", "stream"):
        return [f"residence is {residence!r}, choose host, device, stream, or None for a new tree each time"]
    found = []
    if residence in ("device", "stream"):
        if not isinstance(loss_fn, ModuleLoss):
            found.append(f"residence {residence!r} rebuilds the weights of modules: give a smat_fn.ModuleLoss")
        if engine != "autograd":
            found.append(f"residence {residence!r} needs engine 'autograd', not {engine!r}")
    return found


class _Fresh:
    """theta~ is a new tree."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine) -> None:
        self._at, self._base, self._where = value_and_grad(loss_fn, engine=engine), base, where

    def idle(self, params: Params) -> None:
        """Nothing to prepare."""

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~)."""
        with torch.no_grad():
            simulated = simulate(params, self._base, drawn, where=self._where)
        return _step.accumulate(self._at, simulated, batch)


class _Buffered:
    """theta~ in one reusable buffer, theta_0 prefetched into it from pinned memory during clean steps."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine, *, slices: int) -> None:
        self._at, self._where, self._slices = value_and_grad(loss_fn, engine=engine), where, slices
        self._base, self._buffer = base, cast(BaseBuffer | None, None)

    def idle(self, params: Params) -> None:
        """Queue the next slice."""
        self._buffer_for(params).prefetch()

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~)."""
        leaves, base = tree.flatten(params), self._buffer_for(params).take()
        # a base of another dtype is no place for a state
        states = {
            path: base[path]
            if base[path].dtype == leaf.dtype
            else torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
            for path, leaf in leaves.items()
        }
        with torch.no_grad():
            simulate(leaves, base, drawn, where=self._where, out=states)
        return _step.accumulate(self._at, tree.unflatten(params, states), batch)

    def _buffer_for(self, params: Params) -> BaseBuffer:
        if self._buffer is None:
            # now that the device is known; the caller's own base may be freed
            self._buffer = BaseBuffer(tree.flatten(self._base), tree.flatten(params), slices=self._slices)
            self._base = None
        return self._buffer


class _Rebuilt:
    """theta~ of one block at a time, in forward and again in backward."""

    def __init__(self, loss_fn: ModuleLoss, base: Params, where: Where | None, *, streamed: bool) -> None:
        self._loss_fn, self._base, self._where, self._streamed = loss_fn, base, where, streamed
        self._source: ResidentBase | StreamedBase | None = None

    def idle(self, params: Params) -> None:
        """Nothing to prepare."""

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~)."""
        self._loss_fn.check(params)
        if self._source is None:
            kind = StreamedBase if self._streamed else ResidentBase
            self._source, self._base = kind(tree.flatten(self._base), params), None
        source, module = self._source, self._loss_fn.module
        make = _simulator(params, drawn, self._where)

        def at(params: Params, batch: Batch) -> tuple[tuple[Tensor, Aux], Params]:
            leaves = {path: leaf.detach().requires_grad_() for path, leaf in params.items()}
            try:
                with torch.enable_grad(), rebuilding(module, leaves, lambda paths: make(paths, source.get(paths))):
                    loss, aux = self._loss_fn.loss(module, batch)
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            finally:
                source.rewind()
            return (loss.detach(), aux), dict(zip(leaves, grads, strict=True))

        return _step.accumulate(at, params, batch)


def _simulator(
    params: Mapping[str, Tensor], drawn: Draw, where: Where | None
) -> Callable[[Sequence[str], Sequence[Tensor]], list[Tensor]]:
    """`simulate` of some leaves at a time; what they share of the draw is made once."""
    (part,) = parts_of(params, drawn, where, {})
    position = {path: i for i, path in enumerate(part.paths)}

    def make(paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        rows, leaves = [position[path] for path in paths], [params[path] for path in paths]
        streams = torch.stack([part.numbers.streams[:, row] for row in rows], 1)
        states = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) for leaf in leaves]
        masked, starts = [part.masked[row] for row in rows], [part.starts[row] for row in rows]
        ops.simulate_into(leaves, list(base), states, *part.numbers._replace(streams=streams), masked, starts)
        return states

    return make
