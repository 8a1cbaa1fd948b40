"""Fisher-weighted averaging: every coordinate's mean, weighted by how much each expert's loss depends on it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..types import Params
from .parts import arithmetic
from .parts.arithmetic import halved
from .parts.chunks import Fuse, Piece
from .parts.inputs import Experts, Leaves, check, coef_problems, flat_statistics, type_problems
from .parts.merger import UNKNOWN, WIDE, InMemory, Mapped, Rule, vector_by_rule
from .parts.per_expert import NONE, Numbers, Weighted, names_of, number, number_problems
from .parts.vectors import applied


def fisher(
    base: Params,
    experts: Experts,
    fishers: Experts,
    *,
    coef: float = 1.0,
    normalize: bool = True,
    floor: float = 1e-6,
    weights: Numbers | None = None,
) -> Params:
    """θ₀ + γ Σ_i w_i F̂_i ⊙ Δ_i / Σ_i w_i F̂_i, F̂_i = max(F_i / r_i, floor), r_i the RMS of F_i over all leaves.

    With γ = 1 it is Σ_i w_i F̂_i ⊙ θ_i / Σ_i w_i F̂_i.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        fishers: the diagonals of their Fisher matrices, by the same names or in the same order: `diagonal_fisher`, or
            `smat_fn.optim.second_moments`; any dtype.
        coef: γ, finite.
        normalize: False leaves out the division by r_i: r_i = 1.
        floor: positive; where no expert's loss depends on a coordinate, it makes the mean.
        weights: w_i by the experts' names, not negative, 1 for those not named; one may be {glob: number} by leaf.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Matena and Raffel, "Merging models with Fisher-weighted averaging", 2022; model_merging/merging.py of
        mmatena/model_merging at f2d1677. There the norm is L2, the floor comes first, in units of F_i, and by default
        it is of the first model alone, whose value a coordinate takes that no expert's loss depends on.
    """
    check(base, experts, coef_problems(coef))
    vector = fisher_vector(base, experts, fishers, normalize=normalize, floor=floor, weights=weights)
    return applied(base, vector, coef=coef)


def fisher_vector(
    base: Params,
    experts: Experts,
    fishers: Experts,
    *,
    normalize: bool = True,
    floor: float = 1e-6,
    weights: Numbers | None = None,
) -> Leaves:
    """Σ_i w_i F̂_i ⊙ Δ_i / Σ_i w_i F̂_i: flat, floating-point leaves only, for `apply_vector`.

    Args: as `fisher`.
    """
    weights = NONE if weights is None else weights
    start, flat = check(base, experts, _problems(experts, floor, weights))
    leaves = InMemory(start, flat, flat_statistics("fisher", start, list(flat), fishers))
    own: Any = {"normalize": normalize, "floor": floor, "weights": weights}  # the option has no weights by leaf
    return vector_by_rule(Fisher(**own).rule(leaves), start, flat)


def fuse(
    piece: Piece, fishers: Sequence[Tensor], scales: Sequence[float], weights: Sequence[float], floor: float
) -> Tensor:
    """The merged vector of a chunk. Args: fishers: of the leaf, flat; these, scales and weights in experts' order."""
    stop = piece.start + piece.deltas[0].numel()
    top, bottom = torch.zeros_like(piece.deltas[0]), torch.zeros_like(piece.deltas[0])
    for delta, own, scale, weight in zip(piece.deltas, fishers, scales, weights, strict=True):
        # by the power of two while float64, since diagonals may be outside of float32's range as a whole
        power = _power(scale)
        share = own[piece.start : stop].to(delta.device, torch.float64, copy=True).mul_(power).to(delta.dtype)
        share.mul_(scale / power).clamp_(min=floor).mul_(weight)
        bottom += share
        top += share.mul_(delta)
    return top.div_(bottom)


def scale_of(leaves: Iterable[tuple[str, Tensor]]) -> float:
    """1 / RMS of all coordinates of some leaves in any order, 0 where they are 0; summed in float64, by halves.

    Raises: ValueError for a leaf with a negative value, or one that is not finite.
    """
    sums, count = list[float](), 0
    for label, leaf in leaves:
        flat, count = leaf.detach().reshape(-1), count + leaf.numel()
        parts = [part for part in flat.split(arithmetic.BLOCK) if len(part)]
        if parts and not bool(torch.stack([((part >= 0) & part.isfinite()).all() for part in parts]).all()):
            raise ValueError(
                f"{label} has values that are negative or not finite, and a diagonal of a Fisher matrix is a mean of "
                "squared gradients: compute it again, by merge.py statistics or "
                "smat_fn.merge.statistics.diagonal_fisher"
            )
        if parts:
            sums += torch.cat([halved(part.double().square()[None]) for part in parts]).tolist()
    total = math.fsum(sums)
    return (count / total) ** 0.5 if total else 0.0


def _power(number: float) -> float:
    """The power of two at or below a positive number; 1 for 0."""
    return math.ldexp(1.0, math.frexp(number)[1] - 1) if number else 1.0


def _of(weights: Numbers, names: Sequence[str], path: str) -> list[float]:
    """Weights up to a common power of two. Raises: ValueError where all weights of a leaf are 0."""
    found = [number(weights, name, path, 1.0) for name in names]
    if not any(found):
        raise ValueError(f"all weights of parameter {path!r} are 0: leave one expert in")
    power = _power(max(found))  # they may all be outside of float32's range
    return [weight / power for weight in found]


def _problems(experts: Experts, floor: float, weights: Numbers) -> list[str]:
    if wrong := type_problems(floor=floor) + number_problems(experts, weights):
        return wrong
    problems = [] if 0 < floor < float("inf") else [f"floor is {floor}, must be a positive finite number"]
    names = names_of(experts)
    given = [w for own in weights.values() for w in (own.values() if isinstance(own, Mapping) else [own])]
    problems += [f"a weight is {w}, must not be negative" for w in given if math.isfinite(w) and w < 0]
    if names and not problems and all(weights.get(name, 1.0) == 0 for name in names):
        problems.append("all weights are 0: leave one expert in")
    return problems


@dataclass(frozen=True)
class Fisher(Weighted):
    """Fisher-weighted averaging: the mean of each coordinate, weighted by the experts' diagonal Fisher information."""

    name = "fisher"
    function = staticmethod(fisher_vector)
    semantics: ClassVar = {"mergekit": UNKNOWN}
    grid: ClassVar = WIDE
    selects: ClassVar = ("weights_from",)
    coef: float | None = None
    """Factor of the merged change (gamma); 1 gives the authors' weighted mean. Set it, or use --search."""
    weights_from: Literal["fisher", "adam"] = "fisher"
    """Each expert's fisher.safetensors (merge.py statistics), or the second moments of `train.py --keep-moments`."""
    normalize: bool = True
    """True: divide each diagonal by its RMS; False: take diagonals as they are."""
    floor: float = 1e-6
    """Minimum of the entries of a diagonal, after the division by its RMS."""

    def statistics(self) -> str:
        return self.weights_from

    def rule(self, leaves: Mapped) -> Rule:
        names = list(leaves.experts)
        scales = [
            scale_of((f"{path!r} of the statistics of {name!r}", leaves.statistic(name, path)) for path in leaves.coefs)
            for name in names
        ]
        if not self.normalize:
            scales = [1.0] * len(names)

        def fuse_of(path: str) -> Fuse:
            own = [leaves.statistic(name, path).detach().reshape(-1) for name in names]
            weights = _of(self.weights, names, path)
            return partial(fuse, fishers=own, scales=scales, weights=weights, floor=self.floor)

        return Rule(fuse_of)
