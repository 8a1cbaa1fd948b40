"""Write an expert or a merged model as the whole model it belongs to, with configuration and tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from .... import checkpoint, errors
from ....config import WeightAverage
from ....folders import Options, Report, local_folder, merge_folders, open_folder
from ....folders.files import bytes_of, size_text
from ....folders.multi_task import is_several, open_several
from ....folders.run import export_task
from ... import outcome
from ...manifests import manifest_of
from ...recipes.places import folder_name
from ..experts.given import model_names
from ..experts.origin import key_of_base, origin_of
from ..provenance.card import exported_card, library_of, licenses_of, rounding
from ..provenance.fingerprints import leaves_of
from ..provenance.finished import hashes, texts
from ..settings import Export


def export(model: Path, base: Path, out: Path, *, task: str | None = None, **options: Unpack[Options]) -> Report:
    """Write a folder that ``from_pretrained`` loads: base with the model's parameters in their place, bit-identical.

    A weight average of one model, so it streams, resumes and appears atomically as any merge does (`merge_folders`).

    Args:
        model: folder of train.py or merge.py, whose parameters may be a part of base's (the vision tower of CLIP, the
            top layers of a text encoder), or of an adapter.
        base: folder or hub name of the model that it was trained from.
        out: folder to write.
        task: of a folder with models of several tasks, whose bits are then those of the merge for this task alone.
        options: as of `merge_folders`.
    Raises: ValueError as `merge_folders`; for a model of train.py or merge.py that was made from another base; for a
        task that the folder has not, and files of it that have changed.
    """
    manifest, several = manifest_of(model), is_several(model)
    if several:
        open_several(model).place(task)
    elif task is not None:
        raise ValueError(f"{model} is one model: leave out --task")
    if key_of_base(model) in manifest:
        _check_base(model, local_folder("base", base), manifest)

    left_out = "fingerprint", "base_fingerprint", checkpoint.ADAPTED, "scales"

    def describe(files: Sequence[Path], report: Report) -> dict[str, str]:
        if several:
            errors.raise_problems(_changed(model, manifest.get("files", {}), report))
        licenses = {**manifest.get("licenses", {}), **licenses_of(base, {}).get("licenses", {})}
        facts = {
            **{name: value for name, value in manifest.items() if name not in left_out},
            **({} if task is None else {"task": task}),
            "kind": "exported",
            "source": folder_name(model),
            "source_fingerprint": manifest.get("fingerprint"),
            **({"licenses": licenses} if licenses else {}),
            "base_model": model_names(base) + manifest.get("base_model", [])[1:],
            "rounding_ratio": report.rounding,
            **library_of(files[0].parent),
            **hashes(files, report.inputs, report.hashes),
        }
        return texts(facts, partial(exported_card, model), report.inputs)

    if several:
        return export_task(model, base, task, out, describe=describe, **options)
    options["partial"] = True
    return merge_folders(WeightAverage(), base, {folder_name(model): model}, out, describe=describe, **options)


def write(args: Export) -> Iterator[str]:
    """`export` by the options of the command; yields the size of the whole model, and notes."""
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
    yield f"exported: {args.out}, {size_text(report.bytes)}, {rounded}"
    yield from (f"note: {note}" for note in report.notes)


def _changed(model: Path, files: Mapping[str, str], report: Report) -> list[str]:
    """Errors for files of several models that are no longer those of its manifest, as they were read."""
    read = {file: digest for file, digest in report.hashes.items() if file.parent == model}
    return [
        f"{file} is not the file that its manifest names (merge.py verify {model}): copy the folder, or merge, again"
        for file, digest in read.items()
        if files.get(file.name) != digest
    ]


def _check_base(model: Path, base: Path, manifest: Mapping[str, Any]) -> None:
    """Raises: ValueError where the leaves of base that the model has are not those it was made from."""
    if is_several(model):
        if checkpoint.fingerprint(leaves_of(base)) != manifest["base_fingerprint"]:
            raise ValueError(f"{model} was made from another base than {base}: give the base of that merge")
    elif origin_of(model, open_folder("base", base), manifest) == "other":
        raise ValueError(f"{model} was made from another base than {base}: give the model that it was trained from")
