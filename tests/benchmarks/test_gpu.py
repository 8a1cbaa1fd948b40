"""The benchmarks that need a GPU keep what they have measured when a part of them fails."""

import json
from contextlib import nullcontext

import pytest
import torch

from benchmarks import gpu, kernels, steps, timing


@pytest.fixture(autouse=True)
def _pretended(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "describe", lambda command: {"hardware": "a GPU"})


def rows(*values):
    """Rows of a benchmark that runs out of memory after them."""
    yield from ({"value": value} for value in values)
    raise torch.OutOfMemoryError("no more")


def test_kernels_keep_the_cases_before_one_that_fails(monkeypatch, tmp_path):
    left = rows(1, 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(kernels, "RESULTS", tmp_path / "kernels.json")
    for name, stand_in in (("check_bits", lambda device: None), ("make", lambda *_: None)):
        monkeypatch.setattr(kernels, name, stand_in)
    monkeypatch.setattr(kernels, "by_kernels", lambda device: nullcontext())
    monkeypatch.setattr(kernels, "measure", lambda *_, **__: [next(left)])
    with pytest.raises(torch.OutOfMemoryError):
        kernels.main()
    assert json.loads((tmp_path / "kernels.json").read_text())["rows"] == [{"value": 1}, {"value": 2}]


def test_steps_keep_the_rows_of_a_model_before_one_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(steps, "measure", lambda *_, **__: rows(1, 2))
    with pytest.raises(torch.OutOfMemoryError):
        steps.main(only=("clip-vit-b32",), out=tmp_path / "steps.json")
    assert [row["value"] for row in json.loads((tmp_path / "steps.json").read_text())["rows"]] == [1, 2]


def test_one_that_fails_leaves_the_other_its_table(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "main", lambda **_: list(rows()))
    monkeypatch.setattr(steps, "main", lambda **_: [{"ratio": 1.01}])
    with pytest.raises(SystemExit, match="failed: kernels"):
        gpu.main()
    said = capsys.readouterr()
    assert "| 1.01 |" in said.out
    assert "OutOfMemoryError: no more" in said.err
