"""FSDP2: simulation and reweighting on the local shards, by global coordinate, around your own training loop."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import errors, tree
from ..execution import Shards, on_shards
from ..grad import trained
from ..mat import asam, ascent
from ..mat.ascent import Ascent
from ..mat.weights import SimulatedWeights
from ..simulation import Draw, reweight
from ..types import Params, Predicate, Where


def base_shards(module: nn.Module) -> dict[str, Tensor]:
    """theta_0: copies of the local shards of a sharded module's trainable parameters, as they are now.

    Names, here and in draws, are those of the module itself, without the parts that ``torch.compile`` and torch's
    ``checkpoint_wrapper`` put into them.
    """
    settle(module)
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
        placements = _shards_in(p)
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
    after it; from torch 2.13 on, a step that ended in an exception can be taken again after ``zero_grad``. No
    process needs another one's numbers: together the shards are the state that one process would simulate (Eq.
    smat-state), bit for bit.

    Args:
        base: of `base_shards`.
        drawn: None is a clean step: theta stays.
        where: the masked set, by the names of ``module.named_parameters()``.
    """
    reshard(module)  # before its parameters are taken: gathered ones are others
    leaves, origins = _leaves(module), tree.flatten_unwrapped(base)
    shards = {path: local(p).detach() for path, p in leaves.items()}  # FSDP2 owns the storage: written in place
    asked = _asked(module, where)
    weights = SimulatedWeights(shards, origins, where=asked, starts=starts_in(leaves), switch=False)
    wait(leaves)
    try:
        with weights.at(drawn):
            try:
                yield
            finally:
                wait(leaves)
    except BaseException:
        restart(module)
        raise
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
    for part in _parts(module):
        part.reshard()


def restart(module: Any) -> None:
    """Shard again after an exception in a pass, and drop what it has left: FSDP2's states, gradients not yet shared."""
    for part in _parts(module):
        state = part._get_fsdp_state()  # nothing public has the gradients of micro-batches that were not averaged
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for group in filter(None, groups):
            for own in group.fsdp_params:
                own.unsharded_accumulated_grad = None
                if hasattr(own, "_unsharded_param"):
                    own._unsharded_param.grad = None
    renew(module)


def renew(module: Any) -> None:
    """Shard again what `reshard` leaves gathered, the weights of a forward pass that failed; gradients stay."""
    with suppress(AttributeError):  # since torch 2.13, and once the module itself has run
        module.reset_iter_state()
    reshard(module)


def settle(module: nn.Module) -> None:
    """Gather and shard again, part by part: otherwise the first forward pass may move shards to other memory."""
    for part in _parts(module):
        part.unshard()
        part.reshard()


def wait(leaves: Mapping[str, Any]) -> None:
    """Wait for copies of shards in host memory to the devices that use them: FSDP2 may not have, and they change."""
    offloaded = (p for p in leaves.values() if hasattr(p, "to_local") and p.device.type == "cpu")
    for kind in {p.device_mesh.device_type for p in offloaded} - {"cpu"}:
        torch.get_device_module(kind).synchronize()


def _parts(module: nn.Module) -> Iterator[Any]:
    """The modules that FSDP2 shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes long; without it nothing is sharded
    if fsdp is not None:
        yield from (part for part in module.modules() if isinstance(part, fsdp.FSDPModule))


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


def sharded(leaves: Mapping[str, Any]) -> bool:
    """Whether a leaf is a DTensor."""
    return any(hasattr(leaf, "to_local") for leaf in leaves.values())


def shard_problems(leaves: Mapping[str, Any]) -> list[str]:
    """Errors for leaves that are not all shards of the first dimension over one dimension of one mesh.

    Over others they may be copies (HSDP).
    """
    if not sharded(leaves):
        return []
    problems, meshes = [], list[Any]()
    for path, p in leaves.items():
        placements = getattr(p, "placements", None)
        if placements is None:
            problems.append(f"parameter {path!r} is whole, and others are shards: shard all trained parameters")
        elif len(kinds := _shards_in(p)) != 1 or not kinds[0][1].is_shard(0):
            problems.append(
                f"parameter {path!r} is placed as {tuple(placements)}: shard its first dimension alone, by FSDP2 over "
                "one mesh dimension"
            )
        elif (own := (p.device_mesh, kinds[0][0])) not in meshes:
            meshes.append(own)
    if len(meshes) > 1:
        problems.append(f"parameters are shards over {len(meshes)} different meshes: shard all of them over one")
    return errors.shortened(problems, "{} more parameters are placed so")


def _shards_in(leaf: Any) -> list[tuple[int, Any]]:
    """The dimensions of its mesh over which a leaf is not copied, and how it is placed there."""
    return [(i, kind) for i, kind in enumerate(getattr(leaf, "placements", ())) if not kind.is_replicate()]


def total_of(leaves: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """The function that sums a tensor over the processes that hold the shards, each of which calls it."""
    found = [leaf for leaf in leaves.values() if hasattr(leaf, "to_local")]
    over = _shards_in(found[0]) if found else []
    if not over:
        return lambda tensor: tensor
    group = found[0].device_mesh.get_group(over[0][0])

    def total(tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=group)
        return summed

    return total


def spread_of(leaves: Mapping[str, Any], wholes: Mapping[str, Tensor]) -> Shards:
    """The argument of `on_shards`. Args: leaves: DTensors; wholes: leaves of the shapes of whole ones."""
    return Shards(
        starts_in(leaves),
        wholes,
        total_of(leaves),
        lambda path, shard: gathered(leaves[path], shard),
        lambda path, whole: rows_of(leaves[path], whole),
    )


def gathered(leaf: Any, shard: Tensor) -> Tensor:
    """The whole leaf whose shards are those that the processes give, placed as another leaf."""
    from torch.distributed.tensor import DTensor  # takes long

    mesh, placements = leaf.device_mesh, leaf.placements
    own = DTensor.from_local(shard, mesh, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())
    return own.full_tensor()


def rows_of(leaf: Any, whole: Tensor) -> Tensor:
    """The rows of a whole tensor that are this process's shard of a leaf; a view, or the shard of a DTensor."""
    if hasattr(whole, "to_local") or not hasattr(leaf, "to_local"):
        return local(whole)
    rows, numbers = local(leaf).shape[0], math.prod(whole.shape[1:])
    first = starts_in({"": leaf})[""] // numbers if rows and numbers else 0
    return whole[first : first + rows]


class ShardWeights(SimulatedWeights):
    """`SimulatedWeights` of a module whose trained parameters are FSDP2 shards, written in place.

    All processes call everything. Draws go by coordinate of the whole parameter, and a climb's norm is that of all
    shards.

    Args:
        leaves: the parameters of the module, as they are while it is sharded.
        base: theta_0 by name, whole or shards.
        where: the masked set; it is asked with the parameters, whose shapes are those of whole ones.
        climbs: along the momentum of an optimizer of these parameters.
    """

    _climbs_shards = True

    def __init__(
        self,
        module: nn.Module,
        leaves: Mapping[str, Any],
        base: Mapping[str, Tensor],
        *,
        where: Predicate,
        climbs: Ascent | None = None,
    ) -> None:
        masks = {path: bool(where(path, p)) for path, p in leaves.items()}
        own = {path: rows_of(p, base[path]).detach().to(p.device) for path, p in leaves.items()}
        self._spread = spread_of(leaves, leaves)
        shards = {path: local(p).detach() for path, p in leaves.items()}
        super().__init__(shards, own, where=lambda path, _: masks[path], starts=self._spread.starts, switch=False)
        self._climbs, self._sharded, self._whole = climbs, module, leaves

    @contextmanager
    def at(self, drawn: Draw | None) -> Iterator[None]:
        """`SimulatedWeights.at`; nothing stays gathered."""
        with self._around(super().at(drawn)):
            yield

    @contextmanager
    def away(self) -> Iterator[None]:
        """`SimulatedWeights.away`; weights that are gathered again are theta inside, and not afterwards."""
        with self._around(super().away()):
            yield

    @contextmanager
    def climbed(self, *, rho: float = 0.25, adaptive: bool = True) -> Iterator[None]:
        """`SimulatedWeights.climbed`; nothing stays gathered."""
        with self._around(super().climbed(rho=rho, adaptive=adaptive)):
            yield

    @contextmanager
    def _around(self, block: AbstractContextManager[None]) -> Iterator[None]:
        """Inside, the shards hold other values; what was gathered on one side is not used on the other."""
        self._shard()
        self._parameters = {path: local(p).detach() for path, p in self._whole.items()}
        with block:
            try:
                yield
            finally:
                self._shard()

    def _shard(self) -> None:
        reshard(self._sharded)
        own = set(map(id, self._sharded.parameters()))
        if any(id(p) not in own for p in self._whole.values()):  # a forward pass failed, and its error was caught
            renew(self._sharded)
        wait(self._whole)

    def _grads(self) -> dict[str, Tensor]:
        with torch.no_grad():  # a shard is the same tensor every time
            return {path: local(p.grad) for path, p in self._whole.items() if p.grad is not None}

    def _clear_grads(self) -> None:
        for p in self._whole.values():
            p.grad = None

    def reweight(self, grads: Mapping[str, Tensor], drawn: Draw) -> None:
        """`SimulatedWeights.reweight`, of the shards of gradients."""
        with torch.no_grad():
            super().reweight({path: local(grad) for path, grad in grads.items()}, drawn)

    def _climb(self, drawn: Draw | None) -> Callable[..., Params] | None:
        if self._climbs is None or (drawn is not None and self._climbs.climb == "clean"):
            return None
        slopes = ascent.momentum_in(self._climbs.optimizer(), self._whole)
        if slopes is None:
            return None
        return partial(asam.climb, grads={path: local(slope) for path, slope in slopes.items()}, rho=self._climbs.rho)

    def _write(self, *args: Any) -> None:
        with on_shards(self._spread):
            super()._write(*args)
