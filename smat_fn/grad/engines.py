"""`value_and_grad`: the gradient of a loss function, with two engines behind one signature."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from .. import random, tree
from ..errors import some_of
from ..execution import in_loss, transformed
from ..types import Aux, Batch, Engine, LossFn, Params
from .master_weights import MasterWeights, with_master_weights
from .modules import ModuleLoss, takes_key


def value_and_grad(loss_fn: LossFn, *, engine: Engine = "func") -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    """``((loss, aux), grads)`` of ``loss_fn(params, *args) -> (loss, aux)`` in its first argument.

    ``engine="func"`` is ``torch.func.grad_and_value``: composable with every torch.func transform. ``"autograd"`` is
    ``torch.autograd.grad`` on fresh leaves: bit-identical to ``loss.backward()``, about half the memory, works with
    gradient checkpointing (non-reentrant) when ``loss_fn`` is a `ModuleLoss`, and under ``torch.inference_mode``. They
    agree within rounding.

    Returns: a function of (params, *args), and of ``key`` for a loss that takes one; grads have the structure, shapes
        and dtypes of params, zero for leaves that the loss does not touch. With "autograd", loss, grads and tensors of
        aux (any pytree) are detached. With "func" they are detached from this gradient only; outer transforms still
        differentiate through them.
    Raises: ValueError for an unknown engine, for a `ModuleLoss` whose module is torch's DDP or has hooks on gradients,
        for leaves that are not floating-point tensors, for a loss function that does not return a pair (0-d loss, aux),
        from "func" for gradient checkpointing, and from "autograd" for a loss without a gradient, such as one computed
        under ``torch.no_grad``.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"value_and_grad: engine {engine!r} is unknown, choose one of {get_args(Engine)}")
    run = _func_engine(loss_fn) if engine == "func" else _autograd_engine(loss_fn)
    return _checked(loss_fn, run) if isinstance(loss_fn, ModuleLoss) else run


def _checked(loss_fn: ModuleLoss, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the error of `ModuleLoss.check_gradients` now, and where a hook is registered later."""
    loss_fn.check_gradients()
    # weak, since FSDP2 replaces parameters; the whole check would take longer than some modules
    watched = [weakref.ref(p) for p in loss_fn.module.parameters()]

    def checked(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and any(map(_hooked, watched)):
            loss_fn.check_gradients()
        return run(*args, **options)

    return checked


def _hooked(parameter: "weakref.ref[nn.Parameter]") -> bool:
    p: Any = parameter()
    return p is not None and bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def _func_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any, **options: Any) -> tuple[tuple[Tensor, Aux], Params]:
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        parts: list[Any] = []

        def tensors_apart(leaves: dict[str, Tensor], *args: Any) -> tuple[Tensor, list[Tensor]]:
            with _without_hooks():
                loss, aux = loss_and_aux(loss_fn(tree.unflatten(params, leaves), *args, **options))
            parts[:] = pytree.tree_flatten(aux)
            return loss, [leaf for leaf in parts[0] if isinstance(leaf, Tensor)]

        # torch refuses leaves that are not tensors, in params and in aux
        try:
            grads, (loss, tensors) = torch.func.grad_and_value(tensors_apart, has_aux=True)(flat, *args)
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
            raise ValueError(_NO_HOOKS) from error
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in parts[0]]
        aux = pytree.tree_unflatten(leaves, parts[1])
        return (loss, aux), tree.unflatten(params, grads)

    return run


_NO_HOOKS = (
    "torch.func runs no hooks on saved tensors, which gradient checkpointing uses: take engine='autograd', or switch "
    "checkpointing off"
)


def _without_hooks() -> AbstractContextManager[None]:
    """Inside, torch raises `_NO_HOOKS` for hooks on saved tensors, in place of its own text."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.disable_saved_tensors_hooks(_NO_HOOKS)


def _autograd_engine(loss_fn: LossFn) -> Callable[..., tuple[tuple[Tensor, Aux], Params]]:
    def run(params: Params, *args: Any, **options: Any) -> tuple[tuple[Tensor, Aux], Params]:
        if transformed():
            raise ValueError("engine 'autograd' cannot be transformed or compiled: take engine='func'")
        flat = tree.flatten(params)
        tree.check_floating(flat, "params")
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else nullcontext(), torch.enable_grad(), in_loss():
            leaves = {path: _recorded(leaf).detach().requires_grad_() for path, leaf in flat.items()}
            before = tree.versions(leaves)
            if inference:
                args = pytree.tree_map_only(Tensor, _recorded, args)

            if isinstance(loss_fn, ModuleLoss):
                (loss, aux), grads = loss_fn.gradient(
                    leaves, lambda module: loss_and_aux(loss_fn.loss(module, *args, **options))
                )
            else:
                loss, aux = loss_and_aux(loss_fn(tree.unflatten(params, leaves), *args, **options))
                with _refusing_recomputation():
                    grads = tree.gradients(loss, leaves, touched=True)
            if changed := tree.written(leaves, before):
                raise ValueError(
                    f"the loss wrote into the parameters given to it ({some_of(changed)}), which are the state's own: "
                    "leave them as they are; an nn.Embedding writes unless max_norm is None"
                )
            value = loss.detach(), detached(aux)
        return value, tree.unflatten(params, dict(zip(leaves, grads, strict=True)))

    return run


@contextmanager
def _refusing_recomputation() -> Iterator[None]:
    """Raises: ValueError for layers that the backward pass runs again, where weights given to the loss are gone."""

    def refuse(module: nn.Module, _: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1  # in this thread, of a backward pass
        if inside and any(p.requires_grad for p in module.parameters()):
            raise ValueError(
                f"gradient checkpointing runs a {type(module).__name__} again in the backward pass, at the module's "
                "own weights instead of those given to the loss: give value_and_grad or the method a "
                "smat_fn.grad.ModuleLoss(module, loss) itself, or switch checkpointing off"
            )

    with register_module_forward_pre_hook(refuse):
        yield


def _recorded(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that autograd cannot save since it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


class Keyed(NamedTuple):
    """A batch with the parts of its loss's key.

    Attributes:
        batch: the batch of the loss.
        run_key: int64 (2,).
        step: the step, counted from 0.
        part: number of the micro-batch in its step.
    """

    batch: Batch
    run_key: Tensor
    step: int | Tensor
    part: int

    @property
    def key(self) -> Tensor:
        """``fold_in(fold_in(run key, step), "loss:<part>")``: one for all passes of a step over this micro-batch."""
        step = self.step.to(self.run_key.device) if isinstance(self.step, Tensor) else self.step
        return random.fold_in(random.fold_in(self.run_key, step), f"loss:{self.part}")


def keyed(loss_fn: LossFn) -> LossFn:
    """The loss as a loss of `Keyed` batches: one that takes a ``key`` gets theirs, made where it is needed."""
    if isinstance(loss_fn, MasterWeights):
        return with_master_weights(keyed(loss_fn.loss_fn), loss_fn.dtype)
    if isinstance(loss_fn, ModuleLoss):
        own, inner = copy.copy(loss_fn), loss_fn

        def loss(module: nn.Module, one: Keyed, **_: Any) -> tuple[Tensor, Aux]:
            return inner.loss(module, one.batch, key=one.key if inner.wants_key() else None)

        own.loss = loss  # type: ignore[method-assign, assignment]
        return own
    if takes_key(loss_fn):
        return lambda params, one: loss_fn(params, one.batch, key=one.key)
    return lambda params, one: loss_fn(params, one.batch)


def detached(aux: Aux) -> Aux:
    """aux with its tensors, in any pytree, off the graph."""
    return pytree.tree_map_only(Tensor, Tensor.detach, aux)


def loss_and_aux(result: Any) -> tuple[Tensor, Aux]:
    """Loss and aux that a loss function returned. Raises: ValueError unless it is a pair of a 0-d loss and anything."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise ValueError(f"the loss function returned {got}: return (loss, aux), or (loss, None)")
    loss, aux = result
    if not isinstance(loss, Tensor) or loss.ndim:
        got = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
        raise ValueError(f"the loss {got}: must be a 0-d tensor, take its mean or sum")
    return loss, aux
