"""recipe.yml, the file of a merge, which repeats it: written and read again."""

from collections import abc
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from ... import __version__, errors
from ...config import MERGERS, MORE_MERGERS, MergerConfig, Semantics
from ...folders import Options
from ...folders.inputs.stacks import stack_parts
from .forms import number_of
from .places import folders_beside, placed, placed_by_name

BESIDE = (
    "config_from", "tokenizer_from", "chat_template", "token_rows", "tokens", "pad_to_multiple_of", "heads", "into",
    "partial",
)  # fmt: skip
OWN = (
    "base", "experts", "coef", "seed", "semantics", "out_dtype", "shard_size", "vocabulary", "device", *BESIDE,
)  # fmt: skip


class Recipe(NamedTuple):
    """A merge that a file describes."""

    config: MergerConfig
    base: Path
    experts: dict[str, Path]
    coef: Mapping[str, float] | None  # γ by leaf, instead of the configuration's
    options: dict[str, Any]  # seed, semantics and those of `folders.Options` that the file names
    notes: tuple[str, ...] = ()


def written(
    config: MergerConfig, base: Path, experts: Mapping[str, Path], coef: Any, settings: Mapping[str, Any]
) -> str:
    """The file of a merge, which `load.recipe_of` reads. It names folders without paths; `sources` holds the paths."""
    facts = {
        "smat_fn": __version__,
        "merger": config.name,
        "options": config.settings(),
        "base": placed_by_name(base),
        "experts": {name: placed_by_name(path) for name, path in experts.items()},
        **({} if coef is None else {"coef": coef if isinstance(coef, (int, float)) else dict(coef)}),
        **settings,
    }
    return yaml.safe_dump(_plain(facts), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    """The value with lists for tuples, which YAML does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def read_own(found: Mapping[str, Any], file: Path) -> Recipe:
    """A file that `written` gave."""
    known = {merger.name: merger for merger in (*MERGERS, *MORE_MERGERS)}
    found = dict(found) | {name: number_of(found[name]) for name in ("coef", "options") if name in found}
    kinds = {**get_type_hints(Options), "base": str, "experts": Mapping[str, str], "options": Mapping[str, Any]}
    kinds |= {"seed": int, "semantics": Semantics}
    problems = [
        f"{name} is not a field of this file" for name in found if name not in (*OWN, "smat_fn", "merger", "options")
    ]
    problems += [f"{name} is missing" for name in ("base", "experts", "options") if name not in found]
    problems += [
        f"{name!r} is {value!r}: see the recipe.yml of a merged model"
        for name, value in found.items()
        if name in kinds and not _fits(value, kinds[name])
    ]
    if (merger := known.get(str(found["merger"]))) is None:
        problems.append(f"merger is {found['merger']!r}, must be one of {', '.join(known)}")
    elif isinstance(found.get("options"), dict):
        problems += _option_problems(merger, found["options"])
    number = found.get("coef") if _fits(found.get("coef"), float) else None
    if number is not None and merger is not None:
        problems += _number_problems(merger, number, found.get("options"))
    errors.raise_problems(problems, of=str(file))
    assert merger is not None
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in found["options"].items()}
    if number is not None:
        options["coef"] = number
    elif isinstance(found.get("coef"), dict) and hasattr(merger, "coef"):
        options = {"coef": None} | options  # that of every leaf is there
    places = folders_beside(file.parent)
    base = placed(found["base"], places.get("base", ()))
    experts = {name: placed(path, places.get(f"expert {name!r}", ())) for name, path in found["experts"].items()}
    missing = [place for place in (base, *experts.values()) if _gone(place)]
    if missing:
        lost = ", ".join(dict.fromkeys(map(str, missing)))
        raise ValueError(f"{file} names {lost}, neither here nor at its old path: write its path into the file")
    rest = {name: found[name] for name in OWN[3:] if name in found}
    for name in places.keys() & {"config_from", "tokenizer_from"}:
        rest[name] = str(places[name][0])
    return Recipe(merger(**options), base, experts, found.get("coef") if number is None else None, rest)


def _gone(place: Path) -> bool:
    """Whether a name is that of no folder here, and of no repository."""
    return not place.exists() and not stack_parts(place) and len(place.parts) == 1


def _number_problems(merger: type[MergerConfig], coef: float, options: Any) -> Iterator[str]:
    """Errors for one number as ``coef``, beside the options or as one of them."""
    if "coef" not in get_type_hints(merger):
        yield f"coef is {coef:g}, but {merger.name} has none: leave it out"
    elif isinstance(options, dict) and options.get("coef") is not None:
        yield f"coef is {coef:g}, and options.coef {options['coef']}: leave one out"


def _option_problems(merger: type[MergerConfig], options: Mapping[str, Any]) -> Iterator[str]:
    """Errors for the options of a merger."""
    own, kinds = {f.name: f for f in fields(merger)}, get_type_hints(merger)
    for name, value in options.items():
        if name not in own:
            yield f"options.{name} is not an option of {merger.name}"
        elif not (_entry_fits if name in merger.by_leaf else _fits)(value, kinds[name]):
            yield f"options.{name} is {value!r}: see merge.py {merger.name} --help"
    missing = (name for name, f in own.items() if f.default is MISSING is f.default_factory and name not in options)
    yield from (f"options.{name} is missing" for name in missing)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value of YAML is of a type; numbers of experts may be given by glob."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return any(value == one for one in inner)
    if origin is abc.Mapping:
        return isinstance(value, dict) and all(
            isinstance(n, str) and _entry_fits(e, inner[1]) for n, e in value.items()
        )
    if origin is tuple:
        return isinstance(value, list) and all(_entry_fits(entry, inner[0]) for entry in value)
    if inner:
        return any(_fits(value, one) for one in inner)
    return type(value) in ((int, float) if kind is float else (kind,))


def _entry_fits(value: Any, kind: Any) -> bool:
    by_glob = kind is float and isinstance(value, dict)
    return all(isinstance(g, str) and _fits(v, float) for g, v in value.items()) if by_glob else _fits(value, kind)
