"""Leaves that some versions of transformers store and others do not: computed buffers, copies of embeddings."""

from torch import Tensor

from .reading import Folder
from .vocabulary import HEAD, by_token, equal_leaves

# computed from the configuration when a model is loaded
_BUFFERS = "position_ids", "token_type_ids", "inv_freq", "masked_bias", "relative_position_index"


def computed(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is, by its name, a buffer that a model computes; of causal masks only those of 4 dimensions."""
    mask = path.endswith(("attn.bias", "attention.bias")) and leaf.ndim == 4
    return mask or path.rpartition(".")[2] in _BUFFERS


def may_be_spare(path: str, leaf: Tensor) -> bool:
    """Whether one model may store a leaf that another one of its kind lacks, as far as its name says."""
    return computed(path, leaf) or by_token(path)


def recast(path: str, leaf: Tensor, like: Tensor) -> bool:
    """Whether a computed buffer is stored in another dtype than base's ``like``: positions as floats, as some tools do.

    Two floating-point dtypes are merged like those of any leaf.
    """
    both = leaf.is_floating_point() and like.is_floating_point()
    return computed(path, leaf) and leaf.shape == like.shape and leaf.dtype != like.dtype and not both


def with_bases(base: Folder, expert: Folder) -> Folder:
    """An expert with base's buffers, and with copies of its embeddings where base stores such copies."""
    for path, leaf in base.leaves.items():
        if path in expert.leaves and not recast(path, expert.leaves[path], leaf):
            continue
        if computed(path, leaf):
            expert = expert.with_leaf(path, leaf, base.reader(path))
        elif twin := _twin(path, base, expert):
            expert = expert.with_leaf(path, expert.leaves[twin], expert.reader(twin))
    for path, leaf in list(expert.leaves.items()):
        if path not in base.leaves and (computed(path, leaf) or _twin(path, expert, base)):
            expert = expert.without(path)
    return expert


def _twin(path: str, folder: Folder, other: Folder) -> str | None:
    """The embeddings that a leaf of ``folder`` is a copy of and that ``other`` has too; heads have rules of their own.

    Only leaves that are named as embeddings: small ones, such as biases, may be equal by chance.
    """
    if path == HEAD or not by_token(path):
        return None
    own = folder.leaves[path]
    alike = (
        name
        for name, leaf in folder.leaves.items()
        if name not in (path, HEAD) and by_token(name) and name in other.leaves
        if leaf.ndim == 2 and (leaf.shape, leaf.dtype) == (own.shape, own.dtype)
    )
    return next((name for name in alike if equal_leaves(folder, path, name)), None)
