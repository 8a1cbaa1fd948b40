"""Loss slices along merge directions (paper section 5.3, Eq. shared-interference-landscape)."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from .. import merge, tree
from ..types import LossFn, Micro, Params
from .stacked import Progress, evaluate


def partner_update(base: Params, experts: Mapping[str, Params], task: str, *, coef: float = 0.3) -> dict[str, Tensor]:
    """u_i = γ Σ_{j≠i} Δ_j, flat, floating-point leaves, in compute dtype.

    Raises: ValueError for a task that is not an expert's name, and for one without another expert.
    """
    if task not in experts:
        raise ValueError(f"task {task!r} is not an expert: choose one of {', '.join(map(repr, experts))}")
    partners = {name: expert for name, expert in experts.items() if name != task}
    if not partners:
        raise ValueError(f"task {task!r} has no other expert among {list(experts)}: give at least one")
    return {path: leaf.mul_(coef) for path, leaf in merge.task_arithmetic_vector(base, partners).items()}


def slice_point(
    base: Params, delta: Mapping[str, Tensor], partners: Mapping[str, Tensor], a: float, b: float
) -> Params:
    """θ(a, b) = θ₀ + a Δ + b u, in compute dtype, rounded once to the dtype of each leaf of base.

    (0, 0) is base; (1, 0) is the expert, within one ulp of max(|θ|, |θ₀|).
    """

    def leaf(path: str, start: Tensor) -> Tensor:
        if not start.is_floating_point():
            return start.clone()
        moved = delta[path].to(start.device) * a
        return moved.add_(partners[path].to(start.device), alpha=b).add_(start).to(start.dtype)

    return tree.unflatten(base, {path: leaf(path, start) for path, start in tree.flatten(base).items()})


def landscape(
    base: Params,
    expert: Params,
    partners: Mapping[str, Tensor],
    loss: Callable[[Params], Tensor],
    *,
    a: Sequence[float],
    b: Sequence[float],
    memory: int | None = None,
    done: Progress | None = None,
) -> list[list[float]]:
    """L(θ₀ + a Δ_i^(r) + b u_i^FT) at every (a, b) of a grid: rows by b, columns by a.

    Args: expert: of method r on task i; partners: `partner_update` of the FT experts, the same for every method; loss:
        of a tree, a 0-d tensor, on the same samples for every point and method; memory, done: as in `evaluate`.
    """
    delta = tree.flatten(merge.task_vector(expert, base))
    points = list(product(b, a))
    values = evaluate(
        loss, (partial(slice_point, base, delta, partners, x, y) for y, x in points), memory=memory, done=done
    )
    return [values[start : start + len(a)] for start in range(0, len(points), len(a))]


def mean_loss(loss_fn: LossFn, batches: Sequence[Micro]) -> Callable[[Params], Tensor]:
    """``loss(params)``: mean of the losses of batches by their weights."""

    def loss(params: Params) -> Tensor:
        values = [float(weight) * loss_fn(params, batch)[0] for batch, weight in batches]
        return torch.stack(values).sum() / math.fsum(float(weight) for _, weight in batches)

    return loss
