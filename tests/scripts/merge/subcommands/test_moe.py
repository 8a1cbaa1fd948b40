"""Mixtures of experts against what mergekit-moe 0.1.5 made, and against the dense models that they are made of."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from smat_fn import random
from smat_fn.folders.mixtures import merge_mixture, open_models
from smat_fn.merge.around import mixture as parts
from smat_fn.merge.around.mixture import MIXTRAL, QWEN2, normal, random_rows, rows
from smat_fn.scripts.merge import settings
from smat_fn.scripts.merge.provenance.finished import verify
from smat_fn.scripts.merge.subcommands import moe
from smat_fn.scripts.recipes.load import recipe_of

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import make_moe  # noqa: E402
import make_recipes  # noqa: E402

TEXT = torch.arange(3, 13)[None]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_moe.write_models(folder)
    return folder


def made(file, out, **options):
    place = out.parent / f"{out.name}.yml"
    place.write_text(yaml.safe_dump(file))
    return list(moe.make(settings.Moe(place, out, **options)))


def mixed(folder, **more):
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **more)
    assert "Moe" in type(model).__name__ or "Mixtral" in type(model).__name__
    assert not any(told.values())
    return model


def mixture(base, experts, router, kind=MIXTRAL, *, shared=False, residual_scales=(), noise_scales=(), key=None):
    """The parameters of a mixture, in memory."""
    found, changes = {}, parts.changes(residual_scales, noise_scales, len(experts))
    for path, origin in parts.origins(base, len(experts), kind, shared=shared).items():
        found[path] = parts.made(origin, base, router)
        if origin.expert is not None:
            leaf = experts[origin.expert][origin.path]
            found[path] = parts.changed(leaf.reshape(-1), changes[origin.expert], key, path).view_as(leaf)
        elif found[path] is None:
            found[path] = base[origin.path]
    return found


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("label", [*make_moe.MODES, "Qwen2", "Qwen3"])
def test_a_mixture_is_what_mergekit_makes_of_it(label, models, tmp_path):
    mode, more = (label, {}) if label in make_moe.MODES else ("hidden", {"architecture": "qwen"})
    if more:
        models = tmp_path / "models"
        make_moe.write_models(models, label, **make_moe.MORE.get(label, {}))
        more |= make_moe.shared_by(models) if label == "Qwen2" else {}
    made(make_moe.file_of(mode, models, **more), tmp_path / "out")
    found = mixed(tmp_path / "out").state_dict()
    wanted = {
        k.partition("/")[2]: v
        for k, v in load_file(HERE / "golden/moe.safetensors").items()
        if k.startswith(f"{label}/")
    }
    assert wanted.keys() <= found.keys()
    assert mode != "hidden" or wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        if path.endswith("gate.weight"):  # states are in bfloat16, as there
            torch.testing.assert_close(found[path], leaf, rtol=0, atol=1e-6 if mode == "cheap_embed" else 2**-6)
        else:  # the models' random weights have other last bits on some processors
            torch.testing.assert_close(found[path], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "more"), [pytest.param("Llama", {}, marks=pytest.mark.slow),
                                            ("Llama", {"tie_word_embeddings": True, "rope_theta": 77.0}),
                                            ("Qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
                                            ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 77.0}),
                                            ("Mistral", {"sliding_window": 4})])  # fmt: skip
def test_equal_experts_compute_what_the_dense_model_does(kind, more, tmp_path):
    make_moe.write_models(tmp_path, kind, **more)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "BASE")
    opened = open_models(tmp_path / "BASE", dict.fromkeys("xyz", tmp_path / "BASE"), per_token=2)
    report = merge_mixture(opened, random_rows(random.key(0), (2, 3, 8), uniform=False), tmp_path / "out")
    assert any("all experts are one model" in note for note in report.notes)
    with torch.no_grad():
        torch.testing.assert_close(mixed(tmp_path / "out")(TEXT).logits, dense(TEXT).logits, rtol=1e-4, atol=1e-5)


def test_a_configuration_has_rope_under_the_names_of_transformers_4_too(tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    make_moe.write_models(tmp_path, "Llama", rope_parameters=rope)
    opened = open_models(tmp_path / "BASE", dict.fromkeys("xyz", tmp_path / "BASE"), per_token=2)
    merge_mixture(opened, random_rows(random.key(0), (2, 3, 8), uniform=False), tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["rope_theta"], found["rope_scaling"]) == (77.0, {"rope_type": "linear", "factor": 2.0})
    assert found["rope_parameters"] == transformers.AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rope


@pytest.mark.parametrize(("kind", "more"), [("Qwen2", {}),
                                            pytest.param("Llama", {"head_dim": 6}, marks=pytest.mark.slow),
                                            ("Mistral", {"head_dim": 6, "sliding_window": 4})])  # fmt: skip
def test_half_of_equal_experts_and_a_shared_one_by_a_gate_of_a_half_are_the_dense_model(kind, more, tmp_path):
    make_moe.write_models(tmp_path, kind, **more)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "BASE")
    opened = open_models(tmp_path / "BASE", dict.fromkeys("xyzs", tmp_path / "BASE"), per_token=2, shared=True)
    router = random_rows(random.key(0), (2, 4, 8), uniform=False)
    router[:, -1] = 0
    merge_mixture(opened, router, tmp_path / "out", residual_scales=[0.5] * 3)
    with torch.no_grad():
        torch.testing.assert_close(mixed(tmp_path / "out")(TEXT).logits, dense(TEXT).logits, rtol=1e-4, atol=1e-5)
    made(
        {"base_model": str(tmp_path / "BASE"), "gate_mode": "cheap_embed", "experts_per_token": 1,
         "experts": [{"source_model": str(tmp_path / "BASE"), "positive_prompts": ["t3"], "residual_scale": 0.75}],
         "shared_experts": [{"source_model": str(tmp_path / "BASE"), "residual_scale": 0.25}]},
        tmp_path / "full",
    )  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(mixed(tmp_path / "full")(TEXT).logits, dense(TEXT).logits, rtol=1e-4, atol=1e-5)
    notes = json.loads((tmp_path / "full/manifest.json").read_text())["notes"]
    assert any(note.startswith("the shared expert has no prompts: it counts in full") for note in notes)
    assert not any("nearly dependent" in note for note in notes)  # the zeros of its gate are no row of the router


def test_a_llama_becomes_a_qwen2_moe_that_computes_what_it_does_where_the_file_says_so(tmp_path):
    make_moe.write_models(tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "BASE")
    same = [{"source_model": str(tmp_path / "BASE")}] * 3
    file = make_moe.file_of("random", tmp_path) | {"experts": same}
    assert any("all experts are one model" in line for line in made(file, tmp_path / "plain"))
    assert any("all experts" in line for line in made(file | make_moe.shared_by(tmp_path), tmp_path / "shared"))
    noisy = file | {"experts": [own | {"noise_scale": 0.1} for own in same]}
    assert not any("all experts" in line for line in made(noisy, tmp_path / "noisy"))
    made(file | {"architecture": "Qwen MoE"}, tmp_path / "out")
    model = mixed(tmp_path / "out")
    assert type(model).__name__ == "Qwen2MoeForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(model(TEXT).logits, dense(TEXT).logits, rtol=1e-4, atol=1e-5)
    assert not any(
        leaf.any() for path, leaf in weights(tmp_path / "out").items() if "bias" in path or "shared_expert" in path
    )
    list(moe.make(settings.Moe(tmp_path / "out/recipe.yml", tmp_path / "again")))
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_a_router_that_is_sure_computes_its_expert_with_the_attention_of_base(models, tmp_path):
    base, a, b = (weights(models / name) for name in ("BASE", "A", "B"))
    router = torch.zeros(2, 2, 8)
    opened = open_models(models / "BASE", {"A": models / "A", "B": models / "B"}, per_token=1)
    merge_mixture(opened, router, tmp_path / "out")  # of equal ones the first
    dense = transformers.AutoModelForCausalLM.from_pretrained(models / "BASE")
    dense.load_state_dict({k: a[k] if ".mlp." in k else v for k, v in base.items()})
    with torch.no_grad():
        torch.testing.assert_close(mixed(tmp_path / "out")(TEXT).logits, dense(TEXT).logits, rtol=1e-4, atol=1e-5)
    found = mixture(base, [a, b], router)
    stored = weights(tmp_path / "out")
    assert found.keys() == stored.keys()
    assert all(torch.equal(leaf, stored[path]) for path, leaf in found.items())


def test_folders_hold_the_function_bit_for_bit_in_any_chunks_and_dtype(models, tmp_path):
    base, *experts = (weights(models / name) for name in ("BASE", "A", "B", "C"))
    router = random_rows(random.key(1), (2, 3, 8), uniform=True)
    scales = [None, 0.3, -2.0]
    found = mixture(base, experts, router, residual_scales=scales)
    opened = open_models(models / "BASE", {name: models / name for name in "ABC"}, per_token=2)
    for place, (chunk, workers, dtype) in {"one": (7, 1, "same"), "two": (1 << 12, 2, "bfloat16")}.items():
        options = {
            "residual_scales": scales,
            "chunk": chunk,
            "workers": workers,
            "out_dtype": dtype,
            "shard_size": 1500,
        }
        merge_mixture(opened, router, tmp_path / place, **options)
        index = json.loads((tmp_path / place / "model.safetensors.index.json").read_text())["weight_map"]
        stored = {path: load_file(tmp_path / place / file)[path] for path, file in index.items()}
        assert stored.keys() == found.keys()
        kind = torch.float32 if dtype == "same" else torch.bfloat16
        assert all(torch.equal(leaf.to(kind), stored[path]) for path, leaf in found.items())
        assert mixed(tmp_path / place, dtype="auto").dtype == kind


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_folders_with_noise_and_a_shared_expert_hold_the_function_bit_for_bit(kind, tmp_path):
    make_moe.write_models(tmp_path, kind)
    base, *experts = (weights(tmp_path / name) for name in ("BASE", "A", "B", "C"))
    router = random_rows(random.key(1), (2, 3, 8), uniform=True)
    changes = {"residual_scales": [0.5, None, -2.0], "noise_scales": [None, 0.3, 0.1], "key": random.key(7)}
    found = mixture(base, experts, router, QWEN2, shared=True, **changes)
    opened = open_models(tmp_path / "BASE", {name: tmp_path / name for name in "ABC"}, per_token=2, shared=True)
    assert opened.architecture is QWEN2
    for place, (chunk, workers) in {"one": (7, 1), "two": (1 << 12, 2)}.items():
        merge_mixture(opened, router, tmp_path / place, chunk=chunk, workers=workers, **changes)
        stored = weights(tmp_path / place)
        assert stored.keys() == found.keys()
        assert all(torch.equal(leaf, stored[path]) for path, leaf in found.items())
    block = "model.layers.1.mlp."
    noise = {path: normal(random.fold_in(random.key(7), block + path), 0, 96).float().reshape(8, 12)
             for path in ("experts.1.down_proj.weight", "shared_expert.down_proj.weight")}  # fmt: skip
    for (path, own), expert, noise_scale, factor in zip(noise.items(), experts[1:], (0.3, 0.1), (1, -2), strict=True):
        wanted = (expert["model.layers.1.mlp.down_proj.weight"] + noise_scale * own) * factor
        torch.testing.assert_close(found[block + path], wanted)
    assert torch.equal(found[f"{block}experts.0.up_proj.weight"], experts[0]["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(found[f"{block}shared_expert_gate.weight"], router[1, 2:])
    with pytest.raises(ValueError, match=r"key is None, and noise_scales need one: give smat_fn.random.key"):
        merge_mixture(opened, router, tmp_path / "out", noise_scales=[0.1])
    with pytest.raises(ValueError, match="shared is True, and there is no other expert: leave it out"):
        parts.origins(base, 1, QWEN2, shared=True)
    with pytest.raises(ValueError, match=r"noise_scales has nan, must be finite"):
        merge_mixture(opened, router, tmp_path / "out", noise_scales=[float("nan")])


def test_normal_numbers_are_the_same_in_any_chunks_and_normal():
    key = random.key(4)
    whole = normal(key, 0, 20001)
    assert torch.equal(
        torch.cat([normal(key, a, b) for a, b in ((0, 5), (5, 4097), (4097, 4097), (4097, 20001))]), whole
    )
    radius, angle = (random.uniform(own, (20001,), dtype=torch.float64) for own in random.split(key))
    torch.testing.assert_close(whole, (-2 * torch.log1p(-radius)).sqrt() * (2 * torch.pi * angle).cos())
    assert abs(float(whole.mean())) < 4 / 20001**0.5
    assert abs(float(whole.var()) - 1) < 4 * (2 / 20001) ** 0.5
    assert abs(float(whole.pow(4).mean()) - 3) < 4 * (96 / 20001) ** 0.5


def test_random_rows_are_their_distributions():
    normal, uniform = (random_rows(random.key(3), (4, 8, 1024), uniform=kind) for kind in (False, True))
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    assert float(uniform.abs().max()) <= 1 / 32
    assert abs(float(uniform.std()) - 1 / 32 / 3**0.5) < 1e-3
    states = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert torch.equal(rows(states, torch.zeros(2, 2)), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_a_configuration_that_transformers_refuses_is_one_error(models, tmp_path):
    place = shutil.copytree(models, tmp_path / "models")
    for file in place.glob("*/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 5}))
    with pytest.raises(ValueError, match=r"base: transformers refuses its config.json .*number of attention heads"):
        made(make_moe.file_of("random", place), tmp_path / "out")


def test_the_file_in_an_output_repeats_it_and_a_rerun_keeps_it(models, tmp_path):
    said = made(make_moe.file_of("random", models, experts_per_token=1), tmp_path / "out", seed=5)
    assert "3 experts, 1 a token" in said[0]
    assert verify(tmp_path / "out")[1] == []
    assert made(make_moe.file_of("random", models, experts_per_token=1), tmp_path / "out", seed=5)[0].startswith("kept")
    list(moe.make(settings.Moe(tmp_path / "out/recipe.yml", tmp_path / "again")))
    for file in "model.safetensors", "config.json", "recipe.yml":
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    other = made(make_moe.file_of("random", models, experts_per_token=1), tmp_path / "other", seed=6)
    assert (
        weights(tmp_path / "other")["model.layers.0.block_sparse_moe.gate.weight"]
        .ne(weights(tmp_path / "out")["model.layers.0.block_sparse_moe.gate.weight"])
        .all()
    ), other
    told = r"exists and holds something else .its hyperparameters.experts_per_token is 1.* or pass --overwrite$"
    with pytest.raises(ValueError, match=told):
        made(make_moe.file_of("random", models), tmp_path / "out", seed=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("of the user")
    for overwrite in False, True:
        with pytest.raises(ValueError, match=r"mine holds notes.txt, .*: move it, or choose another folder$"):
            made(make_moe.file_of("random", models), tmp_path / "mine", overwrite=overwrite)
    text = (tmp_path / "out/README.md").read_text() + (tmp_path / "out/manifest.json").read_text()
    assert "the MLPs those of A, B, C; routers by random" in text
    assert "# Mixture of experts of A+B+C" in text
    config = (tmp_path / "out/config.json").read_text()
    assert str(models) not in text + config + (tmp_path / "out/recipe.yml").read_text()
    assert "no parameter differs" not in text
    shared = make_moe.file_of("random", models, **make_moe.shared_by(models, noise_scale=0.5))
    assert "3 experts, 2 a token, and a shared one" in made(shared, tmp_path / "shared", seed=5)[0]
    list(moe.make(settings.Moe(tmp_path / "shared/recipe.yml", tmp_path / "shared2")))
    for file in "model.safetensors", "config.json", "recipe.yml":
        assert (tmp_path / "shared" / file).read_bytes() == (tmp_path / "shared2" / file).read_bytes()
    assert "the MLPs those of A, B-1, C, and for every token of B-3;" in (tmp_path / "shared/README.md").read_text()
    shared["shared_experts"][0]["noise_scale"] = 0.25
    with pytest.raises(ValueError, match=r"its hyperparameters.noise_scales is \[None, None, None, 0.5\]"):
        made(shared, tmp_path / "shared", seed=5)
    made(make_moe.file_of("random", models), tmp_path / "out", seed=5, overwrite=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_experts_per_tok"] == 2


BAD = {
    "base_model": 3,
    "gate_mode": "guess",
    "dtype": "int8",
    "architecture": "deepseek",
    "shared_experts": [{"source_model": "A", "negative_prompts": ["x"]}],
    "experts_per_token": "2",
    "expert": 1,
    "experts": [
        {
            "source_model": "A",
            "noise_scale": True,
            "residual_scale": "much",
            "positive_prompts": "t3",
            "residual_scal": 2,
        },
        {"source_model": "B+LORA"},
        {"model": "C"},
    ],
}
NAMED = (
    "expert is not a field, did you mean 'experts'?", "shared_experts[0].positive_prompts is missing",
    "base_model is 3",
    "architecture is 'deepseek', must be mixtral, qwen2 or qwen3; transformers has no class of a DeepSeek-MoE",
    "gate_mode is 'guess', must be one of hidden, ", "dtype is 'int8', must be one of ",
    "experts_per_token is '2'", "experts[0].residual_scal is not a field, did you mean 'residual_scale'?",
    "experts[0].noise_scale is True: must be a number", "experts[0].residual_scale is 'much'",
    "experts[0].positive_prompts is 't3'",
    "experts[1].source_model is 'B+LORA': export", "experts[1].positive_prompts is missing", "experts[2] is {'model'",
)  # fmt: skip


def test_quantised_experts_are_noted(models, tmp_path):
    folder = shutil.copytree(models / "B", tmp_path / "eight")
    leaves = load_file(folder / "model.safetensors")
    path = next(path for path in leaves if path.endswith("up_proj.weight"))
    save_file(leaves | {path: leaves[path].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    file = make_moe.file_of("random", models)
    file["experts"][1]["source_model"] = str(folder)
    (note,) = [line for line in made(file, tmp_path / "out", seed=5) if line.startswith("note: expert 'eight'")]
    assert "holds 1 quantised parameter, read as float32" in note


def test_fields_that_mergekit_ignores_are_noted(models, tmp_path):
    more = {"merge_method": "moe", "tokenizer": "A", "out_dtype": "bfloat16", "width": 2}
    note = "note: {} is not a field of a mixture: ignored, as in mergekit"
    file = make_moe.file_of("random", models, **{name: value for name, value in more.items() if name != "width"})
    file["experts"][0]["width"] = 2
    lines = made(file, tmp_path / "out", seed=5)
    assert {note.format(name) for name in more} <= {*lines}


def test_all_fields_that_are_not_supported_are_refused_by_name_at_once(tmp_path):
    (tmp_path / "bad.yml").write_text(yaml.safe_dump(BAD))
    with pytest.raises(ValueError, match="base_model is 3") as error:
        moe.load(tmp_path / "bad.yml")
    assert [text for text in NAMED if text not in str(error.value)] == []
    same = [{"source_model": name, "positive_prompts": ["x"]} for name in "AB"]
    for shared, told in (
        ([{"source_model": "A"}] * 2, r"shared_experts is \[.*: must be a list of one model"),
        ("A", "shared_experts is 'A': must be a list of one model"),
        ([3], r"shared_experts\[0\] is 3: must have source_model"),
        ([{"source_model": "A"}], "architecture is 'qwen3 moe', which has no shared_experts: leave architecture out"),
    ):
        more = {"architecture": "qwen3 moe", "shared_experts": shared}
        (tmp_path / "bad.yml").write_text(yaml.safe_dump({"base_model": "B", "experts": same, **more}))
        with pytest.raises(ValueError, match=told):
            moe.load(tmp_path / "bad.yml")
    (tmp_path / "same.yml").write_text(yaml.safe_dump({"base_model": "B", "experts": same}))
    with pytest.raises(ValueError, match="experts have the same prompts"):
        moe.load(tmp_path / "same.yml")
    with pytest.raises(ValueError, match=r"describes a mixture of experts: run merge\.py moe"):
        recipe_of({"base_model": "B", "experts": same}, tmp_path / "same.yml")
    wanted = "bad.yml is a recipe, not a mixture of experts: run merge.py "
    for text, told in ("[1]", "holds a list"), ("a: [", "cannot be read as YAML"), ("merge_method: ties", wanted):
        (tmp_path / "bad.yml").write_text(text)
        with pytest.raises(ValueError, match=told):
            moe.load(tmp_path / "bad.yml")
    with pytest.raises(ValueError, match=r"gone\.yml cannot be read \(No such file or directory\): give a mixture"):
        moe.load(tmp_path / "gone.yml")


def change(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_models_that_do_not_fit_are_refused_before_anything_is_written(tmp_path):
    make_moe.write_models(tmp_path)
    (tmp_path / "wide").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    make_moe.write_models(tmp_path / "wide", attention_bias=True)
    refused = {
        "experts_per_token is 4: must be from 1 to the number of experts, 3": {"experts_per_token": 4},
        "parameter 'model.layers.0.self_attn.k_proj.bias' has no place in Mixtral: base must be a plain Llama": {
            "base_model": str(tmp_path / "wide/BASE")
        },
        "BASE is of kind llama, must be qwen3 (Qwen3-MoE)": {"architecture": "Qwen3 MoE"},
        "must be from 1 to the number of experts, 3": {"experts_per_token": 4, **make_moe.shared_by(tmp_path)},
        "missing is not a folder": {"base_model": str(tmp_path / "missing")},
        "adapter is an adapter: make it a whole model first": {"base_model": str(tmp_path / "adapter")},
    }
    for text, more in refused.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            made(make_moe.file_of("random", tmp_path, **more), tmp_path / "out")
    with pytest.raises(ValueError, match="which is, holds or lies in"):
        made(make_moe.file_of("random", tmp_path), tmp_path / "A/out")
    deep, biased = weights(tmp_path / "B"), weights(tmp_path / "C")
    deep |= {path.replace("layers.1", "layers.2"): leaf.clone() for path, leaf in deep.items() if "layers.1" in path}
    biased["model.layers.1.mlp.up_proj.bias"] = torch.ones(12)
    for name, leaves in {"deep": deep, "biased": biased}.items():
        save_file(leaves, shutil.copytree(tmp_path / "B", tmp_path / name) / "model.safetensors")
    file = make_moe.file_of("random", tmp_path)
    file["experts"] += [{"source_model": str(tmp_path / name)} for name in ("deep", "biased")]
    with pytest.raises(
        ValueError, match=r"'deep' has parameter 'model.layers.2.mlp.* 'biased' has parameter 'model.layers.1.mlp"
    ):
        made(file, tmp_path / "out")
    change(tmp_path / "B", hidden_act="gelu")
    with pytest.raises(ValueError, match=r"expert 'B' has another activation .* --config-from base$"):
        made(make_moe.file_of("random", tmp_path), tmp_path / "out")
    change(tmp_path / "B", model_type="gpt2", hidden_act="silu")
    with pytest.raises(ValueError, match="is of kind gpt2, must be llama or mistral"):
        made(make_moe.file_of("random", tmp_path), tmp_path / "out")
    change(tmp_path / "B", model_type="qwen3", hidden_act="silu")
    with pytest.raises(ValueError, match=r"B is of kind qwen3, must be llama or mistral"):
        made(make_moe.file_of("random", tmp_path), tmp_path / "out")
    change(tmp_path / "B", model_type="llama")
    for file in (tmp_path / "BASE").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"base: the tokenizer of .* cannot be read"):
        made(make_moe.file_of("hidden", tmp_path), tmp_path / "out")
    opened = open_models(tmp_path / "BASE", {"A": tmp_path / "A"}, per_token=1)
    for router, scales, told in (
        (torch.zeros(2, 2, 8), (), r"must be floats \(2, 1, 8\)"),
        (torch.full((2, 1, 8), torch.nan), (), "router holds values that are NaN"),
        (None, (), "router is a NoneType, must be a tensor"),
        (torch.zeros(2, 1, 8), 1.0, "residual_scales is 1.0: give a list of numbers"),
        (torch.zeros(2, 1, 8), ["1"], "residual_scales is '1', must be a number"),
        (torch.zeros(2, 1, 8), [float("nan")], "residual_scales has nan, must be finite"),
        (torch.zeros(2, 1, 8), [1, 2], "residual_scales has 2 numbers, there are 1 experts"),
    ):
        with pytest.raises(ValueError, match=told):
            merge_mixture(opened, router, tmp_path / "out", residual_scales=scales)
    assert "expert '0' lacks parameter" in parts.fit_problems(weights(tmp_path / "BASE"), {"0": {}})[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_windows_of_the_last_layers_alone_have_no_place_in_a_mixture(kind, tmp_path):
    make_moe.write_models(tmp_path, kind, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="base has use_sliding_window, for its last layers alone"):
        made(make_moe.file_of("random", tmp_path), tmp_path / "out")


def test_a_rerun_sees_another_tokenizer_and_a_scale_that_is_no_number(models, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(models / "BASE", base)
    file = make_moe.file_of("random", models) | {"base_model": str(base)}
    made(file, tmp_path / "out")
    assert made(file, tmp_path / "out")[0].startswith("kept: ")
    config = base / "generation_config.json"
    config.write_text(json.dumps({"max_new_tokens": 3}))
    with pytest.raises(ValueError, match=r"holds something else \(its generation_config.json is not base's\)"):
        made(file, tmp_path / "out")
    file["experts"][0]["residual_scale"] = float("nan")
    with pytest.raises(ValueError, match="residual_scale is nan: must be a number"):
        made(file, tmp_path / "new")


def test_a_prompt_of_tokens_without_embeddings_is_named(models, tmp_path):
    base = shutil.copytree(models / "BASE", tmp_path / "base")
    make_recipes.write_tokenizer(base, [*make_recipes.WORDS, "new"])
    file = make_moe.file_of("cheap_embed", models) | {"base_model": str(base)}
    file["experts"][2]["positive_prompts"] = ["t3", "t3 new"]
    known = len(make_recipes.WORDS)
    with pytest.raises(ValueError, match=f"the prompt 't3 new' has the token {known}, and base has .* {known} tokens:"):
        made(file, tmp_path / "out")


def test_a_head_that_base_stores_is_not_tied_by_its_configuration(models, tmp_path):
    base = shutil.copytree(models / "BASE", tmp_path / "base")
    change(base, tie_word_embeddings=True)
    file = make_moe.file_of("random", models) | {"base_model": str(base)}
    assert any("the output has tie_word_embeddings false" in line for line in made(file, tmp_path / "out"))
    assert torch.equal(weights(tmp_path / "out")["lm_head.weight"], weights(base)["lm_head.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_a_shared_expert_of_qwen3_models_is_an_error(tmp_path):
    make_moe.write_models(tmp_path, "Qwen3")
    with pytest.raises(
        ValueError,
        match=r"BASE is of kind qwen3, must be qwen2 or llama or mistral \(Qwen2-MoE, which has a shared expert\)",
    ):
        made(make_moe.file_of("random", tmp_path, **make_moe.shared_by(tmp_path)), tmp_path / "out")
    base = weights(tmp_path / "BASE")
    with pytest.raises(ValueError, match="shared is True, and a Qwen3-MoE has no shared expert: leave it out"):
        mixture(base, [base, base], torch.zeros(2, 2, 8), parts.QWEN3, shared=True)


def test_every_expert_has_a_name_of_its_own(models, tmp_path):
    source = Path(make_moe.file_of("random", models)["experts"][0]["source_model"])
    places = [tmp_path / name for name in ("a", "b/a", "a-0")]
    for place in places:
        shutil.copytree(source, place)
    file = make_moe.file_of("random", models) | {"experts": [{"source_model": str(place)} for place in places]}
    assert "3 experts" in made(file, tmp_path / "out")[0]
