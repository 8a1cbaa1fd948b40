"""Methods on FSDP2 shards: a state holds this process's shards of parameters and of the optimizer's state."""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import errors, random, tree
from ..errors import some_of
from ..execution import on_shards
from ..grad import ModuleLoss, loss_and_aux
from ..grad.master_weights import FrozenRounded, ModuleMasterWeights
from ..grad.modules import WrappedLoss
from ..mat import asam, finetune, l2sp, mergopt, mixout, msam, smat
from ..optim.chain import ChainState
from ..types import Aux, Method, Micro, Optimizer, Params, Where
from .replicas import Share, check_shared, of_this_process
from .shards import local, reshard, restart, settle, spread_of

T = TypeVar("T")
_BLOCK = 1 << 20  # numbers that are exchanged at once
# methods that act on coordinates, but for norms by `tree.global_norm`; whether they read theta_0 after the first step
SHARDED: dict[Callable[..., Method], bool] = {
    finetune.build: False,
    asam.build: False,
    msam.build: False,
    mergopt.build: False,
    smat.build: True,
    l2sp.build: True,
    mixout.build: True,
}
_OURS = "loss_fn", "optimizer", "base", "where", "max_grad_norm", "offload", "engine", "donate"


class Sharded:
    """A method on shards: ``init`` and ``update`` as of any method, on batches of `smat_fn.parallel.share`.

    A copy of the module is sharded block by block; all processes call everything. Draws, and so simulated states, are
    those of one process bit for bit; gradients are averaged in float32, and every norm is that of all shards. For
    the optimizers of `smat_fn.optim`, whose predicates see whole leaves, and others that are elementwise, of which
    there is no check (`smat_fn.optim.from_transformation`). Muon makes each direction in every process.

    Args:
        loss_fn: runs the module's own forward pass; may have master weights, of which FSDP2 gathers rounded ones.
        build: of the method: that of `smat_fn.mat`'s finetune (default), smat, asam, msam, mergopt, l2sp or mixout.
        where: the masked set, by path.
        hyperparameters: those of ``build``, for smat without offload.

    Raises:
        ValueError: lists a loss that runs the module otherwise (a linearised or compiled module, adapters), another
            method and bad hyperparameters; in ``init`` an empty masked set with ``drop_prob > 0``, and
            `smat_fn.optim.chain`, whose transforms would see shards.
    """

    def __init__(
        self,
        loss_fn: ModuleLoss,
        optimizer: Optimizer,
        build: Callable[..., Method] = finetune.build,
        *,
        where: Where | None = None,
        max_grad_norm: float | None = None,
        **hyperparameters: Any,
    ) -> None:
        problems = []
        if build not in SHARDED:
            names = ", ".join(known.__module__.rpartition(".")[2] for known in SHARDED)
            problems.append(
                f"the method is {_name(build)}, which shards do not support: give build of {names}, or enter one of "
                "your own in smat_fn.parallel.SHARDED if all that it does to parameters is by coordinate, but for norms"
            )
        elif unknown := sorted(hyperparameters.keys() - (inspect.signature(build).parameters.keys() - {*_OURS})):
            problems.append(f"{_name(build)} on shards has no {', '.join(unknown)}: leave it out")
        else:
            leaves = {path: p.detach() for path, p in loss_fn.module.named_parameters()}
            given = {"max_grad_norm": max_grad_norm, "donate": True, **hyperparameters}
            problems += errors.problems_of(build, loss_fn, optimizer, leaves, **given)
        inner, self._dtype = _unrounded(loss_fn)
        problems += _otherwise(inner)
        errors.raise_problems(problems, "Sharded")
        self._loss_fn, self._optimizer, self._build, self._where = inner, optimizer, build, tree.predicate(where)
        self._options = {"max_grad_norm": max_grad_norm, "donate": True, **hyperparameters}
        self._leaves: dict[str, Any] = {}  # sharded, once there is a state

    def init(self, params: Params, dtype: torch.dtype | None = None) -> Any:
        """The state of this process; params are those of the whole module, theta_0. Shards are copied block by block.

        Args: dtype: of the shards, as `smat_fn.tree.cast` rounds; None: that of params.
        Raises: ValueError that lists names that the module does not have, and other shapes than its own; for params of
            several dtypes, and for a number.
        """
        whole = tree.flatten(params)
        if not whole:
            raise ValueError("Sharded: params is empty: give the parameters to train, module.named_parameters()")
        tree.check_floating(whole, "params")
        self._loss_fn.check(whole)
        shapes, picks = {path: leaf.detach().to("meta", dtype) for path, leaf in whole.items()}, self._where
        asked: Where | None = None if picks is None else lambda path, _: bool(picks(path, shapes[path]))
        errors.raise_problems(
            _unshardable(shapes) + errors.problems_of(self._method, self._loss_fn, shapes, asked), "Sharded"
        )
        module = sharded_copy(self._loss_fn.module, whole, self._dtype, stored=dtype)
        self._leaves = {path: p for path, p in module.named_parameters() if p.requires_grad}
        self._spread = spread_of(self._leaves, shapes)
        shards = self._shards()
        base = self._theta_0(shards)
        method = self._method(_ShardedLoss(self._loss_fn, module, self._leaves), base, asked)
        with on_shards(self._spread):
            self._update, state = method.update, method.init(shards)._replace(params=shards)
        if wide := _not_elementwise(state.opt_state):
            raise ValueError(
                f"Sharded: the optimizer's state holds a {wide}, but a process sees its shards alone: take adam or "
                "adamw, and max_grad_norm to clip"
            )
        return state

    def update(self, key: Tensor, state: Any, batch: Sequence[Micro]) -> tuple[Any, Any]:
        """A step on this process's micro-batches; the state that was given is spent."""
        random.check_key(key)
        check_shared(batch)
        shards = self._shards()
        _check_state(state, shards)
        for path, shard in shards.items():  # the first step, or restored
            if shard.data_ptr() != state.params[path].data_ptr():
                shard.copy_(state.params[path])
        with on_shards(self._spread):
            return self._update(key, state._replace(params=shards), list(batch))

    def _theta_0(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the shards, in the module's dtypes where these hold the same values; no memory if none is read."""
        if not SHARDED[self._build]:
            return {path: shard.to("meta") for path, shard in shards.items()}
        own = dict(self._loss_fn.module.named_parameters())
        narrow = {path: shard.to(own[path].dtype, copy=True) for path, shard in shards.items()}
        return {
            path: n if torch.equal(n.to(s.dtype), s) else s.clone()
            for (path, n), s in zip(narrow.items(), shards.values(), strict=True)
        }

    def _method(self, loss_fn: ModuleLoss, base: Params, where: Where | None) -> Method:
        return self._build(loss_fn, self._optimizer, base, where=where, **self._options)

    def whole(self, state: T) -> T:
        """A state, or leaves by path, of the whole module on the CPU, in the first process; others keep their shards.

        All processes call it.
        """

        def first(path: str, shard: Tensor) -> Tensor:
            found = self._spread.whole(path, shard)
            return found.cpu() if dist.get_rank() == 0 else shard

        return self._mapped(state, first)

    def stored_shape(self, place: Sequence[Any], leaf: Tensor) -> torch.Size:
        """The shape in `whole`'s result of a tensor of a state. Args: place: its keys in the state."""
        path = self._path(place, leaf)
        return leaf.shape if path is None else self._leaves[path].shape

    def own(self, place: Sequence[Any], leaf: Tensor, stored: Tensor) -> Tensor:
        """The part of a tensor of `whole`'s result that this process holds, of the shape of ``leaf``."""
        path = self._path(place, leaf)
        return stored if path is None else self._spread.own(path, stored)

    def _mapped(self, state: T, fn: Callable[[str, Tensor], Tensor]) -> T:
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


class _ShardedLoss(WrappedLoss):
    """A module's loss on a share, where its parameters are this process's shards; gradients are averaged by FSDP2."""

    def __init__(self, inner: ModuleLoss, module: nn.Module, leaves: Mapping[str, Any]) -> None:
        ModuleLoss.__init__(self, module, inner.loss, training=inner.training)
        self.inner, self._leaves, self._failed = inner, leaves, False

    def loss(self, module: nn.Module, *args: Share, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        (one,) = args
        own = None if key is None else of_this_process(key)
        loss, aux = loss_and_aux(self.inner.loss(module, one.batch, key=own))
        return loss * one.factor, aux

    def wants_key(self) -> bool:
        """As the loss on shards: the module that was given may be in another mode by now."""
        return self.inner.wants_key() or any(part.training for part in self.module.modules())

    def gradient(
        self, leaves: Mapping[str, Tensor], run: Callable[[nn.Module], tuple[Tensor, Aux]]
    ) -> tuple[tuple[Tensor, Aux], Sequence[Tensor]]:
        """The loss averaged over processes, aux of this one, and the shards of the mean gradients."""
        _check_recovered(self._failed, "init")
        with on_shards(None), self._holding(leaves), self.running(), _naming_shards():
            loss, aux = run(self.module)
            tree.check_differentiable(loss)
            loss.backward()
        grads = []
        for p in (self._leaves[path] for path in leaves):
            grads.append(torch.zeros_like(local(p)) if p.grad is None else local(p.grad))
            p.grad = None
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return ((mean / dist.get_world_size()).to(loss.dtype), aux), grads

    @contextmanager
    def _holding(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """The module's shards hold these values. What they held is in these tensors meanwhile: there is no copy."""
        held = [(local(p).detach(), leaves[path].data) for path, p in self._leaves.items()]
        others = [(own, leaf) for own, leaf in held if own.data_ptr() != leaf.data_ptr()]
        _swap(others)
        try:
            yield
        except BaseException:
            self._failed = not _recovered(self.module)
            self.module.zero_grad()  # of the blocks that were done: the next would be added to them
            raise
        finally:
            reshard(self.module)
            _swap(others)


def _recovered(module: Any) -> bool:
    """Shard again after a pass that ended in an exception. Returns: whether another one can follow it."""
    restart(module)
    return hasattr(module, "reset_iter_state")


def _check_recovered(failed: bool, way: str) -> None:
    if failed:
        raise ValueError(
            f"a pass before ended in an exception, from which FSDP2 recovers from torch 2.13 on: begin with {way}"
        )


@contextmanager
def _naming_shards() -> Iterator[None]:
    """Raises: ValueError for a weight that was read while a process held its shard alone."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(
            "a weight was read outside of the forward pass that gathers it: on shards a loss calls the module itself, "
            "module(...), and a module the members of its nn.ModuleLists; others train without shards"
        ) from error


def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchange the values of two contiguous tensors, a block at a time."""
    for one, other in pairs:
        for own, given in zip(one.view(-1).split(_BLOCK), other.view(-1).split(_BLOCK), strict=True):
            before = own.clone()
            own.copy_(given)
            given.copy_(before)


class _FrozenShards(WrappedLoss):
    """A module's loss whose weights are this process's shards, all of them frozen: it has no parameters."""

    def __init__(self, inner: ModuleLoss, module: nn.Module) -> None:
        ModuleLoss.__init__(self, module, inner.loss, training=inner.training)
        self.inner, self._failed = inner, False

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while FSDP2 gathers the module's weights, of which none stays gathered.

        Raises: ValueError for other weights than none, and with torch 2.12 after a pass that ended in an exception.
        """
        if params:
            raise ValueError(
                f"{some_of(sorted(params))} would replace shards, which are frozen: give lora.with_lora this loss, and "
                "frozen_shards the dtype of master weights"
            )
        _check_recovered(self._failed, "frozen_shards")
        try:
            with self.running(), _naming_shards():
                return fn(self.module)
        except BaseException:
            self._failed = not _recovered(self.module)
            raise
        finally:
            reshard(self.module)

    def wants_key(self) -> bool:
        """As the loss on shards: the module that was given may be in another mode by now."""
        return self.inner.wants_key() or any(part.training for part in self.module.modules())


def frozen_shards(
    loss_fn: ModuleLoss,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    *,
    stored: torch.dtype | None = None,
) -> ModuleLoss:
    """The loss of a copy of the module that is frozen at these parameters, and sharded by FSDP2: for adapters.

    `smat_fn.lora.with_lora` and `smat_fn.lora.build` take it; each process holds the adapters whole, and
    `smat_fn.parallel.replicated` averages their gradients. All processes must run the same blocks.

    Args:
        dtype: of all parameters of the module, as `with_master_weights` around the loss wants it; None: their own.
        stored: of the shards of params alone, as `smat_fn.tree.cast` rounds; None: their own.

    Raises:
        ValueError: for a loss that runs the module otherwise.
    """
    errors.raise_problems(_otherwise(loss_fn), "frozen_shards")
    return _FrozenShards(loss_fn, sharded_copy(loss_fn.module, params, dtype, stored=stored, frozen=True))


def sharded_copy(
    module: nn.Module,
    params: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    *,
    stored: torch.dtype | None = None,
    frozen: bool = False,
) -> nn.Module:
    """A copy of the module on these parameters, the only ones trained, sharded by FSDP2: each block, then the rest.

    Besides the shards one block at a time is in memory. Numbers, which have no rows, stay whole. A process may leave
    out parameters of a block, but no block.

    Args:
        dtype: of all parameters while the module runs; None: their own.
        stored: of the shards; None: that of params.
        frozen: none is trained, and shards have the dtype in which the module runs, if one is given.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # parameters of the copy are the module's own memory until they are sharded, which copies them
    given = [p for p in module.parameters() if type(p) is nn.Parameter and not p.is_inference()]
    alike = {id(p): nn.Parameter(p.detach(), False) for p in given}
    own = copy.deepcopy(module, alike)
    alike.clear()
    kinds = {leaf.dtype if stored is None else stored for leaf in params.values()}
    narrow = dtype is not None or not kinds <= {torch.float32, torch.float64}
    # the layers get what they get in a module that is not sharded
    wide = torch.float32 if narrow else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
    # by default that of a GPU, to which weights would be moved from the CPU
    mesh = init_device_mesh(next(iter(params.values())).device.type, (dist.get_world_size(),))
    paths = {id(p): path for path, p in own.named_parameters()}
    for part in (*_blocks(own, _uses(own)), own):
        numbers = set[nn.Parameter]()
        for p in part.parameters():
            if (path := paths.pop(id(p), None)) is None:  # sharded already
                continue
            cast = dtype if dtype is not None and (frozen or not p.ndim) else stored if path in params else None
            p.data = _unsharded(params.get(path, p), cast)
            p.requires_grad_(path in params and not frozen)
            numbers |= {p} if not p.ndim else set()
        root: Any = fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=numbers)
    if hasattr(root, "set_reduce_scatter_unused_params"):  # since torch 2.13
        root.set_reduce_scatter_unused_params(True)  # losses may touch other parameters in each process
    settle(own)
    return own


def _unsharded(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A leaf as FSDP2 wants it, contiguous; a number, which it does not copy, in memory of its own."""
    own = leaf.detach().to(dtype if leaf.is_floating_point() else None).contiguous()
    return own.clone() if not own.ndim or own.is_inference() else own


def _otherwise(loss_fn: Any) -> list[str]:
    """The error for a loss that does not run its module as it is."""
    if getattr(type(loss_fn), "within", None) is ModuleLoss.within:
        return []
    return [f"shards run the module itself, not as a {type(loss_fn).__name__} does: give the ModuleLoss inside it"]


def _unrounded(loss_fn: Any) -> tuple[Any, torch.dtype | None]:
    """The loss inside of master weights, and the dtype that they are rounded to: FSDP2 rounds what it gathers."""
    if not isinstance(loss_fn, ModuleMasterWeights):
        return loss_fn, None
    inner = loss_fn.loss_fn
    return inner.inner if isinstance(inner, FrozenRounded) else inner, loss_fn.dtype


def _blocks(module: nn.Module, uses: Mapping[Tensor, int]) -> Iterator[nn.Module]:
    """The members of lists of modules, the outermost, but those that share a weight. Args: uses: of the root."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found = ((member, _uses(member)) for member in child)
            yield from (member for member, own in found if own and all(uses[p] == count for p, count in own.items()))
        else:
            yield from _blocks(child, uses)


def _uses(module: nn.Module) -> Counter[Tensor]:
    """How many names each parameter has in a module."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))


def _unshardable(leaves: Mapping[str, Tensor]) -> list[str]:
    """Errors for parameters that FSDP2 does not train."""
    found = [
        f"parameter {path!r} is one number, of which processes cannot hold shares: freeze it (leave it out of params), "
        "or train without shards"
        for path, leaf in leaves.items()
        if not leaf.ndim
    ]
    if len(kinds := {tree.dtype_name(leaf): path for path, leaf in reversed(list(leaves.items()))}) > 1:
        named = ", ".join(f"{path!r} {kind}" for kind, path in sorted(kinds.items()))
        found.append(f"params have several dtypes ({named}), FSDP2 trains one: tree.cast them, --precision of train.py")
    return found


def _check_state(state: Any, shards: Mapping[str, Tensor]) -> None:
    """Raises: ValueError for a state of other shards than these, which would be overwritten by it."""
    if not hasattr(state, "opt_state"):
        raise ValueError(f"state is a {type(state).__name__}: give what init or update of these shards returned")
    if isinstance(state.step, Tensor):
        raise ValueError("the step of state is a tensor, as compiled steps have it: on shards it is a number")
    try:
        tree.check_same(shards, "the shards of this process", **{"the state": tree.flatten(state.params)})
    except ValueError as error:
        raise ValueError(f"{error}: give what init or update of these shards returned") from None


def _not_elementwise(state: Any) -> str:
    """The name of a state inside this one whose transforms would see shards; an empty text otherwise."""
    if isinstance(state, ChainState):
        return type(state).__name__
    return next(filter(None, (_not_elementwise(getattr(state, name)) for name in getattr(state, "_fields", ()))), "")


def _name(build: Any) -> str:
    return f"{getattr(build, '__module__', '')}.{getattr(build, '__name__', build)}".removeprefix("smat_fn.mat.")
