"""Noise in units of the update so far: sigma times the RMS of theta - theta_0, of the whole tree or leaf by leaf."""

import math
import operator

from torch import Tensor

from .. import tree
from ..execution import no_grad, whole_size
from ..grouped import elementwise
from ..types import Params, Where
from .state import Draw, of_leaves, simulate

FAR = 30  # times that sigma may differ from the update's RMS before users are warned


@no_grad
def update_rms(params: Params, base: Params) -> Tensor:
    """RMS of all coordinates of theta - theta_0, a 0-d float64 tensor on the device of the first leaf.

    Raises: ValueError for trees that do not match.
    """
    deltas = elementwise(operator.sub, *_matching(params, base), wide=True)
    return tree.global_norm(deltas) / math.sqrt(max(1, whole_size(deltas)))


@no_grad
def simulate_by_leaf(params: Params, base: Params, draw: Draw, *, where: Where | None = None) -> Params:
    r"""The simulated state with a sigma for each leaf: ``draw.sigma`` times the RMS of the leaf's update.

    ``theta_0 + alpha m (.) (theta - theta_0) + epsilon``, epsilon of a leaf of RMS ``sigma RMS(theta - theta_0)``
    there; alpha, mask and the unit noise are those of `simulate`, which a tree of one leaf at a time draws alike.

    Args:
        params, base, draw, where: as `simulate`.

    Returns:
        tree of params' structure, shapes and dtypes.

    Raises:
        ValueError: for trees that do not match.
    """
    leaves, origins = _matching(params, base)
    found: dict[str, Tensor] = {}
    for path, leaf in leaves.items():
        own, origin = {path: leaf}, {path: origins[path]}
        found |= simulate(own, origin, in_units_of(update_rms(own, origin), of_leaves(draw, own)), where=where)
    return tree.unflatten(params, found)


def beside_update(sigma: float, update: float) -> tuple[str, bool]:
    """Sigma beside the RMS of the update that was trained, and whether it is far from it."""
    times = sigma / update
    return f"sigma {sigma:g} is {times:.2g} times the RMS of the update, {update:.2g}", not 1 / FAR < times < FAR


def in_units_of(rms: Tensor, draw: Draw) -> Draw:
    """The draw whose sigma is multiplied by an RMS, on the device of that: the host does not wait to read it."""
    sigma = draw.sigma.to(rms.device, non_blocking=rms.device.type == "cuda")
    return draw._replace(sigma=sigma * rms)


def _matching(params: Params, base: Params) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves, origins = tree.flatten(params), tree.flatten(base)
    tree.check_same(leaves, "params", base=origins)
    return leaves, origins
