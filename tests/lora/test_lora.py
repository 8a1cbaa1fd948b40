"""Adapters against the merged weight they stand for, by hand and by PEFT."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import draw, lora, materialise, optim, random, value_and_grad
from smat_fn.folders import open_folder
from smat_fn.folders.inputs.adapters.experts import open_adapter
from smat_fn.grad import ModuleLoss
from smat_fn.lora import dropout
from smat_fn.mat import smat
from smat_fn.models.pretrained import checkpoint_blocks
from smat_fn.types import Micro
from smat_fn.where import block_linear

KEY = random.key(5)
STRENGTHS = {"alpha_min": 0.3, "drop_prob": 0.5, "sigma": 0.05}


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(6, 8), "down": torch.nn.Linear(8, 6)}) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).tanh())
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Blocks().double()


@pytest.fixture
def setting(model):
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    paths, transposed = lora.linear_paths(model)
    adapter = lora.Lora(paths, rank=2, alpha=6.0, transposed=transposed)
    start = lora.init(KEY, base, adapter)
    moved = {name: leaf + 0.1 * torch.randn_like(leaf) for name, leaf in start.items()}
    return base, adapter, start, moved


def squares(module, batch):
    return (module(batch) ** 2).mean(), None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_an_expert_is_read_to_the_cpu_wherever_its_base_lies(setting, tmp_path):
    base, adapter, _, moved = setting
    lora.save_peft(tmp_path / "adapter", moved, adapter, base="tiny", manifest={"kind": "expert"})
    there, here = ({name: leaf.to(place) for name, leaf in base.items()} for place in ("cuda", "cpu"))
    found, wanted = (lora.load_expert(tmp_path / "adapter", own)[0] for own in (there, here))
    assert all(torch.equal(found[name], leaf) for name, leaf in wanted.items())


def test_the_start_is_the_base_and_every_matrix_of_a_block_has_adapters(setting, model):
    base, adapter, start, _ = setting
    assert adapter.paths == tuple(f"layers.{i}.{n}.weight" for i in range(2) for n in ("up", "down"))
    merged = lora.expand(start, base, adapter)
    assert all(torch.equal(merged[path], base[path]) for path in adapter.paths)
    assert start["layers.0.up.lora_A.weight"].shape == (2, 6)
    assert start["layers.0.up.lora_B.weight"].shape == (8, 2)
    bound = {name: leaf.abs().max() * leaf.shape[1] ** 0.5 for name, leaf in start.items() if "lora_A" in name}
    assert all(0.5 < value <= 1 for value in bound.values())
    assert lora.linear_paths(model, ["down", "layers.1.*"])[0] == (adapter.paths[1], *adapter.paths[2:])


def test_adapters_start_at_the_same_bits_on_every_device(setting, monkeypatch):
    base, adapter, start, _ = setting
    asked, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda own, *args: asked.append(own) or to(own, *args))
    there = lora.init(KEY, {path: leaf.to("meta") for path, leaf in base.items()}, adapter)
    assert all(there[name].is_meta and there[name].dtype == leaf.dtype for name, leaf in start.items())
    # what is sent there needs no arithmetic any more, which a GPU would round otherwise
    sent = [leaf.double() for leaf in asked if leaf.shape == (2, 6) and not leaf.is_meta]
    assert any(torch.equal(leaf, start["layers.0.up.lora_A.weight"]) for leaf in sent)


def test_expanded_weights_are_those_of_the_definition(setting):
    base, adapter, _, moved = setting
    merged = lora.expand(moved, base, adapter)
    for path in adapter.paths:
        layer = path.removesuffix(".weight")
        wanted = base[path] + 3.0 * (moved[layer + ".lora_B.weight"] @ moved[layer + ".lora_A.weight"])
        assert torch.allclose(merged[path], wanted, rtol=1e-14)
    assert lora.Lora(adapter.paths, rank=4, alpha=6.0, rslora=True).scaling == 3.0


@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_the_gradient_at_a_simulated_merged_weight_is_the_chain_rule(engine, setting, model):
    base, adapter, _, moved = setting
    where = block_linear(model)
    drawn = draw(random.fold_in(KEY, 3), **STRENGTHS)
    loss_fn, batch = ModuleLoss(model, squares), torch.randn(5, 6, dtype=torch.float64)
    at = value_and_grad(lora.with_lora(loss_fn, base, adapter, drawn=drawn, where=where), engine=engine)
    (loss, _), grads = at(moved, batch)
    merged = lora.expand(moved, base, adapter)
    mask, noise = materialise(drawn, merged, where=where)
    scale = drawn.scale.double()
    state = {p: base[p] + scale * mask[p] * (merged[p] - base[p]) + noise[p] for p in adapter.paths}
    (wanted, _), dense = value_and_grad(loss_fn, engine="func")({**base, **state}, batch)
    assert torch.allclose(loss, wanted, rtol=1e-10)
    for path in adapter.paths:
        layer, g = path.removesuffix(".weight"), scale * mask[path] * dense[path]
        a, b = moved[layer + ".lora_A.weight"], moved[layer + ".lora_B.weight"]
        assert torch.allclose(grads[layer + ".lora_A.weight"], 3.0 * b.T @ g, rtol=1e-8, atol=1e-12)
        assert torch.allclose(grads[layer + ".lora_B.weight"], 3.0 * g @ a.T, rtol=1e-8, atol=1e-12)


def test_every_period_th_step_is_simulated_and_the_others_are_plain(setting, model):
    base, adapter, start, _ = setting
    loss_fn, batch = ModuleLoss(model, squares), torch.randn(5, 6, dtype=torch.float64)
    options = {"where": block_linear(model), "max_grad_norm": 0.1, "period": 2, **STRENGTHS}
    method = lora.build(loss_fn, optim.adam(1e-2), base, adapter, **options)
    plain = smat.build(lora.with_lora(loss_fn, base, adapter), optim.adam(1e-2), start, max_grad_norm=0.1, sigma=0.0,
                       alpha_min=1.0, drop_prob=0.0)  # fmt: skip
    state, other = method.init(start), plain.init(start)
    for step in range(4):
        state, info = method.update(KEY, state, batch)
        other, _ = plain.update(KEY, other, batch)
        assert info.simulated == (step % 2 == 1)
        same = [torch.equal(state.params[name], other.params[name]) for name in start]
        assert all(same) if step == 0 else not all(same)
    # two micro-batches of one draw are the whole batch
    halves, _ = method.update(KEY, state, [Micro(batch[:2]), Micro(batch[2:4])])
    whole, _ = method.update(KEY, state, batch[:4])
    assert all(torch.allclose(halves.params[name], whole.params[name], rtol=1e-9) for name in start)


def test_checkpointed_layers_meet_the_simulated_weights_again(setting, model):
    base, adapter, _, moved = setting
    drawn, batch = draw(KEY, **STRENGTHS), torch.randn(5, 6, dtype=torch.float64)

    def checkpointed(module, x):
        for layer in module.layers:
            inside = torch.utils.checkpoint.checkpoint(
                lambda x, layer=layer: layer["down"](layer["up"](x).tanh()), x, use_reentrant=False
            )
            x = x + inside
        return (x**2).mean(), None

    def grads(loss):
        adapted = lora.with_lora(ModuleLoss(model, loss), base, adapter, drawn=drawn)
        return value_and_grad(adapted, engine="autograd")(moved, batch)[1]

    one, two = grads(squares), grads(checkpointed)
    assert all(torch.equal(one[name], two[name]) for name in moved)


def test_bad_input_is_listed(setting, model):
    base, adapter, start, _ = setting
    with pytest.raises(ValueError, match=r"'bias' is not the weight.*; rank is 0.*; alpha is nan"):
        lora.Lora(("bias",), rank=0, alpha=float("nan"))
    with pytest.raises(ValueError, match=r"^lora: paths is 'x.weight': give a tuple of paths$"):
        lora.Lora("x.weight")
    with pytest.raises(ValueError, match=r"^lora: saved is None: give a tuple of paths$"):
        lora.Lora(("x.weight",), saved=None)
    with pytest.raises(ValueError, match=r"alpha is '8', must be a positive.*; dropout is 'x', must lie in"):
        lora.Lora(("x.weight",), alpha="8", dropout="x")
    for call in (lora.linear_paths, lora.whole_paths):
        with pytest.raises(ValueError, match=r"is the text 'norm': give a list, \['norm'\]"):
            call(model, "norm")
    with pytest.raises(ValueError, match=r"'x.weight' is in paths and in saved"):
        lora.Lora(("x.weight",), saved=("x.weight",))
    with pytest.raises(ValueError, match=r"'x.weight'.*\n?.*rank 7"):
        lora.init(KEY, base, lora.Lora(("x.weight", adapter.paths[0]), rank=7))
    with pytest.raises(ValueError, match="'q_proj' fits no linear layer"):
        lora.linear_paths(model, ["q_proj"])
    with pytest.raises(ValueError, match=r"sigma is -1.*; period is 0"):
        lora.build(ModuleLoss(model, squares), optim.adam(1e-2), base, adapter, sigma=-1.0, period=0)
    with pytest.raises(ValueError, match=r"drop_prob is 0.5, but Mask has nothing to act on: where picks none of 4"):
        lora.build(ModuleLoss(model, squares), optim.adam(1e-2), base, adapter, where=lambda path, leaf: "x" in path)
    with pytest.raises(ValueError, match=r"offload is 'cpu', but adapters .*; sigma_of is 'leaf', but .*; sigma is -1"):
        lora.build(
            ModuleLoss(model, squares), optim.adam(1e-2), base, adapter, offload="cpu", sigma_of="leaf", sigma=-1.0
        )
    method = lora.build(ModuleLoss(model, squares), optim.adam(1e-2), base, adapter)
    with pytest.raises(ValueError, match="lora_A"):
        method.init({name: leaf for name, leaf in start.items() if "lora_A" not in name})


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_saved_folder_is_pefts_own_and_merges_to_the_same_weights(family, tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
    else:
        config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.AutoModelForCausalLM.from_config(config)
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    paths, transposed = lora.linear_paths(model)
    assert bool(transposed) == (family == "gpt2")
    adapter = lora.Lora(paths, rank=3, alpha=5.0, rslora=True, transposed=transposed)
    trained = {name: leaf + 0.1 * torch.randn_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
    lora.save_peft(tmp_path / "adapter", trained, adapter, base="tiny", manifest={"kind": "expert"})
    read, known = lora.load_peft(tmp_path / "adapter")
    assert known == adapter
    assert all(torch.equal(read[name], leaf) for name, leaf in trained.items())
    assert json.loads((tmp_path / "adapter/manifest.json").read_text()) == {"kind": "expert"}
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    wanted = {**base, **lora.expand(trained, base, adapter)}
    for name, p in merged.named_parameters():
        torch.testing.assert_close(p.detach(), wanted[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="exists"):
        lora.save_peft(tmp_path / "adapter", trained, adapter, base="tiny")
    with pytest.raises(ValueError, match="holds no adapters"):
        lora.load_peft(tmp_path)


def test_square_weights_of_both_layouts_are_read_as_they_were_written(tmp_path):
    base = {"h.0.attn.weight": torch.zeros(4, 4), "h.0.up.weight": torch.zeros(4, 4)}
    adapter = lora.Lora(tuple(base), rank=2, alpha=4.0, transposed=frozenset({"h.0.attn.weight"}))
    trained = {name: torch.randn_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
    for kind in (None, "CAUSAL_LM"):
        lora.save_peft(tmp_path, trained, adapter, base="tiny", task_type=kind, overwrite=True)
        assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == kind
    read, known = lora.load_peft(tmp_path)
    assert known == adapter
    for path, leaf in lora.expand(read, base, known).items():
        assert torch.equal(leaf, lora.expand(trained, base, adapter)[path])


class TwoLayouts(torch.nn.Module):
    """Square weights of a Linear, as of ViT, and of a Conv1D, as of GPT-2: a captioning model has both."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(0)
        self.query, self.c_proj, self.c_attn = torch.nn.Linear(4, 4), Conv1D(4, 4), Conv1D(12, 4)


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning")  # of peft
def test_square_weights_of_both_layouts_that_peft_adapted_are_told_by_the_module(tmp_path):
    peft = pytest.importorskip("peft")
    base = {name: p.detach().clone() for name, p in TwoLayouts().named_parameters()}
    for targets in ["query", "c_proj"], ["c_proj", "c_attn"], ["query", "c_attn"]:
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True)
        model = peft.get_peft_model(TwoLayouts(), config)
        folder = tmp_path / "_".join(targets)
        model.save_pretrained(folder)
        wanted = dict(model.merge_and_unload().named_parameters())
        read, adapter = lora.load_peft(folder, TwoLayouts())
        assert adapter.transposed == {f"{name}.weight" for name in targets if name != "query"}
        for name, leaf in {**base, **lora.expand(read, base, adapter)}.items():
            torch.testing.assert_close(leaf, wanted[name].detach(), rtol=1e-5, atol=1e-6)
        if "query" not in targets:  # PEFT's one value is right
            assert lora.load_peft(folder)[1] == adapter
            continue
        with pytest.raises(
            ValueError, match=r"'c_\w+' is named as a Conv1D, 'query' is not, .*: give load_peft the mod"
        ):
            lora.load_peft(folder)
        lora.save_peft(tmp_path / "own", read, adapter, base="x", overwrite=True)
        assert lora.load_peft(tmp_path / "own")[1].transposed == adapter.transposed
        with pytest.raises(ValueError, match="module has no layer 'query': is it the model that was adapted"):
            lora.load_peft(folder, torch.nn.Linear(4, 4))
    linear = lora.Lora(("c_proj.weight", "query.weight"), rank=2)  # layers are named c_proj in other models too
    lora.save_peft(tmp_path / "linear", lora.init(KEY, base, linear), linear, base="x")
    assert lora.load_peft(tmp_path / "linear")[1].transposed == frozenset()
    wide = lora.Lora(("c_attn.weight",), rank=2, transposed=frozenset({"c_attn.weight"}))
    with pytest.raises(
        ValueError, match=r"^B A of 'c_attn.weight' has shape \(12, 4\), base \(4, 12\): is it of anoth"
    ):
        lora.expand(lora.init(KEY, base, wide), base, dataclasses.replace(wide, transposed=frozenset()))


def test_adapters_of_another_lora_are_refused(tmp_path):
    base = {"h.0.up.weight": torch.ones(4, 4), "head.weight": torch.ones(4, 4)}
    own = lora.Lora(("h.0.up.weight",), rank=2, saved=("head.weight",))
    adapters = lora.init(KEY, base, own)
    for lacking in adapters:
        rest = {name: leaf for name, leaf in adapters.items() if name != lacking}
        with pytest.raises(ValueError, match=f"^adapters lack leaf '{lacking}'$"):
            lora.expand(rest, base, own)
        with pytest.raises(ValueError, match=f"^adapters lack leaf '{lacking}' of lora$"):
            lora.save_peft(tmp_path / "no", rest, own, base="x")
    with pytest.raises(
        ValueError, match=r"^the base has no leaf 'h\.0\.up\.weight'; the base has no leaf 'head\.weight'$"
    ):
        lora.expand(adapters, {}, own)
    with pytest.raises(ValueError, match=r"^adapters have leaf 'x' that lora lacks; adapters have rank 2, lora has 3$"):
        lora.save_peft(
            tmp_path / "no", {**adapters, "x": base["head.weight"]}, dataclasses.replace(own, rank=3), base="x"
        )
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("of", ["expand", "function", "module"])
def test_factors_of_another_rank_or_leaf_are_refused_by_every_loss(of, setting, model):
    base, adapter, _, moved = setting
    first = adapter.paths[0].removesuffix("weight") + "lora_A.weight"
    lacking = {name: leaf for name, leaf in moved.items() if name != first}
    narrow = {**moved, first: moved[first][:1]}

    def run(adapters, own):
        if of == "expand":
            return lora.expand(adapters, base, own)
        loss = ModuleLoss(model, squares)
        full = loss if of == "module" else lambda params, batch: loss(params, batch)
        return value_and_grad(lora.with_lora(full, base, own))(adapters, torch.ones(2, 6).double())

    with pytest.raises(ValueError, match=rf"adapters lack leaf '{first}'"):
        run(lacking, adapter)
    with pytest.raises(ValueError, match=r"have shapes \(1, 6\) and \(8, 2\), of rank 2 they are \(2, in\)"):
        run(narrow, adapter)
    with pytest.raises(ValueError, match=r"of rank 3 they are \(3, in\) and \(out, 3\): give the Lora that they"):
        run(moved, dataclasses.replace(adapter, rank=3))
    run(moved, adapter)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapter_config.json", '{"r": '),
        ("adapter_config.json", "[1]"),
        ("adapter_model.safetensors", ""),
        ("adapter_model.safetensors", "cut off"),
    ],
)
def test_damaged_adapters_are_named(name, text, setting, tmp_path):
    _, adapter, start, _ = setting
    lora.save_peft(tmp_path / "a", start, adapter, base="x")
    (tmp_path / "a" / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}/a is not a readable adapter .*: copy or download it again"):
        lora.load_peft(tmp_path / "a")


def test_settings_that_are_no_numbers_are_named(setting, tmp_path):
    _, adapter, start, _ = setting
    lora.save_peft(tmp_path / "a", start, adapter, base="x")
    file = tmp_path / "a" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "lora_dropout": "x"}))
    with pytest.raises(ValueError, match=r"a: lora_dropout of adapter_config.json is 'x', must lie in \[0, 1\)"):
        lora.load_peft(tmp_path / "a")
    del config["target_modules"]
    file.write_text(json.dumps(config))
    assert set(lora.load_peft(tmp_path / "a")[1].paths) == set(adapter.paths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_called_by_keyword_drops_the_same_inputs(dtype):
    class Named(torch.nn.Module):
        def __init__(self, by_name):
            super().__init__()
            self.layers, self.by_name = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(6, 6))]), by_name

        def forward(self, x):
            return self.layers[0][0](input=x) if self.by_name else self.layers[0][0](x)

    found = []
    for by_name in (False, True):
        torch.manual_seed(0)
        model = Named(by_name).to(dtype)
        base = {name: p.detach().clone() for name, p in model.named_parameters()}
        adapter = lora.Lora(lora.linear_paths(model)[0], rank=2)
        adapters = {name: torch.ones_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
        dropping = lora.with_dropout(ModuleLoss(model, squares), base, adapter, 0.5)
        loss = lora.with_lora(dropping, base, adapter)
        found.append(loss(adapters, torch.linspace(0, 1, 12).view(2, 6).to(dtype), key=KEY)[0])
    assert torch.equal(*found)


def test_adapters_of_wrapped_blocks_are_named_as_those_of_the_model(tmp_path):
    for folder, prefix in (("plain", "h.0."), ("wrapped", "h.0._orig_mod.")):
        base = {f"{prefix}attn.weight": torch.ones(4, 4), f"{prefix}up.weight": torch.ones(4, 3)}
        attn, up = base
        adapter = lora.Lora((attn,), rank=2, transposed=frozenset({attn}), saved=(up,))
        trained = {name: torch.ones_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
        lora.save_peft(tmp_path / folder, trained, adapter, base="tiny")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "wrapped" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()
    file = tmp_path / "wrapped" / "adapter_model.safetensors"
    plain = lora.load_peft(tmp_path / "plain")[0]
    save_file({f"_orig_mod.{name}": leaf for name, leaf in load_file(file).items()}, file)  # of a compiled PeftModel
    wrapped = lora.load_peft(tmp_path / "wrapped")[0]
    assert plain.keys() == wrapped.keys()
    assert all(torch.equal(leaf, wrapped[name]) for name, leaf in plain.items())


def encoder(**options):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def test_an_attention_of_torch_is_one_layer_whose_input_projection_has_adapters():
    module = encoder()
    weights = ["self_attn.in_proj_weight", "linear1.weight", "linear2.weight"]
    paths, transposed = lora.linear_paths(module)
    assert paths == tuple(f"layers.{i}.{name}" for i in range(2) for name in weights)
    assert not transposed
    assert lora.linear_paths(module, ["self_attn"])[0] == (paths[0], paths[3])
    assert lora.linear_paths(module, ["layers.1.*"])[0] == paths[3:]
    with pytest.raises(ValueError, match="target 'out_proj' fits no linear layer"):
        lora.linear_paths(module, ["out_proj"])
    blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(4, 2, kdim=3)})])
    with pytest.raises(ValueError, match=r"attention '0.attention' has weights of their own for q, k and v"):
        lora.linear_paths(blocks)
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    start = lora.init(KEY, base, lora.Lora(paths, rank=2, alpha=4.0))
    assert start["layers.0.self_attn.lora_B.weight"].shape == (24, 2)
    loss = lora.with_lora(ModuleLoss(module, squares), base, lora.Lora(paths, rank=2, alpha=4.0))
    _, grads = value_and_grad(loss, engine="autograd")(start, torch.randn(2, 3, 8))
    assert grads["layers.0.self_attn.lora_B.weight"].abs().sum() > 0


def test_adapters_of_torchs_attention_are_pefts_own(tmp_path):
    peft = pytest.importorskip("peft")
    module = encoder().eval()
    base = {name: p.detach().clone() for name, p in module.named_parameters()}
    adapter = lora.Lora(lora.linear_paths(module)[0], rank=2, alpha=4.0)
    trained = {name: leaf + 0.3 * torch.randn_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
    lora.save_peft(tmp_path / "adapter", trained, adapter, base="tiny")
    read, known = lora.load_peft(tmp_path / "adapter")
    assert set(known.paths) == set(adapter.paths)
    assert all(torch.equal(read[name], leaf) for name, leaf in trained.items())
    merged = {**base, **lora.expand(trained, base, adapter)}
    wrapped = peft.PeftModel.from_pretrained(encoder().eval(), tmp_path / "adapter")
    for name, p in wrapped.merge_and_unload().named_parameters():
        torch.testing.assert_close(p.detach(), merged[name], rtol=1e-5, atol=1e-6)
    # as merge.py reads the folder
    save_file(base, tmp_path / "model.safetensors")
    opened = open_adapter("it", tmp_path / "adapter", open_folder("base", tmp_path))
    for name, leaf in merged.items():
        found = opened.read(name, 0, leaf.numel()).view(leaf.shape)
        torch.testing.assert_close(found, leaf, rtol=1e-5, atol=1e-6)


def llama(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(module, batch):
    return module(input_ids=batch, labels=batch).loss, None


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_modules_that_are_trained_whole_are_pefts_modules_to_save(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    paths, _ = lora.linear_paths(model, ["q_proj"])
    saved = lora.whole_paths(model, ["lm_head", "model.norm"], paths)
    assert saved == ("lm_head.weight", "model.norm.weight")
    adapter = lora.Lora(paths, rank=2, alpha=4.0, saved=saved, dropout=0.25)
    start = lora.init(KEY, base, adapter)
    assert all(torch.equal(start[path], base[path]) and start[path] is not base[path] for path in saved)
    loss, options = ModuleLoss(model, tokens), {"where": block_linear(model), "period": 2, **STRENGTHS}
    with pytest.raises(ValueError, match=r"lora.dropout is 0.25, but the loss drops nothing"):
        lora.build(loss, optim.adam(1e-2), base, adapter, **options)
    loss = lora.with_dropout(loss, base, adapter, 0.25)
    method = lora.build(loss, optim.adam(1e-2), base, adapter, **options)
    state = method.init(start)
    batch = torch.arange(20).view(2, 10)
    for _ in range(2):
        state, info = method.update(KEY, state, batch)
    assert info.simulated
    trained = state.params
    assert not any(torch.equal(trained[path], base[path]) for path in saved)
    lora.save_peft(tmp_path / "adapter", trained, adapter, base="tiny")
    read, known = lora.load_peft(tmp_path / "adapter")
    assert known == adapter
    assert read.keys() == trained.keys()
    wanted = {**base, **lora.expand(trained, base, adapter)}
    wrapped = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    found = wrapped.merge_and_unload()
    for name, p in found.named_parameters():
        torch.testing.assert_close(p.detach(), wanted[name], rtol=1e-5, atol=1e-6)
    save_file(base, tmp_path / "model.safetensors")
    opened = open_adapter("it", tmp_path / "adapter", open_folder("base", tmp_path))
    for path in saved:
        assert torch.equal(opened.read(path, 0, base[path].numel()).view(base[path].shape), trained[path])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_adapters_that_peft_wrote_are_read(tmp_path):
    peft = pytest.importorskip("peft")
    base = {name: p.detach().clone() for name, p in llama().named_parameters()}
    for i, targets in enumerate((["q_proj", "v_proj"], r".*\.1\..*q_proj")):
        config = peft.LoraConfig(
            r=2, target_modules=targets, init_lora_weights=False, modules_to_save=["lm_head", "norm"]
        )
        model = peft.get_peft_model(llama(), config)
        model.save_pretrained(tmp_path / str(i))
        read, adapter = lora.load_peft(tmp_path / str(i))
        assert len(adapter.saved) == 6  # of every module whose name ends so
        wanted = model.merge_and_unload().state_dict()
        for name, leaf in {**base, **lora.expand(read, base, adapter)}.items():
            torch.testing.assert_close(leaf, wanted[name], rtol=1e-5, atol=1e-6)
    file = tmp_path / "0/adapter_config.json"
    known = json.loads(file.read_text())
    for name, value in {"init_lora_weights": "pissa", "layer_replication": [[0, 2]], "peft_type": "LOHA"}.items():
        file.write_text(json.dumps({**known, name: value}))
        with pytest.raises(ValueError, match=f"sets {name} to .*, which is not read here"):
            lora.load_peft(tmp_path / "0")
    file.write_text(json.dumps({**known, "r": 4}))
    with pytest.raises(ValueError, match=r"adapters have rank 2, adapter_config\.json says 4"):
        lora.load_peft(tmp_path / "0")
    file.write_text(json.dumps(known))
    layer, weights = "model.layers.1.self_attn.q_proj", load_file(tmp_path / "0/adapter_model.safetensors")
    del weights[f"base_model.model.{layer}.lora_A.weight"]
    weights[f"base_model.model.{layer}.lora_B.weight"] = torch.ones(16, 2, 1)
    save_file(weights, tmp_path / "0/adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"\(16, 2, 1\), not a matrix: conv.*; .*: '{layer}' has one factor, must"):
        lora.load_peft(tmp_path / "0")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["embed_tokens"]))
    model.save_pretrained(tmp_path / "other", save_embedding_layers=False)
    with pytest.raises(
        ValueError, match=r"lora_embedding_A' belongs neither to an adapter .*: give this folder to merge"
    ):
        lora.load_peft(tmp_path / "other")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
def test_peft_adapters_of_some_layers_are_read_and_those_of_several_ranks_refused(tmp_path):
    peft = pytest.importorskip("peft")
    base = {name: p.detach().clone() for name, p in llama().named_parameters()}
    some = {"layers_to_transform": [1], "layers_pattern": "layers"}
    several = {"rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 5}}
    for name, options in {"some": some, "several": several}.items():
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
        model = peft.get_peft_model(llama(), config)
        model.save_pretrained(tmp_path / name)
        wanted = model.merge_and_unload().state_dict()
        if name == "several":
            with pytest.raises(
                ValueError, match=r"rank_pattern is {'v_proj': 3}, .*: give this folder to merge.py or .*alp"
            ):
                lora.load_peft(tmp_path / name)
            save_file(base, tmp_path / "model.safetensors")
            opened = open_adapter("it", tmp_path / name, open_folder("base", tmp_path))
            found = {path: opened.leaf(path) for path in base}
        else:
            read, adapter = lora.load_peft(tmp_path / name)
            assert {path.split(".")[2] for path in adapter.paths} == {"1"}
            found = {**base, **lora.expand(read, base, adapter)}
        for path, leaf in found.items():
            torch.testing.assert_close(leaf, wanted[path], rtol=1e-5, atol=1e-6)


def test_modules_that_peft_would_train_otherwise_are_refused():
    tied = llama(tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head' shares its weights with model.embed_tokens.weight"):
        lora.whole_paths(tied, ["lm_head"])
    model = llama()
    with pytest.raises(ValueError, match="'head' is not there"):
        lora.whole_paths(model, ["head"])
    with pytest.raises(ValueError, match="has adapters inside"):
        lora.whole_paths(model, ["self_attn"], lora.linear_paths(model)[0])
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.up_proj' is inside 'model.layers.0.mlp'"):
        lora.whole_paths(model, ["model.layers.0.mlp", "model.layers.0.mlp.up_proj"])


class Masked(torch.nn.Module):
    """PEFT's dropout with a mask that is given: (1 - p) / p is in it."""

    def __init__(self, key, p):
        super().__init__()
        self.key, self.p = key, p

    def forward(self, x):
        return x * (random.uniform(self.key, tuple(x.shape)) >= self.p) / (1 - self.p)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # asked by peft
@pytest.mark.parametrize("checkpointed", [False, True])
def test_dropout_is_pefts_with_masks_of_the_key(checkpointed, tmp_path):
    peft = pytest.importorskip("peft")
    model, p = llama(), 0.4
    base = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    paths, _ = lora.linear_paths(model)
    adapter = lora.Lora(paths, rank=2, alpha=4.0, dropout=p)
    moved = {name: leaf + 0.1 * torch.randn_like(leaf) for name, leaf in lora.init(KEY, base, adapter).items()}
    lora.save_peft(tmp_path / "adapter", moved, adapter, base="tiny")
    wrapped = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter", is_trainable=True).eval()
    for path in paths:
        layer = wrapped.get_submodule("base_model.model." + path.removesuffix(".weight"))
        own = random.fold_in(random.fold_in(KEY, "adapters"), path)
        layer.lora_dropout["default"] = Masked(own, p)
    batch = torch.arange(20).view(2, 10)
    wanted = wrapped(input_ids=batch, labels=batch).loss
    wanted.backward()
    if checkpointed:
        checkpoint_blocks(model)
        model.train()
    loss = lora.with_lora(lora.with_dropout(ModuleLoss(model, tokens), base, adapter, p), base, adapter)
    (found, _), grads = value_and_grad(loss, engine="autograd")(moved, batch, key=KEY)
    torch.testing.assert_close(found, wanted.detach())
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            own = name.removeprefix("base_model.model.").replace(".default", "")
            torch.testing.assert_close(grads[own], parameter.grad, rtol=1e-4, atol=1e-6)
    (clean, _), _ = value_and_grad(loss, engine="autograd")(moved, batch)
    assert not torch.equal(clean, found)
    torch.testing.assert_close(
        clean, lora.with_lora(ModuleLoss(model, tokens), base, adapter)(moved, batch)[0].detach()
    )


def test_both_passes_of_a_step_drop_the_same_inputs_and_a_run_repeats():
    model = llama()
    base = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    adapter = lora.Lora(lora.linear_paths(model, ["q_proj", "down_proj"])[0], rank=2, alpha=4.0)
    seen = []

    def recorded(module, batch):
        seen.append(module.model.layers[0].mlp.down_proj(torch.ones(1, 24)).detach())
        return tokens(module, batch)

    loss = lora.with_dropout(ModuleLoss(model, recorded), base, adapter, 0.5)
    off = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 1e-8}  # two passes, at nearly the same state
    method = lora.build(loss, optim.adam(1e-2), base, adapter, where=block_linear(model), lam=0.5, **off)
    ends = []
    for _ in range(2):
        start = lora.init(KEY, base, adapter)
        state = method.init({name: leaf + 0.1 for name, leaf in start.items()})
        for _ in range(2):
            state, _ = method.update(KEY, state, torch.arange(10).view(1, 10))
        ends.append(state.params)
    assert all(torch.equal(leaf, ends[1][name]) for name, leaf in ends[0].items())
    assert len(seen) == 8  # of two runs two steps, each with a clean and a simulated pass
    for clean, simulated in zip(seen[::2], seen[1::2], strict=True):
        torch.testing.assert_close(clean, simulated, rtol=0, atol=1e-5)
    assert (seen[2] - seen[0]).abs().max() > 0.1


def test_masks_are_drawn_where_the_input_is_and_a_chunk_at_a_time(monkeypatch):
    loss = lora.with_dropout(ModuleLoss(encoder(), squares), {}, lora.Lora(("up.weight",), rank=2, alpha=4.0), 0.4)
    loss._keys[:], x, keys, uniform = [KEY], torch.zeros(3, 11), [], random.uniform
    wanted = uniform(random.fold_in(KEY, "w"), (3, 11)) >= 0.4
    monkeypatch.setattr(dropout, "CHUNK", 8)
    monkeypatch.setattr(random, "uniform", lambda key, shape: keys.append(key) or uniform(key, shape))
    assert torch.equal(loss._kept("w", x), wanted)
    assert loss._kept("w", x[:0]).shape == (0, 11)
    keys.clear()
    loss._kept("w", x.to("meta"))
    assert [key.device.type for key in keys] == ["meta"] * 5


def test_bad_dropout_is_refused():
    adapter = lora.Lora(lora.linear_paths(encoder())[0], rank=2, alpha=4.0)
    loss = ModuleLoss(encoder(), squares)
    with pytest.raises(ValueError, match=r"dropout of adapters is 1, must lie .*'layers.0.self_attn', an nn.Multihead"):
        lora.with_dropout(loss, {}, adapter, 1)
    with pytest.raises(ValueError, match="dropout is -1"):
        lora.Lora(adapter.paths, dropout=-1)
