"""FSDP2: simulation and reweighting on the local shards, by global coordinate, around your own training loop."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import errors, tree
from ..grad import trained
from ..mat.weights import SimulatedWeights
from ..simulation import Draw, reweight
from ..types import Predicate, Where


def base_shards(module: nn.Module) -> dict[str, Tensor]:
    """theta_0: copies of the local shards of a sharded module's trainable parameters, as they are now.

    Names, here and in draws, are those of the module itself, without the parts that ``torch.compile`` and torch's
    ``checkpoint_wrapper`` put into them.
    """
    reshard(module)
    return {path: local(p).detach().clone() for path, p in _leaves(module).items()}


def starts_of(module: nn.Module) -> dict[str, int]:
    """Index of each local shard's first coordinate in the full leaf.

    Rows are dealt out as ``torch.chunk`` does, uneven and empty shards included; parameters that are whole start at 0.

    Raises: ValueError that lists parameters sharded in another dimension than the first, or over several mesh
        dimensions: their shard is not contiguous.
    """
    return starts_in(_leaves(module))


def starts_in(leaves: Mapping[str, Any]) -> dict[str, int]:
    """`starts_of` of parameters by name."""
    problems, starts = [], {}
    for path, p in leaves.items():
        starts[path] = 0
        placements = [(i, kind) for i, kind in enumerate(getattr(p, "placements", ())) if not kind.is_replicate()]
        if len(placements) > 1 or any(not kind.is_shard(0) for _, kind in placements):
            problems.append(f"leaf {path!r} is placed as {p.placements}: shard its first dimension alone")
        elif placements:
            mesh, (dimension, _) = p.device_mesh, placements[0]
            rows = -(-p.shape[0] // mesh.size(dimension))
            first = min(rows * mesh.get_local_rank(dimension), p.shape[0])
            starts[path] = first * math.prod(p.shape[1:])
    errors.raise_problems(problems)
    return starts


@contextmanager
def simulated_shards(
    module: nn.Module, base: Mapping[str, Tensor], drawn: Draw | None, *, where: Where | None = None
) -> Iterator[None]:
    """Sets the module's shards to those of theta~ inside, and restores theta on exit, even after an exception.

    Forward and backward of all micro-batches of a step belong inside, `reweight_grads`, clipping and the optimizer
    after it. No process needs another one's numbers: together the shards are the state that one process would simulate
    (Eq. smat-state), bit for bit.

    Args:
        base: of `base_shards`.
        drawn: None is a clean step: theta stays.
        where: the masked set, by the names of ``module.named_parameters()``.
    """
    reshard(module)  # before its parameters are taken: gathered ones are others
    with simulated_leaves(module, _leaves(module), tree.flatten_unwrapped(base), drawn, _asked(module, where)):
        yield


@contextmanager
def simulated_leaves(
    module: nn.Module, leaves: Mapping[str, Any], base: Mapping[str, Tensor], drawn: Draw | None, where: Where | None
) -> Iterator[None]:
    """`simulated_shards` of these parameters of the module, whose names here are those of base, where and draws."""
    reshard(module)
    shards = {path: local(p).detach() for path, p in leaves.items()}  # FSDP2 owns the storage: written in place
    weights = SimulatedWeights(shards, base, where=where, starts=starts_in(leaves), switch=False)
    try:
        with weights.at(drawn):
            yield
    finally:
        reshard(module)


def reweight_grads(module: nn.Module, drawn: Draw, *, where: Where | None = None) -> None:
    """``grad <- alpha m (.) grad`` on the local shards of the accumulated gradients, in place (Eq. smat-gradient).

    Raises: ValueError where no parameter has a gradient.
    """
    reshard(module)  # gathered parameters have no gradients
    grads = {path: local(p.grad) for path, p in _leaves(module).items() if p.grad is not None}
    if not grads:
        raise ValueError("no parameter of the module has a gradient: reweight after backward, before zero_grad")
    starts = {path: start for path, start in starts_of(module).items() if path in grads}
    with torch.no_grad():
        reweight(grads, drawn, where=_asked(module, where), out=grads, starts=starts)


def reshard(module: nn.Module) -> None:
    """Shard again the weights that a forward pass without a backward one left gathered: the next would use them."""
    from torch.distributed.fsdp import FSDPModule  # takes long, and not every torch has it

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _leaves(module: nn.Module) -> dict[str, Any]:
    """The trained parameters. Raises: ValueError for those of FSDP1, whose shards do not say where they begin."""
    leaves = {path: p for path, p in module.named_parameters() if p.requires_grad}
    errors.raise_problems(trained.fsdp1_problems(leaves))
    return tree.flatten_unwrapped(leaves)


def _asked(module: nn.Module, where: Where | None) -> Predicate | None:
    """The masked set by names without wrappers; it is asked by those that its author reads in the module."""
    picks = tree.predicate(where)
    if picks is None:
        return None
    names = {tree.unwrapped(name): name for name, _ in module.named_parameters()}
    return lambda path, leaf: picks(names[path], leaf)


def local(leaf: Tensor) -> Tensor:
    """This process's shard of a leaf; a leaf that is whole is its own."""
    return leaf.to_local() if hasattr(leaf, "to_local") else leaf
