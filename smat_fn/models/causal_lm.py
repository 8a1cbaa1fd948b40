"""Causal language models of ``transformers`` as a loss of flat parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..compiled import readable
from ..types import Batch
from .modules import sent, train_only
from .pretrained import DeviceMap, LanguageModel, checkpoint_blocks, language_model, read

IGNORED = -100  # label of a position that is not predicted
FEW = 0.75  # of all positions: above it, choosing them saves little


def load(
    source: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    attention: str | None = None,
    gradient_checkpointing: bool = False,
    train_layers: int | None = None,
    train: Sequence[str] | None = None,
) -> LanguageModel:
    """Load a causal language model and its tokenizer.

    Args:
        source: folder or hub repository, as for ``from_pretrained``; its cache and HF_HUB_OFFLINE are respected.
        dtype: dtype of all parameters, such as "bfloat16" or torch.bfloat16 (default float32).
        device: device of the model (default "cpu").
        device_map: split the model over devices instead, as for ``from_pretrained``; needs the package accelerate.
        attention: ``attn_implementation``; None: "sdpa" if the model supports it.
        gradient_checkpointing: keep one activation per block and recompute the others in the backward pass:
            bit-identical, slower, needs ``engine="autograd"``.
        train_layers: number of top blocks to train, the rest is frozen; None: train everything.
        train: patterns of the names of parameters to train, such as ``*.self_attn.*``; None: train everything.

    Returns:
        A `LanguageModel`.

    Raises:
        ValueError: model or tokenizer cannot be loaded, weights are missing, the two do not fit, a device map
            leaves weights on no device, or as `train_only`.
    """
    own: Any = {"dtype": dtype, "device": device, "device_map": device_map, "attention": attention}
    module, tokenizer = read("AutoModelForCausalLM", "a causal language model", source, **own)
    train_only(module, layers=train_layers, names=train)
    bundle = language_model(module, tokenizer, next_token_loss)
    if gradient_checkpointing:
        checkpoint_blocks(module)
    return bundle


def next_token_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """``-1/n sum log p(token_t | tokens before t)`` over the n positions t >= 1 whose label is not -100.

    Cross entropy of float32 logits (float64 stays float64). Where at most `FEW` of all positions are predicted, the
    output head runs there alone: the values agree with those of all logits up to rounding.

    Args: batch: mapping with int64 (B, T) ``input_ids``, ``attention_mask``, ``labels``, moved to the module's device.
    Returns: (loss, n).
    """
    device = next(module.parameters()).device
    ids, mask = (sent(batch[name], device) for name in ("input_ids", "attention_mask"))
    # the labels are shifted, not the logits: those are large, and a slice of them would be copied
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    places, head = _few(targets), None
    if places is not None and not _is_compiled(module):
        head = getattr(module, "get_output_embeddings", lambda: None)()
    with nullcontext() if places is None or head is None else head_at(head, places, targets.shape):
        logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logits = logits.to(tree.compute_dtype(logits))
    if places is not None and logits.shape[:2] == (1, len(places)):
        targets = targets.flatten()[places][None]
    targets = sent(targets, device)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def _few(targets: Tensor) -> Tensor | None:
    """Flat positions that are predicted, if they are few; None too where counting them would wait for a device."""
    if not readable(targets):
        return None
    places = (targets != IGNORED).flatten().nonzero()[:, 0]
    return places if len(places) <= FEW * targets.numel() else None


def _is_compiled(module: nn.Module) -> bool:
    """Whether a program of torch.compile runs some of the module: such programs do not look for hooks."""
    return any(one._compiled_call_impl is not None or "_orig_mod" in one._modules for one in module.modules())


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

    hook = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()
