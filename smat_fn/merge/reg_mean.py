"""RegMean: linear layers whose outputs are nearest to every expert's on that expert's own inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..types import Params
from .parts.arithmetic import add, divided
from .parts.chunks import Fuse
from .parts.inputs import Experts, Leaves, check, coef_problems, flat_statistics, type_problems
from .parts.merger import UNKNOWN, WIDE, InMemory, Mapped, Merger, Rule, vector_by_rule
from .parts.spectral import Others, other_problems, rest
from .parts.vectors import applied

_ASYMMETRY = 2**-6  # of a matrix in bfloat16, whose two halves were rounded on their own, in its largest entries


def reg_mean(
    base: Params, experts: Experts, grams: Experts, *, coef: float = 1.0, scale: float = 0.9, others: Others = "mean"
) -> Params:
    """θ₀ + γ τ, τ = (Σ_i Δ_i G̃_i) (Σ_i G̃_i)⁻¹ of linear layers, G̃_i = s G_i + (1 − s) diag(G_i).

    Matrices are (outputs, inputs), as in ``torch.nn.Linear``. With s = 1 and γ = 1 it is
    argmin_W Σ_i ‖X_i (W − W_i)ᵀ‖². Inputs that are 0 in all rows take the mean. Arithmetic is float64.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        grams: Gram matrices of the inputs of their linear layers, by the same names or in the same order
            (`input_grams`): flat, by the name of the layer's weight.
        coef: γ, finite.
        scale: s of what lies off the diagonal, in [0, 1]; with 1 the inverse is the pseudo-inverse.
        others: of leaves without a Gram matrix: "mean" of the task vectors, or "zero".

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's. The last bits are those of the
        library that solves the system.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Jin et al., "Dataless knowledge fusion by merging weights of language models", 2023; the mean over rows as
        in fusion_bench/method/regmean of tanganke/fusion_bench.
    """
    check(base, experts, coef_problems(coef))
    return applied(base, reg_mean_vector(base, experts, grams, scale=scale, others=others), coef=coef)


def reg_mean_vector(
    base: Params, experts: Experts, grams: Experts, *, scale: float = 0.9, others: Others = "mean"
) -> Leaves:
    """τ, or the mean: flat, floating-point leaves only, for `apply_vector`.

    Args: as `reg_mean`.
    """
    start, flat = check(base, experts, [*scale_problems(scale), *other_problems(others, ())])
    leaves = InMemory(start, flat, flat_statistics("gram", start, list(flat), grams))
    return vector_by_rule(RegMean(scale=scale, others=others).rule(leaves), start, flat)


def regressed(deltas: list[Tensor], grams: Sequence[Tensor], *, scale: float) -> Tensor:
    """τ of a matrix."""
    wide = [gram.to(deltas[0].device, torch.float64) for gram in grams]
    for gram in wide:
        largest = gram.diagonal().amax()
        if not bool((gram.diagonal() >= 0).all() & ((gram - gram.mT).abs().amax() <= _ASYMMETRY * largest)):
            raise ValueError(
                f"a Gram matrix of weights {tuple(deltas[0].shape)} is not one: XᵀX of the rows X of inputs is finite "
                "and symmetric, and its diagonal is not negative; compute it again, by merge.py statistics or "
                "smat_fn.merge.statistics.input_grams"
            )
    parts = [gram * scale + torch.diag_embed(gram.diagonal() * (1 - scale)) for gram in wide]
    left, total = add(delta.double() @ gram for delta, gram in zip(deltas, parts, strict=True)), add(parts)
    dead = total.diagonal() == 0
    left[:, dead] = divided(add(deltas), len(deltas)).double()[:, dead]
    total[dead, dead] = 1.0  # of one index each: the diagonal
    if scale == 1:
        return (left @ torch.linalg.pinv(total, hermitian=True)).to(deltas[0].dtype)
    try:
        lower = torch.linalg.cholesky(total)
    except torch.linalg.LinAlgError:
        raise ValueError(
            f"the Gram matrices of weights {tuple(deltas[0].shape)} have a singular sum at scale {scale}: pass a "
            "smaller scale, such as 0.9, or 1 for the pseudo-inverse"
        ) from None
    return torch.cholesky_solve(left.mT, lower).mT.to(deltas[0].dtype)


def scale_problems(scale: float) -> list[str]:
    """Errors for a factor outside of [0, 1]."""
    if wrong := type_problems(scale=scale):
        return wrong
    return [] if 0 <= scale <= 1 else [f"scale is {scale}, must be in [0, 1]"]


@dataclass(frozen=True)
class RegMean(Merger):
    """RegMean: linear layers whose outputs are nearest to every expert's on that expert's own inputs."""

    name = "reg_mean"
    function = staticmethod(reg_mean_vector)
    semantics: ClassVar = {"mergekit": UNKNOWN}
    grid: ClassVar = WIDE
    coef: float | None = None
    """Factor of the merged change (gamma); the authors take 1. Set it, or use --search."""
    scale: float = 0.9
    """Factor of the off-diagonal entries of Gram matrices."""
    others: Others = "mean"
    """Parameters without a Gram matrix: the mean of the task vectors, or no change."""

    def statistics(self) -> str:
        return "gram"

    def rule(self, leaves: Mapped) -> Rule:
        names = list(leaves.experts)

        def whole(path: str) -> bool:
            return leaves.statistic(names[0], path) is not None and leaves.shape(path).numel() > 0

        def fuse(path: str) -> Fuse:
            if not whole(path):
                return lambda piece: rest(piece.deltas, self.others)
            shape = leaves.shape(path)
            mix = partial(regressed, grams=[leaves.statistic(name, path) for name in names], scale=self.scale)
            return lambda piece: mix([delta.view(shape) for delta in piece.deltas]).reshape(-1)

        return Rule(fuse, whole=whole)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        shapes = [leaf.shape for leaf in leaves.values() if leaf.ndim == 2]
        return max(((4 * experts + 48) * m * n + 8 * (2 * experts + 4) * n * n for m, n in shapes), default=0)
