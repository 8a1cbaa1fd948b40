"""A loop of the caller's own: a module's parameters hold the simulated state during forward and backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn

from .. import tree
from ..errors import count_problem, flag_problems, raise_problems, some_of
from ..grad import trained
from ..simulation import Draw, reweight, simulate
from ..simulation.state import unknown_factors
from ..types import Params, Where
from ..where import block_linear, mask_problems, masked_text, never
from . import asam, ascent
from .ascent import Ascent, Climb
from .offload.storage import BaseBuffer
from .step import check_not_negative

_OPEN = WeakSet[nn.Module]()  # modules whose parameters hold theta~, by `SimulatedWeights.of`
_ELSEWHERE = "grad_sample", "main_grad"  # gradients that Opacus and Megatron read instead of ``grad``
_CLIMBED = object()  # in place of a draw: the state theta + e of a clean step


class SimulatedWeights:
    """The gradient at simulated states where the caller runs forward and backward: parameters hold theta~ meanwhile.

    `SimulatedWeights.of` makes it of a module, and then also checks what the module does.

    Args:
        parameters: the tensors by name; FSDP2's are the local shards.
        base: theta_0 by name.
        where: the masked set S; None masks every parameter, unlike in `of`.
        starts: name -> index of the tensor's first coordinate in the full leaf, for shards.
        switch: True switches the parameters' storage to one buffer; False writes theta~ into their storage, which
            other code may own, and keeps a copy of theta.
        slices: the number of `prepare` calls over which a base in host memory is copied to the device, into the one
            buffer that then becomes theta~ (``offload="cpu"`` of `simulated_gradient`). None: the base stays where it
            is. At least 1; needs ``switch`` and no ``starts``.
        once: the caller changes no parameter between two blocks of one ``Draw`` object, which is simulated once, nor
            between two clean ones without `prepare` before the second. Else every block simulates, since writes of
            fused optimizers and through ``.data`` cannot be seen.
        climbs: the ascent step of clean steps, or of all; None: there is none. Needs ``switch`` and no ``starts``.

    Raises: ValueError that lists bad ``slices`` and ``climbs``, parameters that share memory with base, which training
        would change with them, or with each other, frozen ones, and parameters whose storage FSDP1 or DTensor owns.
    """

    _climbs_shards = False  # whether a climb's norm is that of the shards of all processes

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        *,
        where: Where | None = None,
        starts: Mapping[str, int] | None = None,
        switch: bool = True,
        slices: int | None = None,
        once: bool = False,
        climbs: Ascent | None = None,
    ) -> None:
        problems = [] if slices is None else count_problem("slices", slices)
        if slices is not None and not (switch and starts is None):
            problems.append("slices needs switch=True and starts=None: leave it out, and the base stays where it is")
        if climbs is not None and not (switch and starts is None):
            problems.append("climbs needs switch=True and starts=None: the climb's norm is that of whole parameters")
        raise_problems(problems + trained.weight_problems(parameters, base), "SimulatedWeights")
        self._parameters, self._base, self._where, self._starts = parameters, base, tree.predicate(where), starts
        self._switch, self._climbs = switch, climbs
        self._drawn = cast(object, None)  # the draw of the state in the buffer, or `_CLIMBED`
        self._once = once or slices is not None  # a base in host memory has become theta~
        self._module = cast(nn.Module | None, None)
        self._check_base: Callable[[], None] = lambda: None
        # the draw of the blocks since the last reweighting, and whether a backward pass ran in one
        self._passed, self._differentiated = cast(Draw | None, None), False
        self._masks = False  # whether the masked set names a parameter
        self._versions = dict[str, int]()  # of theta, when it was simulated
        self._host = None if slices is None else BaseBuffer(base, parameters, slices=slices)
        new = switch and self._host is None
        self._buffer = {path: torch.empty_like(p.data) for path, p in parameters.items()} if new else {}
        self._kept, self._away = dict[str, Tensor](), False  # theta, while the parameters hold theta~; inside `away`
        # the first step's draw, and the number of passes after it: see `_compared`
        self._first, self._later = cast(object, None), 0
        self._looked = 0  # reweightings
        # gradients of the last block of `climbed`, which the caller frees, and their versions
        self._climbed = dict[str, tuple[ReferenceType[Tensor], int]]()
        self._unread = dict[str, Tensor](), dict[str, Tensor]()  # norms before and after the last pass, on a device

    @classmethod
    def of(
        cls,
        module: nn.Module,
        *,
        base: Params | None = None,
        where: Where | None = None,
        optimizer: Any = None,
        climb: Climb | None = None,
        rho: float | None = None,
    ) -> "SimulatedWeights":
        """Of the trained parameters of a module, by their names in it.

        Args:
            module: before it is wrapped, or wrapped by torch.compile, DataParallel, DistributedDataParallel or Fabric
                (of Lightning).
            base: theta_0 by name, which may hold more than the trained parameters; None: a copy of these as they are
                now, so before a checkpoint of a run that is resumed is loaded.
            where: the masked set; None: `smat_fn.where.block_linear` of the module, unlike in the class and `simulate`.
            optimizer: torch's, whose momentum is the direction of the climb; a list where several train the module;
                None without a climb.
            climb: None; "clean": blocks of clean steps, ``at(None)``, hold ``theta + e``,
                ``e = rho theta^2 (.) d / (|| |theta| (.) d || + 1e-12)`` with d the momentum, so 0 before the first
                update; "both": theta~ too is that of theta + e.
            rho: radius of the climb, >= 0; None: 0.5.

        Raises:
            ValueError: On construction: as the class; no trained parameter, sparse gradients, an embedding that
                clips its rows, or a base of other names or shapes; with ``climb``, an optimizer without a momentum or
                without a parameter; without, an ``optimizer`` or a ``rho``. In simulated steps: parameters that were
                replaced, frozen or unfrozen since, a base that was written to, a gradient of the draw before that was
                not reweighted, or gradients of other passes that were not cleared before a block. In steps that climb:
                the same but for gradients of other passes, and a momentum of another shape or device.

        Source: of ``climb``: `smat_fn.mat.msam`.
        """
        if not isinstance(module, nn.Module):
            raise ValueError(f"SimulatedWeights: module is a {type(module).__name__}, must be a torch.nn.Module")
        leaves = trained.leaves_of(module)
        problems = trained.embedding_problems(module)
        problems += [] if leaves else ["the module has no parameter with requires_grad: unfreeze what is trained"]
        problems += ascent.climb_problems(climb, rho)
        if climb is None and optimizer is not None:
            problems.append("optimizer is for a climb, and there is none: give climb too, or leave optimizer out")
        problems += [] if problems or climb is None else ascent.optimizer_problems(optimizer, leaves)
        raise_problems(problems, "SimulatedWeights")
        if base is None:
            own = {path: p.detach().clone() for path, p in leaves.items()}
        else:  # of the whole module, perhaps
            own = {path: leaf for path, leaf in tree.flatten_unwrapped(base).items() if path in leaves}
            tree.check_same(leaves, "the module", base=own)
        climbs = None if climb is None else Ascent(lambda: optimizer, climb, ascent.radius(rho))
        where = block_linear(trained.bare(module)) if where is None else where
        states = cls(leaves, own, where=where, climbs=climbs)
        states._module = module
        if base is not None:
            states._check_base = tree.unchanged(own)
        return states

    def __repr__(self) -> str:
        return f"SimulatedWeights: Mask acts on {masked_text(self._where, self._parameters)}"

    def prepare(self) -> None:
        """Called before a clean step, in which a part of theta_0 can be copied where no climb takes its memory."""
        if self._climbs is not None:
            self._drawn = None  # weights and momentum are others than in the step before
        elif self._host is not None:
            self._host.prefetch()

    @contextmanager
    def at(self, drawn: Draw | None) -> Iterator[None]:
        """Replace the parameters by the state of the draw inside the block, and restore theta, also after an exception.

        All micro-batches of a step share one ``Draw`` object. None is a clean step: theta stays, or with a climb is
        replaced by theta + e. Of a module, batch norms keep their running statistics inside the block of a draw.

        Raises: ValueError for a draw with Mask where the masked set names no parameter, for factors of alpha of other
            names than the parameters', and for weights that were written to inside the block; of a device, writes that
            only a norm shows when the next block begins; with a climb, for a momentum that cannot be read.
        """
        self._check_closed()
        if drawn is None and self._climbs is None:
            yield
            return
        if drawn is not None and not isinstance(drawn, Draw):
            raise ValueError(f"draw is a {type(drawn).__name__}, must be what smat_fn.draw returns, or None")
        raise_problems([] if drawn is None else self._draw_problems(drawn))
        first = drawn is not self._passed
        if self._module is not None:
            self._check_module(first)
        climb = self._climb(drawn)
        if drawn is None:  # gradients of micro-batches before are added to, and nothing is reweighted
            with nullcontext() if climb is None else self._held(None, climb):
                yield
            return
        begun = {path: (p.grad, _version(p.grad)) for path, p in self._parameters.items() if p.grad is not None}
        # gradients are seldom there, so that the host seldom waits
        looked = begun if self._module is not None and first else {}
        others = {path for path, (grad, _) in looked.items() if bool(grad.any())}
        with self._held(drawn, climb), trained.still(self._batch_norms()):
            yield
        ended = {path: p.grad for path, p in self._parameters.items() if p.grad is not None}
        same = [path for path, (grad, _) in begun.items() if ended.get(path) is grad]
        if added := [path for path in same if path in others and _version(ended[path]) == begun[path][1] + 1]:
            raise ValueError(
                f"gradients of {some_of(added)} were not cleared before the first block of a draw: a backward pass in "
                "the block was added to them, and reweighting would multiply both. Call module.zero_grad(), since an "
                "optimizer clears only the parameters that it holds, or freeze what is not trained "
                "(requires_grad_(False)); run other backward passes after reweight_grads. For several draws in one "
                "step take each gradient by torch.autograd.grad, call states.reweight(grads, drawn), and add them"
            )
        self._passed = drawn
        written = any(_version(ended[path]) != begun[path][1] for path in same)
        self._differentiated |= len(same) < len(ended) or written

    @contextmanager
    def climbed(self, *, rho: float = 0.25, adaptive: bool = True) -> Iterator[None]:
        """Replace the parameters by theta + e inside the block, for the second pass of ASAM.

        ``e = rho theta^2 (.) g / (|| |theta| (.) g || + 1e-12)``, g the gradient of the first pass, of all
        micro-batches, in ``p.grad``. It is dropped: the block runs the second pass, of all micro-batches, and the
        optimizer takes the gradient at theta + e alone. Of a module, batch norms keep their running statistics.

        Args:
            rho: radius, >= 0.
            adaptive: False is SAM, |theta| replaced by 1.

        Raises: ValueError for a bad rho, shards, no gradient before the block, a second block in a step, a gradient of
            a draw that was not reweighted, other parameters than at the start, and writes to weights; of a module, no
            gradient after the block.

        Source: `smat_fn.mat.asam`.
        """
        self._check_closed()
        if not self._climbs_shards and (not self._switch or self._starts is not None):
            raise ValueError(
                "climbed() needs switch=True and starts=None: the climb's norm is that of whole parameters"
            )
        raise_problems(check_not_negative(rho=rho) + flag_problems(adaptive=adaptive), "climbed")
        if self._module is not None:
            self._check_module(first=True)
        self._refuse_elsewhere(self._parameters)
        grads = self._grads()
        if not grads:
            raise ValueError("climbed() climbs along the gradient, and no parameter has one: call backward() before")
        if self._climbs_again(grads):
            raise ValueError(
                "gradients are, or were added to, those of the climbed() block before: a step has one block, which "
                "holds the second pass of all micro-batches, after the first pass of all; clear gradients (zero_grad) "
                "before the first pass of the next step"
            )
        slopes = {path: grads[path] if path in grads else torch.zeros_like(p) for path, p in self._parameters.items()}
        self._clear_grads()
        self._drawn = None
        with self._held(None, partial(asam.climb, grads=slopes, rho=rho, adaptive=adaptive)):
            del grads, slopes
            with trained.still(self._batch_norms()):
                yield
        ended = self._grads()
        if not ended and self._module is not None:  # a trainer may leave its batches out
            raise ValueError("no backward pass ran in the block of climbed(): call backward() inside")
        self._climbed = {path: (ref(grad), _version(grad)) for path, grad in ended.items()}

    def _grads(self) -> dict[str, Tensor]:
        return {path: p.grad for path, p in self._parameters.items() if p.grad is not None}

    def _clear_grads(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def _climbs_again(self, grads: Mapping[str, Tensor]) -> bool:
        """Whether gradients hold those of the last block of `climbed`, or only one backward pass was added to all.

        An update, and zeros in place, would be a write more: that pass is the first one of another micro-batch.
        """
        kept = {path: self._climbed[path] for path in grads if path in self._climbed}
        writes = [_version(grads[path]) - before for path, (own, before) in kept.items() if own() is grads[path]]
        added = len(writes) == len(grads) and max(writes) <= 1
        return 0 in writes or (added and not tree.written(self._parameters, self._versions))

    def _refuse_elsewhere(self, paths: Iterable[str]) -> None:
        if read := [(path, name) for name in _ELSEWHERE for path in paths if _is_set(self._parameters[path], name)]:
            path, name = read[0]
            raise ValueError(
                f"parameter {path!r} has {name}, by which an optimizer may step instead of by the gradient of these "
                "blocks: DP-SGD and optimizers with gradients of their own are not supported"
            )

    def _check_closed(self) -> None:
        if self._kept or (self._module is not None and trained.bare(self._module) in _OPEN):
            raise ValueError(
                "a block inside another block of these weights, or a block before was not left (an exception, or a "
                "hook that did not run): leave it first"
            )

    def _batch_norms(self) -> list[tuple[str, nn.Module]]:
        """The module's batch norms with running statistics."""
        return [] if self._module is None else trained.norms_of(trained.bare(self._module))

    def _check_module(self, first: bool) -> None:
        """Raises: ValueError for other parameters than at the start; first: for a gradient that is not reweighted."""
        assert self._module is not None
        now = trained.leaves_of(self._module)
        found = trained.changes(self._parameters, now, "when SimulatedWeights was made")
        raise_problems([*found, "make it again, from theta_0 (base=)"] if found else [])
        if first and self._differentiated:
            raise ValueError(
                "the gradient of the draw before was not reweighted: call reweight_grads(drawn) after the last block "
                "of a draw, before clipping and the optimizer (micro-batches of a step share one Draw, made before the "
                "first of them)"
            )

    def _climb(self, drawn: Draw | None) -> Callable[..., Params] | None:
        """The climb of a block, along the momentum; None: it does not climb, as before the first update."""
        if self._climbs is None or (drawn is not None and self._climbs.climb == "clean"):
            return None
        slopes = ascent.momentum_in(self._climbs.optimizer(), self._parameters)
        return None if slopes is None else partial(asam.climb, grads=slopes, rho=self._climbs.rho)

    def _draw_problems(self, drawn: Draw) -> list[str]:
        problems, picks = unknown_factors(drawn.factors, self._parameters, "factors of alpha name"), self._where
        self._masks = (
            self._masks
            or picks is None
            or picks is never
            or any(picks(path, p) for path, p in self._parameters.items())
        )
        if not self._masks:  # the number may be on a GPU, which is waited for
            found = mask_problems(picks, self._parameters, drawn.drop_prob.item())
            problems += [f"{text}; where=smat_fn.where.never switches Mask off on purpose" for text in found]
        return problems

    @contextmanager
    def _held(self, drawn: Draw | None, climb: Callable[..., Params] | None) -> Iterator[None]:
        point = _CLIMBED if drawn is None else drawn
        turn = object() if drawn is None else drawn  # clean blocks have no draw that would tell steps apart
        unread, self._unread = self._unread, ({}, {})
        _refuse_writes(_differing(*unread))
        self._check_base()
        if not self._once or tree.written(self._parameters, self._versions):
            self._drawn = None
        weights = {path: p.detach() for path, p in self._parameters.items()}
        kept = weights if self._switch else {path: weight.clone() for path, weight in weights.items()}
        self._kept = kept
        if self._module is not None:
            _OPEN.add(trained.bare(self._module))
        try:
            if not self._switch or point is not self._drawn:
                base = self._base
                if self._host is not None:
                    base = self._host.memory() if drawn is None else self._host.take()
                    self._buffer = {path: _laid_out(base[path], weight) for path, weight in weights.items()}
                elif self._switch:  # a module's dtype, device or memory format may have changed
                    self._buffer = {path: _fitting(self._buffer[path], weight) for path, weight in weights.items()}
                self._write(kept, base, drawn, climb, self._buffer if self._switch else weights)
                self._drawn = point
            climb = None  # holds gradients, which would be in memory beside those of the block
            if self._switch:
                for path, p in self._parameters.items():
                    p.data = self._buffer[path]
            torch.clear_autocast_cache()  # which holds rounded weights until the caller's outermost torch.autocast ends
            before = tree.versions(self._parameters)
            compared = self._compared(turn)
            norms = _norms(compared)
            yield
            changed, after = tree.written(self._parameters, before), _norms(compared)
            if self._first is turn or _at_hand(after):
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
            self._first = None if self._first is turn else self._first
            raise
        finally:
            try:
                self._put_back(kept)
            except BaseException:  # an interrupt between two parameters
                self._put_back(kept)
                raise
            torch.clear_autocast_cache()
            self._kept, self._versions = {}, tree.versions(self._parameters)
            if self._module is not None:
                _OPEN.discard(trained.bare(self._module))

    @torch.no_grad()
    def _write(
        self,
        theta: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        drawn: Draw | None,
        climb: Callable[..., Params] | None,
        out: Mapping[str, Tensor],
    ) -> None:
        """theta~, theta + e, or theta~ of theta + e. Args: out: may be base where it is in host memory."""
        if climb is not None:
            over = drawn is not None and self._host is not None  # theta_0, which simulate reads
            theta = climb(theta, out=None if over else out)
        if drawn is not None:
            simulate(theta, base, drawn, where=self._where, out=out, starts=self._starts)

    def _put_back(self, kept: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for path, p in self._parameters.items():
                if self._switch:
                    p.data = kept[path]
                else:
                    p.detach().copy_(kept[path])

    def _compared(self, drawn: object) -> dict[str, Tensor]:
        """The parameters whose norms are compared before and after a pass, since writes to p.data leave no trace.

        All of them in the first step at another state: what a program does, it does in most steps. Later one a pass,
        each in its turn, which finds whatever writes into all of them at once.
        """
        self._first = drawn if self._first is None else self._first
        paths = list(self._parameters) if self._switch else []
        if self._first is not drawn and paths:
            self._later += 1
            paths = [paths[self._later % len(paths)]]
        return {path: self._parameters[path] for path in paths}

    @contextmanager
    def away(self) -> Iterator[None]:
        """Put theta back into the parameters for a block inside `at`; one inside another changes nothing."""
        if self._away:
            yield
            return
        self._away = True
        # a signal's handler may come here while only some hold theta~, of which `at` switches the others afterwards
        before = {path: self._parameters[path].data for path in self._kept}
        if not self._switch:
            before = {path: state.clone() for path, state in before.items()}
        self._put(self._kept)
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            self._away = False
            self._put(before)
            torch.clear_autocast_cache()

    def _put(self, states: Mapping[str, Tensor]) -> None:
        """Other values in the parameters, which leave no trace: `at` looks for writes of the caller."""
        for path, state in states.items():
            if self._switch:
                self._parameters[path].data = state
            else:
                self._parameters[path].data.copy_(state)

    def reweight_grads(self, drawn: Draw | None) -> None:
        """``grad <- alpha m (.) grad`` for the parameters' own gradients in place (Eq. smat-gradient).

        Once a step, after the last block of `at` and before clipping; for None, a clean step, nothing.

        Raises: ValueError as `reweight`, and for a backward pass outside of the blocks.
        """
        if drawn is None:
            return
        grads = {path: p.grad for path, p in self._parameters.items() if p.grad is not None}
        if grads and drawn is self._passed and not self._differentiated:
            raise ValueError(
                "no backward pass ran in the blocks of this draw: call backward() inside, where the parameters hold "
                "theta~ (gradients of torch.autograd.grad: states.reweight(grads, drawn); where a framework calls "
                "backward, as Lightning, the block is open from before training_step to on_after_backward)"
            )
        self.reweight(grads, drawn)

    def reweight(self, grads: Mapping[str, Tensor], drawn: Draw) -> None:
        """``grads <- alpha m (.) grads`` in place, once the gradients of a step are complete.

        Args: grads: by the parameters' names; drawn: that of the blocks before.
        Raises: ValueError for no gradients, names of no parameter, and a draw of which there was no block since the
            last reweighting.
        """
        if self._parameters and all(grad is None for grad in grads.values()):
            raise ValueError(
                "grads holds no gradient: no parameter has one. Leave out the reweighting of a step without a loss, as "
                "where its batches were skipped; if the model's parameters were replaced after SimulatedWeights was "
                "made, make it again, of those that the model has now"
            )
        if unknown := [path for path in grads if path not in self._parameters]:
            raise ValueError(
                f"grads has {some_of(unknown)}, names that SimulatedWeights does not have, and "
                f"draws depend on names: give those of its parameters, such as {next(iter(self._parameters))!r}"
            )
        paths = list(grads)
        if self._looked:  # at all in the first step, then at one a step, in its turn
            paths = paths[self._looked % max(1, len(paths)) :][:1]
        self._looked += 1
        self._refuse_elsewhere(paths)
        if drawn is not self._passed:
            raise ValueError(
                "this Draw object is not that of the last block, or its gradient is reweighted already: reweight once "
                "a step, after its last `with states.at(drawn)`"
            )
        starts = None if self._starts is None else {path: self._starts[path] for path in grads}
        with torch.no_grad():
            reweight(grads, drawn, where=self._where, out=grads, starts=starts)
        self._drawn, self._passed, self._differentiated = None, None, False


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
            f"parameters were written to while they held theta~ ({some_of(changed)}), or theta + e of a climb, and the "
            "end of the block undoes it: update weights before or after, at theta (those that are moved and put back: "
            "through p.data alone, not in place under torch.no_grad())"
        )


def empty(leaf: Tensor, *, dtype: torch.dtype | None) -> Tensor:
    """New memory of a leaf's shape and device; dtype: None is the leaf's."""
    return torch.empty(leaf.shape, dtype=dtype or leaf.dtype, device=leaf.device)


def place(base: Tensor, leaf: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The memory of a buffered theta_0 for theta~; a base of another dtype cannot hold it."""
    return base if base.dtype == (dtype or leaf.dtype) else empty(leaf, dtype=dtype)


def _laid_out(base: Tensor, weight: Tensor) -> Tensor:
    # a gradient takes the strides of what the parameter holds, and torch's fused optimizers those of the parameter
    memory = place(base, weight)
    return memory if memory.stride() == weight.stride() else torch.empty_like(weight)


def _fitting(buffer: Tensor, weight: Tensor) -> Tensor:
    """The buffer of theta~, or a new one for a weight of another dtype, device or layout."""
    alike = (buffer.dtype, buffer.device, buffer.stride()) == (weight.dtype, weight.device, weight.stride())
    return buffer if alike else torch.empty_like(weight)


def _is_set(parameter: Tensor, name: str) -> bool:
    return getattr(parameter, name, None) is not None


def _version(grad: Tensor) -> int:
    return 0 if grad.is_inference() else grad._version
