"""The mutation check on a package of one function: found, not found, gone, and what runs again."""

import json
import re
from functools import cache

import pytest

from benchmarks.mutants import MUTANTS, mutated, page, running
from benchmarks.mutants.catalogue import Mutant

SOURCE = '''"""double is x + x."""


def double(x):
    """x + x"""
    return x + x


def positive(x):
    return x > 0
'''
TESTS = """from smat_fn.toy.maths import double, positive


def test_double():
    assert double(3) == 6


def test_positive():
    assert positive(1)
"""
FOUND = Mutant("toy/maths.py", "return x + x", "return x - x")
SURVIVES = Mutant("toy/maths.py:positive", "x > 0", "x >= 0")
EQUIVALENT = Mutant("toy/maths.py:double", "x + x", "2 * x", "the same number")
GONE = Mutant("toy/maths.py", "return x * x", "return x")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository of one module."""
    files = {
        "smat_fn/toy/maths.py": SOURCE,
        "tests/toy/test_maths.py": TESTS,
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\nmarkers = ['slow']\n",
        # the server without the libraries that it imports in advance
        "benchmarks/mutants/server.py": re.sub(
            r"PRELOADED = .*", "PRELOADED = ()", (running.ROOT / "benchmarks/mutants/server.py").read_text()
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(running, "ROOT", tmp_path)
    monkeypatch.setattr(running, "RESULTS", tmp_path / "mutants.json")
    monkeypatch.setattr(running, "COPIED", ("smat_fn", "tests", "benchmarks", "pyproject.toml"))
    monkeypatch.setattr(running, "NICE", 0)
    return tmp_path


def check(monkeypatch, capsys, *mutants):
    """(exit status, output) of the command."""
    monkeypatch.setattr(running, "MUTANTS", list(mutants))
    with pytest.raises(SystemExit) as ended:
        running.main([])
    return ended.value.code, capsys.readouterr().out


@pytest.mark.slow
def test_a_fault_is_found_survives_or_has_no_place_and_runs_once(root, monkeypatch, capsys):
    status, out = check(monkeypatch, capsys, FOUND, SURVIVES, EQUIVALENT, GONE)
    assert status == 1
    assert out.startswith("4 mutants, 3 to run, 1 anchors are gone\n")
    assert "toy/maths.py: the anchor 'return x * x' is gone: anchor the mutant anew" in out
    assert "survives: toy/maths.py:positive: x > 0 -> x >= 0" in out
    assert out.count("survives: ") == 1
    stored = json.loads((root / "mutants.json").read_text())
    assert [result["killer"] for result in stored.values()] == ["tests/toy/test_maths.py::test_double", "", ""]
    assert (root / "smat_fn/toy/maths.py").read_text() == SOURCE
    text = (root / "docs/mutants.md").read_text()
    assert "3 faults, 1 found by a test, 2 not." in text
    assert "| `smat_fn/toy/maths.py:double` | `x + x` becomes `2 * x` | the same number |" in text
    assert "1 to run" not in check(monkeypatch, capsys, FOUND, SURVIVES, EQUIVALENT)[1]
    # a new test: what survived runs again, what was found by the same file too
    (root / "tests/toy/test_zero.py").write_text(
        "from smat_fn.toy.maths import positive\n\n\ndef test_zero():\n    assert not positive(0)\n"
    )
    status, out = check(monkeypatch, capsys, FOUND, SURVIVES, EQUIVALENT)
    assert (status, out.splitlines()[0]) == (0, "3 mutants, 2 to run, 0 anchors are gone")
    assert "tests/toy/test_zero.py::test_zero" in out


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_are_no_judges(root, monkeypatch):
    (root / "tests/toy/test_maths.py").write_text(TESTS + "\n\ndef test_false():\n    assert False\n")
    monkeypatch.setattr(running, "MUTANTS", [FOUND])
    with pytest.raises(SystemExit, match="tests/toy fail without any mutant"):
        running.main([])


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        (Mutant("toy/maths.py", "x", "y"), r"the anchor 'x' is there \d+ times"),
        (Mutant("toy/maths.py:half", "x", "y"), "half is defined 0 times"),
        (Mutant("toy/other.py", "x", "y"), "no file smat_fn/toy/other.py"),
        (GONE, "is gone"),
    ],
)
def test_anchors_that_do_not_fit_say_so(root, mutant, problem):
    with pytest.raises(ValueError, match=problem):
        mutated(root, mutant)


def test_docstrings_are_no_anchors(root):
    assert mutated(root, EQUIVALENT) == SOURCE.replace("return x + x", "return 2 * x")


def test_the_catalogue_names_each_fault_once_and_changes_something():
    assert len({mutant[:3] for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert all(mutant.old != mutant.new for mutant in MUTANTS)
    parts = (
        "simulation", "mat", "optim", "merge", "folders", "ops", "integrations", "data", "suites", "parallel",
        "evaluate", "transport",
    )  # fmt: skip
    assert {running.tests_of(mutant) for mutant in MUTANTS} == {
        *(f"tests/{part}" for part in parts),
        *running.TESTS.values(),
    }


def test_the_code_that_a_fault_changes_is_in_its_file():
    texts = cache(lambda file: (running.ROOT / "smat_fn" / file).read_text(encoding="utf-8"))
    gone = []
    for place, old, *_ in MUTANTS:
        file, _, inside = place.partition(":")
        defined = not inside or re.search(rf"(def|class) {inside}\b", texts(file))
        gone += [] if defined and old in texts(file) else [f"{place}: {old}"]
    assert gone == []


@pytest.mark.slow  # the same, and that each is there but once
def test_every_anchor_of_the_catalogue_fits():
    assert all(mutated(running.ROOT, mutant) for mutant in MUTANTS)


def test_the_page_is_that_of_the_stored_results_and_every_survivor_has_a_reason():
    stored = json.loads(running.RESULTS.read_text(encoding="utf-8"))
    assert (running.ROOT / "docs/mutants.md").read_text(encoding="utf-8") == page(stored)
    assert [name for name, result in stored.items() if not result["killer"] and not result["equivalent"]] == []
    assert len(stored) >= 60


def test_words_do_not_count_in_what_a_result_depends_on():
    plain = "def f(x):\n    return x + 1\n"
    assert running.code_of('"""Adds."""\n\n\ndef f(x):\n    """One more."""\n    return x + 1  # at last\n') == (
        running.code_of(plain)
    )
    assert running.code_of("def f(x):\n    return x + 2\n") != running.code_of(plain)
    assert running.code_of('def f():\n    """Nothing."""\n') == running.code_of("def f():\n    pass\n")
