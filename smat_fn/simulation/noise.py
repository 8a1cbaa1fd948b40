"""Quantile tables of Gaussian and Laplace noise, kept by name and by device."""

import math
import statistics

import torch
from torch import Tensor

from ..types import Noise

_TABLES: dict[str, Tensor] = {}


def quantiles(noise: Noise) -> Tensor:
    """Quantiles of a unit noise at the midpoints of 65,536 equal probabilities, normalised to mean 0 and RMS 1.

    Returns: float32 (65536,), antisymmetric; empty for uniform noise, which needs no table.
    """
    if noise not in _TABLES:
        with torch.inference_mode(False):  # it is kept, and may be needed where gradients are taken
            _TABLES[noise] = torch.empty(0) if noise == "uniform" else _quantiles(noise)
    return _TABLES[noise]


# a constant for torch.compile, as in smat_fn.random
quantiles._dynamo_marked_constant = True  # type: ignore[attr-defined]


_SENT: dict[tuple[str, torch.device], Tensor] = {}


def table_on(noise: Tensor, device: torch.device) -> Tensor:
    """A draw's table on a device; one of `quantiles` is sent there once, not at every step."""
    if noise.device == device or torch.compiler.is_compiling():
        return noise.to(device)
    if torch._C._functorch.peek_interpreter_stack() is not None:  # what comes out belongs to the transform
        return noise.to(device)
    name = next((name for name, table in _TABLES.items() if table is noise), "")
    if (name, device) in _SENT:
        return _SENT[name, device]
    if not name:
        return noise.to(device, non_blocking=device.type == "cuda")
    with torch.inference_mode(False):
        there = noise.to(device)  # once, so that the host may wait: every stream finds it there
    if type(there) is Tensor:  # no stand-in of a mode
        _SENT[name, device] = there
    return there


def _quantiles(noise: Noise) -> Tensor:
    upper = [(32768.5 + i) / 65536 for i in range(32768)]
    if noise == "gaussian":
        half = [statistics.NormalDist().inv_cdf(q) for q in upper]
    else:
        half = [-math.log(2 * (1 - q)) for q in upper]
    rms = math.sqrt(math.fsum(z * z for z in half) / len(half))
    positive = torch.tensor([z / rms for z in half], dtype=torch.float32)
    return torch.cat((-positive.flip(0), positive))
