"""Products of adapters: LoHa, LoKr and LoRA with a core in closed form, and in files of LyCORIS and kohya's scripts."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from smat_fn.config import TaskArithmetic
from smat_fn.folders import open_folder, plan
from smat_fn.folders.inputs.adapters import changes, products
from smat_fn.folders.inputs.adapters.experts import open_adapter

from .test_lora_files import CONV, UNET, Q, flat, merged, numbers, of_peft, saved, unet, weights

OUT, IN, R, K = 6, 4, 2, 3


def tensors(*sizes, seed=0):
    return [numbers(*size, seed=seed + i) for i, size in enumerate(sizes)]


def with_core(core, a, b):
    return torch.einsum("ijkl,ip,jr->prkl", core, a, b).contiguous()


def made():
    """Tensors of each kind, with the change that they make in dense arithmetic."""
    a, b, c, d = tensors((OUT, R), (R, IN), (OUT, R), (R, IN))
    yield "LoHa", {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": c, "hada_w2_b": d}, (a @ b) * (c @ d)
    core, other = tensors((R, R, K, K), (R, R, K, K), seed=9)
    parts = {"hada_w1_a": a.T, "hada_w1_b": b, "hada_t1": core, "hada_w2_a": c.T, "hada_w2_b": d, "hada_t2": other}
    yield "LoHa with cores", parts, with_core(core, a.T, b) * with_core(other, c.T, d)
    small, large = tensors((3, 2), (2, 2), seed=20)
    yield "LoKr", {"lokr_w1": small, "lokr_w2": large}, torch.kron(small, large)
    left, right, kernel = tensors((2, 1), (1, 2), (2, 2, K, K), seed=30)
    parts = {"lokr_w1_a": small, "lokr_w1_b": large, "lokr_w2_a": left, "lokr_w2_b": right}
    yield "LoKr of factors", parts, torch.kron(small @ large, left @ right)
    yield "LoKr of kernels", {"lokr_w1": small, "lokr_w2": kernel}, torch.kron(small[:, :, None, None], kernel)
    parts = {"lokr_w1": small, "lokr_t2": core, "lokr_w2_a": large, "lokr_w2_b": large}
    yield "LoKr with a core", parts, torch.kron(small[:, :, None, None], with_core(core, large, large))
    down, up = tensors((R, IN, 1, 1), (OUT, R, 1, 1), seed=40)
    whole = torch.einsum("or,rskl,si->oikl", up[:, :, 0, 0], core, down[:, :, 0, 0])
    yield "LoRA with a core", {"A": down, "mid": core, "B": up}, whole


@pytest.mark.parametrize(("kind", "parts", "whole"), list(made()), ids=lambda own: own if isinstance(own, str) else "")
def test_rows_are_those_of_the_whole_product(kind, parts, whole):
    assert products.is_complete(parts)
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    assert products.matrix(shapes) == (len(whole), whole[0].numel())
    rows = products.rows_of(parts)
    for start, stop in ((0, len(whole)), (1, 2), (3, 5), (len(whole) - 1, len(whole) + 7)):
        assert rows(start, stop).equal(whole.flatten(1)[start:stop])
    for part in parts:
        rest = [other for other in parts if other != part]
        assert products.is_complete(rest) == (part in (products.CORE, "hada_t1", "hada_t2", "lokr_t2"))


def test_a_convolution_with_a_core_is_three_convolutions():
    ((*_, parts, whole),) = [own for own in made() if own[0] == "LoRA with a core"]
    x = numbers(2, IN, 5, 5, seed=3)
    inner = functional.conv2d(functional.conv2d(x, parts["A"]), parts["mid"], padding=1)
    assert functional.conv2d(x, whole, padding=1).equal(functional.conv2d(inner, parts["B"]))


def test_shapes_that_do_not_fit_make_no_matrix():
    assert products.matrix({"A": (2, 6), "B": (6, 3)}) is None
    assert products.matrix({"hada_w1_a": (6, 2), "hada_w1_b": (2, 4), "hada_w2_a": (6, 2), "hada_w2_b": (3, 4)}) is None
    assert not products.is_complete(["lokr_w1", "lokr_w2", "lokr_w2_a"])
    assert not products.is_complete(["A", "B", "hada_w1_a"])


@pytest.mark.parametrize(("kind", "parts", "whole"), list(made()), ids=lambda own: own if isinstance(own, str) else "")
@pytest.mark.parametrize("alpha", [None, 1.0])
@pytest.mark.parametrize("start", ["lora_unet_", "lycoris_"])
def test_files_of_lycoris_and_kohya_change_the_weights_of_base(kind, parts, whole, alpha, start, tmp_path):
    path, shape = (Q, (6, 4)) if whole.ndim == 2 else (CONV, (6, 4, K, K))
    name, ends = f"{start}{flat(path)}", {part: end for end, part in products.ENDS.items()}
    ends |= {"A": ".lora_down.weight", "B": ".lora_up.weight"}
    stored = {f"{name}{ends[part]}": tensor.clone().contiguous() for part, tensor in parts.items()}
    stored |= {} if alpha is None else {f"{name}.alpha": torch.tensor(alpha)}
    base = unet(tmp_path / "base", {**UNET, path: shape})
    found = merged(base, saved(tmp_path / "x.safetensors", stored), tmp_path / "out")
    rank = products.rank({part: tuple(tensor.shape) for part, tensor in parts.items()})
    assert (rank is None) == (kind in ("LoKr", "LoKr of kernels"))  # whole matrices: no scale
    scale = 1.0 if alpha is None or rank is None else alpha / rank
    before = weights({**UNET, path: shape})
    assert found.keys() == before.keys()
    for leaf, value in found.items():
        change = scale * whole if leaf == f"{path}.weight" else 0
        assert value.equal(before[leaf] + change)


PARTS = {kind: (parts, whole) for kind, parts, whole in made()}
PARTS["LoRA"] = {"A": PARTS["LoHa"][0]["hada_w1_b"], "B": PARTS["LoHa"][0]["hada_w1_a"]}, None


@pytest.mark.parametrize("of_columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["LoRA", "LoHa", "LoKr of kernels", "LoRA with a core"])
def test_dora_of_lycoris_gives_rows_or_columns_their_norms_in_whatever_chunks(
    kind, of_columns, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(changes, "BLOCK", 8)  # two rows of a matrix at a time
    parts, whole = PARTS[kind]
    whole = parts["B"] @ parts["A"] if whole is None else whole
    path = Q if whole.ndim == 2 else CONV
    ends = {part: end for end, part in products.ENDS.items()} | {"A": ".lora_down.weight", "B": ".lora_up.weight"}
    size = numbers(1, IN, seed=5) if of_columns else numbers(OUT, 1, seed=6)
    size = size.add(8).view(*size.shape, *([1] * (whole.ndim - 2)))
    stored = {f"lora_unet_{flat(path)}{ends[part]}": leaf.clone().contiguous() for part, leaf in parts.items()}
    file = saved(tmp_path / "x.safetensors", stored | {f"lora_unet_{flat(path)}.dora_scale": size})
    base = unet(tmp_path / "base", {**UNET, path: tuple(whole.shape)})
    before = weights({**UNET, path: tuple(whole.shape)})[f"{path}.weight"]
    after = (before + whole).double()
    dims = [dim for dim in range(whole.ndim) if dim != of_columns]
    expected = after / after.square().sum(dims, keepdim=True).sqrt() * size
    opened = open_adapter("x", file, open_folder("base", base))
    read = opened.reads[f"{path}.weight"]
    found = read(0, whole.numel())
    torch.testing.assert_close(found.view(whole.shape).double(), expected, rtol=3e-6, atol=0)
    for start, stop in ((0, 1), (3, 8), (whole.numel() - 5, whole.numel())):
        folders.assert_same_bits({"": read(start, stop)}, {"": found[start:stop]})


def test_magnitudes_of_weights_with_one_row_and_of_kernels_of_one_coordinate(tmp_path):
    a, b, size = torch.tensor([[1.0, 2, 2, 4]]), torch.ones(1, 1), torch.tensor([[3.0, 4, 5, 6]])
    one, point = "time_embedding.linear_1", "mid_block.attentions.0.proj_in"
    shapes = {**UNET, one: (1, 4), point: (2, 4, 1, 1)}
    stored = {f"lora_unet_{flat(one)}.{name}": x for name, x in (("lora_down.weight", a), ("lora_up.weight", b))}
    stored |= {f"lora_unet_{flat(one)}.dora_scale": size, f"lora_unet_{flat(point)}.dora_scale": torch.ones(2, 1)}
    stored |= {f"lora_unet_{flat(point)}.lora_down.weight": a.clone()}
    stored |= {f"lora_unet_{flat(point)}.lora_up.weight": torch.ones(2, 1)}
    file = saved(tmp_path / "x.safetensors", stored)
    found = merged(unet(tmp_path / "base", shapes), file, tmp_path / "out")
    before = weights(shapes)
    torch.testing.assert_close(found[f"{one}.weight"], size * (before[f"{one}.weight"] + a).sign())
    rows = before[f"{point}.weight"].flatten(1) + a
    torch.testing.assert_close(found[f"{point}.weight"].flatten(1), rows / rows.norm(dim=1, keepdim=True))


def test_magnitudes_of_another_shape_and_of_fused_weights_are_errors(tmp_path):
    parts, _ = PARTS["LoRA"]
    base = unet(tmp_path / "base", {**UNET, Q: (OUT, IN)})
    stored = {f"lora_unet_{flat(Q)}.lora_{way}.weight": parts[part] for way, part in (("down", "A"), ("up", "B"))}
    file = saved(tmp_path / "x.safetensors", stored | {f"lora_unet_{flat(Q)}.dora_scale": torch.ones(OUT)})
    with pytest.raises(ValueError, match=r"dora_scale' of shape \(6,\) has no number for each row or col.* of '.*to_q"):
        plan(TaskArithmetic(coef=1.0), base, {"x": file}, tmp_path / "none")
    fused = saved(tmp_path / "flux.safetensors", {"double_blocks.0.img_attn.qkv.weight": torch.ones(3 * IN, IN)})
    name = "transformer.transformer_blocks.0.attn.to_q"
    stored = {f"{name}.lora_A.weight": parts["A"], f"{name}.lora_B.weight": parts["B"][:IN].clone()}
    file = saved(tmp_path / "y.safetensors", stored | {f"{name}.dora_scale": torch.ones(IN, 1)})
    with pytest.raises(ValueError, match=r"to_q' of 'double_blocks\.0\.img_attn\.qkv.weight' is not a plain LoRA"):
        plan(TaskArithmetic(coef=1.0), fused, {"x": file}, tmp_path / "none")
    folder = of_peft(tmp_path / "peft", {Q: (parts["A"], parts["B"])}, 2)
    weights_of = folder / "adapter_model.safetensors"
    saved(weights_of, load_file(weights_of) | {f"base_model.model.{Q}.dora_scale": torch.ones(OUT, 1)})
    with pytest.raises(
        ValueError, match=r"holds 'base_model\.model.*dora_scale', which is not a plain LoRA of a param"
    ):
        plan(TaskArithmetic(coef=1.0), base, {"x": folder}, tmp_path / "none")
