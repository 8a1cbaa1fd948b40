"""LoRA files of other tools into one file: the change of the merged file is that of the files, in dense arithmetic."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from smat_fn import random
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_adapters
from smat_fn.scripts.merge.subcommands.adapters import by_module, in_space

from .test_lora_files import (
    CONV,
    LDM,
    TEXT,
    UNET,
    WAYS,
    Q,
    changed,
    factors,
    flat,
    header,
    kohya,
    merged,
    named,
    numbers,
    of_peft,
    pipeline,
    saved,
    unet,
    weights,
)

A, B = numbers(2, 6, seed=1), numbers(6, 2, seed=2)
SHARES = {"x": 1.0, "y": 0.5}
FILE = "pytorch_lora_weights.safetensors"


def combined(places, out, method="cat", rank=None, shares=SHARES, **options):
    how = {"weights": shares, "key": random.key(0), "rank": rank, "method": method}
    return merge_adapters(places, out, lambda found: by_module(found, **how), **options)


def both(way, tmp_path, second=UNET):
    """Two files of a UNet at scale 3 / 2, and base with both changes."""
    one, two = factors(UNET), factors(second, seed=500)
    places = {}
    for name, found in (("x", one), ("y", two)):
        tensors, told = WAYS[way](found)
        places[name] = saved(tmp_path / f"{name}.safetensors", tensors, **told)
    return places, changed(changed(weights(UNET), one, 1.5), two, 0.75)


@pytest.mark.parametrize("way", WAYS)
def test_a_concatenation_changes_base_as_both_files(way, folders, tmp_path):
    second = {path: shape for path, shape in UNET.items() if path != CONV}  # a module of one file alone
    places, expected = both(way, tmp_path, second)
    made = combined(places, tmp_path / "out")
    assert (made.rank, len(made.modules), len(made.partial)) == (4, len(UNET), 1)
    stored = load_file(tmp_path / "out" / FILE)
    assert {name for place in places.values() for name in load_file(place)} == {*stored}
    alphas = [float(leaf) for name, leaf in stored.items() if name.endswith(".alpha")]
    assert alphas == [4.0] * (0 if way in ("diffusers", "save_lora_adapter", "patterns") else len(UNET))
    for given in tmp_path / "out", tmp_path / "out" / FILE:  # the folder and the file are experts
        again = merged(unet(tmp_path / "base"), given, tmp_path / f"merged-{given.name}")
        folders.assert_same_bits(again, expected)
    assert combined({"x": tmp_path / "out"}, tmp_path / "again").rank == 4


def test_settings_in_the_header_are_those_of_the_merged_adapter(tmp_path):
    places, _ = both("patterns", tmp_path)
    combined(places, tmp_path / "out")
    with safe_open(tmp_path / "out" / FILE, "pt") as file:
        settings = json.loads(file.metadata()["lora_adapter_metadata"])
    assert settings == {
        **{"unet.r": 4, "unet.lora_alpha": 4, "unet.rank_pattern": {}, "unet.alpha_pattern": {}},
        **{"unet.use_rslora": False, "unet.target_modules": sorted(UNET)},
    }


def test_settings_stand_in_for_alphas_where_one_file_has_them(folders, tmp_path):
    one, two = (factors({Q: UNET[Q]}, seed=seed) for seed in (1, 2))
    told = header(**{"unet.r": 2, "unet.lora_alpha": 3})
    x = saved(tmp_path / "x.safetensors", named(one, "unet."), **told)
    y = saved(tmp_path / "y.safetensors", named(two, "unet.", alpha=4))
    combined({"x": x, "y": y}, tmp_path / "out")
    assert not any(name.endswith("alpha") for name in load_file(tmp_path / "out" / FILE))
    made = merged(unet(tmp_path / "base"), tmp_path / "out", tmp_path / "merged")
    folders.assert_same_bits(made, changed(changed(weights(UNET), one, 1.5), two, 1.0))


def test_one_alpha_is_an_alpha_of_every_module(folders, tmp_path):
    found = factors({Q: UNET[Q], CONV: UNET[CONV]})
    given = kohya({Q: found[Q]}, alpha=1) | kohya({CONV: found[CONV]})
    combined({"x": saved(tmp_path / "x.safetensors", given)}, tmp_path / "out", "cat", shares={})
    stored = load_file(tmp_path / "out" / FILE)
    assert [stored[f"lora_unet_{flat(path)}.alpha"].item() for path in (Q, CONV)] == [2.0, 2.0]
    expected = changed(changed(weights(UNET), {Q: found[Q]}, 0.5), {CONV: found[CONV]})
    folders.assert_same_bits(merged(unet(tmp_path / "base"), tmp_path / "out", tmp_path / "merged"), expected)


def test_text_encoders_and_endings_of_one_tool_are_merged(folders, tmp_path):
    of_unet, text = factors({Q: UNET[Q], CONV: UNET[CONV]}), factors(TEXT)
    tensors = named({Q: of_unet[Q]}, "unet.", "lora.down.weight", "lora.up.weight")  # as diffusers mixes them
    tensors |= named({CONV: of_unet[CONV]}, "unet.")
    tensors |= named(text, "text_encoder.", "lora_linear_layer.down.weight", "lora_linear_layer.up.weight")
    combined({"x": saved(tmp_path / "x.safetensors", tensors)}, tmp_path / "out", shares={"x": 2.0})
    base = pipeline(tmp_path / "base", seconds=False)
    made = merged(base, tmp_path / "out", tmp_path / "merged")
    folders.assert_same_bits(
        {path: leaf for path, leaf in made.items() if path.startswith("text")},
        {f"text_encoder/{path}": leaf for path, leaf in changed(weights(TEXT, seed=40), text, 2.0).items()},
    )


@pytest.mark.parametrize("start", ["", "transformer.", "diffusion_model."])
def test_names_of_transformers_are_those_of_one_tool(start, tmp_path):
    names = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_out", "x_embedder"]
    tensors = named({name: (A, B) for name in names}, start, alpha=1)
    tensors |= named({names[0]: (A, B)}, "transformer_2.", alpha=1) if start == "transformer." else {}
    tensors |= named({"text_model.encoder.layers.0.mlp.fc1": (A, B)}, "text_encoder_2.", alpha=1)
    copies = {name: leaf.clone() for name, leaf in tensors.items()}
    made = combined({"x": saved(tmp_path / "x.safetensors", copies)}, tmp_path / "out", shares={})
    assert len(made.modules) == len(tensors) // 3


def test_halves_in_16_bits_are_of_one_size(tmp_path):
    one, two = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.randn(4, 64) * 1e-4
    tensors = {"lora_unet_q.lora_down.weight": two.half(), "lora_unet_q.lora_up.weight": one.half()}
    combined({"x": saved(tmp_path / "x.safetensors", tensors)}, tmp_path / "out", "svd", shares={})
    a, b = (load_file(tmp_path / "out" / FILE)[f"lora_unet_q.lora_{way}.weight"] for way in ("down", "up"))
    assert 0.5 <= a.abs().max() / b.abs().max() <= 2
    whole = one.half().float() @ two.half().float()
    assert (b.float() @ a.float() - whole).norm() < 1e-3 * whole.norm()


def test_ranks_are_those_asked_for_and_convolutions_keep_their_kernels(tmp_path):
    places, expected = both("kohya", tmp_path)
    assert combined(places, tmp_path / "out", "svd", 3).rank == 3
    stored = load_file(tmp_path / "out" / FILE)
    assert stored[f"lora_unet_{flat(CONV)}.lora_down.weight"].shape == (3, 3, 3, 3)
    assert stored[f"lora_unet_{flat(CONV)}.lora_up.weight"].shape == (4, 3, 1, 1)
    a, b = (stored[f"lora_unet_{flat(Q)}.lora_{way}.weight"] for way in ("down", "up"))
    delta = expected[f"{Q}.weight"] - weights(UNET)[f"{Q}.weight"]
    left, sizes, right = torch.linalg.svd(delta)
    torch.testing.assert_close(b @ a, left[:, :3] * sizes[:3] @ right[:3], rtol=0, atol=2e-4)


def test_knots_of_files_is_that_of_their_factors(tmp_path):
    places, expected = both("kohya", tmp_path)
    key = random.key(0)
    merge_adapters(
        places,
        tmp_path / "out",
        lambda found: in_space("knots", TaskArithmetic(), SHARES, found, coef=1.0, rank=None, key=key),
    )
    made = merged(unet(tmp_path / "base"), tmp_path / "out", tmp_path / "merged")
    for path, leaf in made.items():
        torch.testing.assert_close(leaf, expected[path], rtol=0, atol=2e-3)


def test_headers_keep_the_kind_of_the_model_alone(tmp_path):
    found = {"ss_base_model_version": "sdxl_base_v1-0", "modelspec.architecture": "sdxl/lora"}
    own = {"ss_tag_frequency": "{}", "sshs_model_hash": "0" * 64}
    one = saved(tmp_path / "x.safetensors", kohya(factors(UNET)), **found, **own, ss_v2="False")
    two = saved(tmp_path / "y.safetensors", kohya(factors(UNET)), **found, ss_v2="True")
    combined({"x": one, "y": two}, tmp_path / "out")
    with safe_open(tmp_path / "out" / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt", **found}
    other = saved(tmp_path / "z.safetensors", kohya(factors(UNET)), ss_base_model_version="sdxl_1.0")
    made = combined({"x": one, "z": other}, tmp_path / "other")
    told = "different ss_base_model_version ('sdxl_base_v1-0' in adapter 'x', 'sdxl_1.0' in adapter 'z'): left out"
    assert told in made.notes[0]
    with safe_open(tmp_path / "other" / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_dtypes_are_the_widest_and_values_stay_in_their_range(tmp_path):
    found = factors({Q: (6, 6)})
    half = {name: leaf.half() for name, leaf in kohya(found, alpha=2).items()}
    places = {"x": saved(tmp_path / "x.safetensors", half), "y": saved(tmp_path / "y.safetensors", dict(half))}
    combined(places, tmp_path / "out")
    kinds = {name.rpartition(".")[2]: leaf.dtype for name, leaf in load_file(tmp_path / "out" / FILE).items()}
    assert kinds == {"weight": torch.float16, "alpha": torch.float32}
    large = {name: leaf * (1 if name.endswith("alpha") else 2e4) for name, leaf in half.items()}
    with pytest.raises(ValueError, match=r"exceeds the range of torch\.float16, the widest dtype of the adapters"):
        combined({"x": saved(tmp_path / "z.safetensors", large)}, tmp_path / "none", shares={"x": 4.0})
    assert not (tmp_path / "none").exists()


K = f"lora_unet_{flat(Q)}"
REFUSED = {
    "other tools": (
        named(factors(UNET), "unet."),
        r"different tools \(lora_unet\* in adapter 'x', unet\* in",
    ),
    "another prefix": (
        kohya(factors(UNET), "lora_transformer_"),
        r"\(lora_unet\* in adapter 'x', lora_tr.*\* in",
    ),
    "a bias": (
        kohya(factors(UNET)) | {f"{K}.diff_b": A[0]},
        "not of a plain LoRA: remove it, or merge the models",
    ),
    "two names": (kohya(factors(UNET), names=LDM), "are two names of one module: merge whole models instead"),
    "LoHa": (
        {f"{K}.hada_{part}": (A if part[-1] == "b" else B).clone() for part in ("w1_a", "w1_b", "w2_a", "w2_b")},
        "'.*to_q' of y.safetensors is not a plain LoRA: merge whole models instead, merge.py MERGER",
    ),
    "DoRA": (
        {f"{K}.lora_down.weight": A, f"{K}.lora_up.weight": B, f"{K}.dora_scale": torch.ones(6, 1)},
        "'.*to_q' of y.safetensors is not a plain LoRA: merge whole models instead, merge.py MERGER",
    ),
    "factors of nothing": (
        {f"{K}.lora_down.weight": A, f"{K}.lora_up.weight": A.clone()},
        "are not factors of a weight: save it again",
    ),
    "another model": (kohya(factors({Q: (6, 7)})), r"is of shape \(6, 6\) in x, \(6, 7\) in y: they are of different"),
    "NaN": ({f"{K}.lora_down.weight": A / 0, f"{K}.lora_up.weight": B}, "hold values that are NaN or infinite"),
    "no scale": (named(factors(UNET), ""), "nothing says at which scale"),
    "of MLX": ({"model.q.lora_a": A, "model.q.lora_b": B}, "is an adapter of mlx-lm: merge whole models instead"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(kind, tmp_path):
    tensors, match = REFUSED[kind]
    places = {"x": saved(tmp_path / "x.safetensors", kohya(factors(UNET))), "y": tmp_path / "y.safetensors"}
    saved(places["y"], tensors)
    with pytest.raises(ValueError, match=match):
        combined(places, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_of_peft_are_not_merged_with_files(tmp_path):
    found = factors({Q: (6, 6)})
    told = header(**{"unet.r": 2, "unet.lora_alpha": 3})
    file = saved(tmp_path / "x.safetensors", named(found, "unet."), **told)
    folder = of_peft(tmp_path / "peft", found, 3)
    with pytest.raises(ValueError, match="y are folders of PEFT, x files of other tools: merge whole models"):
        combined({"x": file, "y": folder}, tmp_path / "out")
    with pytest.raises(ValueError, match="base is 'b', but LoRA files name none"):
        combined({"x": file}, tmp_path / "out", base="b")
