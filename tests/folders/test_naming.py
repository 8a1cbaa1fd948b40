"""Leaves under the names and in the shapes that transformers gives them in memory, and back."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import families
from smat_fn.config import TaskArithmetic
from smat_fn.folders import merge_folders, open_folder, place_of
from smat_fn.folders.inputs.naming import namings
from smat_fn.models import pretrained
from smat_fn.scripts.train.whole_model import export_problems


def values(folder):
    return {path: folder.read(path, 0, leaf.numel()).view(leaf.shape) for path, leaf in folder.leaves.items()}


@pytest.mark.parametrize("name", ["mixtral", "vit (backbone alone)", "gpt_neox"])
def test_a_checkpoint_is_seen_as_its_module_and_stored_again_bit_for_bit(name, tmp_path):
    import transformers

    families.write_base(name, tmp_path)
    base, auto = open_folder("base", tmp_path), getattr(transformers, families.AUTO[families.FAMILIES[name].kind])
    module = {
        path: leaf for path, leaf in auto.from_pretrained(tmp_path).named_parameters() if "classifier" not in path
    }
    (naming,) = (own for own in namings(base) if type(own.model) is type(auto.from_pretrained(tmp_path)))
    seen = naming.seen(base)
    assert module.keys() <= seen.leaves.keys()
    assert module.keys() != base.leaves.keys()
    found = values(seen)
    assert all(torch.equal(found[path], leaf) for path, leaf in module.items())
    assert all(found[path].shape == leaf.shape for path, leaf in seen.leaves.items())
    again, before = values(naming.stored(seen, base, seen.leaves)), load_file(tmp_path / "model.safetensors")
    assert again.keys() == before.keys()
    assert all(torch.equal(again[path], leaf) for path, leaf in before.items())
    # one leaf that changes, changes what it was made from alone
    path = max(found, key=lambda path: found[path].numel())
    changed = seen.with_leaf(path, seen.leaves[path], lambda a, b: found[path].reshape(-1)[a:b] + 1)
    stored = values(naming.stored(changed, base, [path]))
    moved = {name: leaf for name, leaf in stored.items() if not torch.equal(leaf, before[name])}
    assert sum(leaf.numel() for leaf in moved.values()) == found[path].numel()
    assert all(torch.equal(leaf, before[name] + 1) for name, leaf in moved.items())


@pytest.mark.parametrize(("name", "prefix"), [("mixtral", "net."), ("vit (backbone alone)", ""), ("gpt_neox", "")])
def test_a_state_dict_with_the_names_in_memory_is_an_expert(name, prefix, tmp_path):
    """As zero_to_fp32.py and Lightning write it: merged like the same model that save_pretrained wrote."""
    import transformers

    families.write_base(name, tmp_path / "base")
    auto = getattr(transformers, families.AUTO[families.FAMILIES[name].kind])
    held, stored = auto.from_pretrained(tmp_path / "base").state_dict(), load_file(tmp_path / "base/model.safetensors")
    (tmp_path / "x").mkdir()
    torch.save({prefix + path: leaf + 1 for path, leaf in held.items()}, tmp_path / "x/pytorch_model.bin")
    config = TaskArithmetic(coef=1.0)
    alike = held.keys() - {path for path in held if "classifier" in path}
    assert alike != stored.keys()
    heads = "keep" if alike != held.keys() else "error"  # of a backbone that is loaded with a new one
    merge_folders(config, tmp_path / "base", {"x": tmp_path / "x"}, tmp_path / "out", heads=heads)
    merged = load_file(tmp_path / "out/model.safetensors")
    assert merged.keys() == stored.keys()
    moved = {path: leaf + ("pooler" not in path) for path, leaf in stored.items()}  # which a classifier lacks
    torch.testing.assert_close(merged, moved)


def test_an_auto_class_that_does_not_fit_is_not_asked_for_its_error_which_imports_every_model(tmp_path, monkeypatch):
    import transformers

    families.write_base("vit (backbone alone)", tmp_path)
    expected = [type(own.model) for own in namings(open_folder("base", tmp_path))]
    asked = []
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", asked.append)
    assert [type(own.model) for own in namings(open_folder("base", tmp_path))] == expected != []
    assert asked == []


def test_what_could_not_be_exported_is_known_from_headers(tmp_path):
    families.write_base("qwen3_moe", tmp_path)
    params = families.load("qwen3_moe", tmp_path).params
    assert export_problems(tmp_path, params) == []
    name = "model.layers.0.mlp.experts.down_proj"
    (problem,) = export_problems(tmp_path, {**params, name: params[name][:2]})
    assert problem.startswith(f"merge.py export cannot put what is trained into {tmp_path}: ")
    assert "match nowhere in base" in problem
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    (problem,) = export_problems(tmp_path, params)
    assert "pickled weights" in problem
    assert "save_pretrained" in problem


def test_without_a_config_names_are_as_they_are_stored(tmp_path):
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    base = open_folder("base", tmp_path)
    assert list(namings(base)) == []
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of nobody"}))
    assert list(namings(base)) == []
    assert place_of(base, base).prefix == ""


@pytest.mark.parametrize("text", ["3", "[]", "null", "{", '"x"'])
def test_a_configuration_that_is_no_mapping_names_nothing(text, folders, tmp_path):
    base = folders.save(tmp_path / "base", {"w": torch.ones(2)})
    (base / "config.json").write_text(text)
    assert list(namings(open_folder("base", base))) == []
    assert pretrained.config_of(base) is None
    assert pretrained.facts_of(tmp_path, "base") == {}
