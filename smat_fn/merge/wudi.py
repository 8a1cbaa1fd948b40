"""WUDI in closed form: the matrix that differs least from every expert's on the inputs that its rows stand for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import Params
from .parts.inputs import Experts
from .parts.merger import merged, vector_function
from .parts.per_expert import Numbers
from .parts.spectral import Mix, Others, Spectral, is_matrix
from .parts.tall import LARGE


def wudi(
    base: Params,
    experts: Experts,
    *,
    coef: float,
    others: Others = "mean",
    skip: Sequence[str] = (),
    ridge: float = 1e-8,
    norms: bool = True,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ Δ*, Δ* = (Σ_i Δ_i G_i / ‖Δ_i‖²) (Σ_i G_i / ‖Δ_i‖² + ridge · I)⁻¹ per matrix, G_i = Δ_iᵀ Δ_i.

    Norms are those of Frobenius. Without the ridge Δ* minimises Σ_i ‖(Δ* − Δ_i) Δ_iᵀ‖² / ‖Δ_i‖², of several minimisers
    it is the one of least norm; the authors descend by 300 steps of Adam from Σ_i Δ_i, which on changes of low rank
    ends at another one. Matrices are (outputs, inputs), as in ``torch.nn.Linear``. Arithmetic is
    float64; experts whose matrix is zero are left out.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; 1 in the paper.
        others: of leaves that are not matrices: "mean" of the task vectors, or "zero", as the authors, who change
            linear layers alone.
        skip: globs of matrices that count as such leaves.
        ridge: at least 0; with 0 the inverse is the pseudo-inverse.
        norms: False leaves out the division by ‖Δ_i‖²: ACTMat, with ridge 0.
        weights: w_i by expert, finite: Δ_i counts as w_i Δ_i. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that solves the system.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: Cheng et al., "Whoever started the interference should end it: guiding data-free model merging via task
        vectors", 2025; closed form and ridge: merge/methods/functional/wudi.py of apanariello4/merge-and-rebase at
        345c570; ACTMat: arXiv 2604.01329, functional/actmerge.py there.
    """
    return merged(Wudi, **locals())


def nearest(deltas: list[Tensor], *, ridge: float, norms: bool) -> Tensor:
    """Δ* of a matrix, by a system of the smaller of inputs and outputs times experts."""
    wide = [delta.double() for delta in deltas]
    sizes = torch.stack([delta.square().sum() for delta in wide]).tolist()  # the host waits once
    live = [(delta, delta / (size**0.5 if norms else 1)) for delta, size in zip(wide, sizes, strict=True) if size]
    if not live:
        return torch.zeros_like(deltas[0])
    # D: the Δ_i / ‖Δ_i‖ below each other; then Σ G_i / ‖Δ_i‖² = DᵀD, and Σ Δ_i G_i / ‖Δ_i‖² = E D
    stacked = torch.cat([row for _, row in live])
    if _is_long(len(wide[0]), len(wide)) and len(stacked) >= stacked.shape[1]:
        product = torch.zeros_like(wide[0])
        for delta, row in live:
            product.addmm_(delta, row.mT @ row)
        return _solved(stacked.mT @ stacked, product.mT, ridge).mT.to(deltas[0].dtype)
    left = torch.cat([delta @ row.mT for delta, row in live], 1)
    if len(stacked) < stacked.shape[1]:  # D (DᵀD + r)⁻¹ = (DDᵀ + r)⁻¹ D
        return (left @ _solved(stacked @ stacked.mT, stacked, ridge)).to(deltas[0].dtype)
    return _solved(stacked.mT @ stacked, (left @ stacked).mT, ridge).mT.to(deltas[0].dtype)


def _is_long(rows: int, experts: int) -> bool:
    """Whether E, outputs times outputs of every expert, is too large to be formed, as of an embedding."""
    return rows * rows * experts > LARGE


def _solved(matrix: Tensor, right: Tensor, ridge: float) -> Tensor:
    """(M + ridge)⁻¹ R of a symmetric M, or M⁺ R."""
    if not ridge:
        return torch.linalg.pinv(matrix, hermitian=True) @ right
    matrix.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed:
        raise torch.linalg.LinAlgError(
            f"If they are, ridge {ridge:g} is below the rounding of its system: pass a larger one, or 0 for the "
            "pseudo-inverse"
        )
    return torch.cholesky_solve(right, factor)


@dataclass(frozen=True)
class Wudi(Spectral):
    """WUDI in closed form: least interference with every expert on the inputs that its matrices respond to."""

    name = "wudi"
    ridge: float = 1e-8
    """Added to the diagonal of the linear system, by default of changes scaled to norm 1; 0: the pseudo-inverse."""
    norms: bool = True
    """True: scale the experts' changes to norm 1; False: do not scale them to norm 1; with --ridge 0 this is ACTMat."""

    def problems(self, experts: Experts) -> list[str]:
        fine = 0 <= self.ridge < float("inf")
        problems = [] if fine else [f"ridge is {self.ridge}, must be a finite number of at least 0"]
        return problems + super().problems(experts)

    def mix(self) -> Mix:
        return partial(nearest, ridge=self.ridge, norms=self.norms)

    def size_problems(self, leaves: Mapping[str, Tensor], experts: int) -> list[str]:
        return []  # products, and a system of the smaller side

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        def needed(rows: int, columns: int) -> int:
            side = min(rows * experts, columns)
            long = _is_long(rows, experts) and rows * experts >= columns
            product = columns if long else max(columns, rows * experts)
            return 28 * experts * rows * columns + 40 * side * side + 32 * rows * product

        shapes = [leaf.shape for path, leaf in leaves.items() if is_matrix(path, leaf.shape, self.skip)]
        return max((needed(*shape) for shape in shapes), default=0)


wudi_vector = vector_function(Wudi)
