"""Gradients at simulated states, for every placement of theta_0 and theta~, and for an external backward pass too."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias, cast, get_args

import torch
from torch import Tensor

from .. import ops, tree
from ..compiled import no_grad, transformed
from ..errors import raise_problems, shortened
from ..grad import MasterWeights, ModuleLoss, detached, loss_and_aux, value_and_grad
from ..grad.master_weights import FrozenRounded
from ..simulation import Draw, reweight, simulate
from ..simulation.state import Part, check_devices, parts_of
from ..types import Aux, Batch, Engine, LossFn, Offload, Params, Where
from ..where import mask_problems
from .offload.rebuild import blocks, rebuilding
from .offload.storage import BaseBuffer, ResidentBase, StreamedBase, flat, read_in_place
from .step import Gradient, accumulate

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

        def either(merged: Tensor, own: Tensor) -> Tensor:
            return torch.where(simulated.to(own.device), merged, own)

        states = tree.tree_map(either, no_grad(simulate)(params, base, drawn, where=where), params)
        loss, aux, grads = accumulate(gradient, states, batch)
        return loss, aux, tree.tree_map(either, no_grad(reweight)(grads, drawn, where=where), grads)

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


class SimulatedWeights:
    """The same gradient where the caller runs forward and backward: a module's own parameters hold theta~ meanwhile.

    Args:
        parameters: the tensors by name; FSDP2's are the local shards.
        base: theta_0 by name.
        where: the masked set S.
        starts: name -> index of the tensor's first coordinate in the full leaf, for shards.
        switch: True switches the parameters' storage to one buffer; False writes theta~ into their storage, which
            other code may own, and keeps a copy of theta.
        slices: the number of `prepare` calls over which a base in host memory is copied to the device, into the one
            buffer that then becomes theta~ (``offload="cpu"`` of `simulated_gradient`). None: the base stays where it
            is. Needs ``switch`` and no shards.

    Raises: ValueError that lists parameters that share memory with base, which training would change with them, or with
        each other, and parameters whose storage FSDP1 or DTensor owns.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        *,
        where: Where | None = None,
        starts: Mapping[str, int] | None = None,
        switch: bool = True,
        slices: int | None = None,
    ) -> None:
        raise_problems(_parameter_problems(parameters, base), "SimulatedWeights")
        self._parameters, self._base, self._where, self._starts = parameters, base, tree.predicate(where), starts
        self._switch, self._drawn = switch, cast(Draw | None, None)
        self._checked = False  # whether the masked set fits the draws
        self._versions = dict[str, int]()  # of theta, when it was simulated
        self._host = None if slices is None else BaseBuffer(base, parameters, slices=slices)
        new = switch and self._host is None
        self._buffer = {path: torch.empty_like(p.data) for path, p in parameters.items()} if new else {}
        self._kept, self._away = dict[str, Tensor](), False  # theta, while the parameters hold theta~; inside `away`
        # the first step's draw, and the number of passes after it: see `_compared`
        self._first, self._later = cast(Draw | None, None), 0
        self._unread = dict[str, Tensor](), dict[str, Tensor]()  # norms before and after the last pass, on a device

    def prepare(self) -> None:
        """Called in a clean step, in which a part of theta_0 can be copied."""
        if self._host is not None:
            self._host.prefetch()

    @contextmanager
    def at(self, drawn: Draw | None) -> Iterator[None]:
        """Replace the parameters by the state of the draw inside the block, and restore theta, also after an exception.

        One ``Draw`` object is simulated once for the same weights: all micro-batches of a step share it. None is a
        clean step: theta stays.

        Raises: ValueError for a first draw with Mask where the masked set names no parameter, and for weights that
            were written to inside the block; of a device, writes that only a norm shows when the next block begins.
        """
        if drawn is None:
            yield
            return
        if not self._checked:
            if not isinstance(drawn, Draw):
                raise ValueError(f"draw is a {type(drawn).__name__}, must be what smat_fn.draw returns, or None")
            picks = self._where
            if picks is not None and not any(picks(path, p) for path, p in self._parameters.items()):
                # the number may be on a GPU, which is waited for
                found = mask_problems(picks, self._parameters, drawn.drop_prob.item())
                raise_problems([f"{text}; for a part of a model give where=smat_fn.where.never" for text in found])
            self._checked = True
        with self._held(drawn):
            yield

    @contextmanager
    def _held(self, drawn: Draw) -> Iterator[None]:
        unread, self._unread = self._unread, ({}, {})
        _refuse_writes(_differing(*unread))
        if tree.written(self._parameters, self._versions):
            self._drawn = None
        weights = {path: p.detach() for path, p in self._parameters.items()}
        kept = weights if self._switch else {path: weight.clone() for path, weight in weights.items()}
        self._kept = kept
        try:
            if not self._switch or drawn is not self._drawn:
                base = self._base
                if self._host is not None:
                    base = self._host.take()
                    self._buffer = {path: _laid_out(base[path], weight) for path, weight in weights.items()}
                with torch.no_grad():
                    states = self._buffer if self._switch else weights
                    simulate(kept, base, drawn, where=self._where, out=states, starts=self._starts)
                self._drawn = drawn
            if self._switch:
                for path, p in self._parameters.items():
                    p.data = self._buffer[path]
            torch.clear_autocast_cache()  # which holds rounded weights until the caller's outermost torch.autocast ends
            before = tree.versions(self._parameters)
            compared = self._compared(drawn)
            norms = _norms(compared)
            yield
            changed, after = tree.written(self._parameters, before), _norms(compared)
            if self._first is drawn or _at_hand(after):
                changed += [path for path in _differing(norms, after) if path not in changed]
            else:  # the host would wait for the device; by the next pass the numbers are there
                self._unread = norms, after
            if self._switch and any(
                p.data_ptr() != self._buffer[path].data_ptr() for path, p in self._parameters.items()
            ):
                self._drawn = None  # p.data was moved aside and copied back: the buffer may hold something else
            _refuse_writes(changed)
        except BaseException:
            self._drawn = None  # another try begins with other weights
            self._first = None if self._first is drawn else self._first
            raise
        finally:
            try:
                self._put_back(kept)
            except BaseException:  # an interrupt between two parameters
                self._put_back(kept)
                raise
            torch.clear_autocast_cache()
            self._kept, self._versions = {}, tree.versions(self._parameters)

    def _put_back(self, kept: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for path, p in self._parameters.items():
                if self._switch:
                    p.data = kept[path]
                else:
                    p.detach().copy_(kept[path])

    def _compared(self, drawn: Draw) -> dict[str, Tensor]:
        """The parameters whose norms are compared before and after a pass, since writes to p.data leave no trace.

        All of them in the first simulated step: what a program does, it does in most steps. Later one a pass, each in
        its turn, which finds whatever writes into all of them at once.
        """
        self._first = drawn if self._first is None else self._first
        paths = list(self._parameters) if self._switch else []
        if self._first is not drawn and paths:
            self._later += 1
            paths = [paths[self._later % len(paths)]]
        return {path: self._parameters[path] for path in paths}

    @contextmanager
    def away(self) -> Iterator[None]:
        """Put theta back into switched parameters for a block inside `at`; one inside another changes nothing."""
        if self._away:
            yield
            return
        self._away = True
        # a signal's handler may come here while only some hold theta~, of which `at` switches the others afterwards
        before = {path: self._parameters[path].data for path in self._kept}
        for path, weight in self._kept.items():
            self._parameters[path].data = weight
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            self._away = False
            for path, state in before.items():
                self._parameters[path].data = state
            torch.clear_autocast_cache()

    def reweight(self, grads: Mapping[str, Tensor], drawn: Draw) -> None:
        """``grads <- alpha m (.) grads`` in place (Eq. smat-gradient), once the gradients of a step are complete."""
        if self._parameters and all(grad is None for grad in grads.values()):
            raise ValueError(
                "grads holds no gradient: no parameter has one. If the model's were replaced after SimulatedWeights "
                "was made, make it again, of those that the model has now"
            )
        starts = None if self._starts is None else {path: self._starts[path] for path in grads}
        with torch.no_grad():
            reweight(grads, drawn, where=self._where, out=grads, starts=starts)
        self._drawn = None


def _parameter_problems(parameters: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> list[str]:
    """Errors for weights that cannot be replaced."""
    if wrong := [
        f"{name} is a {type(given).__name__}, must be a dict of tensors by name"
        for name, given in (("parameters", parameters), ("base", base))
        if not hasattr(given, "items")
    ]:
        return wrong
    problems = []
    held = {path: p.data_ptr() for path, p in parameters.items() if path in base and type(p) in tree.PLAIN}
    if same := [path for path, place in held.items() if place and place == base[path].data_ptr()]:
        problems.append(
            f"base shares memory with the parameters ({', '.join(shortened(same, '{} more'))}), so that theta_0 "
            "would follow theta: give copies, {name: p.detach().clone() for name, p in module.named_parameters()}"
        )
    problems += shortened(
        [
            f"parameters {first!r} and {second!r} share memory, which theta~ would separate: give a tied weight once"
            for first, second in tree.sharing(parameters)
        ],
        "{} more share memory",
    )
    problems += fsdp1_problems(parameters)
    if sharded := [path for path, p in parameters.items() if hasattr(p, "to_local")]:
        problems.append(
            f"parameters are DTensors ({', '.join(shortened(sharded, '{} more'))}): use "
            "smat_fn.parallel.simulated_shards"
        )
    return problems


def fsdp1_problems(parameters: Mapping[str, Tensor]) -> list[str]:
    """Errors for parameters of FSDP1, which copies what their storage is switched to into its flat parameter."""
    owned = [path for path, p in parameters.items() if hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param")]
    names = ", ".join(shortened(owned, "{} more"))
    return [
        f"FSDP1 owns the storage of {names}: shard by FSDP2 (torch.distributed.fsdp.fully_shard), and simulate by "
        "smat_fn.parallel.simulated_shards"
    ] * bool(owned)


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
                states = {path: _empty(leaf, dtype=self._dtype) for path, leaf in leaves.items()}
                _simulate_rounded(leaves, base, drawn, self._where, states)
            else:
                for part in parts_of(leaves, drawn, self._where, {}):  # `simulate` without its checks and wrappers
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
        states = {path: _place(base[path], leaf, self._dtype) for path, leaf in leaves.items()}
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
                with (
                    self._loss_fn.running(),
                    torch.enable_grad(),
                    rebuilding(module, leaves, states),
                ):
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


def _norms(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # those of bfloat16 would be rounded to bfloat16, and hide small updates
    own = {path: torch.linalg.vector_norm(p.detach(), dtype=tree.compute_dtype(p)) for path, p in parameters.items()}
    return {path: norm.nan_to_num() for path, norm in own.items()}


def _at_hand(norms: Mapping[str, Tensor]) -> bool:
    return all(norm.is_cpu for norm in norms.values())


def _differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    return [path for path, norm in before.items() if not torch.equal(norm, after[path])]


def _refuse_writes(changed: Sequence[str]) -> None:
    if changed:
        raise ValueError(
            f"parameters were written to while they held theta~ ({', '.join(shortened(changed, '{} more'))}), and the "
            "end of the simulated pass undoes it: update weights before or after, at theta"
        )


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


def _empty(leaf: Tensor, *, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(leaf.shape, dtype=dtype or leaf.dtype, device=leaf.device)


def _place(base: Tensor, leaf: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The memory of a buffered theta_0 for theta~; a base of another dtype cannot hold it."""
    return base if base.dtype == (dtype or leaf.dtype) else _empty(leaf, dtype=dtype)


def _laid_out(base: Tensor, weight: Tensor) -> Tensor:
    # a gradient takes the strides of what the parameter holds, and torch's fused optimizers those of the parameter
    place = _place(base, weight)
    return place if place.stride() == weight.stride() else torch.empty_like(weight)


def _simulate_rounded(
    leaves: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    drawn: Draw,
    where: Where | None,
    states: Mapping[str, Tensor],
) -> None:
    """`simulate` of master weights into narrower leaves, which may be base: one block in float32 at a time."""
    for part in parts_of(leaves, drawn, where, {}):
        own = {path: leaves[path] for path in part.paths}
        make = _simulator(own, drawn, where)
        for paths in dict.fromkeys(blocks(own).values()):
            for path, state in zip(paths, make(paths, [base[path] for path in paths]), strict=True):
                states[path].copy_(state)


def _simulator(
    params: Mapping[str, Tensor], drawn: Draw, where: Where | None, dtype: torch.dtype | None = None
) -> Callable[[Sequence[str], Sequence[Tensor]], list[Tensor]]:
    """`simulate` of some leaves at a time, rounded to dtype; what they share of the draw is made once."""
    parts = list(parts_of(params, drawn, where, {}))
    place = {path: (part, i) for part in parts for i, path in enumerate(part.paths)}

    def make(paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        origins, made = dict(zip(paths, base, strict=True)), dict[str, Tensor]()
        for part in parts:
            if own := [path for path in paths if place[path][0] is part]:
                made.update(zip(own, states_of(part, own, [origins[path] for path in own]), strict=True))
        return [made[path] for path in paths]

    def states_of(part: Part, paths: Sequence[str], base: Sequence[Tensor]) -> list[Tensor]:
        rows, leaves = [place[path][1] for path in paths], [params[path] for path in paths]
        if rows == list(range(rows[0], rows[-1] + 1)):  # as in most blocks: two calls instead of one a leaf
            streams = part.numbers.streams[:, rows[0] : rows[-1] + 1].contiguous()
        else:
            streams = torch.stack([part.numbers.streams[:, row] for row in rows], 1)
        states = [_empty(leaf, dtype=None) for leaf in leaves]
        masked, starts = [part.masked[row] for row in rows], [part.starts[row] for row in rows]
        ops.simulate_into(leaves, list(base), states, *part.numbers._replace(streams=streams), masked, starts)
        return states if dtype is None else [state.to(dtype) for state in states]

    return make
