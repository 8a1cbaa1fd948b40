"""Simulated weights that exist only while a module runs: rebuilt in its forward, and again where backward needs them.

Possible because a draw is a function of (key, path, coordinate): what is saved for backward is a leaf's path instead of
its tensor. The base is resident on the device, or streamed from pinned memory with look-ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..simulation.draws import Draw
from ..types import Where
from .storage import Runtime, runtime_for


class BaseSource(Protocol):
    """Gives theta_0 of a module's leaves on the device."""

    def get(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """Leaves of theta_0; valid until they are dropped."""


class ResidentBase:
    """theta_0 on the device."""

    def __init__(self, base: Mapping[str, Tensor]) -> None:
        self._base = dict(base)

    def get(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """Leaves of theta_0."""
        return {path: self._base[path] for path in paths}


class StreamedBase:
    """theta_0 in pinned memory, copied a module at a time, the next ones in the order of the last pass ahead of use.

    Args: base: flat leaves of theta_0; like: flat leaves that give the device; ahead: modules copied in advance.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        like: Mapping[str, Tensor],
        *,
        ahead: int = 2,
        runtime: Runtime | None = None,
    ) -> None:
        self._device = next(iter(like.values())).device
        self._runtime = runtime or runtime_for(self._device)
        self._pinned = {path: self._runtime.pin(leaf) for path, leaf in base.items()}
        self._ahead = ahead
        self._flying: dict[tuple[str, ...], dict[str, Tensor]] = {}
        self._next: dict[tuple[str, ...], tuple[str, ...]] = {}  # who followed whom, forward and backward alike
        self._last: tuple[str, ...] | None = None

    def get(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """Leaves of theta_0, copied in advance if the order of modules was as before."""
        wanted = tuple(paths)
        if self._last is not None and self._last != wanted:
            self._next[self._last] = wanted
        self._last = wanted
        if wanted not in self._flying:
            self._fetch(wanted)
        self._runtime.join()
        leaves = self._flying.pop(wanted)
        following = wanted
        for _ in range(self._ahead):
            following = self._next.get(following, ())
            if not following:
                break
            if following not in self._flying:
                self._fetch(following)
        while len(self._flying) > self._ahead:
            self._flying.pop(next(iter(self._flying)))
        return leaves

    def _fetch(self, paths: tuple[str, ...]) -> None:
        with self._runtime.side():
            self._flying[paths] = {
                path: self._pinned[path].to(self._device, non_blocking=True, copy=True) for path in paths
            }


class _Owner(NamedTuple):
    module: nn.Module
    names: dict[str, str]  # of the module's own parameter -> leaf path


class _Rebuilt(torch.autograd.Function):
    """theta~ for theta, the gradient passed through: a leaf gathers the sum of raw gradients, tied or not."""

    @staticmethod
    def forward(ctx, leaf, state):  # type: ignore[no-untyped-def]
        return state.view_as(state)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class Rebuilder:
    """Runs a module on simulated weights that are never there all at once.

    Args: module: whose parameters the leaf paths name (tied weights once).
    """

    def __init__(self, module: nn.Module, base: BaseSource) -> None:
        self._module, self._base = module, base
        path_of = {id(p): path for path, p in module.named_parameters()}
        self._owners = [
            _Owner(owner, {name: path_of[id(p)] for name, p in owner.named_parameters(recurse=False)})
            for owner in module.modules()
        ]
        self.rebuilds = 0  # leaves rebuilt so far

    @contextmanager
    def at(self, leaves: Mapping[str, Tensor], draw: Draw, where: Where | None) -> Iterator[nn.Module]:
        """The module with simulated weights of ``leaves``; run loss and gradient inside.

        A module's parameters are meta tensors except while it runs, so that weights read from outside (which would miss
        the simulation) raise instead of being wrong. The module is as before afterwards, also after an exception.
        """
        live: dict[int, str] = {}
        handles, originals = [], []
        for owner, names in self._owners:
            own = {name: path for name, path in names.items() if path in leaves}
            if not own:
                continue
            before = {name: p for name, p in owner.named_parameters(recurse=False) if name in own}
            stubs = {name: torch.empty_like(p, device="meta") for name, p in before.items()}
            originals.append((owner, before))
            owner._parameters.update(stubs)  # type: ignore[arg-type]
            handles.append(owner.register_forward_pre_hook(self._enter(own, leaves, draw, where, live)))
            handles.append(owner.register_forward_hook(_leave(stubs, live), always_call=True))

        def pack(tensor: Tensor) -> Any:
            path = live.get(tensor.untyped_storage().data_ptr())
            return tensor if path is None else (path, tensor.size(), tensor.stride(), tensor.storage_offset())

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            path, *view = saved
            return self._states([path], leaves, draw, where)[path].as_strided(*view)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield self._module
        finally:
            for handle in handles:
                handle.remove()
            for owner, parameters in originals:
                owner._parameters.update(parameters)

    def _enter(self, own, leaves, draw, where, live):  # type: ignore[no-untyped-def]
        def hook(module, _):  # type: ignore[no-untyped-def]
            states = self._states(list(dict.fromkeys(own.values())), leaves, draw, where)
            for name, path in own.items():
                live[states[path].untyped_storage().data_ptr()] = path
                module._parameters[name] = _Rebuilt.apply(leaves[path], states[path])

        return hook

    def _states(
        self, paths: Sequence[str], leaves: Mapping[str, Tensor], draw: Draw, where: Where | None
    ) -> dict[str, Tensor]:
        from ..simulation.apply import simulate

        self.rebuilds += len(paths)
        with torch.no_grad():
            return simulate({path: leaves[path].detach() for path in paths}, self._base.get(paths), draw, where=where)


def _leave(stubs, live):  # type: ignore[no-untyped-def]
    def hook(module, *_):  # type: ignore[no-untyped-def]
        for name, stub in stubs.items():
            live.pop(module._parameters[name].untyped_storage().data_ptr(), None)
            module._parameters[name] = stub

    return hook
