"""Mixtures of experts (Mixtral, Qwen3-MoE) of dense models: base's attention, every expert's MLP, a router a layer."""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from ... import errors, random, tree
from ...tree import dtype_name
from ...types import Params
from ..parts.inputs import Experts, type_problems

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_PARTS = "mlp.gate_proj.weight", "mlp.down_proj.weight", "mlp.up_proj.weight"
_KEPT = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
}
_NORMS = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
_AROUND = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Architecture(NamedTuple):
    """A model class of mixtures, and its names in a layer."""

    name: str
    model: str  # class of ``transformers``
    kinds: tuple[str, ...]  # ``model_type`` of the dense models
    block: str
    parts: tuple[str, ...]  # of an expert, in the order of `_PARTS`
    kept: tuple[str, ...] = ()  # what comes from base, beside `_KEPT`


MIXTRAL = Architecture(
    "Mixtral", "Mixtral", ("llama", "mistral"), "block_sparse_moe", ("w1.weight", "w2.weight", "w3.weight")
)
QWEN3 = Architecture(
    "Qwen3-MoE", "Qwen3Moe", ("qwen3",), "mlp", tuple(part.removeprefix("mlp.") for part in _PARTS), kept=_NORMS
)
ARCHITECTURES = MIXTRAL, QWEN3


def architecture_of(paths: Iterable[str]) -> Architecture:
    """The architecture of a mixture of models with these parameters: Qwen3 normalises queries and keys."""
    return QWEN3 if any(path.endswith(_NORMS) for path in paths) else MIXTRAL


class Origin(NamedTuple):
    """The origin of a parameter of a mixture: base, an expert, or the router."""

    path: str  # in the dense model; of a router the layer's number
    expert: int | None = None  # None: base, or the router
    router: bool = False


def origins(paths: Iterable[str], experts: int) -> dict[str, Origin]:
    """The parameters of a mixture by name, in the order of a dense model's, with their origin.

    Args:
        paths: parameters of base, a Llama, Mistral or Qwen3 language model as ``transformers`` names them.
        experts: their number N.

    Raises: ValueError that lists parameters that the mixture has no place for.
    """
    found, unknown, paths = dict[str, Origin](), list[str](), list(paths)
    architecture = architecture_of(paths)
    parts = dict(zip(_PARTS, architecture.parts, strict=True))
    for path in paths:
        layer = _LAYER.fullmatch(path)
        part = parts.get(layer[2]) if layer else None
        if layer and part:
            block = f"model.layers.{layer[1]}.{architecture.block}"
            if layer[2] == _PARTS[0]:
                found[f"{block}.gate.weight"] = Origin(layer[1], router=True)
            found |= {f"{block}.experts.{i}.{part}": Origin(path, i) for i in range(experts)}
        elif path in _AROUND or (layer and (layer[2] in _KEPT or layer[2] in architecture.kept)):
            found[path] = Origin(path)
        elif not path.endswith("rotary_emb.inv_freq"):  # computed from the configuration
            unknown.append(path)
    errors.raise_problems(
        [
            f"parameter {p!r} has no place in {architecture.name}: base must be a plain {_either(architecture)}"
            for p in unknown
        ]
    )
    return found


def fit_problems(base: Mapping[str, Tensor], experts: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Errors for MLPs of experts that are not of base's shapes. Only names and shapes are read."""
    layers = [path for path in base if (found := _LAYER.fullmatch(path)) and found[2] in _PARTS]
    known = "model.layers.0.mlp.gate_proj.weight"
    problems = [] if layers else [f"base has no parameter {known!r}: is it a Llama, Mistral or Qwen3?"]
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


def mixture(
    base: Params, experts: Experts, router: Tensor, *, residual_scales: Sequence[float | None] = ()
) -> dict[str, Tensor]:
    """A mixture of experts: in every layer ``Σ_i p_i MLP_i(x)``, p the softmax of the largest entries of ``router x``.

    Attention, norms, embeddings and head are base's. With equal MLPs the mixture computes what base does, whatever the
    router: the p_i that count add up to 1.

    Args:
        base: tree of a Llama, Mistral or Qwen3 language model.
        experts: {name: tree} or a list of N trees, of which the MLPs are read.
        router: (layers, N, width), a row for each expert (`rows`).
        residual_scales: a factor of each expert's ``down_proj``; None: 1.

    Returns:
        A flat tree of base's dtypes, in the names of ``MixtralForCausalLM``'s checkpoints, of a Qwen3 in those of
        ``Qwen3MoeForCausalLM``.

    Raises:
        ValueError: lists parameters without a place in the mixture, and experts and routers of other shapes.

    Source: Jiang et al., "Mixtral of experts", 2024; mergekit 0.1.5, moe/mixtral.py and moe/qwen3.py.
    """
    start = tree.flatten(base)
    if not isinstance(experts, (Mapping, list, tuple)) or not experts:
        raise ValueError(f"experts are {experts!r}: give a mapping {{name: tree}} or a list of trees, at least one")
    named = experts if isinstance(experts, Mapping) else {str(i): own for i, own in enumerate(experts)}
    flat = {str(name): tree.flatten(own) for name, own in named.items()}
    found, every = origins(start, len(flat)), list(flat.values())
    problems = [*fit_problems(start, flat), *router_problems(found, start, len(flat), router)]
    problems += scale_problems(residual_scales, len(flat))
    errors.raise_problems(problems)
    scales = [*residual_scales, *[None] * (len(flat) - len(residual_scales))]

    def leaf(origin: Origin) -> Tensor:
        if origin.router:
            dtype = start[f"model.layers.{origin.path}.mlp.gate_proj.weight"].dtype
            return router[int(origin.path)].to(dtype)
        if origin.expert is None:
            return start[origin.path].detach().clone()
        scaled_by = scales[origin.expert] if "down_proj" in origin.path else None
        return scaled(every[origin.expert][origin.path].detach(), scaled_by).to(start[origin.path].dtype, copy=True)

    return {path: leaf(origin) for path, origin in found.items()}


def _either(architecture: Architecture) -> str:
    return " or ".join(kind.capitalize() for kind in architecture.kinds)


def scale_problems(scales: Sequence[float | None], experts: int) -> list[str]:
    """Errors for residual_scales that are not a list of numbers, at most one for each expert."""
    if not isinstance(scales, (list, tuple)):
        return [f"residual_scales is {scales!r}: give a list of numbers, None for 1"]
    problems = [text for scale in scales if scale is not None for text in type_problems(residual_scales=scale)]
    if not problems:
        problems = [f"residual_scales has {s}, must be finite" for s in scales if s is not None and not isfinite(s)]
    if len(scales) > experts:
        problems.append(f"residual_scales has {len(scales)} numbers, there are {experts} experts")
    return problems


def scaled(leaf: Tensor, factor: float | None) -> Tensor:
    """A leaf times a factor, in its dtype."""
    return leaf if factor is None else leaf * factor


def router_problems(found: Mapping[str, Origin], base: Mapping[str, Tensor], experts: int, router: Tensor) -> list[str]:
    """Errors for a router that is not of a mixture's shape, or holds values that are not finite."""
    if not isinstance(router, Tensor):
        return [f"router is a {type(router).__name__}, must be a tensor: layers, experts, width"]
    layers = sum(origin.router for origin in found.values())
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
    one, two = random.split(key)
    radius = (-2 * (1 - random.uniform(one, shape, dtype=torch.float64)).log()).sqrt()  # Box and Muller
    return (radius * (2 * torch.pi * random.uniform(two, shape, dtype=torch.float64)).cos()).float()
