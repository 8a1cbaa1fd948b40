"""Merging in parts: processes on machines that share a disk merge disjoint leaves into one folder.

A part has whole files of the output, so that no two machines ever write to one file: what a network file system does
with two writers of a page is its own. Each part keeps one note in the work folder, replaced as a whole: the facts that
decide the output, by which parts of another merge are found, and its finished files. A part writes its own note before
it reads the others', so if two parts end together, at least one sees both notes. File times are not used.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch

from .. import checkpoint, errors
from ..checkpoint import write_text
from ..merge.parts.merger import Merger
from .files import Changed, Hashing, check_unchanged, sampled
from .inputs.stacks import layers_read
from .prepare import Options, prepare
from .run import Describe, Report, completed, cuttable, decided, kept_if_full, merge_shards, moved, room_problems
from .streaming.chunks import Job, written
from .streaming.estimate import memory_problems
from .streaming.survey import Survey, trimmed_leaves
from .writing import NOTE, PROGRESS, Shard, Work, exclusive, locked, recover, whole, work_folder

WAIT = 60.0  # seconds for what others do under the lock of the output folder, unless they complete it


class Part(NamedTuple):
    """One of the parts of a merge."""

    number: int  # from 1
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


class Waiting(NamedTuple):
    """A finished part of a merge that it did not complete."""

    part: Part
    missing: tuple[str, ...]  # parts to be finished, as "2/3"; none: another process completes the folder


def part_of(text: str) -> Part:
    """The part that ``text`` names, as "2/3". Raises: ValueError for anything else."""
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    part = Part(int(found[1]), int(found[2])) if found else None
    if part is None or not 1 <= part.number <= part.total:
        raise ValueError(f"part is {text!r}, must be I/N with I from 1 to N, as 2/3")
    return part


# over 60 lines: its docstring explains the protocol
def merge_part(
    config: Merger,
    base: Path,
    experts: Mapping[str, Path],
    out: Path,
    part: Part,
    *,
    describe: Describe | None = None,
    facts: Mapping[str, object] | None = None,
    **options: Unpack[Options],
) -> Report | Waiting:
    """One part of `merge_folders`; the part that finishes last completes the folder, with the same bytes.

    Parts run on any machines at any time, each may be killed and rerun. Thresholds and sums over all leaves are
    computed by every part. Inputs may lie elsewhere on each machine: they are compared by name, size and a sample of
    their bytes. The bits are those of one process where libraries and processors of the machines compute alike.

    Args:
        config, base, experts, out, describe, options: as of `merge_folders`, the same for all parts.
        part: which one; there are at most as many as the output has files of weights (``shard_size``).
        facts: more settings that must be the same for all parts, of ``describe``.

    Returns:
        The report of the whole merge, or which parts are missing.

    Raises:
        ValueError: as `merge_folders`; for another number of parts or other settings than those of the parts before;
            if this part is running. What other parts have written stays, unless all parts have ended; and all that is
            finished, if an input changes while it is read.
    """
    begin = time.perf_counter()
    _check_part(part)
    out = checkpoint.follow(Path(out))
    job, shards = prepare(config, base, experts, out, **options)
    errors.raise_problems([*memory_problems(job), *_count_problems(part, shards)])
    mine = shares(job, shards, part.total)[part.number - 1]
    asked = _facts(job, shards, options, described=describe is not None)
    asked |= {"layers of stacks": [layers_read(Path(path)) for path in (base, *experts.values())], **(facts or {})}
    asked = json.loads(json.dumps(asked))  # as it is read again
    folder, files = work_folder(out), list(job.seen)[part.number - 1 :: part.total]
    with Hashing(job.workers) as hashing, kept_if_full(folder, cuttable(job, shards)), ExitStack() as running:
        with exclusive(out, wait=WAIT):
            recover(out)
            checkpoint.refuse_existing(out, overwrite=options.get("overwrite", False))
            errors.raise_problems([*_other_problems(folder, part, asked), *room_problems(folder, shards)])
            running.enter_context(_running(folder, part))
            progress = _notes(folder).get(part.number) or {"parts": part.total, "facts": asked, "shards": {}}

            def save() -> None:
                check_unchanged(job.seen)
                write_text(folder / f"{NOTE}{part.number}.json", json.dumps(progress))

            progress["done"] = False
            save()
        progress["shards"] = whole(folder, progress["shards"], mine, job.workers)
        begun = hashing.begin(files) if describe is not None and "inputs" not in progress else None
        try:
            survey = Survey(job, progress, save, {path for shard in mine for path in shard.offsets})
            merge_shards(job, survey, mine, work := Work(folder, progress, save, hashing))
        except Changed:
            raise
        except ValueError:
            with exclusive(out, wait=WAIT):
                _discard(folder, part, mine)  # it would fail again
            raise
        if begun is not None:
            progress["inputs"] = [digest.result() for digest in begun.values()]
        progress["done"] = True
        save()
        running.close()
        return _complete(job, shards, out, part, asked, work, describe, begin)


def shares(job: Job, shards: Sequence[Shard], count: int) -> list[list[Shard]]:
    """The files of every part: the one with most work that is left goes to the part that has the least."""
    leaves = written(job).leaves
    work = [sum(job.config.work(leaves[path].shape) for path in shard.offsets) for shard in shards]
    placed, loads = list[list[int]]([[] for _ in range(count)]), [0.0] * count
    for i in sorted(range(len(shards)), key=lambda i: -work[i]):
        least = min(range(count), key=lambda part: (loads[part], len(placed[part]), part))
        placed[least].append(i)
        loads[least] += work[i]
    return [[shards[i] for i in sorted(own)] for own in placed]


def _complete(
    job: Job,
    shards: Sequence[Shard],
    out: Path,
    part: Part,
    facts: Mapping[str, Any],
    work: Work,
    describe: Describe | None,
    begin: float,
) -> Report | Waiting:
    """Complete the folder if all parts are finished and no other process completes it. Args: work: of this part."""
    folder = work.folder
    with ExitStack() as lock:
        try:
            lock.enter_context(exclusive(out, wait=WAIT))
        except ValueError:
            return Waiting(part, ())
        notes = _notes(folder)
        if part.number not in notes:
            return Waiting(part, ())
        errors.raise_problems(_other_problems(folder, part, facts))
        placed = shares(job, shards, part.total)
        missing = tuple(
            str(other)
            for other in (Part(i + 1, part.total) for i in range(part.total))
            if not _finished(folder, other, notes, placed[other.number - 1], job.workers, own=other == part)
        )
        if missing:
            return Waiting(part, missing)
        progress: dict[str, Any] = {"shards": {}}
        for shard in shards:
            owner = next(i for i, own in enumerate(placed, 1) if shard in own)
            progress["shards"][shard.file] = notes[owner]["shards"][shard.file]
        try:
            progress |= _surveys(job, notes, placed)
            if describe is not None:
                for i, file in enumerate(job.seen):
                    work.hashing.know(file, notes[i % part.total + 1]["inputs"][i // part.total])
            report = completed(job, Survey(job, progress), shards, work._replace(progress=progress), describe, begin)
        except Changed:
            raise
        except ValueError:
            shutil.rmtree(folder, ignore_errors=True)  # every part would fail again
            raise
        return moved(report, folder, out)


def _finished(
    folder: Path, part: Part, notes: Mapping[int, Any], shards: Sequence[Shard], workers: int, *, own: bool
) -> bool:
    """Whether a part is done, not running, and its files are those that it wrote."""
    note = notes.get(part.number)
    if note is None or not note["done"]:
        return False
    try:
        with _running(folder, part):  # called again, it may be about to write
            return own or len(whole(folder, note["shards"], shards, workers)) == len(shards)
    except ValueError:
        return False


def _surveys(job: Job, notes: Mapping[int, Any], placed: Sequence[Sequence[Shard]]) -> dict[str, Any]:
    """Thresholds and votes of all parts, as one process notes them."""
    if (trimming := job.config.trimming()) is None:
        return {}
    scope = trimming.scope
    found = [notes[i] for i in sorted(notes)]
    if scope == "tensor":
        rows: dict[str, Any] = {}
        for note, shards in zip(found, placed, strict=True):
            own = {path for shard in shards for path in shard.offsets}
            rows |= zip((path for path in trimmed_leaves(job) if path in own), note["trims"], strict=True)
        return {"trims": [rows[path] for path in trimmed_leaves(job)], "majority": found[0]["majority"]}
    every = [{name: note[name] for name in ("trims", "majority")} for note in found]
    others = [i for i, one in enumerate(every, 1) if one != every[0]]
    errors.raise_problems([f"part {i} found other thresholds than part 1: did an input change?" for i in others])
    return every[0]


def _check_part(part: Any) -> None:
    """Raises: ValueError for anything but a part, and for a number outside of 1 to the number of parts."""
    whole = isinstance(part, Part) and all(type(number) is int for number in part)
    if not whole or not 1 <= part.number <= part.total:
        raise ValueError(f"part is {part!r}, must be Part(i, n) with i from 1 to n, as part_of('2/3') gives it")


def _count_problems(part: Part, shards: Sequence[Shard]) -> list[str]:
    if part.total <= len(shards):
        return []
    return [
        f"part is {part}, but the output has {len(shards)} file{'s' * (len(shards) > 1)} of weights: "
        "take fewer parts, or smaller files (--shard-size)"
    ]


def _facts(job: Job, shards: Sequence[Shard], options: Mapping[str, Any], *, described: bool) -> dict[str, object]:
    """All that decides the output's bytes, by name; no times and no places."""
    facts: dict[str, object] = {
        **decided(job, shards),
        "version of torch": torch.__version__,
        **{name: options.get(name) for name in ("vocabulary", "token_rows", "tokens")},
        "describe": described,
        "order of the experts": list(job.experts),
        "number of files read": len(job.seen),
    }
    for folder in (job.base, *job.experts.values()):
        facts[folder.label] = [[file.name, sampled(file)] for file in folder.stores]
    for name, source in job.beside.items():
        content = source.read_bytes() if isinstance(source, Path) else source
        facts[name] = hashlib.sha256(content).hexdigest()
    return facts


def _other_problems(folder: Path, part: Part, facts: Mapping[str, Any]) -> list[str]:
    """Errors where the work folder holds another merge, or one in another number of parts."""
    again = f"give this one the same settings, or delete {folder} to start over"
    if (folder / PROGRESS).exists():
        return [f"{folder} holds an unfinished merge by one process: finish it without --part, or delete it"]
    problems = []
    for index, note in _notes(folder).items():
        other = Part(index, note["parts"])
        if other.total != part.total:
            problems.append(f"part is {part}, but {folder} holds part {other}: {again}")
        elif note["facts"] != facts:
            names = [name for name in {**note["facts"], **facts} if note["facts"].get(name) != facts.get(name)]
            problems.append(f"part {part} differs from part {other} in {', '.join(names)}: {again}")
    return problems[:1]


def _running(folder: Path, part: Part) -> Any:
    """The lock that a part holds while it runs. Raises: ValueError if it is held."""
    return locked(folder / f"{NOTE}{part.number}.lock", f"part {part} in {folder} is running already: wait for it")


def _notes(folder: Path) -> dict[int, Any]:
    """The notes of all parts that have begun, by index."""
    found = {int(file.stem.removeprefix(NOTE)): file for file in folder.glob(f"{NOTE}*.json")}
    return {index: json.loads(found[index].read_text(encoding="utf-8")) for index in sorted(found)}


def _discard(folder: Path, part: Part, shards: Sequence[Shard]) -> None:
    """Delete what a part has written."""
    for file in (f"{NOTE}{part.number}.json", *(name for s in shards for name in (s.file, f"{s.file}.part"))):
        (folder / file).unlink(missing_ok=True)
    if not _notes(folder):
        shutil.rmtree(folder, ignore_errors=True)
