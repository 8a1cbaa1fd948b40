"""Rows as combinations of few other rows: orthogonal matching pursuit, and the nearest rows by cosine."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...execution import unrounded

MEMORY = 1 << 28  # bytes that one block of targets takes
_EXACT = 2.0**-20  # of a norm: a smaller remainder is the rounding of float32 rows


class Sparse(NamedTuple):
    """Rows as sums of other rows: x = Σ_j c_j p_{i_j}."""

    indices: Tensor  # i, int64 (rows, k)
    coefs: Tensor  # c, float64 (rows, k)


def matching_pursuit(points: Tensor, targets: Tensor, k: int) -> Sparse:
    """x ≈ Σ_{j ≤ k} c_j p_{i_j} of every target x, by orthogonal matching pursuit.

    i_{t+1} = argmax_i |⟨r_t, p_i⟩|, r_t = x − Σ_{j ≤ t} c_j p_{i_j} with the c that minimise ‖r_t‖. Points that depend
    on those taken, and all once r_t is zero up to rounding, have c = 0. Inner products with the points are float32,
    all else is float64: a QR decomposition that grows by a column a step.

    Args:
        points: p, float32 (n, width), on any device.
        targets: x, float32 (rows, width).
        k: the number of points, from 1 to n.

    The cost is 2 · rows · n · width · k operations, in products of matrices; the memory beside the inputs `MEMORY`.

    Source: Pati et al., "Orthogonal matching pursuit", 1993; for embeddings Goddard & Fernandes Neto, "Training-free
        tokenizer transplantation via orthogonal matching pursuit", 2025 (arXiv 2506.06607).
    """
    size = MEMORY // (8 * k * points.shape[1] + 8 * len(points))
    return _by_blocks(lambda block: _pursued(points, block, k), targets, size)


def _pursued(points: Tensor, targets: Tensor, k: int) -> Sparse:
    """`matching_pursuit` of one block of targets."""
    rest, count = targets.double(), len(targets)
    least = _EXACT * rest.norm(dim=1)
    indices = torch.zeros(count, k, dtype=torch.long, device=targets.device)
    basis = rest.new_zeros(count, k, targets.shape[1])  # orthonormal rows
    triangle = torch.eye(k, dtype=rest.dtype, device=rest.device).repeat(count, 1, 1)  # points taken = triangleᵀ basis
    along = rest.new_zeros(count, k)  # ⟨x, basis⟩
    for t in range(k):
        unlike = rest.norm(dim=1) > least
        if not bool(unlike.any()):
            break
        indices[:, t] = (rest.float() @ points.mT).abs_().argmax(1)
        taken = points[indices[:, t]].double()
        new, shares = taken, rest.new_zeros(count, t)
        for _ in range(2):  # the second time removes what rounding has left
            found = (basis[:, :t] @ new.unsqueeze(2)).squeeze(2)
            new, shares = new - (found.unsqueeze(1) @ basis[:, :t]).squeeze(1), shares + found
        length = new.norm(dim=1, keepdim=True)
        counts = unlike.unsqueeze(1) & (length > _EXACT * taken.norm(dim=1, keepdim=True))
        basis[:, t] = torch.where(counts, new / length, 0.0)
        triangle[:, :t, t] = torch.where(counts, shares, 0.0)
        triangle[:, t, t] = torch.where(counts, length, 1.0).squeeze(1)
        along[:, t] = (basis[:, t] * rest).sum(1)
        rest = rest - along[:, t, None] * basis[:, t]
    return Sparse(indices, torch.linalg.solve_triangular(triangle, along.unsqueeze(2), upper=True).squeeze(2))


def nearest(points: Tensor, targets: Tensor, k: int) -> Sparse:
    """x ≈ Σ_j c_j p_{i_j} over the k points of the largest cosines; c_j = max(cos_j, 0) / Σ_l max(cos_l, 0), or 0.

    Args: as `matching_pursuit`.
    """
    units = normalize(points)

    def found(block: Tensor) -> Sparse:
        cosines, indices = (normalize(block) @ units.mT).topk(k)
        weights = cosines.double().clamp(min=0)
        return Sparse(indices, weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny))

    return _by_blocks(found, targets, MEMORY // (8 * len(points)))


def _by_blocks(find: Callable[[Tensor], Sparse], targets: Tensor, size: int) -> Sparse:
    with unrounded(targets.device):
        found = [find(block) for block in targets.split(max(1, size))]
    return Sparse(torch.cat([own.indices for own in found]).cpu(), torch.cat([own.coefs for own in found]).cpu())


def combined(rows: Tensor, sparse: Sparse, centre: Tensor | None = None) -> Tensor:
    """Σ_j c_j rows[i_j] + (1 − Σ_j c_j) centre, in float64, rounded once to the dtype of ``rows``, (n, ...).

    Args: centre: one row in float64, default 0.
    """
    flat = rows.reshape(len(rows), -1)
    size = max(1, MEMORY // (8 * flat.shape[1] * sparse.indices.shape[1]))
    made = list[Tensor]()
    for i, c in zip(sparse.indices.split(size), sparse.coefs.split(size), strict=True):
        sums = (c.unsqueeze(1) @ flat[i].double()).squeeze(1)
        if centre is not None:
            sums += (1 - c.sum(1, keepdim=True)) * centre.view(1, -1)
        made.append(sums.to(rows.dtype))
    return torch.cat(made).view(-1, *rows.shape[1:])
