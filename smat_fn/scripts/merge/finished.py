"""Is a merged model already there? Its manifest names how it was made and of what, and all of it is hashed again."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ... import __version__, checkpoint


def is_merged(folder: Path) -> bool:
    """Does a folder hold a merged model, to be found by its manifest?"""
    try:
        manifest = checkpoint.load_manifest(folder)
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == "merged"


def differences(folder: Path, wanted: Mapping[str, Any]) -> list[str]:
    """How the merge in ``folder`` differs from one with these facts, in words; nothing is hashed."""
    if not is_merged(folder):
        return [f"{folder} holds no merged model"]
    manifest = checkpoint.load_manifest(folder)
    facts = json.loads(json.dumps(wanted))  # tuples are lists in a manifest
    if (made := manifest.get("versions", {}).get("smat_fn")) != __version__:
        return [f"smat_fn {made} made it, this is {__version__}"]
    return [
        f"its {name} is {manifest.get(name)!r}, here it would be {value!r}"
        for name, value in facts.items()
        if manifest.get(name) != value
    ]


def verify(path: Path, *, workers: int = 1) -> tuple[int, list[str]]:
    """Hash again what the manifest of a merged model names. Returns: the number of files, and all that differs.

    Args: path: its folder, or its card. Raises: ValueError for a folder without a manifest.
    """
    folder = path if path.is_dir() else path.parent
    manifest = checkpoint.load_manifest(folder)
    if "files" not in manifest:  # merged in memory
        same = checkpoint.fingerprint(checkpoint.load_leaves(folder)[0]) == manifest.get("fingerprint")
        return 1, [] if same else [f"{folder / checkpoint.WEIGHTS} has not the weights that were written"]
    named = {folder / file: print_ for file, print_ in manifest["files"].items()}
    for source in manifest["inputs"].values():
        named |= {Path(file): print_ for file, print_ in source.items()}
    found = digests([file for file in named if file.is_file()], workers)
    return len(named), [
        f"{file} has changed: SHA-256 {found[file]}, it was {print_}" if file in found else f"{file} is missing"
        for file, print_ in named.items()
        if found.get(file) != print_
    ]


def digests(files: Iterable[Path], workers: int) -> dict[Path, str]:
    """SHA-256 of every file, each file once, in several threads: hashing lets go of the interpreter."""
    each = list(dict.fromkeys(files))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(each, pool.map(_sha256, each), strict=True))


def seconds_to_hash(size: int) -> float:
    """For ``size`` bytes in one thread of this machine, from a trial."""
    trial, begin = bytes(1 << 22), time.perf_counter()
    hashlib.sha256(trial)
    return size / len(trial) * (time.perf_counter() - begin)


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
