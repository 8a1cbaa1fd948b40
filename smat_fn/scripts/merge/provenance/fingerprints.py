"""Fingerprints in the manifest of a merged model: of base, of the model, and of experts that other tools made."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from .... import checkpoint
from ....folders.inputs.opening import open_input
from ....folders.inputs.side_files import TOKENIZER
from ....folders.multi_task import is_several, open_several
from ...manifests import manifest_of, other_weights


def expert_prints(experts: Mapping[str, str | None], hashed: Mapping[str, Any]) -> dict[str, str]:
    """Fingerprints of experts: of those that other tools made, the hash of the hashes of their files of weights."""

    def print_of(files: Mapping[str, str]) -> str:
        others = *checkpoint.STATISTICS.values(), *TOKENIZER
        weights = {file: own for file, own in files.items() if not any(map(Path(file).match, others))}
        return hashlib.sha256(json.dumps(weights, sort_keys=True).encode()).hexdigest()

    return {name: known or print_of(hashed["inputs"][f"expert {name!r}"]) for name, known in experts.items()}


def fingerprints_of(base: Path, merged: Path, known: str | None = None) -> tuple[str, str]:
    """The fingerprints of a base, unless it is known, and of what was merged with it, computed at the same time.

    Raises: ValueError for a base of other weights than its manifest names.
    """
    with ThreadPoolExecutor(1) as pool:  # hashlib releases the GIL
        origin = pool.submit(lambda: known or checkpoint.fingerprint(leaves_of(base)))
        made = checkpoint.fingerprint(leaves_of(merged))
    if manifest_of(base).get("fingerprint", origin.result()) != origin.result():
        raise ValueError(other_weights(base))
    return origin.result(), made


def leaves_of(folder: Path) -> dict[str, Tensor]:
    """The leaves of a checkpoint, or the tensors of a folder of several tasks, mapped: no memory is taken."""
    if is_several(folder):
        return open_several(folder).tensors()
    return open_input(str(folder), folder).tensors()
