"""Loss slices along merge directions (paper section 5.3, Eq. shared-interference-landscape)."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from .. import errors, merge, tree
from ..errors import problems_of
from ..merge.parts.inputs import coef_problems
from ..types import LossFn, Micro, Params
from .diagnose import mapping_problems
from .stacked import Progress, evaluate


def partner_update(base: Params, experts: Mapping[str, Params], task: str, *, coef: float = 0.3) -> dict[str, Tensor]:
    """u_i = γ Σ_{j≠i} Δ_j, flat, floating-point leaves, in compute dtype.

    Raises: ValueError for a task that is not an expert's name, and for one without another expert.
    """
    errors.raise_problems(coef_problems(coef) + mapping_problems(experts))
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
        of a tree, a 0-d tensor, on the same samples for every point and method; a, b: finite; memory, done: as in
        `evaluate`.
    Raises: ValueError that lists axes that are not lists of finite numbers, a loss that cannot be called, and partners
        that are not those of base.
    """
    problems = list[str]()
    a, b = _axis("a", a, problems), _axis("b", b, problems)
    problems += [] if callable(loss) else [f"loss is {loss!r}: give a function of a tree"]
    problems += [] if memory is None else errors.count_problem("memory", memory, 0)
    errors.raise_problems(problems + [f"partners: {text}" for text in problems_of(tree.flatten, partners)])
    delta = tree.flatten(merge.task_vector(expert, base))
    floating = {path: leaf for path, leaf in tree.flatten(base).items() if leaf.is_floating_point()}
    tree.check_same(floating, "base", partners=tree.flatten(partners))
    points = list(product(b, a))
    values = evaluate(
        loss, (partial(slice_point, base, delta, partners, x, y) for y, x in points), memory=memory, done=done
    )
    return [values[start : start + len(a)] for start in range(0, len(points), len(a))]


def _axis(name: str, values: Sequence[float], problems: list[str]) -> list[float]:
    """The coordinates of an axis; an error for others than finite numbers goes into ``problems``."""
    try:
        found = [float(value) for value in values]
    except (TypeError, ValueError):
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        problems.append(f"{name} is {values!r}, must be a list of finite numbers")
    return found


def mean_loss(loss_fn: LossFn, batches: Sequence[Micro]) -> Callable[[Params], Tensor]:
    """``loss(params)``: mean of the losses of batches by their weights.

    Args: batches: at least one `Micro`, of positive and finite weight.
    Raises: ValueError for no batches, and others.
    """
    if not batches or not all(isinstance(part, Micro) for part in batches):
        raise ValueError("mean_loss: batches must be a list of at least one Micro(batch, weight)")
    if bad := [part.weight for part in batches if not 0 < part.weight < math.inf]:
        raise ValueError(f"mean_loss: weights of batches are {bad}: must be positive, leave out what weighs nothing")

    def loss(params: Params) -> Tensor:
        values = [float(weight) * loss_fn(params, batch)[0] for batch, weight in batches]
        return torch.stack(values).sum() / math.fsum(float(weight) for _, weight in batches)

    return loss
