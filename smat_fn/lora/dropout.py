"""Dropout on the input of adapters, its masks a function of the step's key."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .. import random
from ..errors import raise_problems
from ..grad import ModuleLoss
from ..grad.modules import WrappedLoss
from ..types import Aux
from .adapters import WEIGHT, Lora, layer_of

CHUNK = 1 << 24  # numbers drawn at a time, of about 40 bytes each meanwhile


class WithDropout(WrappedLoss):
    """A `ModuleLoss` whose adapted layers drop the inputs of their updates; made by `with_dropout`."""

    def __init__(self, inner: ModuleLoss, base: Mapping[str, Tensor], lora: Lora, p: float) -> None:
        super().__init__(inner, training=inner.training)
        self._base, self._lora, self._p = base, lora, p
        self._keys: list[Tensor] = []  # that of the pass that runs; copies of this loss share it
        self.elsewhere = set[str]()  # layers whose update is added by `smat_fn.lora.per_module`

    def loss(self, module: nn.Module, *args: Any, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        """The loss inside; without a key nothing is dropped."""
        if key is None:
            return self.inner.loss(module, *args)
        self._keys[:] = [random.fold_in(key, "adapters")]
        return self.inner.loss(module, *args, key=key)

    def wants_key(self) -> bool:
        """Always: the masks are made of it."""
        return True

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` with dropout on; blocks that the backward pass recomputes drop the same inputs again."""
        return self.inner.within(params, lambda module: self._hooked(module, fn))

    def _hooked(self, module: nn.Module, fn: Callable[[nn.Module], Any]) -> Any:
        with ExitStack() as left:
            left.callback(self._keys.clear)
            for path in self._lora.paths:
                left.callback(
                    module.get_submodule(layer_of(path))
                    .register_forward_hook(self._hook(path), with_kwargs=True)
                    .remove
                )
            return fn(module)

    def _hook(self, path: str) -> Callable[..., Tensor]:
        def add(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> Tensor:
            if not self._keys or path in self.elsewhere:
                return output
            (x,), weight = (*args, *named.values()), layer.weight
            assert isinstance(weight, Tensor)
            kept = self._kept(path, x)
            change = torch.where(kept, x * (self._p / (1 - self._p)), -x)
            update = weight - self._base[path].to(weight.dtype)
            return output + change @ (update if path in self._lora.transposed else update.T)

        return add

    def dropped(self, path: str, x: Tensor) -> Tensor:
        """``dropout(x)`` of a layer's input; x itself without a key."""
        return torch.where(self._kept(path, x), x / (1 - self._p), 0) if self._keys else x

    def _kept(self, path: str, x: Tensor) -> Tensor:
        # drawn where x is, bit-identical: the host would take longer than the layer
        key = random.fold_in(self._keys[0], path).to(x.device, non_blocking=x.is_cuda)
        parts = []
        for start in range(0, max(x.numel(), 1), CHUNK):
            own = torch.stack((key[0], key[1] + start // 4))  # a block of the key has four numbers
            parts.append(random.uniform(own, (min(CHUNK, x.numel() - start),)) >= self._p)
        return torch.cat(parts).view(x.shape)


def chain(loss_fn: Any) -> Iterator[Any]:
    """A loss, the one inside it, and so on."""
    while loss_fn is not None:
        yield loss_fn
        loss_fn = getattr(loss_fn, "inner", None)


def dropout_of(loss_fn: Any) -> WithDropout | None:
    """The `WithDropout` inside a loss."""
    return next((loss for loss in chain(loss_fn) if isinstance(loss, WithDropout)), None)


def with_dropout(loss_fn: ModuleLoss, base: Mapping[str, Tensor], lora: Lora, p: float) -> WithDropout:
    r"""The loss of the full tree with ``W_0 x + (W - W_0) dropout(x)`` in the layers that have adapters.

    With ``W = W_0 + s B A`` it is PEFT's ``W_0 x + s B A dropout(x)``; at a simulated state the update that is dropped
    is the simulated one, the noise of Perturb included. ``dropout(x) = x / (1 - p)`` where a uniform number of the key,
    the layer and the place in x is at least p, else 0: the same in the clean and the simulated pass of a step, in a
    recomputed block, and in every call of a layer within one pass. It costs each layer a second matrix product.

    Args:
        loss_fn: of the full tree; `with_master_weights` and `with_lora` go around it.
        base: theta_0, all leaves.
        p: probability in [0, 1).

    Returns:
        A loss that takes a key; without one nothing is dropped.

    Raises:
        ValueError: for p outside [0, 1), and an ``nn.MultiheadAttention``, whose adapters PEFT has without dropout.

    Source: Hu et al., 2021; PEFT 0.21.2, ``lora.Linear.forward``.
    """
    problems = [] if 0 <= p < 1 else [f"dropout of adapters is {p}, must lie in [0, 1)"]
    problems += [
        f"dropout of adapters is not supported for {layer_of(path)!r}, an nn.MultiheadAttention: name other targets"
        for path in lora.paths
        if not path.endswith(WEIGHT)
    ]
    raise_problems(problems)
    return WithDropout(loss_fn, base, lora, p)
