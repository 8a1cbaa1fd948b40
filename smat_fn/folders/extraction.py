"""Extract a LoRA adapter: a truncated SVD of expert - base."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .. import __version__, checkpoint, errors
from .files import digests
from .inputs.adapters import CONFIG, PREFIX, WEIGHTS, stored_halves
from .inputs.naming import namings
from .inputs.opening import open_inputs
from .inputs.reading import Folder, config_of
from .prepare import place_problems
from .writing import exclusive

ROWS = 4096  # of a matrix that are in float64 at a time
_EMBEDDINGS = "embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings", "embed_positions", "embed_in"
_CONV1D = "c_attn", "c_proj", "c_fc", "q_attn"  # GPT-2's, whose weights are (in, out)


class Extracted(NamedTuple):
    """Report of `extract_lora`: how well the adapter approximates the expert's changes."""

    errors: dict[str, float]  # ‖Δ − B A‖ / ‖Δ‖ of every changed leaf; 0 where it is stored whole
    error: float  # of all of them together
    whole: tuple[str, ...]  # changed leaves that are stored as the expert has them, since they are of no linear layer
    left_out: tuple[str, ...]  # changed leaves that peft has no place for: biases of adapted layers, other modules
    tied: tuple[str, ...]  # adapted leaves that are other modules' too: peft changes those as well only when it merges
    bytes: int


def extract_lora(base: Path, expert: Path, out: Path, *, rank: int, overwrite: bool = False) -> Extracted:
    """B A = argmin over matrices of rank ``rank`` of ‖Δ − B A‖_F, for every changed 2-D weight: a folder for peft.

    Δ V Vᵀ, V the eigenvectors of the float64 ΔᵀΔ with the largest eigenvalues; both factors share the singular values,
    float32, scaling 1. Modules that are not linear layers or embeddings (norms, the experts of a mixture) are stored
    whole as ``modules_to_save`` where they changed. All names are those of the module that ``from_pretrained`` makes
    of base. The folder is written atomically. Memory: a few times the largest leaf in float32, and ΔᵀΔ of its
    short side.

    Args: base, expert: folders or hub names, leaves of the same names and shapes; rank: at least 1; a leaf has at most
        its own.
    Raises: ValueError that lists every problem of options and headers; for values that are not finite; if no matrix
        that peft can adapt has changed, as in a model of convolutions; for a pipeline, whose components are models.
    Source: Eckart & Young, 1936; Hu et al., "LoRA", 2022.
    """
    problems = [] if rank >= 1 else [f"rank is {rank}, must be at least 1"]
    problems += place_problems(out, (base, expert), overwrite=overwrite)
    start, found = open_inputs(base, {"expert": expert}, "error", problems, options=False)
    errors.raise_problems(problems)
    assert start is not None
    beside = _of_modules(start)
    naming = next(namings(start), None)
    pair = [folder.without(*beside) for folder in (start, found["expert"])]
    base_leaves, expert_leaves = pair if naming is None else map(naming.seen, pair)
    kinds, modules = _modules(base_leaves, None if naming is None else naming.model)
    stored, rests, ranks = _factors(base_leaves, expert_leaves, rank, kinds)
    others = [path for path in rests if path.removesuffix(".weight") not in ranks]
    sizes = ((path, _square(_delta(path, start, found["expert"]))) for path in beside)
    rests |= {path: (size, size) for path, size in sizes if size}
    if not rests:
        raise ValueError(f"no weight of {expert} differs from {base}: an adapter would be empty, give another expert")
    if not ranks:
        raise ValueError(
            f"none of the {len(rests)} weights of {expert} that differ from base (first: {next(iter(rests))}) is of a "
            "linear layer or embedding, and peft loads no adapter without one: publish the expert itself"
        )
    saved = _saved(others, ranks)
    # peft reads all leaves of such a module, changed or not
    for path in base_leaves.leaves:
        if _inside(path, saved):
            stored[path] = expert_leaves.leaf(path)
            if path in rests:
                rests[path] = 0.0, rests[path][1]
    whole = tuple(path for path in rests if _inside(path, saved))
    left_out = tuple(path for path in rests if path not in whole and path.removesuffix(".weight") not in ranks)
    config = _config(base, rank, ranks, saved, modules)
    config["fan_in_fan_out"] = any(kinds[module] == "conv1d" for module in ranks)
    out = checkpoint.follow(out)
    with exclusive(out):
        checkpoint.sweep(out)  # what a killed call has left
        _write(out, stored, config, left_out, overwrite)
    rest, size = (sum(sizes[i] for sizes in rests.values()) for i in (0, 1))
    return Extracted(
        {path: math.sqrt(rest / size) for path, (rest, size) in rests.items()},
        math.sqrt(rest / size) if size else 0.0,
        whole,
        left_out,
        () if naming is None else _tied(naming.model, ranks),
        sum(tensor.nbytes for tensor in stored.values()),
    )


def _of_modules(base: Folder) -> list[str]:
    """The leaves of further modules of sentence-transformers, which are not in the model that peft adapts."""
    prefixes = tuple(filter(None, base.outputs))
    found = [path for path in base.leaves if path.startswith(prefixes)] if prefixes else []
    if len(found) == len(base.leaves):
        raise ValueError(f"{base.root} holds its weights in {', '.join(prefixes)}: give one of them, and the expert's")
    return found


def _factors(
    base: Folder, expert: Folder, rank: int, kinds: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, tuple[float, float]], dict[str, int]]:
    """The factors of all changed matrices of modules that peft can adapt.

    Returns: tensors as peft names them; ‖Δ − B A‖² and ‖Δ‖² of every changed leaf; ranks of the adapted modules.
    """
    stored: dict[str, Tensor] = {}
    rests: dict[str, tuple[float, float]] = {}
    ranks: dict[str, int] = {}
    for path, leaf in base.leaves.items():
        delta = _delta(path, base, expert) if leaf.is_floating_point() else None
        if delta is None or not bool(delta.any()):
            continue
        module, _, last = path.rpartition(".")
        if last != "weight" or module not in kinds or leaf.ndim != 2:
            rests[path] = (size := _square(delta)), size
            continue
        left, right = low_rank(delta, rank)
        rests[path] = _rest(delta, left, right), _square(delta)
        ranks[module] = left.shape[1]
        stored |= _named(module, left, right, kinds[module])
    return stored, rests, ranks


def _write(
    out: Path, stored: Mapping[str, Tensor], config: Mapping[str, Any], left_out: Sequence[str], overwrite: bool
) -> None:
    with checkpoint.atomic_folder(out, overwrite=overwrite) as folder:
        tensors = {PREFIX + name: tensor.contiguous().clone() for name, tensor in stored.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        checkpoint.write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        hashes = {file.name: digest for file, digest in digests([folder / CONFIG, folder / WEIGHTS], 1).items()}
        manifest = {
            "adapter": "extracted", "rank": config["r"], "left_out": left_out, "versions": {"smat_fn": __version__},
            "files": hashes,
        }  # fmt: skip
        checkpoint.write_text(folder / checkpoint.MANIFEST, json.dumps(manifest, indent=2) + "\n")


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(left, right) float32, (rows, r) and (r, columns), r = min(rank, rows, columns): the nearest product."""
    if matrix.shape[0] < matrix.shape[1]:
        left, right = low_rank(matrix.T, rank)
        return right.T, left.T
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64)
    for rows in matrix.split(ROWS):
        gram.addmm_(rows.double().T, rows.double())
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -min(rank, matrix.shape[1]) :].flip(1)
    left = torch.cat([rows.double() @ vectors for rows in matrix.split(ROWS)])
    # an eigenvalue is the square of a length, and less exact
    share = left.square().sum(0).sqrt_().sqrt_()
    return (left / share.where(share > 0, 1)).float(), (vectors * share).T.float()


def _config(
    base: Path, rank: int, ranks: Mapping[str, int], saved: Collection[str], modules: Sequence[str]
) -> dict[str, Any]:
    low = [module for module, r in ranks.items() if r < rank]
    # peft takes the first expression that a module's path ends with, so that longer ones must come first
    named = [module for module in ranks if any(f".{module}".endswith(f".{own}") for own in low)]
    lower = {module: ranks[module] for module in sorted(named, key=len, reverse=True)}
    # peft takes every module whose path ends with such a name
    unique = (name if sum(other.endswith(name) for other in modules) == 1 else PREFIX + name for name in saved)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": lower,
        "alpha_pattern": lower,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted(unique) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _modules(folder: Folder, model: Any) -> tuple[dict[str, str], list[str]]:
    """Modules that peft can adapt, each with its kind, and the names of all modules: by type, else by their names."""
    if model is None:
        modules = sorted({path.rpartition(".")[0] for path in folder.leaves} - {""})
        gpt2 = str(config_of(folder.root).get("model_type", "")).startswith(("gpt2", "openai-gpt", "imagegpt"))
        kinds = {}
        for module in modules:
            last = module.rpartition(".")[2]
            kinds[module] = "embedding" if last in _EMBEDDINGS else "conv1d" if gpt2 and last in _CONV1D else "linear"
        return kinds, modules
    from transformers.pytorch_utils import Conv1D

    found = dict(model.named_modules())
    kinds = {}
    for name, module in found.items():
        # peft looks up tokens as a plain embedding does, and would merge an attention's own projection twice
        if isinstance(found.get(name.rpartition(".")[0]), nn.MultiheadAttention):
            continue
        if isinstance(module, nn.Embedding):
            if type(module).forward is nn.Embedding.forward or hasattr(module, "embed_scale"):
                kinds[name] = "embedding"
        elif isinstance(module, Conv1D | nn.Linear):
            kinds[name] = "conv1d" if isinstance(module, Conv1D) else "linear"
    return kinds, [name for name in found if name]


def _saved(others: Sequence[str], adapted: Collection[str]) -> set[str]:
    """The modules of leaves that no factors hold, to be stored whole, unless adapted ones are among or below them."""
    own = {path.rpartition(".")[0] for path in others} - {""}
    own = {module for module in own if not any(_inside(other, {module}) for other in adapted)}
    return {module for module in own if not _inside(module.rpartition(".")[0], own)}


def _tied(model: Any, adapted: Collection[str]) -> tuple[str, ...]:
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    shared = (name for same in names.values() if len(same) > 1 for name in same)
    return tuple(name for name in shared if name.removesuffix(".weight") in adapted)


def _inside(path: str, modules: Collection[str]) -> bool:
    """Is a module or a leaf one of these modules, or below one?"""
    parts = path.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))


def _named(module: str, left: Tensor, right: Tensor, kind: str) -> dict[str, Tensor]:
    """The factors of Δ = left @ right under peft's names."""
    a, b = (right, left) if kind == "linear" else (left.T, right.T)
    return stored_halves(module, a, b, embedding=kind == "embedding")


def _delta(path: str, base: Folder, expert: Folder) -> Tensor:
    delta = expert.leaf(path).float() - base.leaf(path).float()
    if not bool(delta.isfinite().all()):
        raise ValueError(
            f"parameter {path!r} holds values that are NaN or infinite in base or the expert: nothing is written"
        )
    return delta


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _rest(delta: Tensor, left: Tensor, right: Tensor) -> float:
    parts = zip(delta.split(ROWS), left.split(ROWS), strict=True)
    return sum(_square(part.double() - rows.double() @ right.double()) for part, rows in parts)
