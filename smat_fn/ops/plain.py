"""The operations in plain torch, out of place: what torch.compile fuses and torch.func.vmap batches."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import random, tree
from .cpu import Numbers, kept_scale, noise_step

PIECE = 1 << 19  # coordinates whose random fields are held at once


def simulate(
    params: Sequence[Tensor], base: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool], starts: Sequence[int]
) -> list[Tensor]:
    """Eq. smat-state; see `smat_fn.simulate`."""

    def state(leaf: int, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        theta, theta_0 = params[leaf].reshape(-1)[part], base[leaf].reshape(-1)[part]
        center = theta_0.to(coefficient.dtype)
        assert noise is not None
        return ((center + coefficient * (theta.to(coefficient.dtype) - center)) + noise).to(theta.dtype)

    dtypes = [tree.compute_dtype(p, b) for p, b in zip(params, base, strict=True)]
    return _by_pieces(state, params, dtypes, numbers, masked, starts, noise=True)


def reweight(grads: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool], starts: Sequence[int]) -> list[Tensor]:
    """Eq. smat-gradient; see `smat_fn.reweight`."""

    def weighted(leaf: int, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        gradient = grads[leaf].reshape(-1)[part]
        return (coefficient * gradient.to(coefficient.dtype)).to(gradient.dtype)

    return _by_pieces(weighted, grads, _dtypes(grads), numbers, masked, starts, noise=False)


def coefficients(like: Sequence[Tensor], numbers: Numbers, masked: Sequence[bool]) -> list[Tensor]:
    """alpha m of every coordinate."""
    fn: Callable[..., Tensor] = lambda leaf, part, coefficient, noise: coefficient.clone()  # noqa: E731
    return _by_pieces(fn, like, _dtypes(like), numbers, masked, [0] * len(like), noise=False)


def noises(like: Sequence[Tensor], numbers: Numbers) -> list[Tensor]:
    """epsilon of every coordinate."""
    fn: Callable[..., Tensor] = lambda leaf, part, coefficient, noise: noise  # noqa: E731
    return _by_pieces(fn, like, _dtypes(like), numbers, [False] * len(like), [0] * len(like), noise=True)


def _dtypes(leaves: Sequence[Tensor]) -> list[torch.dtype]:
    return [tree.compute_dtype(leaf) for leaf in leaves]


def _by_pieces(
    fn: Callable[[int, slice, Tensor, Tensor | None], Tensor],
    leaves: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    numbers: Numbers,
    masked: Sequence[bool],
    starts: Sequence[int],
    *,
    noise: bool,
) -> list[Tensor]:
    """``fn(leaf, part, alpha m, epsilon)`` over flat parts of leaves, joined; the cuts do not matter."""
    pieces: list[list[Tensor]] = [[] for _ in leaves]
    for group in tree.spans([leaf.numel() for leaf in leaves], PIECE):
        wanted = [(0, span) for span in group if masked[span[0]]] + [(1, span) for span in group if noise]
        fields = iter(
            random.streams(
                torch.stack([numbers.streams[which, leaf] for which, (leaf, _, _) in wanted]),
                [stop - start for _, (_, start, stop) in wanted],
                starts=[starts[leaf] + start for _, (leaf, start, _) in wanted],
            )
            if wanted
            else ()
        )
        mask_fields = [next(fields) if masked[leaf] else None for leaf, _, _ in group]
        noise_fields = [next(fields) if noise else None for _ in group]
        for (leaf, start, stop), mask_field, noise_field in zip(group, mask_fields, noise_fields, strict=True):
            coefficient = _coefficient(numbers, mask_field, dtypes[leaf], stop - start)
            epsilon = None if noise_field is None else _epsilon(numbers, noise_field, dtypes[leaf])
            pieces[leaf].append(fn(leaf, slice(start, stop), coefficient, epsilon))
    for index, parts in enumerate(pieces):
        if not parts:
            nothing = torch.empty(0, dtype=dtypes[index], device=leaves[index].device)
            parts.append(fn(index, slice(0, 0), nothing, nothing))
    whole = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in pieces]
    return [flat.reshape(leaf.shape) for flat, leaf in zip(whole, leaves, strict=True)]


def _coefficient(numbers: Numbers, field: Tensor | None, dtype: torch.dtype, size: int) -> Tensor:
    if field is None:
        return numbers.scale.to(dtype).expand(size)
    kept = kept_scale(numbers.scale, numbers.cutoff, dtype)
    return torch.where(field < numbers.cutoff, torch.zeros_like(kept), kept)


def _epsilon(numbers: Numbers, field: Tensor, dtype: torch.dtype) -> Tensor:
    uniform = not numbers.quantiles.numel()
    unit = field.to(dtype) - 32767.5 if uniform else numbers.quantiles[field].to(dtype)
    return unit * noise_step(numbers.sigma, uniform, dtype)
