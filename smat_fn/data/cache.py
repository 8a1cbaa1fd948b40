"""On-disk cache of expensive tensors, keyed by a hash of their inputs."""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import __version__, machine
from ..checkpoint import fingerprint, save_shared

HELD = 2 * 2**30  # bytes of a split's pixels or frozen states that are kept here and in memory; of a larger one none
log = logging.getLogger(__name__)
_unwritable = set[Path]()  # folders that a line in the log has named


def cache_dir() -> Path:
    """``$SMAT_FN_CACHE``, or ``~/.cache/smat_fn``; a place that cannot be written where the home folder is unknown."""
    home = Path(os.path.expanduser("~"))  # unchanged for a user that the system does not know, as in containers
    return Path(
        os.environ.get("SMAT_FN_CACHE") or (home if home.is_absolute() else Path(os.devnull)) / ".cache/smat_fn"
    )


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {package: machine.version(package) for package in packages}


def cached(name: str, config: Mapping[str, Any], build: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The result of ``build()``, or its stored result for this name and config, bit-identical.

    The file is ``<name>-<hash of config>.safetensors`` in `cache_dir`, written beside itself and renamed, so that
    readers never meet half a file. A file that fails its fingerprint is built again, with a line in the log. Where none
    can be written, the result is returned all the same, with one line in the log of the process. The hash covers the
    version of smat_fn too, and the processor and the kernels in use, which round differently.

    Args: config: JSON values, everything that the tensors depend on.
    """
    text = json.dumps({**config, "smat_fn": __version__, "cpu": machine.cpu()}, sort_keys=True)
    path = cache_dir() / f"{name}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.safetensors"
    try:
        if path.exists():
            return _read(path, text)
    except Exception as error:  # a broken file can fail in many ways, none of them fatal
        log.warning("cache file %s is not usable (%s): building it again", path, error)
    tensors = {name: tensor.contiguous() for name, tensor in build().items()}  # as they are read: strides decide bits
    try:
        _write(path, text, tensors)
    except (OSError, SafetensorError) as error:
        if path.parent not in _unwritable:
            _unwritable.add(path.parent)
            said = "the cache %s cannot be written (%s): what it would keep is computed again by every command; "
            log.warning(said + "free space there, or set SMAT_FN_CACHE to another folder", path.parent, error)
    return tensors


def _read(path: Path, config: str) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        facts = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in json.loads(facts["order"])}
    if facts["config"] != config or facts["fingerprint"] != fingerprint(tensors):
        raise ValueError("config or fingerprint differ")
    return tensors


def _write(path: Path, config: str, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors sorts by size and name: the order of the tree is kept beside
    facts = {"config": config, "fingerprint": fingerprint(tensors), "order": json.dumps(list(tensors))}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # several machines may share the folder
    try:
        save_shared(tensors, temporary, facts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
