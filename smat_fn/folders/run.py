"""Merging of checkpoint folders: all checks first, then shard by shard, written atomically."""

import errno
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, Unpack

from .. import __version__, checkpoint, errors, machine
from ..checkpoint import write_text
from ..merge.parts.inputs import check_variances
from ..merge.parts.masked import of_all_tasks
from ..merge.parts.merger import Merger, Rule
from ..merge.parts.windows import in_order
from ..merge.weight_average import WeightAverage
from .files import Changed, Hashing, check_unchanged, followed, identity, sampled, shared, size_text
from .inputs.stacks import layers_read
from .multi_task import open_several, prepared, write_several
from .prepare import Options, place_problems, prepare
from .streaming.chunks import Job, Written, rule_of, write_order, written
from .streaming.estimate import memory_bound, memory_problems, seconds_of
from .streaming.survey import Survey
from .writing import (
    Shard,
    Work,
    exclusive,
    file_limit,
    fill,
    largest_leaf,
    load_progress,
    recover,
    save_progress,
    shard_file,
    take_place,
    work_folder,
    write_chunk,
)


class Report(NamedTuple):
    """Report of a finished merge."""

    density: dict[str, float]  # TIES: the fraction of coordinates kept of every expert, else empty
    rounding_ratio: float  # RMS of the last rounding / RMS of the merged change of base; above 1 it drowns the change
    seconds: float
    bytes: int  # of tensor data written
    inputs: dict[str, list[Path]]  # the files that were read, of "base" and "expert 'name'"
    hashes: dict[Path, str]  # SHA-256 of the finished files, and with a description of those that were read
    notes: tuple[str, ...] = ()  # what a user should know of the inputs: tokenizers that differ

    @property
    def rounding(self) -> float | None:
        """The ratio for a manifest: None where nothing but rounding changes base, since JSON has no infinity."""
        return self.rounding_ratio if math.isfinite(self.rounding_ratio) else None


class Plan(NamedTuple):
    """Estimated cost of a merge, from file headers and a trial on one chunk."""

    memory: int  # bytes, a bound of the anonymous memory at its peak, above that of an idle process
    read: int  # bytes of all inputs' files
    disk: int  # bytes that are written; twice as many are taken where a merge of the same name is replaced
    seconds: float  # of computation on this machine with its present threads; disks slower than that add to it
    shards: tuple[str, ...]
    leaves: int
    parameters: int
    notes: tuple[str, ...] = ()  # as of `Report`


Describe: TypeAlias = Callable[[Sequence[Path], Report], Mapping[str, str]]


# over 60 lines: its docstring explains every argument
def merge_folders(
    config: Merger,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    *,
    describe: Describe | None = None,
    hashing: Hashing | None = None,
    **options: Unpack[Options],
) -> Report:
    """Merge checkpoint folders on disk, bit-identical to the merger of ``config`` in memory.

    The output has base's leaves, shapes and dtypes, its configuration and its tokenizer. It is written
    atomically; an interrupted merge resumes after its last complete shard when rerun. Anonymous memory, besides that of
    libraries, stays below 80 bytes x chunk + 32 MiB: it grows neither with the model nor with the number N of experts.
    Mergers that need more of a leaf at once say so in `Merger.memory`: DELLA rows, TSV-Merge whole leaves.
    EMR-Merging and TALL masks without a task give the models of all tasks in one folder (`multi_task`, `export_task`):
    4 bytes a weight (8 where a leaf is float64), and 1/8 byte a weight for each task.

    Args:
        base, experts: folders, single ``.safetensors`` files, or hub names "owner/name" or "owner/name@revision"; an
            expert may be a folder of a LoRA adapter (`open_adapter`), both may be stacks of layers, as
            ``A[0:3]+B[1:4]`` (`stacks.stacked`); the name of an expert decides random masks.
        describe: given the files of the finished checkpoint and the report, the texts of more files by name, which
            appear with it; default: a manifest that names the merger, its settings and the files.
        hashing: shared by several merges, so that each of their inputs is hashed once; default: its own.
        coef: γ, or {glob: γ} as in `coefs_of`, else ``config.coef``.
        key: int64 (2,), for random masks.
        out_dtype: of the floating-point leaves, "same" as base's.
        shard_size: bytes of tensor data in one file; a base in a single file gives a single file.
        chunk: coordinates in memory at a time, all experts together; it changes no bit. None: 2**19, on a GPU 2**27 or
            as many as half of its free memory holds.
        workers: threads that share the chunk; give torch one thread (``torch.set_num_threads``) for each.
        overwrite: replace ``out``, of which only files that its manifest names are ever deleted; a symbolic link
            stays, and what it points to is replaced.
        device: where chunks are merged; on a GPU some mergers have other last bits (docs/gotchas.md).
        vocabulary: what to do with embeddings and heads of another number of rows than base's: "error", "base-rows"
            or "pad-with-base", as in `fit_rows`.
        partial: an expert may hold a part of base's leaves and has the others of base; they count like any others
            where a merger compares magnitudes.
        config_from: whose configuration the output has, an expert's name or a folder; without it experts whose
            configurations contradict base's are refused.
        tokenizer_from: whose tokenizer it has: "base", "union", an expert's name or a folder; embeddings and heads are
            then merged by token (`tokens.aligned`), without it by row.
        token_rows: what a model that lacks a token has there: base's row where base is merged too, or the "mean" of the
            models that have it; "by-row" merges by row, and only writes the tokenizer.
        tokens: with tokenizer_from, rows of single tokens (`tokens.aligned`): {token: {"model": NAME}}, {"zero": True},
            and with {"force": True} for models that have the token too.
        pad_to_multiple_of: with tokenizer_from, of the number of rows; further ones are a model's mean row.
        into: "base" or the name of an expert, a vision-language model: its language model is merged with text models,
            whose names one prefix maps to those there, and its other leaves are copied (`inside`).
        heads: "keep" writes the leaves outside base's layers that an expert has and base has not, or that any expert
            has in another shape, into ``heads/NAME.safetensors``, and merges the rest.
        chat_template: "auto" for the most frequent one of the inputs, a template, or a file of one.

    Raises:
        ValueError: lists every problem of options and headers before any work; later for values that are not finite,
            with all their leaves, for inputs that change while they are read, if another merge into ``out`` is running,
            and when the disk is full, where the next call resumes. Nothing is left in ``out`` then.
    """
    out = checkpoint.follow(Path(out))
    job, shards = prepared(config, base, experts, out, **options)
    overwrite, more = options.get("overwrite", False), read_by(base, experts, options)
    return write_job(job, shards, out, describe=describe, hashing=hashing, overwrite=overwrite, more=more)


def export_task(
    model: Path,
    base: Path,
    task: str | None,
    out: Path,
    *,
    describe: Describe | None = None,
    **options: Unpack[Options],
) -> Report:
    """Write the model of one task of a folder of the models of all tasks: the bits of the merge for this task alone.

    Args:
        model: the folder.
        base: that of the merge.
        task: one of its tasks.
        out, describe, options: as of `merge_folders`; without the coefficient, which the folder has.

    Raises: ValueError as `merge_folders`; for an unknown task, masks that do not fit, and another base.
    """
    out, found = checkpoint.follow(out), open_several(model)
    found.place(task)
    assert task is not None
    problems = place_problems(out, [model], overwrite=True)
    job, shards = prepare(WeightAverage(), base, {task: base}, out, **options)
    if not found.fits(job.base.leaves):
        problems.append(f"{model} has other parameters than {base}: give the base of that merge")
    errors.raise_problems(problems)
    view = found.model(task, job.base)
    seen = {file: identity(file) for file in view.stores}
    notes = tuple(note for note in job.notes if not note.startswith(f"expert {task!r} "))  # base stood in for it
    job = job._replace(experts={task: view}, seen={**job.seen, **seen}, notes=notes)
    overwrite, read = options.get("overwrite", False), read_by(base, {}, options)
    return write_job(job, shards, out, describe=describe, overwrite=overwrite, more=f"task {task} {read}")


def read_by(base: Path, experts: Mapping[str, Path], options: Mapping[str, Any]) -> str:
    """How inputs are read, beside what their files say: the layers of stacks, and which row is of which token."""
    rows = {name: options.get(name) for name in ("vocabulary", "tokenizer_from", "token_rows", "tokens")}
    return json.dumps([rows, [layers_read(Path(path)) for path in (base, *experts.values())]], default=str)


def write_job(
    job: Job,
    shards: Sequence[Shard],
    out: Path,
    *,
    describe: Describe | None,
    hashing: Hashing | None = None,
    overwrite: bool,
    more: str | None,
) -> Report:
    """Merge what is prepared, as `merge_folders`.

    Args: hashing: as of `merge_folders`; more: what else decides the bytes, of a resumed merge.
    """
    begin = time.perf_counter()
    errors.raise_problems(memory_problems(job))
    folder, recipe = work_folder(out), _recipe(job, shards, more)
    with exclusive(out), shared(hashing, job.workers) as hashing, kept_if_full(folder, cuttable(job, shards)):
        recover(out)
        checkpoint.refuse_existing(out, overwrite=overwrite)  # what another merge has put there
        errors.raise_problems(room_problems(folder, shards))
        progress = load_progress(folder, recipe, shards, job.workers)
        if describe is not None:
            hashing.begin(job.seen)
        try:

            def save() -> None:
                check_unchanged(job.seen)
                save_progress(folder, progress)

            work = Work(folder, progress, save, hashing)
            survey = Survey(job, progress, work.save)
            made = (write_several if of_all_tasks(job.config) else merge_shards)(job, survey, shards, work)
            job = job._replace(beside={**job.beside, **made})
            report = completed(job, survey, shards, work, describe, begin)
        except Changed:
            raise
        except ValueError:
            shutil.rmtree(folder, ignore_errors=True)  # it would fail again
            raise
        return moved(report, folder, out)


def merge_shards(job: Job, survey: Survey, shards: Sequence[Shard], work: Work) -> Mapping[str, bytes]:
    """Write the shards that the progress does not name, and note each in it.

    Returns: more files of the output: none.
    Raises: as `write_order`.
    """
    rule = rule_of(job, survey)
    for shard in shards:
        if shard.file not in work.progress["shards"]:
            with shard_file(work.folder, shard) as descriptor, followed(descriptor) as (digest, reached):
                sums = [0.0, 0.0]
                for error, change, end in in_order(_writes(job, rule, shard, descriptor), job.workers):
                    sums = [sums[0] + error, sums[1] + change]
                    reached(end)
                reached(shard.size)
            work.progress["shards"][shard.file] = {"sums": sums, "sha256": digest.result()}
            work.save()
    return {}


def completed(
    job: Job, survey: Survey, shards: Sequence[Shard], work: Work, describe: Describe | None, begin: float
) -> Report:
    """Write all files beside finished shards. Raises: ValueError if an input changed while it was read."""
    size = sum(shard.size - len(shard.header) for shard in shards)
    files = fill(work.folder, job.beside, shards)
    check_unchanged(job.seen)  # a file that is gone cannot be hashed
    report = _report(job, survey, work, files, described=describe is not None)
    report = report._replace(bytes=size, seconds=time.perf_counter() - begin)
    for name, text in (describe or partial(_manifest, job))(files, report).items():
        write_text(work.folder / name, text)
    check_unchanged(job.seen)  # once all that is said of them has been read
    return report


def moved(report: Report, folder: Path, out: Path) -> Report:
    """The report of a finished folder that has taken the place of ``out``."""
    take_place(folder, out)
    files = {file: out / file.relative_to(folder) for file in report.hashes if file.is_relative_to(folder)}
    return report._replace(hashes={files.get(file, file): digest for file, digest in report.hashes.items()})


def _report(job: Job, survey: Survey, work: Work, files: Sequence[Path], *, described: bool) -> Report:
    """The report of a merge, before its size and time are known."""
    done = work.progress["shards"]
    error, change = (math.sqrt(sum(shard["sums"][i] for shard in done.values())) for i in (0, 1))
    ratio = error / change if change else math.inf if error else 0.0
    inputs = {opened.label: list(opened.stores) for opened in (job.base, *job.experts.values())}
    named = {str(file.relative_to(files[0].parent)): file for file in files}
    known = {file: done[name]["sha256"] for name, file in named.items() if name in done}
    hashes = work.hashing.digests([*(file for file in files if file not in known), *(job.seen if described else ())])
    mixture = any(folder is job.base for folder in job.experts.values())
    alone = all(own.stores.keys() == job.base.stores.keys() for own in job.experts.values())
    copied = alone and not job.config.based  # such as a stack
    several = of_all_tasks(job.config)  # a vector is written, no change is measured
    notes = job.notes if change or mixture or several or copied else (*job.notes, "no parameter differs from base's")
    if 0.5 < ratio < math.inf:
        wider = "out_dtype float32 keeps it; scores of train.py's experts need --precision fp32 in training"
        notes = *notes, f"rounding is more than half of the merged change: {wider}"
    return Report(survey.density, ratio, 0.0, 0, inputs, {**known, **hashes}, notes)


def _manifest(job: Job, files: Sequence[Path], report: Report) -> dict[str, str]:
    """The manifest of a merge without a description: enough to check it and to replace it."""
    facts = {
        "kind": "merged",
        "merger": job.config.name,
        "hyperparameters": job.config.settings(),
        "files": {str(file.relative_to(files[0].parent)): report.hashes[file] for file in files},
        "code": machine.code(),
        "versions": {"smat_fn": __version__},
    }
    return {checkpoint.MANIFEST: json.dumps(facts, indent=2) + "\n"}


def cuttable(job: Job, shards: Sequence[Shard]) -> Sequence[Shard]:
    """The shards that a smaller ``shard_size`` would cut: none where the output is one file, as base is."""
    return () if job.base.root.is_file() else shards


@contextmanager
def kept_if_full(folder: Path, shards: Sequence[Shard]) -> Iterator[None]:
    """Turn the error of a full disk into a ValueError that says how to resume. Args: shards: as of `cuttable`."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(
                f"the disk of {folder.parent} takes no file that is so large ({error.strerror}): {_smaller(shards)}"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ValueError(
            f"the disk of {folder.parent} is full: finished files stay in {folder.name}; free disk space and rerun "
            "to resume, or delete it"
        ) from error


def _smaller(shards: Sequence[Shard]) -> str:
    """The way out where a file is too large: smaller shards, if they can be small enough."""
    largest = max(map(largest_leaf, shards), default=0)
    if largest < min(max((shard.size - len(shard.header) for shard in shards), default=0), file_limit()):
        return f"give a smaller shard_size (the largest parameter takes {size_text(largest)})"
    return "choose another disk, or raise the limit on file sizes (ulimit -f)"


def plan(config: Merger, base: Path, experts: Mapping[str, Path], out: Path, **options: Unpack[Options]) -> Plan:
    """The checks of `merge_folders`, and what it would need; nothing is written. Raises: as `merge_folders` does."""
    job, shards = prepared(config, base, experts, out, **options)
    disk, leaves = sum(shard.size for shard in shards), written(job).leaves.values()
    errors.raise_problems([*memory_problems(job), *room_problems(work_folder(out), shards)])
    return Plan(
        memory_bound(job),
        sum(file.stat().st_size for opened in (job.base, *job.experts.values()) for file in opened.stores),
        disk,
        seconds_of(_of_one_task(job)),
        tuple(shard.file for shard in shards),
        len(leaves),
        sum(leaf.numel() for leaf in leaves),
        job.notes,
    )


def _of_one_task(job: Job) -> Job:
    """The merge for one task, which reads and computes about as much as that for all of them."""
    one: Any = job.config
    return job._replace(config=replace(one, task=next(iter(job.experts)))) if of_all_tasks(one) else job


def _writes(job: Job, rule: Rule, shard: Shard, descriptor: int) -> Iterator[Callable[[], tuple[float, float, int]]]:
    """Tasks that merge and write a chunk each: squared norms of its rounding error and change, its end in the file."""

    def write(merge: Callable[[], Written], offset: int) -> tuple[float, float, int]:
        done = merge()
        check_variances(path, done.values)
        begin = offset + done.start * done.values.itemsize
        write_chunk(descriptor, done.values, begin)
        return done.error, done.change, begin + done.values.nbytes

    for path, offset in shard.offsets.items():
        check_unchanged(job.seen)  # a mapped file that was cut kills the process when it is read
        yield from (partial(write, merge, offset) for merge in write_order(job, rule, path))


def _recipe(job: Job, shards: Sequence[Shard], more: str | None) -> dict[str, Any]:
    """All that affects the output's bytes: a digest of the settings, and the input files by path.

    A file counts by what changes when it is written or replaced, and by a sample of its bytes where its time was set
    back; not by its time of change alone, which new permissions and links set.
    """
    read = [(name, file) for name, folder in {"": job.base, **job.experts}.items() for file in folder.stores]
    files: dict[str, Any] = {}
    for _, file in read:
        now = job.seen[file]
        known = None if now is None else [now.size, now.modified, now.inode]
        files[str(file)] = [str(file.resolve()), known, sampled(file)]
    return {"settings": digest_of([decided(job, shards), more, [[n, str(file)] for n, file in read]]), "files": files}


def decided(job: Job, shards: Sequence[Shard]) -> dict[str, Any]:
    """Facts that decide the output's bytes, beside the input files and how they are read, by name; JSON values."""
    return {
        "version of smat_fn": machine.code(),
        "merger": job.config.name,
        "hyperparameters": job.config.settings(),
        "coef": digest_of(job.coefs),
        "key": None if job.key is None else job.key.tolist(),
        "device": job.device.type,
        "into": written(job).label,
        "files of the output": digest_of([[shard.file, hashlib.sha256(shard.header).hexdigest()] for shard in shards]),
    }


def digest_of(value: object) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def room_problems(folder: Path, shards: Sequence[Shard]) -> list[str]:
    """Errors if the disk has too little space for the shards that are not in ``folder`` yet."""
    present = 0
    for shard in shards:
        for file in (folder / shard.file, folder / f"{shard.file}.part"):
            with suppress(FileNotFoundError):
                present += file.stat().st_blocks * 512
    disk = next(path for path in folder.resolve().parents if path.exists())
    needed, free = sum(shard.size for shard in shards), shutil.disk_usage(disk).free
    if needed - present <= free:
        return []
    return [
        f"{disk} has {size_text(free)} free, {size_text(needed - present)} are needed: free space or write elsewhere"
    ]
