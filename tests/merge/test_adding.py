"""The example of docs/adding_a_merger.md is a merger: its code runs, its tests pass, it streams."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from smat_fn import merge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_merger.md"
TEXT = PAGE.read_text(encoding="utf-8")
CODE, CHECKS = re.finditer(r"^```python\n(.*?)^```$", TEXT, flags=re.M | re.S)


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
    monkeypatch.setattr("smat_fn.merge.common.CHUNK", 7)
    for path, leaf in base.items():
        alone = {name: {path: expert[path]} for name, expert in reversed(experts.items())}
        assert torch.equal(example.median({path: leaf}, alone, coef=0.5)[path], merged[path])
        assert torch.equal(applied[path], merged[path])
        assert (merged[path].dtype, merged[path].shape) == (leaf.dtype, leaf.shape)
    assert not torch.equal(merged["matrix"], base["matrix"])


def test_the_page_names_what_exists():
    internal = {"check", "coef_problems", "key_problems", "check_alone"}, {"merge_pieces", "apply_vector"}
    for module, names in zip(("inputs", "common"), internal, strict=True):
        assert all(hasattr(getattr(merge, module), name) and f"`{name}" in TEXT for name in names)
    assert all(hasattr(merge.leaves, name) and f"`{name}" in TEXT for name in ("gram", "merge_leaves"))
