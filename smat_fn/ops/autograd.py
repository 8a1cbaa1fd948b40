"""Differentiable wrappers of the operations, for every transform of torch.func: reverse, forward, nested, batched.

An `autograd.Function` with ``setup_context``, ``vmap`` and ``jvp`` around each operation, whose derivatives are made of
the same two functions; so second order closes over them, and mask and noise are never stored.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..execution import opaque
from . import library, plain
from .cpu import Drawn, Numbers


def simulate(
    params: Sequence[Tensor], base: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool], starts: Sequence[int]
) -> list[Tensor]:
    """Eq. smat-state on leaves; differentiable in params, base, numbers.scale and numbers.sigma."""
    if opaque(*params, *base, *numbers):
        return library.simulate(list(params), list(base), *numbers, list(masked), list(starts))
    if torch.compiler.is_compiling():
        return plain.simulate(params, base, Drawn(numbers, masked, starts))
    return list(_Simulate.apply(*numbers, list(masked), list(starts), len(params), *params, *base))


def reweight(grads: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool], starts: Sequence[int]) -> list[Tensor]:
    """Eq. smat-gradient on leaves; differentiable in grads and numbers.scale."""
    if opaque(*grads, *numbers):
        return library.reweight(list(grads), *numbers[:3], list(masked), list(starts))
    if torch.compiler.is_compiling():
        return plain.reweight(grads, Drawn(numbers, masked, starts))
    return list(_Reweight.apply(*numbers, list(masked), list(starts), *grads))


def reweight_and_clip(
    grads: Mapping[str, Tensor],
    numbers: Numbers | None,
    masked: Sequence[bool],
    starts: Sequence[int] = (),
    *,
    max_norm: float | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """`library.reweight_and_clip` with derivatives: in grads, numbers.scale and max_norm; results are bit-identical."""
    leaves = dict(grads)
    if numbers is not None:
        weighted = reweight(list(leaves.values()), numbers, masked, starts or [0] * len(leaves))
        leaves = dict(zip(leaves, weighted, strict=True))
    norm = tree.global_norm(leaves)
    if max_norm is not None:
        factor = library.clip_factor(norm, max_norm)
        if opaque(*leaves.values(), factor):
            return dict(zip(leaves, library.scaled(list(leaves.values()), factor), strict=True)), norm.float()
        wide = {path: _wide(g, g) for path, g in leaves.items()}
        leaves = {p: (g * factor.to(g.device, g.dtype)).to(leaves[p].dtype) for p, g in wide.items()}
    return leaves, norm.float()


def choose(chosen: Tensor, merged: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
    """Leaves of ``merged`` where a 0-d bool says so, else of ``own``; compiled code may write into merged."""
    if opaque(chosen, *merged, *own):
        library.choose_into(chosen, list(merged), list(own))
        return list(merged)
    flags = {device: chosen.to(device) for device in dict.fromkeys(leaf.device for leaf in own)}
    return [torch.where(flags[o.device], m, o) for m, o in zip(merged, own, strict=True)]


class _Simulate(torch.autograd.Function):
    @staticmethod
    def forward(streams, scale, cutoff, sigma, quantiles, masked, starts, count, *leaves):  # type: ignore[no-untyped-def]
        params, base = list(leaves[:count]), list(leaves[count:])
        return tuple(library.simulate(params, base, streams, scale, cutoff, sigma, quantiles, masked, starts))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.masked, ctx.starts, ctx.count = inputs[5:8]
        _save(ctx, *inputs[:5], *inputs[8:])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        numbers, leaves = Numbers(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        params, base = leaves[: ctx.count], leaves[ctx.count :]
        g_params: Sequence[Any] = [None] * ctx.count
        g_base: Sequence[Any] = [None] * ctx.count
        g_scale = g_sigma = None
        if any(ctx.needs_input_grad[8:]):
            g_params = reweight(grads, numbers, ctx.masked, ctx.starts)
            g_base = [(g - c).to(b.dtype) for g, c, b in zip(grads, g_params, base, strict=True)]
        if ctx.needs_input_grad[1]:
            unit = reweight([_wide(g, g) for g in grads], _unit(numbers), ctx.masked, ctx.starts)
            g_scale = _dot(unit, [_wide(p, u) - _wide(b, u) for u, p, b in zip(unit, params, base, strict=True)])
            g_scale = g_scale.to(numbers.scale.dtype)
        if ctx.needs_input_grad[3]:
            g_sigma = _dot(_unit_noise(ctx, params, numbers), grads).to(numbers.sigma.dtype)
        return None, g_scale, None, g_sigma, None, None, None, None, *g_params, *g_base

    @staticmethod
    def jvp(ctx, *tangents):  # type: ignore[no-untyped-def]
        numbers, leaves = Numbers(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        params, base = leaves[: ctx.count], leaves[ctx.count :]
        t_params = _or_zero(tangents[8 : 8 + ctx.count], params)
        t_base = _or_zero(tangents[8 + ctx.count :], base)
        apart = [p - b.to(p.dtype) for p, b in zip(t_params, t_base, strict=True)]
        weighted = reweight(apart, numbers, ctx.masked, ctx.starts)
        out = [w + b.to(w.dtype) for w, b in zip(weighted, t_base, strict=True)]
        if tangents[1] is not None:
            delta = [_wide(p, b) - _wide(b, p) for p, b in zip(params, base, strict=True)]
            out = _moved(out, tangents[1], reweight(delta, _unit(numbers), ctx.masked, ctx.starts))
        if tangents[3] is not None:
            out = _moved(out, tangents[3], _unit_noise(ctx, params, numbers))
        return tuple(out)

    @staticmethod
    def vmap(info, in_dims, *args):  # type: ignore[no-untyped-def]
        def whole(streams, scale, cutoff, sigma, quantiles, masked, starts, count, *leaves):  # type: ignore[no-untyped-def]
            drawn = Drawn(Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)
            return tuple(plain.simulate(leaves[:count], leaves[count:], drawn))

        return _batched(_Simulate.apply, whole, info.batch_size, in_dims, args, leaves=args[8:])


class _Reweight(torch.autograd.Function):
    @staticmethod
    def forward(streams, scale, cutoff, sigma, quantiles, masked, starts, *grads):  # type: ignore[no-untyped-def]
        return tuple(library.reweight(list(grads), streams, scale, cutoff, masked, starts))

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        ctx.masked, ctx.starts = inputs[5:7]
        _save(ctx, *inputs[:5], *inputs[7:])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        numbers, inputs = Numbers(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        out: Sequence[Any] = [None] * len(inputs)
        g_scale = None
        if any(ctx.needs_input_grad[7:]):
            out = reweight(grads, numbers, ctx.masked, ctx.starts)
        if ctx.needs_input_grad[1]:
            unit = reweight([_wide(g, g) for g in grads], _unit(numbers), ctx.masked, ctx.starts)
            g_scale = _dot(unit, inputs).to(numbers.scale.dtype)
        return None, g_scale, None, None, None, None, None, *out

    @staticmethod
    def jvp(ctx, *tangents):  # type: ignore[no-untyped-def]
        numbers, inputs = Numbers(*ctx.saved_tensors[:5]), ctx.saved_tensors[5:]
        out = reweight(_or_zero(tangents[7:], inputs), numbers, ctx.masked, ctx.starts)
        if tangents[1] is not None:
            wide = [_wide(x, x) for x in inputs]
            out = _moved(out, tangents[1], reweight(wide, _unit(numbers), ctx.masked, ctx.starts))
        return tuple(out)

    @staticmethod
    def vmap(info, in_dims, *args):  # type: ignore[no-untyped-def]
        def whole(streams, scale, cutoff, sigma, quantiles, masked, starts, *grads):  # type: ignore[no-untyped-def]
            drawn = Drawn(Numbers(streams, scale, cutoff, sigma, quantiles), masked, starts)
            return tuple(plain.reweight(grads, drawn))

        return _batched(_Reweight.apply, whole, info.batch_size, in_dims, args, leaves=args[7:])


def _save(ctx: Any, *tensors: Tensor) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _unit(numbers: Numbers) -> Numbers:
    """The draw at alpha = 1: m (.) x is the derivative of alpha m (.) x in alpha."""
    return numbers._replace(scale=torch.ones_like(numbers.scale))


def _unit_noise(ctx: Any, like: Sequence[Tensor], numbers: Numbers) -> list[Tensor]:
    """epsilon / sigma, the derivative of the state in sigma."""
    zeros = [torch.zeros_like(leaf, dtype=tree.compute_dtype(leaf)) for leaf in like]
    unit = numbers._replace(sigma=torch.ones_like(numbers.sigma))
    return simulate(zeros, zeros, unit, [False] * len(zeros), ctx.starts)


def _batched(
    apply: Callable[..., tuple[Tensor, ...]],
    whole: Callable[..., tuple[Tensor, ...]],
    size: int,
    in_dims: Sequence[Any],
    args: Sequence[Any],
    *,
    leaves: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A launch per element on the kernels, where each has a key of its own; else plain torch batched by vmap."""
    if not library.by_kernel(leaves):
        stacked = torch.func.vmap(whole, in_dims=tuple(in_dims))(*args)
    else:
        rows = [apply(*(_element(a, d, i) for a, d in zip(args, in_dims, strict=True))) for i in range(size)]
        stacked = tuple(torch.stack(column) for column in zip(*rows, strict=True))
    return stacked, (0,) * len(stacked)


def _element(argument: Any, dim: Any, index: int) -> Any:
    return argument.select(dim, index) if isinstance(argument, Tensor) and dim is not None else argument


def _wide(leaf: Tensor, like: Tensor) -> Tensor:
    return leaf.to(tree.compute_dtype(leaf, like))


def _or_zero(tangents: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, like, strict=True)]


def _moved(out: Sequence[Tensor], tangent: Tensor, unit: Sequence[Tensor]) -> list[Tensor]:
    return [o + (tangent.to(u.dtype) * u).to(o.dtype) for o, u in zip(out, unit, strict=True)]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return sum(((a * _wide(b, a)).sum() for a, b in zip(left, right, strict=True)), start=torch.zeros(()))
