"""Adapters and bases of Flux and Wan whose names are those of different codes: the same change, whole or in parts."""

import pytest
import torch
from torch import nn

from smat_fn.folders import plan
from smat_fn.folders.inputs.adapters.original_names import Names, of_diffusers

from .test_lora_files import RANK, TA, changed, factors, flat, header, kohya, merged, named, numbers, saved, weights

SIZE, WIDE = 4, 10
SQUARE, UP, DOWN = (SIZE, SIZE), (WIDE, SIZE), (SIZE, WIDE)


def attention(path, names):
    return {f"{path}.{name}": SQUARE for name in names}


SPLIT = "attn.to_q", "attn.to_k", "attn.to_v"
ADDED = "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"
FLUX_1 = {  # modules of the original code -> those of diffusers, with the shapes of their weights
    "double_blocks.7.img_attn.qkv": attention("transformer_blocks.7", SPLIT),
    "double_blocks.7.txt_attn.qkv": attention("transformer_blocks.7", ADDED),
    "double_blocks.7.img_attn.proj": {"transformer_blocks.7.attn.to_out.0": SQUARE},
    "double_blocks.7.txt_attn.proj": {"transformer_blocks.7.attn.to_add_out": SQUARE},
    "double_blocks.7.img_mlp.0": {"transformer_blocks.7.ff.net.0.proj": UP},
    "double_blocks.7.img_mlp.2": {"transformer_blocks.7.ff.net.2": DOWN},
    "double_blocks.7.txt_mlp.0": {"transformer_blocks.7.ff_context.net.0.proj": UP},
    "double_blocks.7.txt_mlp.2": {"transformer_blocks.7.ff_context.net.2": DOWN},
    "double_blocks.7.img_mod.lin": {"transformer_blocks.7.norm1.linear": (24, SIZE)},
    "double_blocks.7.txt_mod.lin": {"transformer_blocks.7.norm1_context.linear": (24, SIZE)},
    "single_blocks.12.linear1": {
        **attention("single_transformer_blocks.12", SPLIT),
        "single_transformer_blocks.12.proj_mlp": UP,
    },
    "single_blocks.12.linear2": {"single_transformer_blocks.12.proj_out": (SIZE, SIZE + WIDE)},
    "single_blocks.12.modulation.lin": {"single_transformer_blocks.12.norm.linear": (12, SIZE)},
    "img_in": {"x_embedder": (SIZE, 3)},
    "txt_in": {"context_embedder": (SIZE, 5)},
    "time_in.in_layer": {"time_text_embed.timestep_embedder.linear_1": (SIZE, 6)},
    "time_in.out_layer": {"time_text_embed.timestep_embedder.linear_2": SQUARE},
    "guidance_in.in_layer": {"time_text_embed.guidance_embedder.linear_1": (SIZE, 6)},
    "guidance_in.out_layer": {"time_text_embed.guidance_embedder.linear_2": SQUARE},
    "vector_in.in_layer": {"time_text_embed.text_embedder.linear_1": (SIZE, 7)},
    "vector_in.out_layer": {"time_text_embed.text_embedder.linear_2": SQUARE},
    "final_layer.linear": {"proj_out": (3, SIZE)},
}
FLUX_2 = {
    "double_blocks.0.img_attn.qkv": attention("transformer_blocks.0", SPLIT),
    "double_blocks.0.txt_attn.qkv": attention("transformer_blocks.0", ADDED),
    "double_blocks.0.img_attn.proj": {"transformer_blocks.0.attn.to_out.0": SQUARE},
    "double_blocks.0.txt_attn.proj": {"transformer_blocks.0.attn.to_add_out": SQUARE},
    "double_blocks.0.img_mlp.0": {"transformer_blocks.0.ff.linear_in": UP},
    "double_blocks.0.img_mlp.2": {"transformer_blocks.0.ff.linear_out": DOWN},
    "double_blocks.0.txt_mlp.0": {"transformer_blocks.0.ff_context.linear_in": UP},
    "double_blocks.0.txt_mlp.2": {"transformer_blocks.0.ff_context.linear_out": DOWN},
    "single_blocks.0.linear1": {"single_transformer_blocks.0.attn.to_qkv_mlp_proj": (22, SIZE)},
    "single_blocks.0.linear2": {"single_transformer_blocks.0.attn.to_out": (SIZE, SIZE + WIDE)},
    "double_stream_modulation_img.lin": {"double_stream_modulation_img.linear": (24, SIZE)},
    "double_stream_modulation_txt.lin": {"double_stream_modulation_txt.linear": (24, SIZE)},
    "single_stream_modulation.lin": {"single_stream_modulation.linear": (12, SIZE)},
    "img_in": {"x_embedder": (SIZE, 3)},
    "txt_in": {"context_embedder": (SIZE, 5)},
    "time_in.in_layer": {"time_guidance_embed.timestep_embedder.linear_1": (SIZE, 6)},
    "guidance_in.out_layer": {"time_guidance_embed.guidance_embedder.linear_2": SQUARE},
    "final_layer.linear": {"proj_out": (3, SIZE)},
}
WAN = {
    "blocks.3.self_attn.q": {"blocks.3.attn1.to_q": SQUARE},
    "blocks.3.self_attn.k": {"blocks.3.attn1.to_k": SQUARE},
    "blocks.3.self_attn.v": {"blocks.3.attn1.to_v": SQUARE},
    "blocks.3.self_attn.o": {"blocks.3.attn1.to_out.0": SQUARE},
    "blocks.3.cross_attn.q": {"blocks.3.attn2.to_q": SQUARE},
    "blocks.3.cross_attn.k": {"blocks.3.attn2.to_k": SQUARE},
    "blocks.3.cross_attn.v": {"blocks.3.attn2.to_v": SQUARE},
    "blocks.3.cross_attn.o": {"blocks.3.attn2.to_out.0": SQUARE},
    "blocks.3.cross_attn.k_img": {"blocks.3.attn2.add_k_proj": SQUARE},
    "blocks.3.cross_attn.v_img": {"blocks.3.attn2.add_v_proj": SQUARE},
    "vace_blocks.1.before_proj": {"vace_blocks.1.proj_in": SQUARE},
    "vace_blocks.1.after_proj": {"vace_blocks.1.proj_out": SQUARE},
    "vace_blocks.1.self_attn.o": {"vace_blocks.1.attn1.to_out.0": SQUARE},
    "img_emb.proj.1": {"condition_embedder.image_embedder.ff.net.0.proj": SQUARE},
    "img_emb.proj.3": {"condition_embedder.image_embedder.ff.net.2": SQUARE},
    "blocks.3.ffn.0": {"blocks.3.ffn.net.0.proj": UP},
    "blocks.3.ffn.2": {"blocks.3.ffn.net.2": DOWN},
    "time_embedding.0": {"condition_embedder.time_embedder.linear_1": (SIZE, 6)},
    "time_embedding.2": {"condition_embedder.time_embedder.linear_2": SQUARE},
    "text_embedding.0": {"condition_embedder.text_embedder.linear_1": (SIZE, 5)},
    "text_embedding.2": {"condition_embedder.text_embedder.linear_2": SQUARE},
    "time_projection.1": {"condition_embedder.time_proj": (24, SIZE)},
    "head.head": {"proj_out": (3, SIZE)},
}
CHROMA = {
    "distilled_guidance_layer.layers.1.in_layer": {"distilled_guidance_layer.layers.1.linear_1": UP},
    "distilled_guidance_layer.layers.1.out_layer": {"distilled_guidance_layer.layers.1.linear_2": DOWN},
    **{path: parts for path, parts in FLUX_1.items() if "blocks" in path and "mod" not in path},
}
SD_3 = {
    "joint_blocks.5.x_block.attn.qkv": attention("transformer_blocks.5", SPLIT),
    "joint_blocks.5.context_block.attn.qkv": attention("transformer_blocks.5", ADDED),
    "joint_blocks.5.x_block.attn.proj": {"transformer_blocks.5.attn.to_out.0": SQUARE},
    "joint_blocks.5.context_block.attn.proj": {"transformer_blocks.5.attn.to_add_out": SQUARE},
    "joint_blocks.5.x_block.mlp.fc1": {"transformer_blocks.5.ff.net.0.proj": UP},
    "joint_blocks.5.x_block.mlp.fc2": {"transformer_blocks.5.ff.net.2": DOWN},
    "joint_blocks.5.context_block.mlp.fc1": {"transformer_blocks.5.ff_context.net.0.proj": UP},
    "joint_blocks.5.context_block.mlp.fc2": {"transformer_blocks.5.ff_context.net.2": DOWN},
    "joint_blocks.5.x_block.attn2.qkv": attention("transformer_blocks.5", ("attn2.to_q", "attn2.to_k", "attn2.to_v")),
    "joint_blocks.5.x_block.attn2.proj": {"transformer_blocks.5.attn2.to_out.0": SQUARE},
    "joint_blocks.5.x_block.adaLN_modulation.1": {"transformer_blocks.5.norm1.linear": (24, SIZE)},
    "x_embedder.proj": {"pos_embed.proj": (SIZE, 3)},
    "t_embedder.mlp.0": {"time_text_embed.timestep_embedder.linear_1": (SIZE, 6)},
    "t_embedder.mlp.2": {"time_text_embed.timestep_embedder.linear_2": SQUARE},
    "y_embedder.mlp.0": {"time_text_embed.text_embedder.linear_1": (SIZE, 7)},
    "y_embedder.mlp.2": {"time_text_embed.text_embedder.linear_2": SQUARE},
    "context_embedder": {"context_embedder": (SIZE, 5)},
    "final_layer.linear": {"proj_out": (3, SIZE)},
}
Z_IMAGE = {
    "layers.11.attention.qkv": attention("layers.11.attention", ("to_q", "to_k", "to_v")),
    "layers.11.attention.out": {"layers.11.attention.to_out.0": SQUARE},
    "context_refiner.0.attention.qkv": attention("context_refiner.0.attention", ("to_q", "to_k", "to_v")),
    "noise_refiner.1.attention.out": {"noise_refiner.1.attention.to_out.0": SQUARE},
    "layers.11.feed_forward.w1": {"layers.11.feed_forward.w1": UP},
    "x_embedder": {"all_x_embedder.2-1": (SIZE, 3)},
    "final_layer.linear": {"all_final_layer.2-1.linear": (3, SIZE)},
    "final_layer.adaLN_modulation.1": {"all_final_layer.2-1.adaLN_modulation.1": SQUARE},
}
ALL = {"flux 1": FLUX_1, "flux 2": FLUX_2, "chroma": CHROMA, "sd 3": SD_3, "z-image": Z_IMAGE, "wan": WAN}
MODELS = pytest.mark.parametrize("model", ALL.values(), ids=ALL)


def of_parts(model):
    """The shapes under diffusers' names."""
    return {path: shape for parts in model.values() for path, shape in parts.items()}


def of_whole(model):
    """The shapes under the original names."""
    return {
        path: (sum(shape[0] for shape in parts.values()), next(iter(parts.values()))[1])
        for path, parts in model.items()
    }


def fused(model, tree):
    """Weights under diffusers' names -> under the original ones."""
    return {f"{path}.weight": torch.cat([tree[f"{part}.weight"] for part in parts]) for path, parts in model.items()}


def split(model, tree):
    made = {}
    for path, parts in model.items():
        pieces = tree[f"{path}.weight"].split([shape[0] for shape in parts.values()])
        made |= {f"{part}.weight": piece for part, piece in zip(parts, pieces, strict=True)}
    return made


@MODELS
def test_every_module_has_both_names(model):
    for path, parts in model.items():
        if path not in parts:
            assert Names(tuple(map(flat, parts))) in of_diffusers(flat(path))
    assert of_diffusers("blocks_3_attn1_to_q") == []


@MODELS
@pytest.mark.parametrize("way", ["kohya", "of ComfyUI"])
def test_original_names_change_a_base_of_diffusers(model, way, folders, tmp_path):
    base = saved(tmp_path / "transformer/diffusion_pytorch_model.safetensors", weights(of_parts(model))).parent
    found = factors(of_whole(model))
    tensors = kohya(found, alpha=6) if way == "kohya" else named(found, "diffusion_model.", alpha=6)
    made = merged(base, saved(tmp_path / "x.safetensors", tensors), tmp_path / "out")
    folders.assert_same_bits(made, split(model, changed(fused(model, weights(of_parts(model))), found, 3.0)))


@MODELS
def test_names_of_diffusers_change_an_original_file(model, folders, tmp_path):
    start = weights(of_parts(model))
    base = saved(tmp_path / "base.safetensors", fused(model, start))
    found = factors(of_parts(model))
    told = header(**{"transformer.r": RANK, "transformer.lora_alpha": 3})
    made = merged(base, saved(tmp_path / "x.safetensors", named(found, "transformer."), **told), tmp_path / "out")
    folders.assert_same_bits(made, fused(model, changed(start, found, 1.5)))


def test_some_parts_of_a_fused_weight_in_a_file_of_a_whole_model(folders, tmp_path):
    start = weights(of_parts(FLUX_1))
    tree = {f"model.diffusion_model.{path}": leaf for path, leaf in fused(FLUX_1, start).items()}
    base = saved(tmp_path / "base.safetensors", tree)
    some = ("to_v", "add_q_proj", "proj_mlp")
    shapes = {path: shape for path, shape in of_parts(FLUX_1).items() if path.endswith(some)}
    found = factors(shapes)
    found[next(iter(shapes))] = numbers(5, SIZE, seed=1), numbers(SIZE, 5, seed=2)  # ranks may differ
    made = merged(base, saved(tmp_path / "x.safetensors", named(found, "transformer.")), tmp_path / "out")
    expected = fused(FLUX_1, changed(start, found))
    folders.assert_same_bits(made, {f"model.diffusion_model.{path}": leaf for path, leaf in expected.items()})


def test_a_pipeline_takes_original_names(folders, tmp_path):
    start = weights(of_parts(WAN))
    saved(tmp_path / "base/transformer/diffusion_pytorch_model.safetensors", start)
    (tmp_path / "base/model_index.json").write_text("{}")
    found = factors(of_whole(WAN))
    tensors = named(found, "diffusion_model.", "lora_down.weight", "lora_up.weight")
    made = merged(tmp_path / "base", saved(tmp_path / "x.safetensors", tensors), tmp_path / "out")
    expected = split(WAN, changed(fused(WAN, start), found))
    folders.assert_same_bits(made, {f"transformer/{path}": leaf for path, leaf in expected.items()})


def test_scales_of_parts_may_differ(folders, tmp_path):
    qkv, parts = next(iter(FLUX_1.items()))
    start = weights(parts)
    base = saved(tmp_path / "base.safetensors", fused({qkv: parts}, start))
    found = factors(parts)
    q, k, v = found
    tensors = kohya({q: found[q]}, alpha=4) | kohya({k: found[k]}, alpha=1) | kohya({v: found[v]})
    made = merged(base, saved(tmp_path / "x.safetensors", tensors), tmp_path / "out")
    expected = start
    for path, scale in ((q, 2), (k, 0.5), (v, 1)):
        expected = changed(expected, {path: found[path]}, scale)
    folders.assert_same_bits(made, fused({qkv: parts}, expected))


@pytest.mark.parametrize("original", [False, True])
def test_halves_that_diffusers_swaps(original, folders, tmp_path):
    names = ["norm_out.linear", "final_layer.adaLN_modulation.1"]
    own, other = names[:: -1 if original else 1]
    base = saved(tmp_path / "base.safetensors", weights({own: (6, SIZE)}))
    found = factors({other: (6, SIZE)})
    made = merged(base, saved(tmp_path / "x.safetensors", kohya(found, alpha=2)), tmp_path / "out")
    a, b = found[other]
    folders.assert_same_bits(made, changed(weights({own: (6, SIZE)}), {own: (a, b.roll(3, 0))}))
    same = merged(base, saved(tmp_path / "y.safetensors", kohya({own: found[other]}, alpha=2)), tmp_path / "same")
    folders.assert_same_bits(same, changed(weights({own: (6, SIZE)}), {own: found[other]}))


def test_two_transformers_of_one_pipeline_are_told_apart(folders, tmp_path):
    for part in ("transformer", "transformer_2"):
        saved(tmp_path / f"base/{part}/diffusion_pytorch_model.safetensors", weights(of_parts(WAN)))
    (tmp_path / "base/model_index.json").write_text("{}")
    found = factors(of_whole(WAN))
    file = saved(tmp_path / "x.safetensors", named(found, "diffusion_model.", alpha=2))
    told = "may adapt transformer or transformer_2 of base .*, for which .* equal names: give the folder of one of them"
    with pytest.raises(ValueError, match=told):
        plan(TA, tmp_path / "base", {"x": file}, tmp_path / "none")
    made = merged(tmp_path / "base/transformer_2", file, tmp_path / "out")
    folders.assert_same_bits(made, split(WAN, changed(fused(WAN, weights(of_parts(WAN))), found)))
    both = named(factors(of_parts(WAN)), "transformer.", alpha=2) | named(factors(of_parts(WAN)), "transformer_2.")
    assert plan(TA, tmp_path / "base", {"x": saved(tmp_path / "y.safetensors", both)}, tmp_path / "none")


def test_t5_has_another_number_in_diffusers(folders, tmp_path):
    t5 = {"encoder.block.0.layer.0.SelfAttention.q": SQUARE, "encoder.block.0.layer.1.DenseReluDense.wo": DOWN}
    clip = {"text_model.encoder.layers.0.mlp.fc1": UP}
    saved(tmp_path / "base/transformer/diffusion_pytorch_model.safetensors", weights(of_parts(FLUX_1)))
    saved(tmp_path / "base/text_encoder/model.safetensors", weights(clip))
    saved(tmp_path / "base/text_encoder_2/model.safetensors", weights(t5, seed=9))
    (tmp_path / "base/model_index.json").write_text("{}")
    one, three = factors(clip), factors(t5, seed=3)
    tensors = kohya(one, "lora_te1_", alpha=2) | kohya(three, "lora_te3_", alpha=2)
    made = merged(tmp_path / "base", saved(tmp_path / "x.safetensors", tensors), tmp_path / "out")
    expected = {f"text_encoder/{path}": leaf for path, leaf in changed(weights(clip), one).items()}
    expected |= {f"text_encoder_2/{path}": leaf for path, leaf in changed(weights(t5, seed=9), three).items()}
    folders.assert_same_bits({name: leaf for name, leaf in made.items() if name.startswith("text")}, expected)
    strange = saved(tmp_path / "y.safetensors", kohya(factors({"encoder.block.9.q": SQUARE}), "lora_te3_"))
    with pytest.raises(ValueError, match=r"adapts text_encoder_3 \(1 modules\), base has text_encoder, tex"):
        plan(TA, tmp_path / "base", {"x": strange}, tmp_path / "none")


def test_both_names_of_a_module_in_one_file_are_an_error(tmp_path):
    base = saved(tmp_path / "base.safetensors", fused(FLUX_1, weights(of_parts(FLUX_1))))
    qkv, parts = next(iter(FLUX_1.items()))
    tensors = kohya(factors({qkv: (12, SIZE)})) | kohya(factors(parts))
    with pytest.raises(ValueError, match=r"'lora_unet_double_blocks_7_img_attn_qkv' and 'lora_unet_tr.* both change"):
        plan(TA, base, {"x": saved(tmp_path / "x.safetensors", tensors)}, tmp_path / "none")


def test_parts_that_cannot_be_told_apart_are_errors(tmp_path):
    diffusers = saved(tmp_path / "base/model.safetensors", weights(of_parts(FLUX_1))).parent
    qkv, linear = "double_blocks.7.img_attn.qkv", "single_blocks.12.linear1"
    whole = nn.Linear(SIZE, 12).weight.detach().clone()
    for name, tensors, told in (
        (
            "height",
            kohya(factors({linear: (24, SIZE)})),
            r"B \(24, 2\) and A .* have no product of shape \(22, 4\)",
        ),
        ("width", kohya(factors({qkv: (12, 5)})), r"B \(12, 2\) and A \(2, 5\) .* no product of shape \(12, 4\)"),
        (
            "kind",
            {f"lora_unet_{flat(qkv)}.lokr_w1": torch.ones(1, 1), f"lora_unet_{flat(qkv)}.lokr_w2": whole},
            "'lora_unet_double_blocks_7_img_attn_qkv' of 'transformer_blocks.7.attn.to_q.weight' is not a plain LoRA",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            plan(TA, diffusers, {"x": saved(tmp_path / f"{name}.safetensors", tensors)}, tmp_path / "none")
