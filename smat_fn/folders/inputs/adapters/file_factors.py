"""The factors of LoRA files of diffusers and kohya's scripts without their base, and the tensors of such a file."""

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import errors
from ....errors import some_of
from ....merge.around.factors import Factors
from . import original_names, products
from .config import WHOLE
from .factors import check_range, stored_as
from .other_tools import (
    ENDS,
    MLX,
    SETTINGS,
    Module,
    like_of,
    modules_of,
    open_store,
    parts_of,
    scale_of_module,
    settings_of,
)

# what programs read from the header to know the model that a file is for
_KEPT = "ss_base_model_version", "ss_v2", "ss_network_module", "modelspec.architecture", "modelspec.implementation"
_DOTTED = r"(?:unet|transformer|prior|diffusion_model|text_encoder)(?=[_\d]*\.)"
_START = re.compile(rf"lora_(?:unet|transformer|te)|lycoris_|{_DOTTED}")


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
    modules = modules_of(label, file, store, ENDS, "remove it, or merge the models that these adapters make")
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
    """Errors for names of different tools, which would be different modules here. Args: files: by label."""
    modules = [own for found in files.values() for own in found.modules.values()]
    starts = {module.name: (_START.match(module.name) or [""])[0] for module in modules}
    of_denoisers = {*starts.values()} - {"lora_te", "text_encoder"}
    if len(of_denoisers) > 1 or len({start.startswith(("lora_", "lycoris_")) for start in starts.values()}) > 1:
        shown = {label: some_of({starts[name] + "*": 0 for name in found.modules}) for label, found in files.items()}
        named = ", ".join(f"{own} in {label}" for label, own in shown.items())
        return [f"names of tensors are those of different tools ({named}): {WHOLE}"]
    known = dict[tuple[str, str], str]()
    for module in modules:
        flat = original_names.flat(module.path, of_blocks=True)
        for part in [flat, *(part for names in original_names.of_diffusers(flat) for part in names.parts)]:
            if (other := known.setdefault((module.part, part), module.name)) != module.name:
                return [f"{other!r} and {module.name!r} are two names of one module: {WHOLE}"]
    return []


def header_notes(files: Mapping[str, LoraFile]) -> Iterator[str]:
    """Notes on files whose headers name different models, as different tools do. Args: files: by label."""
    for entry in _KEPT:
        told = {label: found.metadata[entry] for label, found in files.items() if entry in found.metadata}
        if len({*told.values()}) > 1:
            named = ", ".join(f"{value!r} in {label}" for label, value in told.items())
            yield f"the headers have different {entry} ({named}): left out, make sure that all are of one model"


def merged_file(
    merged: Mapping[str, Factors], files: Collection[LoraFile], rank: int
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and header of a file of merged factors, all of one rank and of scale 1, by alphas or settings if any.

    One rank, and an alpha for every module or for none: diffusers 0.42.1 reads other files with wrong scales.

    Raises: ValueError for values beyond the range of the widest dtype.
    """
    kind = reduce(torch.promote_types, (half.dtype for own in files for f in own.factors.values() for half in f[:2]))
    with_settings = any(SETTINGS in own.metadata for own in files)
    with_alphas = any("alpha" in module.held for own in files for module in own.modules.values()) and not with_settings
    stored = dict[str, Tensor]()
    for name, factors in merged.items():
        first = next(own for own in files if name in own.modules)
        held, kernel = first.modules[name].held, first.kernels[name]
        a, b = stored_as(kind, factors, rank)
        stored[held["A"]], stored[held["B"]] = a.view(rank, -1, *kernel), b.view(*b.shape, *(1 for _ in kernel))
        if with_alphas:
            stored[f"{name}.alpha"] = torch.tensor(float(rank))
    check_range(stored, kind)
    header = {"format": "pt"} | _agreed([own.metadata for own in files])
    if with_settings:
        modules = {name: own.modules[name] for own in files for name in merged if name in own.modules}
        header[SETTINGS] = json.dumps(_settings(modules.values(), rank))
    return stored, header


def _agreed(headers: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Entries on the model on which all headers agree."""
    first, *others = headers
    return {
        entry: first[entry]
        for entry in _KEPT
        if entry in first and all(header.get(entry) == first[entry] for header in others)
    }


def _settings(modules: Iterable[Module], rank: int) -> dict[str, Any]:
    """The settings of peft for each component, as diffusers writes them into the header."""
    paths = dict[str, list[str]]()
    for module in modules:
        paths.setdefault(f"{module.part}." if module.part else "", []).append(module.path)
    same = {"r": rank, "lora_alpha": rank, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False}
    return {
        start + name: value
        for start, own in paths.items()
        for name, value in {**same, "target_modules": sorted(own)}.items()
    }
