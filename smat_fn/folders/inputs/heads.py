"""Heads of experts that differ from base's: stored for each task beside the merged trunk."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from .beside import Files
from .reading import Folder
from .stacks import layer_of

FOLDER = "heads"
EMA = "model_ema."  # of Stable Diffusion's checkpoints


def apart(base: Folder, expert: Folder) -> tuple[Folder, dict[str, Tensor]]:
    """An expert with base's leaves, and the leaves of its head, outside base's layers, by name.

    A head's leaves are those that base has not, or has in another shape; base's own head takes their place.
    """
    rows = _rows(base)

    def outside(path: str) -> bool:
        return _outside(path, rows)

    own = {
        path: leaf
        for path, leaf in expert.leaves.items()
        if outside(path) and (path not in base.leaves or base.leaves[path].shape != leaf.shape)
    }
    if len(own) == len(expert.leaves):  # of other names altogether
        return expert, {}
    head = {path: expert.leaf(path).clone() for path in own}
    for path in own:
        expert = expert.without(path)
    for path, leaf in base.leaves.items():
        if path not in expert.leaves and outside(path):
            expert = expert.with_leaf(path, leaf, base.reader(path))
    return expert, head


def ways_out(base: Folder, experts: Mapping[str, Folder]) -> list[str]:
    """Advice on leaves that are not base's; none for models without layers."""
    rows = _rows(base)
    names = {path for folder in experts.values() for path in folder.leaves.keys() ^ base.leaves.keys()}
    if names and all(path.startswith(EMA) for path in names):
        return [f"{EMA}* are averages over training, of no use after it: remove them from the file that has them"]
    inside = {path for path in names if not _outside(path, rows)}
    if not rows or not names:
        return []
    if inside:
        return [
            "names differ inside the layers: if these are models of one kind, load and save all by one version of "
            "transformers"
        ]
    return ["these leaves are outside the layers: if they are heads, give heads keep, which merges the rest"]


def _rows(base: Folder) -> set[str]:
    return {found[0] for path in base.leaves if (found := layer_of(path))}


def _outside(path: str, rows: set[str]) -> bool:
    """Whether a leaf is in none of a model's layers."""
    return (found := layer_of(path)) is None or found[0] not in rows


def head_files(heads: Mapping[str, dict[str, Tensor]], roots: Mapping[str, Path]) -> Files:
    """Each head with its expert's config.json, as files of the output."""
    files: Files = {}
    for name, head in heads.items():
        if head:
            files[f"{FOLDER}/{name}.safetensors"] = save(head, metadata={"format": "pt"})
            if (config := roots[name] / "config.json").is_file():
                files[f"{FOLDER}/{name}.json"] = config
    return files


def head_notes(heads: Mapping[str, dict[str, Tensor]]) -> list[str]:
    """Notes on the heads that are kept, one an expert."""
    return [
        f"the head of expert {name!r} ({', '.join(head)}) is kept as {FOLDER}/{name}.safetensors: load it over the "
        "merged model, with strict=False"
        for name, head in heads.items()
        if head
    ]
