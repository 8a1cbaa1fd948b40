"""Options of extracted adapters: rank by energy, factors alone, globs. PEFT itself reads every adapter."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file

from smat_fn.folders import extract_lora, merge_adapters
from smat_fn.merge.around.factors import combine

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about transformers


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=32, **sizes, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture
def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def changed(tmp_path):
    """``changed(model)``: base and expert on disk, and what changed."""

    def save(model, seed=1, name="expert"):
        expert, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for leaf in expert.parameters():
            leaf.data += 0.1 * torch.randn(leaf.shape, generator=generator)
        model.save_pretrained(tmp_path / "base")
        expert.save_pretrained(tmp_path / name)
        before = dict(model.named_parameters())
        return {path: (leaf - before[path]).detach() for path, leaf in expert.named_parameters()}

    return save


def through_peft(model, adapter):
    """The change of every parameter when PEFT merges an adapter into a model."""
    peft = pytest.importorskip("peft")
    before = model.state_dict()
    after = peft.PeftModel.from_pretrained(copy.deepcopy(model), adapter).merge_and_unload().state_dict()
    return {path: after[path] - leaf for path, leaf in before.items()}


def truncated(delta, energy, rank=None):
    """(nearest matrix, its rank): the smallest one that holds a share of the squared norm, at most ``rank``."""
    u, s, v = torch.linalg.svd(delta.double(), full_matrices=False)
    shares = s.square().cumsum(0) / s.square().sum()
    count = min(int((shares < energy).sum()) + 1, rank or len(s))
    return ((u[:, :count] * s[:count]) @ v[:count]).float(), count


def assert_changes(found, expected):
    for path, delta in found.items():
        wanted = expected.get(path, torch.zeros_like(delta))
        torch.testing.assert_close(delta, wanted, rtol=0, atol=2e-6 if path in expected else 0, msg=path)


@pytest.mark.parametrize("rank", [None, 6])
def test_every_matrix_has_the_smallest_rank_that_holds_the_energy(rank, llama, changed, tmp_path):
    deltas = changed(llama)
    made = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=rank, energy=0.7)
    expected, ranks = dict(deltas), dict[str, int]()
    for path, delta in deltas.items():
        if delta.ndim == 2:
            expected[path], ranks[path.removesuffix(".weight")] = truncated(delta, 0.7, rank)
    assert made.ranks == ranks
    assert len(set(ranks.values())) > 1
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert config["r"] == max(ranks.values())
    # as in llama.cpp, whose scale of a module is lora_alpha divided by the rank of its tensors
    halves = load_file(tmp_path / "lora/adapter_model.safetensors")
    stored = [half.shape[1] for path, half in halves.items() if "lora_B" in path or "lora_embedding_B" in path]
    assert [config["lora_alpha"] / own for own in stored] == [1.0] * len(ranks)
    assert not {"rank_pattern", "alpha_pattern"} & config.keys()
    assert_changes(through_peft(llama, tmp_path / "lora"), expected)
    manifest = json.loads((tmp_path / "lora/manifest.json").read_text())
    assert (manifest["rank"], manifest["energy"]) == (rank, 0.7)


def test_a_change_of_low_rank_is_found_whole(llama, tmp_path):
    expert, ranks = copy.deepcopy(llama), dict[str, int]()
    for i, (path, leaf) in enumerate(expert.named_parameters()):
        if leaf.ndim == 2:
            ranks[path.removesuffix(".weight")] = rank = 1 + i % 3
            generator = torch.Generator().manual_seed(i)
            left, right = (
                torch.randn(size, generator=generator) for size in ((len(leaf), rank), (rank, leaf.shape[1]))
            )
            leaf.data += left @ right
    llama.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    made = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", energy=1 - 1e-9)
    assert made.ranks == ranks
    assert made.error < 1e-5
    assert (made.whole, made.left_out, made.skipped, made.lost) == ((), (), (), 0)


def test_factors_alone_leave_out_what_has_none(llama, changed, tmp_path):
    deltas = changed(llama)
    base, expert, lora = (tmp_path / name for name in ("base", "expert", "lora"))
    made = extract_lora(base, expert, lora, rank=64, linear_only=True)
    lost = {path: delta for path, delta in deltas.items() if delta.ndim == 1}
    assert set(made.left_out) == lost.keys()
    assert made.whole == ()
    squares = [sum(float(d.double().square().sum()) for d in found.values()) for found in (lost, deltas)]
    assert made.lost == pytest.approx(math.sqrt(squares[0] / squares[1]), rel=1e-5)
    assert made.error == pytest.approx(made.lost, rel=1e-5)
    assert {made.errors[path] for path in lost} == {1.0}
    config = json.loads((lora / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None  # as vLLM requires it
    assert all(".lora_" in name for name in load_file(lora / "adapter_model.safetensors"))
    assert_changes(through_peft(llama, lora), {path: d for path, d in deltas.items() if path not in lost})
    assert json.loads((lora / "manifest.json").read_text())["left_out"] == list(made.left_out)


def test_adapters_of_factors_alone_can_be_merged(llama, changed, tmp_path):
    both = []
    for seed in (1, 2):
        deltas = changed(llama, seed, str(seed))
        options = {"energy": 0.9, "linear_only": True}
        extract_lora(tmp_path / "base", tmp_path / str(seed), tmp_path / f"lora{seed}", **options)
        both.append({path: truncated(delta, 0.9)[0] for path, delta in deltas.items() if delta.ndim == 2})

    def cat(held):
        modules = next(iter(held.values()))
        return {m: combine({name: own[m] for name, own in held.items()}, method="cat") for m in modules}

    merge_adapters({"a": tmp_path / "lora1", "b": tmp_path / "lora2"}, tmp_path / "out", cat)
    found = through_peft(llama, tmp_path / "out")
    for path, delta in both[0].items():
        torch.testing.assert_close(found[path], delta + both[1][path], rtol=0, atol=1e-5, msg=path)


def test_skip_wins_over_only(llama, changed, tmp_path):
    deltas = changed(llama)
    globs = {"only": ("*.self_attn.*", "*norm*"), "skip": ("*.layers.1.*", "*.k_proj.weight")}
    made = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", rank=64, **globs)
    kept = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qvo"}
    whole = {"model.norm.weight", *(f"model.layers.0.{n}_layernorm.weight" for n in ("input", "post_attention"))}
    assert set(made.whole) == whole
    assert made.ranks.keys() == {path.removesuffix(".weight") for path in kept}
    assert set(made.skipped) == deltas.keys() - kept - whole
    assert made.left_out == ()
    assert made.lost == pytest.approx(made.error, rel=1e-5)
    assert_changes(through_peft(llama, tmp_path / "lora"), {path: deltas[path] for path in kept | whole})


def test_a_module_that_is_stored_whole_has_bases_value_where_it_is_skipped(gpt2, changed, tmp_path):
    deltas = changed(gpt2)
    path = "transformer.ln_f.bias"
    options = {"rank": 64, "skip": [path, "*.c_*.bias", "*.wte.weight"]}
    made = extract_lora(tmp_path / "base", tmp_path / "expert", tmp_path / "lora", **options)
    assert path in made.skipped
    assert "transformer.ln_f.weight" in made.whole
    found = through_peft(gpt2, tmp_path / "lora")
    assert_changes(found, {name: delta for name, delta in deltas.items() if name not in made.skipped})


def test_all_errors_are_in_one_message(llama, changed, tmp_path):
    changed(llama)
    base, expert, out = (tmp_path / name for name in ("base", "expert", "lora"))
    out.mkdir()
    with pytest.raises(ValueError, match="rank is 0") as caught:
        extract_lora(base, expert, out, rank=0, energy=1.0, only=["*.attn.*"], skip=["lm_head"])
    for told in (
        "rank is 0, must be at least 1",
        "energy is 1.0, must lie in (0, 1)",
        "lora exists",
        "`only='*.attn.*'` matches no parameter of base: give a glob over names such as ",
        "`skip='lm_head'` matches no parameter of base",
    ):
        assert told in str(caught.value)
    out.rmdir()
    for options, told in (
        ({}, "neither `rank` nor `energy` is given: give `rank=16`"),
        ({"energy": float("nan")}, "energy is nan, must lie"),
        ({"rank": 1, "only": ["lm_head.*"], "skip": ["*"]}, "`skip` matches every parameter that `only` leaves"),
        ({"rank": 1, "only": ["*norm*"]}, "none of the 5 weights .* among those of `only` and `skip` .first: .*norm"),
    ):
        with pytest.raises(ValueError, match=told):
            extract_lora(base, expert, out, **options)
    with pytest.raises(ValueError, match=r"no weight of .* `only` and `skip`: .*give another expert or other globs"):
        extract_lora(base, base, out, rank=1, skip=["lm_head.*"])
    assert not out.exists()


@pytest.mark.parametrize("globs", [{}, {"only": ["*q*"]}, {"skip": ["*q*"]}])
def test_a_base_without_floating_point_parameters_is_told(globs, folders, tmp_path):
    leaves = {"model.position_ids": torch.arange(4)}
    base, expert = (folders.save(tmp_path / name, leaves) for name in ("base", "expert"))
    with pytest.raises(ValueError, match="base has no floating-point parameters: there is nothing to extract"):
        extract_lora(base, expert, tmp_path / "lora", rank=1, **globs)


def test_a_base_in_a_single_file_is_refused_before_any_work(folders, monkeypatch, tmp_path):
    leaves = {"model.diffusion_model.input_blocks.1.q.weight": torch.ones(4, 4)}
    base = folders.save(tmp_path / "base", leaves) / "model.safetensors"
    expert = folders.save(tmp_path / "expert", {name: leaf + 1 for name, leaf in leaves.items()})
    monkeypatch.setattr("smat_fn.folders.extraction.low_rank", None)
    told = (
        r"^rank is 0.*; base is .*model.safetensors, a single file, .*: give a folder with config.json that from_pret"
    )
    with pytest.raises(ValueError, match=told):
        extract_lora(base, expert / "model.safetensors", tmp_path / "lora", rank=0)


class Denoiser(torch.nn.Module):
    """Named like a denoiser of diffusers, whose classes transformers does not know."""

    def __init__(self):
        super().__init__()
        self.conv_in = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.GroupNorm(2, 4)
        self.to_q = torch.nn.Linear(4, 6, bias=False)
        self.class_embedding = torch.nn.Embedding(5, 4)


def test_a_component_of_a_pipeline_is_adapted_by_its_names(folders, tmp_path):
    torch.manual_seed(0)
    model = Denoiser()
    base, leaves = tmp_path / "base", model.state_dict()
    deltas = {path: torch.randn(leaf.shape) for path, leaf in leaves.items()}
    folders.save(base, leaves)
    (base / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    folders.save(tmp_path / "expert", {path: leaf + deltas[path] for path, leaf in leaves.items()})
    made = extract_lora(base, tmp_path / "expert", tmp_path / "lora", rank=8)
    assert made.ranks == {"to_q": 4, "class_embedding": 4}
    assert made.left_out == ()
    assert_changes(through_peft(model, tmp_path / "lora"), deltas)
