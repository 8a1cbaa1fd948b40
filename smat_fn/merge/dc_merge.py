"""DC-Merge: leading directions of every expert in a space that covers all, where large entries are elected."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..types import Params
from .parts.arithmetic import add, agreeing, zeroed
from .parts.inputs import Experts
from .parts.merger import merged, vector_function
from .parts.per_expert import Numbers
from .parts.spectral import Mix, Others, Spectral, leading, orthonormal, rest, svd
from .tsv_merge import count_of

Smooth = Literal["none", "mean", "linear"]


def dc_merge(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    others: Others = "mean",
    skip: Sequence[str] = (),
    share: float = 0.0,
    keep: float = 0.001,
    elect: bool = True,
    smooth: Smooth = "none",
    ratio: float = 5.0,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ Û (B ⊙ M) V̂ᵀ, per matrix; M is the TIES mean of the M_i = Ûᵀ U_i Σ_i V_iᵀ V̂, B is 1 on N blocks k × k.

    U_i, Σ_i, V_i are the k leading triplets of Δ_i, U = [U_1 … U_N], Û and V̂ the nearest orthonormal matrices as in
    `tsv_merge`. The TIES mean keeps the max(1, ⌊keep s²⌋) largest entries of each M_i, s = min(rows, columns), with
    ``share`` s = N k; and of these takes the mean of those that have the sign of their sum. ``smooth`` replaces the
    singular values of each Δ_i by as many of the same sum: equal ones, or equally spaced ones whose first is min(ratio,
    σ_1 / σ_k) times the last.
    Directions whose singular value is 0 up to rounding are left out.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite.
        others: of leaves that are not matrices: "mean" of the task vectors, as the authors, or "zero".
        skip: globs of matrices that count as such leaves; the authors skip "*text_projection*".
        share: of every expert's singular values: k = ⌊share · min(rows, columns)⌋, 0: a share of 1/N. Of LoRA adapters
            the authors take the rank.
        keep: of the entries of each M_i, in (0, 1]; 0.001 in the source.
        elect: False takes the sum of all kept entries instead.
        smooth: "none", as the authors for fully fine-tuned experts; "mean" or "linear" as for LoRA.
        ratio: of "linear", at least 1.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: "DC-Merge: improving model merging with directional consistency", 2026, arXiv 2603.06242; DC_utils.py and
        merging_functions.py of Tobeginwith/DC-Merge at 3c443e4.
    """
    return merged(DcMerge, **locals())


def covered(deltas: list[Tensor], *, config: "DcMerge") -> Tensor:
    """Û (B ⊙ M) V̂ᵀ of a matrix."""
    count = count_of(deltas[0].shape, len(deltas), config.share)
    if not count:
        return rest(deltas, config.others)
    side = count * len(deltas) if config.share else min(deltas[0].shape)
    kept = max(1, int(config.keep * side**2))
    parts = [leading(svd(delta), count) for delta in deltas]
    left, right = (orthonormal(torch.cat(part, 1)) for part in zip(*((u, v) for u, _, v in parts), strict=True))
    cores = [
        _largest((left.mT @ (u * smoothed(values, config.smooth, config.ratio))) @ (v.mT @ right), kept)
        for u, values, v in parts
    ]
    total = add(cores)
    core = agreeing(cores, total.sign(), mean=True) if config.elect else total
    blocks = [core[at : at + count, at : at + count] for at in range(0, len(core), count)]
    return left @ torch.block_diag(*blocks) @ right.mT


def smoothed(values: Tensor, smooth: Smooth, ratio: float) -> Tensor:
    """Singular values in descending order, with the sum kept; those that are 0 stay 0."""
    if smooth == "none":
        return values
    count = int((values > 0).sum())
    if not count:
        return values
    first = min(ratio, float(values[0] / values[count - 1])) if smooth == "linear" else 1.0
    shares = torch.linspace(first, 1.0, count, dtype=values.dtype, device=values.device)
    return torch.cat([shares * (values.sum() / shares.sum()), values[count:]])


def _largest(core: Tensor, count: int) -> Tensor:
    if count >= core.numel():
        return core
    sizes = core.abs()
    return zeroed(core, sizes >= sizes.reshape(-1).topk(count).values[-1])


@dataclass(frozen=True)
class DcMerge(Spectral):
    """DC-Merge: TIES in one orthonormal basis, built from the leading singular vectors of all experts."""

    name = "dc_merge"
    share: float = 0.0
    """Share of each expert's singular values to keep; 0: 1 / number of experts."""
    keep: float = 0.001
    """Density: share of the entries of each expert's matrix to keep, in the basis of all experts' singular vectors."""
    elect: bool = True
    """True: the mean of kept entries with the sign of their sum; False: sum all kept entries, whatever their sign."""
    smooth: Smooth = "none"
    """Replace each expert's singular values by equal (mean) or linearly falling (linear) ones; for low-rank experts."""
    ratio: float = 5.0
    """With --smooth linear: upper bound of the ratio of the first singular value to the last."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [] if 0 <= self.share <= 1 else [f"share is {self.share}, must be in [0, 1]"]
        problems += [] if 0 < self.keep <= 1 else [f"keep is {self.keep}, must be in (0, 1]"]
        if self.smooth not in ("none", "mean", "linear"):
            problems.append(f"smooth is {self.smooth!r}, must be 'none', 'mean' or 'linear'")
        if not 1 <= self.ratio < float("inf"):
            problems.append(f"ratio is {self.ratio}, must be a finite number of at least 1")
        return problems + super().problems(experts)

    def mix(self) -> Mix:
        return partial(covered, config=self)

    def held(self, shape: Sequence[int], experts: int) -> int:
        side = count_of(shape, experts, self.share) * experts
        return super().held(shape, experts) * max(1, round(experts * self.share)) + 8 * experts * side * side


dc_merge_vector = vector_function(DcMerge)
