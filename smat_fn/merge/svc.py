"""SVC: a merged model whose singular values are lowered where its experts pull in one direction too often."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .common import UNKNOWN, Mapped, Merger, Rule, apply_vector, merge_leaves
from .inputs import Experts, Leaves, check, coef_problems, count_problems
from .spectral import HELD, Mix, is_matrix, largest, matrix_rule, of_matrix, other_problems


def svc(base: Params, experts: Experts, *, coef: float = 1.0, alpha: float = 1.0, skip: Sequence[str] = ()) -> Params:
    """θ₀ + γ U diag(σ_r / η_r) Vᵀ per matrix of a merged model, θ_m − θ₀ = U diag(σ) Vᵀ. A pass after any merger.

    ``η_r = mean_i max(α, ⟨u_rᵀ(θ_m − θ₀), u_rᵀ Δ_i⟩ / max(‖u_rᵀ Δ_i‖², 1e-12))``. Other leaves stay those of θ_m.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees: first the merged model θ_m, then the experts that it was merged from.
        coef: γ, finite; 1 in the paper, for the coefficient of the merge is in θ_m.
        alpha: α, above 0; 1 in the paper.
        skip: globs of matrices that stay as they are; the authors skip "*text_projection*" and "*embedding*".

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: "When shared knowledge hurts: spectral over-accumulation in model merging", 2026 (arXiv 2602.05536);
        merge_func.py of lyymuwu/SVC at 6ad2b31.
    """
    check(base, experts, [*coef_problems(coef), *_problems(experts, alpha, skip)])
    return apply_vector(base, svc_vector(base, experts, alpha=alpha, skip=skip), coef=coef)


def svc_vector(base: Params, experts: Experts, *, alpha: float = 1.0, skip: Sequence[str] = ()) -> Leaves:
    """U diag(σ_r / η_r) Vᵀ, or the merged change: flat, floating-point leaves only, for `apply_vector`."""
    start, flat = check(base, experts, _problems(experts, alpha, skip))

    def fuse(path: str, deltas: Iterable[Tensor]) -> Tensor:
        every = [delta.contiguous() for delta in deltas]
        return of_matrix(path, every, mix) if is_matrix(path, every[0].shape, skip) else _merged(every)

    mix = partial(calibrated, alpha=alpha)
    return merge_leaves(start, flat, fuse)


def calibrated(deltas: list[Tensor], *, alpha: float) -> Tensor:
    """U diag(σ_r / η_r) Vᵀ of a matrix."""
    merged, *others = deltas
    left, values, right = torch.linalg.svd(merged, full_matrices=False)
    response = values[:, None] * right  # u_rᵀ(θ_m − θ₀)
    eta = torch.zeros_like(values)
    for delta in others:
        own = left.mT @ delta
        eta += ((response * own).sum(1) / own.square().sum(1).clamp(min=1e-12)).clamp(min=alpha)
    return (left * (values / (eta / len(others)))) @ right


def _merged(deltas: list[Tensor]) -> Tensor:
    return deltas[0].clone()


def _problems(experts: Experts, alpha: float, skip: Sequence[str]) -> list[str]:
    problems = [*count_problems(experts, "svc", least=2), *other_problems("mean", skip)]
    return problems + ([] if 0 < alpha < float("inf") else [f"alpha is {alpha}, must be above 0 and finite"])


@dataclass(frozen=True)
class Svc(Merger):
    """SVC: lower the singular values of a merged model, the first of --experts, where the others pull too often."""

    name = "svc"
    function = staticmethod(svc_vector)
    semantics: ClassVar = {"mergekit": UNKNOWN}
    coef: float = 1.0
    """gamma, a factor of the whole change; 1 is the source's."""
    alpha: float = 1.0
    """Least share of an expert's response at which a direction counts as shared too often."""
    skip: tuple[str, ...] = ()
    """Globs of matrices that stay as they are, as embeddings too large for a decomposition: "*embed*"."""

    def rule(self, leaves: Mapped) -> Rule:
        def mix(_: str) -> Mix:
            return partial(calibrated, alpha=self.alpha)

        return matrix_rule(leaves, self.skip, mix, _merged)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return (4 * experts + HELD) * largest(leaves, self.skip)

    def work(self, shape: Sequence[int]) -> float:
        return super().work(shape) * (min(shape) if len(shape) == 2 else 1)
