"""Data parallelism: every process holds all weights and a share of the batch; gradients are averaged."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import random, tree
from ..grad import ModuleLoss, keyed, loss_and_aux, reparametrised, takes_key
from ..grad.modules import WrappedLoss
from ..mat import smat
from ..mat.simulated import Composed
from ..mat.smat import Schedule
from ..simulation import Draw, simulate
from ..types import Aux, Batch, LossFn, Method, Micro, Optimizer, Params, Where

BUCKET = 1 << 24  # numbers reduced together where they are reduced after backward, 64 MiB of float32
BUCKETS_MB = [1, 25]  # of gradients reduced while backward runs: the first leaves', then those of all others
# without sizes of its own, torch's reducer has one bucket in its first backward pass, and each of ours is a first one
OVERLAPS = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel).parameters  # since torch 2.13


_NOT_SHARED = (
    "not that of parallel.share, which knows the share of each process in the average: give "
    "parallel.share(split_rows(batch, parts), rank=rank, size=size)"
)


class Share(NamedTuple):
    """A micro-batch of one process, and its factor in the average over the whole batch: the batch of a `Micro`."""

    batch: Batch
    factor: float


def share(parts: Sequence[Micro], *, rank: int, size: int) -> list[Micro]:
    """The micro-batches of one process, as many for each: those at ``rank``, ``rank + size``, ..., each a `Share`.

    The mean over processes and shares of ``factor * loss`` is ``sum_i w_i loss_i / sum_i w_i`` over all parts, w the
    weights of `Micro`. Processes without a part get one of factor 0, since all of them take part in every average.

    Raises: ValueError for parts other than a list of `Micro` of positive weight, and for a rank outside of the group.
    """
    if not 0 <= rank < size:
        raise ValueError(f"share: rank is {rank}, must be in [0, {size}), the number of processes")
    if not parts or not all(isinstance(part, Micro) and part.weight > 0 for part in parts):
        raise ValueError("share: parts must be a list of Micro(batch, weight) of positive weight: see split_rows")
    each = -(-len(parts) // size)
    total = sum(part.weight for part in parts)
    own = [parts[i] if i < len(parts) else Micro(parts[0].batch, 0.0) for i in range(rank, each * size, size)]
    return [Micro(Share(part.batch, part.weight * each * size / total)) for part in own]


def check_shared(parts: Any) -> None:
    """Raises: ValueError for micro-batches that are not those of `share`."""
    if not (
        isinstance(parts, (list, tuple)) and parts and all(isinstance(getattr(p, "batch", 0), Share) for p in parts)
    ):
        raise ValueError(f"the batch of a process is {_NOT_SHARED}")


def replicated(loss_fn: LossFn) -> LossFn:
    """The loss averaged over the processes of the default group, its gradient too: takes a `Share` as its batch.

    For any method with the "autograd" engine. Gradients are summed in float32 (float64 for float64 leaves), a bucket at
    a time, and rounded once; all processes get bit-identical ones. Those of a `ModuleLoss` are on their way while the
    backward pass runs (torch's DistributedDataParallel, 2.13 and later), those of other functions and of losses made of
    this one are reduced when it has ended. aux is local, and so is the key of a loss that takes one.
    """
    if isinstance(loss_fn, ModuleLoss):
        return _AveragedModule(loss_fn, training=loss_fn.training)

    def loss(params: Params, one: Share, **options: Tensor) -> tuple[Tensor, Aux]:
        _check_share(one)
        own = {name: of_this_process(key) for name, key in options.items()}
        return _averaged(*loss_and_aux(loss_fn(_averaging(params), one.batch, **own)), one.factor)

    loss.takes_key = takes_key(loss_fn)  # type: ignore[attr-defined]
    return loss


def independent_smat(
    loss_fn: LossFn, optimizer: Optimizer, base: Params, *, where: Where | None = None, **options: Any
) -> Method:
    r"""SMAT in which process r draws for itself: the gradient ``1/R sum_r alpha_r m_r (.) grad L_r(theta~_r)``.

    The expectation is that of one shared draw; the variance due to the draw is divided by R. Each
    process draws with ``fold_in(step key, r)``; parameters and norms stay equal in all of them.

    Args:
        options: as in `smat_fn.mat.smat.build`, without offload and sigma_of. Batches are those of `share`.
    """
    check_base = tree.unchanged(base)

    def at(drawn: Draw) -> LossFn:
        check_base()
        inside = reparametrised(loss_fn, lambda params: simulate(params, base, drawn, where=where))
        return keyed(replicated(inside))

    return smat.build_from(
        replicated(loss_fn),
        Composed(at, options.get("engine", "autograd")),
        optimizer,
        base,
        where=where,
        schedule=partial(_OfProcess, rank=dist.get_rank()),
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class _OfProcess(Schedule):
    """Draws of a process of its own."""

    rank: int

    def key_of(self, key: Tensor, step: int | Tensor) -> Tensor:
        return random.fold_in(super().key_of(key, step), self.rank)


class _AveragedModule(WrappedLoss):
    """A module's loss on a share, averaged over the processes."""

    def loss(self, module: nn.Module, *args: Share, key: Tensor | None = None) -> tuple[Tensor, Aux]:
        (one,) = args
        _check_share(one)
        own = None if key is None else of_this_process(key)
        return _averaged(*loss_and_aux(self.inner.loss(module, one.batch, key=own)), one.factor)

    def within(self, params: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> Any:
        """``fn(module)`` while the module's weights are params, whose gradients are averaged after backward."""
        return self.inner.within(_averaging(params), fn)

    def gradient(
        self, leaves: Mapping[str, Tensor], run: Callable[[nn.Module], tuple[Tensor, Aux]]
    ) -> tuple[tuple[Tensor, Aux], Sequence[Tensor]]:
        """Loss, aux and mean gradients, reduced while the backward pass runs."""
        if not OVERLAPS:
            return super().gradient(leaves, run)
        own = {path: nn.Parameter(leaf) for path, leaf in leaves.items()}

        def differentiated(module: nn.Module) -> tuple[tuple[Tensor, Aux], Sequence[Tensor]]:
            loss, aux = run(module)
            return (loss, aux), _mean_gradients(loss, list(own.values()))

        return self.inner.within(own, differentiated)


def _check_share(one: Any) -> None:
    if not isinstance(one, Share):
        raise ValueError(f"the batch is {_NOT_SHARED}")


def _mean_gradients(loss: Tensor, leaves: list[nn.Parameter]) -> list[Tensor]:
    """Gradients averaged by torch's DistributedDataParallel, which starts on a bucket when its gradients are complete.

    Its reducer is made anew for every gradient, between forward and backward: it hangs on these leaves, its buckets are
    the memory of the gradients that come back, and nothing of it stays.
    """
    engine = DistributedDataParallel(
        _Leaves(leaves), init_sync=False, gradient_as_bucket_view=True, bucket_cap_mb_list=BUCKETS_MB
    )
    engine.register_comm_hook(None, _mean_of_bucket)
    torch.autograd.backward(engine(loss), inputs=leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _mean_of_bucket(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A comm hook: torch's own sums in the gradients' dtype."""
    flat, size = bucket.buffer(), dist.get_world_size()

    def rounded(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return flat.copy_(done.value()[0].div_(size))

    return dist.all_reduce(flat.to(tree.compute_dtype(flat)), async_op=True).get_future().then(rounded)


class _Leaves(nn.Module):
    """Leaves as the parameters of a module, whose forward pass takes a loss and touches all of them."""

    def __init__(self, leaves: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.leaves = nn.ParameterList(leaves)

    def forward(self, loss: Tensor) -> Tensor:
        return _Touched.apply(loss, *self.leaves)


class _Touched(torch.autograd.Function):
    """The loss as a function of all leaves: those that it does not touch are complete at once, without a gradient.

    What a loss touches may differ from process to process, while buckets are complete only with all their leaves.
    """

    @staticmethod
    def forward(loss: Tensor, *leaves: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.leaves = len(inputs) - 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(None,) * ctx.leaves


def of_this_process(key: Tensor) -> Tensor:
    """A loss's key here: processes see other examples, with randomness of their own."""
    return random.fold_in(key, f"rank:{dist.get_rank()}")


def _averaged(loss: Tensor, aux: Aux, factor: float) -> tuple[Tensor, Aux]:
    return _MeanLoss.apply(loss * factor), aux


def _averaging(params: Params) -> Params:
    leaves = tree.flatten(params)
    return tree.unflatten(params, dict(zip(leaves, _MeanGradient.apply(*leaves.values()), strict=True)))


class _MeanLoss(torch.autograd.Function):
    """The mean over processes; the gradient of each is its own, `_MeanGradient` averages those."""

    @staticmethod
    def forward(loss: Tensor) -> Tensor:
        total = loss.detach().to(tree.compute_dtype(loss), copy=True)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).to(loss.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _MeanGradient(torch.autograd.Function):
    """The identity; the gradient is the mean over processes."""

    @staticmethod
    def forward(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in leaves)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        means: list[Tensor | None] = [None] * len(grads)
        groups: dict[Any, list[int]] = {}
        for i, grad in enumerate(grads):
            groups.setdefault((grad.device, tree.compute_dtype(grad)), []).append(i)
        for (_, kind), members in groups.items():
            for bucket in _buckets(members, [grads[i].numel() for i in members]):
                flat = torch.cat([grads[i].reshape(-1).to(kind) for i in bucket])
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                pieces = flat.split([grads[i].numel() for i in bucket])
                for i, piece in zip(bucket, pieces, strict=True):
                    means[i] = piece.view(grads[i].shape).to(grads[i].dtype)
        return tuple(mean for mean in means if mean is not None)


def _buckets(members: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Members in order, in runs of at most `BUCKET` numbers, or of one member."""
    buckets: list[list[int]] = [[]]
    filled = 0
    for member, size in zip(members, sizes, strict=True):
        if buckets[-1] and filled + size > BUCKET:
            buckets.append([])
            filled = 0
        buckets[-1].append(member)
        filled += size
    return buckets
