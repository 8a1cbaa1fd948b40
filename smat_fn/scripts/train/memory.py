"""The peak of memory, of CUDA devices and of the process."""

from pathlib import Path
from typing import Any

import torch


def reset_process_peak() -> bool:
    """Start `process_peak` anew. Returns: whether the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def process_peak() -> int | None:
    """The largest resident bytes of this process since `reset_process_peak`, None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def reset_peak(device: torch.device) -> None:
    """The peaks of CUDA devices start anew; that of a process is left to whoever runs it."""
    if device.type == "cuda":
        for own in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(own)


def peak_memory(device: torch.device) -> dict[str, Any]:
    """``peak_memory_bytes``, and in ``peak_memory_of`` what they are of; nothing where the system does not tell.

    Of several CUDA devices it is the largest peak of one (paper, cost protocol).
    """
    if device.type == "cuda":
        allocated = max(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
        return {"peak_memory_bytes": allocated, "peak_memory_of": "cuda allocations"}
    peak = process_peak()  # that of getrusage begins with the parent's
    return {} if peak is None else {"peak_memory_bytes": peak, "peak_memory_of": "resident process"}
