"""Files of tensors: headers first, then flat ranges of coordinates from mapped memory."""

import re
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

from ...errors import first_line, some_of
from ...tree import dtype_name
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
_POINTER = b"version https://git-lfs."
_MODEL = re.compile(r"(model|module|net|network|state_dict|params)(_.+)?|.+_state_dict|ema")  # keys of training scripts

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


def _named(found: object) -> bool:
    """Whether an object is a dict of tensors by name."""
    return isinstance(found, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())


def _plain(leaf: Tensor) -> bool:
    """Whether a tensor's values lie in memory as its shape says: not for one that is sparse, nested or meta."""
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta


def _inner(found: object) -> dict[str, dict[str, Tensor]]:
    """The state dicts in the dict of a training script, beside its epoch and its optimizer."""
    if not isinstance(found, dict) or _named(found):
        return {}
    return {key: own for key, own in found.items() if _named(own) and own and _MODEL.fullmatch(str(key))}


class Pickled:
    """A mapped file of ``torch.save``, read without running any of its code."""

    def __init__(self, file: Path) -> None:
        self.identity = identity(_regular(file))
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # pickle's, zip's, torch's
            raise ValueError(
                f"{file} holds pickled weights that cannot be read safely ({first_line(error)}): {SAFE}"
            ) from error
        inner = _inner(found)
        if len(inner) > 1:
            raise ValueError(f"{file} holds several sets of weights, {', '.join(map(repr, inner))}: {SAFE}")
        found = next(iter(inner.values()), found)
        if not _named(found):
            keys = some_of(map(repr, found)) if isinstance(found, dict) else ""
            what = f"a dict of {keys}" if keys else f"a {type(found).__name__}"
            raise ValueError(f"{file} holds {what}, not pickled weights by name: {SAFE}")
        if odd := next((name for name, leaf in found.items() if not _plain(leaf)), None):
            raise ValueError(f"{file} holds {odd!r}, a tensor that is sparse, nested or without values (meta): {SAFE}")
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
