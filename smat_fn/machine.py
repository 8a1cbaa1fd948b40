"""Provenance of a result: command, commit, code, processor, hardware, versions."""

import hashlib
import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__

PACKAGES = ("torch", "transformers", "triton", "scikit-learn", "numpy")
DISPATCH = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")


def describe(command: str, *, gpu: str | None = None) -> dict[str, Any]:
    """Facts for a result file.

    Args: command: that made it; gpu: the device's name, None where none was used.
    """
    versions = {"smat_fn": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except metadata.PackageNotFoundError:
            continue
    hardware = f"{os.cpu_count()} cores of {_processor()}, {gpu or 'no GPU used'}"
    return {"command": command, "commit": commit(), "hardware": hardware, "versions": versions}


@cache
def version(package: str) -> str:
    """Version of an installed package, whose metadata is read once a process. Raises: PackageNotFoundError."""
    return metadata.version(package)


@cache
def code(folder: Path = Path(__file__).parent) -> str:
    """Version of this package and a hash of its source files: the same for a checkout and an installed copy of it.

    Args: folder: of the files; those of the package by default. Read once a process.
    """
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()}"


def cpu() -> dict[str, Any]:
    """Facts of the processor that decide, with versions and threads, which kernels run, and so the last bits.

    Returns: ``model``, ``instructions`` (those torch's own kernels use), versions of ``onednn`` and ``mkl`` where torch
        has them, and ``environment``: the variables of `DISPATCH` that are set.
    """
    import torch

    built = torch.__config__.show()
    libraries = {"onednn": r"MKL-DNN v(\S+)", "mkl": r"Math Kernel Library Version (\S+)"}
    found = {name: match[1] for name, pattern in libraries.items() if (match := re.search(pattern, built))}
    instructions = torch.backends.cpu.get_cpu_capability()
    environment = {name: os.environ[name] for name in DISPATCH if name in os.environ}
    return {"model": _processor(), "instructions": instructions, **found, "environment": environment}


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


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return model
