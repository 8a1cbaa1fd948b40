"""Shared by mergers of matrices: options, the rule for folders, and decompositions that drop what is 0."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from ...execution import transformed, unrounded_everywhere
from . import tall
from .arithmetic import add, divided
from .chunks import Fuse
from .inputs import Experts
from .merger import UNKNOWN, WIDE, Mapped, Merger, Rule
from .per_expert import Weighted

Others: TypeAlias = Literal["mean", "zero"]
LARGEST = 2**31 - 1  # numbers of a matrix, and of what its SVD works in: (4 k + 7) k for k = min(rows, columns)
SIDE = 23169  # k at which these are exceeded, after which LAPACK's own count is negative, or small again
_NOT_FINITE = "parameter {!r} has no singular values, are all of its values finite?"
HELD = 64  # bytes per coordinate of a matrix that decompositions take, beside the task vectors
Mix: TypeAlias = Callable[[list[Tensor]], Tensor]  # the merged vector of a matrix, from its task vectors


def other_problems(others: str, skip: Sequence[str]) -> list[str]:
    """Validation errors for ``others`` and ``skip``."""
    problems = [] if others in ("mean", "zero") else [f"others is {others!r}, must be 'mean' or 'zero'"]
    return problems + skip_problems(skip)


def skip_problems(skip: Sequence[str]) -> list[str]:
    """Validation errors for ``skip``."""
    if isinstance(skip, str):
        return [f"skip is the text {skip!r}: pass a list of globs"]
    fits = isinstance(skip, Sequence) and all(isinstance(glob, str) for glob in skip)
    return [] if fits else [f"skip is {skip!r}: pass a list of globs"]


def is_matrix(path: str, shape: Sequence[int], skip: Sequence[str]) -> bool:
    """Whether a leaf has two dimensions, none of them 0, and no glob of ``skip`` matches its path."""
    return len(shape) == 2 and min(shape) > 0 and not any(fnmatchcase(path, glob) for glob in skip)


def matrices_of(blocks: Iterable[list[Tensor]], shape: Sequence[int]) -> list[Tensor]:
    """Whole task matrices of `Mapped.blocks`, in new memory."""
    found, start = torch.empty(0), 0
    for deltas in blocks:
        found = found if start else deltas[0].new_empty(len(deltas), math.prod(shape))
        for whole, delta in zip(found, deltas, strict=True):
            whole[start : start + len(delta)] = delta
        start += len(deltas[0])
    return [whole.view(*shape) for whole in found]


def rest(deltas: list[Tensor], others: Others) -> Tensor:
    """The mean of the task vectors, or zero."""
    return divided(add(deltas), len(deltas)) if others == "mean" else torch.zeros_like(deltas[0])


def of_matrix(path: str, deltas: list[Tensor], mix: Mix) -> Tensor:
    """``mix(deltas)``. Raises: ValueError that names a matrix that is not finite, as LAPACK may take it in silence."""
    read = deltas[0].device.type == "cpu" and not transformed()
    if read and not all(bool(delta.isfinite().all()) for delta in deltas):
        raise ValueError(_NOT_FINITE.format(path))
    with _named(path):
        return mix(deltas)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Name the matrix in errors of decompositions; round no product as the caller's ``torch.autocast`` would."""
    try:
        with unrounded_everywhere():
            yield
    except torch.linalg.LinAlgError as error:
        raise ValueError(f"{_NOT_FINITE.format(path)} {error}") from error


def matrix_rule(
    leaves: Mapped,
    skip: Sequence[str],
    mix: Callable[[str], Mix],
    other: Mix,
    streams: Callable[[str], bool] = lambda _: False,
) -> Rule:
    """``mix(path)`` of whole matrices, ``other`` of chunks of other leaves and of matrices named by ``skip``.

    Args: streams: matrices of which ``mix(path)`` takes a block of rows at a time, as many as they have columns.
    """

    def matrix(path: str) -> bool:
        return is_matrix(path, leaves.shape(path), skip)

    def fuse(path: str) -> Fuse:
        if not matrix(path):
            return lambda piece: other(piece.deltas)
        columns = leaves.shape(path)[1]
        with _named(path):
            own = mix(path)
        return lambda piece: of_matrix(path, [delta.view(-1, columns) for delta in piece.deltas], own).reshape(-1)

    return Rule(
        fuse,
        whole=lambda path: matrix(path) and not streams(path),
        block=lambda path: leaves.shape(path)[1] ** 2 if matrix(path) and streams(path) else 0,
    )


def svd(matrix: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """U, the diagonal of Σ, Vᵀ; singular values that are 0 up to rounding are set to 0, and their vectors too.

    Args: floor: singular values up to it are 0 too.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    real = is_real(values, matrix) & (values > floor)
    return left * real, values * real, right * real[:, None]


def leading(parts: tuple[Tensor, Tensor, Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first ``count`` triplets of `svd`: U (rows, count), the diagonal of Σ, V (columns, count)."""
    left, values, right = parts
    return left[:, :count], values[:count], right[:count].mT


def orthonormal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (of a wide one, rows): P Qᵀ of P D Qᵀ. Directions of 0 are left out.

    Source: Schönemann, "A generalized solution of the orthogonal Procrustes problem", 1966.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left * is_real(values, matrix)) @ right


def is_real(values: Tensor, matrix: Tensor) -> Tensor:
    """Which singular values are not 0 up to rounding (`tall.negligible`)."""
    return values > tall.negligible(matrix.shape, values.dtype) * values[0]


class OfMatrices(Merger):
    """A merger of whole matrices, but for those named by its option ``skip``."""

    semantics: ClassVar = {"mergekit": UNKNOWN}
    skip: tuple[str, ...]

    def streams(self, shape: Sequence[int], experts: int) -> bool:
        """Whether a matrix is merged by blocks of rows (`tall`)."""
        return False

    def memory(self, leaves: Mapping[str, Tensor], experts: int) -> int:
        return max((self.held(shape, experts) for _, shape in self._matrices(leaves)), default=0)

    def size_problems(self, leaves: Mapping[str, Tensor], experts: int) -> list[str]:
        return [
            f"parameter {path!r} is {rows} x {columns}, and libraries for singular values count in 32 bits: they take "
            f"at most {LARGEST} numbers, and {SIDE} on the shorter side; name it in `skip`"
            for path, (rows, columns) in self._matrices(leaves)
            if not self.streams((rows, columns), experts)
            if rows * columns > LARGEST or min(rows, columns) > SIDE
        ]

    def _matrices(self, leaves: Mapping[str, Tensor]) -> list[tuple[str, torch.Size]]:
        return [(path, leaf.shape) for path, leaf in leaves.items() if is_matrix(path, leaf.shape, self.skip)]

    def held(self, shape: Sequence[int], experts: int) -> int:
        """Bytes that a matrix takes."""
        if self.streams(shape, experts):
            return tall.held(shape[1], experts)
        return (4 * experts + HELD) * math.prod(shape)

    def work(self, shape: Sequence[int]) -> float:
        return super().work(shape) * (min(shape) if len(shape) == 2 else 1)


@dataclass(frozen=True)
class Spectral(Weighted, OfMatrices):
    """A merger of matrices. Other leaves, and matrices named by ``skip``, take the mean of the task vectors or 0."""

    grid: ClassVar = WIDE
    coef: float | None = None
    """gamma, the factor of the merged update. Presets have none: set it, or choose it on dev with --search."""
    others: Others = "mean"
    """Parameters that are not matrices: the mean of the task vectors, or no change."""
    skip: tuple[str, ...] = ()
    """Globs of matrices to treat in the same way, such as embeddings too large to decompose: "*embed*"."""

    def mix(self) -> Mix:
        """The arithmetic on one matrix."""
        raise NotImplementedError

    def mix_rows(self, blocks: tall.Blocks, shape: Sequence[int], experts: int) -> Mix:
        """The same for a block of rows of a matrix that `streams`."""
        raise NotImplementedError

    def problems(self, experts: Experts) -> list[str]:
        return other_problems(self.others, self.skip) + super().problems(experts)

    def plain(self, leaves: Mapped) -> Rule:
        def streams(path: str) -> bool:
            return self.streams(leaves.shape(path), len(leaves.experts))

        def mix(path: str) -> Mix:
            if streams(path):
                return self.mix_rows(partial(tall.row_blocks, leaves, path), leaves.shape(path), len(leaves.experts))
            return self.mix()

        return matrix_rule(leaves, self.skip, mix, lambda deltas: rest(deltas, self.others), streams)
