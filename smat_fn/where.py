"""Predicates on leaves, ``where(path, tensor) -> bool``, made from a module's types and structure."""

from torch import Tensor, nn

from .types import Where

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d


def trainable(module: nn.Module) -> Where:
    """Leaves that are parameters with ``requires_grad``, under their ``named_parameters`` names (tied weights once)."""
    names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
    return lambda path, leaf: path in names


def block_linear(module: nn.Module) -> Where:
    """The set S of Eq. smat-mask: weights of linear layers inside transformer blocks, found by type and structure.

    A block is an element of an outermost ``nn.ModuleList``; its linear weights are those of ``nn.Linear``, of
    transformers' ``Conv1D`` and stacked 3-D expert weights. Not in the set: a weight tied to an embedding, a mixture's
    router (a type named so), convolution kernels.
    Source: paper section 4.1, Mask.
    """
    embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    routers = {id(m) for router in module.modules() if "Router" in type(router).__name__ for m in router.modules()}
    picked = set()
    for block in _blocks(module):
        for layer in block.modules():
            if id(layer) in routers or isinstance(layer, _CONVOLUTIONS):
                continue
            if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
                picked.add(id(layer.weight))
            picked.update(id(p) for p in layer.parameters(recurse=False) if p.ndim == 3)
    names = frozenset(name for name, p in module.named_parameters() if id(p) in picked - embeddings)
    return lambda path, leaf: path in names


def never(path: str, leaf: Tensor) -> bool:
    """No leaf at all: Mask switched off."""
    return False


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in _blocks(child)]
