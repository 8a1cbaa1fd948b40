"""CLIP models as losses of the vision tower, on a tiny random checkpoint, against transformers' own logits."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import families
from smat_fn import grad, tree, where
from smat_fn.models import clip

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/clip_tiny.py"))
CLASSES, TEMPLATES = ["cat", "dog", "old grey donkey"], ["a photo of a {}.", "the {}!"]
TEXTS = [template.replace("{}", name) for name in CLASSES for template in TEMPLATES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip")
    EXAMPLE["write_model"](path, TEXTS, width=32, layers=2, image=8, patch=4, seed=0)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return clip.load(folder)


@pytest.fixture(scope="module")
def whole(folder):
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(folder).eval().requires_grad_(False)


def identity(pixels):
    return pixels


def make_batch(size=5):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 8, 8, generator=generator), torch.arange(size) % len(CLASSES)


def test_only_the_vision_tower_is_trained_and_its_blocks_masked(model, whole):
    assert list(model.params) == [name for name, _ in whole.vision_model.named_parameters()]
    assert all(torch.equal(model.params[n], p) for n, p in whole.vision_model.named_parameters())
    masked = [name for name, leaf in model.params.items() if model.where(name, leaf)]
    layers = ("k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2")
    assert masked == [n for n in model.params if n.endswith(".weight") and n.split(".")[-2] in layers]
    assert len(masked) == 12
    assert all(where.trainable(model.module)(name, leaf) for name, leaf in model.params.items())
    assert not any(module.training for module in model.module.modules())
    assert model.image_size == 8
    assert {name.split(".")[0] for name in model.text} == {"text_model", "text_projection", "logit_scale"}


def test_with_one_template_logits_are_transformers_own(model, whole):
    texts = [f"a {name}" for name in CLASSES]
    tokens = model.tokens(texts)
    pixels, labels = make_batch()
    head = model.head(tokens, len(CLASSES))
    assert head.dtype == torch.float32
    loss, logits = model.loss_fn(head, identity)(model.params, (pixels, labels))
    expected = whole(**tokens, pixel_values=pixels).logits_per_image
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, F.cross_entropy(expected, labels), rtol=1e-5, atol=1e-5)


def test_a_head_is_the_normalised_mean_of_normalised_features(model, whole):
    head = model.head(model.tokens(TEXTS), len(CLASSES))
    for row, name in zip(head, CLASSES, strict=True):
        mean = torch.zeros(32)
        for template in TEMPLATES:
            # every text alone, unpadded
            tokens = model.tokens([template.replace("{}", name)])
            feature = whole.get_text_features(**tokens).pooler_output[0]
            mean += feature / feature.norm() / len(TEMPLATES)
        expected = whole.logit_scale.exp() * mean / mean.norm()
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)


def test_many_texts_are_encoded_in_parts(model, monkeypatch):
    tokens = model.tokens(TEXTS)
    expected = model.head(tokens, 3)
    monkeypatch.setattr(clip, "_TOGETHER", 4)
    torch.testing.assert_close(model.head(tokens, 3), expected, rtol=1e-5, atol=1e-6)


def test_gradients_reach_every_leaf_and_both_engines_agree(model):
    loss_fn = model.loss_fn(model.head(model.tokens(TEXTS), 3), identity)
    (loss, logits), grads = grad.value_and_grad(loss_fn, engine="autograd")(model.params, make_batch())
    assert logits.shape == (5, 3)
    assert not logits.requires_grad
    assert all(g.abs().sum() > 0 for n, g in grads.items() if not n.endswith("k_proj.bias"))
    (other, _), others = grad.value_and_grad(loss_fn)(model.params, make_batch())
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=0)
    for name, g in grads.items():
        torch.testing.assert_close(others[name], g, rtol=1e-4, atol=1e-6)


def test_checkpointed_gradients_are_bit_equal(model, folder):
    again = clip.load(folder, gradient_checkpointing=True)
    head = model.head(model.tokens(TEXTS), 3)
    results = [
        grad.value_and_grad(bundle.loss_fn(head, identity), engine="autograd")(bundle.params, make_batch())
        for bundle in (model, again)
    ]
    assert torch.equal(results[0][0][0], results[1][0][0])
    assert all(torch.equal(g, results[1][1][name]) for name, g in results[0][1].items())


def test_the_dtype_is_that_of_the_tower_and_heads_stay_float32(folder, model):
    for dtype, kind in (("bfloat16", torch.float32), ("float64", torch.float64)):
        other = clip.load(folder, dtype=dtype)
        assert {p.dtype for p in other.params.values()} == {getattr(torch, dtype)}
        head = other.head(other.tokens(TEXTS), 3)
        assert torch.equal(head, model.head(model.tokens(TEXTS), 3))
        _, logits = other.loss_fn(head, identity)(other.params, make_batch())
        assert logits.dtype == kind
        expected = model.loss_fn(head, identity)(model.params, make_batch())[1]
        torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.2 if dtype == "bfloat16" else 1e-4)


def test_the_loss_takes_weights_of_another_dtype_than_the_model(folder, model):
    head, narrow = model.head(model.tokens(TEXTS), 3), clip.load(folder, dtype="bfloat16")
    loss, logits = model.loss_fn(head, identity)(tree.cast(model.params, torch.bfloat16), make_batch())
    expected = narrow.loss_fn(head, identity)(narrow.params, make_batch())
    assert torch.equal(loss, expected[0])
    assert torch.equal(logits, expected[1])


def test_long_prompts_are_refused(model):
    with pytest.raises(ValueError, match=r"1 prompts have more tokens than the 77 of the text tower, 'a cat cat"):
        model.tokens(["a dog", "a" + 100 * " cat"])


def test_models_that_do_not_fit_are_told(folder, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import CLIPVisionModel, ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTModel(ViTConfig(image_size=8, patch_size=4, **small)).save_pretrained(tmp_path / "vit")
    with pytest.raises(ValueError, match=r"a ViTModel, it has no vision_model, no text_model"):
        clip.load(tmp_path / "vit")
    CLIPVisionModel.from_pretrained(folder).save_pretrained(tmp_path / "vision")
    with pytest.raises(ValueError, match=r"a CLIPVisionModel, it has no .*no text_model"):
        clip.load(tmp_path / "vision")
    with pytest.raises(ValueError, match="cannot be loaded as a CLIP or SigLIP model"):
        clip.load(tmp_path / "none")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        clip.load(folder, dtype="int8")

    shutil.copytree(folder, tmp_path / "part")
    leaves = load_file(folder / "model.safetensors")
    del leaves["text_projection.weight"]
    save_file(leaves, tmp_path / "part" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights of CLIPModel \(first: text_projection\.weight\)"):
        clip.load(tmp_path / "part")
    shutil.copytree(folder, tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"cannot be loaded .*image processor"):
        clip.load(tmp_path / "blind")


def test_siglip_heads_and_logits_are_transformers_own_but_for_its_bias(tmp_path):
    from transformers import SiglipModel

    families.write_base("siglip", tmp_path)
    model, whole = clip.load(tmp_path), SiglipModel.from_pretrained(tmp_path)
    texts = ["5 6 7", "8", "9 10 11 12"]
    tokens = model.tokens(texts)
    assert tokens["input_ids"].shape == (3, 16)  # it reads the last position, so all texts have the same length
    pixels = torch.rand(2, 3, families.IMAGE, families.IMAGE)
    head = model.head(tokens, 3)
    logits = model.loss_fn(head, identity)(model.params, (pixels, torch.tensor([0, 2])))[1]
    expected = whole(input_ids=tokens["input_ids"], pixel_values=pixels).logits_per_image - whole.logit_bias
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"1 prompts have more tokens than the 16 .*'5 5"):
        model.tokens([17 * "5 "])


def test_images_of_any_size_are_refused_with_the_way_out(tmp_path):
    from transformers import Siglip2Config, Siglip2Model

    families.write_base("siglip", tmp_path)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    Siglip2Model(Siglip2Config(text_config={**small, "vocab_size": 64}, vision_config=small)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a Siglip2Model, it has no visual_projection.*class SiglipModel"):
        clip.load(tmp_path)
