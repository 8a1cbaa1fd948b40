"""Merge folders of any size without holding a model in memory, and check later what was merged."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from .. import checkpoint, random, tree
from ..config import MergerConfig, Semantics, settings
from ..merge.stream import Options, Plan, Report, merge_folders, open_folder, plan, prepare
from .streaming_card import streaming_card
from .training import refusals

CARD = "README.md"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Order(NamedTuple):
    """What is to be merged, the same for every merger."""

    base: Path
    experts: Mapping[str, Path]  # by task, or by the folder's name
    manifests: Mapping[str, Mapping[str, Any]]  # of the experts; empty where there is none
    out: Path
    seed: int  # of random masks
    coefs: Mapping[str, float]  # γ by glob, instead of the configurations'
    semantics: Semantics
    options: Options


def order(
    base: Path,
    experts: Sequence[Path],
    *,
    out: Path,
    seed: int,
    coefs: Mapping[str, float] | None = None,
    semantics: Semantics = "paper",
    **options: Unpack[Options],
) -> Order:
    """Experts by name, the same names that a merge in memory gives them, so that random masks are the same.

    Raises: ValueError that lists experts of one name and experts of another base.
    """
    named: dict[str, Path] = {}
    manifests: dict[str, Mapping[str, Any]] = {}
    own, problems = _manifest(base).get("fingerprint"), []
    for path in experts:
        manifest = _manifest(path)
        name = manifest.get("task", path.name)
        if name in named:
            problems.append(f"{path}: there is another expert named {name!r}: give each once, or rename its folder")
        if own is not None and manifest.get("base_fingerprint", own) != own:
            problems.append(f"{path} was trained from another base than {base}")
        named[name], manifests[name] = path, manifest
    tree.raise_problems(problems)
    return Order(base, named, manifests, out, seed, coefs or {}, semantics, options)


def stream_run(configs: Sequence[MergerConfig], order: Order) -> Iterator[tuple[Path, Report]]:
    """Merge by each merger into ``out/<merger>``, with a manifest and a card: `merge_folders`. Yields what is done.

    Raises: ValueError that lists all problems of all mergers before any merging; later as `merge_folders`.
    """
    _check(configs, order)
    for config in configs:

        def describe(files: Sequence[Path], report: Report, config: MergerConfig = config) -> dict[str, str]:
            return _texts(config, order, files, report)

        folder = order.out / config.name
        options = _options(config, order)
        yield folder, merge_folders(config, order.base, order.experts, folder, describe=describe, **options)


def plan_run(configs: Sequence[MergerConfig], order: Order) -> dict[Path, Plan]:
    """What `stream_run` would need; nothing is written. Raises: as `stream_run` does before any merging."""
    _check(configs, order)
    folders = {order.out / config.name: config for config in configs}
    return {
        folder: plan(config, order.base, order.experts, folder, **_options(config, order))
        for folder, config in folders.items()
    }


def verify(path: Path) -> tuple[int, list[str]]:
    """Hash again what the manifest of a merged model names. Returns: the number of files, and all that differs.

    Args: path: its folder, or its card. Raises: ValueError for a folder without a manifest.
    """
    folder = path if path.is_dir() else path.parent
    manifest = checkpoint.load_manifest(folder)
    if "files" not in manifest:  # merged in memory
        same = checkpoint.fingerprint(checkpoint.load_leaves(folder)[0]) == manifest.get("fingerprint")
        return 1, [] if same else [f"{folder / checkpoint.WEIGHTS} has not the weights that were written"]
    named = {folder / file: print_ for file, print_ in manifest["files"].items()}
    for source in manifest["inputs"].values():
        named |= {Path(file): print_ for file, print_ in source.items()}
    found = {file: _sha256(file) if file.is_file() else None for file in named}
    return len(named), [
        f"{file} is missing" if found[file] is None else f"{file} has changed: SHA-256 {found[file]}, it was {print_}"
        for file, print_ in named.items()
        if found[file] != print_
    ]


def bytes_of(size: str) -> int:
    """ "5GB", "200MB", "4KB" or a number of bytes. Raises: ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", size.strip().upper())
    if not found:
        raise ValueError(f"size {size!r} is none: write 5GB, 200MB or a number of bytes")
    return int(float(found[1]) * _UNITS.get(found[2] or "", 1))


def _check(configs: Sequence[MergerConfig], order: Order) -> None:
    problems: list[str] = []
    for config in configs:
        options = _options(config, order)
        if hasattr(config, "coef") and config.coef is None and not order.coefs:
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
            options["coef"] = 1.0
        for text in refusals(prepare, config, order.base, order.experts, order.out / config.name, **options):
            problems += text.split("; ")
    tree.raise_problems(list(dict.fromkeys(problems)))  # all mergers have the same inputs


def _options(config: MergerConfig, order: Order) -> Options:
    options = Options(**order.options)
    options["key"] = mask_key(order.seed)
    if order.coefs and hasattr(config, "coef"):
        options["coef"] = order.coefs
    return options


def mask_key(seed: int) -> Tensor:
    """The key of random masks, as a merge in memory makes it."""
    return random.fold_in(random.key(seed), "merge")


def _texts(config: MergerConfig, order: Order, files: Sequence[Path], report: Report) -> dict[str, str]:
    """Manifest and card of a merged model."""
    work = files[0].parent
    first = next(iter(order.manifests.values()))
    labels = dict.fromkeys(manifest.get("label", name) for name, manifest in order.manifests.items())
    coefs = {"coefs": dict(order.coefs)} if "coef" in _options(config, order) else {}
    manifest = checkpoint.describe(
        _mapped(work),
        kind="merged",
        merger=config.name,
        hyperparameters={**settings(config), **coefs},
        semantics=order.semantics,
        out_dtype=order.options.get("out_dtype", "same"),
        label="+".join(labels),
        seed=first.get("seed", order.seed),
        merge_seed=order.seed,
        suite=first.get("suite"),
        base_fingerprint=checkpoint.fingerprint(_mapped(report.inputs["base"][0].parent)),
        experts={name: manifest.get("fingerprint") for name, manifest in order.manifests.items()},
        dev={},
        dev_curve=[],
        density=report.density,
        rounding_ratio=report.rounding_ratio if math.isfinite(report.rounding_ratio) else None,
        notes=list(report.notes),
        files={str(file.relative_to(work)): _sha256(file) for file in files},
        inputs={name: {str(file.absolute()): _sha256(file) for file in files} for name, files in report.inputs.items()},
    )
    return {checkpoint.MANIFEST: json.dumps(manifest, indent=2, allow_nan=False) + "\n", CARD: streaming_card(manifest)}


def _mapped(folder: Path) -> dict[str, Tensor]:
    """The leaves of a checkpoint, mapped: no memory is taken."""
    opened = open_folder(str(folder), folder)
    return {path: opened.read(path, 0, leaf.numel()).view(leaf.shape) for path, leaf in opened.leaves.items()}


def _manifest(path: Path) -> dict[str, Any]:
    """The manifest of train.py or merge.py; nothing for other folders, whatever their file of this name is."""
    found: Any = checkpoint.load_manifest(path) if (path / checkpoint.MANIFEST).exists() else {}
    return found if isinstance(found, dict) and "kind" in found else {}


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
