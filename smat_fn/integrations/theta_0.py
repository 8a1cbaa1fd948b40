"""theta_0 of small parameters in a trainer's checkpoints, since heads and adapters may be made at random."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import checkpoint

_FILE = "smat_theta_0.safetensors"
_LARGEST = 1 << 20  # values of a parameter


def write(folder: Path, base: Mapping[str, Tensor]) -> None:
    """A file of the small ones among the leaves of theta_0, but for shards."""
    small = {path: own for path, own in base.items() if own.numel() <= _LARGEST and not hasattr(own, "to_local")}
    if small:
        save_file({path: checkpoint.plain(own).clone() for path, own in small.items()}, folder / _FILE)


def differing(folder: Path, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leaves in the file of a folder, if it has one, whose values theta_0 here does not have."""
    stored = load_file(folder / _FILE) if (folder / _FILE).is_file() else {}
    pairs = [(path, own, base[path]) for path, own in stored.items() if path in base]
    alike = [(path, own, now) for path, own, now in pairs if (own.dtype, own.shape) == (now.dtype, now.shape)]
    moved = [(path, own.to(now.device), now) for path, own, now in alike if not hasattr(now, "to_local")]
    return {path: own for path, own, now in moved if not torch.equal(own, now)}
