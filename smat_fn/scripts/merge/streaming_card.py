"""The card of a model that was merged on disk, from its manifest, and what a merge would need, in words."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...folders import Plan
from ...merge import RANDOM
from .card import density
from .finished import seconds_to_hash

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def streaming_card(manifest: Mapping[str, Any]) -> str:
    """Markdown: what was merged and how, what it cost in precision, and the SHA-256 of every file read and written."""
    options = ", ".join(f"{name} {value}" for name, value in manifest["hyperparameters"].items()) or "no options"
    masks = f", random masks from seed {manifest['merge_seed']}" if manifest["merger"] in RANDOM else ""
    lines = [
        f"# {manifest['label']} experts merged by {manifest['merger'].upper()}",
        "",
        f"Merger: {manifest['merger']} ({options}), semantics {manifest['semantics']}{masks}.",
        "",
        f"Precision: {rounding(manifest['rounding_ratio'])}; dtypes: {manifest['out_dtype']}.",
    ]
    lines += density(manifest)
    lines += [f"\nNote: {note}." for note in manifest["notes"]]
    lines += ["", "| expert | fingerprint of its weights |", "|---|---|"]
    lines += [f"| {name} | {'' if p is None else f'`{p}`'} |" for name, p in manifest["experts"].items()]
    lines += ["", f"Base `{manifest['base_fingerprint']}`, merged weights `{manifest['fingerprint']}`."]
    lines += [
        "",
        "`python merge.py verify FOLDER` hashes all of these again.",
        "",
        "| written | SHA-256 |",
        "|---|---|",
    ]
    lines += [f"| {file} | `{print_}` |" for file, print_ in manifest["files"].items()]
    for name, files in manifest["inputs"].items():
        lines += ["", f"| read of {name} | SHA-256 |", "|---|---|"]
        lines += [f"| {file} | `{print_}` |" for file, print_ in files.items()]
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    return "\n".join([*lines, "", versions + "."]) + "\n"


def rounding(ratio: float | None) -> str:
    """The last rounding beside the merged change, in words."""
    if ratio is None or not math.isfinite(ratio):
        return "nothing but rounding changes the base"
    return f"rounding is {ratio:.2%} of the merged change (RMS)"


def plan_text(folder: Path, found: Plan) -> str:
    """What a merge into ``folder`` would need."""
    files = f"{len(found.shards)} file" + ("s" if len(found.shards) > 1 else "")
    hashing = seconds_to_hash(found.read + 3 * found.disk)  # files, and the fingerprints of base and result
    return "\n".join(
        [
            f"{folder}: all checks passed, {found.leaves:,} leaves, {found.parameters:,} parameters",
            f"  memory: at most {found.memory / 2**20:,.0f} MiB beside mapped files",
            f"  disk: {_size(found.disk)} in {files}",
            f"  time: about {found.seconds:,.1f} s of computation, then {hashing:,.1f} s of hashing in one thread; "
            f"{_size(found.read)} to read, a disk slower than that adds to it",
            *(f"  note: {note}" for note in found.notes),
        ]
    )


def _size(count: int) -> str:
    unit = next((unit for unit in ("GB", "MB", "KB") if count >= _UNITS[unit]), None)
    return f"{count} bytes" if unit is None else f"{count / _UNITS[unit]:.1f} {unit}"
