"""The trained parameters of a module, and what must not happen to it while its weights are replaced."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from .. import errors, tree


def bare(module: nn.Module) -> nn.Module:
    """The module without wrappers that put a prefix before its parameters' names, on which draws depend."""
    while True:
        if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # of torch.compile
            module = inner
        elif isinstance(module, nn.DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module


def leaves_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name, without the parts of wrappers around blocks; tied ones once."""
    found: Any = tree.flatten_unwrapped({name: p for name, p in bare(module).named_parameters() if p.requires_grad})
    return found


def changes(before: Mapping[str, Tensor], now: Mapping[str, Tensor], since: str) -> list[str]:
    """Errors for trainable parameters that are not those of before."""
    problems = [f"parameter {path!r} is trained now, and was not {since}" for path in now if path not in before]
    problems += [f"parameter {path!r} was trained {since}, and is not now" for path in before if path not in now]
    for path, p in before.items():
        other = now.get(path)
        if other is not None and (p.shape != other.shape or (isinstance(p, nn.Parameter) and p is not other)):
            problems.append(f"parameter {path!r} is another tensor than {since}")
    return errors.shortened(problems, f"{{}} more trainable parameters are not those {since}")


def norms_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The batch norms that move running statistics in train mode, by name."""
    return [(name, own) for name, own in module.named_modules() if _keeps_statistics(own)]


def _keeps_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None and module.momentum != 0


def norm_problems(norms: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """The error for batch norms in train mode, whose running statistics would be those of theta and theta~ mixed."""
    names = [name for name, norm in norms if norm.training]
    if not names:
        return []
    return [
        f"{errors.some_of(names)}: batch norms in train mode would move their running "
        "statistics at theta~ too, and evaluation is at theta: set their momentum to 0.0, which keeps the "
        "current statistics, or keep them in eval mode"
    ]


def embedding_problems(module: nn.Module) -> list[str]:
    """Errors for embeddings whose gradients are sparse, or that clip their rows in the forward pass."""
    found = [
        (name, own)
        for name, own in bare(module).named_modules()
        if isinstance(own, nn.Embedding | nn.EmbeddingBag) and own.weight.requires_grad
    ]
    return [
        f"{name!r} gives sparse gradients, which cannot be reweighted: make the {type(own).__name__} with sparse=False"
        for name, own in found
        if own.sparse
    ] + [
        f"{name!r} writes to its weight in the forward pass, which would be at theta~: set its max_norm to None"
        for name, own in found
        if own.max_norm is not None
    ]
