"""SCE: select the coordinates that vary most, weigh experts by their squares, erase minority signs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..types import Params
from .parts import looped
from .parts.arithmetic import add, divided, elected, gram_memory, largest, squares, step_on
from .parts.chunks import Fuse
from .parts.inputs import Experts
from .parts.merger import Mapped, Rule, merged, vector_function
from .parts.per_expert import Numbers, Weighted
from .parts.ranks import among_largest

LEAST = 1e-6  # of the weights that a coordinate is divided by


def sce(
    base: Params,
    experts: Experts,
    *,
    coef: float = 1.0,
    density: float = 1.0,
    floor: float = 1e-6,
    weights: Numbers | None = None,
) -> Params:
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
        weights: by expert, finite: Δ_i is multiplied by it first. A number, or {glob: number} by leaf; 1 for others.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: Wan et al., "FuseChat: knowledge fusion of chat models", 2024; mergekit 0.1.5, merge_methods/sce.py.
    """
    return merged(Sce, **locals())


def selected(deltas: Sequence[Tensor], *, density: float, floor: float) -> Tensor:
    """The merged vector of a whole leaf of which only a share of the coordinates stays."""
    keep = _varying(deltas, density)

    def kept() -> Iterator[list[Tensor]]:
        for *vectors, own in _blocks(*deltas, keep):
            yield [vector * own for vector in vectors]

    shares = shares_of(squares(kept()), keep.numel(), floor)
    return torch.cat([erased(vectors, shares) for vectors in kept()])


def shares_of(norms: Sequence[float], size: int, floor: float) -> list[float]:
    """w of every expert, from the squared norms of a leaf's task vectors."""
    means = [norm / max(size, 1) for norm in norms]
    total = sum(means)
    return [mean / total for mean in means] if total and total >= floor else [1 / len(means)] * len(means)


def erased(deltas: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The merged vector of a chunk: weighted means without minority signs."""
    sign = elected(deltas)
    above, below = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in zip(deltas, shares, strict=True):
        share = (delta.sign() == sign).to(sign.dtype).mul_(weight)
        above += delta * share
        below += share
    return above / below.clamp_(min=LEAST)


def _varying(deltas: Sequence[Tensor], density: float) -> Tensor:
    """1 for the coordinates of largest variance, 0 for the others."""
    variance = torch.cat([_variance(vectors) for vectors in _blocks(*deltas)])
    count = int(variance.count_nonzero().cpu().float() * density)
    # abs: a NaN may have a sign
    return among_largest(variance.abs_(), count).to(variance.dtype)


def _variance(deltas: Sequence[Tensor]) -> Tensor:
    """The variance over the experts times their number."""
    # from the first one: a sum of equal changes, divided by their number, may be rounded to another change
    mean = divided(add(delta - deltas[0] for delta in deltas), len(deltas))
    return add((delta - deltas[0]).sub_(mean).square_() for delta in deltas)


def _blocks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same coordinates of flat vectors, on the CPU as many as stay in a core's cache through all operations."""
    return zip(*(vector.split(step_on(vector.device, len(vectors))) for vector in vectors), strict=True)


@dataclass(frozen=True)
class Sce(Weighted):
    """SCE: keep coordinates of largest variance, drop minority signs, weight experts by their mean squared change."""

    name = "sce"
    uneven = True
    coef: float = 1.0
    """gamma; 1 is mergekit's."""
    density: float = 1.0
    """Share of each parameter's coordinates to keep, largest variance over the experts first."""
    floor: float = 1e-6
    """Weight experts equally in parameters where their mean squared changes sum to less than this; 0: never."""

    def problems(self, experts: Experts) -> list[str]:
        density, floor = self.density, self.floor
        problems = [] if 0 <= density <= 1 else [f"density is {density}, must be in [0, 1]: it is the kept share"]
        problems += [] if 0 <= floor < float("inf") else [f"floor is {floor}, must be finite and at least 0"]
        return problems + super().problems(experts)

    def plain(self, leaves: Mapped) -> Rule:
        def shares(path: str) -> list[float]:
            diagonal = [row[i] for i, row in enumerate(leaves.gram(path, diagonal=True))]
            return shares_of(diagonal, leaves.shape(path).numel(), self.floor)

        def fuse(path: str) -> Fuse:
            if self.density < 1:
                return lambda piece: selected(piece.deltas, density=self.density, floor=self.floor)
            own = shares(path)
            return lambda piece: erased(piece.deltas, own)

        def loop(path: str) -> looped.Loop | None:
            if self.density < 1:
                return None
            return partial(looped.combined, kind="SCE", one=LEAST, by_expert=shares(path))

        return Rule(fuse, whole=lambda _: self.density < 1, loop=loop)

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return (8 * experts + 48) * largest(leaves) if self.density < 1 else gram_memory(leaves, experts)


sce_vector = vector_function(Sce)
