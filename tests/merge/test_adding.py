"""The example of docs/adding_a_merger.md is a merger: its code runs, its tests pass, it streams."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import config, merge

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding_a_merger.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE, CHECKS = re.finditer(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)
IN_PYTHON = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from smat_fn import folders, merge
from smat_fn.config import DIFFERENCES, MORE_MERGERS, Median
from smat_fn.merge import median
assert Median in MORE_MERGERS and "median" in DIFFERENCES["mergekit"]
base, *experts = (load_file(f"{name}/model.safetensors") for name in ["base", *sys.argv[1:]])
experts = dict(zip(sys.argv[1:], experts))
merged = merge.merge_by(Median(coef=0.5), base, experts)
assert all(leaf.equal(merged[path]) for path, leaf in median(base, experts, coef=0.5).items())
save_file(merged, "memory.safetensors")
paths = {name: Path(name) for name in experts}
assert folders.plan(Median(coef=0.5), Path("base"), paths, Path("folders")).memory
folders.merge_folders(Median(coef=0.5), Path("base"), paths, Path("folders"), chunk=7, workers=2)
"""


def run(block, namespace):
    # blank lines in front, so that a traceback shows the page's own line
    exec(compile("\n" * TEXT[: block.start(1)].count("\n") + block[1], str(PAGE), "exec"), namespace)


@pytest.fixture
def example(monkeypatch):
    """The module that the page tells to write."""
    module = ModuleType("smat_fn.merge.median")
    module.__package__ = "smat_fn.merge"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    run(CODE, vars(module))
    return module


def test_its_tests_pass(example):
    namespace = {"__name__": "test_median"}
    run(CHECKS, namespace)
    tests = {name: test for name, test in namespace.items() if name.startswith("test_")}
    assert len(tests) == 3
    for test in tests.values():
        marks = getattr(test, "pytestmark", [])
        for values in marks[0].args[1] if marks else [()]:
            test(values) if marks else test()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_passes_what_every_merger_owes(example, dtype, family, monkeypatch):
    base, experts = family(dtype)
    merged = example.median(base, experts, coef=0.5)
    applied = merge.apply_vector(base, example.median_vector(base, experts), coef=0.5)
    monkeypatch.setattr("smat_fn.merge.parts.chunks.CHUNK", 7)
    for path, leaf in base.items():
        alone = {name: {path: expert[path]} for name, expert in reversed(experts.items())}
        assert torch.equal(example.median({path: leaf}, alone, coef=0.5)[path], merged[path])
        assert torch.equal(applied[path], merged[path])
        assert (merged[path].dtype, merged[path].shape) == (leaf.dtype, leaf.shape)
    assert not torch.equal(merged["matrix"], base["matrix"])


STEPS = re.findall(r"^\| `([\w/]+\.py)` \| (?:`(\w+)`|imports) \| `(.+)` \|$", TEXT, flags=re.M)


@pytest.fixture
def copy(tmp_path):
    """A copy of the package and its tests with the merger of the page, by the page's steps."""
    leave_out = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("smat_fn", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=leave_out)
    for name in ("merge.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "smat_fn/merge/median.py").write_text(CODE[1], encoding="utf-8")
    for file, name, new in STEPS:
        lines = (tmp_path / file).read_text(encoding="utf-8").splitlines(keepends=True)
        begins = f"{name} = " if name else ("from .", "from smat_fn")
        place = next(i for i, line in enumerate(lines) if line.startswith(begins)) + bool(name)
        lines.insert(place, f"{new}\n")
        (tmp_path / file).write_text("".join(lines), encoding="utf-8")
    return tmp_path


def python(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_functions_and_options_of_all_mergers_are_exported():
    for kind in (*merge.MERGERS, *merge.MORE_MERGERS):
        own = kind.__module__.rpartition(".")[2]
        for name in (own, *([f"{own}_vector"] if kind.based else [])):
            assert name in merge.__all__
            assert getattr(merge, name).__name__ == name
        assert kind.__name__ in config.__all__
        assert getattr(config, kind.__name__) is kind


@pytest.mark.slow
def test_the_steps_of_the_page_are_enough_for_the_suites(copy):
    files = ["tests/merge/test_conformance.py", "tests/merge/test_identities.py", "tests/folders/test_bits.py"]
    assert {*files, "smat_fn/merge/registry.py"} < {file for file, _, _ in STEPS}
    words = "-vv", "-p", "no:cacheprovider", "-k", "median or every_merger"
    assert "[median] PASSED" in python(copy, "-m", "pytest", *words, *files)


@pytest.mark.slow
def test_a_file_and_its_lines_are_a_merger(copy, family):
    """In memory, of folders and by merge.py, with the same bits."""
    base, experts = family(torch.bfloat16)
    for name, leaves in {"base": base, **experts}.items():
        (copy / name).mkdir()
        save_file(leaves, copy / name / "model.safetensors", metadata={"format": "pt"})
    names = list(experts)
    python(copy, "-c", IN_PYTHON, *names)
    assert "gamma, the factor of the merged update" in python(copy, "merge.py", "median", "--help")
    python(copy, "merge.py", "median", "--base", "base", "--experts", *names, "--coef", "0.5", "--out", "cli")
    memory = load_file(copy / "memory.safetensors")
    for folder in ("folders", "cli/median"):
        merged = load_file(copy / folder / "model.safetensors")
        assert merged.keys() == memory.keys() == base.keys()
        assert all(torch.equal(leaf, memory[path]) for path, leaf in merged.items())
    assert not torch.equal(memory["matrix"], base["matrix"])


def test_the_page_names_what_exists():
    internal = {
        "inputs": {"count_problems", "check_alone"},
        "merger": {"merged", "merge_alone", "vector_function"},
        "chunks": {"merge_weights"},
    }
    for module, names in internal.items():
        assert all(hasattr(getattr(merge.parts, module), name) and f"`{name}" in TEXT for name in names)
    for name in vars(merge.Merger):
        if not name.startswith("_") and name != "settings":
            assert f"`{name}" in TEXT, name
