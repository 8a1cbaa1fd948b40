"""A model's loss as a loss of its adapters."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..grad import ModuleLoss
from ..simulation import Draw, simulate
from ..types import Aux, LossFn, Where
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
    ``s B^T G`` and ``s G A^T``. For any method and engine; a `ModuleLoss` stays one: checkpointed layers are safe.

    Args: loss_fn: of the full tree; base: theta_0, all leaves; where: the masked set, by path of the weights.
    Source: Eqs. smat-state, smat-gradient at ``theta = W_0 + s B A``.
    """

    def weights(adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        merged = expand(adapters, base, lora)
        if drawn is not None:
            merged = simulate(merged, {path: base[path] for path in merged}, drawn, where=where)
        return {**base, **merged}

    if isinstance(loss_fn, ModuleLoss):
        return _Adapted(loss_fn, weights)
    return lambda adapters, *args: loss_fn(weights(adapters), *args)


class _Adapted(ModuleLoss):
    """The module runs on the weights that the adapters stand for."""

    def __init__(self, loss_fn: ModuleLoss, weights: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
        super().__init__(loss_fn.module, loss_fn.loss)
        self._inner, self._weights = loss_fn, weights

    def __call__(self, params: Mapping[str, Tensor], *args: Any) -> tuple[Tensor, Aux]:
        return self._inner(self._weights(params), *args)

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's weights are those of the adapters."""
        return self._inner.within(self._weights(params), fn)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss function inside."""
        self._inner.check(self._weights(params))
