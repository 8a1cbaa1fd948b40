"""Towers of CLIP merged with whole CLIP models, both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file

from smat_fn.config import TaskArithmetic, Ties, WeightAverage
from smat_fn.folders import merge_folders, read_inputs

transformers = pytest.importorskip("transformers")

TA = TaskArithmetic(coef=0.5)
TEXT = dict(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20,
    max_position_embeddings=6, projection_dim=4, bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
VISION = dict(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=4, patch_size=2,
    projection_dim=4,
)  # fmt: skip
KINDS = {
    "CLIPVisionModel": ("vision_config", "vision_model."),
    "CLIPVisionModelWithProjection": ("vision_config", ""),
    "CLIPTextModel": ("text_config", "text_model."),
    "CLIPTextModelWithProjection": ("text_config", ""),
}


def saved(folder, kind, seed, **vision):
    config = transformers.CLIPConfig(text_config=TEXT, vision_config={**VISION, **vision}, projection_dim=4)
    torch.manual_seed(seed)
    own = getattr(config, KINDS[kind][0]) if kind in KINDS else config
    getattr(transformers, kind)(own).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("clip") / "base", "CLIPModel", 0)


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_changes_its_leaves_of_the_whole_model(kind, clip, tmp_path):
    tower, prefix = saved(tmp_path / "tower", kind, 1), KINDS[kind][1]
    report = merge_folders(TA, clip, {"tower": tower}, tmp_path / "out")
    base, made = weights(clip), weights(tmp_path / "out")
    own = {f"{prefix}{path}": leaf for path, leaf in weights(tower).items()}
    assert own.keys() < base.keys() == made.keys()
    for path, leaf in base.items():
        assert torch.equal(made[path], leaf + (own[path] - leaf) * 0.5 if path in own else leaf), path
    assert any("is a tower of base" in note and "base's ('" in note for note in report.notes)
    transformers.CLIPModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_changes_the_tower_that_base_is(kind, clip, tmp_path):
    tower, prefix = saved(tmp_path / "tower", kind, 1), KINDS[kind][1]
    other = saved(tmp_path / "other", kind, 2)
    report = merge_folders(WeightAverage(), tower, {"whole": clip, "tower": other}, tmp_path / "out")
    left, right, made = weights(clip), weights(other), weights(tmp_path / "out")
    assert made.keys() == right.keys()
    for path, leaf in right.items():
        assert torch.equal(made[path], (left[f"{prefix}{path}"] + leaf) / 2), path
    assert any("base is a tower of expert 'whole'" in note for note in report.notes)
    again = getattr(transformers, kind).from_pretrained(tmp_path / "out")
    assert again.state_dict().keys() == right.keys()


def test_two_towers_meet_in_the_whole_model_and_in_memory_too(clip, tmp_path):
    towers = {kind: saved(tmp_path / kind, kind, 3) for kind in ("CLIPVisionModel", "CLIPTextModelWithProjection")}
    merge_folders(Ties(coef=1.0, keep=1.0, aggregate="sum", scope="tensor"), clip, towers, tmp_path / "out")
    made = weights(tmp_path / "out")
    for kind, tower in towers.items():
        for path, leaf in weights(tower).items():
            torch.testing.assert_close(made[f"{KINDS[kind][1]}{path}"], leaf)
    assert torch.equal(made["logit_scale"], weights(clip)["logit_scale"])
    base, experts = read_inputs(clip, towers, [])
    assert all(expert.keys() == base.keys() for expert in experts.values())


def test_unclear_parts_are_refused(clip, tmp_path):
    wide = saved(tmp_path / "wide", "CLIPVisionModel", 1, hidden_size=16)
    with pytest.raises(ValueError, match=r"tower \(clip_vision_model\) of base, by config.json.*models of one size"):
        merge_folders(TA, clip, {"wide": wide}, tmp_path / "out")
    short = saved(tmp_path / "short", "CLIPVisionModel", 1, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"lacks 'vision_model.encoder.layers.1.* and 15 more"):
        merge_folders(TA, clip, {"short": short}, tmp_path / "out")
    classifier = saved(tmp_path / "classifier", "CLIPForImageClassification", 1)
    with pytest.raises(ValueError, match=r"lacks base's text_model, but its config.json is that of a whole model"):
        merge_folders(TA, clip, {"classifier": classifier}, tmp_path / "out")
    nameless = saved(tmp_path / "nameless", "CLIPVisionModelWithProjection", 1)
    config = json.loads((nameless / "config.json").read_text())
    (nameless / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "model_type"}))
    with pytest.raises(ValueError, match="lacks parameter 'logit_scale' of base"):
        merge_folders(TA, clip, {"nameless": nameless}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_activation_of_a_tower_is_an_error(clip, tmp_path):
    other = saved(tmp_path / "other", "CLIPVisionModel", 1, hidden_act="gelu")
    base = saved(tmp_path / "base", "CLIPModel", 1, hidden_act="quick_gelu")
    config = json.loads((base / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "quick_gelu"
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"another activation in config.json .hidden_act gelu, base's is quick_gelu"):
        merge_folders(TA, base, {"other": other}, tmp_path / "out")
