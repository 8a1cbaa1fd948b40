"""Merge on disk: folders of any size, without holding a model in memory."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import torch

from ... import checkpoint, errors
from ...config import MergerConfig, Semantics, settings
from ...errors import problems_of
from ...folders import (
    SHARD_SIZE,
    Options,
    Part,
    Plan,
    Report,
    Waiting,
    merge_folders,
    merge_part,
    part_of,
    plan,
)
from ...folders.files import Hashing, shared, size_text
from ...folders.inputs import hub
from ...folders.inputs.adapters.peft import is_adapter
from ...folders.inputs.opening import open_input
from ...folders.inputs.side_files import template_text
from ...folders.inputs.stacks import stack_parts
from ...folders.multi_task import open_several, prepared
from ...folders.writing import exclusive, tidy
from ...merge import lines_rules
from ...merge.parts.masked import of_all_tasks
from .. import outcome
from ..manifests import by_other_code, manifest_of, rewritten_meanwhile
from ..recipes.own import BESIDE, OWN, written
from ..recipes.places import placed_by_name
from .experts.given import by_name
from .experts.inputs import depth_problems, facts_of, mask_key
from .experts.origin import base_problems, name_problems
from .provenance.card import card, library_of, licenses_of, rounding
from .provenance.fingerprints import expert_prints, fingerprints_of
from .provenance.finished import differences, hashes, is_merged, other_inputs, seconds_to_hash, texts


class Order(NamedTuple):
    """Inputs, output and settings that all mergers of a call share."""

    base: Path
    experts: Mapping[str, Path]  # by task, or by the folder's name
    manifests: Mapping[str, Mapping[str, Any]]  # of the experts; empty where there is none
    out: Path
    seed: int  # of random masks
    coefs: Mapping[str, float]  # γ by glob, instead of the configurations'
    semantics: Semantics
    options: Options
    part: Part | None = None  # merge this one only
    searched: Mapping[str, Mapping[str, Any]] = MappingProxyType({})  # by merger, facts of a search by an outside score


def order(
    base: Path,
    experts: Sequence[Path] | Mapping[str, Path],
    *,
    out: Path,
    seed: int,
    coefs: Mapping[str, float] | None = None,
    semantics: Semantics = "paper",
    part: Part | None = None,
    based: bool = True,
    **options: Unpack[Options],
) -> Order:
    """Experts by name, the same names that a merge in memory gives them, so that random masks are the same.

    Args: based: some merger of the call takes differences from base, so that trained experts must be of base.
    Raises: ValueError that lists experts of one name and, if ``based``, experts of another base.
    """
    found, problems = by_name(base, experts, manifest_of(base).get("fingerprint"), based=based)
    folders, manifests = {name: path for name, path, _ in found}, {name: own for name, _, own in found}
    of_base = {name: path for name, path in folders.items() if based or is_adapter(path)}
    problems += base_problems(base, of_base, manifests)
    errors.raise_problems(problems)
    if (template := options.get("chat_template")) not in (None, "auto"):
        options["chat_template"] = template_text(str(template))  # which the manifest names, not the file
    return Order(base, folders, manifests, out, seed, coefs or {}, semantics, options, part)


def by_depth(base: Path, configs: Sequence[MergerConfig], lines: tuple[float, float]) -> dict[str, float]:
    """LiNeS as coefficients by glob: those of the mergers, times factors from ``lines[0]`` to ``lines[1]`` by block.

    Raises: ValueError that lists mergers whose vector has no coefficient, several coefficients, a base without blocks.
    """
    problems = depth_problems(configs, lines)
    coefs = {config.coef for config in configs if hasattr(config, "coef")}
    if None in coefs:
        problems.append("--lines multiplies a coefficient: pass --coef, or --search for one on dev")
    paths = list[str]()
    with errors.collected(problems):
        leaves = open_input("base", base).leaves
        paths = [path for path, leaf in leaves.items() if leaf.is_floating_point()]
        lines_rules(paths, low=0.0, high=1.0)
    errors.raise_problems(problems)
    (coef,) = coefs
    return lines_rules(paths, low=coef * lines[0], high=coef * lines[1])


def stream_run(
    configs: Sequence[MergerConfig], order: Order, hashing: Hashing | None = None
) -> Iterator[tuple[Path, Report | Waiting | None]]:
    """Merge by each merger into ``out/<merger>``, with manifest and model card (`merge_folders`); a generator.

    Without ``overwrite``, a folder that holds this very merge stays as it is, once its files and its inputs are hashed
    again: it is yielded with None. Of a part (`merge_part`) comes what it waits for, of the last one the report.

    Args: hashing: shared with other work on the same inputs; default: its own.
    Raises: ValueError that lists all problems of all mergers before any merging; later as `merge_folders`.
    """
    origins: dict[tuple[str, ...], str] = {}
    with shared(hashing, order.options.get("workers", 1)) as hashing:
        kept = kept_of(configs, order, hashing)
        for config in configs:
            folder = order.out / config.name
            if config in kept or _is_kept_meanwhile(config, order, hashing):
                with exclusive(folder):  # the lock file of a merge that was killed at its end goes
                    tidy(folder)
                    yield folder, None
                continue
            options, describe = options_of(config, order), partial(_texts, config, order, origins)
            inputs = config, order.base, order.experts, folder
            if order.part is None:
                yield folder, merge_folders(*inputs, describe=describe, hashing=hashing, **options)
            else:
                decided = {"seed": order.seed, **_settings(config, order)}
                yield folder, merge_part(*inputs, order.part, describe=describe, facts=decided, **options)


def plan_run(configs: Sequence[MergerConfig], order: Order, hashing: Hashing | None = None) -> dict[Path, Plan | None]:
    """Memory, disk and time of `stream_run`, None for a merge that is done; nothing is written. Raises: the same."""
    with shared(hashing, order.options.get("workers", 1)) as hashing:
        kept = kept_of(configs, order, hashing)
    return {
        order.out / config.name: None
        if config in kept
        else plan(config, order.base, order.experts, order.out / config.name, **options_of(config, order))
        for config in configs
    }


def run(
    configs: Sequence[MergerConfig],
    order: Order,
    *,
    dry_run: bool,
    push: str | None,
    public: bool,
    hashing: Hashing | None = None,
) -> Iterator[str]:
    """`stream_run`, each model pushed where ``push`` names a repository, or `plan_run`; yields the printed lines."""
    torch.set_num_threads(1)  # of each worker
    if dry_run:
        yield from (plan_text(*planned) for planned in plan_run(configs, order, hashing).items())
        return
    with_push = pushed(push, public=public, count=len(configs))
    for config, merged in zip(configs, stream_run(configs, order, hashing), strict=True):
        yield from summary(config, *merged, order.coefs)
        yield from with_push(merged[0])


def pushed(repository: str | None, *, public: bool, count: int) -> Callable[[Path], Iterable[str]]:
    """Function that pushes a finished folder and yields a line about it; it does nothing without a repository.

    Args: count: merged models of this call.
    Raises: ValueError for a name, a token or a number of models that cannot be pushed, before anything is merged.
    """
    if repository is None:
        errors.raise_problems(["--public requires --push-to-hub"] if public else [])
        return lambda folder: ()
    problems = hub.push_problems(repository)
    problems += [f"--push-to-hub takes one merged model, here are {count}: give one merger"] if count != 1 else []
    errors.raise_problems(problems)

    def push(folder: Path) -> Iterable[str]:
        yield f"pushed: {hub.push(folder, repository, private=not public, without=[checkpoint.SOURCES])}"

    return push


def chosen_part(text: str | None, *, dry_run: bool, push: str | None) -> Part | None:
    """The part of --part. Raises: ValueError for one that is none, and for what takes a whole merge."""
    if text is None:
        return None
    problems = problems_of(part_of, text)
    if dry_run:
        problems.append("--dry-run checks the whole merge: leave out --part")
    if push is not None:
        problems.append("--push-to-hub takes a whole model: when it is finished, give it without --part")
    errors.raise_problems(problems)
    return part_of(text)


def summary(
    config: MergerConfig, folder: Path, report: Report | Waiting | None, coefs: Collection[str] = ()
) -> list[str]:
    """Lines for a merged model of `stream_run`. Args: coefs: globs of those by parameter, of `Order`."""
    if isinstance(report, Waiting):
        rest = "another process completes the folder"
        if report.missing:
            rest = f"unfinished yet: missing part{'s' * (len(report.missing) > 1)} {', '.join(report.missing)}"
        outcome.add("parts", {"folder": folder, "part": str(report.part), "missing": list(report.missing)})
        return [f"part {report.part} of {folder} is done, {rest}"]
    coef = getattr(config, "coef", None)
    outcome.add("merged", {"folder": folder, "coef": coef, "kept": report is None})
    if report is None:
        return [f"kept: {folder}: {_done(folder)}"]
    said = "" if coef is None else f", coef {coef:g}"
    if coefs and hasattr(config, "coef"):
        # a glob of all parameters leaves none to the merger's own coefficient
        said = ", coef by parameter" if coef is None or "*" in coefs else f"{said} and others by parameter"
    first = f"merged: {folder}{said}, {rounding(report.rounding_ratio)}"
    if of_all_tasks(config):
        tasks = ", ".join(open_several(folder).scales)
        first = f"merged: {folder}, {size_text(report.bytes)}, one vector and a mask each for {tasks}"
    return [first, *(f"note: {note}" for note in report.notes)]


def _done(folder: Path) -> str:
    made = by_other_code(checkpoint.load_manifest(folder))
    return f"already finished: its files and inputs match its model card{made}"


def plan_text(folder: Path, found: Plan | None) -> str:
    """Lines for a merge into ``folder`` that `plan_run` has planned."""
    outcome.add("plans", {"folder": folder} | ({"kept": True} if found is None else found._asdict()))
    if found is None:
        return f"{folder}: {_done(folder)}"
    files = f"{len(found.shards)} file" + ("s" if len(found.shards) > 1 else "")
    hashing = seconds_to_hash(found.read + 3 * found.disk)  # files, and the fingerprints of base and result
    return "\n".join(
        [
            f"{folder}: all checks passed, {found.leaves:,} tensors, {found.parameters:,} parameters",
            f"  memory: at most {found.memory / 2**20:,.0f} MiB beside mapped files",
            f"  disk: {size_text(found.disk)} in {files}",
            f"  time: about {found.seconds:,.1f} s of computation, then {hashing:,.1f} s of hashing in one thread; "
            f"{size_text(found.read)} to read; a slow disk takes longer",
            *(f"  note: {note}" for note in found.notes),
        ]
    )


def kept_of(configs: Sequence[MergerConfig], order: Order, hashing: Hashing) -> list[MergerConfig]:
    """The mergers whose merge is done already. Raises: as `stream_run` before any merging."""
    problems, kept = list[str](), list[MergerConfig]()
    if order.coefs and not any(hasattr(config, "coef") for config in configs):
        problems.append(f"{' and '.join(config.name for config in configs)} takes no coefficient: leave out --coefs")
    for config in configs:
        folder = order.out / config.name
        if folder.exists() and not order.options.get("overwrite"):
            if not (others := _other_merge(config, order, folder, hashing)):
                kept.append(config)
                continue
            problems += [f"{folder} holds another merge: {others[0]}"] if is_merged(folder) else []
        options = options_of(config, order)
        if hasattr(config, "coef") and config.coef is None and not order.coefs:
            problems.append(f"{config.name} needs a coefficient: give --coef, or --search for one on dev")
            options["coef"] = 1.0
        if of_all_tasks(config) and order.part is not None:
            problems.append(
                f"--part requires one model: give --task, or merge {config.name} for all tasks without --part"
            )
        if found := problems_of(prepared, config, order.base, order.experts, folder, **options):
            problems += list(name_problems(order.base, order.experts, order.manifests)) or found
    errors.raise_problems(list(dict.fromkeys(problems)))  # all mergers have the same inputs
    return kept


def _is_kept_meanwhile(config: MergerConfig, order: Order, hashing: Hashing) -> bool:
    """Whether another process has done a merge since `kept_of` was asked. Raises: as `stream_run` before merging."""
    there = (order.out / config.name).exists() and not order.options.get("overwrite")
    return bool(there and kept_of([config], order, hashing))


def _other_merge(config: MergerConfig, order: Order, folder: Path, hashing: Hashing) -> list[str]:
    """Reasons why ``folder`` does not hold this very merge; none if it does."""
    asked = {name: own for name, own in order.searched.get(config.name, {}).items() if name == "asked"}
    if found := differences(folder, {"merge_seed": order.seed, **_settings(config, order), **_stacks(order), **asked}):
        return found
    options = options_of(config, order) | Options(overwrite=True)
    try:
        job, _ = prepared(config, order.base, order.experts, folder, **options)
    except ValueError as error:
        return [str(error)]
    inputs = {opened.label: opened.stores for opened in (job.base, *job.experts.values())}
    return other_inputs(folder, inputs, order.experts, job.beside, hashing)


def _settings(config: MergerConfig, order: Order) -> dict[str, Any]:
    """Settings that decide the bytes of a merge, beside its inputs."""
    coefs = {"coefs": dict(order.coefs)} if "coef" in options_of(config, order) else {}
    return {
        "merger": config.name,
        "hyperparameters": {**settings(config), **coefs},
        "semantics": order.semantics,
        "out_dtype": order.options.get("out_dtype", "same"),
        "shard_size": order.options.get("shard_size", SHARD_SIZE),
        "vocabulary": order.options.get("vocabulary", "error"),
        "device": order.options.get("device", "cpu"),
        **{name: _by_name(value) for name in BESIDE if (value := order.options.get(name)) not in (None, False)},
    }


def options_of(config: MergerConfig, order: Order) -> Options:
    """The options of `merge_folders` for a merger, without its settings."""
    options = Options(**order.options)
    options["key"] = mask_key(order.seed)
    if order.coefs and hasattr(config, "coef"):
        options["coef"] = order.coefs
    return options


def _texts(
    config: MergerConfig, order: Order, origins: dict[tuple[str, ...], str], files: Sequence[Path], report: Report
) -> dict[str, str]:
    """Manifest and model card of a merged model. Args: origins: fingerprints of base by the hashes of its files.

    Raises: ValueError for inputs of other weights than their manifests name.
    """
    errors.raise_problems(rewritten_meanwhile(order.experts, report.inputs, report.hashes))
    facts = facts_of(order.base, list(order.experts.values()), order.manifests, order.seed)
    hashed = hashes(files, report.inputs, report.hashes)
    facts["experts"] = expert_prints(facts["experts"], hashed)
    of_base = tuple(report.hashes[file] for file in report.inputs["base"])
    origin, merged = fingerprints_of(order.base, files[0].parent, origins.get(of_base))
    origins[of_base] = origin
    manifest = checkpoint.describe(
        {},
        **facts,
        **_settings(config, order),
        **{name: value for name, value in _stacks(order).items() if value},
        base_fingerprint=origin,
        **({"scales": open_several(files[0].parent).scales} if of_all_tasks(config) else {}),
        dev={},
        dev_curve=[],
        **order.searched.get(config.name, {}),
        density=report.density,
        rounding_ratio=report.rounding,
        notes=list(report.notes),
        **licenses_of(order.base, order.experts),
        **library_of(files[0].parent),
        **hashed,
    ) | {"fingerprint": merged}
    return texts(manifest, card, report.inputs | _whose(order)) | {checkpoint.RECIPE: _recipe(config, order)}


def _by_name(value: Any) -> Any:
    """The folder of an option by its name, anything else as it is."""
    if not isinstance(value, str):
        return value
    return placed_by_name(Path(value)) if "{" not in value and Path(value).is_dir() else value


def _whose(order: Order) -> dict[str, list[Path]]:
    """A file in each folder that an option names, which none of the inputs is."""
    given = {name: Path(str(order.options.get(name))) for name in ("config_from", "tokenizer_from")}
    found = {name: sorted(path.glob("*.json")) for name, path in given.items() if path.is_dir()}
    return {name: files[:1] for name, files in found.items() if files}


def _stacks(order: Order) -> dict[str, Any]:
    """The parts of stacked models, by name, and those of base; None where there are none."""
    found = {name: placed_by_name(path) for name, path in order.experts.items() if stack_parts(path)}
    return {"stacks": found or None, "base_stack": placed_by_name(order.base) if stack_parts(order.base) else None}


def _recipe(config: MergerConfig, order: Order) -> str:
    """The recipe from which `merge.py` repeats this merge."""
    made = _settings(config, order)
    rest = {name: made[name] for name in OWN if name in made}
    coef = dict(order.coefs) if made["hyperparameters"].get("coefs") else None
    return written(config, order.base, order.experts, coef, {"seed": order.seed, **rest})
