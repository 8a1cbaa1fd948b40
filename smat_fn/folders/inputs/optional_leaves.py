"""Leaves that some tools store and others do not, or by other names: computed buffers, copies of embeddings."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from ...errors import and_more
from .reading import BUFFERS, Folder, config_of
from .vocabulary import HEAD, by_token, equal_leaves, tied_to

# heads that their classes tie to the embeddings, of names that do not say so: Whisper's, BERT's, DistilBERT's
_TIED = "proj_out.weight", "predictions.decoder.weight", "vocab_projector.weight"
_BIAS = "predictions.decoder.bias", "lm_head.decoder.bias"  # tied to the bias one module above
# factors of a weight norm: torch before 2.0 (as most models of speech are stored), and since
_NORMED = (".weight_g", ".weight_v"), (".parametrizations.weight.original0", ".parametrizations.weight.original1")


def as_base_spells(base: Collection[str], other: Collection[str]) -> dict[str, str]:
    """The names of another model's leaves as base has them.

    The factors of weight norms are called as in base, and a prefix before all names of one of the two goes or comes.
    """
    names = {path: path for path in other}
    for theirs, bases in (_NORMED, _NORMED[::-1]):
        if not any(path.endswith(bases) for path in base) or any(path.endswith(theirs) for path in base):
            continue
        for path in other:
            stem = path.removesuffix(theirs[0])
            if stem != path and stem + theirs[1] in names and stem + bases[0] not in names:
                names |= {stem + own: stem + called for own, called in zip(theirs, bases, strict=True)}
    spelled = set(names.values())
    if not spelled.isdisjoint(base):
        return names
    less, more = _prefix(spelled, base), _prefix(base, spelled)
    return {path: more + name.removeprefix(less) for path, name in names.items()}


def _prefix(names: Collection[str], bare: Iterable[str]) -> str:
    """The prefix of all names, as "module." of DistributedDataParallel, after which most of ``bare`` are among them."""
    first, found = next(iter(names), ""), {"": 0}
    for end in (place + 1 for place, letter in enumerate(first) if letter == "."):
        if all(path.startswith(first[:end]) for path in names):
            found[first[:end]] = sum(first[:end] + path in names for path in bare)
    return max(found, key=lambda prefix: found[prefix])


def computed(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is, by its name, a buffer that a model computes; of causal masks only those of 4 dimensions."""
    mask = path.endswith(("attn.bias", "attention.bias")) and leaf.ndim == 4
    return mask or path.rpartition(".")[2] in BUFFERS


def predicts_ahead(path: str, config: Mapping[str, Any]) -> bool:
    """Whether a leaf is of multi-token prediction (Qwen3.5, DeepSeek-V3, GLM-4.5), which transformers leaves out.

    Such layers are in a module ``mtp``, or follow the ``num_hidden_layers`` of the configuration.
    """
    if any(part.startswith("mtp") for part in path.split(".")):
        return True
    text = config.get("text_config")
    inner = {**config, **text} if isinstance(text, dict) else config
    count, layer = inner.get("num_hidden_layers"), re.search(r"(?:^|\.)layers\.(\d+)\.", path)
    if layer is None or not isinstance(count, int) or not inner.get("num_nextn_predict_layers"):
        return False
    return int(layer[1]) >= count


def may_be_spare(path: str, leaf: Tensor, config: Mapping[str, Any]) -> bool:
    """Whether one model may store a leaf that another one of its kind lacks, as far as its name says."""
    return computed(path, leaf) or may_be_copy(path) or predicts_ahead(path, config)


def copy_of(path: str, folder: Folder, among: Collection[str]) -> str | None:
    """The embeddings, or the bias of a head, among these leaves that a leaf is a copy of; None for another leaf."""
    if path != HEAD:
        return _twin(path, folder, among)
    found = tied_to(folder)
    return found if found in among else None


def recast(path: str, leaf: Tensor, like: Tensor) -> bool:
    """Whether a computed buffer is stored in another dtype than base's ``like``: positions as floats, as some tools do.

    Two floating-point dtypes are merged like those of any leaf.
    """
    both = leaf.is_floating_point() and like.is_floating_point()
    return computed(path, leaf) and leaf.shape == like.shape and leaf.dtype != like.dtype and not both


def with_bases(base: Folder, expert: Folder) -> Folder:
    """An expert with base's buffers, and with copies of its embeddings where base stores such copies.

    Where it has none of the layers that predict further tokens it has base's, with a note.
    """
    config = {**config_of(base.root), **base.config}
    ahead = [path for path in base.leaves if predicts_ahead(path, config)]
    if ahead and expert.leaves.keys().isdisjoint(ahead):
        expert = expert.with_leaves_of(base, ahead)
        few = and_more(map(repr, ahead))
        note = f"{expert.label} lacks layers that predict further tokens ({few}): base's are used"
        expert = expert.noted(note)
    for path, leaf in base.leaves.items():
        if path in expert.leaves and not recast(path, expert.leaves[path], leaf):
            continue
        if computed(path, leaf):
            expert = expert.with_leaf(path, leaf, base.reads[path])
        elif twin := _twin(path, base, expert.leaves):
            expert = expert.with_leaf(path, expert.leaves[twin], expert.reads[twin])
    others = [(path, leaf) for path, leaf in expert.leaves.items() if path not in base.leaves]
    spare = [path for path, leaf in others if computed(path, leaf) or _twin(path, expert, base.leaves)]
    return expert.without(*spare)


def may_be_copy(path: str) -> bool:
    """Whether a leaf may be a copy of embeddings, or of a head's bias, by its name."""
    return by_token(path) or path.endswith((*_TIED, *_BIAS))


def _twin(path: str, folder: Folder, among: Collection[str]) -> str | None:
    """The leaf among these that a leaf of ``folder`` is a copy of; ``lm_head`` has rules of its own.

    Only leaves that are named as embeddings and heads: small ones, such as other biases, may be equal by chance.
    """
    if path == HEAD or not may_be_copy(path):
        return None
    own = folder.leaves[path]
    bias = f"{path.removesuffix('decoder.bias')}bias" if path.endswith(_BIAS) else None
    alike = (
        name
        for name, leaf in folder.leaves.items()
        if name not in (path, HEAD) and name in among
        if (by_token(name) and leaf.ndim == 2 if bias is None else name == bias)
        if (leaf.shape, leaf.dtype) == (own.shape, own.dtype)
    )
    return next((name for name in alike if equal_leaves(folder, path, name)), None)
