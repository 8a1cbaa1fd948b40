"""The masked set on real architectures of transformers, tiny and random."""

import pytest
import torch
from torch import nn

from smat_fn import where

LM = {
    **{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
VISION = {
    **{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12},
    **{"image_size": 8, "patch_size": 4},
}
ATTENTION = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
MLP = [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def make(kind):
    import transformers as hf

    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LM))
    if kind == "llama tied":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**LM, tie_word_embeddings=True))
    if kind == "gpt2":
        sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=11, bos_token_id=1, eos_token_id=2, **sizes))
    if kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=3))
    if kind == "clip vision":
        return hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION))
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**LM, num_local_experts=2))
    if kind == "llama4":
        config = hf.Llama4TextConfig(**LM, intermediate_size_mlp=12, num_local_experts=2, head_dim=4)
        return hf.Llama4ForCausalLM(config)
    assert kind == "lfm2"
    return hf.Lfm2ForCausalLM(hf.Lfm2Config(**LM, layer_types=["conv", "full_attention"]))


def in_blocks(prefix, names):
    return {f"{prefix}.{i}.{name}" for i in range(2) for name in names}


VIT = [f"attention.{x}_proj.weight" for x in "qkvo"] + ["mlp.fc1.weight", "mlp.fc2.weight"]
CLIP = [f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "out")] + ["mlp.fc1.weight", "mlp.fc2.weight"]
GPT2 = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
LLAMA4 = [f"feed_forward.{x}" for x in EXPERTS] + [f"feed_forward.shared_expert.{x[4:]}" for x in MLP]
EXPECTED = {
    "llama": in_blocks("model.layers", ATTENTION + MLP),
    "llama tied": in_blocks("model.layers", ATTENTION + MLP),
    "gpt2": in_blocks("transformer.h", GPT2),
    "vit": in_blocks("vit.layers", VIT),
    "clip vision": in_blocks("encoder.layers", CLIP),
    "mixtral": in_blocks("model.layers", ATTENTION + [f"mlp.{x}" for x in EXPERTS]),
    "llama4": in_blocks("model.layers", ATTENTION + LLAMA4),
}


def picked(predicate, module):
    return {name for name, p in module.named_parameters() if predicate(name, p)}


@pytest.mark.parametrize("kind", EXPECTED)
def test_block_linear_is_attention_and_mlp_weights_and_nothing_else(kind):
    module = make(kind)
    assert picked(where.block_linear(module), module) == EXPECTED[kind]


def test_convolution_kernels_are_not_expert_weights():
    module = make("lfm2")
    got = picked(where.block_linear(module), module)
    assert "model.layers.0.conv.conv.weight" not in got
    assert "model.layers.0.conv.in_proj.weight" in got
    assert module.model.layers[0].conv.conv.weight.ndim == 3


def test_a_head_is_left_out_tied_or_not():
    assert "lm_head.weight" in dict(make("llama").named_parameters())
    assert "lm_head.weight" not in dict(make("llama tied").named_parameters())
    tied = where.block_linear(make("llama tied"))
    assert not tied("lm_head.weight", torch.zeros(11, 8))
    assert not tied("model.embed_tokens.weight", torch.zeros(11, 8))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)
        self.inner = nn.ModuleList([nn.Linear(3, 3)])


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 3)
        self.stem = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 3)


def test_block_linear_by_structure():
    module = Tiny()
    names = [f"blocks.{i}.{name}.weight" for i in range(2) for name in ("fc", "inner.0")]
    assert picked(where.block_linear(module), module) == set(names)


def test_a_block_weight_tied_to_an_embedding_is_left_out():
    module = Tiny()
    module.blocks[0].fc.weight = module.embed.weight
    assert "blocks.0.fc.weight" not in picked(where.block_linear(module), module)
    # the embedding's own name is the one that is left, and it is not masked
    assert not where.block_linear(module)("embed.weight", module.embed.weight)


def test_a_module_without_blocks_has_nothing_to_mask():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert picked(where.block_linear(module), module) == set()


def test_trainable_follows_requires_grad_and_names_tied_weights_once():
    module = Tiny()
    module.head.weight = module.embed.weight
    module.blocks[0].requires_grad_(False)
    module.stem.bias.requires_grad_(False)
    predicate = where.trainable(module)
    expected = {name for name, p in module.named_parameters() if p.requires_grad}
    assert picked(predicate, module) == expected
    assert "embed.weight" in expected
    assert not predicate("head.weight", module.head.weight)
    assert not predicate("stem.bias", module.stem.bias)
    assert not predicate("no.such.name", torch.zeros(1))


def test_never():
    assert not where.never("blocks.0.fc.weight", torch.zeros(1))
