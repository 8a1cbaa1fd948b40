"""FT and SMAT on FSDP2 shards as a method: a state holds this process's shards of parameters and optimizer."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import errors, random, tree
from ..execution import in_loss
from ..grad import ModuleLoss, detached, loss_and_aux
from ..mat import finetune, smat, step
from ..mat.smat import Schedule
from ..mat.step import State
from ..ops.library import clip_factor
from ..optim import MuonState
from ..optim.chain import ChainState
from ..simulation import reweight
from ..types import Aux, Micro, Optimizer, Params, Where
from ..where import mask_problems
from .replicas import check_shared
from .shards import local, simulated_leaves, starts_in

_HYPER = "alpha_min", "drop_prob", "sigma", "noise", "alpha_max", "period"


class Sharded:
    """A method on shards: ``init`` and ``update`` as of any method, on batches of `smat_fn.parallel.share`.

    A copy of the module is sharded block by block; all processes call everything. Draws, and so simulated states, are
    those of one process bit for bit; gradients are averaged in float32, and the one norm is that of all shards. For
    elementwise optimizers alone (Adam, AdamW): a shard of a matrix is not a matrix.

    Args:
        loss_fn: runs the module's own forward pass, and takes no key.
        simulated: alpha_min, drop_prob, sigma, noise, alpha_max and period of `smat_fn.mat.smat.build`; None: FT.
        where: the masked set, by path.

    Raises:
        ValueError: lists a loss that runs the module otherwise (master weights, a linearised or compiled module,
            adapters) and bad numbers; in ``init`` an empty masked set with ``drop_prob > 0``, and optimizers that look
            at whole matrices or at a norm (Muon, `smat_fn.optim.chain`).
    """

    def __init__(
        self,
        loss_fn: ModuleLoss,
        optimizer: Optimizer,
        *,
        where: Where | None = None,
        max_grad_norm: float | None = None,
        simulated: Mapping[str, Any] | None = None,
    ) -> None:
        self._loss_fn, self._optimizer, self._where, self._max_norm = loss_fn, optimizer, where, max_grad_norm
        own: dict[str, Any] = {"sigma": 2e-3, **(simulated or {})}
        problems = step.check(optimizer, max_grad_norm, "autograd", donate=True)
        if unknown := own.keys() - _HYPER:
            problems.append(f"shards have no {', '.join(sorted(unknown))}: give {', '.join(_HYPER)} alone")
        else:
            problems += errors.problems_of(Schedule, **own)
        if getattr(type(loss_fn), "within", None) is not ModuleLoss.within:
            problems.append(
                f"shards run the module itself, not as a {type(loss_fn).__name__} does: give the ModuleLoss inside it"
            )
        errors.raise_problems(problems, "Sharded")
        self._schedule = None if simulated is None else Schedule(**own)

    def init(self, params: Params) -> State:
        """The state of this process; params are those of the whole module, theta_0.

        Raises: ValueError that lists names that the module does not have, and other shapes than its own.
        """
        leaves = tree.flatten(params)
        if not leaves:
            raise ValueError("Sharded: params is empty: give the parameters to train, module.named_parameters()")
        tree.check_floating(leaves, "params")
        self._loss_fn.check(leaves)
        if self._schedule is not None:
            errors.raise_problems(mask_problems(self._where, leaves, self._schedule.drop_prob), "Sharded")
        self._module = sharded_copy(self._loss_fn.module, leaves)
        inner = self._loss_fn
        self._loss = ModuleLoss(self._module, lambda m, *a: inner.loss(m, *a), training=inner.training)
        self._leaves: dict[str, Any] = {path: p for path, p in self._module.named_parameters() if p.requires_grad}
        shards = self._shards()
        self._base = {} if self._schedule is None else tree.clone(shards)
        opt_state = self._optimizer.init(shards)
        if wide := _not_elementwise(opt_state):
            raise ValueError(
                f"Sharded: the optimizer's state holds a {wide}, but a process sees its shards alone: take adam or "
                "adamw, and max_grad_norm to clip"
            )
        return State(shards, opt_state, 0)

    def update(self, key: Tensor, state: State, batch: Sequence[Micro]) -> tuple[State, Any]:
        """A step on this process's micro-batches; the state that was given is spent."""
        random.check_key(key)
        check_shared(batch)
        shards = self._shards()
        _check_state(state, shards)
        for path, shard in shards.items():  # restored, or moved by FSDP2 as it started
            if shard.data_ptr() != state.params[path].data_ptr():
                shard.copy_(state.params[path])
        drawn = None if self._schedule is None else self._schedule.draw(key, state.step)
        at = (self._module, self._leaves, self._base)
        with simulated_leaves(*at, drawn, self._where) if drawn else nullcontext():
            loss, aux, grads = self._gradient(batch)
        with torch.no_grad():
            if drawn is not None:
                reweight(grads, drawn, where=self._where, out=grads, starts=starts_in(self._leaves))
            norm = _norm(grads)
            if self._max_norm is not None:
                factor = clip_factor(norm, self._max_norm)
                grads = {path: (g.to(tree.compute_dtype(g)) * factor).to(g.dtype) for path, g in grads.items()}
            state = step.advance(self._optimizer, State(shards, state.opt_state, state.step), grads, donate=True)
        if self._schedule is None:
            return state, finetune.Info(loss, aux, norm.float())
        scale = torch.ones((), dtype=torch.float32, device=key.device) if drawn is None else drawn.scale
        return state, smat.Info(loss, aux, norm.float(), scale, drawn is not None)

    def whole(self, state: State) -> State:
        """The state of the whole module on the CPU, in the first process; all processes call it, others keep theirs."""

        def gathered(path: str, shard: Tensor) -> Tensor:
            from torch.distributed.tensor import DTensor  # takes long

            p = self._leaves[path]
            spread = DTensor.from_local(
                shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            found = spread.full_tensor()
            return found.cpu() if dist.get_rank() == 0 else shard

        return self._mapped(state, gathered)

    def empty(self, state: State) -> State:
        """A state of the whole module's shapes on the CPU, to read a stored one into."""
        return self._mapped(
            state, lambda path, shard: torch.empty(self._leaves[path].shape, dtype=shard.dtype, device="cpu")
        )

    def scatter(self, whole: State, state: State) -> State:
        """The stored state of the whole module with this process's shards, which are those of ``state``."""
        starts = starts_in(self._leaves)
        stored = iter(pytree.tree_leaves(whole))

        def own(path: str, shard: Tensor, found: Tensor) -> Tensor:
            first = starts[path] // math.prod(shard.shape[1:]) if shard.numel() else 0
            with torch.no_grad():
                return shard.copy_(found[first : first + shard.shape[0]])

        flat, spec = pytree.tree_flatten_with_path(state)
        leaves = [
            found if (path := self._path(place, leaf)) is None else own(path, leaf, found)
            for (place, leaf), found in zip(flat, stored, strict=True)
        ]
        return pytree.tree_unflatten(leaves, spec)

    def _mapped(self, state: State, fn: Callable[[str, Tensor], Tensor]) -> State:
        flat, spec = pytree.tree_flatten_with_path(state)
        leaves = [leaf if (path := self._path(place, leaf)) is None else fn(path, leaf) for place, leaf in flat]
        return pytree.tree_unflatten(leaves, spec)

    def _path(self, place: Sequence[Any], leaf: Any) -> str | None:
        """The path of the parameter that a tensor of the state belongs to, by its key and shape; else None."""
        path = getattr(place[-1], "key", None) if place else None
        if not isinstance(leaf, Tensor) or path not in self._leaves:
            return None
        return path if leaf.shape == local(self._leaves[path]).shape else None

    def _shards(self) -> dict[str, Tensor]:
        return {path: local(p).detach() for path, p in self._leaves.items()}

    def _gradient(self, parts: Sequence[Micro]) -> tuple[Tensor, list[Aux], dict[str, Tensor]]:
        """Means over micro-batches and processes, in float32 until the end."""
        losses, auxes, total = [], [], dict[str, Tensor]()
        for part in parts:
            with self._loss.running(), in_loss():
                loss, aux = loss_and_aux(self._loss.loss(self._module, part.batch.batch))
                (loss * part.batch.factor).backward()
            losses.append(loss.detach() * part.batch.factor)
            auxes.append(detached(aux))
            for path, p in self._leaves.items():
                grad = torch.zeros_like(local(p)) if p.grad is None else local(p.grad)
                p.grad = None
                wide = grad.detach().to(tree.compute_dtype(grad))
                total[path] = wide if path not in total else total[path].add_(wide)
        mean = torch.stack(losses).mean().to(torch.float64)
        dist.all_reduce(mean)
        grads = {path: (leaf / len(parts)).to(self._leaves[path].dtype) for path, leaf in total.items()}
        return (mean / dist.get_world_size()).to(losses[0].dtype), auxes, grads


def sharded_copy(module: nn.Module, params: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module on these parameters, the only ones trained, sharded by FSDP2: each block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    own = copy.deepcopy(module)
    for path, p in own.named_parameters():
        if path in params:
            p.data = params[path].detach().clone()
        p.requires_grad_(path in params)
    narrow = any(tree.compute_dtype(leaf) != leaf.dtype for leaf in params.values())
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if narrow else None)
    # by default that of a GPU, to which weights would be moved from the CPU
    mesh = init_device_mesh(next(iter(params.values())).device.type, (dist.get_world_size(),))
    for block in _blocks(own):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(own, mesh=mesh, mp_policy=policy)
    return own


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, the outermost."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (member for member in child if next(member.parameters(), None) is not None)
        else:
            yield from _blocks(child)


def _check_state(state: Any, shards: Mapping[str, Tensor]) -> None:
    """Raises: ValueError for a state of other shards than these, which would be overwritten by it."""
    if not hasattr(state, "opt_state"):
        raise ValueError(f"state is a {type(state).__name__}: give what init or update of these shards returned")
    try:
        tree.check_same(shards, "the shards of this process", **{"the state": tree.flatten(state.params)})
    except ValueError as error:
        raise ValueError(f"{error}: give what init or update of these shards returned") from None


def _not_elementwise(state: Any) -> str:
    """The name of a state inside this one whose optimizer is not known to be elementwise; an empty text otherwise."""
    if isinstance(state, MuonState | ChainState):
        return type(state).__name__
    return next(filter(None, (_not_elementwise(getattr(state, name)) for name in getattr(state, "_fields", ()))), "")


def _norm(grads: Mapping[str, Tensor]) -> Tensor:
    """The one norm of all shards, 0-d float64."""
    squares = tree.global_norm(grads).square()
    dist.all_reduce(squares)
    return squares.sqrt()
