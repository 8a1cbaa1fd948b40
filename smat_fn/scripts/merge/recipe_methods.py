"""Map each `merge_method` of mergekit, and its parameters, to a merger and its options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    NuSlerp,
    Sce,
    Slerp,
    TaskArithmetic,
    Ties,
    WeightedAverage,
)


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


class Resolved(NamedTuple):
    """The parameters of a recipe, for every leaf of the models."""

    names: list[str]  # of the experts
    per_model: dict[str, dict[str, float | dict[str, float]]]  # parameter -> expert -> number, or by leaf
    shared: dict[str, Any]  # constant ones

    def flag(self, name: str, default: bool) -> bool:
        return bool(self.shared.get(name, default))

    def aggregate(self, *, mean: bool) -> Any:
        return "mean" if self.flag("normalize", mean) else "sum"

    def of(self, name: str) -> Any:
        return self.per_model.get(name, {})

    def ordered(self, name: str, default: float) -> tuple[Any, ...]:
        return tuple(self.of(name).get(expert, default) for expert in self.names)


def _breadcrumbs(found: Resolved, *, elect: bool) -> MergerConfig:
    densities = {name: found.of("density").get(name, 1.0) for name in found.names}
    largest = {name: found.of("gamma").get(name, 0.01) for name in found.names}
    own: Any = {"weights": found.of("weight"), "densities": densities, "largest": largest}
    own |= {"aggregate": found.aggregate(mean=False), "elect": elect, "rescale": found.flag("rescale", False)}
    return Breadcrumbs(0.0, 0.0, coef=1.0, count="kept", **own)


def _della(found: Resolved, *, elect: bool) -> MergerConfig:
    eps = {name: found.of("epsilon").get(name, 0.15) for name in found.names}
    windows = {
        name: {path: 2 * v for path, v in value.items()} if isinstance(value, dict) else 2 * value
        for name, value in eps.items()
    }
    own: Any = {"weights": found.of("weight"), "densities": _densities(found), "windows": windows, "rescale": True}
    return Della(coef=1.0, drop_prob=0.0, window=0.0, aggregate=found.aggregate(mean=elect), elect=elect, **own)


def _dare(found: Resolved, *, elect: bool) -> MergerConfig:
    own: Any = {"weights": found.of("weight"), "densities": _densities(found), "rescale": True}
    return (DareTies if elect else Dare)(coef=1.0, drop_prob=0.0, aggregate=found.aggregate(mean=False), **own)


def _densities(found: Resolved) -> dict[str, Any]:
    return {name: found.of("density").get(name, 1.0) for name in found.names}


def _ties(found: Resolved) -> MergerConfig:
    own: Any = {"weights": found.of("weight"), "densities": _densities(found)}
    return Ties(
        coef=1.0,
        keep=1.0,
        aggregate=found.aggregate(mean=True),
        scope="tensor",
        rescale=found.flag("rescale", False),
        **own,
    )


def nuslerp(found: Resolved) -> MergerConfig:
    """NuSLERP of two models. Raises: ValueError for weights that no one share stands for."""
    if len(found.names) != 2:
        raise ValueError(f"nuslerp takes two models beside base_model, here are {len(found.names)}")
    one, two = found.ordered("weight", 1.0)
    if isinstance(one, dict) or isinstance(two, dict) or not one + two:
        raise ValueError("parameters.weight of nuslerp must be one number per model, with a sum other than 0")
    along = "leaf" if found.flag("nuslerp_flatten", True) else "last"
    if along == "last" and found.flag("nuslerp_row_wise", False):
        along = "first"
    return NuSlerp(t=two / (one + two), along=along)  # type: ignore[arg-type]


def _multislerp(found: Resolved) -> MergerConfig:
    weights = found.ordered("weight", 1.0)
    if any(isinstance(weight, dict) for weight in weights):
        raise ValueError("parameters.weight of multislerp must be one number per model")
    return MultiSlerp(weights=weights)


GTA = "normalize", "rescale", "int8_mask", "lambda"
WD = "weight", "density"
METHODS = {
    "linear": Method(
        lambda f: WeightedAverage(f.ordered("weight", 1.0), normalize=f.flag("normalize", True)),
        ("weight",), ("normalize",), based=False, required=("weight",),
    ),
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
    "della_linear": Method(
        lambda f: _della(f, elect=False), (*WD, "epsilon"), GTA, required=("weight",), drops=True
    ),
    "breadcrumbs": Method(
        lambda f: _breadcrumbs(f, elect=False), (*WD, "gamma"), GTA, required=("weight",)
    ),
    "breadcrumbs_ties": Method(
        lambda f: _breadcrumbs(f, elect=True), (*WD, "gamma"), GTA, required=("weight",)
    ),
    "slerp": Method(lambda f: Slerp(), (), ("t",), based=False, pair=True, required=("t",)),
    "nuslerp": Method(nuslerp, ("weight",), ("nuslerp_flatten", "nuslerp_row_wise"), required=("weight",)),
    "multislerp": Method(_multislerp, ("weight",), required=("weight",)),
    "karcher": Method(
        lambda f: Karcher(f.shared.get("max_iter", 10), f.shared.get("tol", 1e-5)),
        (), ("max_iter", "tol"), based=False, uneven=True,
    ),
    "model_stock": Method(lambda f: ModelStock(clamp=False), uneven=True),
    "sce": Method(
        lambda f: Sce(density=f.shared.get("select_topk", 1.0)), (), ("int8_mask", "select_topk"), uneven=True
    ),
    "arcee_fusion": Method(lambda f: ArceeFusion(), based=False, pair=True),
}  # fmt: skip
