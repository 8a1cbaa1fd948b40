"""What results were made with: the code by its content, the processor by what decides the last bits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import smat_fn
from smat_fn import checkpoint, machine


def test_code_is_the_content_of_the_source_files(tmp_path):
    package = Path(smat_fn.__file__).parent
    copy = shutil.copytree(package, tmp_path / "installed", ignore=shutil.ignore_patterns("__pycache__"))
    assert machine.code(copy) == machine.code() == machine.code(package)
    assert machine.code().startswith(f"{smat_fn.__version__}+")
    (copy / "optim" / "notes.txt").write_text("no code")
    codes = {machine.code(copy)}
    for change in (lambda: (copy / "tree.py").rename(copy / "trees.py"), lambda: (copy / "types.py").write_text("")):
        change()
        machine.code.cache_clear()
        codes.add(machine.code(copy))
    assert len(codes) == 3


def test_a_manifest_tells_processor_and_instructions(monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    made = checkpoint.describe({"w": torch.zeros(1)})
    assert made["code"] == machine.code()
    assert made["cpu"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert made["cpu"]["environment"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "MKL_CBWR" not in made["cpu"]["environment"]
    assert made["cpu"]["model"] in machine.describe("x")["hardware"]
    if torch.backends.mkldnn.is_available():
        assert made["cpu"]["onednn"][0].isdigit()


@pytest.mark.parametrize("lines", ["model name\t: A CPU\n", "Features : fp asimd\n"])
def test_the_processor_is_named_where_the_system_names_it(lines, monkeypatch):
    monkeypatch.setattr(machine.Path, "read_text", lambda self: lines)
    monkeypatch.setattr(machine.platform, "processor", lambda: "aarch64")
    monkeypatch.setattr(machine, "_processor", machine._processor.__wrapped__)  # without its cache
    assert machine.cpu()["model"] == ("A CPU" if "name" in lines else "aarch64")


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="no x86 processor with AVX2")
@pytest.mark.parametrize(
    "before",
    [
        *(pytest.param(words, marks=pytest.mark.slow) for words in ("", "import torch; torch.ones(2) + 1")),
        "import torch",
    ],
)
def test_portable_kernels_are_chosen_before_torch_chooses(before):
    if "ones" in before and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor's own choice is the portable one")
    words = f"{before}; import os, smat_fn; from smat_fn import machine; print(machine.cpu(), flush=True)"
    words = words.removeprefix("; ") + "; os._exit(0)"  # leaving is slow
    environment = {name: value for name, value in os.environ.items() if name not in machine.DISPATCH}
    command = [sys.executable, "-c", words]
    run = subprocess.run(
        command, env=environment | {"SMAT_FN_PORTABLE": "1"}, capture_output=True, text=True, check=False
    )
    if "ones" in before:
        assert run.stderr.strip().endswith("import smat_fn before using it")
        return
    assert run.returncode == 0, run.stderr
    assert "'instructions': 'AVX2'" in run.stdout
    assert "'MKL_CBWR': 'COMPATIBLE'" in run.stdout
