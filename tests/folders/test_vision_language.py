"""Text models merged into the language model of a vision-language model: bits, layouts of names, refusals."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from smat_fn.config import TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import merge_folders, merge_part, part_of, plan
from smat_fn.scripts.merge import commands
from smat_fn.scripts.merge.settings import FromRecipe

transformers = pytest.importorskip("transformers")

TA = TaskArithmetic(coef=0.5)
TIES = Ties(coef=0.5, keep=0.5, aggregate="sum", scope="global")
TEXT = dict(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=20, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
VISION = dict(
    model_type="clip_vision_model", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    image_size=4, patch_size=2,
)  # fmt: skip
LLAVA = "language_model."


def text_model(folder, seed, **fields):
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, **fields)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    found = {name: text_model(place / name, seed) for seed, name in enumerate(("text", "a", "b"))}
    torch.manual_seed(9)
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 22}, vision_config=VISION, image_token_index=21
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(place / "vlm")
    return found | {"vlm": place / "vlm"}


def weights(folder):
    return load_file(folder / "model.safetensors")


def inside_of(models, name):
    """A model's leaves under the names of the language model, with the rows that only that one has."""
    whole = weights(models["vlm"])
    if name == "vlm":
        return {path: leaf for path, leaf in whole.items() if path.startswith(LLAVA)}
    leaves = {f"{LLAVA}{path}": leaf for path, leaf in weights(models[name]).items()}
    return {path: torch.cat([leaf, whole[path][len(leaf) :]]) for path, leaf in leaves.items()}


@pytest.mark.parametrize("config", [TA, TIES, WeightAverage()], ids=lambda config: config.name)
@pytest.mark.parametrize("base", ["text", "vlm"])
def test_bits_are_those_of_the_merged_text_models(base, config, models, folders, tmp_path):
    names = ["a", "b"] if base == "vlm" else ["vlm", "a", "b"]
    into = "base" if base == "vlm" else "vlm"
    given = {name: models[name] for name in names}
    options = {"vocabulary": "pad-with-base", "into": into}
    report = merge_folders(config, models[base], given, tmp_path / "out", **options)
    wanted = folders.in_memory(config, inside_of(models, base), {name: inside_of(models, name) for name in names})
    rest = {path: leaf for path, leaf in weights(models["vlm"]).items() if path not in wanted}
    folders.assert_same_bits(folders.load(tmp_path / "out"), wanted | rest)
    assert any(f"language model of {into} are merged" in note for note in report.notes)
    again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, wanted[f"{LLAVA}lm_head.weight"])


def test_a_recipe_of_mergekit_merges_into_a_model_too(models, folders, tmp_path):
    def merged(out, into="vlm", **parameters):
        entries = [{"model": str(models[name]), "parameters": {"weight": 0.5}} for name in ("vlm", "a")]
        found = {"merge_method": "task_arithmetic", "base_model": str(models["text"]), "models": entries}
        file = tmp_path / "recipe.yml"
        file.write_text(yaml.safe_dump(found | {"parameters": {"lambda": 0.5} | parameters}))
        commands.from_recipe(FromRecipe(file, tmp_path / out, into=into, vocabulary="pad-with-base"))

    merged("out")
    given, options = {name: models[name] for name in ("vlm", "a")}, {"vocabulary": "pad-with-base", "into": "vlm"}
    config = TaskArithmetic(coef=0.5, weights={"vlm": 0.5, "a": 0.5})
    merge_folders(config, models["text"], given, tmp_path / "wanted", **options)
    assert weights(tmp_path / "out" / "ta").keys() == weights(models["vlm"]).keys()
    folders.assert_same_bits(weights(tmp_path / "out" / "ta"), weights(tmp_path / "wanted"))
    commands.from_recipe(FromRecipe(tmp_path / "out" / "ta" / "recipe.yml", tmp_path / "again"))
    folders.assert_same_bits(weights(tmp_path / "again" / "ta"), weights(tmp_path / "wanted"))
    with pytest.raises(ValueError, match="into requires whole models with one number each"):
        merged("no", **{"lambda": [{"filter": "mlp", "value": 0.1}, {"value": 0.2}]})
    for method, own in {
        "nearswap": {"models": [{"model": str(models["vlm"])}], "parameters": {"t": [0.1, 0.2]}},
        "multislerp": {"parameters": {"weight": [0.1, 0.2]}},
        "linear": {"parameters": {"weight": [0.1, 0.2]}},
    }.items():
        entries = [{"model": str(models[name])} for name in ("a", "vlm")]
        found = {"merge_method": method, "base_model": str(models["text"]), "models": entries, **own}
        (tmp_path / "recipe.yml").write_text(yaml.safe_dump(found))
        with pytest.raises(ValueError, match="into requires whole models with one number each"):
            commands.from_recipe(FromRecipe(tmp_path / "recipe.yml", tmp_path / "no", into="vlm"))
    with pytest.raises(ValueError, match=r"base is a tower .* of expert 'vlm'"):
        merged("no", into=None)
    assert not (tmp_path / "no").exists()


def test_an_adapter_of_the_text_model(models, folders, tmp_path):
    module, adapter = "model.layers.1.self_attn.q_proj", tmp_path / "adapter"
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    factors = {f"base_model.model.{module}.lora_{name}.weight": leaf for name, leaf in {"A": a, "B": b}.items()}
    folders.save(tmp_path / "factors", factors)
    (tmp_path / "factors").rename(adapter)
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    given, options = {"vlm": models["vlm"], "adapter": adapter}, {"vocabulary": "pad-with-base", "into": "vlm"}
    merge_folders(TaskArithmetic(coef=1.0), models["text"], given, tmp_path / "out", **options)
    made, whole = folders.load(tmp_path / "out"), weights(models["vlm"])
    change = {f"{LLAVA}{module}.weight": 2 * b @ a}
    for path, leaf in whole.items():
        torch.testing.assert_close(made[path], leaf + change.get(path, 0.0))


def test_parts_and_dtypes(models, folders, tmp_path):
    given = {name: models[name] for name in ("vlm", "a")}
    options = dict(vocabulary="pad-with-base", into="vlm", shard_size=3000, out_dtype="bfloat16")
    assert plan(TIES, models["text"], given, tmp_path / "one", **options).leaves == len(weights(models["vlm"]))
    merge_folders(TIES, models["text"], given, tmp_path / "one", **options)
    for number in (2, 1):
        merge_part(TIES, models["text"], given, tmp_path / "two", part_of(f"{number}/2"), **options)
    one, two = folders.load(tmp_path / "one"), folders.load(tmp_path / "two")
    folders.assert_same_bits(one, two)
    kept = weights(models["vlm"])["multi_modal_projector.linear_1.weight"]
    assert torch.equal(one["multi_modal_projector.linear_1.weight"], kept.bfloat16())


@pytest.mark.parametrize("body", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("tied", [False, True])
def test_one_prefix_maps_all_names(tied, body, folders, tmp_path):
    text = {"model.layers.0.up.weight": torch.ones(2, 2), "model.norm.weight": torch.ones(2)}
    text |= {"model.embed_tokens.weight": torch.ones(3, 2)} | ({} if tied else {"lm_head.weight": torch.ones(3, 2)})
    head = "language_model.lm_head.weight" if body.startswith("language") else "lm_head.weight"
    names = {path: path.replace("model.", body, 1) for path in text} | {"lm_head.weight": head}
    sees = {names[path]: leaf * 2 for path, leaf in text.items()}
    sees |= {"model.visual.layers.0.up.weight": torch.ones(2, 2), "model.visual.norm.weight": torch.ones(4)}
    expert = {path: leaf * 3 for path, leaf in text.items()} | {"model.layers.0.rotary_emb.inv_freq": torch.ones(2)}
    expert |= {"lm_head.weight": expert["model.embed_tokens.weight"].clone()}  # if tied, a copy
    trees = {"sees": sees, "text": text, "expert": expert}
    given = {name: folders.save(tmp_path / name, tree) for name, tree in trees.items()}
    base = given.pop("text")
    merge_folders(TaskArithmetic(coef=1.0), base, given, tmp_path / "out", into="sees")
    wanted = {path: torch.full_like(leaf, 4.0) if path in names.values() else leaf for path, leaf in sees.items()}
    folders.assert_same_bits(folders.load(tmp_path / "out"), wanted)  # 1 + (2 - 1) + (3 - 1)
    for name, size, told in (("alike", 1.0, False), ("other", 5.0, True)):  # of a second whole model one part is merged
        more = {name: folders.save(tmp_path / name, sees | {"model.visual.norm.weight": torch.full((4,), size)})}
        found = plan(TaskArithmetic(coef=1.0), base, given | more, tmp_path / "no", into="sees").notes
        assert (f"expert {name!r} differs from sees in 'model.visual.norm.weight' too" in found[0]) == told
    only = {"only": folders.save(tmp_path / "only", {f"inner.{path}": leaf for path, leaf in text.items()})}
    assert plan(TaskArithmetic(coef=1.0), base, only, tmp_path / "no", into="only").notes[0].endswith("are merged")
    broken = sees | {"model.visual.norm.weight": torch.full((4,), torch.nan)}
    given["sees"] = folders.save(tmp_path / "broken", broken)
    with pytest.raises(ValueError, match=r"'model.visual.norm.weight' of expert 'sees' holds values that are NaN"):
        merge_folders(TaskArithmetic(coef=1.0), base, given, tmp_path / "out", into="sees", overwrite=True)


def test_what_would_be_wrong_is_refused(models, tmp_path):
    out = tmp_path / "out"
    given = {name: models[name] for name in ("vlm", "a")}
    with pytest.raises(
        ValueError, match=r"20 rows in 'language_model.*vlm 22: pass `vocabulary='pad-with-base'` \(vlm's rows there\)$"
    ):
        plan(TA, models["text"], given, out, into="vlm")
    options = {"vocabulary": "pad-with-base"}
    with pytest.raises(ValueError, match=r"`into='vlm'` is none of the models that are merged \(base, a\)"):
        plan(TA, models["text"], {"a": models["a"]}, out, into="vlm", **options)
    with pytest.raises(ValueError, match=r"^`config_from` is not available with `into`: leave one out$"):
        plan(TA, models["text"], given, out, into="vlm", config_from="a", **options)
    with pytest.raises(ValueError, match=r"^`chat_template=.auto.` is not available with `into`: leave one out$"):
        plan(TA, models["text"], given, out, into="vlm", chat_template="auto", **options)
    with pytest.raises(ValueError, match="all models have the same parameters: leave it out"):
        plan(TA, models["text"], {"a": models["a"]}, out, into="a", **options)
    wide = text_model(tmp_path / "wide", 1, head_dim=8)
    with pytest.raises(ValueError, match=r"'wide' is not the language model .* nothing there fits 'model.layers"):
        plan(TA, models["text"], given | {"wide": wide}, out, into="vlm", **options)
    tied = text_model(tmp_path / "tied", 1, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'tied' has no head .* 'vlm' has a head"):
        plan(TA, models["text"], given | {"tied": tied}, out, into="vlm", **options)
    other = text_model(tmp_path / "other", 1, hidden_act="gelu")
    with pytest.raises(ValueError, match="'other' has another activation"):
        plan(TA, models["text"], given | {"other": other}, out, into="vlm", **options)
    less = weights(models["a"])
    del less["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "less").mkdir()
    save_file(less, tmp_path / "less/model.safetensors")
    (tmp_path / "less/config.json").write_text((models["a"] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"it lacks 'language_model.model.layers.1.mlp.up_proj.weight'"):
        plan(TA, models["text"], given | {"less": tmp_path / "less"}, out, into="vlm", **options)
    config = json.loads((models["vlm"] / "config.json").read_text()) | {"tie_word_embeddings": True}
    tying = tmp_path / "vlm"
    tying.mkdir()
    (tying / "model.safetensors").symlink_to(models["vlm"] / "model.safetensors")
    (tying / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"its config\.json ties the head to the embeddings"):
        plan(TA, models["text"], {"vlm": tying, "a": models["a"]}, out, into="vlm", **options)
