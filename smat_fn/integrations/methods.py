"""Methods of a trainer or a model that are replaced for a while."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..mat.weights import SimulatedWeights


@contextmanager
def instead(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, ``owner.name`` is another method."""
    own, original = name in vars(owner), getattr(owner, name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class Away:
    """A method that runs at theta; a copy of its owner has its own, at what the copy holds."""

    def __init__(self, weights: SimulatedWeights, owner: Any, name: str) -> None:
        self._weights, self._method, self._what = weights, getattr(owner, name), f"{name} of {type(owner).__name__}"

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._weights.away():
            result = self._method(*args, **options)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(result)):
            raise ValueError(
                f"{self._what} gives the loss tensors with gradients, but in a simulated step a "
                "method of that name runs at theta, for samples: name it otherwise"
            )
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)
