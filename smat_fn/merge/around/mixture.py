"""Mixtures of experts of dense models (`ARCHITECTURES`): in every layer Σ_i p_i MLP_i(x).

p is the softmax of the largest entries of ``router x``. Attention, norms, embeddings and head are base's. With equal
MLPs the mixture computes what base does, whatever the router: the p_i that count add up to 1. A shared expert, the last
one, adds ``sigmoid(r x) MLP(x)``, r the router's last row. Parameters have the names of checkpoints; what a Qwen2-MoE
has and its models do not is zero: biases, and a shared expert of width 128.

Source: Jiang et al., "Mixtral of experts", 2024; mergekit 0.1.5, moe/mixtral.py, moe/qwen.py and moe/qwen3.py.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import isfinite, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ... import errors, random
from ...tree import compute_dtype, dtype_name
from ..parts.inputs import type_problems

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PARTS = "mlp.gate_proj.weight", "mlp.down_proj.weight", "mlp.up_proj.weight"
_KEPT = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
}
_NORMS = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
_DOWN = ".w2.weight", ".down_proj.weight"
_BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
_AROUND = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Architecture(NamedTuple):
    """A model class of mixtures, and its names in a layer."""

    name: str
    model: str  # class of ``transformers``
    kinds: tuple[str, ...]  # ``model_type`` of the dense models
    block: str
    parts: tuple[str, ...]  # of an expert, in the order of `_PARTS`
    kept: tuple[str, ...] = ()  # what comes from base, beside `_KEPT`
    shared: bool = False  # a layer has an expert that every token goes through, times ``sigmoid(gate x)``


_OWN = tuple(part.removeprefix("mlp.") for part in _PARTS)
MIXTRAL = Architecture(
    "Mixtral", "Mixtral", ("llama", "mistral"), "block_sparse_moe", ("w1.weight", "w2.weight", "w3.weight")
)
QWEN3 = Architecture("Qwen3-MoE", "Qwen3Moe", ("qwen3",), "mlp", _OWN, kept=_NORMS)
QWEN2 = Architecture("Qwen2-MoE", "Qwen2Moe", ("qwen2", "llama", "mistral"), "mlp", _OWN, kept=_BIASES, shared=True)
ARCHITECTURES = MIXTRAL, QWEN3, QWEN2  # of several for one kind of model the first is the default
UNUSED = 128  # width of a shared expert of zeros: quantisers' groups, and devices, divide it


class Origin(NamedTuple):
    """The origin of a parameter of a mixture: base, an expert, the router, or zeros."""

    path: str  # in the dense model; of rows and zeros a parameter of their dtype
    expert: int | None = None
    rows: tuple[int, slice] | None = None  # of the router: layer, experts
    zeros: tuple[int, ...] | None = None  # their shape


def origins(
    base: Mapping[str, Tensor], experts: int, architecture: Architecture, *, shared: bool = False
) -> dict[str, Origin]:
    """The parameters of a mixture by name, in the order of a dense model's, with their origin.

    Args:
        base: parameters of a dense language model as ``transformers`` names them; only names and shapes are read.
        experts: their number, with the shared one.
        architecture: that of the mixture.
        shared: the last expert is shared.

    Raises: ValueError that lists parameters that the mixture has no place for, and a shared expert without one.
    """
    if shared and not (architecture.shared and experts > 1):
        lacks = "there is no other expert" if architecture.shared else f"a {architecture.name} has no shared expert"
        raise ValueError(f"shared is True, and {lacks}: leave it out")
    found, unknown, routed = dict[str, Origin](), list[str](), experts - shared
    parts = dict(zip(_PARTS, architecture.parts, strict=True))
    lacking = () if any(path.endswith(_BIASES) for path in base) else tuple(set(_BIASES) & {*architecture.kept})

    def beside(own: Origin, unused: tuple[int, ...]) -> Origin:
        return own if shared else Origin(own.path, zeros=unused)

    for path, leaf in base.items():
        layer = _LAYER.fullmatch(path)
        part = parts.get(layer[2]) if layer else None
        if layer and part:
            block, number = f"model.layers.{layer[1]}.{architecture.block}", int(layer[1])
            if layer[2] == _PARTS[0]:
                found[f"{block}.gate.weight"] = Origin(path, rows=(number, slice(routed)))
                if architecture.shared:
                    gate = Origin(path, rows=(number, slice(routed, None)))
                    found[f"{block}.shared_expert_gate.weight"] = beside(gate, (1, leaf.shape[1]))
            found |= {f"{block}.experts.{i}.{part}": Origin(path, i) for i in range(routed)}
            if architecture.shared:
                narrow = (leaf.shape[0], UNUSED) if layer[2] == _PARTS[1] else (UNUSED, leaf.shape[1])
                found[f"{block}.shared_expert.{part}"] = beside(Origin(path, routed), narrow)
        elif path in _AROUND or (layer and (layer[2] in _KEPT or layer[2] in architecture.kept)):
            found[path] = Origin(path)
            bias = path.removesuffix("weight") + "bias"
            if bias.endswith(lacking):  # of a Llama
                found[bias] = Origin(path, zeros=(leaf.shape[0],))
        elif not path.endswith("rotary_emb.inv_freq"):  # computed from the configuration
            unknown.append(path)
    way = f"base must be a plain {' or '.join(map(str.capitalize, architecture.kinds))}"
    errors.raise_problems([f"parameter {p!r} has no place in {architecture.name}: {way}" for p in unknown])
    return found


def made(origin: Origin, base: Mapping[str, Tensor], router: Tensor) -> Tensor | None:
    """Rows of the router, or zeros, in base's dtype; None for what comes from a model."""
    dtype = base[origin.path].dtype
    if origin.zeros:
        return torch.zeros((), dtype=dtype, device=router.device).expand(origin.zeros)  # no memory until it is read
    return None if origin.rows is None else router[origin.rows].to(dtype)


def fit_problems(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Errors for MLPs of experts that are not of base's shapes. Only names and shapes are read."""
    layers = [path for path in base if (found := _LAYER.fullmatch(path)) and found[2] in _PARTS]
    known = "model.layers.0.mlp.gate_proj.weight"
    problems = [] if layers else [f"base has no parameter {known!r}: is it a Llama, Mistral, Qwen2 or Qwen3?"]
    for name, leaves in experts.items():
        lacking = [path for path in layers if path not in leaves]
        problems += [f"expert {name!r} lacks parameter {path!r} of base" for path in lacking[:3]]
        problems += [
            f"parameter {path!r} is {tuple(leaves[path].shape)} in expert {name!r} but {tuple(base[path].shape)} in "
            "base"
            for path in layers
            if path in leaves and leaves[path].shape != base[path].shape
        ][:3]
        inside = {path: found[2] for path in leaves if path not in base and (found := _LAYER.fullmatch(path))}
        problems += [
            f"expert {name!r} has parameter {path!r}, which base lacks: models must have as many layers and MLPs of "
            "one kind"
            for path, part in inside.items()
            if part.startswith("mlp.")
        ][:3]
    return problems


class Change(NamedTuple):
    """The change of an expert's MLPs: noise is added, then ``down_proj`` is multiplied."""

    residual: float | None
    noise: float | None


def changes(
    residual_scales: Sequence[float | None], noise_scales: Sequence[float | None], experts: int
) -> list[Change]:
    """The change of every expert; those beyond the lists have none."""
    every = zip_longest(residual_scales, noise_scales, range(experts))
    return [Change(residual, noise) for residual, noise, _ in every]


def change_problems(
    residual_scales: Sequence[float | None], noise_scales: Sequence[float | None], experts: int, key: Tensor | None
) -> list[str]:
    """Errors for scales that are not lists of numbers, at most one for each expert, and for noise without a key."""
    problems = []
    for name, scales in {"residual_scales": residual_scales, "noise_scales": noise_scales}.items():
        if not isinstance(scales, (list, tuple)):
            problems.append(f"{name} is {scales!r}: give a list of numbers, None for an expert as it is")
            continue
        given = [scale for scale in scales if scale is not None]
        found = [text for scale in given for text in type_problems(**{name: scale})]
        problems += found or [f"{name} has {scale}, must be finite" for scale in given if not isfinite(scale)]
        if len(scales) > experts:
            problems.append(f"{name} has {len(scales)} numbers, there are {experts} experts")
    if not problems and any(noise_scales) and key is None:
        problems.append("key is None, and noise_scales need one: give smat_fn.random.key(seed)")
    return problems


def changed(leaf: Tensor, change: Change, key: Tensor | None, path: str, *, start: int = 0) -> Tensor:
    """Coordinates of an expert's parameter, changed in its dtype.

    Args: leaf: flat, from coordinate ``start``; path: in the mixture.
    """
    factor = change.residual if path.endswith(_DOWN) else None
    if not change.noise:
        return leaf if factor is None else leaf * factor
    assert key is not None
    noise = normal(random.fold_in(key, path), start, start + leaf.numel())
    found = leaf.to(compute_dtype(leaf)) + (change.noise * noise).to(leaf.device, compute_dtype(leaf))
    return (found if factor is None else found * factor).to(leaf.dtype)


def router_problems(found: Mapping[str, Origin], base: Mapping[str, Tensor], experts: int, router: Tensor) -> list[str]:
    """Errors for a router that is not of a mixture's shape, or holds values that are not finite."""
    if not isinstance(router, Tensor):
        return [f"router is a {type(router).__name__}, must be a tensor: layers, experts, width"]
    layers = sum(path.endswith(".gate.weight") for path in found)
    first = next((leaf for path, leaf in base.items() if path.endswith("mlp.gate_proj.weight")), None)
    wanted = layers, experts, 0 if first is None else first.shape[1]
    if tuple(router.shape) != wanted or not router.is_floating_point():
        return [
            f"router is {dtype_name(router)} {tuple(router.shape)}, must be floats {wanted}: layers, experts, width"
        ]
    return [] if bool(router.isfinite().all()) else ["router holds values that are NaN or infinite"]


def rows(positive: Tensor, negative: Tensor | None = None) -> Tensor:
    """Router rows of an expert: ``(h⁺ − h⁻) / ‖h⁺ − h⁻‖`` in every layer, in the dtype of ``positive``.

    Args:
        positive: (layers, width), states that the expert is for.
        negative: the same of states that it is not for; default: none.

    Source: mergekit 0.1.5, moe/router.py.
    """
    states = positive if negative is None else positive - negative
    return states / states.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-8)


def random_rows(key: Tensor, shape: Sequence[int], *, uniform: bool) -> Tensor:
    """A router of random rows: standard normal, or ``uniform`` in ±1/√width as a new linear layer has.

    Args: key: int64 (2,); shape: layers, experts, width.
    """
    if uniform:
        edge = shape[-1] ** -0.5
        return random.uniform(key, shape, minval=-edge, maxval=edge)
    return normal(key, 0, prod(shape)).float().reshape(tuple(shape))


def normal(key: Tensor, start: int, stop: int) -> Tensor:
    """Coordinates [start, stop) of a stream of standard normal numbers, float64 (Box and Muller).

    Args: key: int64 (2,).
    """
    size = 1 << 14  # whole chunks from its multiples: a number does not depend on its place in a vector instruction
    keys, found = random.split(key), [torch.empty(0, dtype=torch.float64, device=key.device)]
    for first in range(start - start % size, stop, size):
        words = torch.tensor([0, first // 4], device=key.device)  # a block of a key holds four words
        one, two = (random.uniform(own + words, (size,), dtype=torch.float64) for own in keys)
        found.append((-2 * (1 - one).log()).sqrt() * (2 * torch.pi * two).cos())
    return torch.cat(found)[start % size :][: stop - start]
