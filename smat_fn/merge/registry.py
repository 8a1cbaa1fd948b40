"""All mergers, and the way from their options to their functions. Registering a merger is one line here."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import import_module
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from ..errors import raise_problems
from ..types import Params
from .parts.coefs import Rules, apply_rules, matches
from .parts.inputs import Experts, Leaves
from .parts.merger import Merger
from .parts.vectors import applied

_PAPER = "weight_average", "task_arithmetic", "ties", "dare", "della"  # the tables report their average
_MORE = (
    "weighted_average",
    "wise_ft",
    "slerp",
    "model_stock",
    "dare_ties",
    "breadcrumbs",
    "magmax",
    "pcb",
    "tsv_merge",
    "iso_c",
    "iso_cts",
    "wudi",
    "nuslerp",
    "karcher",
    "sce",
    "arcee_fusion",
    "multislerp",
    "metagpt",
    "cart",
    "consensus",
    "tall_mask",
    "svc",
    "emr",
    "fisher",
    "reg_mean",
    "nearswap",
    "ram",
    "opcm",
    "dc_merge",
)


def _options_in(name: str) -> type[Merger]:
    """The subclass of `Merger` that a module of this package defines."""
    module = import_module(f"{__package__}.{name}")  # the package's attribute may be the function of this name
    values = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Merger)]
    (found,) = (value for value in values if value.__module__ == module.__name__)
    return found


MERGERS = tuple(map(_options_in, _PAPER))
MORE_MERGERS = tuple(map(_options_in, _MORE))
BASELESS = frozenset(merger.name for merger in (*MERGERS, *MORE_MERGERS) if not merger.based)
RANDOM = frozenset(merger.name for merger in (*MERGERS, *MORE_MERGERS) if merger.random)


def merge_by(
    config: Merger,
    base: Params,
    experts: Experts,
    *,
    key: Tensor | None = None,
    coef: Rules | None = None,
    statistics: Experts | None = None,
) -> Params:
    """Merge as the options of a merger say.

    Args:
        config: options, `Ties` or its like.
        base: tree that the experts were trained from; ignored by mergers without a base.
        experts: {name: tree} or a list of trees.
        key: int64 (2,), for random masks.
        coef: γ, or {glob: γ} for a merger with a base; else ``config.coef``.
        statistics: of every expert, of the kind that ``config.statistics()`` names; default: none.

    Returns:
        A new tree of base's structure and dtypes.

    Raises:
        ValueError: as the merger does.
    """
    _check_options(config)
    options = config.settings()
    own = options.pop("coef", None)
    coef = own if coef is None else coef
    if config.based and coef is None:
        raise ValueError(f"{config.name} needs a coefficient: give coef here or in its options")
    if not config.based:
        merged: Params = config.function(experts, **options, **({} if coef is None else {"coef": coef}))
        return merged
    vector = vector_by(config, base, experts, key=key, statistics=statistics)
    return apply_rules(base, vector, coef=coef) if isinstance(coef, Mapping) else applied(base, vector, coef=coef)


def vector_by(
    config: Merger, base: Params, experts: Experts, *, key: Tensor | None = None, statistics: Experts | None = None
) -> Leaves:
    """The merged task vector of `merge_by`, for a merger with a base; it does not depend on the coefficient."""
    _check_options(config)
    options = {name: value for name, value in config.settings().items() if name not in ("coef", *config.selects)}
    own = () if config.statistics() is None else ({} if statistics is None else statistics,)
    vector: Leaves = config.function(*((key,) if config.random else ()), base, experts, *own, **options)
    return vector


def with_defaults(config: Merger) -> Merger:
    """The config with the default of its function, as in `merge_by`, for every option that is None and has one."""
    taken = {name: option.default for name, option in signature(config.function).parameters.items()}
    unset = [f.name for f in fields(config) if getattr(config, f.name) is None and f.name != "coef"]
    return replace(config, **{name: taken[name] for name in unset if taken.get(name) not in (None, Parameter.empty)})


def _check_options(config: Merger) -> None:
    if not isinstance(config, Merger):
        raise ValueError(f"config is {config!r}, must be the options of a merger, such as Ties(coef=0.4, keep=0.2)")
    given = config.settings()
    raise_problems(
        [
            f"{name} of {type(config).__name__} is None: give a value, a preset's is used by merge.py alone"
            for name, option in signature(config.function).parameters.items()
            if option.kind is option.KEYWORD_ONLY and option.default is option.empty and name not in (*given, "coef")
        ]
    )


def _at_w(value: Any, by_leaf: bool = False) -> Any:
    """An option for a leaf "w", which rules by leaf need not name. Args: by_leaf: the value may be such rules."""
    if isinstance(value, Mapping) and by_leaf:
        return value if not value or matches("w", value) else list(value.values())[-1]
    if isinstance(value, Mapping):
        return {name: _at_w(own, True) for name, own in value.items()}
    return type(value)(_at_w(own, True) for own in value) if type(value) in (list, tuple) else value


def check_options(config: Merger, names: Sequence[str], *, key: Tensor, coef: float | None) -> None:
    """Merge a single coordinate, which costs nothing. Raises: ValueError as the merger does for its options."""
    one, experts = {"w": torch.zeros(1)}, {name: {"w": torch.zeros(1)} for name in names}
    at_w = {f.name: _at_w(getattr(config, f.name), f.name in config.by_leaf) for f in fields(config)}
    statistics = dict.fromkeys(names, {} if config.statistics() == "gram" else {"w": torch.ones(1)})
    merge_by(replace(config, **at_w), one, experts, key=key, coef=coef, statistics=statistics)
