"""Workers of two processes, and what they found."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def found_by(module, folder):
    """Run a module, which trains in two processes, on a folder; what each of them has saved there, by rank."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(folder)]
    done = subprocess.run(
        command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"found{rank}.pt") for rank in range(2)]
