"""A pytest plugin: which functions of the library each test calls, fixtures and other processes included.

``pytest -p calls --calls FILE TESTS``, with this folder on PYTHONPATH, writes {test: [[file, qualified name], ...]}.
"""

import atexit
import json
import os
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

PACKAGE = str(Path(__file__).resolve().parents[3] / "smat_fn")
FOLDER = "SMAT_FN_TEST_CALLS"  # where other processes write what they have called


def noting(codes):
    """A profile function that collects the code objects of Python functions that start."""

    def note(frame, event, argument):
        if event == "call":
            codes.add(frame.f_code)

    return note


def names(codes):
    return sorted({(code.co_filename, code.co_qualname) for code in codes if code.co_filename.startswith(PACKAGE)})


def watch_process():
    """Called by sitecustomize in processes that tests start: notes what they call, until they end."""
    codes, file = set(), Path(os.environ[FOLDER]) / f"{os.getpid()}.json"

    def write():
        sys.setprofile(None)
        file.write_text(json.dumps(names(tuple(codes))), encoding="utf-8")

    sys.setprofile(noting(codes))
    atexit.register(write)


class Calls:
    """The functions that ran in each test and in each fixture, which several tests may share."""

    def __init__(self, file):
        self.file, self.fixtures, self.tests = Path(file), {}, {}
        self.folder = TemporaryDirectory()
        os.environ[FOLDER] = self.folder.name

    def pytest_fixture_setup(self, fixturedef, request):
        return (yield from self.recorded(self.fixtures.setdefault(fixturedef, set())))

    def pytest_runtest_call(self, item):
        own = self.tests.setdefault(item.nodeid.partition("[")[0], set())
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            own |= self.fixtures.get(definitions[-1], set())
        return (yield from self.recorded(own))

    def recorded(self, found):
        """Around a hook: what starts on its thread, on threads that it starts, and in processes that end meanwhile."""
        codes, before = set(), sys.getprofile()
        sys.setprofile(noting(codes))
        threading.setprofile(sys.getprofile())
        try:
            return (yield)
        finally:
            sys.setprofile(before)
            threading.setprofile(before)
            found |= set(names(codes))
            for file in Path(self.folder.name).glob("*.json"):
                found |= {tuple(name) for name in json.loads(file.read_text(encoding="utf-8"))}
                file.unlink()

    def pytest_sessionfinish(self):
        self.folder.cleanup()
        found = {test: sorted(called) for test, called in self.tests.items()}
        self.file.write_text(json.dumps(found), encoding="utf-8")


def pytest_addoption(parser):
    parser.addoption("--calls", help="file to write")


def pytest_configure(config):
    import pytest  # not in the processes that tests start

    if file := config.getoption("--calls"):
        for name in ("pytest_fixture_setup", "pytest_runtest_call"):
            setattr(Calls, name, pytest.hookimpl(wrapper=True)(getattr(Calls, name)))
        config.pluginmanager.register(Calls(file))
