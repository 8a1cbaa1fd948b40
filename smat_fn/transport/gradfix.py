"""GradFix: of an expert's change, the coordinates that lower the task's loss at the new base."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch

from .. import tree
from ..errors import problems_of
from ..merge.parts.inputs import Leaves, coef_problems
from ..merge.parts.vectors import applied
from ..merge.statistics import row_gradients
from ..types import LossFn, Micro, Params
from .changes import changes

Vote = Literal["mean", "majority"]


def gradfix(new: Params, old: Params, expert: Params, signs: Params, *, coef: float = 1.0) -> Params:
    """θ_new + γ m ⊙ (θ − θ_old), m = 1 where sign(θ − θ_old) = s, else 0.

    With s = −sign ∇L(θ_new) the sum of the kept coordinates times their gradients is negative, so that for small γ the
    loss is lower than at θ_new. A coordinate with s = 0 stays as in the new base.

    Args:
        new: the base that receives the change, any tree.
        old: the base that the expert was trained from, a tree of new's names and shapes.
        expert: θ, a tree of the same names and shapes.
        signs: s of every floating-point leaf, of any dtype: `descent_signs`. Only the signs are read.
        coef: γ, finite.

    Returns:
        A new tree of new's structure and dtypes; non-floating leaves are new's.

    Raises:
        ValueError: lists every problem of values, names, shapes and dtypes.

    Source: Rinaldi et al., "Gradient-sign masking for task vector transport across pre-trained models", 2026
        (arXiv 2510.09658).
    """
    return applied(new, gradfix_vector(new, old, expert, signs, coef_problems(coef)), coef=coef)


def gradfix_vector(new: Params, old: Params, expert: Params, signs: Params, problems: Sequence[str] = ()) -> Leaves:
    """m ⊙ (θ − θ_old): flat, floating-point leaves only, for `apply_vector`.

    Args: as `gradfix`; problems: found before, raised with those found here.
    """
    given = tree.flatten(signs)
    wanted = {path: leaf for path, leaf in tree.flatten(new).items() if leaf.is_floating_point()}
    found = [*problems, *problems_of(lambda: tree.check_same(wanted, "new", signs=given))]
    _, vector = changes(new, old, expert, found, same_shapes=True)
    for path, change in vector.items():
        vector[path] = torch.where(change.sign() == given[path].to(change).sign(), change, torch.zeros_like(change))
    return vector


def descent_signs(loss_fn: LossFn, new: Params, rows: Iterable[Micro], *, vote: Vote = "mean") -> Leaves:
    """s of `gradfix`: −sign Σ_r w_r ∇ℓ_r (mean), or sign Σ_r −sign ∇ℓ_r (majority), at θ_new.

    Args:
        loss_fn: ``(params, batch) -> (loss, aux)`` of the task.
        new: θ_new, any tree of floating-point tensors.
        rows: batches with their weights, as ``split_rows(batch, rows)`` of `smat_fn.data.batching` gives them; with
            "majority" each one, of a single row or more, has a vote.
        vote: "mean" or "majority".

    Returns:
        s by parameter name, int8; 0 where gradients are 0 or votes equal.

    Raises:
        ValueError: there are no rows, another vote, or a gradient that is not finite.

    Source: as `gradfix`, section 3; "majority" is there for few rows.
    """
    if vote not in get_args(Vote):
        raise ValueError(f"vote is {vote!r}, choose mean or majority")
    total = {path: torch.zeros_like(leaf, dtype=torch.float32) for path, leaf in tree.flatten(new).items()}
    for grads, weight in row_gradients(loss_fn, new, rows):
        for path, grad in grads.items():
            total[path] -= grad.float().sign() if vote == "majority" else grad.float() * weight
    tree.check_finite(total, "the gradient")
    return {path: leaf.sign().to(torch.int8) for path, leaf in total.items()}
