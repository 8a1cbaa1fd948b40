"""Train the experts of a suite: checkpoints with a log each, and runs that go on where they were interrupted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import stdev
from typing import Any

from ... import checkpoint, errors, lora, random, simulation, tree
from ...config import MethodConfig, Smat, Training, settings
from ...lora import Lora
from ...parallel import ALONE, World
from ...suites import Suite
from ...types import Params
from . import snapshots
from .checks import check_run
from .logs import Log
from .loop import budget, schedules, train_expert
from .memory import reset_peak
from .snapshots import Saver, Stop
from .stopwatch import device_of
from .variants import adapters_of


def train_run(
    suite: Suite,
    method: MethodConfig,
    training: Training,
    *,
    seed: int,
    tasks: Sequence[str],
    out: Path,
    label: str | None = None,
    preset: str | None = None,
    log_every: int = 1,
    overwrite: bool = False,
    resume: bool = False,
    save_every_steps: int | None = None,
    save_every_minutes: float | None = None,
    log_to: Sequence[str] = (),
    probe: int = 0,
    probe_at: Smat | None = None,
    stop: Stop | None = None,
    world: World = ALONE,
    report: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Train one expert per task into ``out/<task>``, its log beside it (``.log.jsonl``), the base in ``out/base``.

    Args: label: the name of this run in tables, by default the method's in capitals; preset: that the numbers are of,
        for the manifests; log_every: steps between lines;
        resume: leave finished experts alone and go on from the snapshot of an unfinished one, to the same bits;
        save_every_steps, save_every_minutes: when to take one (``out/<task>.resume.safetensors``, the last one is kept
        until the expert is finished); log_to: trackers, names of `trackers.PACKAGES`; probe: number of simulated
        states at whose dev loss the finished expert is probed, with the strengths of ``probe_at``; stop: asks to save
        and end; world: the processes that train together, all of which call this, the first one writes; report: gets a
        line for what is not trained from its start.
    Returns: the experts' folders.
    Raises: ValueError as `check_run`, for experts of another base in ``out``, and for ones of other settings that a
        resumed run finds there; at a logged step that meets a loss that is not finite, naming it; `Interrupted`.
    """
    origin = checkpoint.fingerprint(suite.base)
    if world.leads:  # the others would meet what it writes
        check_run(
            method,
            training,
            known=suite.tasks,
            tasks=tasks,
            out=out,
            log_every=log_every,
            overwrite=overwrite,
            resume=resume,
            save_every_steps=save_every_steps,
            save_every_minutes=save_every_minutes,
            log_to=log_to,
            probe=probe,
            world=world,
        )
    if probe and (probe_at is None or suite.dev_batches is None):
        raise ValueError(f"probe is {probe}: it needs strengths (probe_at), and a suite with dev_batches")
    facts = {
        "label": label or method.name.upper(),
        "method": method.name,
        "hyperparameters": settings(method),
        "seed": seed,
        "suite": dict(suite.recipe),
        "base_fingerprint": origin,
    }
    # before the first one is trained
    budgets = {task: budget(suite, task, training) for task in tasks}
    adapters = {task: adapters_of(suite.loss_fn(task), training) for task in tasks}
    wanted = {task: _as_json({**facts, "training": _numbers(own)}) for task, own in budgets.items()}
    if resume and world.leads:
        _check_resumed(out, wanted)
    if world.leads:
        _write_base(out / checkpoint.BASE, suite, origin, overwrite=overwrite)
    device, folders = device_of(suite.base), []
    more: dict[str, Any] = {"processes": world.size} if world.size > 1 else {}
    more |= {} if preset is None else {"preset": preset}
    for task, own in budgets.items():
        folders.append(out / task)
        saver = Saver(
            snapshots.path_of(out, task),
            wanted[task],
            every_steps=save_every_steps,
            every_minutes=save_every_minutes,
        )
        finished = resume and (out / task).exists()
        if world.leads and (finished or not resume):
            saver.discard()
        finished, last = world.agree((finished, snapshots.read(saver.path)))
        if finished:
            report(f"{task}: finished before")
            continue
        if last is not None:
            report(f"{task}: goes on after step {last.step} of {own.steps}")
        if not world.leads:
            train_expert(suite, task, method, own, seed=seed, saver=saver, stop=stop, world=world)
            continue
        reset_peak(device)
        assert own.steps is not None
        with Log(
            out / f"{task}.log.jsonl",
            task=task,
            total=own.steps,
            every=log_every,
            device=device,
            rates=_rates(own),
            rows=_rows(suite, task, seed),
            start=0 if last is None else last.step,
            progress=None if last is None else last.progress,
            trackers=log_to,
            run=f"{facts['label']}-{task}-seed{seed}",
            config=wanted[task],
        ) as log:
            try:
                params = train_expert(suite, task, method, own, seed=seed, log=log, saver=saver, stop=stop, world=world)
                tree.check_finite(tree.flatten(params), f"the {task} expert")
            except ValueError as error:
                raise ValueError("; ".join(filter(None, (str(error), saver.where())))) from error
            finally:
                saver.wait()  # after an exception too: nothing appears later, in a run that begins anew
            full = _weights(params, suite, adapters[task])
            cost = log.cost()  # before the probe, whose memory and time are not those of training
            probed = {} if not probe or probe_at is None else {"probe": _probe(suite, task, full, probe, probe_at)}
            log.finish(**cost, **{f"probe_{name}": probed["probe"][name] for name in ("clean", "simulated") if probed})
        manifest = checkpoint.describe(
            full, kind="expert", task=task, **facts, training=_numbers(own), **cost, **probed, **more
        )
        if (own_adapters := adapters[task]) is None:
            checkpoint.save_expert(out / task, params, manifest, overwrite=overwrite)
        else:
            source = str(suite.recipe.get("model", suite.name))
            lora.save_peft(out / task, params, own_adapters, base=source, manifest=manifest, overwrite=overwrite)
        saver.discard()
    return folders


def _weights(params: Params, suite: Suite, adapters: Lora | None) -> Params:
    """The expert's weights, in the dtypes of the suite's base."""
    return params if adapters is None else {**suite.base, **lora.expand(params, suite.base, adapters)}


def _check_resumed(out: Path, wanted: Mapping[str, Mapping[str, Any]]) -> None:
    """Removes what was written in part. Raises: ValueError that lists experts and snapshots of other settings."""
    problems = []
    for task, settings_ in wanted.items():
        checkpoint.sweep(out / task)
        last, path = snapshots.read(snapshots.path_of(out, task)), out / task
        found = checkpoint.load_manifest(path) if path.exists() else None if last is None else last.settings
        if found is not None and (differ := snapshots.differences(found, settings_)):
            problems.append(f"{task} in {out} was trained with other settings: {', '.join(differ)}")
    checkpoint.sweep(out / checkpoint.BASE)
    if problems:
        problems.append("give the settings it was started with, or choose another --out")
    errors.raise_problems(problems)


def _write_base(path: Path, suite: Suite, fingerprint: str, *, overwrite: bool) -> None:
    if path.exists() and checkpoint.load_manifest(path).get("fingerprint") == fingerprint:
        return
    if path.exists() and not overwrite:
        raise ValueError(
            f"{path} is another base than suite {suite.name!r} gives: choose another --out, or --overwrite"
        )
    manifest = checkpoint.describe(suite.base, kind="base", suite=dict(suite.recipe))
    checkpoint.save_expert(path, suite.base, manifest, overwrite=True)


def _probe(suite: Suite, task: str, params: Params, count: int, at: Smat) -> dict[str, Any]:
    """Dev losses of an expert and of its simulated states; the keys are the same in all runs."""
    assert suite.dev_batches is not None
    names = ("alpha_min", "drop_prob", "sigma", "noise")
    strengths = {name: value for name, value in settings(at).items() if name in names}
    keys = random.split(random.fold_in(random.key(0), "probe"), count)
    loss_fn, batches = suite.loss_fn(task), suite.dev_batches(task)
    found = simulation.probe(loss_fn, params, suite.base, batches, keys, where=suite.where, **strengths)
    spread = {"sd": stdev(found.simulated)} if count > 1 else {}
    return {"clean": found.clean, "simulated": found.mean, **spread, "keys": count, **strengths}


def _rates(training: Training) -> Callable[[int], dict[str, float]]:
    named = schedules(training)
    return lambda step: {name: schedule(step) for name, schedule in named.items()}


def _rows(suite: Suite, task: str, seed: int) -> Callable[[int], list[int]] | None:
    key, batch_rows = random.fold_in(random.key(seed), task), suite.batch_rows
    return None if batch_rows is None else lambda step: batch_rows(task, key, step)


def _numbers(training: Training) -> dict[str, Any]:
    left_out = ("epochs", "lora", "independent_draws")  # unless they say something
    return {name: value for name, value in asdict(training).items() if name not in left_out or value}


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(facts))
