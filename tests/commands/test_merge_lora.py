"""merge.py with adapters and other vocabularies, and its extract-lora, as a user runs them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(exits, capsys):
    """``call(*words)``: (what merge.py prints, what it exits with)."""

    def run(*words):
        code = exits("merge.py", *words)
        return capsys.readouterr().out, code

    return run


@pytest.fixture
def model(tmp_path):
    def save(name, seed, rows=10):
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "model.embed_tokens.weight": (rows, 4),
            "model.q.weight": (6, 4),
            "model.q.bias": (6,),
            "norm.weight": (4,),
        }
        (tmp_path / name).mkdir()
        leaves = {path: torch.randn(shape, generator=generator) for path, shape in shapes.items()}
        save_file(leaves, tmp_path / name / "model.safetensors", {"format": "pt"})
        return tmp_path / name, leaves

    return save


def test_an_adapter_that_was_extracted_is_an_expert(call, model, tmp_path):
    (base, before), (expert, after) = model("base", 0), model("expert", 1)
    inputs = "--base", base, "--expert", expert, "--out", tmp_path / "lora"
    said, code = call("extract-lora", *inputs, "--rank", 4)
    assert code is None
    for line in (
        "2 matrices: relative error ",
        "1 changed leaf stored whole: norm.weight\n",
        "1 changed leaf left out, an adapter cannot hold them: model.q.bias\n",
    ):
        assert line in said
    assert f"extracted: {tmp_path / 'lora'}, rank 4" in said
    assert call("extract-lora", *inputs, "--rank", 0)[1].startswith(
        "merge.py extract-lora: rank is 0, must be at least 1; "
    )
    words = "ta", "--coef", 1, "--base", base, "--experts", tmp_path / "lora", "--out", tmp_path / "out"
    said, code = call(*words)
    assert code is None
    merged = load_file(tmp_path / "out/ta/model.safetensors")
    for path, leaf in (after | {"model.q.bias": before["model.q.bias"]}).items():
        torch.testing.assert_close(merged[path], leaf, rtol=0, atol=2e-6)
    manifest = json.loads((tmp_path / "out/ta/manifest.json").read_text())
    used = {Path(file).name for file in manifest["inputs"]["expert 'lora'"]}
    assert used == {"adapter_config.json", "adapter_model.safetensors"}
    assert call("verify", tmp_path / "out/ta")[1] is None


def test_vocabulary_is_an_option(call, model, tmp_path):
    (base, before), (expert, after) = model("base", 0), model("expert", 1, rows=12)
    words = "ta", "--coef", 1, "--base", base, "--experts", expert, "--out", tmp_path / "out"
    assert (
        "expert 'expert' has 12 rows in 'model.embed_tokens.weight', base 10: choose vocabulary base-rows"
        in call(*words)[1]
    )
    assert call(*words, "--vocabulary", "base-rows")[1] is None
    merged = load_file(tmp_path / "out/ta/model.safetensors")
    start = before["model.embed_tokens.weight"]
    assert torch.equal(merged["model.embed_tokens.weight"], start + (after["model.embed_tokens.weight"][:10] - start))
