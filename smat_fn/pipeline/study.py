"""Methods compared over seeds: each method's learning rate chosen on dev, test scores at that choice alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from .. import checkpoint, merge
from ..config import PRESETS
from ..evaluate import Result
from ..evaluate.statistics import paired
from .evaluation import evaluate, find_checkpoints
from .training import mean

__all__ = ["Study", "Trial", "as_json", "choose_lr", "paired", "run_study", "run_trial"]


class Trial(NamedTuple):
    """One cell of a study: a method at a learning rate and a seed."""

    preset: str
    method: str
    lr: float
    seed: int

    def folder(self, work: Path) -> Path:
        """Where its experts and merged models are kept."""
        return work / f"{self.preset}-{self.method}-{self.lr:g}-seed{self.seed}"


class Study(NamedTuple):
    """What a study found."""

    dev: dict[str, dict[float, list[float]]]  # method -> learning rate -> five-merger dev mean per seed
    lr: dict[str, float]  # chosen per method
    rows: list[Result]  # test scores at the chosen learning rates


def run_study(
    preset: str, methods: Sequence[str], seeds: Sequence[int], *, work: Path, jobs: int, report: Callable[[str], None]
) -> Study:
    """Train and merge every (method, learning rate of the grid, seed), choose on dev, score the choice on test.

    Trials that stand in ``work`` are not run again.

    Args: jobs: processes, one thread each (1: this one); report: gets a line per finished trial.
    """
    grid = PRESETS[preset].lr_grid
    trials = [Trial(preset, m, lr, seed) for seed in seeds for m in methods for lr in sorted(grid)]
    # the first trial of each seed pretrains the base, the others find it in the cache
    for batch in (trials[:: len(trials) // len(seeds)], trials):
        for number, (trial, score) in enumerate(_run_all(batch, work, jobs), 1):
            report(f"[{number}/{len(batch)}] {trial.method}, lr {trial.lr:g}, seed {trial.seed}: dev {score:.2f}")
    dev = {m: {lr: [run_trial(Trial(preset, m, lr, s), work) for s in seeds] for lr in sorted(grid)} for m in methods}
    lr = {method: choose_lr(by_lr) for method, by_lr in dev.items()}
    chosen = [Trial(preset, method, lr[method], seed).folder(work) for method in methods for seed in seeds]
    return Study(dev, lr, evaluate(find_checkpoints(chosen)))


def choose_lr(dev: Mapping[float, Sequence[float]]) -> float:
    """The learning rate of the largest mean dev score over seeds, the smaller of equal ones."""
    return merge.choose(sorted(dev), lambda lr: mean(dev[lr])).best


def run_trial(trial: Trial, work: Path) -> float:
    """Experts and five merged models of one trial, unless they stand already: the five-merger mean on dev."""
    from ..data import load_suite
    from .merging import find_inputs, merge_run
    from .training import train_run

    folder, preset = trial.folder(work), PRESETS[trial.preset]
    mergers = folder / "merged"
    if not all((mergers / name / checkpoint.MANIFEST).exists() for name in preset.mergers):
        train_run(
            suite := load_suite(preset.suite, seed=trial.seed, progress=False),
            preset.methods[trial.method],
            replace(preset.training, lr=trial.lr),
            seed=trial.seed,
            tasks=suite.tasks,
            out=folder,
            overwrite=True,
        )
        configs = list(preset.mergers.values())
        merge_run(configs, *find_inputs(folder), out=mergers, search=True, seed=0, overwrite=True)
    manifests = [checkpoint.load_manifest(mergers / name) for name in preset.mergers]
    return mean([mean(list(manifest["dev"].values())) for manifest in manifests])


def _run_all(trials: Sequence[Trial], work: Path, jobs: int) -> Iterator[tuple[Trial, float]]:
    if jobs == 1:
        yield from ((trial, run_trial(trial, work)) for trial in trials)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        running = {pool.submit(run_trial, trial, work): trial for trial in trials}
        yield from ((running[done], done.result()) for done in as_completed(running))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def as_json(study: Study) -> Mapping[str, Any]:
    """The dev scores and chosen learning rates as JSON values."""
    return {"dev": {m: {f"{lr:g}": v for lr, v in by_lr.items()} for m, by_lr in study.dev.items()}, "lr": study.lr}
