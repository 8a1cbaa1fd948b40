"""The kernels compiled for sm_90 where no GPU is, and the benchmarks' every path on tiny sizes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def benchmark(*arguments, interpret):
    """Output of ``python -m benchmarks ... --dry-run``; its exit status must be 0."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", "-m", "benchmarks", *arguments, "--dry-run"]
    environment |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    results = {file: file.stat().st_mtime_ns for file in (ROOT / "benchmarks" / "results").iterdir()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results == {file: file.stat().st_mtime_ns for file in (ROOT / "benchmarks" / "results").iterdir()}
    return done.stdout


@pytest.fixture(scope="module")
def compiled():
    """Cells of the table by variant, as numbers. The exit status says: 128-bit accesses, no fused multiply-add."""
    lines = [line.strip("|").split("|") for line in benchmark("sass", interpret=True).splitlines()[2:]]
    return {name.strip(): [float(cell or "nan") for cell in cells] for name, *cells in lines}


@pytest.mark.slow
def test_all_kernels_compile_for_sm_90(compiled):
    assert {re.split(r"[ ,]", name)[0] for name in compiled} == {"simulate", "reweight", "climb"}
    assert {"simulate bf16, masked, aligned", "reweight bf16, masked, norm, aligned"} <= set(compiled)


@pytest.mark.slow
def test_instructions_per_coordinate_stay_below_what_memory_hides(compiled):
    limits = {
        "simulate bf16, masked, aligned": 37,
        "reweight bf16, masked, store, aligned": 20,
        "reweight bf16, masked, norm, aligned": 26,
        "reweight bf16, masked, clip, store, aligned": 23,
    }
    over = {name: compiled[name][0] for name, limit in limits.items() if not compiled[name][0] <= limit}
    assert not over


@pytest.mark.slow
def test_nothing_is_spilled(compiled):
    assert {name: cells[2] for name, cells in compiled.items() if cells[2] > 0} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_benchmarks_run_dry(name):
    assert "| " in benchmark(name, interpret=False)
