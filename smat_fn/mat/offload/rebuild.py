"""Simulated weights that exist only while they are used: rebuilt a block at a time, in forward and again in backward.

Possible because a draw is a function of (key, path, coordinate): what is saved for backward is a leaf's path instead of
its tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

States = Callable[[Sequence[str]], Sequence[Tensor]]
_LATER = (
    "outside the forward pass of the module that owns it: offload 'recompute' and 'stream' rebuild weights for that "
    "time only, use offload 'cpu' or None"
)


@contextmanager
def rebuilding(module: nn.Module, leaves: Mapping[str, Tensor], states: States) -> Iterator[None]:
    """Each part of the module sees the states of its own leaves, only while it runs; run loss *and* gradient inside.

    The states of one block (`blocks`) are alive, until another one is asked for. Gradients flow to ``leaves`` as if the
    states were they, a tied leaf's summed (a leaf that one part reads twice and another once: in another order). A
    weight read while its part does not run raises, since it is not there. The module is as before afterwards, also
    after an exception.

    Args: leaves: by names of ``module.named_parameters()`` (tied weights once); others stay the module's own;
        states: new tensors for the leaves of a block, the same values whenever asked.
    """
    path_of = {id(p): path for path, p in module.named_parameters() if path in leaves}
    cache = _Cache(blocks(leaves), states)
    handles, originals = [], []

    def pack(tensor: Tensor) -> Any:
        if (path := cache.holds(tensor)) is None:
            return Versioned(tensor)
        return _Saved(path, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Versioned):
            return saved.unchanged()
        return cache.get((saved.path,))[0].as_strided(saved.size, saved.stride, saved.offset)

    try:
        for owner in module.modules():
            own = {name: path_of[id(p)] for name, p in owner._parameters.items() if id(p) in path_of}
            if not own:
                continue
            stubs = {name: Absent(leaves[path], path, _LATER) for name, path in own.items()}
            originals.append((owner, {name: owner._parameters[name] for name in own}))
            owner._parameters.update(stubs)  # type: ignore[arg-type]
            # first and last of the part's hooks, so that the others see its weights too
            handles.append(owner.register_forward_pre_hook(_enter(own, leaves, cache), prepend=True))
            handles.append(owner.register_forward_hook(_leave(stubs), always_call=True))
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        cache.clear()
        for handle in handles:
            handle.remove()
        for owner, parameters in originals:
            owner._parameters.update(parameters)


def blocks(paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each leaf the leaves rebuilt with it: those below the same last number of their paths, else of one module.

    ``h.0.attn.weight`` goes with ``h.0.mlp.bias``, ``embed.weight`` with ``embed.bias``: a transformer's layer is a
    block, whose leaves share a launch.
    """
    prefix_of = {}
    for path in paths:
        parts = path.split(".")[:-1]
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        prefix_of[path] = ".".join(parts[: numbers[-1] + 1] if numbers else parts)
    members: dict[str, list[str]] = {}
    for path, prefix in prefix_of.items():
        members.setdefault(prefix, []).append(path)
    return {path: tuple(members[prefix]) for path, prefix in prefix_of.items()}


class Versioned:
    """A tensor that autograd saves, with the check that torch leaves out where hooks pack what is saved."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version

    def unchanged(self) -> Tensor:
        """The tensor. Raises: RuntimeError for one that was written to since, as torch does."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that the backward pass needs was changed in place: it "
                f"is at version {self._tensor._version}, expected version {self._version}"
            )
        return self._tensor


class _Saved(NamedTuple):
    path: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Cache:
    """The states of the block that was asked for last."""

    def __init__(self, block_of: Mapping[str, tuple[str, ...]], states: States) -> None:
        self._block_of, self._make = block_of, states
        self._states: dict[str, Tensor] = {}
        self._path_at: dict[int, str] = {}  # by address of the storage, which is the state's own as long as it is here

    def get(self, paths: Sequence[str]) -> list[Tensor]:
        """Simulated states of leaves, rebuilt with their blocks unless they are cached."""
        if any(path not in self._states for path in paths):
            # a tied leaf may come with leaves of another block
            wanted = list(dict.fromkeys(member for path in paths for member in self._block_of[path]))
            self.clear()
            with torch.no_grad():
                self._states.update(zip(wanted, self._make(wanted), strict=True))
            self._path_at.update({s.untyped_storage().data_ptr(): path for path, s in self._states.items()})
        return [self._states[path] for path in paths]

    def holds(self, tensor: Tensor) -> str | None:
        """The leaf whose state this is a view of; None for any other tensor."""
        path = self._path_at.get(tensor.untyped_storage().data_ptr())
        return None if path is None or tensor.dtype != self._states[path].dtype else path

    def clear(self) -> None:
        """Free all states."""
        self._states.clear()
        self._path_at.clear()


def _enter(own: Mapping[str, str], leaves: Mapping[str, Tensor], cache: _Cache) -> Callable[..., None]:
    paths = list(dict.fromkeys(own.values()))

    def hook(module: nn.Module, _: Any) -> None:
        states = zip(paths, cache.get(paths), strict=True)
        weights = {path: _StandIn.apply(leaves[path], state) for path, state in states}
        module._parameters.update({name: weights[path] for name, path in own.items()})

    return hook


def _leave(stubs: Mapping[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, *_: Any) -> None:
        module._parameters.update(stubs)  # type: ignore[arg-type]

    return hook


class _StandIn(torch.autograd.Function):
    """A state in place of its leaf, the gradient passed through."""

    @staticmethod
    def forward(ctx, leaf, state):  # type: ignore[no-untyped-def]
        return state.view_as(state)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class Absent(Tensor):
    """Placeholder with a leaf's shape, dtype and device; reading its values raises, and says what is wrong."""

    path: str
    why: str

    @staticmethod
    def __new__(cls, leaf: Tensor, path: str, why: str) -> "Absent":
        stub = Tensor._make_wrapper_subclass(
            cls, leaf.size(), strides=leaf.stride(), dtype=leaf.dtype, device=leaf.device, requires_grad=True
        )
        stub.path, stub.why = path, why
        return stub

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        absent = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, cls)]
        raise ValueError(f"leaf {', '.join(repr(a.path) for a in absent)} was read by {func} {absent[0].why}")
