"""Whether a model was trained from a base: the fingerprint in its manifest beside those that base had in training."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .... import checkpoint, lora
from ....folders import open_folder, place_of
from ....folders.inputs.adapters.peft import is_adapter
from ....folders.inputs.reading import Folder
from ....lora.adapters import A, B, layer_of
from ...manifests import manifest_of


def key_of_base(model: Path) -> str:
    """The field of a model's manifest with the fingerprint of the base that it was trained from."""
    return checkpoint.ADAPTED if is_adapter(model) else "base_fingerprint"


def origin_of(model: Path, base: Folder, manifest: Mapping[str, Any]) -> Literal["base", "rounded", "other"]:
    """The weights that a model was trained from: base, base rounded to the model's dtypes, or others.

    Of an adapter, whose factors do not depend on the rounding of base, never "rounded".

    Raises: ValueError for a model whose names are not those of base.
    """
    adapter = is_adapter(model)
    other = adapter or manifest.get("out_dtype", "same") != "same"
    for found, whole in _prints(base, _part_of(model), other=other):
        if found == manifest[key_of_base(model)]:
            return "base" if whole or adapter else "rounded"
    return "other"


def base_problems(base: Path, experts: Mapping[str, Path], manifests: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Errors for experts of train.py whose manifests say that they were trained from other weights than base's.

    Not of those whose names differ from base's (`name_problems`).
    """
    known: dict[Any, str] = {}  # experts of one run ask for the same fingerprint of base, which takes a pass over it
    for path, manifest, opened in _trained(base, experts, manifests):
        with suppress(ValueError):
            kinds = frozenset((name, leaf.dtype) for name, leaf in _part_of(path).leaves.items())
            asked = str(manifest[key_of_base(path)]), str(manifest.get("out_dtype")), is_adapter(path), kinds
            if asked not in known:
                known[asked] = origin_of(path, opened, manifest)
            origin = known[asked]
            if origin == "other":
                yield f"{path} was trained from another base than {base}{_way_out(base, path)}"
            elif origin == "rounded":
                yield (
                    f"{path} was trained from {base} rounded to its dtypes, and the rounding would count as its change"
                    f"{_way_out(base, path)}"
                )


def name_problems(base: Path, experts: Mapping[str, Path], manifests: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Errors for experts of train.py that have other names than base, for a merge that such names have ended."""
    for path, _, opened in _trained(base, experts, manifests):
        if not is_adapter(path) and open_folder("expert", path).leaves.keys() != opened.leaves.keys():
            yield f"{path} is of train.py, and its parameters are not those that {base} stores{_way_out(base, path)}"


def _trained(
    base: Path, experts: Mapping[str, Path], manifests: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Path, Mapping[str, Any], Folder]]:
    """The experts of train.py with their manifests, and base, unless it is of these commands or not a local folder."""
    opened = None
    for name, path in experts.items():
        manifest = manifests[name]
        own = manifest.get("kind") not in (None, "merged", "exported", "base") and key_of_base(path) in manifest
        if not own or not base.is_dir() or manifest_of(base):
            continue
        with suppress(ValueError):  # of base: the merge says so
            opened = opened or open_folder("base", base)
            yield path, manifest, opened


def _way_out(base: Path, expert: Path) -> str:
    run = expert.parent
    there = (run / checkpoint.BASE).is_dir()
    return f": pass --base {run / checkpoint.BASE}, or --run {run} instead of --base and --experts" if there else ""


def _part_of(model: Path) -> Folder:
    """The leaves of base that a model has, or as an adapter changes."""
    return _changed_by(model) if is_adapter(model) else open_folder(str(model), model)


def _changed_by(adapter: Path) -> Folder:
    """The leaves of base that an adapter of train.py changes, without values; their dtype in training is unknown."""
    factors, found = lora.load_peft(adapter)
    shapes = {name: factors[name].shape for name in found.saved}
    for path in found.paths:
        a, b = (factors[layer_of(path) + half] for half in (A, B))
        shapes[path] = a.shape[1:] + b.shape[:1] if path in found.transposed else b.shape[:1] + a.shape[1:]
    leaves = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return Folder(str(adapter), leaves, {}, {})


def _prints(base: Folder, part: Folder, *, other: bool) -> Iterator[tuple[str, bool]]:
    """The fingerprints that the leaves of base which a part has may have had where it was made; whether not rounded.

    As they are stored, rounded to the part's dtypes as they are loaded for training, by way of float32 where a suite
    loads them so; and that of all leaves, which a merge on disk counts.

    Args: other: the part was merged into another dtype than that of training: it may have been any.
    """
    whole, prefix, _ = place_of(base, part)

    def fingerprint(*kinds: torch.dtype | None) -> str:
        """Of leaves that are rounded to these dtypes in turn; None: the part's own."""

        def read(name: str) -> Tensor:
            leaf = whole.leaf(f"{prefix}{name}")
            for kind in kinds if leaf.is_floating_point() else ():
                leaf = leaf.to(part.leaves[name].dtype if kind is None else kind)
            return leaf

        return checkpoint.fingerprint_of(part.leaves, read)

    stored = {whole.leaves[f"{prefix}{name}"].dtype for name in part.leaves}
    kinds = {leaf.dtype for leaf in part.leaves.values()}
    yield fingerprint(), True
    rounded = [None] * (stored != kinds or len(kinds) > 1)
    for kind in (*rounded, *((torch.float32, torch.bfloat16, torch.float16) if other else ())):
        yield fingerprint(kind), False
        if torch.float64 in stored:
            yield fingerprint(torch.float32, kind), False
    if len(part.leaves) < len(base.leaves):
        yield checkpoint.fingerprint_of(base.leaves, base.leaf), True
