"""Checkpoint folders in Hugging Face's layout: headers first, then flat ranges of leaves from mapped files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PICKLES = "*.bin", "*.pt", "*.pth", "*.ckpt"
_QUANTISED = "qweight", "qzeros", "quant_map", "weight_packed", "weight_scale", "weight_scale_inv", "SCB"


class Folder(NamedTuple):
    """A checkpoint on disk. ``leaves`` are meta tensors in the order of its files; `read` gives their values."""

    label: str
    leaves: dict[str, Tensor]
    files: dict[str, Path]  # of every leaf
    stores: dict[Path, Any]

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """Flat coordinates [start, stop) of a leaf: a view of the mapped file, not to be written to."""
        return self.stores[self.files[path]].get_tensor(path).reshape(-1)[start:stop]


def open_folder(label: str, path: Path) -> Folder:
    """Read the headers of a checkpoint folder; no tensor data is read.

    Raises: ValueError that lists what is missing, broken or of a kind that cannot be merged, by name.
    """
    problems: list[str] = []
    wanted = _files(label, path, problems)
    stores: dict[Path, Any] = {}
    leaves: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for file, names in wanted.items():
        try:
            store = safe_open(file, framework="pt")
            held = store.offset_keys()
        except (OSError, SafetensorError) as error:
            problems.append(f"{label}: {file} cannot be read ({error}): copy or download it again")
            continue
        stores[file] = store
        problems += [
            f"{label}: {file} lacks leaf {name!r} that {INDEX} places there: download it again"
            for name in sorted((names or set()) - set(held))
        ]
        problems += [
            f"{label}: {file} holds leaf {name!r} that {INDEX} does not place there: write the checkpoint again"
            for name in held
            if names is not None and name not in names
        ]
        for name in held:
            view = store.get_slice(name)
            code = view.get_dtype()
            if code not in DTYPES:
                problems.append(
                    f"{label}: leaf {name!r} is stored as {code}, which cannot be merged: "
                    "convert the checkpoint to bfloat16, float16 or float32"
                )
                continue
            leaves[name] = torch.empty(view.get_shape(), dtype=DTYPES[code], device="meta")
            files[name] = file
    problems += _quantised(label, path, leaves)
    if problems:
        raise ValueError("; ".join(problems))
    return Folder(label, leaves, files, stores)


def _files(label: str, path: Path, problems: list[str]) -> dict[Path, set[str] | None]:
    """The files of a checkpoint and the leaves that its index places in each; None without an index."""
    if not path.is_dir():
        problems.append(f"{label}: {path} is no folder: give the folder of a checkpoint")
    elif (path / WEIGHTS).exists():
        return {path / WEIGHTS: None}
    elif (path / INDEX).exists():
        return _indexed(label, path, problems)
    else:
        problems.append(f"{label}: {path} {_foreign(path)}")
    return {}


def _indexed(label: str, path: Path, problems: list[str]) -> dict[Path, set[str] | None]:
    try:
        placed = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in placed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{label}: {path / INDEX} is no index ({error!r}): download it again")
        return {}
    names: dict[str, set[str] | None] = {}
    for name, file in pairs:
        group = names.setdefault(file, set())
        assert group is not None
        group.add(name)
    for file in sorted(names):
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
            problems.append(f"{label}: {path / INDEX} names {file!r}, which leaves the folder: do not trust this index")
        elif not (path / file).is_file():
            problems.append(f"{label}: {path / file} is missing, {INDEX} names it: download it again")
        else:
            continue
        del names[file]
    return {path / file: names[file] for file in sorted(names)}


def _foreign(path: Path) -> str:
    """What a folder without safetensors weights holds instead."""
    safe = "save the model again with save_pretrained, which writes safetensors"
    found = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if found:
        return f"holds pickled weights ({found[0]}), which can run code when read: {safe}"
    if gguf := sorted(file.name for file in path.glob("*.gguf")):
        return f"holds a GGUF file ({gguf[0]}), whose weights are quantised: merge the original checkpoint"
    if (path / "adapter_model.safetensors").exists():
        return "holds an adapter, not a whole model: merge it into its base and save that"
    return f"holds neither {WEIGHTS} nor {INDEX}: give the folder of a checkpoint"


def _quantised(label: str, path: Path, leaves: Mapping[str, Tensor]) -> Iterator[str]:
    out = "merge the checkpoint it was made from"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    if isinstance(config, dict) and config.get("quantization_config"):
        asked = config["quantization_config"]
        method = asked.get("quant_method", "unknown method") if isinstance(asked, dict) else asked
        yield f"{label}: {path} is quantised ({method}, says its config.json): {out}"
        return
    parts = [name for name in leaves if name.rpartition(".")[2] in _QUANTISED]
    if parts:
        yield f"{label}: {path} is quantised (it holds leaf {parts[0]!r}): {out}"
