"""Train the experts of a suite: one loop for every method, checkpoints with a log each."""

import importlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from .. import checkpoint, optim, random, tree
from ..config import MethodConfig, Training, settings
from ..data import Suite
from ..data.suite import check_member
from ..grad import ModuleLoss
from ..types import Batch, LossFn, Method, Optimizer, Params, Where

OnStep = Callable[[int, Any], None]
BASE = "base"


def make_optimizer(training: Training, where: Where | None = None) -> Optimizer:
    """The optimizer and schedule of a training configuration, with torch's fused kernels.

    Args: where: the masked set, whose matrices Muon takes.
    Raises: ValueError for numbers that the optimizer cannot use.
    """
    assert training.steps is not None, "budget gives them"
    schedule = optim.cosine if training.schedule == "cosine" else lambda lr, steps: optim.constant(lr)
    lr, decay = schedule(training.lr, training.steps), training.weight_decay
    if (training.optimizer == "muon") != (training.muon_lr is not None):
        raise ValueError(
            f"muon_lr is {training.muon_lr} for {training.optimizer}: muon needs one, the others have none"
        )
    if training.muon_lr is not None:
        rest, muon_lr = optim.adamw(lr, weight_decay=decay, fused=True), schedule(training.muon_lr, training.steps)
        return optim.muon(muon_lr, rest=rest, where=where, weight_decay=decay)
    if training.optimizer == "adamw":
        return optim.adamw(lr, weight_decay=decay, fused=True)
    if decay:
        raise ValueError(f"weight_decay is {decay}, adam has none: take optimizer adamw, or 0")
    return optim.adam(lr, fused=True)


def budget(suite: Suite, task: str, training: Training) -> Training:
    """The training of one task, its steps computed from its epochs where they are not given.

    Raises: ValueError for rows of the task that the suite cannot use.
    """
    per_epoch = None if suite.epoch_steps is None else suite.epoch_steps(task)
    if training.steps is not None:
        return replace(training, epochs={})
    if per_epoch is None:
        raise ValueError(f"suite {suite.name!r} has no epochs: give steps")
    epochs = training.epochs[task]
    return replace(training, steps=epochs * per_epoch, epochs={task: epochs})


def build_method(
    method: MethodConfig,
    optimizer: Optimizer,
    loss_fn: LossFn,
    base: Params,
    *,
    where: Where | None,
    max_grad_norm: float | None,
) -> Method:
    """The training method on a loss; it donates its state's buffers from step to step."""
    module = importlib.import_module(f"..mat.{method.module}", __package__)
    return module.build(
        loss_fn, optimizer, base, where=where, max_grad_norm=max_grad_norm, donate=True, **settings(method)
    )


def train_expert(
    suite: Suite,
    task: str,
    method: MethodConfig,
    training: Training,
    *,
    seed: int,
    on_step: OnStep | None = None,
) -> Params:
    """One expert, from the suite's base.

    The run key is ``fold_in(key(seed), task)``: batches and draws depend on it and the step alone, so that all methods
    see the same data in the same order.

    Args: on_step: called as ``on_step(step, info)`` after every step.
    """
    key = random.fold_in(random.key(seed), task)
    training = budget(suite, task, training)
    assert training.steps is not None
    run = build_method(
        method,
        make_optimizer(training, suite.where),
        suite.loss_fn(task),
        suite.base,
        where=suite.where,
        max_grad_norm=training.max_grad_norm,
    )
    state = run.init(suite.base)
    for step in range(training.steps):
        state, info = run.update(key, state, suite.batch(task, key, step))
        if on_step is not None:
            on_step(step, info)
    return state.params


def train_run(
    suite: Suite,
    method: MethodConfig,
    training: Training,
    *,
    seed: int,
    tasks: Sequence[str],
    out: Path,
    label: str | None = None,
    log_every: int = 1,
    overwrite: bool = False,
) -> list[Path]:
    """Train one expert per task into ``out/<task>``, its log beside it (``.log.jsonl``), the base in ``out/base``.

    Args: label: the name of this run in tables, by default the method's in capitals; log_every: steps between lines.
    Returns: the experts' folders.
    Raises: ValueError as `check_run`, and for experts of another base in ``out``; at a logged step whose loss is not
        finite, naming it.
    """
    origin = checkpoint.fingerprint(suite.base)
    check_run(method, training, known=suite.tasks, tasks=tasks, out=out, log_every=log_every, overwrite=overwrite)
    facts = {
        "label": label or method.name.upper(),
        "method": method.name,
        "hyperparameters": settings(method),
        "seed": seed,
        "suite": dict(suite.recipe),
        "base_fingerprint": origin,
    }
    budgets = {task: budget(suite, task, training) for task in tasks}  # before the first one is trained
    _write_base(out / BASE, suite, origin, overwrite=overwrite)
    folders = []
    for task, own in budgets.items():
        started = time.perf_counter()
        with _log(out / f"{task}.log.jsonl", task, own, log_every) as on_step:
            params = train_expert(suite, task, method, training, seed=seed, on_step=on_step)
        tree.check_finite(tree.flatten(params), f"the {task} expert")
        seconds = round(time.perf_counter() - started, 3)
        numbers = {name: value for name, value in asdict(own).items() if name != "epochs" or value}
        manifest = checkpoint.describe(params, kind="expert", task=task, **facts, training=numbers, seconds=seconds)
        checkpoint.save_expert(out / task, params, manifest, overwrite=overwrite)
        folders.append(out / task)
    return folders


def check_run(
    method: MethodConfig,
    training: Training,
    *,
    known: tuple[str, ...],
    tasks: Sequence[str],
    out: Path,
    log_every: int,
    overwrite: bool,
) -> None:
    """Raises: ValueError that lists bad numbers, tasks not in ``known`` or named twice, and folders that exist."""
    steps = training.steps
    problems = [f"steps is {steps}, must be at least 1"] if steps is not None and steps < 1 else []
    if steps is None:
        for task in dict.fromkeys(tasks):
            if (epochs := training.epochs.get(task)) is None:
                problems.append(f"task {task!r} has no number of epochs: give --epochs or --steps")
            elif epochs < 1:
                problems.append(f"epochs of {task} is {epochs}, must be at least 1")
    problems += [f"log_every is {log_every}, must be at least 1"] if log_every < 1 else []
    optimizer, limit = optim.adam(0.0), training.max_grad_norm
    try:
        optimizer = make_optimizer(replace(training, steps=max(steps or 1, 1)))
    except ValueError as error:
        problems.append(str(error))
    problems += refusals(
        build_method, method, optimizer, ModuleLoss(nn.Module(), _no_loss), {}, where=None, max_grad_norm=limit
    )
    problems += ["no tasks: name at least one"] if not tasks else []
    problems += [f"task {task!r} is named twice" for task in dict.fromkeys(tasks) if tasks.count(task) > 1]
    for task in dict.fromkeys(tasks):
        problems += refusals(check_member, "task", task, known)
        problems += refusals(checkpoint.refuse_existing, out / task, overwrite=overwrite)
    tree.raise_problems(problems)


def refusals(check: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """What ``check(*args, **options)`` has to say against them: the text of its ValueError, or nothing."""
    try:
        check(*args, **options)
    except ValueError as error:
        return [str(error)]
    return []


def _no_loss(module: nn.Module, batch: Batch) -> tuple[Any, None]:
    raise AssertionError("built to check its options, not to run")


def _write_base(path: Path, suite: Suite, fingerprint: str, *, overwrite: bool) -> None:
    if path.exists() and checkpoint.load_manifest(path).get("fingerprint") == fingerprint:
        return
    if path.exists() and not overwrite:
        raise ValueError(
            f"{path} is another base than suite {suite.name!r} gives: choose another --out, or --overwrite"
        )
    manifest = checkpoint.describe(suite.base, kind="base", suite=dict(suite.recipe))
    checkpoint.save_expert(path, suite.base, manifest, overwrite=True)


@contextmanager
def _log(path: Path, task: str, training: Training, every: int) -> Iterator[OnStep]:
    """A JSON line every few steps, and a progress bar on a terminal."""
    from tqdm import tqdm

    total = training.steps
    assert total is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file, tqdm(total=total, desc=f"train {task}", disable=None, leave=False) as bar:
        started = time.perf_counter()

        def on_step(step: int, info: Any) -> None:
            bar.update()
            if (step + 1) % every and step + 1 < total:
                return
            row = {
                "step": step,
                "loss": float(info.loss),
                "grad_norm": float(info.grad_norm),
                "simulated": bool(getattr(info, "simulated", False)),
                "scale": float(getattr(info, "scale", 1.0)),
                "seconds": round(time.perf_counter() - started, 4),
            }
            if not math.isfinite(row["loss"]):
                raise ValueError(f"loss of {task} is {row['loss']} at step {step}: lower the learning rate")
            file.write(json.dumps(row) + "\n")
            kind = "simulated" if row["simulated"] else "clean"
            bar.set_postfix_str(f"loss {row['loss']:.3f}, grad {row['grad_norm']:.2f}, {kind}", refresh=False)

        yield on_step


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return math.fsum(values) / len(values)
