"""A model's loss as a loss of its adapters."""

from collections.abc import Mapping

from torch import Tensor

from ..grad import reparametrised
from ..simulation import Draw, simulate
from ..types import LossFn, Params, Where
from .adapters import Lora, expand


def with_lora(
    loss_fn: LossFn,
    base: Mapping[str, Tensor],
    lora: Lora,
    *,
    drawn: Draw | None = None,
    where: Where | None = None,
) -> LossFn:
    r"""The loss of adapters: ``L(W_0 + s B A)``, or with a draw ``L(W_0 + alpha m (.) s B A + epsilon)``.

    The draw is that of the weights' own paths, on the adapted matrices alone: the state that full fine-tuning would
    simulate there. Gradients reach A and B by the chain rule through `simulate`: with ``G = alpha m (.) grad L``,
    ``s B^T G`` and ``s G A^T``. For any method and engine.

    Args:
        loss_fn: of the full tree.
        base: theta_0, all leaves.
        where: the masked set, by path of the weights.

    Source: Eqs. smat-state, smat-gradient at ``theta = W_0 + s B A``.
    """

    def weights(adapters: Params) -> dict[str, Tensor]:
        merged = expand(adapters, base, lora)
        if drawn is not None:
            merged = simulate(merged, {path: base[path] for path in merged}, drawn, where=where)
        return {**base, **merged}

    return reparametrised(loss_fn, weights)
