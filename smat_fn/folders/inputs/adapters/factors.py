"""The factors of LoRA adapters of PEFT without their base, and factors as tensors to store."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .... import errors
from ....merge.around.factors import Factors
from ..stored import empty_problems
from .config import MERGED, WEIGHTS, WHOLE, WIDER
from .peft import IN_MEMORY, PARTS, PREFIX, bare_name, opened_folder, weights_of


class Held(NamedTuple):
    """An adapter's factors of every module, and what its configuration says of all of them."""

    factors: dict[str, Factors]  # by module, without peft's prefix
    embeddings: frozenset[str]  # modules that are embeddings
    parameters: frozenset[str]  # modules whose matrix is ``in_proj_weight``
    under: dict[str, Tensor]  # by name in the file: weights below factors, which peft stores of embeddings and heads
    config: dict[str, Any]
    note: str = ""  # as `Folder.note`


def read_adapter(label: str, path: Path) -> Held:
    """The factors of a LoRA adapter, without its base: mapped.

    Raises: ValueError that lists what is broken, unknown, or more than A and B of matrices.
    """
    config, store, scale, problems, _, note = opened_folder(label, path)
    halves: dict[tuple[str, bool], dict[str, str]] = {}
    others: dict[str, list[str]] = {}
    parts = PARTS | IN_MEMORY
    for name in store.names:
        if ending := next((ending for ending in parts if name.endswith(ending)), None):
            part, embedding = parts[ending]
            module = bare_name(name.removesuffix(ending))
            halves.setdefault((module, embedding), {})[part] = name
        else:
            kind = re.search(r"\.(lora|token_adapter|modules_to_save).*", name)
            others.setdefault(kind[0] if kind else name.rpartition(".")[2], []).append(name)
    held = {name: leaf for name in store.names if (leaf := store.header(name)) is not None}
    errors.raise_problems(empty_problems(f"{label}: {path}", held))
    whole = not config.get("ensure_weight_tying")  # a tied head is merged with its embeddings, in whole models
    below = {f"{module}.base_layer.weight" for module, embedding in halves if embedding or whole}
    under = {
        PREFIX + bare_name(name): store.get_tensor(name)
        for name in others.get("weight", ())
        if bare_name(name) in below
    }
    others["weight"] = [name for name in others.get("weight", ()) if bare_name(name) not in below]
    problems += [
        f"{label}: {weights_of(path).name} holds {name!r}{f' and {len(more)} more of its kind' if more else ''}, which "
        f"is not a factor of a matrix: {WHOLE}"
        for name, *more in filter(None, others.values())
    ]
    if not halves and not problems:
        problems.append(f"{label}: {weights_of(path)} holds no factors: is it an adapter?")
    found = dict[str, Factors]()
    for (module, _), names in halves.items():
        if len(names) < 2:
            problems.append(f"{label}: {next(iter(names.values()))!r} has no other factor in {WEIGHTS}: save it again")
            continue
        a, b = store.get_tensor(names["A"]), store.get_tensor(names["B"])
        if not (a.is_floating_point() and b.is_floating_point() and a.ndim == b.ndim == 2 and len(a) == b.shape[1]):
            shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)}"
            problems.append(
                f"{label}: {shapes} of {module!r} are not factors of a matrix, convolutions are not read here: {MERGED}"
            )
        elif scale is not None:
            with errors.collected(problems):
                found[module] = Factors(a, b, scale(module, len(a)))
    errors.raise_problems(problems)
    parameters = (str(name).removesuffix(".in_proj_weight") for name in config.get("target_parameters") or ())
    embeddings = frozenset(module for module, embedding in halves if embedding)
    return Held(found, embeddings, frozenset(parameters), under, config, note)


def stored_halves(module: str, a: Tensor, b: Tensor, *, embedding: bool) -> dict[str, Tensor]:
    """A and B of a module under the names that peft stores them as, without `PREFIX`."""
    names = (ending for ending, (_, of_embedding) in PARTS.items() if of_embedding == embedding)
    return {module + ending: half for ending, half in zip(names, (a, b), strict=True)}


def stored_as(kind: torch.dtype, factors: Factors, rank: int) -> tuple[Tensor, Tensor]:
    """A and B of a product of scale 1, padded with zeros to a rank, in a dtype.

    In 16 bits both get about the same largest value, by a power of two, since an SVD leaves one with small values.
    """
    a, b = pad(factors.a, (0, 0, 0, rank - factors.rank)), pad(factors.b, (0, rank - factors.rank))
    sizes = float(a.abs().max()), float(b.abs().max())
    if kind.itemsize == 2 and min(sizes) > 0:
        power = 2.0 ** round(math.log2(sizes[0] / sizes[1]) / 2)
        a, b = a / power, b * power
    return a.to(kind).contiguous().clone(), b.to(kind).contiguous().clone()


def check_range(stored: Mapping[str, Tensor], kind: torch.dtype) -> None:
    """Raises: ValueError for values that the dtype cannot hold."""
    wide = [path for path, half in stored.items() if not bool(half.isfinite().all())]
    if wide:
        raise ValueError(f"{wide[0]!r} exceeds the range of {kind}, {WIDER}")
