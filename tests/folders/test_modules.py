"""Checkpoints whose weights stand in several folders: modules of sentence-transformers, pipelines of diffusers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import random
from smat_fn.config import TaskArithmetic, WeightAverage
from smat_fn.folders import extract_lora, merge_adapters, merge_folders, open_folder, plan
from smat_fn.scripts.merge.subcommands.adapters import by_module

TA = TaskArithmetic(coef=0.5)


def tree(seed, **shapes):
    generator = torch.Generator().manual_seed(seed)
    return {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}


def written(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            save_file(content, folder / name, metadata={"format": "pt"})
        else:
            (folder / name).write_text(content)
    return folder


def sentence(folder, seed, *, dense=True):
    files = {"model.safetensors": tree(seed, embed=(4, 3)), "config.json": "{}", "1_Pooling/config.json": "{}"}
    if dense:
        files |= {"2_Dense/model.safetensors": tree(seed + 50, **{"linear.weight": (5, 3), "linear.bias": (5,)})}
        files |= {"2_Dense/config.json": "{}", "modules.json": "[]"}
    return written(folder, files)


@pytest.mark.parametrize("pickled", [False, True])
def test_further_modules_are_merged(pickled, tmp_path):
    base, one, two = (sentence(tmp_path / str(seed), seed) for seed in range(3))
    name = "2_Dense/model.safetensors"
    start, *others = (load_file(folder / name) for folder in (base, one, two))
    if pickled:
        (one / name).unlink()
        torch.save(others[0], one / "2_Dense/pytorch_model.bin")
    merge_folders(TA, base, {"one": one, "two": two}, tmp_path / "out", shard_size=40)
    made = load_file(tmp_path / "out" / name)
    for path, leaf in start.items():
        change = (others[0][path] - leaf) + (others[1][path] - leaf)
        assert torch.equal(made[path], leaf + change * 0.5)
    assert made.keys() == start.keys()
    assert {"2_Dense/config.json", "1_Pooling/config.json"} <= {
        str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.json")
    }
    again = open_folder("out", tmp_path / "out")
    assert set(again.leaves) == {"embed", "2_Dense/linear.weight", "2_Dense/linear.bias"}
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert name in manifest["files"]
    merge_folders(TA, base, {"one": one}, tmp_path / "out", overwrite=True)


def test_an_expert_without_further_modules_has_those_of_base(tmp_path):
    base, plain = sentence(tmp_path / "base", 0), sentence(tmp_path / "plain", 1, dense=False)
    merge_folders(TA, base, {"x": plain}, tmp_path / "out")
    name = "2_Dense/model.safetensors"
    made, own = (load_file(folder / name) for folder in (tmp_path / "out", base))
    assert all(torch.equal(made[path], leaf) for path, leaf in own.items())


def test_ways_out_for_modules_that_base_lacks(tmp_path):
    layer = {"layers.0.query.weight": (4, 3)}
    plain, one, two = (sentence(tmp_path / str(seed), seed, dense=seed > 0) for seed in range(3))
    for seed, folder in enumerate((plain, one, two)):
        written(folder, {"model.safetensors": tree(seed, **layer)})
    told = "2_Dense/ of sentence-transformers is not in base, or has other shapes there: give a base with the experts'"
    with pytest.raises(ValueError, match=told) as caught:
        plan(TA, plain, {"one": one, "two": two}, tmp_path / "none")
    assert "heads" not in str(caught.value)
    wide = tree(0, **{"linear.weight": (9, 3), "linear.bias": (9,)})
    other = written(tmp_path / "other", {"modules.json": "[]", "2_Dense/model.safetensors": wide})
    written(other, {"model.safetensors": tree(0, **layer)})
    with pytest.raises(ValueError, match=told):
        plan(TA, other, {"one": one}, tmp_path / "none")
    name = "2_Dense/model.safetensors"
    merge_folders(WeightAverage(), one, {"one": one, "two": two}, tmp_path / "out")
    made, left, right = (load_file(folder / name) for folder in (tmp_path / "out", one, two))
    assert all(torch.equal(leaf, (left[path] + right[path]) / 2) for path, leaf in made.items())
    for folder in one, two:
        shutil.rmtree(folder / "2_Dense")
    merge_folders(TA, plain, {"one": one, "two": two}, tmp_path / "alone")
    assert not (tmp_path / "alone/2_Dense").exists()


def lora(folder, seed):
    """A model of sentence-transformers whose transformer is an adapter."""
    sentence(folder, seed)
    for name in "model.safetensors", "config.json":
        (folder / name).unlink()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}
    names = {
        f"base_model.model.layers.0.query.lora_{half}.weight": shape for half, shape in (("A", (2, 3)), ("B", (4, 2)))
    }
    return written(
        folder, {"adapter_model.safetensors": tree(seed + 90, **names), "adapter_config.json": json.dumps(config)}
    )


def test_modules_beside_an_adapter_are_merged(tmp_path):
    base, whole = (sentence(tmp_path / str(seed), seed) for seed in range(2))
    for seed, folder in enumerate((base, whole)):
        leaves = tree(seed, embed=(4, 3), **{"layers.0.query.weight": (4, 3)})
        written(folder, {"model.safetensors": leaves, "config.json": '{"num_hidden_layers": 1}'})
    expert = lora(tmp_path / "adapter", 2)
    name = "2_Dense/model.safetensors"
    start, one, own = (load_file(folder / name) for folder in (base, whole, expert))
    a, b = load_file(expert / "adapter_model.safetensors").values()
    query = load_file(base / "model.safetensors")["layers.0.query.weight"] + 2 * (b @ a)
    stack = Path(f"{base}+{expert}[0:1]")
    for place, path in enumerate((expert, stack)):
        out = tmp_path / f"out{place}"
        report = merge_folders(WeightAverage(), base, {"x": path}, out)
        assert (out / name).read_bytes() == (expert / name).read_bytes()
        torch.testing.assert_close(load_file(out / "model.safetensors")["layers.0.query.weight"], query)
        assert expert / name in report.inputs["expert 'x'"]
        assert report.notes == ()
    merge_folders(TA, base, {"x": expert, "y": whole}, tmp_path / "both")
    made = load_file(tmp_path / "both" / name)
    for path, leaf in start.items():
        assert torch.equal(made[path], leaf + ((own[path] - leaf) + (one[path] - leaf)) * 0.5)
    written(expert, {name: {"linear.weight": own["linear.weight"]}})
    with pytest.raises(ValueError, match=r"expert 'x' lacks parameter '2_Dense/linear.bias'"):
        plan(TA, base, {"x": expert}, tmp_path / "none")
    (base / name).unlink()
    told = "has parameter '2_Dense/linear.weight' that .*0 lacks: give a model with this module, or a copy of the ad"
    with pytest.raises(ValueError, match=told):
        plan(TA, base, {"x": stack}, tmp_path / "none")
    with pytest.raises(ValueError, match=r"expert 'x' has parameter '2_Dense/linear.weight' that base lacks"):
        plan(TA, base, {"x": expert}, tmp_path / "none")
    (expert / name).unlink()
    merge_folders(TA, base, {"x": expert}, tmp_path / "plain")


def test_an_adapter_merged_from_adapters_has_no_further_modules(tmp_path):
    places = {"x": lora(tmp_path / "x", 1), "y": lora(tmp_path / "y", 2)}
    (places["y"] / "2_Dense/model.safetensors").unlink()
    how = {"method": "cat", "weights": {}, "key": random.key(0), "rank": None}
    made = merge_adapters(places, tmp_path / "out", lambda found: by_module(found, **how))
    assert made.notes == (
        "adapter 'x' lies beside weights of 2_Dense/, which the merged adapter has not: merge the adapters as whole "
        "models if these are to count",
    )


def pipeline(folder, seed):
    return written(
        folder,
        {
            "model_index.json": '{"_class_name": "StableDiffusionPipeline"}',
            "unet/diffusion_pytorch_model.safetensors": tree(seed, **{"conv.weight": (3, 2)}),
            "unet/config.json": "{}",
            "text_encoder/model.safetensors": tree(seed + 9, **{"conv.weight": (2, 2)}),
            "scheduler/scheduler_config.json": "{}",
            "tokenizer/merges.txt": "a b",
        },
    )


def test_a_pipeline_is_merged_component_by_component(tmp_path):
    base, one, two = (pipeline(tmp_path / str(seed), seed) for seed in range(3))
    merge_folders(WeightAverage(), base, {"one": one, "two": two}, tmp_path / "out")
    for name in "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors":
        left, right = (load_file(folder / name)["conv.weight"] for folder in (one, two))
        assert torch.equal(load_file(tmp_path / "out" / name)["conv.weight"], (left + right) / 2)
    files = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert files == {str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()} | {"manifest.json"}
    (two / "unet/diffusion_pytorch_model.safetensors").rename(two / "unet/diffusion_pytorch_model.bin")
    with pytest.raises(ValueError, match=r"unet holds its weights in diffusion_pytorch_model.bin, but those of a comp"):
        plan(TA, base, {"two": two}, tmp_path / "none")


def sharded(folder, names, main):
    """The weights of a component in two files with an index, as diffusers and transformers save them."""
    leaves = load_file(folder / f"{main}.safetensors")
    extra = {name: leaf + 1 for name in names for leaf in list(leaves.values())[:1]}
    (folder / f"{main}.safetensors").unlink()
    placed = dict.fromkeys(leaves, f"{main}-00001-of-00002.safetensors")
    placed |= dict.fromkeys(extra, f"{main}-00002-of-00002.safetensors")
    for file in set(placed.values()):
        save_file({path: leaf for path, leaf in {**leaves, **extra}.items() if placed[path] == file}, folder / file)
    (folder / f"{main}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return leaves | extra


def whole(folder, index):
    """All leaves that an index names."""
    placed = json.loads((folder / index).read_text())
    found = {path: load_file(folder / file)[path] for path, file in placed["weight_map"].items()}
    assert placed["metadata"]["total_size"] == sum(leaf.nbytes for leaf in found.values())
    assert {file.name for file in folder.glob("*.safetensors")} == set(placed["weight_map"].values())
    return found


def test_shards_of_components_are_read_and_written(tmp_path):
    base, one, two = (pipeline(tmp_path / str(seed), seed) for seed in range(3))
    own = {}
    for part, main in ("unet", "diffusion_pytorch_model"), ("text_encoder", "model"):
        own[part] = [sharded(folder / part, ["bias", "scale"], main) for folder in (base, one, two)]
    merge_folders(WeightAverage(), base, {"one": one, "two": two}, tmp_path / "out", shard_size=30)
    for part, main in ("unet", "diffusion_pytorch_model"), ("text_encoder", "model"):
        made = whole(tmp_path / "out" / part, f"{main}.safetensors.index.json")
        assert len(made) == 3
        for path, leaf in made.items():
            assert torch.equal(leaf, (own[part][1][path] + own[part][2][path]) / 2)
    again = merge_folders(WeightAverage(), tmp_path / "out", {"one": one}, tmp_path / "joined")
    assert load_file(tmp_path / "joined/unet/diffusion_pytorch_model.safetensors").keys() == own["unet"][1].keys()
    assert again.bytes == sum(leaf.nbytes for part in own.values() for leaf in part[1].values())
    alone = merge_folders(TA, base / "unet", {"one": one / "unet"}, tmp_path / "unet", shard_size=30)
    assert whole(tmp_path / "unet", "diffusion_pytorch_model.safetensors.index.json").keys() == own["unet"][0].keys()
    assert alone.bytes == sum(leaf.nbytes for leaf in own["unet"][0].values())


def test_a_component_that_cannot_be_read_whole_is_refused(tmp_path):
    base, one = (pipeline(tmp_path / str(seed), seed) for seed in range(2))
    (one / "unet/config.json").write_text('{"quantization_config": {"quant_method": "quanto"}}')
    with pytest.raises(
        ValueError, match=r"unet is quantised \(quanto, says its config.json\): merge the checkpoint it"
    ):
        plan(TA, base, {"one": one}, tmp_path / "none")
    (one / "unet/config.json").write_text("{}")
    sharded(one / "unet", ["bias"], "diffusion_pytorch_model")
    (one / "unet/diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.safetensors is missing, diffusion_pytorch_model.safetensors"):
        plan(TA, base, {"one": one}, tmp_path / "none")
    half = base / "unet/diffusion_pytorch_model.safetensors"
    half.rename(half.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(ValueError, match=r"unet holds its weights in diffusion_pytorch_model.fp16.safetensors"):
        plan(TA, base, {"one": one}, tmp_path / "none")


def test_a_component_keeps_the_name_of_its_file(tmp_path):
    base, one = (pipeline(tmp_path / str(seed), seed) / "unet" for seed in range(2))
    merge_folders(WeightAverage(), base, {"one": one}, tmp_path / "out")
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (one / name).read_bytes()
    assert not (tmp_path / "out/model.safetensors").exists()


def test_configurations_of_components_name_the_dtype_of_their_weights(tmp_path):
    base, one = (pipeline(tmp_path / str(seed), seed) for seed in range(2))
    written(base, {"text_encoder/config.json": '{"torch_dtype": "float32", "size": 2}'})
    merge_folders(TA, base, {"one": one}, tmp_path / "out", out_dtype="bfloat16")
    assert json.loads((tmp_path / "out/text_encoder/config.json").read_text()) == {"torch_dtype": "bfloat16", "size": 2}
    assert (tmp_path / "out/unet/config.json").read_text() == "{}"
    merge_folders(TA, base, {"one": one}, tmp_path / "same")
    assert (tmp_path / "same/text_encoder/config.json").read_bytes() == (base / "text_encoder/config.json").read_bytes()


def test_modules_of_a_router_and_of_a_folder_without_weights_of_its_own_are_merged(tmp_path):
    names = {
        "routed": ("", "2_Router/query_0_Dense/", "2_Router/document_0_Dense/"),
        "asym": ("", "2_Asym/140244_Dense/"),  # as it was called before
        "whole": ("query_0_Transformer/", "document_0_Transformer/"),
        "numbered": ("0_Transformer/", "2_Dense/"),
    }
    routers = {"routed": "2_Router/router_config.json", "asym": "2_Asym/config.json", "whole": "router_config.json"}
    for kind, places in names.items():
        folders = []
        for seed in range(3):
            files = {f"{p}model.safetensors": tree(9 * seed + i, w=(3, 2), b=(3,)) for i, p in enumerate(places)}
            files |= {f"{place}config.json": "{}" for place in places} | {
                "modules.json": "[]",
                "1_Pooling/x.json": "{}",
            }
            if kind in routers:
                types = {place.split("/")[-2]: "Dense" for place in places if place}
                files[routers[kind]] = json.dumps({"types": types})
            folders.append(written(tmp_path / f"{kind}{seed}", files))
        base, one, two = folders
        (base / "unknown/checkpoint").mkdir(parents=True)
        (base / "unknown/checkpoint/model.safetensors").write_text("of something else")
        out = tmp_path / f"{kind}-out"
        merge_folders(WeightAverage(), base, {"one": one, "two": two}, out)
        for name in (f"{place}model.safetensors" for place in places):
            made, left, right = (load_file(folder / name) for folder in (out, one, two))
            assert made.keys() == {"w", "b"}
            assert all(torch.equal(leaf, (left[path] + right[path]) / 2) for path, leaf in made.items())
        found = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
        assert found == {str(file.relative_to(two)) for file in two.rglob("*") if file.is_file()} | {"manifest.json"}
    file = two / "0_Transformer/model.safetensors"
    file.rename(file.with_name("openvino.safetensors"))
    with pytest.raises(
        ValueError,
        match=r"0_Transformer holds its weights in openvino.safetensors, but those of a module",
    ):
        plan(TA, base, {"two": two}, tmp_path / "none")


def test_modules_are_those_that_modules_json_names(tmp_path):
    paths = "", "2_Dense", "10_Dense", "own/last", "10_Dense", "1_Normalize", "..", "../0", "/", "./"
    files = [
        "model.safetensors",
        "2_Dense/model.safetensors",
        "10_Dense/model.safetensors",
        "own/last/model.safetensors",
    ]
    for seed in range(3):
        leaves = {
            name: tree(9 * seed + i, w=(3, 2), b=(3,)) for i, name in enumerate([*files, "3_Dense/model.safetensors"])
        }
        own = {"modules.json": json.dumps([{"path": path} for path in paths]), "10_Dense/config.json": "{}"}
        written(tmp_path / str(seed), leaves | own)
    merge_folders(WeightAverage(), tmp_path / "0", {"x": tmp_path / "1", "y": tmp_path / "2"}, tmp_path / "out")
    for name in files:
        made, left, right = (load_file(tmp_path / folder / name) for folder in ("out", "1", "2"))
        assert made.keys() == {"w", "b"}
        assert all(torch.equal(leaf, (left[path] + right[path]) / 2) for path, leaf in made.items())
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert found == {*files, "10_Dense/config.json", "modules.json", "manifest.json"}


def test_settings_of_modules_and_components_that_differ_are_noted(tmp_path):
    of_sentences = {
        "modules.json": '[{"type": "a.Transformer"}, {"type": "a.b.Pooling"}]',
        "1_Pooling/config.json": '{"pooling_mode": "mean", "size": 3, "include_prompt": true}',
        "config_sentence_transformers.json": '{"__version__": {"a": "1"}, "similarity_fn_name": "cosine"}',
        "preprocessor_config.json": '{"image_mean": [0.5], "image_processor_type": "A"}',
    }
    other = {
        "modules.json": '[{"type": "c.Transformer"}, {"type": "c.Pooling"}, {"type": "c.Normalize"}]',
        "1_Pooling/config.json": '{"pooling_mode": "cls", "size": 3}',
        "config_sentence_transformers.json": '{"__version__": {"a": "2"}, "similarity_fn_name": "dot"}',
        "preprocessor_config.json": '{"image_mean": [0.4], "image_processor_type": "B"}',
    }
    base, one, two = (sentence(tmp_path / str(seed), seed) for seed in range(3))
    for folder, files in (base, of_sentences), (one, of_sentences), (two, other):
        written(folder, files)
    said = [
        "1_Pooling/config.json (pooling_mode cls, base's is mean)",
        "config_sentence_transformers.json (similarity_fn_name dot, base's is cosine)",
        "modules.json (modules Transformer Pooling Normalize, base's is Transformer Pooling)",
        "preprocessor_config.json (image_mean [0.4], base's is [0.5])",
    ]
    found = plan(TA, base, {"one": one, "two": two}, tmp_path / "none").notes
    assert sorted(found) == [f"expert 'two' has another {text}: the output has that of base" for text in said]
    plain = written(
        tmp_path / "plain", {"model.safetensors": load_file(base / "model.safetensors"), "config.json": "{}"}
    )
    for folder in (one, two):
        (folder / "2_Dense/model.safetensors").unlink()
    processor, note = plan(TA, plain, {"one": one}, tmp_path / "none").notes
    told = "expert 'one' has files that base lacks (preprocessor_config.json): the output lacks them, copy them there"
    assert processor == told
    assert note.startswith(
        "expert 'one' is a model of sentence-transformers, base is not: the output has no pooling, c"
    )

    base, one = (pipeline(tmp_path / f"p{seed}", seed) for seed in range(2))
    written(base, {"model_index.json": '{"_class_name": "A", "scheduler": ["d", "DDIM"], "tokenizer": [null, null]}'})
    written(one, {"model_index.json": '{"_class_name": "B", "scheduler": ["d", "PNDM"], "tokenizer": ["t", "C"]}'})
    written(base, {"scheduler/scheduler_config.json": '{"_version": "1", "prediction_type": "epsilon"}'})
    written(one, {"scheduler/scheduler_config.json": '{"_version": "2", "prediction_type": "v_prediction"}'})
    written(base, {"text_encoder/config.json": '{"hidden_act": "gelu"}', "tokenizer/vocab.json": '{"a": 1}'})
    written(one, {"text_encoder/config.json": '{"hidden_act": "relu"}', "tokenizer/vocab.json": '{"a": 2}'})
    said = [
        "model_index.json (scheduler PNDM, base's is DDIM)",
        "scheduler/scheduler_config.json (prediction_type v_prediction, base's is epsilon)",
        "text_encoder/config.json (hidden_act relu, base's is gelu)",
    ]
    found = plan(TA, base, {"one": one}, tmp_path / "none").notes
    assert sorted(found) == [f"expert 'one' has another {text}: the output has that of base" for text in said]


def test_a_pipeline_without_a_component_has_bases_and_a_component_alone_is_refused(tmp_path):
    base, one = (pipeline(tmp_path / str(seed), seed) for seed in range(2))
    checker = tree(7, **{"conv.weight": (2, 2), "special": (3,)})
    written(base, {"safety_checker/model.safetensors": checker})
    report = merge_folders(WeightAverage(), base, {"one": one}, tmp_path / "out")
    assert list(report.notes) == ["expert 'one' has no safety_checker/: it has base's"]
    made = load_file(tmp_path / "out/safety_checker/model.safetensors")
    assert all(torch.equal(made[path], leaf) for path, leaf in checker.items())
    name = "unet/diffusion_pytorch_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (one / name).read_bytes()
    written(base, {"unet/diffusion_pytorch_model.safetensors": tree(0, **{"conv.weight": (3, 2), "own": (2,)})})
    for whole, part in (base, base / "unet"), (base, base / "safety_checker"):
        for left, right, told in (whole, part, "expert 'one' is a part of base"), (part, whole, "base is a part of ex"):
            with pytest.raises(ValueError, match=f"{told}.*: give {part}, and merge this part alone"):
                plan(TA, left, {"one": right}, tmp_path / "none")


def test_an_extracted_adapter_leaves_out_further_modules_and_is_of_one_component(tmp_path):
    base, one = (sentence(tmp_path / str(seed), seed) for seed in range(2))
    for seed, folder in enumerate((base, one)):
        written(folder, {"model.safetensors": tree(seed, **{"layer.0.query.weight": (4, 3), "norm.weight": (3,)})})
    made = extract_lora(base, one, tmp_path / "out", rank=2)
    assert made.left_out == ("2_Dense/linear.bias", "2_Dense/linear.weight")
    assert made.whole == ("norm.weight",)
    names = load_file(tmp_path / "out/adapter_model.safetensors").keys()
    assert {name.removeprefix("base_model.model.").partition(".")[0] for name in names} == {"layer", "norm"}
    base, one = (pipeline(tmp_path / f"p{seed}", seed) for seed in range(2))
    with pytest.raises(
        ValueError, match=r"p0 holds its weights in text_encoder/, unet/: give one of them, and the exp"
    ):
        extract_lora(base, one, tmp_path / "none", rank=2)
