"""For writers of methods: micro-batches around a gradient, then clipping and the optimizer, and checks of arguments."""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import random, tree
from ..errors import flag_problems, problems_of, raise_problems, shortened, some_of, takes
from ..execution import transformed, unread
from ..grad import Keyed
from ..grouped import groups, plain
from ..simulation import reweight_and_clip
from ..simulation.state import check_max_norm
from ..types import Aux, Batch, Engine, Micro, Optimizer, Params


class State(NamedTuple):
    """State of a method between steps.

    Attributes:
        params: theta, the expert's parameters.
        opt_state: of the optimizer.
        step: optimizer steps done; 0-d int64 inside vmap and torch.compile.
    """

    params: Params
    opt_state: Any
    step: int | Tensor


Gradient = Callable[[Params, Batch], tuple[tuple[Tensor, Aux], Params]]


def init(optimizer: Optimizer, base: Params, *, donate: bool) -> Callable[[Params], State]:
    """``Method.init``: checks params against the base and starts the optimizer; a donating method owns a copy.

    Without ``donate`` the parameters of the state share memory with those given until the first update.
    """

    def start(params: Params) -> State:
        leaves = tree.flatten(params)
        if not leaves:
            raise ValueError("params has no leaf, so that nothing would be trained: are all parameters frozen?")
        tree.check_floating(leaves, "params")
        origins = tree.flatten(base)
        if spread := [path for own in (leaves, origins) for path, p in own.items() if type(p).__name__ == "DTensor"]:
            raise ValueError(
                f"leaf {spread[0]!r} is a DTensor, of which a process holds a part: give parallel.Sharded the whole "
                "module, or simulate shards in a loop of your own by parallel.simulated_shards"
            )
        tree.check_floating(origins, "base")
        tree.check_same(origins, "base", params=leaves)
        if not transformed():
            params = tree.clone(params) if donate else tree.tree_map(Tensor.detach, params)
        return State(params, optimizer.init(params), tree.counter(0, params))

    return start


def accumulate(gradient: Gradient, params: Params, batch: Batch) -> tuple[Tensor, Aux, Params]:
    """(loss, aux, grads) of a batch, or averaged over a list of `Micro`, where aux is a list with one entry each.

    ``sum_i w_i g_i / sum_i w_i``, w the weights of `Micro`. With the number of examples or tokens of each micro-batch
    as its weight this is the mean over all of them. Sums run in float32 (float64 for float64 leaves) and are rounded
    once to the gradient's dtype.

    Raises: ValueError for an empty list, for a list of which only a part is `Micro`, for a `Micro` outside a list, and
        for an iterator.
    """
    parts = micro_batches(batch)
    if parts is None:
        (loss, aux), grads = gradient(params, batch)
        return loss, aux, grads
    if bad := [part.weight for part in parts if not (math.isfinite(part.weight) and part.weight > 0)]:
        raise ValueError(f"weights of micro-batches are {bad}: must be positive, leave out what weighs nothing")
    even = len({part.weight for part in parts}) == 1
    weights = [1.0 if even else part.weight for part in parts]
    whole = functools.reduce(operator.add, weights)  # not `sum`: from Python 3.12 on it gives other last bits
    total: dict[str, Tensor] = {}
    losses, auxes = [], []
    for (micro, _), weight in zip(parts, weights, strict=True):
        (loss, aux), grads = gradient(params, micro)
        losses.append(loss)
        auxes.append(aux)
        leaves = tree.flatten(grads)
        dtypes = {path: g.dtype for path, g in leaves.items()}
        total = _added(total, leaves, weight)
        del grads, leaves  # freed before those of the next micro-batch are made
    mean = tree.unflatten(params, _divided(total, whole, dtypes))
    if even:
        return torch.stack(losses).mean(), auxes, mean
    terms = (loss * weight for loss, weight in zip(losses, weights, strict=True))
    return functools.reduce(torch.add, terms) / whole, auxes, mean


def micro_batches(batch: Batch) -> list[Micro] | None:
    """The micro-batches of a step, None for one batch: micro-batches are a list whose members are all `Micro`.

    Raises: ValueError as `accumulate`.
    """
    if isinstance(batch, list) and batch and all(isinstance(part, Micro) for part in batch):
        return batch
    if isinstance(batch, list) and not batch:
        raise ValueError("the batch is an empty list: give one batch, or a list of at least one Micro(batch, weight)")
    if isinstance(batch, Iterator):
        raise ValueError(
            f"the batch is a {type(batch).__name__}, which can be read only once, and some methods read a batch in two "
            "passes: give what it yields, as next(batch), or a list of Micro(batch, weight) for micro-batches"
        )
    if isinstance(batch, Micro) or (
        isinstance(batch, (list, tuple)) and any(isinstance(part, Micro) for part in batch)
    ):
        raise ValueError("micro-batches are a list whose members are all Micro(batch, weight), and nothing else is")
    return None


def with_keys(update: Callable[[Tensor, Any, Batch], Any], like: Params) -> Callable[[Tensor, Any, Batch], Any]:
    """A method's update for a loss by `smat_fn.grad.keyed`: every batch of a step comes with the key of its loss.

    Args: like: tree of the parameters' names; its values are not read.
    Raises: ValueError for a run key of another type than `smat_fn.random.key` gives, before anything else, and for a
        state of other parameters than ``like``.
    """

    # the base itself is not kept
    tops, names = frozenset(like) if isinstance(like, Mapping) else None, frozenset(tree.flatten(like))

    def run(key: Tensor, state: Any, batch: Batch) -> tuple[Any, Any]:
        """One optimizer step.

        Args:
            key: the run key, int64 (2,), the same at every step: the step number is folded in.
            state: returned by ``init``, or by the step before.
            batch: one batch of any type, or a list of `smat_fn.types.Micro`: a mean over them by their weights.

        Returns:
            (the next state, the method's Info).

        Raises:
            ValueError: for a key, a state or micro-batches of another kind, and for a state of other parameters.
        """
        random.check_key(key)
        if not hasattr(state, "opt_state"):
            raise ValueError(f"state is a {type(state).__name__}: give what the method's init or update returned")
        # keys of a mapping take microseconds in every step, leaves take more; a list may have the leaves of a dict
        alike = transformed() or (isinstance(state.params, Mapping) and state.params.keys() == tops)
        if not alike and (own := tree.flatten(state.params).keys()) != names:
            found = some_of(sorted(map(repr, own ^ names)))
            raise ValueError(
                f"state is of other parameters than the method ({found} in one of them): give what the method's init "
                "or update returned"
            )
        parts = micro_batches(batch)
        if parts is None:
            return update(key, state, Keyed(batch, key, state.step, 0))
        given = [Micro(Keyed(part, key, state.step, i), weight) for i, (part, weight) in enumerate(parts)]
        return update(key, state, given)

    run.__name__ = run.__qualname__ = "update"
    return run


def _added(total: dict[str, Tensor], grads: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """``total + weight * grad`` of all leaves, in place; of an empty total, new ones."""
    if not plain(grads):
        return {path: _added_leaf(total.get(path), g, weight) for path, g in grads.items()}
    sums = total or {path: _wide(g) for path, g in grads.items()}
    for paths in groups(grads):
        into, given = [sums[path] for path in paths], [grads[path] for path in paths]
        if total and weight == 1 and into[0].dtype == given[0].dtype:
            torch._foreach_add_(into, given)
            continue
        terms = list(map(_wide, given)) if total else into
        torch._foreach_copy_(terms, given)
        if weight != 1:
            torch._foreach_mul_(terms, weight)
        if total:
            torch._foreach_add_(into, terms)
    return sums


def _added_leaf(total: Tensor | None, grad: Tensor, weight: float) -> Tensor:
    wide = grad.to(tree.compute_dtype(grad), copy=total is None)
    wide = wide if weight == 1 else tree.as_vectors(lambda leaf: leaf * weight)(wide)
    if transformed():
        return wide if total is None else total + wide
    return wide if total is None else total.add_(wide)


def _divided(total: dict[str, Tensor], whole: float, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """``total / whole`` in the dtypes of the gradients; writes into total."""
    if not plain(total):
        divide = torch.div if transformed() else Tensor.div_
        divided = tree.as_vectors(lambda s: divide(s, whole))
        return {path: divided(s).to(dtypes[path]) for path, s in total.items()}
    mean = {p: s if s.dtype == dtypes[p] else torch.empty_like(s, dtype=dtypes[p]) for p, s in total.items()}
    for paths in groups(mean):
        sums, rounded = [total[path] for path in paths], [mean[path] for path in paths]
        torch._foreach_div_(sums, whole)
        if sums[0] is not rounded[0]:
            torch._foreach_copy_(rounded, sums)
    return mean


def _wide(grad: Tensor) -> Tensor:
    return torch.empty_like(grad, dtype=tree.compute_dtype(grad))


def apply(
    optimizer: Optimizer, state: State, grads: Params, *, max_grad_norm: float | None, donate: bool
) -> tuple[State, Tensor]:
    """Clip, then the optimizer on theta: (next state, 0-d float32 norm of the gradient before clipping)."""
    grads, norm = reweight_and_clip(grads, None, max_norm=max_grad_norm, donate=donate)
    return advance(optimizer, state, grads, donate=donate), norm


def advance(optimizer: Optimizer, state: State, grads: Params, *, donate: bool) -> State:
    """The next state: the optimizer on theta."""
    options = {"donate": True} if donate else {}
    # checked once, since it takes time; a counter is a tensor in compiled and batched steps, whose trace is checked
    first = not isinstance(state.step, int) or state.step == 0
    leaves = tree.flatten(state.params) if first else {}
    before = {} if donate else tree.versions(leaves)
    result = optimizer.update(grads, state.opt_state, state.params, **options)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(f"the optimizer's update returned a {type(result).__name__}: return (params, state)")
    params, opt_state = result
    if first:
        _check_updated(leaves, tree.flatten(params), [] if donate else tree.written(leaves, before))
    return State(params, opt_state, tree.counter(state.step + 1, params))


def _check_updated(before: Mapping[str, Tensor], after: Mapping[str, Tensor], written: Sequence[str]) -> None:
    """Raises: ValueError for an optimizer that wrote into its parameters, or gave others than it got."""
    if written:  # the base may share their memory, and would follow
        raise ValueError(
            f"the optimizer's update wrote into the parameters given to it ({some_of(written)}): return new tensors, "
            "as theta - lr * g, and no in-place operation such as -= or sub_"
        )
    tree.check_same(before, "the parameters", **{"what the optimizer's update returned": after})
    problems = [
        f"leaf {path!r} is {tree.dtype_name(leaf)} before the optimizer's update and "
        f"{tree.dtype_name(after[path])} after it: return the dtype of the parameters"
        for path, leaf in before.items()
        if after[path].dtype != leaf.dtype
    ]
    if problems:
        raise_problems(shortened(problems, "{} more leaves change their dtype"))


def as_tensors(state: State) -> State:
    """The state with every integer in it as a 0-d int64 tensor: for torch.compile, vmap, and stacks of states.

    ``update`` then decides by tensors what a step is, one program for all steps, and returns such a state.
    """
    device = next(iter(tree.flatten(state.params).values())).device

    def tensor(leaf: Any) -> Any:
        return torch.full((), leaf, dtype=torch.int64, device=device) if type(leaf) is int else leaf

    return pytree.tree_map(tensor, state)


def check_not_negative(**numbers: float | Tensor) -> list[str]:
    """Errors for hyperparameters that are not finite or negative; tensors inside transforms are not looked at."""
    return [
        f"{name} is {value!r}, must be finite and not negative"
        for name, value in numbers.items()
        if not (unread(value) or (isinstance(value, Real | Tensor) and 0 <= value < math.inf))
    ]


def check(optimizer: Any, max_grad_norm: float | None, engine: str, *, donate: bool) -> list[str]:
    """Errors for the arguments that all methods share."""
    problems = flag_problems(donate=donate)
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        problems.append(f"optimizer is a {type(optimizer).__name__}: give one with init and update (smat_fn.optim)")
    elif donate and not takes(optimizer.update, 3, donate=True):
        problems.append(
            "donate=True needs an optimizer whose update takes donate: add *, donate=False to yours, with which it may "
            "write into what it gets, or leave donate out"
        )
    if engine not in get_args(Engine):
        problems.append(f"engine is {engine!r}, choose one of {', '.join(get_args(Engine))}")
    return problems + problems_of(check_max_norm, max_grad_norm, "max_grad_norm")
