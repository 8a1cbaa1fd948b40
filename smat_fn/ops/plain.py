"""The operations in plain torch, a chunk at a time: of all dtypes, what torch.compile fuses and vmap batches."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import random, tree
from ..execution import loops_for
from .cpu import Drawn, Numbers, centered_fields, kept_scale, noise_step

CHUNK = 1 << 19  # coordinates whose random fields are held at once


def simulate(
    params: Sequence[Tensor], base: Sequence[Tensor], drawn: Drawn, out: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Eq. smat-state; see `smat_fn.simulate`. Args: out: is written into and returned, may be params or base."""

    def state(leaf: int, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        theta, theta_0 = params[leaf].reshape(-1)[part], base[leaf].reshape(-1)[part]
        center = theta_0.to(coefficient.dtype)
        assert noise is not None
        return ((center + coefficient * (theta.to(coefficient.dtype) - center)) + noise).to(theta.dtype)

    dtypes = [tree.compute_dtype(p, b) for p, b in zip(params, base, strict=True)]
    return _by_pieces(state, params, dtypes, drawn, noise=True, out=out)


def reweight(grads: Sequence[Tensor], drawn: Drawn, out: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Eq. smat-gradient; see `smat_fn.reweight`. Args: out: is written into and returned, may be grads."""

    def weighted(leaf: int, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        gradient = grads[leaf].reshape(-1)[part]
        return (coefficient * gradient.to(coefficient.dtype)).to(gradient.dtype)

    return _by_pieces(weighted, grads, _dtypes(grads), drawn, noise=False, out=out)


def coefficients(like: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool]) -> list[Tensor]:
    """alpha m of every coordinate."""
    fn: Callable[..., Tensor] = lambda leaf, part, coefficient, noise: coefficient.clone()  # noqa: E731
    return _by_pieces(fn, like, _dtypes(like), Drawn(numbers, masked, [0] * len(like)), noise=False)


def noises(like: Sequence[Tensor], numbers: Numbers) -> list[Tensor]:
    """The noise epsilon of every coordinate."""
    fn: Callable[..., Tensor] = lambda leaf, part, coefficient, noise: noise  # noqa: E731
    return _by_pieces(fn, like, _dtypes(like), Drawn(numbers, [False] * len(like), [0] * len(like)), noise=True)


def _dtypes(leaves: Sequence[Tensor]) -> list[torch.dtype]:
    return [tree.compute_dtype(leaf) for leaf in leaves]


def _by_pieces(
    fn: Callable[[int, slice, Tensor, Tensor | None], Tensor],
    leaves: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    drawn: Drawn,
    *,
    noise: bool,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """``fn(leaf, part, alpha m, epsilon)`` over flat parts of leaves, joined; the cuts do not matter."""
    made: list[list[Tensor]] = [[] for _ in leaves]
    (numbers, masked, starts) = drawn
    for group in tree.spans([leaf.numel() for leaf in leaves], CHUNK):
        wanted = [(0, span) for span in group if masked[span[0]]] + [(1, span) for span in group if noise]
        keys = [numbers.streams[which, leaf] for which, (leaf, _, _) in wanted]
        windows = [(starts[leaf] + start, starts[leaf] + stop) for _, (leaf, start, stop) in wanted]
        fields = iter(_fields(keys, windows) if keys else ())
        masks = [next(fields) if masked[leaf] else None for leaf, _, _ in group]
        for (leaf, start, stop), mask_field in zip(group, masks, strict=True):
            coefficient = _coefficient(numbers, mask_field, dtypes[leaf], stop - start)
            epsilon = _epsilon(numbers, next(fields), dtypes[leaf]) if noise else None
            value = fn(leaf, slice(start, stop), coefficient, epsilon)
            if out is None:
                made[leaf].append(value)
            else:
                out[leaf].view(-1)[start:stop].copy_(value)
    if out is not None:
        return list(out)
    for index, parts in enumerate(made):
        if not parts:
            nothing = torch.empty(0, dtype=dtypes[index], device=leaves[index].device)
            parts.append(fn(index, slice(0, 0), nothing, nothing))
    whole = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in made]
    return [_laid(flat, leaf) for flat, leaf in zip(whole, leaves, strict=True)]


def _laid(flat: Tensor, like: Tensor) -> Tensor:
    """Coordinates as a leaf of the shape and strides of another one, by functions alone, which vmap batches."""
    if like.is_contiguous():
        return flat.reshape(like.shape)
    order: list[int] = []  # by descending strides; torch.compile cannot sort by numbers that it does not know
    for dim in range(like.ndim):
        order.insert(len([other for other in order if like.stride(other) >= like.stride(dim)]), dim)
    dense = flat.reshape(like.shape).permute(order).contiguous()
    return dense.permute([order.index(dim) for dim in range(like.ndim)])


def _fields(keys: Sequence[Tensor], windows: Sequence[tuple[int, int]]) -> list[Tensor]:
    if loops_for(*keys) is not None:
        return [field.to(torch.int32).add_(32768) for field in centered_fields(keys, windows)]
    starts, sizes = [start for start, _ in windows], [stop - start for start, stop in windows]
    return random.streams(torch.stack(list(keys)), sizes, starts=starts)


def _coefficient(numbers: Numbers, field: Tensor | None, dtype: torch.dtype, size: int) -> Tensor:
    if field is None:
        return numbers.scale.to(dtype).expand(size)
    kept = kept_scale(numbers.scale, numbers.cutoff, dtype)
    limit = numbers.cutoff
    dropped = torch.where(limit < 0, field >= 65536 + limit, field < limit)
    return torch.where(dropped, torch.zeros_like(kept), kept)


def _epsilon(numbers: Numbers, field: Tensor, dtype: torch.dtype) -> Tensor:
    uniform = not numbers.quantiles.numel()
    unit = field.to(dtype) - 32767.5 if uniform else numbers.quantiles[field].to(dtype)
    return unit * noise_step(numbers.sigma, uniform, dtype)
