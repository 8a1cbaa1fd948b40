"""Pictures of experts and merges: updates by block, and dev score over the coefficient. No torch until one is made."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ... import errors
from ..cli import NONE
from .commands import Shared

if TYPE_CHECKING:
    from ...analyses.interference import Updates
    from ...analyses.results import Result
    from ...folders.inputs.reading import Folder

PIECE = 1 << 20  # coordinates read together


@dataclass(frozen=True, kw_only=True)
class Interference(Shared):
    """Compare experts' updates block by block: sizes, cosines between them, agreement of their signs."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="[RUN...]", help_behavior_hint="")] = ()
    """Run folders of train.py, to compare methods. Leave them out with --base and --experts."""
    base: Annotated[Path | None, NONE] = None
    """Base of --experts: a folder or a hub name."""
    experts: Annotated[tuple[Path, ...], NONE] = ()
    """Experts of one base: folders, hub names or LoRA adapters."""
    heads: Literal["error", "keep"] = "error"
    """If an expert's head differs from the base's: error, or leave the heads out and compare the rest."""


def interference(options: Interference) -> "Result":
    """`analyses.interference` of every run, or of the experts; a row for each block of each. Weights are mapped.

    Raises: ValueError as `rows_of`; for runs and experts together or neither, for a label that comes twice with one
        seed, and for experts that an interrupted --overwrite has yet to replace.
    """
    from ... import checkpoint
    from ..run_folder import find_inputs, unreplaced

    given = options.base is not None, bool(options.experts)
    if any(given) if options.runs else not all(given):
        raise ValueError("give either run folders of train.py, or --base FOLDER with --experts FOLDER...")
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    sources = [find_inputs(run) for run in options.runs] or [(options.base or Path(), list(options.experts))]
    if options.runs:
        errors.raise_problems([text for _, experts in sources for text in unreplaced(experts)])
    facts = [checkpoint.load_manifest(experts[0]) if options.runs else {} for _, experts in sources]
    names = [(first.get("label", "experts"), first.get("seed")) for first in facts]
    errors.raise_problems(
        [
            f"{n} runs are {x} of seed {seed}: give one, or another --label"
            for (x, seed), n in Counter(names).items()
            if n > 1
        ]
    )
    for (base, experts), (label, seed) in zip(sources, names, strict=True):
        rows += (own := rows_of(base, experts, heads=options.heads, method=label, seed=seed))
        runs.append({"label": label, "seed": seed, "experts": list(own[0]["rms"]) if own else []})
    versions = checkpoint.describe({})["versions"]
    return {"analysis": "interference", "settings": {}, "runs": runs, "versions": versions, "rows": rows}


def rows_of(
    base: Path,
    experts: Sequence[Path],
    *,
    vocabulary: str = "error",
    heads: str = "error",
    tokenizer_from: str | None = None,
    **more: Any,
) -> list[dict[str, Any]]:
    """The rows of `interference` for experts of one base, with ``more`` in each.

    Running statistics of batch norms are left out: they are not weights, and can be larger by orders of magnitude.

    Args: experts: FOLDER or NAME=FOLDER each; vocabulary, heads, tokenizer_from: as of `merge_folders`.
    Raises: ValueError as `merge_folders` for inputs that do not fit base, and for experts of one name.
    """
    from ...analyses.interference import as_rows
    from ...analyses.interference import interference as compute
    from ...folders.inputs.config_source import Sources
    from ...folders.inputs.opening import inputs_of, open_inputs
    from ..merge.experts.given import by_name

    known, problems = by_name(base, experts, None)
    errors.raise_problems(problems)
    named = {name: path for name, path, _ in known}
    align = Sources(inputs_of(base, named), tokenizer_from=tokenizer_from).align(based=True)
    apart: dict[str, Any] = {"heads": {}, "stand_ins": {}} if heads == "keep" else {}  # there may be none
    start, found = open_inputs(base, named, vocabulary, problems, align=align, **apart)
    errors.raise_problems(problems)
    assert start is not None, "its absence is a problem"
    return as_rows(compute(_updates(start, list(found.values()))), list(found), **more)


def _updates(start: "Folder", experts: Sequence["Folder"]) -> Iterator["Updates"]:
    import torch

    for path, leaf in start.leaves.items():
        if not leaf.is_floating_point() or path.endswith(("running_mean", "running_var")):
            continue
        for first in range(0, leaf.numel(), PIECE):
            last = min(first + PIECE, leaf.numel())
            own = start.read(path, first, last).to(torch.float32)
            yield path, [expert.read(path, first, last).to(torch.float32) - own for expert in experts]


def check_picture(path: Path) -> None:
    """Raises: ValueError for a place where no PNG can be written, ModuleNotFoundError without matplotlib."""
    import matplotlib  # noqa: F401 - what draws at the end must be there before a long merge

    from ... import checkpoint

    above = next(place for place in path.absolute().parents if place.exists())
    if above.is_dir() and not os.access(above, os.W_OK):
        raise ValueError(f"--plot {path}: {above} cannot be written to: name a file elsewhere")
    if path.suffix.lower() != ".png" or path.is_dir() or not above.is_dir():
        below = "is a PNG" if above.is_dir() else f"would lie below a file, {above}"
        reason = "cannot replace a folder" if path.is_dir() else below
        raise ValueError(f"--plot {path}: the picture {reason}; name a file that ends in .png")
    errors.raise_problems(checkpoint.foreign_problems({path: b"\x89PNG\r\n"}))


def picture(path: Path, rows: Sequence[Mapping[str, Any]], merged: Sequence[Path]) -> None:
    """Write a PNG for ``merge.py --plot``: experts' updates by block, and the scores of a search by coefficient."""
    from ... import checkpoint
    from ...analyses.plots import merge_picture

    curves = {}
    for folder in merged:
        manifest = checkpoint.load_manifest(folder)
        if curve := manifest["dev_curve"] or manifest.get("score_curve"):
            curves[manifest["merger"]] = {float(coef): float(score) for coef, score in curve}
    checkpoint.write_bytes(path, merge_picture(rows, curves))
