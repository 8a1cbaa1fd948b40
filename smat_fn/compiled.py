"""Access to the loops that numba compiles: an optional dependency, imported on first use, that changes no bit.

Loops read and write plain memory of the CPU. Without numba, inside `off` or with ``SMAT_FN_NUMBA=0`` torch does all.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

_off = False


@contextmanager
def off() -> Iterator[None]:
    """Plain torch inside, in all threads."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def loops_for(*tensors: Tensor) -> ModuleType | None:
    """The compiled loops, if there are any and all tensors are memory of the CPU: none batched, traced or fake."""
    if torch.compiler.is_compiling() or _off or torch._C._len_torch_dispatch_stack():
        return None
    for tensor in tensors:
        if type(tensor) not in _TYPES or not tensor.is_cpu or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None
    return _imported()


_TYPES = Tensor, torch.nn.Parameter


@cache
def _imported() -> ModuleType | None:
    if os.environ.get("SMAT_FN_NUMBA") == "0":
        return None
    try:
        from . import _loops
    except ImportError:
        return None
    return _loops


def array(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array; bfloat16 as uint16, int64 as uint64."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(numpy.uint16)
    return flat.numpy().view(numpy.uint64) if flat.dtype == torch.int64 else flat.numpy()
