"""Weights in 8-bit floats or MXFP4 are read as the values that they stand for; other quantised ones are errors."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...tree import dtype_name
from .quantised_values import GROUP, Grid, Scaled, Unpacked, Widened
from .stored import FLOAT8, Read

_WEIGHTS = torch.float8_e4m3fn, torch.float8_e5m2
CONFIGURED = "quantization_config", "quantization", "compression_config"  # of MLX; of older compressed-tensors
_FLOATS = "fp8", "fbgemm_fp8", "mxfp4"  # quant_method in config.json
_FORMATS = {  # of several, the field that names it and what is read; int8 of naive-quantized is told by its dtype
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
    "modelopt": ("quant_algo", ("FP8",)),
}
_AFTER = "_scale_inv", "_scale"  # scales have the name of their weights with this: transformers, DeepSeek; vLLM's tools
_OF_COMFY = "scale_weight"  # in the module of the weight
_NUMBERS = (  # last parts of names of single numbers: of activations and of the cache
    *("input_scale", "activation_scale", "scale_input", "output_scale", "input_scale_ub"),
    *("input_zero_point", "output_zero_point", "k_zero_point", "v_zero_point"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"),
)
_MARK, _COMFY = "scaled_fp8", "comfy_quant"  # of ComfyUI: of a whole file, and of a module, as JSON
_HEADER = "_quantization_metadata"  # the formats of all modules, in the header of a file of ComfyUI
_COMFY_FORMATS = "float8_e4m3fn", "float8_e5m2"  # others have their scales in another order
_OF_SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e8m0fnu, torch.uint8)
_BLOCKS, _POWERS = "_blocks", "_scales"  # of MXFP4: packed weights, and a power of two for each 32 of them
_OTHERS = (  # last parts of names of other formats: GPTQ and AWQ, bitsandbytes, compressed-tensors, HQQ
    *("qweight", "qzeros", "g_idx"),
    *("SCB", "absmax", "quant_map", "nested_absmax", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("weight_packed", "weight_scale", "weight_scale_2", "weight_zero_point", "weight_scale_inv", "W_q"),
)
_WAY_OUT = "merge the checkpoint it was made from, or a dequantised copy"


class Values(NamedTuple):
    """Leaves of a checkpoint and how they are read, as in `reading.Folder`."""

    leaves: dict[str, Tensor]
    reads: dict[str, Read]
    note: str = ""
    configured: tuple[str, ...] = ()  # components whose config.json decides values


def dequantised(
    label: str,
    stored: Mapping[str, Tensor],
    read: Mapping[str, Read],
    configs: Mapping[str, Mapping[str, Any]],
    problems: list[str],
) -> Values:
    """Leaves and how they are read, those in 8-bit floats or MXFP4 as the values that they stand for.

    Values have the dtype that their config.json names. Their scales are left out, and so is what only arithmetic in 8
    bits needs. Errors for weights whose scales are unknown or do not fit go into ``problems``.

    Args: stored: meta tensors by name; read: reads each of them; configs: of the model, "", and of its components.
    """
    leaves, reads, left_out = dict[str, Tensor](), dict[str, Read](), set[str]()
    components, like_scales = list[str](), dict[str, list[str]]()
    for name, leaf in stored.items():
        module, _, last = name.rpartition(".")
        if "scale" in last and leaf.dtype not in _WEIGHTS:
            like_scales.setdefault(module, []).append(name)
    for name, leaf in stored.items():
        path, value, values = name, leaf, read[name]
        if leaf.dtype in _WEIGHTS and name.rpartition(".")[2] != _MARK:
            config = configs[_component(configs, name)]
            value = leaf.to(_dtype(config))
            values = Widened(read[name], value.dtype)
            if (scales := _scales_of(name, stored)) is None:
                problems += _without_scales(label, name, stored, like_scales, config)
            else:
                left_out.add(scales)
                if grid := _grid(label, name, stored, scales, config, problems):
                    values = Scaled(read[name], read[scales], grid, value.dtype)
            problems += _other_format(label, name, stored, read)
        elif (powers := _powers_of(name, stored)) is not None:
            path, value = name.removesuffix(_BLOCKS), _unpacked(leaf).to(_dtype(configs[_component(configs, name)]))
            values = Unpacked(read[name], read[powers], leaf.shape, value.dtype)
            left_out.add(powers)
        if path in leaves:
            problems.append(f"{label}: {path!r} is stored twice, once as {name!r}: {_WAY_OUT}")
        if value is not leaf:
            components.append(_component(configs, name))
        leaves[path], reads[path] = value, values
    if not components:
        return Values(leaves, reads)
    leaves = {path: leaf for path, leaf in leaves.items() if path not in left_out and not _is_unread(path, leaf)}
    dtypes = dict.fromkeys(dtype_name(leaf) for path, leaf in leaves.items() if leaf is not stored.get(path))
    several = "s" if len(components) > 1 else ""
    told = f"{label} holds {len(components)} quantised parameter{several}, read as {' and '.join(dtypes)}"
    note = f"{told}: changes of weights include what their rounding changed"
    return Values(leaves, reads, note, tuple(dict.fromkeys(components)))


def _component(configs: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """The prefix of the component that a leaf belongs to."""
    return max((prefix for prefix in configs if name.startswith(prefix)), key=len)


def _is_unread(name: str, leaf: Tensor) -> bool:
    """Whether a leaf beside quantised weights is none of the model's parameters."""
    last = name.rpartition(".")[2]
    number = last in _NUMBERS or last.endswith(("_input_scale", "_activation_scale"))
    return last in (_MARK, _COMFY) or (number and leaf.numel() == 1)


def _scales_of(name: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the scales of a weight in 8-bit floats; None where it has none."""
    module, _, last = name.rpartition(".")
    names = [name + end for end in _AFTER] + ([f"{module}.{_OF_COMFY}"] if last == "weight" else [])
    return next((own for own in names if own in leaves), None)


def _grid(
    label: str,
    name: str,
    leaves: Mapping[str, Tensor],
    scales: str,
    config: Mapping[str, Any],
    problems: list[str],
) -> Grid | None:
    """How the scales of a weight lie over it; None where they do not fit, which is in ``problems`` then."""
    shape, own = leaves[name].shape, leaves[scales]
    if own.dtype not in _OF_SCALES:
        problems.append(f"{label}: {scales!r} is {dtype_name(own)}, scales must be floats or powers of two: {_WAY_OUT}")
        return None
    found = Grid.of(shape, own.shape, _block(config))
    if found is None:
        shapes = f"{tuple(own.shape)}, its weight {tuple(shape)}"
        problems.append(f"{label}: {scales!r} has shape {shapes}, which it does not cover in blocks: {_WAY_OUT}")
    return found


def other_formats(label: str, metadata: Mapping[str, str]) -> Iterator[str]:
    """An error for a file of ComfyUI whose header names formats that are not read here."""
    try:
        layers = json.loads(metadata.get(_HEADER, "{}")).get("layers", {})
        kinds = {str(own.get("format")) for own in layers.values()}
    except (ValueError, AttributeError):
        kinds = {"unknown"}
    if others := sorted(kinds.difference(_COMFY_FORMATS)):
        yield f"{label}: the header of its file says formats {', '.join(others)}, which are not read: {_WAY_OUT}"


def _other_format(label: str, name: str, leaves: Mapping[str, Tensor], read: Mapping[str, Read]) -> Iterator[str]:
    """An error for a module of ComfyUI whose scales lie in another order."""
    mark = f"{name.rpartition('.')[0]}.{_COMFY}"
    if mark in leaves:
        try:
            kind = json.loads(bytes(read[mark](0, leaves[mark].numel()).tolist())).get("format")
        except (ValueError, AttributeError, TypeError):
            kind = None
        if kind not in _COMFY_FORMATS:
            yield f"{label}: {mark!r} says format {kind}, which is not read: {_WAY_OUT}"


def _without_scales(
    label: str,
    name: str,
    leaves: Mapping[str, Tensor],
    scales: Mapping[str, Sequence[str]],
    config: Mapping[str, Any],
) -> Iterator[str]:
    """An error for a weight without known scales that must have some: a model saved in 8 bits as it is has none.

    Args: scales: leaves whose last word contains "scale" and that are no weights in 8 bits, by module.
    """
    module, _, last = name.rpartition(".")
    ends = ((own, own.rpartition(".")[2]) for own in scales.get(module, ()))
    matrix = leaves[name].dim() > 1
    if other := next((own for own, end in ends if last in end or (matrix and end in ("scale", "scales"))), None):
        yield f"{label}: parameter {name!r} is stored in 8-bit floats, and {other!r} is not a known scale: {_WAY_OUT}"
    elif quantised_by(config):
        yield f"{label}: parameter {name!r} is stored in 8-bit floats without a scale: {_WAY_OUT}"


def _powers_of(name: str, leaves: Mapping[str, Tensor]) -> str | None:
    """The name of the powers of two of a weight in MXFP4, as gpt-oss stores its experts; None where it is no such."""
    leaf, powers = leaves[name], leaves.get(own := f"{name.removesuffix(_BLOCKS)}{_POWERS}")
    packed = leaf.dtype is torch.uint8 and leaf.dim() == 4 and 2 * leaf.shape[-1] == GROUP
    fits = powers is not None and powers.dtype is torch.uint8 and powers.shape == leaf.shape[:-1]
    return own if name.endswith(_BLOCKS) and packed and fits else None


def _unpacked(leaf: Tensor) -> Tensor:
    """A meta tensor in the shape of what `Unpacked` reads."""
    experts, width, groups, _ = leaf.shape
    return leaf.new_empty(experts, groups * GROUP, width)


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    names = [own.get(field) for own in _levels(config) for field in ("dtype", "torch_dtype")]
    found = next((name for name in names if name in ("float32", "float16", "bfloat16")), "bfloat16")
    dtype: torch.dtype = getattr(torch, str(found))
    return dtype


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block, as config.json says; None where it does not."""
    own, groups = _settings(config), _settings(config).get("config_groups")  # of compressed-tensors
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)] if _is_dict(groups) else []
    found = [own.get("weight_block_size"), *(scheme.get("block_structure") for scheme in weights if _is_dict(scheme))]
    found = [[int(n) for n in size.split("x")] if _is_product(size) else size for size in found]
    sizes = (size for size in found if isinstance(size, list) and len(size) == 2)
    return next(((a, b) for a, b in sizes if type(a) is type(b) is int and a > 0 and b > 0), None)


def _is_product(found: object) -> TypeGuard[str]:
    return isinstance(found, str) and re.fullmatch(r"\d+x\d+", found) is not None  # of older compressed-tensors


def _is_dict(found: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(found, dict)


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configuration, and that of the language model in it."""
    inner = config.get("text_config")
    return [config, inner] if _is_dict(inner) else [config]


def _asked(config: Mapping[str, Any]) -> Any:
    """The field of a config.json that says how the model is quantised."""
    return next((own for level in _levels(config) for name in CONFIGURED if (own := level.get(name))), None)


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = _asked(config)
    return found if _is_dict(found) else {}


def quantised_by(config: Mapping[str, Any]) -> str:
    """The method of quantisation that a config.json names; "" for a model that is not quantised."""
    found = _asked(config)
    return str(found.get("quant_method", "unknown method") if _is_dict(found) else found or "")


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without what it says of quantisation: weights are written as values."""
    own = {name: value for name, value in config.items() if name not in CONFIGURED}
    return own | ({"text_config": plain_config(own["text_config"])} if _is_dict(own.get("text_config")) else {})


def refused_by_config(label: str, path: Path, config: Mapping[str, Any]) -> list[str]:
    """An error for a checkpoint whose config.json says that it is quantised in a way that is not read here."""
    method, settings = quantised_by(config), _settings(config)
    field, fine = _FORMATS.get(method, ("", ()))
    read = method in _FLOATS or settings.get(field) in fine
    if not method or (read and not settings.get("transform_config")):
        return []
    return [f"{label}: {path} is quantised ({method}, says its config.json): {_WAY_OUT}"]


def refused(label: str, configs: Mapping[Path, Mapping[str, Any]], leaves: Mapping[str, Tensor]) -> Iterator[str]:
    """An error for a quantised checkpoint, of what `dequantised` leaves; ``configs`` also of its components."""
    told = [text for place, config in configs.items() for text in refused_by_config(label, place, config)]
    if told:
        yield from told
        return
    for name, leaf in leaves.items():
        packed = not leaf.is_floating_point() and (  # of MLX uint32
            name.endswith((".weight", "_blocks")) or any(name + end in leaves for end in _AFTER)
        )
        packed |= leaf.dtype in FLOAT8.values()  # exponents of no weight
        if packed or name.rpartition(".")[2] in _OTHERS:
            root = next(iter(configs))
            yield f"{label}: {root} is quantised (it holds parameter {name!r}, {dtype_name(leaf)}): {_WAY_OUT}"
            return
