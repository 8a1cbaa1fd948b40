"""Shared by mergers that make a model for each task: one vector, and a mask and a number for each task."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from . import arithmetic
from .looped import Shared
from .merger import UNKNOWN, Mapped, Merger


class Masked(Merger):
    """A merger of which one folder holds the models of all tasks: θ₀ + γ λ_t m_t ⊙ τ, one τ for all."""

    semantics: ClassVar = {"mergekit": UNKNOWN}
    task: str | None
    scaled: ClassVar[bool] = False  # λ_t is not 1

    def place(self, leaves: Mapped) -> int:
        """Position of the expert that the model is for. Raises: ValueError that lists the names."""
        names = list(leaves.experts)
        if self.task not in names:
            raise ValueError(f"task {self.task!r} is not an expert, choose one of {', '.join(map(repr, names))}")
        return names.index(self.task)

    def shared(self, deltas: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """τ of a block, and the mask of every task."""
        raise NotImplementedError

    def shared_by_loop(self) -> Shared | None:
        """The same of a window by a compiled loop, with the sums that `scale` takes; None: there is none."""
        return None

    def scale(self, leaves: Iterable[tuple[int, Sequence[float]]]) -> float:
        """λ_t, from the size of every leaf and the sums of |Δ_t| and of |m_t ⊙ τ| in it."""
        return 1.0

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        if not self.scaled and self.task is not None:
            return 0
        return arithmetic.blocks_memory(leaves, experts)


def of_all_tasks(config: object) -> bool:
    """Whether a merger makes one folder for all tasks: it could make a model for one of them, and none is named."""
    return isinstance(config, Masked) and config.task is None
