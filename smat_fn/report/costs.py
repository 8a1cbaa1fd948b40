"""What training cost: seconds and memory of expert sets."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..evaluate.runs import SET, Run
from .section import Section, Table
from .tables import Cell, cell_of


class Cost(NamedTuple):
    """The cost of one label's expert sets; what was not recorded for all experts is None."""

    tasks: frozenset[str]
    seconds: Cell | None  # of the training loops, summed over the experts
    per_step: Cell | None
    peak: int | None  # bytes, the largest over experts and seeds
    peak_of: str  # what these bytes are


def costs_of(runs: Iterable[Run]) -> dict[str, Cost]:
    """Costs by label."""
    sets: dict[str, dict[int, list[Run]]] = {}
    for run in runs:
        if run.trains:
            sets.setdefault(run.label, {}).setdefault(run.seed, []).append(run)
    return {label: _cost(dict(sorted(by_seed.items()))) for label, by_seed in sets.items()}


def _cost(by_seed: dict[int, list[Run]]) -> Cost:
    experts = [run for runs in by_seed.values() for run in runs]
    # steps of a row of a whole set are those of one expert
    steps = {
        seed: sum(0 if run.model == SET else run.training.get("steps") or 0 for run in runs)
        for seed, runs in by_seed.items()
    }
    seconds = per_step = None
    if all(run.seconds is not None for run in experts):
        seconds = cell_of({seed: sum(run.seconds or 0.0 for run in runs) for seed, runs in by_seed.items()})
        if all(steps.values()):
            per_step = cell_of({seed: total / steps[seed] for seed, total in seconds.by_seed.items()})
    peaks = [run.peak_memory_bytes for run in experts]
    peak = None if None in peaks else max(p for p in peaks if p is not None)
    peak_of = ", ".join(sorted({run.peak_memory_of for run in experts} - {""}))
    return Cost(frozenset(run.model for run in experts), seconds, per_step, peak, peak_of)


def times(cost: Cost | None, reference: Cost | None) -> Cell | None:
    """Seconds over the reference's, per seed that both have; None for other tasks or where they were not recorded."""
    if cost is None or reference is None or cost.tasks != reference.tasks:
        return None
    if cost.seconds is None or reference.seconds is None:
        return None
    mine, other = cost.seconds.by_seed, reference.seconds.by_seed
    ratios = {seed: mine[seed] / other[seed] for seed in mine if other.get(seed)}
    return cell_of(ratios) if ratios else None


def size(count: int) -> str:
    """Bytes in MiB, from 1 GiB on in GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def cost_section(costs: Mapping[str, Cost], references: Mapping[str, str | None]) -> Section | None:
    """Seconds a step and in all, and memory, beside the reference's; None where nothing was recorded."""
    known = {label: cost for label, cost in costs.items() if cost.seconds or cost.peak}
    if not known:
        return None
    rows: list[list[object]] = []
    records: list[dict[str, object]] = []
    for label, cost in known.items():
        base = costs.get(references.get(label) or "")
        ratio = times(cost, base)
        more = 100 * (cost.peak / base.peak - 1) if cost.peak and base and base.peak else None
        rows.append(
            [
                label,
                cost.per_step and cost.per_step.text(4),
                cost.seconds and cost.seconds.text(1),
                ratio and ("1" if cost is base else ratio.text(3)),
                cost.peak and size(cost.peak),
                None if more is None or cost is base else f"{round(more, 1) + 0.0:+.1f} %",
            ]
        )
        records.append(
            {
                "method": label,
                "seconds_per_step": cost.per_step and cost.per_step.mean,
                "seconds": cost.seconds and cost.seconds.mean,
                "seconds_sd": cost.seconds and cost.seconds.sd,
                "times_reference": ratio and ratio.mean,
                "peak_memory_bytes": cost.peak,
            }
        )
    against = next((name for name in references.values() if name), "reference")
    of = ", ".join(dict.fromkeys(cost.peak_of for cost in known.values() if cost.peak_of))
    columns = ["Method", "Seconds a step", "Seconds in all", f"x {against}", "Peak memory", f"against {against}"]
    text = (
        "Seconds of the training loops, batches and logging included, summed over the experts of a set; loading, "
        "saving, merging and evaluation are left out. Mean over seeds. Memory: the largest peak of training an expert."
    )
    text += f" It is of: {of}." if of else ""
    return Section("Training cost", text, Table(columns, rows, records))
