"""The device's memory of a suite's base, given back while a method trains that does not read it there."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ...config import MethodConfig, settings

STRUCTURE_ALONE = "ft", "asam", "mergopt"  # what these methods take from base


def rests(method: MethodConfig, base: Mapping[str, Tensor]) -> bool:
    """Whether base is on a device that need not hold it: OrthoReg reads it there, SMAT unless it is to be pinned."""
    pinned = method.name == "smat" and settings(method).get("offload") in ("cpu", "stream")
    return (pinned or method.name in STRUCTURE_ALONE) and all(leaf.is_cuda for leaf in base.values())


@contextmanager
def resting(leaves: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the leaves and whatever shares their memory have none; after it, the values of ``kept``, come what may.

    A module's own weights are such: a loss runs on the parameters it is given. Memory that other tensors share stays.
    """
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves.values()}
    held = dict.fromkeys(storages, 0)
    for leaf in leaves.values():
        held[leaf.untyped_storage().data_ptr()] += leaf.nbytes
    own = [(storages[place], size) for place, size in held.items() if storages[place].nbytes() == size]
    try:
        for storage, _ in own:
            storage.resize_(0)
        yield
    finally:
        for storage, size in own:
            storage.resize_(size)
        for path, leaf in leaves.items():
            leaf.copy_(kept[path])
