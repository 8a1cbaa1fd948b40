"""`FullLoss`: a `ModuleLoss` that requires every trained parameter; freezing; batches on their way to the device."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from glob import escape
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import and_more
from ..execution import transformed
from ..grad import ModuleLoss
from ..tree import unwrapped
from ..types import Aux
from ..where import attention

CACHES = "cache", "past_key_values", "cache_params"  # the first from transformers 5.24 on; RWKV's "state" mixes rows


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Detached copies of a module's trainable parameters by name, tied weights once."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def blocks(module: Any) -> list[nn.Module]:
    """The transformer blocks of a model: the first list of as many modules as its config counts layers; or none.

    None too where several such lists stand side by side: XLM keeps all attentions in one, all feed-forwards in another.
    """
    config = getattr(module, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    count = getattr(config, "num_hidden_layers", None)
    for part in module.modules():
        if lists := [m for m in part.children() if isinstance(m, nn.ModuleList) and len(m) == count]:
            return list(lists[0]) if len(lists) == 1 else []
    return []


def cache_name(module: nn.Module) -> str:
    """Name of a model's cache of keys and values, as an argument and in its output; empty without one."""
    accepted = signature(module.forward).parameters
    return next((name for name in CACHES if name in accepted), "")


def train_only(module: Any, *, layers: int | None = None, names: Sequence[str] | None = None) -> None:
    """Freeze a model in place but for its top blocks, or for the parameters whose names match a pattern.

    Args:
        module: a model of ``transformers``.
        layers: number of top blocks that stay trainable (default: all parameters).
        names: patterns of parameter names that stay trainable, such as ``*.self_attn.*``; or ``attention``, the
            projections that `smat_fn.where.attention` finds, alone (default: all parameters).

    Raises:
        ValueError: both are given, the model has fewer blocks or two stacks of them, a pattern matches nothing, or
            there is no attention.
    """
    check_choice(layers, names)
    if layers is not None:
        own, kind = blocks(module), type(module).__name__
        if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
            raise ValueError(f"train_layers is {layers}, a {kind} has two stacks of layers: name parameters with train")
        check_layers(layers, own, kind)
        kept = {id(p) for block in own[len(own) - layers :] for p in block.parameters()}
    elif names is not None:
        every = {unwrapped(name): id(p) for name, p in module.named_parameters()}
        found = attention(module).names if "attention" in names else frozenset[str]()
        if "attention" in names and not found:
            raise ValueError(f"train is attention, {type(module).__name__} has none in its blocks: name parameters")
        names = [*(name for name in names if name != "attention"), *map(escape, found)]
        if strange := [pattern for pattern in names if not any(fnmatchcase(name, pattern) for name in every)]:
            raise ValueError(
                f"train names {', '.join(strange)}, which no parameter of {type(module).__name__} matches: they are "
                f"{and_more(every, 3)}"
            )
        kept = {place for name, place in every.items() if any(fnmatchcase(name, pattern) for pattern in names)}
    else:
        return
    for p in module.parameters():
        p.requires_grad_(id(p) in kept)


def check_choice(layers: int | None, names: Sequence[str] | None) -> None:
    """Raises: ValueError where both the top layers and names say what is trained, and for one text as names."""
    if isinstance(names, str):
        raise ValueError(f"names is the text {names!r}: give a list, [{names!r}]")
    if layers is not None and names is not None:
        raise ValueError(f"train_layers is {layers} and train names {', '.join(names)}: give one of them")


def check_layers(layers: int, own: Sequence[nn.Module], kind: str) -> None:
    """Raises: ValueError unless a model has as many blocks as are to be trained."""
    if not 1 <= layers <= len(own):
        raise ValueError(
            f"train_layers is {layers}, {kind} has {len(own) or 'no list of'} layers: "
            "choose from 1 to that number, or leave it out to train everything"
        )


def frozen(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that are not trained, and the buffers that its checkpoint stores."""
    stored = module.state_dict().keys()
    buffers = {name: own for name, own in module.named_buffers() if name in stored}
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad} | buffers


def sent(batch: Tensor, device: torch.device) -> Tensor:
    """A batch on the device; from pinned memory, for which a host that runs ahead of its GPU need not wait."""
    if device.type != "cuda" or not batch.is_cpu or transformed():  # in a transform it may have no memory of its own
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
