"""Many runs of train.py from one command: every method with every seed, and a table of their progress."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ... import checkpoint, errors, machine
from ...config import METHODS, MORE_METHODS, PRESETS, Smat
from ...folders.writing import locked
from ...suites import task_names
from .. import cli, outcome
from ..manifests import manifest_of
from ..signals import leaving_on_signals
from . import launching, resuming
from .launching import Job, Launcher
from .settings import DataSettings, Status, Sweep

JOBS = "jobs"  # folder of their logs
_MOST = 100  # files to hold open


class Progress(NamedTuple):
    """How far one expert is."""

    run: str
    task: str
    done: bool
    step: int | None  # of the last line of its log, None without a log
    loss: float | None


def jobs(options: Sweep, *, script: Sequence[str]) -> list[Job]:
    """The runs of a sweep, seeds in the outer loop so that all methods of one seed end together.

    Args:
        options: of the command line.
        script: words after ``python`` that start train.py.

    Raises: ValueError that lists unknown methods, repeated methods and seeds, and flags that a sweep sets itself.
    """
    known = [config.name for config in (*METHODS, *MORE_METHODS)]
    problems = [f"method {m!r} is unknown, choose from {', '.join(known)}" for m in options.methods if m not in known]
    for name, values in (("methods", options.methods), ("seeds", options.seeds)):
        problems += [] if values else [f"no {name}: name at least one"]
        problems += [] if len(set(values)) == len(values) else [f"{name} are {values}: name each once"]
    try:
        flags = shlex.split(options.flags)
    except ValueError as error:
        flags = []
        problems.append(f"--flags={options.flags!r} cannot be split into words ({error}): close every quotation mark")
    own = {"--seed", "--out", "--resume", "--overwrite"}
    problems += [
        f"flag {flag} is set by the sweep itself: leave it out of --flags"
        for flag in flags
        if flag.partition("=")[0] in own
    ]
    if "--joint" in flags:
        problems.append("flag --joint: a sweep trains experts, leave it out of --flags and run train.py METHOD --joint")
    errors.raise_problems(problems)
    found = []
    for seed in options.seeds:
        for method in options.methods:
            name = f"{method}-seed{seed}"
            own_flags = ("--seed", str(seed), "--out", str(options.out / name), "--resume")
            command = (sys.executable, *script, method, *own_flags, *flags_of(method, flags)[0])
            found.append(Job(name, command, options.out / JOBS / f"{name}.log"))
    return found


def flags_of(method: str, flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of ``--flags`` for a method, and the options that it lacks, which are those of other methods."""
    of = {
        config.name: {f"--{option.name.replace('_', '-')}" for option in fields(config)}
        for config in (*METHODS, *MORE_METHODS)
    }
    foreign = set[str]().union(*of.values()) - of.get(method, set())
    own, left, taken = list[str](), list[str](), True
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            taken = name not in foreign and name.replace("--no-", "--") not in foreign
            left += [] if taken else [name]
        own += [word] if taken else []
    return own, left


def sweep(options: Sweep, *, script: Sequence[str], report: Callable[[str], None] = print) -> None:
    """Run the jobs that have not succeeded yet, or whose experts are gone.

    Args: options, script: as those of `jobs`; report: is called with each line.

    Raises: ValueError as `jobs`; for experts and snapshots of other code, unless they are to be kept; and at the end if
        a run failed, naming the logs, or if runs of one seed were trained on different rows.
    """
    launch = _launcher(options)
    wanted = jobs(options, script=script)
    if not options.other_code:
        _check_code([_run(options, job) for job in wanted])
    waiting = [job for job in wanted if not _ended_well(job, _run(options, job), options.flags)]
    for method in options.methods:
        if others := flags_of(method, shlex.split(options.flags))[1]:
            report(f"note: {method} has no {' or '.join(others)}, and is trained without")
    report(f"{len(wanted)} runs, {len(wanted) - len(waiting)} of them done; logs in {options.out / JOBS}")
    failed, ended = list[Job](), 0
    with ExitStack() as held, leaving_on_signals():
        for lock, name in _locks(options, waiting).items():
            held.enter_context(locked(lock, f"another sweep runs {name} (it holds {lock}): wait for it"))
        launched = chain.from_iterable(launch(wave) for wave in _waves(options.flags, waiting) if not failed)
        for job, status in launched:
            ended += 1
            if status == 0:
                mark = {"command": job.command, "experts": sorted(_experts(_run(options, job)))}
                checkpoint.write_text(_mark(job), json.dumps(mark) + "\n")
            else:
                failed.append(job)
            outcome.add("runs", {"run": job.name, "status": status, "log": job.log})
            how = "done" if status == 0 else f"failed with status {status}"
            report(f"[{ended}/{len(waiting)}] {job.name}: {how}")
    if failed:
        rest = f"; {left} wait for their sigma, which is measured on these" if (left := len(waiting) - ended) else ""
        raise ValueError(
            f"{len(failed)} runs failed: read {', '.join(str(j.log) for j in failed)}, then rerun the sweep{rest}"
        )
    errors.raise_problems(_other_rows([_run(options, job) for job in wanted]))


def _locks(options: Sweep, waiting: Sequence[Job]) -> dict[Path, str]:
    """The files that a sweep locks, with what they stand for: its runs, or all where they would be too many to open."""
    if len(waiting) > _MOST:
        return {options.out / JOBS / "sweep.lock": "here"}
    return {job.log.with_suffix(".lock"): job.name for job in waiting}


def _waves(flags: str, waiting: Sequence[Job]) -> list[list[Job]]:
    """The runs of ft before all others where these measure sigma on them: no sigma depends on what ends first."""
    words = shlex.split(flags)
    preset = PRESETS.get(cli.value_of("--preset", words, DataSettings.preset))
    own = preset.methods.get(Smat.name) if preset else None
    if cli.value_of("--sigma", words, getattr(own, "sigma", None)) != "auto":
        return [list(waiting)]
    first = [job for job in waiting if job.name.startswith("ft-seed")]
    return [first, [job for job in waiting if job not in first]]


def progress(out: Path) -> list[Progress]:
    """Every expert that is done or has a log, below a folder. Raises: ValueError where there is none."""
    found = []
    logs = checkpoint.logs_below(out)
    manifests = {m.parent for m in checkpoint.files_below(out, checkpoint.MANIFEST)}
    experts = {folder for folder in manifests if manifest_of(folder).get("kind") in resuming.TRAINED}
    for folder in sorted(experts | set(logs)):
        last = _last(logs[folder]) if folder in logs else {}
        run = str(folder.parent.relative_to(out))
        done = folder in experts and resuming.finished(folder.parent, folder.name)
        found.append(Progress(run, folder.name, done, last.get("step"), last.get("loss")))
    if not found:
        raise ValueError(f"{out} holds no run of train.py: give its --out folder, or a parent folder")
    return found


def table(rows: Sequence[Progress]) -> Any:
    """A rich table: a line per run, a column per task. A run's tasks are those of all runs that share one with it.

    A multi-task model has a column of its own, and is not missing where a run has none.
    """
    from rich.table import Table

    tasks, runs = list(dict.fromkeys(r.task for r in rows)), list(dict.fromkeys(r.run for r in rows))
    cells = {(r.run, r.task): _cell(r) for r in rows}
    shown = Table("run", *tasks, "done")
    own = {run: {r.task for r in rows if r.run == run} for run in runs}
    experts = {run: tasks_of - {checkpoint.JOINT} for run, tasks_of in own.items()}
    for run in runs:
        ended = sum(r.done for r in rows if r.run == run)
        wanted = own[run].union(*(others for others in experts.values() if others & own[run]))
        line = (cells.get((run, task), "-" if task in wanted else "") for task in tasks)
        shown.add_row(run, *line, f"{ended}/{len(wanted)}")
    return shown


def status(options: Status) -> None:
    """Print the table."""
    from rich.console import Console

    rows = progress(options.folder)
    Console(width=max(100, Console().width)).print(table(rows))
    for row in rows:
        outcome.add("experts", row._asdict())


def _cell(row: Progress) -> str:
    if row.done or row.step is None:
        return "done" if row.done else "started"
    return f"step {row.step + 1}" + ("" if row.loss is None else f", loss {row.loss:.3f}")


def _last(log: Path) -> dict[str, Any]:
    """The last whole line with a step: a line may be half written, or damaged."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            return row
    return {}


def _mark(job: Job) -> Path:
    return job.log.with_suffix(".done.json")


def _run(options: Sweep, job: Job) -> Path:
    return options.out / job.name


def _experts(run: Path) -> dict[str, dict[str, Any]]:
    """The manifests of a run's finished experts."""
    found = {file.parent: manifest_of(file.parent) for file in run.glob(f"*/{checkpoint.MANIFEST}")}
    return {folder.name: manifest for folder, manifest in found.items() if manifest.get("kind") == "expert"}


def _ended_well(job: Job, run: Path, flags: str) -> bool:
    """Whether the same command has succeeded, and the experts that it left and those of all tasks are there."""
    if not _mark(job).exists():
        return False
    mark = json.loads(_mark(job).read_text(encoding="utf-8"))
    experts = _experts(run)
    whole = experts.keys() & mark["experts"] == set(mark["experts"]) != set()
    return whole and tuple(mark["command"]) == job.command and not _new_tasks(flags, experts)


def _new_tasks(flags: str, experts: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Tasks of the data, in a folder or a file of folders, of which a run has no expert; none where the flags name its
    tasks, or the data are a dataset of the hub, whose tasks are those of the suite or of the flags."""
    words = shlex.split(flags)
    named = any(word.partition("=")[0] in ("--tasks", "tasks") for word in words)
    suite: dict[str, Any] = next((own["suite"] for own in experts.values() if own.get("suite")), {})
    data = suite.get("data")
    if isinstance(data, Mapping):  # what a file of data held when the experts were trained: the flags name the file
        pairs = [(*word.partition("="), after) for word, after in pairwise((*words, ""))]
        data = next((value or after for name, _, value, after in reversed(pairs) if name in ("--data", "data")), None)
    if named or not isinstance(data, str) or not Path(data).expanduser().exists():  # on the hub, or one that moved
        return set()
    return set(task_names(suite["name"], data=data)) - experts.keys()


def _check_code(runs: Sequence[Path]) -> None:
    problems = []
    for run in runs:
        made = {run / task: manifest.get("code") for task, manifest in _experts(run).items()}
        for file in run.glob(f"*{resuming.ENDING}"):
            if (last := resuming.read(file)) is not None:
                made[file] = last.code
        problems += [f"{path} is of code {code or 'unknown'}" for path, code in made.items() if code != machine.code()]
    if problems:
        way = "give another --out, remove them, or keep them with --other-code"
        problems.append(f"this is {machine.code()}: {way}")
    errors.raise_problems(problems)


def _other_rows(runs: Sequence[Path]) -> list[str]:
    """Errors for runs of one seed whose experts of a task were trained on different rows: the data were edited."""
    found: dict[tuple[int, str], dict[str, list[str]]] = {}
    for run in runs:
        for task, manifest in _experts(run).items():
            if rows := manifest.get("train_rows"):
                found.setdefault((manifest.get("seed", 0), task), {}).setdefault(rows.get("hash", ""), []).append(
                    run.name
                )
    return [
        f"the training rows of {task} changed during the sweep: those of {' are not those of '.join(names)}; remove "
        "the runs on the old rows, then rerun the sweep"
        for (_, task), sets in found.items()
        if len(names := [", ".join(own) for own in sets.values()]) > 1
    ]


def _launcher(options: Sweep) -> Launcher:
    given = " ".join(f"{name} {value}" for name, value in options.cluster_options.items())
    if options.launcher == "local" and given:
        raise ValueError(f"--cluster-options {given} would change nothing: pass --launcher submitit too")
    if options.launcher == "submitit" and (options.devices or options.processes != 1):
        raise ValueError(
            "--devices and --processes are those of --launcher local: leave them out, and give each job of the cluster "
            "its GPUs by --cluster-options"
        )
    if options.launcher == "local":
        return launching.local(processes=options.processes, devices=options.devices)
    parameters: dict[str, Any] = dict(options.cluster_options)
    return launching.submitit_jobs(options.out / JOBS / "submitit", **parameters)
