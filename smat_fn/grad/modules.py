"""Loss functions of modules, whose weights are arguments: randomness comes from a key, buffers do not change."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .. import random, tree
from ..errors import some_of
from ..execution import batched, layers
from ..types import Aux, LossFn, Params


class ModuleLoss:
    """A LossFn over a module: ``loss(module, *args) -> (loss, aux)`` run on given weights by ``functional_call``.

    Parameters are a flat dict named as in ``module.named_parameters()`` (tied weights once); names left out keep the
    module's own (frozen) values. The module itself is never changed: not its weights, mode or buffers.

    With a ``key``, which methods give (a child of the step's, the same in all passes of a step), torch's generators are
    seeded from it while a module in train mode runs, so that dropout is a function of the key, and set back afterwards.
    A loss that takes ``key`` itself gets one of its own.

    Args:
        loss: ``(module, *args) -> (loss, aux)``, or ``(module, *args, key=...)``.
        training: True runs the module in train mode (its batch norms in their own), False in eval mode, None as it is.

    Raises: ValueError for names that the module does not have, for other shapes than its own, and for modules that
        write into their buffers in train mode, such as batch norms with running statistics.
    """

    def __init__(
        self, module: nn.Module, loss: Callable[..., tuple[Tensor, Aux]], *, training: bool | None = None
    ) -> None:
        self._loss, self._loss_takes_key = loss, takes_key(loss)
        self._shell = _Shell(module)
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self.training = training

    def __call__(self, params: Mapping[str, Tensor], *args: Any, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        options = {} if key is None else {"key": key}
        return self.within(params, lambda module: self.loss(module, *args, **options))

    def loss(self, module: nn.Module, *args: Any, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        """The loss of a module whose weights are in place, its randomness a function of the key where there is one."""
        options = {"key": random.fold_in(key, "loss")} if key is not None and self._loss_takes_key else {}
        if key is None or not _trains(module):
            return self._loss(module, *args, **options)
        with _seeded(key, module):
            return self._loss(module, *args, **options)

    def wants_key(self) -> bool:
        """Whether a key makes a difference now: a part of the module is in train mode, or the loss takes one."""
        return self._loss_takes_key or (_trains(self.module) if self.training is None else self.training)

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``, its mode that of ``training``."""
        self.check(params)
        # functional_call alone would ignore unknown names in silence
        weights = {f"module.{name}": value for name, value in params.items()}
        if self.training is None and (not _trains(self.module) or next(self.module.buffers(), None) is None):
            return functional_call(self._shell, weights, (fn,))
        with self.running():
            return functional_call(self._shell, weights, (fn,))

    def gradient(
        self, leaves: Mapping[str, Tensor], run: Callable[[nn.Module], tuple[Tensor, Aux]]
    ) -> tuple[tuple[Tensor, Aux], Sequence[Tensor]]:
        """``run(module)``, a pair (loss, aux), at leaves of autograd, and the loss's gradients in their order."""

        def differentiated(module: nn.Module) -> tuple[tuple[Tensor, Aux], Sequence[Tensor]]:
            loss, aux = run(module)
            return (loss, aux), tree.gradients(loss, leaves)

        # inside the swap of weights: checkpointed layers run again in backward and must meet the same weights
        return self.within(leaves, differentiated)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The module in the mode of ``training``, with copies of its buffers if a part of it is in train mode."""
        modes = {} if self.training is None else {m: m.training for m in self.module.modules()}
        try:
            for module in modes:
                if not (self.training and isinstance(module, _NormBase)):
                    module.training = bool(self.training)
            with _buffers_apart(self.module) if _trains(self.module) else nullcontext():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def in_training(self) -> "ModuleLoss":
        """The same loss with ``training=True``. Raises: ValueError for a loss made of another: take it of that one."""
        if type(self).within is not ModuleLoss.within:
            raise ValueError(f"in_training: a {type(self).__name__} runs the loss inside it: take in_training of that")
        own = copy.copy(self)
        own.training = True
        return own

    @property
    def module(self) -> nn.Module:
        """The module that the loss runs."""
        return self._shell.module

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError that lists names that the module does not have, and other shapes than its own."""
        if not isinstance(params, Mapping) or not all(isinstance(value, Tensor) for value in params.values()):
            raise ValueError(
                f"the parameters of a module are a flat dict, as dict(module.named_parameters()), got {_kind(params)}"
            )
        problems = [
            f"leaf {name!r} is not a parameter of the module"
            if name not in self._shapes
            else f"leaf {name!r} has shape {tuple(value.shape)}, the module's is {tuple(self._shapes[name])}"
            for name, value in params.items()
            if self._shapes.get(name) != value.shape
        ]
        if problems:
            raise ValueError("; ".join(problems) + ": take names and shapes from module.named_parameters()")

    def check_gradients(self) -> None:
        """Raises: ValueError for what acts on gradients of the module's own parameters alone: hooks, torch's DDP."""
        if torch.compiler.is_compiling():
            return
        ddp = nn.parallel.DistributedDataParallel
        if wrapped := [name or "the module" for name, m in self.module.named_modules() if isinstance(m, ddp)]:
            raise ValueError(
                f"{wrapped[0]} is a DistributedDataParallel, which averages gradients of its own parameters, not those "
                "of the tensors given to the loss: give the module inside it, and average by "
                "smat_fn.parallel.replicated(loss)"
            )
        hooked = [
            repr(name)
            for name, p in self.module.named_parameters()
            if p.requires_grad and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
        ]
        if hooked:
            raise ValueError(
                f"hooks on the gradients of parameters ({some_of(hooked)}) would not run, as "
                "the loss runs on the tensors given to it: remove them, and change gradients before the optimizer, "
                "optim.chain(lambda grads: ..., optimizer)"
            )


def _kind(params: Any) -> str:
    if not isinstance(params, Mapping):
        return f"a {type(params).__name__}"
    name, value = next((name, value) for name, value in params.items() if not isinstance(value, Tensor))
    return f"a {type(value).__name__} under {name!r}"


def takes_key(loss: Any) -> bool:
    """Whether a loss function takes a ``key``: a parameter of that name, which no partial has filled in."""
    if (said := getattr(loss, "takes_key", None)) is not None:
        return bool(said)
    if loss is None or "key" in getattr(loss, "keywords", ()):
        return False
    try:
        return "key" in inspect.signature(loss).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def reparametrised(loss_fn: LossFn, weights: Callable[[Params], Params]) -> LossFn:
    """``L(f(phi))`` as a loss of phi, f differentiable; a `ModuleLoss` stays one, so that checkpointed layers are safe.

    Args: weights: f, from the new parameters to those of ``loss_fn``.
    """
    if isinstance(loss_fn, ModuleLoss):
        return _Reparametrised(loss_fn, weights)

    def loss(params: Params, *args: Any, **options: Any) -> tuple[Tensor, Aux]:
        return loss_fn(weights(params), *args, **options)

    loss.takes_key = takes_key(loss_fn)  # type: ignore[attr-defined]
    return loss


def apply_fn(module: nn.Module) -> Callable[..., Any]:
    """``apply(params, *args, **kwargs)``: the module's forward on given weights, checked like `ModuleLoss`."""

    def apply(params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return run.within(params, lambda inner: inner(*args, **kwargs))

    run = ModuleLoss(module, lambda inner, *args: inner(*args))
    return apply


class WrappedLoss(ModuleLoss):
    """The loss of another `ModuleLoss`, run at other weights or counted otherwise: what is not changed is its own."""

    def __init__(self, inner: ModuleLoss, *, training: bool | None = None) -> None:
        super().__init__(inner.module, inner.loss, training=training)
        self.inner = inner

    def loss(self, module: nn.Module, *args: Any, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        """The loss of the wrapped `ModuleLoss`."""
        return self.inner.loss(module, *args, key=key)

    def wants_key(self) -> bool:
        """Whether the wrapped loss takes a key."""
        return self.inner.wants_key()

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's parameters are ``params``."""
        return self.inner.within(params, fn)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss function inside."""
        self.inner.check(params)


class _Reparametrised(WrappedLoss):
    """The module runs on a function of the parameters."""

    def __init__(self, inner: ModuleLoss, weights: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self._weights = weights

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's weights are that function's value."""
        return self.inner.within(self._weights(params), fn)

    def check(self, params: Mapping[str, Tensor]) -> None:
        """Raises: ValueError as the loss function inside."""
        self.inner.check(self._weights(params))


def _trains(module: nn.Module) -> bool:
    return any(part.training for part in module.modules())


@contextmanager
def _seeded(key: Tensor, module: nn.Module) -> Iterator[None]:
    """torch's generators seeded from a key while the module runs, and set back."""
    if torch.compiler.is_compiling():
        if any(isinstance(part, _DropoutNd) and part.training and part.p for part in module.modules()):
            raise ValueError("dropout in a compiled step would have no key: compile the module instead of the step")
        yield
        return
    if any(map(batched, layers(key))):  # vmap itself refuses random operations
        yield
        return
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    states, seed = [generator.get_state() for generator in generators], int(key[0])
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _buffers_apart(module: nn.Module) -> Iterator[None]:
    """Copies in the place of the buffers. Raises: ValueError for modules that write into those that are their state."""
    norms = [
        name
        for name, m in module.named_modules()
        if isinstance(m, _NormBase) and m.training and m.running_mean is not None
    ]
    if norms:
        raise ValueError(_kept([f"module {name!r}" for name in norms], "in train mode would write running statistics"))
    originals = {owner: dict(owner._buffers) for owner in module.modules() if owner._buffers}
    copies: dict[int, Tensor] = {}
    try:
        for owner, buffers in originals.items():
            for name, buffer in buffers.items():
                if buffer is not None:
                    owner._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        versions = {id(b): _version(b) for b in copies.values()}
        yield
        written = [
            f"{prefix}.{name}".lstrip(".")
            for prefix, owner in module.named_modules()
            for name, buffer in originals.get(owner, {}).items()
            if buffer is not None
            and name not in owner._non_persistent_buffers_set
            and ((now := owner._buffers.get(name)) is not copies[id(buffer)] or _version(now) != versions[id(now)])
        ]
        if written:
            raise ValueError(_kept(written, "are buffers that the forward pass writes"))
    finally:
        for owner, buffers in originals.items():
            owner._buffers.update(buffers)


def _version(tensor: Tensor) -> int:
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _kept(names: list[str], why: str) -> str:
    return (
        f"{some_of(names)} {why}, but a loss never changes its module: put these parts in eval mode (module.eval()), "
        "or give a loss that passes buffers as arguments (torch.func.functional_call) and returns them in aux"
    )


class _Shell(nn.Module):
    """Runs any function of the module where ``functional_call`` has put the weights in place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, fn: Callable[[nn.Module], Any]) -> Any:
        return fn(self.module)
