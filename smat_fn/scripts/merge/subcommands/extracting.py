"""`merge.py extract-lora`: the library's function by the options, and a manifest with hashes of inputs and outputs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .... import checkpoint
from ....errors import and_more
from ....folders import Extracted, extract_lora
from ....folders.extraction import files_read
from ....folders.files import Hashing, size_text
from ....folders.inputs.opening import open_input
from ....folders.inputs.stacks import stack_parts
from ... import outcome
from ...manifests import manifest_of
from ...recipes.places import placed_by_name, sources_text
from ..provenance.finished import hashes, is_finished, kept_adapter
from ..settings import ExtractLora

SETTINGS = "rank", "energy", "linear_only", "only", "skip"


def extract(args: ExtractLora) -> Iterator[str]:
    """Write the adapter, unless the folder holds this very one; yields lines on its errors.

    Raises: ValueError as the library's function, with the way out for an expert of train.py.
    """
    settings = {name: getattr(args, name) for name in SETTINGS}
    stack = {"stack": placed_by_name(args.expert) if stack_parts(args.expert) else None}
    inputs = partial(_inputs, args)
    if not args.overwrite and is_finished(args.out, "extracted", settings | stack, inputs, args.threads):
        outcome.add("kept", args.out)
        yield from kept_adapter(args.out)
        return
    texts = partial(_texts, args.threads, stack)
    try:
        made = extract_lora(args.base, args.expert, args.out, **settings, overwrite=args.overwrite, texts=texts)
    except ValueError as error:
        if not manifest_of(args.expert) or _names(args.expert) <= _names(args.base):
            raise
        way = f"merge.py export {args.expert} --base {args.base} --out FOLDER, then pass --expert FOLDER"
        raise ValueError(
            f"{args.expert} has the names of train.py, not those of {args.base}: {way} ({error})"
        ) from error
    yield from summary(made, linear_only=args.linear_only)
    outcome.add("written", args.out)
    for kind in ("whole", "left_out", "skipped"):
        for path in getattr(made, kind):
            outcome.add(kind, path)
    outcome.add("lost", made.lost)
    least, most = min(made.ranks.values()), max(made.ranks.values())
    ranks = f"rank {most}" if least == most else f"ranks {least} to {most}, padded to {most}"
    yield f"extracted: {args.out}, {ranks}, {size_text(made.bytes)}, relative error {made.error:.2e} in all"
    yield from (f"note: {note}" for note in made.notes)


def summary(made: Extracted, *, linear_only: bool) -> Iterator[str]:
    """Lines that summarise an extracted adapter, one for each kind of leaf."""
    beside = {*made.whole, *made.left_out, *made.skipped}
    low = sorted((error, path) for path, error in made.errors.items() if path not in beside)
    if low:
        (worst, path), middle = low[-1], low[len(low) // 2][0]
        found = outcome.counted(low, "matrix", "matrices")
        yield f"{found}: relative error {middle:.2e} in the middle, {worst:.2e} at {path}"
    why = "they have no low-rank factors (--linear-only)" if linear_only else "an adapter cannot hold them"
    for paths, what in (
        (made.whole, "stored whole"),
        (made.left_out, f"left out, {why}"),
        (made.skipped, "skipped (--only, --skip)"),
    ):
        if paths:
            yield f"{outcome.counted(paths, 'changed parameter', 'changed parameters')} {what}: {and_more(paths, 3)}"
    if made.left_out or made.skipped:
        yield f"not in the adapter: {made.lost:.2%} of the norm of expert - base"
    if made.tied:
        yield f"{and_more(made.tied, 3)}: other modules share it, peft changes them too with merge_and_unload alone"


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
