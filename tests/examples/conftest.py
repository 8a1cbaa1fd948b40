"""Scripts as a user runs them, but for the interpreter: a stand-in that need not import torch again."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORKS = Path(__file__).parent / "forks.py"


@pytest.fixture(scope="session")
def environment():
    """Variables of all commands."""
    return os.environ | {
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        **{"PYTHONWARNINGS": "error"},
    }


@pytest.fixture(scope="session")
def python(environment, tmp_path_factory):
    """An executable that does what ``python SCRIPT WORD...`` does (`forks`)."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path is short
        socket = Path(folder) / "socket"
        server = subprocess.Popen(
            [sys.executable, FORKS, "serve", socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert server.stdin is not None
        assert server.stdout is not None
        with server, server.stdin:
            assert server.stdout.readline() == b"listening\n"
            stand_in = tmp_path_factory.mktemp("bin") / "python"
            stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FORKS}" "{socket}" "$@"\n')
            stand_in.chmod(0o755)
            yield stand_in


@pytest.fixture(scope="session")
def run(python, environment):
    """``run(script, *words, **variables)``: what a script, its place given from the root, prints."""

    def call(script, *words, **variables):
        own = environment | {"PYTHON": str(python), **{name: str(value) for name, value in variables.items()}}
        command = ["bash" if script.endswith(".sh") else python, ROOT / script, *map(str, words)]
        process = subprocess.run(command, capture_output=True, text=True, env=own, check=False, timeout=600)
        assert process.returncode == 0, process.stdout + process.stderr
        assert "Warning" not in process.stderr
        return process.stdout

    return call
