"""Weights in 8-bit floats and MXFP4 are read as the values that they stand for."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from smat_fn.config import Della, Emr, TaskArithmetic, Ties
from smat_fn.folders import extract_lora, merge_folders, plan
from smat_fn.folders.inputs.reading import open_folder
from smat_fn.folders.run import export_task
from smat_fn.scripts.merge import on_disk

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
TA = TaskArithmetic(coef=0.5)
NOTE = ", read as bfloat16: changes of weights include what their rounding changed"


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(scales, shape, block):
    """A scale for every coordinate."""
    rows, columns = shape[-2:]
    return scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def configured(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def mark(form):
    """ComfyUI's mark of the format of a module."""
    return torch.tensor([*json.dumps({"format": form}).encode()], dtype=torch.uint8)


def fp8(block=None):
    return {"quant_method": "fp8"} | ({} if block is None else {"weight_block_size": list(block)})


def assert_every_range(folder, path, expected):
    size = expected.numel()
    assert folder.leaves[path].shape == expected.shape
    assert folder.leaves[path].dtype == expected.dtype
    for start, stop in product(range(size + 1), repeat=2):
        if start <= stop:
            assert torch.equal(folder.read(path, start, stop), expected.reshape(-1)[start:stop]), (start, stop)


@pytest.mark.parametrize("name", ["a.weight_scale_inv", "a.weight_scale", "a.scale_weight"])
@pytest.mark.parametrize(
    ("shape", "scales", "block"),
    [
        ((7, 5), (2, 3), (4, 2)),  # blocks beyond both edges
        ((6, 4), (3, 2), (2, 2)),
        ((5, 6), (5, 1), (1, 6)),  # a scale a row
        ((5, 6), (5,), (1, 6)),
        ((2, 3, 5), (2, 2, 2), (2, 3)),  # matrices of experts
        ((5, 6), (1,), (5, 6)),
        ((5, 6), (), (5, 6)),
        ((2, 3, 2, 2), (1,), (2, 2)),
        ((7,), (1,), (1, 7)),
        ((), (), (1, 1)),
    ],
)
def test_every_range_is_the_product_with_the_scales_of_its_blocks(name, shape, scales, block, folders, tmp_path):
    values, scale = drawn(*shape).to(E4M3), drawn(*scales, seed=1)
    folder = configured(
        folders.save(tmp_path / "x", {"a.weight": values, name: scale, "a.input_scale": torch.ones(1)}),
        quantization_config=fp8(block if shape and shape[-1] % block[1] else None),
    )
    found = open_folder("base", folder)
    assert list(found.leaves) == ["a.weight"]
    assert found.note == f"base holds 1 quantised parameter{NOTE}"
    flat = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    whole = flat if scale.numel() == 1 else spread(flat, shape, block)
    assert_every_range(found, "a.weight", (values.float() * whole.reshape(whole.shape or (1,))).bfloat16().view(shape))


@pytest.mark.parametrize("kind", [E8M0, torch.uint8])
def test_scales_may_be_exponents_of_two(kind, folders, tmp_path):
    powers = torch.tensor([[0, 120], [127, 200]], dtype=torch.uint8)
    values = torch.arange(24, dtype=torch.uint8).view(E5M2).view(4, 6)
    tree = {"a.weight": values, "a.weight_scale_inv": powers.view(kind)}
    found = open_folder("base", configured(folders.save(tmp_path / "x", tree), quantization_config=fp8((2, 3))))
    factor = spread(torch.tensor([[2.0**-127, 2.0**-7], [1.0, 2.0**73]]), (4, 6), (2, 3))
    assert_every_range(found, "a.weight", (values.float() * factor).bfloat16())


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_all_bytes_are_the_values_that_torch_reads(kind, folders, tmp_path):
    values = torch.arange(256, dtype=torch.uint8).view(kind)
    found = open_folder("base", folders.save(tmp_path / "x", {"a": values}))
    assert found.note == f"base holds 1 quantised parameter{NOTE}"
    torch.testing.assert_close(found.leaf("a"), values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert found.leaf("a").isnan().sum() == (2 if kind is E4M3 else 6)


def test_mxfp4_by_hand(folders, tmp_path):
    """Two experts of 64 rows and 3 columns: the low half of a byte comes first, rows are stored as columns."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(16, (2, 3, 64), generator=torch.Generator().manual_seed(0))
    powers = torch.tensor([[[127, 128], [126, 130], [120, 127]], [[127, 127], [129, 1], [254, 125]]]).byte()
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).byte().view(2, 3, 2, 16)
    tree = {"e.down_proj_blocks": blocks, "e.down_proj_scales": powers, "e.down_proj_bias": drawn(2, 3)}
    folder = configured(folders.save(tmp_path / "x", tree), quantization_config={"quant_method": "mxfp4"})
    found = open_folder("base", folder)
    assert sorted(found.leaves) == ["e.down_proj", "e.down_proj_bias"]
    expected = table[codes] * (2.0 ** (powers.double() - 127)).float().repeat_interleave(32, 2)
    expected = expected.transpose(1, 2).bfloat16().contiguous()
    read = found.reads["e.down_proj"]
    assert torch.equal(found.leaf("e.down_proj"), expected)
    for start, stop in product(range(0, 385, 7), repeat=2):
        if start <= stop:
            assert torch.equal(read(start, stop), expected.view(-1)[start:stop])


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("inner", [False, True])
def test_values_have_the_dtype_that_the_configuration_names(name, inner, folders, tmp_path):
    config = {name: "float16"}
    folder = folders.save(tmp_path / "x", {"a.weight": drawn(4, 4).to(E4M3), "a.weight_scale": torch.tensor(0.1)})
    own = {"text_config": config} if inner else config
    found = open_folder("base", configured(folder, **own, quantization_config=fp8()))
    assert found.leaf("a.weight").dtype == torch.float16


@pytest.mark.parametrize("config", [TA, Ties(coef=0.7, keep=0.5), Della(coef=0.9, drop_prob=0.5, window=0.14)])
def test_a_merge_is_that_of_the_values_and_its_configuration_is_not_quantised(config, folders, tmp_path):
    scales = {path: drawn(3, 2, seed=path).abs() for path in (1, 2)}
    values = {path: drawn(10, 7, seed=path + 5).to(E4M3) for path in (1, 2)}
    plain = {path: (values[path].float() * spread(scales[path], (10, 7), (4, 4))).bfloat16() for path in (1, 2)}
    model = {
        path: {"q.weight": values[path], "q.weight_scale_inv": scales[path], "norm": drawn(7, seed=9).bfloat16()}
        for path in (1, 2)
    }
    other = {"q.weight": drawn(10, 7, seed=11).bfloat16(), "norm": drawn(7, seed=12).bfloat16()}
    asked = {"dtype": "bfloat16", "hidden_size": 7, "quantization_config": fp8((4, 4))}
    paths = [configured(folders.save(tmp_path / str(path), model[path]), **asked) for path in (1, 2)]
    third = configured(folders.save(tmp_path / "3", other), dtype="bfloat16", hidden_size=7)
    out = tmp_path / "out"
    result = merge_folders(config, paths[0], {"x": paths[1], "y": third}, out, key=folders.key)
    assert result.notes == (f"base holds 1 quantised parameter{NOTE}", f"expert 'x' holds 1 quantised parameter{NOTE}")
    whole = {path: {"q.weight": plain[path], "norm": model[path]["norm"]} for path in (1, 2)}
    folders.assert_same_bits(folders.load(out), folders.in_memory(config, whole[1], {"x": whole[2], "y": other}))
    assert json.loads((out / "config.json").read_text()) == {"dtype": "bfloat16", "hidden_size": 7}


def test_files_of_comfyui(folders, tmp_path):
    values = drawn(6, 4).to(E4M3)
    scaled = {
        "q.weight": values, "q.scale_weight": torch.tensor(0.5), "q.scale_input": torch.tensor(3.0),
        "q.comfy_quant": mark("float8_e4m3fn"), "scaled_fp8": torch.zeros(2).to(E4M3), "q.bias": drawn(6),
    }  # fmt: skip
    plain = {"q.weight": values, "norm.scale": torch.ones(4)}  # no scale of q
    files = {name: folders.save(tmp_path / name, tree) for name, tree in {"scaled": scaled, "plain": plain}.items()}
    found = {name: open_folder("base", folder / "model.safetensors") for name, folder in files.items()}
    assert sorted(found["scaled"].leaves) == ["q.bias", "q.weight"]
    assert torch.equal(found["scaled"].leaf("q.weight"), values.bfloat16() * 0.5)
    assert torch.equal(found["plain"].leaf("q.weight"), values.bfloat16())


@pytest.mark.parametrize(
    ("tree", "config", "told"),
    [
        ({"q.weight_scale": (4, 3)}, fp8((2, 2)), r"'q.weight_scale' has shape \(4, 3\), its weight \(4, 4\), which"),
        ({"q.weight_scale": (0, 4)}, fp8((2, 2)), r"'q.weight_scale' has shape \(0, 4\), its weight \(4, 4\), which"),
        ({"q.weight_scale": (2, 4, 1)}, fp8(), r"'q.weight_scale' has shape \(2, 4, 1\), its weight \(4, 4\)"),
        ({"q.qscale_weight": ()}, None, "'q.weight' is stored in 8-bit floats, and 'q.qscale_weight' is not a known"),
        ({"k.weight": (4,)}, fp8(), "'q.weight' is stored in 8-bit floats without a scale: merge the checkpoint it"),
        ({"q.weight_zero_point": ()}, None, "it holds parameter 'q.weight_zero_point'"),
        ({"q.weight_scale": (1,), "k.scale": E8M0}, None, "it holds parameter 'k.scale', float8_e8m0fnu"),
        ({}, {"quant_method": "awq"}, r"is quantised \(awq, says its config.json\): merge the checkpoint it was made"),
        ({}, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"quantised \(compressed-tensors,"),
        ({}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"is quantised \(modelopt, says"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_an_error(tree, config, told, folders, tmp_path):
    own = {"q.weight": drawn(4, 4).to(E4M3)} | {
        name: torch.ones(4).to(E8M0) if shape is E8M0 else torch.ones(shape) for name, shape in tree.items()
    }
    folder = folders.save(tmp_path / "x", own)
    if config is not None:
        configured(folder, quantization_config=config)
    with pytest.raises(ValueError, match=f"^base: .*{told}"):
        plan(TA, folder, {"x": folder}, tmp_path / "out")


def test_scales_of_another_number_of_matrices_are_an_error(folders, tmp_path):
    tree = {"q": drawn(2, 4, 4).to(E4M3), "q_scale_inv": torch.ones(3, 2, 2)}
    with pytest.raises(ValueError, match=r"'q_scale_inv' has shape \(3, 2, 2\), its weight \(2, 4, 4\), which it does"):
        open_folder("base", folders.save(tmp_path / "x", tree))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
            "group_0": {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [4, 3]}}}},
        {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
            "group_0": {"weights": {"block_structure": "4x3"}}}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fbgemm_fp8"},
    ],
    ids=lambda config: config["quant_method"],
)  # fmt: skip
def test_other_tools_in_8_bit_floats(config, folders, tmp_path):
    blocks = "config_groups" in config
    values, scale = drawn(6, 4).to(E4M3), drawn(2, 2) if blocks else drawn(6, 1)
    tree = {"q.weight": values, "q.weight_scale": scale, "q.k_scale": torch.ones(1)}
    found = open_folder("base", configured(folders.save(tmp_path / "x", tree), quantization_config=config))
    assert list(found.leaves) == ["q.weight"]
    assert_every_range(
        found, "q.weight", (values.float() * spread(scale, (6, 4), (4, 3) if blocks else (1, 4))).bfloat16()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_values_are_those_that_transformers_loads(kind, folders, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    shared = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    if kind == "fp8":
        made = transformers.LlamaConfig(hidden_size=256, intermediate_size=384, **shared)
        asked, options = fp8((128, 128)) | {"activation_scheme": "dynamic"}, transformers.FineGrainedFP8Config
    else:
        layers = {"layer_types": ["sliding_attention", "full_attention"], "num_experts_per_tok": 2}
        sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 3}
        made = transformers.GptOssConfig(**sizes, **layers, **shared)
        asked, options = {"quant_method": "mxfp4"}, transformers.Mxfp4Config
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    folder = folders.save(tmp_path / "x", _stored(kind, folders.load(tmp_path / "plain")))
    configured(folder, **config, quantization_config=asked)
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    found = open_folder("base", folder)
    assert "read as bfloat16" in found.note
    folders.assert_same_bits(found.tensors(), {path: expected[path] for path in found.leaves})
    out = tmp_path / "out"
    merge_folders(TA, folder, {"x": tmp_path / "plain"}, out)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == torch.bfloat16
    folders.assert_same_bits(
        folders.load(out), folders.in_memory(TA, found.tensors(), {"x": folders.load(tmp_path / "plain")})
    )


def _stored(kind, leaves):
    """The same names, with drawn values in the place of linear weights."""
    drawing, stored = torch.Generator().manual_seed(1), {}
    for path, leaf in leaves.items():
        if kind == "fp8" and "_proj" in path:
            rows, columns = (-(-size // 128) for size in leaf.shape)
            stored[path] = (leaf.float() * 100).to(E4M3)
            stored[f"{path}_scale_inv"] = torch.rand(rows, columns, generator=drawing)
        elif kind == "mxfp4" and path.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = leaf.shape
            groups = experts, columns, rows // 32
            stored[f"{path}_blocks"] = torch.randint(256, (*groups, 16), generator=drawing).byte()
            stored[f"{path}_scales"] = torch.randint(110, 135, groups, generator=drawing).byte()
        else:
            stored[path] = leaf
    return stored


def quantised(*shape, scales, seed=0):
    """A weight with scales for blocks of 128 x 128, and its values."""
    values, scale = drawn(*shape, seed=seed).to(E4M3), drawn(*scales, seed=seed + 1).abs()
    return {"q.weight": values, "q.weight_scale_inv": scale}, values.float() * spread(scale, shape, (128, 128))


@pytest.mark.parametrize("block", [[128, 128], "128x128", None])
@pytest.mark.parametrize("name", ["q.weight_scale", "q.weight_scale_inv"])
def test_blocks_that_equal_ones_would_fit_too_are_the_usual_ones(name, block, folders, tmp_path):
    values, scale = drawn(960, 2).to(E4M3), drawn(8, 1, seed=1).abs()
    folder = folders.save(tmp_path / "x", {"q.weight": values, name: scale})
    if block is not None:
        scheme = {"config_groups": {"a": {"weights": {"block_structure": block}}}, "format": "float-quantized"}
        configured(folder, quantization_config={"quant_method": "compressed-tensors", **scheme})
    expected = (values.float() * spread(scale, (960, 2), (128, 128))).bfloat16()
    assert torch.equal(open_folder("base", folder).leaf("q.weight"), expected)


def test_the_header_of_a_file_of_comfyui(folders, tmp_path):
    tree = {"q.weight": drawn(4, 4).to(E4M3), "q.weight_scale": torch.tensor(0.5)}
    for kind in "float8_e4m3fn", "mxfp8":
        layers = json.dumps({"layers": {"q": {"format": kind}}})
        save_file(tree, tmp_path / f"{kind}.safetensors", metadata={"_quantization_metadata": layers, "made": "here"})
    with pytest.raises(ValueError, match="the header of its file says formats mxfp8, which are not read: merge the ch"):
        open_folder("base", tmp_path / "mxfp8.safetensors")
    file = tmp_path / "float8_e4m3fn.safetensors"
    merge_folders(TA, file, {"x": file}, tmp_path / "out")
    with safe_open(tmp_path / "out/model.safetensors", "pt") as made:
        assert "_quantization_metadata" not in made.metadata()
        assert made.metadata()["made"] == "here"


def test_every_command_says_what_is_read_so(folders, tmp_path):
    scheme = {"hidden_size": 4, "num_hidden_layers": 2, "quantization_config": fp8((4, 4))}
    for seed, name in enumerate(["a", "b"]):
        tree = {f"model.layers.{i}.q.weight": drawn(4, 4, seed=seed + i).to(E4M3) for i in range(2)}
        tree |= {f"{path}_scale_inv": torch.ones(1, 1) for path in tree}
        configured(folders.save(tmp_path / name, tree | {"model.norm.weight": torch.ones(4)}), **scheme)
    a, b = tmp_path / "a", tmp_path / "b"
    stack = Path(f"{a}[0:1]+{b}[1:2]")
    result = merge_folders(TA, stack, {"x": Path(f"{b}[0:1]+{a}[1:2]")}, tmp_path / "stack")
    assert [f"holds 2 quantised parameters{NOTE}" in note for note in result.notes].count(True) == 2
    notes = f"base holds 2 quantised parameters{NOTE}", f"expert 'expert' holds 2 quantised parameters{NOTE}"
    assert extract_lora(a, b, tmp_path / "lora", rank=1).notes == notes
    merge_folders(Emr(), a, {"x": b, "y": a}, tmp_path / "emr")
    exported = export_task(tmp_path / "emr", a, "x", tmp_path / "task")
    assert [note for note in exported.notes if "quantised" in note] == [notes[0]]


@pytest.mark.parametrize("place", ["config.json", "text_config", "none", "component"])
def test_blocks_and_dtype_are_those_of_the_configuration_wherever_it_stands(place, folders, tmp_path):
    tree, values = quantised(192, 130, scales=(2, 2))
    asked = {"torch_dtype": "float16", "quantization_config": fp8((128, 128))}
    folder, prefix, dtype = tmp_path / "x", "", torch.float16
    if place == "component":
        folders.save(folder / "unet", tree)
        configured(folder / "unet", **asked)
        (folder / "model_index.json").write_text('{"unet": ["diffusers", "UNet2DConditionModel"]}')
        prefix = "unet/"
    else:
        folders.save(folder, tree)
        if place != "none":
            configured(folder, **({"text_config": asked} if place == "text_config" else asked))
        dtype = torch.bfloat16 if place == "none" else dtype
    found = open_folder("base", folder)
    assert torch.equal(found.leaf(f"{prefix}q.weight"), values.to(dtype))
    merge_folders(TA, folder, {"x": folder}, tmp_path / "out")
    for file in tmp_path.glob("out/**/config.json"):
        assert "quantization_config" not in file.read_text()
    (made,) = tmp_path.glob("out/**/*.safetensors")
    assert torch.equal(folders.load(made.parent)["q.weight"], values.to(dtype))


def test_a_finished_merge_is_of_its_configuration(folders, tmp_path):
    tree, _ = quantised(192, 130, scales=(2, 2))
    folder = configured(folders.save(tmp_path / "x", tree), quantization_config=fp8((96, 65)))

    def lines():
        asked = on_disk.order(folder, {"y": folder}, out=tmp_path / "out", seed=0)
        return list(on_disk.run([TA], asked, dry_run=False, push=None, public=False))

    assert not lines()[0].startswith("kept")
    assert lines()[0].startswith("kept")
    configured(folder, quantization_config=fp8((128, 128)))
    with pytest.raises(ValueError, match="holds another merge"):
        lines()


@pytest.mark.parametrize(
    "name",
    ["a.q.kv_scale", "a.q.output_scale", "a.q.input_scale_ub", "a.q.input_zero_point", "a.k_zero_point", "a.k_scale"],
)
def test_numbers_for_activations_and_the_cache_are_left_out_and_parameters_are_not(name, folders, tmp_path):
    tree = {"a.q.weight": drawn(4, 4).to(E4M3), "a.q.weight_scale": torch.ones(1), name: torch.ones(1)}
    found = open_folder("base", folders.save(tmp_path / "x", tree | {"a.q_scale": drawn(4)}))
    assert sorted(found.leaves) == ["a.q.weight", "a.q_scale"]


@pytest.mark.parametrize(
    "tree",
    [
        {"d.qkv.weight": (4, 4), "d.norm.key_norm.scale": (4,)},
        {"c.positional_embedding": (4, 4), "c.logit_scale": None},
        {"b.modulation": (1, 6, 4), "b.scale_shift_table": (4,), "scale": (3,)},
        {"n.scale": (4,), "n.bias": (4,), "n.weight": (4, 4)},
        {"n.scale": None, "n.bias": (4,)},
    ],
)
def test_a_model_saved_in_8_bits_may_have_parameters_that_are_called_scales(tree, folders, tmp_path):
    own = {name: torch.tensor(4.6) if shape is None else drawn(*shape).to(E4M3) for name, shape in tree.items()}
    found = open_folder("base", folders.save(tmp_path / "x", own))
    assert sorted(found.leaves) == sorted(tree)
    assert all(torch.equal(leaf, own[name].to(leaf.dtype)) for name, leaf in found.tensors().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_block_size": [0, 128]}, {"weight_block_size": ["a", "b"]}, {"weight_block_size": [-1, 2]},
        {"config_groups": {"FP8": ["Linear"]}}, {"config_groups": ["a"]}, {"config_groups": {"FP8": {"weights": 3}}},
    ],
)  # fmt: skip
def test_settings_that_name_no_block_are_ignored(settings, folders, tmp_path):
    method = {"quant_method": "compressed-tensors", "format": "naive-quantized"}
    folder = folders.save(tmp_path / "x", {"a.weight": drawn(4, 4).to(E4M3), "a.weight_scale": torch.ones(2, 2)})
    found = open_folder("base", configured(folder, quantization_config=method | settings))
    assert torch.equal(found.leaf("a.weight"), drawn(4, 4).to(E4M3).bfloat16())


def test_many_problems_of_a_kind_are_a_few_and_their_number(folders, tmp_path):
    tree = {f"{i}.q.weight": drawn(2, 2).to(E4M3) for i in range(40)}
    tree |= {f"{i}.q.qscale_weight": torch.ones(1) for i in range(40)}
    with pytest.raises(ValueError, match=r"; and 37 more like these$"):
        open_folder("base", folders.save(tmp_path / "x", tree))


@pytest.mark.parametrize(
    ("tree", "settings", "told"),
    [
        ({"q.weight_scale": torch.ones(2, 1)}, {"format": "float-quantized", "config_groups": {
            "a": {"weights": {"block_structure": [4, 4]}}}}, "has shape (2, 1), its weight (4, 4), which it does not"),
        ({"q.comfy_quant": mark("mxfp8")}, None, "'q.comfy_quant' says format mxfp8, which is not read: merge the"),
        ({"q.weight_scale": torch.ones(1).int()}, None, "'q.weight_scale' is int32, scales must be floats or powers"),
        ({"q.weight_scale_2": torch.ones(1)}, None, "it holds parameter 'q.weight_scale_2'"),
        ({"e.down": torch.ones(4, 4).char(), "e.down_scale": torch.ones(4, 1)}, None, "it holds parameter 'e.down', i"),
        ({"e.d_blocks": torch.ones(1, 2, 1, 16).byte(), "e.d_scales": torch.ones(1, 2, 1).byte(), "e.d": drawn(2)},
         None, "'e.d' is stored twice, once as 'e.d_blocks'"),
        ({}, {"format": "float-quantized", "transform_config": {"config_groups": {}}}, r"quantised \(compressed-"),
    ],
)  # fmt: skip
def test_other_formats_are_told_by_what_they_hold(tree, settings, told, folders, tmp_path):
    own = {"q.weight": drawn(4, 4).to(E4M3), "q.weight_scale": torch.ones(1)} | tree
    folder = folders.save(tmp_path / "x", own)
    if settings is not None:
        configured(folder, quantization_config={"quant_method": "compressed-tensors"} | settings)
    with pytest.raises(ValueError, match=told if "\\" in told else re.escape(told)):
        open_folder("base", folder)
