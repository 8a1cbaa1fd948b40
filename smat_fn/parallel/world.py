"""The processes of a run: how many there are, which one this is, and what they agree on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class World(NamedTuple):
    """One process, or one of several that ``torchrun`` started; the first one reports and writes."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that reports and writes."""
        return self.rank == 0

    def agree(self, value: Any) -> Any:
        """The first process's value, in all of them; any value that pickles."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def largest(self, number: int) -> int:
        """The largest of the processes' numbers."""
        if self.size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    @contextmanager
    def first(self) -> Iterator[None]:
        """The first process runs the block before the others do, which then find what it left in caches."""
        if not self.leads:
            dist.barrier()
        yield
        if self.leads and self.size > 1:
            dist.barrier()


ALONE = World()


@contextmanager
def joined() -> Iterator[World]:
    """The world of this process by torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK); each takes a GPU of its own."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield World(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
