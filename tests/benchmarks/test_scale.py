"""The scale model: a tiny one from end to end, and the share of simulation by hand."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import scale


def test_a_tiny_model_is_measured_and_stored(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(scale, "SIZES", {**scale.TINY, "tie_word_embeddings": True})
    scale.main(rows=2, length=8, rounds=1, dtypes=("bfloat16",), threads=1, out=tmp_path / "scale.json")
    found = json.loads((tmp_path / "scale.json").read_text())
    assert {"command", "hardware", "versions"} <= found.keys()
    assert (found["batch"], found["period"], found["threads"], found["model"]["vocab_size"]) == ([2, 8], 4, 1, 512)
    (row,) = found["rows"]
    assert (row["dtype"], row["parameters"]) == ("bfloat16", 512 * 64 + 2 * (4 * 64**2 + 3 * 64 * 96 + 2 * 64) + 64)
    parts = ("gradient", "clip", "optimizer", "rest")
    assert all(row[f"{kind} step, {part} ms"] > 0 for kind in ("clean", "simulated") for part in parts)
    assert row["simulated step, rest ms"] > row["clean step, rest ms"]
    assert "| bfloat16 |" in capsys.readouterr().out
    # rows of another dtype stay, those of other batches do not
    for rows, dtypes in ((2, ["bfloat16", "float32"]), (1, ["float32"])):
        scale.main(rows=rows, length=8, rounds=1, dtypes=("float32",), threads=1, out=tmp_path / "scale.json")
        stored = json.loads((tmp_path / "scale.json").read_text())["rows"]
        assert [one["dtype"] for one in stored] == dtypes


def test_what_a_simulated_step_has_beyond_a_clean_one_is_simulation(monkeypatch):
    now = [0.0]

    def takes(seconds):
        def run():
            now[0] += seconds

        return run

    monkeypatch.setattr(scale.time, "perf_counter", lambda: now[0])
    for name, owner in (("accumulate", scale.smat), ("accumulate", scale.at_simulated)):
        monkeypatch.setattr(owner, name, takes(8.0))
    clips = iter((2.0, 2.0, 2.0, 3.0))
    monkeypatch.setattr(scale.smat, "reweight_and_clip", lambda: takes(next(clips))())
    monkeypatch.setattr(scale.smat, "step", SimpleNamespace(advance=takes(1.0)))
    parts = scale.Parts()
    with parts.counted():
        for number in range(4):
            start, simulated = now[0], number == 3
            now[0] += 4.5 if simulated else 0.5
            (scale.at_simulated if simulated else scale.smat).accumulate()
            scale.smat.reweight_and_clip()
            scale.smat.step.advance()
            parts.step(now[0] - start, simulated)
    assert parts.mean(False) == {"gradient": 8.0, "clip": 2.0, "optimizer": 1.0, "rest": 0.5}
    assert parts.mean(True) == {"gradient": 8.0, "clip": 3.0, "optimizer": 1.0, "rest": 4.5}
    assert parts.simulation() == 5.0
