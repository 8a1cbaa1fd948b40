"""Descriptions of a run before it starts: one line, or all of --dry-run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ... import tree
from ...config import MethodConfig, Training, settings
from ...grad import ModuleLoss
from ...models import inspect
from ...suites import Suite
from .loop import loss_of
from .notes import coarse_line, never_simulated
from .options import RunOptions
from .training import planned
from .variants import training_settings
from .whole_model import export_problems, stored_dtypes


def headline(
    suite: Suite, method: MethodConfig, training: Training, *, origin: str, seed: int, processes: int = 1
) -> str:
    """One line: method, suite, learning rate and where it is from, length, what differs from plain training, seed."""
    parts = [f"learning rate {training.lr:g} ({origin})"]
    parts += [f"muon_lr {training.muon_lr:g} of matrices"] if training.muon_lr is not None else []
    parts.append(_epochs(training.epochs) if training.steps is None else f"{training.steps} steps")
    parts += [f"precision {training.precision}"] if training.precision else []
    parts += _stored(suite, training)
    parts += [f"{training.accumulate} micro-batches a step"] if training.accumulate > 1 else []
    parts += [f"average {training.average}"] if training.average else []
    parts += [f"adapters of rank {training.lora.rank}"] if training.lora else []
    parts += [f"dev {training.dev.by} every {training.dev.every} steps"] if training.dev else []
    parts += ["dropout"] if training.dropout else []
    parts += ["sharded"] if training.shard else []
    parts += ["compiled"] if training.compiled else []
    parts += [f"{processes} processes"] if processes > 1 else []
    return "\n".join([*_notes(suite), f"{method.name} on {suite.name}: {', '.join(parts)}, seed {seed}"])


def dry_run(suite: Suite, method: MethodConfig, training: Training, run: RunOptions) -> str:
    """Settings of suite, method and optimizer, the parameters, and per task the steps and the share of cut rows.

    Raises: ValueError as the run itself would before it begins (`training.planned`).
    """
    plans = planned(suite, method, training, run)
    budgets = {task: own for task, (own, _) in plans.items()}
    own = {name: value for name, value in training_settings(training).items() if name not in ("steps", "epochs")}
    shared = {name: value for name, value in own.items() if value is not None}
    lines = [
        *_notes(suite),
        f"suite {suite.name}: {_listed({name: value for name, value in suite.recipe.items() if name != 'name'})}",
        f"method {method.name}: {_listed(settings(method)) or 'no options'}",
        f"training: {_listed(shared)}, run seed {run.seed}",
        *([f"weights: {', '.join(found)}"] if (found := _stored(suite, training)) else []),
        "",
    ]
    loss = loss_of(suite, run.tasks[0], training)
    assert isinstance(loss, ModuleLoss)
    leaves = inspect.describe_leaves(loss.module, suite.where)
    if training.lora is not None and (adapters := plans[run.tasks[0]][1]) is not None:
        merged = method.name == "smat" and training.lora.simulate == "merged"
        dtype = "float32" if training.precision == "mixed" else None
        leaves = inspect.with_adapters(leaves, adapters, merged=merged, dtype=dtype)
    lines += [inspect.table(leaves), ""]
    lines += [line, ""] if (line := coarse_line(suite.base, method, training)) else []
    lines += [_task_line(suite, task, own) for task, own in budgets.items()]
    lines += never_simulated(method, {task: own.length for task, own in budgets.items()})
    return "\n".join([*lines, f"{sum(own.length for own in budgets.values())} steps in all"])


def _notes(suite: Suite) -> list[str]:
    """Notes before training, for example that the result cannot be exported."""
    model = suite.recipe.get("model")
    return [f"note: {note}" for note in (*suite.notes, *(export_problems(Path(model), suite.base) if model else ()))]


def _stored(suite: Suite, training: Training) -> list[str]:
    """Phrases on the dtype of experts with float32 master weights, and on weights that are rounded unasked."""
    if training.precision == "bf16":
        return []
    found = [] if training.precision != "mixed" else ["adapters trained and stored in float32"]
    if found and training.lora is None:
        kinds = sorted({tree.dtype_name(leaf) for leaf in suite.base.values()})
        found = [f"float32 master weights while training, experts stored in {' and '.join(kinds)}"]
    return found + _rounded(suite)


def _rounded(suite: Suite) -> list[str]:
    """A phrase on trained weights of a folder or hub name that are stored in a wider dtype than they are loaded in."""
    model = suite.recipe.get("model")
    if not model:
        return []
    stored = stored_dtypes(Path(model), suite.base)
    pairs = ((stored.get(name), leaf.dtype) for name, leaf in suite.base.items())
    lost = {(kind, own) for kind, own in pairs if kind is not None and torch.promote_types(kind, own) != own}
    said = {tuple(str(dtype).removeprefix("torch.") for dtype in pair) for pair in lost}
    hint = " (--precision fp32 keeps them)"
    return [f"{wide} weights rounded to {own}{'' if own == 'float32' else hint}" for wide, own in sorted(said)]


def _epochs(epochs: Mapping[str, int]) -> str:
    each = set(epochs.values())
    if len(each) > 1:
        return "epochs " + ", ".join(f"{count} ({task})" for task, count in epochs.items())
    return "".join(f"{count} epoch{'s' if count > 1 else ''}" for count in each)


def _task_line(suite: Suite, task: str, training: Training) -> str:
    line = f"{task}: {training.steps} steps" + (f" ({training.epochs[task]} epochs)" if training.epochs else "")
    if suite.cuts is None:
        return line
    cut = suite.cuts(task)
    rows = f"{cut.texts} texts in {cut.rows} windows" if cut.texts else f"{cut.rows} rows"
    line = f"{line}, {rows} of up to {cut.longest} tokens"
    if cut.texts and not cut.eos and not cut.answer:
        return line  # plain texts are not cut
    kept = suite.recipe.get("truncate", "right")
    place = "in the middle of prompts" if kept == "prompt-middle" else f"on the {'left' if kept == 'left' else 'right'}"
    shares = f"{cut.eos:.1%} lose EOS, {cut.answer:.1%} a part of the answer, {cut.whole_answer:.1%} all of it"
    return f"{line}; cut {place}: {shares}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
