"""One batched evaluation of many merged models timed against a loop over them, on digits.

Experts are the base with random updates, since time does not depend on what they have learnt, and the base is a barely
pretrained one. Three sweeps of `smat_fn.analyses`, on one CPU thread: by a loop, and by `torch.func.vmap` under two
memory budgets, of which the first is the default on a CPU.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smat_fn import merge, random
from smat_fn.analyses import Job, cyclic_subsets, landscape, partner_update, scores_of
from smat_fn.suites import load_suite

from . import timing

RESULTS = timing.RESULTS / "vmap.json"
BUDGETS = {"loop": 0, "vmap, 8 MiB": 1 << 23, "vmap, 64 MiB": 1 << 26}
UPDATE = 2e-3  # RMS of an expert's update, about that of FT on this suite


def main(*, rounds: int = 7, out: Path = RESULTS) -> None:
    """Time the sweeps, print a table, write the results.

    Args: rounds: of every sweep; out: file of the results.
    """
    torch.set_num_threads(1)
    facts = timing.describe("python -m benchmarks vmap")
    rows = []
    for name, (count, run) in sweeps().items():
        values = {label: torch.tensor(run(memory)) for label, memory in BUDGETS.items()}
        gap = max(float((found - values["loop"]).abs().max()) for found in values.values())
        times = timing.interleaved(
            {label: partial(run, memory) for label, memory in BUDGETS.items()}, rounds=rounds, clock=timing.cpu_time
        )
        row: dict[str, Any] = {"sweep": name, "evaluations": count, "loop s": timing.quartiles(times["loop"])}
        row |= {f"{label} / loop": timing.ratios(t, times["loop"]) for label, t in times.items() if label != "loop"}
        rows.append({**row, "largest difference": gap})
        print(timing.markdown(rows[-1:]), flush=True)
    timing.store(out, {**facts, "rounds": rounds, "rows": rows})
    print(timing.markdown(rows))


def sweeps() -> dict[str, tuple[int, Callable[[int], list[float]]]]:
    """The timed sweeps by name: the number of evaluations, and a function of the memory budget that runs them."""
    suite = load_suite("digits", seed=0, pretrain_steps=10, progress=False)
    base, tasks, key = suite.base, suite.tasks, random.key(0)
    experts = {task: _moved(base, random.fold_in(key, task)) for task in tasks}
    vector = merge.task_arithmetic_vector(base, experts)

    def scores(jobs: list[Job], memory: int) -> list[float]:
        return [value for job in scores_of(suite, "dev", memory=memory)(jobs) for value in job.values()]

    grid = [Job(partial(merge.apply_vector, base, vector, coef=c), tasks) for c in merge.COEFS]
    subsets = [subset for count in range(2, len(tasks) + 1) for subset in cyclic_subsets(tasks, count)]
    merged = [
        Job(partial(merge.task_arithmetic, base, {task: experts[task] for task in subset}, coef=0.3), subset)
        for subset in subsets
    ]
    task = tasks[0]
    batch, partners, axis = suite.batch(task, key, 0), partner_update(base, experts, task), [i / 7 for i in range(15)]

    def surface(memory: int) -> list[float]:
        loss = lambda params: suite.loss_fn(task)(params, batch)[0]  # noqa: E731
        lines = landscape(base, experts[task], partners, loss, a=axis, b=axis, memory=memory)
        return [value for line in lines for value in line]

    return {
        "10 coefficients, 250 images": (10 * len(tasks), lambda memory: scores(grid, memory)),
        "subsets of 4 experts, 250 images": (sum(map(len, subsets)), lambda memory: scores(merged, memory)),
        "slice of 15 x 15, 16 images": (225, surface),
    }


def _moved(base: dict[str, Tensor], key: Tensor) -> dict[str, Tensor]:
    bound = 3**0.5 * UPDATE
    return {
        path: leaf + random.uniform(random.fold_in(key, path), leaf.shape, minval=-bound, maxval=bound)
        for path, leaf in base.items()
    }
