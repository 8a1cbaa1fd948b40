"""Trees in an optimizer's state: the momentum, for methods that climb along it, and checks that they fit params."""

from collections.abc import Mapping
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
        ValueError: a leaf has no momentum.
    """
    leaves, found = tree.flatten(params), _collect(opt_state)
    lacking = [path for path in leaves if path not in found]
    if lacking:
        raise ValueError(
            f"the optimizer keeps no momentum of {len(lacking)} of {len(leaves)} leaves, first {lacking[0]!r}: take "
            "adam, adamw or muon of smat_fn.optim, or one whose state has it in a field mu or momentum"
        )
    return tree.unflatten(params, found)


def check_kind(state: Any, *fields: str) -> None:
    """Raises: ValueError for a state that lacks one of these fields: it is of another optimizer."""
    if lacking := [name for name in fields if not hasattr(state, name)]:
        raise ValueError(
            f"the optimizer's state is a {type(state).__name__}, which has no {lacking[0]}: give what init or update "
            "of this optimizer returned"
        )


def check_state(leaves: Mapping[str, Tensor], **trees: Mapping[str, Tensor]) -> None:
    """The flat trees of a state, by field, have the names and shapes of the parameters.

    Raises: ValueError that lists leaves that differ.
    """
    try:
        tree.check_same(leaves, "params", **trees)
    except ValueError as error:
        raise ValueError(
            f"the optimizer's state is of other parameters ({error}): give what its init(params) or update returned "
            "for these"
        ) from None


def _collect(state: Any) -> dict[str, Tensor]:
    fields = getattr(state, "_fields", ())
    found: dict[str, Tensor] = {}
    for name in ("rest", "chosen", "optimizer"):
        found |= _collect(getattr(state, name)) if name in fields else {}
    for name in ("mu", "momentum"):
        found |= tree.flatten(getattr(state, name)) if name in fields else {}
    return found
