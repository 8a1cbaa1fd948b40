"""Convert mergekit recipes to mergers, models and coefficients: slices, filters and gradients, leaf by leaf."""

import glob
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ... import errors
from ...config import MergerConfig
from ...folders.inputs.hub import header_problems, local_folder, missing, unavailable
from ...folders.inputs.opening import key_of, open_input
from ...folders.inputs.side_files import TOKENIZER, files_of
from ...folders.inputs.stacks import StackPart, adapted_by, is_first, layer_of, layers_of, stack_of
from ...where import blocks_of, unet_problems
from .methods import METHODS, Method, Resolved, values_of
from .own import Recipe
from .places import folder_name
from .templates import NOTES, TEMPLATES

DEFAULTS = {"weight": 1.0, "density": 1.0, "gamma": 0.01, "epsilon": 0.15, "scale": 1.0}  # mergekit's, of some leaves


class Source(NamedTuple):
    """A model in a slice."""

    ref: str
    layers: tuple[int, int] | None  # None: all of them
    own: Mapping[str, Any]  # parameters
    absent: bool = False  # there to fill the place of a model that this slice has not: its weight is 0
    joined: bool = False  # base_model, which the list of models leaves out


class Slice(NamedTuple):
    """Layers that are merged from the same models."""

    experts: list[Source]
    base: Source | None  # of methods that have one
    parameters: Mapping[str, Any]
    tail: bool = False  # no layers: the models of the last norm and the head


class Spot(NamedTuple):
    """Origin of a leaf of the output."""

    part: int  # its slice
    t: float  # from 0 at the first layer of the slice to 1 at the last one; NaN in a UNet, whose layers have no depth
    name: Callable[[int], str]  # there, in a model whose first layer of this slice is given


def resolve(
    found: Mapping[str, Any],
    *,
    inside: bool = False,
    partial: bool = False,
    merges: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """A recipe whose fields have been checked, with the headers of its models.

    Args:
        inside, partial: the merge has `into` or `partial` (`Options`); with `into` no value differs by parameter.
        merges: names of earlier merges of the file, by their folders: those of experts here.
    Raises: ValueError for models that cannot be opened, ranges of layers and numbers of models that do not fit, and
        parameters that a leaf lacks.
    """
    notes: tuple[str, ...] = ()
    if _is_base_alone(found):
        found, notes = _copied(found), ("base_model is the only model: its weights are written as they are",)
    method, origin = METHODS[found["merge_method"]], found.get("base_model")
    alone = method.alone if origin is None else None
    slices = _slices(found, method, based=method.based and alone is None)
    names = _slot_names(slices, merges)
    refs = dict.fromkeys(s.ref for part in slices for s in (*part.experts, *([part.base] if part.base else [])))
    inputs = {**({} if origin is None else {"base": Path(origin)}), **{f"model {ref!r}": Path(ref) for ref in refs}}
    errors.raise_problems(unavailable(inputs) or missing(inputs))
    if whole := _is_whole(slices):
        base, experts = _whole_models(found, slices[0], names, shapes=not (inside or partial))
    else:
        base = _stack([part.base or _base_of(part.experts, origin) for part in slices])
        experts = {name: _stack([part.experts[i] for part in slices], method.uneven) for i, name in enumerate(names)}
    start = open_input("base", base)
    paths = [path for path, leaf in start.leaves.items() if leaf.is_floating_point()]
    resolver = _Resolver(_whole_spots(paths) if whole else _spots(paths, slices), slices, found.get("parameters") or {})
    resolved = _resolved(found["merge_method"], names, resolver)
    coef: Any = None
    if alone is not None:
        config, coef = alone(resolved)
    else:
        config = method.make(resolved)
    if method.gamma in method.shared:
        coef = resolver.rules(method.gamma, None, 1.0 if method.gamma == "lambda" else None, every=True)
        alike = not isinstance(coef, Mapping)
        config, coef = replace(config, coef=coef if alike else None), None if alike else coef  # type: ignore[call-arg]
    if inside and (not whole or _by_leaf(config, coef)):
        raise ValueError(
            "into requires whole models with one number each, since layers and parameters here are those of base: "
            "merge without the file, by merge.py MERGER --coefs"
        )
    notes += tuple(_notes(found, slices, merges))
    options = {"semantics": "mergekit", "out_dtype": found.get("out_dtype") or found.get("dtype") or "same"}
    if whole:
        models = {model.ref: key_of(name) for name, model in zip(names, slices[0].experts, strict=True)}
    else:
        models = {model.ref: key_of(name_of(model.ref, merges)) for part in slices for model in part.experts}
    options |= _beside(found, origin or first_of(found), start.root, models)
    return Recipe(config, base, experts, coef, options, notes)


def _whole_models(
    found: Mapping[str, Any], part: Slice, names: Sequence[str], *, shapes: bool
) -> tuple[Path, dict[str, Path]]:
    """Base and experts of a recipe without slices. Raises: ValueError for headers that do not fit, as on the hub."""
    first = found.get("base_model") or first_of(found)
    base = _whole(first, "")
    experts = {name: _whole(source.ref, first) for name, source in zip(names, part.experts, strict=True)}
    by_row = found.get("tokenizer") is None and not found.get("tokenizer_source")
    labelled = {"base": base, **{f"expert {name!r}": path for name, path in experts.items()}}
    errors.raise_problems(header_problems(labelled, rows=by_row, shapes=shapes))
    return base, experts


def _notes(found: Mapping[str, Any], slices: Sequence[Slice], merges: Mapping[str, str]) -> Iterator[str]:
    """Notes on how a recipe is read."""
    if _asks_int8_mask(found, slices):
        yield "int8_mask is ignored: masks take no memory here"
    if note := NOTES.get(str(found.get("chat_template"))):
        yield note
    if slices[-1].tail:
        few = " and ".join(name_of(source.ref, merges) for source in slices[-1].experts if source.absent)
        yield f"the last norm and the head are merged without {few}, as in mergekit: slices[0] has fewer models"


def _is_base_alone(found: Mapping[str, Any]) -> bool:
    """Whether a recipe adds no task vector to its base, which mergekit then writes as it is."""
    refs = {entry["model"] for entry in entries(found)}
    return "lambda" in METHODS[found["merge_method"]].shared and refs == {found.get("base_model")}


def _copied(found: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe that writes the same models or layers unchanged."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(own) for name, own in value.items() if name != "parameters"}
        return [plain(own) for own in value] if isinstance(value, list) else value

    return {**plain(found), "merge_method": "passthrough"}


def _whole(ref: str, base: str) -> Path:
    """A whole model; an adapter of base by its folder, of another model as all layers of that one with the adapter."""
    pair = adapted_by(Path(ref))
    if pair is None:
        return Path(ref)
    if str(pair[0]) == str(Path(base)):
        return pair[1]
    return stack_of([StackPart(Path(ref), 0, layers_of(open_input(ref, pair[0])))])


def _by_leaf(config: MergerConfig, coef: Any) -> bool:
    """Whether a coefficient, a number of an expert or an option differs by leaf."""
    found = config.settings().values()
    of_experts: list[Iterable[Any]] = [value.values() for value in found if isinstance(value, Mapping)]
    of_experts += [value for value in found if isinstance(value, list | tuple)]
    options = [getattr(config, name) for name in config.by_leaf]
    return any(isinstance(own, Mapping) for own in (coef, *options, *itertools.chain(*of_experts)))


def entries(found: Mapping[str, Any]) -> Iterator[Any]:
    """The models of a recipe, of its slices too."""
    models, slices = found.get("models"), found.get("slices")
    yield from models if isinstance(models, list) else ()
    for part in slices if isinstance(slices, list) else ():
        sources = part.get("sources") if isinstance(part, dict) else None
        yield from sources if isinstance(sources, list) else ()


def first_of(found: Mapping[str, Any]) -> str:
    """The first model of a recipe, without its adapter: its configuration and tokenizer stand for base_model's."""
    first = next(entries(found), None)
    if not isinstance(first, dict):
        return ""
    pair = adapted_by(Path(str(first.get("model"))))
    return str(first.get("model") if pair is None else pair[0])


def _slices(found: Mapping[str, Any], method: Method, *, based: bool) -> list[Slice]:
    """The models of every slice, as many in each. Raises: ValueError that lists the slices that do not fit."""
    origin, problems, slices = found.get("base_model"), list[str](), list[Slice]()
    parts, sliced = found.get("slices") or [{"sources": found["models"]}], bool(found.get("slices"))
    for place, part in enumerate(parts):
        sources = [
            Source(entry["model"], tuple(entry["layer_range"]) if sliced else None, entry.get("parameters") or {})
            for entry in part["sources"]
        ]
        if not sliced and not based and origin is not None and all(s.ref != origin for s in sources):
            sources.append(Source(origin, None, {}, joined=True))  # as mergekit does
        label = f"slices[{place}]" if sliced else "models"
        if len({source.ref for source in sources}) < len(sources):
            problems.append(f"{label} has a model twice: give each once")
        if len({source.layers[1] - source.layers[0] for source in sources if source.layers}) > 1:
            problems.append(f"{label} has ranges of several lengths: they must be equal")
        base = next((source for source in sources if based and source.ref == origin), None)
        experts = [source for source in sources if source is not base]
        if not experts:
            problems.append(f"{label} has base_model alone: give another model")
        if method.pair:
            experts.sort(key=lambda source: source.ref != origin)
            if len(experts) != 2 or experts[0].ref != origin:
                problems.append(f"{label} must have base_model {origin} and one other model")
        if based and base is None and sliced:
            problems.append(f"{label} lacks base_model {origin}, which {found['merge_method']} needs there")
        if method.single and len(experts) != 1:
            problems.append(f"{label} has {len(experts)} models: {found['merge_method']} takes one")
        slices.append(Slice(experts, base, part.get("parameters") or {}))
    errors.raise_problems(problems)
    slices += _tail(parts, slices)
    width = max(len(part.experts) for part in slices)
    for part in slices:
        part.experts.extend([part.experts[0]._replace(own={}, absent=True)] * (width - len(part.experts)))
    return slices


def _tail(parts: Sequence[Mapping[str, Any]], slices: Sequence[Slice]) -> list[Slice]:
    """The models of the last norm and the head, where they are not all of the last slice's.

    mergekit 0.1.5 (plan.py, `plan_module`) takes as many of the last slice's models as the first slice has.
    """
    count, last = len(parts[0]["sources"]), slices[-1]
    kept = {source["model"] for source in parts[-1]["sources"][:count]}
    if len(parts[-1]["sources"]) <= count or (last.base is not None and last.base.ref not in kept):
        return []

    def behind(source: Source) -> Source:
        stop = (source.layers or (0, 0))[1]
        return source._replace(layers=(stop, stop), absent=source.ref not in kept)

    base = None if last.base is None else behind(last.base)
    return [Slice([behind(source) for source in last.experts], base, last.parameters, tail=True)]


def _slot_names(slices: Sequence[Slice], merges: Mapping[str, str]) -> list[str]:
    """A name for the first model of all slices, for the second one, and so on."""
    slots = list(zip(*(part.experts for part in slices), strict=True))
    places = [tuple(None if s.absent else os.path.realpath(_path(s.ref)) for s in slot) for slot in slots]

    def of(depth: int) -> list[str]:
        return ["+".join(dict.fromkeys(_deep(s.ref, depth, merges) for s in slot if not s.absent)) for slot in slots]

    # of folders of one name, as many above them as tell them apart
    names = max(map(of, range(1, 5)), key=lambda found: len(set(found)))
    if len(set(names)) < len(names) and len(set(places)) < len(places):
        raise ValueError(f"models have equal names among {names}: give each folder once")
    # the same models in another order: slices may list them in any
    return [f"{name}-{names[: i + 1].count(name)}" if name in names[:i] else name for i, name in enumerate(names)]


def _deep(ref: str, depth: int, merges: Mapping[str, str]) -> str:
    """The name of a model after the names of folders above it, or of a repository after its owner's."""
    path = _path(ref)
    above = (Path(os.path.abspath(path)) if path.exists() else path).parts[-depth:-1]
    return "-".join([*above, name_of(ref, merges)])


def _is_whole(slices: Sequence[Slice]) -> bool:
    """Whether a recipe merges whole models. Raises: ValueError for ranges of layers that a model does not have."""
    sources = [source for part in slices for source in (*part.experts, *([part.base] if part.base else []))]
    if all(source.layers is None for source in sources):
        return True
    counts = {
        ref: layers_of(open_input(ref, (adapted_by(Path(ref)) or [Path(ref)])[0]))
        for ref in {source.ref for source in sources}
    }
    if len(slices) == 1 and all(source.layers == (0, counts[source.ref]) for source in sources):
        return True
    behind = [source for part in slices if part.tail for source in (*part.experts, part.base)]
    errors.raise_problems(
        [
            f"layer_range of {name_of(ref)} is {list(layers)}: it has layers [0, {counts[ref]}]"
            + (", which includes the last one" if layers[1] < 0 else "")
            for ref, layers in dict.fromkeys((source.ref, source.layers) for source in sources if source not in behind)
            if layers is not None and not 0 <= layers[0] < layers[1] <= counts[ref]
        ]
    )
    return False


def _base_of(sources: Sequence[Source], origin: str | None) -> Source:
    """The source of base_model, where it is merged like the others, else the first one."""
    return next((source for source in sources if source.ref == origin and not source.absent), sources[0])


def _stack(sources: Sequence[Source], uneven: bool = False) -> Path:
    """Args: uneven: the merger leaves out absent models; else their weight is 0."""
    return stack_of([StackPart(Path(s.ref), *(s.layers or (0, 0)), s.absent and uneven) for s in sources])


def _whole_spots(paths: Iterable[str]) -> dict[str, Spot]:
    blocks = blocks_of(paths)
    last = dict[str, int]()  # by list of layers, as encoder and decoder have
    for block in filter(None, blocks.values()):
        head, _, layer = block.rpartition(".")
        last[head] = max(int(layer), last.get(head, 0))
    lost = bool(unet_problems(blocks.values(), ""))

    def spot(path: str) -> Spot:
        head, _, layer = blocks[path].rpartition(".")
        t = int(layer) / last[head] if layer and last[head] else float(bool(layer))
        return Spot(0, nan if lost else t, lambda start: path)

    return {path: spot(path) for path in blocks}


def _spots(paths: Iterable[str], slices: Sequence[Slice]) -> dict[str, Spot]:
    ranges, before = list[tuple[int, int]](), 0
    for part in slices:
        start, stop = part.experts[0].layers or (0, 0)
        ranges.append((before, stop - start))
        before += stop - start

    def spot(path: str) -> Spot:
        if (found := layer_of(path)) is None:
            return Spot(0 if is_first(path) else len(slices) - 1, 0.0, lambda start: path)
        head, layer, rest = found
        part = next(i for i, (first, count) in enumerate(ranges) if layer < first + count)
        first, count = ranges[part]
        place = layer - first
        return Spot(part, place / (count - 1) if count > 1 else 1.0, lambda start: f"{head}{start + place}.{rest}")

    return {path: spot(path) for path in paths}


def _resolved(called: str, names: list[str], resolver: "_Resolver") -> Resolved:
    """Every parameter of a method; problems of all of them at once."""
    method, problems, per_model = METHODS[called], list[str](), dict[str, dict[str, Any]]()
    for name in method.per_model:
        for slot, model in enumerate(names):
            with errors.collected(problems):
                value = resolver.rules(name, slot, None if name in method.required else ..., where=model)
                if value is not ...:
                    per_model.setdefault(name, {})[model] = value
    shared = {}
    for name in method.shared:
        if name != method.gamma:
            value = resolver.rules(name, None, None if name in method.required else ...)
            if isinstance(value, dict) and not method.by_leaf:
                problems.append(f"parameters.{name} differs by parameter: {called} takes one value for all of them")
            elif value is not ...:
                shared[name] = value
    if not shared.get("rescale", True) and method.drops and "epsilon" in method.per_model:
        dense = per_model.get("density", {})
        few = [name for name in dense if any(value < 1 for value in values_of(dense[name]))]
        if few:
            problems.append(
                f"parameters.rescale is false, with a density below 1 for {' and '.join(few)}: what {called} drops at "
                "random is always rescaled here, leave it out"
            )
    errors.raise_problems(list(dict.fromkeys(problems)))
    return Resolved(names, per_model, shared, resolver.spots)


class _Resolver:
    """Filters and gradients, leaf by leaf, as mergekit's config.py has them."""

    def __init__(self, spots: Mapping[str, Spot], slices: Sequence[Slice], shared: Mapping[str, Any]) -> None:
        self.spots, self.slices, self.shared = spots, slices, shared

    def rules(self, name: str, slot: int | None, default: Any, *, where: str = "", every: bool = False) -> Any:
        """A parameter as one value, or by leaf. Args: slot: of a model; default: None raises where nothing is given."""
        values = {path: self._chosen(name, slot, path, default) for path in self.spots}
        if missing := [path for path, chosen in values.items() if chosen is None]:
            joined = slot is not None and self.slices[0].experts[slot].joined
            part = f", parameter {missing[0]!r}" if len(missing) < len(values) else ""
            why = f"give {name}" + (", with a last value that has no filter" if part else "")
            if joined:
                why = "base_model is merged too, as in mergekit: give it in models, or leave it out"
            raise ValueError(f"parameters.{name} is missing{f' for {where}' if where else ''}{part}: {why}")
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        if ... in values.values():
            if name not in DEFAULTS:
                raise ValueError(f"parameters.{name} is given for some parameters only: end its filters with a value")
            values = {path: DEFAULTS[name] if value is ... else value for path, value in values.items()}
        rules = {glob.escape(path): value for path, value in values.items()}
        return rules if every else rules | {"*": next(reversed(values.values()))}

    def _chosen(self, name: str, slot: int | None, path: str, default: Any) -> Any:
        spot = self.spots[path]
        part, tested = self.slices[spot.part], path
        scopes = [part.parameters, self.shared]
        if slot is not None:
            source = part.experts[slot]
            if source.absent and name == "weight":
                return 0.0
            if source.absent:
                source = part.experts[0]
            scopes, tested = [source.own, *scopes], spot.name((source.layers or (0, 0))[0])
        found = (self._value(scope.get(name), tested, spot.t) for scope in scopes)
        chosen = next((value for value in found if value is not None), default)
        return float(chosen) if slot is not None and isinstance(chosen, bool) else chosen  # true is 1 in mergekit

    def _value(self, setting: Any, path: str, t: float) -> Any:
        if setting is None or isinstance(setting, (bool, int, float)):
            return setting
        if isinstance(setting, str):
            return float(setting)
        conditions: list[Any] = [setting] if isinstance(setting, dict) else setting
        if all(isinstance(entry, (bool, int, float, str)) for entry in conditions):
            return _between([float(entry) for entry in conditions], t)
        for entry in conditions:
            wanted = entry.get("filter")
            if wanted is None or wanted == "*" or wanted in path:
                return self._value(entry["value"], path, t)
        return None


def _between(values: Sequence[float], t: float) -> float:
    """The value of a recipe's gradient at t in [0, 1], interpolated linearly. Raises: ValueError for t of a UNet."""
    if isnan(t) and len(values) > 1:
        raise ValueError(
            f"the layers of a UNet have no depth for the gradient {values}: give filters with one value each"
        )
    if len(values) == 1:
        return values[0]
    place = t * (len(values) - 1)
    first = int(place)
    share = place - first
    return (1 - share) * values[first] + share * values[min(len(values) - 1, first + 1)]


def _beside(found: Mapping[str, Any], origin: str, root: Path, names: Mapping[str, str]) -> dict[str, Any]:
    """Whose configuration, tokenizer and chat template the output has; mergekit's are those of ``origin``."""
    here = local_folder("base_model", (adapted_by(Path(origin)) or [Path(origin)])[0])
    given = found.get("tokenizer")
    source = found.get("tokenizer_source") or (None if given is None else given.get("source", "union"))
    own = "base" if here == root else names.get(origin, origin)
    rows = None if found.get("base_model") else "mean"
    if source is None and here != root and files_of(here, TOKENIZER):
        source, rows = "base", "by-row"
    if source is not None and source != "union":
        source = source.removeprefix("model:")  # as older versions of mergekit write it
        source = own if source in ("base", origin) else names.get(source, source)

    def named(ref: str) -> str:
        if ref != origin and ref not in names:
            raise ValueError(f"tokenizer.tokens: {ref} is not one of the models")
        return own if ref == origin else names[ref]

    tokens = {str(token): _token(entry, named) for token, entry in ((given or {}).get("tokens") or {}).items()}
    asked = {
        "tokens": tokens or None,
        "pad_to_multiple_of": (given or {}).get("pad_to_multiple_of"),
        "config_from": None if here == root else own,
        "tokenizer_from": source,
        "chat_template": TEMPLATES.get(str(found.get("chat_template")), found.get("chat_template")),
        "token_rows": None if source is None else rows,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _token(entry: Mapping[str, Any], named: Callable[[str], str]) -> dict[str, Any]:
    """A token of mergekit's ``tokenizer.tokens`` as one of `tokens.aligned`."""
    source, found = entry.get("source"), dict[str, Any]()
    if isinstance(source, dict) and source["kind"] == "zero":
        found["zero"] = True
    elif source is not None:
        found["model"] = named(source["model"] if isinstance(source, dict) else source)
    if isinstance(source, dict):
        found |= {new: source[old] for old, new in (("token", "token"), ("token_id", "id")) if old in source}
    return found | ({"force": True} if entry.get("force") else {})


def _asks_int8_mask(found: Mapping[str, Any], slices: Sequence[Slice]) -> bool:
    own = [scope for part in slices for scope in (part.parameters, *(source.own for source in part.experts))]
    return any(scope.get("int8_mask") for scope in (found, found.get("parameters") or {}, *own))


def _path(ref: str) -> Path:
    return (adapted_by(Path(ref)) or [Path(ref)])[-1]


def name_of(ref: str, merges: Mapping[str, str] = MappingProxyType({})) -> str:
    """The expert's name: of an earlier merge its name, else that of its folder, or of its adapter's folder."""
    path = _path(ref)
    return merges.get(str(path)) or folder_name(path)
