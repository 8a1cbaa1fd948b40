"""Causal language models of ``transformers`` as a loss of flat parameters.

Another family (encoder-decoder, classifier) is another file that gives a bundle with the same fields.
"""

from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import tree
from ..grad import ModuleLoss
from ..types import Batch, Where
from ..where import block_linear
from .modules import FullLoss

IGNORED = -100  # label of a position that is not predicted
NO_EOS = "the tokenizer has no EOS token, nothing would end an answer: set tokenizer.eos_token, save it with the model"


class CausalLM(NamedTuple):
    """A pretrained model, ready to train: theta_0, its loss, and the masked set."""

    module: nn.Module  # in eval mode: no dropout
    tokenizer: Any
    params: dict[str, Tensor]  # theta_0, tied weights once; the module's own storage: not to be written to
    loss_fn: ModuleLoss  # loss_fn(params, batch) -> (loss, supervised tokens)
    where: Where  # the masked set S


def load(
    source: str | Path,
    *,
    dtype: str | torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str = "sdpa",
    gradient_checkpointing: bool = False,
) -> CausalLM:
    """A model and its tokenizer, from a folder or by the name of a hub repository.

    Args: source: as for ``from_pretrained``, whose cache and offline flags (HF_HUB_OFFLINE) hold; dtype: of all
        parameters, "bfloat16" or torch.bfloat16; attention: ``attn_implementation``; gradient_checkpointing: keep one
        activation per block and compute the others again in the backward pass: bit-equal, slower, and only with the
        "autograd" engine.
    Raises: ValueError where the model or tokenizer cannot be had, weights are missing, or the two do not fit.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is no floating-point dtype, choose 'bfloat16' or 'float32'")
    options = {"dtype": kind, "attn_implementation": attention, "output_loading_info": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        module, info = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{str(source)!r} cannot be loaded as a causal language model with its tokenizer: give a folder of one, or "
            f"a hub repository that is in the cache or can be reached ({shorten(str(error), 300)})"
        ) from error
    if info["missing_keys"]:
        raise ValueError(
            f"{str(source)!r} lacks weights of {type(module).__name__}: {', '.join(sorted(info['missing_keys']))}: "
            "give a checkpoint of a causal language model"
        )
    check_tokenizer(tokenizer, module.get_input_embeddings().weight.shape[0])
    module = module.to(device).eval()
    if gradient_checkpointing:
        checkpoint_blocks(module)
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return CausalLM(module, tokenizer, params, FullLoss(module, next_token_loss), block_linear(module))


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """The tokenizer can close an answer, and its vocabulary and special tokens have rows in the embedding.

    Args: vocabulary: rows of the embedding.
    Raises: ValueError that lists what is wrong.
    """
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    outside = [f"its {name} token {i}" for name, i in special.items() if i is not None and i >= vocabulary]
    if tokenizer.vocab_size > vocabulary:
        outside.insert(0, f"its {tokenizer.vocab_size} tokens")
    problems = [NO_EOS] if special["eos"] is None else []
    if outside:
        problems.append(
            f"the embedding has {vocabulary} rows, too few for the tokenizer ({', '.join(outside)}): "
            "take the model's own tokenizer, or resize the embedding and save the result as the base"
        )
    tree.raise_problems(problems)


def next_token_loss(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """``-1/n sum log p(token_t | tokens before t)`` over the n positions t >= 1 whose label is not -100.

    Cross entropy of float32 logits (float64 stays float64).

    Args: batch: mapping with int64 (B, T) ``input_ids``, ``attention_mask``, ``labels``, moved to the module's device.
    Returns: (loss, n).
    """
    device = next(module.parameters()).device
    ids, mask, labels = (batch[name].to(device) for name in ("input_ids", "attention_mask", "labels"))
    logits = module(input_ids=ids, attention_mask=mask, use_cache=False).logits
    # the labels are shifted, not the logits: those are large, and a slice of them would be copied
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    logits = logits.to(tree.compute_dtype(logits))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return loss, (targets != IGNORED).sum()


def checkpoint_blocks(module: Any) -> None:
    """Switches on non-reentrant gradient checkpointing in a ``transformers`` module, in place, without dropout."""
    # the first name is new, the second one warns where the first exists
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # only reentrant checkpointing needs this hook on the embedding, and torch.func refuses it
    module.disable_input_require_grads()
    for layer in module.modules():
        if getattr(layer, "gradient_checkpointing", False):
            # transformers checkpoints in training mode alone; the layers inside stay in eval mode
            layer.training = True
            for name, value in list(vars(layer).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)
