"""Training checkpoints for --resume: one safetensors file, written atomically in a background thread."""

import json
import logging
import signal
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils import _pytree as pytree

from ... import checkpoint, errors, machine, tree
from ...parallel import Sharded, World
from ..manifests import flat, manifest_of

ENDING = ".resume.safetensors"  # of the name of a task's file
TRAINED = "expert", checkpoint.JOINT  # kinds of manifests of finished training
log = logging.getLogger(__name__)
# SIGHUP: of a terminal or connection that ends; the last two: of clusters, before a time limit
ASKING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


class ResumePoint(NamedTuple):
    """Metadata of a training checkpoint."""

    step: int  # optimizer steps done
    settings: dict[str, Any]  # of the run, as in an expert's manifest
    progress: dict[str, Any]  # of the log
    code: str  # that wrote it, of `smat_fn.machine.code`
    task: str


class Interrupted(Exception):
    """Training ended by a signal, its state saved."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.status = 128 + number  # as a shell reports it


class Stop:
    """The number of the signal that asked training to end, if one did."""

    signal: int | None = None
    _meanwhile = ""

    @contextmanager
    def at_once(self, text: str, world: World) -> Iterator[None]:
        """A signal ends what is done here instead of waiting for the next step. Raises: Interrupted with ``text``.

        Not one of several processes, of which the others would wait for it.
        """
        self._meanwhile = text if world.size == 1 else ""
        try:
            yield
        finally:
            self._meanwhile = ""

    def ask(self, number: int) -> None:
        """A signal has come. Raises: Interrupted inside `at_once`."""
        self.signal = number
        if self._meanwhile:
            raise Interrupted(number, f"stopped by signal {number} {self._meanwhile}")


@contextmanager
def on_signals(*, second_ends: bool = True) -> Iterator[Stop]:
    """The first signal of `ASKING` asks training to save and end, a second one ends it at once. Main thread only.

    Args: second_ends: False under torchrun and submitit, which pass on what processes may have had already.
    """
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if second_ends:
            signal.signal(number, previous[number])
        stop.ask(number)

    previous: dict[int, Any] = {number: signal.getsignal(number) for number in ASKING}
    if previous[signal.SIGHUP] == signal.SIG_IGN:  # by nohup
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def path_of(out: Path, task: str) -> Path:
    """The file of a task."""
    return out / f"{task}{ENDING}"


def replace_expert(out: Path, task: str) -> None:
    """Remember that the expert which is there now is to be replaced, for the run that resumes this one."""
    if found := manifest_of(out / task):
        checkpoint.write_text(replaced(out, task), found.get("fingerprint", ""))


def finished(out: Path, task: str) -> bool:
    """Whether there is an expert, and not one that an interrupted run with --overwrite has yet to replace."""
    mark, found = replaced(out, task), manifest_of(out / task)
    if found.get("kind") not in TRAINED or not mark.exists():
        return found.get("kind") in TRAINED
    return found.get("fingerprint", "") != mark.read_text(encoding="utf-8")


def replaced(out: Path, task: str) -> Path:
    """The file that names an expert which is to be replaced."""
    return out / f".{task}{checkpoint.REPLACED}"


def read(path: Path) -> ResumePoint | None:
    """The metadata of a file; None if there is no file. Raises: ValueError for a broken file."""
    if not path.exists():
        return None
    with _opened(path) as store:
        facts = json.loads((store.metadata() or {})["facts"])
    kinds = {"step": int, "settings": dict, "progress": dict, "code": str, "task": str}
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path} does not say which training it is the state of: move it, or put back a copy")
    return ResumePoint(**{name: facts[name] for name in kinds})


def begun(out: Path, tasks: Iterable[str], *, besides: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The settings of the experts that a run holds, finished or unfinished: ``tasks`` in this order, then further ones.

    A multi-task model is none of them unless ``tasks`` names it.

    Args: besides: tasks that are left out.
    """
    folders = (manifest.parent for manifest in sorted(out.glob(f"[!.]*/{checkpoint.MANIFEST}")))
    ended = [folder.name for folder in folders if manifest_of(folder).get("kind") == "expert"]  # not an exported one
    others = [file.name.removesuffix(ENDING) for file in sorted(out.glob(f"*{ENDING}"))]
    others = [name for name in others if name != checkpoint.JOINT]
    for task in dict.fromkeys((*tasks, *ended, *others)):
        if task in besides:
            continue
        last = read(path_of(out, task))
        if facts := manifest_of(out / task) if finished(out, task) else {} if last is None else last.settings:
            yield facts


def restore(path: Path, state: Any, shards: Sharded | None = None) -> Any:
    """The state in a file, written into the tensors of ``state``, a fresh one of the same run that owns them.

    One stored tensor at a time is in memory.

    Args: shards: whose state this is, with this process's shares of what is stored.
    Raises: ValueError for a broken or damaged file, and for a state of other tensors.
    """
    flat, spec = pytree.tree_flatten_with_path(state)
    with _opened(path) as store:
        metadata = store.metadata()
        numbers, stored = json.loads(metadata["facts"])["numbers"], set(store.keys())
        places = {pytree.keystr(place): place for place, _ in flat}
        wanted = dict(zip(places, (leaf for _, leaf in flat), strict=True))
        tensors = {name for name, leaf in wanted.items() if isinstance(leaf, Tensor)}
        if tensors != stored or set(wanted) - tensors != set(numbers):
            raise ValueError(f"{path} is the state of another optimizer or model: start over with --overwrite")

        def taken(name: str) -> Tensor:
            found, own, place = store.get_tensor(name), wanted[name], places[name]
            shape = own.shape if shards is None else shards.stored_shape(place, own)
            if (found.shape, found.dtype) != (shape, own.dtype):  # `copy_` would repeat and cast
                raise ValueError(f"{path} holds {name} in another shape or dtype: start over with --overwrite")
            own.copy_(found if shards is None else shards.own(place, own, found))
            return found

        with torch.no_grad():
            found = _crc(metadata["facts"], tensors, taken)
        if found != metadata["crc32"]:
            raise ValueError(
                f"{path} is damaged (CRC-32 {found}, it was {metadata['crc32']}): put back a copy, or remove "
                "it to train its expert from the start"
            )
    return pytree.tree_unflatten([leaf if n in tensors else numbers[n] for n, leaf in wanted.items()], spec)


def _crc(facts: str, names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """CRC-32 of facts and tensors, read one at a time: twice as fast as SHA-256, where a signal's grace is short."""
    found = zlib.crc32(facts.encode())
    for name in sorted(names):
        found = zlib.crc32(checkpoint.plain(read(name)).reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def restore_all(path: Path, state: Any, world: World, shards: Sharded | None = None) -> Any:
    """`restore` in every process, of one and the same snapshot: the first one writes it, the others read it.

    Raises: ValueError in all of them where one cannot read it, or finds another one on its disk.
    """
    problem, found, own = None, state, ""
    try:
        if (last := read(path)) is not None:
            own = f"the state after {last.step} steps of run {last.progress.get('run_id')}"
        found = restore(path, state, shards)
    except ValueError as error:
        problem = str(error)
    seen = world.gather((own, problem))
    problems = [text if world.size == 1 else f"process {rank}: {text}" for rank, (_, text) in enumerate(seen) if text]
    problems += [
        f"process {rank} finds {other} in {path}, the first one {seen[0][0]}"
        for rank, (other, text) in enumerate(seen)
        if not text and other != seen[0][0]
    ]
    if problems and world.size > 1:
        problems.append("all processes read what the first one wrote: --out must lie on a disk that they share")
    errors.raise_problems(problems)
    return found


def differences(stored: Mapping[str, Any], now: Mapping[str, Any], *, besides: Collection[str] = ()) -> list[str]:
    """Messages for settings that differ, by path, if bits depend on them; only those named in ``now`` count.

    Args: besides: paths of settings that do not count.
    """
    rows = stored.get("train_rows") or {}  # some suites know fewer facts of them
    if "train_rows" in now:
        now = {**now, "train_rows": {name: value for name, value in now["train_rows"].items() if name in rows}}
    old, new = (flat({name: settings.get(name) for name in now}) for settings in (stored, now))
    paths, missing = dict.fromkeys((*old, *new)), "left out"
    return [
        f"{path} was {old.get(path, missing)}, is {new.get(path, missing)}"
        for path in paths
        if path not in ("train_rows.from", *besides) and old.get(path, missing) != new.get(path, missing)
    ]


class Saver:
    """Keeps the last checkpoint of an expert in training; each replaces the one before, none holds non-finite values.

    Args: settings: JSON values that a run must share to resume from it; every_steps, every_minutes: when one is due,
        None: never; both: whichever comes first.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
    ) -> None:
        self.path = path
        self._settings, self._every_steps, self._every_minutes = settings, every_steps, every_minutes
        self._since, self._thread = time.monotonic(), threading.Thread()

    def due(self, step: int) -> bool:
        """Whether it is time, ``step`` steps being done."""
        minutes = (time.monotonic() - self._since) / 60
        by_steps = self._every_steps is not None and step % self._every_steps == 0
        return by_steps or (self._every_minutes is not None and minutes >= self._every_minutes)

    def save(self, state: Any, progress: Mapping[str, Any]) -> None:
        """Copy the state to the host's memory, and write it in the background."""
        self.wait()
        places = {pytree.keystr(place): leaf for place, leaf in pytree.tree_flatten_with_path(state)[0]}
        tensors = {
            name: leaf.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, leaf in places.items()
            if isinstance(leaf, Tensor)
        }
        numbers = {name: leaf for name, leaf in places.items() if name not in tensors}
        facts = {"step": state.step, "settings": self._settings, "progress": progress, "numbers": numbers}
        facts |= {"code": machine.code(), "task": self.path.name.removesuffix(ENDING)}
        self._thread = threading.Thread(target=self._write, args=(tensors, json.dumps(facts)))
        self._thread.start()
        self._since = time.monotonic()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._thread.ident is not None:
            self._thread.join()

    def discard(self) -> None:
        """Remove the file: the expert is finished."""
        self.wait()
        self.path.unlink(missing_ok=True)
        checkpoint.sweep(self.path)

    def where(self) -> str | None:
        """Text that names the last good state, None if there is none."""
        self.wait()
        last = read(self.path)
        return None if last is None else f"the last good state, after {last.step} steps, is {self.path}"

    def _write(self, tensors: dict[str, Tensor], facts: str) -> None:
        if not all(map(tree.is_finite, tensors.values())):
            return  # the loss is reported; the previous checkpoint stays
        crc = _crc(facts, tensors, tensors.__getitem__)
        try:
            checkpoint.write_tensors(self.path, tensors, {"format": "pt", "facts": facts, "crc32": crc})
        except (OSError, SafetensorError) as error:  # a full disk is no reason to lose what is in memory
            log.warning("%s cannot be written (%s): training continues without it", self.path, error)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with suppress(FileNotFoundError):
            path.open("rb").close()  # safetensors calls every file that it cannot open a missing one
    except OSError as error:
        raise ValueError(
            f"{path} cannot be opened ({error.strerror}): it holds the state of training, make it readable and rerun"
        ) from error
    try:
        with safe_open(path, framework="pt") as store:
            yield store
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it to train its expert from the start") from error
