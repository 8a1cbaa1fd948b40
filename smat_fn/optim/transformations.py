"""Between optimizers, which return parameters, and gradient transformations, which return updates to add to them."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from .. import tree
from ..execution import refuse_donation
from ..types import Optimizer, Params


class GradientTransformation(NamedTuple):
    """``init(params) -> state``; ``update(updates, state, *, params=None, inplace=False) -> (updates, state)``."""

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Params, Any]]


class _Transformation(Protocol):
    """Interface of another library's transformation."""

    @property
    def init(self) -> Callable[..., Any]: ...
    @property
    def update(self) -> Callable[..., tuple[Any, Any]]: ...


def from_transformation(transformation: _Transformation) -> Optimizer:
    """The optimizer that adds the updates of a gradient transformation: ``theta + u``, ``u, state = update(g, state)``.

    For torchopt's transformations and chains, and for any other object with optax's two functions over tensors. They
    see the parameters as a flat dict by path.

    Args:
        transformation: ``init(params) -> state`` and ``update(updates, state, params=params) -> (updates, state)``; the
            sign and the learning rate are its own, as in ``torchopt.adam(1e-3)``.

    Returns:
        An `Optimizer` whose state is the transformation's; differentiable where that is, unless ``donate=True``.

    Raises:
        ValueError: what is given has no init and update; updates of other names or shapes than the parameters.
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise ValueError(
            f"from_transformation: a {type(transformation).__name__} is not a gradient transformation: give an object "
            "with init(params) and update(updates, state, params=...)"
        )
    # torchopt's write into their arguments unless told not to
    pure = {"inplace": False} if "inplace" in inspect.signature(transformation.update).parameters else {}

    def update(grads: Params, state: Any, params: Params, *, donate: bool = False) -> tuple[Params, Any]:
        refuse_donation("from_transformation", donate)
        leaves, slopes = tree.flatten(params), tree.flatten(grads)
        tree.check_same(leaves, "params", grads=slopes)
        found, state = transformation.update(slopes, state, params=leaves, **pure)
        updates = tree.flatten(found)
        tree.check_same(leaves, "params", updates=updates)
        if donate:
            with torch.no_grad():
                for path, leaf in leaves.items():
                    leaf.copy_(leaf + updates[path])
            return params, state
        moved = {path: (leaf + updates[path]).to(leaf.dtype) for path, leaf in leaves.items()}
        return tree.unflatten(params, moved), state

    return Optimizer(lambda params: transformation.init(tree.flatten(params)), update)


def as_transformation(optimizer: Optimizer) -> GradientTransformation:
    """An optimizer as the gradient transformation whose updates are ``theta' - theta``: for chains of other libraries.

    Adding them gives the optimizer's parameters up to the rounding of difference and sum, in the parameters' dtype.

    Args:
        optimizer: of `smat_fn.optim`, or any with its two functions.

    Returns:
        `GradientTransformation`, whose update needs ``params``, as that of a weight decay does.

    Raises:
        ValueError: in ``update`` without params.
    """

    # `inplace` is part of the calls that torchopt makes; it only allows writing
    def update(updates: Params, state: Any, params: Params = None, *, inplace: bool = False) -> tuple[Params, Any]:
        if params is None:
            raise ValueError("an optimizer as a transformation needs params: call update(updates, state, params=...)")
        moved, state = optimizer.update(updates, state, params)
        return tree.tree_map(torch.sub, moved, params), state

    return GradientTransformation(optimizer.init, update)
