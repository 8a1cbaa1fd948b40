"""Open base and experts: folders, hub names, adapters, other vocabularies, tied heads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import errors
from ...errors import some_of
from ...merge.parts.inputs import Leaves, fit_problems
from .adapters.experts import open_adapter
from .adapters.peft import is_adapter
from .differing import differences, unread_notes
from .diffusion import other_kind
from .heads import NOTHING_APART, apart, left_out, unprefixed, ways_out
from .hub import header_problems, local_folder, unavailable
from .lineage import strangers
from .naming import Naming, namings
from .optional_leaves import as_base_spells, computed, with_bases
from .reading import PIPELINE, Folder, config_of, open_folder, own_modules
from .stacks import adapted_by, layer_of, stack_parts, stacked
from .stored import Read
from .towers import fitted, prefix_of
from .vision_language import inside
from .vocabulary import HEAD, fit_rows, is_copy, one_head, tokenizer_notes

RESERVED = "base", "union"  # what options of an output's files may name, beside experts


def read_inputs(
    base: Path,
    experts: Mapping[str, Path],
    notes: list[str],
    *,
    stand_ins: dict[str, list[str]] | None = None,
    so: str = "",
) -> tuple[Leaves, dict[str, Leaves]]:
    """`open_inputs`, checked against each other, as leaves: mapped, or in memory where they are formed.

    Appends to ``notes`` which experts have other configurations and tokenizers than base: they run by base's.

    Args: stand_ins: heads of experts may differ from base's, and are left out; takes base's leaves in their place; so:
        as in `tokenizer_notes`.
    Raises: ValueError that lists all problems.
    """
    problems, heads = list[str](), None if stand_ins is None else dict[str, dict[str, Tensor]]()
    start, found = open_inputs(base, experts, "error", problems, heads=heads, stand_ins=stand_ins, options=False)
    errors.raise_problems(problems)
    assert start is not None, "its absence is a problem"
    roots = {f"expert {name!r}": folder.root for name, folder in found.items() if folder.root != start.root}
    wrong, unlike = differences(start.root, roots, chosen=False, template=True, options=False)
    errors.raise_problems(wrong)
    notes += [*tokenizer_notes(start.root, roots, so=so), *unlike]
    notes += [*unread_notes({"base": start.root, **roots}), *strangers(start, found)]
    notes += [folder.note for folder in (start, *found.values()) if folder.note]
    notes += left_out(heads or {})
    modules = tuple(filter(None, start.outputs))  # those of sentence-transformers are no part of the model
    return _values(start, modules), {name: _values(folder, modules) for name, folder in found.items()}


def _values(folder: Folder, without: tuple[str, ...]) -> Leaves:
    return {path: folder.leaf(path) for path in folder.leaves if not path.startswith(without)}


def open_inputs(
    base: Path,
    experts: Mapping[str, Path],
    vocabulary: str,
    problems: list[str],
    *,
    partial: bool = False,
    align: Callable[[Folder, dict[str, Folder]], tuple[Folder, dict[str, Folder]]] | None = None,
    heads: dict[str, dict[str, Tensor]] | None = None,
    stand_ins: dict[str, list[str]] | None = None,
    options: bool = True,
    into: str | None = None,
) -> tuple[Folder | None, dict[str, Folder]]:
    """Base and those experts that can be opened; errors of all of them go into ``problems``.

    Args:
        partial: experts may hold a part of base's leaves, and have the others of base (`placed`).
        align: gives embeddings one order of tokens (`tokens.aligned`).
        heads: takes those of every expert, which need not be base's (`heads.apart`).
        stand_ins: takes the leaves of base in place of those heads.
        options: the caller takes ``vocabulary`` and ``tokenizer_from``, which an error may advise.
        into: the name of a whole model whose language model is merged (`inside`).
    """
    inputs = {"base": Path(base), **{f"expert {name!r}": Path(path) for name, path in experts.items()}}
    if gone := unavailable(inputs):
        problems += gone
        return None, {}
    alike = heads is None and not partial and into is None
    if wrong := header_problems(inputs, rows=vocabulary == "error" and align is None, shapes=alike):
        problems += wrong
        return None, {}
    start, found = _opened(base, experts, problems, partial=partial, heads=heads is not None, into=into)
    if start is not None and into is not None:
        start, found = _placed_in(into, start, found, len(experts), vocabulary, problems)
    if start is None:
        return None, found
    nothing = False  # that `heads` could take
    for name, other in list(found.items()):
        if heads is not None:
            other = unprefixed(start, other)
        if other.leaves.keys().isdisjoint(start.leaves):
            problems.append(_foreign_names(start, found.pop(name)))
            continue
        found[name] = with_bases(start, other)
    if heads is not None:
        found, own, lacking = apart(start, found)
        heads |= own
        if stand_ins is not None:
            stand_ins |= lacking
        nothing = stand_ins is None and bool(found) and not lacking and not problems
    start, found, tied = one_head(start, found)
    if align is not None and not problems:
        with errors.collected(problems):
            start, found = align(start, found)
    unaligned = align is not None and bool(problems)  # rows differ because tokens could not be aligned
    found, rows = fit_rows(start, found, vocabulary, options=options, aligned=align is not None)
    problems += tied if unaligned else tied + rows
    wrong = fit_problems(start.leaves, "base", {folder.label: folder.leaves for folder in found.values()})
    problems += [*wrong, *(ways_out(start, found) if wrong else [NOTHING_APART] * nothing)]
    return start, found


def _opened(
    base: Path, experts: Mapping[str, Path], problems: list[str], *, partial: bool, heads: bool, into: str | None
) -> tuple[Folder | None, dict[str, Folder]]:
    """Base and experts as they are stored, without a comparison; the model ``into`` keeps its names."""
    start, found = None, dict[str, Folder]()
    with errors.collected(problems):
        start = open_input("base", Path(base))
    for name, path in experts.items():
        label = f"expert {name!r}"
        with errors.collected(problems):
            if stack_parts(Path(path)):
                found[name] = open_input(label, Path(path))
                continue
            folder = local_folder(label, Path(path))
            if not is_adapter(folder):
                opened = open_folder(label, folder)
                if start is not None:
                    opened = opened if key_of(name) == into else _as_stored(start, opened)
                    errors.raise_problems(other_kind(start, opened, partial=partial))
                if start is not None and into is None:
                    opened = placed(start, opened) if partial else fitted(start, opened)
                found[name] = opened
            elif start is not None:
                found[name] = adapted(label, folder, start, heads=heads)
    if start is None:
        return None, found
    for name, other in found.items():
        found[name] = _with_modules_of(start, other)
    return start, found


def _as_stored(base: Folder, other: Folder) -> Folder:
    """An expert with the names and shapes that base stores, where its own are those of a class of ``transformers``."""
    other = other.named(as_base_spells(base.leaves, other.leaves))
    if base.leaves.keys() <= other.leaves.keys() or other.leaves.keys() <= base.leaves.keys():
        return other
    for naming in namings(base):
        seen = naming.seen(base).leaves
        if seen.keys() <= other.leaves.keys():
            with suppress(ValueError, RuntimeError):  # shapes of another model
                found = naming.stored(other, base, seen)
                unknown = [path for path in base.leaves if path not in naming.known]
                return found.without(*unknown).with_leaves_of(other, [p for p in other.leaves if p not in seen])
    return other


def _with_modules_of(base: Folder, other: Folder) -> Folder:
    """An expert with base's modules of sentence-transformers, or components of a pipeline, where it has none."""
    gone = [own for own in base.outputs if own and not any(leaf.startswith(own) for leaf in other.leaves)]
    piped = (base.root / PIPELINE).is_file()
    if not gone or (other.leaves.keys().isdisjoint(base.leaves) and (piped or other.outputs)):
        return other
    found = other.with_leaves_of(base, [leaf for leaf in base.leaves if leaf.startswith(tuple(gone))])
    return found.noted(f"{other.label} has no {', '.join(gone)}: it has base's") if piped else found


def _placed_in(
    into: str, base: Folder, experts: dict[str, Folder], count: int, vocabulary: str, problems: list[str]
) -> tuple[Folder | None, dict[str, Folder]]:
    """`inside`, where all ``count`` experts could be opened; None where an error is in ``problems``."""
    if len(experts) < count:
        return None, {}
    placed, wrong = inside(into, {"base": base, **{key_of(name): own for name, own in experts.items()}}, vocabulary)
    problems += wrong
    return (None, {}) if wrong else (placed["base"], {name: placed[key_of(name)] for name in experts})


def open_input(label: str, path: Path) -> Folder:
    """A checkpoint, or a stack of layers of several (`stacks.stack_parts`). Raises: ValueError as `open_folder`."""
    parts = stack_parts(path)
    if not parts:
        return open_folder(label, local_folder(label, path))
    opened = {part.path: _open_part(label, part.path) for part in parts}
    layers = [(opened[part.path], part.start, part.stop) for part in parts]
    return stacked(label, layers, [part.absent for part in parts])


def _open_part(label: str, path: Path) -> Folder:
    """A checkpoint, or ``MODEL+ADAPTER`` in the dtypes of the model. Raises: ValueError as `open_folder`, `adapted`."""
    if (pair := adapted_by(path)) is None:
        return open_folder(label, local_folder(label, path))
    model, adapter = (local_folder(label, own) for own in pair)
    start = open_folder(label, model)
    made = adapted(label, adapter, start)
    if strange := next((path for path in made.leaves if path not in start.leaves), None):
        raise ValueError(
            f"{label}: {adapter} has parameter {strange!r} that {model} lacks: give a model with this module, or a "
            "copy of the adapter's folder without it"
        )
    leaves = {path: leaf.to(start.leaves[path].dtype) for path, leaf in made.leaves.items()}
    reads = {path: _rounded(made, path, leaf.dtype) for path, leaf in leaves.items()}
    return start._replace(leaves=leaves, reads=reads, stores={**start.stores, **made.stores}).noted(made.note)


def _rounded(folder: Folder, path: str, dtype: torch.dtype) -> Read:
    read = folder.reads[path]
    return read if folder.leaves[path].dtype == dtype else lambda start, stop: read(start, stop).to(dtype)


def key_of(name: str) -> str:
    """The name of an expert beside base and the union of tokenizers: its label, where it is named like one of these."""
    return f"expert {name!r}" if name in RESERVED else name


def inputs_of(base: Path, experts: Mapping[str, Path]) -> dict[str, Path]:
    """Base and experts by name (`key_of`)."""
    return {"base": base, **{key_of(name): path for name, path in experts.items()}}


def roots_of(opened: Mapping[str, Folder], given: Mapping[str, Path]) -> dict[str, Path]:
    """The folders of models by name, those of the parts of stacks too.

    A part is named by its folder, with those above it as far as another model has the same name.
    """
    roots = {name: folder.root for name, folder in opened.items()}
    for name, path in given.items():
        for part in stack_parts(Path(path)):
            model = (adapted_by(part.path) or [part.path])[0]
            root, words = local_folder(name, model), part.path.parts
            keys = (key_of("/".join(words[-depth:])) for depth in range(1, len(words) + 1))
            roots[next(key for key in keys if roots.get(key, root) == root)] = root
    return roots


class Place(NamedTuple):
    """Where the leaves of a part are in base."""

    view: Folder  # base under the names of the part's module
    prefix: str  # of the part's names there
    naming: Naming | None  # between base as it is stored and the view, where they differ


def place_of(base: Folder, part: Folder) -> Place:
    """Where a part is in base as it is stored, else in base as a class of ``transformers`` names it in memory.

    Raises: as `prefix_of`.
    """
    try:
        return Place(base, prefix_of(base, part), None)
    except ValueError:
        for naming in namings(base):
            view = naming.seen(base)
            with suppress(ValueError):
                return Place(view, prefix_of(view, part), naming)
        raise


def placed(base: Folder, part: Folder) -> Folder:
    """Base with the leaves of a part in their place, noted. A tied head is left to `vocabulary.one_head`.

    Raises: as `prefix_of`.
    """
    if not part.leaves.keys().isdisjoint(base.leaves):
        part = part.without(
            *(path for path, own in part.leaves.items() if path not in base.leaves and computed(path, own))
        )
    view, prefix, naming = place_of(base, part)
    own = {f"{prefix}{name}": name for name in part.leaves}
    leaves = {path: part.leaves[own[path]] if path in own else leaf for path, leaf in view.leaves.items()}
    reads = {path: part.reads[own[path]] if path in own else view.reads[path] for path in leaves}
    says = config_of(part.root).get("tie_word_embeddings")  # GPT-2's configuration does not
    tied = HEAD not in own and HEAD in view.leaves and (says is True or (says is None and is_copy(view)))
    lacking = [
        path
        for path, leaf in view.leaves.items()
        if path not in own and not (tied and path == HEAD) and not computed(path, leaf)
    ]
    note = f"{part.label} lacks {_listed(lacking, own)}: it has base's" if lacking else ""
    whole = Folder(part.label, leaves, reads, part.stores, part.root, note=note)
    if naming is not None:
        whole = naming.stored(whole, base, own)
    return whole.without(HEAD) if tied else whole


def _listed(paths: Sequence[str], others: Iterable[str]) -> str:
    """Leaves by name, those of a module that has none of the others by its first word."""
    modules = {path.partition(".")[0] for path in others}
    words = [(path.partition(".")[0], path) for path in paths]
    shown = dict.fromkeys(path if module in modules else module for module, path in words)
    return some_of(shown)


def adapted(label: str, path: Path, base: Folder, *, heads: bool = False) -> Folder:
    """`open_adapter`, with modules of sentence-transformers that lie beside the adapter.

    The base is as it is stored, else as a class of ``transformers`` names it in memory.

    Raises: as `open_adapter`.
    """
    expert = _adapted(label, path, base, heads=heads)
    if not (modules := own_modules(path)):
        return expert
    own = open_folder(label, path)
    kept = expert.without(*(leaf for leaf in expert.leaves if leaf.startswith(tuple(modules))))
    return kept.with_leaves_of(own, own.leaves)._replace(stores={**expert.stores, **own.stores})


def _adapted(label: str, path: Path, base: Folder, *, heads: bool) -> Folder:
    try:
        return open_adapter(label, path, base, heads=heads)
    except ValueError:
        for naming in namings(base):
            with suppress(ValueError):
                expert = open_adapter(label, path, naming.seen(base))
                return naming.stored(expert, base, expert.leaves)
        raise


def _foreign_names(base: Folder, other: Folder) -> str:
    """Error message for an expert that has none of base's parameter names."""
    for whole, part in (base, other), (other, base):
        for prefix in filter(None, whole.outputs):
            if all(prefix + name in whole.leaves for name in part.leaves):
                return f"{part.label} is a part of {whole.label}: give {whole.root / prefix}, and merge this part alone"
    for name in other.leaves:
        for path in base.leaves:
            longer, shorter = (name, path) if len(name) > len(path) else (path, name)
            if longer.endswith(f".{shorter}"):
                prefix, whose = longer.removesuffix(shorter), other.label if longer is name else "base"
                rest = (path for path in base.leaves if not path.startswith(prefix))
                if whose == "base" and (base.root.is_file() or not any(map(layer_of, rest))):  # a head alone, or a VAE
                    return (
                        f"{other.label} has no parameter of base: names in base start with {prefix!r}: if it is a part "
                        "of base, pass `partial=True`, which takes the rest from base"
                    )
                head = ", or pass `heads='keep'`" if longer is name else ""
                head = head or (", or pass `into='base'` to merge its language model" if whose == "base" else "")
                return (
                    f"{other.label} has no parameter of base: names in {whose} start with {prefix!r}: save it without "
                    f"(model.base_model.save_pretrained){head}, or load and save both by one version of transformers"
                )
    names = f"{next(iter(other.leaves))!r} the first, base's {next(iter(base.leaves))!r}"
    return f"{other.label} has no parameter of base ({names}): trained from another base?"
