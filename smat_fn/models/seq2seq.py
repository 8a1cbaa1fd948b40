"""Encoder-decoders of ``transformers`` (T5, BART) as a loss of flat parameters."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import errors
from ..types import Batch
from . import head
from .head import IGNORED
from .modules import sent, train_only
from .pretrained import LanguageModel, check_tokenizer, checkpoint_blocks, language_model, read, vocabulary_of


def seq2seq(module: nn.Module, tokenizer: Any) -> LanguageModel:
    """Wrap a model of ``AutoModelForSeq2SeqLM`` and its tokenizer; the module is put into eval mode: no dropout.

    Args:
        module: the model, moved to its device and dtype before.
        tokenizer: its tokenizer, with an EOS token.

    Raises:
        ValueError: the module is not an encoder-decoder, or the tokenizer does not fit.
    """
    config: Any = module.config
    problems = []
    if not getattr(config, "is_encoder_decoder", False):
        problems.append(
            f"{type(module).__name__} is not an encoder-decoder: use smat_fn.models.causal_lm for causal models"
        )
    elif getattr(config, "decoder_start_token_id", None) is None:  # PLBart's has no such field
        problems.append("the config has no decoder_start_token_id: set it to the token that answers begin with")
    errors.raise_problems(problems)
    check_tokenizer(tokenizer, vocabulary_of(module))
    return language_model(module, tokenizer, answer_loss)


def load(
    source: str | Path,
    *,
    gradient_checkpointing: bool = False,
    train_layers: int | None = None,
    train: Sequence[str] | None = None,
    **options: Any,
) -> LanguageModel:
    """Load an encoder-decoder and its tokenizer; arguments and errors are those of `causal_lm.load`.

    T5 with gradient_checkpointing is not bit-identical: its position bias then uses another attention kernel.

    Returns:
        A `LanguageModel`.
    """
    module, tokenizer = read("AutoModelForSeq2SeqLM", "an encoder-decoder", source, **options)
    train_only(module, layers=train_layers, names=train)
    bundle = seq2seq(module, tokenizer)
    if gradient_checkpointing:
        checkpoint_blocks(module)
    return bundle


def answer_loss(module: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """``-1/n sum log p(target_t | source, targets before t)`` over the n labels that are not -100.

    `head.cross_entropy`: float32 logits (float64 stays float64), of the predicted positions alone where these are few.

    Args: batch: as `data.pairs.collate` gives it, moved to the module's device.
    Returns: (loss, n).
    """
    return head.cross_entropy(module, *_predictions(module, batch))


def log_probs(module: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """``log p(target_t | source, targets before t)`` of the labels that are not -100, at their positions of (B, T).

    Args: as `answer_loss`. Returns: as `head.log_probs`.
    """
    return head.log_probs(module, *_predictions(module, batch))


def _predictions(module: Any, batch: Batch) -> tuple[Callable[[], Any], Tensor]:
    """A call of the module, and the token that it is to predict at each position."""
    device = next(module.parameters()).device
    ids, mask, labels = (sent(batch[name], device) for name in ("input_ids", "attention_mask", "labels"))
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": _before(module, labels)}
    return lambda: module(**given, use_cache=False), batch["labels"]


def start_problems(module: Any, target: Sequence[int]) -> list[str]:
    """The error for a model whose loss starts answers at another token than decoding does.

    Args: target: tokens of an answer, as `data.pairs` gives them.
    """
    own, kind = module.config.decoder_start_token_id, type(module).__name__
    try:
        first = int(_before(module, torch.tensor([target]))[0, 0])
    except ValueError as error:  # of transformers, where there is no pad token
        return [f"{kind} cannot shift answers ({error}): set pad_token_id in its config.json"]
    if first == own:
        return []
    return [
        f"answers are decoded from token {own} (decoder_start_token_id), but the loss of {kind} starts them at token "
        f"{first}, which the tokenizer's targets end in: set decoder_start_token_id in its config.json to {first}, or "
        "the tokenizer's target language (tgt_lang)"
    ]


def _before(module: Any, labels: Tensor) -> Tensor:
    """The decoder's input: the start token, and the labels but the last."""
    if own := getattr(module, "prepare_decoder_input_ids_from_labels", None):
        return own(labels=labels)
    config = module.config
    before = F.pad(labels[:, :-1], (1, 0), value=config.decoder_start_token_id)
    pad = config.decoder_start_token_id if config.pad_token_id is None else config.pad_token_id
    return before.masked_fill(before == IGNORED, pad)
