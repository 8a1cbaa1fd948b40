"""One draw of Scale, Mask and Perturb: a few numbers that stand for all of them."""

import math
import statistics
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from .. import random
from ..types import Noise

NOISES: tuple[str, ...] = get_args(Noise)


class Draw(NamedTuple):
    """Draws of alpha, m and epsilon; mask and noise stay implicit: functions of (key, path, coordinate)."""

    key: Tensor  # shape=(2,), int64
    scale: Tensor  # alpha, shape=(), float32
    drop_prob: Tensor  # p, shape=(), float64
    sigma: Tensor  # RMS of the noise in units of the weights, shape=(), float64
    noise: Tensor  # quantiles of unit noise by 16-bit field, shape=(65536,), float32; empty for uniform noise


def draw(key: Tensor, *, alpha_min: float, drop_prob: float, sigma: float, noise: Noise = "uniform") -> Draw:
    r"""Draw the simulated state of one step.

    ``alpha ~ U[alpha_min, 1]``, ``m_k = 0`` with probability p and else ``1 / (1 - p)``, ``epsilon_k`` of mean 0 and
    RMS sigma, all independent. alpha comes from the child 0 of the key, mask and noise from its children by leaf path.

    Args: key: int64 (2,), used for nothing else; alpha_min: in [0, 1]; drop_prob: p in [0, 1), the probability of
        removing a coordinate of the masked set, realised on 16 bits; sigma: RMS of the noise, >= 0, in units of the
        weights; noise: "uniform", "gaussian" or "laplace". ``alpha_min=1``, ``drop_prob=0`` and ``sigma=0`` switch
        Scale, Mask and Perturb off.
    Returns: Draw on the key's device; can be vmapped over keys.
    Raises: ValueError that lists every value out of range.
    Source: paper Eqs. smat-state and smat-mask.
    """
    problems = check_strengths(alpha_min, drop_prob, sigma, noise)
    if problems:
        raise ValueError("draw: " + "; ".join(problems))
    unit = random.uniform(random.fold_in(key, 0), dtype=torch.float64)
    scale = (alpha_min + (1.0 - alpha_min) * unit).to(torch.float32)

    def number(value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=key.device)

    return Draw(key, scale, number(drop_prob), number(sigma), quantiles(noise).to(key.device))


def check_strengths(alpha_min: float, drop_prob: float, sigma: float, noise: str) -> list[str]:
    """Problems with the strengths of the three operations, in words."""
    problems = []
    if not 0 <= alpha_min <= 1:
        problems.append(f"alpha_min is {alpha_min}, must lie in [0, 1] (1 switches Scale off)")
    if not 0 <= drop_prob < 1:
        problems.append(f"drop_prob is {drop_prob}, must lie in [0, 1): it is the probability of removing a coordinate")
    if not (math.isfinite(sigma) and sigma >= 0):
        problems.append(f"sigma is {sigma}, must be finite and not negative (0 switches Perturb off)")
    if noise not in NOISES:
        problems.append(f"noise is {noise!r}, choose one of {', '.join(NOISES)}")
    return problems


def all_off(alpha_min: float, drop_prob: float, sigma: float) -> bool:
    """Whether Scale, Mask and Perturb are all switched off, so that theta~ is theta."""
    return alpha_min == 1 and drop_prob == 0 and sigma == 0


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
