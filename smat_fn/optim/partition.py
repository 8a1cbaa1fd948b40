"""Two optimizers on one tree, each on leaves of its own."""

from typing import Any, NamedTuple

from .. import tree
from ..types import Optimizer, Params, Where


class PartitionState(NamedTuple):
    """States of the two optimizers.

    Attributes:
        chosen: state of the optimizer of the leaves that were picked.
        rest: state of the other one.
    """

    chosen: Any
    rest: Any


def partition(where: Where, chosen: Optimizer, rest: Optimizer) -> Optimizer:
    """One optimizer on the leaves that ``where`` picks, another on all others: parameter groups.

    Args:
        where: predicate ``(path, tensor) -> bool``, such as `smat_fn.where.matrices`.
        chosen: of the leaves it holds for.
        rest: of the others.

    Returns:
        An `Optimizer` whose state is a `PartitionState`.

    Raises:
        ValueError: chosen or rest is not an `Optimizer`.

    Example:
        >>> import torch
        >>> from smat_fn import optim, where
        >>> slow = partition(where.matrices, optim.adam(1e-3), optim.adam(1e-5))
        >>> params = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
        >>> params, state = slow.update(params, slow.init(params), params)
        >>> [round(float(1 - leaf.max()), 6) for leaf in params.values()]
        [0.001, 1e-05]
    """
    for name, own in (("chosen", chosen), ("rest", rest)):
        if not isinstance(own, Optimizer):
            raise ValueError(f"partition: {name} is a {type(own).__name__}, give an optimizer of smat_fn.optim")

    def init(params: Params) -> PartitionState:
        ours, others = tree.partition(params, where)
        return PartitionState(chosen.init(ours), rest.init(others))

    def update(grads: Params, state: PartitionState, params: Params, **options: Any) -> tuple[Params, PartitionState]:
        flat = tree.flatten(grads)
        tree.check_same(tree.flatten(params), "params", grads=flat)
        tree.check_kind(state, "chosen", "rest")
        ours, others = tree.partition(params, where)
        ours, first = chosen.update({path: flat[path] for path in ours}, state.chosen, ours, **options)
        others, second = rest.update({path: flat[path] for path in others}, state.rest, others, **options)
        return tree.combine(params, ours, others), PartitionState(first, second)

    return Optimizer(init, update)
