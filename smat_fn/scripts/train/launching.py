"""Run commands in other processes: one per local device, or cluster jobs."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A command, and the file for its output."""

    name: str
    command: tuple[str, ...]
    log: Path


# runs all jobs and yields each with its exit status as it ends; another launcher is another such function
Launcher = Callable[[Sequence[Job]], Iterator[tuple[Job, int]]]
SLURM_DEFAULTS = {"timeout_min": 24 * 60, "gpus_per_node": 1}


def local(*, processes: int = 1, devices: Sequence[str] = ()) -> Launcher:
    """One process per GPU of ``devices`` (as CUDA_VISIBLE_DEVICES names it), or ``processes`` at a time.

    When this process is interrupted its children are asked to end, and waited for: they save what they have.

    Raises: ValueError for a number of processes below 1, and devices named twice.
    """
    if processes < 1:
        raise ValueError(f"processes is {processes}, must be at least 1")
    if len(set(devices)) != len(devices):
        raise ValueError(f"devices are {', '.join(devices)}: name each once")
    places = list(devices) or [""] * processes

    def run(jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        waiting, free = list(jobs), list(places)
        running: list[tuple[Job, str, subprocess.Popen]] = []
        try:
            while waiting or running:
                while waiting and free:
                    job, place = waiting.pop(0), free.pop(0)
                    running.append((job, place, _process_of(job, {"CUDA_VISIBLE_DEVICES": place} if place else {})))
                ended = [one for one in running if one[2].poll() is not None]
                if not ended:
                    time.sleep(0.05)
                for one in ended:
                    running.remove(one)
                    free.append(one[1])
                    yield one[0], one[2].returncode
        finally:
            for _, _, process in running:
                process.terminate()
            for _, _, process in running:
                process.wait()

    return run


def submitit_jobs(folder: Path, *, cluster: str | None = None, **parameters: Any) -> Launcher:
    """Every command as a job of a cluster, by the package ``submitit``.

    A job that the cluster preempts, or that reaches its time, is asked to save, and queued again with the same command.

    Args: folder: for its files; cluster: None finds Slurm, "debug" runs in this process; parameters: of
        ``AutoExecutor.update_parameters`` (timeout_min, gpus_per_node, slurm_partition...), over `SLURM_DEFAULTS`.
    Raises: ValueError where the package is missing, for parameters that it does not know, and for a job that the
        cluster does not accept.
    """
    try:
        import submitit
    except ImportError as error:
        raise ValueError("jobs of a cluster need the package submitit: pip install submitit, or run locally") from error
    executor = submitit.AutoExecutor(folder, cluster=cluster)
    try:
        executor.update_parameters(**{**SLURM_DEFAULTS, **parameters})
    except (NameError, AssertionError, TypeError) as error:
        given = " ".join(f"{name} {value}" for name, value in parameters.items())
        raise ValueError(f"--cluster-options {given}: submitit does not take them ({error})") from error

    def run(jobs: Sequence[Job]) -> Iterator[tuple[Job, int]]:
        sent = {}
        for job in jobs:
            try:
                sent[executor.submit(_Attempt(job))] = job
            except submitit.core.utils.FailedSubmissionError as error:
                begun = "".join(f", {known.name} is job {own.job_id}" for own, known in sent.items())
                raise ValueError(
                    f"the cluster does not accept the job {job.name}{begun}: check --cluster-options ({error})"
                ) from error
        for done in submitit.helpers.as_completed(list(sent)):
            # a job that the cluster ended has no result, whatever its command would have returned
            yield sent[done], done.result() if done.exception() is None else 1

    return run


def _process_of(job: Job, environment: Mapping[str, str]) -> subprocess.Popen:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "ab") as log:
        return subprocess.Popen(job.command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT)


@dataclass(frozen=True)
class _Attempt:
    """A job of submitit: signals of the cluster ask its command to save and end, which the job waits for."""

    job: Job

    def __call__(self) -> int:
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            return _process_of(self.job, {}).wait()
        asked, running = dict[int, None](), list[subprocess.Popen]()

        def forward(number: int, frame: FrameType | None) -> None:
            asked[number] = None
            for process in running:
                process.terminate()

        signals = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
        before: dict[int, Any] = {number: signal.signal(number, forward) for number in signals}
        try:
            running.append(_process_of(self.job, {}))
            if asked:  # while it started
                running[0].terminate()
            status = running[0].wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        for number in asked:
            if callable(before[number]):
                signal.raise_signal(number)  # submitit queues the job again, or ignores it
        return status

    def checkpoint(self) -> Any:
        """The protocol of submitit: the next attempt is the same command, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
