"""Heads of experts that differ from base's: stored for each task beside the merged trunk."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from .reading import Folder, own_modules
from .side_files import Files
from .stacks import layer_of, layers_of
from .vocabulary import differs_in_rows

FOLDER = "heads"
EMA = "model_ema."  # of Stable Diffusion's checkpoints
NOTHING_APART = (
    "`heads='keep'` keeps nothing: all parameters of the experts are base's, with base's shapes, and are merged. Leave "
    "it out; a head that is not to be merged gets the coefficient 0, as by `coef={'classifier.*': 0}`, and is base's"
)
_WRAPPED = ".base_layer."  # of PEFT
_HEAD = re.compile(r"(^|[._])(heads?|classifiers?|predictors?)\.$")  # as `smat_fn.where` knows them


def apart(
    base: Folder, experts: Mapping[str, Folder]
) -> tuple[dict[str, Folder], dict[str, dict[str, Tensor]], dict[str, list[str]]]:
    """Experts with base's leaves, the leaves of their heads, outside base's layers, and the leaves of base that stand
    in for them.

    A head's leaves are those that base has not, or that some expert has in another shape than base: then no expert's
    is merged, though it may have base's shape. Other numbers of tokens are left to `vocabulary`.
    """
    rows = _rows(base)
    shapes = {path for path in _reshaped(base, experts) if _outside(path, rows)}
    found, heads, stand_ins = dict(experts), dict[str, dict[str, Tensor]](), dict[str, list[str]]()
    for name, expert in experts.items():
        own = [path for path in expert.leaves if _outside(path, rows) and (path not in base.leaves or path in shapes)]
        if len(own) == len(expert.leaves):  # of other names altogether
            heads[name] = {}
            continue
        heads[name] = {path: expert.leaf(path).clone() for path in own}
        expert = expert.without(*own)
        lacking = [path for path in base.leaves if path not in expert.leaves and _outside(path, rows)]
        found[name] = expert.with_leaves_of(base, lacking)
        if own or lacking:
            stand_ins[name] = lacking
    return found, heads, stand_ins


def unprefixed(base: Folder, expert: Folder) -> Folder:
    """An expert with base's names where its own have a prefix before them, as "bert." of a classifier's encoder.

    An expert that has not all of base's layers under one prefix stays as it is.
    """
    rows = _rows(base)
    inside = [path for path in base.leaves if not _outside(path, rows)]
    if not inside or not expert.leaves.keys().isdisjoint(inside):
        return expert
    for name in expert.leaves:
        prefix = name.removesuffix(inside[0])
        if name.endswith(f".{inside[0]}") and all(f"{prefix}{path}" in expert.leaves for path in inside):
            names = {own: own.removeprefix(prefix) for own in expert.leaves if own.startswith(prefix)}
            known = {own: path for own, path in names.items() if path in base.leaves and path not in expert.leaves}
            return expert.named({own: known.get(own, own) for own in expert.leaves})
    return expert


def ways_out(base: Folder, experts: Mapping[str, Folder]) -> list[str]:
    """Advice on leaves that are not base's; none for models without layers."""
    rows = _rows(base)
    names = {path for folder in experts.values() for path in folder.leaves.keys() ^ base.leaves.keys()}
    if names and all(path.startswith(EMA) for path in names):
        return [f"{EMA}* are averages over training, of no use after it: remove them from the file that has them"]
    if any(_WRAPPED in path for path in names):
        return [
            f"*{_WRAPPED}* are layers in which an adapter is loaded: save the model after merge_and_unload (PEFT), or "
            "after fuse_lora and unload_lora_weights (diffusers)"
        ]
    for folder in experts.values():
        lacking = {path.partition(".")[0] for path in base.leaves if path not in folder.leaves}
        own = {path.partition(".")[0] for path in folder.leaves}
        if lacking and folder.leaves.keys() <= base.leaves.keys() and lacking.isdisjoint(own):
            what = f"{folder.label} lacks {', '.join(sorted(lacking))} as a whole"
            if base.root.is_file():  # of a diffusion model
                return [f"{what}: pass `partial=True`, which takes what it lacks from base"]
            return [
                f"{what}: if it is a part of base, such as the language model of a vision-language model, pass "
                "`into='base'`; for other parts pass `partial=True`, which takes the rest from base"
            ]
    inside = {path for path in names if not _outside(path, rows)}
    shapes = _reshaped(base, experts)
    modules = sorted({own for folder in experts.values() for own in own_modules(folder.root)})
    if names | shapes and all(path.startswith(tuple(modules)) for path in names | shapes):
        unlike = [own for own in modules if any(path.startswith(own) for path in names | shapes)]
        return [
            f"{', '.join(unlike)} of sentence-transformers is not in base, or has other shapes there: give a base with "
            "the experts' modules (an expert, for mergers that take no differences from base), or copies of the "
            "experts without these folders"
        ]
    if all(_outside(path, rows) for path in shapes):  # else models of another size
        names |= shapes
    if not rows or not names:
        return []
    for folder in experts.values():
        with suppress(ValueError):  # of models without one list of layers
            count, of_base = layers_of(folder), layers_of(base)
            differ = inside & (base.leaves.keys() ^ folder.leaves.keys())
            if min((found[1] for path in differ if (found := layer_of(path))), default=-1) == min(count, of_base):
                last = f"{folder.label} has layers 0 to {count - 1}, base 0 to {of_base - 1}"
                return [f"{last}: give the base that it was trained from"]
    if inside:
        return [
            "names differ inside the layers: if these are models of one kind, load and save all by one version of "
            "transformers; if one holds the others as its language model, pass `into='base'`, or the name of the expert"
        ]
    return ["these parameters are outside the layers: if they are heads, pass `heads='keep'`, which merges the rest"]


def _reshaped(base: Folder, experts: Mapping[str, Folder]) -> set[str]:
    """Leaves of base that some expert has in another shape, but for the number of tokens."""
    return {
        path
        for folder in experts.values()
        for path, leaf in folder.leaves.items()
        if path in base.leaves and base.leaves[path].shape != leaf.shape
        if not differs_in_rows(path, base.leaves[path], leaf)
    }


def _rows(base: Folder) -> set[str]:
    """Names before the numbers of base's layers; heads may be numbered too, as ``classifier.1.weight``."""
    rows = {found[0] for path in base.leaves if (found := layer_of(path))}
    return {row for row in rows if not _HEAD.search(row)}


def _outside(path: str, rows: set[str]) -> bool:
    """Whether a leaf is in none of a model's layers."""
    return (found := layer_of(path)) is None or found[0] not in rows


def head_files(heads: Mapping[str, dict[str, Tensor]], roots: Mapping[str, Path]) -> Files:
    """Each head with its expert's config.json, as files of the output.

    Raises: ValueError for the name of an expert, which its manifest may give, that is not the name of a file.
    """
    files: Files = {}
    for name, head in heads.items():
        if head and (name in (".", "..") or Path(name).name != name):
            raise ValueError(f"expert {name!r}: `heads='keep'` writes a file of its name, so give it another name")
        if head:
            files[f"{FOLDER}/{name}.safetensors"] = save(head, metadata={"format": "pt"})
            if (config := roots[name] / "config.json").is_file():
                files[f"{FOLDER}/{name}.json"] = config
    return files


def head_notes(heads: Mapping[str, dict[str, Tensor]]) -> list[str]:
    """Notes on the heads that are kept, one an expert."""
    return [
        f"the head of expert {name!r} ({', '.join(head)}) is kept as {FOLDER}/{name}.safetensors: load it over the "
        "merged model, with strict=False"
        for name, head in heads.items()
        if head
    ]


def left_out(heads: Mapping[str, dict[str, Tensor]]) -> list[str]:
    """Notes on the heads that are neither merged nor scored, one an expert."""
    return [
        f"the head of expert {name!r} ({', '.join(head)}) is left out, for scores are under heads made from "
        "task data: merge.py RECIPE, the recipe.yml of a merged model, writes it into heads/ there"
        for name, head in heads.items()
        if head
    ]
