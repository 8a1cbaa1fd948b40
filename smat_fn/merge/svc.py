"""SVC: a merged model whose singular values are lowered in directions that its experts share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import Params
from .parts.inputs import Experts, count_problems
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.spectral import OfMatrices, matrix_rule, skip_problems


def svc(base: Params, experts: Experts, *, coef: float = 1.0, alpha: float = 1.0, skip: Sequence[str] = ()) -> Params:
    """θ₀ + γ U diag(σ_r / η_r) Vᵀ per matrix of a merged model, θ_m − θ₀ = U diag(σ) Vᵀ. A pass after any merger.

    ``η_r = mean_i max(α, ⟨u_rᵀ(θ_m − θ₀), u_rᵀ Δ_i⟩ / max(‖u_rᵀ Δ_i‖², 1e-12))``. Other leaves stay those of θ_m.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees: first the merged model θ_m, then the experts that it was merged from.
        coef: γ, finite; 1 in the paper, for the coefficient of the merge is in θ_m.
        alpha: α, above 0; the authors' scripts take 1 for TSV-M and 1/N for other mergers.
        skip: globs of matrices that stay as they are; the authors skip "*text_projection*" and "*embedding*".

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that computes the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: "When shared knowledge hurts: spectral over-accumulation in model merging", 2026 (arXiv 2602.05536);
        merge_func.py of lyymuwu/SVC at 6ad2b31.
    """
    return merged(Svc, **locals())


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


@dataclass(frozen=True)
class Svc(OfMatrices):
    """SVC: shrink singular values of a merged model (the first of --experts) in directions that the others share."""

    name = "svc"
    coef: float = 1.0
    """Factor of the whole change (gamma); the authors take 1."""
    alpha: float = 1.0
    """Lower bound of each ratio of merged to expert's response; a singular value is divided by the mean ratio."""
    skip: tuple[str, ...] = ()
    """Globs of matrices to leave unchanged, such as embeddings too large to decompose: "*embed*"."""

    def problems(self, experts: Experts) -> list[str]:
        problems = [*count_problems(experts, "svc", least=2), *skip_problems(self.skip)]
        fine = 0 < self.alpha < float("inf")
        return problems + ([] if fine else [f"alpha is {self.alpha}, must be above 0 and finite"])

    def rule(self, leaves: Mapped) -> Rule:
        mix = partial(calibrated, alpha=self.alpha)
        return matrix_rule(leaves, self.skip, lambda _: mix, lambda deltas: deltas[0].clone())


svc_vector = vector_function(Svc)
