"""Where theta_0 and the simulated state live on a device: one reusable buffer, filled from pinned memory ahead of time.

During clean steps the base is copied, a slice a step, on a side stream into the buffer; a simulated step overwrites it
in place with theta~. Nothing here changes a value: whatever is missing is copied before it is used.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..simulation.draws import Draw
from ..types import Where


class Runtime(Protocol):
    """Pinned memory and a side stream; a counting fake stands in for it in tests."""

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned host memory."""

    def side(self) -> AbstractContextManager[Any]:
        """Work inside runs on the side stream, after what is queued on the main stream."""

    def join(self) -> None:
        """The main stream waits for the side stream."""


class CudaRuntime:
    """CUDA's pinned memory and one side stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._device = torch.cuda.Stream(device), device

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in pinned host memory."""
        return tensor.detach().cpu().contiguous().pin_memory()

    def side(self) -> AbstractContextManager[Any]:
        """Work inside runs on the side stream, after what is queued on the main stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """The main stream waits for the side stream."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class HostRuntime:
    """No device: copies at once, in order."""

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy."""
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def side(self) -> AbstractContextManager[Any]:
        """No other stream."""
        return nullcontext()

    def join(self) -> None:
        """Nothing to wait for."""


def runtime_for(device: torch.device) -> Runtime:
    """The runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else HostRuntime()


class BaseBuffer:
    """theta_0 in pinned memory and one buffer of its size on the device.

    Args: base: flat leaves of theta_0; like: flat leaves that give the device; slices: clean steps of a period, over
        which the copy is spread; runtime: of the device by default.
    """

    def __init__(
        self, base: Mapping[str, Tensor], like: Mapping[str, Tensor], *, slices: int, runtime: Runtime | None = None
    ) -> None:
        device = next(iter(like.values())).device
        self._runtime = runtime or runtime_for(device)
        self._pinned = {path: self._runtime.pin(leaf) for path, leaf in base.items()}
        self._buffer = {path: torch.empty_like(leaf, device=device) for path, leaf in self._pinned.items()}
        self._parts = cut({path: leaf.nbytes for path, leaf in base.items()}, max(1, slices))
        self._filled = 0  # parts of the buffer that hold theta_0

    def prefetch(self) -> None:
        """Queue the copy of the next slice, if one is missing."""
        if self._filled < len(self._parts):
            self._copy(self._parts[self._filled])
            self._filled += 1

    def simulate(self, params: Mapping[str, Tensor], draw: Draw, where: Where | None) -> dict[str, Tensor]:
        """theta~ in the buffer; it stays valid until the next `prefetch` or `simulate`."""
        from ..simulation.apply import simulate

        while self._filled < len(self._parts):
            self.prefetch()
        self._runtime.join()
        self._filled = 0  # before the buffer changes, so that an exception leaves no half-valid one behind
        simulate(dict(params), self._buffer, draw, where=where, out=self._buffer)
        return self._buffer

    def _copy(self, paths: Sequence[str]) -> None:
        with self._runtime.side():
            for path in paths:
                self._buffer[path].copy_(self._pinned[path], non_blocking=True)


def cut(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Leaves in order, in at most ``parts`` groups of about equal size; no group is empty."""
    total, done = sum(sizes.values()), 0
    groups: list[list[str]] = [[] for _ in range(parts)]
    for path, size in sizes.items():
        # by the middle of the leaf, so that a large one goes where most of it lies
        groups[min(parts - 1, int(parts * (done + size / 2) / max(total, 1)))].append(path)
        done += size
    return [group for group in groups if group]
