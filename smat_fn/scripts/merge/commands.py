"""The command line of merge.py beside merging: verify, export, extract-lora, and --coef GLOB=NUMBER. No torch here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ..cli import Command

if TYPE_CHECKING:
    from ...folders import Extracted


@dataclass(frozen=True)
class Verify:
    """Hash the files of a merged model, and those that it was made from, again; list every one that has changed."""

    path: Positional[Path]
    """Folder of the merged model, or its README.md."""


def verify(args: Verify) -> None:
    """Print what has changed since the merge, or how many files are as they were."""
    from .finished import verify

    count, problems = verify(args.path)
    for problem in problems:
        print(problem)
    if problems:
        raise ValueError(f"{len(problems)} of {count} files are not those that {args.path} names")
    print(f"{count} files are those that {args.path} names")


@dataclass(frozen=True)
class Export:
    """Write an expert or a merged model as the whole model it belongs to, for from_pretrained: base with its leaves."""

    model: Annotated[Positional[Path], arg(metavar="MODEL")]
    """Folder of an expert of train.py, of a merged model, or of a LoRA adapter."""
    base: Path
    """The model that it was trained from: a folder, or a hub name."""
    out: Path
    """Folder for the whole model."""
    out_dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    """Dtype of all weights; same: base's."""
    shard_size: str = "5GB"
    """Largest file of weights, as 500MB or 5GB."""
    overwrite: bool = False
    """Replace a model that exists."""
    threads: int = 1
    """CPU threads."""


def export(args: Export) -> None:
    """Write the whole model and print its size."""
    import torch

    from .exporting import export
    from .streaming import bytes_of

    torch.set_num_threads(1)  # of each worker
    report = export(
        args.model,
        args.base,
        args.out,
        out_dtype=args.out_dtype,
        shard_size=bytes_of(args.shard_size),
        overwrite=args.overwrite,
        workers=args.threads,
    )
    rounded = f"rounding is {report.rounding_ratio:.2%} of the change" if report.rounding_ratio else "bit for bit"
    print(f"exported: {args.out}, {report.bytes / 1e6:.1f} MB, {rounded}")
    for note in report.notes:
        print(f"note: {note}")


@dataclass(frozen=True)
class ExtractLora:
    """Write what an expert changed in base as a LoRA adapter for peft, as near as its rank allows."""

    base: Path
    """Base: a folder, or a hub name."""
    expert: Path
    """Fine-tuned model: a folder, or a hub name."""
    out: Path
    """Folder for the adapter."""
    rank: int
    """Rank of the adapter, at most."""
    overwrite: bool = False
    """Replace an adapter that exists."""
    threads: int = 1
    """CPU threads."""


def extract_lora(args: ExtractLora) -> None:
    """Write the adapter and print its errors."""
    import torch

    from ...folders import extract_lora

    torch.set_num_threads(args.threads)
    made = extract_lora(args.base, args.expert, args.out, rank=args.rank, overwrite=args.overwrite)
    for line in summary(made):
        print(line)
    print(f"extracted: {args.out}, rank {args.rank}, {made.bytes / 1e6:.1f} MB, relative error {made.error:.2e} in all")


def summary(made: "Extracted") -> Iterator[str]:
    """What an adapter holds, a line for each kind of leaf."""
    beside = {*made.whole, *made.left_out}
    low = sorted((error, path) for path, error in made.errors.items() if path not in beside)
    if low:
        (worst, path), middle = low[-1], low[len(low) // 2][0]
        yield f"{_count(low, 'matrix', 'matrices')}: relative error {middle:.2e} in the middle, {worst:.2e} at {path}"
    if made.whole:
        yield f"{_count(made.whole, 'changed leaf', 'changed leaves')} stored whole: {_some(made.whole)}"
    if made.left_out:
        what = _count(made.left_out, "changed leaf", "changed leaves")
        yield f"{what} left out, an adapter cannot hold them: {_some(made.left_out)}"
    if made.tied:
        yield f"{_some(made.tied)}: other modules share it, peft changes them too with merge_and_unload alone"


def _count(things: Sequence[object], one: str, several: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else several}"


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


COMMANDS: dict[str, Command] = {
    "verify": (verify, Verify),
    "export": (export, Export),
    "extract-lora": (extract_lora, ExtractLora),
}


def by_glob(words: list[str]) -> list[str]:
    """Every ``--coef GLOB=NUMBER`` as words of --coefs."""
    left, rules, rest = list[str](), list[str](), iter(words)
    for word in rest:
        option, _, value = word.partition("=")
        given = [option, value] if value else [word, *([next(rest, "")] if word == "--coef" else [])]
        if given[0] == "--coef" and "=" in given[-1]:
            rules += given[-1].rpartition("=")[::2]
        else:
            left += [word] if value else given
    if not rules:
        return words
    place = left.index("--coefs") if "--coefs" in left else len(left)
    return [*left[:place], "--coefs", *rules, *left[place + 1 :]]
