"""The fuzz of merge.py: some of its cases, and that it sees what it looks for."""

import random
from pathlib import Path

import pytest

from benchmarks import fuzz


def test_some_cases_end_with_a_line(tmp_path: Path) -> None:
    ends = [fuzz.run_case(tmp_path, random.Random(f"7 {case}")) for case in range(12)]
    assert [end for end in ends if end[0] in ("traceback", "changed")] == []
    assert {"done", "told"} <= {end for end, _ in ends}


@pytest.mark.parametrize("fault", ["traceback", "changed"])
def test_a_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def merged(path: str, run_name: str) -> None:
        if fault == "traceback":
            raise TypeError("'list' object has no attribute 'items'")
        (tmp_path / "case" / "base" / "model.safetensors").write_bytes(b"")

    monkeypatch.setattr(fuzz.runpy, "run_path", merged)
    monkeypatch.setattr(fuzz, "DAMAGES", (lambda folder, draw: None,))
    assert fuzz.run_case(tmp_path, random.Random(0))[0] == fault
