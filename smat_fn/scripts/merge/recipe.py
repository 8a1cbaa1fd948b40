"""Recipes: mergekit's YAML as options of our mergers, and our own file that repeats a merge.

What a recipe asks for and no merger here does is refused by the name of its field, all of it at once.
"""

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ... import __version__, errors
from ...config import (
    MERGERS,
    MORE_MERGERS,
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
from ...folders import open_folder
from ...folders.inputs import local_folder, repository_of

FIELDS = "merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source"
REFUSED = {
    "modules": "only whole models are merged, give models",
    "tokenizer": "the output has base's tokenizer, give tokenizer_source: base",
    "chat_template": "the output has base's, set it there",
}
DTYPES = "float32", "bfloat16", "float16", "float64"


class Recipe(NamedTuple):
    """A merge that a file describes."""

    config: MergerConfig
    base: Path
    experts: list[Path]  # each as NAME=FOLDER
    coef: float | Mapping[str, float] | None  # γ, or by leaf, instead of the configuration's
    options: dict[str, Any]  # seed, semantics and those of `folders.Options` that the file names
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """What a `merge_method` of mergekit is here."""

    make: Callable[["Resolved"], MergerConfig]
    per_model: tuple[str, ...] = ()  # parameters
    shared: tuple[str, ...] = ()
    based: bool = True  # its base is our base; else base is one of the models, or there is none
    pair: bool = False  # of a base and one other model
    required: tuple[str, ...] = ()
    drops: bool = False  # at random


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


def _nuslerp(found: Resolved) -> MergerConfig:
    one, two = found.ordered("weight", 1.0)
    if isinstance(one, dict) or isinstance(two, dict) or not one + two:
        raise ValueError("parameters.weight of nuslerp must be one number a model, of a sum that is not 0")
    along = "leaf" if found.flag("nuslerp_flatten", True) else "last"
    if along == "last" and found.flag("nuslerp_row_wise", False):
        along = "first"
    return NuSlerp(t=two / (one + two), along=along)  # type: ignore[arg-type]


def _multislerp(found: Resolved) -> MergerConfig:
    weights = found.ordered("weight", 1.0)
    if any(isinstance(weight, dict) for weight in weights):
        raise ValueError("parameters.weight of multislerp must be one number a model")
    return MultiSlerp(weights=weights)


GTA = "normalize", "rescale", "int8_mask", "lambda"
WD = "weight", "density"
METHODS = {
    "linear": Method(
        lambda f: WeightedAverage(f.ordered("weight", 1.0), normalize=f.flag("normalize", True)),
        ("weight",), ("normalize",), based=False, required=("weight",),
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
    "nuslerp": Method(_nuslerp, ("weight",), ("nuslerp_flatten", "nuslerp_row_wise"), required=("weight",)),
    "multislerp": Method(_multislerp, ("weight",), required=("weight",)),
    "karcher": Method(
        lambda f: Karcher(f.shared.get("max_iter", 10), f.shared.get("tol", 1e-5)), (), ("max_iter", "tol"), based=False
    ),
    "model_stock": Method(lambda f: ModelStock(clamp=False)),
    "sce": Method(lambda f: Sce(density=f.shared.get("select_topk", 1.0)), (), ("int8_mask", "select_topk")),
    "arcee_fusion": Method(lambda f: ArceeFusion(), based=False, pair=True),
}  # fmt: skip


def load(file: Path) -> Recipe:
    """The merge that a file describes, in mergekit's format or in that of `written`.

    Raises: ValueError that lists every field that is unknown, malformed, or asks for what no merger here does; no
        model is looked at before.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} cannot be read as YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, must be the fields of a recipe")
    if "merger" in found:
        return _own(found, file)
    try:
        return _foreign(found)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _foreign(found: Mapping[str, Any]) -> Recipe:
    errors.raise_problems(list(_problems(found)))
    method, sources = METHODS[found["merge_method"]], list(_sources(found))
    origin = found.get("base_model")
    alone = found["merge_method"] == "nuslerp" and origin is None
    based = method.based and not alone
    models = [(ref, own) for ref, own in sources if not (based and ref == origin)]
    if not based and origin is not None and all(ref != origin for ref, _ in models):
        models.append((origin, {}))  # as mergekit does
    if method.pair:
        models = sorted(models, key=lambda model: model[0] != origin)
    base = Path(origin or sources[0][0])
    experts = {_name(ref): Path(ref.partition("+")[2] or ref) for ref, _ in models}
    if len(experts) < len(models):
        raise ValueError(f"models have equal names among {[_name(ref) for ref, _ in models]}: rename a folder")
    start = open_folder("base", local_folder("base", base))
    paths = [path for path, leaf in start.leaves.items() if leaf.is_floating_point()]
    resolve = _Resolver(paths, found.get("parameters") or {}, _slice_parameters(found))
    _check_layers(found, resolve.layers)
    resolved = _resolved(method, {_name(ref): own for ref, own in models}, resolve)
    if alone:
        one, two = resolved.ordered("weight", 1.0)
        _nuslerp(resolved)
        config: MergerConfig = Slerp(coef=two / (one + two))
    else:
        config = method.make(resolved)
    coef = None
    if name := next((name for name in ("lambda", "t") if name in method.shared), None):
        coef = resolve.rules(name, {}, 1.0 if name == "lambda" else None, every=True)
    dtype = found.get("out_dtype") or found.get("dtype")
    notes = ("int8_mask is ignored: masks take no memory here",) if _asks(found, "int8_mask") else ()
    given = [Path(f"{name}={path}") for name, path in experts.items()]
    return Recipe(config, base, given, coef, {"out_dtype": dtype or "same"}, notes)


def _resolved(method: Method, models: Mapping[str, Mapping[str, Any]], resolve: "_Resolver") -> Resolved:
    """Every parameter of a method; problems of all of them at once."""
    problems, per_model = list[str](), dict[str, dict[str, Any]]()
    for name in method.per_model:
        for model, own in models.items():
            try:
                value = resolve.rules(name, own, None if name in method.required else ..., where=model)
                if value is not ...:
                    per_model.setdefault(name, {})[model] = value
            except ValueError as error:
                problems.append(str(error))
    shared = {}
    for name in method.shared:
        if name not in ("lambda", "t"):
            value = resolve.rules(name, {}, ...)
            if isinstance(value, dict):
                problems.append(f"parameters.{name} differs by leaf: give one value")
            elif value is not ...:
                shared[name] = value
    if shared.get("rescale", True) is False and method.drops:
        problems.append("parameters.rescale: what is dropped at random is always rescaled here, leave it out")
    errors.raise_problems(problems)
    return Resolved(list(models), per_model, shared)


class _Resolver:
    """Filters and gradients, leaf by leaf, as mergekit's config.py has them."""

    def __init__(self, paths: Sequence[str], *scopes: Mapping[str, Any]) -> None:
        self.paths, self.scopes = paths, scopes[::-1]
        found = {path: re.search(r"\.(\d+)\.", f".{path}.") for path in paths}
        self._layer = {path: int(match[1]) if match else None for path, match in found.items()}
        self.layers = 1 + max((layer for layer in self._layer.values() if layer is not None), default=-1)

    def rules(self, name: str, own: Mapping[str, Any], default: Any, *, where: str = "", every: bool = False) -> Any:
        """A parameter as one value, or by leaf. Args: default: None raises, where nothing is given."""
        values = {}
        for path in self.paths:
            chosen = next(
                (v for scope in (own, *self.scopes) if (v := self._value(scope.get(name), path)) is not None), default
            )
            if chosen is None:
                raise ValueError(f"parameters.{name} is missing{f' for {where}' if where else ''}, leaf {path!r}")
            values[path] = chosen
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        if ... in values.values():
            raise ValueError(f"parameters.{name} is given for some leaves only: end its filters with a value")
        rules = {glob.escape(path): value for path, value in values.items()}
        return rules if every else rules | {"*": next(reversed(values.values()))}

    def _value(self, setting: Any, path: str) -> Any:
        if setting is None or isinstance(setting, (bool, int, float)):
            return setting
        if isinstance(setting, str):
            return float(setting)
        conditions: list[Any] = [setting] if isinstance(setting, dict) else setting
        if all(isinstance(entry, (bool, int, float, str)) for entry in conditions):
            return self._gradient([float(entry) for entry in conditions], path)
        for entry in conditions:
            wanted = entry.get("filter")
            if wanted is None or wanted == "*" or wanted in path:
                return self._value(entry["value"], path)
        return None

    def _gradient(self, values: Sequence[float], path: str) -> float:
        layer = self._layer[path]
        t = 0.0 if layer is None else layer / (self.layers - 1) if self.layers > 1 else 1.0
        place = t * (len(values) - 1)
        first = int(place)
        share = place - first
        return (1 - share) * values[first] + share * values[min(len(values) - 1, first + 1)]


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    """All that speaks against the fields of a recipe of mergekit; no model is looked at."""
    for name in found:
        if name in REFUSED:
            yield f"{name} is not supported: {REFUSED[name]}"
        elif name not in FIELDS:
            yield f"{name} is no field of a recipe: they are {', '.join(FIELDS)}"
    method = METHODS.get(str(found.get("merge_method")))
    if method is None:
        yield f"merge_method is {found.get('merge_method')!r}: one of {', '.join(METHODS)}"
    for name in ("dtype", "out_dtype"):
        if found.get(name) not in (None, *DTYPES):
            yield f"{name} is {found[name]!r}: one of {', '.join(DTYPES)}"
    if found.get("tokenizer_source") not in (None, "base"):
        yield f"tokenizer_source is {found['tokenizer_source']!r}: only base, the output has base's tokenizer"
    if bool(found.get("models")) == bool(found.get("slices")):
        yield "models or slices must be given, and one of them alone"
    origin = found.get("base_model")
    if not (origin is None or isinstance(origin, str)) or "+" in str(origin):
        yield f"base_model is {origin!r}: must be a folder or a hub name"
    if method and origin is None and (method.pair or (method.based and found.get("merge_method") != "nuslerp")):
        yield f"base_model is missing: {found['merge_method']} needs one"
    slices = found.get("slices") or []
    if not isinstance(slices, list) or any(not isinstance(part, dict) for part in slices):
        yield "slices must be a list of slices, each with sources"
        slices = []
    if len(slices) > 1:
        yield "slices holds several: only one of whole models is supported, the output has base's leaves"
    for part in slices:
        yield from (f"slices.{name} is not supported" for name in part if name not in ("sources", "parameters"))
    entries = list(_entries(found))
    if (found.get("models") or slices) and not entries:
        yield "models must be a list of models"
    for place, entry in enumerate(entries):
        yield from _entry_problems(place, entry, origin, method)
    if method is not None:
        for scope in (found.get("parameters") or {}, _slice_parameters(found)):
            for name, value in scope.items():
                if name not in (*method.per_model, *method.shared):
                    yield f"parameters.{name} is not supported with {found['merge_method']}"
                else:
                    yield from _setting_problems(f"parameters.{name}", value)


def _entry_problems(place: int, entry: Any, origin: Any, method: Method | None) -> Iterator[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        yield f"model {place} is {entry!r}: must have model, a folder or a hub name"
        return
    ref = entry["model"]
    for name in entry.keys() - {"model", "parameters", "layer_range"}:
        yield f"{name} of model {ref} is not supported"
    if "+" in ref and ref.partition("+")[0] != origin:
        yield f"model {ref}: an adapter must be one of base_model"
    for name, value in (entry.get("parameters") or {}).items():
        if method is not None and name not in method.per_model:
            yield f"parameters.{name} of model {ref} is not supported with this merge_method"
        else:
            yield from _setting_problems(f"parameters.{name} of model {ref}", value)


def _setting_problems(label: str, value: Any) -> Iterator[str]:
    if isinstance(value, (bool, int, float)):
        return
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            yield f"{label} is {value!r}: must be a number"
    elif isinstance(value, dict):
        if "value" not in value or value.keys() - {"value", "filter"}:
            yield f"{label} holds {value!r}: must have value, and may have filter"
        else:
            yield from _setting_problems(label, value["value"])
    elif isinstance(value, list) and value:
        if any(isinstance(entry, dict) for entry in value) and not all(isinstance(entry, dict) for entry in value):
            yield f"{label} mixes numbers and filters"
        for entry in value:
            yield from _setting_problems(label, entry)
    else:
        yield f"{label} is {value!r}: must be a number, a list of numbers, or filters with values"


def _entries(found: Mapping[str, Any]) -> Iterator[Any]:
    """The models of a recipe, of its slices too."""
    models = found.get("models")
    yield from models if isinstance(models, list) else ()
    for part in found.get("slices") or ():
        sources = part.get("sources") if isinstance(part, dict) else None
        yield from sources if isinstance(sources, list) else ()


def _sources(found: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for entry in _entries(found):
        yield entry["model"], entry.get("parameters") or {}


def _slice_parameters(found: Mapping[str, Any]) -> Mapping[str, Any]:
    slices = found.get("slices") or [{}]
    own = slices[0].get("parameters") if isinstance(slices, list) and isinstance(slices[0], dict) else None
    return own if isinstance(own, dict) else {}


def _check_layers(found: Mapping[str, Any], layers: int) -> None:
    problems = [
        f"layer_range of {_name(entry['model'])} is {entry.get('layer_range')}: only [0, {layers}], whole models"
        for entry in _entries(found)
        if found.get("slices") and entry.get("layer_range") != [0, layers]
    ]
    errors.raise_problems(problems)


def _asks(found: Mapping[str, Any], name: str) -> bool:
    scopes: Iterable[Mapping[str, Any]] = [found.get("parameters") or {}, *(own for _, own in _sources(found))]
    return any(scope.get(name) for scope in scopes)


def _name(ref: str) -> str:
    return Path(ref.partition("+")[2] or ref).name


OWN = "base", "experts", "coef", "seed", "semantics", "out_dtype", "shard_size", "vocabulary", "device"


def written(
    config: MergerConfig, base: Path, experts: Mapping[str, Path], coef: Any, settings: Mapping[str, Any]
) -> str:
    """The file of a merge: `load` gives it again. Folders stand in it by name; where they lie says `sources`."""
    facts = {
        "smat_fn": __version__,
        "merger": config.name,
        "options": config.settings(),
        "base": _place(base),
        "experts": {name: _place(path) for name, path in experts.items()},
        **({} if coef is None else {"coef": coef if isinstance(coef, (int, float)) else dict(coef)}),
        **settings,
    }
    return yaml.safe_dump(_plain(facts), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """Without tuples, which YAML has none of."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _place(path: Path) -> str:
    return str(path) if repository_of(path) else path.name


def _own(found: Mapping[str, Any], file: Path) -> Recipe:
    """A file that `written` gave."""
    known = {merger.name: merger for merger in (*MERGERS, *MORE_MERGERS)}
    unknown = [
        f"{name} is no field of this file" for name in found if name not in (*OWN, "smat_fn", "merger", "options")
    ]
    missing = [f"{name} is missing" for name in ("base", "experts") if name not in found]
    if found["merger"] not in known:
        missing.append(f"merger is {found['merger']!r}: one of {', '.join(known)}")
    errors.raise_problems([*unknown, *missing])
    merger = known[found["merger"]]
    own = {f.name for f in fields(merger)}
    errors.raise_problems(
        [f"options.{name} is no option of {merger.name}" for name in found["options"] if name not in own]
    )
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in found["options"].items()}
    places = _folders(file.parent)
    base = places.get("base", Path(found["base"]))
    experts = [Path(f"{name}={places.get(f'expert {name!r}', Path(path))}") for name, path in found["experts"].items()]
    rest = {name: found[name] for name in OWN[3:] if name in found}
    return Recipe(merger(**options), base, experts, found.get("coef"), rest)


def _folders(folder: Path) -> dict[str, Path]:
    """Where the inputs of a merge in this folder lie."""
    from .finished import sources

    found = {}
    for label, files in sources(folder).items():
        if files and (place := Path(next(iter(files.values()))).parent).is_dir():
            found[label] = place
    return found
