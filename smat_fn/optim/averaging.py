"""The average of the parameters over the steps of a training run, kept beside any optimizer."""

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..types import Optimizer, Params, Schedule


class AveragedState(NamedTuple):
    """State of an optimizer and the average so far."""

    step: int  # updates done
    average: Params  # shapes of params, float32 (float64 for float64 leaves)
    optimizer: Any


def averaged(optimizer: Optimizer, weight: Schedule) -> Optimizer:
    r"""An optimizer whose state also holds a running average of the parameters; training itself is not changed.

    ``a <- a + w_s (theta - a)`` after the update of step s, theta the new parameters. `ema` and `swa` give the weights.

    One buffer of float32 the size of params and, where w_s is not 0, one pass over it a step. As part of the state the
    average is saved and resumed bit for bit.

    Args:
        optimizer: any one.
        weight: step, counted from 0, -> w_s.

    Returns:
        An `Optimizer` whose state is an `AveragedState`; ``state.average`` is the result.
    """

    def init(params: Params) -> AveragedState:
        start = tree.tree_map(lambda leaf: leaf.detach().to(tree.compute_dtype(leaf), copy=True), params)
        return AveragedState(0, start, optimizer.init(params))

    @torch.no_grad()
    def update(grads: Params, state: AveragedState, params: Params, **options: Any) -> tuple[Params, AveragedState]:
        params, inner = optimizer.update(grads, state.optimizer, params, **options)
        rate, average = weight(state.step), state.average

        def moved(mean: Tensor, theta: Tensor) -> Tensor:
            if rate == 1:
                return mean.copy_(theta) if options.get("donate") else theta.detach().to(mean.dtype, copy=True)
            step = (theta.to(mean.dtype) - mean).mul_(rate)
            return mean.add_(step) if options.get("donate") else mean + step

        if rate:
            average = tree.tree_map(moved, average, params)
        return params, AveragedState(state.step + 1, average, inner)

    return Optimizer(init, update)


def ema(decay: float) -> Schedule:
    r"""Weights of the exponential moving average over all steps, without the start's share.

    ``a_n = sum_s d^(n - s) theta_s / sum_s d^(n - s)``, s = 1..n: ``w_s = (1 - d) / (1 - d^(s + 1))``.

    Args:
        decay: d in [0, 1).

    Raises:
        ValueError: decay is outside.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"ema: decay is {decay}, must lie in [0, 1)")
    return lambda step: (1 - decay) / (1 - decay ** (step + 1))


def swa(steps: int, share: float) -> Schedule:
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
    return lambda step: 0.0 if step < first else 1 / (step - first + 1)


def averaging(text: str, steps: int) -> Schedule:
    """The weights that ``ema:0.999`` or ``swa:25%`` asks for. Raises: ValueError for any other text."""
    kind, _, value = text.partition(":")
    if kind == "ema" and re.fullmatch(r"0?\.\d+|0", value):
        return ema(float(value))
    if kind == "swa" and re.fullmatch(r"\d+(\.\d+)?%", value):
        return swa(steps, float(value[:-1]) / 100)
    raise ValueError(f"average is {text!r}: give ema:DECAY as in ema:0.999, swa:SHARE% as in swa:25%, or none")
