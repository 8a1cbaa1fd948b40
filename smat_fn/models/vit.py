"""The tiny vision transformer of the digits suite."""

import torch
from torch import Tensor, nn

from ..importing import uncollected

WIDTH = 128


def tiny_vit(key: Tensor) -> nn.Module:
    """A ViT of 8x8 grey images: patches of 4x4, width 128, 2 layers, 4 heads, MLP 256, no dropout, no pooler.

    Args: key: int64 (2,), seeds transformers' own initialisation; torch's global generator is left as it was.
    Returns: a ``transformers.ViTModel`` in float32 and eval mode, 268,160 parameters.
    Source: Dosovitskiy et al., 2021; initialisation as in ``transformers``.
    """
    with uncollected():
        from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        # the CPU kernel behind "sdpa" has no second derivative and is 7 % faster on these 5 tokens
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(key[0]))
        return ViTModel(config, add_pooling_layer=False).eval()


def features(module: nn.Module, pixels: Tensor) -> Tensor:
    """The class token after the last norm: (B, 1, 8, 8) pixels to (B, 128), in the dtype of the weights."""
    return module(pixel_values=pixels.to(next(module.parameters()))).last_hidden_state[:, 0]
