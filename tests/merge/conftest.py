"""Goldens of mergekit: stored, or made anew where it is installed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "golden" / "mergekit.safetensors"
VERSION = "from importlib.metadata import version; print(version('mergekit'))"


@pytest.fixture(scope="session")
def golden_file(tmp_path_factory):
    """What mergekit 0.1.5 gives: made anew where it is installed, here or for $MERGEKIT_PYTHON, else as stored."""
    python = os.environ.get("MERGEKIT_PYTHON") or (sys.executable if find_spec("mergekit") else None)
    if python is None:
        return STORED
    found = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
    if found != "0.1.5":
        return STORED
    made = tmp_path_factory.mktemp("mergekit") / STORED.name
    subprocess.run([python, str(STORED.parent.parent / "make_golden.py"), str(made)], capture_output=True, check=True)
    return made
