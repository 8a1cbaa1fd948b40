"""Loss functions of modules, whose weights are arguments."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from ..types import Aux, LossFn, Params


class ModuleLoss:
    """A LossFn over a module: ``loss(module, *args) -> (loss, aux)`` run on given weights by ``functional_call``.

    Parameters are a flat dict named as in ``module.named_parameters()`` (tied weights once); names left out keep the
    module's own (frozen) values. The module itself is never changed.

    Raises: ValueError for names that the module does not have, and for other shapes than its own.
    """

    def __init__(self, module: nn.Module, loss: Callable[..., tuple[Tensor, Aux]]) -> None:
        self.loss = loss
        self._shell = _Shell(module)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}

    def __call__(self, params: Mapping[str, Tensor], *args: Any) -> tuple[Tensor, Aux]:
        return self.within(params, lambda module: self.loss(module, *args))

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``."""
        self.check(params)
        # functional_call alone would ignore unknown names in silence
        return functional_call(self._shell, {f"module.{name}": value for name, value in params.items()}, (fn,))

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._shell.module

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError that lists names that the module does not have, and other shapes than its own."""
        problems = [
            f"leaf {name!r} is no parameter of the module"
            if name not in self._shapes
            else f"leaf {name!r} has shape {tuple(value.shape)}, the module's is {tuple(self._shapes[name])}"
            for name, value in params.items()
            if self._shapes.get(name) != value.shape
        ]
        if problems:
            raise ValueError("; ".join(problems) + ": take names and shapes from module.named_parameters()")


def reparametrised(loss_fn: LossFn, weights: Callable[[Params], Params]) -> LossFn:
    """``L(f(phi))`` as a loss of phi, f differentiable; a `ModuleLoss` stays one, so that checkpointed layers are safe.

    Args: weights: f, from the new parameters to those of ``loss_fn``.
    """
    if isinstance(loss_fn, ModuleLoss):
        return _Reparametrised(loss_fn, weights)
    return lambda params, *args: loss_fn(weights(params), *args)


def apply_fn(module: nn.Module) -> Callable[..., Any]:
    """``apply(params, *args, **kwargs)``: the module's forward on given weights, checked like `ModuleLoss`."""

    def apply(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return run.within(params, lambda inner: inner(*args, **kwargs))

    run = ModuleLoss(module, lambda inner, *args: inner(*args))
    return apply


class _Reparametrised(ModuleLoss):
    """The module runs on a function of the parameters."""

    def __init__(self, inner: ModuleLoss, weights: Callable[[Any], Any]) -> None:
        super().__init__(inner.module, inner.loss)
        self._inner, self._weights = inner, weights

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's weights are that function's value."""
        return self._inner.within(self._weights(params), fn)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss function inside."""
        self._inner.check(self._weights(params))


class _Shell(nn.Module):
    """Runs any function of the module where ``functional_call`` has put the weights in place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[[nn.Module], Any]) -> Any:
        return fn(self.module)
