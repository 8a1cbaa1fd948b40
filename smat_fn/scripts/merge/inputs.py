"""A base and its experts, read from folders and checked against each other."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

from torch import Tensor

from ... import checkpoint, errors, lora, random, tree
from ...config import MergerConfig
from ...errors import problems_of
from ...evaluate.results import Run, check_type
from ...folders import read_inputs
from ...folders.inputs.adapters import is_adapter
from ...folders.inputs.hub import repository_of
from ...folders.inputs.stacks import folders_of, stack_parts
from ...folders.inputs.statistics import of_other_labels, stale, without
from ...merge.parts.inputs import Leaves, flat_statistics
from ...merge.parts.per_expert import Weighted
from ...merge.weighted_average import WeightedAverage
from ..recipes.places import folder_name

FIELDS = {  # of manifests by kind
    "expert": ("task", "label", "seed", "hyperparameters"),
    checkpoint.JOINT: ("tasks", "label", "seed", "hyperparameters"),
    "merged": ("merger", "experts", "label", "seed", "hyperparameters"),
}
KINDS = ("base", "expert", checkpoint.JOINT, "snapshot", "merged")  # of manifests whose values `manifest_of` checks
TYPES = {  # of values in these manifests, as JSON; any may be absent, and null where `FIELDS` does not name it
    **get_type_hints(Run),
    "task": str,
    "tasks": Mapping[str, int],
    "merger": str,
    "preset": str,
    "base_fingerprint": str,
    checkpoint.UNTRAINED: str,
    "experts": Mapping[str, str | None],
    "files": Mapping[str, str],
    "inputs": Mapping[str, Mapping[str, str]],
    "suite": {"name": str, "seed": int, "tasks": Sequence[str]},
}
BY_TASK = ("templates", "data")  # options of suites that may be a mapping with a value for each task
AGAIN = "put back the one written with the weights, or move the folder"


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


def find_inputs(run: Path) -> tuple[Path, list[Path]]:
    """The base and the experts of a folder that train.py wrote, ``RUN`` or ``RUN/snapshots/NUMBER``.

    Raises: ValueError if it holds none.
    """
    experts = [
        path
        for path in (sorted(run.iterdir()) if run.is_dir() else ())
        if not path.name.startswith(".") and path.name != "lost+found"  # as `checkpoint.files_below`
        if path.is_dir() and checkpoint.MANIFEST in os.listdir(path)  # an error where this user may not read it
        if manifest_of(path).get("kind") in ("expert", "snapshot")
    ]
    if not experts:
        if not run.exists():
            raise ValueError(f"{run} does not exist, so it holds no experts: give the --out folder of train.py")
        runs = sorted({path.parents[1] for path in run.glob(f"*/*/{checkpoint.MANIFEST}")})
        near = f" (here perhaps {' or '.join(map(str, runs[:3]))})" if runs else ""
        raise ValueError(f"{run} holds no experts: give the --out folder of train.py{near}")
    top = run.absolute().parents[1] if run.absolute().parent.name == checkpoint.SNAPSHOTS else run
    return top / checkpoint.BASE, experts


def all_inputs(run: Path) -> tuple[Path, list[Path]]:
    """The base and all experts of a finished run, as `find_inputs` gives them.

    Raises: ValueError as it does, and for tasks whose training has not ended, or which `transport` has yet to move.
    """
    base, experts = find_inputs(run)
    errors.raise_problems(_unmoved(run, base.parent))
    out, ended = base.parent, {*(expert.name for expert in experts), checkpoint.JOINT}  # which no merge takes
    logs = {log.name.removesuffix(".log.jsonl"): log for log in sorted(out.glob("*.log.jsonl"))}
    begun = {task: log for task, log in logs.items() if task not in ended}
    old = [mark.name[1:].removesuffix(checkpoint.REPLACED) for mark in sorted(out.glob(f".*{checkpoint.REPLACED}"))]
    old = [name for name in old if name != checkpoint.JOINT]
    problems = (
        [f"{run} has experts of {', '.join(old)} that an interrupted --overwrite has yet to replace"] if old else []
    )
    problems += [f"{run} has a log but no expert of {', '.join(begun)}"] if begun else []
    taken = [folder for folder in (out / task for task in begun) if not is_free(folder)]
    if taken:
        problems[-1] += f", and {', '.join(map(str, taken))} cannot take it: move that away"
    if problems:
        problems.append("end the training by train.py ... --resume")
    if begun and not old:
        files = ", ".join(map(str, begun.values()))
        problems[-1] += f", or move {files} away to merge {', '.join(sorted(e.name for e in experts))} alone"
    errors.raise_problems(problems)
    return base, experts


def moving(expert: Path) -> Path:
    """The file that is there until `transport` has written an expert."""
    return expert.parent / f".{expert.name}{checkpoint.MOVING}"


def _unmoved(run: Path, out: Path) -> list[str]:
    """The error for a run whose experts an interrupted merge.py transport has yet to move."""
    marks = sorted(out.glob(f".*{checkpoint.MOVING}"))
    tasks, files = ", ".join(m.name[1:].removesuffix(checkpoint.MOVING) for m in marks), ", ".join(map(str, marks))
    text = f"{run} has yet to get the experts of {tasks} from an interrupted merge.py transport: rerun it, or delete"
    return [f"{text} {files} to take the run as it is"] if marks else []


def is_free(folder: Path) -> bool:
    """Whether nothing is in the place of an expert but, at most, an empty folder."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def unreplaced(experts: Iterable[Path]) -> list[str]:
    """Errors for experts that an interrupted --overwrite of train.py or merge.py transport has yet to replace."""
    marks = {expert: expert.parent / f".{expert.name}{checkpoint.REPLACED}" for expert in experts}
    unmoved = [
        f"{expert} is the expert that an interrupted merge.py transport has yet to replace: rerun it, or delete "
        f"{moving(expert)} to keep the old one"
        for expert in marks
        if moving(expert).exists()
    ]
    return unmoved + [
        f"{expert} is the expert that an interrupted --overwrite has yet to replace: end the training by "
        f"train.py ... --resume, or delete {mark} to keep the old one"
        for expert, mark in marks.items()
        if mark.exists()
    ]


def trained_by(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """The name of the preset in the manifests of experts, "digits" where none has one.

    Raises: ValueError that lists the names of several.
    """
    named = {expert: manifest.get("preset") for expert, manifest in manifests.items()}
    found = dict.fromkeys(name for name in named.values() if name)
    if len(found) > 1:
        each = ", ".join(f"{expert} by {name}" for expert, name in named.items())
        raise ValueError(f"the experts were trained by several presets ({each}): pass --preset")
    return next(iter(found), "digits")


def sigma_note(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    """A note on experts of SMAT that were trained with different sigma; an empty text where they have one."""
    smat = {Path(name).name: own for name, own in manifests.items() if own.get("method") == "smat"}
    found = {name: own["hyperparameters"].get("sigma") for name, own in smat.items()}
    if len(set(map(str, found.values()))) < 2:
        return ""
    return f"the experts were trained with different sigma ({', '.join(f'{name} {s}' for name, s in found.items())})"


def manifests_of(experts: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The manifests of those experts that train.py wrote, by folder."""
    return {str(path): manifest for _, path in map(named, experts) if (manifest := manifest_of(path))}


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of train.py or merge.py; empty for other folders, even with a file of this name.

    Raises: ValueError that lists the values of other types than were written.
    """
    file = path / checkpoint.MANIFEST
    found: Any = checkpoint.load_manifest(path) if file.is_file() else {}
    if not isinstance(found, dict) or "kind" not in found:
        return {}
    if (kind := found["kind"]) in KINDS:
        own = {name: value for name, value in found.items() if value is not None or name in FIELDS.get(kind, ())}
        problems = _mistyped(own, TYPES)
        if isinstance(suite := own.get("suite"), dict) and suite:
            problems += [f"suite lacks {name}" for name in ("name", "seed") if suite.get(name) is None]
        errors.raise_problems([f"{file}: {text}: {AGAIN}" for text in problems])
    return found


def _mistyped(values: Mapping[str, Any], types: Mapping[str, Any], of: str = "") -> list[str]:
    """Errors for values of other types, by name."""
    problems: list[str] = []
    for name in values.keys() & types.keys():
        kind, place = types[name], f"{of}[{name!r}]" if of else name
        nested = isinstance(kind, dict)
        problems += problems_of(check_type, place, values[name], Mapping[str, Any] if nested else kind)
        if nested and isinstance(values[name], dict):
            own = {option: value for option, value in values[name].items() if value is not None}
            problems += _mistyped(own, kind, place)
    return sorted(problems)


def incomplete(manifests: Mapping[Path, Mapping[str, Any]], *more: str) -> list[str]:
    """Errors for manifests of train.py and merge.py, by folder, without `FIELDS` or some of ``more``."""
    lacking = {
        folder: [
            name for name in dict.fromkeys((*FIELDS.get(manifest.get("kind", ""), ()), *more)) if name not in manifest
        ]
        for folder, manifest in manifests.items()
    }
    return [
        f"{folder / checkpoint.MANIFEST} lacks {', '.join(names)}: {AGAIN}"
        for folder, names in lacking.items()
        if names
    ]


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
        f"{config.name} takes no weights by expert, as {example}: "
        + ("use weighted_average" if config.name == "wa" else "leave them out")
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
    return (Path(head), weight) if "@" in head or folder.exists() or stack_parts(folder) else (expert, None)


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
    noted = tuple(dict.fromkeys(notes))
    return Inputs(origin, loaded, manifests, places, notes=noted, prints=tuple(prints), stand_ins=stand_ins)


def check_weights(path: Path, manifest: Mapping[str, Any], found: str | None = None) -> None:
    """Raises: ValueError for weights that are missing, or not those that the manifest of their folder names: another
    program wrote them, or they are damaged. Finished merges, statistics and scores would be taken for theirs.

    Adapters of earlier code are only read: their manifest has no hash of their file, and its fingerprint is of what
    they add up to with base.

    Args: found: the fingerprint of the weights as they were read; None: their file is hashed, or read.
    """
    stated, files = manifest.get("fingerprint"), _weights_named(manifest)
    if found is not None and stated in (None, found):
        return
    if gone := [path / name for name in files if not (path / name).is_file()]:
        raise ValueError(f"{gone[0]} is missing: put it back, or delete {path} to make it again")
    if files:
        same = checkpoint.file_hashes(path, *files) == files
    elif is_adapter(path):
        same = bool(lora.load_peft(path))
    else:
        same = stated in (None, found or checkpoint.fingerprint(checkpoint.load_leaves(path)[0]))
    if not same:
        raise ValueError(other_weights(path))


def rewritten_meanwhile(
    experts: Mapping[str, Path], inputs: Mapping[str, Iterable[Path]], hashes: Mapping[Path, str]
) -> list[str]:
    """Errors as those of `check_weights` for the experts of a merge that has read and hashed its inputs.

    No file is read again, but those of whole models of earlier code, whose manifests have no hash of them.

    Args: experts: folders by name; inputs: the files that were read, by label; hashes: SHA-256 of these files.
    """
    problems = []
    for name, path in experts.items():
        manifest = manifest_of(path)
        if not (files := _weights_named(manifest)):
            problems += problems_of(check_weights, path, manifest) if manifest and not is_adapter(path) else []
            continue
        read = {str(f.relative_to(path)): hashes[f] for f in inputs[f"expert {name!r}"] if path in f.parents}
        if not (both := files.keys() & read.keys()) or any(files[file] != read[file] for file in both):
            problems.append(other_weights(path))
    return problems


def _weights_named(manifest: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the files of weights that a manifest names."""
    files = manifest.get("files")
    return {n: h for n, h in files.items() if n.endswith(".safetensors")} if isinstance(files, dict) else {}


def other_weights(path: Path) -> str:
    """The error for weights that are not those of their manifest."""
    return (
        f"the weights in {path} are not those that its {checkpoint.MANIFEST} names: put these back, or delete the "
        f"folder to make it again, or remove {checkpoint.MANIFEST} to take the new ones as those of another program"
    )


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


def with_tasks_of(recipes: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The first recipe of a suite with the tasks of all: experts of new tasks may have come beside the first ones.

    Options that have a value for each task get those of new tasks too.
    """
    found = [recipe for recipe in recipes if recipe]
    if not found:
        return None
    tasks = dict.fromkeys(task for recipe in found for task in recipe.get("tasks") or ())
    values: dict[str, Any] = {}
    for name in BY_TASK:
        if all(isinstance(recipe.get(name), Mapping) for recipe in found):
            values[name] = {task: value for recipe in reversed(found) for task, value in recipe[name].items()}
    return {**found[0], **values, **({"tasks": list(tasks)} if tasks else {})}


def value_for(task: str, option: str, recipe: Mapping[str, Any]) -> Any:
    """The value of a suite's option for a task: where it has one for each task, that of this task alone."""
    value = recipe.get(option)
    return value.get(task) if option in BY_TASK and isinstance(value, Mapping) else value


def model_names(base: Path, experts: Sequence[Path] = ()) -> list[str]:
    """Base and experts for a model card's metadata: hub names without revision; of a local base the folder's name."""
    names = [repository_of(path) for _, given in map(named, experts) for path in folders_of(given)]
    origins = [repository_of(path) or path.resolve().name for path in folders_of(base)]
    return list(dict.fromkeys([*origins, *filter(None, names)]))


def mask_key(seed: int) -> Tensor:
    """The key of random masks."""
    return random.fold_in(random.key(seed), "merge")
