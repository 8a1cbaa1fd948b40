"""Extract a LoRA adapter: a truncated SVD of expert - base."""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from .. import __version__, checkpoint, errors, machine, tree
from ..merge.around.low_rank import low_rank, remainder, square
from .files import digests
from .inputs.adapters.config import CONFIG, WEIGHTS
from .inputs.adapters.factors import stored_halves
from .inputs.adapters.peft import PREFIX
from .inputs.modules import inside, modules_of, saved, tied
from .inputs.naming import namings
from .inputs.opening import open_inputs
from .inputs.reading import Folder
from .prepare import place_problems
from .writing import exclusive

# text files by name, given the manifest and the files read by label
Texts: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Sequence[Path]]], Mapping[str, str]]


class Extracted(NamedTuple):
    """Report of `extract_lora`: how well the adapter approximates the expert's changes."""

    errors: dict[str, float]  # ‖Δ − B A‖ / ‖Δ‖ of every changed leaf; 0 where it is stored whole, 1 where it is missing
    error: float  # of all of them together
    ranks: dict[str, int]  # of every adapted module; all are stored with the largest
    whole: tuple[str, ...]  # changed leaves that are stored as the expert has them, since they are of no linear layer
    left_out: tuple[str, ...]  # changed leaves that peft has no place for, with ``linear_only`` all without factors
    skipped: tuple[str, ...]  # changed leaves that ``only`` and ``skip`` exclude
    lost: float  # ‖Δ‖ of left_out and skipped over ‖Δ‖ of all changed leaves
    tied: tuple[str, ...]  # adapted leaves that are other modules' too: peft changes those as well only when it merges
    bytes: int
    notes: tuple[str, ...] = ()  # on how base and expert were read


class _Opened(NamedTuple):
    """Base and expert under the names of the module that peft adapts."""

    base: Folder
    expert: Folder
    beside: tuple[Folder, Folder]  # leaves of both that are in further modules, under their stored names
    model: Any  # on the meta device; None for a model that transformers does not know
    excluded: frozenset[str]  # leaves that keep base's values


def extract_lora(
    base: Path,
    expert: Path,
    out: Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    linear_only: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    overwrite: bool = False,
    texts: Texts | None = None,
) -> Extracted:
    """B A = argmin over matrices of rank r of ‖Δ − B A‖_F, for every changed 2-D weight: a folder for peft.

    Δ V Vᵀ, V the eigenvectors of the float64 ΔᵀΔ with the largest eigenvalues; both factors share the singular values,
    float32, scaling 1. Modules that are not linear layers or embeddings (norms, the experts of a mixture) are stored
    whole as ``modules_to_save`` where they changed. All names are those of the module that ``from_pretrained`` makes
    of base. All modules have the largest rank: lower ones are padded with zeros, since llama.cpp reads no patterns. The
    folder is written atomically. Memory: a few times the largest leaf in float32, and ΔᵀΔ of its short side.

    Args:
        base, expert: folders or hub names, leaves of the same names and shapes; expert may be a file or an adapter.
        rank: the largest r, at least 1; a leaf has at most its own.
        energy: in (0, 1): r is the smallest one for which Σ_{i ≤ r} σ_i² ≥ energy · Σ σ_i², and at most ``rank``.
        linear_only: nothing is stored whole: changed leaves without factors are left out.
        only: globs over parameter names, default all: the other parameters keep base's values.
        skip: globs of parameters that keep base's values, those that ``only`` matches too.
        overwrite: replace a folder that exists.
        texts: gives text files by name; default: the manifest alone.
    Raises: ValueError that lists every problem of options and headers; for values that are not finite; if no matrix
        that peft can adapt has changed, as in a model of convolutions; for a pipeline, whose components are models.
    Source: Eckart & Young, 1936; Hu et al., "LoRA", 2022.
    """
    problems = _option_problems(rank, energy)
    problems += place_problems(out, (base, expert), overwrite=overwrite)
    opened = _open(base, expert, only, skip, problems)
    made, stored, config = _extracted(opened, partial(low_rank, rank=rank, energy=energy), linear_only)
    facts = {
        **{"rank": rank, "energy": energy, "linear_only": linear_only, "only": only, "skip": skip},
        **{"left_out": made.left_out, "skipped": made.skipped},
    }
    out = checkpoint.follow(out)
    with exclusive(out):
        checkpoint.sweep(out)  # what a killed call has left
        with checkpoint.atomic_folder(out, overwrite=overwrite) as folder:
            config = {"peft_type": "LORA", "base_model_name_or_path": str(base), **config}
            manifest = _write(folder, stored, config, facts)
            plain = json.dumps(manifest, indent=2) + "\n"
            given = texts(manifest, _files(opened)) if texts else {}
            for file, text in {checkpoint.MANIFEST: plain, **given}.items():
                checkpoint.write_text(folder / file, text)
    return made


def files_read(base: Path, expert: Path) -> dict[str, list[Path]]:
    """The files that an adapter is extracted from, by label. Raises: ValueError for inputs that do not fit."""
    return _files(_open(base, expert, (), (), []))


def _files(opened: _Opened) -> dict[str, list[Path]]:
    return {
        label: sorted({*folder.stores, *filter(Path.is_file, [folder.root / "config.json"])})
        for label, folder in (("base", opened.base), ("expert", opened.expert))
    }


def _extracted(
    opened: _Opened, split: Callable[[Tensor], tuple[Tensor, Tensor]], linear_only: bool
) -> tuple[Extracted, dict[str, Tensor], dict[str, Any]]:
    """The contents of an adapter: the report, its tensors, and the fields of its configuration that depend on them."""
    kinds, modules = modules_of(opened.base, opened.model)
    factors, rests = _factors(opened, split, kinds)
    ranks = {module: left.shape[1] for module, (left, _) in factors.items()}
    base, expert = opened.beside
    sizes = ((path, square(_delta(path, base, expert))) for path in base.leaves)
    rests |= {path: (size, size) for path, size in sizes if size}
    skipped = tuple(path for path in rests if path in opened.excluded)
    lacking = [path for path in rests if path.removesuffix(".weight") not in ranks and path not in skipped]
    _check_changed(opened, lacking, ranks)
    rank = max(ranks.values())
    stored = {path: half for m, own in factors.items() for path, half in _named(m, *own, kinds[m], rank).items()}
    kept = set[str]() if linear_only else saved([path for path in lacking if path not in base.leaves], ranks)
    # peft reads all leaves of such a module, changed or not
    for path in opened.base.leaves:
        if inside(path, kept):
            stored[path] = (opened.base if path in opened.excluded else opened.expert).leaf(path)
    whole = tuple(path for path in lacking if inside(path, kept))
    left_out = tuple(path for path in lacking if path not in whole)
    rests |= {path: (0.0, rests[path][1]) for path in whole}
    rest, size = (sum(pair[i] for pair in rests.values()) for i in (0, 1))
    lost = sum(rests[path][1] for path in (*left_out, *skipped))
    report = Extracted(
        errors={path: math.sqrt(own / norm) for path, (own, norm) in rests.items()},
        error=math.sqrt(rest / size) if size else 0.0,
        ranks=ranks,
        whole=whole,
        left_out=left_out,
        skipped=skipped,
        lost=math.sqrt(lost / size) if size else 0.0,
        tied=() if opened.model is None else tied(opened.model, ranks),
        bytes=sum(tensor.nbytes for tensor in stored.values()),
        notes=tuple(filter(None, (base.note, expert.note))),
    )
    config = _config(ranks, rank, kept, modules)
    config["fan_in_fan_out"] = any(kinds[module] == "conv1d" for module in ranks)
    return report, stored, config


def _option_problems(rank: int | None, energy: float | None) -> list[str]:
    problems = [] if rank is None or rank >= 1 else [f"rank is {rank}, must be at least 1"]
    if rank is None and energy is None:
        problems.append("neither `rank` nor `energy` is given: give `rank=16`, or `energy=0.95`, or both")
    if energy is not None and not 0 < energy < 1:
        problems.append(
            f"energy is {energy}, must lie in (0, 1): it is the share of the squared norm of a change that factors hold"
        )
    return problems


def _open(base: Path, expert: Path, only: Sequence[str], skip: Sequence[str], problems: list[str]) -> _Opened:
    """Base and expert by their headers. Raises: ValueError that lists ``problems`` and those of the inputs."""
    if Path(base).is_file():
        problems.append(
            f"base is {base}, a single file, whose parameter names need not be those of modules that peft adapts: give "
            "a folder with config.json that from_pretrained loads, and an expert of the same names (diffusers: write "
            "both by from_single_file and save_pretrained, and give a component such as unet/)"
        )
    start, found = open_inputs(base, {"expert": expert}, "error", problems, options=False)
    if start is None:
        errors.raise_problems(problems)
        raise AssertionError("its absence is a problem")
    beside, naming = list[str](), next(namings(start), None)
    with errors.collected(problems):
        beside = _of_modules(start)

    def seen(folder: Folder) -> Folder:
        inner = folder.without(*beside)
        return inner if naming is None else naming.seen(inner)

    view, excluded = seen(start), frozenset[str]()
    with errors.collected(problems):
        leaves = {**view.leaves, **{path: start.leaves[path] for path in beside}}
        excluded = _excluded([path for path, leaf in leaves.items() if leaf.is_floating_point()], only, skip)
    errors.raise_problems(problems)
    end = found["expert"]
    both = tuple(folder._replace(leaves={path: folder.leaves[path] for path in beside}) for folder in (start, end))
    return _Opened(view, seen(end), (both[0], both[1]), None if naming is None else naming.model, excluded)


def _excluded(names: Sequence[str], only: Sequence[str], skip: Sequence[str]) -> frozenset[str]:
    """Names that no glob of ``only`` matches, or one of ``skip`` does.

    Raises: ValueError that lists globs without a match; if there is no name, or none is left.
    """
    if not names:
        raise ValueError("base has no floating-point parameters: there is nothing to extract")
    problems = [
        f"`{option}={glob!r}` matches no parameter of base: give a glob over names such as {names[0]}"
        for option, globs in (("only", only), ("skip", skip))
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in names)
    ]
    wanted = {name for name in names if not only or any(fnmatchcase(name, glob) for glob in only)}
    left = {name for name in wanted if not any(fnmatchcase(name, glob) for glob in skip)}
    if not left and not problems:
        problems.append("`skip` matches every parameter that `only` leaves: give narrower globs")
    errors.raise_problems(problems)
    return frozenset(names) - left


def _check_changed(opened: _Opened, lacking: Sequence[str], ranks: Mapping[str, int]) -> None:
    """Raises: ValueError for an adapter without factors."""
    base, expert = opened.base.root, opened.expert.root
    among = " among those of `only` and `skip`" if opened.excluded else ""
    if not ranks and not lacking:
        way = "give another expert" + (" or other globs" if among else "")
        raise ValueError(f"no weight of {expert} differs from {base}{among}: an adapter would be empty, {way}")
    if not ranks:
        raise ValueError(
            f"none of the {len(lacking)} weights of {expert} that differ from base{among} (first: {lacking[0]}) is of "
            "a linear layer or embedding, and peft loads no adapter without one: publish the expert itself"
        )


def _of_modules(base: Folder) -> list[str]:
    """The leaves of further modules of sentence-transformers, which are not in the model that peft adapts."""
    prefixes = tuple(filter(None, base.outputs))
    found = [path for path in base.leaves if path.startswith(prefixes)] if prefixes else []
    if len(found) == len(base.leaves):
        raise ValueError(f"{base.root} holds its weights in {', '.join(prefixes)}: give one of them, and the expert's")
    return found


def _factors(
    opened: _Opened, split: Callable[[Tensor], tuple[Tensor, Tensor]], kinds: Mapping[str, str]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, tuple[float, float]]]:
    """The factors of all changed matrices of modules that peft can adapt.

    Returns: (left, right) of Δ = left @ right by module; ‖Δ − B A‖² and ‖Δ‖² of every changed leaf.
    """
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    rests: dict[str, tuple[float, float]] = {}
    for path, leaf in opened.base.leaves.items():
        delta = _delta(path, opened.base, opened.expert) if leaf.is_floating_point() else None
        if delta is None or not bool(delta.any()):
            continue
        module, _, last = path.rpartition(".")
        if path in opened.excluded or last != "weight" or module not in kinds or leaf.ndim != 2:
            rests[path] = (size := square(delta)), size
            continue
        factors[module] = left, right = split(delta)
        rests[path] = remainder(delta, left, right), square(delta)
    return factors, rests


def _write(
    folder: Path, stored: Mapping[str, Tensor], config: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Write tensors and configuration. Returns: the manifest."""
    tensors = {PREFIX + name: tensor.contiguous().clone() for name, tensor in stored.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    checkpoint.write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    hashes = {file.name: digest for file, digest in digests([folder / CONFIG, folder / WEIGHTS], 1).items()}
    versions = {"smat_fn": __version__}
    return {"adapter": "extracted", **facts, "code": machine.code(), "versions": versions, "files": hashes}


def _config(modules: Collection[str], rank: int, kept: Collection[str], every: Sequence[str]) -> dict[str, Any]:
    # peft takes every module whose path ends with such a name
    unique = (name if sum(other.endswith(name) for other in every) == 1 else PREFIX + name for name in kept)
    return {
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(modules),
        "modules_to_save": sorted(unique) or None,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }


def _named(module: str, left: Tensor, right: Tensor, kind: str, rank: int) -> dict[str, Tensor]:
    """The factors of Δ = left @ right under peft's names, padded with zeros to a rank."""
    more = rank - left.shape[1]
    left, right = pad(left, (0, more)), pad(right, (0, 0, 0, more))
    a, b = (right, left) if kind == "linear" else (left.T, right.T)
    return stored_halves(module, a, b, embedding=kind == "embedding")


def _delta(path: str, base: Folder, expert: Folder) -> Tensor:
    delta = expert.leaf(path).float() - base.leaf(path).float()
    if not tree.is_finite(delta):
        raise ValueError(
            f"parameter {path!r} holds values that are NaN or infinite in base or the expert: nothing is written"
        )
    return delta
