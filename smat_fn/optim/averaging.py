"""The average of the parameters over the steps of a training run, kept beside any optimizer."""

import re
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..execution import no_grad, refuse_donation, transformed
from ..grouped import elementwise
from ..types import Optimizer, Params, PerStep


class AveragedState(NamedTuple):
    """State of an optimizer and the average so far.

    Attributes:
        step: updates done; 0-d int64 inside vmap and torch.compile.
        average: of the shapes of params, float32 (float64 for float64 leaves).
        optimizer: state of the optimizer.
    """

    step: int | Tensor
    average: Params
    optimizer: Any


def averaged(optimizer: Optimizer, weight: PerStep) -> Optimizer:
    r"""An optimizer whose state also holds a running average of the parameters; training itself is not changed.

    ``a <- a + w_s (theta - a)`` after the update of step s, theta the new parameters. `ema` and `swa` give the weights.

    One buffer of float32 the size of params and, where w_s is not 0, one pass over it a step. As part of the state the
    average is saved and resumed bit for bit.

    Args:
        optimizer: any one.
        weight: step, counted from 0, -> w_s.

    Returns:
        An `Optimizer` whose state is an `AveragedState`; ``state.average`` is the result.

    Raises:
        ValueError: for an optimizer without init and update, and a weight that is not a function.
    """

    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(f"averaged: optimizer is a {type(optimizer).__name__}: give one with init and update")
    if not callable(weight):
        raise ValueError(
            f"averaged: weight is {weight!r}: give a function of the step, as ema(0.999) or swa(1000, 0.25)"
        )

    def init(params: Params) -> AveragedState:
        own = params if transformed() else tree.tree_map(Tensor.detach, params)
        start = tree.tree_map(lambda leaf: leaf.to(tree.compute_dtype(leaf), copy=True), own)
        return AveragedState(tree.counter(0, params), start, optimizer.init(params))

    @no_grad
    def update(grads: Params, state: AveragedState, params: Params, **options: Any) -> tuple[Params, AveragedState]:
        donate = bool(options.get("donate"))
        refuse_donation("averaged", donate)
        tree.check_kind(state, "step", "average", "optimizer")
        tree.check_state(tree.flatten(params), average=tree.flatten(state.average))
        params, inner = optimizer.update(grads, state.optimizer, params, **options)
        rate, average = weight(state.step), state.average

        def copied(mean: Tensor, theta: Tensor) -> Tensor:
            return mean.copy_(theta) if donate else theta.to(mean.dtype, copy=True)

        def blended(mean: Any, theta: Any) -> Any:
            return mean + rate * (theta - mean)

        if isinstance(rate, Tensor):
            average = tree.tree_map(partial(_moved, rate), average, params)
        elif rate == 1:
            average = tree.tree_map(copied, average, params)
        elif rate:
            average = elementwise(blended, average, params, donate=donate)
        return params, AveragedState(tree.counter(state.step + 1, params), average, inner)

    return Optimizer(init, update)


def _moved(rate: Tensor, mean: Tensor, theta: Tensor) -> Tensor:
    wide = theta.to(mean.dtype)
    return torch.where(rate == 1, wide, mean + (wide - mean) * rate.to(mean.device, mean.dtype))


def ema(decay: float) -> PerStep:
    r"""Weights of the exponential moving average over all steps, normalised so that the start has no share.

    ``a_n = sum_s d^(n - s) theta_s / sum_s d^(n - s)``, s = 1..n: ``w_s = (1 - d) / (1 - d^(s + 1))``.

    Args:
        decay: d in [0, 1).

    Raises:
        ValueError: decay is outside.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema: decay is {decay}, must lie in [0, 1)")
    return lambda step: (1 - decay) / (1 - decay ** ((step.double() if isinstance(step, Tensor) else step) + 1))


def swa(steps: int, share: float) -> PerStep:
    r"""Weights of the mean over the last steps, ``max(1, round(share steps))`` of them.

    Args:
        steps: of the run.
        share: in (0, 1].

    Raises:
        ValueError: a value is outside.

    Source: Izmailov et al., 2018, with an average every step and the run's own learning rate.
    """
    if not (steps >= 1 and 0 < share <= 1):
        raise ValueError(f"swa: a share of {share:g} of {steps} steps, must be of at least 1 step and in (0, 1]")
    first = steps - max(1, round(share * steps))

    def weight(step: int | Tensor) -> float | Tensor:
        if isinstance(step, Tensor):
            return torch.where(step < first, 0.0, 1 / (step.double() - first + 1).clamp(min=1))
        return 0.0 if step < first else 1 / (step - first + 1)

    return weight


def averaging(text: str, steps: int) -> PerStep:
    """The weights that ``ema:0.999`` or ``swa:25%`` asks for. Raises: ValueError for any other text."""
    kind, _, value = text.partition(":")
    if kind == "ema" and re.fullmatch(r"0?\.\d+|0", value):
        return ema(float(value))
    if kind == "swa" and re.fullmatch(r"\d+(\.\d+)?%", value):
        return swa(steps, float(value[:-1]) / 100)
    raise ValueError(f"average is {text!r}: give ema:DECAY as in ema:0.999, swa:SHARE% as in swa:25%, or none")
