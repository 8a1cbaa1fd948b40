"""TALL mask: the sum of all task vectors where one task needs it, a model for that task."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..types import Params
from .consensus import needs, ratio_problems
from .parts import looped
from .parts.arithmetic import add, zeroed
from .parts.chunks import Piece
from .parts.inputs import Experts
from .parts.masked import Masked
from .parts.merger import Mapped, Rule, merged, vector_function


def tall_mask(base: Params, experts: Experts, *, task: str, ratio: float, coef: float = 1.0) -> Params:
    """θ₀ + γ m_t ⊙ τ, τ = Σ_i Δ_i, m_t = 1 where |Δ_t| > ratio · |τ − Δ_t|, else 0: one model for each task.

    The masks, a bit a coordinate, and τ are all that the experts' models need. What the experts share is stored once.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.
        task: name of the expert that the model is for.
        ratio: λ of the mask, at least 0; the authors choose it on the task's validation data among 0.2 to 0.6.
        coef: γ, finite; 1 in the paper.

    Returns:
        A new tree of base's structure and dtypes; non-floating leaves are base's.

    Raises:
        ValueError: lists every problem of values, structure and shapes.

    Source: as `consensus`.
    """
    return merged(TallMask, **locals())


def fuse(piece: Piece, place: int, ratio: float) -> Tensor:
    """The merged vector of a chunk."""
    total = add(piece.deltas)
    return zeroed(total, needs(piece.deltas[place], total, ratio))


@dataclass(frozen=True)
class TallMask(Masked):
    """TALL mask: a model for one task. It adds the sum of all changes, but only on coordinates that the task needs."""

    name = "tall_mask"
    ratio: float
    """The task needs a coordinate if its change exceeds this factor times the sum of the others' changes."""
    task: str | None = None
    """Expert whose model is written. Without it, the output is one folder: the vector, and a mask for each task."""
    coef: float = 1.0
    """Factor of the merged change (gamma); the authors take 1."""

    def problems(self, experts: Experts) -> list[str]:
        return ratio_problems(self.ratio)

    def rule(self, leaves: Mapped) -> Rule:
        place = self.place(leaves)
        return Rule(
            lambda _: lambda piece: fuse(piece, place, self.ratio),
            loop=lambda _: partial(looped.combined, kind="TALL_MASK", one=self.ratio, two=place),
        )

    def shared(self, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = add(deltas)
        return total, [needs(delta, total, self.ratio) for delta in deltas]

    def shared_by_loop(self) -> looped.Shared:
        return partial(looped.of_all_tasks, kind="TALL_MASK", ratio=self.ratio)


tall_mask_vector = vector_function(TallMask)
