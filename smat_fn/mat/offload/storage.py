"""Where theta_0 lives: on the device, in a reusable buffer there, or in pinned memory with copies ahead of use.

Copies run on a side stream. Nothing here changes a value: what has not arrived is waited for before it is used.
"""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import tree
from ...types import Params

ALIGN = 64  # bytes at whose multiples leaves begin in an arena
HELD = 1  # groups beyond those in use that may wait for their last read


class Runtime(Protocol):
    """Pinned memory and a side stream of one device; a fake that counts and delays stands in for it in tests."""

    def pin(self, leaves: Mapping[str, Tensor]) -> "Host":
        """The leaves in host memory that copies can start from."""

    def empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory on the device for `copy`, valid until the first one; for shapes and dtypes."""

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Queue copies on the side stream, after all that is queued on the main stream; returns a ticket."""

    def join(self, ticket: Any) -> None:
        """The main stream waits for the copies of a ticket and those before."""

    def release(self, leaves: Sequence[Tensor]) -> None:
        """Frees leaves made by `empty`; everything that reads them is already queued on the main stream."""

    def finish(self, leaves: Sequence[Tensor]) -> None:
        """`release` at the end of a method's life: the host waits."""


Piece = tuple[int, int, Tensor]  # coordinates [start, stop) of a leaf, flat, and their memory


class Host(Protocol):
    """Leaves in host memory."""

    def pieces(self, path: str, start: int, stop: int) -> list[Piece]:
        """Coordinates [start, stop) of a leaf, in order."""


class Unpinned:
    """Leaves in ordinary host memory: the tensors themselves, where they are contiguous on the CPU."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self._leaves = {path: leaf.detach().cpu().contiguous().view(-1) for path, leaf in leaves.items()}

    def pieces(self, path: str, start: int, stop: int) -> list[Piece]:
        """The whole range, as one chunk."""
        return [(start, stop, self._leaves[path][start:stop])]


def read_in_place(base: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of base whose own memory `Unpinned` reads; CUDA's runtime copies all of them."""
    kept = (path for path, leaf in base.items() if leaf.is_cpu and leaf.is_contiguous() and not like[path].is_cuda)
    return {path: base[path].detach() for path in kept}


class Arena:
    """A copy of leaves, one after another, in few blocks whose sizes are powers of two.

    To such sizes torch's cache of pinned memory rounds up every tensor: a tensor a leaf costs up to twice its bytes.
    A leaf may lie across blocks.

    Args: make: bytes -> that much memory, uint8; least: smallest block, in bytes, a power of two and at least `ALIGN`.
    """

    def __init__(self, leaves: Mapping[str, Tensor], make: Callable[[int], Tensor], *, least: int = 1 << 21) -> None:
        self._at: dict[str, tuple[int, torch.dtype, int]] = {}  # first byte, dtype, bytes of a coordinate
        total = 0
        for path, leaf in leaves.items():
            self._at[path] = total, leaf.dtype, leaf.element_size()
            total += -(-leaf.nbytes // ALIGN) * ALIGN
        units = -(-total // least)
        sizes = [least << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
        self._blocks = [make(size) for size in sizes]
        self._ends = list(accumulate(sizes))
        for path, leaf in leaves.items():
            flat = leaf.detach().reshape(-1)
            for start, stop, memory in self.pieces(path, 0, leaf.numel()):
                memory.copy_(flat[start:stop])

    def pieces(self, path: str, start: int, stop: int) -> list[Piece]:
        """Coordinates [start, stop) of a leaf, one chunk for each pinned block."""
        first, dtype, size = self._at[path]
        found, now = [], start
        while now < stop:
            byte = first + now * size
            block = bisect_right(self._ends, byte)
            end = min(stop, (self._ends[block] - first) // size)
            offset = byte - (self._ends[block - 1] if block else 0)
            found.append((now, end, self._blocks[block][offset : offset + (end - now) * size].view(dtype)))
            now = end
        return found


class OnHost(dict[str, Tensor]):
    """theta_0 by path for a caller that keeps ``host`` itself: shapes and dtypes, whose values are read from there.

    Args: host: None in a tree that was built like another one, which has no values.
    """

    def __init__(self, leaves: Mapping[str, Tensor], host: Host | None = None) -> None:
        super().__init__({path: leaf.detach().to("meta") for path, leaf in leaves.items()})
        self.host = host


def held(host: Host, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values that a host has of leaves, in its own memory; a leaf that lies across blocks is copied."""
    found = {}
    for path, leaf in leaves.items():
        parts = [memory for _, _, memory in host.pieces(path, 0, leaf.numel())]
        whole = parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=leaf.dtype), *parts])
        found[path] = whole.view(leaf.shape)
    return found


def flat(base: Params) -> Mapping[str, Tensor]:
    """The leaves of base by path, and with them where an `OnHost` has its values."""
    return base if isinstance(base, OnHost) else tree.flatten(base)


def host_of(base: Mapping[str, Tensor]) -> Host | None:
    """Where the values of base are in host memory already."""
    return base.host if isinstance(base, OnHost) else None


class CudaRuntime:
    """CUDA's pinned memory and one side stream.

    The memory of `empty` belongs to the side stream, so the allocator hands it on to that stream alone, where all that
    uses it later waits for the main stream first. The allocator may also give it back to the device when that stream
    alone is done (expandable segments): so what `release` gets is held until the main stream has read it, and the host
    waits where more than `HELD` groups are. (``record_stream`` would hold memory back until the device has caught up
    with the host: a copy per module would then pile up to a copy of everything.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._held: deque[tuple[Any, list[Tensor]]] = deque()

    def pin(self, leaves: Mapping[str, Tensor]) -> Host:
        """A copy in pinned host memory. Raises: ValueError where the host has too little."""
        try:
            return Arena(leaves, lambda size: torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            # CUDA's message is that of a full device
            total = sum(leaf.nbytes for leaf in leaves.values()) / 2**30
            raise ValueError(
                f"the base takes {total:.1f} GiB of pinned host memory, which this machine cannot give: "
                "`offload='recompute'` keeps it on the device"
            ) from error

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

    def release(self, leaves: Sequence[Tensor]) -> None:
        """Hold the leaves until the main stream has read them."""
        self._held.append((torch.cuda.current_stream(self._device).record_event(), list(leaves)))
        while self._held and (len(self._held) > HELD or self._held[0][0].query()):
            event, _ = self._held.popleft()
            event.synchronize()

    def finish(self, leaves: Sequence[Tensor]) -> None:
        """Wait until the main stream has read the leaves."""
        torch.cuda.current_stream(self._device).record_event().synchronize()


class HostRuntime:
    """The runtime of a device without a side stream: copies run at once, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, leaves: Mapping[str, Tensor]) -> Host:
        """The tensors themselves, contiguous in host memory."""
        return Unpinned(leaves)

    def empty(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory on the device."""
        return [torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device) for leaf in like]

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy the sources into the targets."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def join(self, ticket: None) -> None:
        """Do nothing: a copy has ended when `copy` returns."""

    def release(self, leaves: Sequence[Tensor]) -> None:
        """Do nothing: what reads the leaves has already run."""

    def finish(self, leaves: Sequence[Tensor]) -> None:
        """Do nothing: what reads the leaves has already run."""


@cache
def runtime_for(device: torch.device) -> Runtime:
    """The one runtime of a device."""
    return CudaRuntime(device) if device.type == "cuda" else HostRuntime(device)


def by_device(base: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[torch.device, dict[str, Tensor]]:
    """Leaves of base by the device of the leaf of ``like``."""
    devices: dict[torch.device, dict[str, Tensor]] = {}
    for path, leaf in base.items():
        devices.setdefault(like[path].device, {})[path] = leaf
    return devices


class Span(NamedTuple):
    """Coordinates [start, stop) of a leaf."""

    path: str
    start: int
    stop: int


class BaseBuffer:
    """theta_0 in pinned memory, and on each device one buffer of the size of its leaves.

    Args: base: flat leaves of theta_0; like: a leaf for each of them, on the device where it is wanted; slices: number
        of `prefetch` calls that fill a buffer, each with an equal share of its bytes; runtime: by default the device's.
    """

    def __init__(
        self, base: Mapping[str, Tensor], like: Mapping[str, Tensor], *, slices: int, runtime: Runtime | None = None
    ) -> None:
        self._paths = list(base)
        self._parts = [
            _DeviceBuffer(own, host_of(base), runtime or runtime_for(device), max(1, slices))
            for device, own in by_device(base, like).items()
        ]

    def prefetch(self) -> None:
        """Queue the copy of the next slice, if one is missing."""
        for part in self._parts:
            part.prefetch()

    def memory(self) -> dict[str, Tensor]:
        """The buffers, for the caller to overwrite until the next `prefetch` or `take`; what was copied is lost."""
        lent = {path: leaf for part in self._parts for path, leaf in part.memory().items()}
        return {path: lent[path] for path in self._paths}

    def take(self) -> dict[str, Tensor]:
        """theta_0 in the buffers, for the caller to overwrite until the next `prefetch` or `take`."""
        taken = {path: leaf for part in self._parts for path, leaf in part.take().items()}
        return {path: taken[path] for path in self._paths}


class _DeviceBuffer:
    """`BaseBuffer` of one device."""

    def __init__(self, base: Mapping[str, Tensor], host: Host | None, runtime: Runtime, slices: int) -> None:
        self._runtime, self._pinned = runtime, runtime.pin(base) if host is None else host
        self._buffer = dict(zip(base, runtime.empty(list(base.values())), strict=True))
        weakref.finalize(self, runtime.finish, list(self._buffer.values())).atexit = False
        self._slices = cut(base, slices)
        self._filled, self._ticket = 0, None  # slices of the buffer that hold theta_0, and when the last one arrives

    def prefetch(self) -> None:
        if self._filled < len(self._slices):
            copies = _copies(self._pinned, self._buffer, self._slices[self._filled])
            self._ticket = self._runtime.copy(*copies)
            self._filled += 1

    def memory(self) -> dict[str, Tensor]:
        # no copy, and what the side stream did with this memory before, writes to it any more
        self._runtime.join(self._runtime.copy([], []))
        self._filled = 0
        return self._buffer

    def take(self) -> dict[str, Tensor]:
        while self._filled < len(self._slices):
            self.prefetch()
        if self._slices:
            self._runtime.join(self._ticket)
        self._filled = 0
        return self._buffer


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


def _copies(pinned: Host, leaves: Mapping[str, Tensor], spans: Sequence[Span]) -> tuple[list[Tensor], list[Tensor]]:
    """(targets, sources) of the copies of all coordinate ranges."""
    targets, sources = [], []
    for path, start, stop in spans:
        flat = leaves[path].view(-1)
        for begin, end, memory in pinned.pieces(path, start, stop):
            targets.append(flat[begin:end])
            sources.append(memory)
    return targets, sources


class ResidentBase:
    """theta_0 on the devices of ``like``; arguments as `StreamedBase`."""

    def __init__(self, base: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
        self._base = {path: leaf.detach().to(like[path].device).contiguous() for path, leaf in base.items()}

    def get(self, paths: Sequence[str]) -> list[Tensor]:
        """The leaves of theta_0 at these paths."""
        return [self._base[path] for path in paths]

    def release(self) -> None:
        """Do nothing: the leaves are those of base."""

    def rewind(self) -> None:
        """Do nothing: no order of use is recorded."""


class StreamedBase:
    """theta_0 in pinned memory, copied group by group; after the first pass, ahead of use in the order of the last one.

    A pass is all `get` calls between two `rewind`. On a device are at most the group in use, ``ahead`` more, and the
    one before until it has been read.

    Args: base: flat leaves of theta_0; like: a leaf for each of them, on the device where it is wanted; runtime: each
        device's by default.
    """

    def __init__(
        self, base: Mapping[str, Tensor], like: Mapping[str, Tensor], *, ahead: int = 1, runtime: Runtime | None = None
    ) -> None:
        self._parts: list[_DeviceStream] = []
        self._part_of: dict[str, int] = {}
        for device, own in by_device(base, like).items():
            self._part_of.update(dict.fromkeys(own, len(self._parts)))
            self._parts.append(_DeviceStream(own, host_of(base), runtime or runtime_for(device), ahead))

    def get(self, paths: Sequence[str]) -> list[Tensor]:
        """Leaves of theta_0, until `release` or the next `get`."""
        groups: dict[int, list[str]] = {}
        for path in paths:
            groups.setdefault(self._part_of[path], []).append(path)
        found: dict[str, Tensor] = {}
        for part, own in groups.items():
            found.update(zip(own, self._parts[part].get(tuple(own)), strict=True))
        return [found[path] for path in paths]

    def release(self) -> None:
        """The leaves of the last `get` are used up: all that reads them is queued."""
        for part in self._parts:
            part.release()

    def rewind(self) -> None:
        """End of a pass, complete or not."""
        for part in self._parts:
            part.rewind()


class _DeviceStream:
    """`StreamedBase` of one device."""

    def __init__(self, base: Mapping[str, Tensor], host: Host | None, runtime: Runtime, ahead: int) -> None:
        self._runtime, self._ahead = runtime, ahead
        self._pinned = runtime.pin(base) if host is None else host
        self._shapes = {path: torch.empty_like(leaf, device="meta") for path, leaf in base.items()}
        self._order: list[tuple[str, ...]] = []  # groups of the last pass
        self._seen: list[tuple[str, ...]] = []  # of this one
        self._next = 0  # position in the order
        self._flying: dict[int, tuple[list[Tensor], Any]] = {}  # by position
        self._used: list[Tensor] = []  # the group in use

    def get(self, group: tuple[str, ...]) -> list[Tensor]:
        self.release()
        self._seen.append(group)
        flight = None
        with suppress(ValueError):  # not expected any more: guess on from where the order was left
            position = self._order.index(group, self._next)
            flight, self._next = self._flying.pop(position, None), position + 1
        leaves, ticket = flight or self._fetch(group)
        coming = range(self._next, min(self._next + self._ahead, len(self._order)))
        self._keep(coming)
        for i in coming:
            if i not in self._flying:
                self._flying[i] = self._fetch(self._order[i])
        self._runtime.join(ticket)
        self._used = leaves
        return list(leaves)

    def release(self) -> None:
        if self._used:
            self._runtime.release(self._used)
            self._used = []

    def rewind(self) -> None:
        self.release()
        self._order, self._seen, self._next = self._seen or self._order, [], 0
        self._keep(range(0))

    def _keep(self, coming: range) -> None:
        """Drops copies that are not needed any more."""
        for i in [i for i in self._flying if i not in coming]:
            leaves, ticket = self._flying.pop(i)
            self._runtime.join(ticket)  # nothing is given back while it is written
            self._runtime.release(leaves)

    def _fetch(self, group: tuple[str, ...]) -> tuple[list[Tensor], Any]:
        targets = self._runtime.empty([self._shapes[path] for path in group])
        own = dict(zip(group, targets, strict=True))
        spans = [Span(path, 0, leaf.numel()) for path, leaf in own.items()]
        return targets, self._runtime.copy(*_copies(self._pinned, own, spans))
