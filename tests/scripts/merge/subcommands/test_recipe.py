"""Recipes in mergekit's format against what mergekit 0.1.5 made of them, and our own file that repeats a merge."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from smat_fn import checkpoint, merge
from smat_fn.checkpoint import RECIPE
from smat_fn.config import Karcher, TaskArithmetic
from smat_fn.folders import merge_folders
from smat_fn.scripts import entry
from smat_fn.scripts.cli import spoken
from smat_fn.scripts.merge import commands, on_disk, settings
from smat_fn.scripts.merge.subcommands import exporting
from smat_fn.scripts.recipes import resolve
from smat_fn.scripts.recipes.load import fields_of, recipe_of

GOLDEN = Path(__file__).parent / "golden"
_spec = importlib.util.spec_from_file_location("make_recipes", GOLDEN.parent / "make_recipes.py")
make_recipes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_recipes)
ROOT = Path(__file__).parents[4]
TOKENS = json.loads((GOLDEN / "tokens.json").read_text())
RECIPES = yaml.safe_load((GOLDEN / "recipes.yml").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_recipes.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "recipes.safetensors")


def load(file):
    return recipe_of(fields_of(file, "a recipe"), file)


def merged(recipe, models, out, **options):
    out.mkdir(exist_ok=True)
    file = out / "asked.yml"
    file.write_text(yaml.safe_dump(make_recipes.at(recipe, models)))
    commands.from_recipe(settings.FromRecipe(file, out, **options))
    (made,) = (folder for folder in out.iterdir() if folder.is_dir())
    return made


@pytest.fixture(scope="module")
def made_of(models, tmp_path_factory):
    """``made_of(name)``: the folder that a recipe makes, once."""
    return cache(lambda name: merged(RECIPES[name], models, tmp_path_factory.mktemp("made")))


# of each a like one is fast: another recipe of its method, and one with its tokens or slices
SLOW = {
    "ties", "ties-extremes", "ties-normalized-densities", "dare-extremes", "breadcrumbs-extremes", "linear",
    "task-arithmetic-negation", "slerp-models", "slerp-one-model", "ram-of-all-changes", "slices-slerp",
    "slices-linear-unequal", "slices-ramplus-unequal", "slices-sce-unequal", "slices-model-stock-unequal",
    "tokenizer-union", "tokenizer-of-base", "tokens-padded-alone",
}  # fmt: skip


def each(names, *slow):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW | {*slow} else name for name in names]
    )


def test_what_is_slow_is_a_recipe():
    assert RECIPES.keys() >= SLOW
    assert {RECIPES[name]["merge_method"] for name in RECIPES.keys() - SLOW} == {
        recipe["merge_method"] for recipe in RECIPES.values()
    }


@each(RECIPES)
def test_a_recipe_is_what_mergekit_makes_of_it(name, made_of, golden):
    made = made_of(name)
    found = load_file(made / "model.safetensors")
    if name in TOKENS:
        order = same_tokens(made, TOKENS[name], RECIPES[name].get("tokenizer", {}).get("pad_to_multiple_of", 1))
        found |= {path: found[path][order] for path in ("model.embed_tokens.weight", "lm_head.weight")}
    wanted = {path.partition("/")[2]: leaf for path, leaf in golden.items() if path.partition("/")[0] == name}
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert found[path].dtype == leaf.dtype
        near = {"rtol": 2e-5, "atol": 2e-6} if leaf.dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
        torch.testing.assert_close(found[path], leaf, **near, msg=lambda text, path=path: f"{path}: {text}")


REPEATED = (
    "ties-gradients", "della", "slerp-gradient-slices", "linear-filters", "breadcrumbs", "passthrough-of-another-base",
    "slices-linear-unequal", "slices-karcher-unequal", "slices-growing", "tokens",
    "slices-ramplus-unequal", "nearswap", "nearswap-gradient", "multislerp-gradients-without-base",
    "dare-linear-not-rescaled",
    "adapters-of-base-and-of-a-model", "adapters-in-slices",
    "tokenizer-union-mean", "tokenizer-of-a-model",
)  # fmt: skip


@each(REPEATED, "slerp-gradient-slices", "breadcrumbs", "slices-karcher-unequal", "nearswap", "tokenizer-of-a-model")
def test_the_file_in_an_output_repeats_it(name, models, made_of, tmp_path):
    (tmp_path / "one").mkdir()
    first = merged(RECIPES[name], models, tmp_path / "one", seed=3) if name == "della" else made_of(name)  # has masks
    commands.from_recipe(settings.FromRecipe(first / RECIPE, tmp_path / "two"))
    second = tmp_path / "two" / first.name
    for file in "model.safetensors", "config.json", RECIPE:
        assert (first / file).read_bytes() == (second / file).read_bytes()


def test_weights_of_karcher_are_those_of_the_experts_that_have_a_layer(models, tmp_path):
    part = Path(f"{models / 'B'}[0:2]~+{models / 'B'}[2:4]")
    places = {"A": models / "A", "B": part, "C": models / "C"}
    merge_folders(Karcher(weights=(1.0, 2.0, 5.0)), models / "A", places, tmp_path / "out")
    found, trees = (
        load_file(tmp_path / "out" / "model.safetensors"),
        [load_file(models / n / "model.safetensors") for n in "ABC"],
    )
    for layer, own, weights in ((0, trees[::2], (1.0, 5.0)), (3, trees, (1.0, 2.0, 5.0))):
        path = f"model.layers.{layer}.mlp.up_proj.weight"
        expected = merge.karcher([{path: tree[path]} for tree in own], weights=weights)[path]
        torch.testing.assert_close(found[path], expected)


def same_tokens(made, wanted, pad):
    """Our id of every token, in mergekit's order; the order of new tokens is random there."""
    tokenizer = AutoTokenizer.from_pretrained(made)
    ids = tokenizer.get_vocab()
    assert ids.keys() == wanted["ids"].keys()
    assert tokenizer.chat_template == wanted["chat_template"]
    rows = json.loads((made / "config.json").read_text())["vocab_size"]
    assert rows == -(-len(ids) // pad) * pad
    return [*(ids[token] for token in sorted(wanted["ids"], key=wanted["ids"].get)), *range(len(ids), rows)]


@each(name for name in RECIPES if "slices" in RECIPES[name] or name in TOKENS)
def test_a_model_of_other_layers_or_tokens_loads(name, made_of):
    made = made_of(name)
    model, told = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True, dtype="auto")
    assert not any(told.values())
    stored = load_file(made / "model.safetensors")
    assert all(torch.equal(leaf, stored[path]) for path, leaf in model.state_dict().items())


BAD = {
    "merge_method": "evolve",
    "base_model": "BASE",
    "modules": {},
    "tokenizer": {
        "source": "union",
        "pad_to_multiple_of": 0,
        "width": 3,
        "tokens": {
            "t3": {"force": 1},
            "t4": {"sources": "A"},
            "t5": {"source": {"kind": "model_token", "model": "A"}},
            "t6": {"source": 5},
        },
    },
    "tokenizer_source": "base",
    "chat_template": "exaone",
    "dtype": "int8",
    "parameter": 1,
    "slices": [
        {"sources": [{"model": "A", "layer_range": [0, 2], "parameters": {"weight": "much"}}]},
        {"sources": [{"model": "C+ADAPTER", "layer_range": [2], "parameters": {"weight": [1, {"value": 2}]}}]},
        {"sources": [], "residual_weight": 0.5},
    ],
}
NAMED = (
    "modules is not supported", "tokenizer.pad_to_multiple_of is 0", "tokens.t3.force is 1", "tokens.t4 is {'sources'",
    "tokens.t5.source is", "tokens.t6.source is 5", "tokenizer.width is not supported",
    "tokenizer and tokenizer_source are both", "chat_template is 'exaone'", "dtype 'int8' is unknown",
    "parameter is not a field of a recipe, did you mean 'parameters'",
    "merge_method 'evolve' is unknown", "slices.residual_weight", "'much'",
    "weight of model C+ADAPTER mixes", "layer_range of model C+ADAPTER is [2]",
    "sources of every slice, must be",
)  # fmt: skip


def test_all_that_no_merger_does_is_refused_by_name_before_a_model_is_looked_at(tmp_path):
    (tmp_path / "bad.yml").write_text(yaml.safe_dump(BAD))
    with pytest.raises(ValueError, match="modules is not supported") as error:
        load(tmp_path / "bad.yml")
    assert [text for text in NAMED if text not in str(error.value)] == []


WEIGHTS = ("A", 0.25), ("B", 0.75)
SHARED = {"merge_method": "ties", "base_model": "BASE", "models": [{"model": "A", "parameters": {"weight": 1}}]}
SLICED = {"merge_method": "passthrough", "dtype": "float32"}
ONE = {"sources": [{"model": "A", "layer_range": [0, 2]}]}
TWO = {"sources": [{"model": "A", "layer_range": [0, 2]}, {"model": "B", "layer_range": [0, 2]}]}
THREE = [{"model": name, "layer_range": [0, 2], "parameters": {"weight": 1}} for name in "CAB"]
EXCEPT_MLP = [{"filter": "mlp", "value": 0}, {"value": 1}]
NEAR = {"merge_method": "nearswap", "base_model": "BASE", "models": [{"model": "A"}]}
OTHER = {"model": "BASE", "layer_range": [0, 2], "parameters": {"weight": 1}}
NUSLERP = {"merge_method": "nuslerp", "models": [{"model": name, "parameters": {"weight": w}} for name, w in WEIGHTS]}
GONE = {"merge_method": "karcher", "models": [{"model": f"/nowhere/{name}"} for name in "AB"]}
REFUSALS = {
    "parameters is 3: must be parameters by name": SHARED | {"parameters": 3},
    "parameters of model": SHARED | {"models": [{"model": "A", "parameters": [1]}]},
    "has the filter [0]": SHARED | {"parameters": {"density": {"filter": [0], "value": 1}}},
    "has the value {'value': 1}": SHARED | {"parameters": {"density": {"value": {"value": 1}}}},
    "is [[0]]: must be a number, a list of numbers": SHARED | {"parameters": {"density": [[0]]}},
    "parameters.eps: multislerp is implemented with eps 1e-08 alone, delete it": {
        "merge_method": "multislerp",
        "base_model": "BASE",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"weight": 1, "eps": 1e-6},
    },
    "parameters.weight is missing for A: give weight": SHARED | {"models": [{"model": "A"}]},
    "parameters.normalize differs by parameter": SHARED
    | {"parameters": {"normalize": [{"filter": "mlp", "value": True}, {"value": False}]}},
    "parameters.rescale is false, with a density below 1 for A: what della drops": SHARED
    | {"merge_method": "della", "parameters": {"rescale": False, "density": [0.5, 1], "epsilon": 0.1}},
    "parameters.rescale is false, with a density below 1 for A: what della_linear drops": SHARED
    | {"merge_method": "della_linear", "parameters": {"rescale": 0.0, "density": 0.5}},
    "parameters.rescale and normalize: with a density below 1 for A averages": SHARED
    | {"merge_method": "dare_linear", "parameters": {"rescale": False, "normalize": True, "density": 0.5}},
    "layer_range of A is [3, 9]: it has layers [0, 4]": SLICED
    | {"slices": [{"sources": [{"model": "A", "layer_range": [3, 9]}]}]},
    "layer_range of A is [0, -1]: it has layers [0, 4], which includes the last one": SLICED
    | {"slices": [{"sources": [{"model": "A", "layer_range": [0, -1]}]}]},
    "slices[0] lacks base_model": SLICED
    | {
        "merge_method": "ties",
        "base_model": "BASE",
        "slices": [{"sources": [{"model": "A", "layer_range": [0, 2], "parameters": {"weight": 1}}]}],
    },
    "slices[1] has 2 models: passthrough takes one": SLICED | {"slices": [ONE, TWO]},
    "nuslerp takes two models beside base_model": SLICED
    | {"merge_method": "nuslerp", "base_model": "C", "slices": [{"sources": THREE}, {"sources": [*THREE, OTHER]}]},
    "weight of nuslerp with base_model must be one number per model": NUSLERP
    | {
        "base_model": "BASE",
        "parameters": {"weight": 1},
        "models": [{"model": "A", "parameters": {"weight": [0, 1]}}, {"model": "B"}],
    },
    "parameters.weight: the sum is 0 at parameter 'lm_head.weight': give nuslerp others": NUSLERP
    | {"models": [{"model": "A", "parameters": {"weight": [0, 1]}}, {"model": "B", "parameters": {"weight": 0}}]},
    "tokenizer.tokens: ": SHARED | {"tokenizer": {"tokens": {"t3": {"source": "B"}}}},
    "slices[0] has ranges of several lengths": SLICED
    | {
        "merge_method": "karcher",
        "slices": [{"sources": [{"model": "A", "layer_range": [0, 2]}, {"model": "B", "layer_range": [1, 2]}]}],
    },
    "models has base_model alone": SHARED | {"merge_method": "model_stock", "models": [{"model": "BASE"}]},
    "slices must be a list": SLICED | {"slices": True},
    "slices[0] has a model twice": SLICED
    | {
        "merge_method": "karcher",
        "slices": [{"sources": [{"model": "A", "layer_range": [0, 2]}, {"model": "A", "layer_range": [2, 4]}]}],
    },
    "missing for BASE: base_model is merged too, as in mergekit": {
        "merge_method": "linear",
        "base_model": "BASE",
        "models": [
            {"model": "A", "parameters": {"weight": 0.5}},
            {"model": "B_OTHER_VOCABULARY", "parameters": {"weight": 0.5}},
        ],
        "tokenizer": {"source": "union"},
        "chat_template": "auto",
        "dtype": "float32",
    },
    "parameters.weight: the sum is 0 at parameter 'model.layers.0.mlp.down_proj.weight'": {
        "merge_method": "linear",
        "models": [{"model": name, "parameters": {"weight": EXCEPT_MLP}} for name in "AB"],
    },
    "A is 1000": {"merge_method": "linear", "models": [{"model": "A", "parameters": {"weight": 10**400}}]},
    "A is inf: must be a finite number": {
        "merge_method": "linear",
        "models": [{"model": "A", "parameters": {"weight": float("inf")}}],
    },
    "parameters.t is missing: give t": SLICED | NEAR,
    "parameters.weight is missing for A, parameter 'lm_head.weight': give weight, with a last value that has no": SHARED
    | {"models": [{"model": "A", "parameters": {"weight": {"filter": "mlp", "value": 1}}}]},
    "parameters.t of nearswap is 1e-07: give 0.000001 or more": SLICED | NEAR | {"parameters": {"t": 1e-7}},
    "parameters.t of nearswap is 1e-08: give": SLICED | NEAR | {"parameters": {"t": [0.1, 1e-8]}},
    "parameters.tol differs by parameter: karcher takes one value for all of them": {
        "merge_method": "karcher",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"tol": [0.1, 0.2]},
    },
    "parameters.weight: the sum is 0 at parameter 'lm_head.weight': give others, or normalize_weights: false": {
        "merge_method": "multislerp",
        "base_model": "BASE",
        "models": [{"model": "A", "parameters": {"weight": 1}}, {"model": "B", "parameters": {"weight": -1}}],
    },
    "weights of parameter 'lm_head.weight' sum to 0.9: without base_model it is implemented for weights whose sum is": {
        "merge_method": "multislerp",
        "models": [{"model": "A", "parameters": {"weight": 0.5}}, {"model": "B", "parameters": {"weight": 0.4}}],
        "parameters": {"normalize_weights": False},
    },
    "parameters.max_iter is 2.5: must be a whole number": {
        "merge_method": "karcher",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"max_iter": 2.5},
    },
    "parameters.epsilon of A is 0.15, density 0.9: density - epsilon": SHARED
    | {"merge_method": "della", "parameters": {"density": 0.9}},
    "model A+: must be MODEL+ADAPTER, two folders or hub names": "merge_method: karcher\nmodels: [{model: A+}]\n",
    "base_model is missing": {"merge_method": "ties", "models": SHARED["models"]},
    "models is missing: list the models to merge, or slices of them": {"merge_method": "linear"},
    "models and slices are both given: leave one out": SHARED | {"slices": [ONE]},
    "merge_method is missing: give one of linear": {"models": SHARED["models"]},
    "merge_method 'Tie' is unknown, did you mean 'ties'?": SHARED | {"merge_method": "Tie"},
    "dtype 'bfloat16`' is unknown, did you mean 'bfloat16'?": SHARED | {"dtype": "bfloat16`"},
    "dype is not a field of a recipe, did you mean 'dtype'?": SHARED | {"dype": "float32"},
    "select_topk is a parameter: put it under parameters, or delete it; mergekit 0.1.5 ignores it here": SHARED
    | {"select_topk": 0.5},
    "pad_to_multiple_of is a field of tokenizer: put it there": SHARED | {"pad_to_multiple_of": 8},
    "parameters.densty is not a parameter of ties, did you mean 'density'?": SHARED | {"parameters": {"densty": 1}},
    "parameters.lambda of model": SHARED | {"models": [{"model": "A", "parameters": {"weight": 1, "lambda": 1}}]},
    "lambda is one of the whole merge, put it under parameters beside merge_method": SHARED
    | {"models": [{"model": "A", "parameters": {"weight": 1, "lambda": 1}}]},
    "weight stands beside model": SHARED | {"models": [{"model": "A", "weight": 1}]},
    "/A: put it under parameters there": SHARED | {"models": [{"model": "A", "weight": 1}]},
    "@REVISION, or delete it; mergekit 0.1.5 ignores it here": SHARED | {"models": [{"model": "A", "revision": "dpo"}]},
    "/A, which has no such field, did you mean 'parameters'?": SHARED | {"models": [{"model": "A", "parameter": 1}]},
    "slices.merge_method is not supported: all slices are merged by one method: write a file for each": SLICED
    | {"slices": [ONE | {"merge_method": "slerp"}]},
    "slices.base_model is not supported: all slices have one base": SLICED
    | {"slices": [ONE | {"base_model": "A"}, ONE | {"base_model": "B"}]},
    "slices.base_model is not supported: all slices have one": SLICED
    | {"base_model": "B", "slices": [ONE | {"base_model": "A"}]},
    "bad.yml describes a mixture of experts: run merge.py moe": {
        "merge_method": "moe",
        "base_model": "A",
        "experts": [],
    },
    "bad.yml configures fusion_bench.method.Ties (_target_), it is not a recipe: docs/from_mergekit.md maps": {
        "_target_": "fusion_bench.method.Ties",
        "scaling_factor": 0.3,
    },
    "bad.yml configures fusion_bench.programs.Fusion (_target_)": {
        "_target_": "fusion_bench.programs.Fusion",
        "method": {"_target_": "fusion_bench.method.X"},
    },
    "bad.yml configures fusion_bench.method.X (_target_)": {"method": {"_target_": "fusion_bench.method.X"}},
    "bad.yml is a search of mergekit-evolve (genome), not a merge": {"genome": {"models": ["A"]}, "tasks": []},
    "cannot be read as YAML": "models: [",
    "delete the lines with ```, which are of the page it was copied from": "```yaml\nmerge_method: linear\n```\n",
    "nowhere/A is not a folder: give the folder of a checkpoint, or a hub name": GONE,
    "nowhere/B is not a folder: give the folder of a checkpoint, or a hub name": GONE,
    "cannot be read as YAML ('x')": "merge_method: !!bool x",
    "cannot be read as YAML (string index": "merge_method: !!int ''",
    "cannot be read as YAML ('NoneType'": "merge_method: !!timestamp x",
    "models have equal names among": SHARED | {"models": [{"model": "A"}, {"model": "B/../A"}]},
    "holds a list": "[1]",
    "holds nothing": "# later\n",
    "normalize is given twice": "parameters: {normalize: true, weight: 1, normalize: false}",
    "parameters.normalize is the text 'false': write false without quotes": SHARED
    | {"merge_method": "ties", "parameters": {"normalize": "false"}},
    "an alias (*name) is a part of what it stands for (&name)": "models: &a [{model: A}, *a]",
    "its aliases (*name) stand for more than 1,000,000 values": "".join(
        f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else '0'] * 9)}]\n" for i in range(9)
    ),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_what_a_recipe_cannot_say_is_one_error(text, models, tmp_path):
    recipe = REFUSALS[text]
    words = recipe if isinstance(recipe, str) else yaml.safe_dump(make_recipes.at(recipe, models))
    (tmp_path / "bad.yml").write_text(words)
    with pytest.raises(ValueError, match=re.escape(text)):
        load(tmp_path / "bad.yml")


ROWS = {
    "leaf": {},
    "last": {"nuslerp_flatten": False},
    "first": {"nuslerp_flatten": False, "nuslerp_row_wise": True},
}


@pytest.mark.parametrize("along", ROWS)
def test_nuslerp_without_a_base_is_that_of_a_zero_one(along, models, tmp_path):
    made = merged(NUSLERP | {"parameters": ROWS[along]}, models, tmp_path)
    a, b = (load_file(models / name / "model.safetensors") for name in "AB")
    zeros = {path: torch.zeros_like(leaf) for path, leaf in a.items()}
    found = load_file(made / "model.safetensors")
    for path, leaf in merge.nuslerp(zeros, [a, b], t=0.75, along=along).items():
        assert torch.equal(found[path], leaf)


@pytest.mark.parametrize("along", [pytest.param("leaf", marks=pytest.mark.slow), "last", "first"])
def test_nuslerp_without_a_base_has_weights_by_layer(along, models, tmp_path):
    own = [{"model": "A", "parameters": {"weight": [0, 3]}}, {"model": "B", "parameters": {"weight": 1}}]
    recipe = {"name": "any", "merge_method": "nuslerp", "models": own, "parameters": ROWS[along]}
    made = merged(recipe, models, tmp_path)
    a, b = (load_file(models / name / "model.safetensors") for name in "AB")
    found = load_file(made / "model.safetensors")
    for path, leaf in found.items():
        layer = int(path.split(".")[2]) if ".layers." in path else 0
        zero, both = {path: torch.zeros_like(leaf)}, [{path: a[path]}, {path: b[path]}]
        assert torch.equal(leaf, merge.nuslerp(zero, both, t=1 / (layer + 1), along=along)[path])


def test_folders_of_one_name_and_words_that_change_nothing(models, tmp_path):
    """``model:`` is of older versions of mergekit, and int8_mask stands anywhere."""
    own = []
    for place, source, weight in ("one", "A", 1), ("two", "B", 3):
        folder = shutil.copytree(models / source, tmp_path / place / "ck")
        own.append({"model": str(folder), "parameters": {"weight": weight, "int8_mask": True}})
    recipe = {"merge_method": "linear", "models": own, "tokenizer_source": f"model:{tmp_path}/two/ck"}
    recipe["parameters"] = {"filter_wise": False, "eps": 1e-8}
    (tmp_path / "asked.yml").write_text(yaml.safe_dump(recipe))
    commands.from_recipe(settings.FromRecipe(tmp_path / "asked.yml", tmp_path / "out"))
    made = tmp_path / "out/weighted_average"
    a, b = (load_file(models / name / "model.safetensors") for name in "AB")
    for path, leaf in load_file(made / "model.safetensors").items():
        torch.testing.assert_close(leaf, (a[path] + 3 * b[path]) / 4)
    assert [*checkpoint.load_manifest(made)["experts"]] == ["one-ck", "two-ck"]
    assert json.loads((made / "tokenizer_config.json").read_text())["chat_template"] == make_recipes.TEMPLATES["B"]


def told(recipe, tmp_path):
    """The error for a recipe."""
    (tmp_path / "bad.yml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    with pytest.raises(ValueError, match=r"bad\.yml") as error:
        load(tmp_path / "bad.yml")
    return str(error.value)


def test_each_problem_of_a_recipe_is_told_once(tmp_path):
    own = [{"model": name, "weight": 1} for name in "ABC"]
    text = told({"merge_method": "model_stock", "base_model": "BASE", "models": own}, tmp_path)
    assert text.count("weight stands beside model A and B and C: put it under parameters there") == 1
    assert "merge_method 'lrp' is unknown" in told({"merge_method": "lrp", "models": own}, tmp_path)
    modules = told({"merge_method": "linear", "modules": {"text": {"models": own}}}, tmp_path)
    assert "models is missing" not in modules


IGNORED = {
    "model_stock": (
        {},
        [{"weight": [0.5, 1]}, {"weight": {"value": 2}}],
        {"normalize": True},
        "parameters.normalize, parameters.weight of model {A} and {B}: ignored, as in mergekit: model_stock has no "
        "normalize or weight, it has filter_wise",
    ),
    "arcee_fusion": (
        {"base_model": "A"},
        [{"weight": 0.5}, {}],
        {"smooth": True},
        "parameters.smooth, parameters.weight of model {A}: ignored, as in mergekit: arcee_fusion has no smooth or "
        "weight",
    ),
}


@pytest.mark.parametrize("method", IGNORED)
def test_what_mergekit_ignores_is_ignored_with_a_note(method, models, tmp_path, capsys):
    more, own, shared, note = IGNORED[method]
    plain = {"merge_method": method, "base_model": "BASE", "models": [{"model": name} for name in "AB"]} | more
    given = plain | {"parameters": shared, "random_seed": 3, "author": "me", "dtype": "torch.float32"}
    given["models"] = [{"model": m, "parameters": values, "glorious": 1} for m, values in zip("AB", own, strict=True)]
    made = [merged(recipe, models, tmp_path / name) for name, recipe in {"plain": plain, "given": given}.items()]
    a, b = (load_file(folder / "model.safetensors") for folder in made)
    assert a.keys() == b.keys()
    assert all(torch.equal(leaf, b[path]) for path, leaf in a.items())
    text = capsys.readouterr().out
    for words in (
        note.format(A=models / "A", B=models / "B"),
        "author, random_seed are not fields of a recipe: ignored, as in mergekit",
        f"glorious stands beside model {models / 'A'} and {models / 'B'}: ignored, as in mergekit",
    ):
        assert text.count(f"note: {words}\n") == 1


@pytest.mark.parametrize("method", ["task_arithmetic", "dare_ties"])
@pytest.mark.parametrize("form", ["models", "slices"])
def test_a_base_alone_is_written_as_it_is(method, form, models, tmp_path, capsys):
    alone = {"model": "BASE+ADAPTER", "parameters": {"weight": 1, "density": 0.5}}
    layers = [{"sources": [alone | {"layer_range": [0, 4]}]}]
    own = {"models": [alone]} if form == "models" else {"slices": layers}
    recipe = {"merge_method": method, "base_model": "BASE+ADAPTER", "parameters": {"normalize": False}, **own}
    made = merged(recipe, models, tmp_path / "out")
    plain = merged({"merge_method": "passthrough", "models": [{"model": "BASE+ADAPTER"}]}, models, tmp_path / "plain")
    a, b = (load_file(folder / "model.safetensors") for folder in (made, plain))
    assert a.keys() == b.keys()
    assert all(torch.equal(leaf, b[path]) for path, leaf in a.items())
    assert "note: base_model is the only model: its weights are written as they are\n" in capsys.readouterr().out


def test_base_and_method_of_all_slices_are_those_of_the_recipe(models, tmp_path):
    slices = [{"sources": [{"model": m, "layer_range": [i, i + 2]} for m in ("BASE", "A")]} for i in (0, 2)]
    plain = {"merge_method": "slerp", "base_model": "BASE", "slices": slices, "parameters": {"t": [0, 1]}}
    inner = {"base_model": {"model": {"path": str(models / "BASE")}}, "merge_method": "slerp"}
    given = {"slices": [own | inner for own in slices], "parameters": {"t": [0, 1]}}
    made = [merged(recipe, models, tmp_path / name) for name, recipe in {"plain": plain, "given": given}.items()]
    files = [(folder / "model.safetensors").read_bytes() for folder in made]
    assert files[0] == files[1]


@pytest.mark.parametrize("text", ["1e-8", "1.0e-8", "0.00000001"])
def test_numbers_without_a_point_are_numbers(text, models, tmp_path):
    """PyYAML reads 1e-8 as text."""
    recipe = f"merge_method: multislerp\nbase_model: {models / 'BASE'}\nparameters: {{weight: 1e-1, eps: {text}}}\n"
    (tmp_path / "asked.yml").write_text(recipe + f"models: [{{model: {models / 'A'}}}, {{model: {models / 'B'}}}]\n")
    assert load(tmp_path / "asked.yml").config.weights == (0.1, 0.1)
    asked = {"merge_method": "nearswap", "base_model": "BASE", "models": [{"model": "A"}], "parameters": {"t": 0.5}}
    file = merged(asked, models, tmp_path) / RECIPE
    file.write_text(file.read_text().replace("t: 0.5", "t: 2e-5"))
    assert load(file).config.t == 2e-5


def test_angles_of_rows_and_weights_that_are_not_normalized(models, tmp_path):
    own = {"base_model": "BASE", "models": [{"model": "A"}, {"model": "B"}]}
    for method, parameters, name, value in (
        ("model_stock", {"filter_wise": True}, "along", "last"),
        ("model_stock", {"filter_wise": False}, "along", "leaf"),
        ("multislerp", {"weight": 0.3, "normalize_weights": False}, "normalize", False),
        ("multislerp", {"weight": 0.3}, "normalize", True),
    ):
        asked = {**own, "merge_method": method, "parameters": parameters}
        (tmp_path / "asked.yml").write_text(yaml.safe_dump(make_recipes.at(asked, models)))
        assert getattr(load(tmp_path / "asked.yml").config, name) == value


def test_int8_mask_is_ignored_beside_merge_method_too(models, tmp_path):
    (tmp_path / "asked.yml").write_text(yaml.safe_dump(make_recipes.at(SHARED | {"int8_mask": True}, models)))
    assert load(tmp_path / "asked.yml").notes == ("int8_mask is ignored: masks take no memory here",)


def test_a_revision_of_a_folder_is_ignored_with_a_note(models, tmp_path, monkeypatch):
    monkeypatch.chdir(models)
    own = [{"model": {"model": {"path": "A", "revision": "v1"}}, "parameters": {"weight": 1}}]
    (tmp_path / "asked.yml").write_text(yaml.safe_dump(SHARED | {"base_model": "BASE@main", "models": own}))
    found = load(tmp_path / "asked.yml")
    assert (found.base, found.experts) == (Path("BASE"), {"A": Path("A")})
    wanted = "BASE is a folder, which has no revisions: @main is ignored", "A is a folder, which has no revisions: @v1"
    assert [text in note for text, note in zip(wanted, found.notes, strict=True)] == [True, True]
    assert [note.partition(":")[0] for note in found.notes] == ["BASE@main", "A@v1"]


TEMPLATES_TOLD = json.loads((GOLDEN / "templates.json").read_text())


@pytest.mark.parametrize("name", TEMPLATES_TOLD)
def test_named_chat_templates_render_the_text_of_mergekit(name, models, tmp_path):
    recipe = {"merge_method": "passthrough", "models": [{"model": "A"}], "chat_template": name}
    made = merged(recipe, models, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(made)
    for case in TEMPLATES_TOLD[name]:
        asked = {"tokenize": False, "add_generation_prompt": case["prompt"]}
        if case["text"] is None:
            with pytest.raises(Exception, match="alternate"):
                tokenizer.apply_chat_template(case["messages"], **asked)
        else:
            assert tokenizer.apply_chat_template(case["messages"], **asked) == case["text"]
    commands.from_recipe(settings.FromRecipe(made / RECIPE, tmp_path / "again"))
    assert (tmp_path / "again" / made.name / RECIPE).read_bytes() == (made / RECIPE).read_bytes()


def test_what_a_named_chat_template_does_otherwise_than_its_vendor_is_told(models, tmp_path):
    for name, text in {"chatml": "", "llama3": "line break after every <|eot_id|>", "alpaca": "no line break"}.items():
        recipe = {"merge_method": "passthrough", "models": [{"model": "A"}], "chat_template": name}
        (tmp_path / "asked.yml").write_text(yaml.safe_dump(make_recipes.at(recipe, models)))
        notes = load(tmp_path / "asked.yml").notes
        assert notes == () if not text else text in notes[0]


def test_layers_of_models_with_other_vocabularies_are_stacked_between_those_of_one(models, tmp_path):
    """As mergekit, which reads the embeddings of the first slice, the norm and the head of the last one."""

    def stack(*names):
        own = [{"sources": [{"model": name, "layer_range": [i, i + 1]}]} for i, name in enumerate(names)]
        return {"merge_method": "passthrough", "dtype": "float32", "slices": own}

    made = merged(stack("A", "B_OTHER_VOCABULARY", "A"), models, tmp_path)
    a, b = (load_file(models / name / "model.safetensors") for name in ("A", "B_OTHER_VOCABULARY"))
    for path, leaf in load_file(made / "model.safetensors").items():
        assert torch.equal(leaf, (b if ".layers.1." in path else a)[path])
    assert json.loads((made / "config.json").read_text())["vocab_size"] == make_recipes.ROWS
    assert not any(AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)[1].values())
    (tmp_path / "bad").mkdir()
    with pytest.raises(ValueError, match="the first and the last slice must have one vocabulary"):
        merged(stack("A", "B", "B_OTHER_VOCABULARY"), models, tmp_path / "bad")


def test_slices_may_list_the_models_in_any_order(models, tmp_path):
    def part(layers, **weights):
        own = [{"model": name, "layer_range": layers, "parameters": {"weight": w}} for name, w in weights.items()]
        return {"sources": own}

    recipe = {"merge_method": "linear", "dtype": "float32"}
    made = {}
    for place, weights in {"any": {"B": 0.4, "A": 0.6}, "one": {"A": 0.6, "B": 0.4}}.items():
        (tmp_path / place).mkdir()
        slices = [part([0, 1], A=1.0), part([1, 2], **weights), part([2, 4], A=0.7, B=0.3)]
        made[place] = merged(recipe | {"slices": slices}, models, tmp_path / place)
    assert [*checkpoint.load_manifest(made["any"])["experts"]] == ["A+B", "A+B-2"]
    one, two = (load_file(folder / "model.safetensors") for folder in made.values())
    for path, leaf in one.items():
        torch.testing.assert_close(leaf, two[path], rtol=1e-6, atol=1e-6)


def test_a_recipe_takes_what_its_errors_ask_for(models, tmp_path):
    own = [{"model": name, "parameters": {"weight": 1}} for name in ("A", "B_OTHER_VOCABULARY")]
    with pytest.raises(ValueError, match="pass `vocabulary='base-rows'`"):
        merged({"merge_method": "linear", "models": own}, models, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(make_recipes.CONFIG | {"rope_theta": 5.0}))
    chosen = {"vocabulary": "base-rows", "config_from": str(tmp_path)}
    made = merged({"merge_method": "linear", "models": own}, models, tmp_path, **chosen)
    assert len(load_file(made / "model.safetensors")["lm_head.weight"]) == make_recipes.ROWS
    assert json.loads((made / "config.json").read_text())["rope_theta"] == 5.0


def test_merging_by_token_is_advised_where_a_recipe_does_not_ask_for_it(models, tmp_path):
    place = shutil.copytree(models, tmp_path / "models")
    for file in (place / "A").glob("tokenizer*"):
        file.unlink()
    own = [{"model": name, "parameters": {"weight": 1}} for name in ("A", "B_OTHER_VOCABULARY")]
    texts = []
    for source in None, "union":
        with pytest.raises(ValueError, match=r"has 16 rows in|has no tokenizer") as error:
            merged({"merge_method": "linear", "models": own, "tokenizer_source": source}, place, tmp_path)
        texts.append(spoken(str(error.value), ["vocabulary", "config_from"]))
    assert "merge by token (tokenizer_source: union in the recipe)" in texts[0]
    assert texts[1].endswith("has no tokenizer, so rows match no tokens: leave out tokenizer_source in the recipe")


def test_gradients_run_over_each_list_of_layers():
    counts = {"encoder": 5, "decoder": 3, "once": 1}
    paths = [f"{part}.layers.{i}.w" for part, count in counts.items() for i in range(count)]
    found = {path: spot.t for path, spot in resolve._whole_spots([*paths, "head"]).items()}
    assert [*found.values()] == [0, 0.25, 0.5, 0.75, 1, 0, 0.5, 1, 1, 0]
    paths = [f"model.layers.{i}.mlp.w" for i in range(3)] + ["visual.merger.mlp.0.weight", "visual.merger.mlp.2.weight"]
    found = {path: spot.t for path, spot in resolve._whole_spots(paths).items()}
    assert [*found.values()] == [0, 0.5, 1, 0, 0]


def test_a_gradient_over_a_unet_is_an_error(tmp_path):
    leaves = {f"{way}_blocks.{i}.conv.weight": torch.ones(2, 2) for way in ("down", "up") for i in range(2)}
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        save_file(leaves, tmp_path / name / "model.safetensors")

    def made(weight, out):
        own = [{"model": str(tmp_path / name), "parameters": {"weight": weight}} for name in "ab"]
        recipe = {"merge_method": "task_arithmetic", "base_model": str(tmp_path / "base"), "models": own}
        file = tmp_path / f"{out}.yml"
        file.write_text(yaml.safe_dump(recipe))
        return load(file)

    with pytest.raises(ValueError, match=r"^[^;]*UNet have no depth for the gradient \[0.0, 1.0\]: give filters[^;]*$"):
        made([0, 1], "graded")
    plain, *filtered = made([0.5], "one"), made([{"filter": "up_", "value": 1}, {"value": 0.5}], "filtered")
    assert plain.config.weights == {"a": 0.5, "b": 0.5}
    assert filtered[0].config.weights["a"] != 0.5


def test_an_adapter_may_be_of_the_first_model(models, tmp_path):
    made = merged({"merge_method": "passthrough", "models": [{"model": "BASE+ADAPTER"}]}, models, tmp_path)
    found, base = (load_file(folder / "model.safetensors") for folder in (made, models / "BASE"))
    a, b = load_file(models / "ADAPTER" / "adapter_model.safetensors").values()
    path = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(found.pop(path), base.pop(path) + 2 * (b @ a))
    assert all(torch.equal(leaf, base[path]) for path, leaf in found.items())


def test_an_adapter_with_added_tokens_is_exported_with_them_or_without(models, tmp_path, monkeypatch):
    adapter = shutil.copytree(models / "ADAPTER", tmp_path / "ADAPTER")
    other = models / "B_OTHER_VOCABULARY"
    for file in other.glob("tokenizer*"):
        shutil.copy(file, adapter)
    whole = load_file(other / "model.safetensors")
    head = whole["lm_head.weight"]
    rows = {f"base_model.model.{path}": whole[path] for path in ("lm_head.weight", "model.embed_tokens.weight")}
    save_file(load_file(adapter / "adapter_model.safetensors") | rows, adapter / "adapter_model.safetensors")

    def run(*words):
        words = ("export", adapter, "--base", models / "BASE", "--out", tmp_path / "out", "--overwrite", *words)
        monkeypatch.setattr(sys, "argv", ["merge.py", *map(str, words)])
        entry.merge("merge.py", ())
        return load_file(tmp_path / "out/model.safetensors")["lm_head.weight"]

    def ids(folder):
        found = json.loads((folder / "tokenizer.json").read_text())
        return found["model"]["vocab"] | {token["content"]: token["id"] for token in found["added_tokens"]}

    with pytest.raises(SystemExit, match=r"pass --vocabulary .*, or merge by token \(--tokenizer-from union\)"):
        run()
    base = load_file(models / "BASE/model.safetensors")["lm_head.weight"]
    assert len(run("--vocabulary", "pad-with-base")) == len(base)
    found, after, before = run("--tokenizer-from", "union"), ids(tmp_path / "out"), ids(adapter)
    assert before.keys() - ids(models / "BASE").keys()
    for token, row in before.items():
        assert torch.equal(found[after[token]], head[row])


def test_a_base_with_an_adapter_is_the_folder_that_export_writes(models, tmp_path):
    """In bfloat16 too, to which both round the sum; and it may be one of the models."""
    place = tmp_path / "models"
    for name in "BASE", "A":
        own = {path: leaf.bfloat16() for path, leaf in load_file(models / name / "model.safetensors").items()}
        shutil.copytree(models / name, place / name)
        save_file(own, place / name / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(models / "ADAPTER", place / "ADAPTER")
    exporting.export(place / "ADAPTER", place / "BASE", place / "WHOLE")
    found = []
    for base in "BASE+ADAPTER", "WHOLE":
        (tmp_path / base).mkdir()
        own = [{"model": "A", "parameters": {"weight": 0.5}}, {"model": base, "parameters": {"weight": 0.3}}]
        recipe = {"merge_method": "task_arithmetic", "base_model": base, "models": own}
        found.append(merged(recipe, place, tmp_path / base))
    one, two = (load_file(made / "model.safetensors") for made in found)
    assert one.keys() == two.keys()
    assert all(leaf.dtype == torch.bfloat16 and torch.equal(leaf, two[path]) for path, leaf in one.items())
    file = (found[0] / RECIPE).read_text()
    assert yaml.safe_load(file)["base"] == "BASE+ADAPTER[0:4]"
    assert str(tmp_path) not in file + (found[0] / "manifest.json").read_text() + (found[0] / "README.md").read_text()
    commands.from_recipe(settings.FromRecipe(found[0] / RECIPE, tmp_path / "again"))
    again = tmp_path / "again" / found[0].name / "model.safetensors"
    assert again.read_bytes() == (found[0] / "model.safetensors").read_bytes()


def test_base_gives_the_rows_that_a_model_lacks_at_any_place_in_slices(models, tmp_path):
    """``tokenizer: {}`` is a union in mergekit."""
    weights = {"A": 0.5, "B_OTHER_VOCABULARY": 0.4, "BASE": 0.2}
    own = [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]
    asked = {"merge_method": "linear", "base_model": "BASE", "dtype": "float32"}
    halves = [{"sources": [{**model, "layer_range": part} for model in own]} for part in ([0, 2], [2, 4])]
    recipes = {
        "whole": asked | {"models": own, "tokenizer": {"source": "union"}},
        "sliced": asked | {"slices": halves, "tokenizer": {}},
    }
    found = {}
    for name, recipe in recipes.items():
        (tmp_path / name).mkdir()
        found[name] = load_file(merged(recipe, models, tmp_path / name) / "model.safetensors")
    assert found["whole"].keys() == found["sliced"].keys()
    assert all(torch.equal(leaf, found["sliced"][path]) for path, leaf in found["whole"].items())


def test_recipes_in_the_forms_that_mergekit_writes(models, tmp_path):
    def loaded(recipe):
        (tmp_path / "asked.yml").write_text(yaml.safe_dump(make_recipes.at(recipe, models)))
        return load(tmp_path / "asked.yml")

    def nested(name, lora=None):
        own = {"path": str(models / name), "revision": None}
        return {"model": own, "lora": lora and {"path": str(models / lora)}}

    sources = [{"model": nested("BASE"), "layer_range": [0, 2]}]
    sources += [{"model": nested(name), "layer_range": [1, 3], "parameters": {"weight": 0.5}} for name in "AB"]
    told = {"source": {"kind": "model_token", "model": nested("A"), "token_id": 4}}
    written = {"merge_method": "ties", "base_model": nested("BASE")}
    written |= {"modules": {"default": {"slices": [{"sources": sources}]}}}
    written |= {"tokenizer": {"source": nested("A"), "tokens": {"new": told, "t4": {"source": nested("B")}}}}
    names = iter(["BASE", "A", "B"])
    usual = {"merge_method": "ties", "base_model": "BASE"}
    usual |= {"slices": [{"sources": [own | {"model": next(names)} for own in sources]}]}
    told = {"source": told["source"] | {"model": "A"}}
    usual |= {"tokenizer": {"source": "A", "tokens": {"new": told, "t4": {"source": "B"}}}}
    assert loaded(written) == loaded(usual)
    alone = {"default": {"models": [{"model": nested("BASE", "ADAPTER")}]}}
    assert loaded({"merge_method": "passthrough", "modules": alone}) == loaded(
        {"merge_method": "passthrough", "models": [{"model": "BASE+ADAPTER"}]}
    )
    assert loaded(usual | {"modules": None}) == loaded(usual)
    several = usual | {"modules": written["modules"]}
    with pytest.raises(ValueError, match="modules is not supported: only the module default is read"):
        loaded(several)


def test_what_is_printed_and_written_is_what_a_recipe_says(models, tmp_path, capsys):
    recipe = {
        "merge_method": "slerp",
        "base_model": "A",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"t": 0.9},
    }
    made = merged(recipe, models, tmp_path)
    assert f"merged: {made}, coef 0.9, rounding" in capsys.readouterr().out
    assert "Merger: slerp (coef 0.9, zeros True), semantics mergekit." in (made / "README.md").read_text()
    (tmp_path / "leaves").mkdir()
    made = merged(recipe | {"parameters": {"t": [0.2, 0.9]}}, models, tmp_path / "leaves")
    assert f"merged: {made}, coef by parameter, rounding" in capsys.readouterr().out


def test_true_is_one_and_false_is_zero_among_numbers(models, tmp_path):
    outs = []
    for place, yes, no in (("words", True, False), ("numbers", 1.0, 0.0)):
        (tmp_path / place).mkdir()
        listed = [{"model": name, "parameters": {"weight": w}} for name, w in (("A", yes), ("B", no), ("C", 0.5))]
        recipe = {"merge_method": "linear", "models": listed, "parameters": {"normalize": False}, "dtype": "float32"}
        outs.append(merged(recipe, models, tmp_path / place))
    first, second = (load_file(out / "model.safetensors") for out in outs)
    assert all(torch.equal(first[path], second[path]) for path in first)
    commands.from_recipe(settings.FromRecipe(outs[0] / RECIPE, tmp_path / "again"))  # what is written is accepted


def test_a_seed_of_the_command_line_is_taken_before_that_of_the_file(models, tmp_path):
    recipe = {
        "merge_method": "dare_linear",
        "base_model": "BASE",
        "models": [{"model": "A", "parameters": {"weight": 1, "density": 0.5}}],
    }
    for place in "one", "two":
        (tmp_path / place).mkdir()
    first, files = merged(recipe, models, tmp_path / "one", seed=3), []
    for seed in 3, 4:
        commands.from_recipe(settings.FromRecipe(first / RECIPE, tmp_path / "two", seed=seed, overwrite=True))
        files.append((tmp_path / "two" / "dare" / "model.safetensors").read_bytes())
    assert files[0] == (first / "model.safetensors").read_bytes() != files[1]


def stage(folder, name, **fields):
    """The folder that a recipe of relative names makes in ``out/NAME``."""
    (folder / f"{name}.yml").write_text(yaml.safe_dump(fields | {"dtype": "float32"}))
    commands.from_recipe(settings.FromRecipe(Path(f"{name}.yml"), Path("out", name)))
    (made,) = (path for path in Path("out", name).iterdir() if path.is_dir())
    return str(made), load_file(made / "model.safetensors")


def test_outputs_of_earlier_merges_are_merged_again(models, tmp_path, monkeypatch):
    """One file for each document of a mergekit-multi file; later ones name the outputs of earlier ones."""
    for name in "BASE", "A", "B", "C":
        (tmp_path / name).symlink_to(models / name)
    monkeypatch.chdir(tmp_path)
    half = {"parameters": {"weight": 0.5}}
    one, first = stage(tmp_path, "one", merge_method="linear", models=[{"model": name} | half for name in "BA"])
    assert one == "out/one/weighted_average"
    a, b, c, base = (load_file(models / name / "model.safetensors") for name in ("A", "B", "C", "BASE"))
    assert all(torch.equal(leaf, (b[path] + a[path]) / 2) for path, leaf in first.items())
    t = {"parameters": {"t": 0.5}}
    two, second = stage(tmp_path, "two", merge_method="slerp", base_model=one, models=[{"model": "C"}], **t)
    for path, leaf in merge.slerp([first, c], coef=0.5, zeros=True).items():
        torch.testing.assert_close(second[path], leaf, rtol=2e-5, atol=2e-6)
    own = [{"model": one, "parameters": {"weight": 0.25}}, {"model": two, "parameters": {"weight": 0.75}}]
    _, third = stage(tmp_path, "three", merge_method="linear", models=own)
    for path, leaf in third.items():
        torch.testing.assert_close(leaf, first[path] * 0.25 + second[path] * 0.75)
    _, both = stage(tmp_path, "both", merge_method="slerp", base_model=one, models=[{"model": two}], **t)
    for path, leaf in merge.slerp([first, second], coef=0.5, zeros=True).items():
        torch.testing.assert_close(both[path], leaf, rtol=2e-5, atol=2e-6)
    vectors = {"merge_method": "task_arithmetic", "parameters": {"weight": 0.5}}
    other, fourth = stage(tmp_path, "other", merge_method="linear", models=[{"model": name} | half for name in "CA"])
    for origin, start in (one, first), ("BASE", base):
        place = Path(origin).name
        _, found = stage(tmp_path, place, base_model=origin, models=[{"model": two}, {"model": other}], **vectors)
        for path, leaf in found.items():
            wanted = start[path] + 0.5 * (second[path] - start[path]) + 0.5 * (fourth[path] - start[path])
            torch.testing.assert_close(leaf, wanted)
    trained = shutil.copytree(models / "C", tmp_path / "TRAINED")
    (trained / "manifest.json").write_text(json.dumps({"kind": "expert", "base_fingerprint": "0" * 64}))
    _, mixed = stage(tmp_path, "mixed", merge_method="linear", models=[{"model": m} | half for m in (one, "TRAINED")])
    for path, leaf in mixed.items():
        torch.testing.assert_close(leaf, (first[path] + c[path]) / 2)
    with pytest.raises(ValueError, match=f"TRAINED was trained from another base than {one}"):
        stage(tmp_path, "no", base_model=one, models=[{"model": "TRAINED"}], **vectors)


OWN = {"merger": "ties", "options": {"coef": 0.3, "keep": 0.5}, "base": "BASE", "experts": {"A": "A"}}
OWN_BAD = {
    "options is missing": {"options": ...},
    "'options' is [1]": {"options": [1]},
    "'experts' is ['A']": {"experts": ["A"]},
    "'experts' is {'A': 3}": {"experts": {"A": 3}},
    "'base' is 3": {"base": 3},
    "'coef' is 'x'": {"coef": "x"},
    "'coef' is {'*': None}": {"coef": {"*": None}},
    "'seed' is 0.5": {"seed": 0.5},
    "'shard_size' is '5GB'": {"shard_size": "5GB"},
    "'out_dtype' is 'int8'": {"out_dtype": "int8"},
    "merger is ['ties'], must be one of": {"merger": ["ties"]},
    "options.keep is 'x': see merge.py ties --help": {"options": {"keep": "x"}},
    "options.kep is not an option of ties": {"options": {"kep": 0.5}},
    "options.weights is [0.5]": {"options": {"weights": [0.5]}},
    "coef is 0.5, and options.coef 0.3: leave one out": {"coef": 0.5},
    "coef is 0.5, but wa has none: leave it out": {"merger": "wa", "options": {}, "coef": 0.5},
    "'partial' is 'yes'": {"partial": "yes"},
    "options.t is missing": {"merger": "nearswap", "options": {}},
    "names BASE, A, neither here nor at its old path": {},
}


@pytest.mark.parametrize("text", OWN_BAD)
def test_a_file_of_ours_that_was_changed_is_one_error(text, tmp_path):
    found = {name: value for name, value in (OWN | OWN_BAD[text]).items() if value is not ...}
    (tmp_path / RECIPE).write_text(yaml.safe_dump(found))
    with pytest.raises(ValueError, match=re.escape(text)):
        load(tmp_path / RECIPE)


def test_one_coefficient_may_be_given_beside_the_options(models, tmp_path, capsys):
    files = []
    for place, given in (("beside", {"options": {}, "coef": 0.4}), ("inside", {"options": {"coef": 0.4}})):
        own = {"merger": "ta", **given, "base": str(models / "BASE"), "experts": {"A": str(models / "A")}}
        (tmp_path / RECIPE).write_text(yaml.safe_dump(own))
        commands.from_recipe(settings.FromRecipe(tmp_path / RECIPE, tmp_path / place))
        files.append((tmp_path / place / "ta/model.safetensors").read_bytes())
        assert f"merged: {tmp_path / place / 'ta'}, coef 0.4, rounding" in capsys.readouterr().out
    assert files[0] == files[1]
    first, second = (yaml.safe_load((tmp_path / place / "ta" / RECIPE).read_text()) for place in ("beside", "inside"))
    assert first == second


OUTSIDE = {"kind": "model_token", "model": "A", "token_id": 14}
STOCK = [{"model": name, "layer_range": [0, 2]} for name in ("BASE", "A", "B")]
LATE = {
    "in some layers there are 1 experts (A), too few for model_stock": {
        "merge_method": "model_stock", "base_model": "BASE", "slices": [{"sources": STOCK[:2]}, {"sources": STOCK}],
    },
    "'t3' names no source, but force needs one": SHARED | {"tokenizer": {"tokens": {"t3": {"force": True}}}},
    "'n0' has no row in A": SHARED | {"tokenizer": {"tokens": {"n0": {"source": "A", "force": True}}}},
    "'new' names no source, but base lacks it": SHARED | {"tokenizer": {"source": "base", "tokens": {"new": {}}}},
    "'t3' has no row in A": SHARED | {"tokenizer": {"tokens": {"t3": {"source": OUTSIDE, "force": True}}}},
}  # fmt: skip


@pytest.mark.parametrize("text", LATE)
def test_what_only_the_models_show_is_an_error_before_anything_is_written(text, models, tmp_path):
    with pytest.raises(ValueError, match=re.escape(text)):
        merged(LATE[text], models, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["asked.yml"]


def test_experts_have_weights_on_the_command_line(models, tmp_path, monkeypatch):
    def run(*words):
        words = (*words, "--base", models / "BASE", "--out", tmp_path / words[0])
        monkeypatch.setattr(sys, "argv", ["merge.py", *map(str, words)])
        entry.merge("merge.py", ())

    run("ta", "--experts", f"{models / 'A'}@0.5", f"other={models / 'B'}@-0.3", "--coef", "1")
    base, a, b = (load_file(models / name / "model.safetensors") for name in ("BASE", "A", "B"))
    for path, leaf in load_file(tmp_path / "ta" / "ta" / "model.safetensors").items():
        assert torch.equal(leaf, base[path] + ((a[path] - base[path]) * 0.5 + (b[path] - base[path]) * -0.3))
    with pytest.raises(SystemExit, match=r"wa takes no weights by expert, as A@0\.5: use weighted_average"):
        run("wa", "--experts", f"{models / 'A'}@0.5", models / "B")
    with pytest.raises(SystemExit, match=r"cart takes no weights by expert, as A@0\.5: leave them out"):
        run("cart", "--experts", f"{models / 'A'}@0.5", models / "B", "--coef", "1")
    with pytest.raises(
        SystemExit, match=r"karcher takes no weights by expert, as A@0\.5: give --weights, in the expert"
    ):
        run("karcher", "--experts", f"{models / 'A'}@0.5", models / "B")
    run("tsv_merge", "--experts", f"{models / 'A'}@0.5", models / "B", "--coef", "1", "--weights", "B", "-2")
    weights = {"A": 0.5, "B": -2.0}
    expected = merge.tsv_merge(base, {"A": a, "B": b}, coef=1.0, weights=weights)
    found = load_file(tmp_path / "tsv_merge" / "tsv_merge" / "model.safetensors")
    assert all(torch.equal(leaf, expected[path]) for path, leaf in found.items())
    written = checkpoint.read_json(tmp_path / "tsv_merge" / "tsv_merge" / checkpoint.MANIFEST)
    assert written["hyperparameters"]["weights"] == weights
    run(
        "ties",
        "--experts",
        models / "A",
        models / "B",
        "--coef",
        "1",
        "--keep",
        "0.2",
        "--no-elect",
        "--aggregate",
        "mean",
    )
    expected = merge.ties(base, {"A": a, "B": b}, coef=1.0, keep=0.2, elect=False, aggregate="mean")
    found = load_file(tmp_path / "ties" / "ties" / "model.safetensors")
    assert all(torch.equal(leaf, expected[path]) for path, leaf in found.items())
    again = tmp_path / "again"
    commands.from_recipe(settings.FromRecipe(tmp_path / "tsv_merge" / "tsv_merge" / RECIPE, again))
    same = load_file(again / "tsv_merge" / "model.safetensors")
    assert all(
        torch.equal(leaf, same[path])
        for path, leaf in load_file(tmp_path / "tsv_merge/tsv_merge/model.safetensors").items()
    )
    run("weighted_average", "--experts", f"{models / 'A'}@0.5", models / "B")
    found = load_file(tmp_path / "weighted_average" / "weighted_average" / "model.safetensors")
    assert all(torch.equal(leaf, (a[path] * 0.5 + b[path]) / 1.5) for path, leaf in found.items())
    with pytest.raises(SystemExit, match="weights of experts are in --experts and in --weights: leave these out"):
        run("weighted_average", "--experts", f"{models / 'A'}@0.5", models / "B", "--weights", "1", "2")


def test_folders_may_have_an_equals_sign_in_their_names(models, tmp_path, monkeypatch):
    for source, name in {"BASE": "BASE", "A": "lr=A", "B": "lr=B"}.items():
        (tmp_path / name).symlink_to(models / source)
    monkeypatch.chdir(tmp_path)
    Path("recipe.yml").write_text(
        "merge_method: task_arithmetic\nbase_model: BASE\nparameters: {weight: 0.5}\n"
        "models: [{model: lr=A}, {model: lr=B}]\n"
    )
    commands.from_recipe(settings.FromRecipe(Path("recipe.yml"), tmp_path / "one"))
    commands.from_recipe(settings.FromRecipe(tmp_path / "one/ta" / RECIPE, tmp_path / "two"))
    one, two = ((tmp_path / place / "ta/model.safetensors").read_bytes() for place in ("one", "two"))
    assert one == two
    assert list(checkpoint.load_manifest(tmp_path / "two/ta")["experts"]) == ["lr=A", "lr=B"]


def test_folders_may_have_a_plus_in_their_paths(models, tmp_path, monkeypatch):
    """The first one gives the configuration."""
    monkeypatch.chdir(tmp_path)
    for source, name in {"A": "c+/A", "B": "c+/B"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(models / source)
    found = []
    for place in str(models), "c+":
        text = (
            f"merge_method: linear\nparameters: {{weight: 1}}\nmodels: [{{model: {place}/A}}, {{model: {place}/B}}]\n"
        )
        Path("recipe.yml").write_text(text)
        out = tmp_path / f"from {Path(place).name}"
        commands.from_recipe(settings.FromRecipe(Path("recipe.yml"), out))
        found.append((out / "weighted_average/model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert list(checkpoint.load_manifest(out / "weighted_average")["experts"]) == ["A", "B"]


def test_the_file_in_an_output_takes_the_inputs_that_it_names(models, tmp_path, monkeypatch):
    for source, name in {"A": "one/ck", "B": "two/ck", "C": "other"}.items():
        shutil.copytree(models / source, tmp_path / name)
    base = models / "BASE"
    stack = Path(f"{tmp_path / 'one/ck'}[0:2]+{tmp_path / 'two/ck'}[2:4]")
    monkeypatch.chdir(tmp_path / "one/ck")

    def written(experts, place, base=base):
        (_,) = on_disk.stream_run([TaskArithmetic(coef=1.0)], on_disk.order(base, experts, out=place, seed=0))
        return place / "ta" / RECIPE

    def repeated(file, place):
        commands.from_recipe(settings.FromRecipe(file, place))
        return (place / "ta/model.safetensors").read_bytes()

    stacked = written({"s": stack}, tmp_path / "stack")
    assert repeated(stacked, tmp_path / "again") == stacked.with_name("model.safetensors").read_bytes()
    for name in "pipe", "tuned":
        for part in "unet", "vae":
            (tmp_path / name / part).mkdir(parents=True)
            save_file({"w": torch.randn(4)}, tmp_path / name / part / "diffusion_pytorch_model.safetensors")
        (tmp_path / name / "model_index.json").write_text("{}")
    piped = written({"t": tmp_path / "tuned"}, tmp_path / "parts", tmp_path / "pipe")
    commands.from_recipe(settings.FromRecipe(piped, tmp_path / "parts-again"))
    assert sorted(file.name for file in (tmp_path / "parts-again/ta").glob("*/")) == ["unet", "vae"]
    save_file(load_file(base / "model.safetensors"), tmp_path / "base.safetensors")  # in one file, without a folder
    alone = written([models / "A" / "../A"], tmp_path / "alone", tmp_path / "base.safetensors")
    assert yaml.safe_load(alone.read_text())["base"] == "base.safetensors"
    assert repeated(alone, tmp_path / "alone-again") == alone.with_name("model.safetensors").read_bytes()
    edited = written([Path()], tmp_path / "here")  # the working directory has its name
    assert yaml.safe_load(edited.read_text())["experts"] == {"ck": "ck"}
    assert repeated(edited, tmp_path / "same") == edited.with_name("model.safetensors").read_bytes()
    edited.write_text(edited.read_text().replace("ck: ck", f"ck: {tmp_path / 'other'}"))
    wanted = written({"ck": tmp_path / "other"}, tmp_path / "wanted").with_name("model.safetensors").read_bytes()
    assert repeated(edited, tmp_path / "edited") == wanted


def test_the_card_of_a_stack_says_what_it_is(models, tmp_path):
    made = merged(RECIPES["passthrough-of-another-base"], models, tmp_path)
    text = (made / "README.md").read_text()
    assert "# Layers of A+B, stacked" in text
    assert "A+B is `A[2:4]+B[0:1]`" in text
    assert "Not base's: config of C, tokenizer of C." in text
    config = json.loads((made / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert str(models) not in text + (made / "manifest.json").read_text() + (made / RECIPE).read_text()
    (tmp_path / "alone").mkdir()
    made = merged(RECIPES["passthrough-stack"], models, tmp_path / "alone")
    assert "no parameter differs" not in (made / "README.md").read_text()  # from a base that the recipe does not have


def test_base_model_gives_the_tokenizer_of_layers_without_one(models, tmp_path):
    """Without a tokenizer in the recipe rows are merged as they are."""
    place = shutil.copytree(models, tmp_path / "models")
    for file in (place / "A").glob("tokenizer*"):
        file.unlink()
    make_recipes.write_tokenizer(place / "C", make_recipes.WORDS[::-1])
    (tmp_path / "out").mkdir()
    made = merged(RECIPES["passthrough-of-another-base"], place, tmp_path / "out")
    assert (made / "tokenizer.json").read_bytes() == (place / "C/tokenizer.json").read_bytes()
    a = load_file(place / "A" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_file(made / "model.safetensors")["model.embed_tokens.weight"], a)
    commands.from_recipe(settings.FromRecipe(made / RECIPE, tmp_path / "again"))
    for file in "model.safetensors", "tokenizer.json", RECIPE:
        assert (tmp_path / "again" / made.name / file).read_bytes() == (made / file).read_bytes()


def test_a_finished_merge_is_kept_for_the_same_layers_and_tokenizers_alone(models, tmp_path):
    places = {name: shutil.copytree(models / name, tmp_path / name) for name in ("BASE", "A", "B_OTHER_VOCABULARY")}

    def merge(base, expert, out="out", **options):
        order = on_disk.order(Path(base), {"x": Path(expert)}, out=tmp_path / out, seed=0, **options)
        ((_, report),) = on_disk.stream_run([TaskArithmetic(coef=0.5)], order)
        return report

    a, b = places["BASE"], places["A"]
    first = f"{a}[0:2]+{b}[2:4]"
    merge(a, first)
    assert merge(a, first) is None
    for base, expert, told in (
        (a, f"{a}[0:3]+{b}[3:4]", "its stacks.x is BASE[0:2]+A[2:4], this merge's would be BASE[0:3]+A[3:4]"),
        (f"{a}[0:1]+{b}[1:4]", first, "its base_stack is None, this merge's would be BASE[0:1]+A[1:4]"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            merge(base, expert)
    other = places["B_OTHER_VOCABULARY"]
    merge(a, other, "rows", tokenizer_from="base")
    assert merge(a, other, "rows", tokenizer_from="base") is None
    facts = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(
        json.dumps(facts, indent=1)
    )  # other bytes say the same: it is compared by its hash
    with pytest.raises(ValueError, match="it was made of another expert 'x'"):
        merge(a, other, "rows", tokenizer_from="base")


@pytest.mark.slow
def test_stacks_and_tokenizers_on_the_command_line(models, golden, tmp_path):
    def run(*words):
        command = [sys.executable, ROOT / "merge.py", *words, "--out", tmp_path]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)

    stack = f"{models / 'A'}[0:3]+{models / 'B'}[1:4]"
    found = run("wa", "--base", stack, "--experts", f"both={stack}", "--chat-template", "auto")
    assert found.returncode == 0, found.stderr
    for path, leaf in load_file(tmp_path / "wa" / "model.safetensors").items():
        assert torch.equal(leaf, golden[f"passthrough-stack/{path}"])
    words = "--experts", models / "A", models / "B_OTHER_VOCABULARY", "--weights", "A", 0.5, "B_OTHER_VOCABULARY", 0.7
    whole = "--base", models / "BASE", "--coef", 1, "--tokenizer-from", "B_OTHER_VOCABULARY"
    found = run("ta", *words, *whole)
    assert found.returncode == 0, found.stderr
    assert "of 16 tokens 4 in base, 4 in A have no row" in found.stdout
    for path, leaf in load_file(tmp_path / "ta" / "model.safetensors").items():
        torch.testing.assert_close(leaf, golden[f"tokenizer-of-a-model/{path}"], rtol=2e-5, atol=2e-6)
