"""`merge.py adapters`: merges the factors by the options, and writes a manifest with hashes of inputs and outputs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any

from .... import __version__, errors, machine, random
from .... import merge as mergers
from ....config import MERGERS, MORE_MERGERS, MergerConfig, preset_of, resolve
from ....folders import merge_adapters as write
from ....folders.combining import files_read
from ....folders.files import digests, size_text
from ....folders.inputs.adapters.config import CONFIG
from ....folders.inputs.adapters.file_factors import read_file
from ....folders.inputs.hub import local_folder
from ....merge.around.factors import Factors, option_problems
from ....merge.parts.masked import Masked
from ....merge.parts.merger import Merger
from ... import outcome
from ..experts.given import by_name, model_names, weight_of
from ..experts.inputs import mask_key
from ..provenance.card import adapter_card, licenses_of
from ..provenance.finished import base_of, hashes, is_finished, kept_adapter, texts
from ..settings import MergeAdapters

SPACES = {"knots": mergers.knots, "core_space": mergers.core_space}


def merge(args: MergeAdapters) -> Iterator[str]:
    """Write the merged adapter, unless the folder holds this very one; yields notes and its rank.

    Raises: ValueError that lists all problems of options, then of adapters, before any work.
    """
    pairs = [weight_of(expert) for expert in args.experts]
    found, problems = by_name(Path(args.base or "their base"), [path for path, _ in pairs], None)
    weights = {name: weight for (name, *_), (_, weight) in zip(found, pairs, strict=True) if weight is not None}
    key = mask_key(args.seed)
    if args.majority != "total" and "ties" not in args.method:
        problems.append(f"--majority is for ties and ties_svd, not for {args.method}")
    if args.method in SPACES:
        problems += [] if args.density is None else [f"{args.method} has no density of its own: give it in --options"]
        merger = errors.all_at_once(problems, lambda: _merger(args))
        combine: Any = partial(in_space, args.method, merger, weights, coef=args.coef, rank=args.rank, key=key)
        how: dict[str, Any] = {"merger": merger.name, "options": merger.settings(), "coef": args.coef}
    else:
        how = {"density": args.density} if args.density is not None else {}
        how |= {"majority": args.majority} if "ties" in args.method else {}
        problems += option_problems(args.method, args.rank, args.density, args.majority, key)
        others = {"--options": args.options, "--coef": args.coef != 1.0, "--merger": args.merger != "ties"}
        problems += [f"{name} is for knots and core_space, not for {args.method}" for name, on in others.items() if on]
        errors.raise_problems(problems)
        combine = partial(by_module, method=args.method, weights=weights, key=key, rank=args.rank, **how)
    facts = {
        "method": args.method,
        "adapters": [name for name, *_ in found],
        **how,
        "weights": weights,
        "rank": args.rank,
        "merge_seed": args.seed,
    }
    adapters = {name: path for name, path, _ in found}
    inputs = partial(_inputs, args, adapters)
    if not args.overwrite and is_finished(args.out, "merged", facts, inputs, args.threads):
        outcome.add("merged", {"folder": args.out, "kept": True})
        yield from kept_adapter(args.out)
        return
    texts = partial(_texts, facts)
    made = write(adapters, args.out, combine, base=args.base, overwrite=args.overwrite, texts=texts)
    if made.partial:
        lacking = outcome.counted(made.partial, "module", "modules")
        yield f"note: {lacking} of some adapters alone, merged from those: {errors.and_more(made.partial, 3)}"
    yield from (f"note: {note}" for note in made.notes)
    outcome.add("merged", {"folder": args.out, "kept": False})
    modules = outcome.counted(made.modules, "module", "modules")
    yield f"merged: {args.out}, {modules} of rank {made.rank}, {size_text(made.bytes)}"


def _inputs(args: MergeAdapters, adapters: Mapping[str, Path]) -> tuple[Any, dict[str, list[Path]]]:
    places = {name: local_folder(f"adapter {name!r}", Path(path), fetch=False) for name, path in adapters.items()}
    named = [base_of(place) for place in places.values()]
    return args.base or named[0], files_read(places)


def by_module(
    adapters: Mapping[str, Mapping[str, Factors]],
    *,
    weights: Mapping[str, float],
    key: Any,
    rank: int | None,
    **how: Any,
) -> dict[str, Factors]:
    """`combine` of every module, from the adapters that have it; masks by the module's name too."""
    if rank is None and how["method"].endswith("svd"):
        rank = max(factors.rank for found in adapters.values() for factors in found.values())
    merged = {}
    for module in dict.fromkeys(module for found in adapters.values() for module in found):
        own = {name: found[module] for name, found in adapters.items() if module in found}
        shares = {name: weight for name, weight in weights.items() if name in own}
        try:
            merged[module] = mergers.combine(own, weights=shares, rank=rank, key=random.fold_in(key, module), **how)
        except ValueError as error:
            raise ValueError(f"{module!r}: {error}") from error
    return merged


def in_space(
    space: str,
    merger: MergerConfig,
    weights: Mapping[str, float],
    adapters: Mapping[str, Mapping[str, Factors]],
    **how: Any,
) -> dict[str, Factors]:
    """`knots` or `core_space` of adapters whose changes are multiplied by their weights."""
    scaled = {
        name: {module: f._replace(scale=f.scale * weights.get(name, 1.0)) for module, f in found.items()}
        for name, found in adapters.items()
    }
    return SPACES[space](scaled, merger, **how)


def _merger(args: MergeAdapters) -> MergerConfig:
    # statistics are of whole models, and so of no use for factors
    known = {m.name: m for m in (*MERGERS, *MORE_MERGERS) if m.based and m.statistics is Merger.statistics}
    if args.merger not in known:
        near = errors.suggestion(args.merger, known)
        way = f"{near} choose one of" if near else ", must be one of"
        raise ValueError(f"--merger is {args.merger!r}{way} {', '.join(known)}")
    kind = known[args.merger]
    own = [f.name for f in fields(kind) if f.name != "coef"]
    unknown = [name for name in args.options if name not in own]
    errors.raise_problems(
        [f"--options {n} is not an option of {kind.name}: they are {', '.join(own)}" for n in unknown]
    )
    needed = [f.name for f in fields(kind) if f.default is MISSING is f.default_factory and f.name not in args.options]
    needed += ["task"] if issubclass(kind, Masked) and "task" not in args.options else []
    errors.raise_problems([f"{kind.name} needs --options {name} VALUE" for name in needed])
    return resolve(kind(**args.options), preset_of(args.preset).mergers)


def _texts(facts: Mapping[str, Any], files: Sequence[Path], inputs: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    found = digests([*files, *(file for own in inputs.values() for file in own)], 1)
    places = dict(zip(facts["adapters"], (files[0] for files in inputs.values()), strict=True))
    about: dict[str, Any]
    if files[0].name == CONFIG:
        config = json.loads(files[0].read_text(encoding="utf-8"))
        about, base = {"tool": "peft", "stored_rank": config["r"]}, config["base_model_name_or_path"]
    else:  # a LoRA file names no base, and a model card beside several files is not theirs
        places = {name: file for name, file in places.items() if [*file.parent.glob("*.safetensors")] == [file]}
        stored = read_file("the merged adapter", files[0]).factors
        about, base = {"tool": "diffusers", "stored_rank": next(iter(stored.values())).rank}, None
    about |= licenses_of(Path(base) if base else None, {name: file.parent for name, file in places.items()})
    about |= {"base_model": model_names(Path(base))[0] if base else None, "versions": {"smat_fn": __version__}}
    about |= {"code": machine.code()}
    manifest = {"adapter": "merged", **facts, **about, **hashes(files, inputs, found)}
    return texts(manifest, adapter_card, inputs)
