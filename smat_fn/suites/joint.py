"""The multi-task model: all tasks of a suite as one, whose steps take a batch of each task in turn."""

from collections.abc import Mapping
from math import fsum
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import random
from ..checkpoint import JOINT
from ..data.batching import split_rows
from ..data.text import Cut
from ..evaluate.records import content_key
from ..grad import ModuleLoss, linearised
from ..grad.tangent import Linearised
from ..models import FullLoss
from ..types import Aux, Batch, LossFn, Micro, Params, Suite

HASHES = "hash", "dev", "inputs", "head"  # of `train_rows`


class OfTask(NamedTuple):
    """A batch with the place of its task, which chooses its loss."""

    place: int
    batch: Batch


def joint(suite: Suite, steps: Mapping[str, int], *, seed: int) -> Suite:
    """A suite whose only task is `JOINT`: the tasks of ``steps``, each for its number of steps.

    The tasks take turns. Those that have had all their steps are left out, so that the n-th batch of a task is the n-th
    batch of its own expert. A dev score is the mean over the tasks, a dev loss the mean over all dev rows.

    Args:
        suite: whose base, masked set and recipe stay as they are.
        steps: by task, in their order.
        seed: of the run, as `train_expert` takes it for an expert.
    Raises: ValueError for a task that the suite does not have.
    """
    tasks = tuple(steps)
    turns = [(task, n) for n in range(max(steps.values())) for task in tasks if n < steps[task]]
    keys = {task: random.fold_in(random.key(seed), task) for task in tasks}
    losses = [suite.loss_fn(task) for task in tasks]
    alike = all(loss is losses[0] for loss in losses)  # then no batch needs its task
    split, dev_batches, train_rows, cuts = suite.split or split_rows, suite.dev_batches, suite.train_rows, suite.cuts

    def marked(task: str, batch: Batch) -> Batch:
        return batch if alike else OfTask(tasks.index(task), batch)

    def batch(_: str, key: Tensor, step: int) -> Batch:
        task, n = turns[step]
        return marked(task, suite.batch(task, keys[task], n))

    def split_one(one: Batch, parts: int) -> list[Micro]:
        if alike:
            return split(one, parts)
        return [Micro(OfTask(one.place, own), weight) for own, weight in split(one.batch, parts)]

    def score(params: Params, _: str, split: str) -> float:
        return fmean(suite.score(params, task, split) for task in tasks)

    def every_dev_batch(_: str) -> list[Micro]:
        assert dev_batches is not None
        return [Micro(marked(task, own), weight) for task in tasks for own, weight in dev_batches(task)]

    def rows_of_all(_: str) -> dict[str, Any]:
        assert train_rows is not None
        return _together({task: train_rows(task) for task in tasks})

    def cut(_: str) -> Cut:
        assert cuts is not None
        return _cut([cuts(task) for task in tasks])

    each = ", ".join(f"{task} ({count} steps)" for task, count in steps.items())
    return suite.replace(
        tasks=(JOINT,),
        notes=(*suite.notes, f"{JOINT} is one model, trained on {each}"),
        loss_fn=lambda _: losses[0] if alike else joint_loss(losses, suite.base),
        batch=batch,
        split=split_one,
        score=score,
        dev_batches=dev_batches and every_dev_batch,
        train_rows=train_rows and rows_of_all,
        cuts=cuts and cut,
        epoch_steps=None,
        batch_rows=None,  # numbers of rows say nothing without their task
    )


def joint_loss(losses: list[LossFn], base: Params) -> ModuleLoss:
    """The loss of `OfTask`: that of its task, of losses that run one module.

    Raises: ValueError for losses of several modules.
    """
    if all(isinstance(loss, Linearised) for loss in losses):
        return linearised(joint_loss([loss.inner for loss in losses], base), base)  # type: ignore[attr-defined]
    parts = [loss for loss in losses if isinstance(loss, ModuleLoss) and type(loss).within is ModuleLoss.within]
    if len(parts) < len(losses) or len({id(part.module) for part in parts}) > 1:
        raise ValueError("--joint needs a suite whose tasks run one module: train experts, without --joint")

    def loss(module: nn.Module, one: OfTask) -> tuple[Tensor, Aux]:
        return parts[one.place].loss(module, one.batch)

    return FullLoss(parts[0].module, loss)


def _together(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The training rows of all tasks: their sources, their number, and a hash that changes where that of one does."""
    found: dict[str, Any] = {
        "from": ", ".join(str(own["from"]) for own in rows.values()),
        "count": sum(own["count"] for own in rows.values()),
    }
    for name in HASHES:
        if any(name in own for own in rows.values()):
            found[name] = content_key({task: own.get(name) for task, own in rows.items()})
    if any("classes" in own for own in rows.values()):
        found["classes"] = [name for own in rows.values() for name in own.get("classes", ())]
    return found


def _cut(parts: list[Cut]) -> Cut:
    rows = sum(part.rows for part in parts)
    eos, answer, whole_answer = (fsum(part[at] * part.rows for part in parts) / rows for at in (1, 2, 3))
    texts = sum(part.texts or part.rows for part in parts) if any(part.texts for part in parts) else 0
    return Cut(rows, eos, answer, whole_answer, max(part.longest for part in parts), texts)
