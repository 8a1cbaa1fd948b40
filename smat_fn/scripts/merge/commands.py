"""merge.py's subcommands beside mergers, and words that it takes for other words. No torch until one runs."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import and_more
from .. import outcome
from ..cli import Command
from .settings import (
    AdaMerging,
    Export,
    ExtractLora,
    FromRecipe,
    MergeAdapters,
    Moe,
    RegMeanPlus,
    Statistics,
    Transport,
    Verify,
)

if TYPE_CHECKING:
    from ...folders import Extracted, Part
    from ...folders.files import Hashing
    from ..recipes.own import Recipe
    from .streaming import Order


def verify(args: Verify) -> None:
    """Print what has changed since the merge, or how many files are as they were."""
    from .finished import verify

    count, problems = verify(args.path)
    outcome.add("verified", {"path": args.path, "files": count, "changed": len(problems)})
    for problem in problems:
        outcome.line(problem)
        outcome.add("problems", problem)
    if problems:
        raise ValueError(f"{len(problems)} of {count} files differ from the hashes stored in {args.path}")
    outcome.line(f"{count} {'file has the hash' if count == 1 else 'files have the hashes'} stored in {args.path}")


def export(args: Export) -> None:
    """Write the whole model and print its size."""
    import torch

    from ...folders.files import size_text
    from .card import rounding
    from .exporting import export
    from .streaming import bytes_of

    torch.set_num_threads(1)  # of each worker
    report = export(
        args.model,
        args.base,
        args.out,
        task=args.task,
        vocabulary=args.vocabulary,
        tokenizer_from=args.tokenizer_from,
        out_dtype=args.out_dtype,
        shard_size=bytes_of(args.shard_size),
        overwrite=args.overwrite,
        workers=args.threads,
    )
    rounded = rounding(report.rounding_ratio) if report.rounding_ratio else "bit for bit"
    outcome.add("written", args.out)
    outcome.line(f"exported: {args.out}, {size_text(report.bytes)}, {rounded}")
    for note in report.notes:
        outcome.line(f"note: {note}")


def extract_lora(args: ExtractLora) -> None:
    """Write the adapter and print its errors."""
    import torch

    from ...folders.files import size_text
    from .extracting import extract

    torch.set_num_threads(args.threads)
    if (made := extract(args)) is None:
        outcome.add("kept", args.out)
        _kept(args.out)
        return
    for line in summary(made, linear_only=args.linear_only):
        outcome.line(line)
    outcome.add("written", args.out)
    for kind in ("whole", "left_out", "skipped"):
        for path in getattr(made, kind):
            outcome.add(kind, path)
    outcome.add("lost", made.lost)
    least, most = min(made.ranks.values()), max(made.ranks.values())
    ranks = f"rank {most}" if least == most else f"ranks {least} to {most}, padded to {most}"
    outcome.line(f"extracted: {args.out}, {ranks}, {size_text(made.bytes)}, relative error {made.error:.2e} in all")


def summary(made: "Extracted", *, linear_only: bool) -> Iterator[str]:
    """Lines that summarise an extracted adapter, one for each kind of leaf."""
    beside = {*made.whole, *made.left_out, *made.skipped}
    low = sorted((error, path) for path, error in made.errors.items() if path not in beside)
    if low:
        (worst, path), middle = low[-1], low[len(low) // 2][0]
        yield f"{_count(low, 'matrix', 'matrices')}: relative error {middle:.2e} in the middle, {worst:.2e} at {path}"
    why = "they have no low-rank factors (--linear-only)" if linear_only else "an adapter cannot hold them"
    for paths, what in (
        (made.whole, "stored whole"),
        (made.left_out, f"left out, {why}"),
        (made.skipped, "skipped (--only, --skip)"),
    ):
        if paths:
            yield f"{_count(paths, 'changed parameter', 'changed parameters')} {what}: {and_more(paths, 3)}"
    if made.left_out or made.skipped:
        yield f"not in the adapter: {made.lost:.2%} of the norm of expert - base"
    if made.tied:
        yield f"{and_more(made.tied, 3)}: other modules share it, peft changes them too with merge_and_unload alone"


def merge_adapters(args: MergeAdapters) -> None:
    """Write the adapter and print its rank."""
    import torch

    from ...folders.files import size_text
    from .adapters import merge

    torch.set_num_threads(args.threads)
    if (made := merge(args)) is None:
        outcome.add("merged", {"folder": args.out, "kept": True})
        _kept(args.out)
        return
    if made.partial:
        lacking = _count(made.partial, "module", "modules")
        outcome.line(f"note: {lacking} of some adapters alone, merged from those: {and_more(made.partial, 3)}")
    for note in made.notes:
        outcome.line(f"note: {note}")
    outcome.add("merged", {"folder": args.out, "kept": False})
    modules = _count(made.modules, "module", "modules")
    outcome.line(f"merged: {args.out}, {modules} of rank {made.rank}, {size_text(made.bytes)}")


def _kept(adapter: Path) -> None:
    from .finished import unequal_ranks

    outcome.line(f"kept: {adapter}: already finished")
    if unequal_ranks(adapter):
        way = "pass --overwrite to write it with one rank"
        outcome.line(f"note: its modules have unequal ranks, which llama.cpp scales wrongly: {way}")


def _count(things: Collection[object], one: str, several: str) -> str:
    return f"{len(things)} {one if len(things) == 1 else several}"


def from_recipe(args: FromRecipe) -> None:
    """Merge, and print a summary of each merge of the file."""
    from ..recipes.load import documents_of, recipe_of
    from . import streaming

    part = streaming.chosen_part(args.part, dry_run=args.dry_run, push=args.push_to_hub)
    first, *more = documents_of(args.file, "a recipe")
    if more:
        _several(args, [first, *more])
    else:
        _merge(args, recipe_of(first, args.file, into=args.into, partial=args.partial), args.out, part)


def _several(args: FromRecipe, documents: Sequence[Mapping[str, Any]]) -> None:
    """The merges of a file, one after another.

    Raises: ValueError for what takes one merge, and all problems of the file that do not depend on an earlier merge.
    """
    from ... import errors
    from ...folders.files import Hashing
    from ..recipes.load import recipe_of
    from ..recipes.several import placed, steps_of
    from . import streaming

    notes, made = list[str](), dict[str, Path]()
    problems = [
        f"{args.file} holds several merges, and --{name} is for one: write the last one to a file of its own"
        for name, value in (("part", args.part), ("push-to-hub", args.push_to_hub))
        if value is not None
    ]
    steps = errors.all_at_once(problems, lambda: steps_of(documents, args.file, notes))
    with Hashing(args.threads) as hashing:
        for step in steps:  # those of models that are there, before the first merge
            if not (step.needs or args.dry_run):
                with errors.collected(problems, of=step.label):
                    found = recipe_of(placed(step, {}), args.file, into=args.into, partial=args.partial)
                    streaming.plan_run([found.config], _order(args, found, step.folder(args.out)), hashing)
        errors.raise_problems(problems)
        for note in notes:
            outcome.line(f"note: {note}")
        for step in steps:
            if args.dry_run and (waits := [name for name in step.needs if name not in made]):
                outcome.line(f"{step.label}: checked once {' and '.join(waits)} is merged")
                continue
            with errors.collected(problems, of=step.label):
                found = recipe_of(placed(step, made), args.file, into=args.into, partial=args.partial)
                _merge(args, found, step.folder(args.out), hashing=hashing)
                folder = step.folder(args.out) / found.config.name
                made |= {step.name: folder} if folder.is_dir() else {}
            errors.raise_problems(problems)


def _merge(
    args: FromRecipe, found: "Recipe", out: Path, part: "Part | None" = None, hashing: "Hashing | None" = None
) -> None:
    from . import streaming

    order = _order(args, found, out, part)
    for note in found.notes:
        outcome.line(f"note: {note}")
    how: Any = {"dry_run": args.dry_run, "push": args.push_to_hub, "public": args.public, "hashing": hashing}
    for line in streaming.run([found.config], order, **how):
        outcome.line(line)


def _order(args: FromRecipe, found: "Recipe", out: Path, part: "Part | None" = None) -> "Order":
    from ...folders import chunk_of
    from . import streaming

    given = dict(found.options)
    seed = given.pop("seed", 0)
    seed = seed if args.seed is None else args.seed
    if args.shard_size is not None:
        given["shard_size"] = streaming.bytes_of(args.shard_size)
    given |= {
        name: value
        for name in ("vocabulary", "config_from", "heads", "into", "device")
        if (value := getattr(args, name)) is not None
    }
    given["partial"] = args.partial or given.get("partial", False)
    return streaming.order(
        found.base,
        found.experts,
        out=out,
        seed=seed,
        coefs=found.coef,
        overwrite=args.overwrite,
        chunk=None if args.memory_mib is None else chunk_of(args.memory_mib << 20),
        workers=args.threads,
        part=part,
        based=found.config.based,
        **given,
    )


def printing(module: str, name: str) -> Callable[[Any], None]:
    """The command that prints the lines which a function of a module here yields for its options."""

    def run(args: Any) -> None:
        import torch

        torch.set_num_threads(args.threads)
        for line in getattr(import_module(module, __package__), name)(args):
            outcome.line(line)

    return run


COMMANDS: dict[str, Command] = {
    "verify": (verify, Verify),
    "recipe": (from_recipe, FromRecipe),
    "export": (export, Export),
    "extract-lora": (extract_lora, ExtractLora),
    "statistics": (printing(".statistics", "make_statistics"), Statistics),
    "adamerging": (printing(".by_data", "adapt"), AdaMerging),
    "reg_mean_plus": (printing(".by_data", "regress"), RegMeanPlus),
    "adapters": (merge_adapters, MergeAdapters),
    "transport": (printing(".transport", "transport"), Transport),
    "moe": (printing(".moe", "make"), Moe),
}


def by_file(words: list[str]) -> list[str]:
    """``FILE.yml`` as the first word is ``recipe FILE.yml``; a word after the file is --out, as of mergekit-yaml."""
    words = ["recipe", *words] if words and words[0].endswith((".yml", ".yaml")) else words
    named = words[:1] == ["recipe"] and len(words) > 2 and not any(word.startswith("-") for word in words[1:3])
    if not named or "--out" in {word.partition("=")[0] for word in words}:
        return words
    return [*words[:2], "--out", *words[2:]]


def by_density(words: list[str]) -> list[str]:
    """``--density``, the name in mergekit and PEFT, as --keep of TIES; of DARE and DELLA --drop-prob is 1 - density.

    Adapters and sce have a --density of their own.
    """
    drops = words[0] in ("dare", "dare_ties", "della") if words else False
    if not (drops or "ties" in words) or words[0] in ("adapters", "sce"):
        return words
    names, option = [word.partition("=")[0] for word in words], "--drop-prob" if drops else "--keep"
    if option in names or "--density" not in names:
        return words  # with both, one would be taken in silence: --density is an unknown option then
    place = names.index("--density")
    joined = words[place].partition("=")[2]
    value, after = (joined, place + 1) if joined else ("".join(words[place + 1 : place + 2]), place + 2)
    if drops and re.fullmatch(r"[0-9.]+(e-?[0-9]+)?", value):
        value = f"{1 - float(value):.12g}"
    return [*words[:place], option, value, *words[after:]]


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
