"""Train the experts of a suite into a folder, each with its log; --resume continues an interrupted run."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checkpoint, errors, lora, machine, random, simulation, tree
from ...config import MethodConfig, Smat, Training, settings
from ...errors import problems_of
from ...folders.writing import locked
from ...lora import Lora
from ...lora.per_module import shard_problems
from ...merge.statistics import gram_layers
from ...parallel import ALONE, World
from ...suites import Suite
from ...types import Params
from ...where import mask_problems
from ..manifests import by_other_code, manifest_of
from ..run_folder import is_free
from . import resuming
from .dev_curve import DevCurve, curve_of
from .logs import Log
from .loop import budget, loss_of, schedules, train_expert
from .memory import reset_peak
from .noise_level import perturbed, with_sigma
from .notes import coarse_line, cut_notes, never_simulated, sigma_line, still_line
from .options import RunOptions, check_run
from .resume_checks import check_resumed
from .resuming import ResumePoint, Saver, Stop
from .variants import adapters_of, sigma_is_auto, training_settings, whole_weights

WAIT = 600.0  # seconds for another process that writes the base


class Expert(NamedTuple):
    """The settings of one expert to train."""

    task: str
    training: Training  # of this task, with its number of steps
    adapters: Lora | None
    facts: dict[str, Any]  # JSON values that its manifest, and any checkpoint it resumes from, must have


class Shared(NamedTuple):
    """Values that all experts of a run share."""

    suite: Suite
    method: MethodConfig  # its sigma is a number
    run: RunOptions
    stop: Stop
    world: World
    report: Callable[[str], None]


def save(
    suite: Suite,
    folder: Path,
    expert: Expert,
    params: Params,
    manifest: Callable[[], dict[str, Any]],
    *,
    overwrite: bool,
    moments: Mapping[str, Tensor] | None = None,
) -> None:
    """Weights, or adapters in PEFT's format, with the manifest that is made when they are written."""
    if expert.adapters is None:
        facts = {"expert": "", "steps": expert.training.steps, "rows": "those of training"}
        statistics = {"adam": (moments, facts)} if moments is not None else {}

        def described() -> dict[str, Any]:
            made = manifest()
            facts["expert"] = made["fingerprint"]  # statistics are written last
            return made

        checkpoint.save_expert(folder, params, described, overwrite=overwrite, statistics=statistics, hashed=True)
        return
    source = str(suite.recipe.get("model", suite.name))
    lora.save_peft(folder, params, expert.adapters, base=source, manifest=manifest, overwrite=overwrite, hashed=True)


def adapted_facts(suite: Suite, expert: Expert) -> dict[str, str]:
    """The fingerprint of those leaves of base that adapters change, whose names their file has: `export` checks it."""
    if expert.adapters is None:
        return {}
    names = *expert.adapters.paths, *expert.adapters.saved
    return {checkpoint.ADAPTED: checkpoint.fingerprint({name: suite.base[name] for name in names})}


class Kept:
    """Extra outputs of a run: parameter snapshots, written during training, and the optimizer's second moments.

    All processes call it; the first one writes snapshots and holds moments.
    """

    def __init__(self, suite: Suite, run: RunOptions, expert: Expert, world: World) -> None:
        self.moments: dict[str, Tensor] | None = None  # bfloat16, once training has ended
        self._suite, self._run, self._expert, self._world = suite, run, expert, world
        steps, count = expert.training.length, run.keep_snapshots
        self._last, self._at = steps, {steps * i // (count + 1): i for i in range(1, count + 1)}

    def __call__(
        self, step: int, moments: Callable[[], Params], expert: Callable[[], AbstractContextManager[Params]]
    ) -> bool:
        """Keep a snapshot, or Adam's moments, if one is due after this step.

        Raises: ValueError for parameters that are not finite; an error in all processes where the first one cannot
            write.
        """
        if self._run.keep_moments and step == self._last:
            found = moments()
            if self._world.leads:
                self.moments = {path: leaf.to("cpu", torch.bfloat16) for path, leaf in found.items()}
        if step not in self._at:
            return False
        with expert() as params:
            self._world.led(lambda: self._snapshot(step, params))
        return True

    def _snapshot(self, step: int, now: Params) -> None:
        task, index = self._expert.task, self._at[step]
        tree.check_finite(tree.flatten(now), f"the {task} expert after {step} steps")
        place = {"index": index, "of": self._run.keep_snapshots, "step": step}

        def manifest() -> dict[str, Any]:
            full = whole_weights(now, self._suite.base, self._expert.adapters)
            facts = self._expert.facts | adapted_facts(self._suite, self._expert)
            return checkpoint.describe(full, kind="snapshot", task=task, **facts, snapshot=place)

        folder = self._run.snapshots(task)[index]
        save(self._suite, folder, self._expert, now, manifest, overwrite=True)  # `check_run` refuses others'


def train_run(
    suite: Suite,
    method: MethodConfig,
    training: Training,
    run: RunOptions,
    *,
    stop: Stop | None = None,
    world: World = ALONE,
    report: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Train and save one expert for each task of ``run``, or the model of `joint_run`, with its log, and the base.

    Args:
        stop: asks to save the state of training and end.
        world: the processes that train together, all of which call this; the first one writes.
        report: gets a line for every expert that is finished already, or resumed.

    Returns:
        The experts' folders.

    Raises:
        ValueError: as `check_run`; for experts of another base in ``run.out``, and for experts of other settings that
            a resumed run finds there; for tasks that another process trains there; for a loss or weights that are not
            finite; for an expert that cannot be written.
        Interrupted: when ``stop`` asked for it.
    """
    if world.leads:  # the others would meet what it writes
        check_run(method, training, run, known=run.joint or suite.tasks, world=world)
    plans = planned(suite, method, training, run)  # before a sigma is looked for
    for line in cut_notes(suite, run.tasks) if world.leads else ():
        report(line)
    tell = report if world.leads else lambda line: None
    stop = stop or Stop()
    with stop.at_once("before the first step: rerun the command", world):
        find = partial(with_sigma, suite, training=training, run=run, world=world, report=tell)
        method, origin = find(method)
        if run.probe and run.probe_at is not None and sigma_is_auto(run.probe_at):
            at = method if origin else find(run.probe_at, probe=True)[0]
            run = replace(run, probe_at=replace(run.probe_at, sigma=settings(at)["sigma"]))
    if world.leads and (line := coarse_line(suite.base, method, training, above=0.5)):
        report(f"warning: {line}; --precision fp32 keeps the noise, and small updates too")
    shared = Shared(suite, method, run, stop, world, report)
    experts = _experts(shared, plans, origin)
    _same_everywhere(world, experts)
    for line in never_simulated(method, {expert.task: expert.training.length for expert in experts}):
        report(line)
    with ExitStack() as held:
        if world.leads:
            _hold(run, held)
            if run.resume:
                same = getattr(suite, "same_bits", ())
                check_resumed(run, {expert.task: expert.facts for expert in experts}, report, same_bits=same)
            fingerprint = experts[0].facts["base_fingerprint"]
            with _locked_base(run.out):
                _write_base(run.out / checkpoint.BASE, suite, fingerprint, overwrite=run.overwrite)
            for task in run.tasks if run.overwrite else ():
                resuming.replace_expert(run.out, task)
        for expert in experts:
            _train_one(shared, expert)
    return [run.out / expert.task for expert in experts]


def _hold(run: RunOptions, held: ExitStack) -> None:
    """Lock the tasks of a run, where the disk has locks, and remove partial writes of killed runs of them.

    Raises: ValueError where another process trains one.
    """
    for task in run.tasks:
        file = run.out / f".{task}.lock"
        taken = f"{task} is trained in {run.out} by another process: wait for it, or delete {file} if there is none"
        with suppress(OSError):  # a cluster's disk may have no locks
            held.enter_context(locked(file, taken))
    for task in run.tasks:
        own = run.out / task, resuming.path_of(run.out, task), resuming.replaced(run.out, task)
        for path in (*own, *run.snapshots(task).values()):
            checkpoint.sweep(path)


@contextmanager
def _locked_base(out: Path) -> Iterator[None]:
    """Hold the lock of the base of ``out``, whose other tasks other processes may train; leftovers of killed ones go.

    Raises: ValueError where one still writes it after `WAIT` seconds.
    """
    base, file = out / checkpoint.BASE, out / f".{checkpoint.BASE}.lock"
    taken = f"{base} is written by another process: wait for it, or delete {file} if there is none"
    with ExitStack() as held:
        with suppress(OSError):  # as in `_hold`
            held.enter_context(locked(file, taken, wait=WAIT))
            checkpoint.sweep(base)
        yield


def planned(
    suite: Suite, method: MethodConfig, training: Training, run: RunOptions
) -> dict[str, tuple[Training, Lora | None]]:
    """The training and the adapters of each task. Raises: ValueError for what does not fit the suite."""
    if run.probe and run.probe_at is None:
        raise ValueError(f"probe is {run.probe}: give its hyperparameters too, probe_at")
    if run.probe and suite.dev_batches is None:
        raise ValueError(f"suite {suite.name!r} has no batches of its dev split: leave out `probe`")
    if isinstance(method, Smat) and training.lora is None:
        errors.raise_problems(mask_problems(suite.where, suite.base, method.drop_prob or 0.0))
    errors.raise_problems([text for task in run.tasks for text in problems_of(budget, suite, task, training)])
    budgets = {task: budget(suite, task, training) for task in run.tasks}
    few = [f"{task} ({own.length} steps)" for task, own in budgets.items() if own.length <= run.keep_snapshots]
    if few and run.keep_snapshots:
        raise ValueError(f"keep_snapshots is {run.keep_snapshots}, must be below the steps of {', '.join(few)}")
    held = getattr(method, "held", 0)
    if short := [f"{task} ({own.length} steps)" for task, own in budgets.items() if own.length <= held]:
        raise ValueError(
            f"{method.name} moves no parameter in its first {held} steps, and {', '.join(short)} have no more: give "
            "more --steps, or a smaller --calibration"
        )
    errors.raise_problems([f"{task}: {text}" for task, own in budgets.items() for text in problems_of(schedules, own)])
    losses = {task: loss_of(suite, task, training) for task in run.tasks}
    if training.shard and suite.recipe.get("linearised"):
        raise ValueError("`shard` is not supported with linearised: leave one of them out")
    errors.raise_problems(problems_of(curve_of, suite, run.tasks[0], training, method, None))
    if "gram" in run.statistics:
        found = problems_of(gram_layers, losses[run.tasks[0]], suite.base)
        errors.raise_problems([f"statistics gram: {text}" for text in found])
    plans = {task: (own, adapters_of(losses[task], training)) for task, own in budgets.items()}
    if (adapters := plans[run.tasks[0]][1]) is not None:
        errors.raise_problems([f"`shard`: {text}" for text in shard_problems(adapters) if training.shard])
        lora.init(random.key(0), suite.base, adapters)
    return plans


def _experts(
    shared: Shared, plans: Mapping[str, tuple[Training, Lora | None]], sigma_from: Mapping[str, Any]
) -> list[Expert]:
    """All experts, before the first one is trained."""
    suite, method, run = shared[:3]
    facts = {
        "label": run.label or method.name.upper(),
        "method": method.name,
        "hyperparameters": settings(method),
        "seed": run.seed,
        "suite": dict(suite.recipe),
        "base_fingerprint": checkpoint.fingerprint(suite.base),
        **({checkpoint.UNTRAINED: checkpoint.fingerprint(suite.untrained)} if suite.untrained else {}),
        **({"keep_snapshots": run.keep_snapshots} if run.keep_snapshots else {}),
        **({"keep_moments": True} if run.keep_moments else {}),
        **({"sigma_from": sigma_from} if sigma_from else {}),
        **({"tasks": dict(zip(run.joint, run.joint_steps, strict=True))} if run.joint else {}),
    }
    found = {task: {**facts, "training": training_settings(own, shared.world)} for task, (own, _) in plans.items()}
    if (rows := suite.train_rows) is not None:
        for task, (own, _) in plans.items():  # dev rows count where they choose the weights that are kept
            kept = {name: value for name, value in rows(task).items() if name != "dev" or own.dev is not None}
            found[task]["train_rows"] = kept
    return [Expert(task, *plan, json.loads(json.dumps(found[task]))) for task, plan in plans.items()]


def _train_one(shared: Shared, expert: Expert) -> None:
    """Train and save an expert, from its checkpoint if there is one; a finished expert is kept."""
    suite, method, run, stop, world, report = shared
    task, training = expert.task, expert.training
    steps, minutes = run.save_every_steps, run.save_every_minutes
    saver = Saver(resuming.path_of(run.out, task), expert.facts, every_steps=steps, every_minutes=minutes)
    finished, last = False, None
    if world.leads:  # the others would open what this one removes
        finished = run.resume and resuming.finished(run.out, task)
        if finished or not run.resume:
            saver.discard()
        last = resuming.read(saver.path)
    finished, last = world.agree((finished, last))
    if finished:
        if world.leads:
            _forget_replaced(run, task)
            code = by_other_code(checkpoint.load_manifest(run.out / task))
            report(f"{task}: already finished{code}{_relabelled(run, task)}")
            _probe_finished(shared, task)
        return
    if last is not None:
        report(f"{task}: resumes after step {last.step} of {training.steps}{by_other_code(last._asdict())}")
    kept, curve = Kept(suite, run, expert, world), curve_of(suite, task, training, method, expert.adapters)
    train = partial(train_expert, suite, task, method, training, seed=run.seed, saver=saver, stop=stop, world=world)
    train = partial(train, curve=curve, offload=run.offload, on_state=kept)
    if not world.leads:
        train()
        return
    with _log(shared, expert, last) as log:
        try:
            params = train(log=log)
            tree.check_finite(tree.flatten(params), f"the {task} expert")
        except ValueError as error:
            where = saver.where() if str(saver.path) not in str(error) else None  # that file is damaged
            raise ValueError("; ".join(filter(None, (str(error), where)))) from error
        finally:
            saver.wait()  # after an exception too: nothing appears later, in a run that begins anew
        tell = partial(_manifest, shared, expert, params, log, curve)
        again = run.overwrite or not resuming.finished(run.out, task)
        try:
            save(suite, run.out / task, expert, params, tell, overwrite=again, moments=kept.moments)
        except OSError as error:  # such as a full disk
            text = f"{run.out / task} cannot be written ({error.strerror or error.__cause__ or error})"
            last_good = saver.where() or "there is no training checkpoint"
            raise ValueError(f"{text}; {last_good}: free space there, and rerun with --resume") from error
    _forget_replaced(run, task)
    saver.discard()


def _forget_replaced(run: RunOptions, task: str) -> None:
    """Where the expert has replaced another, remove the old one's snapshots, of numbers that the new one does not have.

    The mark goes last: a run that is killed before that resumes here.
    """
    if not (mark := resuming.replaced(run.out, task)).exists():
        return
    for folder in checkpoint.snapshots_of(run.out / task):
        if folder in run.snapshots(task).values() or manifest_of(folder).get("kind") != "snapshot":
            continue
        if not problems_of(checkpoint.refuse_existing, folder, overwrite=True):  # nothing of others is in it
            shutil.rmtree(folder)
    mark.unlink(missing_ok=True)


def _relabelled(run: RunOptions, task: str) -> str:
    """Give a finished expert and its snapshots the label of the command line; says so if it is another one.

    No bit of an expert depends on its label, which tells the lines of a table apart.
    """
    said = ""
    for folder in (run.out / task, *checkpoint.snapshots_of(run.out / task)):
        manifest = manifest_of(folder)
        if run.label and manifest and manifest["label"] != run.label:
            said = said or f", label {manifest['label']} is now {run.label}"
            checkpoint.write_manifest(folder, {**manifest, "label": run.label})
    return said


def _probe_finished(shared: Shared, task: str) -> None:
    """Measure the probe of a finished expert, unless its manifest has one of these settings and rows, and write it."""
    suite, run = shared.suite, shared.run
    if not run.probe or run.probe_at is None:
        return
    manifest = manifest_of(run.out / task)
    known = manifest.get("probe") or {}
    wanted = {"keys": run.probe, **_probed_at(run.probe_at), **_dev_rows(suite, task)}
    if all(known.get(name) == value for name, value in wanted.items()):
        return
    found = lora.load_expert(run.out / task, suite.base)[0]
    full = {path: leaf.to(suite.base[path].device) for path, leaf in found.items()}
    checkpoint.write_manifest(run.out / task, {**manifest, "probe": _probe(shared, task, full)})


def _manifest(shared: Shared, expert: Expert, params: Params, log: Log, curve: DevCurve | None) -> dict[str, Any]:
    """The manifest of an expert whose weights were just written, so that the peak of memory is with that of saving.

    The probe comes after the peak was read: its memory and time are not those of training.
    """
    suite, method, run, _, world, report = shared
    log.end()
    found, task, training = log.cost(), expert.task, expert.training
    full = whole_weights(params, suite.base, expert.adapters)
    probed = _probe(shared, task, full)
    still = still_line(training, full, suite.base, log.largest_norm)
    found |= {"warning": still} if still else {}
    log.finish(**found, **{f"probe_{name}": probed[name] for name in ("clean", "simulated") if probed})
    if still:
        report(f"{task}: warning: {still}")
    if of_weights := sigma_line(method, training, full, perturbed(suite.base, expert.adapters)):
        report(f"{task}: {of_weights}")
    if curve is not None:
        found["evaluations"] = curve.facts()
        report(f"{task}: {curve.line(training.steps)}")
    found |= {"probe": probed} if probed else {}
    found |= {"processes": world.size} if world.size > 1 else {}
    found |= {} if run.preset is None else {"preset": run.preset}
    found |= adapted_facts(suite, expert)
    kind = checkpoint.JOINT if run.joint else "expert"
    return checkpoint.describe(full, kind=kind, task=task, **expert.facts, **found)


def _same_everywhere(world: World, experts: Sequence[Expert]) -> None:
    """Raises: ValueError in all processes where they have other settings, another base or other code."""
    seen = world.gather({expert.task: {**expert.facts, "code": machine.code()} for expert in experts})
    errors.raise_problems(
        [
            f"process {rank} would train another expert than the first one: {', '.join(differ)}"
            for rank, own in enumerate(seen)
            if (differ := resuming.differences(seen[0], own))
        ]
    )


def _log(shared: Shared, expert: Expert, last: ResumePoint | None) -> Log:
    """The log of an expert, continued after its checkpoint if there is one; peaks of memory count from here."""
    suite, run = shared.suite, shared.run
    device, task, training = next(iter(suite.base.values())).device, expert.task, expert.training
    reset_peak(device)
    key, batch_rows, rates = random.fold_in(random.key(run.seed), task), suite.batch_rows, schedules(training)
    return Log(
        run.out / f"{task}{checkpoint.LOG}",
        task=task,
        total=training.length,
        every=run.log_every,
        device=device,
        rates=lambda step: {name: schedule(step) for name, schedule in rates.items()},
        rows=None if batch_rows is None else lambda step: batch_rows(task, key, step),
        start=0 if last is None else last.step,
        before=None if last is None else last.progress,
        report=shared.report,
        trackers=run.log,
        run=f"{expert.facts['label']}-{task}-seed{run.seed}",
        config=expert.facts,
    )


def _write_base(path: Path, suite: Suite, fingerprint: str, *, overwrite: bool) -> None:
    if manifest_of(path).get("fingerprint") == fingerprint:
        return
    if not is_free(path) and not overwrite:
        raise ValueError(
            f"{path} is another base than suite {suite.name!r} gives: choose another --out, or --overwrite"
        )
    manifest = checkpoint.describe(suite.base, kind="base", suite=dict(suite.recipe))
    checkpoint.save_expert(path, suite.base, manifest, overwrite=True)


def _probe(shared: Shared, task: str, params: Params) -> dict[str, Any]:
    """Dev losses of an expert and of its simulated states, empty without --probe; the keys are the same in all runs."""
    suite, run, count = shared.suite, shared.run, shared.run.probe
    if not count or run.probe_at is None:
        return {}
    assert suite.dev_batches is not None
    hyperparameters = _probed_at(run.probe_at)
    keys = random.split(random.fold_in(random.key(0), "probe"), count)
    loss_fn, batches = suite.loss_fn(task), suite.dev_batches(task)
    found = simulation.probe(loss_fn, params, suite.base, batches, keys, where=suite.where, **hyperparameters)
    shared.report(f"{task}: dev loss {found.clean:.4f}, at {count} simulated states {found.mean:.4f}")
    losses = {"clean": found.clean, "simulated": found.mean} | ({"sd": stdev(found.simulated)} if count > 1 else {})
    return {**losses, "keys": count, **hyperparameters, **_dev_rows(suite, task)}


def _dev_rows(suite: Suite, task: str) -> dict[str, str]:
    """The hash of the dev rows of a task, where the suite gives one."""
    found = {} if suite.train_rows is None else suite.train_rows(task)
    return {"dev_rows": found["dev"]} if "dev" in found else {}


def _probed_at(at: Smat) -> dict[str, Any]:
    names = ("alpha_min", "drop_prob", "sigma", "noise")
    return {name: value for name, value in settings(at).items() if name in names}
