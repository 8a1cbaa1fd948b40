"""`simulate` and its gradient `reweight` on any tree: plain torch operations, differentiable by every transform."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .. import random, tree
from ..types import Params, Where
from .draws import Draw

# coordinates whose random fields are held at once
_PIECE = 1 << 19


def simulate(
    params: Params,
    base: Params,
    draw: Draw,
    *,
    where: Where | None = None,
    out: Params | None = None,
    starts: Mapping[str, int] | None = None,
) -> Params:
    r"""The simulated merged state.

    ``theta~ = theta_0 + alpha * m (.) (theta - theta_0) + epsilon``  (Eq. smat-state), in float32 (float64 for float64
    leaves) as ``(theta_0 + c (theta - theta_0)) + epsilon`` with ``c = alpha / (1 - p)`` or 0, each operation rounded,
    then one rounding to the dtype of params. Differentiable in params, base, draw.scale and draw.sigma.

    Args: params: theta, any tree of floating-point tensors; base: theta_0, same structure and shapes; draw: from
        `smat_fn.draw`; where: the masked set S as a predicate on (path, leaf), None masks every leaf; out: tree whose
        tensors receive the result (no gradient flows); starts: path -> index of the leaf's first coordinate in the
        full leaf, for shards.
    Returns: tree of params' structure, shapes and dtypes; ``out`` if given.
    Raises: ValueError for trees that do not match (all problems listed, by path).
    Source: paper section 4.1.
    """
    leaves, origins = tree.flatten(params), tree.flatten(base)
    tree.check_floating(leaves, "params")
    tree.check_floating(origins, "base")
    tree.check_same(leaves, "params", base=origins)

    def state(path: str, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        theta, theta_0 = leaves[path].reshape(-1)[part], origins[path].reshape(-1)[part]
        dtype = coefficient.dtype
        center = theta_0.to(dtype)
        assert noise is not None
        return ((center + coefficient * (theta.to(dtype) - center)) + noise).to(leaves[path].dtype)

    dtypes = {path: tree.compute_dtype(leaf, origins[path]) for path, leaf in leaves.items()}
    return _finish(params, _by_pieces(state, leaves, dtypes, draw, where, starts, noise=True), out)


def reweight(
    grads: Params,
    draw: Draw,
    *,
    where: Where | None = None,
    out: Params | None = None,
    starts: Mapping[str, int] | None = None,
) -> Params:
    r"""The gradient at theta from the gradient at the simulated state, the draw held fixed.

    ``alpha * m (.) g``  (Eq. smat-gradient), in float32 (float64), rounded once; the mask is drawn again, not stored.

    Args: grads: gradient at `simulate`'s result; draw, where, starts: those of that `simulate`; out: may be grads.
    Returns: tree of grads' structure, shapes and dtypes; ``out`` if given.
    Raises: ValueError for leaves that are no floating-point tensors.
    Source: paper section 4.2.
    """
    leaves = tree.flatten(grads)
    tree.check_floating(leaves, "grads")

    def weighted(path: str, part: slice, coefficient: Tensor, noise: Tensor | None) -> Tensor:
        gradient = leaves[path].reshape(-1)[part]
        return (coefficient * gradient.to(coefficient.dtype)).to(gradient.dtype)

    dtypes = {path: tree.compute_dtype(leaf) for path, leaf in leaves.items()}
    return _finish(grads, _by_pieces(weighted, leaves, dtypes, draw, where, starts, noise=False), out)


def participation(draw: Draw, like: Params, *, where: Where | None = None) -> Params:
    """``alpha * m`` of every coordinate (the factor of Eq. smat-gradient), float32 (float64 for float64 leaves).

    Args: draw, where: as `simulate`; like: tree that gives structure, shapes and dtypes.
    """
    return _shaped_like(like, draw, where, lambda path, part, coefficient, noise: coefficient, noise=False)


def materialise(draw: Draw, like: Params, *, where: Where | None = None) -> tuple[Params, Params]:
    """Mask (0 or 1 / (1 - p)) and noise of every coordinate, for tests and readers.

    Args: draw, where: as `simulate`; like: tree that gives structure, shapes and dtypes.
    Returns: (mask, noise), float32 (float64 for float64 leaves); ``alpha * mask`` is `participation`.
    """
    unit = draw._replace(scale=torch.ones_like(draw.scale))
    mask = _shaped_like(like, unit, where, lambda path, part, coefficient, noise: coefficient, noise=False)
    return mask, _shaped_like(like, unit, where, lambda path, part, coefficient, noise: noise, noise=True)


def _shaped_like(like: Params, draw: Draw, where: Where | None, fn: Callable[..., Tensor], *, noise: bool) -> Params:
    leaves = tree.flatten(like)
    tree.check_floating(leaves, "like")
    dtypes = {path: tree.compute_dtype(leaf) for path, leaf in leaves.items()}
    return _finish(like, _by_pieces(fn, leaves, dtypes, draw, where, None, noise=noise), None)


def _finish(like: Params, result: dict[str, Tensor], out: Params | None) -> Params:
    if out is None:
        return tree.unflatten(like, result)
    targets = tree.flatten(out)
    tree.check_same(result, "the result", out=targets)
    with torch.no_grad():
        for path, value in result.items():
            targets[path].copy_(value)
    return out


def _by_pieces(
    fn: Callable[[str, slice, Tensor, Tensor | None], Tensor],
    leaves: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    draw: Draw,
    where: Where | None,
    starts: Mapping[str, int] | None,
    *,
    noise: bool,
) -> dict[str, Tensor]:
    """``fn(path, part, alpha * m, epsilon)`` over flat parts of leaves, joined; the cuts do not matter."""
    starts = _check_starts(starts, leaves)
    if not leaves:
        return {}
    paths = list(leaves)
    device = leaves[paths[0]].device
    draw = Draw(*(field.to(device) for field in draw))
    masked = [where is None or where(path, leaf) for path, leaf in leaves.items()]
    mask_keys, noise_keys = random.leaf_streams(draw.key, paths)
    cutoff = random.threshold(draw.drop_prob)
    pieces: dict[str, list[Tensor]] = {path: [] for path in paths}
    for group in tree.spans([leaf.numel() for leaf in leaves.values()], _PIECE):
        wanted = [(mask_keys, span) for span in group if masked[span[0]]]
        wanted += [(noise_keys, span) for span in group] if noise else []
        fields = iter(
            random.streams(
                torch.stack([keys[index] for keys, (index, _, _) in wanted]),
                [stop - start for _, (_, start, stop) in wanted],
                starts=[starts.get(paths[index], 0) + start for _, (index, start, _) in wanted],
            )
            if wanted
            else ()
        )
        mask_fields = [next(fields) if masked[index] else None for index, _, _ in group]
        noise_fields = [next(fields) if noise else None for _ in group]
        for (index, start, stop), mask_field, noise_field in zip(group, mask_fields, noise_fields, strict=True):
            dtype = dtypes[paths[index]]
            coefficient = _coefficient(draw, cutoff, mask_field, dtype, stop - start)
            epsilon = None if noise_field is None else _epsilon(draw, noise_field, dtype)
            pieces[paths[index]].append(fn(paths[index], slice(start, stop), coefficient, epsilon))
    return {path: _join(parts, leaves[path]) for path, parts in pieces.items()}


def _coefficient(draw: Draw, cutoff: Tensor, field: Tensor | None, dtype: torch.dtype, size: int) -> Tensor:
    scale = draw.scale.to(dtype)
    if field is None:
        return scale.expand(size)
    kept = scale * (65536.0 / (65536 - cutoff).to(torch.float64)).to(dtype)
    return torch.where(field < cutoff, torch.zeros_like(kept), kept)


def _epsilon(draw: Draw, field: Tensor, dtype: torch.dtype) -> Tensor:
    if draw.noise.shape[-1]:
        return draw.noise[field].to(dtype) * draw.sigma.to(dtype)
    return (field.to(dtype) - 32767.5) * (draw.sigma * (math.sqrt(3) / 32768)).to(dtype)


def _join(parts: list[Tensor], like: Tensor) -> Tensor:
    if not parts:
        return torch.empty_like(like)
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(like.shape)


def _check_starts(starts: Mapping[str, int] | None, leaves: Mapping[str, Tensor]) -> Mapping[str, int]:
    if starts is None:
        return {}
    problems = [f"starts names {path!r}, which is no leaf" for path in starts if path not in leaves]
    problems += [f"starts[{path!r}] is {start}, must not be negative" for path, start in starts.items() if start < 0]
    if problems:
        raise ValueError("; ".join(problems))
    return starts
