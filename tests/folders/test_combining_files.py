"""LoRA files of other tools into one file: the change of the merged file is that of the files, in dense arithmetic."""

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
    saved,
    unet,
    weights,
)

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


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("save_lora_adapter", "patterns")])
def test_a_concatenation_changes_base_as_both_files(way, folders, tmp_path):
    second = {path: shape for path, shape in UNET.items() if path != CONV}  # a module of one file alone
    places, expected = both(way, tmp_path, second)
    made = combined(places, tmp_path / "out")
    assert (made.rank, len(made.modules), len(made.partial)) == (4, len(UNET), 1)
    stored = load_file(tmp_path / "out" / FILE)
    assert {name for place in places.values() for name in load_file(place)} == {*stored}
    alphas = {name: leaf for name, leaf in stored.items() if name.endswith(".alpha")}
    assert {float(leaf) for leaf in alphas.values()} == ({2.0, 4.0} if way != "diffusers" else set())
    for given in tmp_path / "out", tmp_path / "out" / FILE:  # the folder and the file are experts
        again = merged(unet(tmp_path / "base"), given, tmp_path / f"merged-{given.name}")
        folders.assert_same_bits(again, expected)


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
    other = saved(tmp_path / "z.safetensors", kohya(factors(UNET)), ss_base_model_version="sd_v1")
    told = r"different ss_base_model_version \('sdxl_base_v1-0' in adapter 'x', 'sd_v1' in adapter 'z'\)"
    with pytest.raises(ValueError, match=told):
        combined({"x": one, "z": other}, tmp_path / "none")


def test_dtypes_are_the_widest_and_values_stay_in_their_range(tmp_path):
    found = factors({Q: (6, 6)})
    half = {name: leaf.half() for name, leaf in kohya(found, alpha=2).items()}
    places = {"x": saved(tmp_path / "x.safetensors", half), "y": saved(tmp_path / "y.safetensors", dict(half))}
    combined(places, tmp_path / "out")
    assert {leaf.dtype for leaf in load_file(tmp_path / "out" / FILE).values()} == {torch.float16}
    large = {name: leaf * (1 if name.endswith("alpha") else 2e4) for name, leaf in half.items()}
    with pytest.raises(ValueError, match=r"exceeds the range of torch\.float16, the widest dtype of the adapters"):
        combined({"x": saved(tmp_path / "z.safetensors", large)}, tmp_path / "none", shares={"x": 4.0})
    assert not (tmp_path / "none").exists()


A, B = numbers(2, 6, seed=1), numbers(6, 2, seed=2)
K = f"lora_unet_{flat(Q)}"
REFUSED = {
    "other tools": (
        named(factors(UNET), "unet."),
        r"different tools \(lora_\*\.lora_down\.weight in adapter 'x', \*\.l",
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
