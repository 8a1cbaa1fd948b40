"""What a result was made with: command, commit, hardware, versions."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__

PACKAGES = ("torch", "transformers", "triton", "scikit-learn", "numpy")


def describe(command: str, *, gpu: str | None = None) -> dict[str, Any]:
    """Facts for a result file.

    Args: command: that made it; gpu: the device's name, None where none was used.
    """
    versions = {"smat_fn": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    hardware = f"{_processor()}, {gpu or 'no GPU used'}"
    return {"command": command, "commit": commit(), "hardware": hardware, "versions": versions}


def commit() -> str:
    """The commit of this code, "unknown" outside its repository; says whether tracked files have changed."""
    # an installed copy may lie inside another project's repository
    if not _git("ls-files", Path(__file__).name):
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:  # no git here
        return ""
    return run.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {model}"
