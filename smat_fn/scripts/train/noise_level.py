"""``--sigma auto``: sigma of SMAT, estimated from the size of updates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ... import analyses, checkpoint, errors, lora, random, tree
from ...config import Finetune, MethodConfig, Training
from ...parallel import ALONE, World
from ...simulation import relative
from ...suites import Suite
from ...types import Params
from ..manifests import manifest_of
from . import resuming
from .logs import check_losses
from .loop import budget, loss_of, schedules, train_expert
from .options import RunOptions
from .variants import adapters_of, sigma_is_auto, training_settings, whole_weights

COEF = 0.3  # gamma of the other experts' updates, as `eval.py diagnose` has it
SHARE, LEAST, MOST = 20, 10, 100  # a short run: this part of the steps, within these bounds

Found = tuple[float, dict[str, Any]]  # sigma, and where it is from


def with_sigma(
    suite: Suite,
    method: MethodConfig,
    training: Training,
    run: RunOptions,
    *,
    probe: bool = False,
    world: World = ALONE,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[MethodConfig, dict[str, Any]]:
    r"""The method with sigma as a number, and the origin of that number; unchanged where sigma is a number already.

    The noise stands in for the other experts' updates (Eq. merged-state: ``epsilon_i = gamma sum_{j != i} Delta_j``):
    sigma is the RMS of that sum at gamma = 0.3, over the weights that it perturbs. It is, the first that there is: that
    of the experts in ``run.out``, finished or not, which ``run.overwrite`` does not replace; measured on a run of ft
    beside ``run.out``, of the same base and the same tasks and steps; estimated from a short run of ft, as
    gamma sqrt(K - 1) times the RMS of one update, K being the suite's tasks, for updates that are nearly orthogonal.
    The same inputs give the same number.

    Args:
        probe: the method is that of ``--probe``, whose sigma is not that of training.
        world: the first process finds it, the others get it from there; short runs on shards take all of them.
        report: gets a line with the number and where it is from.

    Returns:
        (method, JSON values for manifests: ``from``, and what the number was computed from).

    Raises:
        ValueError: where no parameter moves in the short run, where its loss or update is not finite, and for experts
            in ``run.out`` of a sigma that was given.
    """
    if not sigma_is_auto(method):
        return method, {}
    found, said, beside = None, "", ""
    if world.leads:
        base = checkpoint.fingerprint(suite.base)
        if found := _standing(run, base, suite.tasks, probe=probe):
            said = f"that of the experts in {run.out}: "
        else:
            found, beside = _measured(suite, training, run, base)
    found, beside = world.agree((found, beside))
    if found is None:
        # short runs on shards take all processes, others the first one alone
        own, takes_part = (world, True) if training.shard else (ALONE, world.leads)
        found = world.agree(_estimated(suite, training, run, report, beside, own) if takes_part else None)
    sigma, origin = found
    report(f"sigma auto: {sigma:g}, {said}{origin['from']}")
    return replace(method, sigma=sigma), origin


def _standing(run: RunOptions, base: str, tasks: Sequence[str], *, probe: bool) -> Found | None:
    """Sigma, or that of the probe, of the experts or checkpoints that this run keeps, those of other tasks last.

    Experts that are merged have one sigma, so a task that comes later gets that of the others. Raises: ValueError where
    that was given as a number.
    """
    replaced = run.tasks if run.overwrite else ()
    given = list[float]()
    for facts in resuming.begun(run.out, (*run.tasks, *tasks), besides=replaced):
        if facts.get("base_fingerprint") != base:
            continue
        if probe:
            if (probed := facts.get("probe") or {}).get("sigma") is not None:
                return probed["sigma"], {"from": "their probe's"}
            continue
        if facts.get("method") != "smat":
            continue
        own = facts["hyperparameters"]
        if facts.get("sigma_from"):
            return own["sigma"], facts["sigma_from"]
        if "sigma" in own:  # without it the method's default was taken
            given.append(own["sigma"])
    if given:
        raise ValueError(
            f"sigma is 'auto', but {run.out} holds experts of sigma {given[0]:g}, and experts that are merged have "
            f"one: give sigma {given[0]:g}, or choose another --out"
        )
    return None


def _measured(suite: Suite, training: Training, run: RunOptions, fingerprint: str) -> tuple[Found | None, str]:
    """Sigma measured on a finished ft run in a sibling folder: one with the same seed first, then with the same
    learning rate, then by name.

    Without one a text that says where it was looked for, and why the first few runs of ft there do not fit.
    """
    own = {task: _budget(suite, task, training) for task in run.tasks}  # rows of other tasks may not have been read
    adapters, parent = training_settings(training).get("lora"), run.out.absolute().parent
    chosen: list[tuple[bool, bool, str, str, Path]] = []
    others = []
    for folder in sorted(parent.glob("*/")):
        try:
            manifests = {task: manifest_of(folder / task) for task in suite.tasks}
        except ValueError:  # damaged, or of another program: not this run's error
            others.append(f"{folder.name} has a manifest that cannot be read")
            continue
        if "ft" not in (found.get("method") for found in manifests.values()):
            continue
        if reason := _differs(manifests, fingerprint, own, adapters):
            others.append(f"{folder.name} {reason}")
        elif len(manifests) > 1:
            first = manifests[suite.tasks[0]]
            rates = first["training"].get("lr", training.lr), first["training"].get("muon_lr")
            other = rates != (training.lr, training.muon_lr)
            chosen.append((first["seed"] != run.seed, other, folder.name, _rates(*rates) if other else "", folder))
    if not chosen:
        of = f" ({errors.and_more(others, 3)})" if others else ""
        return None, f"{parent} holds no matching run of ft{of}"
    *_, rate, folder = min(chosen)
    base = perturbed(suite.base, adapters_of(loss_of(suite, run.tasks[0], training), training))
    found = {task: lora.load_expert(folder / task, suite.base)[0] for task in suite.tasks}
    experts = {task: {path: own[path] for path in base} for task, own in found.items()}
    base = {path: leaf.cpu() for path, leaf in base.items()}
    whole = analyses.diagnose(base, experts, dict.fromkeys(base, "other"), coef=COEF)[-1]
    sigma = analyses.suggested_sigma(whole)
    if sigma is None:
        return None, f"the experts of {folder} equal the base"
    at = f" (learning rate {rate}, here {_rates(training.lr, training.muon_lr)})" if rate else ""
    said = f"the RMS of the other experts' updates in {folder.name}{at} at gamma {COEF}"
    return (sigma, {"from": said, "update": whole.delta, "run": folder.name}), ""


def _rates(lr: float, muon_lr: float | None) -> str:
    return f"{lr:g}" if muon_lr is None else f"{lr:g} with muon_lr {muon_lr:g}"


def _differs(manifests: Mapping[str, Any], fingerprint: str, steps: Mapping[str, int | None], adapters: Any) -> str:
    """Why experts in a folder are not those that this run would be merged with; an empty text where they are."""
    for task, found in manifests.items():
        if found.get("method") != "ft":
            return f"lacks {task}" if not found else f"has {task} of {found.get('method')}"
        if found.get("base_fingerprint") != fingerprint:
            return "has another base"
        if task in steps and found["training"]["steps"] != steps[task]:
            wanted = "not in this preset" if steps[task] is None else f"here {steps[task]}"
            return f"trained {task} for {found['training']['steps']} steps, {wanted}"
        if found["training"].get("lora") != adapters:
            return "has other adapters"
    return ""


def _estimated(
    suite: Suite, training: Training, run: RunOptions, report: Callable[[str], None], beside: str, world: World
) -> Found:
    """Sigma extrapolated from two short ft runs at the first learning rate, one about half as long as the other.

    The RMS grows as a power of the sum of the learning rates so far, between its root (steps of random directions) and
    itself (steps in one direction).
    """
    squares, lengths = [], []
    for task in run.tasks:
        whole = budget(suite, task, training)
        long = max(2, min(MOST, max(LEAST, whole.length // SHARE), whole.length))
        lengths.append(long)
        if task == run.tasks[0]:
            report(
                f"sigma auto: {beside}; estimating it from {long + long // 2} steps of ft a task (to measure it, "
                "first train ft on all tasks with the same settings, in a folder beside --out)"
            )
        half, full = (_moved(suite, task, whole, steps, run.seed, world) for steps in (long // 2, long))
        if not full or not half:
            raise ValueError(
                f"sigma auto: no parameter moves in {long} steps of ft on {task} at learning rate "
                f"{_rates(whole.lr, whole.muon_lr)}: give another one, --precision mixed, or --sigma a number"
            )
        power = min(1.0, max(0.5, math.log2(full / half) / math.log2(long / (long // 2))))
        name, peak = ("muon_lr", whole.muon_lr) if whole.muon_lr else ("lr", whole.lr)
        rates = schedules(whole)[name]
        length = sum(float(rates(step)) for step in range(whole.length)) / (long * peak)
        squares.append((full * length**power) ** 2)
    update = math.sqrt(math.fsum(squares) / len(squares))
    others = max(1, len(suite.tasks) - 1)
    said = f"{COEF} times the root of {others} (other experts) times the RMS of updates that short runs of ft predict"
    facts = {"from": said, "update": update, "steps": max(lengths)}
    return float(f"{COEF * math.sqrt(others) * update:.2g}"), facts


def _moved(suite: Suite, task: str, training: Training, steps: int, seed: int, world: World) -> float:
    """RMS of the update after so many steps of ft at a constant learning rate.

    Raises: ValueError for a loss or an update that is not finite.
    """
    plain = replace(training, schedule="constant", warmup=0, average=None, independent_draws=False, dev=None)
    own = replace(plain, steps=steps, epochs={})
    losses, key, of = list[tuple[int, Tensor]](), random.fold_in(random.key(seed), task), suite.batch_rows
    params = train_expert(
        suite, task, Finetune(), own, seed=seed, world=world,
        on_step=lambda step, info: losses.append((step, info.loss.detach())),
    )  # fmt: skip
    try:
        check_losses(task, losses, None if of is None else lambda step: of(task, key, step))
    except ValueError as error:
        raise ValueError(f"sigma auto, a short run of ft: {error}") from error
    adapters = adapters_of(loss_of(suite, task, own), own)
    # of shards the first process alone has the whole weights
    moved = world.led(lambda: update_rms(whole_weights(params, suite.base, adapters), perturbed(suite.base, adapters)))
    if not math.isfinite(moved):
        raise ValueError(
            f"sigma auto: the RMS of the update of {task} is {moved} after {steps} steps of ft at learning rate "
            f"{_rates(training.lr, training.muon_lr)}: lower it"
        )
    return moved


def perturbed(base: Mapping[str, Tensor], adapters: lora.Lora | None) -> dict[str, Tensor]:
    """The weights that training changes, and Perturb: all, or those of adapters."""
    return dict(base) if adapters is None else {path: base[path] for path in (*adapters.paths, *adapters.saved)}


def update_rms(params: Params, base: Params) -> float:
    """RMS of ``params - base`` over all coordinates of the floating-point leaves of ``base``; others did not move."""
    found, leaves = tree.flatten(params), tree.flatten(base)
    start = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    return float(relative.update_rms({path: found.get(path, leaf) for path, leaf in start.items()}, start))


def _budget(suite: Suite, task: str, training: Training) -> int | None:
    """The steps of a task; None where the preset has no number of epochs for it."""
    return budget(suite, task, training).steps if training.steps or task in training.epochs else None
