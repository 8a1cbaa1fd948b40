"""The fast path: whole trees at once, chunked torch on the CPU and grouped Triton kernels on CUDA, with equal bits.

Only this room imports triton, and only when a kernel is first launched.
"""

from . import plain
from .autograd import reweight, simulate
from .finish import finish
from .library import reweight_into, simulate_into

__all__ = ["finish", "plain", "reweight", "reweight_into", "simulate", "simulate_into"]
