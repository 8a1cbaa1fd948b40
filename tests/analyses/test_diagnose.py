"""Sizes of updates by kind of leaf, on trees with known numbers and on real modules."""

import math

import pytest
import torch

from smat_fn import random
from smat_fn.analyses import Group, diagnose, groups, suggested_sigma, unmoved, unmoved_shares
from smat_fn.models import tiny_vit
from smat_fn.where import block_linear

KINDS = {"embed": "embeddings", "q": "attention", "gain": "norms", "flag": "other"}
BASE = {"embed": torch.zeros(4), "q": torch.zeros(2, 6), "gain": torch.ones(3), "flag": torch.tensor(True)}


def moved(embed, q, gain):
    return {"embed": BASE["embed"] + embed, "q": BASE["q"] + q, "gain": BASE["gain"] + gain, "flag": BASE["flag"]}


def test_sizes_are_the_closed_forms():
    experts = {"a": moved(3.0, 0.5, 0.0), "b": moved(4.0, -0.5, 0.0), "c": moved(0.0, 0.5, 0.25)}
    embeddings, attention, norms, whole = diagnose(BASE, experts, KINDS, coef=0.2)
    # partners of a, b, c: 4, 3, 7 on embeddings; 0, 1, 0 on attention; 0.25, 0.25, 0 on norms
    squares = {"embeddings": (25.0, 74.0), "attention": (0.75, 1.0), "norms": (0.0625, 0.125)}
    sizes = {"embeddings": 4, "attention": 12, "norms": 3}
    for row, kind in zip((embeddings, attention, norms), squares, strict=True):
        own, partners = squares[kind]
        assert row == pytest.approx(Group(kind, sizes[kind], (own / 3) ** 0.5, 0.2 * (partners / 3) ** 0.5))
    totals = [sum(sizes[kind] * squares[kind][i] for kind in sizes) / (19 * 3) for i in (0, 1)]
    assert whole == pytest.approx(Group("all", 19, totals[0] ** 0.5, 0.2 * totals[1] ** 0.5))


def test_the_suggestion_is_the_partners_update_to_two_digits():
    assert suggested_sigma(Group("all", 5, 1.0, 0.0123456)) == 0.012
    assert suggested_sigma(Group("all", 5, 1.0, None)) is None
    assert suggested_sigma(Group("all", 5, 0.0, 0.0)) is None


def test_orthogonal_updates_of_one_size_suggest_gamma_times_size_times_root_of_partners():
    signs = [1.0 - 2 * (torch.arange(32) >> bit & 1) for bit in range(5)]  # orthogonal to each other
    experts = {str(bit): {"w": 0.02 * sign} for bit, sign in enumerate(signs)}
    _, whole = diagnose({"w": torch.zeros(32)}, experts, {"w": "mlp"}, coef=0.3)
    assert whole.delta == pytest.approx(0.02)
    assert whole.partners == pytest.approx(0.3 * 0.02 * 4**0.5)


def test_a_single_expert_has_no_partners():
    rows = diagnose(BASE, {"a": moved(1.0, 1.0, 1.0)}, KINDS)
    assert {row.partners for row in rows} == {None}
    assert {row.delta for row in rows} == {1.0}


def test_every_leaf_needs_a_kind():
    with pytest.raises(ValueError, match=r"'embed' has no kind.*'gain' has no kind"):
        diagnose(BASE, {"a": BASE}, {"q": "mlp"})
    with pytest.raises(ValueError, match="'q' is of kind 'weights': choose one of embeddings, attention"):
        diagnose(BASE, {"a": BASE}, {"embed": "embeddings", "q": "weights", "gain": "norms"})
    for coef in (-0.3, float("nan")):
        with pytest.raises(ValueError, match=f"coef is {coef}, must be finite and not negative"):
            diagnose(BASE, {"a": BASE, "b": BASE}, KINDS, coef=coef)


def test_arguments_of_other_types_are_named():
    told = "experts are a list: give a mapping.*coef is None, must be a number; kinds are a NoneType"
    with pytest.raises(ValueError, match=told):
        diagnose(BASE, [BASE], None, coef=None)


@pytest.mark.parametrize(("noise", "peak"), [("uniform", 1.7320), ("gaussian", 4.325), ("laplace", 7.843)])
def test_noise_below_half_the_way_to_the_nearest_number_moves_nothing(noise, peak):
    # bf16 numbers in [1, 2) are 2^-7 apart, those below 1 half as far
    values = torch.tensor([1.0, -1.0, 1.5, 0.99, 0.0, 2.0, 0.5, 3.0], dtype=torch.bfloat16)
    for sigma in (3e-4, 6e-4, 1e-3, 2e-3, 2.3e-3):
        reach = [(values.float() + sign * peak * sigma).bfloat16() for sign in (-1, 1)]
        still = ((reach[0] == values) & (reach[1] == values) & (values != 0)).sum()
        assert unmoved({"gain": values, "w": torch.tensor([1.0, 100.0])}, sigma, noise) == still
    assert unmoved({"gain": values}, 2e-3) == 3  # 1.5, 2 and 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sigma", [1e-6, 3e-5, 2e-3, 2.0**-9 / math.sqrt(3), 0.5, 1e5])
def test_of_all_numbers_of_a_dtype_those_are_counted_whose_lower_neighbour_is_too_far(dtype, sigma):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[every.isfinite() & (every.abs() >= torch.finfo(dtype).tiny)]
    towards = torch.nextafter(every, torch.zeros_like(every))
    gap = (every.double() - towards.double()).abs()
    assert unmoved({"w": every}, sigma) == int((sigma * math.sqrt(3) < gap / 2).sum())


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_noise_of_no_size_is_refused(sigma):
    for call in (lambda **o: unmoved({}, **o), lambda **o: unmoved_shares(BASE, KINDS, **o)):
        with pytest.raises(ValueError, match=f"^unmoved: sigma is {sigma!r}"):
            call(sigma=sigma)
        with pytest.raises(ValueError, match=r"^unmoved: noise is 'pink', choose one of uniform"):
            call(sigma=0.1, noise="pink")


def test_shares_of_weights_that_noise_does_not_move():
    leaves = {"gain": torch.tensor([1.0, 1.5, 0.99, 0.0, 2.0], dtype=torch.bfloat16), "w": torch.tensor([1.0, 100.0])}
    kinds = {"gain": "norms", "w": "mlp"}
    assert unmoved_shares(leaves, kinds, 2e-3) == {"norms": 2 / 5, "mlp": 0.0, "all": 2 / 7}
    assert unmoved_shares(leaves, kinds, 2e-3, "laplace") == {"norms": 0.0, "mlp": 0.0, "all": 0.0}


def test_the_kinds_of_a_vision_transformer():
    module = tiny_vit(random.key(0))
    kinds = groups(module, block_linear(module))
    assert set(kinds) == {name for name, _ in module.named_parameters()}
    sizes = {}
    for name, leaf in module.named_parameters():
        sizes[kinds[name]] = sizes.get(kinds[name], 0) + leaf.numel()
    # two blocks of width 128, MLP 256: four square matrices, two of 128 x 256; five norms; 5 positions, a class token
    assert sizes["attention"] == 2 * 4 * 128**2
    assert sizes["mlp"] == 2 * 2 * 128 * 256
    assert sizes["norms"] == 5 * 2 * 128
    assert sizes["embeddings"] == 128 * 16 + 5 * 128 + 128
    assert sizes["biases"] == 2 * (4 * 128 + 256 + 128) + 128
    assert set(sizes) == {"attention", "mlp", "norms", "embeddings", "biases"}


def test_the_kinds_of_a_language_model_with_a_head_of_its_own():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for tied in (False, True):
        module = LlamaForCausalLM(LlamaConfig(vocab_size=11, tie_word_embeddings=tied, **sizes))
        kinds = groups(module, block_linear(module))
        block = "model.layers.0."
        assert kinds == {
            "model.embed_tokens.weight": "embeddings",
            **{f"{block}self_attn.{n}_proj.weight": "attention" for n in "qkvo"},
            **{f"{block}mlp.{n}_proj.weight": "mlp" for n in ("gate", "up", "down")},
            **{f"{block}{n}_layernorm.weight": "norms" for n in ("input", "post_attention")},
            "model.norm.weight": "norms",
            **({} if tied else {"lm_head.weight": "head"}),
        }


def test_what_is_in_a_block_and_no_linear_weight_is_other():
    block = torch.nn.Module()
    block.gain = torch.nn.Parameter(torch.ones(3))
    block.child = torch.nn.Linear(3, 3)
    module = torch.nn.Sequential(torch.nn.ModuleList([block]))
    assert groups(module, block_linear(module)) == {
        "0.0.gain": "other",
        "0.0.child.weight": "mlp",
        "0.0.child.bias": "biases",
    }
