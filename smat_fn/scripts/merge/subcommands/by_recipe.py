"""`merge.py recipe`: the merges that a file describes, one after another."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .... import errors
from ....folders import Part, chunk_of
from ....folders.files import Hashing, bytes_of
from ...recipes import load
from ...recipes.own import Recipe
from ...recipes.several import placed, steps_of
from .. import on_disk
from ..settings import FromRecipe


def merge(args: FromRecipe) -> Iterator[str]:
    """Merge as a file says; yields a summary of each of its merges."""
    part = on_disk.chosen_part(args.part, dry_run=args.dry_run, push=args.push_to_hub)
    first, *more = load.documents_of(args.file, "a recipe")
    if more:
        yield from _several(args, [first, *more])
    else:
        yield from _merge(args, load.recipe_of(first, args.file, into=args.into, partial=args.partial), args.out, part)


def _several(args: FromRecipe, documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The merges of a file, one after another.

    Raises: ValueError for what takes one merge, and all problems of the file that do not depend on an earlier merge.
    """
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
                    found = load.recipe_of(placed(step, {}), args.file, into=args.into, partial=args.partial)
                    on_disk.plan_run([found.config], _order(args, found, step.folder(args.out)), hashing)
        errors.raise_problems(problems)
        yield from (f"note: {note}" for note in notes)
        for step in steps:
            if args.dry_run and (waits := [name for name in step.needs if name not in made]):
                yield f"{step.label}: checked once {' and '.join(waits)} is merged"
                yield from (f"note: {note}" for note in step.notes)
                continue
            with errors.collected(problems, of=step.label):
                merges = {str(folder): name for name, folder in made.items()}
                fields = placed(step, made)
                found = load.recipe_of(fields, args.file, into=args.into, partial=args.partial, merges=merges)
                yield from _merge(args, found, step.folder(args.out), hashing=hashing)
                folder = step.folder(args.out) / found.config.name
                made |= {step.name: folder} if folder.is_dir() else {}
            errors.raise_problems(problems)


def _merge(
    args: FromRecipe, found: Recipe, out: Path, part: Part | None = None, hashing: Hashing | None = None
) -> Iterator[str]:
    order = _order(args, found, out, part)
    yield from (f"note: {note}" for note in found.notes)
    push, public = args.push_to_hub, args.public
    yield from on_disk.run([found.config], order, dry_run=args.dry_run, push=push, public=public, hashing=hashing)


def _order(args: FromRecipe, found: Recipe, out: Path, part: Part | None = None) -> on_disk.Order:
    given = dict(found.options)
    seed = given.pop("seed", 0)
    seed = seed if args.seed is None else args.seed
    if args.shard_size is not None:
        given["shard_size"] = bytes_of(args.shard_size)
    given |= {
        name: value
        for name in ("vocabulary", "config_from", "heads", "into", "device")
        if (value := getattr(args, name)) is not None
    }
    given["partial"] = args.partial or given.get("partial", False)
    return on_disk.order(
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
