"""Gradients at simulated states, for every placement of theta_0 and theta~."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast, get_args

import torch
from torch import Tensor

from .. import ops, tree
from ..execution import no_grad, transformed
from ..grad import MasterWeights, ModuleLoss, detached, loss_and_aux, value_and_grad
from ..grad.master_weights import FrozenRounded
from ..simulation import Draw, reweight, simulate
from ..simulation.state import DrawPart, check_devices, draw_parts
from ..types import Aux, Batch, Engine, LossFn, Offload, Params, Where
from .offload.rebuild import blocks, rebuilding
from .offload.storage import BaseBuffer, ResidentBase, StreamedBase, flat, read_in_place
from .step import Gradient, accumulate
from .weights import empty, place

__all__ = [
    "Composed", "EitherGradient", "Result", "SimulatedGradient", "either_gradient", "offload_problems",
    "simulated_gradient",
]  # fmt: skip

Result = tuple[Tensor, Aux, Params]


class SimulatedGradient:
    """``(params, batch, draw) -> (loss, aux, gradient at theta~)``, made by `simulated_gradient`."""

    reweighted: bool = False  # whether the gradient is that in params already, alpha m included

    def prepare(self, params: Params) -> None:
        """Called before the gradient of a clean step, in which a part of an offloaded theta_0 can be copied."""

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        """Loss, aux and gradient at the state of a draw; a list of micro-batches shares the state."""
        raise NotImplementedError


EitherGradient: TypeAlias = Callable[[Params, Batch, Draw, Tensor], Result]


def either_gradient(loss_fn: LossFn, base: Params, *, where: Where | None, engine: Engine) -> EitherGradient:
    """``(params, batch, draw, simulated) -> (loss, aux, gradient in params)`` at theta~ or theta, as a 0-d bool says.

    One program for both kinds of step: one pass, and alpha m included where the step is simulated.
    """
    gradient, check_base = value_and_grad(loss_fn, engine=engine), tree.unchanged(base)

    def at(params: Params, batch: Batch, drawn: Draw, simulated: Tensor) -> Result:
        check_base()

        def either(merged: Params, own: Params) -> Params:
            leaves, others = tree.flatten(merged), tree.flatten(own)
            found = ops.autograd.choose(simulated, list(leaves.values()), [others[path] for path in leaves])
            return tree.unflatten(merged, dict(zip(leaves, found, strict=True)))

        states = either(no_grad(simulate)(params, base, drawn, where=where), params)
        loss, aux, grads = accumulate(gradient, states, batch)
        return loss, aux, either(no_grad(reweight)(grads, drawn, where=where), grads)

    return at


def simulated_gradient(
    loss_fn: LossFn, base: Params, *, where: Where | None, offload: Offload | None, period: int, engine: Engine
) -> SimulatedGradient:
    r"""The gradient at a simulated state, before reweighting.

    ``grad L(theta~)``, ``theta~ = theta_0 + alpha m (.) (theta - theta_0) + epsilon`` (Eqs. smat-state,
    smat-gradient). All offload modes are bit-identical. Float32 master weights (`smat_fn.grad.with_master_weights`)
    are simulated in float32 and rounded once, straight into the copy that the loss runs on.

    Args:
        loss_fn: ``(params, batch) -> (loss, aux)``.
        base: theta_0, a tree like params.
        where: the masked set S as a predicate on (path, leaf) or a tree of bools; None masks every leaf.
        offload: None keeps base as it is and makes a new tree for theta~. ``"cpu"``: theta_0 in pinned host memory,
            copied during clean steps into one reusable buffer that becomes theta~. ``"recompute"``: theta_0 on the
            device, theta~ rebuilt block by block in forward and backward, no second copy. ``"stream"``: the same with
            theta_0 streamed from pinned memory, no copy on the device at all.
        period: a simulated step follows ``period - 1`` clean ones, over which the copies of ``"cpu"`` are spread.
        engine: as in `smat_fn.value_and_grad`.

    Returns:
        SimulatedGradient.
    """
    if offload is None:
        return _Fresh(loss_fn, base, where, engine)
    if offload == "cpu":
        return _Buffered(loss_fn, base, where, engine, slices=period - 1)
    assert isinstance(loss_fn, ModuleLoss)
    return _Rebuilt(loss_fn, base, where, streamed=offload == "stream")


def offload_problems(loss_fn: LossFn, offload: Offload | None, engine: Engine) -> list[str]:
    """Error messages for an offload mode that is unknown or does not fit the loss."""
    if offload not in (None, *get_args(Offload)):
        return [f"offload is {offload!r}, choose cpu, recompute, stream, or None for a new tree each time"]
    found = []
    if offload in ("recompute", "stream"):
        inner = loss_fn.loss_fn if isinstance(loss_fn, MasterWeights) else loss_fn
        # a loss that runs the module on a function of the parameters has no module of these weights
        if not isinstance(inner, ModuleLoss) or type(inner).within is not ModuleLoss.within:
            found.append(
                f"offload {offload!r} rebuilds the weights of modules, of which no frozen one is rounded: cast them "
                "to the dtype of with_master_weights, or take offload 'cpu'"
                if isinstance(inner, FrozenRounded)
                else f"offload {offload!r} rebuilds the weights of modules: give a smat_fn.ModuleLoss itself, or "
                "with_master_weights of one, or take offload 'cpu' for adapters, replicas and other functions"
            )
        if engine != "autograd":
            found.append(f"offload {offload!r} needs engine 'autograd', not {engine!r}")
    return found


class Composed(SimulatedGradient):
    """The gradient of a loss at the state of a draw, for parameters that are not the weights themselves (adapters).

    The chain rule through `smat_fn.simulate` gives the gradient in params, alpha m included.
    """

    reweighted = True

    def __init__(self, loss_at: Callable[[Draw], LossFn], engine: Engine) -> None:
        self._loss_at, self._engine = loss_at, engine

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        return accumulate(value_and_grad(self._loss_at(drawn), engine=self._engine), params, batch)


class _Fresh(SimulatedGradient):
    """theta~ is a new tree."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine) -> None:
        self._at, self._dtype = _unrounded(loss_fn, engine)
        self._rounding = value_and_grad(loss_fn, engine=engine)
        self._base, self._where, self._check_base = base, where, tree.unchanged(base)

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        self._check_base()
        if transformed():
            return accumulate(self._rounding, simulate(params, self._base, drawn, where=self._where), batch)
        leaves, base, states = tree.flatten(params), tree.flatten(self._base), dict[str, Tensor]()
        check_devices(leaves, base)  # memory on no device would be read as what happens to be in new memory
        with torch.no_grad():
            if self._dtype is not None:
                states = {path: empty(leaf, dtype=self._dtype) for path, leaf in leaves.items()}
                _simulate_rounded(leaves, base, drawn, self._where, states)
            else:
                for part in draw_parts(leaves, drawn, self._where, {}):  # `simulate` without its checks and wrappers
                    theta, theta_0 = ([tensors[path] for path in part.paths] for tensors in (leaves, base))
                    made = ops.library.simulate(theta, theta_0, *part.numbers, part.masked, part.starts)
                    states.update(zip(part.paths, made, strict=True))
        return accumulate(_as_wide_as(params, self._at), tree.unflatten(params, states), batch)


class _Buffered(SimulatedGradient):
    """theta~ in one reusable buffer, theta_0 prefetched into it from pinned memory during clean steps."""

    def __init__(self, loss_fn: LossFn, base: Params, where: Where | None, engine: Engine, *, slices: int) -> None:
        self._at, self._dtype = _unrounded(loss_fn, engine)
        self._where, self._slices = where, slices
        self._base, self._buffer, self._check_base = base, cast(BaseBuffer | None, None), tree.unchanged(base)

    def prepare(self, params: Params) -> None:
        """Queue the next slice."""
        self._buffer_for(params).prefetch()

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        leaves, buffer = tree.flatten(params), self._buffer_for(params)
        self._check_base()
        base = buffer.take()
        states = {path: place(base[path], leaf, self._dtype) for path, leaf in leaves.items()}
        with torch.no_grad():
            if self._dtype is None:
                simulate(leaves, base, drawn, where=self._where, out=states)
            else:
                _simulate_rounded(leaves, base, drawn, self._where, states)
        return accumulate(_as_wide_as(params, self._at), tree.unflatten(params, states), batch)

    def _buffer_for(self, params: Params) -> BaseBuffer:
        _refuse("cpu")
        if self._buffer is None:
            # now that the device is known; the caller's own base may be freed
            self._check_base()
            base, leaves = flat(self._base), tree.flatten(params)
            self._buffer = BaseBuffer(base, leaves, slices=self._slices)
            self._base, self._check_base = None, tree.unchanged(read_in_place(base, leaves))
        return self._buffer


class _Rebuilt(SimulatedGradient):
    """theta~ of one block at a time, in forward and again in backward."""

    def __init__(self, loss_fn: ModuleLoss, base: Params, where: Where | None, *, streamed: bool) -> None:
        self._loss_fn, self._base, self._where, self._streamed = loss_fn, base, where, streamed
        self._dtype = loss_fn.dtype if isinstance(loss_fn, MasterWeights) else None
        self._source: ResidentBase | StreamedBase | None = None
        self._check_base = tree.unchanged(base)

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        _refuse("stream" if self._streamed else "recompute")
        self._loss_fn.check(params)
        self._check_base()
        if self._source is None:
            kind, base = StreamedBase if self._streamed else ResidentBase, flat(self._base)
            self._source, self._base = kind(base, params), None
            if self._streamed:  # the check would keep the caller's base
                self._check_base = tree.unchanged(read_in_place(base, params))
        source, module = self._source, self._loss_fn.module
        make = _simulator(params, drawn, self._where, self._dtype)

        def states(paths: Sequence[str]) -> list[Tensor]:
            made = make(paths, source.get(paths))
            source.release()
            return made

        def at(params: Params, batch: Batch) -> tuple[tuple[Tensor, Aux], Params]:
            leaves = {path: self._stand_in(leaf).requires_grad_() for path, leaf in params.items()}
            try:
                with self._loss_fn.running(), torch.enable_grad(), rebuilding(module, leaves, states):
                    loss, aux = loss_and_aux(self._loss_fn.loss(module, batch))
                    grads = tree.gradients(loss, leaves)
            finally:
                source.rewind()
            return (loss.detach(), detached(aux)), dict(zip(leaves, grads, strict=True))

        return accumulate(_as_wide_as(params, at), params, batch)

    def _stand_in(self, leaf: Tensor) -> Tensor:
        # its values are never read: the leaf itself, or with master weights the dtype of the states and no memory
        if self._dtype is None:
            return leaf.detach()
        return torch.zeros((), dtype=self._dtype, device=leaf.device).expand(leaf.shape)


def _refuse(offload: str) -> None:
    if transformed():
        raise ValueError(f"offload {offload!r} keeps buffers: take offload=None inside transforms and torch.compile")


def _unrounded(loss_fn: LossFn, engine: Engine) -> tuple[Gradient, torch.dtype | None]:
    """The gradient at a state that is already rounded, and the dtype of states (None: that of params)."""
    if isinstance(loss_fn, MasterWeights):
        return value_and_grad(loss_fn.loss_fn, engine=engine), loss_fn.dtype
    return value_and_grad(loss_fn, engine=engine), None


def _as_wide_as(params: Params, gradient: Gradient) -> Gradient:
    """Gradients in the dtypes of params, so that micro-batches are added before anything is rounded."""

    def at(states: Params, batch: Batch) -> tuple[tuple[Tensor, Aux], Params]:
        value, grads = gradient(states, batch)
        return value, tree.tree_map(lambda g, leaf: g.to(leaf.dtype), grads, params)

    return at


def _simulate_rounded(
    leaves: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    drawn: Draw,
    where: Where | None,
    states: Mapping[str, Tensor],
) -> None:
    """`simulate` of master weights into narrower leaves, which may be base: one block in float32 at a time."""
    for part in draw_parts(leaves, drawn, where, {}):
        own = {path: leaves[path] for path in part.paths}
        make = _simulator(own, drawn, where)
        for paths in dict.fromkeys(blocks(own).values()):
            torch._foreach_copy_([states[path] for path in paths], make(paths, [base[path] for path in paths]))


def _simulator(
    params: Mapping[str, Tensor], drawn: Draw, where: Where | None, dtype: torch.dtype | None = None
) -> Callable[[Sequence[str], Sequence[Tensor]], list[Tensor]]:
    """`simulate` of some leaves at a time, rounded to dtype; what they share of the draw is made once."""
    parts = list(draw_parts(params, drawn, where, {}))
    place = {path: (part, i) for part in parts for i, path in enumerate(part.paths)}

    def make(paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        origins, made = dict(zip(paths, base, strict=True)), dict[str, Tensor]()
        for part in parts:
            if own := [path for path in paths if place[path][0] is part]:
                made.update(zip(own, states_of(part, own, [origins[path] for path in own]), strict=True))
        return [made[path] for path in paths]

    def states_of(part: DrawPart, paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        rows, leaves = [place[path][1] for path in paths], [params[path] for path in paths]
        if rows == list(range(rows[0], rows[-1] + 1)):  # as in most blocks: two calls instead of one a leaf
            streams = part.numbers.streams[:, rows[0] : rows[-1] + 1].contiguous()
        else:
            streams = torch.stack([part.numbers.streams[:, row] for row in rows], 1)
        states = [empty(leaf, dtype=None) for leaf in leaves]
        masked, starts = [part.masked[row] for row in rows], [part.starts[row] for row in rows]
        ops.simulate_into(leaves, list(base), states, *part.numbers._replace(streams=streams), masked, starts)
        return states if dtype is None else [state.to(dtype) for state in states]

    return make
