"""The calling conventions of the whole library, written once.

- *Params*: any pytree of tensors (mappings, sequences, NamedTuples); canonically the flat ``dict[str, Tensor]``
  of ``module.named_parameters()``, with tied weights once.
- *LossFn*: ``loss_fn(params, *args) -> (loss, aux)`` with a scalar loss.
- *Where*: ``where(path, tensor) -> bool`` picks leaves; ``None`` picks every leaf.
- *Optimizer*: ``init(params) -> state``; ``update(grads, state, params) -> (params, state)``.
- *Method*: ``init(params) -> State``; ``update(key, state, batch) -> (State, Info)``. ``key`` is the run key: the
  step number is folded in by ``update``. ``batch`` is one batch of any type but ``list``, or a ``list`` of
  micro-batches, whose losses and gradients are averaged: with equal weights, or those of `Micro`.

This module imports nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Params: TypeAlias = Any
Batch: TypeAlias = Any
Aux: TypeAlias = Any
LossFn: TypeAlias = Callable[..., tuple[Tensor, Aux]]
Where: TypeAlias = Callable[[str, Tensor], bool]
Schedule: TypeAlias = Callable[[int], float]
Engine: TypeAlias = Literal["func", "autograd"]
Noise: TypeAlias = Literal["uniform", "gaussian", "laplace"]
Offload: TypeAlias = Literal["cpu", "recompute", "stream"]
Precision: TypeAlias = Literal["bf16", "fp32", "mixed"]
Aggregate: TypeAlias = Literal["sum", "mean"]
Scope: TypeAlias = Literal["global", "tensor"]


class Micro(NamedTuple):
    """A micro-batch in a list with its weight: the number of examples or tokens that its loss is the mean of."""

    batch: Batch
    weight: float


class Optimizer(NamedTuple):
    """A pure optimizer; ``update(..., donate=True)`` may write into its arguments and gives the same bits."""

    init: Callable[[Params], Any]
    update: Callable[..., tuple[Params, Any]]


class Method(NamedTuple):
    """A training method: one optimizer step a call."""

    init: Callable[[Params], Any]
    update: Callable[[Tensor, Any, Batch], tuple[Any, Any]]
