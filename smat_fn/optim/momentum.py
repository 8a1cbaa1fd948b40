"""The momentum in an optimizer's state, for methods that take an ascent step along it."""

from typing import Any

from torch import Tensor

from .. import tree
from ..types import Params


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
