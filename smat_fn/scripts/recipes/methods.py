"""Map each `merge_method` of mergekit, and its parameters, to a merger and its options."""

import glob
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ... import random
from ...config import (
    ArceeFusion,
    Breadcrumbs,
    Dare,
    DareTies,
    Della,
    Karcher,
    MergerConfig,
    ModelStock,
    MultiSlerp,
    NearSwap,
    NuSlerp,
    Ram,
    Sce,
    Slerp,
    TaskArithmetic,
    Ties,
    WeightedAverage,
)
from ...merge.nuslerp import Along
from ...merge.parts.coefs import coef_of
from ...merge.weighted_average import no_sum


@dataclass(frozen=True)
class Method:
    """The merger for a `merge_method` of mergekit."""

    make: Callable[["Resolved"], MergerConfig]
    per_model: tuple[str, ...] = ()  # parameters
    shared: tuple[str, ...] = ()
    based: bool = True  # its base is our base; else base is one of the models, or there is none
    pair: bool = False  # of a base and one other model
    required: tuple[str, ...] = ()
    drops: bool = False  # at random
    single: bool = False  # of one model in each slice
    uneven: bool = False  # slices may have fewer models than others, without weights
    gamma: str = "lambda"  # the shared parameter that is our coefficient, where the method has it
    by_leaf: bool = False  # shared parameters may differ by leaf
    alone: Callable[["Resolved"], tuple[MergerConfig, dict[str, float] | None]] | None = None  # without base_model


class Resolved(NamedTuple):
    """The parameters of a recipe, for every leaf of the models."""

    names: list[str]  # of the experts
    per_model: dict[str, dict[str, float | dict[str, float]]]  # parameter -> expert -> number, or by leaf
    shared: dict[str, Any]  # constant ones, or by leaf
    paths: Collection[str] = ()  # of all leaves

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.shared.get(name, default))

    def aggregate(self, *, mean: bool) -> Any:
        return "mean" if self.flag("normalize", mean) else "sum"

    def of(self, name: str) -> Any:
        return self.per_model.get(name, {})

    def of_all(self, name: str, default: float) -> dict[str, Any]:
        """A parameter of every expert."""
        return {expert: self.of(name).get(expert, default) for expert in self.names}

    def ordered(self, name: str, default: float) -> tuple[Any, ...]:
        return tuple(self.of_all(name, default).values())


def _breadcrumbs(found: Resolved, *, elect: bool) -> MergerConfig:
    largest = found.of_all("gamma", 0.01)
    own: Any = {"weights": found.of("weight"), "densities": found.of_all("density", 1.0), "largest": largest}
    own |= {"aggregate": found.aggregate(mean=False), "elect": elect, "rescale": found.flag("rescale", False)}
    return Breadcrumbs(0.0, 0.0, coef=1.0, count="kept", **own)


def _della(found: Resolved, *, elect: bool) -> MergerConfig:
    densities, eps = found.of_all("density", 1.0), found.of_all("epsilon", 0.15)
    for name in found.names:
        rules = densities[name], eps[name]
        for path in found.paths if any(isinstance(own, dict) for own in rules) else [""]:
            density, width = (coef_of(path, own) for own in rules)
            if 0 < density < 1 and not 1e-12 < density - width <= density + width <= 1 + 1e-12:
                where = f" at parameter {path!r}" if path else ""
                raise ValueError(
                    f"parameters.epsilon of {name} is {width:g}{where}, density {density:g}: density - epsilon and "
                    "density + epsilon must be in (0, 1]"
                )
    windows = {
        name: {path: 2 * v for path, v in value.items()} if isinstance(value, dict) else 2 * value
        for name, value in eps.items()
    }
    own: Any = {"weights": found.of("weight"), "densities": densities, "windows": windows, "rescale": True}
    return Della(coef=1.0, drop_prob=0.0, window=0.0, aggregate=found.aggregate(mean=elect), elect=elect, **own)


def values_of(rules: float | dict[str, float]) -> Collection[float]:
    """The values of a parameter: one, or those by leaf."""
    return rules.values() if isinstance(rules, dict) else [rules]


def _dare(found: Resolved, *, elect: bool) -> MergerConfig:
    """Raises: ValueError for changes that are not rescaled but averaged."""
    own: Any = {"weights": found.of("weight"), "densities": found.of_all("density", 1.0), "rescale": True}
    few = [name for name, rules in own["densities"].items() if any(density < 1 for density in values_of(rules))]
    if few and not found.flag("rescale", True):
        if found.flag("normalize", False):
            raise ValueError(
                f"parameters.rescale and normalize: with a density below 1 for {' and '.join(few)} averages are "
                "implemented with rescale: true alone: leave out one of them"
            )
        # the merger divides what it keeps by the probability of keeping it: weights undo that
        own |= {"rescale": False, "weights": {name: _undivided(found, name) for name in found.names}}
    return (DareTies if elect else Dare)(coef=1.0, drop_prob=0.0, aggregate=found.aggregate(mean=False), **own)


def _undivided(found: Resolved, name: str) -> float | dict[str, float]:
    """An expert's weights times its keep probabilities, multiples of 1/65536 as they are drawn."""
    rules = [found.of_all(parameter, 1.0)[name] for parameter in ("weight", "density")]

    def at(path: str) -> float:
        weight, density = (coef_of(path, own) for own in rules)
        return float(weight * (1 - int(random.threshold(1 - density)) / 65536 if density else 0.0))

    if not any(isinstance(own, dict) for own in rules):
        return at("")
    values = {glob.escape(path): at(path) for path in found.paths}
    return values | {"*": next(reversed(values.values()))}


def _ties(found: Resolved) -> MergerConfig:
    own: Any = {"weights": found.of("weight"), "densities": found.of_all("density", 1.0)}
    own |= {"aggregate": found.aggregate(mean=True), "rescale": found.flag("rescale", False)}
    return Ties(coef=1.0, keep=1.0, scope="tensor", **own)


def _nuslerp(found: Resolved) -> MergerConfig:
    """NuSLERP of two models with a base. Raises: ValueError for weights that no one share stands for."""
    share = _share(found)
    if isinstance(share, dict):
        raise ValueError("parameters.weight of nuslerp with base_model must be one number per model")
    return NuSlerp(t=share, along=_along(found))


def _nuslerp_alone(found: Resolved) -> tuple[MergerConfig, dict[str, float] | None]:
    """NuSLERP of two models without a base, and its shares by leaf where they differ. Raises: as `_nuslerp`."""
    share = _share(found)
    if isinstance(share, dict):
        return Slerp(coef=None, arc=_along(found)), share  # type: ignore[arg-type]
    return Slerp(coef=share, arc=_along(found)), None


def _along(found: Resolved) -> Along:
    if found.flag("nuslerp_flatten", True):
        return "leaf"
    return "first" if found.flag("nuslerp_row_wise", False) else "last"


def _share(found: Resolved) -> float | dict[str, float]:
    """The second model's share, or that of every leaf."""
    if len(found.names) != 2:
        raise ValueError(f"nuslerp takes two models beside base_model, here are {len(found.names)}")
    rules = found.ordered("weight", 1.0)
    by_leaf = any(isinstance(own, dict) for own in rules)
    shares = dict[str, float]()
    for path in found.paths if by_leaf else [""]:
        one, two = (coef_of(path, own) for own in rules)
        if abs(one + two) < 1e-6:
            where = f" at parameter {path!r}" if by_leaf else ""
            raise ValueError(f"parameters.weight: the sum is 0{where}: give nuslerp others")
        shares[glob.escape(path)] = two / (one + two)
    return shares if by_leaf else shares[""]


def _nearswap(found: Resolved) -> MergerConfig:
    """Raises: ValueError for a t that mergekit's floor changes."""
    limit = found.shared["t"]
    # t / max(|difference|, 1e-6): below it small differences would be scaled there
    if few := [own for own in values_of(limit) if not own >= 1e-6]:
        raise ValueError(f"parameters.t of nearswap is {few[0]:g}: give 0.000001 or more, a largest change of weights")
    return NearSwap(t=limit)


def _ram(found: Resolved, *, boosted: bool) -> MergerConfig:
    own = {"boost": found.shared.get("r", 0.1), "cap": found.shared.get("alpha", 0.2)} if boosted else {}
    return Ram(threshold=found.shared.get("epsilon", 1e-5), scope="tensor", **own)


def _linear(found: Resolved) -> MergerConfig:
    """Raises: ValueError for leaves whose weights sum to 0."""
    weights, normalize = found.ordered("weight", 1.0), found.flag("normalize", True)
    if normalize:
        _check_sums(found, weights, "normalize: false")
    return WeightedAverage(weights, normalize=normalize)


def _check_sums(found: Resolved, weights: Collection[Any], *others: str) -> None:
    """Raises: ValueError for a parameter whose weights sum to 0. Args: others: ways out beside other weights."""
    empty = [path for path in found.paths if no_sum([coef_of(path, rules) for rules in weights])]
    if empty:
        way = ", or ".join(("give others", *others))
        raise ValueError(f"parameters.weight: the sum is 0 at parameter {empty[0]!r}: {way}")


def _karcher(found: Resolved) -> MergerConfig:
    """Raises: ValueError for a number of steps that is none."""
    steps = found.shared.get("max_iter", 10)
    if not float(steps).is_integer():
        raise ValueError(f"parameters.max_iter is {steps}: must be a whole number")
    return Karcher(int(steps), found.shared.get("tol", 1e-5))


def _multislerp(found: Resolved) -> MergerConfig:
    """Raises: ValueError for parameters whose weights sum to 0."""
    weights, normalize = found.ordered("weight", 1.0), found.flag("normalize_weights", True)
    if normalize:
        _check_sums(found, weights, "normalize_weights: false")
    return MultiSlerp(weights=weights, normalize=normalize)


def _multislerp_alone(found: Resolved) -> tuple[MergerConfig, None]:
    """Raises: ValueError for parameters whose weights sum to 0, and without normalize_weights to other than 1."""
    weights = found.ordered("weight", 1.0)
    _check_sums(found, weights)
    sums = {path: math.fsum(coef_of(path, rules) for rules in weights) for path in found.paths}
    if not found.flag("normalize_weights", True) and (
        other := next((path for path, total in sums.items() if abs(total - 1) > 1e-6), None)
    ):
        raise ValueError(
            f"parameters.normalize_weights is false, and weights of parameter {other!r} sum to {sums[other]:g}: "
            "without base_model it is implemented for weights whose sum is 1, leave it out or give such weights"
        )
    return Karcher(0, 1e-8, weights=weights), None


GTA = "normalize", "rescale", "int8_mask", "lambda"
WD = "weight", "density"
METHODS = {
    "linear": Method(_linear, ("weight",), ("normalize",), based=False, required=("weight",)),
    "passthrough": Method(
        lambda f: WeightedAverage(f.ordered("scale", 1.0), normalize=False), ("scale",), based=False, single=True
    ),
    "task_arithmetic": Method(
        lambda f: TaskArithmetic(coef=1.0, weights=f.of("weight"), aggregate=f.aggregate(mean=False)),
        ("weight",), ("normalize", "int8_mask", "lambda"), required=("weight",),
    ),
    "ties": Method(_ties, WD, GTA, required=("weight",)),
    "dare_linear": Method(lambda f: _dare(f, elect=False), WD, GTA, required=("weight",), drops=True),
    "dare_ties": Method(lambda f: _dare(f, elect=True), WD, GTA, required=("weight",), drops=True),
    "della": Method(lambda f: _della(f, elect=True), (*WD, "epsilon"), GTA, required=("weight",), drops=True),
    "della_linear": Method(lambda f: _della(f, elect=False), (*WD, "epsilon"), GTA, required=("weight",), drops=True),
    "breadcrumbs": Method(lambda f: _breadcrumbs(f, elect=False), (*WD, "gamma"), GTA, required=("weight",)),
    "breadcrumbs_ties": Method(lambda f: _breadcrumbs(f, elect=True), (*WD, "gamma"), GTA, required=("weight",)),
    "slerp": Method(lambda f: Slerp(zeros=True), (), ("t",), based=False, pair=True, required=("t",), gamma="t"),
    "nuslerp": Method(
        _nuslerp, ("weight",), ("nuslerp_flatten", "nuslerp_row_wise"), required=("weight",), alone=_nuslerp_alone
    ),
    "multislerp": Method(
        _multislerp, ("weight",), ("normalize_weights",), required=("weight",), alone=_multislerp_alone
    ),
    "karcher": Method(_karcher, (), ("max_iter", "tol"), based=False, uneven=True),
    "model_stock": Method(
        lambda f: ModelStock(clamp=False, along="last" if f.flag("filter_wise", False) else "leaf"),
        (), ("filter_wise",), uneven=True,
    ),
    "sce": Method(
        lambda f: Sce(density=f.shared.get("select_topk", 1.0)), (), ("int8_mask", "select_topk"), uneven=True
    ),
    "arcee_fusion": Method(lambda f: ArceeFusion(), based=False, pair=True),
    "nearswap": Method(_nearswap, (), ("t",), required=("t",), by_leaf=True),
    "ram": Method(partial(_ram, boosted=False), (), ("epsilon",), uneven=True),
    "ramplus_tl": Method(partial(_ram, boosted=True), (), ("epsilon", "r", "alpha"), uneven=True),
}  # fmt: skip
