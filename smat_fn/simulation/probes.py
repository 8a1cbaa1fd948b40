"""Estimate the loss after merging, before other experts exist."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..grad import loss_and_aux
from ..types import Batch, LossFn, Micro, Noise, Params, Where
from .state import draw, simulate


class Probe(NamedTuple):
    """Losses over the same batches.

    Attributes:
        clean: L(theta).
        simulated: L(theta~) by key.
    """

    clean: float
    simulated: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The estimate of E L(theta~)."""
        return fmean(self.simulated)


@torch.no_grad()
def probe(
    loss_fn: LossFn,
    params: Params,
    base: Params,
    batches: Iterable[Batch | Micro],
    keys: Tensor,
    *,
    where: Where | None = None,
    alpha_min: float,
    drop_prob: float,
    sigma: float,
    noise: Noise = "uniform",
) -> Probe:
    r"""E L(theta~) and L(theta): the expected cost of merging, without the other experts.

    ``1/N sum_n L(theta~_n)``, theta~_n simulated with the draw of key n; L the mean of the losses of all batches, with
    the weights of `Micro`. The same keys give the same draws for all parameters and methods.

    Args:
        loss_fn: (params, batch) -> (loss, aux).
        batches: at least one.
        keys: int64 (N, 2), N at least 1.
        where, alpha_min, drop_prob, sigma, noise: as in `smat_fn.draw` and `smat_fn.simulate`.

    Raises:
        ValueError: for no batches, weights without a positive sum, keys of another shape, and hyperparameters out of
            range.

    Source: the simulated term of paper Eq. smat-objective, on data that is not trained on.
    """
    if isinstance(batches, Tensor):
        raise ValueError("probe: batches are a tensor: give a list of batches")
    batches = list(batches)
    if not batches:
        raise ValueError("probe: no batches, give at least one")
    if not isinstance(keys, Tensor) or keys.ndim != 2 or keys.shape[1] != 2 or not len(keys):
        got = f"have shape {tuple(keys.shape)}" if isinstance(keys, Tensor) else f"are a {type(keys).__name__}"
        raise ValueError(f"probe: keys {got}, must be (N, 2): take smat_fn.random.split")
    parts = [part if isinstance(part, Micro) else Micro(part, 1.0) for part in batches]
    total = sum(part.weight for part in parts)
    if not (math.isfinite(total) and total > 0):
        raise ValueError(f"probe: the weights of the batches add up to {total}, must be positive and finite")

    def loss(state: Params) -> float:
        return sum(float(loss_and_aux(loss_fn(state, part.batch))[0]) * part.weight for part in parts) / total

    def simulated(key: Tensor) -> float:
        drawn = draw(key, alpha_min=alpha_min, drop_prob=drop_prob, sigma=sigma, noise=noise)
        return loss(simulate(params, base, drawn, where=where))

    return Probe(loss(params), tuple(map(simulated, keys)))
