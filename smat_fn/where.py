"""Predicates on leaves, ``where(path, tensor) -> bool``, made from a module's types and structure."""

import re
from collections.abc import Iterator

from torch import Tensor, nn

from .types import Predicate

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
_NOT_LINEAR = re.compile(r"Router|PatchMerging|PatchEmbed")


def trainable(module: nn.Module) -> Predicate:
    """Leaves that are parameters with ``requires_grad``, under their ``named_parameters`` names (tied weights once)."""
    names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
    return lambda path, leaf: path in names


def block_linear(module: nn.Module) -> Predicate:
    """The set S of Eq. smat-mask: weights of linear layers inside transformer blocks, found by type and structure.

    A block is a module with children in an outermost ``nn.ModuleList``, or in an ``nn.Sequential`` of one type. Its
    linear weights are those of ``nn.Linear``, of transformers' ``Conv1D`` and of ``nn.MultiheadAttention``, and stacked
    expert weights: 3-D, no side of length 1. Not in the set: a weight tied to an embedding, convolution kernels, patch
    merging, and a mixture's gates. Those are routers by their type's name and, beside E stacked or listed experts,
    whatever maps to E numbers or to one (Qwen2-MoE's ``shared_expert_gate`` is a gate like the router it stands by).
    Source: paper section 4.1, Mask.
    """
    left_out = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    picked: set[int] = set()
    for block in _blocks(module):
        for layer in block.modules():
            picked.update(id(p) for p in _linear_weights(layer))
            for other in _not_linear(layer):
                left_out.update(id(p) for p in other.parameters())
    names = frozenset(name for name, p in module.named_parameters() if id(p) in picked - left_out)
    return lambda path, leaf: path in names


def muon_matrices(module: nn.Module) -> Predicate:
    """The 2-D leaves of `block_linear`: the matrices that `smat_fn.optim.muon` takes (paper section 5.3)."""
    inside = block_linear(module)
    return lambda path, leaf: leaf.ndim == 2 and inside(path, leaf)


def never(path: str, leaf: Tensor) -> bool:
    """No leaf at all: Mask switched off."""
    return False


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    alike = len(children) > 1 and len({type(child) for child in children}) == 1
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and alike):
        yield from (child for child in children if any(True for _ in child.children()))
    else:
        for child in children:
            yield from _blocks(child)


def _linear_weights(layer: nn.Module) -> Iterator[nn.Parameter]:
    own = dict(layer.named_parameters(recurse=False))
    if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
        yield own["weight"]
    elif isinstance(layer, nn.MultiheadAttention):
        yield from (p for name, p in own.items() if name.endswith("proj_weight"))
    elif not isinstance(layer, _CONVOLUTIONS):
        yield from (p for p in own.values() if p.ndim == 3 and min(p.shape) > 1)


def _not_linear(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer itself if its type says so, and the gates among its children if it is a mixture."""
    if _NOT_LINEAR.search(type(layer).__name__):
        yield layer
    children = list(layer.children())
    experts = {child: count for child in children if (count := _expert_count(child)) > 1}
    for child in children:
        rows = {m.out_features for m in child.modules() if isinstance(m, nn.Linear)}
        if experts and child not in experts and rows and rows <= {1, *experts.values()}:
            yield child


def _expert_count(child: nn.Module) -> int:
    if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
        return len(child)
    stacked = [] if isinstance(child, nn.Linear) else [p for p in _linear_weights(child) if p.ndim == 3]
    return len(stacked[0]) if stacked else 0
