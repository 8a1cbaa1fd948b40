"""Choice among a run's snapshots: the same one of every task, its coefficient chosen within, by merged dev score."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from .... import checkpoint, errors, merge
from ....checkpoint import SNAPSHOTS
from ..experts.inputs import Inputs, load_inputs
from .choosing import Merged, Tried, total

SAME = "task", "method", "hyperparameters", "training", "seed", "suite", "base_fingerprint", "keep_snapshots"


class Chosen(NamedTuple):
    """A merged model of one snapshot, and how it was chosen."""

    merged: Merged
    inputs: Inputs
    facts: dict[str, Any]  # JSON values: index, of, steps by task, curve of [index, mean dev score, coefficient]


def find_snapshots(run: Path, experts: Sequence[Path]) -> dict[int, list[Path]]:
    """The folders of a run's snapshots by number from 1, in the experts' order; the last number is the experts.

    Raises: ValueError that lists experts trained without ``--keep-snapshots``, or with another number of them, and
        snapshots that are missing or of another training.
    """
    manifests = {path.name: checkpoint.load_manifest(path) for path in experts}
    counts = {task: manifest.get("keep_snapshots", 0) for task, manifest in manifests.items()}
    if len({*counts.values()}) > 1 or not all(counts.values()):
        each = ", ".join(f"{task} {count}" for task, count in counts.items())
        raise ValueError(f"{run} holds no common snapshots ({each}): train with --keep-snapshots NUMBER")
    count = next(iter(counts.values()))
    found, problems = dict[int, list[Path]](), list[str]()
    for index in range(1, count + 1):
        found[index] = [run / SNAPSHOTS / str(index) / task for task in manifests]
        for path in found[index]:
            try:
                manifest = checkpoint.load_manifest(path)
            except ValueError as error:
                problems += errors.texts(error)
                continue
            own, place = manifests[path.name], manifest.get("snapshot", {})
            rows = [(facts.get("train_rows") or {}).get("hash") for facts in (manifest, own)]
            if (
                (place.get("index"), place.get("of")) != (index, count)
                or any(manifest.get(name) != own.get(name) for name in SAME)
                or rows[0] != rows[1]
            ):
                problems.append(f"{path} is from another training run than {run / path.name}: train both again")
    errors.raise_problems(problems)
    return {**found, count + 1: list(experts)}


def choose_snapshot(
    base: Path, snapshots: Mapping[int, Sequence[Path]], last: Inputs, merge_at: Callable[[Inputs], Merged]
) -> Chosen:
    """The snapshot whose merged model has the largest mean dev score, the later of equal ones.

    Args:
        base: of all of them.
        snapshots: folders of experts by number.
        last: base and the experts of the last number, which are not read again.
        merge_at: merges the experts of one number, their coefficient chosen on dev.
    """
    best: tuple[int, Merged, Inputs] | None = None
    curve: dict[int, tuple[float, float | None]] = {}
    costs: dict[int, list[Tried]] = {}

    for index in sorted(snapshots, reverse=True):
        inputs = last
        if index != max(snapshots):
            inputs = load_inputs(base, snapshots[index], known=last)._replace(lines=last.lines)
        merged = merge_at(inputs)
        value = fmean(merged.dev.values())
        if best is None or merge.exceeds(value, curve[best[0]][0]):  # one model is kept
            best = index, merged, inputs
        curve[index] = value, merged.coef
        calibrated = merged.calibration.tried if merged.calibration else None
        costs[index] = [cost for cost in (merged.tried, calibrated) if cost is not None]
    assert best is not None
    chosen, merged, inputs = best
    # what the others took is part of this choice; the calibration of the chosen one is told apart
    others = [cost for index, own in costs.items() if index != chosen for cost in own]
    merged = merged if merged.tried is None else merged._replace(tried=total(merged.tried, *others))
    facts = inputs.manifests.items()
    steps = {task: own.get("snapshot", {}).get("step", own["training"]["steps"]) for task, own in facts}
    points = [[index, *curve[index]] for index in sorted(curve)]
    return Chosen(merged, inputs, {"index": chosen, "of": len(snapshots), "steps": steps, "curve": points})
