"""Inputs of a merger: experts by name, checked against base, all problems in one error."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import errors, tree
from ...errors import problems_of
from ...execution import batched, layers, recorded, recorded_in_loss, tracked, unread
from ...tree import dtype_name
from ...types import Params

Experts: TypeAlias = Mapping[str, Params] | Sequence[Params]
Leaves: TypeAlias = dict[str, Tensor]
_LARGEST = torch.finfo(torch.float32).max


def coef_problems(coef: float, name: str = "coef", *, derivative: bool = False) -> list[str]:
    """Validation errors for ``coef``, an argument of that name.

    Args: derivative: the caller has one, and takes batches of torch.func.vmap.
    """
    if isinstance(coef, Tensor) and coef.ndim:
        return [f"{name} is {coef!r}, must be a number"]
    if derivative and isinstance(coef, Tensor):
        if unread(coef):
            return []
        coef = coef.detach()
    if found := type_problems(**{name: coef}):
        return found
    return [] if math.isfinite(coef) else [f"{name} is {coef}, must be finite"]


def type_problems(**values: object) -> list[str]:
    """Errors for options that are not numbers or exceed float32, and for tensors that are differentiated."""
    problems = []
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            found = derivative_problems("the call", {name: value}) + batch_problems({"the call": {name: value}})
            problems += found or ([f"{name} requires grad, {_NO_DERIVATIVE}"] if recorded(value) else [])
        elif not isinstance(value, Real):
            problems.append(f"{name} is {value!r}, must be a number")
        elif _LARGEST < abs(float(value)) < math.inf:  # the error of torch would not name the option
            problems.append(f"{name} is {value}, must be at most {_LARGEST:.3g} in size, as a float32 is")
    return problems


_NO_DERIVATIVE = (
    "and merging has no derivative: detach it, merge outside of what is differentiated, or write the merge with "
    "smat_fn.merge.task_vector and apply_vector, which have one"
)


def derivative_problems(label: str, leaves: Mapping[str, Tensor]) -> list[str]:
    """The error for a leaf that is differentiated: it would be read without, and every derivative be 0."""
    for path, leaf in leaves.items():
        if recorded_in_loss(leaf):
            return [f"{path!r} of {label} requires grad inside a loss, {_NO_DERIVATIVE}"]
        if differentiated(leaf):
            return [f"{path!r} of {label} is differentiated by torch.func, {_NO_DERIVATIVE}"]
    return []


def differentiated(leaf: Tensor) -> bool:
    """Whether torch.func differentiates a tensor."""
    dual = forward_ad.unpack_dual(leaf).tangent is not None
    return dual or any(map(tracked, layers(leaf)))  # what is made inside is wrapped, but not tracked


def batch_problems(trees: Mapping[str, Leaves]) -> list[str]:
    """The error for a leaf that ``torch.func.vmap`` batches: thresholds and compiled loops read values."""
    for label, leaves in trees.items():
        for path, leaf in leaves.items():
            if batched(leaf):
                return [
                    f"{path!r} of {label} is batched by torch.func.vmap, and merging reads values: call it in a "
                    "loop, or write the merge with smat_fn.merge.task_vector, which vmap takes"
                ]
    return []


def complex_problems(label: str, leaves: Mapping[str, Tensor]) -> list[str]:
    """Errors for complex leaves: as leaves that are not floating-point they would stay base's."""
    return [
        f"parameter {path!r} of {label} is {dtype_name(leaf)}, which is not merged: merge torch.view_as_real(leaf), "
        "and make the result complex again by torch.view_as_complex"
        for path, leaf in leaves.items()
        if leaf.is_complex()
    ]


def storage_problems(label: str, leaves: Mapping[str, Tensor]) -> list[str]:
    """Errors for leaves that are sparse, or on the meta device, where they have no values (`shortened`)."""
    problems = [
        f"parameter {path!r} of {label} is {str(leaf.layout).removeprefix('torch.')}: give leaf.to_dense()"
        for path, leaf in leaves.items()
        if leaf.layout != torch.strided
    ]
    problems += [
        f"parameter {path!r} of {label} is on the meta device and has no values: load the weights, without offloading"
        for path, leaf in leaves.items()
        if leaf.is_meta
    ]
    return errors.shortened(problems, f"{{}} more parameters of {label} are not dense or have no values")


def tied_problems(base: Mapping[str, Tensor]) -> list[str]:
    """Errors for a weight under two names: it would count twice in thresholds, and get two masks."""
    return [
        f"parameters {first!r} and {second!r} of base share memory, as a tied weight in module.state_dict() does, and "
        "would be merged as two: give it once, as module.named_parameters() does"
        for first, second in tree.sharing(base)
        if base[first].is_floating_point()
    ]


def alias_problems(experts: Mapping[str, Leaves]) -> list[str]:
    """Errors for experts that are the same tensors, as state_dict() of one model after every task gives them."""
    groups: dict[object, list[str]] = {}
    for name, leaves in experts.items():
        place = tree.memory_of(leaf for leaf in leaves.values() if leaf.is_floating_point())
        if place is not None:
            groups.setdefault(place, []).append(name)
    return [
        f"experts {first!r} and {second!r} {f'and {len(more)} more ' if more else ''}are the same tensors: a "
        "state_dict() holds the model's own memory, clone it, {name: w.detach().clone() for name, w in "
        "model.state_dict().items()}"
        for first, second, *more in (same for same in groups.values() if len(same) > 1)
    ]


def check_variances(path: str, values: Tensor) -> None:
    """Reads only merged leaves of the name running_var. Raises: ValueError for variances below 0."""
    named = path.endswith("running_var") and tree.memory_of([values]) is not None
    if named and bool((values < 0).any()):
        raise ValueError(
            f"parameter {path!r}, the variances of a batch norm, would have values below 0, with which the model's "
            "outputs are NaN: keep base's statistics, by `coef={'*running_*': 0}`, or choose a smaller coef"
        )


def key_problems(key: Tensor) -> list[str]:
    """Validation errors for ``key``."""
    if isinstance(key, Tensor) and key.dtype == torch.int64 and key.shape == (2,):
        return batch_problems({"the call": {"key": key}})
    got = f"{key.dtype} {tuple(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
    return [f"key must be an int64 tensor of shape (2,), got {got}: make one by smat_fn.random.key(seed)"]


def drop_problems(drop_prob: float) -> list[str]:
    """Validation errors for ``drop_prob``."""
    fine = 0 <= drop_prob < 1
    return [] if fine else [f"drop_prob is {drop_prob}, must be in [0, 1): it is 1 - density, the removed share"]


def count_problems(experts: Experts, merger: str, *, least: int, most: int | None = None) -> list[str]:
    """Errors for a number of experts that a merger is not defined for."""
    if not isinstance(experts, (Mapping, list, tuple)) or not experts:
        return []
    if len(experts) < least or (most is not None and len(experts) > most):
        wanted = f"exactly {most}" if least == most else f"at least {least}"
        return [f"the number of experts is {len(experts)}: {merger} takes {wanted}"]
    return []


def check(base: Params, experts: Experts, problems: Iterable[str] = ()) -> tuple[Leaves, dict[str, Leaves]]:
    """Detached flat leaves of base and of every expert by name; no data is read.

    Raises: ValueError that lists the given problems and all of structure, shape and kind at once.
    """
    found = list(problems)
    start = flattened("base", base, found)
    flat = _flat_experts(experts, found)
    if start is not None:
        others = {f"expert {name!r}": own for name, own in flat.items()}
        found += batch_problems({"base": start, **others})
        found += fit_problems(start, "base", others)
    errors.raise_problems(found + alias_problems(flat))
    assert start is not None
    return start, flat


def flat_statistics(kind: str, base: Leaves, names: Sequence[str], statistics: Experts) -> dict[str, Leaves]:
    """Statistics of every expert by name, flat, in the experts' order.

    Args:
        kind: one of `checkpoint.STATISTICS`.
        base: flat leaves.
        names: of the experts.
        statistics: {name: tree}, or a list of trees in the experts' order.

    Raises: ValueError that lists experts without statistics, and statistics of other names and shapes.
    """
    if not isinstance(statistics, (Mapping, list, tuple)):
        raise ValueError(
            f"the statistics ({kind}) are a {type(statistics).__name__}: pass a mapping {{expert's name: tree}} or a "
            "list of trees, in the experts' order"
        )
    if isinstance(statistics, Mapping):
        given = {str(name): own for name, own in statistics.items()}
    else:
        given = dict(
            zip([*names, *(f"place {i}" for i in range(len(names), len(statistics)))], statistics, strict=False)
        )
    problems = [
        f"expert {name!r} has no statistics ({kind}): make them by merge.py statistics, or by the functions of "
        "smat_fn.merge.statistics"
        for name in names
        if name not in given
    ]
    problems += [f"there are statistics of {name!r}, which is not an expert" for name in given if name not in names]
    found = {name: tree.flatten(given[name]) for name in names if name in given}
    for name, own in found.items():
        problems += statistics_problems(kind, base, f"statistics of {name!r}", own)
        problems += derivative_problems(f"statistics of {name!r}", own)
    first = next(iter(found.values()), {})
    problems += [
        f"statistics of {name!r} are of other layers than the first expert's"
        for name, own in found.items()
        if own.keys() != first.keys() and kind == "gram"
    ]
    errors.raise_problems(problems)
    return found


def statistics_problems(kind: str, base: Leaves, label: str, found: Mapping[str, Tensor]) -> list[str]:
    """Errors for statistics that are not those of base's leaves. Only shapes and dtypes are read."""
    if kind == "gram":
        wanted = {
            path: torch.empty(leaf.shape[1], leaf.shape[1], device="meta")
            for path, leaf in base.items()
            if path in found and leaf.ndim == 2
        }
    else:
        wanted = {path: leaf for path, leaf in base.items() if leaf.is_floating_point()}
    problems = problems_of(lambda: tree.check_same(wanted, "what base wants", **{label: found}))
    return problems + [
        f"parameter {path!r} of {label} is {dtype_name(leaf)}, must be floating-point"
        for path, leaf in found.items()
        if not leaf.is_floating_point()
    ]


def check_alone(experts: Experts, *, batches: bool = False) -> dict[str, Leaves]:
    """`check` without a base: structure, dtypes and non-floating values must agree with those of the first expert.

    Args: batches: allow leaves that ``torch.func.vmap`` batches, of which no value is read.
    """
    found: list[str] = []
    flat = _flat_experts(experts, found)
    found += [] if batches else batch_problems({f"expert {name!r}": own for name, own in flat.items()})
    if flat:
        (start_name, start), *rest = ((f"expert {name!r}", own) for name, own in flat.items())
        found += fit_problems(start, start_name, dict(rest))
        found += [p for name, own in rest for p in _value_problems(start, start_name, own, name)]
    errors.raise_problems(found + alias_problems(flat))
    return flat


def _named(experts: Experts, problems: list[str]) -> dict[str, Params]:
    if isinstance(experts, Mapping):
        items = [(str(name), expert) for name, expert in experts.items()]
    elif isinstance(experts, (list, tuple)):
        items = [(str(position), expert) for position, expert in enumerate(experts)]
    else:
        problems.append(f"experts is a {type(experts).__name__}: pass a mapping {{name: tree}} or a list of trees")
        return {}
    if not items:
        problems.append("experts is empty: pass at least one")
    named = dict(items)
    if len(named) < len(items):
        problems.append(f"experts have equal names among {[name for name, _ in items]}: rename them")
    problems += [
        f"expert {name!r} is a tensor, not a tree: pass a mapping {{name: tree}} or a list of trees"
        for name, expert in named.items()
        if isinstance(expert, Tensor)
    ]
    return {name: expert for name, expert in named.items() if not isinstance(expert, Tensor)}


def flattened(label: str, params: Params, problems: list[str]) -> Leaves | None:
    """Detached leaves of a tree, None for what is not one; errors for it, and for leaves that are not merged."""
    with errors.collected(problems, label):
        leaves = tree.flatten(params)
        problems += derivative_problems(label, leaves) + complex_problems(label, leaves)
        problems += storage_problems(label, leaves)
        return {path: leaf.detach() for path, leaf in leaves.items()}
    return None


def _flat_experts(experts: Experts, problems: list[str]) -> dict[str, Leaves]:
    flat = {name: flattened(f"expert {name!r}", expert, problems) for name, expert in _named(experts, problems).items()}
    return {name: leaves for name, leaves in flat.items() if leaves is not None}


def fit_problems(start: Leaves, start_name: str, others: Mapping[str, Leaves]) -> list[str]:
    """Leaves of other trees, by label, that differ from ``start`` in name, shape or kind, as error messages."""
    problems = problems_of(lambda: tree.check_same(start, start_name, **others))
    for name, leaves in others.items():
        problems += kind_problems(start, start_name, leaves, name)
    return problems


def kind_problems(start: Leaves, start_name: str, leaves: Leaves, name: str) -> list[str]:
    """Leaves that are floating-point in one tree and not in the other, as error messages."""
    return [
        of_two_dtypes(path, leaves[path], name, leaf, start_name)
        for path, leaf in start.items()
        if path in leaves and leaves[path].is_floating_point() != leaf.is_floating_point()
    ]


def of_two_dtypes(path: str, leaf: Tensor, name: str, origin: Tensor, start_name: str) -> str:
    """The error for a leaf that must have one dtype in two trees."""
    own, other = f"{dtype_name(leaf)} in {name}", f"{dtype_name(origin)} in {start_name}"
    return f"parameter {path!r} is {own} but {other}: cast one of them"


def _value_problems(start: Leaves, start_name: str, leaves: Leaves, name: str) -> list[str]:
    problems = []
    for path, leaf in start.items():
        other = leaves.get(path)
        if other is None or other.is_floating_point() != leaf.is_floating_point():
            continue
        if other.dtype != leaf.dtype:
            problems.append(of_two_dtypes(path, other, name, leaf, start_name))
        elif leaf.is_meta or other.is_meta or not leaf.layout == other.layout == torch.strided:
            continue  # `storage_problems`
        elif (
            not leaf.is_floating_point() and other.shape == leaf.shape and not torch.equal(other.to(leaf.device), leaf)
        ):
            problems.append(
                f"parameter {path!r} ({dtype_name(leaf)}) differs between {start_name} and {name}: only floating-point "
                "parameters are averaged, make it equal"
            )
    return problems
