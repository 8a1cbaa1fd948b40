"""Several merges in one file, as of mergekit-multi: their order, and folders in place of the names of earlier ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ... import errors
from ...errors import suggestion
from ...folders.inputs.hub import repository_of, unavailable
from .forms import plain
from .places import MERGES
from .problems import foreign_file, recipe_problems

_MODELS = "base_model", "model", "source", "tokenizer_source"  # fields that name a model
_NOT_MODELS = "base", "union"  # of a tokenizer's source


class Step(NamedTuple):
    """One merge of a file."""

    name: str  # empty for the one without a name
    fields: Mapping[str, Any]  # of the recipe, in its plain form
    needs: tuple[str, ...]  # merges that are models of this one
    notes: list[str]  # on fields that have no effect, once `steps_of` has checked them

    @property
    def label(self) -> str:
        """The merge in messages."""
        return f"merge {self.name!r}" if self.name else "the merge without a name"

    def folder(self, out: Path) -> Path:
        """The folder that holds the merged model's."""
        return out / MERGES / self.name if self.name else out


def steps_of(documents: Sequence[Mapping[str, Any]], file: Path, notes: list[str]) -> list[Step]:
    """The merges of a file in an order in which each follows those that it needs, else in the file's order.

    Args: notes: get those about models, as of `plain`.
    Raises: ValueError that lists names that are missing, given twice or not those of a folder, every bad field of every
        merge, models that do not exist, and merges that need each other.
    """
    recipes = [plain(found, file, notes) for found in documents]
    given = [recipe.pop("name", None) for recipe in recipes]
    names = [str(name) for name in given if name is not None]
    left = [
        Step("" if name is None else str(name), recipe, tuple(part for part in _models(recipe) if part in names), [])
        for name, recipe in zip(given, recipes, strict=True)
    ]
    problems = list(_name_problems(given))
    for step in left:
        problems += [f"{step.label}: {text}" for text in _problems(step, names, file)]
    errors.raise_problems(problems, of=str(file))
    refs = {part for step in left for part in _models(step.fields) if part not in names}
    errors.raise_problems(unavailable({f"model {ref!r}": Path(ref) for ref in sorted(refs)}), of=str(file))
    done = list[Step]()
    while left:
        known = {step.name for step in done}
        if (following := next((step for step in left if known.issuperset(step.needs)), None)) is None:
            circle = "; ".join(f"{step.name} is merged from {' and '.join(step.needs)}" for step in left if step.name)
            raise ValueError(f"{file}: merges that need each other: {circle}")
        done.append(following)
        left.remove(following)
    return done


def placed(step: Step, made: Mapping[str, Path]) -> dict[str, Any]:
    """The fields of a merge with the folders of earlier merges in place of their names."""
    return _changed(step.fields, lambda part: str(made.get(part, part)))


def _changed(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """A recipe with other models; MODEL+ADAPTER are two, a folder with + in its path is one."""
    if isinstance(value, Mapping):
        return {key: _changed(own, change, str(key)) for key, own in value.items()}
    if isinstance(value, list):
        return [_changed(own, change) for own in value]
    if not isinstance(value, str) or name not in _MODELS or (name in _MODELS[2:] and value in _NOT_MODELS):
        return value
    # older versions of mergekit write model:A as the source of a tokenizer
    prefix = "model:" if name in _MODELS[2:] and value.startswith("model:") else ""
    value = value.removeprefix(prefix)
    return prefix + "+".join(map(change, [value] if Path(value).exists() else value.split("+")))


def _models(recipe: Mapping[str, Any]) -> list[str]:
    """The models that a recipe names, each once."""
    found = dict[str, None]()
    _changed(recipe, lambda part: found.setdefault(part) or part)
    return list(found)


def _name_problems(names: Sequence[Any]) -> Iterator[str]:
    if names.count(None) > 1:
        yield f"{names.count(None)} merges have no name: give name to all but the last, as name: NAME"
    for name in dict.fromkeys(str(name) for name in names if name is not None):
        if [str(own) for own in names].count(name) > 1:
            yield f"name {name} is given to several merges: each needs its own"
        bad = Path(name).name != name or name in (".", "..", "") or name.startswith("-") or "+" in name
        if bad or not name.isprintable() or name != name.strip():
            yield f"name is {name!r}: must be a name of a folder, without / and +, in one line"
    for given in names:
        if not (given is None or isinstance(given, str)):
            yield f"name is {given!r}, not text: write name: '{given}'"


def _problems(step: Step, names: Sequence[str], file: Path) -> Iterator[str]:
    """Errors for the fields of one merge, and for models that are nowhere."""
    if "merger" in step.fields:
        yield "merger is a field of recipe.yml, which is a file of its own: merge it alone, or write merge_method"
        return
    if foreign := foreign_file(step.fields, file):
        mixture = "it is a mixture of experts: write this document to a file of its own and run merge.py moe FILE"
        yield mixture if "merge.py moe" in foreign else foreign
        return
    yield from recipe_problems(step.fields, step.notes)
    for part in _models(step.fields):
        if part in names or Path(part).exists() or repository_of(Path(part)):
            continue
        yield f"model {part}: not a folder, a hub name, or a merge of this file ({', '.join(names)})" + suggestion(
            part, names
        )
