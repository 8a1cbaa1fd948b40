"""Checkpoint folders for the tests of merging on disk, and what the pure mergers say of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from smat_fn import merge, random

KEY = random.fold_in(random.key(3), "merge")


def save(folder: Path, tree: dict, *, shards: int = 1) -> Path:
    """A folder in Hugging Face's layout."""
    folder.mkdir(parents=True)
    if shards == 1:
        save_file(tree, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    placed = {path: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, path in enumerate(tree)}
    for file in set(placed.values()):
        save_file({path: leaf for path, leaf in tree.items() if placed[path] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


def save_family(folder: Path, base: dict, experts: dict) -> tuple[Path, dict[str, Path]]:
    """Base in two shards, experts in one, two, three."""
    paths = {name: save(folder / f"in-{name}", tree, shards=i + 1) for i, (name, tree) in enumerate(experts.items())}
    return save(folder / "in", base, shards=2), paths


def load(folder: Path) -> dict:
    return {path: leaf for file in sorted(folder.glob("*.safetensors")) for path, leaf in load_file(file).items()}


def in_memory(config, base: dict, experts: dict, coef=None) -> dict:
    return merge.merge_by(config, base, experts, key=KEY, coef=coef)


def assert_same_bits(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for path, leaf in left.items():
        assert (leaf.dtype, leaf.shape) == (right[path].dtype, right[path].shape), path
        bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (leaf, right[path])]
        assert torch.equal(*bits), path


@pytest.fixture
def folders():
    return SimpleNamespace(
        key=KEY, save=save, save_family=save_family, load=load, in_memory=in_memory, assert_same_bits=assert_same_bits
    )


@pytest.fixture
def inputs(family, folders, tmp_path):
    """Base and two experts in bfloat16."""
    base, experts = family(torch.bfloat16, count=2)
    return folders.save_family(tmp_path, base, experts)
