"""The real client of the hub against a small hub on the loopback address."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_folders, plan
from smat_fn.folders.inputs.hub import push, push_problems, remote_of
from smat_fn.models import pretrained
from smat_fn.scripts.merge import on_disk
from smat_fn.scripts.merge.settings import Moe
from smat_fn.scripts.merge.subcommands import moe
from smat_fn.scripts.recipes.resolve import resolve

_spec = importlib.util.spec_from_file_location("small_hub", Path(__file__).with_name("small_hub.py"))
small_hub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_hub)
TA = TaskArithmetic(coef=0.4)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with small_hub.serving() as served:
        for name in "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN":
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield served
        huggingface_hub.close_session()


@pytest.fixture
def models(tmp_path):
    generator = torch.Generator().manual_seed(3)
    for name in "base", "one", "two", "other":
        (tmp_path / name).mkdir()
        shape = (5, 9) if name == "other" else (7, 9)
        leaves = {"model.layers.0.weight": torch.randn(shape, generator=generator), "model.norm": torch.ones(9)}
        save_file(leaves, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "pytorch_model.bin").write_bytes(b"never asked for")
    return tmp_path


def bits(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def test_names_and_revisions_are_downloaded_without_pickles(hub, models, tmp_path):
    hub.add("owner/base", models / "base")
    hub.add("owner/one", models / "two")
    hub.add("owner/one", models / "one", revision="v2")
    sha = hub.sha("owner/one", "v2")
    merge_folders(TA, models / "base", {"x": models / "one"}, tmp_path / "local")
    for name in "owner/one@v2", f"owner/one@{sha}":
        merge_folders(TA, "owner/base", {"x": name}, tmp_path / name[-3:])
        assert bits(tmp_path / name[-3:]) == bits(tmp_path / "local")
    merge_folders(TA, "owner/base", {"x": "owner/one"}, tmp_path / "newest")
    assert bits(tmp_path / "newest") != bits(tmp_path / "local")
    assert not [path for path in hub.downloaded() if path.endswith(".bin")]
    with pytest.raises(ValueError, match="expert 'x': there is no folder owner/one@v3, and the hub did not give"):
        plan(TA, "owner/base", {"x": "owner/one@v3"}, tmp_path / "none")


def test_one_file_of_a_repository_is_downloaded_alone(hub, models, tmp_path):
    many = tmp_path / "many"
    (many / "styles").mkdir(parents=True)
    for name, source in {"one": "one", "styles/two": "two"}.items():
        (many / f"{name}.safetensors").write_bytes((models / source / "model.safetensors").read_bytes())
    hub.add("owner/many", many)
    (tmp_path / "start").mkdir()
    (tmp_path / "start/base.safetensors").write_bytes((models / "base/model.safetensors").read_bytes())
    hub.add("owner/many", tmp_path / "start", revision="v2")
    folders = {"x": models / "one", "y": models / "two"}
    merge_folders(TA, models / "base", folders, tmp_path / "local")
    given = {"x": "owner/many/one.safetensors", "y": "owner/many@main/styles/two.safetensors"}
    for _ in range(2):  # the second time from the cache
        merge_folders(TA, "owner/many@v2/base.safetensors", given, tmp_path / "out")
        assert bits(tmp_path / "out") == bits(tmp_path / "local")
        shutil.rmtree(tmp_path / "out")
    fetched = [path.rpartition("/resolve/")[2] for path in hub.downloaded()]
    assert sorted(fetched) == ["main/one.safetensors", "main/styles/two.safetensors", "v2/base.safetensors"]
    told = r"repository owner/many has no file three.safetensors: its weights are one.safetensors, styles/two.safe"
    with pytest.raises(ValueError, match=told):
        plan(TA, models / "base", {"x": "owner/many/three.safetensors"}, tmp_path / "none")
    told = (
        "there is no file owner/none/one.safetensors, and the hub did not give one.safetensors of a repository owner/"
    )
    with pytest.raises(ValueError, match=told):
        plan(TA, models / "base", {"x": "owner/none/one.safetensors"}, tmp_path / "none")
    hub.add("owner/whole", models / "one")
    told = "owner/whole/model.safetensors is a file of a folder: give the repository, owner/whole"
    for _ in range(2):  # before the repository is in the cache, and after
        with pytest.raises(ValueError, match=told):
            plan(TA, models / "base", {"x": "owner/whole/model.safetensors"}, tmp_path / "none")
        plan(TA, models / "base", {"x": "owner/whole"}, tmp_path / "none")


def test_quantised_weights_are_compared_after_the_download(hub, models, tmp_path):
    blocks = torch.randint(256, (1, 3, 1, 16), generator=torch.Generator().manual_seed(0)).byte()
    tree = {"e.down_proj_blocks": blocks, "e.down_proj_scales": torch.full((1, 3, 1), 127, dtype=torch.uint8)}
    for name in "packed", "plain":
        (tmp_path / name).mkdir()
    save_file(tree, tmp_path / "packed/model.safetensors")
    (tmp_path / "packed/config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    save_file({"e.down_proj": torch.ones(1, 32, 3, dtype=torch.bfloat16)}, tmp_path / "plain/model.safetensors")
    hub.add("owner/packed", tmp_path / "packed")
    hub.add("owner/plain", tmp_path / "plain")
    merge_folders(TA, "owner/packed", {"x": "owner/plain"}, tmp_path / "out")
    merge_folders(TA, tmp_path / "packed", {"x": tmp_path / "plain"}, tmp_path / "local")
    assert bits(tmp_path / "out") == bits(tmp_path / "local")


def test_modules_of_sentence_transformers_are_compared_after_the_download(hub, tmp_path):
    leaf, config = torch.ones(4, 3), '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}'
    halves = {"A": (2, 3), "B": (4, 2)}.items()
    factors = {f"base_model.model.q.lora_{half}.weight": torch.ones(shape) for half, shape in halves}
    for name in "base", "whole", "adapter":
        (tmp_path / name / "2_Dense").mkdir(parents=True)
        (tmp_path / name / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')
        save_file({"linear.weight": leaf}, tmp_path / name / "2_Dense/model.safetensors")
        if name == "adapter":
            save_file(factors, tmp_path / name / "adapter_model.safetensors")
            (tmp_path / name / "adapter_config.json").write_text(config)
        else:
            save_file({"q.weight": leaf}, tmp_path / name / "model.safetensors")
        hub.add(f"owner/{name}", tmp_path / name)
    for expert in "whole", "adapter":
        places = [(tmp_path / "base", f"owner/{expert}"), ("owner/base", tmp_path / expert)]
        for base, other in places:
            plan(TA, base, {"x": other}, tmp_path / "none")
            shutil.rmtree(tmp_path / "cache")
    plan(TA, tmp_path / "base", {"x": "owner/adapter"}, tmp_path / "none")
    plan(TA, "owner/base", {"x": "owner/adapter"}, tmp_path / "none")  # which is in the cache


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", ("owner/name", None, None)),
        ("owner/name@v2", ("owner/name", "v2", None)),
        ("owner/name/a/b.safetensors", ("owner/name", None, "a/b.safetensors")),
        ("owner/name@v2/b.sft", ("owner/name", "v2", "b.sft")),
        *((text, None) for text in ("name", "../owner/name", "/owner/name", "owner/b.safetensors", "owner/name/b.bin")),
        *((text, None) for text in ("owner/name/folder", "../name/b.safetensors", "owner/b.pt")),
    ],
)
def test_what_is_a_hub_name(text, expected):
    assert remote_of(Path(text)) == expected


def test_a_model_is_loaded_at_its_revision(hub, tmp_path):
    from transformers import BertConfig, BertModel

    for place, revision in enumerate(("main", "v2")):
        torch.manual_seed(place)
        config = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1 + place, num_attention_heads=2)
        model = BertModel(config)
        model.save_pretrained(tmp_path / revision)
        hub.add("owner/model", tmp_path / revision, revision=revision)
    (loaded,) = pretrained.fetch("owner/model@v2", "an encoder", "AutoModel")
    found, stored = loaded.state_dict(), model.state_dict()
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], leaf) for name, leaf in stored.items())
    assert pretrained.config_of("owner/model@v2").num_hidden_layers == 2
    assert pretrained.config_of("owner/model").num_hidden_layers == 1
    with pytest.raises(ValueError, match=r"'owner/model@v3' cannot be loaded as an encoder"):
        pretrained.fetch("owner/model@v3", "an encoder", "AutoModel")


def test_shapes_are_checked_from_headers_before_weights_are_downloaded(hub, models, tmp_path):
    for name in "base", "one", "other":
        hub.add(f"owner/{name}", models / name)
    with pytest.raises(ValueError, match=r"\(5, 9\).*nothing is downloaded"):
        plan(TA, "owner/base", {"x": "owner/one", "y": "owner/other"}, tmp_path / "out")
    assert not [path for path in hub.downloaded() if path.endswith(".safetensors")]
    assert {span for method, path, span in hub.asked if method == "GET" and path.endswith(".safetensors")} == {
        "bytes=0-100000"
    }
    (models / "two/config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    hub.add("owner/two", models / "two")
    for options in ({}, {"partial": True}):
        with pytest.raises(
            ValueError, match=r"owner/two is quantised \(awq, says its config.json\): .*nothing is downloaded"
        ):
            plan(TA, "owner/base", {"x": "owner/one", "y": "owner/two"}, tmp_path / "out", **options)
    (models / "lora").mkdir()
    factors = {"A": torch.ones(1, 9), "B": torch.ones(7, 1)}
    named = {f"base_model.model.model.layers.0.lora_{name}.weight": leaf for name, leaf in factors.items()}
    save_file(named, models / "lora/adapter_model.safetensors")
    (models / "lora/adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    (models / "lora/config.json").write_text((models / "two/config.json").read_text())  # of its base, as by some tools
    hub.add("owner/lora", models / "lora")
    plan(TA, models / "base", {"x": "owner/lora"}, tmp_path / "out")
    assert not [path for path in hub.downloaded() if path.endswith("/model.safetensors")]
    recipe = {"merge_method": "linear", "models": [{"model": f"owner/{name}"} for name in ("base", "one", "other")]}
    for asked, told in (
        ({"x": "owner/one", "y": "owner/on"}, "expert 'y': there is no folder owner/on, and the hub did not give"),
        ({"x": "owner/one@v9"}, "expert 'x': there is no folder owner/one@v9"),
        ({"x": "owner/one", "y": tmp_path / "no"}, f"expert 'y': {tmp_path}/no is not a folder"),
        (resolve, "parameter 'model.layers.0.weight'"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            asked(recipe) if asked is resolve else plan(TA, "owner/base", asked, tmp_path / "out")
    layers = [{"sources": [{"model": name, "layer_range": [0, 1]}]} for name in ("owner/one", "owner/on")]
    with pytest.raises(ValueError, match="model 'owner/on': there is no folder owner/on"):
        resolve({"merge_method": "passthrough", "slices": layers})
    mixture = {"base_model": "owner/base", "gate_mode": "random", "experts": [{"source_model": "owner/on"}] * 2}
    (tmp_path / "moe.yml").write_text(json.dumps(mixture))
    with pytest.raises(ValueError, match=r"expert .*: there is no folder owner/on, and"):
        list(moe.make(Moe(tmp_path / "moe.yml", tmp_path / "out")))
    assert not [path for path in hub.downloaded() if path.endswith("/model.safetensors")]
    plan(TA, "owner/base", {"x": "owner/one"}, tmp_path / "out")
    assert len([path for path in hub.downloaded() if path.endswith("/model.safetensors")]) == 2


def test_weight_norms_of_older_names_are_compared_by_bases_names(hub, tmp_path):
    names = (".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1")
    for model, factors in zip(("base", "x"), names, strict=True):
        (tmp_path / model).mkdir()
        save_file({f"conv{name}": torch.ones(2) for name in factors}, tmp_path / model / "model.safetensors")
        hub.add(f"owner/{model}", tmp_path / model)
    plan(TA, "owner/base", {"x": "owner/x"}, tmp_path / "out")


def test_names_with_a_prefix_are_compared_by_bases_names(hub, models, tmp_path):
    wrapped = {f"net.{path}": leaf for path, leaf in load_file(models / "one/model.safetensors").items()}
    save_file(wrapped, models / "two/model.safetensors")
    for name in "base", "two":
        hub.add(f"owner/{name}", models / name)
    merge_folders(TA, "owner/base", {"x": "owner/two"}, tmp_path / "out")
    merge_folders(TA, models / "base", {"x": models / "one"}, tmp_path / "local")
    assert bits(tmp_path / "out") == bits(tmp_path / "local")


def test_a_repository_without_safetensors_is_downloaded_as_pickles(hub, models, tmp_path):
    torch.save(load_file(models / "one/model.safetensors"), models / "two/pytorch_model.bin")
    (models / "two/model.safetensors").unlink()
    hub.add("owner/two", models / "two")
    merge_folders(TA, models / "base", {"x": "owner/two"}, tmp_path / "out")
    merge_folders(TA, models / "base", {"x": models / "one"}, tmp_path / "local")
    assert bits(tmp_path / "out") == bits(tmp_path / "local")


def test_a_repository_of_a_lora_file_alone_is_an_adapter(hub, models, tmp_path):
    (tmp_path / "lora").mkdir()
    module = "transformer.model.layers.0"
    half = {f"{module}.lora_A.weight": torch.ones(2, 9), f"{module}.lora_B.weight": torch.ones(7, 2)}
    save_file(half, tmp_path / "lora/pytorch_lora_weights.safetensors")
    (models / "base/config.json").write_text('{"_class_name": "ATransformer"}')
    hub.add("owner/lora", tmp_path / "lora")
    merge_folders(TaskArithmetic(coef=1.0), models / "base", {"x": "owner/lora"}, tmp_path / "out")
    found, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", models / "base"))
    torch.testing.assert_close(found["model.layers.0.weight"], start["model.layers.0.weight"] + 2)


def test_a_private_repository_needs_a_token(hub, models, tmp_path, monkeypatch):
    hub.add("owner/secret", models / "one", private=True)
    with pytest.raises(ValueError, match="a private or gated one needs HF_TOKEN"):
        plan(TA, models / "base", {"x": "owner/secret"}, tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", small_hub.TOKEN)
    merge_folders(TA, models / "base", {"x": "owner/secret"}, tmp_path / "out")
    merge_folders(TA, models / "base", {"x": models / "one"}, tmp_path / "local")
    assert bits(tmp_path / "out") == bits(tmp_path / "local")


def test_a_gated_repository_is_told_before_another_one_is_downloaded(hub, models, tmp_path, monkeypatch):
    for name in "base", "one":
        hub.add(f"owner/{name}", models / name)
    hub.gated.add("owner/one")
    told = "expert 'x': the hub's repository owner/one is gated, and it did not give its files (40"
    for token in (None, "hf_of_another_account"):
        monkeypatch.setenv("HF_TOKEN", token) if token else None
        with pytest.raises(ValueError, match=re.escape(told)) as caught:
            plan(TA, "owner/base", {"x": "owner/one"}, tmp_path / "out")
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith("and set HF_TOKEN or call hf auth login; or give a folder")
        assert hub.downloaded() == []
        with pytest.raises(
            ValueError, match=r"'owner/one' cannot be loaded as an encoder.* with HF_TOKEN or hf auth login"
        ):
            pretrained.fetch("owner/one", "an encoder", "AutoModel")
    monkeypatch.setenv("HF_TOKEN", small_hub.TOKEN)
    plan(TA, "owner/base", {"x": "owner/one"}, tmp_path / "out")


def test_an_interrupted_download_goes_on_where_it_broke_off(hub, models, tmp_path, monkeypatch):
    big = {"w": torch.arange(65536.0), "model.norm": torch.ones(9)}
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    for name in "base", "one":
        save_file(big, models / name / "model.safetensors", metadata={"format": "pt"})
    hub.add("owner/one", models / "one")
    hub.cut["model.safetensors"] = 1 << 17
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    merge_folders(TA, models / "base", {"x": "owner/one"}, tmp_path / "out")
    spans = [span for method, path, span in hub.asked if method == "GET" and path.endswith(".safetensors")]
    assert any(span and span.endswith("-") and int(span[6:-1]) > 0 for span in spans), spans
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], big["w"])


def test_offline_the_cache_is_read_and_nothing_is_asked(hub, models, tmp_path, monkeypatch):
    hub.add("owner/one", models / "one")
    merge_folders(TA, models / "base", {"x": "owner/one"}, tmp_path / "online")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    merge_folders(TA, models / "base", {"x": "owner/one"}, tmp_path / "offline")
    assert bits(tmp_path / "offline") == bits(tmp_path / "online")
    with pytest.raises(ValueError, match="there is no folder owner/base"):
        plan(TA, "owner/base", {"x": "owner/one"}, tmp_path / "none")
    assert hub.asked == []
    assert push_problems("owner/new") == ["cannot push to owner/new: HF_HUB_OFFLINE is set"]


@pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # the client's own
def test_a_merged_model_is_pushed_without_what_is_of_this_machine(hub, models, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", small_hub.TOKEN)
    order = on_disk.order(models / "base", [models / "one"], out=tmp_path / "out", seed=0)
    (_,) = on_disk.stream_run([TA], order)
    made = tmp_path / "out/ta"
    (line,) = on_disk.pushed("owner/merged", public=False, count=1)(made)
    assert line == f"pushed: {hub.url}/owner/merged/commit/{hub.sha('owner/merged', 'main')}"
    here = {str(file.relative_to(made)): file.read_bytes() for file in made.rglob("*") if file.is_file()}
    assert here.pop(checkpoint.SOURCES)
    assert hub.repositories["owner/merged"]["main"] == here
    assert "owner/merged" in hub.private
    assert set(hub.cards) == {(made / "README.md").read_text()}  # sent to the validator of the hub
    merge_folders(TA, models / "base", {"x": "owner/merged"}, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == {"model_type": "llama"}


def test_what_cannot_be_pushed_is_said_before_anything_is_merged(hub, models, tmp_path, monkeypatch):
    assert "there is no token" in push_problems("owner/new")[0]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub does not take the token" in push_problems("owner/new")[0]
    assert "cannot push to 'a/b/c'" in push_problems("a/b/c")[0]
    with pytest.raises(ValueError, match="could not be pushed to owner/new"):
        push(models / "base", "owner/new", private=True, without=[])
    monkeypatch.setenv("HF_TOKEN", small_hub.TOKEN)
    with pytest.raises(ValueError, match="takes one merged model, here are 5"):
        on_disk.pushed("owner/new", public=False, count=5)
    with pytest.raises(ValueError, match="--public requires"):
        on_disk.pushed(None, public=True, count=1)
