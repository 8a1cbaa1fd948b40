"""Adam and AdamW: functional wrappers of ``torch.optim.adamw.adamw``, which without weight decay is Adam."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from .. import tree
from ..execution import no_grad, opaque, refuse_donation, transformed
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
    return _build(lr, betas, eps, 0.0, foreach, fused)


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
        return partition(decays, _build(lr, betas, eps, weight_decay, foreach, fused), rest)
    return _build(lr, betas, eps, weight_decay, foreach, fused)


def _build(
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
    numbers = _Numbers(*betas, eps, weight_decay)

    def init(params: Params) -> AdamState:
        tree.check_floating(tree.flatten(params), "params")
        moments = (tree.tree_map(torch.zeros_like, params) for _ in range(2))
        return AdamState(tree.counter(0, params), *moments)

    @no_grad
    def update(grads: Params, state: AdamState, params: Params, *, donate: bool = False) -> tuple[Params, AdamState]:
        refuse_donation("adam", donate)
        tree.check_kind(state, "step", "mu", "nu")
        if transformed() or isinstance(state.step, Tensor):
            return _pure(grads, state, params, schedule(state.step), numbers, foreach, fused)
        own: Callable[[Any], Any] = (lambda t: t) if donate else tree.clone
        params, mu, nu = own(params), own(state.mu), own(state.nu)
        leaves, flat_grads = tree.flatten(params), tree.flatten(grads)
        tree.check_gradients(leaves, flat_grads)
        flat_mu, flat_nu = tree.flatten(mu), tree.flatten(nu)
        tree.check_state(leaves, mu=flat_mu, nu=flat_nu)
        rate = schedule(state.step) if callable(lr) else lr
        own_leaves, means, squares = list(leaves.values()), [flat_mu[p] for p in leaves], [flat_nu[p] for p in leaves]
        counts = _counts(state.step, own_leaves, fused)
        _write(
            own_leaves,
            [flat_grads[p] for p in leaves],
            means,
            squares,
            counts,
            rate,
            numbers,
            foreach=foreach,
            fused=fused,
        )
        return params, AdamState(state.step + 1, mu, nu)

    return Optimizer(init, update)


class _Numbers(NamedTuple):
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def _write(
    params: list[Tensor],
    grads: Sequence[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    counts: list[Tensor],
    lr: float | Tensor,
    numbers: _Numbers,
    *,
    foreach: bool | None,
    fused: bool | None,
    capturable: bool = False,
) -> None:
    """torch's update, in place."""
    torch_adamw(
        params,
        list(map(_laid_out, grads, params)),
        mu,
        nu,
        [],
        counts,
        foreach=foreach,
        capturable=capturable,
        differentiable=False,
        fused=fused,
        has_complex=False,
        amsgrad=False,
        lr=lr,
        maximize=False,
        **numbers._asdict(),
    )


def _counts(step: int, leaves: Sequence[Tensor], fused: bool | None) -> list[Tensor]:
    """A counter a tensor, since torch increments every one in place: entries of one vector a device.

    float32 on these devices, whatever torch's defaults are: bfloat16 does not count beyond 256.
    """
    devices = [leaf.device if fused else torch.device("cpu") for leaf in leaves]
    rows = {
        device: iter(torch.full((number,), float(step), dtype=torch.float32, device=device).unbind())
        for device, number in Counter(devices).items()
    }
    return [next(rows[device]) for device in devices]


@torch.library.custom_op("smat_fn::adam", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _operation(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    step: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    foreach: bool | None,
    fused: bool | None,
) -> list[Tensor]:
    """Parameters, first and second moments after an update, in one list: an operation of compiled code.

    Bit-identical to ``update`` where step and lr are on the CPU.
    """
    made = _new(params, mu, nu)
    torch._foreach_copy_(made, [*params, *mu, *nu])
    devices: dict[torch.device, list[int]] = {}
    for i, leaf in enumerate(params):
        devices.setdefault(leaf.device, []).append(i)
    numbers, count = _Numbers(beta1, beta2, eps, weight_decay), len(params)
    for device, rows in devices.items():
        new, mean, square = ([made[i + part * count] for i in rows] for part in range(3))
        own = new, [grads[i] for i in rows], mean, square
        if step.is_cpu and lr.is_cpu:
            _write(*own, _counts(int(step), new, fused), float(lr), numbers, foreach=foreach, fused=fused)
        else:
            _write_unread(*own, step.to(device), lr.to(device), numbers)
    return made


def _write_unread(
    params: list[Tensor],
    grads: list[Tensor],
    mu: list[Tensor],
    nu: list[Tensor],
    step: Tensor,
    lr: Tensor,
    numbers: _Numbers,
) -> None:
    """`_write` by torch's fused kernel, which reads step and rate on the device: the host does not wait for them."""
    counts = list(step.float().repeat(len(params)).unbind())
    _write(params, grads, mu, nu, counts, lr.float(), numbers, foreach=False, fused=True, capturable=True)


@_operation.register_fake
def _(params, grads, mu, nu, *rest):  # type: ignore[no-untyped-def]
    return _new(params, mu, nu)


def _new(params: list[Tensor], *moments: list[Tensor]) -> list[Tensor]:
    """Memory of one layout for a parameter and its moments, which torch's fused kernels need."""
    return [
        torch.empty_like(p, dtype=m.dtype) for part in (params, *moments) for p, m in zip(params, part, strict=True)
    ]


def _pure(
    grads: Params,
    state: AdamState,
    params: Params,
    lr: float | Tensor,
    numbers: _Numbers,
    foreach: bool | None,
    fused: bool | None,
) -> tuple[Params, AdamState]:
    """An update without a write, and with steps that are tensors: in compiled code one operation for all leaves."""
    leaves, flat_grads = tree.flatten(params), tree.flatten(grads)
    tree.check_gradients(leaves, flat_grads)
    old_mu, old_nu = tree.flatten(state.mu), tree.flatten(state.nu)
    tree.check_state(leaves, mu=old_mu, nu=old_nu)
    trees = [[flat[path] for path in leaves] for flat in (leaves, flat_grads, old_mu, old_nu)]
    every = [leaf for own in trees for leaf in own] + [t for t in (state.step, lr) if isinstance(t, Tensor)]
    if leaves and opaque(*every) and all(type(leaf) in tree.PLAIN for leaf in every):
        step, rate = (
            t if isinstance(t, Tensor) else torch.full((), t, dtype=dtype, device="cpu")
            for t, dtype in ((state.step, torch.int64), (lr, torch.float64))
        )
        made = torch.ops.smat_fn.adam(*trees, step, rate, *numbers, foreach, fused)
        count = len(leaves)
        flat = [dict(zip(leaves, made[part * count : (part + 1) * count], strict=True)) for part in range(3)]
    else:
        flat = _differentiable(leaves, trees[1:], state.step + 1, lr, numbers)
    moved, means, squares = (tree.unflatten(params, own) for own in flat)
    return moved, AdamState(tree.counter(state.step + 1, params), means, squares)


def _differentiable(
    leaves: Mapping[str, Tensor],
    given: Sequence[Sequence[Tensor]],
    step: int | Tensor,
    lr: float | Tensor,
    numbers: _Numbers,
) -> list[dict[str, Tensor]]:
    """Parameters and moments by the same arithmetic, differentiable, in lr too. Args: given: gradients and moments."""
    *betas, eps, weight_decay = numbers
    corrections = [1 - beta ** (step.double() if isinstance(step, Tensor) else step) for beta in betas]
    size, root = lr / corrections[0], corrections[1] ** 0.5
    moved: dict[str, Tensor] = {}
    mu: dict[str, Tensor] = {}
    nu: dict[str, Tensor] = {}
    for (path, leaf), *others in zip(leaves.items(), *given, strict=True):
        # 0-d leaves as (1,): a float64 rate would promote them, and so do torch's forward derivatives by float numbers
        theta, grad, mean, square = (t if t.ndim else t.reshape(1) for t in (leaf, *others))
        decayed = theta * (1 - lr * weight_decay) if weight_decay else theta
        mean = torch.lerp(mean, grad, 1 - betas[0])
        square = (square * betas[1]).addcmul(grad, grad, value=1 - betas[1])
        found = _stepped(decayed, mean, tree.root(square) / root + eps, size), mean, square
        moved[path], mu[path], nu[path] = found if leaf.ndim else (t.reshape(()) for t in found)
    return [moved, mu, nu]


def _stepped(param: Tensor, mean: Tensor, denominator: Tensor, size: float | Tensor) -> Tensor:
    if not isinstance(size, Tensor):
        return torch.addcdiv(param, mean, denominator, value=-size)
    wide = tree.compute_dtype(param)
    size = size.to(param.device, wide)
    return (param.to(wide) - size * (mean.to(wide) / denominator.to(wide))).to(param.dtype)


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    # torch's fused kernels walk a gradient with the strides of its parameter
    return grad if grad.stride() == param.stride() else torch.empty_like(param).copy_(grad)
