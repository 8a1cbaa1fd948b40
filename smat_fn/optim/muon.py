"""Muon on matrices, another optimizer on the rest: a functional wrapper of torch's own Muon."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim._muon import muon as torch_muon

from .. import errors, tree
from ..execution import Shards, no_grad, refuse_donation, shards, transformed
from ..types import Optimizer, Params, PerStep, Where
from .schedules import schedule_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, torch's defaults


class MuonState(NamedTuple):
    """State of Muon and of the optimizer of the rest.

    Attributes:
        step: updates done; 0-d int64 inside vmap and torch.compile.
        momentum: of the matrices, by path, of their shapes and dtypes.
        rest: state of the optimizer of the other parameters.
    """

    step: int | Tensor
    momentum: dict[str, Tensor]
    rest: Any


# over 60 lines: torch's function takes twelve arguments, one a line, and the docstring explains every option
def muon(
    lr: float | PerStep,
    *,
    rest: Optimizer,
    where: Where | None = None,
    momentum: float = 0.95,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
) -> Optimizer:
    r"""Muon with Nesterov momentum on matrices, bit-identical to ``torch.optim.Muon(adjust_lr_fn="original")``.

    ``theta (1 - lr wd) - lr sqrt(max(1, rows / columns)) NS(g lerp m)``, NS the Newton-Schulz orthogonalisation.

    Args:
        lr: learning rate >= 0 of the matrices, or a schedule ``step -> lr`` with steps counted from 0.
        rest: optimizer of all other parameters, usually `adamw`.
        where: picks the matrices among 2-D parameters, a predicate such as ``where.muon_matrices(module)`` or a tree of
            bools; None: all of them.
        momentum: decay rate of the momentum, in [0, 1).
        ns_steps: Newton-Schulz iterations, 1 to 99.
        weight_decay: decoupled weight decay >= 0 of the matrices.

    Returns:
        An `Optimizer` whose state is a `MuonState`.

    Raises:
        ValueError: lists every value that is out of range.

    Source:
        Jordan et al., 2024; paper section 5.3.
    """
    problems = [] if 0 <= momentum < 1 else [f"momentum {momentum} is outside [0, 1)"]
    problems += (
        [] if isinstance(ns_steps, int) and 1 <= ns_steps < 100 else [f"ns_steps is {ns_steps}, must be 1 to 99"]
    )
    if not isinstance(rest, Optimizer):
        problems.append(f"rest is a {type(rest).__name__}: give an optimizer of smat_fn.optim for the other leaves")
    problems += errors.problems_of(tree.predicate, where)
    schedule = schedule_of(lr, problems, weight_decay=weight_decay)
    picks = tree.predicate(where)

    # long for its two closures and torch's list of arguments
    def is_matrix(path: str, leaf: Tensor) -> bool:
        return leaf.ndim == 2 and leaf.numel() > 0 and (picks is None or picks(path, leaf))

    def init(params: Params) -> MuonState:
        tree.check_floating(tree.flatten(params), "params")
        matrices, others = tree.partition(params, is_matrix)
        return MuonState(tree.counter(0, params), tree.tree_map(torch.zeros_like, matrices), rest.init(others))

    @no_grad
    def update(grads: Params, state: MuonState, params: Params, *, donate: bool = False) -> tuple[Params, MuonState]:
        refuse_donation("muon", donate)
        flat_grads = tree.flatten(grads)
        tree.check_gradients(tree.flatten(params), flat_grads)
        matrices, others = tree.partition(params, is_matrix)
        tree.check_kind(state, "step", "momentum", "rest")
        tree.check_state(matrices, momentum=tree.flatten(state.momentum))
        other_grads = {p: flat_grads[p] for p in others}
        if transformed() or isinstance(state.step, Tensor):
            others, rest_state = rest.update(other_grads, state.rest, others)
            lr_now = schedule(state.step)
            buffers, moved = {}, {}
            for p, matrix in matrices.items():
                buffers[p] = torch.lerp(state.momentum[p], flat_grads[p], 1 - momentum)
                direction = _orthogonal(torch.lerp(flat_grads[p], buffers[p], momentum), ns_steps)
                moved[p] = _stepped(matrix * (1 - lr_now * weight_decay), direction, lr_now)
            step = tree.counter(state.step + 1, params)
            return tree.combine(params, moved, others), MuonState(step, buffers, rest_state)
        own: Callable[[Any], Any] = (lambda t: t) if donate else tree.clone
        matrices, buffers = own(matrices), own(state.momentum)
        others, rest_state = rest.update(other_grads, state.rest, others, **({"donate": True} if donate else {}))
        given = {"lr": schedule(state.step), "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps}
        trees = [[own[p] for p in matrices] for own in (matrices, flat_grads, buffers)]
        if (spread := shards()) is not None:
            _on_shards(spread, list(matrices), *trees, **given)
        else:
            torch_muon(
                *trees,
                nesterov=True,  # without it torch before 2.15 writes into a bfloat16 momentum
                ns_coefficients=_COEFFICIENTS,
                eps=1e-7,
                adjust_lr_fn="original",
                has_complex=False,
                **given,
            )
        return tree.combine(params, matrices, others), MuonState(state.step + 1, buffers, rest_state)

    return Optimizer(init, update)


def _on_shards(
    spread: Shards,
    paths: Sequence[str],
    matrices: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    ns_steps: int,
) -> None:
    """torch's function on rows of matrices: each process makes all directions, one whole matrix at a time."""
    for path, matrix, grad, buffer in zip(paths, matrices, grads, buffers, strict=True):
        buffer.lerp_(grad, 1 - momentum)
        direction = _orthogonal(spread.whole(path, grad.lerp(buffer, momentum)), ns_steps)
        rows, columns = direction.shape
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(spread.own(path, direction), alpha=-lr * max(1, rows / columns) ** 0.5)


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iteration in bfloat16, as in torch, without a write."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _stepped(param: Tensor, direction: Tensor, lr: float | Tensor) -> Tensor:
    factor = max(1, param.shape[0] / param.shape[1]) ** 0.5
    if not isinstance(lr, Tensor):
        return torch.add(param, direction, alpha=-lr * factor)
    wide = tree.compute_dtype(param)
    return (param.to(wide) - lr.to(param.device, wide) * factor * direction.to(wide)).to(param.dtype)
