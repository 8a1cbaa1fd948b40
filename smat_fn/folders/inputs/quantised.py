"""Weights in 8-bit floats or MXFP4 are read as the values that they stand for; other quantised ones are errors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...tree import dtype_name
from .stored import FLOAT8, Read

_WEIGHTS = torch.float8_e4m3fn, torch.float8_e5m2
CONFIGURED = "quantization_config", "quantization", "compression_config"  # of MLX; of older compressed-tensors
_FLOATS = "fp8", "fbgemm_fp8", "mxfp4"  # quant_method in config.json
_FORMATS = {"compressed-tensors": ("format", "float-quantized"), "modelopt": ("quant_algo", "FP8")}  # of several
_AFTER = "_scale_inv", "_scale"  # scales have the name of their weights with this: transformers, DeepSeek; vLLM's tools
_OF_COMFY = "scale_weight"  # in the module of the weight
_UNREAD = (  # last parts of names: of activations, of the cache, marks of ComfyUI
    *("input_scale", "activation_scale", "scale_input", "k_scale", "v_scale", "q_scale", "prob_scale"),
    *("scaled_fp8", "comfy_quant"),
)
_BLOCKS, _POWERS, _GROUP = "_blocks", "_scales", 32  # of MXFP4: packed weights, and a power of two for each 32 of them
_FP4 = [sign * size for sign in (1.0, -1.0) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_PAIRS = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])  # the two weights of each byte
_OTHERS = (  # last parts of names of other formats: GPTQ and AWQ, bitsandbytes, compressed-tensors, HQQ
    *("qweight", "qzeros", "g_idx"),
    *("SCB", "absmax", "quant_map", "nested_absmax", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_scale_inv", "W_q"),
)
_WAY_OUT = "merge the checkpoint it was made from, or a dequantised copy"


class Grid(NamedTuple):
    """How scales lie over a weight: matrices, each with blocks of rows and columns that share a scale."""

    matrix: tuple[int, int]  # rows and columns of a matrix of the weight
    scales: tuple[int, int]  # blocks of rows, and of columns
    block: tuple[int, int]  # rows and columns of a block

    @classmethod
    def of(cls, shape: torch.Size, scales: torch.Size, block: tuple[int, int] | None) -> "Grid | None":
        """The grid of scales of a shape; None where they do not fit. ``block`` is what config.json says."""
        size, matrix = shape.numel(), ((1, 1, *shape)[-2], (1, *shape)[-1])
        if not size or not scales.numel():
            return None
        if scales.numel() == 1:
            return cls((size // matrix[1], matrix[1]), (1, 1), (size, matrix[1]))
        if len(scales) == 1:
            scales = torch.Size([*scales, 1])
        if len(scales) != len(shape) or scales[:-2] != shape[:-2]:
            return None
        grid = scales[-2], scales[-1]
        if block is not None and all(-(-n // size) == k for n, size, k in zip(matrix, block, grid, strict=True)):
            return cls(matrix, grid, block)
        if any(n % k for n, k in zip(matrix, grid, strict=True)):
            return None
        return cls(matrix, grid, (matrix[0] // grid[0], matrix[1] // grid[1]))


@dataclass(frozen=True)
class Scaled:
    """Reads coordinates of 8-bit floats, each times the scale of its block in float32, rounded once."""

    values: Read
    scales: Read
    grid: Grid
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        (height, width), (high, wide), (rows, columns) = self.grid
        first, last = start // width, -(-stop // width)
        row = torch.arange(first, last)
        places = row // height * high + row % height // rows
        held = slice(int(places[0]) * wide, (int(places[-1]) + 1) * wide) if len(row) else slice(0, 0)
        scales = _float(self.scales(held.start, held.stop)).view(-1, wide)[places - places[:1], :, None]
        factors = scales.expand(-1, -1, min(columns, width)).reshape(len(row), wide * min(columns, width))[:, :width]
        own = factors.reshape(-1)[start - first * width :][: stop - start]
        return _float(self.values(start, stop)).mul_(own).to(self.dtype)


@dataclass(frozen=True)
class Widened:
    """Reads coordinates of 8-bit floats that have no scales."""

    values: Read
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        return _float(self.values(start, stop)).to(self.dtype)


@dataclass(frozen=True)
class Unpacked:
    """Reads coordinates of MXFP4, whose rows are stored as columns: (experts, columns, groups, bytes of a group)."""

    blocks: Read
    powers: Read
    packed: torch.Size
    dtype: torch.dtype

    def __call__(self, start: int, stop: int) -> Tensor:
        experts, width, groups, _ = self.packed
        height = groups * _GROUP
        blocks = self.blocks(0, self.packed.numel()).view(self.packed)
        powers = self.powers(0, experts * width * groups).view(experts, width, groups)
        first, last, found = start // width, -(-stop // width), [torch.empty(0, width, dtype=self.dtype)]
        while first < last:  # the rows of one expert at a time
            expert, row = divmod(first, height)
            end = min(row + last - first, height)
            cut = slice(row // _GROUP, -(-end // _GROUP))
            scales = _float(powers[expert, :, cut])
            pairs = _PAIRS.index_select(0, blocks[expert, :, cut].reshape(-1).int())
            values = pairs.view(width, -1, _GROUP).mul_(scales[..., None]).view(width, -1).t()
            found.append(values[row - cut.start * _GROUP :][: end - row].to(self.dtype))
            first += end - row
        return torch.cat(found).view(-1)[start % width :][: stop - start]


def _float(stored: Tensor) -> Tensor:
    """8-bit floats, or scales, in float32; bytes are the exponents of powers of two."""
    kind = torch.float8_e8m0fnu if stored.dtype is torch.uint8 else stored.dtype
    if kind not in FLOAT8.values():
        return stored.float()
    found = _table(kind).index_select(0, stored.contiguous().view(torch.uint8).view(-1).int())
    return found.view(stored.shape)


@lru_cache
def _table(kind: torch.dtype) -> Tensor:
    """The values of all bytes: looking them up takes a fifth of the time of torch's conversion."""
    return torch.arange(256, dtype=torch.uint8).view(kind).float()


def dequantised(
    label: str, stored: Mapping[str, Tensor], read: Mapping[str, Read], config: Mapping[str, Any], problems: list[str]
) -> tuple[dict[str, Tensor], dict[str, Read], str]:
    """Leaves and how they are read, those in 8-bit floats or MXFP4 as the values that they stand for, and a note.

    Values have the dtype that ``config`` names. Their scales are left out, and so is what only arithmetic in 8 bits
    needs. Errors for weights whose scales are unknown or do not fit go into ``problems``.

    Args: stored: meta tensors by name; read: reads each of them.
    """
    dtype, block = _dtype(config), _block(config)
    leaves, reads, left_out = dict[str, Tensor](), dict[str, Read](), set[str]()
    count = 0
    for name, leaf in stored.items():
        path, value, values = name, leaf, read[name]
        if leaf.dtype in _WEIGHTS and not _unread(name):
            value, values = leaf.to(dtype), Widened(read[name], dtype)
            if (scales := _scales_of(name, stored)) is None:
                problems += _without_scales(label, name, stored, config)
            elif (grid := Grid.of(leaf.shape, stored[scales].shape, block)) is None:
                shapes = f"{tuple(stored[scales].shape)}, its weight {tuple(leaf.shape)}"
                problems.append(f"{label}: {scales!r} has shape {shapes}, which it does not cover in equal blocks")
            else:
                values = Scaled(read[name], read[scales], grid, dtype)
            left_out.add(scales or "")
        elif (powers := _powers_of(name, stored)) is not None:
            path, value = name.removesuffix(_BLOCKS), _unpacked(leaf).to(dtype)
            values = Unpacked(read[name], read[powers], leaf.shape, dtype)
            left_out.add(powers)
        count += value is not leaf
        leaves[path], reads[path] = value, values
    if not count:
        return leaves, reads, ""
    leaves = {path: leaf for path, leaf in leaves.items() if path not in left_out and not _unread(path)}
    told = f"{label} holds {count} quantised parameters, read as {dtype_name(torch.empty(0, dtype=dtype))}"
    return leaves, reads, f"{told}: changes of weights include what their rounding changed"


def _unread(name: str) -> bool:
    """Whether a leaf of a checkpoint with quantised weights is none of its parameters."""
    last = name.rpartition(".")[2]
    return last in _UNREAD or last.endswith(("_input_scale", "_activation_scale"))


def _scales_of(name: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the scales of a weight in 8-bit floats; None where it has none."""
    module, _, last = name.rpartition(".")
    names = [name + end for end in _AFTER] + ([f"{module}.{_OF_COMFY}"] if last == "weight" else [])
    return next((own for own in names if own in leaves), None)


def _without_scales(label: str, name: str, leaves: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[str]:
    """An error for a weight without scales that must have some: a model saved in 8 bits as it is has none."""
    module = f"{name.rpartition('.')[0]}."
    other = next((own for own in leaves if own.startswith(module) and "scale" in own.removeprefix(module)), None)
    if other is not None:
        yield f"{label}: parameter {name!r} is stored in 8-bit floats, and {other!r} is not a known scale: {_WAY_OUT}"
    elif quantised_by(config):
        yield f"{label}: parameter {name!r} is stored in 8-bit floats without a scale: {_WAY_OUT}"


def _powers_of(name: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the powers of two of a weight in MXFP4, as gpt-oss stores its experts; None where it is no such."""
    leaf, powers = leaves[name], leaves.get(own := f"{name.removesuffix(_BLOCKS)}{_POWERS}")
    packed = leaf.dtype is torch.uint8 and leaf.dim() == 4 and 2 * leaf.shape[-1] == _GROUP
    fits = powers is not None and powers.dtype is torch.uint8 and powers.shape == leaf.shape[:-1]
    return own if name.endswith(_BLOCKS) and packed and fits else None


def _unpacked(leaf: Tensor) -> Tensor:
    """A meta tensor in the shape of what `Unpacked` reads."""
    experts, width, groups, _ = leaf.shape
    return leaf.new_empty(experts, groups * _GROUP, width)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    names = [own.get(field) for own in (config, inner or {}) for field in ("dtype", "torch_dtype")]
    found = next((name for name in names if name in ("float32", "float16", "bfloat16")), "bfloat16")
    dtype: torch.dtype = getattr(torch, str(found))
    return dtype


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, as config.json says; None where it does not."""
    own = _configured(config)
    groups = own.get("config_groups")  # of compressed-tensors
    found = [own.get("weight_block_size")]
    found += [(group.get("weights") or {}).get("block_structure") for group in (groups or {}).values()]
    size = next((size for size in found if isinstance(size, list) and len(size) == 2), None)
    return None if size is None else (int(size[0]), int(size[1]))


def _configured(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = next((own for name in CONFIGURED if (own := config.get(name))), None)
    return found if isinstance(found, dict) else {}


def quantised_by(config: Mapping[str, Any]) -> str:
    """The method of quantisation that a config.json names; "" for a model that is not quantised."""
    asked = next((own for name in CONFIGURED if (own := config.get(name))), None)
    return str(asked.get("quant_method", "unknown method") if isinstance(asked, dict) else asked or "")


def refused_by_config(label: str, path: Path, config: Mapping[str, Any]) -> list[str]:
    """An error for a checkpoint whose config.json says that it is quantised in a way that is not read here."""
    method = quantised_by(config)
    field, fine = _FORMATS.get(method, ("", None))
    if not method or method in _FLOATS or (fine and _configured(config).get(field) == fine):
        return []
    return [f"{label}: {path} is quantised ({method}, says its config.json): {_WAY_OUT}"]


def refused(label: str, configs: Mapping[Path, Mapping[str, Any]], leaves: Mapping[str, Tensor]) -> Iterator[str]:
    """An error for a quantised checkpoint, of what `dequantised` leaves; ``configs`` also of its components."""
    told = [text for place, config in configs.items() for text in refused_by_config(label, place, config)]
    if told:
        yield from told
        return
    for name, leaf in leaves.items():
        packed = not leaf.is_floating_point() and name.endswith((".weight", "_blocks"))  # of MLX uint32
        packed |= leaf.dtype in FLOAT8.values()  # exponents of no weight
        if packed or name.rpartition(".")[2] in _OTHERS:
            root = next(iter(configs))
            yield f"{label}: {root} is quantised (it holds parameter {name!r}, {dtype_name(leaf)}): {_WAY_OUT}"
            return
