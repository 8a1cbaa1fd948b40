"""Every test that a row of docs/equations.md names calls the functions of its line."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_docs import ROOT, ROWS, defined, lines

LINES = {
    f"{name} ({number})": line
    for name, code, tests in ROWS
    if not code.startswith("not ")
    for number, line in enumerate(lines(code, tests), start=1)
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """{test: {(file, qualified name) of what it calls}}; tests that were skipped are left out."""
    file = tmp_path_factory.mktemp("calls") / "calls.json"
    named = sorted({f"{path.relative_to(ROOT)}::{test}" for _, tests in LINES.values() for test, path in tests})
    here = Path(__file__).parent / "calling"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here, ROOT)))}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "calls", "--calls", str(file)]
    done = subprocess.run([*command, *named], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]
    return {test: set(map(tuple, called)) for test, called in json.loads(file.read_text(encoding="utf-8")).items()}


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_the_tests_of_a_line_call_its_functions(calls, line):
    functions, tests = LINES[line]
    found = {test: calls.get(f"{path.relative_to(ROOT)}::{test}") for test, path in tests}
    missing = [
        f"{test} does not call {name}"
        for test, called in found.items()
        if called is not None
        for name, file in functions
        if callable(defined(file, name)[0]) and not is_in(called, file, name)
    ]
    assert not missing, "; ".join(missing)


def is_in(called, file, name):
    """Whether a function, or a method of a class, was called; a class's own name is its body, run by an import."""
    value = defined(file, name)[0]
    qualified = inspect.unwrap(value).__qualname__
    own = {q for f, q in called if f == str(file)}
    return any(q.startswith(qualified + ".") for q in own) if inspect.isclass(value) else qualified in own


@pytest.mark.parametrize("line", LINES)
def test_constants_are_named_in_the_files_of_their_tests(line):
    functions, tests = LINES[line]
    constants = [name for name, file in functions if not callable(defined(file, name)[0])]
    texts = {path.name: path.read_text(encoding="utf-8") for _, path in tests}
    assert [(name, file) for name in constants for file, text in texts.items() if name not in text] == []
