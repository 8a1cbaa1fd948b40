"""The factors of LoRA files of diffusers and kohya's scripts without their base, and the tensors of such a file."""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .... import errors
from ....errors import some_of
from ....merge.around.factors import Factors
from . import original_names, products
from .other_tools import ENDS, MLX, Module, like_of, modules_of, open_store, parts_of, scale_of_module, settings_of

WIDER = "the widest dtype of the adapters: give smaller weights, or save an adapter in float32"
WHOLE = "merge whole models instead, merge.py MERGER --base BASE --experts ADAPTERS"
# what loaders and programs with a window read from the header to know the model that a file is for
_KEPT = "ss_base_model_version", "ss_v2", "ss_network_module", "modelspec.architecture", "modelspec.implementation"
_MODEL = "ss_base_model_version", "modelspec.architecture"


class LoraFile(NamedTuple):
    """The factors of a file by module as it names them: of a convolution A is (rank, inputs times kernel)."""

    factors: dict[str, Factors]
    modules: dict[str, Module]
    kernels: dict[str, tuple[int, ...]]  # of convolutions, () of linear layers
    metadata: dict[str, str]


def read_file(label: str, file: Path) -> LoraFile:
    """The factors of a LoRA file of another tool than PEFT, without its base: mapped.

    Raises: ValueError that lists what is broken, unknown, or more than A and B of matrices.
    """
    store, problems = open_store(label, file), list[str]()
    if file.name == MLX or any(name.endswith(".lora_a") for name in store.names):
        raise ValueError(f"{label}: {file} is an adapter of mlx-lm: {WHOLE}")
    modules = modules_of(label, file, store, ENDS)
    settings = settings_of(label, store, modules, problems)
    found = LoraFile({}, {}, {}, store.metadata)
    for module in modules:
        if not products.is_plain(parts_of(module)) or "magnitude" in module.held:
            problems.append(f"{label}: {module.name!r} of {file.name} is not a plain LoRA: {WHOLE}")
            continue
        a, b = (tuple(like_of(store, module.held[half]).shape) for half in "AB")
        if a[0] != b[1] or math.prod(b[2:]) != 1:
            problems.append(f"{label}: A {a} and B {b} of {module.name!r} are not factors of a weight: save it again")
            continue
        with errors.collected(problems):
            left, right = (store.get_tensor(module.held[half]).flatten(1) for half in "AB")
            scale = scale_of_module(label, store, module, settings, None)
            found.factors[module.name] = Factors(left, right, scale)
            found.modules[module.name], found.kernels[module.name] = module, a[2:]
    errors.raise_problems(problems)
    return found


def file_problems(files: Mapping[str, LoraFile]) -> list[str]:
    """Errors for files of different models or tools, by label."""
    problems = []
    for entry in _MODEL:
        told = {label: found.metadata[entry] for label, found in files.items() if entry in found.metadata}
        if len({*told.values()}) > 1:
            named = ", ".join(f"{value!r} in {label}" for label, value in told.items())
            problems.append(f"the headers of adapters have different {entry} ({named}): they are of different models")
    styles = {label: {_style(module) for module in found.modules.values()} for label, found in files.items()}
    if len({style for own in styles.values() for style in own}) > 1:
        named = ", ".join(f"{some_of(sorted(own))} in {label}" for label, own in styles.items())
        problems.append(f"names of tensors are those of different tools ({named}): {WHOLE}")
        return problems
    known = dict[tuple[str, str], str]()
    for module in (own for found in files.values() for own in found.modules.values()):
        flat = original_names.flat(module.path, of_blocks=True)
        for part in [flat, *(part for names in original_names.of_diffusers(flat) for part in names.parts)]:
            if (other := known.setdefault((module.part, part), module.name)) != module.name:
                problems.append(f"{other!r} and {module.name!r} are two names of one module: {WHOLE}")
                return problems
    return problems


def _style(module: Module) -> str:
    """The beginning and the end of a tool's names."""
    start = next((start for start in ("lora_", "lycoris_", "diffusion_model.") if module.name.startswith(start)), "")
    return f"{start}*{module.held['A'].removeprefix(module.name)}"


def merged_file(merged: Mapping[str, Factors], files: Iterable[LoraFile]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file of merged factors, all of scale 1: an alpha, where some file has one, is the rank.

    Raises: ValueError for values beyond the range of the widest dtype.
    """
    files = list(files)
    kind = reduce(torch.promote_types, (half.dtype for own in files for f in own.factors.values() for half in f[:2]))
    stored = dict[str, Tensor]()
    for name, (a, b, _) in merged.items():
        first = next(own for own in files if name in own.modules)
        held, kernel = first.modules[name].held, first.kernels[name]
        stored[held["A"]] = a.to(kind).view(len(a), -1, *kernel)
        stored[held["B"]] = b.to(kind).view(*b.shape, *(1 for _ in kernel))
        if any("alpha" in own.modules[name].held for own in files if name in own.modules):
            stored[f"{name}.alpha"] = torch.tensor(float(len(a)), dtype=kind)
    wide = [path for path, half in stored.items() if not bool(half.isfinite().all())]
    if wide:
        raise ValueError(f"{wide[0]!r} exceeds the range of {kind}, {WIDER}")
    headers = [own.metadata for own in files]
    kept = {entry: value for entry, value in headers[0].items() if entry in _KEPT and _is_in_all(entry, value, headers)}
    return {path: leaf.contiguous().clone() for path, leaf in stored.items()}, {"format": "pt", **kept}


def _is_in_all(entry: str, value: str, headers: Iterable[Mapping[str, str]]) -> bool:
    return all(header.get(entry) == value for header in headers)
