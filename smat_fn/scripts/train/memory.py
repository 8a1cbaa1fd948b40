"""Peak memory of CUDA devices and of the process; and freeing the base's device memory while it is unused."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import MethodConfig
from ...mat.offload.storage import Host, held
from ...types import Offload

STRUCTURE_ALONE = "ft", "asam", "mergopt", "msam", "talos"  # methods that read base's shapes and dtypes, not its values


def reset_process_peak() -> bool:
    """Reset `process_peak`. Returns: whether the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def process_memory(kind: str, pid: int | str = "self") -> int | None:
    """Bytes of a kind of memory in /proc/<pid>/status, None where the system does not report it or the process ended.

    Args: kind: VmHWM, the peak of what is resident; RssAnon, what is resident and of no file.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), None)


def process_peak() -> int | None:
    """Peak resident bytes of this process since `reset_process_peak`, None where the system does not report it."""
    return process_memory("VmHWM")


def reset_peak(device: torch.device) -> None:
    """Reset the peaks of CUDA devices; that of the process is left to its owner."""
    if device.type == "cuda":
        for own in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(own)


def peak_memory(device: torch.device) -> dict[str, Any]:
    """``peak_memory_bytes``, and ``peak_memory_of`` to say of what; empty where the system does not report it.

    Of several CUDA devices it is the largest peak of one (paper, cost protocol).
    """
    if device.type == "cuda":
        allocated = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        return {"peak_memory_bytes": allocated, "peak_memory_of": "cuda allocations"}
    peak = process_peak()  # that of getrusage begins with the parent's
    return {} if peak is None else {"peak_memory_bytes": peak, "peak_memory_of": "resident process"}


def offloads_base(method: MethodConfig, base: Mapping[str, Tensor], offload: Offload | None = None) -> bool:
    """Whether base is on a device that need not hold it: OrthoReg reads it there, SMAT unless it is to be pinned."""
    return (offload in ("cpu", "stream") or method.name in STRUCTURE_ALONE) and on_gpu(base)


def on_gpu(leaves: Mapping[str, Tensor]) -> bool:
    """Whether CUDA devices hold all leaves."""
    return all(leaf.is_cuda for leaf in leaves.values())


@contextmanager
def offloaded(leaves: Mapping[str, Tensor], kept: Host) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Frees the leaves' storage inside the block, and restores it from ``kept`` on exit, even after an exception.

    Inside, ``with present():``, of the function that the block is given, has it restored for as long. A module's own
    weights may share it: a loss runs on the parameters it is given. Storage that tensors beside ``leaves`` share is not
    freed.
    """
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves.values()}
    shares = dict.fromkeys(storages, 0)
    for leaf in leaves.values():
        shares[leaf.untyped_storage().data_ptr()] += leaf.nbytes
    own = [(storages[place], size) for place, size in shares.items() if storages[place].nbytes() == size]

    def free() -> None:
        for storage, _ in own:
            storage.resize_(0)

    def restore() -> None:
        for storage, size in own:
            storage.resize_(size)
        for path, leaf in leaves.items():
            leaf.copy_(held(kept, {path: leaf})[path])

    @contextmanager
    def present() -> Iterator[None]:
        try:
            restore()
            yield
        finally:
            free()

    try:
        free()
        yield present
    finally:
        restore()
