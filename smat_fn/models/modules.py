"""`FullLoss`: a `ModuleLoss` that requires every parameter; batches of tokens, and their way to the device."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..grad import ModuleLoss
from ..types import Aux


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Detached copies of a module's trainable parameters by name, tied weights once."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def sent(batch: Tensor, device: torch.device) -> Tensor:
    """A batch on the device; from pinned memory, for which a host that runs ahead of its GPU need not wait."""
    if device.type != "cuda" or not batch.is_cpu or torch.compiler.is_compiling():
        return batch.to(device)
    if torch._C._functorch.peek_interpreter_stack() is not None:  # in a transform it may have no memory of its own
        return batch.to(device)
    return batch.pin_memory().to(device, non_blocking=True)


def filled(rows: Sequence[Sequence[int]], value: int, *, multiple: int = 1) -> Tensor:
    """Rows of tokens side by side, filled up on the right to the longest, rounded up to a multiple: int64 (B, T)."""
    width = -(-max(map(len, rows)) // multiple) * multiple
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.int64)


class FullLoss(ModuleLoss):
    """A `ModuleLoss` of all trainable parameters: a name left out is an error instead of a hidden value.

    Raises: ValueError that lists missing names; for unknown names and wrong shapes as `ModuleLoss`.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., tuple[Tensor, Aux]]) -> None:
        super().__init__(module, loss)
        self._names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError that lists missing names; for unknown names and wrong shapes as `ModuleLoss`."""
        missing = self._names.difference(params)
        if missing:
            raise ValueError(
                f"params lack {', '.join(map(repr, sorted(missing)))}: "
                "give every trainable parameter of the module, by its named_parameters() name"
            )
        super().check(params)
