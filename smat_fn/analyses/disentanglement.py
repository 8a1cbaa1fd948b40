"""Weight disentanglement: does a task's prediction change when another task's update is added?"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .. import errors, merge, tree
from ..types import LossFn, Micro, Params
from .diagnose import mapping_problems
from .landscape import slice_point
from .stacked import Job, Progress, score_jobs

Predict = Callable[[Params, str], Tensor]


def disentanglement(
    base: Params,
    experts: Mapping[str, Params],
    predict: Predict,
    points: Sequence[tuple[float, float]],
    *,
    memory: int | None = None,
    done: Progress | None = None,
) -> list[dict[str, float]]:
    """The two terms of the disentanglement error at each point (a₁, a₂), by task; ξ(a₁, a₂) is their sum.

    ξ(a₁, a₂) = Σ_t E_{x of task t} [dist(f(x; θ₀ + a_t τ_t), f(x; θ₀ + a₁ τ₁ + a₂ τ₂))], where τ_t is the update of
    expert t and dist is 1 where two predictions differ, else 0. The expectation is the mean over the inputs that
    ``predict`` takes; labels are not used.

    Args: experts: two, by task; predict: of a tree and a task, the predicted classes of this task's inputs, int64 (n,),
        -1 where there is none; memory, done: as in `score_jobs`.
    Returns: shares from 0 to 1, NaN where a prediction is -1.
    Raises: ValueError for other than two experts.
    Source: Ortiz-Jimenez, Favero, Frossard, Task Arithmetic in the Tangent Space, NeurIPS 2023.
    """
    problems = mapping_problems(experts)
    if not problems and len(experts) != 2:
        problems = [f"experts are {len(experts)} ({', '.join(map(repr, experts))}): give two"]
    errors.raise_problems(problems)
    first, second = (tree.flatten(merge.task_vector(expert, base)) for expert in experts.values())
    alone = [{a: (a, 0.0) for a, _ in points}, {a: (0.0, a) for _, a in points}]  # of one update each
    with torch.no_grad():
        references = [
            {a: predict(slice_point(base, first, second, *at), task) for a, at in own.items()}
            for task, own in zip(experts, alone, strict=True)
        ]

    def build(point: tuple[float, float]) -> Params:
        wanted = {task: own[a] for task, own, a in zip(experts, references, point, strict=True)}
        return {"model": slice_point(base, first, second, *point), "wanted": wanted}

    def differ(both: Params, task: str) -> Tensor:
        found, wanted = predict(both["model"], task), both["wanted"][task]
        lost = ((found < 0) | (wanted < 0)).any()
        return torch.where(lost, torch.nan, (found != wanted).double().mean())

    jobs = (Job(partial(build, point), tuple(experts)) for point in points)
    return score_jobs(jobs, lambda both, task: float(differ(both, task)), batched=differ, memory=memory, done=done)


def predictions(losses: Mapping[str, LossFn], batches: Mapping[str, Sequence[Micro]]) -> Predict:
    """``predict(params, task)``: the classes with the largest logits on the batches of a task, -1 where they are NaN.

    Args: losses: by task, whose aux are logits (n, C); batches: by task.
    """

    def predict(params: Params, task: str) -> Tensor:
        logits = torch.cat([losses[task](params, part.batch)[1] for part in batches[task]])
        return torch.where(logits.amax(1).isnan(), -1, logits.argmax(1))

    return predict
