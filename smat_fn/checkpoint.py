"""Checkpoints: a folder with ``model.safetensors`` and ``manifest.json``, written atomically."""

import fnmatch
import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import __version__, errors, machine, tree
from .tree import dtype_name
from .types import Params

WEIGHTS, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "manifest.json"
BASE = "base"  # the folder of the base beside its experts
JOINT = "joint"  # the folder of a multi-task model beside them, and the kind of its manifest
SNAPSHOTS = "snapshots"  # beside them too: NUMBER/TASK, parameters of earlier steps
LOG = ".log.jsonl"  # ends the name of an expert's log beside its folder
REPLACED = ".replaced"  # ends the name of a file that names an expert which --overwrite has yet to replace
MOVING = ".moving"  # ends the name of a file for a task whose expert merge.py transport has yet to write
SOURCES = "sources.json"  # of a merge: where its inputs lie on this machine; not to be published
RECIPE = "recipe.yml"  # of a merge: what merge.py repeats it from
_AGAIN = "train or merge it again with --overwrite"
STATISTICS = {kind: f"{kind}.safetensors" for kind in ("fisher", "gram", "adam")}  # beside an expert's weights
ADAPTED = "adapted_base_fingerprint"  # in manifests of adapters: of the leaves of base that these change
UNTRAINED = "untrained_fingerprint"  # in manifests of experts of a part of a model: of what the loss reads beside it
PROGRESS = "progress.json"  # of a merge that has not ended: its finished files
NOTE = ".part-"  # begins the names of such files of a merge in parts
_ADAPTER = {"adapter_model.safetensors", "adapter_config.json"}
_OF_MERGES = {SOURCES, RECIPE, "README.md"}  # beside the weights that a manifest names


def save_expert(
    path: str | Path,
    params: Params,
    manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    *,
    overwrite: bool = False,
    files: Mapping[str, str] | None = None,
    statistics: Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, Any]]] | None = None,
    hashed: bool = False,
) -> None:
    """Write a checkpoint folder atomically: to a temporary sibling, which is then renamed.

    Args:
        path: the folder; parents are created.
        params: any tree of tensors on any device, stored by parameter name, without the parts of wrappers
            (`smat_fn.tree.unwrapped`).
        manifest: JSON values, usually from `describe`. A function that returns them is called when the weights are
            written.
        overwrite: replace an existing folder (default: refuse).
        files: more text files of the folder, by file name, without folders; not the names of weights, index, manifest
            and statistics.
        statistics: leaves and facts by kind, as `save_statistics` takes them.
        hashed: add ``files`` to the manifest, the SHA-256 of the file of weights by its name.

    Raises:
        ValueError: the folder exists and ``overwrite`` is off, the manifest is not JSON, or ``files`` names a file
            outside of the folder or one that is written anyway.

    Example:
        >>> params = {"w": torch.zeros(2, 3)}
        >>> save_expert("expert", params, describe(params, task="qa"))
        >>> load_expert("expert", params)[1]["task"]
        'qa'
    """
    text = "" if callable(manifest) else _as_json(manifest)  # an error before work
    errors.raise_problems([text for file in files or {} for text in _name_problems(file)], "save_expert")
    with atomic_folder(path, overwrite=overwrite) as folder:
        leaves = {name: plain(leaf) for name, leaf in tree.flatten_unwrapped(params).items()}
        # safetensors refuses two leaves over one storage
        stored: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, leaf in leaves.items():
            storage = leaf.untyped_storage().data_ptr()
            stored[name] = leaf.clone() if storage in seen else leaf
            seen.add(storage)
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
        if callable(manifest) or hashed:
            facts = manifest() if callable(manifest) else manifest
            text = _as_json({**facts, **({"files": file_hashes(folder, WEIGHTS)} if hashed else {})})
        for file, content in {**(files or {}), MANIFEST: text}.items():
            (folder / file).write_text(content, encoding="utf-8")
        for kind, (own, facts) in (statistics or {}).items():
            _write_statistics(folder, kind, own, facts)


def plain(leaf: Tensor) -> Tensor:
    """A tensor's values on the CPU, one behind the other: what a file's bytes are of (`torch.conj` is a mere view)."""
    return leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _name_problems(file: str) -> list[str]:
    """Errors for a name that is not that of one more file in a checkpoint folder."""
    if not isinstance(file, str) or file in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(file):
        return [f"files names {file!r}, which is not a file name: give a name without folders"]
    own = {name.lower(): name for name in (WEIGHTS, INDEX, MANIFEST, *STATISTICS.values())}
    if (name := own.get(file.lower())) is not None:  # some file systems ignore case
        return [f"files names {file!r}, but {name} holds the expert's own data: choose another name"]
    return []


def _as_json(manifest: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(manifest), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"save_expert: the manifest is not JSON: {error}") from error


def load_expert(path: str | Path, like: Params) -> tuple[Params, dict[str, Any]]:
    """Read a checkpoint and check it against a tree.

    Args:
        path: folder that `save_expert` wrote.
        like: tree whose structure, parameter names, shapes and dtypes the checkpoint must have; values are not read.

    Returns:
        (params, manifest): params in the structure of ``like``, on the CPU; the manifest in JSON's types, in which a
            tuple is a list, and a mapping's key a string.

    Raises:
        ValueError: lists every parameter that is missing, unknown, or of another shape or dtype; or the folder is not
            a checkpoint.
    """
    leaves, manifest = load_leaves(path)
    expected = tree.flatten_unwrapped(like)
    problems = [
        f"parameter {name!r} of {path} is {dtype_name(leaves[name])}, expected {dtype_name(leaf)}: cast it first"
        for name, leaf in expected.items()
        if name in leaves and leaves[name].dtype != leaf.dtype
    ]
    found = errors.problems_of(lambda: tree.check_same(expected, "the expected tree", **{str(path): leaves}))
    errors.raise_problems(problems + ([f"{'; '.join(found)}; was it made from another base?"] if found else []))
    return tree.unflatten(like, {name: leaves[tree.unwrapped(name)] for name in tree.flatten(like)}), manifest


def load_leaves(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(leaves by path, manifest) of a checkpoint, of one file or several, unchecked.

    Raises: ValueError for no such folder or a broken file.
    """
    manifest, file = load_manifest(path), Path(path) / WEIGHTS
    leaves: dict[str, Tensor] = {}
    try:
        for file in _weight_files(Path(path)):
            file.open("rb").close()  # safetensors calls a file that this user may not read absent
            with safe_open(file, framework="pt") as store:
                leaves |= {tree.unwrapped(name): store.get_tensor(name) for name in store.keys()}  # noqa: SIM118 (no mapping)
    except PermissionError:
        raise
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}): {_AGAIN}") from error
    return leaves, manifest


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / WEIGHTS]
    try:
        names = sorted(map(str, set(read_json(index)["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index ({error!r}): {_AGAIN}") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} names {outside[0]!r}, outside the folder: do not trust this index")
    return [folder / name for name in names]


def save_statistics(path: str | Path, kind: str, leaves: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write statistics of an expert into its folder atomically: ``fisher.safetensors`` and its like.

    Args:
        path: the expert's folder.
        kind: one of `STATISTICS`.
        leaves: by parameter name.
        facts: JSON values: what the statistics were computed from, ``expert`` its fingerprint.

    Raises: ValueError for an unknown kind; OSError, which names the file, where it cannot be written.
    """
    with named_in_errors(Path(path) / STATISTICS.get(kind, kind)):
        return _write_statistics(path, kind, leaves, facts)


def _write_statistics(path: str | Path, kind: str, leaves: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    errors.check_member("kind of statistics", kind, tuple(STATISTICS))
    file = Path(path) / STATISTICS[kind]
    stored = {name: plain(leaf) for name, leaf in tree.flatten_unwrapped(leaves).items()}
    # one entry: safetensors writes several in any order, and equal statistics are equal files
    write_tensors(file, stored, {"facts": json.dumps({"kind": kind, **facts})})
    return file


def write_tensors(file: Path, leaves: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Replace a file of tensors atomically; after a power cut it is the old one or the new one."""
    # a folder, for `sweep`: safetensors writes to a random name beside the file that it is given
    fresh = file.with_name(f".{file.name}.new-{os.getpid()}")
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        save_shared(leaves, fresh / file.name, facts)
        sync(fresh / file.name)
        (fresh / file.name).replace(file)
        sync(file.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def save_shared(leaves: Mapping[str, Tensor], file: Path, facts: Mapping[str, str]) -> None:
    """Write a new file of tensors with the permissions of other new files; safetensors writes for their owner alone."""
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(leaves), file, metadata=dict(facts))
    file.chmod(mode & 0o666)


def statistics_facts(file: Path) -> dict[str, Any]:
    """The facts of `save_statistics`. Raises: ValueError for a file that it did not write."""
    try:
        with safe_open(file, framework="pt") as store:
            return {"kind": None, **json.loads(store.metadata()["facts"])}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} holds no statistics of smat_fn ({error!r}): remove it and make them again") from error


def load_statistics(file: Path) -> dict[str, Tensor]:
    """The leaves of `save_statistics`, unchecked."""
    with safe_open(file, framework="pt") as store:
        return {name: store.get_tensor(name) for name in store.keys()}  # noqa: SIM118 (no mapping)


def read_json(file: Path) -> Any:
    """The value in a JSON file. Raises: OSError or ValueError where there is none that can be read."""
    if file.exists() and not file.is_file():  # a pipe would never end
        raise OSError("it is not a file")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Files at or below a folder whose names fit a pattern, sorted; each folder once, linked ones too.

    Hidden folders below it are left out: what is written there has not ended (`atomic_folder`), or is of other tools.

    Raises: OSError for a folder that this user may not read, unless a link leads there; `Path.rglob` would skip it.
    """

    def failed(error: OSError) -> None:
        if not linked and not isinstance(error, (FileNotFoundError, NotADirectoryError)):  # removed meanwhile
            raise error

    found: list[Path] = []
    seen = {*map(str, Path(os.path.realpath(folder)).parents)}  # a link may lead above the folder
    links, linked = [str(folder)], False  # after the folders that are there themselves, whose names are kept
    while links:
        for place, folders, names in os.walk(links.pop(0), onerror=failed):
            if (real := os.path.realpath(place)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
            links += sorted(path for name in folders if os.path.islink(path := os.path.join(place, name)))
            found += [file for name in fnmatch.filter(names, pattern) if (file := Path(place, name)).is_file()]
        linked = True
    return sorted(found)


def logs_below(folder: Path) -> dict[Path, Path]:
    """The logs of training at or below a folder, by the folder of the expert, which may not be there."""
    return {log.with_name(log.name.removesuffix(LOG)): log for log in files_below(folder, f"*{LOG}")}


def snapshots_of(expert: Path) -> list[Path]:
    """Where an expert's snapshots lie if it has any, a folder for each number of a snapshot that its run has."""
    return [place / expert.name for place in sorted((expert.parent / SNAPSHOTS).glob("*"))]


def load_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, its suite with the folders of this machine (`without_places`).

    Raises: ValueError if there is none.
    """
    file = Path(path) / MANIFEST
    try:
        return _with_places(json.loads(file.read_text(encoding="utf-8")), Path(path) / SOURCES)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{path} is not a checkpoint (no {MANIFEST} in it): give a folder that train.py or merge.py wrote"
        ) from None
    except (ValueError, RecursionError) as error:  # bytes that are not text too
        raise ValueError(f"{file} is not JSON ({error})") from None


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Replace the manifest of a checkpoint folder. Raises: ValueError for values that are not JSON."""
    write_text(folder / MANIFEST, _as_json(manifest))


def without_places(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """A manifest without local paths, for publication, and the paths (`SOURCES`): folders are named only."""
    suite = manifest.get("suite")
    given = suite.items() if isinstance(suite, Mapping) else ()
    places = {name: value for name, value in given if isinstance(value, str) and Path(value).is_absolute()}
    if not places:
        return dict(manifest), {}
    assert suite is not None
    return {**manifest, "suite": {**suite, **{name: Path(value).name for name, value in places.items()}}}, places


def _with_places(manifest: Any, file: Path) -> Any:
    if not isinstance(manifest, dict) or not isinstance(manifest.get("suite"), dict) or not file.is_file():
        return manifest
    try:
        places = json.loads(file.read_text(encoding="utf-8"))["suite"]
        own = {name: str(place) for name, place in places.items() if name in manifest["suite"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return manifest
    return {**manifest, "suite": {**manifest["suite"], **own}}


def fingerprint(params: Params) -> str:
    """SHA-256 of a tree's content: name, dtype, shape and bytes of every parameter, sorted by name.

    Args:
        params: any tree of tensors on any device; nesting and wrappers do not matter, only parameter names.

    Returns:
        64 hexadecimal digits; bit-identical trees have equal fingerprints.
    """
    leaves = tree.flatten_unwrapped(params)
    return fingerprint_of(leaves, leaves.__getitem__)


def fingerprint_of(names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """`fingerprint` of leaves that are read one at a time."""
    digest = hashlib.sha256()
    for path in sorted(names):
        leaf = read(path)
        digest.update(f"{path}\0{dtype_name(leaf)}\0{tuple(leaf.shape)}\0".encode())
        digest.update(plain(leaf).reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_hashes(folder: Path, *names: str) -> dict[str, str]:
    """SHA-256 of files in a folder by name. Raises: OSError for one that cannot be read."""
    found = {}
    for name in names:
        with open(folder / name, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def same(one: Params, other: Params) -> bool:
    """Whether two trees are bit-identical, so that their fingerprints are equal; nothing is hashed."""
    left, right = tree.flatten(one), tree.flatten(other)
    return left.keys() == right.keys() and all(
        (leaf.dtype, leaf.shape) == (right[path].dtype, right[path].shape)
        and torch.equal(_integers(leaf), _integers(right[path]))
        for path, leaf in left.items()
    )


def _integers(leaf: Tensor) -> Tensor:
    """The bits of a tensor as integers, among which 0 is not -0 and NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return plain(leaf).reshape(-1).view(widths.get(leaf.itemsize, torch.int64))


def describe(params: Params, **facts: Any) -> dict[str, Any]:
    """A manifest for `save_expert`: the given facts, a fingerprint, the processor, and versions of the software.

    Args:
        params: the tree to be saved.
        facts: JSON values, such as ``task`` and ``seed``.

    Returns:
        ``{**facts, "fingerprint": ..., "code": ..., "cpu": ..., "versions": {"smat_fn", "python", "torch",
        "safetensors"}}``: code and cpu as of `smat_fn.machine`.
    """
    versions = {name: machine.version(name) for name in ("torch", "safetensors")}
    return {
        **facts,
        "fingerprint": fingerprint(params),
        "code": machine.code(),
        "cpu": machine.cpu(),
        "versions": {"smat_fn": __version__, "python": platform.python_version(), **versions},
    }


@contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary sibling folder that takes the place of ``path`` when the block ends without an exception.

    Of a symbolic link what it points to is replaced, and the link stays. Files of weights, which safetensors writes for
    their owner alone, get the permissions of other files. After the block the folder survives a power cut.

    Raises: ValueError as `refuse_existing`; OSError where weights cannot be written.
    """
    target = follow(Path(path))
    refuse_existing(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.parent / f".{target.name}.new-{os.getpid()}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        with named_in_errors(target):
            yield fresh
            for file in fresh.glob("*.safetensors"):
                file.chmod(fresh.stat().st_mode & 0o666)
            for path in (*fresh.rglob("*"), fresh):
                sync(path)
        take_place(fresh, target)
        sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network disks cannot flush a folder
            raise
    finally:
        os.close(descriptor)


def take_place(fresh: Path, target: Path) -> None:
    """Put a finished folder in the place of ``target``; the one there is restored if that fails, else removed."""
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sweep(path: Path) -> None:
    """Remove temporary folders and files of interrupted writes; nothing may be writing the path now."""
    for kind in ("new", "old"):
        for left in path.parent.glob(f".{glob.escape(path.name)}.{kind}-*"):
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.parent / f".{path.name}.new-{os.getpid()}"
    try:
        with named_in_errors(path):
            fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Adds the name of a file or folder to an OSError of the block that has none, as that of a full disk.

    Raises: OSError with the name in place of safetensors' own error, whose text names none.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}): free space there, and run the command again") from error
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raises: ValueError if ``path`` exists and ``overwrite`` is off, or it holds what its manifest does not name."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder: move it, or choose another folder")
    if strangers := _strangers(path):
        raise ValueError(
            f"{path} holds {errors.and_more(strangers, 3)}, which no manifest of smat_fn in it names, and only files "
            "that one names are replaced: move it, or choose another folder"
        )
    if not overwrite:
        raise ValueError(f"{path} exists: choose another folder or pass `overwrite=True`")


def foreign_problems(files: Mapping[Path, bytes]) -> list[str]:
    """Errors for files that exist and were not written here, and for any beside the weights of a checkpoint.

    Args: files: how each begins that was written here.
    """
    problems = [
        f"{place} is a checkpoint, which takes no other files: choose another folder"
        for place in dict.fromkeys(file.parent for file in files)
        if (place / MANIFEST).is_file() and _is_checkpoint(place)
    ]
    for file, begin in files.items():
        if file.is_file():
            with open(file, "rb") as opened:
                there = opened.read(len(begin))
            if there != begin[: len(there)]:  # of a killed process, a part
                problems.append(f"{file} holds something else than is written there: move it, or choose another place")
    return problems


def _is_checkpoint(folder: Path) -> bool:
    with suppress(ValueError):
        manifest = load_manifest(folder)
        return isinstance(manifest, dict) and "kind" in manifest
    return False


def follow(path: Path) -> Path:
    """The target of a symbolic link, whether it exists or not; any other path unchanged.

    Raises: ValueError for a circle of links.
    """
    with suppress(OSError, RuntimeError):  # Python before 3.13 raises for a circle of links
        if not (found := path.resolve() if path.is_symlink() else path).is_symlink():
            return found
    raise ValueError(f"{path} is a symbolic link that leads back to itself: remove it")


def _strangers(path: Path) -> list[str]:
    """Files in a folder that no manifest in it names."""
    there = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    try:
        manifest: Any = load_manifest(path)
    except (ValueError, OSError):
        return there
    named = manifest.get("files", {}) if isinstance(manifest, dict) else None
    if not isinstance(named, dict):
        return there
    ours = {MANIFEST, *named}
    adapter = not _ADAPTER.isdisjoint(named) or (_ADAPTER.issubset(there) and WEIGHTS not in there)
    ours |= _ADAPTER if adapter else {WEIGHTS}
    ours |= set() if manifest.get("kind") in ("base", "expert", "snapshot") else _OF_MERGES
    ours |= {name for name in there if is_note(path / name)}
    ours |= {file for kind, file in STATISTICS.items() if file in there and _holds_statistics(path / file, kind)}
    parts = tuple(f".{file}.new-" for file in STATISTICS.values())  # of a killed `save_statistics`
    ours |= {name for name in there if name.startswith(parts)}
    return [name for name in there if name not in ours]


def is_note(file: Path) -> bool:
    """Whether a file is what a merge notes of its finished files; one that was killed at its end leaves it behind."""
    if file.name != PROGRESS and not (file.name.startswith(NOTE) and file.suffix == ".json"):
        return False
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "shards" in found


def _holds_statistics(file: Path, kind: str) -> bool:
    try:
        return statistics_facts(file).get("kind") == kind
    except (ValueError, AttributeError):
        return False
