"""LoRA adapters as experts: base + scale B A, exactly, whatever the chunks; peft agrees; anything else is refused."""

import copy
import json
import math
import pickle
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import lora, random
from smat_fn.config import Dare, TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import extract_lora, merge_adapters, merge_folders, plan
from smat_fn.folders.inputs.adapters import config as adapter_config
from smat_fn.folders.inputs.adapters.factors import read_adapter
from smat_fn.folders.inputs.adapters.peft import BESIDE

TA = TaskArithmetic(coef=1.0)
PREFIX = "base_model.model."
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "lora_dropout": 0.1, "target_modules": ["q"]}
SHAPES = {
    "model.embed_tokens.weight": (9, 6),
    "model.layers.0.q.weight": (6, 6),
    "model.layers.0.up.weight": (10, 6),
    "model.layers.1.q.weight": (6, 6),
    "model.norm.weight": (6,),
}


def numbers(*shape, seed, most=3):
    """Integers: sums of their products are exact."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.fixture
def base():
    return {path: numbers(*shape, seed=i, most=50).bfloat16() for i, (path, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def adapter(tmp_path):
    """Writes an adapter; ``factors`` gives (A, B) by module."""

    def write(factors, *, more=None, name="adapter", **settings):
        folder = tmp_path / name
        folder.mkdir()
        tensors = {f"{PREFIX}{path}": leaf for path, leaf in (more or {}).items()}
        for module, (a, b) in factors.items():
            kind = "embedding_" if "embed" in module else ""
            end = "" if kind else ".weight"
            tensors |= {f"{PREFIX}{module}.lora_{kind}A{end}": a, f"{PREFIX}{module}.lora_{kind}B{end}": b}
        save_file({path: leaf.contiguous() for path, leaf in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
        return folder

    return write


def test_an_expression_that_would_never_end_is_an_error(base, adapter, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_config, "_LONGEST", 0.002)  # a machine of today needs 0.05
    start, pattern = folders.save(tmp_path / "base", base), {r"((\w|\w|\w|.)+)+\d": 2}
    expert = adapter({"model.layers.0.q": factors((6, 6))}, rank_pattern=pattern)
    told = r"rank_pattern has .* takes over 0.002 s to match 'model.layers.0.q': give the names of modules instead"
    with pytest.raises(ValueError, match=told):
        plan(TA, start, {"x": expert}, tmp_path / "none")


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ([3], "must be an object of expressions"),
        ({"(": 2}, "which is not a regular expression"),
        ({"a{99999999999}": 2}, "which is not a regular expression"),
        ("q", "must be an object"),
    ],
)
def test_patterns_that_are_none(base, adapter, folders, tmp_path, pattern, told):
    start = folders.save(tmp_path / "base", base)
    expert = adapter({"model.layers.0.q": factors((6, 6))}, rank_pattern=pattern)
    with pytest.raises(ValueError, match=told):
        merge_folders(TA, start, {"x": expert}, tmp_path / "out")


def factors(shape, rank=2, seed=5):
    return numbers(rank, shape[1], seed=seed), numbers(shape[0], rank, seed=seed + 1)


def merged(folders, base, folder, tmp_path, config=TA, **options):
    path = tmp_path / "base"
    if not path.exists():
        folders.save(path, base)
    out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    merge_folders(config, path, {"x": folder}, out, out_dtype="float32", key=folders.key, **options)
    return folders.load(out)


def changed(base, **deltas):
    """Base in float32 with changes of leaves, by the name between "model." and ".weight"."""
    wide = {path: leaf.float() for path, leaf in base.items()}
    return wide | {(p := f"model.{name}.weight"): wide[p] + delta for name, delta in deltas.items()}


Q, UP, EMBED = "layers.0.q", "layers.0.up", "embed_tokens"


def test_scaling_is_alpha_over_rank(base, adapter, folders, tmp_path):
    a, b = factors((10, 6))
    for name, module in {"plain": f"model.{UP}", "compiled": "model.layers.0._orig_mod.up"}.items():
        folder = adapter({module: (a, b)}, name=name)
        folders.assert_same_bits(merged(folders, base, folder, tmp_path), changed(base, **{UP: 2 * (b @ a)}))


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("default", ["", ".default"])
def test_names_of_a_wrapped_model_of_peft(before, default, base, adapter, folders, tmp_path):
    """Wrappers before PEFT's own prefix, and the names in memory; patterns are of the names without both."""
    a, b = factors((10, 6))
    folder = adapter({f"model.{UP}": (a, b)}, alpha_pattern={"^model.layers.0.up": 8})
    stored = load_file(folder / "adapter_model.safetensors")
    names = {name: before + name.replace(".weight", f"{default}.weight") for name in stored}
    save_file({names[name]: leaf for name, leaf in stored.items()}, folder / "adapter_model.safetensors")
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), changed(base, **{UP: 4 * (b @ a)}))
    (module,) = read_adapter("x", folder).factors
    assert module == f"model.{UP}"


def test_rank_stabilised_scaling_is_alpha_over_the_root(base, adapter, folders, tmp_path):
    a, b = factors((10, 6), rank=4)
    folder = adapter({f"model.{UP}": (a, b)}, r=4, use_rslora=True, lora_alpha=1)
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), changed(base, **{UP: 0.5 * (b @ a)}))


def test_patterns_change_rank_and_alpha_of_modules_by_their_ends(base, adapter, folders, tmp_path):
    q, other, up = factors((6, 6)), factors((6, 6), rank=4, seed=7), factors((10, 6), rank=1, seed=9)
    folder = adapter(
        {f"model.{Q}": q, "model.layers.1.q": other, f"model.{UP}": up},
        rank_pattern={"1.q": 4, "up": 1},
        alpha_pattern={r"layers\.\d+\.up": 8},
    )
    expected = changed(
        base,
        **{Q: 2 * (q[1] @ q[0]), "layers.1.q": 1 * (other[1] @ other[0]), UP: 8 * (up[1] @ up[0])},
    )
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), expected)


def test_adapters_with_names_beside_the_default_one_are_noted(base, adapter, folders, tmp_path):
    default, named = adapter({f"model.{Q}": factors((6, 6))}, target_modules=["0.q"]), factors((10, 6))
    adapter({f"model.{UP}": named}, name="adapter/x")
    adapter({f"model.{UP}": factors((10, 6))}, name="adapter/checkpoint-500")
    path = folders.save(tmp_path / "base", base)
    told = "is the default adapter of its folder, which holds others too: for one of them give its path"
    assert plan(TA, path, {"d": default}, tmp_path / "none").notes == (f"expert 'd' {told} ({default / 'x'})",)
    assert plan(TA, path, {"x": default / "x"}, tmp_path / "none").notes == ()
    folders.assert_same_bits(
        merged(folders, base, default / "x", tmp_path), changed(base, **{UP: 2 * (named[1] @ named[0])})
    )
    made = merge_adapters({"d": default}, tmp_path / "joined", lambda found: found["d"])
    assert made.notes == (f"adapter 'd' {told} ({default / 'x'})",)


def test_fan_in_fan_out_is_the_transpose(base, adapter, folders, tmp_path):
    square, tall = factors((6, 6)), factors((6, 10))
    folder = adapter({f"model.{Q}": square, f"model.{UP}": tall}, fan_in_fan_out=True)
    expected = changed(base, **{Q: 2 * (square[1] @ square[0]).T, UP: 2 * (tall[1] @ tall[0]).T})
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), expected)


def test_embeddings(base, adapter, folders, tmp_path):
    a, b = factors((6, 9))
    folder = adapter({f"model.{EMBED}": (a, b)})
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), changed(base, **{EMBED: 2 * (b @ a).T}))


def test_whole_leaves_replace_bases_and_carry_their_own_changes(base, adapter, folders, tmp_path):
    norm, embeddings, (a, b) = numbers(6, seed=1), numbers(9, 6, seed=2), factors((6, 9))
    more = {"model.norm.weight": norm, "model.embed_tokens.base_layer.weight": embeddings.bfloat16()}
    folder = adapter({f"model.{EMBED}": (a, b)}, more=more, modules_to_save=["norm"])
    expected = changed(base) | {
        "model.norm.weight": norm,
        "model.embed_tokens.weight": embeddings + 2 * (b @ a).T,
    }
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), expected)


def test_changes_of_resized_embeddings_fit_the_rows_that_are_stored_below_them(base, adapter, folders, tmp_path):
    embeddings, (a, b) = numbers(11, 6, seed=2), factors((6, 11))
    folder = adapter({f"model.{EMBED}": (a, b)}, more={"model.embed_tokens.base_layer.weight": embeddings})
    with pytest.raises(ValueError, match=r"has 11 rows in 'model\.embed_tokens\.weight', base 9: pass `vocabulary"):
        merged(folders, base, folder, tmp_path)
    expected = changed(base) | {"model.embed_tokens.weight": (embeddings + 2 * (b @ a).T)[:9]}
    folders.assert_same_bits(merged(folders, base, folder, tmp_path, vocabulary="base-rows"), expected)


def test_a_published_checkpoint_may_lack_the_first_part_of_names(adapter, folders, tmp_path):
    base, (a, b) = {"h.0.c_attn.weight": numbers(6, 18, seed=3)}, factors((18, 6))
    folder = adapter({"transformer.h.0.c_attn": (a, b)}, fan_in_fan_out=True)
    expected = {"h.0.c_attn.weight": base["h.0.c_attn.weight"] + 2 * (b @ a).T}
    folders.assert_same_bits(merged(folders, base, folder, tmp_path), expected)


@pytest.mark.parametrize("config", [TA, Ties(coef=0.7, keep=0.3, aggregate="sum", scope="global"), WeightAverage(),
                                    Dare(coef=0.5, drop_prob=0.4)], ids=lambda config: config.name)  # fmt: skip
def test_chunks_change_no_bit_and_adapters_mix_with_whole_experts(config, adapter, folders, tmp_path):
    # rows of three blocks, factors whose products round
    generator = torch.Generator().manual_seed(0)
    base = {"up.weight": torch.randn(300, 257, generator=generator).bfloat16()}
    a, b = torch.randn(5, 257, generator=generator), torch.randn(300, 5, generator=generator)
    expert = {"up.weight": base["up.weight"] + 0.01 * torch.randn(300, 257, generator=generator)}
    low, full = adapter({"up": (a, b)}, r=5, lora_alpha=3), folders.save(tmp_path / "full", expert)
    path = folders.save(tmp_path / "in", base)
    outs = {}
    for chunk in (1 << 19, 1000, 997):
        options = {"key": folders.key, "chunk": chunk, "out_dtype": "float32"}
        merge_folders(config, path, {"x": low, "y": full}, tmp_path / f"{chunk}", **options)
        outs[chunk] = folders.load(tmp_path / f"{chunk}")
    folders.assert_same_bits(outs[1000], outs[1 << 19])
    folders.assert_same_bits(outs[997], outs[1 << 19])
    whole = merged_whole(folders, path, low, tmp_path)
    assert (whole - base["up.weight"] - 0.6 * b.double() @ a.double()).abs().max() < 4e-6
    wide = {"up.weight": base["up.weight"].float()}
    folders.assert_same_bits(outs[997], folders.in_memory(config, wide, {"x": {"up.weight": whole}, "y": expert}))


def merged_whole(folders, path, lora, tmp_path):
    merge_folders(WeightAverage(), path, {"x": lora}, tmp_path / "whole", out_dtype="float32")
    return folders.load(tmp_path / "whole")["up.weight"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"use_dora": "yes"}, "use_dora to 'yes'"),
        ({"bias": "lora_b"}, "bias to 'lora_b'"),
        ({"peft_type": "IA3"}, "peft_type to 'IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights to 'pissa'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters to ['experts.gate_up_proj']"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices to [3]"),
        ({"lora_bias": True}, "lora_bias to True"),
        ({"layer_replication": [[0, 2]]}, "layer_replication to [[0, 2]]"),
        ({"invented_tomorrow": {"x": 1}}, "invented_tomorrow to {'x': 1}"),
    ],
)
def test_other_kinds_of_adapters_are_refused_by_name(settings, name, base, adapter, folders, tmp_path):
    folder = adapter({f"model.{UP}": factors((10, 6))}, **settings)
    with pytest.raises(ValueError, match=r"^expert 'x': its adapter_config.json sets ") as caught:
        merged(folders, base, folder, tmp_path)
    assert f"sets {name}, which is not read here: merge it into its base with peft" in str(caught.value)


CHANGED = "give as base the model whose weights this initialisation changed, and set init_lora_weights to true"


@pytest.mark.parametrize("kind", ["pissa_niter_4", "corda", "lora_ga", "loftq"])
def test_initialisations_that_peft_does_not_repeat_are_not_sent_to_its_merge(kind, base, adapter, folders, tmp_path):
    folder = adapter({f"model.{UP}": factors((10, 6))}, init_lora_weights=kind)
    with pytest.raises(ValueError, match=re.escape(CHANGED)) as caught:
        merged(folders, base, folder, tmp_path)
    assert "with peft" not in str(caught.value)
    assert ("path_initial_model_for_weight_conversion=INIT), or give as base" in str(caught.value)) == (kind != "loftq")
    left = {name: {"x": 1} for name in ("corda_config", "lora_ga_config", "loftq_config")}  # mean nothing any more
    converted = adapter({f"model.{UP}": factors((10, 6))}, name="converted", init_lora_weights=True, **left)
    a, b = factors((10, 6))
    folders.assert_same_bits(merged(folders, base, converted, tmp_path), changed(base, **{UP: 2 * b @ a}))


@pytest.mark.filterwarnings("ignore")  # of peft, about its own settings
def test_a_converted_adapter_and_one_of_the_changed_base_are_the_trained_model(folders, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 10))
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["0"], init_lora_weights="pissa_niter_4")
    torch.manual_seed(1)
    model = peft.get_peft_model(copy.deepcopy(start), config)
    held = model.peft_config["default"]
    held.init_lora_weights = True
    model.save_pretrained(tmp_path / "init")
    held.init_lora_weights = "pissa_niter_4"
    with torch.no_grad():
        for leaf in model.parameters():
            leaf += 0.1 * leaf.requires_grad * torch.randn(leaf.shape)
    model.save_pretrained(tmp_path / "changed")
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "init"))
    now = model.base_model.model.state_dict()
    changed = {name.replace(".base_layer", ""): leaf.clone() for name, leaf in now.items()}
    bases = {"converted": start.state_dict(), "changed": {k: v for k, v in changed.items() if ".lora_" not in k}}
    trained = model.merge_and_unload().state_dict()
    torch.manual_seed(2)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(start), tmp_path / "changed").merge_and_unload().state_dict()
    assert (again["0.weight"] - trained["0.weight"]).abs().max() > 1e-3  # what the error warns of
    file = tmp_path / "changed/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": True}))
    for name, leaves in bases.items():
        base = folders.save(tmp_path / f"base-{name}", {path: leaf.clone() for path, leaf in leaves.items()})
        merge_folders(TA, base, {"x": tmp_path / name}, tmp_path / f"out-{name}")
        for path, leaf in folders.load(tmp_path / f"out-{name}").items():
            torch.testing.assert_close(leaf, trained[path], rtol=0, atol=2e-6)


KINDS = {
    "AdaLoRA": lambda peft, **own: peft.AdaLoraConfig(init_r=2, target_r=2, total_step=9, **own),
    "IA3": lambda peft, **own: peft.IA3Config(feedforward_modules=[], **own),
    "OFT": lambda peft, **own: peft.OFTConfig(r=0, oft_block_size=2, **own),
    "VeRA": lambda peft, **own: peft.VeraConfig(r=2, **own),
}


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_peft_that_are_no_plain_lora_are_refused_everywhere_by_their_name(kind, folders, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 4))
    base = folders.save(tmp_path / "base", model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's on its own settings
        peft.get_peft_model(model, KINDS[kind](peft, target_modules=["0"])).save_pretrained(tmp_path / kind)
    name = f"peft_type to '{kind.upper()}'"
    told = (
        f"^(expert|adapter) '{{}}': its adapter_config.json sets {name}, which is not read here: merge it into its base"
    )
    expert, out = tmp_path / kind, tmp_path / "out"
    with pytest.raises(ValueError, match=told.format("x")) as caught:
        merge_folders(TA, base, {"x": expert}, out)
    assert "; " not in str(caught.value)
    with pytest.raises(ValueError, match=told.format("expert")):
        extract_lora(base, expert, out, rank=2)
    with pytest.raises(ValueError, match=told.format("x")):
        merge_adapters({"x": expert}, out, lambda held: held["x"])
    with pytest.raises(ValueError, match="holds an adapter, not a whole model: only experts can be adapters"):
        merge_folders(TA, expert, {"x": base}, out)
    assert not out.exists()


PRODUCTS = {
    "LoHa": lambda peft, **own: peft.LoHaConfig(r=2, alpha=3, **own),
    "LoHa with cores": lambda peft, **own: peft.LoHaConfig(r=2, alpha=3, use_effective_conv2d=True, **own),
    "LoKr": lambda peft, **own: peft.LoKrConfig(r=1, alpha=3, decompose_factor=2, **own),
    "LoKr of factors": lambda peft, **own: peft.LoKrConfig(r=1, alpha=3, decompose_both=True, **own),
    "LoKr with cores": lambda peft, **own: peft.LoKrConfig(
        r=1, alpha=3, decompose_factor=2, use_effective_conv2d=True, **own
    ),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_hadamard_and_kronecker_products_of_peft_are_experts(kind, folders, tmp_path):
    peft = pytest.importorskip("peft")
    generator = torch.Generator().manual_seed(0)
    conv = torch.nn.Conv2d(4, 12, 3)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(6, 4), conv, torch.nn.Conv2d(12, 6, 1))
    base = folders.save(tmp_path / "base", {name: leaf.clone() for name, leaf in model.state_dict().items()})
    config = PRODUCTS[kind](peft, target_modules=["0", "2", "3"], alpha_pattern={"2": 5})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's on its own settings
        wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for leaf in wrapped.parameters():
            if leaf.requires_grad:
                leaf.copy_(torch.randn(leaf.shape, generator=generator))
    wrapped.save_pretrained(tmp_path / "expert")
    stored = load_file(tmp_path / "expert/adapter_model.safetensors")
    assert any(("hada_t" in name) or ("lokr_t" in name) for name in stored) == ("cores" in kind)

    def as_whole(base, name):
        merge_folders(WeightAverage(), base, {"x": tmp_path / name}, tmp_path / f"of-{name}", out_dtype="float32")
        return folders.load(tmp_path / f"of-{name}")

    found = as_whole(base, "expert")
    before = folders.load(base)
    for name, leaf in wrapped.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-5, atol=1e-5)
        assert name.endswith("bias") or name[0] == "1" or not torch.allclose(before[name], leaf)
    # as a LoRA of a rank that holds all of it
    extract_lora(base, tmp_path / "expert", tmp_path / "lora", rank=12, linear_only=False)
    torch.testing.assert_close(as_whole(base, "lora"), found, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=f"sets peft_type to '{kind.split()[0].upper()}', which is not read here"):
        merge_adapters({"x": tmp_path / "expert"}, tmp_path / "none", lambda held: held["x"])


def test_a_product_that_does_not_fit_base_is_an_error(folders, tmp_path):
    peft = pytest.importorskip("peft")
    base = folders.save(tmp_path / "base", torch.nn.Sequential(torch.nn.Linear(6, 8)).state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(6, 4))
    peft.get_peft_model(other, peft.LoHaConfig(r=2, target_modules=["0"])).save_pretrained(tmp_path / "expert")
    with pytest.raises(ValueError, match=r"the tensors of 'base_model.model.0', .*, do not make a change of parameter"):
        plan(TA, base, {"x": tmp_path / "expert"}, tmp_path / "none")
    fitting = folders.save(tmp_path / "fitting", {"0.weight": torch.zeros(4, 6)})
    file = tmp_path / "expert/adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match=r"DoRA of 'base_model.model.0', whose change is not a product B A"):
        plan(TA, fitting, {"x": tmp_path / "expert"}, tmp_path / "none")
    file.write_text(json.dumps(config))
    assert not plan(TA, fitting, {"x": tmp_path / "expert"}, tmp_path / "none").notes
    tensors = load_file(tmp_path / "expert/adapter_model.safetensors")
    del tensors["base_model.model.0.hada_w2_b"]
    save_file(tensors, tmp_path / "expert/adapter_model.safetensors")
    with pytest.raises(ValueError, match="has no other factor in"):
        plan(TA, base, {"x": tmp_path / "expert"}, tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        ({"peft_type": "PREFIX_TUNING", "num_layers": 2}, "it is not a fixed change of weights"),
        ({"alora_invocation_tokens": [3]}, "it is not a fixed change of weights"),
        ({"target_parameters": ["experts.down_proj"]}, "merge it into its base with peft"),
    ],
)
def test_what_linear_layers_cannot_hold_is_one_error(settings, way, base, adapter, folders, tmp_path):
    module = "model.experts" if "target_parameters" in settings else f"model.{UP}"
    folder = adapter({module: factors((10, 6), rank=6 if "experts" in module else 2)}, **settings)
    for read in (
        lambda: merged(folders, base, folder, tmp_path),
        lambda: merge_adapters({"x": folder}, tmp_path / "out", lambda found: found["x"]),
        lambda: lora.load_peft(folder),
    ):
        with pytest.raises(ValueError, match=rf"sets \w+ to .*, which is not read here: {way}") as caught:
            read()
        assert "; " not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({"target_modules": ["q", "up"]}, True),
        ({"target_modules": r"model\.layers\.\d\.(q|up)"}, True),
        ({"target_modules": ["0.q", "up"]}, False),
        ({"target_modules": r"model\.layers\.0\..*"}, False),
        ({"target_modules": "("}, False),  # of another library than re
        ({"target_modules": ["q"], "layers_to_transform": 0}, False),
        ({"target_modules": ["q"], "exclude_modules": ["layers.1.q"]}, False),
        ({"target_modules": ["norm"]}, False),  # nothing like it is adapted
    ],
)
def test_an_adapter_of_which_a_part_was_saved_is_noted(settings, noted, base, adapter, folders, tmp_path):
    start = folders.save(tmp_path / "base", base)
    half = adapter({"model.layers.0.q": factors((6, 6)), f"model.{UP}": factors((10, 6))}, **settings)
    told = (
        "expert 'x' lacks factors of 'model.layers.1.q', though target_modules in its adapter_config.json names them "
        "and other layers have theirs: if only a part of the adapter was saved, save it again"
    )
    assert plan(TA, start, {"x": half}, tmp_path / "out").notes == ((told,) if noted else ())
    both = {f"model.layers.{i}.q": factors((6, 6)) for i in range(2)}
    assert plan(TA, start, {"x": adapter(both, name="both", **settings)}, tmp_path / "out").notes == ()


def test_an_expression_that_never_ends_is_waited_for_once(base, adapter, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(adapter_config, "_LONGEST", 0.01)
    asked, match = [], adapter_config.regex.fullmatch

    def slow(expression, text, timeout):
        asked.append(text)
        return match("(a|a)*", "a" * 40 + "b", timeout=timeout)

    monkeypatch.setattr(adapter_config.regex, "fullmatch", slow)
    wide = base | {f"model.layers.{i}.q.weight": base["model.layers.1.q.weight"].clone() for i in range(2, 9)}
    start, half = (
        folders.save(tmp_path / "base", wide),
        adapter({"model.layers.0.q": factors((6, 6))}, target_modules="x"),
    )
    assert plan(TA, start, {"x": half}, tmp_path / "out").notes == ()
    assert len(asked) == 1


@pytest.mark.parametrize("file", [*BESIDE, "vit.safetensors", "extra.pt"])
def test_weights_that_were_trained_beside_an_adapter_are_not_lost_unsaid(file, base, adapter, folders, tmp_path):
    folder = adapter({f"model.{UP}": factors((10, 6))})
    (folder / file).touch()
    for read in (
        lambda: merged(folders, base, folder, tmp_path),
        lambda: merge_adapters({"x": folder}, tmp_path / "out", lambda found: found["x"]),
    ):
        with pytest.raises(ValueError, match=rf"'x': \S+{file} holds weights beside the adapter, which are not read"):
            read()


def test_a_trainers_files_beside_an_adapter_are_passed_over_and_a_head_is_noted(base, adapter, folders, tmp_path):
    start, folder = folders.save(tmp_path / "base", base), adapter({f"model.{UP}": factors((10, 6))})
    names = "training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth", "rng_state_1.pth"
    for name in (*names, "scaler.pt", "adapter_model.pt", "adapter_0.pt", "recipe_state.pt", "fisher.safetensors"):
        (folder / name).touch()
    assert plan(TA, start, {"x": folder}, tmp_path / "out").notes == ()
    (folder / "value_head.safetensors").touch()
    told = "expert 'x' holds a head beside the adapter, which is left out (value_head.safetensors{})"
    assert plan(TA, start, {"x": folder}, tmp_path / "out").notes == (told.format(""),)
    torch.save({"v_head.summary.weight": torch.ones(1, 6)}, folder / "pytorch_model.bin")  # of TRL's PPO
    assert plan(TA, start, {"x": folder}, tmp_path / "out").notes == (told.format(", pytorch_model.bin"),)


def test_all_problems_of_an_adapter_are_listed(base, adapter, folders, tmp_path):
    ghost, wide, ranked = factors((6, 6)), factors((10, 7)), factors((6, 6), rank=3)
    half = {"model.layers.0.q.lora_A.weight": torch.zeros(2, 6)}
    more = half | {"model.norm.lora_magnitude_vector": torch.zeros(6), "score.weight": torch.zeros(2, 6)}
    factors_of = {"model.ghost": ghost, f"model.{UP}": wide, "model.layers.1.q": ranked, "lm_head": factors((6, 6))}
    folder = adapter(factors_of, more=more)
    with pytest.raises(ValueError, match="magnitude") as caught:
        merged(folders, base, folder, tmp_path)
    for part in (
        "'base_model.model.model.layers.0.q.lora_A.weight' has no other factor in adapter_model.safetensors",
        "holds 'base_model.model.model.norm.lora_magnitude_vector', which is of DoRA, but its",
        "holds 'base_model.model.score.weight', which is not a plain LoRA of a parameter of base",
        "but base has no parameter 'base_model.model.model.ghost.weight': was it trained from another base?",
        "adapts 'base_model.model.lm_head', but base stores no head of its own: give a base that does",
        "has shape (10, 7), parameter 'model.layers.0.up.weight' of base (10, 6): was it trained from another base?",
        "'model.layers.1.q' has rank 3, its adapter_config.json says 2",
    ):
        assert part in str(caught.value), part
    assert "of base: if it is a head, pass `heads='keep'`, else merge it into its base with peft" in str(caught.value)
    scored = adapter({"model.layers.1.q": factors((6, 6))}, name="scored", more={"score.weight": torch.ones(2, 6)})
    start = folders.save(tmp_path / "start", base)
    merge_folders(TA, start, {"x": scored}, tmp_path / "scored-out", heads="keep")
    assert load_file(tmp_path / "scored-out/heads/x.safetensors").keys() == {"score.weight"}
    zero = adapter({"model.layers.1.q": factors((6, 6))}, name="zero", r=0)
    with pytest.raises(ValueError, match=r"'model.layers.1.q' has rank 0 in its adapter_config.json, must be above 0"):
        merged(folders, base, zero, tmp_path)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"r": None}, "r"),
        ({"lora_alpha": "4"}, "lora_alpha"),
        ({"alpha_pattern": {"up": "8"}}, "alpha_pattern['up']"),
        ({"rank_pattern": {"up": True}}, "rank_pattern['up']"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
    ],
)
def test_what_should_be_a_number_is_named(settings, name, base, adapter, folders, tmp_path):
    folder = adapter({f"model.{UP}": factors((10, 6))}, **settings)
    told = f"expert 'x': its adapter_config.json has no number {name}: is it a LoRA adapter?"
    with pytest.raises(ValueError, match=re.escape(told)):
        merged(folders, base, folder, tmp_path)


def test_pickled_adapters_are_read_without_their_code(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    safe = adapter({f"model.{UP}": factors((10, 6))}, name="safe")
    old = shutil.copytree(safe, tmp_path / "old")
    torch.save(load_file(old / "adapter_model.safetensors"), old / "adapter_model.bin")
    (old / "adapter_model.safetensors").unlink()
    for place in safe, old:
        merge_folders(TA, path, {"x": place}, tmp_path / f"out-{place.name}")
        merge_adapters({"x": place}, tmp_path / f"one-{place.name}", lambda found: found["x"], base="base")
    for kind in "out", "one":
        one, two = (folders.load(tmp_path / f"{kind}-{place.name}") for place in (safe, old))
        folders.assert_same_bits(one, two)


EMBEDDINGS = "model.embed_tokens.weight"


def test_a_head_that_is_stored_as_a_copy_of_tied_embeddings_is_left_out(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    rows = numbers(9, 6, seed=5)
    copied = adapter({}, name="copied", more={EMBEDDINGS: rows, "lm_head.weight": rows.clone()})
    report = merge_folders(TA, path, {"x": copied}, tmp_path / "out")
    assert report.notes == ()
    merged = folders.load(tmp_path / "out")
    assert torch.equal(merged[EMBEDDINGS], rows.bfloat16())
    assert "lm_head.weight" not in merged
    own = adapter({}, name="own", more={EMBEDDINGS: rows, "lm_head.weight": rows + 1})
    untied = r"but base stores no head of its own: give a base that does \(tie_word_embeddings false, saved again\)$"
    with pytest.raises(ValueError, match=rf"holds 'base_model.model.lm_head.weight', {untied}"):
        plan(TA, path, {"x": own}, tmp_path / "out2")
    a, b = factors((6, 9))
    pairs = {"model.embed_tokens": (a, b), "lm_head": (b.T, a.T)}
    tied, loose = (adapter(pairs, name=f"pairs{on}", ensure_weight_tying=on) for on in (True, False))
    report = merge_folders(TA, path, {"x": tied}, tmp_path / "pairs", out_dtype="float32")
    assert report.notes == ()
    folders.assert_same_bits(folders.load(tmp_path / "pairs"), changed(base, **{EMBED: 2 * (b @ a).T}))
    with pytest.raises(ValueError, match=rf"it adapts 'base_model.model.lm_head', {untied}"):
        plan(TA, path, {"x": loose}, tmp_path / "out2")
    # the way out: of both adapters every leaf is read
    path = folders.save(tmp_path / "untied", base | {"lm_head.weight": base[EMBEDDINGS].clone()})
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    merge_folders(TA, path, {"x": own}, tmp_path / "head", out_dtype="float32")
    assert torch.equal(folders.load(tmp_path / "head")["lm_head.weight"], (rows + 1).float())
    plan(TA, path, {"x": loose}, tmp_path / "out2")


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_modules_that_peft_stores_three_times_after_resizing_are_read_once(llama, folders, tmp_path):
    peft = pytest.importorskip("peft")

    llama.save_pretrained(tmp_path / "base")
    rows = llama.config.vocab_size
    model = copy.deepcopy(llama)
    model.resize_token_embeddings(rows + 2, mean_resizing=False)
    own = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = peft.get_peft_model(model, own)
    for name, leaf in model.named_parameters():
        if leaf.requires_grad:
            torch.nn.init.normal_(leaf, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")  # whose size peft compares
    model.save_pretrained(tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    for kind in "weight", "modules_to_save.weight", "original_module.weight":
        assert f"{PREFIX}lm_head.{kind}" in stored
    merge_folders(TA, tmp_path / "base", {"x": tmp_path / "adapter"}, tmp_path / "out", vocabulary="base-rows")
    ours, expected = folders.load(tmp_path / "out"), model.merge_and_unload().state_dict()
    assert ours.keys() == expected.keys()
    for path, leaf in ours.items():
        torch.testing.assert_close(leaf, expected[path][: len(leaf)], rtol=0, atol=1e-6, msg=path)


def test_a_head_from_before_the_training_of_its_embeddings_is_not_their_copy(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    rows = numbers(9, 6, seed=5)
    module = EMBEDDINGS.removesuffix(".weight")
    saved = {EMBEDDINGS: rows + 1, f"{module}.modules_to_save.weight": rows + 1}
    untied = adapter({}, more=saved | {f"{module}.original_module.weight": rows, "lm_head.weight": rows.clone()})
    with pytest.raises(ValueError, match=r"holds 'base_model.model.lm_head.weight', but base stores no head of its"):
        plan(TA, path, {"x": untied}, tmp_path / "out")


def test_changed_embeddings_that_a_head_is_tied_to_are_told(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    saved = adapter({}, name="saved", more={EMBEDDINGS: numbers(9, 6, seed=5)})
    low = adapter({"model.embed_tokens": factors((6, 9))}, name="low")
    other = adapter({f"model.{UP}": factors((10, 6))}, name="other")
    experts = {"saved": saved, "low": low, "other": other}
    assert plan(TA, path, experts, tmp_path / "out").notes == ()
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    notes = plan(TA, path, experts, tmp_path / "out").notes
    assert [note.partition(" and with it the head")[0] for note in notes] == [
        f"expert {name!r} changes {EMBEDDINGS!r}," for name in ("saved", "low")
    ]
    for place in saved, low:  # of GPT-2 peft stores no head whatever this says
        settings = json.loads((place / "adapter_config.json").read_text())
        (place / "adapter_config.json").write_text(json.dumps(settings | {"ensure_weight_tying": True}))
    assert plan(TA, path, experts, tmp_path / "out").notes == notes
    (path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))  # as older ones are
    assert plan(TA, path, experts, tmp_path / "out").notes == notes
    (path / "config.json").write_text(json.dumps({"architectures": ["GPT2Model"]}))
    assert plan(TA, path, experts, tmp_path / "out").notes == ()


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_a_head_that_peft_leaves_in_spite_of_ensure_weight_tying_is_told(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path / "base")
    head = model.lm_head.weight.detach().clone()
    own = LoraConfig(target_modules=["c_attn"], modules_to_save=["wte"], ensure_weight_tying=True, fan_in_fan_out=True)
    tuned = get_peft_model(model, own)
    with torch.no_grad():
        tuned.get_input_embeddings().weight.add_(1)
    tuned.save_pretrained(tmp_path / "x")
    notes = plan(TA, tmp_path / "base", {"x": tmp_path / "x"}, tmp_path / "out").notes
    assert torch.equal(tuned.merge_and_unload().lm_head.weight, head)
    assert [
        note for note in notes if "and with it the head that base ties to it; in peft the head stays base's" in note
    ]


def test_a_head_that_is_kept_beside_is_not_taken_for_embeddings(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    up = {f"model.{UP}": factors((10, 6))}
    own = adapter(up, name="own", more={"lm_head.weight": numbers(9, 6, seed=5)})
    notes = plan(TA, path, {"own": own}, tmp_path / "out", heads="keep").notes
    assert len(notes) == 1
    assert notes[0].startswith("the head of expert 'own' (lm_head.weight) is kept")


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_an_adapter_beside_whole_weights_is_reported(weights, base, adapter, folders, tmp_path):
    """As torchtune writes them, in shards for pickled weights."""
    whole = folders.save(tmp_path / "whole", base)
    place = folders.save(tmp_path / "both", {path: leaf + 1 for path, leaf in base.items()})
    if weights != "model.safetensors":
        (place / "model.safetensors").unlink()
        file = "pytorch_model.bin" if weights.endswith(".bin") else "pytorch_model-00001-of-00001.bin"
        torch.save({path: leaf + 1 for path, leaf in base.items()}, place / file)
    if weights.endswith(".json"):
        (place / weights).write_text(json.dumps({"weight_map": dict.fromkeys(base, file)}))
    shutil.copytree(adapter({f"model.{UP}": factors((10, 6))}), place, dirs_exist_ok=True)
    assert plan(TA, whole, {"both": place}, tmp_path / "out").notes == (
        "expert 'both' holds an adapter beside its weights, which is left out: merge the adapter first if it is to "
        "count",
    )


def test_factors_without_values_are_those_of_zero_3(base, adapter, folders, tmp_path):
    folder = adapter({f"model.{UP}": (torch.empty(0), torch.empty(0))})
    told = r"holds weights without values \('\S+lora_A\.weight' and 1 more\), as ZeRO-3 saves them .*: run zero_to_fp32"
    with pytest.raises(ValueError, match=told):
        merged(folders, base, folder, tmp_path)
    with pytest.raises(ValueError, match=told):
        read_adapter("x", folder)


def test_magnitudes_that_peft_would_ignore_are_told(base, adapter, folders, tmp_path):
    """As of torchtune, whose configuration does not say that the adapter is DoRA."""
    norms = {f"model.{UP}.lora_magnitude_vector": torch.ones(10)}
    folder = adapter({f"model.{UP}": factors((10, 6))}, more=norms)
    told = (
        r"lora_magnitude_vector', which is of DoRA, but its adapter_config\.json does not set use_dora: set it to true"
    )
    with pytest.raises(ValueError, match=told):
        merged(folders, base, folder, tmp_path)


def test_a_folder_of_adapters_with_names_is_told_to_give_one(adapter, tmp_path):
    adapter({}, name="one")
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json, but its folders one do: give one of them$"):
        read_adapter("x", tmp_path)


def test_files_that_are_no_adapter(base, adapter, folders, tmp_path):
    path = folders.save(tmp_path / "base", base)
    names = "pickled", "broken", "headless", "listed"
    pickled, broken, headless, listed = (tmp_path / name for name in names)
    for folder in (pickled, broken, headless, listed):
        folder.mkdir()
    (pickled / "adapter_config.json").write_text("{}")
    (pickled / "adapter_model.bin").write_bytes(pickle.dumps(print))
    (broken / "adapter_config.json").write_text("[")
    (headless / "adapter_model.safetensors").write_bytes(b"")
    (listed / "adapter_config.json").write_text("[1]")
    experts = {folder.name: folder for folder in (pickled, broken, headless, listed)}
    with pytest.raises(ValueError, match="pickled") as caught:
        plan(TA, path, experts, tmp_path / "out")
    for part in (
        f"{pickled / 'adapter_model.bin'} holds pickled weights that cannot be read safely",
        f"expert 'broken': {broken} is not a readable adapter",
        f"expert 'listed': {listed} is not a readable adapter (adapter_config.json holds a list, must be a",
        f"expert 'headless': {headless} holds no adapter_config.json: give the folder of a LoRA adapter",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"base: .* holds an adapter, not a whole model: only experts can be adapters"):
        plan(TA, adapter({f"model.{UP}": factors((10, 6))}), {"x": path}, tmp_path / "out")


def test_dora_gives_every_row_its_magnitude_in_whatever_chunks(adapter, base, folders, tmp_path):
    path, (a, b) = "model.layers.0.up", factors((10, 6))
    size = numbers(10, seed=9).abs() + 1
    magnitudes = {f"{path}.lora_magnitude_vector": size}
    folder = adapter({path: (a, b)}, more=magnitudes, use_dora=True)
    ours = merged(folders, base, folder, tmp_path)[f"{path}.weight"]
    moved = base[f"{path}.weight"].float() + 2 * b @ a
    torch.testing.assert_close(ours, size[:, None] * moved / moved.norm(dim=1, keepdim=True))
    for chunk in (7, 1 << 19):
        options = {"chunk": chunk, "out_dtype": "float32"}
        merge_folders(TA, tmp_path / "base", {"x": folder}, tmp_path / f"{chunk}", **options)
        assert torch.equal(folders.load(tmp_path / f"{chunk}")[f"{path}.weight"], ours)
    lacking = adapter({path: (a, b)}, name="lacking", use_dora=True)
    short = adapter({path: (a, b)}, name="short", more={f"{path}.lora_magnitude_vector": size[:3]}, use_dora=True)
    tokens = adapter({"model.embed_tokens": factors((9, 6))}, name="tokens", use_dora=True)
    with pytest.raises(ValueError, match="lacking") as caught:
        plan(TA, tmp_path / "base", {own.name: own for own in (lacking, short, tokens)}, tmp_path / "out")
    for found in ("nothing", r"\(3,\)"):
        assert re.search(rf"has {found} as 'base_model\.model\.{path}\S+' instead of \(10,\): save", str(caught.value))
    assert "DoRA of 'base_model.model.model.embed_tokens', which is not a linear layer" in str(caught.value)
    with pytest.raises(ValueError, match="sets use_dora to True, which is not read here: merge it into its base"):
        merge_adapters({"x": folder}, tmp_path / "out", lambda held: held["x"])


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "up_proj"]},
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"1.self_attn.q_proj": 2}},
        {
            "target_modules": ["k_proj"],
            "alpha_pattern": {"layers.0.self_attn.k_proj": 3},
            "modules_to_save": ["lm_head"],
        },
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    ],
    ids=["plain", "rank stabilised", "patterns and whole modules", "embeddings", "DoRA"],
)
def test_peft_merges_the_same(settings, llama, folders, tmp_path):
    peft = pytest.importorskip("peft")

    llama.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(r=4, lora_alpha=6, **settings))
    for name, leaf in model.named_parameters():
        if leaf.requires_grad:
            torch.nn.init.normal_(leaf, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    merge_folders(TA, tmp_path / "base", {"x": tmp_path / "adapter"}, tmp_path / "out")
    ours, before = folders.load(tmp_path / "out"), llama.state_dict()
    assert ours.keys() == expected.keys()
    moved = {path for path, leaf in expected.items() if not torch.equal(leaf, before[path])}
    assert moved
    for path, leaf in expected.items():
        close = 1e-6 if path in moved else 0
        torch.testing.assert_close(ours[path], leaf, rtol=0, atol=close, msg=path)


def test_extraction_is_the_truncated_singular_value_decomposition(base, folders, tmp_path):
    generator = torch.Generator().manual_seed(0)
    wide = {path: leaf.float() for path, leaf in base.items()}
    deltas = {path: torch.randn(leaf.shape, generator=generator) for path, leaf in base.items()}
    deltas["model.layers.1.q.weight"].zero_()
    folders.save(tmp_path / "base", wide)
    folders.save(tmp_path / "expert", {path: leaf + deltas[path] for path, leaf in wide.items()})
    report = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=3)
    assert report.whole == ("model.norm.weight",)
    assert report.errors.keys() == base.keys() - {"model.layers.1.q.weight"}
    ours = merged(folders, wide, tmp_path / "lora", tmp_path)
    for path, error in report.errors.items():
        delta = deltas[path].double()
        if delta.ndim == 1:
            assert error == 0
            assert torch.equal(ours[path], wide[path] + deltas[path])
            continue
        u, s, v = torch.linalg.svd(delta, full_matrices=False)
        assert math.isclose(error, float(s[3:].norm() / s.norm()), rel_tol=1e-4)
        torch.testing.assert_close(ours[path] - wide[path], ((u[:, :3] * s[:3]) @ v[:3]).float(), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"rank is 0, must be at least 1; .*lora exists"):
        extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=0)


def test_a_module_of_low_rank_whose_name_ends_another(folders, tmp_path):
    base = {"fc.weight": torch.zeros(2, 6), "block.fc.weight": torch.zeros(6, 6)}
    folders.save(tmp_path / "base", base)
    expert = {path: numbers(*leaf.shape, seed=i) for i, (path, leaf) in enumerate(base.items())}
    folders.save(tmp_path / "expert", expert)
    extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=6)
    ours = merged(folders, base, tmp_path / "lora", tmp_path)
    for path, leaf in expert.items():
        torch.testing.assert_close(ours[path], leaf, rtol=0, atol=1e-4)


def test_an_adapter_without_factors_is_refused(folders, tmp_path):
    base = {"stem.weight": torch.zeros(4, 3, 2, 2), "stem.bias": torch.zeros(4)}
    folders.save(tmp_path / "base", base)
    folders.save(tmp_path / "expert", {path: leaf + 1 for path, leaf in base.items()})
    with pytest.raises(ValueError, match=r"none of the 2 weights of .*expert that differ .*publish the expert itself"):
        extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=1)
    folders.save(tmp_path / "copy", base)
    with pytest.raises(ValueError, match=r"no weight of .*copy differs from .*base: an adapter would be empty"):
        extract_lora(tmp_path / "base", tmp_path / "copy", tmp_path / "lora", rank=1)
    assert not (tmp_path / "lora").exists()


def test_an_adapter_is_written_into_none_of_its_inputs(base, folders, tmp_path):
    wide = {path: leaf.float() for path, leaf in base.items()}
    folders.save(tmp_path / "base", wide)
    folders.save(tmp_path / "expert", {path: leaf + 1 for path, leaf in wide.items()})
    lora = tmp_path / "lora"
    extract_lora(tmp_path / "base", tmp_path / "expert", lora, rank=1)
    before = (lora / "adapter_model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="which is, holds or lies in"):
        extract_lora(tmp_path / "base", lora, lora, rank=2, overwrite=True)
    with pytest.raises(ValueError, match="which is, holds or lies in"):
        merge_adapters({"a": lora}, lora, lambda found: found["a"], overwrite=True)
    assert (lora / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
def test_square_weights_of_conv1d_beside_linear_layers_are_told_by_the_model(folders, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 4, "bos_token_id": 0}
    base = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, eos_token_id=0, tie_word_embeddings=False))
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["attn.c_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(base, settings)
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["fan_in_fan_out"] is False  # of lm_head
    merge_folders(TA, tmp_path / "base", {"x": tmp_path / "adapter"}, tmp_path / "out")
    ours, expected = folders.load(tmp_path / "out"), model.merge_and_unload().state_dict()
    for path in ("transformer.h.0.attn.c_proj.weight", "lm_head.weight"):
        torch.testing.assert_close(ours[path], expected[path], rtol=0, atol=1e-6)
    (tmp_path / "base/config.json").unlink()
    with pytest.raises(ValueError, match=r"h\.0\.attn\.c_proj\.weight' is square, .* with peft, and give the"):
        merge_folders(TA, tmp_path / "base", {"x": tmp_path / "adapter"}, tmp_path / "no")


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_that_peft_trained_are_those_of_the_expert(bias, folders, tmp_path):
    peft = pytest.importorskip("peft")
    start = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 4))
    base = {path: leaf.clone() for path, leaf in start.state_dict().items()}
    folders.save(tmp_path / "base", base)
    given = peft.LoraConfig(r=2, target_modules=["0"], bias=bias, init_lora_weights=False)
    model = peft.get_peft_model(start, given)
    trained = [leaf for name, leaf in model.named_parameters() if leaf.requires_grad and name.endswith("bias")]
    for leaf in trained:
        leaf.data += torch.randn(leaf.shape)
    model.save_pretrained(tmp_path / "adapter")
    ours, theirs = merged(folders, base, tmp_path / "adapter", tmp_path), model.merge_and_unload().state_dict()
    changed = {path for path in base if path.endswith("bias") and not ours[path].equal(base[path])}
    assert len(changed) == len(trained) == {"all": 3, "lora_only": 1}[bias]
    for path, leaf in theirs.items():
        torch.testing.assert_close(ours[path], leaf, rtol=0, atol=1e-6, msg=path)
    with pytest.raises(
        ValueError, match=f"sets bias to '{bias}', .*which is not a factor of a matrix: merge whole models"
    ):
        merge_adapters({"x": tmp_path / "adapter"}, tmp_path / "none", lambda found: found["x"])


@pytest.mark.filterwarnings("ignore")  # of peft, about transformers
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_extraction_at_full_rank_gives_the_expert_back_through_peft(family, llama, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    small = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    base = llama if family == "llama" else transformers.GPT2LMHeadModel(small)
    expert = copy.deepcopy(base)
    generator = torch.Generator().manual_seed(0)
    for name, leaf in expert.named_parameters():
        if not name.endswith((".c_attn.bias", ".c_proj.bias", ".c_fc.bias")):  # an adapter cannot hold these
            leaf.data += 0.1 * torch.randn(leaf.shape, generator=generator)
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    report = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=64)
    assert max(report.errors.values()) < 1e-6
    assert (report.error < 1e-6, report.left_out) == (True, ())
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "lora").merge_and_unload()
    for path, leaf in expert.state_dict().items():
        torch.testing.assert_close(model.state_dict()[path], leaf, rtol=0, atol=2e-6, msg=path)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_this_library_are_experts(rslora, base, folders, tmp_path):
    paths = ("model.layers.0.q.weight", "model.layers.0.up.weight")
    settings = lora.Lora(paths, rank=4, alpha=2.0, rslora=rslora)
    wide = {path: leaf.float() for path, leaf in base.items()}
    trained = lora.init(random.key(0), wide, settings)
    trained = {name: numbers(*leaf.shape, seed=i) for i, (name, leaf) in enumerate(trained.items())}
    lora.save_peft(tmp_path / "adapter", trained, settings, base="tiny")
    expected = {**wide, **lora.expand(trained, wide, settings)}
    folders.assert_same_bits(merged(folders, base, tmp_path / "adapter", tmp_path), expected)


def test_errors_for_adapters_of_a_component_and_of_convolutions_name_the_way_out(base, adapter, folders, tmp_path):
    start = folders.save(tmp_path / "pipeline/unet", base).parent
    (start / "model_index.json").write_text("{}")
    of_part = adapter({"model.layers.1.q": factors((6, 6))}, name="of_part")
    told = rf"'base_model.model.model.layers.1.q.weight', its unet/ has: give {start}/unet as base$"
    with pytest.raises(ValueError, match=told):
        plan(TA, start, {"x": of_part}, tmp_path / "none")
    both = adapter({f"model.layers.{i}.q": factors((6, 6)) for i in (0, 1)}, name="both")
    with pytest.raises(ValueError, match=r"layers\.0\.q' and 1 more, but base has no .* as base$") as caught:
        plan(TA, start, {"x": both}, tmp_path / "none")
    assert str(caught.value).count(" as base") == 1
    plan(TA, start / "unet", {"x": of_part}, tmp_path / "none")
    a, b = factors((6, 6))
    grouped = adapter({"model.layers.1.q": (a[..., None], b[:, :1, None])}, name="grouped")
    told = "convolutions with groups are not read here: merge it into its base with peft, and give the result"
    with pytest.raises(ValueError, match=f" do not fit, {told}"):
        plan(TA, start / "unet", {"x": grouped}, tmp_path / "none")
    conv = adapter({"model.layers.1.q": (a[..., None], b[..., None])}, name="conv")
    told = "convolutions are not read here: merge it into its base with peft, and give the result"
    with pytest.raises(ValueError, match=f" not factors of a matrix, {told}"):
        merge_adapters({"x": conv}, tmp_path / "none", lambda found: found["x"])
    with pytest.raises(ValueError, match="convolutions are not read here, merge it into its base with peft"):
        lora.load_peft(conv)
