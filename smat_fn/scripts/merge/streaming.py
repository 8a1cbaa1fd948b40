"""Merge folders of any size without holding a model in memory, and check later what was merged."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from torch import Tensor

from ... import checkpoint, errors, random
from ...config import MergerConfig, Semantics, settings
from ...errors import problems_of
from ...folders import SHARD_SIZE, Options, Plan, Report, merge_folders, open_folder, plan, prepare
from ...folders.writing import copied, exclusive
from .finished import differences, digests, is_merged, verify
from .inputs import manifest_of, named
from .streaming_card import streaming_card

__all__ = ["Order", "bytes_of", "mask_key", "order", "plan_run", "stream_run", "verify"]

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
    folders: dict[str, Path] = {}
    manifests: dict[str, Mapping[str, Any]] = {}
    own, problems = manifest_of(base).get("fingerprint"), []
    for given, path in map(named, experts):
        manifest = manifest_of(path)
        name = given or manifest.get("task", path.name)
        if name in folders:
            problems.append(f"{path}: there is another expert named {name!r}: give each once, or name it: NAME={path}")
        if own is not None and manifest.get("base_fingerprint", own) != own:
            problems.append(f"{path} was trained from another base than {base}")
        folders[name], manifests[name] = path, manifest
    errors.raise_problems(problems)
    return Order(base, folders, manifests, out, seed, coefs or {}, semantics, options)


def stream_run(configs: Sequence[MergerConfig], order: Order) -> Iterator[tuple[Path, Report | None]]:
    """Merge by each merger into ``out/<merger>``, with a manifest and a card: `merge_folders`. Yields what is done.

    A folder that holds this very merge stays as it is, once all of its files and of its inputs are hashed again: it is
    yielded with None. Not so with ``overwrite``.

    Raises: ValueError that lists all problems of all mergers before any merging; later as `merge_folders`.
    """
    kept = _check(configs, order)
    for config in configs:
        if config in kept:
            with exclusive(order.out / config.name):  # the lock of a merge that was killed at its end goes
                yield order.out / config.name, None
            continue

        def describe(files: Sequence[Path], report: Report, config: MergerConfig = config) -> dict[str, str]:
            return _texts(config, order, files, report)

        folder = order.out / config.name
        options = _options(config, order)
        yield folder, merge_folders(config, order.base, order.experts, folder, describe=describe, **options)


def plan_run(configs: Sequence[MergerConfig], order: Order) -> dict[Path, Plan | None]:
    """What `stream_run` would need, None for a merge that is done; nothing is written. Raises: as `stream_run` does."""
    kept = _check(configs, order)
    return {
        order.out / config.name: None
        if config in kept
        else plan(config, order.base, order.experts, order.out / config.name, **_options(config, order))
        for config in configs
    }


def bytes_of(size: str) -> int:
    """ "5GB", "200MB", "4KB" or a number of bytes. Raises: ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", size.strip().upper())
    if not found:
        raise ValueError(f"size {size!r} is none: write 5GB, 200MB or a number of bytes")
    return int(float(found[1]) * _UNITS.get(found[2] or "", 1))


def _check(configs: Sequence[MergerConfig], order: Order) -> list[MergerConfig]:
    """The mergers whose merge is done already. Raises: as `stream_run` before any merging."""
    problems, kept = list[str](), list[MergerConfig]()
    for config in configs:
        folder = order.out / config.name
        if folder.exists() and not order.options.get("overwrite"):
            if not (others := _other_merge(config, order, folder)):
                kept.append(config)
                continue
            problems += [f"{folder} holds another merge: {others[0]}"] if is_merged(folder) else []
        options = _options(config, order)
        if hasattr(config, "coef") and config.coef is None and not order.coefs:
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
            options["coef"] = 1.0
        for text in problems_of(prepare, config, order.base, order.experts, order.out / config.name, **options):
            problems += text.split("; ")
    errors.raise_problems(list(dict.fromkeys(problems)))  # all mergers have the same inputs
    return kept


def _other_merge(config: MergerConfig, order: Order, folder: Path) -> list[str]:
    """Why ``folder`` does not hold this very merge, in words."""
    if found := differences(folder, _settings(config, order)):
        return found
    try:
        job, _ = prepare(config, order.base, order.experts, folder, **_options(config, order) | {"overwrite": True})
    except ValueError as error:
        return [str(error)]
    manifest = checkpoint.load_manifest(folder)
    folders = job.base, *job.experts.values()
    read = {opened.label: sorted(str(file.absolute()) for file in opened.stores) for opened in folders}
    if read != {name: sorted(files) for name, files in manifest["inputs"].items()}:
        return ["it was made of other files"]
    names = [str(file.relative_to(job.base.root)) for file in copied(job.base.root)]
    changed = [
        f"its {name} is not base's"
        for name in names
        if not (folder / name).is_file() or (folder / name).read_bytes() != (job.base.root / name).read_bytes()
        if (name, job.dtype is None) != ("config.json", False)
    ]
    return changed or verify(folder, workers=order.options.get("workers", 1))[1]


def _settings(config: MergerConfig, order: Order) -> dict[str, Any]:
    """What decides the bytes of a merge beside its inputs."""
    coefs = {"coefs": dict(order.coefs)} if "coef" in _options(config, order) else {}
    return {
        "merger": config.name,
        "hyperparameters": {**settings(config), **coefs},
        "semantics": order.semantics,
        "out_dtype": order.options.get("out_dtype", "same"),
        "merge_seed": order.seed,
        "shard_size": order.options.get("shard_size", SHARD_SIZE),
        "vocabulary": order.options.get("vocabulary", "error"),
        "device": order.options.get("device", "cpu"),
    }


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
    workers = order.options.get("workers", 1)
    base = report.inputs["base"][0].parent
    with ThreadPoolExecutor(1) as pool:  # hashing lets go of the interpreter
        fingerprint = pool.submit(lambda: checkpoint.fingerprint(_mapped(base)))
        read = digests([*files, *(file for named in report.inputs.values() for file in named)], workers)
    manifest = checkpoint.describe(
        _mapped(work),
        kind="merged",
        **_settings(config, order),
        label="+".join(labels),
        seed=first.get("seed", order.seed),
        suite=first.get("suite"),
        base_fingerprint=fingerprint.result(),
        experts={name: manifest.get("fingerprint") for name, manifest in order.manifests.items()},
        dev={},
        dev_curve=[],
        density=report.density,
        rounding_ratio=report.rounding_ratio if math.isfinite(report.rounding_ratio) else None,
        notes=list(report.notes),
        files={str(file.relative_to(work)): read[file] for file in files},
        inputs={name: {str(file.absolute()): read[file] for file in files} for name, files in report.inputs.items()},
    )
    return {checkpoint.MANIFEST: json.dumps(manifest, indent=2, allow_nan=False) + "\n", CARD: streaming_card(manifest)}


def _mapped(folder: Path) -> dict[str, Tensor]:
    """The leaves of a checkpoint, mapped: no memory is taken."""
    opened = open_folder(str(folder), folder)
    return {path: opened.read(path, 0, leaf.numel()).view(leaf.shape) for path, leaf in opened.leaves.items()}
