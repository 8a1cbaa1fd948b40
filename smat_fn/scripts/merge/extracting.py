"""`merge.py extract-lora`: the library's function by the options, and a manifest with hashes of inputs and outputs."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ... import checkpoint
from ...folders import Extracted, extract_lora
from ...folders.extraction import files_read
from ...folders.files import Hashing
from ...folders.inputs.opening import open_input
from ...folders.inputs.stacks import stack_parts
from ..recipes.places import placed_by_name, sources_text
from .adapters import base_of
from .finished import hashes, other_facts, other_reads, verify
from .inputs import manifest_of
from .settings import ExtractLora

SETTINGS = "rank", "energy", "linear_only", "only", "skip"


def extract(args: ExtractLora) -> Extracted | None:
    """Extract and write; None where the folder holds this very adapter.

    Raises: ValueError as the library's function, with the way out for an expert of train.py.
    """
    settings = {name: getattr(args, name) for name in SETTINGS}
    stack = {"stack": placed_by_name(args.expert) if stack_parts(args.expert) else None}
    if not args.overwrite and _is_finished(args, settings | stack):
        return None
    texts = partial(_texts, args.threads, stack)
    try:
        return extract_lora(args.base, args.expert, args.out, **settings, overwrite=args.overwrite, texts=texts)
    except ValueError as error:
        if not manifest_of(args.expert) or _names(args.expert) <= _names(args.base):
            raise
        way = f"merge.py export {args.expert} --base {args.base} --out FOLDER, then pass --expert FOLDER"
        raise ValueError(
            f"{args.expert} has the names of train.py, not those of {args.base}: {way} ({error})"
        ) from error


def _is_finished(args: ExtractLora, settings: Mapping[str, Any]) -> bool:
    """Whether ``--out`` holds what these settings make of these files, unchanged."""
    try:
        manifest = checkpoint.load_manifest(args.out)
        if manifest.get("adapter") != "extracted" or other_facts(manifest, settings):
            return False
        if base_of(args.out) != str(args.base):
            return False
        with Hashing(args.threads) as hashing:
            read = files_read(args.base, args.expert)
            return not other_reads(args.out, read, hashing) and not verify(args.out, hashing=hashing)[1]
    except (ValueError, OSError, KeyError, AttributeError):  # the folder or an input is broken, as the library says
        return False


def _texts(
    threads: int, stack: Mapping[str, Any], manifest: Mapping[str, Any], inputs: Mapping[str, Sequence[Path]]
) -> dict[str, str]:
    with Hashing(threads) as hashing:
        found = hashing.digests(file for files in inputs.values() for file in files)
    manifest = {**manifest, **stack, "inputs": hashes([], inputs, found)["inputs"]}
    return {
        checkpoint.MANIFEST: json.dumps(manifest, indent=2) + "\n",
        checkpoint.SOURCES: sources_text(inputs, {}),
    }


def _names(model: Path) -> frozenset[str]:
    return frozenset(open_input("model", model).leaves)
