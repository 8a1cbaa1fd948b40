"""Recognise a finished merge: its manifest states settings and inputs, whose hashes are checked again."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .... import __version__, checkpoint
from ....folders.files import Hashing, digests
from ....folders.inputs.adapters.config import CONFIG
from ....folders.inputs.adapters.other_tools import file_of
from ... import outcome
from ...manifests import by_other_code, flat
from ...recipes.places import named, sources, sources_text
from ..settings import Verify
from .card import CARD


def is_merged(folder: Path) -> bool:
    """Whether the manifest of a folder is that of a merged model."""
    try:
        manifest = checkpoint.load_manifest(folder)
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("kind") == "merged"


def differences(folder: Path, wanted: Mapping[str, Any]) -> list[str]:
    """How the manifest in ``folder`` differs from one with these facts; nothing is hashed."""
    if not is_merged(folder):
        return [f"{folder} holds no merged model"]
    return other_facts(checkpoint.load_manifest(folder), wanted)


def other_facts(manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How a manifest differs from one of this version with these facts."""
    facts = json.loads(json.dumps(wanted))  # tuples are lists in a manifest
    if (made := manifest.get("versions", {}).get("smat_fn")) != __version__:
        return [f"smat_fn {made} made it, this is {__version__}"]
    old, new = (flat({name: values.get(name) for name in facts}) for values in (manifest, facts))
    return [
        f"its {name} is {old.get(name, 'left out')}, this merge's would be {new.get(name, 'left out')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def is_finished(
    folder: Path,
    kind: str,
    facts: Mapping[str, Any],
    inputs: Callable[[], tuple[Any, Mapping[str, Sequence[Path]]]],
    threads: int,
) -> bool:
    """Whether a folder holds the adapter that these settings make of these files, unchanged.

    Args: kind: "merged" or "extracted"; inputs: gives the base that the adapter names, and the files by label.
    """
    try:
        manifest = checkpoint.load_manifest(folder)
        if manifest.get("adapter") != kind or other_facts(manifest, facts):
            return False
        base, read = inputs()
        if base_of(folder) != base:
            return False
        with Hashing(threads) as hashing:
            return not other_reads(folder, read, hashing) and not verify(folder, hashing=hashing)[1]
    except (ValueError, OSError, KeyError, AttributeError):  # the folder or an input is broken, as the command says
        return False


def is_kept(out: Path, others: Callable[[], Sequence[str]], *, overwrite: bool) -> bool:
    """Whether a folder holds the model that is to be made, which stays.

    Args: others: gives the reasons why it is not this very model. Raises: ValueError for a folder of something else.
    """
    if overwrite or not out.exists():
        return False
    checkpoint.refuse_existing(out, overwrite=True)  # what --overwrite would not replace either
    if found := others():
        raise ValueError(
            f"{out} exists and holds something else ({found[0]}): choose another folder or pass --overwrite"
        )
    return True


def kept(folder: Path) -> str:
    """The line on a folder that holds what a command would write."""
    return f"kept: {folder}: already finished{by_other_code(checkpoint.load_manifest(folder))}"


def kept_adapter(adapter: Path) -> Iterator[str]:
    """Lines on an adapter that stays; a note on one that was written when its modules could have unequal ranks."""
    yield kept(adapter)
    if _config(adapter).get("rank_pattern"):
        way = "pass --overwrite to write it with one rank"
        yield f"note: its modules have unequal ranks, which llama.cpp scales wrongly: {way}"


def base_of(adapter: Path) -> Any:
    """The base that an adapter's configuration names; None for a LoRA file, which has none."""
    return _config(adapter).get("base_model_name_or_path")


def _config(adapter: Path) -> Mapping[str, Any]:
    found = adapter / CONFIG
    return checkpoint.read_json(found) if found.exists() or not file_of(adapter) else {}


def other_inputs(
    folder: Path,
    inputs: Mapping[str, Iterable[Path]],
    experts: Iterable[str],
    beside: Mapping[str, Path | bytes],
    hashing: Hashing,
) -> list[str]:
    """Reasons why a folder of the same settings was not made of these inputs, or has changed; none if it is theirs.

    Args: inputs: files by label; experts: their names in order; beside: the files beside its weights.
    """
    own = {label: list(files) for label, files in inputs.items()}
    return (
        other_reads(folder, own, hashing)
        or other_order(folder, experts)
        or other_files(folder, beside)
        or verify(folder, hashing=hashing)[1]
    )


def other_reads(folder: Path, inputs: Mapping[str, Sequence[Path]], hashing: Hashing) -> list[str]:
    """Reasons why a folder was not made of these files, by the hashes in its manifest."""
    read = hashes([], inputs, hashing.digests(file for files in inputs.values() for file in files))["inputs"]
    made = checkpoint.load_manifest(folder).get("inputs", {})
    others = [label for label in [*read, *(made.keys() - read)] if made.get(label) != read.get(label)]
    return [f"it was made of another {label}" for label in others]


def other_order(folder: Path, experts: Iterable[str]) -> list[str]:
    """The order of experts that ``folder`` was made of, if it is another one: SLERP takes γ of the second."""
    made = list(checkpoint.load_manifest(folder).get("experts", {}))
    return [f"it was made of experts in the order {', '.join(made)}"] if made != list(experts) else []


def verify(path: Path, *, hashing: Hashing | None = None) -> tuple[int, list[str]]:
    """Hash again all files that the manifest of a merged model names.

    The paths of inputs are in a file of this machine, `SOURCES`; without it they are not looked for.

    Args: path: folder of the merged model, or its README.md; hashing: where some of the files were hashed before.
    Returns: the number of files, and a line for every file that has changed or is missing.
    Raises: ValueError for a folder without a manifest, and for one that is malformed.
    """
    if not path.exists():
        raise ValueError(f"there is no folder {path}: give that of a merged model, or its README.md")
    folder = path if path.is_dir() else path.parent
    manifest = checkpoint.load_manifest(folder)
    if problems := list(_malformed(manifest)):
        raise ValueError(f"{folder / checkpoint.MANIFEST} is not a manifest of smat_fn: {'; '.join(problems)}")
    if "files" not in manifest:  # merged in memory
        same = checkpoint.fingerprint(checkpoint.load_leaves(folder)[0]) == manifest.get("fingerprint")
        return 1, [] if same else [f"{folder / checkpoint.WEIGHTS} does not hold the weights that were written"]
    named = {folder / file: print_ for file, print_ in manifest["files"].items()}
    places = sources(folder)
    for label, read in manifest.get("inputs", {}).items():
        known = places.get(label, {})
        named |= {Path(known[name]): print_ for name, print_ in read.items() if name in known}
    there = [file for file in named if file.is_file()]
    found = digests(there, 1) if hashing is None else hashing.digests(there)
    return len(named), [
        f"{file} has changed: SHA-256 {found[file]}, it was {print_}" if file in found else f"{file} is missing"
        for file, print_ in named.items()
        if found.get(file) != print_
    ]


def verified(args: Verify) -> Iterator[str]:
    """Lines on what has changed since the merge, or on how many files are as they were."""
    count, problems = verify(args.path)
    outcome.add("verified", {"path": args.path, "files": count, "changed": len(problems)})
    for problem in problems:
        outcome.add("problems", problem)
        yield problem
    if problems:
        raise ValueError(f"{len(problems)} of {count} files differ from the hashes stored in {args.path}")
    yield f"{count} {'file has the hash' if count == 1 else 'files have the hashes'} stored in {args.path}"


def hashes(files: Sequence[Path], inputs: Mapping[str, Sequence[Path]], found: Mapping[Path, str]) -> dict[str, Any]:
    """The facts of a manifest that `verify` checks: SHA-256 of the files of a model, and of those it was made from."""
    return {
        "files": {str(file.relative_to(files[0].parent)): found[file] for file in files},
        "inputs": {label: {name: found[file] for name, file in named(own).items()} for label, own in inputs.items()},
    }


def texts(
    manifest: Mapping[str, Any], card: Callable[[Mapping[str, Any]], str], inputs: Mapping[str, Sequence[Path]]
) -> dict[str, str]:
    """The texts beside a model's weights: manifest, model card and `SOURCES`, which alone has paths of this machine."""
    manifest, places = checkpoint.without_places(manifest)
    return {
        checkpoint.MANIFEST: json.dumps(manifest, indent=2, allow_nan=False) + "\n",
        CARD: card(manifest),
        checkpoint.SOURCES: sources_text(inputs, places),
    }


def _malformed(manifest: Any) -> Iterator[str]:
    if not isinstance(manifest, dict):
        yield f"it holds a {type(manifest).__name__}, must be a JSON object"
        return
    inputs = manifest.get("inputs", {})
    for name, value in {
        "files": manifest.get("files", {}),
        **(inputs if isinstance(inputs, dict) else {"inputs": 0}),
    }.items():
        if not isinstance(value, dict) or not all(isinstance(print_, str) for print_ in value.values()):
            yield f"{name} is {value!r}, must be an object of files and their SHA-256"
        elif name == "files" and (
            outside := [own for own in value if Path(own).is_absolute() or ".." in Path(own).parts]
        ):
            yield f"files names {outside[0]!r}, outside the folder: do not trust this manifest"


def seconds_to_hash(size: int) -> float:
    """The estimated seconds to hash ``size`` bytes in one thread, from a short trial."""
    trial, begin = bytes(1 << 22), time.perf_counter()
    hashlib.sha256(trial)
    return size / len(trial) * (time.perf_counter() - begin)


def other_files(folder: Path, files: Mapping[str, Path | bytes]) -> list[str]:
    """Reasons why the files beside the weights of ``folder`` are not ``files``; none if they are."""
    return [
        f"its {name} is not base's"
        for name, file in files.items()
        if not (folder / name).is_file()
        or (folder / name).read_bytes() != (file.read_bytes() if isinstance(file, Path) else file)
    ]
