"""`merge.py transplant-tokenizer`: the library's function by the options, with manifest and model card."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .... import checkpoint, errors
from ....folders import Report
from ....folders.files import Hashing, bytes_of, size_text
from ....folders.transplant import (
    Transplant,
    files_beside,
    open_transplant,
    output_problems,
    shards_of,
    transplant_tokenizer,
)
from ... import outcome
from ...recipes.places import folder_name, placed_by_name
from ..experts.inputs import model_names
from ..provenance.card import licenses_of, transplanted_card
from ..provenance.fingerprints import fingerprints_of
from ..provenance.finished import hashes, is_kept, kept, other_facts, other_files, other_reads, texts, verify
from ..settings import TransplantTokenizer


def transplant(args: TransplantTokenizer) -> Iterator[str]:
    """Write the model, unless the folder holds this very one; yields lines on its tokens.

    Raises: ValueError as the library's functions.
    """
    size = bytes_of(args.shard_size)
    asked = open_transplant(args.model, args.tokenizer_from, method=args.method, k=args.k)
    facts = _facts(args, asked) | {"shard_size": size}
    if is_kept(args.out, partial(_others, args.out, facts, asked, args.threads), overwrite=args.overwrite):
        outcome.add("kept", args.out)
        yield kept(args.out)
        return
    yield _tokens(asked)
    if args.dry_run:
        errors.raise_problems(output_problems(asked, args.out, overwrite=args.overwrite))
        yield from _plan(args, asked, size)
        return
    report = transplant_tokenizer(
        asked,
        args.out,
        shard_size=size,
        device=args.device,
        workers=args.threads,
        overwrite=args.overwrite,
        describe=partial(_texts, args, asked, facts),
    )
    outcome.add("written", args.out)
    yield f"transplanted: {args.out}, {size_text(report.bytes)}"
    yield from (f"note: {note}" for note in report.notes)


def _tokens(asked: Transplant) -> str:
    found = _counts(asked)
    outcome.add("tokens", found)
    return f"{found['all']:,} tokens: {found['shared']:,} of both models, {found['approximated']:,} to approximate"


def _counts(asked: Transplant) -> dict[str, int]:
    count = len(asked.new.tokens())
    return {"all": count, "shared": len(asked.found), "approximated": count - len(asked.found)}


def _plan(args: TransplantTokenizer, asked: Transplant, size: int) -> Iterator[str]:
    """Lines on what the transplant would need."""
    shards = shards_of(asked, size)
    disk, operations = sum(shard.size for shard in shards), asked.operations
    outcome.add("plans", {"folder": args.out, "disk": disk, "operations": operations})
    yield f"{args.out}: all checks passed"
    yield f"  disk: {size_text(disk)} in {outcome.counted(shards, 'file', 'files')}"
    yield f"  search: about {operations:.1e} floating-point operations"
    yield from (f"  note: {note}" for note in asked.notes)


def _facts(args: TransplantTokenizer, asked: Transplant) -> dict[str, Any]:
    """Facts that decide the bytes, beside the inputs."""
    by_rows = {"k": args.k, "device": args.device} if asked.donor.leaves else {}
    return {
        "kind": "transplanted",
        "label": folder_name(args.model),
        "tokenizer_from": placed_by_name(args.tokenizer_from),
        "hyperparameters": {"method": args.method, **by_rows},
        "base_model": model_names(args.model),
    }


def _inputs(asked: Transplant) -> dict[str, list[Path]]:
    return {"model": list(asked.model.stores), "tokenizer_from": list(asked.donor.stores)}


def _others(out: Path, facts: Mapping[str, Any], asked: Transplant, workers: int) -> list[str]:
    """Why a folder does not hold this very model."""
    try:
        if found := other_facts(checkpoint.load_manifest(out), facts):
            return found
    except ValueError as error:
        return [str(error)]
    with Hashing(workers) as hashing:
        return (
            other_reads(out, _inputs(asked), hashing)
            or other_files(out, files_beside(asked))
            or verify(out, hashing=hashing)[1]
        )


def _texts(
    args: TransplantTokenizer, asked: Transplant, facts: Mapping[str, Any], files: Sequence[Path], report: Report
) -> dict[str, str]:
    """Manifest, model card and the places of inputs."""
    origin, made = fingerprints_of(asked.model.root, files[0].parent)
    manifest = checkpoint.describe(
        {},
        **facts,
        source_fingerprint=origin,
        tokens=_counts(asked),
        notes=list(report.notes),
        **licenses_of(args.model, {folder_name(args.tokenizer_from): args.tokenizer_from}),
        **hashes(files, _inputs(asked), report.hashes),
    ) | {"fingerprint": made}
    return texts(manifest, transplanted_card, _inputs(asked))
