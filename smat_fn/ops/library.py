"""The registered operations ``smat_fn::simulate`` and ``smat_fn::reweight``, on lists of leaves, and donated variants.

They have no autograd formulas of their own: `faces` puts those around them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import errors
from . import chunked, launch
from .plan import Numbers


@torch.library.custom_op("smat_fn::simulate_into", mutates_args=("out",))
def simulate_into(
    params: list[Tensor],
    base: list[Tensor],
    out: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    sigma: Tensor,
    quantiles: Tensor,
    masked: list[bool],
    starts: list[int],
) -> None:
    """`smat_fn.simulate` written into ``out``: contiguous leaves of params' dtypes, may be params or base.

    Raises: ValueError that lists the leaves of out that cannot be written to.
    """
    _simulate(params, base, out, Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)


@torch.library.custom_op("smat_fn::simulate", mutates_args=())
def simulate(
    params: list[Tensor],
    base: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    sigma: Tensor,
    quantiles: Tensor,
    masked: list[bool],
    starts: list[int],
) -> list[Tensor]:
    """`smat_fn.simulate` on the leaves of a tree."""
    out = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in params]
    _simulate(params, base, out, Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)
    return out


@torch.library.custom_op("smat_fn::reweight_into", mutates_args=("out",))
def reweight_into(
    grads: list[Tensor],
    out: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    masked: list[bool],
    starts: list[int],
) -> None:
    """`smat_fn.reweight` written into ``out``: contiguous leaves of grads' dtypes, may be grads.

    Raises: ValueError that lists the leaves of out that cannot be written to.
    """
    _reweight(grads, out, streams, scale, cutoff, masked, starts)


@torch.library.custom_op("smat_fn::reweight", mutates_args=())
def reweight(
    grads: list[Tensor], streams: Tensor, scale: Tensor, cutoff: Tensor, masked: list[bool], starts: list[int]
) -> list[Tensor]:
    """`smat_fn.reweight` on the leaves of a tree."""
    out = [torch.empty_like(g, memory_format=torch.contiguous_format) for g in grads]
    _reweight(grads, out, streams, scale, cutoff, masked, starts)
    return out


@simulate.register_fake
def _(params, base, streams, scale, cutoff, sigma, quantiles, masked, starts):  # type: ignore[no-untyped-def]
    return [torch.empty_like(p, memory_format=torch.contiguous_format) for p in params]


@reweight.register_fake
def _(grads, streams, scale, cutoff, masked, starts):  # type: ignore[no-untyped-def]
    return [torch.empty_like(g, memory_format=torch.contiguous_format) for g in grads]


@simulate_into.register_fake
def _(params, base, out, streams, scale, cutoff, sigma, quantiles, masked, starts):  # type: ignore[no-untyped-def]
    return None


@reweight_into.register_fake
def _(grads, out, streams, scale, cutoff, masked, starts):  # type: ignore[no-untyped-def]
    return None


def check_out(out: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Raises: ValueError that lists the leaves of out, by position, that are strided or of another size or dtype."""
    problems = []
    for i, (target, leaf) in enumerate(zip(out, like, strict=True)):
        if not target.is_contiguous():
            problems.append(f"leaf {i} of out has strides {target.stride()}, must be contiguous")
        if (target.dtype, target.shape) != (leaf.dtype, leaf.shape):
            problems.append(
                f"leaf {i} of out is {target.dtype} {tuple(target.shape)}, must be {leaf.dtype} {tuple(leaf.shape)}"
            )
    errors.raise_problems(problems)


def _simulate(
    params: list[Tensor],
    base: list[Tensor],
    out: list[Tensor],
    numbers: Numbers,
    masked: list[bool],
    starts: list[int],
) -> None:
    check_out(out, params)
    params, base = [p.contiguous() for p in params], [b.contiguous() for b in base]
    way = launch if launch.by_kernel(params, base, out) else chunked
    way.simulate(params, base, out, numbers, masked, starts)


def _reweight(
    grads: list[Tensor],
    out: list[Tensor],
    streams: Tensor,
    scale: Tensor,
    cutoff: Tensor,
    masked: list[bool],
    starts: list[int],
) -> None:
    check_out(out, grads)
    grads = [g.contiguous() for g in grads]
    sigma = torch.zeros((), dtype=torch.float64, device=scale.device)
    numbers = Numbers(streams, scale, cutoff, sigma, scale.new_empty(0))
    way = launch if launch.by_kernel(grads, out) else chunked
    way.reweight(grads, out, numbers, masked, starts)
