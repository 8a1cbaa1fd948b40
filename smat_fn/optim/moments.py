"""Adam's second moments as estimates of a diagonal Fisher matrix."""

from typing import Any

from torch import Tensor

from .. import tree
from .adam import AdamState


def second_moments(state: Any, *, beta: float = 0.999) -> dict[str, Tensor]:
    r"""The bias-corrected second moments in an optimizer's state: ``nu / (1 - beta^t)``, by parameter name.

    The running mean of squared gradients of batches, as they reached the optimizer: clipped, and for SMAT those of
    simulated states among them. With one row per batch it estimates the diagonal of the empirical Fisher matrix.

    Args:
        state: of `adam`, `adamw`, `averaged`, `chain`, `partition` of these; after one update at least.
        beta: decay rate of the second moments.

    Returns:
        Float32 leaves (float64 of float64 moments), only of parameters that Adam updates.

    Raises:
        ValueError: the state is that before the first update.
    """
    if isinstance(state, AdamState):
        if int(state.step) < 1:
            raise ValueError("second_moments: the state is of step 0, there is no moment yet: give it after an update")
        corrected = 1 - beta ** int(state.step)
        return {path: leaf.to(tree.compute_dtype(leaf)) / corrected for path, leaf in tree.flatten(state.nu).items()}
    found: dict[str, Tensor] = {}
    for name in getattr(state, "_fields", ()):
        found |= second_moments(getattr(state, name), beta=beta)
    return found
