"""Memory that a thread keeps from piece to piece."""

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """Flat tensors by name, of each thread its own: taking new ones costs as much as the arithmetic on them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``count`` numbers of any value; they are the ones that this name gave before, of this dtype and device."""
        key = name, dtype, device
        held = self._held.get(key)
        if held is None or len(held) < count:
            held = self._held[key] = torch.empty(count, dtype=dtype, device=device)
        return held[:count]

    def cast(self, name: str, values: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``values.to(device, dtype)``, a copy in the memory of this name where it is one."""
        if values.dtype == dtype and values.device == device:
            return values
        return self.take(name, len(values), dtype, device).copy_(values)
