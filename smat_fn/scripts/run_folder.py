"""The folder of a run of train.py: its base and experts, and whether all of them are there."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import checkpoint, errors
from .manifests import manifest_of


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
