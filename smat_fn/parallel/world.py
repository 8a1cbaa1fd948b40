"""The processes of a run: their number, the rank of this one, and the values that they share."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class World(NamedTuple):
    """One process, or one of several that ``torchrun`` started; the first one reports and writes."""

    rank: int = 0
    size: int = 1
    hosts: Any = None  # the group in which the processes talk without waiting for their devices

    @property
    def leads(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.rank == 0

    def agree(self, value: Any) -> Any:
        """The first process's value, in all of them; any value that pickles."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.hosts)
        return box[0]

    def led(self, work: Callable[[], T]) -> T:
        """The value of ``work`` in the first process, in all of them; the others do not run it, and wait.

        Raises: its error in the first process, and a ValueError with the text of that error in the others.
        """
        if self.size == 1:
            return work()
        found: Any = None
        if self.leads:
            try:
                found = work(), ""
            except BaseException as error:
                self.agree((None, str(error) or type(error).__name__))
                raise
        value, failed = self.agree(found)
        if failed:
            raise ValueError(f"the first process has failed: {failed}")
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes by rank, in all of them; any values that pickle."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.hosts)
        return found

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor(number, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.hosts)
        return int(found)

    @contextmanager
    def first(self) -> Iterator[None]:
        """The first process runs the block before the others do, which then find what it left in caches."""
        if not self.leads:
            dist.barrier(self.hosts)
        yield
        if self.leads and self.size > 1:
            dist.barrier(self.hosts)


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """The world of this process by torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK); each takes a GPU of its own.

    Raises: ValueError for more processes than GPUs on a machine that has some.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= count:
            raise ValueError(
                f"LOCAL_RANK is {place}, but this machine shows {count} GPUs, one for each process: give torchrun "
                f"--nproc-per-node {count}, or set CUDA_VISIBLE_DEVICES to nothing to train on the CPU"
            )
        torch.cuda.set_device(place)
    # a model may be trained on the CPU where GPUs are too
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        # what the first process prepares may take long; if it ends, torchrun ends the others
        hosts = dist.new_group(backend="gloo", timeout=timedelta(days=1))
        yield World(dist.get_rank(), size, hosts)
        dist.barrier(hosts)  # all leave together: the first process may still be writing
    finally:
        dist.destroy_process_group()
