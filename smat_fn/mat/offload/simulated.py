"""How SMAT takes a gradient at the simulated state: where theta_0 and theta~ live decides memory and transfers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ... import ops, tree
from ...grad import MasterWeights, ModuleLoss, value_and_grad
from ...simulation.apply import parts_of, simulate
from ...simulation.draws import Draw
from ...types import Aux, Batch, Engine, LossFn, Offload, Params, Where
from .. import step as _step
from .rebuild import blocks, rebuilding
from .storage import BaseBuffer, ResidentBase, StreamedBase

Result = tuple[Tensor, Aux, Params]


class AtSimulated(Protocol):
    """Gradients at simulated states."""

    def idle(self, params: Params) -> None:
        """Called before the gradient of a clean step."""

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~ before reweighting)."""


def build(
    loss_fn: LossFn, base: Params, *, where: Where | None, offload: Offload | None, period: int, engine: Engine
) -> AtSimulated:
    """The implementation of an offload mode; all of them give the same bits."""
    if offload is None:
        return _Fresh(loss_fn, base, where, engine)
    if offload == "cpu":
        return _Buffered(loss_fn, base, where, engine, slices=period - 1)
    assert isinstance(loss_fn, ModuleLoss)
    return _Rebuilt(loss_fn, base, where, streamed=offload == "stream")


def problems(loss_fn: LossFn, offload: Offload | None, engine: Engine) -> list[str]:
    """What speaks against an offload mode, in words."""
    if offload not in (None, "cpu", "recompute", "stream"):
        return [f"offload is {offload!r}, choose host, device, stream, or None for a new tree each time"]
    found = []
    if offload in ("recompute", "stream"):
        inner = loss_fn.loss_fn if isinstance(loss_fn, MasterWeights) else loss_fn
        # a loss that runs the module on a function of the parameters has no module of these weights
        if not isinstance(inner, ModuleLoss) or type(inner).within is not ModuleLoss.within:
            found.append(
                f"offload {offload!r} rebuilds the weights of modules: give a smat_fn.ModuleLoss itself, or "
                "with_master_weights of one, or take offload 'cpu' for adapters, replicas and other functions"
            )
        if engine != "autograd":
            found.append(f"offload {offload!r} needs engine 'autograd', not {engine!r}")
    return found


class _Fresh:
    """theta~ is a new tree."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine) -> None:
        self._at, self._dtype = _unrounded(loss_fn, engine)
        self._base, self._where = base, where

    def idle(self, params: Params) -> None:
        """Nothing to prepare."""

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~)."""
        with torch.no_grad():
            if self._dtype is None:
                simulated = simulate(params, self._base, drawn, where=self._where)
            else:
                states = tree.tree_map(functools.partial(_empty, dtype=self._dtype), params)
                simulated = _simulate_rounded(params, tree.flatten(self._base), drawn, self._where, states)
        return _step.accumulate(_as_wide_as(params, self._at), simulated, batch)


class _Buffered:
    """theta~ in one reusable buffer, theta_0 prefetched into it from pinned memory during clean steps."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine, *, slices: int) -> None:
        self._at, self._dtype = _unrounded(loss_fn, engine)
        self._where, self._slices = where, slices
        self._base, self._buffer = base, cast(BaseBuffer | None, None)

    def idle(self, params: Params) -> None:
        """Queue the next slice."""
        self._buffer_for(params).prefetch()

    def gradient(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """(loss, aux, gradient at theta~)."""
        leaves, base = tree.flatten(params), self._buffer_for(params).take()
        # a base of another dtype is no place for a state
        states = {
            path: base[path] if base[path].dtype == (self._dtype or leaf.dtype) else _empty(leaf, dtype=self._dtype)
            for path, leaf in leaves.items()
        }
        with torch.no_grad():
            if self._dtype is None:
                simulate(leaves, base, drawn, where=self._where, out=states)
            else:
                _simulate_rounded(leaves, base, drawn, self._where, states)
        return _step.accumulate(_as_wide_as(params, self._at), tree.unflatten(params, states), batch)

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
        self._dtype = loss_fn.dtype if isinstance(loss_fn, MasterWeights) else None
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
        make = _simulator(params, drawn, self._where, self._dtype)

        def at(params: Params, batch: Batch) -> tuple[tuple[Tensor, Aux], Params]:
            leaves = {path: self._stand_in(leaf).requires_grad_() for path, leaf in params.items()}
            try:
                with torch.enable_grad(), rebuilding(module, leaves, lambda paths: make(paths, source.get(paths))):
                    loss, aux = self._loss_fn.loss(module, batch)
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            finally:
                source.rewind()
            return (loss.detach(), aux), dict(zip(leaves, grads, strict=True))

        return _step.accumulate(_as_wide_as(params, at), params, batch)

    def _stand_in(self, leaf: Tensor) -> Tensor:
        # its values are never read: without masters the leaf itself, with masters the dtype of the states, no memory
        if self._dtype is None:
            return leaf.detach()
        return torch.zeros((), dtype=self._dtype, device=leaf.device).expand(leaf.shape)


def _unrounded(loss_fn: LossFn, engine: Engine) -> tuple[_step.Gradient, torch.dtype | None]:
    """The gradient at a state that is already rounded, and the dtype of states (None: that of params)."""
    if isinstance(loss_fn, MasterWeights):
        return value_and_grad(loss_fn.loss_fn, engine=engine), loss_fn.dtype
    return value_and_grad(loss_fn, engine=engine), None


def _as_wide_as(params: Params, gradient: _step.Gradient) -> _step.Gradient:
    """Gradients in the dtypes of params, so that micro-batches are added before anything is rounded."""

    def at(states: Params, batch: Batch) -> tuple[tuple[Tensor, Aux], Params]:
        value, grads = gradient(states, batch)
        return value, tree.tree_map(lambda g, leaf: g.to(leaf.dtype), grads, params)

    return at


def _empty(leaf: Tensor, *, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(leaf.shape, dtype=dtype or leaf.dtype, device=leaf.device)


def _simulate_rounded(
    params: Params, base: Mapping[str, Tensor], drawn: Draw, where: Where | None, out: Params
) -> Params:
    """`simulate` of masters into a tree of the narrower dtype, which may be base: one block in float32 at a time."""
    leaves, states = tree.flatten(params), tree.flatten(out)
    for part in parts_of(leaves, drawn, where, {}):
        own = {path: leaves[path] for path in part.paths}
        make = _simulator(own, drawn, where)
        for paths in dict.fromkeys(blocks(own).values()):
            for path, state in zip(paths, make(paths, [base[path] for path in paths]), strict=True):
                states[path].copy_(state)
    return out


def _simulator(
    params: Mapping[str, Tensor], drawn: Draw, where: Where | None, dtype: torch.dtype | None = None
) -> Callable[[Sequence[str], Sequence[Tensor]], list[Tensor]]:
    """`simulate` of some leaves at a time, rounded to dtype; what they share of the draw is made once."""
    (part,) = parts_of(params, drawn, where, {})
    position = {path: i for i, path in enumerate(part.paths)}

    def make(paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        rows, leaves = [position[path] for path in paths], [params[path] for path in paths]
        streams = torch.stack([part.numbers.streams[:, row] for row in rows], 1)
        states = [_empty(leaf, dtype=None) for leaf in leaves]
        masked, starts = [part.masked[row] for row in rows], [part.starts[row] for row in rows]
        ops.simulate_into(leaves, list(base), states, *part.numbers._replace(streams=streams), masked, starts)
        return states if dtype is None else [state.to(dtype) for state in states]

    return make
