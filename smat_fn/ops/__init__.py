"""The fast path: whole trees at once, chunked torch on the CPU and grouped Triton kernels on CUDA, bit-identical.

Only this package imports triton, and only when a kernel is first launched.
"""

from . import plain
from .autograd import reweight, simulate
from .climb import climb
from .library import reweight_and_clip, reweight_into, simulate_into

__all__ = ["climb", "plain", "reweight", "reweight_and_clip", "reweight_into", "simulate", "simulate_into"]
