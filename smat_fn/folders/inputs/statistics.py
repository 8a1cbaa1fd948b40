"""Statistics of experts (`merge.statistics`) beside their weights: found, checked, mapped."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ... import checkpoint, errors
from ...checkpoint import STATISTICS
from ...merge.parts.inputs import statistics_problems
from .adapters.peft import is_adapter
from .hub import local_folder
from .reading import Folder, open_folder
from .stored import Store


def with_statistics(
    kind: str, base: Folder, experts: Mapping[str, Path], found: dict[str, Folder], problems: list[str]
) -> dict[str, Folder]:
    """The experts with their statistics among their files; errors go into ``problems``.

    Args:
        kind: one of `checkpoint.STATISTICS`.
        base: the base.
        experts: where the experts lie, by name.
        found: those that could be opened.
    """
    missing, new, labels = list[str](), dict(found), dict[str, object]()
    for name, folder in found.items():
        place = local_folder(folder.label, Path(experts[name]), fetch=False)
        if not (file := place / STATISTICS[kind]).exists():
            missing.append(str(place))
            continue
        with errors.collected(problems):
            facts, store = checkpoint.statistics_facts(file), Store(file)
            leaves = {path: leaf for path in store.names if (leaf := store.header(path)) is not None}
            problems += statistics_problems(kind, base.leaves, f"{file}", leaves)
            problems += stale(file, facts, partial(_print_of, folder))
            labels[name] = facts.get("labels")
            new[name] = folder._replace(stores={**folder.stores, file: store})
    problems += without(kind, missing) + of_other_labels(labels)
    layers = {name: frozenset(_names(new[name], kind)) for name in new}
    if kind == "gram" and len({*layers.values()}) > 1 and not missing:
        problems.append("the experts' Gram matrices cover different layers: compute all of them again")
    return new


def without(kind: str, places: list[str]) -> list[str]:
    """An error that names the command for experts without statistics; none without such experts."""
    if not places:
        return []
    way = (
        "they are kept while an expert is trained, by `python train.py ... --keep-moments`"
        if kind == "adam"
        else f"make them by `python merge.py statistics {' '.join(places)} --kinds {kind}`, which "
        "says what else it needs for experts that train.py did not make"
    )
    return [f"no {STATISTICS[kind]} in {', '.join(places)}: {way}"]


def stale(file: Path, facts: Mapping[str, object], print_of: Callable[[], str], *, compared: bool = False) -> list[str]:
    """An error for statistics of other weights than those beside them, or of another kind than their file's name says.

    The fingerprint of an adapter is that of its factors, by its manifest; of a whole model the weights are hashed,
    since another program may have written them beside the manifest.

    Args:
        print_of: gives the fingerprint of the expert's leaves, where no manifest has it.
        compared: they are known to be those of the manifest.
    """
    if STATISTICS.get(kind := str(facts.get("kind"))) != file.name:
        return [
            f"{file} holds statistics of kind {kind}: give it back the name of that kind, and make those needed here"
        ]
    try:
        manifest: Any = checkpoint.load_manifest(file.parent)
    except ValueError:
        manifest = None
    known = manifest.get("fingerprint") if isinstance(manifest, dict) else None
    if known is None:
        now = print_of()
    elif compared or is_adapter(file.parent):
        now = known
    else:
        now = checkpoint.fingerprint(open_folder(str(file.parent), file.parent).tensors())
    if facts.get("expert") == now:
        return []
    return [f"{file} was computed from other weights than those in its folder now: remove it and compute it again"]


def of_other_labels(labels: Mapping[str, object]) -> list[str]:
    """An error for Fisher matrices computed with different ``--labels``: they estimate different matrices.

    Args:
        labels: those of each expert's statistics; None where their facts name none.
    """
    known = {name: own for name, own in labels.items() if own is not None}
    if len({*known.values()}) < 2:
        return []
    each = ", ".join(f"{name}: {own}" for name, own in known.items())
    return [
        f"the experts' fisher.safetensors were computed with different labels ({each}): compute all with the same "
        "ones, `python merge.py statistics EXPERTS --kinds fisher --labels data --overwrite`"
    ]


def _print_of(folder: Folder) -> str:
    return checkpoint.fingerprint(folder.tensors())


def _names(folder: Folder, kind: str) -> list[str]:
    return [name for file, store in folder.stores.items() if file.name == STATISTICS[kind] for name in store.names]
