"""LoRA files of diffusers, kohya's scripts and MLX as experts: bit-identical to PEFT's adapter of equal factors."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from smat_fn.config import TaskArithmetic, Ties
from smat_fn.folders import merge_folders, open_folder, plan
from smat_fn.folders.inputs.adapters.experts import open_adapter
from smat_fn.folders.inputs.adapters.original_names import flat as flat_name

TA = TaskArithmetic(coef=1.0)
RANK = 2
Q = "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_q"
OUT = "down_blocks.0.attentions.1.transformer_blocks.0.attn1.to_out.0"
CONV, DOWN, POINT = (
    "down_blocks.0.resnets.1.conv1",
    "down_blocks.0.downsamplers.0.conv",
    "mid_block.attentions.0.proj_in",
)
TIME = "time_embedding.linear_1"
UNET = {
    **{Q: (6, 6), OUT: (6, 6), CONV: (4, 3, 3, 3), DOWN: (4, 4, 3, 3), POINT: (6, 5, 1, 1), TIME: (7, 6)},
    **{"conv_in": (4, 3, 3, 3), "up_blocks.1.upsamplers.0.conv": (3, 3, 3, 3)},
    "up_blocks.2.resnets.0.time_emb_proj": (5, 7),
}
LDM = {  # the same in the original code
    Q: "input_blocks.2.1.transformer_blocks.0.attn1.to_q",
    OUT: "input_blocks.2.1.transformer_blocks.0.attn1.to_out.0",
    CONV: "input_blocks.2.0.in_layers.2",
    DOWN: "input_blocks.3.0.op",
    POINT: "middle_block.1.proj_in",
    TIME: "time_embed.0",
    "conv_in": "input_blocks.0.0",
    "up_blocks.1.upsamplers.0.conv": "output_blocks.5.2.conv",
    "up_blocks.2.resnets.0.time_emb_proj": "output_blocks.6.0.emb_layers.1",
}
TEXT = {f"text_model.encoder.layers.0.self_attn.{name}": (4, 4) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
TEXT |= {"text_model.encoder.layers.0.mlp.fc1": (8, 4), "text_model.encoder.layers.0.mlp.fc2": (4, 8)}


def numbers(*shape, seed, most=3):
    """Integers: sums of their products are exact."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def weights(shapes, seed=0, end=".weight"):
    return {f"{path}{end}": numbers(*shape, seed=seed + i, most=50) for i, (path, shape) in enumerate(shapes.items())}


def factors(shapes, rank=RANK, seed=100):
    """A and B of modules: of a convolution A has the kernel."""
    found = {}
    for i, (path, (out, *rest)) in enumerate(shapes.items()):
        kernel = [1] * len(rest[1:])
        found[path] = numbers(rank, *rest, seed=seed + i), numbers(out, rank, *kernel, seed=seed + i + 50)
    return found


def changed(base, found, scale=1.0):
    """Base with the changes of factors, in dense arithmetic."""
    made = dict(base)
    for path, (a, b) in found.items():
        delta = b @ a if a.ndim == 2 else functional.conv2d(a.transpose(0, 1), b).transpose(0, 1)
        made[f"{path}.weight"] = base[f"{path}.weight"] + scale * delta
    return made


def flat(path):
    return path.replace(".", "_")


def named(found, part, a="lora_A.weight", b="lora_B.weight", name=lambda path: path, alpha=None):
    """A file's tensors: of each module its factors, and alpha."""
    tensors = {}
    for path, (left, right) in found.items():
        tensors |= {f"{part}{name(path)}.{a}": left, f"{part}{name(path)}.{b}": right}
        tensors |= {} if alpha is None else {f"{part}{name(path)}.alpha": torch.tensor(float(alpha))}
    return {name: leaf.contiguous() for name, leaf in tensors.items()}


def kohya(found, part="lora_unet_", alpha=None, names=None):
    def name(path):
        return flat((names or {}).get(path, path))

    return named(found, part, "lora_down.weight", "lora_up.weight", name, alpha)


def saved(file, tensors, **header):
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt", **header})
    return file


def of_peft(folder, found, alpha, **settings):
    saved(folder / "adapter_model.safetensors", named(found, "base_model.model."))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ["to_q"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def unet(folder, shapes=UNET):
    saved(folder / "diffusion_pytorch_model.safetensors", weights(shapes))
    (folder / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "layers_per_block": 2}')
    return folder


def pipeline(folder, seconds=True):
    unet(folder / "unet")
    saved(folder / "text_encoder/model.safetensors", weights(TEXT, seed=40))
    if seconds:
        wide = {path: tuple(2 * size for size in shape) for path, shape in TEXT.items()}
        saved(folder / "text_encoder_2/model.safetensors", weights(wide, seed=60))
    (folder / "model_index.json").write_text("{}")
    return folder


def merged(base, expert, out, config=TA, **options):
    merge_folders(config, base, {"x": expert}, out, out_dtype="float32", **options)
    found = {}
    for file in out.rglob("*.safetensors"):
        part = "" if file.parent == out else f"{file.parent.name}/"
        found |= {part + path: leaf for path, leaf in load_file(file).items()}
    return found


def header(**settings):
    return {"lora_adapter_metadata": json.dumps(settings)}


WAYS = {  # of writing the same adapter of a UNet at scale 3 / 2
    "diffusers": lambda found: (named(found, "unet."), header(**{"unet.r": RANK, "unet.lora_alpha": 3})),
    "of a transformer": lambda found: (named(found, "transformer.", alpha=3), {}),
    "of ComfyUI": lambda found: (named(found, "diffusion_model.", alpha=3), {}),
    "save_lora_adapter": lambda found: (named(found, ""), header(r=RANK, lora_alpha=3)),
    "down and up": lambda found: (named(found, "unet.", "lora.down.weight", "lora.up.weight", alpha=3), {}),
    "kohya": lambda found: (kohya(found, alpha=3), {"ss_network_dim": "2"}),
    "kohya on SDXL": lambda found: (kohya(found, alpha=3, names=LDM), {}),
    "patterns": lambda found: (
        named(found, "unet."),
        header(
            **{"unet.r": 9, "unet.lora_alpha": 1, "unet.rank_pattern": dict.fromkeys((f"^{p}" for p in found), RANK)},
            **{"unet.alpha_pattern": {".*": 3}, "unet.lora_bias": False, "text_encoder.r": 1},
        ),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_an_adapter_gives_the_bits_of_pefts(way, folders, tmp_path):
    base, found = unet(tmp_path / "base"), factors(UNET)
    tensors, told = WAYS[way](found)
    made = merged(base, saved(tmp_path / "mine.safetensors", tensors, **told), tmp_path / "out")
    folders.assert_same_bits(made, changed(weights(UNET), found, 1.5))
    folders.assert_same_bits(made, merged(base, of_peft(tmp_path / "peft", found, 3), tmp_path / "own"))


def test_fractions_are_those_of_pefts_reader_in_chunks_too(folders, tmp_path):
    """Of bfloat16 factors and weights, not of integers, by a merger that compares magnitudes."""
    shapes = {"a.to_q": (64, 96), "b.conv": (48, 16, 3, 3), "c.wide": (96, 64)}
    generator = torch.Generator().manual_seed(3)
    found = {
        path: tuple(torch.randn(leaf.shape, generator=generator).bfloat16() for leaf in pair)
        for path, pair in factors(shapes, rank=5).items()
    }
    base = tmp_path / "base"
    saved(base / "diffusion_pytorch_model.safetensors", {k: v.bfloat16() for k, v in weights(shapes).items()})
    file = saved(tmp_path / "k.safetensors", kohya(found, alpha=1))
    own = of_peft(tmp_path / "peft", found, 1, r=5)
    for i, config in enumerate((TA, Ties(coef=0.7, keep=0.3))):
        outs = [merged(base, path, tmp_path / f"{i}{path.name}", config) for path in (file, own)]
        folders.assert_same_bits(*outs)
    opened, other = (open_adapter("x", path, open_folder("base", base)) for path in (file, own))
    whole = opened.leaf("b.conv.weight").flatten()
    parts = [opened.read("b.conv.weight", start, min(start + 1000, 6912)) for start in range(0, 6912, 1000)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(whole, other.leaf("b.conv.weight").flatten())
    start = (weights(shapes)["b.conv.weight"].bfloat16()).float()
    a, b = (leaf.float() for leaf in found["b.conv"])
    dense = start + functional.conv2d(a.transpose(0, 1), b).transpose(0, 1) / 5
    torch.testing.assert_close(opened.leaf("b.conv.weight"), dense)


def test_convolutions_of_peft_are_those_that_it_merges(tmp_path):
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1), nn.Conv1d(4, 4, 3), nn.Linear(4, 4))
    for leaf in model.parameters():
        leaf.data = numbers(*leaf.shape, seed=leaf.numel(), most=40)
    saved(tmp_path / "base/model.safetensors", {name: leaf.clone() for name, leaf in model.state_dict().items()})
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0", "1", "2", "3"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    for name, leaf in adapted.named_parameters():
        if "lora_" in name:
            leaf.data = numbers(*leaf.shape, seed=len(name) + leaf.numel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, on a model without a configuration
        adapted.save_pretrained(tmp_path / "adapter")
    made, whole = merged(tmp_path / "base", tmp_path / "adapter", tmp_path / "out"), adapted.merge_and_unload()
    assert all(torch.equal(made[name], leaf) for name, leaf in whole.state_dict().items())
    assert not torch.equal(made["2.weight"], load_file(tmp_path / "base/model.safetensors")["2.weight"])


def test_without_alpha_the_scale_is_one_whatever_the_ranks(folders, tmp_path):
    base = unet(tmp_path / "base")
    found = factors({Q: UNET[Q]}, 3) | factors({CONV: UNET[CONV]}, 1)
    for name, tensors in {"k": kohya(found), "d": named(found, "unet.")}.items():
        made = merged(base, saved(tmp_path / f"{name}.safetensors", tensors), tmp_path / name)
        folders.assert_same_bits(made, changed(weights(UNET), found))


def test_attention_processors_and_text_encoders_of_older_versions(folders, tmp_path):
    base = pipeline(tmp_path / "base", seconds=False)
    of_unet, of_text = factors({Q: UNET[Q], OUT: UNET[OUT]}), factors({next(iter(TEXT)): (4, 4)})
    tensors = {}
    for path, (a, b) in of_unet.items():
        name = path.replace("attn1.", "attn1.processor.").removesuffix(".0") + "_lora"
        tensors |= {f"unet.{name}.down.weight": a, f"unet.{name}.up.weight": b}
    for path, (a, b) in of_text.items():
        for end in ("down", "up"):
            tensors[f"text_encoder.{path}.lora_linear_layer.{end}.weight"] = a if end == "down" else b
    made = merged(base, saved(tmp_path / "old/pytorch_lora_weights.safetensors", tensors).parent, tmp_path / "out")
    expected = {f"unet/{path}": leaf for path, leaf in changed(weights(UNET), of_unet).items()}
    expected |= {f"text_encoder/{path}": leaf for path, leaf in changed(weights(TEXT, 40), of_text).items()}
    folders.assert_same_bits(made, expected)
    spelled = {name.replace("q_proj.lora_linear_layer.", "to_q_lora."): leaf for name, leaf in tensors.items()}
    again = merged(base, saved(tmp_path / "older.safetensors", spelled), tmp_path / "again")
    folders.assert_same_bits(again, expected)
    alone = {name.removeprefix("unet."): leaf for name, leaf in tensors.items() if name.startswith("unet.")}
    folders.assert_same_bits(
        merged(base / "unet", saved(tmp_path / "processors.safetensors", alone), tmp_path / "alone"),
        changed(weights(UNET), of_unet),
    )


def test_a_pipeline_takes_all_components_and_a_component_its_own(folders, tmp_path):
    base = pipeline(tmp_path / "base")
    wide = {path: tuple(2 * size for size in shape) for path, shape in TEXT.items()}
    parts = {"unet": factors(UNET), "te1": factors(TEXT, seed=300), "te2": factors(wide, seed=400)}
    file = saved(
        tmp_path / "x.safetensors",
        {name: leaf for part, found in parts.items() for name, leaf in kohya(found, f"lora_{part}_", alpha=4).items()},
    )
    starts = {"unet": weights(UNET), "te1": weights(TEXT, 40), "te2": weights(wide, 60)}
    folder = {"unet": "unet", "te1": "text_encoder", "te2": "text_encoder_2"}
    every = {part: changed(starts[part], found, 2.0) for part, found in parts.items()}
    whole = {f"{folder[part]}/{path}": leaf for part, own in every.items() for path, leaf in own.items()}
    folders.assert_same_bits(merged(base, file, tmp_path / "out"), whole)
    assert not any("left out" in note for note in plan(TA, base, {"x": file}, tmp_path / "none").notes)
    for part, own in every.items():
        folders.assert_same_bits(merged(base / folder[part], file, tmp_path / part), own)
    (note,) = (n for n in plan(TA, base / "unet", {"x": file}, tmp_path / "none").notes if "left out" in n)
    told = "expert 'x' also adapts text_encoder (6 modules), text_encoder_2 (6 modules), which base does not have: left"
    assert note.startswith(told)
    half = saved(tmp_path / "half.safetensors", {"a.weight": torch.zeros(2)})
    assert not any("left out" in note for note in plan(TA, half, {"x": half}, tmp_path / "none").notes)


def test_text_encoders_are_those_that_transformers_5_stores_without_a_prefix(folders, tmp_path):
    bare = {path.removeprefix("text_model."): shape for path, shape in TEXT.items()}
    base = saved(tmp_path / "base/model.safetensors", weights(bare)).parent
    found = factors(TEXT)
    expected = changed(weights(bare), {path.removeprefix("text_model."): pair for path, pair in found.items()}, 2.0)
    for name, tensors in {
        "k": kohya(found, "lora_te_", alpha=4),
        "d": named(found, "text_encoder.", "lora.down.weight", "lora.up.weight", alpha=4),
    }.items():
        made = merged(base, saved(tmp_path / f"{name}.safetensors", tensors), tmp_path / name)
        folders.assert_same_bits(made, expected)


def single(file, *, text=True):
    """One file of a whole model as Stability's SDXL: a UNet, CLIP as transformers names it, and OpenCLIP."""
    start = weights(UNET)
    tree = {f"model.diffusion_model.{LDM[path]}.weight": start[f"{path}.weight"] for path in UNET}
    if text:
        clip = weights(TEXT, 40)
        tree |= {f"conditioner.embedders.0.transformer.{path}": leaf for path, leaf in clip.items()}
        layer = "conditioner.embedders.1.model.transformer.resblocks.0."
        own = {name.rpartition("layers.0.")[2]: leaf for name, leaf in weights(TEXT, 60).items()}
        thirds = [own[f"self_attn.{name}_proj.weight"] for name in "qkv"]
        tree |= {f"{layer}attn.in_proj_weight": torch.cat(thirds), f"{layer}attn.in_proj_bias": torch.zeros(12)}
        tree |= {
            f"{layer}{new}.weight": own[f"{old}.weight"]
            for new, old in (
                ("attn.out_proj", "self_attn.out_proj"),
                ("mlp.c_fc", "mlp.fc1"),
                ("mlp.c_proj", "mlp.fc2"),
            )
        }
    return saved(file, tree), tree


@pytest.mark.parametrize("names", [LDM, None])
def test_one_file_of_a_whole_model_takes_both_kinds_of_names(names, folders, tmp_path):
    base, tree = single(tmp_path / "base.safetensors")
    of_unet, one = factors(UNET), factors(TEXT, seed=300)
    two = {path: pair for path, pair in factors(TEXT, seed=400).items() if "k_proj" not in path}
    tensors = kohya(of_unet, alpha=4, names=names)
    tensors |= kohya(one, "lora_te1_", alpha=4) | kohya(two, "lora_te2_", alpha=4)
    made = merged(base, saved(tmp_path / "x.safetensors", tensors), tmp_path / "out")
    expected = dict(tree)
    for path, leaf in changed(weights(UNET), of_unet, 2.0).items():
        expected[f"model.diffusion_model.{LDM[path.removesuffix('.weight')]}.weight"] = leaf
    expected |= {
        f"conditioner.embedders.0.transformer.{path}": leaf
        for path, leaf in changed(weights(TEXT, 40), one, 2.0).items()
    }
    own = {name.rpartition("layers.0.")[2]: leaf for name, leaf in changed(weights(TEXT, 60), two, 2.0).items()}
    layer = "conditioner.embedders.1.model.transformer.resblocks.0."
    expected[f"{layer}attn.in_proj_weight"] = torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"])
    expected[f"{layer}attn.out_proj.weight"] = own["self_attn.out_proj.weight"]
    expected |= {f"{layer}mlp.c_fc.weight": own["mlp.fc1.weight"], f"{layer}mlp.c_proj.weight": own["mlp.fc2.weight"]}
    folders.assert_same_bits(made, expected)


def test_a_whole_model_in_one_file_lacks_a_component_of_the_adapter(tmp_path):
    tensors = kohya(factors(UNET)) | kohya(factors(TEXT), "lora_te3_")
    file = saved(tmp_path / "x.safetensors", tensors)
    base, _ = single(tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match=r"adapts text_encoder_3 \(6 modules\), base has unet, text_encoder, text_enc"):
        plan(TA, base, {"x": file}, tmp_path / "none")
    bare, _ = single(tmp_path / "bare.safetensors", text=False)  # the encoders are elsewhere
    assert any("left out" in note for note in plan(TA, bare, {"x": file}, tmp_path / "none").notes)
    with pytest.raises(
        ValueError, match=r"adapts text_encoder_3 .*, base has text_encoder, text_encoder_2, unet alone"
    ):
        plan(TA, pipeline(tmp_path / "pipeline"), {"x": file}, tmp_path / "none")


def test_names_of_a_unet_that_counts_its_blocks_otherwise_are_not_taken_for_each_other(tmp_path):
    assert flat_name(LDM[Q], of_blocks=True) == flat(Q) != flat_name(LDM[Q], of_blocks=False)
    base = unet(tmp_path / "base")
    (base / "config.json").write_text('{"layers_per_block": 3}')
    file = saved(tmp_path / "x.safetensors", kohya(factors({Q: UNET[Q]}), names=LDM))
    with pytest.raises(
        ValueError, match=r"adapts 'lora_unet_input_blocks_2_1_.*', but base has no parameter of this name"
    ):
        plan(TA, base, {"x": file}, tmp_path / "none")


A, B = torch.ones(2, 6), torch.ones(6, 2)
K = f"lora_unet_{flat(Q)}"
ERRORS = {
    "half of a LoHa": (
        {f"{K}.hada_w1_a": A, f"{K}.hada_w2_a": A, f"{K}.alpha": A[0, 0]},
        rf"'{K}.hada_w1_a' has no other factor in x.safetensors: save",
    ),
    "half of a LoKr": ({f"{K}.lokr_w1": A}, rf"'{K}.lokr_w1' has no other factor in x.safetensors: save the adapter"),
    "a LoKr of another base": ({f"{K}.lokr_w1": A, f"{K}.lokr_w2": B}, "do not make a change of parameter"),
    "a magnitude alone": (
        {f"{K}.lora_down.weight": A, f"{K}.lora_up.weight": B, "lora_unet_q.dora_scale": A},
        "'lora_unet_q.dora_scale' has no other factor in x.safetensors: save the adapter",
    ),
    "a core alone": ({f"{K}.lora_down.weight": A, f"{K}.lora_mid.weight": A}, "lora_down.weight' has no other factor"),
    "a bias": ({f"unet.{Q}.lora_A.weight": A, f"unet.{Q}.lora_B.bias": A[0]}, "holds '.*lora_B.bias', which is not of"),
    "DoRA of PEFT": (
        {f"unet.{Q}.lora_A.weight": A, f"unet.{Q}.lora_magnitude_vector": A[0]},
        "magnitude_vector', which",
    ),
    "a norm": ({f"unet.{Q}.lora_A.weight": A, "unet.norm.weight": A[0]}, "holds 'unet.norm.weight', which is not of a"),
    "PEFT's file": (
        {f"base_model.model.{Q}.lora_A.weight": A},
        "give the folder of an adapter of PEFT, in which adapt",
    ),
    "no component": (
        {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B},
        f"nothing says at which scale '{Q}' is changed",
    ),
    "one half": ({f"{K}.lora_down.weight": A}, rf"'{K}.lora_down.weight' has no other factor in x.safetensors: save"),
    "two names": ({f"{K}.lora_down.weight": A, f"{K}.lora.down.weight": A}, "mean the same: save the adapter again"),
    "a vector": ({f"{K}.lora_down.weight": A[0]}, r"of shape \(6,\) is not a factor of a matrix"),
    "float8": ({f"{K}.lora_down.weight": A.to(torch.float8_e4m3fn)}, "is stored as F8_E4M3, which cannot be merged"),
    "another base": (kohya(factors({Q: (6, 5)})), rf"B A of '{Q}' has shape \(6, 5\), parameter '{Q}.weight' of base"),
    "ranks": ({f"{K}.lora_down.weight": A, f"{K}.lora_up.weight": torch.ones(6, 3)}, "do not fit"),
    "unknown": (
        kohya(factors({Q: (6, 6), "a.b": (6, 6), "a.c": (6, 6)})),
        "adapts 'lora_unet_a_b' and 1 more, but base",
    ),
    "alpha 0": (kohya(factors({Q: (6, 6)}), alpha=0), r"alpha' is 0.0, must be a number other than 0"),
    "alpha": (kohya(factors({Q: (6, 6)}), alpha="nan"), r"alpha' is nan, must be a number other than 0"),
    "twice": (
        kohya(factors({Q: (6, 6)})) | named(factors({Q: (6, 6)}), "unet."),
        rf"'lora_unet_\w+' and 'unet.{Q}' both change '{Q}.weight'",
    ),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_is_not_a_plain_lora_of_base_is_an_error_by_its_name(kind, tmp_path):
    tensors, told = ERRORS[kind]
    file = saved(tmp_path / "x.safetensors", {name: leaf.clone() for name, leaf in tensors.items()})
    with pytest.raises(ValueError, match=told) as caught:
        plan(TA, unet(tmp_path / "base"), {"x": file}, tmp_path / "none")
    assert str(caught.value).startswith("expert 'x': ")


@pytest.mark.parametrize(
    ("header_", "alpha", "told"),
    [
        ("{", None, "lora_adapter_metadata in its header is JSONDecodeError.*, must be a JSON object"),
        ("[1]", None, r"lora_adapter_metadata in its header is \[1\], must be a JSON object"),
        ({"unet.r": 2, "unet.lora_alpha": 2}, 2, "two scales: remove one of them"),
        ({"unet.r": 3, "unet.lora_alpha": 2}, None, f"'{Q}' has rank 2, its lora_adapter_metadata says 3"),
        ({"text_encoder.r": 2}, None, "its lora_adapter_metadata for unet has no number r"),
        (
            {"unet.r": 2, "unet.lora_alpha": 2, "unet.use_dora": True},
            None,
            "lora_adapter_metadata for unet sets use_dora to True",
        ),
        (
            {"unet.r": 2, "unet.lora_alpha": 2, "unet.init_lora_weights": "pissa"},
            None,
            "sets init_lora_weights to 'pissa'",
        ),
    ],
)
def test_settings_in_the_header_that_cannot_be_followed(header_, alpha, told, tmp_path):
    text = header_ if isinstance(header_, str) else json.dumps(header_)
    tensors = named(factors({Q: (6, 6)}), "unet.", alpha=alpha)
    file = saved(tmp_path / "x.safetensors", tensors, lora_adapter_metadata=text)
    with pytest.raises(ValueError, match=told):
        plan(TA, unet(tmp_path / "base"), {"x": file}, tmp_path / "none")


def test_a_language_model_whose_names_begin_with_transformer_is_not_a_component(tmp_path):
    base, found = unet(tmp_path / "base"), factors({Q: UNET[Q]})
    file = saved(tmp_path / "x.safetensors", named(found, "transformer."))
    plan(TA, base, {"x": file}, tmp_path / "none")
    (base / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=f"nothing says at which scale 'transformer.{Q}' is changed: give the folder"):
        plan(TA, base, {"x": file}, tmp_path / "none")
    plan(TA, base, {"x": saved(file, named(found, "transformer.", alpha=3))}, tmp_path / "none")


def test_a_folder_of_several_files_is_an_error_that_asks_for_one(tmp_path):
    for name in ("one", "two"):
        saved(tmp_path / "mine" / f"{name}.safetensors", kohya(factors({Q: UNET[Q]})))
    with pytest.raises(
        ValueError, match=r"mine holds 2 files of weights \(one.* the first\) .*, or give one of the files if each is"
    ):
        plan(TA, unet(tmp_path / "base"), {"x": tmp_path / "mine"}, tmp_path / "none")


def test_a_folder_of_one_file_with_a_name_of_its_own(folders, tmp_path):
    found = factors({Q: UNET[Q]})
    saved(tmp_path / "mine/style.safetensors", kohya(found, alpha=4))
    made = merged(unet(tmp_path / "base"), tmp_path / "mine", tmp_path / "out")
    folders.assert_same_bits(made, changed(weights(UNET), found, 2.0))


def test_rank_stabilised_scales_of_the_header(folders, tmp_path):
    found = factors({Q: UNET[Q]}, rank=4)
    settings = {"unet.r": 4, "unet.lora_alpha": 3, "unet.use_rslora": True}
    file = saved(tmp_path / "x.safetensors", named(found, "unet."), **header(**settings))
    made = merged(unet(tmp_path / "base"), file, tmp_path / "out")
    folders.assert_same_bits(made, changed(weights(UNET), found, 1.5))


def test_names_that_mean_several_parameters_or_components_are_errors(tmp_path):
    base = unet(tmp_path / "base", {"a.b_c": (6, 6), "a.b.c": (6, 6)})
    file = saved(tmp_path / "x.safetensors", kohya(factors({"a.b.c": (6, 6)})))
    with pytest.raises(ValueError, match=r"'lora_unet_a_b_c' means 'a.b.c.weight', 'a.b_c.weight' of base"):
        plan(TA, base, {"x": file}, tmp_path / "none")
    tensors = kohya(factors(TEXT), "lora_te1_") | kohya(factors(TEXT, seed=7), "lora_te2_")
    file = saved(tmp_path / "y.safetensors", tensors)
    encoder = saved(tmp_path / "some/model.safetensors", weights(TEXT)).parent
    with pytest.raises(ValueError, match="adapts text_encoder, text_encoder_2, and each of them fits base"):
        plan(TA, encoder, {"x": file}, tmp_path / "none")
    encoder.rename(tmp_path / "text_encoder_2")
    (note,) = (n for n in plan(TA, tmp_path / "text_encoder_2", {"x": file}, tmp_path / "n").notes if "left out" in n)
    assert "also adapts text_encoder (6 modules)" in note
    other = saved(tmp_path / "other/model.safetensors", {"w.weight": torch.zeros(3, 3)}).parent
    with pytest.raises(ValueError, match="adapts text_encoder, text_encoder_2, and none of them fits base"):
        plan(TA, other, {"x": file}, tmp_path / "none")


def test_thirds_of_another_shape_are_errors(tmp_path):
    base, _ = single(tmp_path / "base.safetensors")
    q, *_ = TEXT
    file = saved(tmp_path / "x.safetensors", kohya(factors({q: (5, 4)}), "lora_te2_"))
    with pytest.raises(ValueError, match=r"B \(5, 2\) and A \(2, 4\) .* have no product of shape \(4, 4\), as '.*in_p"):
        plan(TA, base, {"x": file}, tmp_path / "none")


def test_only_experts_are_adapters(tmp_path):
    file = saved(tmp_path / "mine/pytorch_lora_weights.safetensors", kohya(factors({Q: UNET[Q]})))
    with pytest.raises(
        ValueError, match=r"base: .* holds factors of an adapter \(.*\), not weights: give it as an exp"
    ):
        plan(TA, file, {"x": file}, tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"base: .*mine holds an adapter, not a whole model: only experts can be adapt"
    ):
        plan(TA, file.parent, {"x": file}, tmp_path / "none")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"expert 'x': .* cannot be read .*: copy or download it again"):
        plan(TA, unet(tmp_path / "base"), {"x": file.parent}, tmp_path / "none")


MODEL = {
    "model.embed_tokens": (9, 6),
    "model.layers.0.self_attn.q_proj": (6, 6),
    "model.layers.0.mlp.up_proj": (10, 6),
}


@pytest.fixture
def of_mlx(tmp_path):
    """Writes an adapter of mlx-lm: A and B transposed, the embeddings' as they are."""

    def write(found, name="mlx", more=None, **settings):
        tensors = dict(more or {})
        for path, (a, b) in found.items():
            left, right = (b, a) if "embed" in path else (a.T, b.T)
            tensors |= {f"{path}.lora_a": left.contiguous(), f"{path}.lora_b": right.contiguous()}
        folder = saved(tmp_path / name / "adapters.safetensors", tensors).parent
        own = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 2, "scale": 1.5, "dropout": 0.0}}
        config = {**own, **settings}
        (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return write


@pytest.fixture
def model(folders, tmp_path):
    return folders.save(tmp_path / "model", weights(MODEL))


def test_adapters_of_mlx_are_those_of_peft(of_mlx, model, folders, tmp_path):
    found = factors(MODEL)
    expected = changed(weights(MODEL), found, 1.5)
    folders.assert_same_bits(merged(model, of_mlx(found), tmp_path / "out"), expected)
    layers = {path: pair for path, pair in found.items() if "embed" not in path}
    generator = torch.Generator().manual_seed(1)
    layers = {path: tuple(torch.randn(h.shape, generator=generator) for h in pair) for path, pair in layers.items()}
    made = merged(model, of_mlx(layers, "fractions"), tmp_path / "fractions-out")
    folders.assert_same_bits(made, merged(model, of_peft(tmp_path / "peft", layers, 3), tmp_path / "peft-out"))
    both = open_adapter("x", tmp_path / "mlx/adapters.safetensors", open_folder("base", model))
    assert {file.name for file in both.stores} == {"adapters.safetensors", "adapter_config.json"}


def test_dora_of_mlx_is_that_of_peft(of_mlx, model, folders, tmp_path):
    found = {path: pair for path, pair in factors(MODEL).items() if "embed" not in path}
    sizes = {path: numbers(MODEL[path][0], seed=9).abs() + 1 for path in found}
    more = {f"{path}.m": size for path, size in sizes.items()}
    made = merged(model, of_mlx(found, more=more, fine_tune_type="dora"), tmp_path / "out")
    plain = changed(weights(MODEL), found, 1.5)
    for path, size in sizes.items():
        weight = plain[f"{path}.weight"]
        torch.testing.assert_close(made[f"{path}.weight"], size[:, None] * weight / weight.norm(dim=1, keepdim=True))
    peft = of_peft(tmp_path / "peft", found, 3, use_dora=True)
    tensors = load_file(peft / "adapter_model.safetensors")
    tensors |= {f"base_model.model.{path}.lora_magnitude_vector": size for path, size in sizes.items()}
    saved(peft / "adapter_model.safetensors", tensors)
    folders.assert_same_bits(made, merged(model, peft, tmp_path / "own"))
    for i, (settings, wanted) in enumerate(
        (
            (
                {"fine_tune_type": "lora"},
                "holds 'model.layers.0.mlp.up_proj.m' and 1 more, which is not of a plain L",
            ),
            (
                {"fine_tune_type": None},
                "holds 'model.layers.0.mlp.up_proj.m' and 1 more, which is not of a plain LoR",
            ),
        )
    ):
        with pytest.raises(ValueError, match=wanted):
            plan(TA, model, {"x": of_mlx(found, f"wrong{i}", more=more, **settings)}, tmp_path / "none")
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn.q_proj' has no '.*q_proj.m', its magnitude"):
        plan(TA, model, {"x": of_mlx(found, "bare", fine_tune_type="dora")}, tmp_path / "none")


def test_scales_of_older_versions_of_mlx_lm(of_mlx, model, folders, tmp_path):
    found, old = factors(MODEL), {"rank": 2, "alpha": 16.0, "scale": 1.5, "dropout": 0.0}
    made = merged(model, of_mlx(found, lora_parameters=old), tmp_path / "out")  # alpha was left in the defaults
    folders.assert_same_bits(made, changed(weights(MODEL), found, 1.5))
    older = of_mlx(found, "older", lora_parameters=old, fine_tune_type=None)
    with pytest.raises(
        ValueError, match=r"have alpha 16.0 and scale 1.5, and mlx-lm multiplied scale by alpha / rank until"
    ):
        plan(TA, model, {"x": older}, tmp_path / "none")
    same = of_mlx(found, "same", lora_parameters={**old, "alpha": 2}, fine_tune_type=None)
    folders.assert_same_bits(merged(model, same, tmp_path / "same-out"), made)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"fine_tune_type": "full", "lora_parameters": None},
            "fine_tune_type to 'full', which is not read here: write",
        ),
        ({"lora_parameters": None}, r"does not say rank and scale of this adapter of MLX \(KeyError"),
        ({"lora_parameters": 3}, "does not say rank and scale of this adapter of MLX"),
        ({"lora_parameters": {"rank": 2, "alpha": 16}}, "scale in lora_parameters of .* is None, must be a number"),
        ({"lora_parameters": {"rank": True, "scale": 1}}, "rank in lora_parameters of .* is True, must be a number"),
        (
            {"lora_parameters": {"rank": 4, "scale": 1}},
            "has rank 2, its adapter_config.json says 4: of different adapters",
        ),
    ],
)
def test_settings_of_mlx_that_cannot_be_followed(settings, told, of_mlx, model, tmp_path):
    with pytest.raises(ValueError, match=told):
        plan(TA, model, {"x": of_mlx(factors(MODEL), **settings)}, tmp_path / "none")


def test_other_errors_of_adapters_of_mlx(of_mlx, model, tmp_path):
    found = factors(MODEL)
    folder = of_mlx(found)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match="does not say rank and scale of this adapter of MLX"):
        plan(TA, model, {"x": folder}, tmp_path / "none")
    experts = {
        "model.layers.0.mlp.switch.lora_a": torch.ones(3, 2, 6),
        "model.layers.0.mlp.switch.lora_b": torch.ones(3, 6, 2),
    }
    with pytest.raises(
        ValueError, match="has 3 dimensions, as the experts of a mixture, which is not read here: write"
    ):
        plan(TA, model, {"x": of_mlx(found, "mixture", more=experts)}, tmp_path / "none")
    unknown = of_mlx(factors({"model.layers.9.q": (6, 6)}), "unknown")
    with pytest.raises(ValueError, match=r"it adapts 'model.layers.9.q', but base has no parameter"):
        plan(TA, model, {"x": unknown}, tmp_path / "none")
    with pytest.raises(
        ValueError, match=r"holds 'model.norm.weight', which is not of a plain LoRA: write the whole model"
    ):
        plan(TA, model, {"x": of_mlx(found, "norm", more={"model.norm.weight": torch.ones(6)})}, tmp_path / "none")


def test_the_name_of_mlx_bases_is_noted(of_mlx, model, tmp_path):
    notes = plan(TA, model, {"x": of_mlx(factors(MODEL), model="mlx-community/Other-4bit")}, tmp_path / "none").notes
    assert any(re.search("names 'mlx-community/Other-4bit' as its base", note) for note in notes)
