"""Top layers of image models on states: same features, gradients and transforms as the whole model."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.func import functional_call, grad, vmap

from smat_fn.models.modules import train_only
from smat_fn.models.top import Top, top_of

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
MODELS = {
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**SIZES)),
    "deit": lambda: hf.DeiTModel(hf.DeiTConfig(**SIZES)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**SIZES)),
    "registers": lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**SIZES)),
    "dinov3": lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SIZES)),
    "beit": lambda: hf.BeitModel(hf.BeitConfig(**SIZES, use_relative_position_bias=True)),
    "clip": lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SIZES)),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SIZES)),
}


def call(module, values):
    return module(pixel_values=values.to(next(module.parameters()).dtype)).pooler_output


def model(kind, layers=1, dtype=torch.float32):
    torch.manual_seed(0)
    whole = MODELS[kind]().eval().to(dtype)
    whole.set_attn_implementation("eager")  # vmap has no rule for the fused one
    train_only(whole, layers=layers)
    return whole


@pytest.mark.parametrize(
    ("kind", "layers"),
    [*((kind, 1) for kind in MODELS), ("vit", 2)]
    + [pytest.param(kind, 2, marks=pytest.mark.slow) for kind in MODELS if kind != "vit"],
)
def test_features_and_gradients_are_those_of_the_whole(kind, layers):
    whole, values = model(kind, layers), torch.rand(4, 3, 8, 8)
    top = top_of(whole, call, torch.rand(1, 3, 8, 8))
    assert isinstance(top, Top), top
    params = {name: p.detach() for name, p in whole.named_parameters() if p.requires_grad}
    names = {name for name, p in top.module.named_parameters() if p.requires_grad}
    assert names == set(params)
    states = top.states(values)
    assert not states.requires_grad

    def square(module, given):
        return lambda own: functional_call(module, own, (), {"pixel_values": given()}).pooler_output.square().sum()

    expected = grad(square(whole, lambda: values))(params)
    found = grad(square(top.module, lambda: top.give(states)))(params)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    stacked = {name: torch.stack([p, p + 0.1]) for name, p in params.items()}
    pair = vmap(square(top.module, lambda: top.give(states)))(stacked)
    torch.testing.assert_close(pair, vmap(square(whole, lambda: values))(stacked), rtol=1e-4, atol=1e-5)


def test_frozen_layers_are_left_out_and_parameters_are_shared():
    whole = model("vit")
    top = top_of(whole, call, torch.rand(1, 3, 8, 8))
    places = {p.data_ptr() for p in whole.parameters()}
    assert {p.data_ptr() for p in top.module.parameters()} < places
    assert not [name for name, _ in top.module.named_parameters() if ".layers.0." in name or ".layer.0." in name]
    assert top_of(model("vit", dtype=torch.bfloat16), call, torch.rand(1, 3, 8, 8))


def test_models_that_need_more_say_why():
    whole = model("vit")
    whole.layernorm.requires_grad_(True)
    assert top_of(whole, call, torch.rand(1, 3, 8, 8)) == "layers other than top ones are trained"
    swin = hf.SwinModel(hf.SwinConfig(image_size=8, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[1, 2]))
    assert top_of(swin, call, torch.rand(1, 3, 8, 8)) == "layers other than top ones are trained"

    class Looks(nn.Module):
        """Adds what the image was, whatever the layers give."""

        def __init__(self):
            super().__init__()
            self.inner = model("vit")
            self.config = self.inner.config

        def forward(self, pixel_values):
            out = self.inner(pixel_values=pixel_values)
            out.pooler_output = out.pooler_output + pixel_values.mean((1, 2, 3))[:, None]
            return out

    assert "features differ by" in top_of(Looks(), call, torch.rand(1, 3, 8, 8))
