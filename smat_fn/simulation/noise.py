"""Quantile tables of Gaussian and Laplace noise, kept by name and by device."""

import math
import statistics
from functools import cache

import numpy
import torch
from torch import Tensor

from ..execution import constant
from ..types import Noise

_TABLES: dict[str, Tensor] = {}


def quantiles(noise: Noise) -> Tensor:
    """Quantiles of a unit noise at the midpoints of 65,536 equal probabilities, normalised to mean 0 and RMS 1.

    Returns: float32 (65536,) on the CPU, antisymmetric; empty for uniform noise, which needs no table.
    """
    return constant(_values(noise), _TABLES, noise)


# a constant for torch.compile, as in smat_fn.random
quantiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


_SENT: dict[tuple[str, torch.device], Tensor] = {}


def table_on(noise: Tensor, device: torch.device) -> Tensor:
    """A draw's table on a device; one of `quantiles` is sent there once, not at every step."""
    if noise.device == device or torch.compiler.is_compiling():
        return noise.to(device)
    name = next((name for name, table in _TABLES.items() if table is noise), "")
    if not name:
        return noise.to(device, non_blocking=device.type == "cuda")
    return constant(_values(name), _SENT, (name, device), device)


@cache
def _values(noise: str) -> numpy.ndarray:
    if noise == "uniform":
        return numpy.empty(0, numpy.float32)
    upper = [(32768.5 + i) / 65536 for i in range(32768)]
    if noise == "gaussian":
        half = [statistics.NormalDist().inv_cdf(q) for q in upper]
    else:
        half = [-math.log(2 * (1 - q)) for q in upper]
    rms = math.sqrt(math.fsum(z * z for z in half) / len(half))
    positive = numpy.array([z / rms for z in half], numpy.float32)
    return numpy.concatenate((-positive[::-1], positive))
