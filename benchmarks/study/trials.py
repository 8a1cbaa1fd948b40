"""Trials: experts, merged models and scores of one method at one seed; many of them in processes, resumable."""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from smat_fn import checkpoint, lora
from smat_fn.analyses import interference
from smat_fn.evaluate import Result
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.sources import OUTCOME
from smat_fn.scripts.train import memory

from .trial import Kind, Trial

Outcome = dict[str, Any]


def outcome(trial: Trial, work: Path) -> Outcome | None:
    """The outcome of a finished trial, None where it has not finished.

    ``trial`` (its `Trial.facts`), ``dev`` and ``coefs`` (by merger), ``five`` (mean of dev over tasks and mergers),
    ``test`` (rows, or None where they were not asked for), ``geometry``, ``training_seconds``, ``training_cpu_seconds``
    (of all threads), ``seconds`` and ``peak_bytes`` (of the process while it trained, None where the system does not
    tell).
    """
    file = trial.folder(work) / OUTCOME
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def rows_of(found: Outcome) -> list[Result]:
    """The test scores of an outcome."""
    return [Result(**row) for row in found["test"] or ()]


def run_trial(trial: Trial, work: Path, test: bool, keep: bool) -> Outcome:
    """Train the experts, merge them, choose coefficients on dev; what stands in ``work`` is not done again.

    The outcome is written last: a trial that was stopped starts again from nothing.

    Args: test: also score experts and merged models on test; keep: False deletes the weights when all is scored.
    """
    folder, started = trial.folder(work), time.perf_counter()
    found = outcome(trial, work)
    if found is None or (test and found["test"] is None and not _has_weights(folder)):
        found = _train_and_merge(trial, folder)
        found["seconds"] = round(time.perf_counter() - started, 3)
        checkpoint.write_text(folder / OUTCOME, json.dumps(found, indent=1) + "\n")
    if test and found["test"] is None:
        started = time.perf_counter()
        found["test"] = [asdict(row) for row in evaluate(find_checkpoints([folder]))]
        found["seconds"] = round(found["seconds"] + time.perf_counter() - started, 3)
        checkpoint.write_text(folder / OUTCOME, json.dumps(found, indent=1) + "\n")
    if not keep:
        for file in folder.rglob(checkpoint.WEIGHTS):
            file.unlink()
    return found


def run_trials(
    trials: Sequence[Trial],
    work: Path,
    *,
    jobs: int,
    report: Callable[[str], None],
    test: bool = False,
    keep: Callable[[Trial], bool] = lambda trial: True,
    run_one: Callable[[Trial, Path, bool, bool], Outcome] = run_trial,
) -> Iterator[tuple[Trial, Outcome]]:
    """`run_trial` of each, in order, in ``jobs`` processes of one thread (1: this one); yields them as they finish.

    First what the suites keep in the cache and is not there yet is made: bases, states of frozen layers. Time left is
    reckoned from finished trials. A trial that fails does not stop the others.

    Args: report: gets a line per finished trial, with the time left; run_one: in place of `run_trial`.
    Raises: ValueError for a trial that is there twice; RuntimeError, at the end, that lists the trials that failed.
    """
    folders = [trial.folder(work) for trial in trials]
    if len(set(folders)) < len(folders):
        raise ValueError("run_trials: a trial is there twice")
    done = [(trial, found) for trial in trials if (found := outcome(trial, work)) and _complete(found, test)]
    yield from done
    finished = {trial.folder(work) for trial, _ in done}
    left = [trial for trial in trials if trial.folder(work) not in finished]
    seconds: dict[Kind, list[float]] = {}
    for trial, found in done:
        seconds.setdefault(trial.kind(), []).append(found["seconds"])
    if not left:
        return
    failed = []
    with _pool(jobs) as pool:
        if pool is not None:
            for _ in range(jobs):  # all processes start now, beside the first suites
                pool.submit(_import)
        firsts = {json.dumps([trial.facts()["suite"], trial.seed]): (trial,) for trial in reversed(left)}
        report(f"{len(done)} of {len(trials)} trials stand; bases of {len(firsts)} seeds: pretrained unless cached")
        for _, run in _each(pool, _prepare, list(reversed(firsts.values()))):
            run.result()
        report(f"{len(left)} trials in {jobs} processes, {_time_left(left, seconds, jobs)}")
        todo = list(left)
        for place, run in _each(pool, run_one, [(trial, work, test, keep(trial)) for trial in todo]):
            trial = todo[place]
            left.remove(trial)
            try:
                found = run.result()
            except Exception as error:  # whatever it is, the other trials can be saved
                failed.append(f"{trial}: {error}")
                report(f"failed: {failed[-1]}")
                continue
            seconds.setdefault(trial.kind(), []).append(found["seconds"])
            nth, five = f"[{len(trials) - len(left)}/{len(trials)}]", found["five"]
            report(f"{nth} {trial}: dev {five:.2f}, {found['seconds']:.0f} s; {_time_left(left, seconds, jobs)}")
            yield trial, found
    if failed:
        raise RuntimeError("these trials failed, run again to retry them: " + "; ".join(failed))


def _time_left(left: Sequence[Trial], seconds: Mapping[Kind, Sequence[float]], jobs: int) -> str:
    """The estimated time left, from the seconds of finished trials; a kind without any takes as long as the others."""
    if not seconds:
        return "the time left is known when one has finished"
    known = {kind: fmean(values) for kind, values in seconds.items()}
    total = sum(known.get(trial.kind(), fmean(known.values())) for trial in left)
    return f"about {max(1, round(total / jobs / 60))} min left"


def _train_and_merge(trial: Trial, folder: Path) -> Outcome:
    from smat_fn.scripts.merge.in_memory import Request, merge_run
    from smat_fn.scripts.run_folder import find_inputs
    from smat_fn.scripts.train.options import RunOptions
    from smat_fn.scripts.train.training import train_run

    shutil.rmtree(folder, ignore_errors=True)
    suite = trial.load()
    measured = memory.reset_process_peak()
    run = RunOptions(folder, suite.tasks, trial.seed, label=trial.label)
    before = time.process_time()
    experts = train_run(suite, trial.method, trial.training, run)
    used = time.process_time() - before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # other processes share the GPU
    peak = memory.process_peak() if measured else None
    inputs, out, coefs = find_inputs(folder), folder / "merged", trial.coefs
    merged = merge_run(Request(trial.merging(), *inputs, out=out, search=True, coefs=coefs, widen=trial.widen, seed=0))
    dev = {path.name: model.dev for path, model in merged.items()}
    return {
        "label": trial.label,
        "trial": trial.facts(),
        "dev": dev,
        "coefs": {path.name: model.coef for path, model in merged.items()},
        "five": fmean([fmean(scores.values()) for scores in dev.values()]),
        "test": None,
        "geometry": geometry(*inputs),
        "training_seconds": round(sum(checkpoint.load_manifest(path)["seconds"] for path in experts), 3),
        "training_cpu_seconds": round(used, 3),
        "peak_bytes": peak,
    }


def geometry(base: Path, experts: Sequence[Path]) -> dict[str, float]:
    """How experts lie to each other: ``cosine``, the mean over pairs of task vectors, and ``norm``, their mean norm."""
    start, _ = checkpoint.load_leaves(base)
    found = [lora.load_expert(path, start)[0] for path in experts]
    *_, whole = interference(
        (path, [own[path].double() - leaf.double() for own in found]) for path, leaf in start.items()
    )
    return {"cosine": whole.cosine or 0.0, "norm": fmean(whole.rms) * math.sqrt(whole.size)}


def _complete(found: Mapping[str, Any], test: bool) -> bool:
    return not test or found["test"] is not None


def _has_weights(folder: Path) -> bool:
    return all((path / checkpoint.WEIGHTS).exists() for path in find_checkpoints([folder]))


def _import() -> None:
    import smat_fn.scripts.merge.in_memory
    import smat_fn.scripts.train.training
    import smat_fn.suites.trace  # noqa: F401


def _prepare(trial: Trial) -> None:
    """Leaves in the cache what training and the search on dev take from there."""
    from smat_fn import random

    suite = trial.load()
    for task in suite.tasks:
        suite.batch(task, random.key(0), 0)
        if suite.dev_batches is not None:
            suite.dev_batches(task)


@contextmanager
def _pool(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    if jobs == 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _each(
    pool: ProcessPoolExecutor | None, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, Future[Any]]]:
    """The finished calls with their places: as they finish, or one by one in this process."""
    if pool is not None:
        running = {pool.submit(function, *call): place for place, call in enumerate(calls)}
        yield from ((running[run], run) for run in as_completed(running))
        return
    for place, call in enumerate(calls):
        run: Future[Any] = Future()
        try:
            run.set_result(function(*call))
        except Exception as error:
            run.set_exception(error)
        yield place, run


def _one_thread() -> None:
    torch.set_num_threads(1)
