"""AdaMerging: coefficients by task, or by task and leaf, that make the merged model's predictions certain."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import errors, random, tree
from ..types import Aux, Batch, LossFn, Params
from .parts.chunks import delta_of
from .parts.inputs import Experts, Leaves, check, type_problems
from .parts.vectors import apply_vector


class Adapted(NamedTuple):
    """A merged model and its coefficients.

    Attributes:
        params: the merged model, in base's structure and dtypes.
        coefs: by expert and leaf; of task-wise ones the leaf is "*".
        entropy: sum over tasks of the mean entropy of a batch, before every step, in nats.
    """

    params: Params
    coefs: dict[str, dict[str, float]]
    entropy: list[float]


# over 60 lines: its docstring explains every argument
def adamerging(
    loss_fns: Mapping[str, LossFn],
    base: Params,
    experts: Experts,
    batches: Mapping[str, Sequence[Batch]],
    key: Tensor,
    *,
    layer_wise: bool = True,
    steps: int = 500,
    lr: float = 1e-3,
    start: float = 0.3,
) -> Adapted:
    """θ₀ + Σ_i λ_i,l Δ_i,l, λ = argmin Σ_t mean_x H(softmax f_t(x; θ)), by Adam; λ is kept in [0, 1]. No label is read.

    A step takes one batch of every task: step s that of place ⌊n u⌋, u uniform from ``fold_in(fold_in(key, task), s)``.

    Args:
        loss_fns: of the experts' tasks by the experts' names; their aux are the logits (B, classes), on the graph.
        base: tree that the experts were trained from.
        experts: {name: tree}.
        batches: unlabelled rows of every task, by the same names; labels in them play no part.
        key: int64 (2,), for the order of the batches.
        layer_wise: a coefficient for every leaf of every expert, else one for every expert.
        steps: of Adam.
        lr: learning rate of Adam.
        start: first value of all coefficients.

    Returns:
        The merged tree of base's structure and dtypes, the coefficients, and the entropies.

    Raises:
        ValueError: lists every problem of values, names, structure and shapes.

    Source: Yang et al., "AdaMerging: adaptive model merging for multi-task learning", 2024, equations (5) to (7), with
        its learning rate, number of steps and start.
    """
    from .. import optim  # here, so that importing a merger loads no training
    from ..grad import loss_and_aux, value_and_grad

    problems, wrong = errors.count_problem("steps", steps), type_problems(lr=lr, start=start)
    problems += wrong
    if not wrong:
        problems += [] if lr > 0 else [f"lr is {lr}, must be positive"]
        problems += [] if 0 <= start <= 1 else [f"start is {start}, must be in [0, 1]"]
    origin, flat = check(base, experts, problems)
    floating = [path for path, leaf in origin.items() if leaf.is_floating_point()]
    for name in flat:
        problems += [f"task {name!r} has no loss: give one by the expert's name"] if name not in loss_fns else []
        problems += [f"task {name!r} has no batches: give at least one"] if not batches.get(name) else []
    errors.raise_problems(problems)
    wide = {path: tree.compute_dtype(origin[path], *(own[path] for own in flat.values())) for path in floating}
    deltas = {
        name: {path: delta_of(own[path], origin[path], wide[path]) for path in floating} for name, own in flat.items()
    }
    places = floating if layer_wise else ["*"]
    first = next(iter(deltas.values()))[floating[0]]
    coefs: Leaves = {
        name: torch.full((len(places),), float(start), dtype=torch.float32, device=first.device) for name in flat
    }

    def vector(coefs: Leaves, path: str) -> Tensor:
        place = floating.index(path) if layer_wise else 0
        return sum(coefs[name][place].clamp(0, 1).to(wide[path]) * deltas[name][path] for name in deltas)  # type: ignore[return-value]

    def objective(coefs: Leaves, step: int) -> tuple[Tensor, Aux]:
        merged = {path: (origin[path].to(wide[path]) + vector(coefs, path)).to(origin[path].dtype) for path in floating}
        params = tree.unflatten(base, {**origin, **merged})
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        for name in flat:
            drawn = float(random.uniform(random.fold_in(random.fold_in(key, name), step), (1,), dtype=torch.float64))
            batch = batches[name][int(drawn * len(batches[name]))]
            logits = loss_and_aux(loss_fns[name](params, batch))[1]
            if not (isinstance(logits, Tensor) and logits.requires_grad):
                got = "without a gradient" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                raise ValueError(
                    f"the aux of task {name!r} is {got}, so that its coefficients would stay at their start: return "
                    "(loss, logits), the logits computed from params and not detached"
                )
            total = total + entropy(logits).cpu()
        return total, None

    gradient, optimizer = value_and_grad(objective), optim.adam(lr)
    state, found = optimizer.init(coefs), list[float]()
    for step in range(steps):
        (value, _), grads = gradient(coefs, step)
        found.append(float(value))
        if not math.isfinite(found[-1]):
            raise ValueError(
                f"the entropy in step {step} is {found[-1]}: a task's logits are not finite there; if the experts' own "
                "are, pass a smaller lr"
            )
        coefs, state = optimizer.update(grads, state, coefs)
    with torch.no_grad():
        merged = apply_vector(base, {path: vector(coefs, path) for path in floating}, coef=1.0)
    numbers = {name: dict(zip(places, own.clamp(0, 1).tolist(), strict=True)) for name, own in coefs.items()}
    return Adapted(merged, numbers, found)


def entropy(logits: Tensor) -> Tensor:
    """The mean over rows of −Σ_c p_c log p_c, p = softmax(logits)."""
    shares = logits.log_softmax(-1)
    return -(shares.exp() * shares).sum(-1).mean()
