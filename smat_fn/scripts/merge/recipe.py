"""Recipes: mergekit's YAML as options of smat_fn's mergers, and recipe.yml, which repeats a merge.

What a recipe asks for and no merger here does is refused by the name of its field, all of it at once.
"""

import os
from collections import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from ... import errors
from ...config import MERGERS, MORE_MERGERS, MergerConfig, Semantics
from ...errors import check_member, problems_of
from ...folders import Options
from ...folders.inputs.hub import repository_of
from ...folders.inputs.reading import is_single
from ...folders.inputs.stacks import adapted_by, parts_of, stack_of
from .recipe_forms import number_of, plain
from .recipe_methods import METHODS
from .recipe_problems import PARAMETERS, foreign_file, settings_problems, unknown_fields
from .recipe_resolve import Recipe, entries, resolve
from .recipe_templates import TEMPLATES
from .recipe_write import OWN

REFUSED = {"modules": "only the module default is read, with slices or models alone: give models or slices"}
SLICE = {
    "merge_method": "all slices are merged by one method: write a file for each method, and stack what they make",
    "base_model": "all slices have one base: give base_model once, beside slices",
    "residual_weight": "mergekit 0.1.5 never reads it: delete it",
}  # why a slice has no such field
NAMED = "auto", *TEMPLATES
DTYPES = "float32", "bfloat16", "float16", "float64"


class Fields(yaml.SafeLoader):
    """YAML without fields that are given twice, of which PyYAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Raises: yaml.YAMLError for a field that is given twice."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
        return node


def fields_of(file: Path, kind: str) -> dict[str, Any]:
    """The fields of a YAML file. Raises: ValueError that names the file for one that cannot be read as such."""
    try:
        found = yaml.load(file.read_text(encoding="utf-8"), Fields)
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give {kind}") from error
    except (ValueError, yaml.YAMLError) as error:
        if "found another document" in str(error):
            raise ValueError(
                f"{file} holds several documents: write each to its own file, merge them in their order, and give the "
                "output folder of each, OUT/MERGER, where a later one names it"
            ) from error
        raise ValueError(f"{file} cannot be read as YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, must be the fields of {kind}")
    return found


def load(file: Path, *, into: str | None = None, partial: bool = False) -> Recipe:
    """The merge that a file describes, in mergekit's format or in that of `recipe_write.written`.

    Args: into: the model whose language model is merged (`folders.Options`), so that models differ in their names;
        partial: models may lack leaves of base.
    Raises: ValueError that lists every field that is unknown, malformed, or asks for what no merger here does; no
        model is looked at before.
    """
    found = fields_of(file, "a recipe")
    if "merger" in found:
        return _own(found, file)
    if foreign := foreign_file(found, file):
        raise ValueError(foreign)
    notes = list[str]()
    try:
        found = plain(found, notes)
    except RecursionError:
        raise ValueError(f"{file}: an alias (*name) is a part of what it stands for (&name): leave it out") from None
    try:
        errors.raise_problems(list(_problems(found)))
        recipe = resolve(found, inside=into is not None, partial=partial)
        return recipe._replace(notes=(*notes, *recipe.notes))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Errors for the fields of a mergekit recipe; no model is read."""
    for name, value in found.items():
        if name in REFUSED and value is None:
            continue  # as in a configuration that was written with its defaults
        if name in REFUSED:
            yield f"{name} is not supported: {REFUSED[name]}"
    yield from unknown_fields(name for name in found if name not in REFUSED)
    method = METHODS.get(str(found.get("merge_method")))
    if found.get("merge_method") is None:
        yield f"merge_method is missing: give one of {', '.join(METHODS)}"
    elif method is None:
        yield from problems_of(check_member, "merge_method", str(found["merge_method"]), list(METHODS))
    for name in ("dtype", "out_dtype"):
        if found.get(name) is not None:
            yield from problems_of(check_member, name, str(found[name]), list(DTYPES))
    yield from _beside_problems(found)
    if found.get("models") and found.get("slices"):
        yield "models and slices are both given: leave one out"
    elif not (found.get("models") or found.get("slices") or found.get("modules")):
        yield "models is missing: list the models to merge, or slices of them"
    origin = found.get("base_model")
    if not (origin is None or isinstance(origin, str)):
        yield f"base_model is {origin!r}: must be a folder or a hub name, or MODEL+ADAPTER"
    if method and origin is None and (method.pair or (method.based and found.get("merge_method") != "nuslerp")):
        yield f"base_model is missing: {found['merge_method']} needs one"
    slices = found.get("slices") or []
    if not isinstance(slices, list) or any(not isinstance(part, dict) for part in slices):
        yield "slices must be a list of slices, each with sources"
        slices = []
    for name in dict.fromkeys(name for part in slices for name in part if name not in ("sources", "parameters")):
        yield f"slices.{name} is not supported: {SLICE.get(name, 'a slice has sources and parameters, delete it')}"
    parts: list[Mapping[str, Any]] = [{"slices": [part]} for part in slices]
    parts += [found] if found.get("models") else []
    if any(not list(entries(part)) for part in parts):
        yield "models, and sources of every slice, must be lists of models"
    for place, entry in enumerate(entries(found)):
        yield from _entry_problems(place, entry, sliced=bool(slices))
    yield from _misplaced(list(entries(found)))
    yield from settings_problems(found, method)


def _beside_problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a recipe's tokenizer and chat template."""
    given = found.get("tokenizer")
    if given is not None and found.get("tokenizer_source") is not None:
        yield "tokenizer and tokenizer_source are both given: leave one out"
    if given is not None and not isinstance(given, dict):
        yield f"tokenizer is {given!r}: must have source"
    elif given:
        yield from _token_problems(given)
    source = found.get("tokenizer_source") or (given.get("source") if isinstance(given, dict) else None)
    if source is not None and not isinstance(source, str):
        yield f"tokenizer_source is {source!r}: must be base, union or a model"
    template = found.get("chat_template")
    if template is not None and not (isinstance(template, str) and ("{" in template or template in NAMED)):
        yield f"chat_template is {template!r}: must be a template in Jinja, or one of {', '.join(NAMED)}"


def _token_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the fields of a recipe's tokenizer."""
    for name in given.keys() - {"source", "tokens", "pad_to_multiple_of"}:
        yield f"tokenizer.{name} is not supported: it has source, tokens and pad_to_multiple_of"
    pad, tokens = given.get("pad_to_multiple_of"), given.get("tokens")
    if pad is not None and (type(pad) is not int or pad < 1):
        yield f"tokenizer.pad_to_multiple_of is {pad!r}: must be a number above 0"
    if tokens is not None and not isinstance(tokens, dict):
        yield f"tokenizer.tokens is {tokens!r}: must be tokens with source"
        return
    for token, own in (tokens or {}).items():
        label = f"tokenizer.tokens.{token}"
        if not isinstance(own, dict) or own.keys() - {"source", "force"}:
            yield f"{label} is {own!r}: must have source, and may have force"
            continue
        if type(own.get("force", False)) is not bool:
            yield f"{label}.force is {own['force']!r}: must be true or false"
        source = own.get("source")
        if isinstance(source, dict):
            kind, places = source.get("kind"), source.keys() & {"token", "token_id"}
            model = kind == "model_token" and isinstance(source.get("model"), str) and len(places) == 1
            if not (model or source == {"kind": "zero"}) or source.keys() - {"kind", "model", *places}:
                yield f"{label}.source is {source!r}: kind zero, or model_token of a model with token or token_id"
        elif source is not None and not isinstance(source, str):
            yield f"{label}.source is {source!r}: must be a model, or have kind"


def _entry_problems(place: int, entry: Any, *, sliced: bool) -> Iterator[str]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        yield f"model {place} is {entry!r}: must have model, a folder or a hub name"
        return
    ref, layers = entry["model"], entry.get("layer_range")
    if sliced and not (isinstance(layers, list) and len(layers) == 2 and all(type(layer) is int for layer in layers)):
        yield f"layer_range of model {ref} is {layers!r}: must be two numbers, [first, last + 1]"
    if "+" in ref and adapted_by(Path(ref)) is None and not Path(ref).exists():
        yield f"model {ref}: must be MODEL+ADAPTER, two folders or hub names"


def _misplaced(found: Sequence[Any]) -> Iterator[str]:
    """Fields beside ``model`` that have another place, each once."""
    where = dict[str, list[str]]()
    for entry in found:
        for name in entry if isinstance(entry, dict) and isinstance(entry.get("model"), str) else ():
            if name not in ("model", "parameters", "layer_range"):
                where.setdefault(name, []).append(entry["model"])
    for name, refs in where.items():
        whose = f"{name} stands beside model {' and '.join(dict.fromkeys(refs))}"
        if name == "revision":
            yield f"{whose}: write model: {refs[0]}@REVISION"
        elif name in PARAMETERS:
            yield f"{whose}: put it under parameters there"
        else:
            yield f"{whose}, which has model, parameters and layer_range: delete it"


def _own(found: Mapping[str, Any], file: Path) -> Recipe:
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
    return not place.exists() and not parts_of(place) and len(place.parts) == 1


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
        elif not _fits(value, kinds[name]):
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


def placed(given: str, places: Sequence[Path]) -> Path:
    """The path of an input: the place of this machine that is named; a stack has the paths of its parts."""
    if parts := parts_of(Path(given)):
        return stack_of([part._replace(path=placed(str(part.path), places)) for part in parts])
    if pair := adapted_by(Path(given)):
        return Path("+".join(str(placed(str(own), places)) for own in pair))
    for place in places:
        if is_single(file := place / Path(given).name):
            return file
    near = (folder for place in places for folder in (place, place.parent))  # modules lie in folders of their own
    return next((folder for folder in near if _is_named(folder, given)), Path(given))


def _is_named(place: Path, given: str) -> bool:
    """Whether a folder is that of a name in a recipe, and not of another one that was written there since."""
    own = Path(given).parts
    if place.parts[max(0, len(place.parts) - len(own)) :] == own:
        return True
    repository, _, revision = given.partition("@")
    cached = place.parent.parent  # models--OWNER--NAME/snapshots/COMMIT
    if repository_of(Path(given)) is None or cached.name != f"models--{repository.replace('/', '--')}":
        return False
    ref = cached / "refs" / revision
    return place.name.startswith(ref.read_text().strip() if revision and ref.is_file() else revision)


def folders_beside(folder: Path) -> dict[str, list[Path]]:
    """Where the inputs of a merge in this folder lie, by label."""
    from .finished import sources

    found = {
        label: [place for file in files.values() if (place := Path(os.path.abspath(Path(file).parent))).is_dir()]
        for label, files in sources(folder).items()
    }
    return {label: list(dict.fromkeys(places)) for label, places in found.items() if places}
