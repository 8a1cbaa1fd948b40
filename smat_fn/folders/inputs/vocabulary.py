"""Heads and vocabularies that differ between base and experts: reported, or resized to base's shapes."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ...checkpoint import read_json
from .reading import Folder, config_of
from .stored import Read

Vocabulary: TypeAlias = Literal["error", "base-rows", "pad-with-base"]
HEAD = "lm_head.weight"
SHARED = "shared.weight"  # embeddings of an encoder and its decoder
_WORDS = "embed", "wte", "lm_head", "shared"
_PLACES = "position", "wpe", "patch"
_PART = 1 << 22  # coordinates that are compared at a time
_UNTIED = (
    "base's config.json ties the head to the embeddings, but an input stores a head of its own: the output has "
    "tie_word_embeddings false"
)

FITTED = "merge.py wa --base BASE --experts EXPERT --out OUT"  # writes an expert in base's form, by one more option

_TOKENIZERS = "tokenizer.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt"

Folders: TypeAlias = dict[str, Folder]


def one_head(base: Folder, experts: Folders) -> tuple[Folder, Folders, list[str]]:
    """A head that is tied to the embeddings is one leaf in all inputs: counted once, written once.

    A stored copy of the embeddings counts as tied. Where base has no head of its own, its copy in an expert is left
    out; where base stores one, an expert without it has its embeddings there. Returns: the inputs, and
    errors.
    """
    holders = [folder for folder in (base, *experts.values()) if HEAD in folder.leaves]
    if not holders:
        return base, experts, []
    says_tied = config_of(base.root).get("tie_word_embeddings") is True
    if HEAD in base.leaves and says_tied and is_copy(base) and all(map(is_copy, holders)):
        return base.without(HEAD), {name: folder.without(HEAD) for name, folder in experts.items()}, []
    if HEAD in base.leaves and says_tied:  # a head that is written must not be tied again by who loads it
        base = base._replace(config={**base.config, "tie_word_embeddings": False})
        base = base.noted(_UNTIED)
    fitted, problems = dict(experts), []
    for name, folder in experts.items():
        if (HEAD in folder.leaves) == (HEAD in base.leaves):
            continue
        embeddings = _embeddings(folder)
        first, second = (folder, base) if HEAD in folder.leaves else (base, folder)
        if second.leaves.keys() - first.leaves.keys():
            continue  # another kind of head, such as a score: it is not tied, and the leaves are compared
        if HEAD in folder.leaves:
            fitted[name] = folder.without(HEAD)
            if not is_copy(folder):
                problems.append(
                    f"{folder.label} has a head of its own (parameter {HEAD!r}), base ties its head to its embeddings: "
                    "give base a head too (tie_word_embeddings false, saved again), or train the expert with a tied "
                    "head"
                )
        elif embeddings is not None and is_copy(base):
            fitted[name] = folder.with_leaf(HEAD, folder.leaves[embeddings], folder.reads[embeddings])
        else:
            tied = config_of(folder.root).get("tie_word_embeddings") is True
            why, more = "", ""
            if not tied:
                why, more = " or was not saved", ", or pass `partial=True` if it was not saved, which takes base's"
            problems.append(
                f"{folder.label} has no parameter {HEAD!r}, its head is tied to its embeddings{why}; base has a head "
                f"of its own: untie the expert's head (tie_word_embeddings false, saved again){more}"
            )
            fitted[name] = folder.with_leaves_of(base, [HEAD])
    return base, fitted, problems


def fit_rows(
    base: Folder,
    experts: Folders,
    vocabulary: str,
    *,
    options: bool = True,
    of: str | None = None,
    aligned: bool = False,
) -> tuple[Folders, list[str]]:
    """Experts with base's number of rows in embeddings and heads, and the errors where that is impossible.

    ``base-rows`` takes an expert's first rows, as many as base has; ``pad-with-base`` does so too, and gives an expert
    with fewer rows those of base: their task vector is 0. ``error`` refuses both.

    Args:
        options: the caller takes these, and ``tokenizer_from``.
        of: a name of base, which takes no such option.
        aligned: the caller has asked for ``tokenizer_from``, so that no error advises it.
    """
    if vocabulary not in get_args(Vocabulary):
        return experts, [f"vocabulary is {vocabulary!r}, must be one of {', '.join(get_args(Vocabulary))}"]
    fitted, problems, whose = {}, [], of or "base"
    for name, folder in experts.items():
        wrong: dict[int, list[str]] = {}
        for path, leaf in base.leaves.items():
            other = folder.leaves.get(path)
            if other is None or not differs_in_rows(path, leaf, other):
                continue
            rows, wanted = len(other), len(leaf)
            if vocabulary == "error" or (rows < wanted and vocabulary != "pad-with-base"):
                wrong.setdefault(rows, []).append(path)
            # refused or not: the shapes fit from here on, so that this is said once
            dtype = other.dtype if rows > wanted else torch.promote_types(other.dtype, leaf.dtype)
            read = folder.reads[path] if rows > wanted else _padded(folder, base, path, other.numel(), dtype)
            folder = folder.with_leaf(path, torch.empty_like(leaf, dtype=dtype), read)
        fitted[name] = folder
        for rows, paths in wrong.items():
            wanted = len(base.leaves[paths[0]])
            policy, those = ("base-rows", "its first") if rows > wanted else ("pad-with-base", f"{whose}'s")
            way = f"pass `vocabulary={policy!r}` ({those} rows{' there' * (rows < wanted)})"
            if not options:
                way = f"give it as many first, {FITTED} --vocabulary {policy}"
            elif not (of or aligned):
                way += ", or merge by token (`tokenizer_from='union'`)"
            problems.append(f"{folder.label} has {rows} rows in {', '.join(map(repr, paths))}, {whose} {wanted}: {way}")
    return fitted, problems


def by_token(path: str) -> bool:
    """Whether a leaf has a row for every token, by its name: embeddings and heads."""
    return any(word in path for word in _WORDS) and not any(place in path for place in _PLACES)


def differs_in_rows(path: str, leaf: Tensor, other: Tensor) -> bool:
    """Whether two leaves of a name have rows of another number of tokens."""
    return bool(by_token(path) and leaf.ndim and leaf.shape[1:] == other.shape[1:] and len(leaf) != len(other))


def _padded(folder: Folder, base: Folder, path: str, size: int, dtype: torch.dtype) -> Read:
    def read(start: int, stop: int) -> Tensor:
        parts = [folder.read(path, min(start, size), min(stop, size)), base.read(path, max(start, size), stop)]
        return torch.cat([part.to(dtype) for part in parts]) if start < size < stop else parts[start >= size].to(dtype)

    return read


def _embeddings(folder: Folder) -> str | None:
    """The leaf that a head is tied to: of the head's shape, if the folder holds one."""
    head = folder.leaves.get(HEAD)
    names = [
        path
        for path, leaf in folder.leaves.items()
        if path.endswith((SHARED, "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"))
        and (head is None or (leaf.shape, leaf.dtype) == (head.shape, head.dtype))
    ]
    names = [path for path in names if path.endswith(SHARED)] or names
    return names[0] if len(names) == 1 else None


def is_copy(folder: Folder) -> bool:
    """Is the head, where it is stored, a copy of the embeddings? Reads both."""
    return HEAD not in folder.leaves or tied_to(folder) is not None


def tied_to(folder: Folder) -> str | None:
    """The embeddings that a stored head is a copy of; None for a head of its own. Reads both."""
    embeddings = _embeddings(folder)
    return embeddings if embeddings is not None and equal_leaves(folder, HEAD, embeddings) else None


def equal_leaves(folder: Folder, left: str, right: str, *, other: Folder | None = None) -> bool:
    """Whether two leaves of one size hold the same values; reads both. Args: other: the folder of the right one."""
    size, places = folder.leaves[left].numel(), ((folder, left), (other or folder, right))
    return all(
        torch.equal(*(place.read(path, start, min(start + _PART, size)) for place, path in places))
        for start in range(0, size, _PART)
    )


def tokenizer_notes(base: Path, experts: Mapping[str, Path], *, of: str = "base", so: str = "") -> Iterator[str]:
    """A sentence for every expert whose tokenizer numbers tokens differently; one without a tokenizer has base's.

    Args: so: what follows from it (default: the merged model has base's tokenizer).
    """
    for label, path in experts.items():
        for file in _TOKENIZERS:
            both = [folder / file for folder in (base, path)]
            if not all(one.is_file() for one in both) or both[0].read_bytes() == both[1].read_bytes():
                continue
            left, right = map(_tokens, both)
            if left is None or right is None:
                yield f"{label} has another {file} than {of}: its tokens may be numbered differently"
            elif left != right:
                changed = sorted(token for token in left.keys() | right.keys() if left.get(token) != right.get(token))
                first, count = changed[0], f"{len(changed)} token{'s' * (len(changed) > 1)}"
                if left.keys().isdisjoint(changed):
                    said = f"has {count} that {of} lacks, e.g. {first!r} ({right[first]} there)"
                elif right.keys().isdisjoint(changed):
                    said = f"lacks {count} of {of}, e.g. {first!r} ({left[first]} in {of})"
                else:
                    numbers = f"({left.get(first)} in {of}, {right.get(first)} there)"
                    said = f"numbers {count} differently from {of}, e.g. {first!r} {numbers}"
                yield f"{label} {said}: " + (so or f"the merged model has {of}'s tokenizer")
            else:
                continue
            break


def _tokens(file: Path) -> dict[str, Any] | None:
    """Token to number, added ones too; None for a file that does not say it in JSON."""
    try:
        read = read_json(file)
        if file.name != "tokenizer.json":
            return dict(read)
        vocabulary = read["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((t[0], i) for i, t in enumerate(vocabulary))
        found = {**dict(pairs), **{token["content"]: token["id"] for token in read.get("added_tokens", ())}}
        return found if all(isinstance(token, str) for token in found) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
