"""Adapters as experts: the weights that they make of a base, formed some rows at a time."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .... import checkpoint, errors, tree
from ....errors import and_more
from ..naming import namings
from ..optional_leaves import predicts_ahead
from ..reading import Folder, config_of
from ..stored import Pickled, Store, Stored, empty_problems
from ..vocabulary import HEAD, by_token
from . import products
from .changes import Change, Magnitude, changed
from .config import CONFIG, MERGED, WEIGHTS, targets
from .opened import Opened
from .other_tools import DORA, MAGNITUDE, file_of, open_foreign
from .peft import IN_MEMORY, PARTS, bare_name, opened_folder, weights_of

_OF_WHOLE = {**PARTS, **IN_MEMORY, **{ending: (part, False) for ending, part in products.ENDS.items()}}
_HEAD = "if it is a head, pass `heads='keep'`, else "


def open_adapter(label: str, path: Path, base: Folder, *, heads: bool = False) -> Folder:
    """The expert that a LoRA adapter makes of base: θ₀ + s·B·A in float32, whole leaves as they are stored.

    s is ``lora_alpha / r``, or ``lora_alpha / √r`` with ``use_rslora``; ``rank_pattern`` and ``alpha_pattern`` change r
    and lora_alpha of the modules that they match, as peft does. LoHa and LoKr have another product. With ``use_dora``
    rows of the changed weight then get the norms of the module's magnitude, with LyCORIS rows or columns. Biases that
    were trained (``bias``) are whole leaves. No data is read. Of other tools' adapters see `open_foreign`.

    Args: heads: whole leaves that base lacks are taken too, by their names without peft's prefix.
    Raises: ValueError that lists what is broken, unknown, of another kind, or fits no leaf of base.
    """
    file = file_of(path)
    opened = opened_folder(label, path, whole=True) if file is None else open_foreign(label, file, base)
    config, store, scale, problems, files, note = opened
    held, strange = _held(label, path, store)
    problems += strange
    shapes = {name: tuple(leaf.shape) for name, leaf in held.items()}
    halves: dict[tuple[str, bool], dict[str, str]] = {}
    head, touched, unknown = False, set[str](), dict[str, list[str]]()
    leaves, reads = dict(base.leaves), dict(base.reads)
    for name in shapes:
        ending = next((ending for ending in _OF_WHOLE if name.endswith(ending)), None)
        if ending is not None:
            part, embedding = _OF_WHOLE[ending]
            halves.setdefault((name.removesuffix(ending), embedding), {})[part] = name
            continue
        if _is_magnitude(name, config, shapes, of_peft=file is None) or _is_spare(name, shapes):
            continue
        leaf = _leaf(name.replace(".base_layer.", "."), base)
        if leaf is None and _is_copied_head(name, store):
            head = True
            continue
        kind = re.search(r"\.(lora|token_adapter|modules_to_save).*", name)
        if heads and leaf is None and kind is None:
            leaf = bare_name(name)
        if leaf is None or kind:
            unknown.setdefault(kind[0] if kind else name, []).append(name)
            continue
        leaves[leaf], reads[leaf] = held[name], Stored(store, name)
        touched |= set() if ".base_layer." in name else {leaf}
    problems += _unread(label, path, unknown, config)
    if scale is None:
        halves.clear()  # nothing to compute their ranks and scales with, as is told
    problems += _of_a_part(label, halves, base)
    transposed = _layout(label, halves, shapes, config, base)
    known = base._replace(leaves=leaves)  # an adapter stores the rows of resized embeddings below its factors
    for (module, embedding), names in halves.items():
        if not embedding and _leaf(f"{module}.weight", base) is None and _is_tied_pair(names, halves, store, config):
            head = True
            continue
        with errors.collected(problems):
            leaf, change = _change_of(label, path, module, embedding, names, shapes, opened, known, transposed)
            origin, read = leaves[leaf], reads[leaf]
            leaves[leaf] = origin.to(tree.compute_dtype(origin))
            reads[leaf] = changed(store, change, read, leaves[leaf])
            touched.add(leaf)
    errors.raise_problems(problems)
    tied = "" if file is not None else _tied_note(label, touched, base, head)  # mlx-lm adapts the head too
    notes = filter(None, (_base_note(label, path, config, base), tied, _half_note(label, config, touched, base), note))
    return Folder(label, leaves, reads, files, path, note="; ".join(notes))


def _held(label: str, path: Path, store: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Shapes and dtypes of an adapter's tensors, and errors for those of dtypes that cannot be merged.

    Raises: ValueError for tensors without values.
    """
    headers = {name: store.header(name) for name in store.names}
    held = {name: leaf for name, leaf in headers.items() if leaf is not None}
    errors.raise_problems(empty_problems(f"{label}: {path}", held))
    return held, [
        f"{label}: {name!r} is stored as {store.code(name)}, which cannot be merged: save the adapter again"
        for name in headers
        if name not in held
    ]


def _unread(label: str, path: Path, unknown: Mapping[str, Sequence[str]], config: Mapping[str, Any]) -> list[str]:
    """Errors for names in an adapter's file that are not factors of a leaf of base, by their kind."""
    unset = f"which is of DoRA, but its {CONFIG} does not set use_dora: set it to true there"
    dora = unset if config.get("use_dora") is not True else ""
    return [
        f"{label}: {weights_of(path).name} holds {name!r}{f' and {len(more)} more of its kind' if more else ''}, "
        + (
            _headless(name)
            or (dora if kind == MAGNITUDE else "")
            or f"which is not a plain LoRA of a parameter of base: {'' if kind.startswith('.') else _HEAD}{MERGED}"
        )
        for kind, (name, *more) in unknown.items()
    ]


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest that train.py wrote beside weights; empty for folders of other tools."""
    try:
        found: Any = checkpoint.load_manifest(folder)
    except (ValueError, OSError):
        return {}
    return found if isinstance(found, dict) else {}


def _base_note(label: str, path: Path, config: Mapping[str, Any], base: Folder) -> str:
    """A note on an adapter whose configuration names another model than base, by the last part of the name."""
    named = config.get("base_model_name_or_path")
    own = config_of(base.root).get("_name_or_path")
    hub = [part.rpartition("--")[2] for part in base.root.parts if part.startswith("models--")]
    known = {base.root.resolve().name, *hub, Path(own).name if isinstance(own, str) else ""}
    if not isinstance(named, str) or not named or Path(named).name.lower() in map(str.lower, known):
        return ""
    if (start := _manifest(path).get("base_fingerprint")) and start == _manifest(base.root).get("fingerprint"):
        return ""  # of train.py, beside the base that it was trained from
    return f"{label} names {named!r} as its base, here it is {base.root}: make sure that they have the same weights"


def _is_magnitude(name: str, config: Mapping[str, Any], shapes: Collection[str], *, of_peft: bool) -> bool:
    """Whether a name is that of a DoRA module's magnitude."""
    if not of_peft and name.endswith(DORA):
        return True
    of_module = name.endswith(MAGNITUDE) and f"{name.removesuffix(MAGNITUDE)}.lora_A.weight" in shapes
    return of_module and config.get("use_dora") is True


def _is_spare(name: str, names: Collection[str]) -> bool:
    """Whether peft reads a module of ``modules_to_save`` under another name of the file.

    Where embeddings were resized, it stores such a module three times: as trained, a copy, and as it was before.
    """
    module, *kind = name.rsplit(".", 2)
    return len(kind) == 2 and kind[0] in ("modules_to_save", "original_module") and f"{module}.{kind[1]}" in names


def _is_copied_head(name: str, store: Store | Pickled) -> bool:
    """Whether a leaf is the head that peft stores beside the embeddings it is tied to, where these were resized."""
    if not name.replace(".base_layer.", ".").endswith("lm_head.weight"):
        return False
    read = (other for other in store.names if not other.endswith((*_OF_WHOLE,)) and not _is_spare(other, store.names))
    others = (other for other in read if other != name and by_token(other))
    return any(torch.equal(store.get_tensor(name), store.get_tensor(other)) for other in others)


def _is_tied_pair(
    names: Mapping[str, str],
    halves: Mapping[tuple[str, bool], Mapping[str, str]],
    store: Store | Pickled,
    config: Mapping[str, Any],
) -> bool:
    """Whether factors are those that peft stores for a head tied to adapted embeddings (``ensure_weight_tying``)."""
    if config.get("ensure_weight_tying") is not True or {*names} != {"A", "B"}:
        return False
    a, b = store.get_tensor(names["A"]), store.get_tensor(names["B"])
    return any(
        torch.equal(a, store.get_tensor(other["B"]).T) and torch.equal(b, store.get_tensor(other["A"]).T)
        for (_, embedding), other in halves.items()
        if embedding and len(other) == 2
    )


def _tied_note(label: str, touched: Collection[str], base: Folder, head: bool) -> str:
    """A note on embeddings that an adapter changes where base ties its head to them: in peft the head stays base's.

    Unless the file holds the head too: peft 0.21.2 stores it where ``ensure_weight_tying`` had an effect, which it has
    in Llama and not in GPT-2.
    """
    changed = [path for path in touched if by_token(path) and path != HEAD]
    if head or not changed or HEAD in base.leaves or not _ties(base):
        return ""
    return (
        f"{label} changes {changed[0]!r}, and with it the head that base ties to it; in peft the head stays base's, "
        "since the adapter's file holds none"
    )


def _half_note(label: str, config: Mapping[str, Any], touched: Collection[str], base: Folder) -> str:
    """A note on modules that an adapter names and lacks, though it has others of the same path in other layers."""
    kinds, own = {_unnumbered(path) for path in touched}, {**config_of(base.root), **base.config}
    lacking = [
        path.removesuffix(".weight")
        for path in base.leaves
        if path.endswith(".weight") and path not in touched and _unnumbered(path) in kinds
    ]
    try:
        lacking = [path for path in lacking if targets(config, path) and not predicts_ahead(path, own)]
    except TimeoutError:  # the next module would take as long
        return ""
    if not lacking:
        return ""
    return (
        f"{label} lacks factors of {and_more(map(repr, lacking))}, though target_modules in its {CONFIG} names them "
        "and other layers have theirs: if only a part of the adapter was saved, save it again"
    )


def _unnumbered(path: str) -> str:
    return re.sub(r"\d+", "0", path)


def _ties(base: Folder) -> bool:
    """Whether a base without a leaf of a head ties its head to its embeddings; older files of GPT-2 do not say so."""
    config = config_of(base.root)
    kinds = config.get("architectures") or ()
    by_kind = any(str(kind).endswith(("LMHeadModel", "ForCausalLM")) for kind in kinds)
    return config.get("tie_word_embeddings", by_kind) is True


def _change_of(
    label: str,
    path: Path,
    module: str,
    embedding: bool,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    opened: Opened,
    base: Folder,
    transposed: Callable[[str], bool],
) -> tuple[str, Change]:
    leaf = _leaf(f"{module}.weight", base) or _leaf(f"{module}.in_proj_weight", base)
    if not products.is_complete(names):
        raise ValueError(f"{label}: {next(iter(names.values()))!r} has no other factor in {WEIGHTS}: save it again")
    if leaf is None:
        lacking = f"but base has no parameter {module + '.weight'!r}: was it trained from another base?"
        raise ValueError(f"{label}: it adapts {module!r}, {_headless(f'{module}.weight') or lacking}")
    wanted = tuple(base.leaves[leaf].shape)
    if not products.is_plain(names):
        return leaf, _change_of_product(label, module, names, shapes, opened, leaf, wanted)
    a, b = shapes[names["A"]], shapes[names["B"]]
    if min(len(a), len(b)) < 2 or a[0] != b[1] or math.prod(b[2:]) != 1:
        what = f"A {a} and B {b} of {module!r} do not fit, convolutions with groups are not read here"
        raise ValueError(f"{label}: {what}: {MERGED}")
    made, bare = (b[0], *a[1:]), len(a) == len(wanted) == 2
    fits = [False] if len(wanted) > 1 and _without_ones(made) == _without_ones(wanted) else []
    fits += [True] if bare and made[::-1] == wanted else []
    if not fits:
        raise ValueError(
            f"{label}: B A of {module!r} has shape {made}, parameter {leaf!r} of base {wanted}: "
            "was it trained from another base?"
        )
    assert opened.scale is not None, "without scales no pairs are left"
    scale = opened.scale(bare_name(module), a[0])
    swapped = fits[0] if len(fits) == 1 else embedding or transposed(leaf)
    magnitude = _magnitude_of_lycoris(label, module, shapes, leaf, wanted)
    of_peft = opened.config.get("use_dora") is True
    if (of_peft and len(wanted) > 2) or ((of_peft or magnitude) and (embedding or swapped)):
        raise ValueError(f"{label}: DoRA of {module!r}, which is not a linear layer, is not read here: {MERGED}")
    if of_peft:
        magnitude = Magnitude(f"{module}{MAGNITUDE}")
        if (stored := shapes.get(magnitude.name, "nothing")) != wanted[:1]:
            raise ValueError(
                f"{label}: its {CONFIG} sets use_dora to True, but {weights_of(path).name} has {stored} "
                f"as {magnitude.name!r} instead of {wanted[:1]}: save it again"
            )
    return leaf, Change(names, swapped, scale, magnitude)


def _magnitude_of_lycoris(
    label: str, module: str, shapes: Mapping[str, tuple[int, ...]], leaf: str, wanted: tuple[int, ...]
) -> Magnitude | None:
    """The norms of a module's ``dora_scale``, None without. Raises: ValueError for those of another shape."""
    name = f"{module}{DORA}"
    if (own := shapes.get(name)) is None:
        return None
    if own[:2] not in ((wanted[0], 1), (1, wanted[1])) or math.prod(own[2:]) != 1:
        raise ValueError(
            f"{label}: {name!r} of shape {own} has no number for each row or column of {leaf!r} {wanted}: was it "
            "trained from another base?"
        )
    return Magnitude(name, own[:2] != (wanted[0], 1), torch.finfo(torch.float32).eps)


def _change_of_product(
    label: str,
    module: str,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    opened: Opened,
    leaf: str,
    wanted: tuple[int, ...],
) -> Change:
    own = {part: shapes[name] for part, name in names.items()}
    if products.matrix(own) != (wanted[0], math.prod(wanted[1:])):
        raise ValueError(
            f"{label}: the tensors of {module!r}, {own}, do not make a change of parameter {leaf!r} of base {wanted}: "
            "was it trained from another base?"
        )
    if opened.config.get("use_dora") is True:
        raise ValueError(f"{label}: DoRA of {module!r}, whose change is not a product B A, is not read here: {MERGED}")
    assert opened.scale is not None, "without scales no pairs are left"
    magnitude = _magnitude_of_lycoris(label, module, shapes, leaf, wanted)
    return Change(names, False, opened.scale(bare_name(module), products.rank(own)), magnitude)


def _layout(
    label: str,
    halves: Mapping[tuple[str, bool], Mapping[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    base: Folder,
) -> Callable[[str], bool]:
    """Whether the square weight of a linear layer is stored (in, out), as a Conv1D's, whose shape does not show it.

    peft's one ``fan_in_fan_out`` is that of the last layer, so where a model has both kinds it is not believed.
    """
    found = {bool(config.get("fan_in_fan_out"))}
    for (module, embedding), names in halves.items():
        if embedding or {*names} != {"A", "B"} or (leaf := _leaf(f"{module}.weight", base)) is None:
            continue
        shape, out_in = tuple(base.leaves[leaf].shape), (*shapes[names["B"]][:1], *shapes[names["A"]][1:])
        if shape != shape[::-1] and shape in (out_in, out_in[::-1]):
            found.add(shape != out_in)
    for path, weight in base.leaves.items():
        bias = base.leaves.get(f"{path.removesuffix('weight')}bias") if weight.ndim == 2 else None
        if bias is not None and weight.shape[0] != weight.shape[1]:
            found |= {place == 1 for place in (0, 1) if bias.shape == weight.shape[place : place + 1]}
    if len(found) == 1:
        return lambda leaf: True in found
    known = cache(lambda: _stored_transposed(base))

    def transposed(leaf: str) -> bool:
        if (names := known()) is None:
            raise ValueError(
                f"{label}: the adapted {leaf!r} is square, so that its shape does not show whether it is stored as a "
                f"Conv1D's, base has layers of both kinds, and fan_in_fan_out of {CONFIG} is that of one: merge it "
                "into its base with peft, and give the result"
            )
        return leaf in names

    return transposed


def _stored_transposed(base: Folder) -> frozenset[str] | None:
    """The weights of base that belong to a Conv1D; None for a model that transformers does not know."""
    try:
        naming = next(namings(base), None)
    except ImportError:
        return None
    if naming is None:
        return None
    modules = dict(naming.model.named_modules())
    owners = {name: modules.get(path.rpartition(".")[0]) for name, path in naming.names.items()}
    return frozenset(name for name, owner in owners.items() if type(owner).__name__ == "Conv1D")


def _of_a_part(label: str, halves: dict[tuple[str, bool], dict[str, str]], base: Folder) -> Iterator[str]:
    """An error for each part of base, as a pipeline's unet/, that has the adapted modules which base lacks.

    They are taken out of ``halves``.
    """
    found: dict[str, list[str]] = {}
    for module, embedding in list(halves):
        name = f"{bare_name(module)}.weight"
        part = next((prefix for prefix in base.outputs if prefix and prefix + name in base.leaves), None)
        if part is not None and _leaf(f"{module}.weight", base) is None:
            found.setdefault(part, []).append(module)
            del halves[module, embedding]
    for part, (module, *more) in found.items():
        others = f" and {len(more)} more" if more else ""
        yield (
            f"{label}: it adapts {module!r}{others}, but base has no parameter {module + '.weight'!r}, its "
            f"{part} has: give {base.root / part} as base"
        )


def _headless(name: str) -> str:
    """The end of an error for a head in an adapter whose base has it in its embeddings; "" for other names."""
    if not name.replace(".base_layer.", ".").endswith(HEAD):
        return ""
    return "but base stores no head of its own: give a base that does (tie_word_embeddings false, saved again)"


def _leaf(name: str, base: Folder) -> str | None:
    """The leaf of base that an adapter's name means; published checkpoints may lack the first part, "transformer."."""
    path = bare_name(name)
    return next((leaf for leaf in (path, path.partition(".")[2]) if leaf in base.leaves), None)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its last sizes of 1: as a matrix, the kernel of a 1 x 1 convolution has the same factors."""
    return _without_ones(shape[:-1]) if shape[-1:] == (1,) else shape
