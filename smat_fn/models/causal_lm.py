"""Causal language models of ``transformers`` as a loss of flat parameters."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..types import Batch
from . import head
from .head import IGNORED
from .modules import sent, train_only
from .pretrained import DeviceMap, LanguageModel, checkpoint_blocks, language_model, read


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

    `head.cross_entropy`: float32 logits (float64 stays float64), of the predicted positions alone where these are few.

    Args: batch: mapping with int64 (B, T) ``input_ids``, ``attention_mask``, ``labels``, moved to the module's device.
    Returns: (loss, n).
    """
    return head.cross_entropy(module, *_predictions(module, batch))


def log_probs(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """``log p(token_t | tokens before t)`` for all t >= 1 whose label is not -100, at position t - 1 of (B, T).

    Args: as `next_token_loss`. Returns: as `head.log_probs`.
    """
    return head.log_probs(module, *_predictions(module, batch))


def _predictions(module: nn.Module, batch: Batch) -> tuple[Callable[[], Any], Tensor]:
    """A call of the module, and the token that it is to predict at each position."""
    device = next(module.parameters()).device
    ids, mask = (sent(batch[name], device) for name in ("input_ids", "attention_mask"))
    # the labels are shifted, not the logits: those are large, and a slice of them would be copied
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return lambda: module(input_ids=ids, attention_mask=mask, use_cache=False), targets
