"""Norms of task vectors: the diagnosis of DisTaC. If the norms of experts differ much, the longest dominates."""

from collections.abc import Mapping

from ... import errors
from ...types import Params
from ..parts.arithmetic import gram
from ..parts.inputs import Experts, check

UNEQUAL = 3.0  # times that norms may differ before a merge says so


def norms(base: Params, experts: Experts) -> dict[str, float]:
    """‖Δ_i‖ by expert, Frobenius, over all floating-point leaves together; summed in float64.

    Args:
        base: tree that the experts were trained from.
        experts: {name: tree} or a list of trees.

    Raises:
        ValueError: lists what does not fit.

    Source: Yoshida et al., "DisTaC: conditioning task vectors via distillation for robust model merging", 2025, whose
        diagnosis it is; the distillation after shortening needs data and is not here.
    """
    start, flat = check(base, experts)
    squares = dict.fromkeys(flat, 0.0)
    for path, leaf in start.items():
        if leaf.is_floating_point():
            for name, leaves in flat.items():
                squares[name] += gram([leaves[path]], leaf)[0][0]
    return {name: square**0.5 for name, square in squares.items()}


def norms_note(sizes: Mapping[str, float], ratio: float = UNEQUAL) -> str:
    """A note for the user on `norms` that differ by more than ``ratio``; an empty text where none do."""
    if not sizes:
        return ""
    short, long = (choose(sizes, key=sizes.__getitem__) for choose in (min, max))
    if sizes[long] <= ratio * sizes[short]:
        return ""
    times = f"{sizes[long] / sizes[short]:.1f} times as long as" if sizes[short] else "longer than"
    return (
        f"the task vector of {long!r} (norm {sizes[long]:.3g}) is {times} that of {short!r} ({sizes[short]:.3g}): "
        "the longest decides a merge"
    )


def shortening(sizes: Mapping[str, float]) -> dict[str, float]:
    """‖Δ‖ of the shortest / ‖Δ_i‖ of `norms`: the factor that makes every task vector as long as the shortest.

    Raises:
        ValueError: lists task vectors that are zero.
    """
    errors.raise_problems([f"the task vector of {name!r} is zero: leave it out" for name, s in sizes.items() if not s])
    return {name: min(sizes.values()) / size for name, size in sizes.items()}
