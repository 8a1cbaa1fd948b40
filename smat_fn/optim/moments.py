"""Moments in an optimizer's state: the second ones as a diagonal Fisher matrix, the momentum for methods that climb."""

from numbers import Real
from typing import Any

from torch import Tensor

from .. import tree
from ..types import Params
from .adam import AdamState


def second_moments(state: Any, *, beta: float = 0.999) -> dict[str, Tensor]:
    r"""The bias-corrected second moments in an optimizer's state: ``nu / (1 - beta^t)``, by parameter name.

    The running mean of squared gradients of batches, as they reached the optimizer: clipped, and for SMAT those of
    simulated states among them. With one row per batch it estimates the diagonal of the empirical Fisher matrix.

    Args:
        state: of `adam`, `adamw`, `averaged`, `chain`, `partition` of these; after one update at least.
        beta: decay rate of the second moments, in [0, 1).

    Returns:
        Float32 leaves (float64 of float64 moments), only of parameters that Adam updates.

    Raises:
        ValueError: beta is out of range; the state has no second moments, or is that before the first update.
    """
    if not (isinstance(beta, Real) and 0 <= beta < 1):
        raise ValueError(f"second_moments: beta is {beta!r}, must lie in [0, 1)")
    if not (states := _adam_states(state)):
        raise ValueError(f"second_moments: a {type(state).__name__} has none: give the state of adam or adamw")
    found: dict[str, Tensor] = {}
    for own in states:
        if int(own.step) < 1:
            raise ValueError("second_moments: the state is of step 0, there is no moment yet: give it after an update")
        corrected = 1 - beta ** int(own.step)
        found |= {path: leaf.to(tree.compute_dtype(leaf)) / corrected for path, leaf in tree.flatten(own.nu).items()}
    return found


def _adam_states(state: Any) -> list[AdamState]:
    if isinstance(state, AdamState):
        return [state]
    return [own for name in getattr(state, "_fields", ()) for own in _adam_states(getattr(state, name))]


def momentum_of(opt_state: Any, params: Params) -> Params:
    r"""The running mean of gradients in an optimizer's state, as a tree like params; no copy.

    A state's field ``mu`` (Adam's first moments) or ``momentum`` (Muon, SGD with momentum) holds it by the paths of
    params; a state inside it, in a field ``chosen``, ``rest`` or ``optimizer``, holds that of the other leaves.

    Args:
        opt_state: of `smat_fn.optim`, or any NamedTuple with these fields.
        params: what the optimizer trains.

    Returns:
        tree of params' structure and shapes.

    Raises:
        ValueError: a leaf has no momentum, or one of another shape.
    """
    leaves, found = tree.flatten(params), _collect(opt_state)
    lacking = [path for path in leaves if path not in found]
    if lacking:
        raise ValueError(
            f"the optimizer keeps no momentum of {len(lacking)} of {len(leaves)} leaves, first {lacking[0]!r}: take "
            "adam, adamw or muon of smat_fn.optim, or one whose state has it in a field mu or momentum"
        )
    tree.check_state(leaves, momentum={path: found[path] for path in leaves})
    return tree.unflatten(params, found)


def _collect(state: Any) -> dict[str, Tensor]:
    fields = getattr(state, "_fields", ())
    found: dict[str, Tensor] = {}
    for name in ("rest", "chosen", "optimizer"):
        found |= _collect(getattr(state, name)) if name in fields else {}
    for name in ("mu", "momentum"):
        found |= tree.flatten(getattr(state, name)) if name in fields else {}
    return found
