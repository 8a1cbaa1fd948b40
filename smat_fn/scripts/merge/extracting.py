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
from .finished import hashes, is_finished
from .inputs import manifest_of
from .settings import ExtractLora

SETTINGS = "rank", "energy", "linear_only", "only", "skip"


def extract(args: ExtractLora) -> Extracted | None:
    """Extract and write; None where the folder holds this very adapter.

    Raises: ValueError as the library's function, with the way out for an expert of train.py.
    """
    settings = {name: getattr(args, name) for name in SETTINGS}
    stack = {"stack": placed_by_name(args.expert) if stack_parts(args.expert) else None}
    inputs = partial(_inputs, args)
    if not args.overwrite and is_finished(args.out, "extracted", settings | stack, inputs, args.threads):
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


def _inputs(args: ExtractLora) -> tuple[str, dict[str, list[Path]]]:
    return str(args.base), files_read(args.base, args.expert)


def _texts(
    threads: int, stack: Mapping[str, Any], manifest: Mapping[str, Any], inputs: Mapping[str, Sequence[Path]]
) -> dict[str, str]:
    with Hashing(threads) as hashing:
        found = hashing.digests(file for files in inputs.values() for file in files)
    manifest = {**manifest, **stack, "inputs": hashes([], inputs, found)["inputs"]}
    return {checkpoint.MANIFEST: json.dumps(manifest, indent=2) + "\n", checkpoint.SOURCES: sources_text(inputs, {})}


def _names(model: Path) -> frozenset[str]:
    return frozenset(open_input("model", model).leaves)
