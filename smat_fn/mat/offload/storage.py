"""Where theta_0 lives: on the device, in a reusable buffer there, or in pinned memory with copies ahead of use.

Copies run on a side stream. Nothing here changes a value: what has not arrived is waited for before it is used.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Runtime(Protocol):
    """Pinned memory and a side stream; a fake that counts and delays stands in for it in tests."""

    def pin(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in pinned host memory."""

    def empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory on the device for `copy`, valid until the first one."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Queue copies on the side stream, after all that is queued on the main stream; returns a ticket."""

    def join(self, ticket: Any) -> None:
        """The main stream waits for the copies of a ticket and those before."""


class CudaRuntime:
    """CUDA's pinned memory and one side stream.

    The memory of `empty` belongs to the side stream, so the allocator hands it on to that stream alone, where all that
    uses it later waits for the main stream first. (``record_stream`` would hold memory back until the device has caught
    up with the host: a copy per module would then pile up to a copy of everything.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in pinned host memory."""
        return tensor.detach().cpu().contiguous().pin_memory()

    def empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory on the device."""
        with torch.cuda.stream(self._stream):
            return [torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in like]

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        """Queue copies on the side stream; returns the event after them."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def join(self, ticket: torch.cuda.Event) -> None:
        """The main stream waits for an event."""
        torch.cuda.current_stream(self._device).wait_event(ticket)


class HostRuntime:
    """No side stream: copies at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor itself, contiguous in host memory."""
        return tensor.detach().cpu().contiguous()

    def empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory on the device."""
        return [torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in like]

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def join(self, ticket: None) -> None:
        """Nothing to wait for."""


@cache
def runtime_for(device: torch.device) -> Runtime:
    """The one runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else HostRuntime(device)


def one_device(leaves: Mapping[str, Tensor]) -> torch.device:
    """The device of all leaves. Raises: ValueError if there are several."""
    devices = sorted({str(leaf.device) for leaf in leaves.values()})
    if len(devices) > 1:
        raise ValueError(f"leaves lie on {', '.join(devices)}: an offload mode needs one device, use offload=None")
    return torch.device(devices[0] if devices else "cpu")


class Span(NamedTuple):
    """Coordinates [start, stop) of a leaf."""

    path: str
    start: int
    stop: int


class BaseBuffer:
    """theta_0 in pinned memory and one buffer of its size on the device.

    Args: base: flat leaves of theta_0; like: flat leaves that give the device; slices: number of `prefetch` calls that
        fill the buffer, each with an equal share of its bytes; runtime: of the device by default.
    Raises: ValueError for leaves on several devices.
    """

    def __init__(
        self, base: Mapping[str, Tensor], like: Mapping[str, Tensor], *, slices: int, runtime: Runtime | None = None
    ) -> None:
        self._runtime = runtime or runtime_for(one_device(like))
        self._pinned = {path: self._runtime.pin(leaf) for path, leaf in base.items()}
        self._buffer = dict(zip(base, self._runtime.empty(list(self._pinned.values())), strict=True))
        self._slices = cut(base, max(1, slices))
        self._filled, self._ticket = 0, None  # slices of the buffer that hold theta_0, and when the last one arrives

    def prefetch(self) -> None:
        """Queue the copy of the next slice, if one is missing."""
        if self._filled < len(self._slices):
            spans = self._slices[self._filled]
            self._ticket = self._runtime.copy(_views(self._buffer, spans), _views(self._pinned, spans))
            self._filled += 1

    def take(self) -> dict[str, Tensor]:
        """theta_0 in the buffer, for the caller to overwrite until the next `prefetch` or `take`."""
        while self._filled < len(self._slices):
            self.prefetch()
        if self._slices:
            self._runtime.join(self._ticket)
        self._filled = 0
        return dict(self._buffer)


def cut(leaves: Mapping[str, Tensor], parts: int) -> list[list[Span]]:
    """All coordinates in order, in at most ``parts`` slices of equal bytes (within one coordinate); none is empty."""
    total = sum(leaf.nbytes for leaf in leaves.values())
    bounds = [total * part // parts for part in range(parts + 1)]
    slices: list[list[Span]] = [[] for _ in range(parts)]
    begin = 0
    for path, leaf in leaves.items():
        ends = [min(max(bound - begin, 0), leaf.nbytes) // leaf.element_size() for bound in bounds]
        for part in range(parts):
            if ends[part] < ends[part + 1]:
                slices[part].append(Span(path, ends[part], ends[part + 1]))
        begin += leaf.nbytes
    return [spans for spans in slices if spans]


def _views(leaves: Mapping[str, Tensor], spans: Sequence[Span]) -> list[Tensor]:
    return [leaves[path].view(-1)[start:stop] for path, start, stop in spans]


class ResidentBase:
    """theta_0 on the device of ``like``; arguments as `StreamedBase`."""

    def __init__(self, base: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        device = one_device(like)
        self._base = {path: leaf.detach().to(device).contiguous() for path, leaf in base.items()}

    def get(self, paths: Sequence[str]) -> list[Tensor]:
        """Leaves of theta_0."""
        return [self._base[path] for path in paths]

    def rewind(self) -> None:
        """Nothing to forget."""


class StreamedBase:
    """theta_0 in pinned memory, copied group by group; after the first pass, ahead of use in the order of the last one.

    A pass is all `get` calls between two `rewind`. On the device are at most the group in use and ``ahead`` more.

    Args: base: flat leaves of theta_0; like: flat leaves that give the device; runtime: of the device by default.
    Raises: ValueError for leaves on several devices.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        like: Mapping[str, Tensor],
        *,
        ahead: int = 1,
        runtime: Runtime | None = None,
    ) -> None:
        self._runtime = runtime or runtime_for(one_device(like))
        self._pinned = {path: self._runtime.pin(leaf) for path, leaf in base.items()}
        self._ahead = ahead
        self._order: list[tuple[str, ...]] = []  # groups of the last pass
        self._seen: list[tuple[str, ...]] = []  # of this one
        self._next = 0  # position in the order
        self._flying: dict[int, tuple[list[Tensor], Any]] = {}  # by position

    def get(self, paths: Sequence[str]) -> list[Tensor]:
        """Leaves of theta_0; drop them soon."""
        group = tuple(paths)
        self._seen.append(group)
        flight = None
        with suppress(ValueError):  # not expected any more: guess on from where the order was left
            position = self._order.index(group, self._next)
            flight, self._next = self._flying.pop(position, None), position + 1
        leaves, ticket = flight or self._fetch(group)
        coming = range(self._next, min(self._next + self._ahead, len(self._order)))
        self._flying = {i: flight for i, flight in self._flying.items() if i in coming}
        for i in coming:
            if i not in self._flying:
                self._flying[i] = self._fetch(self._order[i])
        self._runtime.join(ticket)
        return leaves

    def rewind(self) -> None:
        """End of a pass, complete or not."""
        self._order, self._seen, self._next = self._seen or self._order, [], 0
        self._flying.clear()

    def _fetch(self, group: tuple[str, ...]) -> tuple[list[Tensor], Any]:
        sources = [self._pinned[path] for path in group]
        targets = self._runtime.empty(sources)
        return targets, self._runtime.copy(targets, sources)
