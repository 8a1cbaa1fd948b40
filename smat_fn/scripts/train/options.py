"""Options of a training run, and the checks made before any work."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ... import checkpoint, errors, mat, optim
from ...config import MethodConfig, Preset, Smat, Training, settings
from ...errors import check_member, problems_of
from ...grad import ModuleLoss
from ...parallel import ALONE, World
from ...types import Batch, Offload, Precision
from ..manifests import manifest_of
from . import resuming, trackers
from .loop import make_optimizer
from .settings import RunSettings
from .variants import offload_of, sigma_is_auto, training_settings, without_auto
from .variants import problems as variant_problems

KEEPS = "keep_moments", "keep_snapshots"


@dataclass(frozen=True)
class RunOptions(RunSettings):
    """The experts of one run: ``out/<task>``, with their logs ``out/<task>.log.jsonl`` and the base ``out/base``."""

    tasks: Sequence[str]
    seed: int  # of batches and draws
    preset: str | None = None  # written to the manifests
    probe_at: Smat | None = None  # hyperparameters of the probe
    joint: tuple[str, ...] = ()  # tasks of a multi-task model, the only one of ``tasks`` then; see `joint_run`
    joint_steps: tuple[int, ...] = ()  # of each of them; none before the suite is loaded

    def snapshots(self, task: str) -> dict[int, Path]:
        """The folders of a task's ``keep_snapshots`` parameters, by number."""
        return {i: self.out / checkpoint.SNAPSHOTS / str(i) / task for i in range(1, self.keep_snapshots + 1)}


def suite_options(preset: Preset, given: Mapping[str, Any], *, precision: Precision | None = None) -> dict[str, Any]:
    """Options of the preset's suite: the preset's, overridden by ``given``.

    Precision "bf16" and "fp32" set the dtype of a suite that has one, unless ``given`` does.
    """
    dtype = {"bf16": "bfloat16", "fp32": "float32"}.get(precision or "")
    own = {"dtype": dtype} if dtype is not None and "dtype" in preset.options else {}
    return {**preset.options, **own, **given}


def experts_to_merge(run: RunOptions, known: Sequence[str], report: Callable[[str], None]) -> int:
    """MergOPT's ``k_max`` where none is given: the one that ``run.out`` has, else the number of the data's tasks.

    Args: report: gets a line where tasks came beside those of the run.
    """
    count = max(2, len(known))  # a task alone has its partners elsewhere
    replaced = run.tasks if run.overwrite else ()
    for facts in resuming.begun(run.out, (*run.tasks, *known), besides=replaced):
        if found := facts.get("hyperparameters", {}).get("k_max"):
            if found != count:
                report(
                    f"note: k_max {found} is that of the experts in {run.out}, the data have {len(known)} tasks: to "
                    "count them all, choose another --out"
                )
            return int(found)
    return count


def check_run(
    method: MethodConfig, training: Training, run: RunOptions, *, known: tuple[str, ...], world: World = ALONE
) -> None:
    """Raises: ValueError that lists bad numbers, tasks not in ``known`` or named twice, and folders that exist."""
    tasks, problems = run.tasks, _number_problems(run, training)
    rows_of = run.joint or tasks  # those that have rows
    if run.joint and not run.joint_steps and training.steps is not None:
        training = replace(training, steps=training.steps * len(run.joint))
    if training.steps is None:
        for task in dict.fromkeys(rows_of):
            if (epochs := training.epochs.get(task)) is None:
                problems.append(f"task {task!r} has no number of epochs: give --epochs or --steps")
            elif epochs < 1:
                problems.append(f"epochs of {task} is {epochs}, must be at least 1")
    problems += ["resume and overwrite exclude each other: choose one"] if run.resume and run.overwrite else []
    problems += trackers.problems(run.log)
    problems += variant_problems(method, training, world, run.offload)
    problems += _optimizer_problems(method, training, offload_of(method, training, run.offload))
    if run.keep_moments and (training.lora is not None or training.optimizer == "muon"):
        what = "adapters" if training.lora is not None else "matrices under muon"
        problems.append(f"keep_moments: {what} have none of all weights, leave it out; merge.py statistics needs none")
    if training.dev is not None and (own := [n for n in KEEPS if getattr(run, n)]):
        problems.append(f"{' and '.join(own)}: with eval_every the best state is the expert, leave one of them out")
    problems += ["no tasks: name at least one"] if not tasks else []
    if run.out.is_symlink() and not run.out.exists():
        problems.append(f"out is {run.out}, a link that leads nowhere: make the folder that it names, or remove it")
    problems += [f"task {task!r} is named twice" for task in dict.fromkeys(rows_of) if rows_of.count(task) > 1]
    problems += _joint_problems(method, run) if run.joint else []
    taken = checkpoint.BASE, checkpoint.SNAPSHOTS, checkpoint.JOINT
    problems += [
        f"task {task!r} is named like a folder of every run ({', '.join(taken)}): rename its folder of data"
        for task in dict.fromkeys(rows_of)
        if task.casefold() in taken
    ]
    for task in dict.fromkeys(rows_of):
        problems += problems_of(check_member, "task", task, known)
    for task in dict.fromkeys(tasks):
        problems += checkpoint.foreign_problems({run.out / f"{task}{checkpoint.LOG}": b'{"step": '})
        if run.resume:
            continue
        problems += _existing(method, training, run, run.out / task, world)
        for folder in run.snapshots(task).values():
            problems += problems_of(checkpoint.refuse_existing, folder, overwrite=run.overwrite)
        if (unfinished := resuming.path_of(run.out, task)).exists() and not run.overwrite:
            problems.append(f"{unfinished} belongs to an unfinished expert: pass --resume or --overwrite")
    errors.raise_problems(problems)


def _existing(method: MethodConfig, training: Training, run: RunOptions, path: Path, world: World) -> list[str]:
    """Error for an existing expert: which of its settings differ, or that it is the same one."""
    found = problems_of(checkpoint.refuse_existing, path, overwrite=run.overwrite)
    if run.overwrite or not (stored := manifest_of(path)):
        return found
    if "transport" in stored:
        return [f"{path} was moved by merge.py transport, not trained: pass another --out, or --overwrite"]
    own = settings(method)
    # epochs count steps, and sigma is found, when the suite is loaded
    open_ = {"epochs", *(("steps",) if training.steps is None else ()), *(x for x, v in own.items() if v == "auto")}

    def known(facts: Mapping[str, Any] | None) -> dict[str, Any]:
        return {name: value for name, value in (facts or {}).items() if name not in open_}

    trained = known(training_settings(training, world))
    now = {"method": method.name, "hyperparameters": known(own), "training": trained, "seed": run.seed}
    parts = {name: known(stored.get(name)) for name in ("hyperparameters", "training")}
    if differ := resuming.differences({**stored, **parts}, json.loads(json.dumps(now))):
        return [f"{path} exists, trained with other settings ({', '.join(differ)}): pass another --out, or --overwrite"]
    return [f"{path} exists, trained with these settings: pass --resume to keep it, or --overwrite to train it again"]


def _joint_problems(method: MethodConfig, run: RunOptions) -> list[str]:
    """Errors for options that are of experts alone."""
    names = [name for name in (*KEEPS, "probe", "statistics") if getattr(run, name)]
    problems = [f"{name} is for experts, which joint does not train: leave one of them out" for name in names]
    if sigma_is_auto(method):
        problems.append("sigma auto is measured on experts: give joint a number")
    return problems


def _number_problems(run: RunOptions, training: Training) -> list[str]:
    counts = {"steps": training.steps, "log_every": run.log_every, "accumulate": training.accumulate}
    counts["save_every_steps"] = run.save_every_steps
    if training.dev is not None:
        counts |= {"eval_every": training.dev.every, "patience": training.dev.patience}
    problems = [f"{name} is {n}, must be at least 1" for name, n in counts.items() if n is not None and n < 1]
    if not run.save_every_minutes > 0:
        problems.append(f"save_every_minutes is {run.save_every_minutes}, must be positive")
    least = {"probe": run.probe, "keep_snapshots": run.keep_snapshots}
    return problems + [f"{name} is {n}, must not be negative" for name, n in least.items() if n < 0]


def _optimizer_problems(method: MethodConfig, training: Training, offload: Offload | None) -> list[str]:
    problems, optimizer, loss = list[str](), optim.adam(0.0), ModuleLoss(nn.Module(), _no_loss)
    with errors.collected(problems):
        optimizer = make_optimizer(replace(training, steps=max(training.steps or training.warmup, 1)))
    own = {"max_grad_norm": training.max_grad_norm, **settings(without_auto(method))}
    own |= {"offload": offload} if offload else {}
    return problems + problems_of(mat.build_of(method), loss, optimizer, {}, **own)


def _no_loss(module: nn.Module, batch: Batch) -> tuple[Any, None]:
    raise AssertionError("built to check its options, not to run")
