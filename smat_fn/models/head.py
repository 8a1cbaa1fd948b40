"""The output head of a language model, run only where a token is predicted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..execution import readable
from .modules import sent

IGNORED = -100  # label of a position that is not predicted
FEW = 0.75  # of all positions: above it, choosing them saves little
AT_ONCE = 2**24  # logits that are upcast together: 64 MiB in float32


def cross_entropy(module: nn.Module, call: Callable[[], Any], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross entropy of float32 logits (float64 stays float64) over the positions whose target is not -100.

    Where at most `FEW` of all positions are predicted, the output head runs there alone: values agree with those of all
    logits up to rounding.

    Args:
        module: the model.
        call: calls it, for an output with ``logits`` (B, T, V).
        targets: int64 (B, T), on any device.

    Returns:
        (loss, number of the positions).
    """
    logits, targets = _predicted(module, call, targets)
    logits = logits.to(tree.compute_dtype(logits))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def log_probs(module: nn.Module, call: Callable[[], Any], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities of the targets, and where they are: `cross_entropy` position by position.

    Logits are upcast `AT_ONCE` numbers at a time.

    Args: as `cross_entropy`.
    Returns: (log p (B, T), 0 where the target is -100; whether a target is not -100, bool (B, T)).
    """
    logits, own = _predicted(module, call, targets)
    logits = logits.flatten(0, 1)
    size = max(AT_ONCE // logits.shape[1], 1)
    parts = zip(logits.split(size), own.flatten().split(size), strict=True)
    values = -torch.cat(
        [
            F.cross_entropy(part.to(tree.compute_dtype(part)), few, ignore_index=IGNORED, reduction="none")
            for part, few in parts
        ]
    )
    predicted = sent(targets != IGNORED, values.device)
    if len(values) == targets.numel():
        return values.view(targets.shape), predicted
    return values.new_zeros(targets.shape).masked_scatter(predicted, values), predicted


def _predicted(module: nn.Module, call: Callable[[], Any], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of all positions, or, where few are predicted, of those that are, as of one row."""
    device = next(module.parameters()).device
    places, head = _few(targets), None
    if places is not None and not _is_compiled(module):
        head = getattr(module, "get_output_embeddings", lambda: None)()
    if places is None or head is None:
        logits = call().logits
    else:
        with head_at(head, places, targets.shape):
            logits = call().logits
        if logits.shape[:2] == (1, len(places)):
            targets = targets.flatten()[places][None]
    return logits, sent(targets, device)


@contextmanager
def head_at(head: nn.Module, places: Tensor, shape: tuple[int, ...]) -> Iterator[None]:
    """An output head that is given states (B, T, D) runs at these n flat positions alone, as on one row (1, n, D).

    Args: shape: (B, T); a call with other states, or of another thread, is left as it is.
    """
    own = get_ident()

    def chosen(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != own or not args or args[0].shape[:-1] != shape:
            return None
        return args[0].flatten(0, 1).index_select(0, sent(places, args[0].device))[None], *args[1:]

    with head.register_forward_pre_hook(chosen):
        yield


def _few(targets: Tensor) -> Tensor | None:
    """Flat positions that are predicted, if they are few; None too where counting them would wait for a device."""
    if not readable(targets):
        return None
    places = (targets != IGNORED).flatten().nonzero()[:, 0]
    return places if len(places) <= FEW * targets.numel() else None


def _is_compiled(module: nn.Module) -> bool:
    """Whether a program of torch.compile runs some of the module: such programs do not look for hooks."""
    return any(one._compiled_call_impl is not None or "_orig_mod" in one._modules for one in module.modules())
