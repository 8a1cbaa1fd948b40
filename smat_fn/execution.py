"""How a call runs: in numba loops, or in plain torch, as inside torch.func, torch.compile and torch's modes.

The loops are imported on first use and change no bit. They read and write plain memory of the CPU. Inside `off` or with
``SMAT_FN_NUMBA=0`` torch does all.

One rule for what the package keeps between calls: numbers, numpy arrays, and tensors that `constant` makes of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy
import torch
from torch import Tensor
from torch._C import _functorch  # nothing public says whether a transform is active
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])
_off = False
_in_loss = ContextVar("in_loss", default=False)


class Shards(NamedTuple):
    """The whole leaves of a step whose leaves are shards of them, those of this process."""

    starts: Mapping[str, int]  # of each leaf, its first coordinate in the whole one
    wholes: Mapping[str, Tensor]  # of each leaf, one of the shape of the whole one, whose values are not read
    total: Callable[[Tensor], Tensor]  # the sum over all processes, each of which calls it
    whole: Callable[[str, Tensor], Tensor]  # the whole leaf at a path, of which each process gives its shard
    own: Callable[[str, Tensor], Tensor]  # this process's shard of a whole leaf at a path


_shards: ContextVar[Shards | None] = ContextVar("shards", default=None)


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
    """The compiled loops, if they are on and all tensors are memory of the CPU: none batched, traced or fake."""
    if torch.compiler.is_compiling() or _off or torch._C._len_torch_dispatch_stack():
        return None
    for tensor in tensors:
        if type(tensor) not in _TYPES or not tensor.is_cpu or wrapped(tensor):
            return None
    return _imported()


_TYPES = Tensor, torch.nn.Parameter


def loops() -> ModuleType | None:
    """The compiled loops, for callers that hold numpy arrays."""
    return None if _off else _imported()


def readable(*tensors: Tensor) -> bool:
    """Whether numpy may read these tensors' values: memory of the CPU, outside of transforms and fake tensors."""
    return (
        not transformed()  # inside, torch wraps what it hands to numpy
        and not _replaced()
        and all(type(tensor) in _TYPES and tensor.is_cpu and not wrapped(tensor) for tensor in tensors)
    )


def _replaced() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 and any(torch._C._get_dispatch_mode(mode) for mode in _REPLACING)


def started() -> bool:
    """Whether the loops are imported already."""
    return not _off and _imported.cache_info().currsize > 0


@cache
def _imported() -> ModuleType | None:
    if os.environ.get("SMAT_FN_NUMBA") == "0":
        return None
    from .importing import uncollected

    with uncollected():
        from . import _loops

        _loops.words(*numpy.zeros((3, 0), numpy.uint64))  # numba imports most of itself at the first call
    return _loops


def array(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array; bfloat16 as uint16, int64 as uint64."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(numpy.uint16)
    return flat.numpy().view(numpy.uint64) if flat.dtype == torch.int64 else flat.numpy()


def transformed() -> bool:
    """Whether torch.func or torch.compile is active: tensors may lack values, and nothing is written in place."""
    return torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None


def wrapped(tensor: Tensor) -> bool:
    """Whether a transform of torch.func holds the tensor, whose values it may not have."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def batched(tensor: Tensor) -> bool:
    """Whether ``torch.func.vmap`` batches a tensor, in its innermost transform."""
    return bool(_functorch.is_batchedtensor(tensor))


def tracked(tensor: Tensor) -> bool:
    """Whether ``torch.func`` records a derivative with respect to a tensor, in its innermost transform."""
    return bool(_functorch.is_gradtrackingtensor(tensor)) and tensor.requires_grad


@contextmanager
def in_loss() -> Iterator[None]:
    """Inside, autograd differentiates a loss for the library: what requires grad must keep its derivative."""
    token = _in_loss.set(True)
    try:
        yield
    finally:
        _in_loss.reset(token)


@contextmanager
def on_shards(spread: Shards | None) -> Iterator[None]:
    """Inside, leaves are shards: draws go by coordinate of the whole leaf, norms are those of all processes."""
    token = _shards.set(spread)
    try:
        yield
    finally:
        _shards.reset(token)


def shards() -> Shards | None:
    """The whole leaves where leaves are shards, else None."""
    return None if torch.compiler.is_compiling() else _shards.get()


def shard_starts() -> Mapping[str, int]:
    """The first coordinate of each shard in its whole leaf; empty where leaves are whole."""
    own = shards()
    return {} if own is None else own.starts


def over_shards(total: Tensor) -> Tensor:
    """A sum over coordinates, over those of all processes where leaves are shards."""
    own = shards()
    return total if own is None else own.total(total)


def whole_size(leaves: Mapping[str, Tensor]) -> int:
    """The number of coordinates of leaves, those of the whole ones where these are shards."""
    own = shards()
    return sum((leaf if own is None else own.wholes[path]).numel() for path, leaf in leaves.items())


def whole_leaf(path: str, leaf: Tensor) -> Tensor:
    """The leaf that a predicate is asked about: the whole one, without values, where this one is a shard of it."""
    own = shards()
    return leaf if own is None else own.wholes.get(path, leaf)


def recorded(tensor: Tensor) -> bool:
    """Whether autograd records operations on a tensor."""
    return torch.is_grad_enabled() and tensor.requires_grad


def recorded_in_loss(tensor: Tensor) -> bool:
    """`recorded`, inside `in_loss`: outside of it, parameters are often merged as they are, without ``no_grad``."""
    return _in_loss.get() and recorded(tensor)


def layers(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as each transform around the call sees it, the innermost first; none outside of transforms."""
    while wrapped(tensor):
        yield tensor
        tensor = _functorch.get_unwrapped(tensor)


def levels() -> bool:
    """Whether a transform of torch.func, or dual numbers, are active; torch.compile asks while it traces."""
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


levels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result does


def opaque(*tensors: Tensor) -> bool:
    """Whether compiled code may call custom operations on these: nothing batches or differentiates them."""
    return torch.compiler.is_compiling() and not levels() and not any(map(recorded, tensors))


def valueless() -> bool:
    """Whether numbers of a state must be tensors: inside vmap, which returns no others, and torch.compile."""
    if torch.compiler.is_compiling():
        return True
    stack = _functorch.get_interpreter_stack() or ()
    return any(level.key() == _functorch.TransformType.Vmap for level in stack)


def unrounded(device: torch.device) -> AbstractContextManager[Any]:
    """Products in the dtype of what is multiplied, inside a ``torch.autocast`` of the caller too."""
    kind = device.type
    rounded = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if rounded else nullcontext()


@contextmanager
def unrounded_everywhere() -> Iterator[None]:
    """`unrounded` on the CPU and on the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    with unrounded(torch.device("cpu")), nullcontext() if accelerator is None else unrounded(accelerator):
        yield


def unread(value: object) -> bool:
    """Whether a hyperparameter is a tensor that cannot be checked, since a transform has not given it a value yet."""
    return isinstance(value, Tensor) and transformed()


def no_grad(function: F) -> F:
    """``torch.no_grad()`` around a function, but inside transforms, whose derivatives pass through it."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if transformed():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(F, run)


def refuse_donation(name: str, donate: bool) -> None:
    """Raises: ValueError for donated arguments inside torch.func, which must not see them change."""
    if donate and not torch.compiler.is_compiling() and transformed():
        raise ValueError(
            f"{name}: donate=True and out= write into tensors given, which would spoil derivatives and batches of "
            "torch.func in silence: take donate=False, and no out, inside its transforms"
        )


def constant(values: numpy.ndarray, kept: dict[Any, Tensor], key: Any, device: torch.device | None = None) -> Tensor:
    """The tensor of an array, kept under a key; in a mode or transform that replaces tensors one of its own, not kept.

    Args: values: shared memory, never written to; device: None is the CPU.
    """
    modes = torch._C._len_torch_dispatch_stack()
    if transformed() or _replaced():
        tensor = torch.from_numpy(values)
        return tensor if device is None else tensor.to(device)
    found = kept.get(key)
    if found is None:
        with torch.inference_mode(False):  # it may be needed where gradients are taken
            found = torch.from_numpy(values)
            # once, so that the host may wait: every stream finds it there
            found = found if device is None else found.to(device)
        if not modes:
            kept[key] = found
    return found


_REPLACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # fake tensors, proxies, functional ones
