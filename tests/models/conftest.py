"""Tiny causal language models of several families."""

import pytest
import torch
import transformers as hf

from smat_fn.models.causal_lm import next_token_loss
from smat_fn.models.modules import train_only
from smat_fn.models.pretrained import language_model

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA = {**SIZES, **SPECIAL, "intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 128}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]  # each kind has rotary tables of its own
SLIDING = {**LLAMA, "head_dim": 8, "sliding_window": 4}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(
        hf.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=61, n_embd=16, n_layer=3, n_head=2, **SPECIAL)),
    "opt": lambda: hf.OPTForCausalLM(hf.OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SLIDING)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SLIDING, layer_types=LAYERS)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**LLAMA, num_local_experts=2)),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=3)),
}


def _model(kind, layers=1, dtype=torch.float32):
    torch.manual_seed(0)
    whole = MODELS[kind]().to(dtype)
    train_only(whole, layers=layers)
    return language_model(whole, None, next_token_loss)


@pytest.fixture(scope="session")
def model():
    """``model(kind, layers=1, dtype=torch.float32)``: a `LanguageModel` of which the top layers are trained."""
    return _model
