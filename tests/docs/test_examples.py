"""The ``Example:`` blocks of docstrings run and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted((ROOT / "smat_fn").rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]


def examples():
    """Docstrings with examples, by their dotted names."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name), name)]
    return [pytest.param(test, id=test.name) for test in found if test.examples]


@pytest.mark.parametrize("test", examples())
def test_an_example_gives_what_it_shows(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test.globs.setdefault("torch", torch)
    lines = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert runner.run(test, out=lines.append).failed == 0, "".join(lines)
