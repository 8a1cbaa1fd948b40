"""The scripts as a user runs them, in this process."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def exits(monkeypatch):
    """``exits(script, *words)``: what the script exits with, None where it ends well."""

    def run(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code
        return None

    return run
