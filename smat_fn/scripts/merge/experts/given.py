"""Experts as they are given on the command line: NAME=FOLDER@WEIGHT."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from .... import checkpoint, errors
from ....config import MergerConfig
from ....folders.inputs.adapters.peft import is_adapter
from ....folders.inputs.hub import repository_of
from ....folders.inputs.reading import SUFFIXES
from ....folders.inputs.stacks import folders_of, stack_parts
from ....merge.parts.per_expert import Weighted
from ....merge.weighted_average import WeightedAverage
from ...manifests import manifest_of
from ...recipes.places import folder_name


def manifests_of(experts: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The manifests of those experts that train.py wrote, by folder."""
    return {str(path): manifest for _, path in map(named, experts) if (manifest := manifest_of(path))}


def named(expert: Path) -> tuple[str | None, Path]:
    """An expert as it is given, ``FOLDER`` or ``NAME=FOLDER``: its name, if it has one, and its folder or hub name."""
    name, _, rest = str(expert).partition("=")
    if not rest or not name or "/" in name or expert.exists():
        return None, expert
    return name, Path(rest).expanduser()


def origins(experts: Sequence[Path]) -> list[str]:
    """The bases that experts name: adapters and, by some versions of transformers, models too."""
    fields = {"adapter_config.json": "base_model_name_or_path", "config.json": "_name_or_path"}
    found: dict[str, None] = {}
    for given, _ in map(weight_of, experts):
        for file, field in fields.items():
            with suppress(OSError, ValueError, AttributeError):
                found[checkpoint.read_json(named(given)[1] / file).get(field)] = None
    return [str(name) for name in found if name]


def _instead_of_weights(config: MergerConfig) -> str:
    if config.name == "wa":
        return "use weighted_average"
    return "give --weights, in the experts' order" if hasattr(config, "weights") else "leave them out"


def weighted(
    configs: Sequence[MergerConfig], base: Path, experts: Sequence[Path], given: Sequence[float | None]
) -> list[MergerConfig]:
    """The mergers with the weights of experts that `weight_of` found.

    Raises: ValueError that lists the mergers without weights by name, and a weight that is given twice.
    """
    found = zip(by_name(base, experts, None)[0], given, strict=True)
    weights = {name: weight for (name, *_), weight in found if weight is not None}
    if not weights:
        return list(configs)
    example = "@".join(map(str, next(iter(weights.items()))))
    problems = [
        f"{config.name} takes no weights by expert, as {example}: " + _instead_of_weights(config)
        for config in configs
        if not isinstance(config, (Weighted, WeightedAverage))
    ]
    problems += [
        "weights of experts are in --experts and in --weights: leave these out"
        for config in configs
        if isinstance(config, WeightedAverage) and config.weights
    ]
    problems += [
        f"the weight of {name!r} is in --experts and in --weights: leave one out"
        for name in weights
        for config in configs
        if isinstance(config, Weighted) and name in config.weights
    ]
    errors.raise_problems(problems)
    by_place = tuple(1.0 if weight is None else weight for weight in given)
    return [
        replace(config, weights=by_place)
        if isinstance(config, WeightedAverage)
        else replace(config, weights={**config.weights, **weights})
        for config in configs
        if isinstance(config, (Weighted, WeightedAverage))
    ]


def weight_of(expert: Path) -> tuple[Path, float | None]:
    """An expert without its weight, and the weight: ``FOLDER@0.5`` has one.

    A number after the @ of a hub name is its revision; ``owner/name@main@0.5`` has a weight.
    """
    head, at, tail = str(expert).rpartition("@")
    if not at or expert.exists() or named(expert)[1].exists():
        return expert, None
    try:
        weight = float(tail)
    except ValueError:
        return expert, None
    folder = named(Path(head))[1]
    is_path = folder.exists() or stack_parts(folder) or folder.suffix in SUFFIXES
    return (Path(head), weight) if "@" in head or is_path else (expert, None)


def by_name(
    base: Path, experts: Sequence[Path] | Mapping[str, Path], fingerprint: str | None, *, based: bool = True
) -> tuple[list[tuple[str, Path, dict[str, Any]]], list[str]]:
    """Experts as (name, path, manifest), named by NAME=, by their task or by their folder; random masks depend on it.

    Args: experts: as they are given, or folders by name; based: some merger takes differences from base.

    Returns: the experts, and a problem for every name that is taken, for experts of parts of different models and, if
        ``based``, every trained expert of another base than the one with this fingerprint.
    """
    found, problems = list[tuple[str, Path, dict[str, Any]]](), list[str]()
    untrained: dict[str, Path] = {}
    for given, path in experts.items() if isinstance(experts, Mapping) else map(named, experts):
        manifest = manifest_of(path)
        name = given or manifest.get("task", folder_name(path))
        if any(name == other for other, *_ in found):
            problems.append(f"{path}: there is another expert named {name!r}: give each once, or name it: NAME={path}")
        # an adapter adds to base, whatever the merger does
        if fingerprint is not None and (based or is_adapter(path)) and _is_foreign(manifest, fingerprint):
            problems.append(f"{path} was trained from another base than {base}")
        if beside := manifest.get(checkpoint.UNTRAINED):
            untrained.setdefault(beside, path)
        found.append((name, path, manifest))
    first, *others = untrained.values() or [None]
    problems += [
        f"{path} was trained beside other frozen weights than {first}: merge experts of one model" for path in others
    ]
    return found, problems


def _is_foreign(manifest: Mapping[str, Any], fingerprint: str) -> bool:
    """Whether an expert was trained from another base than the one with this fingerprint.

    Base itself may be among the models; a merged model may be merged again, with any base.
    """
    if manifest.get("kind") == "merged" or manifest.get("fingerprint") == fingerprint:
        return False
    return bool(manifest.get("base_fingerprint", fingerprint) != fingerprint)


def model_names(base: Path, experts: Sequence[Path] = ()) -> list[str]:
    """Base and experts for a model card's metadata: hub names without revision; of a local base the folder's name."""
    names = [repository_of(path) for _, given in map(named, experts) for path in folders_of(given)]
    origins = [repository_of(path) or path.resolve().name for path in folders_of(base)]
    return list(dict.fromkeys([*origins, *filter(None, names)]))
