"""Many models at once: their weights stacked along a new first axis, one batched evaluation by ``torch.func.vmap``.

A γ grid, a loss slice and a sweep over subsets are lists of trees that differ in values alone.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import tree
from ..types import Params, Suite

log = logging.getLogger(__name__)

# bytes of weights and activations that a batch may take: on a CPU about what its caches hold (benchmarks/vmap.py)
MEMORY = {"cpu": 1 << 23, "cuda": 1 << 30}
Build = Callable[[], Params]
Progress = Callable[[int], Any]


class Job(NamedTuple):
    """A model to be scored.

    Attributes:
        build: makes the model, when it is its turn.
        tasks: the tasks that the model is scored on.
    """

    build: Build
    tasks: tuple[str, ...]


def stack(trees: Sequence[Params]) -> Params:
    """Trees of one structure as one: leaf shapes (K, ...), detached copies."""
    if not trees:
        raise ValueError("stack: no trees, give at least one")
    leaves = [tree.flatten(one) for one in trees]
    tree.check_same(leaves[0], "tree 0", **{f"tree {i}": own for i, own in enumerate(leaves[1:], 1)})
    return tree.unflatten(trees[0], {path: torch.stack([one[path].detach() for one in leaves]) for path in leaves[0]})


def evaluate(
    fn: Callable[[Params], Tensor], builds: Iterable[Build], *, memory: int | None = None, done: Progress | None = None
) -> list[float]:
    """``[fn(build()) for build in builds]``, as many models at a time as fit into ``memory``, without gradients.

    A batch is ``vmap(fn)(stack(models))``; it equals the loop within rounding. The first model is evaluated alone:
    each model of a batch is assumed to need twice its weights and four times its largest activation. A batch of one is
    the loop; so is a function that vmap refuses or has no batching rule for, after a line in the log.

    Args: fn: of a tree, a 0-d tensor; builds: make the trees, called once each, in order; memory: bytes, 0 for a loop,
        None for `MEMORY` of the device; done: called with the number of models after each batch.
    """
    jobs = (Job(build, ("",)) for build in builds)
    return [found[""] for found in _sweep(jobs, lambda params, task: fn(params), memory, done)]


def score_jobs(
    jobs: Iterable[Job],
    score: Callable[[Params, str], float],
    *,
    batched: Callable[[Params, str], Tensor] | None = None,
    memory: int | None = None,
    done: Progress | None = None,
) -> list[dict[str, float]]:
    """Scores of every job by task: ``{task: score(job.build(), task)}``; each model is built once.

    Args: score: of one model, any code; batched: the same number as a 0-d tensor, by operations that vmap knows; with
        it models are evaluated together, task by task; memory, done: as in `evaluate`, done in scores.
    """
    return _sweep(jobs, score, 0, done) if batched is None else _sweep(jobs, batched, memory, done)


def scores_of(
    suite: Suite, split: str, *, memory: int | None = None, done: Progress | None = None
) -> Callable[[Iterable[Job]], list[dict[str, float]]]:
    """`score_jobs` by the scores of a suite on a split, batched where the suite allows it."""
    tensor = suite.score_tensor
    return partial(
        score_jobs,
        score=lambda params, task: suite.score(params, task, split),
        batched=None if tensor is None else lambda params, task: tensor(params, task, split),
        memory=memory,
        done=done,
    )


def _sweep(
    jobs: Iterable[Job], fn: Callable[[Params, str], Any], memory: int | None, done: Progress | None
) -> list[dict[str, float]]:
    rest, found, count = iter(jobs), list[dict[str, float]](), 1
    with torch.no_grad():
        while chunk := list(islice(rest, count)):
            models = [job.build() for job in chunk]
            scores: list[dict[str, float]] = [dict.fromkeys(job.tasks, 0.0) for job in chunk]
            with _Largest() if not found and memory != 0 else nullcontext() as seen:
                for task in dict.fromkeys(task for job in chunk for task in job.tasks):
                    places = [place for place, job in enumerate(chunk) if task in job.tasks]
                    own = [models[place] for place in places]
                    values = _batched(fn, task, own) if count > 1 and len(own) > 1 else None
                    if values is None:
                        values = [float(fn(params, task)) for params in own]
                        if len(own) > 1:  # refused: a loop from here on
                            count = 1
                    for place, value in zip(places, values, strict=True):
                        scores[place][task] = value
                    if done is not None:
                        done(len(own))
            if seen is not None:  # the first model, alone
                leaves = list(tree.flatten(models[0]).values())
                budget = MEMORY.get(leaves[0].device.type, MEMORY["cpu"]) if memory is None else memory
                # weights twice: a model is there while it is copied into the stack
                count = max(1, budget // max(1, 2 * sum(leaf.nbytes for leaf in leaves) + 4 * seen.bytes))
            found += scores
    return found


def _batched(fn: Callable[[Params, str], Tensor], task: str, models: Sequence[Params]) -> list[float] | None:
    try:
        with warnings.catch_warnings():
            # an operation without a batching rule is looped inside vmap, slower than the loop outside
            warnings.filterwarnings("error", message=".*batching rule", category=UserWarning)
            return torch.func.vmap(lambda params: fn(params, task))(stack(models)).tolist()
    except (RuntimeError, UserWarning) as error:  # an error of fn itself comes again in the loop
        log.info("vmap cannot batch these models, they are evaluated one by one: %s", shorten(str(error), 200))
        return None


class _Largest(TorchFunctionMode):
    """Bytes of the largest tensor that any torch function returns inside the block."""

    bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.layout == torch.strided:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result
