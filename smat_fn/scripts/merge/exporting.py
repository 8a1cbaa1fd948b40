"""Write an expert or a merged model as the whole model it belongs to, with configuration and tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ... import checkpoint
from ...config import WeightAverage
from ...folders import Options, Report, local_folder, merge_folders, open_folder, prefix_of
from ...folders.adapters import is_adapter
from .finished import digests
from .inputs import manifest_of

CARD = "README.md"


def export(model: Path, base: Path, out: Path, **options: Unpack[Options]) -> Report:
    """A folder that loads by ``from_pretrained``: base's, with the model's leaves in their place, bit for bit.

    The average of one model, so it streams, resumes and appears whole as any merge (`merge_folders`).

    Args: model: folder of train.py or merge.py, whose leaves may be a part of base's (the vision tower of CLIP, the top
        layers of a text encoder), or of an adapter; base: folder or hub name of the model that it was trained from.
    Raises: ValueError as `merge_folders`; for a model of train.py or merge.py that was made from another base.
    """
    manifest = manifest_of(model)
    if "base_fingerprint" in manifest and not is_adapter(model):
        _check_base(model, local_folder("base", base), manifest["base_fingerprint"])

    def describe(files: Sequence[Path], report: Report) -> dict[str, str]:
        return _texts(model, manifest, files, report, options.get("workers", 1))

    options["partial"] = True
    return merge_folders(WeightAverage(), base, {model.name: model}, out, describe=describe, **options)


def _check_base(model: Path, base: Path, fingerprint: str) -> None:
    """Raises: ValueError where the leaves of base that the model has are not those it was made from."""
    whole, part = open_folder("base", base), open_folder(str(model), model)
    prefix = prefix_of(whole, part)
    if any(whole.leaves[f"{prefix}{name}"].dtype != leaf.dtype for name, leaf in part.leaves.items()):
        return  # the fingerprint is of other bits
    origin = {
        name: whole.read(f"{prefix}{name}", 0, leaf.numel()).view(leaf.shape) for name, leaf in part.leaves.items()
    }
    if checkpoint.fingerprint(origin) != fingerprint:
        raise ValueError(f"{model} was made from another base than {base}: give the model that it was trained from")


def _texts(
    model: Path, manifest: Mapping[str, Any], files: Sequence[Path], report: Report, workers: int
) -> dict[str, str]:
    """Manifest and card: those of the model, and the files that were read and written."""
    work = files[0].parent
    read = digests([*files, *(file for named in report.inputs.values() for file in named)], workers)
    facts = {
        **{name: value for name, value in manifest.items() if name not in ("fingerprint", "base_fingerprint")},
        "kind": "exported",
        "source": str(model.absolute()),
        "source_fingerprint": manifest.get("fingerprint"),
        "rounding_ratio": report.rounding_ratio,
        "files": {str(file.relative_to(work)): read[file] for file in files},
        "inputs": {name: {str(file.absolute()): read[file] for file in own} for name, own in report.inputs.items()},
    }
    card = (model / CARD).read_text(encoding="utf-8") if (model / CARD).exists() else f"# {_title(model, manifest)}\n"
    card += (
        "\nWritten as the whole model that it belongs to: `from_pretrained` reads this folder, and "
        "`python merge.py verify FOLDER` hashes what was read and written again.\n"
    )
    return {checkpoint.MANIFEST: json.dumps(facts, indent=2) + "\n", CARD: card}


def _title(model: Path, manifest: Mapping[str, Any]) -> str:
    task = manifest.get("task")
    return f"{manifest.get('label', model.name)}{'' if task is None else f' expert of {task}'}"
