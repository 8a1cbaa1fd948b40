"""A language model of either kind by its folder or its name: what its config says decides."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ..types import Batch
from . import causal_lm, seq2seq
from .pretrained import LanguageModel, is_encoder_decoder


def load(source: str | Path, **options: Any) -> LanguageModel:
    """`seq2seq.load` of an encoder-decoder (T5, BART), `causal_lm.load` of any other model; options are the same."""
    return (seq2seq if is_encoder_decoder(source) else causal_lm).load(source, **options)


def log_probs(module: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """`seq2seq.log_probs` of an encoder-decoder, `causal_lm.log_probs` of any other model."""
    own = seq2seq if getattr(module.config, "is_encoder_decoder", False) else causal_lm
    return own.log_probs(module, batch)
