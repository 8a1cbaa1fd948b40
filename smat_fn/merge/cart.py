"""CART: task arithmetic around the experts' mean, with task vectors of low rank."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import all_at_once, raise_problems
from ..types import Params
from .parts.arithmetic import add, divided
from .parts.chunks import merge_weights
from .parts.inputs import Experts, check_alone, coef_problems, type_problems
from .parts.merger import Mapped, Rule
from .parts.spectral import Mix, OfMatrices, is_matrix, matrix_rule, of_matrix, skip_problems


def cart(experts: Experts, *, coef: float, share: float = 0.08, skip: Sequence[str] = ()) -> Params:
    """θ̄ + γ Σ_i [θ_i − θ̄]_k per matrix, θ̄ the experts' mean, [·]_k the k leading singular triplets.

    ``k = ⌈share · min(rows, columns)⌉``. Leaves that are not matrices are θ̄.

    Args:
        experts: {name: tree} or a list of trees of the same parameter names, shapes, dtypes and non-floating values.
        coef: γ (λ in the paper), finite.
        share: of singular values, in (0, 1]; the paper finds 0.08 to do well.
        skip: globs of matrices that count as other leaves.

    Returns:
        A new tree of the first expert's structure, rounded once. The last bits are those of the library that computes
        the SVD.

    Raises:
        ValueError: lists every problem of values, structure and shapes; or names a matrix that is not finite.

    Source: Choi et al., "Revisiting weight averaging for model merging", 2024 (arXiv 2412.12153); k:
        merge/methods/cart.py of apanariello4/merge-and-rebase at 345c570.
    """
    wrong = type_problems(share=share) or ([] if 0 < share <= 1 else [f"share is {share}, must be in (0, 1]"])
    problems = [*coef_problems(coef), *wrong, *skip_problems(skip)]
    flat = all_at_once(problems, lambda: check_alone(experts, batches=True))
    raise_problems(Cart(skip=tuple(skip)).size_problems(next(iter(flat.values())), len(flat)))

    def fuse(path: str, values: Iterator[Tensor]) -> Tensor:
        every = [value.contiguous() for value in values]
        if is_matrix(path, every[0].shape, skip):
            return of_matrix(path, every, partial(centred, coef=coef, share=share))
        return _mean(every)

    return merge_weights(experts, flat, fuse)


def centred(weights: list[Tensor], *, coef: float, share: float) -> Tensor:
    """θ̄ + γ Σ_i [θ_i − θ̄]_k of a matrix."""
    mean = _mean(weights)
    count = max(1, math.ceil(round(share * min(mean.shape), 9)))  # 0.07 of 100 is 7
    total = torch.zeros_like(mean)
    for weight in weights:
        left, values, right = torch.linalg.svd(weight - mean, full_matrices=False)
        total += (left[:, :count] * values[:count]) @ right[:count]
    return mean.add_(total.mul_(coef))


def _mean(weights: list[Tensor]) -> Tensor:
    return divided(add(weights), len(weights))


@dataclass(frozen=True)
class Cart(OfMatrices):
    """CART: the experts' mean plus the leading singular vectors of each expert's difference from it."""

    name = "cart"
    function = staticmethod(cart)
    based = False
    coef: float | None = None
    """gamma, the factor of the summed differences. Presets have none: set it, or choose it on dev with --search."""
    share: float = 0.08
    """Share of the singular values to keep of each difference."""
    skip: tuple[str, ...] = ()
    """Globs of matrices to average instead, such as embeddings too large to decompose: "*embed*"."""

    def rule(self, leaves: Mapped) -> Rule:
        def mix(path: str) -> Mix:
            return partial(centred, coef=leaves.coefs[path], share=self.share)

        return matrix_rule(leaves, self.skip, mix, _mean)
