"""The training loop of one expert, the same for every method."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import lora, mat, optim, random, tree
from ...config import MethodConfig, Training, settings
from ...data.batching import split_rows
from ...grad import ModuleLoss, compiled, with_master_weights
from ...grad.tangent import Linearised
from ...lora.dropout import chain
from ...mat.offload import storage
from ...parallel import ALONE, Sharded, World, frozen_shards, share
from ...suites import Suite
from ...types import Batch, LossFn, Method, Optimizer, Params, PerStep, Precision, Where
from ...where import matrices
from . import resuming
from .dev_curve import DevCurve, Tracked, curve_of
from .logs import Log
from .memory import offloaded, offloads_base, on_gpu
from .resuming import Interrupted, Saver, Stop, restore_all
from .settings import Place
from .variants import adapters_of, arrange, masked_beside, offload_of

OnStep = Callable[[int, Any], None]
OnState = Callable[[int, Callable[[], Params], Callable[[], AbstractContextManager[Params]]], bool]
DTYPES: Mapping[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "mixed": torch.float32}


def schedules(training: Training) -> dict[str, PerStep]:
    """The learning rates by name: ``lr``, and ``muon_lr`` where there is one. Raises: ValueError for bad numbers."""
    steps, warmup = training.length, training.warmup
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup is {warmup}, must lie in [0, steps = {steps}]")
    decaying = {"cosine": optim.cosine, "linear": optim.linear}
    given = {"lr": training.lr, "muon_lr": training.muon_lr}
    return {
        name: decaying[training.schedule](lr, steps, warmup=warmup)
        if training.schedule in decaying
        else optim.constant(lr, warmup=warmup)
        for name, lr in given.items()
        if lr is not None
    }


def make_optimizer(training: Training, where: Where | None = None) -> Optimizer:
    """The optimizer and schedule of a training configuration, with torch's fused kernels, and its average over steps.

    Args: where: the masked set, whose matrices Muon takes.
    Raises: ValueError for numbers that the optimizer cannot use.
    """
    optimizer = _optimizer(training, where)
    if training.average is None:
        return optimizer
    return optim.averaged(optimizer, optim.averaging(training.average, training.length))


def _optimizer(training: Training, where: Where | None) -> Optimizer:
    rates, decay = schedules(training), training.weight_decay
    if (training.optimizer == "muon") != (training.muon_lr is not None):
        raise ValueError(
            f"muon_lr is {training.muon_lr} for {training.optimizer}: muon needs one, the others have none"
        )
    if training.decay_matrices and not decay:
        raise ValueError("decay_matrices requires a weight decay, and optimizer adamw or muon")
    decays = matrices if training.decay_matrices else None
    if training.optimizer == "muon":
        rest = optim.adamw(rates["lr"], weight_decay=decay, decays=decays, fused=True)
        return optim.muon(rates["muon_lr"], rest=rest, where=where, weight_decay=decay)
    if training.optimizer == "adamw":
        return optim.adamw(rates["lr"], weight_decay=decay, decays=decays, fused=True)
    if decay:
        raise ValueError(f"weight_decay is {decay}, adam has none: choose optimizer adamw, or weight_decay 0")
    return optim.adam(rates["lr"], fused=True)


def budget(suite: Suite, task: str, training: Training) -> Training:
    """The training of one task, its steps computed from its epochs where they are not given.

    Raises: ValueError for rows of the task that the suite cannot use.
    """
    per_epoch = None if suite.epoch_steps is None else suite.epoch_steps(task)
    if training.steps is not None:
        return replace(training, epochs={})
    if per_epoch is None:
        raise ValueError(f"suite {suite.name!r} is trained by steps, not by epochs: give `steps`")
    epochs = training.epochs[task]
    return replace(training, steps=epochs * per_epoch, epochs={task: epochs})


# over 60 lines: its docstring explains every argument
def train_expert(
    suite: Suite,
    task: str,
    method: MethodConfig,
    training: Training,
    *,
    seed: int,
    on_step: OnStep | None = None,
    on_state: OnState | None = None,
    log: Log | None = None,
    saver: Saver | None = None,
    stop: Stop | None = None,
    world: World = ALONE,
    curve: DevCurve | None = None,
    offload: Place = "auto",
) -> Params:
    """Train one expert from the suite's base; returns it in base's dtypes, with ``training.lora`` its adapters alone.

    With ``training.dev`` the parameters of the best evaluation are returned, and training may end early. Of several
    processes the first one returns an expert; others may return shards of it, or None.

    The run key is ``fold_in(key(seed), task)``: batches and draws depend on it and the step alone, so that all methods
    see the same data in the same order, and a run can resume from any step. Precision "bf16" and "fp32" train a base
    cast to that dtype, "mixed" float32 master weights (`with_master_weights`); a batch is split by the suite into
    ``accumulate`` micro-batches, weighted so that the mean over the whole batch comes out.

    Args:
        on_step: called as ``on_step(step, info)`` after every step.
        on_state: called as ``on_state(steps done, moments, expert)`` after every step, in every process or in none;
            ``moments()`` gives the second moments, ``with expert() as params`` what training would return if it ended
            there, with the suite's base in its place. Says whether that took time that is not training's.
        log: records every step.
        saver: resumes from its checkpoint if there is one, and saves the next ones.
        stop: read before every step.
        world: the processes that share every batch, each of which calls this.
        curve: collects the evaluations of ``training.dev``, instead of one that is left behind.
        offload: where SMAT keeps base and simulated weights (`smat_fn.scripts.train.settings`); no bit depends on it.

    Raises:
        ValueError: for a loss that is not finite, from the log.
        Interrupted: when asked to stop.
    """
    key = random.fold_in(random.key(seed), task)
    training, stop = budget(suite, task, training), stop or Stop()
    run, state, kept = _built(suite, task, method, training, key, world, offload)
    whole: Callable[[Any], Any] = run.whole if isinstance(run, Sharded) else lambda state: state
    if curve is None and training.dev is not None:
        curve = curve_of(suite, task, training, method, adapters_of(loss_of(suite, task, training), training))
    if saver is not None and world.agree(saver.path.exists()):  # the first process's disk decides
        best = partial(_expert, whole, state, suite, training)
        state = _restored(saver, state, curve, best, world, run if isinstance(run, Sharded) else None)
    with nullcontext(nullcontext) if kept is None else offloaded(suite.base, kept) as present:
        # of whole weights its names are read alone
        beside = present if training.lora is not None and world.leads else nullcontext
        if log is not None:
            if state.step < training.length:
                text = f"before step {state.step + 1} of {task}: continue with --resume"
                with stop.at_once(text, world):
                    suite.batch(task, key, state.step)  # what a suite prepares for its first batch is not training time
            log.watch.skip()
        for step in range(state.step, training.length):
            if curve is not None and curve.ended():
                break
            if number := world.largest(stop.signal or 0):
                raise _interrupted(number, whole(state), task, log, saver, world, curve)
            batch = suite.batch(task, key, step)
            state, info = run.update(key, state, _own_part(batch, suite, training, world))
            if log is not None:
                log.step(step, info, batch)
            if on_step is not None:
                on_step(step, info)
            moments, expert = partial(_moments, whole, state), partial(_beside, whole, state, suite, training, beside)
            if on_state is not None and on_state(step + 1, moments, expert) and log is not None:
                log.watch.skip()
            if curve is not None and curve.due(step + 1, training.length):
                with expert() as params:
                    measured = curve.add(step + 1, params, world)
                if log is not None:
                    log.note(step, **measured)
            if saver is None or step + 1 == training.length:
                continue
            due = saver.due(step + 1)
            if world.agree(due) if isinstance(run, Sharded) else due:  # of shards all processes gather, or none
                _save(saver, whole(state), log, curve)
    found = _expert(whole, state, suite, training) if curve is None else curve.best
    if not isinstance(run, Sharded) or not world.leads:
        return found
    return {path: leaf.to(suite.base[path].device) for path, leaf in found.items()}


def _expert(whole: Callable[[Any], Any], state: Any, suite: Suite, training: Training) -> Params:
    """The parameters that training returns if it ends at a state; of shards whole ones in the first process alone."""
    return whole(_result(state, suite=suite, training=training))


@contextmanager
def _beside(
    whole: Callable[[Any], Any],
    state: Any,
    suite: Suite,
    training: Training,
    present: Callable[[], AbstractContextManager[None]],
) -> Iterator[Params]:
    """`_expert`, while the suite's base is present."""
    params = _expert(whole, state, suite, training)
    with present():
        yield params


def _moments(whole: Callable[[Any], Any], state: Any) -> Params:
    """The second moments of a state, as `_expert`."""
    return whole(optim.second_moments(state.opt_state))


def _result(state: Any, *, suite: Suite, training: Training) -> Params:
    """The parameters of a state as they are saved: the last ones, or their average over steps, in base's dtypes.

    Before the first step that counts in the average, these are the last ones too, and not those that training began at.
    """
    params = state.params
    if training.average is not None:
        weight = optim.averaging(training.average, training.length)
        if any(weight(step) for step in reversed(range(state.step))):
            params = tree.tree_map(lambda mean, leaf: mean.to(leaf.dtype), state.opt_state.average, params)
    if training.lora is not None:
        return params
    return tree.tree_map(lambda leaf, origin: leaf.to(origin.dtype), params, suite.base)


def _save(saver: Saver, state: Any, log: Log | None, curve: DevCurve | None) -> None:
    """Save a training checkpoint, in the first process only: the one with a log."""
    if log is None:
        return
    if curve is None or not curve.points:
        saver.save(state, log.progress())
    else:
        saver.save(Tracked(state, curve.best), {**log.progress(), "dev": curve.points})
    log.watch.skip()


def _restored(
    saver: Saver, state: Any, curve: DevCurve | None, best: Callable[[], Params], world: World, shards: Sharded | None
) -> Any:
    """The state of a training checkpoint; the evaluations that it holds go to the curve."""
    last = world.agree(resuming.read(saver.path))
    if curve is None or not (points := last.progress.get("dev")):
        return restore_all(saver.path, state, world, shards)
    own = tree.tree_map(lambda leaf: leaf.detach().clone(), best())
    found = restore_all(saver.path, Tracked(state, own), world, shards)
    curve.resume(points, found.best if world.leads else None)
    return found.state


def _built(
    suite: Suite, task: str, method: MethodConfig, training: Training, key: Tensor, world: World, place: Place
) -> tuple[Method | Sharded, Any, storage.Host | None]:
    """The method on one task, its first state, and base in host memory where the device need not hold base."""
    if training.shard:
        gc.collect()  # cycles of FSDP2 hold the shards of the training before
    loss_fn, base = loss_of(suite, task, training), suite.base
    adapters = adapters_of(loss_fn, training)
    frozen = adapters is not None and training.shard
    if frozen:
        loss_fn = _on_frozen_shards(loss_fn, base, training.precision)
    if adapters is not None and adapters.dropout:
        assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
        loss_fn = lora.with_dropout(loss_fn, base, adapters, adapters.dropout)
    if training.compiled:
        assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
        loss_fn = compiled(loss_fn)  # here alone: dev scores and probes run the module as it is
    dtype = None if training.precision is None else DTYPES[training.precision]
    # shards are cast block by block
    params = _unread(base, dtype) if frozen else base if dtype is None or training.shard else tree.cast(base, dtype)
    if training.precision == "bf16" and _frozen_in_float32(loss_fn):
        raise ValueError(f"precision bf16: suite {suite.name} keeps frozen parameters in float32, take mixed or fp32")
    if training.precision == "mixed":
        loss_fn = with_master_weights(loss_fn)
    else:
        base = params
    kept: storage.Host | None = None
    offload = offload_of(method, training, place, suite.base)
    reads_base = any(isinstance(loss, Linearised) for loss in chain(loss_fn))  # whatever the method
    if adapters is None and not reads_base and offloads_base(method, suite.base, offload):
        if offload is None:
            kept, base = _on_host(suite.base), storage.OnHost(base)  # of which only names and shapes are read
        else:
            host = storage.runtime_for(next(iter(base.values())).device).pin(base)
            kept = host if all(base[path] is leaf for path, leaf in suite.base.items()) else _on_host(suite.base)
            base = storage.OnHost(base, host)
    optimizer = make_optimizer(training, masked_beside(adapters, suite.where) if adapters else suite.where)
    if training.shard:
        kept = _on_host(suite.base) if on_gpu(suite.base) else None
    if training.shard and not frozen:
        assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
        options = {"max_grad_norm": training.max_grad_norm, **settings(method)}
        shards = Sharded(loss_fn, optimizer, mat.build_of(method), where=suite.where, **options)
        return shards, shards.init(params, dtype), kept
    start = params if adapters is None else lora.init(random.fold_in(key, "lora"), params, adapters)
    run = arrange(
        method, training, optimizer, loss_fn, base if adapters is None else params, start, adapters, suite.where, world,
        offload,
    )  # fmt: skip
    return run, run.init(start), kept


def _on_frozen_shards(loss_fn: LossFn, base: Mapping[str, Tensor], precision: Precision | None) -> ModuleLoss:
    """The loss of a copy of the module on shards of base, as adapters of this precision need it."""
    assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
    if precision == "mixed":
        return frozen_shards(loss_fn, base, torch.bfloat16)
    return frozen_shards(loss_fn, base, stored=None if precision is None else DTYPES[precision])


def _unread(base: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Leaves of base's names, shapes and devices, and NaN in place of values, of which there is one in memory."""
    return {
        path: leaf.new_full((), torch.nan, dtype=dtype or leaf.dtype).expand(leaf.shape) for path, leaf in base.items()
    }


def loss_of(suite: Suite, task: str, training: Training) -> LossFn:
    """The loss that a task is trained on: with ``training.dropout`` that of the model in train mode.

    Raises: ValueError for a model that has nothing to drop.
    """
    loss_fn = suite.loss_fn(task)
    if not training.dropout:
        return loss_fn
    assert isinstance(loss_fn, ModuleLoss), "a suite's losses are of modules"
    if type(loss_fn).within is not ModuleLoss.within:
        raise ValueError(f"dropout is not available with the {type(loss_fn).__name__} model of {task}: leave one out")
    if not has_dropout(loss_fn.module):
        raise ValueError(
            f"dropout: the model of {task} has none above 0 (nothing in its modules or its configuration says so): "
            "leave the option out, or give a model with dropout"
        )
    return loss_fn.in_training()


def has_dropout(module: nn.Module) -> bool:
    """Whether a dropout layer, or a number of a module whose name says "drop", is above 0."""
    return any(
        isinstance(value, float) and value > 0
        for part in module.modules()
        for name, value in vars(part).items()
        if "drop" in name.lower() or (name == "p" and "Drop" in type(part).__name__)
    )


def _own_part(batch: Batch, suite: Suite, training: Training, world: World) -> Any:
    """The micro-batches of this process; the batch itself where there is one process and one micro-batch."""
    split = suite.split or split_rows
    if world.size > 1:
        return share(split(batch, training.accumulate * world.size), rank=world.rank, size=world.size)
    return split(batch, training.accumulate) if training.accumulate > 1 else batch


def _on_host(leaves: Mapping[str, Tensor]) -> storage.Host:
    return storage.Unpinned({path: leaf.to("cpu", copy=True) for path, leaf in leaves.items()})


def _interrupted(
    number: int, state: Any, task: str, log: Log | None, saver: Saver | None, world: World, curve: DevCurve | None
) -> Interrupted:
    text = f"stopped by signal {number} after {state.step} steps of {task}"
    if saver is not None and log is not None:
        _save(saver, state, log, curve)
        text += f"; {saver.where() or 'nothing could be saved'}: continue with --resume"
    # torchrun ends the others when one is gone: nobody leaves before the first process has written
    return Interrupted(number, world.agree(text))


def _frozen_in_float32(loss_fn: LossFn) -> bool:
    if not isinstance(loss_fn, ModuleLoss):  # a plain function has no parameters but those that it is given
        return False
    return any(p.dtype == torch.float32 for p in loss_fn.module.parameters() if not p.requires_grad)
