"""A base and its experts, read from folders and checked against each other."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from .... import checkpoint, errors, lora, random, tree
from ....config import MergerConfig
from ....errors import problems_of
from ....folders import read_inputs
from ....folders.inputs.adapters.peft import is_adapter
from ....folders.inputs.statistics import of_other_labels, stale, without
from ....folders.prepare import same_folders
from ....merge.parts.inputs import Leaves, flat_statistics
from ...manifests import check_weights, manifest_of, with_tasks_of
from .given import by_name, model_names


class Inputs(NamedTuple):
    """A base and its experts, checked against each other."""

    base: dict[str, Tensor]
    experts: dict[str, dict[str, Tensor]]  # by task
    manifests: dict[str, dict[str, Any]]  # of the experts, by task
    places: Mapping[str, Path] = MappingProxyType({})  # where they lie, by task
    lines: tuple[float, float] | None = None  # factors of γ by depth, at the first and the last block
    notes: tuple[str, ...] = ()  # on folders of other tools
    prints: tuple[tuple[Leaves, str], ...] = ()  # trees of these with their fingerprints, as they were read
    # base's leaves in place of those of experts' own heads, by name of those experts that have one
    stand_ins: Mapping[str, list[str]] = MappingProxyType({})

    def print_of(self, params: Leaves) -> str:
        """The fingerprint of a tree: the one known from reading it, or computed for any other tree."""
        known = next((found for tree, found in self.prints if tree is params), "")
        return known or checkpoint.fingerprint(params)


def load_inputs(
    base: Path, experts: Sequence[Path], *, known: Inputs | None = None, heads: bool = False, based: bool = True
) -> Inputs:
    """Read a base and experts, and check all of them before anything is merged; hash base and whole experts once.

    Whole models of train.py are recognised by their manifests. All others are read as a merge on disk reads them:
    sharded folders, hub names, and LoRA adapters, whose changed leaves are in float32 (`like_base` rounds them).

    Args:
        known: other experts of this base, which is then not read again.
        heads: they may differ from base's, which then stand in for them.
        based: trained experts must be of base; without it they are merged by mergers that do not read base.
    Raises: ValueError that lists every folder that cannot be read, every expert of another base, shape or dtype, or of
        other weights than its manifest names, values that are not finite, and every name that comes twice.
    """
    problems, notes = [] if experts else ["no experts: give at least one folder"], list[str]()
    origin: dict[str, Tensor] | None = None if known is None else known.base
    with errors.collected(problems):
        if origin is None:
            origin = checkpoint.load_leaves(base)[0] if manifest_of(base) else read_inputs(base, {}, notes)[0]
            tree.check_finite(origin, str(base))
    own = None if origin is None else checkpoint.fingerprint(origin) if known is None else known.print_of(origin)
    found, others = by_name(base, experts, own, based=based)
    loaded: dict[str, dict[str, Tensor]] = {}
    prints = [] if origin is None or own is None else [(origin, own)]
    stand_ins: dict[str, list[str]] = {}
    for name, path, manifest in found:
        try:
            if manifest and not is_adapter(path):
                like = checkpoint.load_leaves(path)[0] if origin is None else origin
                loaded[name] = lora.load_expert(path, like)[0]
                if manifest.get("fingerprint"):
                    prints.append((loaded[name], checkpoint.fingerprint(loaded[name])))
                    check_weights(path, manifest, prints[-1][1])
            else:  # of train.py the fingerprint tells the base, whatever its adapters' configuration calls it
                apart: dict[str, list[str]] | None = {} if heads and not manifest else None
                said = [] if manifest else notes
                loaded[name] = read_inputs(base, {path.name: path}, said, stand_ins=apart)[1][path.name]
                if apart:
                    (stand_ins[name],) = apart.values()
                prints += [] if manifest else [(loaded[name], checkpoint.fingerprint(loaded[name]))]
                if manifest:
                    check_weights(path, manifest)
            tree.check_finite(loaded[name], str(path))
        except ValueError as error:
            problems += errors.texts(error)
    errors.raise_problems(list(dict.fromkeys(problems + others)))
    assert origin is not None
    every = {path for own in stand_ins.values() for path in own}  # a head of base's shape is merged with no other
    if every:
        loaded = {
            name: {path: origin[path] if path in every else own[path] for path in own} for name, own in loaded.items()
        }
    places = {name: path for name, path, _ in found}
    manifests = {name: manifest for name, _, manifest in found}
    noted = tuple(dict.fromkeys([*same_folders(places), *notes]))
    return Inputs(origin, loaded, manifests, places, notes=noted, prints=tuple(prints), stand_ins=stand_ins)


def like_base(base: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of an expert or a merged model on the devices and in the dtypes of base, to run it."""
    return {path: leaf.to(base[path].device, base[path].dtype) for path, leaf in params.items()}


def read_statistics(config: MergerConfig, inputs: Inputs) -> dict[str, Leaves] | None:
    """Statistics of the experts that a merger needs, by expert; None for one that needs none.

    Raises: ValueError that lists the missing ones with the command that makes them, and those of other weights.
    """
    if (kind := config.statistics()) is None:
        return None
    found, missing, problems = dict[str, Leaves](), list[str](), list[str]()
    labels = dict[str, object]()
    for name, params in inputs.experts.items():
        place = inputs.places.get(name, Path(name))
        if not (file := place / checkpoint.STATISTICS[kind]).exists():
            missing.append(str(place))
            continue
        with errors.collected(problems):
            facts = checkpoint.statistics_facts(file)
            compared = bool(inputs.manifests.get(name)) and any(own is params for own, _ in inputs.prints)
            problems += stale(file, facts, partial(inputs.print_of, params), compared=compared)
            labels[name] = facts.get("labels")
            found[name] = checkpoint.load_statistics(file)
            tree.check_finite(found[name], str(file))
    problems += without(kind, missing) + of_other_labels(labels)
    if not problems:
        problems += problems_of(flat_statistics, kind, inputs.base, list(inputs.experts), found)
    errors.raise_problems(problems)
    return found


def missing_of(config: MergerConfig, snapshots: Mapping[int, Sequence[Path]]) -> list[str]:
    """An error for snapshots without the statistics that a merger needs."""
    kind = config.statistics()
    assert kind is not None
    every = (place for places in snapshots.values() for place in places)
    return without(kind, [str(place) for place in every if not (place / checkpoint.STATISTICS[kind]).exists()])


def depth_problems(configs: Sequence[MergerConfig], lines: tuple[float, float]) -> list[str]:
    """Errors for factors by depth: not finite, or around a merger that has no task vector to scale."""
    problems = [f"--lines {factor} must be finite" for factor in lines if not math.isfinite(factor)]
    without = [config.name for config in configs if hasattr(config, "coef") and not config.based]
    if not any(hasattr(config, "coef") and config.based for config in configs):
        without = [config.name for config in configs]
    return problems + [f"{name} has no task vector with a coefficient: leave out --lines" for name in without]


def facts_of(
    base: Path, experts: Sequence[Path], manifests: Mapping[str, Mapping[str, Any]], seed: int
) -> dict[str, Any]:
    """Facts about the inputs of a merge for its manifest; ``seed`` is that of random masks."""
    known = manifests.values()
    return {
        "kind": "merged",
        "merge_seed": seed,
        "label": "+".join(dict.fromkeys(manifest.get("label", name) for name, manifest in manifests.items())),
        "seed": next((manifest["seed"] for manifest in known if "seed" in manifest), seed),
        "suite": with_tasks_of(manifest.get("suite") for manifest in known),
        "base_model": model_names(base, experts),
        "experts": {name: manifest.get("fingerprint") for name, manifest in manifests.items()},
    }


def mask_key(seed: int) -> Tensor:
    """The key of random masks."""
    return random.fold_in(random.key(seed), "merge")
