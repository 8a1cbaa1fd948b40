"""Files of tensors: headers first, then flat ranges of coordinates from mapped memory."""

import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...errors import and_more, first_line, some_of
from ...tree import PLAIN, dtype_name
from ..files import identity

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
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
SAFE = "save the state dict with safetensors.torch.save_file, or the model with save_pretrained"
OF_VERL = "python -m verl.model_merger merge"
_DISTRIBUTED = "torch.distributed."  # where DTensor is
_PART = f"a part of a model that FSDP has sharded: write whole weights from all parts first (verl's by {OF_VERL})"
_POINTER = b"version https://git-lfs."
_MODEL = re.compile(r"(model|module|net|network|state_dict|params)(_.+)?|.+_state_dict|ema")  # keys of training scripts
_AVERAGE = re.compile(r"ema|swa|average")

Read: TypeAlias = Callable[[int, int], Tensor]  # flat coordinates [start, stop) of a leaf


class Store:
    """A mapped safetensors file. Tensors just read stay mapped: mapping one costs as much as a small chunk."""

    def __init__(self, file: Path) -> None:
        self.identity = identity(_regular(file))
        store: Any = safe_open(file, framework="pt")
        self.get_tensor: Callable[[str], Tensor] = lru_cache(maxsize=4)(store.get_tensor)
        self.names: list[str] = store.offset_keys()
        self.metadata: dict[str, str] = store.metadata() or {}
        self._slice = store.get_slice

    def code(self, name: str) -> str:
        """How a tensor is stored: "BF16"."""
        return self._slice(name).get_dtype()

    def header(self, name: str, more: Mapping[str, torch.dtype] = MappingProxyType({})) -> Tensor | None:
        """Shape and dtype of a tensor, as a meta tensor; None for a dtype not in `DTYPES` or ``more``."""
        code, known = self.code(name), DTYPES | dict(more)
        shape = self._slice(name).get_shape()
        try:
            return torch.empty(shape, dtype=known[code], device="meta") if code in known else None
        except RuntimeError:  # a shape such as (0, 2**62, 2**62), whose strides torch cannot count
            return None


def _regular(file: Path) -> Path:
    """The file. Raises: OSError for a folder or a pipe, which would never end; ValueError for a pointer of Git LFS."""
    if file.exists() and not file.is_file():
        raise OSError("it is not a file")
    with suppress(OSError), file.open("rb") as found:
        if found.read(len(_POINTER)) == _POINTER:  # what git leaves in place of a file that it did not fetch
            raise ValueError(f"{file} is a pointer of Git LFS: fetch the file by git lfs pull")
    return file


def empty_problems(where: str, leaves: Mapping[str, Tensor]) -> list[str]:
    """An error for weights without values, which ZeRO-3 leaves on each process where it is saved without its parts."""
    empty = [path for path, leaf in leaves.items() if leaf.shape == (0,) and re.search(r"\.weight$|\.lora_", path)]
    if not empty:
        return []
    return [
        f"{where} holds weights without values ({and_more(map(repr, sorted(empty)))}), as ZeRO-3 saves them without "
        "its parts: run zero_to_fp32.py, or train with stage3_gather_16bit_weights_on_model_save"
    ]


def _named(found: object) -> bool:
    """Whether an object is a dict of tensors by name."""
    return isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())


def _plain(leaf: Tensor) -> bool:
    """Whether a tensor's values lie in memory as its shape says: not for a DTensor, or one that is sparse or meta."""
    return type(leaf) in PLAIN and leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta


def _inner(found: object) -> dict[str, dict[str, Tensor]]:
    """The state dicts in the dict of a training script, beside its epoch and its optimizer."""
    if not isinstance(found, dict) or _named(found):
        return {}
    every = {key: own for key, own in found.items() if _named(own) and own}
    models = {key: own for key, own in every.items() if _MODEL.fullmatch(str(key))}
    if not all(_AVERAGE.search(str(key)) for key in models):
        return models
    # an average alone does not say that it is the model: of as many tensors, or of the same names, is a student
    twins = {
        key: own
        for key, own in every.items()
        if any(len(own) == len(other) or own.keys() & other.keys() for other in models.values())
    }
    return models | twins


def _among_tensors(found: object) -> list[str]:
    """The entries of a state dict that are not tensors, with their types; [] for a dict that has few tensors."""
    if not isinstance(found, dict):
        return []
    others = [f"{name!r} ({type(own).__name__})" for name, own in found.items() if not isinstance(own, Tensor)]
    return others if 2 * len(others) < len(found) else []


def _unread(file: Path, error: Exception) -> str:
    """The error for a file that torch.load refuses: it names the classes that the file needs."""
    classes = list[str]()
    with suppress(Exception):  # of other formats
        classes = sorted(get_unsafe_globals_in_checkpoint(file))
    if any(name.startswith(_DISTRIBUTED) for name in classes):
        return f"{file} is {_PART}"
    if "TorchScript" in str(error):
        return f"{file} is a program of TorchScript: save torch.jit.load({file.name!r}).state_dict() by torch.save"
    told = f"it holds objects of {some_of(classes)}" if classes else first_line(error)
    return f"{file} holds pickled weights that cannot be read safely ({told}): {SAFE}"


class Pickled:
    """A mapped file of ``torch.save``, read without running any of its code."""

    def __init__(self, file: Path) -> None:
        self.identity = identity(_regular(file))
        try:
            with safe_globals([Namespace]):  # the arguments of a training script
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle's, zip's, torch's
            raise ValueError(_unread(file, error)) from error
        inner = _inner(found)
        if len(inner) > 1:
            raise ValueError(f"{file} holds several sets of weights, {', '.join(map(repr, inner))}: {SAFE}")
        found = next(iter(inner.values()), found)
        if not _named(found):
            if others := _among_tensors(found):
                raise ValueError(f"{file} holds {some_of(others)} among its tensors: save the state dict without them")
            keys = some_of(map(repr, found)) if isinstance(found, dict) else ""
            what = f"a dict of {keys}" if keys else f"a {type(found).__name__}"
            raise ValueError(f"{file} holds {what}, not pickled weights by name: {SAFE}")
        if any(type(leaf).__module__.startswith(_DISTRIBUTED) for leaf in found.values()):
            raise ValueError(f"{file} is {_PART}")
        if odd := next((name for name, leaf in found.items() if not _plain(leaf)), None):
            kinds = "sparse, nested, without values (meta) or of a class of its own"
            raise ValueError(f"{file} holds {odd!r}, a tensor that is {kinds}: {SAFE}")
        self._leaves = found
        self.names: list[str] = list(found)
        self.metadata: dict[str, str] = {}

    def get_tensor(self, name: str) -> Tensor:
        """A leaf as a memory-mapped tensor."""
        return self._leaves[name].detach()

    def code(self, name: str) -> str:
        """How a tensor is stored: "bfloat16"."""
        return dtype_name(self._leaves[name])

    def header(self, name: str, more: Mapping[str, torch.dtype] = MappingProxyType({})) -> Tensor | None:
        """Shape and dtype of a leaf, as `Store.header`."""
        leaf = self._leaves[name]
        return (
            torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
            if leaf.dtype in {*DTYPES.values(), *more.values()}
            else None
        )


@dataclass(frozen=True)
class Stored:
    """Reads coordinates of a stored tensor; ``store`` has `Store.get_tensor`."""

    store: Any
    name: str

    def __call__(self, start: int, stop: int) -> Tensor:
        found: Tensor = self.store.get_tensor(self.name).reshape(-1)[start:stop]
        return found

    def mapped(self) -> Tensor | None:
        """All of them, flat, in the memory of the mapped file; None where their order or address is another one."""
        found: Tensor = self.store.get_tensor(self.name)
        usual = found.is_contiguous() and found.data_ptr() % found.itemsize == 0
        return found.view(-1) if usual else None


def reader_of_tensor(leaf: Tensor) -> Read:
    """A function that reads coordinates of a tensor in memory."""
    return lambda start, stop: leaf.reshape(-1)[start:stop]
