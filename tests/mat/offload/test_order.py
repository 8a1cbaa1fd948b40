"""The order of copies, waits and uses on streams, as a model on the CPU: every one is traced, races are named.

Streams carry vector clocks. An operation is ordered after all that its stream has waited for. Two uses of one memory,
one of them a write, must be ordered; memory is given back only when the host knows that no other stream reads it.
"""

import weakref

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smat_fn.mat.offload import storage
from smat_fn.mat.offload.storage import Arena, BaseBuffer, CudaRuntime, StreamedBase
from smat_fn.ops import launch
from smat_fn.testing import assert_trees_equal, random_tree

CPU, ATEN = torch.device("cpu"), torch.ops.aten
WRITES = ATEN.copy_.default, ATEN.fill_.Scalar


class Streams(TorchDispatchMode):
    """A device's streams and the uses of the memory that was allocated on one that is not the main one."""

    def __init__(self, fast):
        super().__init__()
        self.fast, self.host, self.races, self.trace = fast, {}, [], []  # fast: a device that is never behind
        self.uses, self.recorded, self.main = {}, {}, None
        self.main = self.now = Stream(self)

    def merge(self, clock, other):
        for stream, time in other.items():
            clock[stream] = max(clock.get(stream, 0), time)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATEN.empty.memory_format and self.now is not self.main:
            return self.allocate(*args, dtype=kwargs["dtype"])
        for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor) and func is not ATEN.view.default:
                self.use(leaf.untyped_storage().data_ptr(), func, write=func in WRITES and i == 0)
        return func(*args, **(kwargs or {}))

    def allocate(self, shape, dtype):
        size = torch.Size(shape)
        memory = numpy.empty(max(1, size.numel()) * dtype.itemsize, dtype=numpy.uint8)
        leaf = torch.from_numpy(memory)[: size.numel() * dtype.itemsize].view(dtype).view(size)
        place = leaf.untyped_storage().data_ptr()
        self.uses[place] = [(self.now, 0, True)]
        weakref.finalize(memory, self.free, place, self.now)
        return leaf

    def use(self, place, func, *, write):
        if place not in self.uses:
            return
        now = self.now
        now.clock[now] = now.clock.get(now, 0) + 1
        for stream, time, wrote in self.uses[place]:
            if (write or wrote) and now.clock.get(stream, 0) < time:
                self.races.append(f"{func} on {now} before stream {stream} is done")
        self.uses[place].append((now, now.clock[now], write))
        self.trace.append(func)

    def record(self, leaf, stream):
        self.recorded.setdefault(leaf.untyped_storage().data_ptr(), set()).add(stream)

    def free(self, place, owner):
        waited_for = {owner, *self.recorded.pop(place, ())}
        for stream, time, _ in self.uses.pop(place):
            if stream not in waited_for and self.host.get(stream, 0) < time:
                self.races.append(f"given back before {stream} is done")


class Stream:
    def __init__(self, machine, *_):
        self.machine, self.clock = machine, {}

    def wait_stream(self, other):
        self.machine.merge(self.clock, other.clock)

    def wait_event(self, event):
        self.machine.merge(self.clock, event.clock)

    def record_event(self):
        return Event(self.machine, dict(self.clock))

    def __enter__(self):
        self.before, self.machine.now = self.machine.now, self

    def __exit__(self, *_):
        self.machine.now = self.before


class Event:
    def __init__(self, machine, clock):
        self.machine, self.clock = machine, clock

    def query(self):
        if self.machine.fast:
            self.synchronize()
        return self.machine.fast

    def synchronize(self):
        self.machine.merge(self.machine.host, self.clock)


class Runtime(CudaRuntime):
    """As it is, but for memory that no CPU can pin."""

    def pin(self, leaves):
        return Arena(leaves, lambda size: torch.empty(size, dtype=torch.uint8), least=storage.ALIGN)


class CopiesTooEarly(Runtime):
    def copy(self, targets, sources):
        before = self._stream.wait_stream
        self._stream.wait_stream = lambda other: None
        try:
            return super().copy(targets, sources)
        finally:
            self._stream.wait_stream = before


class NeverWaits(Runtime):
    def join(self, ticket):
        pass


class GivesBackAtOnce(Runtime):
    def release(self, leaves):
        pass

    finish = release


@pytest.fixture(params=["fast device", "slow device"])
def machine(request, monkeypatch):
    model = Streams(request.param == "fast device")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(model))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: model.now)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return model


BASE = random_tree(1, {f"w{i}": (10,) for i in range(6)})
FORWARD = [(path,) for path in BASE]
PASS = FORWARD + FORWARD[:0:-1]


def elsewhere(machine):
    """A caller that continues on another stream."""
    other = Stream(machine)
    other.wait_stream(machine.now)
    machine.main = machine.now = other


def buffered(machine, runtime):
    """Three periods of a buffer that the main stream reads and overwrites, the second on another main stream."""
    buffer, found = BaseBuffer(BASE, BASE, slices=3, runtime=runtime), []
    for period in range(3):
        if period == 1:
            elsewhere(machine)
        for _ in range(2 + period % 2):
            buffer.prefetch()
        taken = buffer.take()
        found.append({path: leaf.clone() for path, leaf in taken.items()})
        for leaf in taken.values():
            leaf.fill_(0.0)
    return found


def lent(machine, runtime):
    """A buffer whose memory the main stream writes before the first copy, and after copies that are lost; the last time
    on another main stream.
    """
    buffer, found = BaseBuffer(BASE, BASE, slices=3, runtime=runtime), []
    for early in range(3):
        if early == 2:
            elsewhere(machine)
        for _ in range(early):
            buffer.prefetch()
        for leaf in buffer.memory().values():
            leaf.fill_(0.0)
        found.append({path: leaf.clone() for path, leaf in buffer.take().items()})
    return found


def streamed(machine, runtime):
    """Passes in one order, in another, and one that is cut short; what is read of each group.

    From the third one on the main stream is another one, to which what is held and what is ahead is handed on.
    """
    source, found = StreamedBase(BASE, BASE, ahead=2, runtime=runtime), []
    for turn, order in enumerate((PASS, PASS, FORWARD[::-1], PASS[:4], FORWARD)):
        if turn == 2:
            elsewhere(machine)
        for group in order:
            (leaf,) = source.get(group)
            found.append({group[0]: leaf.clone()})
            del leaf
            source.release()
        source.rewind()
    return found


WAYS = {"buffered": buffered, "lent": lent, "streamed": streamed}


@pytest.mark.parametrize("way", WAYS)
def test_no_use_of_the_device_memory_races(machine, way):
    runtime = Runtime(CPU)  # which lives as long as the process
    with machine:
        found = WAYS[way](machine, runtime)
    assert machine.races == []
    assert machine.trace.count(ATEN.copy_.default) > 10
    assert machine.trace.count(ATEN.clone.default) > 10
    for leaves in found:
        assert_trees_equal(leaves, {path: BASE[path] for path in leaves})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", [CopiesTooEarly, NeverWaits, GivesBackAtOnce])
def test_a_wait_left_out_is_a_race(machine, way, broken):
    runtime = broken(CPU)
    with machine:
        WAYS[way](machine, runtime)
    assert machine.races or (broken is CopiesTooEarly and way == "streamed")  # whose memory is new each time


def test_few_groups_are_held_for_a_device_that_is_behind(machine):
    with machine:
        source, alive = StreamedBase(BASE, BASE, ahead=1, runtime=Runtime(CPU)), []
        for _ in range(2):
            for group in PASS:
                source.get(group)
                alive.append(len(machine.uses))
            source.rewind()
    # in use, one ahead, and the one before
    assert max(alive) == (2 if machine.fast else 3)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_table_that_a_launch_forgets_is_kept_until_every_stream_has_read_it(machine, monkeypatch, recorded):
    def table(places, kept, key, device):
        return kept.setdefault(key, torch.empty(len(places), dtype=torch.int32))

    monkeypatch.setattr(launch, "constant", table)
    monkeypatch.setattr(launch, "_owners", {})
    record = (lambda leaf, stream: machine.record(leaf, stream)) if recorded else lambda *_: None
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    first, device = Stream(machine), torch.device("cuda")
    with machine:
        with first:
            launch._owner((3,), device).clone()
        launch._owner((3,), device).clone()  # what a launch on the main stream does
        with first:
            for count in range(4, 37):
                launch._owner((count,), device).clone()
        assert len(launch._owners) == 32
        launch._owners.clear()
    assert bool(machine.races) != recorded


class Pageable(TorchFunctionMode):
    """Memory that is asked for as pinned is not, which no CPU can do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def test_pinned_memory_is_the_hosts_whatever_the_default_device(machine):
    runtime = CudaRuntime(CPU)
    with torch.device("meta"), Pageable():
        host = runtime.pin(BASE)
    assert_trees_equal({path: host.pieces(path, 0, 10)[0][2] for path in BASE}, BASE)


def test_too_little_host_memory_is_not_called_a_full_device(machine, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ValueError, match=r"takes 0\.0 GiB of pinned host memory.*`offload='recompute'` keeps it"):
        CudaRuntime(CPU).pin(BASE)
