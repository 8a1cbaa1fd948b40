"""Code that lies in a model folder is not run, and nobody is asked whether it may be (SECURITY.md)."""

import json

import pytest
import torch
from safetensors.torch import save_file

from smat_fn.folders.inputs.naming import namings
from smat_fn.folders.inputs.reading import open_folder
from smat_fn.models import causal_lm, clip, encoder, image_classifier, pretrained, seq2seq

MARK = "from pathlib import Path\nPath({!r}).touch()\nclass Own:\n    pass\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model of a class that the folder itself brings; the user would answer yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    own = tmp_path / "model"
    own.mkdir()
    (own / "own.py").write_text(MARK.format(str(tmp_path / "ran")))
    kinds = "Config", "Model", "ModelForCausalLM", "ModelForSeq2SeqLM", "ModelForImageClassification"
    config = {"model_type": "own", "auto_map": {f"Auto{kind}": "own.Own" for kind in kinds}}
    (own / "config.json").write_text(json.dumps(config))
    (own / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    save_file({"w": torch.zeros(2)}, own / "model.safetensors", {"format": "pt"})
    return own


@pytest.mark.parametrize("module", [causal_lm, seq2seq, clip, encoder, image_classifier], ids=lambda m: m.__name__[15:])
def test_a_loader_refuses_it(module, folder):
    with pytest.raises(ValueError, match=r"cannot be loaded as"):
        module.load(folder)
    assert not (folder.parent / "ran").exists()


def test_a_look_at_it_runs_nothing(folder):
    assert image_classifier.is_clip(folder)
    assert not pretrained.is_encoder_decoder(folder)
    assert not list(namings(open_folder("model", folder)))
    assert not (folder.parent / "ran").exists()
