"""SMAT: the task loss at simulated merged states, every t-th step or mixed into every step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import random, tree
from ..errors import count_problem, flag_problems, problems_of, raise_problems
from ..execution import valueless
from ..grad import Keyed, keyed, value_and_grad
from ..grouped import elementwise
from ..optim import momentum_of
from ..optim.chain import clip
from ..simulation import Draw, draw, opposite, reweight, reweight_and_clip, simulate
from ..simulation.losses import check_lam
from ..simulation.state import Number, all_off, draw_problems, factor_problems, unknown_factors
from ..types import Aux, Batch, Engine, LossFn, Method, Noise, Offload, Optimizer, Params, Where
from ..where import by_depth, mask_problems
from . import asam, step
from .ascent import Climb, clean_problems, climb_problems, radius
from .sigma_units import SigmaOf, relative_gradient, sigma_problems
from .simulated import EitherGradient, Result, SimulatedGradient, either_gradient, offload_problems, simulated_gradient
from .step import Gradient, State, accumulate

__all__ = ["Climb", "Info", "Schedule", "Smat", "State", "build", "build_from", "is_simulated", "literal_step"]

AlphaDepth: TypeAlias = tuple[float, float] | Mapping[str, float] | Callable[[str], float]


class Info(NamedTuple):
    """Per-step diagnostics. Nothing here feeds the next step.

    Attributes:
        loss: the loss that was differentiated, shape ().
        aux: of the loss; of the clean and of the simulated one with ``lam``.
        grad_norm: norm of the gradient after reweighting, before clipping, float32, shape ().
        scale: alpha, float32, shape (); 1 on a clean step.
        simulated: whether the step was simulated; a 0-d tensor where the state's step is one.
    """

    loss: Tensor
    aux: Aux
    grad_norm: Tensor
    scale: Tensor
    simulated: bool | Tensor


def is_simulated(step: Any, period: int) -> Any:
    """Whether step ``step``, counted from 0, is simulated: t - 1 expert steps, then one simulated step.

    Raises: ValueError for a period below 1.
    """
    if not period >= 1:
        raise ValueError(f"period is {period!r}, must be an integer of at least 1 (1 simulates every step)")
    return (step + 1) % period == 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every period-th step of a training is simulated, each with a draw of its own.

    Step s, counted from 0, is simulated where ``(s + 1) % period == 0``, at ``draw(fold_in(key, s), ...)``. Nothing is
    kept between steps: a resumed run has the same draws.

    Args:
        alpha_min: Scale, in [0, 1]; 1 switches it off.
        drop_prob: Mask, in [0, 1), the probability of removing a coordinate; 0 switches it off.
        sigma: Perturb, RMS of the noise in units of the weights, >= 0; 0 switches it off.
        period: t >= 1; 1 simulates every step.
        noise: "uniform", "gaussian" or "laplace".
        alpha_max: alpha is uniform on [alpha_min, alpha_max].
        factors: path -> finite number, by which alpha is multiplied in that leaf.
        antithetic: simulated steps 2q and 2q + 1, counted from 0, are a pair: a draw and its `opposite`.

    Raises:
        ValueError: lists every bad value.

    Source: paper section 4.3; alpha_max, factors and antithetic are not in it.
    """

    sigma: Number
    alpha_min: Number = 0.2
    drop_prob: Number = 0.5
    period: int = 4
    noise: Noise = "uniform"
    alpha_max: Number = 1.0
    factors: Mapping[str, float] | None = None
    antithetic: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.period, Integral) and not isinstance(self.period, bool):
            object.__setattr__(self, "period", int(self.period))  # of numpy
        problems = draw_problems(self.alpha_min, self.drop_prob, self.sigma, self.noise, self.alpha_max)
        problems += [f"{text} (1 simulates every step)" for text in count_problem("period", self.period)]
        problems += flag_problems(antithetic=self.antithetic)
        raise_problems(problems + factor_problems({} if self.factors is None else self.factors))

    @property
    def off(self) -> bool:
        """Whether Scale, Mask and Perturb are all off, by numbers: every step is then clean."""
        if isinstance(self.alpha_max, Tensor) or self.alpha_max != 1:  # nothing depends on a tensor's value
            return False
        return all_off(self.alpha_min, self.drop_prob, self.sigma) and not self.factors

    def draw(self, key: Tensor, step: int | Tensor) -> Draw | None:
        """The draw of a step; None for a clean one.

        Args:
            key: the run key, int64 (2,). Give each expert one of its own: with the same key all have the same alpha.
            step: counted from 0, an optimizer step; with a period above 1 a number, no tensor.
        """
        clean = self.off or not (self.period == 1 or is_simulated(step, self.period))
        return None if clean else self.drawn(key, step)

    def drawn(self, key: Tensor, step: int | Tensor) -> Draw:
        """The draw of a step if it is simulated, which a tensor may decide."""
        second = step // self.period % 2 if self.antithetic else 0  # the second of a pair has the key of the first
        found = draw(
            self.key_of(key, step - second * self.period), alpha_min=self.alpha_min, drop_prob=self.drop_prob,
            sigma=self.sigma, noise=self.noise, alpha_max=self.alpha_max, factors=self.factors,
        )  # fmt: skip
        return opposite(found, 1 - 2 * second) if self.antithetic else found

    def key_of(self, key: Tensor, step: int | Tensor) -> Tensor:
        """The key of a step's draw."""
        return random.step_key(key, step)


def literal_step(
    key: Tensor,
    state: State,
    batch: Batch,
    *,
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    period: int = 4,
    engine: Engine = "autograd",
    **hyperparameters: Any,
) -> tuple[State, Info]:
    """One step of the paper, literally; `build` gives a bit-identical one in fewer passes over memory.

    Args:
        key: the run key, int64 (2,).
        state: State of `build`'s ``init``.
        batch: one batch.
        hyperparameters: alpha_min, drop_prob, sigma, noise of `smat_fn.draw`; the others as in `build`.

    Raises:
        ValueError: lists every hyperparameter out of range, in clean steps too.
    """
    off = Schedule(period=period, **hyperparameters).off  # all three operations are: `build` then simulates nothing
    params, gradient = state.params, value_and_grad(keyed(loss_fn), engine=engine)
    batch = Keyed(batch, key, state.step, 0)  # for a loss that takes a key
    scale = torch.ones((), dtype=torch.float32, device=key.device)
    if simulated := not off and is_simulated(state.step, period):
        drawn = draw(random.fold_in(key, state.step), **hyperparameters)  # alpha, m, epsilon
        scale = drawn.scale
        with torch.no_grad():
            merged = simulate(params, base, drawn, where=where)  # theta_0 + alpha m (.) (theta - theta_0) + epsilon
        (loss, aux), grads = gradient(merged, batch)
        grads = reweight(grads, drawn, where=where)  # alpha m (.) grad L(theta~)
    else:
        (loss, aux), grads = gradient(params, batch)
    grads, norm = clip(grads, max_grad_norm)
    params, opt_state = optimizer.update(grads, state.opt_state, params)
    return State(params, opt_state, state.step + 1), Info(loss, aux, norm, scale, simulated)


# over 60 lines: its docstring explains every hyperparameter of the paper
def build(
    loss_fn: LossFn,
    optimizer: Optimizer,
    base: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    alpha_min: Number = 0.2,
    drop_prob: Number = 0.5,
    sigma: Number = 2e-3,
    period: int = 4,
    noise: Noise = "uniform",
    alpha_max: Number = 1.0,
    sigma_of: SigmaOf = "weights",
    climb: Climb | None = None,
    rho: float | None = None,
    lam: Number | None = None,
    alpha_depth: AlphaDepth | None = None,
    antithetic: bool = False,
    offload: Offload | None = None,
    engine: Engine = "autograd",
    donate: bool = False,
) -> Method:
    r"""Merge-aware training by Scale, Mask and Perturb.

    ``(1 - lambda) L(theta) + lambda E L(theta~)``, ``theta~ = theta_0 + alpha m (.) (theta - theta_0) + epsilon``
    (Eqs. smat-objective, smat-state). Periodic (default): step s, counted from 0, takes the gradient
    ``alpha m (.) grad L(theta~)`` (Eq. smat-gradient) when ``(s + 1) % period == 0``, else ``grad L(theta)``: one
    forward and one backward pass a step, lambda = 1 / period. Mixed (``lam`` given): both, weighted, in every step.
    The draw of step s is ``draw(fold_in(key, s), ...)``, one for all micro-batches of the step. With Scale, Mask and
    Perturb all off every step is clean: bit-identical to `smat_fn.mat.finetune`, with a climb to `smat_fn.mat.msam`.
    Where the state's step is a tensor (inside vmap and torch.compile) both kinds of step are one program, which takes
    theta~ or theta by it.

    With ``climb`` theta is replaced by ``theta + e`` in the loss of clean steps, or in theta~ too, and nowhere else;
    ``e = rho theta^2 (.) d / (|| |theta| (.) d || + 1e-12)``, d the optimizer's momentum before the step: no further
    pass and no buffer in the state, a copy of params while the gradient runs.

    With ``alpha_depth`` the alpha of a leaf in block l of L is ``alpha (low + (high - low) l / (L - 1))``, as if merged
    by LiNeS. With ``antithetic`` simulated steps 2q and 2q + 1, counted from 0, are a pair: the draw of the first and
    its `smat_fn.simulation.opposite`, the same alpha with the complementary mask and ``-epsilon``. At drop_prob 1/2 the
    mean of the two states is ``theta_0 + alpha (theta - theta_0)`` of a fixed theta; every step alone has the same
    distribution as without. Neither costs a pass or a buffer.

    Args:
        loss_fn: ``(params, batch) -> (loss, aux)``.
        optimizer: anything with ``init`` and ``update`` (`smat_fn.optim`).
        base: theta_0, a tree of params' structure and shapes.
        where: the masked set S, a predicate on (path, leaf) or a tree of bools; None masks every leaf.
        max_grad_norm: clip by global norm after reweighting; None: no clipping.
        alpha_min: Scale, in [0, 1]; 1 switches it off.
        drop_prob: Mask, in [0, 1), the probability of removing a coordinate; 0 switches it off.
        sigma: Perturb, RMS of the noise in units of the weights, >= 0; 0 switches it off. The three may be 0-d tensors,
            as in `smat_fn.draw`.
        period: t >= 1; 1 simulates every step.
        noise: "uniform", "gaussian" or "laplace".
        alpha_max: alpha is uniform on [alpha_min, alpha_max]; may be a 0-d tensor too.
        sigma_of: unit of sigma. "weights": absolute. "update": multiplied by the current RMS of ``theta - theta_0``
            over all parameters. "leaf": the same per parameter; one without an update gets no noise. In a merge of N
            experts with unrelated updates by task arithmetic, the other N - 1 add a change whose RMS is
            ``gamma sqrt(N - 1)`` times that of one update: that is the sigma to take. Costs a read of theta and theta_0
            in simulated steps. With climb "both" the update is ``theta + e - theta_0``.
        climb: None; "clean": the gradient of clean steps is that at theta + e; "both": that of simulated steps too.
        rho: radius of the climb, >= 0; None: 0.5.
        lam: lambda in [0, 1], may be a 0-d tensor; replaces the schedule.
        alpha_depth: None; (low, high), alpha's factor in the first and in the last block by `smat_fn.where.by_depth`
            (low outside of blocks); a mapping from paths to factors (1 of paths left out); or a function of the path.
        antithetic: draw simulated steps in pairs.
        offload: where theta_0 and theta~ are stored, bit-identical: see `smat_fn.mat.simulated.simulated_gradient`.
        engine: as in `smat_fn.value_and_grad`.
        donate: reuse the state's buffers (the state passed in is then spent), bit-identical.

    Returns:
        Method with ``init(params) -> State`` and ``update(key, state, batch) -> (State, Info)``.

    Raises:
        ValueError: lists every bad argument, a ``rho`` without ``climb`` too; for ``climb`` "clean" without clean
            steps; in ``init`` for params that do not match base, and for an optimizer without a momentum to climb
            along.

    Source: paper sections 4.1 to 4.3; alpha_max, sigma_of, climb, alpha_depth and antithetic are not in it.
    """
    problems = offload_problems(loss_fn, offload, engine) + sigma_problems(sigma_of, offload)
    at_simulated = at_either = None
    if not (problems or step.check(optimizer, max_grad_norm, engine, donate=donate)):
        own, slices = keyed(loss_fn), 1 if lam is not None else period
        at_simulated = simulated_gradient(own, base, where=where, offload=offload, period=slices, engine=engine)
        at_simulated = relative_gradient(own, at_simulated, base, where=where, of=sigma_of, engine=engine)
        if offload is None and climb is None and sigma_of == "weights":
            at_either = either_gradient(own, base, where=where, engine=engine)
    if offload in ("cpu", "stream"):
        # only names and shapes are needed for init: the caller's base must not stay alive here
        base = tree.tree_map(lambda leaf: leaf.detach().to("meta"), base)
    return build_from(
        loss_fn, at_simulated, optimizer, base, where=where, max_grad_norm=max_grad_norm, alpha_min=alpha_min,
        drop_prob=drop_prob, sigma=sigma, period=period, noise=noise, alpha_max=alpha_max, climb=climb, rho=rho,
        lam=lam, alpha_depth=alpha_depth, antithetic=antithetic, engine=engine, donate=donate, at_either=at_either,
        problems=problems,
    )  # fmt: skip


# over 60 lines: the checks of all arguments
def build_from(
    loss_fn: LossFn,
    at_simulated: SimulatedGradient | None,
    optimizer: Optimizer,
    like: Params,
    *,
    where: Where | None = None,
    max_grad_norm: float | None = None,
    climb: Climb | None = None,
    rho: float | None = None,
    lam: Number | None = None,
    alpha_depth: AlphaDepth | None = None,
    engine: Engine = "autograd",
    donate: bool = False,
    at_either: EitherGradient | None = None,
    problems: list[str] | None = None,
    weights: Params | None = None,
    schedule: Callable[..., Schedule] = Schedule,
    **hyper: Any,
) -> Method:
    """SMAT around a `SimulatedGradient`: what `build`, adapters and processes with draws of their own share.

    Args:
        loss_fn: the clean loss.
        at_simulated: the gradient at simulated states, of `keyed` batches.
        like: tree of the parameters' names and shapes.
        at_either: the gradient where a tensor says whether the step is simulated; None: such a state is refused.
        problems: errors found before, raised together with those found here.
        weights: the tree whose leaves are simulated (default: like); ``alpha_depth`` is by its paths.
        schedule: makes the schedule from the hyperparameters.
        hyper: as in `build`; those of `smat_fn.Schedule`.
    """
    hyper = {"sigma": 2e-3, **hyper}
    found = [*(problems or []), *step.check(optimizer, max_grad_norm, engine, donate=donate)]
    factors, wrong = _factors(alpha_depth, like if weights is None else weights)
    found += problems_of(schedule, factors=factors, **hyper) + wrong
    if not (wrong := problems_of(tree.predicate, where)):
        wrong = mask_problems(where, tree.flatten(like), hyper.get("drop_prob", Schedule.drop_prob))
    found += wrong
    found += [] if lam is None else problems_of(check_lam, lam)
    found += climb_problems(climb, rho)
    if lam is not None and climb == "clean":
        found.append("climb 'clean' needs clean steps, lam has none: take climb 'both', or a period instead of lam")
    raise_problems(found, "smat")
    assert at_simulated is not None
    made, simulated = schedule(factors=factors, **hyper), at_simulated
    raise_problems(clean_problems(climb, period=made.period, off=made.off), "smat")
    gradient = value_and_grad(keyed(loss_fn), engine=engine)
    if lam is not None:
        made = replace(made, period=1)
        learned = isinstance(lam, Tensor) or isinstance(made.alpha_max, Tensor)  # no branch depends on their values
        simulated = at_simulated if not learned and lam == 1 else _Mixed(gradient, at_simulated, lam, where)
    off = not isinstance(lam, Tensor) and (made.off or (lam == 0 and not isinstance(made.alpha_max, Tensor)))

    start = step.init(optimizer, like, donate=donate)

    def init(params: Params) -> State:
        state = start(params)
        if climb is not None:
            momentum_of(state.opt_state, state.params)  # raises before the first step
        return state

    update_either = _deciding(at_either, made, optimizer, max_grad_norm, donate)

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        if not off and made.period > 1 and (isinstance(state.step, Tensor) or torch.compiler.is_compiling()):
            return update_either(key, step.as_tensors(state), batch)
        drawn, point = None if off else made.draw(key, state.step), state.params  # alpha, m, epsilon
        if climb == "both" or (climb == "clean" and drawn is None):
            point = asam.climb(point, momentum_of(state.opt_state, point), rho=radius(rho))
        if drawn is None:
            if not off:
                simulated.prepare(state.params)
            loss, aux, grads = accumulate(gradient, point, batch)
        else:
            loss, aux, grads = simulated(point, batch, drawn)  # grad L(theta~)
        # alpha m (.) grad L(theta~), then the clip
        undone = None if simulated.reweighted else drawn
        grads, norm = reweight_and_clip(grads, undone, where=where, max_norm=max_grad_norm, donate=donate)
        state = step.advance(optimizer, state, grads, donate=donate)
        scale = torch.ones((), dtype=torch.float32, device=key.device) if drawn is None else drawn.scale
        chosen = drawn is not None
        return state, Info(loss, aux, norm, scale, torch.tensor(chosen) if valueless() else chosen)

    return Method(init, step.with_keys(update, like))


def _factors(alpha_depth: AlphaDepth | None, like: Params) -> tuple[dict[str, float], list[str]]:
    """alpha's factors by path, and the errors for those that are unavailable or not finite."""
    paths, found = list(tree.flatten(like)), dict[str, float]()
    try:
        if isinstance(alpha_depth, Mapping):
            found = dict(alpha_depth)
        elif callable(alpha_depth):
            found = {path: alpha_depth(path) for path in paths}
        elif alpha_depth is not None:
            low, high = alpha_depth
            found = by_depth(paths, low, high)
    except (ValueError, TypeError) as error:
        return {}, [f"alpha_depth is {alpha_depth}: {error}"]
    return found, unknown_factors(found, paths, "alpha_depth names")


def _deciding(
    at_either: EitherGradient | None,
    schedule: Schedule,
    optimizer: Optimizer,
    max_grad_norm: float | None,
    donate: bool,
) -> Callable[[Tensor, State, Batch], tuple[State, Info]]:
    """An update for a state whose step is a tensor: one program for clean and simulated steps."""

    def update(key: Tensor, state: State, batch: Batch) -> tuple[State, Info]:
        if at_either is None:
            raise ValueError(
                "smat: whether a step is simulated is a tensor here, which only a loss of the weights themselves with "
                "offload=None, no climb and sigma_of='weights' can follow: take period=1 or lam, and call "
                "smat_fn.mat.finetune's update for clean steps"
            )
        drawn, chosen = schedule.drawn(key, state.step), is_simulated(state.step, schedule.period)
        loss, aux, grads = at_either(state.params, batch, drawn, chosen)
        grads, norm = reweight_and_clip(grads, None, max_norm=max_grad_norm, donate=donate)
        scale = torch.where(chosen, drawn.scale, 1.0)
        return step.advance(optimizer, state, grads, donate=donate), Info(loss, aux, norm, scale, chosen)

    return update


class _Mixed(SimulatedGradient):
    """``(1 - lambda) grad L(theta) + lambda alpha m (.) grad L(theta~)``: both losses in one step."""

    reweighted = True

    def __init__(self, gradient: Gradient, at_simulated: SimulatedGradient, lam: Number, where: Where | None) -> None:
        self._gradient, self._at_simulated, self._lam, self._where = gradient, at_simulated, lam, where

    def __call__(self, params: Params, batch: Batch, drawn: Draw) -> Result:
        self._at_simulated.prepare(params)
        loss, aux, grads = accumulate(self._gradient, params, batch)
        merged_loss, merged_aux, merged = self._at_simulated(params, batch, drawn)
        if not self._at_simulated.reweighted:
            merged = reweight(merged, drawn, where=self._where)
        lam = self._lam

        def mean(a: Any, b: Any) -> Any:
            return (1 - lam) * a + lam * b

        return mean(loss, merged_loss), (aux, merged_aux), elementwise(mean, grads, merged)


@dataclass(frozen=True)
class Smat:
    """SMAT: the loss at simulated merged states every t-th step (Scale, Mask, Perturb)."""

    name: ClassVar[str] = "smat"
    IMPLIED: ClassVar = {"alpha_max": 1.0, "sigma_of": "weights", "antithetic": False}  # None means the same run

    alpha_min: float | None = None
    """Scale: alpha is uniform on [alpha_min, 1]; 1 switches Scale off."""
    drop_prob: float | None = None
    """Mask: probability of removing a coordinate in linear layers of blocks; 0 switches Mask off."""
    sigma: float | Literal["auto"] | None = None
    """Perturb: RMS of the noise, in units of the weights; 0: off; auto: set by train.py from the size of updates."""
    period: int | None = None
    """Every period-th step is simulated; 1: every step."""
    noise: Noise | None = None
    """Distribution of the noise."""
    alpha_max: float | None = None
    """Scale: upper end of the range of alpha, instead of 1."""
    sigma_of: SigmaOf | None = None
    """Units of sigma: the weights, the RMS of the whole update so far, or the RMS of each parameter's update."""
    climb: Climb | None = None
    """Take the gradient after an ascent step along the optimizer's momentum (as msam): in clean, or in all steps."""
    rho: float | None = None
    """Length of the ascent step of --climb: 0.5 if not given."""
    lam: float | None = None
    """Mixed objective instead of the period: weight of the simulated loss in every step."""
    alpha_depth: tuple[float, float] | None = None
    """Factors of alpha in the first and in the last block, linear in between."""
    antithetic: bool | None = None
    """Draw simulated steps in pairs: mask and its complement, noise and its negative."""
