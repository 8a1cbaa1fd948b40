"""The adapters of a model as a flat tree, and the weights they stand for."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real

import torch
from torch import Tensor, nn

from .. import errors, random, tree
from ..execution import unrounded
from ..where import block_linear

A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"
IN_PROJ = ".in_proj_weight"  # of nn.MultiheadAttention


@dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and how these are scaled."""

    paths: tuple[str, ...]  # of the weights, each ending in ".weight" or ".in_proj_weight"
    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False  # scale by alpha / sqrt(rank) instead of alpha / rank
    transposed: frozenset[str] = frozenset()  # paths of weights stored (in, out), as GPT-2's Conv1D
    saved: tuple[str, ...] = ()  # paths of leaves that are trained whole beside adapters, PEFT's modules_to_save
    dropout: float = 0.0  # of the adapters' inputs (`with_dropout`); here for PEFT's file alone

    def __post_init__(self) -> None:
        named = {"paths": self.paths, "saved": self.saved}
        texts = [
            f"{name} is {own!r}: give a tuple of paths"
            for name, own in named.items()
            if isinstance(own, str) or not isinstance(own, Iterable)
        ]
        errors.raise_problems(texts, "lora")
        problems = [] if self.paths else ["no matrices: name at least one"]
        problems += [
            f"{path!r} is not the weight of a layer" for path in self.paths if not path.endswith((WEIGHT, IN_PROJ))
        ]
        if not (isinstance(self.rank, int) and self.rank >= 1):
            problems.append(f"rank is {self.rank}, must be an integer of at least 1")
        if not (isinstance(self.alpha, Real) and math.isfinite(self.alpha) and self.alpha > 0):
            problems.append(f"alpha is {self.alpha!r}, must be a positive and finite number")
        both = sorted({*self.paths}.intersection(self.saved))
        problems += [f"{path!r} is in paths and in saved: give it adapters or train it whole" for path in both]
        fine = isinstance(self.dropout, Real) and 0 <= self.dropout < 1
        problems += [] if fine else [f"dropout is {self.dropout!r}, must lie in [0, 1)"]
        errors.raise_problems(problems, "lora")

    @property
    def scaling(self) -> float:
        """s in ``W_0 + s B A``."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def layer_of(path: str) -> str:
    """The layer that a weight's adapters are named after; that of an ``in_proj_weight`` is the attention itself."""
    return path.removesuffix(WEIGHT) if path.endswith(WEIGHT) else path.removesuffix(IN_PROJ)


def texts_of(name: str, given: Iterable[str]) -> tuple[str, ...]:
    """Several texts. Raises: ValueError for one text, which would be read letter by letter."""
    if isinstance(given, str):
        raise ValueError(f"{name} is the text {given!r}: give a list, [{given!r}]")
    return tuple(given)


def linear_paths(module: nn.Module, targets: Iterable[str] = ()) -> tuple[tuple[str, ...], frozenset[str]]:
    """(paths, those stored transposed) of the 2-D weights of linear layers inside blocks, in the module's order.

    An ``nn.MultiheadAttention`` is one layer, whose ``in_proj_weight`` has adapters. Its output projection has none:
    PEFT 0.21.2 ignores adapters of that layer, and merges those that belong to the attention twice.

    Args:
        targets: names of layers ("q_proj") or globs over layer paths ("model.layers.1.*"), none: all.

    Raises:
        ValueError: lists targets without a matrix, and attentions whose q, k and v differ in width.
    """
    inside, wanted = block_linear(module), texts_of("targets", targets)
    kinds = dict(module.named_modules())
    attentions = {name for name, kind in kinds.items() if isinstance(kind, nn.MultiheadAttention)}
    layers = {
        path: owner if (owner := path.rpartition(".")[0]) in attentions else layer_of(path)
        for path, leaf in module.named_parameters()
        if leaf.ndim == 2 and inside(path, leaf)
    }
    layers = {path: layer for path, layer in layers.items() if layer.rpartition(".")[0] not in attentions}

    def fits(layer: str, target: str) -> bool:
        return layer.rpartition(".")[2] == target or fnmatchcase(layer, target)

    chosen = [p for p, layer in layers.items() if not wanted or any(fits(layer, target) for target in wanted)]
    problems = [
        f"target {target!r} fits no linear layer of a block"
        for target in wanted
        if not any(fits(layer, target) for layer in layers.values())
    ]
    split = sorted({layers[path] for path in chosen if not path.endswith((WEIGHT, IN_PROJ))})
    problems += [
        f"attention {layer!r} has weights of their own for q, k and v, which PEFT does not adapt: name other targets"
        for layer in split
    ]
    errors.raise_problems(problems)
    transposed = frozenset(path for path in chosen if type(kinds[layers[path]]).__name__ == "Conv1D")
    return tuple(chosen), transposed


def whole_paths(module: nn.Module, names: Iterable[str], adapted: Iterable[str] = ()) -> tuple[str, ...]:
    """The parameters of modules that are trained whole beside adapters, as PEFT's ``modules_to_save``.

    Args: names: last parts of module paths ("lm_head", "embed_tokens") or globs over them; adapted: `Lora.paths`.
    Raises: ValueError that lists names of no module, of modules whose parameters belong to others too (PEFT would untie
        them), of modules inside one another, and of those that have adapters inside.
    """
    modules = {name: own for name, own in module.named_modules() if name}
    chosen: dict[str, tuple[str, ...]] = {}
    owners: dict[int, list[str]] = {}
    for path, leaf in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(leaf), []).append(path)
    problems = []
    for name in texts_of("names", names):
        found = [path for path in modules if path.rpartition(".")[2] == name or fnmatchcase(path, name)]
        problems += [] if found else [f"module {name!r} is not there: name one of the model's, as lm_head"]
        for path in found:
            own = dict(modules[path].named_parameters(prefix=path))
            shared = sorted({other for leaf in own.values() for other in owners[id(leaf)]} - set(own))
            problems += [f"module {path!r} shares its weights with {', '.join(shared)}: leave it out"] if shared else []
            problems += [] if own else [f"module {path!r} has no parameters: leave it out"]
            inside = [other for other in adapted if other in own]
            problems += [f"module {path!r} has adapters inside ({inside[0]}): train one or the other"] if inside else []
            chosen[path] = tuple(own)
    problems += [
        f"module {path!r} is inside {other!r}: name one of them"
        for path in chosen
        for other in chosen
        if path.startswith(f"{other}.")
    ]
    errors.raise_problems(problems)
    return tuple(path for own in chosen.values() for path in own)


def init(key: Tensor, base: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Adapters at the start of training: A uniform on ``+-1/sqrt(in)``, B zero, so that ``W_0 + s B A = W_0``.

    Returns: leaves ``<layer>.lora_A.weight`` (rank, in) and ``<layer>.lora_B.weight`` (out, rank) in the dtype and on
        the device of the weight; A by ``fold_in(key, path)``; copies of the leaves of ``lora.saved``.
        Source: Hu et al., 2021; PEFT's initialisation.
    Raises: ValueError that lists weights that the base lacks, that are not matrices, or smaller than the rank.
    """
    problems = []
    for path in lora.paths:
        leaf = base.get(path)
        if leaf is None:
            problems.append(f"the base has no leaf {path!r}")
        elif leaf.ndim != 2 or min(leaf.shape) < lora.rank:
            problems.append(f"leaf {path!r} of shape {tuple(leaf.shape)} has no adapter of rank {lora.rank}")
    problems += [f"the base has no leaf {path!r}" for path in lora.saved if path not in base]
    errors.raise_problems(problems)
    adapters = {}
    for path in lora.paths:
        leaf, layer = base[path], layer_of(path)
        out, into = reversed(leaf.shape) if path in lora.transposed else leaf.shape
        drawn = (2 * random.uniform(random.fold_in(key, path), (lora.rank, into)) - 1) / math.sqrt(into)
        adapters[layer + A] = drawn.to(leaf.device, leaf.dtype)  # divided where the key is: a GPU rounds otherwise
        adapters[layer + B] = torch.zeros(out, lora.rank, dtype=leaf.dtype, device=leaf.device)
    return {**adapters, **{path: base[path].clone() for path in lora.saved}}


def names_of(lora: Lora) -> list[str]:
    """The leaves of the adapters of ``lora``: A and B of each layer, and the leaves that are trained whole."""
    return [*(layer_of(path) + half for path in lora.paths for half in (A, B)), *lora.saved]


def expand(adapters: Mapping[str, Tensor], base: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The adapted weights ``W_0 + s B A``, differentiable in the adapters.

    Arithmetic in float32 (float64 stays float64), one rounding to the weight's dtype.

    Returns: the leaves of ``lora.paths`` and ``lora.saved`` alone.
    Raises: ValueError as `check_fit`.
    """
    check_fit(adapters, base, lora)
    merged = {path: adapters[path].to(base[path].dtype) for path in lora.saved}
    for path in lora.paths:
        delta = delta_of(adapters, path, base[path], lora)
        merged[path] = (base[path].to(delta.dtype) + delta).to(base[path].dtype)
    return merged


def check_fit(adapters: Mapping[str, Tensor], base: Mapping[str, Tensor], lora: Lora) -> None:
    """Raises: ValueError that lists leaves that adapters and base lack, and adapters of another shape or rank."""
    named = *lora.paths, *lora.saved
    absent = [f"the base has no leaf {path!r}" for path in named if path not in base]
    errors.raise_problems(absent + [f"adapters lack leaf {name!r}" for name in names_of(lora) if name not in adapters])
    errors.raise_problems(_unlike(adapters, base, lora))


def _unlike(adapters: Mapping[str, Tensor], base: Mapping[str, Tensor], lora: Lora) -> list[str]:
    way = "is it of another base, or does lora.transposed not name just the Conv1D layers?"
    problems = []
    for path in lora.paths:
        down, up = (tuple(adapters[layer_of(path) + half].shape) for half in (A, B))
        if not (len(down) == len(up) == 2 and down[0] == up[1] == lora.rank):
            problems.append(
                f"A and B of {path!r} have shapes {down} and {up}, of rank {lora.rank} they are ({lora.rank}, in) and "
                f"(out, {lora.rank}): give the Lora that they were made for"
            )
            continue
        shape = up[0], down[1]
        shape, wanted = shape[::-1] if path in lora.transposed else shape, tuple(base[path].shape)
        problems += [f"B A of {path!r} has shape {shape}, base {wanted}: {way}"] if shape != wanted else []
    return problems


def delta_of(adapters: Mapping[str, Tensor], path: str, leaf: Tensor, lora: Lora) -> Tensor:
    """``s B A`` of a weight ``leaf``, laid out as it is, in float32 (float64 for one in float64)."""
    kind, layer = tree.compute_dtype(leaf), layer_of(path)
    with unrounded(leaf.device):
        delta = lora.scaling * (adapters[layer + B].to(kind) @ adapters[layer + A].to(kind))
    return delta.T if path in lora.transposed else delta
