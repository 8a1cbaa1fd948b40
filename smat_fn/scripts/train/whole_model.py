"""Where the leaves that are trained lie in the whole model, as merge.py export will put them back."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...folders import local_folder, open_folder, place_of
from ...folders.inputs.opening import Place
from ...folders.inputs.reading import Folder


def export_problems(base: Path, params: Mapping[str, Tensor]) -> list[str]:
    """Why `export` could not put these leaves into base, by names and shapes; no tensor data is read.

    Args: base: folder, or hub name, which is looked for in the hub's cache alone.
    """
    try:
        _place(base, params)
    except ValueError as error:
        return [f"merge.py export cannot put what is trained into {base}: {error}"]
    return []


def stored_dtypes(base: Path, params: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """The dtypes in which base stores these leaves; empty for one that `export_problems` names. Args: as there."""
    try:
        view, prefix, _ = _place(base, params)
    except ValueError:
        return {}
    return {name: view.leaves[f"{prefix}{name}"].dtype for name in params}


def _place(base: Path, params: Mapping[str, Tensor]) -> Place:
    """The place of these leaves in base. Raises: ValueError as `place_of`, and for a base that cannot be read."""
    part = Folder("what is trained", {name: leaf.detach().to("meta") for name, leaf in params.items()}, {}, {})
    return place_of(open_folder("the model", local_folder("the model", base, fetch=False)), part)
