"""Shards whose bytes are written in place, in a folder that is completed atomically and can be resumed."""

import glob
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .. import checkpoint
from ..checkpoint import NOTE, PROGRESS, WEIGHTS, write_text
from .files import Hashing, digests, identity
from .inputs.stored import DTYPES

log = logging.getLogger(__name__)
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has none
FLUSH = 0.05  # seconds between two flushes of a shard that is being written
_NUMBERED = re.compile(r"(^|_)\d+_[^/]*/$")
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Shard(NamedTuple):
    """One output file: its header and, in its order, the byte offsets of its leaves."""

    file: str
    header: bytes
    offsets: dict[str, int]
    size: int
    prefix: str = ""  # of the leaves' names, which the file leaves out


class Work(NamedTuple):
    """The folder in which a merge is prepared, and what is known of its finished shards."""

    folder: Path
    progress: dict[str, Any]  # JSON values
    save: Callable[[], object]  # writes the progress
    hashing: Hashing


def largest_leaf(shard: Shard) -> int:
    """The bytes of the largest leaf of a shard."""
    begins = sorted(shard.offsets.values())
    return max((end - begin for begin, end in pairwise([*begins, shard.size])), default=0)


def file_limit() -> float:
    """The most bytes that this process may write into one file; that of the file system is not known."""
    try:
        import resource
    except ImportError:  # Windows has none
        return math.inf
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return math.inf if limit == resource.RLIM_INFINITY else limit


def layout(
    leaves: Mapping[str, Tensor],
    shard_size: int,
    outputs: Mapping[str, str],
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> list[Shard]:
    """Shards of at most ``shard_size`` bytes, or one leaf, in the order of ``leaves``; wide dtypes first in each.

    One shard is ``model.safetensors``, more are numbered as Hugging Face does; so are the components of a pipeline,
    while a further module of sentence-transformers is one file.

    Args:
        outputs: other files, by the prefix of their leaves' names, which the file leaves out.
        metadata: beside the format, of files without a prefix.
    """
    modules = {
        prefix: {path: leaf for path, leaf in leaves.items() if path.startswith(prefix)} for prefix in outputs if prefix
    }
    beside = {path for own in modules.values() for path in own}
    name = outputs.get("", WEIGHTS)
    shards = _cut(
        {path: leaf for path, leaf in leaves.items() if path not in beside}, shard_size, name, metadata=metadata
    )
    for prefix, own in modules.items():
        if _NUMBERED.search(prefix):  # of sentence-transformers, which reads no shards there
            shards.append(_shard(outputs[prefix], _ordered(own), prefix))
        else:
            shards += _cut(own, shard_size, outputs[prefix], prefix)
    return shards


def layout_together(groups: Mapping[str, Mapping[str, Tensor]], shard_size: int, name: str) -> list[Shard]:
    """Shards as of `layout`, named after ``name``, with all leaves of a group in one file."""
    sizes = {
        key: torch.empty(sum(leaf.nbytes for leaf in group.values()), dtype=torch.uint8, device="meta")
        for key, group in groups.items()
    }
    return [
        _shard(cut.file, _ordered({path: leaf for key in cut.offsets for path, leaf in groups[key].items()}))
        for cut in _cut(sizes, shard_size, name)
    ]


def _cut(
    leaves: Mapping[str, Tensor],
    shard_size: int,
    name: str,
    prefix: str = "",
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> list[Shard]:
    if not leaves:
        return []
    groups: list[list[str]] = [[]]
    room = shard_size
    for path, leaf in leaves.items():
        if leaf.nbytes > room and groups[-1]:
            groups.append([])
            room = shard_size
        groups[-1].append(path)
        room -= leaf.nbytes
    stem = name.removesuffix(".safetensors")
    names = [f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    names = [name] if len(groups) == 1 else names
    ordered = [_ordered({path: leaves[path] for path in group}) for group in groups]
    return [_shard(file, group, prefix, metadata) for file, group in zip(names, ordered, strict=True)]


def _ordered(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wide dtypes first, which keeps every leaf aligned to its own width."""
    return dict(sorted(leaves.items(), key=lambda pair: -pair[1].itemsize))


def _shard(
    file: str, leaves: Mapping[str, Tensor], prefix: str = "", metadata: Mapping[str, str] = MappingProxyType({})
) -> Shard:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    ends, end = {}, 0
    for path, leaf in leaves.items():
        ends[path] = end, end + leaf.nbytes
        entries[path.removeprefix(prefix)] = {
            "dtype": _CODES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": list(ends[path]),
        }
        end += leaf.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(
        file, header, {path: len(header) + start for path, (start, _) in ends.items()}, len(header) + end, prefix
    )


def write_chunk(descriptor: int, values: Tensor, offset: int) -> None:
    """The bytes of a flat tensor at an offset of an open file."""
    data = memoryview(values.contiguous().view(torch.uint8).numpy().data)
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextmanager
def shard_file(folder: Path, shard: Shard) -> Iterator[int]:
    """A descriptor of a file that has its full size and header, and its name once the block ends well."""
    part = folder / f"{shard.file}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(descriptor, shard.size)
        os.pwrite(descriptor, shard.header, 0)
        with _flushing(descriptor):
            yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.rename(folder / shard.file)


@contextmanager
def _flushing(descriptor: int) -> Iterator[None]:
    """Flush written bytes to the disk in the background while the next chunks are merged."""
    ended = Event()

    def flush() -> None:
        with suppress(OSError):  # the last one, by the caller, tells
            while not ended.wait(FLUSH):
                _sync(descriptor)

    thread = Thread(target=flush)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def exclusive(out: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock on a file beside ``out``. It ends with the process, so a file that a killed merge left is not held.

    Args: wait: seconds to wait for another process.
    Raises: ValueError if another merge, in this or another process, holds it.
    """
    file = out.parent / f".{out.name}.lock"
    with locked(file, f"another merge into {out} is running (it holds {file}): wait for it", wait=wait):
        yield


@contextmanager
def locked(file: Path, taken: str, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a lock on ``file``, which is there as long. Raises: ValueError with the text ``taken`` if it is held.

    Folders that are made for it, and hold nothing at the end, are removed.
    """
    made = [place for place in file.parents if not place.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise ValueError(taken) from None
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: filelock never takes a file without a name
        lock.release()
        with suppress(OSError):
            for place in made:
                place.rmdir()


def work_folder(out: Path) -> Path:
    """The folder in which a merge into ``out`` is prepared, and from which an interrupted one resumes."""
    return out.parent / f".{out.name}.merging"


def load_progress(folder: Path, recipe: Mapping[str, Any], shards: Sequence[Shard], workers: int) -> dict[str, Any]:
    """The progress of an interrupted merge of this recipe; of any other, a warning, an emptied folder and no progress.

    A finished shard whose bytes are no longer those that were written is not counted, so it is made again.

    Raises: ValueError if a merge in parts is under way there: nothing of it is deleted.
    """
    if any(folder.glob(f"{NOTE}*.json")):
        raise ValueError(f"{folder} holds parts of an unfinished merge: finish it by --part, or delete it")
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        earlier = progress["recipe"]
        if earlier == recipe:
            return progress | {"shards": whole(folder, progress["shards"], shards, workers)}
        if progress["shards"]:
            log.warning("note: an unfinished merge in %s is discarded: %s", folder, _difference(earlier, recipe))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    progress = {"recipe": recipe, "shards": {}}
    save_progress(folder, progress)
    return progress


def _difference(earlier: Any, recipe: Mapping[str, Any]) -> str:
    """How the recipe of an earlier merge differs, in words."""
    old, new = earlier["files"], recipe["files"]
    if earlier["settings"] != recipe["settings"] or old.keys() != new.keys():
        return "it has other settings or inputs"
    return f"{', '.join(name for name in new if old[name] != new[name])} changed since"


def whole(folder: Path, noted: Mapping[str, Any], shards: Sequence[Shard], workers: int) -> dict[str, Any]:
    """The notes of those finished shards whose bytes have not changed since."""
    sizes = {shard.file: shard.size for shard in shards}
    there = [file for file in noted if (now := identity(folder / file)) and now.size == sizes[file]]
    found = digests([folder / file for file in there], workers)
    return {file: noted[file] for file in there if noted[file]["sha256"] == found[folder / file]}


def save_progress(folder: Path, progress: Mapping[str, Any]) -> None:
    """Replace the list of finished files."""
    write_text(folder / PROGRESS, json.dumps(progress))


def fill(folder: Path, beside: Mapping[str, Path | bytes], shards: Sequence[Shard]) -> list[Path]:
    """Indices, configuration and tokenizer beside the shards. Returns: all files of the checkpoint.

    Args: beside: by name, files to copy, or their content.
    """
    made = [folder / shard.file for shard in shards]
    groups: dict[str, list[Shard]] = {}
    for shard in shards:
        if (stem := shard.file.partition("-00001-")[0]) != shard.file:
            groups[stem] = [other for other in shards if other.file.startswith(f"{stem}-")]
    for stem, group in groups.items():
        placed = {path.removeprefix(s.prefix): s.file.removeprefix(s.prefix) for s in group for path in s.offsets}
        size = sum(shard.size - min(shard.offsets.values()) for shard in group)
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        made.append(folder / f"{stem}.safetensors.index.json")
        write_text(made[-1], json.dumps(index, indent=2) + "\n")
    for name, source in beside.items():
        made.append(folder / name)
        made[-1].parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, Path):
            shutil.copyfile(source, made[-1])
        else:
            made[-1].write_bytes(source)
    return sorted(made, key=lambda file: len(file.parts))  # stable: one beside the folders first


def recover(out: Path) -> None:
    """Put back what a merge that was killed while it replaced ``out`` had moved aside, or delete it if replaced."""
    for replaced in sorted(out.parent.glob(f".{glob.escape(out.name)}.old-*")):
        if out.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(out)


def take_place(folder: Path, out: Path) -> None:
    """The finished folder takes the place of ``out`` (`checkpoint.take_place`), without what a merge keeps in it."""
    for file in {*folder.glob(".*"), *folder.rglob("*.part")}.difference(_notes(folder)):  # of killed merges
        file.unlink(missing_ok=True)
    checkpoint.take_place(folder, out)
    tidy(out)


def tidy(out: Path) -> None:
    """Remove what a merge has noted, once ``out`` is in its place: until then every rerun finds the finished files."""
    for file in _notes(out):
        file.unlink(missing_ok=True)


def _notes(folder: Path) -> list[Path]:
    return [file for file in folder.glob("*") if checkpoint.is_note(file)]
