"""Language models with their tokenizers, from a folder or the hub, and one sentence for whatever is wrong with them."""

from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from .. import tree

NO_EOS = "the tokenizer has no EOS token, nothing would end an answer: set tokenizer.eos_token, save it with the model"


def read(
    auto: str, what: str, source: str | Path, *, dtype: str | torch.dtype, attention: str | None = None
) -> tuple[Any, Any]:
    """A model and its tokenizer by ``from_pretrained``, on the CPU.

    Args: auto: class of ``transformers`` that loads it; what: kind of model, for messages; others: as `causal_lm.load`.
    Raises: ValueError where the model or tokenizer cannot be had, weights are missing, or the two do not fit.
    """
    import transformers

    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is no floating-point dtype, choose 'bfloat16' or 'float32'")
    options = {"dtype": kind, "attn_implementation": attention, "output_loading_info": True}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        module, info = getattr(transformers, auto).from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{str(source)!r} cannot be loaded as {what} with its tokenizer: give a folder of one, or "
            f"a hub repository that is in the cache or can be reached ({shorten(str(error), 300)})"
        ) from error
    if info["missing_keys"]:
        raise ValueError(
            f"{str(source)!r} lacks weights of {type(module).__name__}: {', '.join(sorted(info['missing_keys']))}: "
            f"give a checkpoint of {what}"
        )
    check_tokenizer(tokenizer, module.get_input_embeddings().weight.shape[0])
    return module, tokenizer


def is_encoder_decoder(source: str | Path) -> bool:
    """What the config of a model says; False where there is none to be had."""
    from transformers import AutoConfig

    try:
        return bool(getattr(AutoConfig.from_pretrained(source), "is_encoder_decoder", False))
    except (OSError, ValueError):
        return False


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
