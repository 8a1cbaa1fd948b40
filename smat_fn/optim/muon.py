"""Muon on matrices, another optimizer on the rest: a pure face on torch's own Muon."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim._muon import muon as torch_muon

from .. import errors, tree
from ..types import Optimizer, Params, Schedule, Where
from .schedules import constant

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, torch's defaults


class MuonState(NamedTuple):
    """State of Muon and of the optimizer of the rest."""

    step: int  # updates done
    momentum: dict[str, Tensor]  # of the matrices, by path
    rest: Any


def muon(
    lr: float | Schedule,
    *,
    rest: Optimizer,
    where: Where | None = None,
    momentum: float = 0.95,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
) -> Optimizer:
    r"""Muon with Nesterov momentum, bit-equal to ``torch.optim.Muon(adjust_lr_fn="original")``; ``rest`` elsewhere.

    ``theta (1 - lr wd) - lr sqrt(max(1, rows / columns)) NS(g lerp m)``, NS the Newton-Schulz orthogonalisation.

    Args: lr: number or schedule of the step; rest: optimizer of all other leaves, usually `adamw`; where: the matrices,
        as a predicate on (path, leaf), among the 2-D leaves (None: all of them); momentum: in [0, 1); ns_steps:
        Newton-Schulz steps; weight_decay: decoupled.
    Raises: ValueError that lists values out of range.
    Source: Jordan et al., 2024; paper section 5.3.
    """
    problems = [] if 0 <= momentum < 1 else [f"momentum {momentum} is outside [0, 1)"]
    problems += (
        [] if isinstance(ns_steps, int) and 1 <= ns_steps < 100 else [f"ns_steps is {ns_steps}, must be 1 to 99"]
    )
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        problems.append(f"weight_decay is {weight_decay}, must be finite and not negative")
    if not isinstance(rest, Optimizer):
        problems.append(f"rest is a {type(rest).__name__}: give an optimizer of smat_fn.optim for the other leaves")
    try:
        schedule = lr if callable(lr) else constant(lr)
    except ValueError as error:
        problems.append(str(error))
    errors.raise_problems(problems)

    def split(flat: dict[str, Tensor], like: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        matrices = {p for p, leaf in like.items() if leaf.ndim == 2 and (where is None or where(p, leaf))}
        return {p: flat[p] for p in like if p in matrices}, {p: flat[p] for p in like if p not in matrices}

    def init(params: Params) -> MuonState:
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        matrices, others = split(flat, flat)
        return MuonState(0, tree.tree_map(torch.zeros_like, matrices), rest.init(others))

    @torch.no_grad()
    def update(grads: Params, state: MuonState, params: Params, *, donate: bool = False) -> tuple[Params, MuonState]:
        flat, flat_grads = tree.flatten(params), tree.flatten(grads)
        tree.check_same(flat, "params", grads=flat_grads)
        matrices, others = split(flat, flat)
        matrix_grads, other_grads = split(flat_grads, flat)
        own: Callable[[Any], Any] = (lambda t: t) if donate else tree.clone
        matrices, buffers = own(matrices), own(state.momentum)
        others, rest_state = rest.update(other_grads, state.rest, others, **({"donate": True} if donate else {}))
        torch_muon(
            list(matrices.values()),
            [matrix_grads[p] for p in matrices],
            [buffers[p] for p in matrices],
            lr=schedule(state.step),
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=True,  # without it torch before 2.15 writes into a bfloat16 momentum
            ns_coefficients=_COEFFICIENTS,
            ns_steps=ns_steps,
            eps=1e-7,
            adjust_lr_fn="original",
            has_complex=False,
        )
        return tree.combine(params, matrices, others), MuonState(state.step + 1, buffers, rest_state)

    return Optimizer(init, update)
