"""The tiny vision transformer."""

import pytest
import torch
from torch.func import functional_call

from smat_fn import random
from smat_fn.models import features, parameters, tiny_vit
from smat_fn.where import block_linear


@pytest.fixture(scope="module")
def vit():
    return tiny_vit(random.key(0))


def test_size(vit):
    width, mlp, positions, patch = 128, 256, 5, 16
    block = 4 * (width * width + width) + 2 * 2 * width + 2 * width * mlp + mlp + width
    embedding = width + positions * width + patch * width + width
    assert sum(p.numel() for p in vit.parameters()) == embedding + 2 * block + 2 * width == 268_160


def test_initialisation_follows_the_key_and_leaves_the_global_generator_alone(vit):
    before = torch.get_rng_state()
    twin = parameters(tiny_vit(random.key(0)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(2)
    assert all(torch.equal(twin[name], p) for name, p in vit.named_parameters())
    other = parameters(tiny_vit(random.key(1)))
    assert not torch.equal(other["embeddings.cls_token"], twin["embeddings.cls_token"])


def test_features_are_the_class_token_of_the_given_weights(vit):
    pixels = torch.rand(3, 1, 8, 8)
    assert features(vit, pixels).shape == (3, 128)
    params = parameters(vit)
    params["layernorm.weight"].zero_()
    params["layernorm.bias"].copy_(torch.arange(128.0))

    class Shell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit

        def forward(self, x):
            return features(self.vit, x)

    out = functional_call(Shell(), {f"vit.{name}": p for name, p in params.items()}, (pixels,))
    assert torch.equal(out, torch.arange(128.0).expand(3, 128))


def test_there_is_no_dropout(vit):
    pixels = torch.rand(2, 1, 8, 8)
    assert torch.equal(features(vit, pixels), features(vit.train(), pixels))
    vit.eval()


def test_it_can_be_differentiated_twice(vit):
    pixels, masked = torch.rand(2, 1, 8, 8), block_linear(vit)
    weight = next(p for name, p in vit.named_parameters() if masked(name, p))
    (first,) = torch.autograd.grad(features(vit, pixels).square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    assert second.isfinite().all()
    assert second.abs().sum() > 0
