"""Recognise a finished merge: its manifest states how it was made and of what, and all of that is hashed again."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ... import __version__, checkpoint


def is_merged(folder: Path) -> bool:
    """Whether the manifest of a folder is that of a merged model."""
    try:
        manifest = checkpoint.load_manifest(folder)
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == "merged"


def differences(folder: Path, wanted: Mapping[str, Any]) -> list[str]:
    """How the manifest in ``folder`` differs from one with these facts; nothing is hashed."""
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
    """Hash again all files that the manifest of a merged model names.

    Args: path: folder of the merged model, or its README.md.
    Returns: the number of files, and a line for every file that has changed or is missing.
    Raises: ValueError for a folder without a manifest.
    """
    folder = path if path.is_dir() else path.parent
    manifest = checkpoint.load_manifest(folder)
    if "files" not in manifest:  # merged in memory
        same = checkpoint.fingerprint(checkpoint.load_leaves(folder)[0]) == manifest.get("fingerprint")
        return 1, [] if same else [f"{folder / checkpoint.WEIGHTS} has not the weights that were written"]
    named = {folder / file: print_ for file, print_ in manifest["files"].items()}
    for source in manifest["inputs"].values():
        named |= {Path(file): print_ for file, print_ in source.items()}
    found = _digests([file for file in named if file.is_file()], workers)
    return len(named), [
        f"{file} has changed: SHA-256 {found[file]}, it was {print_}" if file in found else f"{file} is missing"
        for file, print_ in named.items()
        if found.get(file) != print_
    ]


def hashes(files: Sequence[Path], inputs: Mapping[str, Sequence[Path]], workers: int) -> dict[str, Any]:
    """The facts of a manifest that `verify` checks: SHA-256 of the files of a model, and of those it was made from."""
    read = _digests([*files, *(file for own in inputs.values() for file in own)], workers)
    return {
        "files": {str(file.relative_to(files[0].parent)): read[file] for file in files},
        "inputs": {name: {str(file.absolute()): read[file] for file in own} for name, own in inputs.items()},
    }


def seconds_to_hash(size: int) -> float:
    """For ``size`` bytes in one thread of this machine, from a trial."""
    trial, begin = bytes(1 << 22), time.perf_counter()
    hashlib.sha256(trial)
    return size / len(trial) * (time.perf_counter() - begin)


def _digests(files: Iterable[Path], workers: int) -> dict[Path, str]:
    """SHA-256 of every file, each file once, in several threads: hashlib releases the GIL."""
    each = list(dict.fromkeys(files))
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(each, pool.map(_sha256, each), strict=True))


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
