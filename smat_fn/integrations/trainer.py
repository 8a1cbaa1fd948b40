"""SMAT inside ``transformers.Trainer``, and inside the trainers that build on it (TRL).

trainer = SFTTrainer(model, ...)
attach(trainer, key=random.key(0), sigma=2e-3)
trainer.train()
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import errors, tree
from ..grad import trained
from ..mat import ascent
from ..mat.ascent import Ascent, TrainerClimb
from ..mat.offload import storage
from ..mat.smat import Schedule
from ..mat.weights import SimulatedWeights
from ..parallel.shards import ShardWeights, local, renew, reshard, restart, settle, sharded
from ..simulation import Draw
from ..simulation.state import unknown_factors
from ..tree import predicate
from ..types import Noise, Params, Predicate, Where
from ..where import block_linear, mask_problems
from . import checks, methods, theta_0
from .passes import Passes

_LOG = logging.getLogger(__name__)
_HANDLE = "_smat_attached"  # the trainer's attribute that holds the handle
_RECORD = "smat_fn"  # the name of its settings in a checkpoint's trainer_state.json
_ORIGINS: Any = WeakIdKeyDictionary()  # of parameters that began to train: the samples of their theta_0
_SEEN = 8  # parameters at which a training_step is looked at
_METHODS = (
    "training_step", "compute_loss", "log", "call_model_init", "create_scheduler", "_load_optimizer_and_scheduler",
)  # fmt: skip
# methods of the trainer and of its accelerator, ...
_AT_THETA = "evaluate", "predict", "evaluation_loop", "prediction_loop", "save_model", "save_state"
_AT_THETA_OF_MODULES = "generate", "save_pretrained"  # ... and of modules


class Attached:
    """SMAT on a trainer. ``draw`` is that of the last simulated step; ``repr`` says what is simulated and masked."""

    def __init__(
        self,
        trainer: Any,
        key: Tensor,
        schedule: Schedule,
        *,
        base: Params | Literal["host"] | None,
        where: Where | None,
        climb: TrainerClimb | None = None,
        rho: float | None = None,
    ) -> None:
        self.draw: Draw | None = None
        self._trainer, self._key, self._schedule, self._asked = trainer, key, schedule, where
        self._climbs = None if climb is None else Ascent(self._optimizer, climb, ascent.radius(rho, climb))
        self._twice = climb == "asam"  # whether the micro-batches of clean steps run twice
        self._plain = schedule.off and climb is None  # every step's loss is at theta
        self._host = isinstance(base, str)
        self._given = None if base is None or self._host else tree.flatten_unwrapped(base)
        self._check_base: Callable[[], None] = lambda: None
        self._frozen = dict[str, Tensor]()  # theta_0 of what an earlier attach trained, and this one does not
        self._own = dict[str, Tensor]()  # theta_0 where none is given: a copy of the weights of ...
        self._pinned: storage.Host | None = None  # with "host": the memory of that copy
        self._model: nn.Module | None = None  # ... this model
        self._waits = False  # whether the copy is made of shards, when accelerate has made them
        self._untrained = False  # whether no step has been trained since the copy
        self._resumed: Path | None = None  # the checkpoint that was loaded last
        self._origin = dict[str, bytes]()  # samples of theta_0, until a step is trained from it
        self._text = ""
        self._weights: SimulatedWeights | None = None  # while the trainer trains, and the parameters of then
        self._leaves, self._dtypes = dict[str, nn.Parameter](), list[torch.dtype]()
        self._norms = list[tuple[str, nn.Module]]()  # batch norms with running statistics
        self._at_theta = list[tuple[Any, str]]()  # methods that run at theta inside a simulated step too
        self._step = -1  # an optimizer step that is not complete, ...
        self._now: Draw | None = None  # ... and its draw
        self._summed = -1  # the step of the last gradient, -1 before the first one, ...
        self._finished = -1  # ... and of the last complete one
        # whether the gradient of this optimizer step is; one that runs already is not SMAT's
        self._complete = bool(getattr(trainer, "is_in_train", False))
        self._inside: ExitStack | None = None  # a training_step that has not come to compute_loss
        self._early = ExitStack()  # hooks on the modules with trained parameters until then
        self._within = False  # a training_step
        self._passes: Passes | None = None  # the first pass of a step whose micro-batches run twice
        self._scales, self._steps = list[Tensor](), 0  # alphas, and the number of steps, since the last log
        self._active = True
        self._replaced = {name: getattr(trainer, name) for name in _METHODS}
        self._callback = _callback(self)

    def __repr__(self) -> str:
        return self._text if self._active else "SMAT: detached"

    def detach(self) -> None:
        """Restores plain training, even if the trainer's methods have been wrapped since.

        Raises: ValueError between the micro-batches of a simulated step, or of a clean one that climbs.
        """
        if not self._active:
            return
        if self._now is not None or (self._climbs is not None and self._step >= 0):
            raise ValueError("detach inside an optimizer step: its gradient is half summed, detach between two steps")
        trainer, own = self._trainer, vars(self._trainer)
        for name, original in self._replaced.items():
            if own.get(name) == self._ours(name):  # else others wrap it: it passes through
                delattr(trainer, name)
                if getattr(trainer, name) != original:  # not the class's
                    setattr(trainer, name, original)
        if own.get(_HANDLE) is self:
            delattr(trainer, _HANDLE)
        trainer.remove_callback(self._callback)
        trainer.state.stateful_callbacks.pop(_RECORD, None)
        self._active = False
        self._end()
        self._own, self._frozen, self._pinned, self._waits = {}, {}, None, False

    def _ours(self, name: str) -> Any:
        """The method in place of the trainer's."""
        return getattr(self, f"_{name.lstrip('_')}")

    def _attach(self, origin: Mapping[str, Tensor]) -> None:
        trainer = self._trainer
        self._take(trainer.model, origin)
        self._check(trainer.model)
        if self._given is not None:
            self._check_base = tree.unchanged(self._given)
        if (earlier := vars(trainer).get(_HANDLE)) is not None:
            earlier.detach()
            self._replaced = {name: getattr(trainer, name) for name in _METHODS}
        for name in _METHODS:
            setattr(trainer, name, self._ours(name))
        trainer.add_callback(self._callback)
        setattr(trainer, _HANDLE, self)

    def _take(self, model: nn.Module, origin: Mapping[str, Tensor]) -> None:
        """theta_0 is a copy of these weights, unless it was given."""
        self._model, leaves = model, _leaves_of(model)
        errors.raise_problems(checks.shard_problems_of(self._trainer, leaves, self._host))
        if self._given is None:
            self._untrained = True
            self._waits = checks.shards_later(self._trainer) and not sharded(origin)
            if self._waits:  # each process would copy the whole model, and all but the first may not have its weights
                return
            place = "cpu" if self._host else None
            if not self._host or not any(p.is_cuda for p in leaves.values()):  # else `_hold` makes the copy
                origin = {path: leaf.detach().to(device=place, copy=True) for path, leaf in origin.items()}
            if self._host:
                self._hold(origin, leaves)
            else:
                self._own = dict(origin)

    def _hold(self, origin: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> None:
        """theta_0 is these values, once, in the host memory that copies to the devices of the parameters start from."""
        device = next((p.device for p in leaves.values() if p.is_cuda), torch.device("cpu"))
        self._pinned = storage.runtime_for(device).pin(origin)
        self._own = storage.held(self._pinned, origin)

    def _check(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters to simulate. Raises: ValueError that lists everything that prevents it."""
        leaves, where = _leaves_of(model), self._where(model)
        problems = checks.trainer_problems(self._trainer, leaves)
        problems += checks.shard_problems_of(self._trainer, leaves, self._host)
        if self._given is not None:
            problems += checks.base_problems(self._given, model, leaves)
        elif not self._waits:
            found = trained.changes(self._own, leaves, "at attach")
            problems += found + (["freeze, unfreeze and resize before attach"] if found else [])
        problems += unknown_factors(self._schedule.factors or {}, leaves, "factors of alpha name")
        problems += mask_problems(where, leaves, self._schedule.drop_prob)
        # train() makes the optimizer where none is given
        made = self._optimizer() is not None or getattr(self._trainer, "is_in_train", False)
        if self._climbs is not None and not self._twice and made:
            problems += [] if problems else ascent.optimizer_problems(self._optimizer(), leaves)
        errors.raise_problems(problems)
        self._text = checks.describe(self._schedule, self._climbs, leaves, where)
        return leaves

    def _optimizer(self) -> Any:
        return self._trainer.optimizer

    def _where(self, model: nn.Module) -> Predicate:
        return predicate(self._asked) or block_linear(trained.bare(model))

    def _begin(self) -> None:
        """Training begins, with the model of now."""
        model = self._trainer.model
        known = None if self._model is None else trained.bare(self._model)
        if self._given is None and trained.bare(model) is not known:
            raise ValueError("the trainer's model was replaced after attach, theta_0 is that of another: attach again")
        self._end()
        if self._waits and self._trainer.state.global_step:
            raise ValueError(checks.no_shards(self._trainer))
        if self._waits:
            self._copy(model)
        leaves = self._check(model)
        if isinstance(self._pinned, storage.Unpinned) and any(p.is_cuda for p in leaves.values()):  # moved since attach
            self._hold(self._own, leaves)
        if self._given is None and self._resumed is not None and _RECORD in self._trainer.state.stateful_callbacks:
            self._recall(self._resumed, leaves)
        self._weights, origin = self._simulated(model, leaves)
        self._leaves, self._dtypes = leaves, [p.dtype for p in leaves.values()]
        self._origin = checks.samples_of(origin)
        record = checks.record(self._key, self._schedule, self._climbs, origin, self._where(model), self._origin)
        errors.raise_problems(checks.process_problems(checks.of_all_processes(record)))
        state = self._trainer.state
        start = 0 if _RECORD in state.stateful_callbacks else state.global_step  # of the steps with SMAT
        self._remember(record)
        self._norms = trained.norms_of(model)
        # wrappers of torch.compile pass on what is set and deleted
        modules = [own for own in model.modules() if not isinstance(getattr(own, "_orig_mod", None), nn.Module)]
        named = [(own, name) for own in modules for name in _AT_THETA_OF_MODULES]
        named += [(own, name) for own in (self._trainer, self._trainer.accelerator) for name in _AT_THETA]
        self._at_theta = [(own, name) for own, name in named if callable(getattr(own, name, None))]
        _LOG.info("%s", self._text)
        if others := checks.others(self._trainer, leaves):
            _LOG.warning("%s", others)
        if never := checks.never(self._schedule, start, state.max_steps):
            _LOG.warning("%s", never)
        elif not self._schedule.off:
            adapters = getattr(trained.bare(model), "peft_config", None)
            if text := checks.factors(leaves, adapters):
                _LOG.warning("%s", text)

    def _simulated(
        self, model: nn.Module, leaves: Mapping[str, nn.Parameter]
    ) -> tuple[SimulatedWeights, Mapping[str, Tensor]]:
        """The object that writes theta~, and theta_0."""
        base: Any = self._given or self._own
        where, climbs = self._where(model), None if self._twice else self._climbs
        if sharded(leaves):
            base = {path: base[path] for path in leaves}
            restart(model)  # a training before may have ended inside a step
            settle(model)
            return ShardWeights(model, leaves, base, where=where, climbs=climbs), base
        if self._host:
            base = storage.OnHost(base, self._pinned)
        else:
            base = {path: base[path].to(p.device) for path, p in leaves.items()}
        slices = max(1, self._schedule.period - 1) if self._host else None
        own = SimulatedWeights(leaves, base, where=where, slices=slices, once=True, climbs=climbs)
        return own, self._own if self._host else base

    def _copy(self, model: nn.Module) -> None:
        """theta_0 is a copy of the shards that accelerate has made of a model."""
        self._own, self._waits = {path: p.detach().clone() for path, p in _leaves_of(model).items()}, False

    def _recall(self, folder: Path, leaves: Mapping[str, Tensor]) -> None:
        """theta_0 of small parameters is that of the run that was stopped, whose checkpoints hold it."""
        if found := theta_0.differing(folder, self._own):
            self._own |= found
            if self._host:
                self._hold(self._own, leaves)
            told = errors.some_of(list(found))
            _LOG.info("SMAT: theta_0 of %d parameters is that of the checkpoint: %s", len(found), told)

    def _save(self, folder: Path) -> None:
        """A checkpoint was written, in this process."""
        if self._given is None and self._weights is not None and folder.is_dir():
            theta_0.write(folder, {path: self._own[path] for path in self._leaves})

    def _remember(self, record: dict[str, Any]) -> None:
        """In the state that every checkpoint holds, for a run that resumes from it."""
        state = self._trainer.state
        kept = state.stateful_callbacks
        if state.global_step:
            errors.raise_problems(checks.resume_problems(kept.get(_RECORD), record))
        kept[_RECORD] = record

    def _finish(self) -> None:
        """Training ends: what sigma was beside the update that it trained."""
        if self._weights is not None and self.draw is not None:
            line, far = checks.noise_line(float(self._schedule.sigma), self._leaves, self._given or self._own)
            _LOG.log(logging.WARNING if far else logging.INFO, "%s", line)
        self._end()

    def _end(self) -> None:
        """Drop all references to the model of a finished training."""
        self._weights, self._leaves, self._norms, self._at_theta = None, {}, [], []
        self._step, self._now, self._complete, self._summed, self._finished = -1, None, False, -1, -1
        self._scales, self._steps, self._passes = [], 0, None

    def _call_model_init(self, *args: Any, **options: Any) -> Any:
        if self._active:
            self._end()
            self._model, self._own, self._frozen, self._pinned = None, {}, {}, None
        model = self._replaced["call_model_init"](*args, **options)
        if self._active:
            self._take(model, _leaves_of(model))
        return model

    def _create_scheduler(self, *args: Any, **options: Any) -> Any:
        """The trainer calls it when its model is prepared, before it loads a checkpoint into shards."""
        if self._active and self._waits and sharded(_leaves_of(self._trainer.model)):
            self._copy(self._trainer.model)
        return self._replaced["create_scheduler"](*args, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None, *args: Any, **options: Any) -> Any:
        """The trainer resumes from a checkpoint."""
        self._resumed = None if checkpoint is None else Path(checkpoint)
        return self._replaced["_load_optimizer_and_scheduler"](checkpoint, *args, **options)

    def _training_step(self, *args: Any, **options: Any) -> Any:
        original = self._replaced["training_step"]
        if not self._active or self._within:  # of a batch that training_step splits, at the same theta~
            return original(*args, **options)
        if self._weights is None:  # a trainer without that event, or one that trains already
            self._begin()
        if self._untrained and not self._trainer.state.global_step:  # here, since callbacks may load weights too
            errors.raise_problems(checks.start_problems(self._own, self._leaves))
        self._untrained = False
        if self._origin:  # the first step of a training
            for path, p in self._leaves.items():
                _ORIGINS[p] = self._origin[path]
            self._origin = {}
        trainer, weights, step = self._trainer, self._weights, self._trainer.state.global_step
        loss, model = trainer.compute_loss, args[0] if args else options["model"]
        assert weights is not None
        if step == self._finished:
            raise ValueError(checks.finished(trainer, step))
        if step != self._step:  # the first micro-batch of an optimizer step; one draw for all
            self._check_base()
            self._check_parameters(model)
            self._step, self._now = step, self._schedule.draw(self._key, step)
            if self._now is not None:
                self.draw = self._now
            elif not self._plain and not self._twice:  # theta + e would overwrite what is copied
                weights.prepare()
        if self._twice and (self._passes is None or self._passes.step != step):  # an error ends no step
            self._passes = Passes(trainer, step)
        passes = self._passes if self._now is None else None
        self._within, before = True, self._seen()
        try:
            with ExitStack() as self._inside:
                self._inside.enter_context(self._watched(model))
                if passes is not None:
                    self._inside.enter_context(passes.first(model, args, options))
                if loss != self._compute_loss:  # replaced since attach: all that it computes is at theta~
                    self._inside.enter_context(methods.instead(trainer, "compute_loss", partial(self._loss, loss)))
                result = original(*args, **options)
                if self._inside is not None and not self._left_out(before):
                    raise ValueError(checks.no_compute_loss(trainer))
            if passes is not None and trainer.accelerator.sync_gradients:
                self._repeat(passes, model)
        except BaseException:
            self._step, self._now = -1, None  # another try begins with other weights
            renew(trainer.model)
            raise
        finally:
            self._early.close()
            self._inside, self._within = None, False
        if trainer.accelerator.sync_gradients:  # the last micro-batch: the sum is complete, clipping is next
            self._finish_step()
        return result

    def _check_parameters(self, model: nn.Module) -> None:
        now = _leaves_of(model)  # of the wrapped model, under names of its own
        if len(now) != len(self._leaves) or any(
            p is not q for p, q in zip(now.values(), self._leaves.values(), strict=True)
        ):
            found = trained.changes(self._leaves, _leaves_of(self._trainer.model), "when training began")
            found = found or ["the model that is trained is not the trainer's"]
            raise ValueError("; ".join([*found, "SMAT simulates those of the start: attach again, then train"]))
        if problems := checks.cast_problems(self._leaves, self._dtypes):
            raise ValueError("; ".join([*problems, "convert the model before it is trained"]))
        paths = list(self._leaves)
        one = paths[self._trainer.state.global_step % len(paths)]  # in its turn, so that a step's work stays small
        if hooked := checks.hooks_of({one: self._leaves[one]}):
            raise ValueError(f"{hooked[0]} was registered in training, and acts on gradients inside the backward pass")

    def _seen(self) -> tuple[dict[str, Tensor], dict[str, int], dict[str, int]]:
        """Some gradients, the versions of their parameters, and their own: what a training_step changed shows there."""
        paths = list(self._leaves)[:: max(1, len(self._leaves) // _SEEN)]
        with torch.no_grad():  # a shard is the same tensor every time
            some = {path: local(self._leaves[path]) for path in paths}
            grads = {path: local(grad) for path in paths if (grad := self._leaves[path].grad) is not None}
        return grads, tree.versions(some), tree.versions(grads)

    def _left_out(self, before: tuple[dict[str, Tensor], dict[str, int], dict[str, int]]) -> bool:
        """Whether a training_step without a loss changed nothing, as where it catches an error and skips the batch."""
        (grads, versions, grad_versions), (now, now_versions, _) = before, self._seen()
        if self._summed < 0 or versions != now_versions:
            return False
        changed = [path for path in versions if now.get(path) is not grads.get(path)]
        changed += tree.written(grads, grad_versions)
        return not checks.gradient_problems({path: self._leaves[path] for path in changed})

    @contextmanager
    def _watched(self, model: nn.Module) -> Iterator[None]:
        """An error for a forward pass with gradients before compute_loss: in a simulated step it would be at theta."""

        def before(*_: Any) -> None:
            if self._inside is not None and not self._plain and torch.is_grad_enabled():
                raise ValueError(checks.early_forward(self._trainer))

        if self._summed < 0:  # what a program does, it does in most steps: parts are watched in the first one alone
            own = {id(p) for p in self._leaves.values()}
            watched = (part for part in model.modules() if any(id(p) in own for p in part.parameters(recurse=False)))
            for part in watched:
                self._early.callback(part.register_forward_pre_hook(before).remove)
        hook = model.register_forward_pre_hook(before)
        try:
            yield
        finally:
            hook.remove()

    def _finish_step(self) -> None:
        # of another step: all batches of this one were left out
        if self._now is not None and self._weights is not None and self._summed == self._step:
            if grads := {path: p.grad for path, p in self._leaves.items() if p.grad is not None}:
                self._weights.reweight(grads, self._now)
            self._scales.append(self._now.scale)
        self._steps += 1
        self._complete, self._finished = True, self._step
        self._step, self._now = -1, None  # training may begin anew, from this step on

    def _compute_loss(self, *args: Any, **options: Any) -> Any:
        return self._loss(self._replaced["compute_loss"], *args, **options)

    def _loss(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation inside training_step
            return original(*args, **options)
        inside, self._inside = self._inside, None
        self._early.close()  # before the model may be compiled
        if inside is not None and not self._plain and self._summed != self._step:
            errors.raise_problems(checks.gradient_problems(self._leaves))
        self._summed = self._summed if inside is None else self._step
        if inside is not None and not (self._now is None and self._climbs is None) and self._weights is not None:
            # from here to the end of the backward pass; what is prepared before, and may be generated, is at theta
            self._switch(inside, self._weights, self._weights.at(self._now), still=self._now is not None)
        return original(*args, **options)

    def _repeat(self, passes: Passes, model: nn.Module) -> None:
        """The second pass of ASAM: the gradient at theta + e, e along the sum of the first pass, in its place."""
        self._inside, self._passes, self._finished = None, None, passes.step
        assert self._weights is not None
        assert self._climbs is not None
        if all(p.grad is None for p in self._leaves.values()):  # all batches were left out
            return
        for p in checks.beside(self._trainer, self._leaves):
            p.grad = None
        with ExitStack() as inside:
            self._switch(inside, self._weights, self._weights.climbed(rho=self._climbs.rho), still=True)
            passes.second(model, self._replaced["training_step"])

    def _switch(
        self, inside: ExitStack, weights: SimulatedWeights, block: AbstractContextManager[None], *, still: bool
    ) -> None:
        """Enter a block in which the parameters do not hold theta. Args: still: batch norms keep their statistics."""
        for owner, name in self._at_theta:
            inside.enter_context(methods.instead(owner, name, methods.Away(weights, owner, name)))
        inside.enter_context(block)
        inside.enter_context(trained.still(self._norms if still else []))

    def _log(self, logs: dict[str, float], *args: Any, **options: Any) -> Any:
        if self._active and self._steps and "loss" in logs and not self._within:  # not what a training_step logs
            logs = {**logs, "smat/simulated": len(self._scales) / self._steps}
            if self._scales:
                logs["smat/alpha"] = torch.stack(self._scales).mean().item()
            self._scales, self._steps = [], 0
        return self._replaced["log"](logs, *args, **options)

    def _before_update(self) -> None:
        if not self._complete:
            raise ValueError(checks.no_training_step(self._trainer))


# over 60 lines: its docstring explains every argument
def attach(
    trainer: Any,
    *,
    key: Tensor,
    base: Params | Literal["host"] | None = None,
    where: Where | None = None,
    alpha_min: float = 0.2,
    drop_prob: float = 0.5,
    sigma: float = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
    alpha_max: float = 1.0,
    factors: Mapping[str, float] | None = None,
    antithetic: bool = False,
    climb: TrainerClimb | None = None,
    rho: float | None = None,
) -> Attached:
    r"""Train by SMAT in a ``transformers.Trainer``, which still does everything else.

    Optimizer step s, counted from 0, with ``(s + 1) % period == 0`` runs forward and backward of all its micro-batches
    at ``theta~ = theta_0 + alpha m (.) (theta - theta_0) + epsilon`` and multiplies the accumulated gradient by
    ``alpha m`` before it is clipped (Eqs. smat-state, smat-gradient). The parameters hold theta~ from ``compute_loss``
    to the end of ``training_step`` alone: batches are prepared and generated, the optimizer, evaluation, saving and
    error handling run at theta, ``evaluate``, ``save_model`` and ``generate`` also if they are called in between. The
    draw of step s is ``draw(fold_in(key, s), ...)``, so that a resumed run has the same draws. The trainer's logs gain
    ``smat/simulated``, the share of simulated steps since the last log, and ``smat/alpha``, their mean alpha;
    ``grad_norm`` there is that of the reweighted gradient.

    With ``climb`` the parameters hold ``theta + e`` in clean steps, for as long as theta~ in simulated ones, where
    ``e = rho theta^2 (.) d / (|| |theta| (.) d || + 1e-12)`` and d is the optimizer's momentum before the step, so that
    e is 0 in the first one. With Scale, Mask and Perturb off (alpha_min 1, drop_prob 0, sigma 0) this is MSAM. With
    climb "asam" d is the gradient of the step: its micro-batches run at theta first, then all of them once more at
    theta + e, whose gradient takes the place of the first one; batches, random numbers and the trainer's counters are
    those of the first pass, and so are the loss and the metrics that are logged.

    The parameters are those of the model when ``train()`` begins (``model_init`` and hyperparameter search are fine),
    compared again before every step. Attaching again replaces the earlier SMAT; without base, its theta_0 stays.

    Args:
        trainer: with its model in place; wrapped models (DDP), FSDP2 shards, accumulation, checkpointing, mixed
            precision and compiled models are fine.
        key: the run key, int64 (2,).
        base: theta_0 by parameter name; None: a copy of the trainable weights as they are now (before a checkpoint is
            resumed, these are the pretrained ones), as ``model_init`` makes them, or as accelerate shards them when
            training begins; "host": the same copy in (pinned) host memory, bit-identical, moved during clean steps into
            the one buffer that becomes theta~; not of shards.
        where: the masked set; None: `smat_fn.where.block_linear` of the model.
        alpha_min, drop_prob, sigma, period, noise, alpha_max, factors, antithetic: as of `smat_fn.Schedule`.
        climb: None; "clean": clean steps climb along the momentum of the trainer's optimizer; "both": simulated steps
            too, whose theta~ is that of theta + e; "asam": clean steps take two passes and climb along their gradient.
        rho: radius of the climb, >= 0; None: 0.5, of "asam" 0.25.

    Returns:
        A handle with ``detach()``.

    Raises:
        ValueError: lists bad options, a base that does not match or shares memory with the model, parameters that
            share memory, an empty masked set with ``drop_prob > 0``, shards not of FSDP2, optimizers that step in the
            backward pass or lack a parameter, those without a momentum where it is climbed along, trainers with a loop
            of their own, or trained before; in training, other parameters, weights that changed before its first step,
            a base that was written to, or another run.

    Source: paper sections 4.1 to 4.3, for "asam" 5.1 (`smat_fn.mat.asam`); alpha_max, factors, antithetic and the
    other climbs (`smat_fn.mat.msam`) are not in it.
    Memory: theta_0 and theta~ beside the model; theta~ alone with "host", which is not copied ahead where clean steps
    climb; theta + e takes the memory of theta~. Of shards, those of this process.
    """
    hyper: dict[str, Any] = {"alpha_min": alpha_min, "drop_prob": drop_prob, "sigma": sigma, "period": period}
    hyper |= {"noise": noise, "alpha_max": alpha_max, "factors": factors, "antithetic": antithetic}
    problems = errors.problems_of(Schedule, **hyper) + checks.key_problems(key)
    problems += errors.problems_of(tree.predicate, where) + ascent.climb_problems(climb, rho, get_args(TrainerClimb))
    if isinstance(base, str) and base != "host":
        problems.append(f"base is {base!r}, must be 'host', theta_0 by parameter name, or None")
    problems += checks.model_problems(trainer)
    errors.raise_problems(problems + checks.class_problems(trainer))
    schedule = Schedule(**hyper)
    errors.raise_problems(ascent.clean_problems(climb, period=schedule.period, off=schedule.off))
    earlier, origin = vars(trainer).get(_HANDLE), dict[str, Tensor](_leaves_of(trainer.model))
    handle = Attached(trainer, key, schedule, base=base, where=where, climb=climb, rho=rho)
    known = dict[str, Tensor]()
    before = None if earlier is None or earlier._model is None else trained.bare(earlier._model)
    if earlier is not None and before is trained.bare(trainer.model) and earlier._own:  # compiled since, perhaps
        known = earlier._frozen | earlier._own
    if known and all(known[path].shape == p.shape for path, p in origin.items() if path in known):
        # else a notebook's cell run again would take trained weights for theta_0
        handle._frozen = {path: leaf for path, leaf in known.items() if path not in origin}
        origin = {path: known.get(path, p) for path, p in origin.items()}
    elif base is None or isinstance(base, str):
        errors.raise_problems(checks.trained_problems(trainer, origin, _ORIGINS))
    handle._attach(origin)
    if known and earlier is not None:
        handle._untrained &= earlier._untrained
    return handle


def _leaves_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, those of FSDP2 as shards."""
    reshard(model)
    return trained.leaves_of(model)


def _callback(handle: Attached) -> Any:
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Begin and end of a training, and its checkpoints; no update without a step of ours."""

        def __init__(self) -> None:
            self.handle = handle  # copied with the trainer, as a variable of this function would not be

        def on_train_begin(self, *args: Any, **options: Any) -> None:
            self.handle._begin()

        def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
            self.handle._before_update()

        def on_step_end(self, *args: Any, **options: Any) -> None:
            self.handle._before_update()
            self.handle._complete = False

        def on_save(self, args: Any, state: Any, *others: Any, **options: Any) -> None:
            if args.should_save:
                self.handle._save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        def on_train_end(self, *args: Any, **options: Any) -> None:
            self.handle._finish()

    return Watch()
