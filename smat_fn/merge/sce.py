"""SCE: select the coordinates that vary most, weigh experts by their squares, erase minority signs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..types import Params
from .parts.arithmetic import add, divided, elected, largest
from .parts.chunks import Fuse
from .parts.inputs import Experts
from .parts.merger import Mapped, Merger, Rule, merged, vector_function
from .parts.ranks import among_largest


def sce(base: Params, experts: Experts, *, coef: float = 1.0, density: float = 1.0, floor: float = 1e-6) -> Params:
    """θ₀ + γ Σ_i a_i w_i Δ_i / max(Σ_i a_i w_i, 1e-6) in every coordinate that stays; 0 in the others.

    Of a leaf ⌊density · v⌋ coordinates stay, those whose variance over the experts is largest, equal ones by position;
    v is the number of variances above 0, and the product is rounded to float32, as in mergekit. a_i is 1 where Δ_i has
    the sign of Σ_i Δ_i, where 0 counts as +, else 0. ``w_i`` is the mean of Δ_i² over the leaf, what does not stay
    counting as 0, divided by the sum of these means; or 1/N where that sum is below ``floor``.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        coef: γ, finite; mergekit has none, which is 1.
        density: in [0, 1]; mergekit's ``select_topk``. 1 keeps the coordinates without variance too.
        floor: at least 0. mergekit's 1e-6 is above what many fine-tunes change: they get equal weights.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Wan et al., "FuseChat: knowledge fusion of chat models", 2024; mergekit 0.1.5, merge_methods/sce.py.
    """
    return merged(Sce, **locals())


def fused(deltas: Iterable[Tensor], *, density: float, floor: float) -> Tensor:
    """The merged vector of a leaf."""
    every = [delta.contiguous() for delta in deltas]
    if density < 1:
        keep = _varying(every, density)
        every = [delta * keep for delta in every]
    sums = torch.stack([delta.double().square().sum() for delta in every]).tolist()
    squares = [square / max(every[0].numel(), 1) for square in sums]
    total = sum(squares)
    weights = [square / total for square in squares] if total and total >= floor else [1 / len(every)] * len(every)
    sign = elected(every)
    above, below = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in zip(every, weights, strict=True):
        share = (delta.sign() == sign).to(sign.dtype).mul_(weight)
        above += delta * share
        below += share
    return above / below.clamp_(min=1e-6)


def _varying(deltas: list[Tensor], density: float) -> Tensor:
    """1 for the coordinates of largest variance, 0 for the others."""
    # from the first one: a sum of equal changes, divided by their number, may be rounded to another change
    mean = divided(add(delta - deltas[0] for delta in deltas), len(deltas))
    variance = add((delta - deltas[0]).sub_(mean).square_() for delta in deltas).reshape(-1)  # times N
    count = int(variance.count_nonzero().cpu().float() * density)
    # abs: a NaN may have a sign
    return among_largest(variance.abs_(), count).to(variance.dtype).view(deltas[0].shape)


@dataclass(frozen=True)
class Sce(Merger):
    """SCE: the coordinates that vary most over the experts, weighted by squared changes, without minority signs."""

    name = "sce"
    uneven = True
    coef: float = 1.0
    """gamma; 1 is mergekit's."""
    density: float = 1.0
    """Share of a parameter's coordinates to keep, those of largest variance."""
    floor: float = 1e-6
    """Experts are weighted equally where their mean squares sum to less than this; 0: never."""

    def problems(self, experts: Experts) -> list[str]:
        density, floor = self.density, self.floor
        problems = [] if 0 <= density <= 1 else [f"density is {density}, must be in [0, 1]: it is the kept share"]
        return problems + ([] if 0 <= floor < float("inf") else [f"floor is {floor}, must be finite and at least 0"])

    def rule(self, leaves: Mapped) -> Rule:
        def fuse(path: str) -> Fuse:
            shape = leaves.shape(path)
            return lambda piece: fused(
                (delta.view(shape) for delta in piece.deltas), density=self.density, floor=self.floor
            ).reshape(-1)

        return Rule(fuse, whole=lambda _: True)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return (8 * experts + 48) * largest(leaves)


sce_vector = vector_function(Sce)
