"""Model Breadcrumbs: drop the smallest and the largest changes of every leaf, then task arithmetic."""

import torch
from torch import Tensor

from ..types import Params
from .common import add, apply_vector
from .inputs import Experts, Leaves, check, coef_problems
from .leaves import merge_leaves


def breadcrumbs(base: Params, experts: Experts, *, coef: float, drop_smallest: float, drop_largest: float) -> Params:
    """θ₀ + γ Σ_i m_i ⊙ Δ_i, m_i = 0 on the smallest and the largest magnitudes of every leaf, else 1; rounded once.

    Of a leaf of n coordinates, sorted by |Δ| with equal ones by position, the first ⌊n · drop_smallest⌋ and the last
    ⌊n · drop_largest⌋ go; nothing is rescaled. In the paper's symbols: drop_smallest is β, drop_largest is 1 − γ.

    Args: experts: {name: tree} or a list of trees; coef: γ of task arithmetic (α there), finite;
        drop_smallest, drop_largest: shares in [0, 1), together below 1.
    Returns: a new tree of base's structure and dtypes; non-floating leaves are base's.
    Raises: ValueError that lists every problem of values, structure and shapes.
    Source: Davari & Belilovsky, "Model Breadcrumbs", 2024.
    """
    check(base, experts, [*coef_problems(coef), *_problems(drop_smallest, drop_largest)])
    vector = breadcrumbs_vector(base, experts, drop_smallest=drop_smallest, drop_largest=drop_largest)
    return apply_vector(base, vector, coef=coef)


def breadcrumbs_vector(base: Params, experts: Experts, *, drop_smallest: float, drop_largest: float) -> Leaves:
    """The merged task vector of `breadcrumbs`: flat, floating-point leaves only, for `apply_vector`."""
    start, flat = check(base, experts, _problems(drop_smallest, drop_largest))
    return merge_leaves(
        start, flat, lambda _, deltas: add(_masked(delta, drop_smallest, drop_largest) for delta in deltas)
    )


def _masked(delta: Tensor, drop_smallest: float, drop_largest: float) -> Tensor:
    size = delta.numel()
    order = delta.abs().reshape(-1).argsort(stable=True)
    kept = order[int(size * drop_smallest) : size - int(size * drop_largest)]
    mask = torch.zeros(size, dtype=torch.bool, device=delta.device).index_fill_(0, kept, True)
    return delta.where(mask.view(delta.shape), 0)


def _problems(drop_smallest: float, drop_largest: float) -> list[str]:
    shares = {"drop_smallest": drop_smallest, "drop_largest": drop_largest}
    problems = [
        f"{name} is {share}, must be in [0, 1): it is the removed share of a leaf"
        for name, share in shares.items()
        if not 0 <= share < 1
    ]
    if not problems and not drop_smallest + drop_largest < 1:
        problems.append(f"drop_smallest {drop_smallest} and drop_largest {drop_largest} leave nothing: lower one")
    return problems
