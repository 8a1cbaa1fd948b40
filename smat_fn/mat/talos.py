"""TaLoS: only the coordinates to which the base is least sensitive are trained."""

from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import count_problem, raise_problems
from ..execution import transformed
from ..grad import keyed, value_and_grad
from ..optim import AveragedState
from ..types import Batch, Engine, LossFn, Method, Optimizer, Params, Where
from . import step
from .finetune import Info
from .step import Gradient

__all__ = ["Info", "State", "Talos", "build"]

CALIBRATION = 20  # steps
SHRUNK = 0.1  # what the weights that are frozen already are multiplied by while the others are measured
Counts = dict[int, int]  # steps done at the end of a round -> coordinates that are left


class State(NamedTuple):
    """State of the method between steps.

    Attributes:
        params: theta, the expert's parameters.
        opt_state: of the optimizer.
        step: optimizer steps done; 0-d int64 inside vmap and torch.compile.
        scores: as params, float32: negative where a coordinate is frozen, else its squared gradients, summed over the
            steps of the round of calibration, and 0 after the last one.
    """

    params: Params
    opt_state: Any
    step: int | Tensor
    scores: Params


# over 60 lines: its docstring states the calibration, where it differs from its source, and the cost
def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    sparsity: float = 0.9,
    rounds: int = 4,
    calibration: int = CALIBRATION,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Fine-tuning of the least sensitive coordinates, found in the first steps.

    In the first ``calibration`` steps params stay where they are. A round r of R of them adds up ``F_j = sum (d L(theta
    (.) s) / d theta_j)^2`` over its batches, s 0.1 in frozen coordinates and else 1, and then freezes all coordinates
    but the ``(1 - sparsity)^(r / R)`` part of all with the smallest F: one threshold for all leaves, and of equal F at
    the threshold none is frozen. Later steps are ``theta_j <- `` the optimizer's new theta_j in the coordinates that
    are left; frozen ones never move, by weight decay neither. The optimizer sees the whole gradient, clipped by its
    whole norm, in every step, so that moments and schedule begin with the first step.

    As the released code of its source, but: F is the square of the gradient of a batch's mean loss with the labels of
    the data, where the source squares the gradient of each row of a held-out set with a label drawn from the model,
    since a method sees losses and neither rows nor predictions; all trained leaves take part, where the source freezes
    the embeddings of text models.

    Two passes in steps of calibration, else one. One buffer in the state, float32; a donating step keeps a copy of
    params, calibration the weights ``theta (.) s``, and the end of a round sorts all F at once. Inside vmap and
    torch.compile every step is as expensive as the end of a round.

    Args:
        sparsity: part of the coordinates that is frozen, in [0, 1); 0: fine-tuning, without calibration.
        rounds: R >= 1.
        calibration: steps, at least as many as rounds.
        others: as in `smat_fn.mat.finetune.build`.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``, key for
            the loss alone (dropout).

    Raises:
        ValueError: lists every bad argument, and in ``init`` for params that do not match base.

    Source: Iurada, Ciccone and Tommasi, 2025; vision/pruners.py and vision/prune_finetune.py of
        iurada/talos-task-arithmetic at b99d422.
    """
    problems = step.check(optimizer, max_grad_norm, engine, donate=donate)
    if not (isinstance(sparsity, Real) and 0 <= sparsity < 1):
        problems.append(f"sparsity is {sparsity!r}, must lie in [0, 1): the part of the coordinates that is frozen")
    counting = count_problem("rounds", rounds) + count_problem("calibration", calibration)
    if not counting and calibration < rounds:
        counting = [f"calibration is {calibration}, must be at least rounds, {rounds}: every round takes a step"]
    raise_problems(problems + counting, "talos")
    at = value_and_grad(keyed(loss_fn), engine=engine)
    size = sum(leaf.numel() for leaf in tree.flatten(base).values())
    left = {calibration * r // rounds: max(1, int((1 - sparsity) ** (r / rounds) * size)) for r in range(1, rounds + 1)}
    start = step.init(optimizer, base, donate=donate)

    def init(params: Params) -> State:
        state = start(params)
        zeros = tree.tree_map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float32), state.params)
        return State(*state, zeros)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        loss, aux, grads = step.accumulate(at, state.params, batch)
        measures = state.step < calibration if sparsity else False
        scores = state.scores
        if isinstance(measures, Tensor) or measures:
            scores = _chosen(measures, _measured(at, state, batch, left), scores)
        before = tree.clone(state.params) if donate else state.params
        plain, norm = step.apply(optimizer, step.State(*state[:3]), grads, max_grad_norm=max_grad_norm, donate=donate)

        def trained(new: Tensor, old: Tensor, score: Tensor) -> Tensor:
            kept = torch.where((score < 0) | measures, old.to(new.dtype), new)
            return new.copy_(kept) if donate and not transformed() else kept

        params, opt_state = tree.tree_map(trained, plain.params, before, scores), plain.opt_state
        if isinstance(opt_state, AveragedState):  # which has seen the optimizer's frozen coordinates
            average = tree.tree_map(trained, opt_state.average, before, scores)
            opt_state = opt_state._replace(average=average)
        return State(params, opt_state, plain.step, scores), Info(loss, aux, norm)

    return Method(init, step.with_keys(update, base))


def _measured(at: Gradient, state: State, batch: Batch, left: Counts) -> Params:
    """The scores after a step of calibration."""

    def shrunk(theta: Tensor, score: Tensor) -> Tensor:
        return torch.where(score < 0, SHRUNK * theta.detach(), theta.detach())

    def added(score: Tensor, grad: Tensor) -> Tensor:
        return torch.where(score < 0, score, score + grad.detach().float().square())

    _, _, grads = step.accumulate(at, tree.tree_map(shrunk, state.params, state.scores), batch)
    scores, done = tree.tree_map(added, state.scores, grads), state.step + 1
    if not isinstance(done, Tensor):
        return _frozen(scores, left[done]) if done in left else scores
    count = torch.stack([torch.where(done == end, own, 0) for end, own in left.items()]).sum(0)
    ended = _frozen(scores, count.clamp(min=1))
    return _chosen(count > 0, ended, scores)


def _chosen(first: bool | Tensor, one: Params, other: Params) -> Params:
    """One tree or the other."""
    if isinstance(first, Tensor):
        return tree.tree_map(lambda a, b: torch.where(first, a, b), one, other)
    return one if first else other


def _frozen(scores: Params, count: int | Tensor) -> Params:
    """Scores for the next round: -1 above the count-th smallest that is not negative, else 0."""
    leaves = tree.flatten(scores)
    first = next(iter(leaves.values()))
    flat = torch.cat([score.reshape(-1).to(first.device) for score in leaves.values()])
    ordered = torch.where(flat < 0, torch.inf, flat).sort().values
    limit = ordered.gather(0, torch.as_tensor(count - 1, device=first.device).reshape(1)).reshape(())

    def next_round(score: Tensor) -> Tensor:
        out = (score < 0) | (score > limit.to(score.device))
        return torch.where(out, -torch.ones_like(score), torch.zeros_like(score))

    return tree.tree_map(next_round, scores)


@dataclass(frozen=True)
class Talos:
    """TaLoS: only the least sensitive coordinates are trained, which the first steps find."""

    name: ClassVar[str] = "talos"

    sparsity: float | None = None
    """Part of the coordinates that is frozen: those whose squared gradients at the base are largest."""
    rounds: int | None = None
    """Rounds in which they are found."""
    calibration: int | None = None
    """Steps at the start that find them, in which no parameter moves."""

    @property
    def held(self) -> int:
        """The first steps, in which params stay where they are."""
        return 0 if self.sparsity == 0 else CALIBRATION if self.calibration is None else self.calibration
