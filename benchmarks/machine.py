"""What a result was measured with."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "scikit-learn", "numpy")


def describe(command: str) -> dict[str, Any]:
    """Command, commit, hardware and versions, for every result file."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"command": command, "commit": _commit(), "hardware": _hardware(), "versions": versions}


def _commit() -> str:
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return (_git("rev-parse", "HEAD") or "unknown") + (" with changes" if changed else "")


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:  # no git here
        return ""
    return run.stdout.strip()


def _hardware() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores of {model}, no GPU used"
