"""The ascent step where torch's own optimizer trains a module: its momentum by parameter name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import tree
from ..errors import problems_of, shortened, some_of
from .step import check_not_negative

Climb = Literal["clean", "both"]
TrainerClimb = Literal["clean", "both", "asam"]  # where a step's micro-batches can run once more
RHO, RHO_ASAM = 0.5, 0.25  # radius of a climb where none is given, along the momentum and along the gradient
_KEPT = "exp_avg", "momentum_buffer"  # names of the momentum in a parameter's state: of Adam's kind, of SGD and Muon
_WAY = (
    "climb needs an optimizer that keeps exp_avg (Adam, AdamW, NAdam) or momentum_buffer (SGD with momentum, Muon) of "
    "every trained parameter; climb=None needs none"
)


class Ascent(NamedTuple):
    """``theta + e``, ``e = rho theta^2 (.) d / (|| |theta| (.) d || + 1e-12)``, d the momentum before the step.

    Attributes:
        optimizer: gives torch's optimizer, or a list of several, whose momentum is read at every block.
        climb: "clean": in clean steps; "both": in simulated steps too; "asam": in clean steps, d is the gradient of a
            first pass, which the caller runs.
        rho: radius, >= 0.
    """

    optimizer: Callable[[], Any]
    climb: TrainerClimb
    rho: float


def climb_problems(climb: Any, rho: Any, choices: Sequence[str] = get_args(Climb)) -> list[str]:
    """Errors for values of ``climb`` and ``rho``, and for a radius of no climb."""
    found = [] if rho is None else check_not_negative(rho=rho)
    if climb is None and rho is not None:
        found.append(f"rho is {rho!r}, the radius of a climb, and there is none: give climb too, or leave rho out")
    if climb not in (None, *choices):
        found.append(f"climb is {climb!r}, choose {', '.join(choices[:-1])} or {choices[-1]}, or None for no climb")
    return found


def radius(rho: float | None, climb: str | None = None) -> float:
    """The radius of a climb, that of none given too: `smat_fn.mat.asam`'s own for "asam"."""
    default = RHO_ASAM if climb == "asam" else RHO
    return default if rho is None else rho


def clean_problems(climb: Any, *, period: int, off: bool) -> list[str]:
    """The error for a climb in clean steps where every step is simulated. Args: off: no step is."""
    if off or climb in (None, "both") or period > 1:
        return []
    return [f"climb {climb!r} needs clean steps, period 1 has none: take climb 'both', or a larger period"]


def optimizer_problems(optimizer: Any, parameters: Mapping[str, Tensor]) -> list[str]:
    """Errors, before the first step, for optimizers without a momentum, and for parameters that none of them holds."""
    problems, held = list[str](), set[int]()
    ids = {id(p) for p in parameters.values()}
    for own in _optimizers(optimizer):
        name = type(own).__name__
        if not (isinstance(getattr(own, "param_groups", None), list) and hasattr(own, "state")):
            problems.append(f"optimizer is a {name}, must be a torch.optim.Optimizer or a list of them: {_WAY}")
        elif hasattr(own, "consolidate_state_dict"):  # ZeroRedundancyOptimizer
            problems.append(f"{name} keeps a part of the momentum in each process: {_WAY}")
        else:
            groups = [(group, {id(p) for p in group["params"]} & ids) for group in own.param_groups]
            problems += {
                f"{name} keeps no momentum, {_off(group)}: {_WAY}": 0 for group, at in groups if at and _off(group)
            }
            held = held.union(*(at for _, at in groups))
    if problems:
        return problems
    if left := [path for path, p in parameters.items() if id(p) not in held]:
        return [
            f"the optimizer does not have {len(left)} of {len(parameters)} trained parameters ({some_of(left)}), whose "
            "momentum climb needs: give all optimizers as a list, or freeze them (p.requires_grad_(False)) before"
        ]
    return problems_of(momentum_in, optimizer, parameters)


def _off(group: Mapping[str, Any]) -> str:
    """The setting of a parameter group that says that no momentum is kept, an empty text otherwise."""
    if "momentum" in group:
        return "" if group["momentum"] else f"momentum is {group['momentum']}"
    if "beta1" in group:  # of Adafactor
        return "" if group["beta1"] else f"beta1 is {group['beta1']}"
    return "" if "betas" not in group or group["betas"][0] else f"betas is {tuple(group['betas'])}"


def momentum_in(optimizer: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The momentum of each parameter by name, 0 where its state is empty; None while all are.

    Raises: ValueError that lists parameters whose state has no momentum, or one of another shape or device, or of
        other than floating-point values.
    """
    owners, found, problems = _optimizers(optimizer), dict[str, Tensor](), list[str]()
    for path, p in parameters.items():
        own = next((one for one in owners if p in one.state), None)
        state = {} if own is None else own.state[p]
        name = type(own).__name__
        slope = next((state[key] for key in _KEPT if state.get(key) is not None), None)
        if slope is not None and _fits(slope, p):
            found[path] = slope
        elif slope is not None:
            problems.append(
                f"the momentum of {path!r} in {name} is a {type(slope).__name__} {tree.dtype_name(slope)} "
                f"{tuple(slope.shape)} on {slope.device}, must be floating-point numbers of shape {tuple(p.shape)} on "
                f"{p.device}, as its parameter: {_WAY}"
            )
        elif others := [key for key in state if key not in (*_KEPT, "step")]:
            problems.append(f"{name} keeps no momentum of {path!r}, but {some_of(others)}: {_WAY}")
    if problems:
        raise ValueError("; ".join(shortened(problems, "{} more parameters without a momentum")))
    if not found:
        return None
    return {path: found[path] if path in found else torch.zeros_like(p) for path, p in parameters.items()}


def _fits(slope: Any, parameter: Tensor) -> bool:
    if hasattr(slope, "to_local") and hasattr(parameter, "to_local"):  # shards
        return slope.shape == parameter.shape and _fits(slope.to_local(), parameter.to_local())
    plain = type(slope) in tree.PLAIN and slope.layout == torch.strided and slope.is_floating_point()
    return plain and (slope.shape, slope.device) == (parameter.shape, parameter.device)


def _optimizers(given: Any) -> list[Any]:
    """torch's own optimizers; Accelerate's wrapper holds one."""
    return [getattr(one, "optimizer", one) for one in (given if isinstance(given, list | tuple) else [given])]
