"""Adam and AdamW: functional wrappers of ``torch.optim.adam.adam`` and ``torch.optim.adamw.adamw``."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from .. import tree
from ..execution import no_grad, refuse_donation, transformed
from ..types import Optimizer, Params, PerStep, Where
from .partition import partition
from .schedules import schedule_of


class AdamState(NamedTuple):
    """State of Adam and AdamW.

    Attributes:
        step: updates done; 0-d int64 inside vmap and torch.compile.
        mu: first moments, of the shapes and dtypes of params.
        nu: second moments, of the shapes and dtypes of params.
    """

    step: int | Tensor
    mu: Params
    nu: Params


def adam(
    lr: float | PerStep,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> Optimizer:
    r"""Adam, bit-identical to ``torch.optim.Adam`` with the same arguments.

    ``theta - lr * mu_hat / (sqrt(nu_hat) + eps)``.

    Args:
        lr: learning rate >= 0, or a schedule ``step -> lr`` with steps counted from 0.
        betas: decay rates of the first and second moments, each in [0, 1).
        eps: added to the denominator, >= 0.
        foreach: use torch's multi-tensor implementation; None: torch decides.
        fused: use torch's fused kernel; None: torch decides.

    Returns:
        An `Optimizer` whose state is an `AdamState`; moments have the shapes and dtypes of params.

    Raises:
        ValueError: a value is out of range; in ``update`` for a gradient of another dtype than its parameter.

    Source:
        Kingma and Ba, 2015.

    Example:
        >>> optimizer, params = adam(1e-3), {"w": torch.ones(2)}
        >>> params, state = optimizer.update({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> params["w"], state.step
        (tensor([0.9990, 0.9990]), 1)
    """
    return _build(torch_adam, lr, betas, eps, 0.0, foreach, fused)


def adamw(
    lr: float | PerStep,
    *,
    weight_decay: float,
    decays: Where | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    foreach: bool | None = None,
    fused: bool | None = None,
) -> Optimizer:
    r"""AdamW, bit-identical to ``torch.optim.AdamW`` with the same arguments.

    ``theta (1 - lr * weight_decay) - lr * mu_hat / (sqrt(nu_hat) + eps)``.

    Args:
        lr: as `adam`, like all arguments that are not listed.
        weight_decay: decoupled weight decay >= 0; a step shrinks weights by the factor 1 - lr * weight_decay.
        decays: predicate ``(path, tensor) -> bool`` on the leaves that decay, such as `smat_fn.where.matrices` (no
            norms, no biases); None: all of them.

    Returns:
        An `Optimizer`, as `adam`; with ``decays`` its state is a `PartitionState` of two `AdamState`.

    Raises:
        ValueError: a value is out of range.

    Source:
        Loshchilov and Hutter, 2019.
    """
    if decays is not None:
        rest = adamw(lr, weight_decay=0.0, betas=betas, eps=eps, foreach=foreach, fused=fused)
        return partition(decays, _build(torch_adamw, lr, betas, eps, weight_decay, foreach, fused), rest)
    return _build(torch_adamw, lr, betas, eps, weight_decay, foreach, fused)


def _build(
    function: Callable[..., None],
    lr: float | PerStep,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None,
) -> Optimizer:
    two = isinstance(betas, (tuple, list)) and len(betas) == 2
    problems = [] if two else [f"betas are {betas}: give two numbers"]
    problems += [f"beta {b} is outside [0, 1)" for b in betas if not 0 <= b < 1] if two else []
    if foreach and isinstance(lr, Tensor):  # torch's own error comes with the first step
        problems.append("lr is a tensor, which foreach=True does not take: give a number, or leave foreach out")
    schedule = schedule_of(lr, problems, eps=eps, weight_decay=weight_decay)

    def init(params: Params) -> AdamState:
        tree.check_floating(tree.flatten(params), "params")
        moments = (tree.tree_map(torch.zeros_like, params) for _ in range(2))
        return AdamState(tree.counter(0, params), *moments)

    @no_grad
    def update(grads: Params, state: AdamState, params: Params, *, donate: bool = False) -> tuple[Params, AdamState]:
        refuse_donation("adam", donate)
        tree.check_kind(state, "step", "mu", "nu")
        if transformed() or isinstance(state.step, Tensor):
            return _pure(grads, state, params, schedule(state.step), betas, eps, weight_decay)
        own: Callable[[Any], Any] = (lambda t: t) if donate else tree.clone
        params, mu, nu = own(params), own(state.mu), own(state.nu)
        leaves, flat_grads = tree.flatten(params), tree.flatten(grads)
        tree.check_gradients(leaves, flat_grads)
        flat_mu, flat_nu = tree.flatten(mu), tree.flatten(nu)
        tree.check_state(leaves, mu=flat_mu, nu=flat_nu)
        counts = _counts(state.step, [leaf.device if fused else torch.device("cpu") for leaf in leaves.values()])
        function(
            list(leaves.values()),
            [_laid_out(flat_grads[p], leaf) for p, leaf in leaves.items()],
            [flat_mu[p] for p in leaves],
            [flat_nu[p] for p in leaves],
            [],
            counts,
            foreach=foreach,
            capturable=False,
            differentiable=False,
            fused=fused,
            has_complex=False,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=schedule(state.step) if callable(lr) else lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return params, AdamState(state.step + 1, mu, nu)

    return Optimizer(init, update)


def _counts(step: int, devices: Sequence[torch.device | None]) -> list[Tensor]:
    """A counter a tensor, since torch increments every one in place: entries of one vector a device.

    float32 on these devices, whatever torch's defaults are: bfloat16 does not count beyond 256.
    """
    rows = {
        device: iter(torch.full((number,), float(step), dtype=torch.float32, device=device).unbind())
        for device, number in Counter(devices).items()
    }
    return [next(rows[device]) for device in devices]


def _pure(
    grads: Params,
    state: AdamState,
    params: Params,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[Params, AdamState]:
    """The same arithmetic without a write: differentiable, in lr too, and with steps that are tensors."""
    leaves, flat_grads = tree.flatten(params), tree.flatten(grads)
    tree.check_gradients(leaves, flat_grads)
    old_mu, old_nu = tree.flatten(state.mu), tree.flatten(state.nu)
    tree.check_state(leaves, mu=old_mu, nu=old_nu)
    step = state.step + 1
    corrections = [1 - beta ** (step.double() if isinstance(step, Tensor) else step) for beta in betas]
    size, root = lr / corrections[0], corrections[1] ** 0.5
    moved, mu, nu = {}, {}, {}
    for path, leaf in leaves.items():
        # 0-d leaves as (1,): a float64 rate would promote them, and so do torch's forward derivatives by float numbers
        own = [t if t.ndim else t.reshape(1) for t in (leaf, flat_grads[path], old_mu[path], old_nu[path])]
        theta, grad, mean, square = own
        decayed = theta * (1 - lr * weight_decay) if weight_decay else theta
        mean = torch.lerp(mean, grad, 1 - betas[0])
        square = (square * betas[1]).addcmul(grad, grad, value=1 - betas[1])
        found = _stepped(decayed, mean, tree.root(square) / root + eps, size), mean, square
        moved[path], mu[path], nu[path] = found if leaf.ndim else (t.reshape(()) for t in found)
    means, squares = tree.unflatten(params, mu), tree.unflatten(params, nu)
    return tree.unflatten(params, moved), AdamState(tree.counter(step, params), means, squares)


def _stepped(param: Tensor, mean: Tensor, denominator: Tensor, size: float | Tensor) -> Tensor:
    if not isinstance(size, Tensor):
        return torch.addcdiv(param, mean, denominator, value=-size)
    wide = tree.compute_dtype(param)
    size = size.to(param.device, wide)
    return (param.to(wide) - size * (mean.to(wide) / denominator.to(wide))).to(param.dtype)


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    # torch's fused kernels walk a gradient with the strides of its parameter
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
