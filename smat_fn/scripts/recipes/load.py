"""Read a merge from a file: mergekit's YAML as options of smat_fn's mergers, or recipe.yml.

What a recipe asks for and no merger here does is refused by the name of its field, all of it at once.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ... import errors
from .forms import plain
from .own import Recipe, read_own
from .problems import foreign_file, recipe_problems
from .resolve import resolve

_MOST = 1_000_000  # values of a recipe


class Fields(yaml.SafeLoader):
    """YAML without fields that are given twice, of which PyYAML silently takes the last."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Raises: yaml.YAMLError for a field that is given twice."""
        node = super().compose_mapping_node(anchor)
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if twice := [name for place, name in enumerate(names) if name in names[:place]]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} is given twice", problem_mark=node.start_mark)
        return node


def _values(value: Any, known: dict[int, int]) -> int:
    """The number of values with those that aliases repeat, without walking through them again."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = 0  # of a part of itself, which is an error of its own
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_values(own, known) for own in inner)
    return known[id(value)]


def documents_of(file: Path, kind: str) -> list[dict[str, Any]]:
    """The fields of each document of a YAML file, without empty ones; of one at least.

    Raises: ValueError that names the file for one that cannot be read as such.
    """
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        documents = list(yaml.load_all(text, Fields))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give {kind}") from error
    except (ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:  # of !!bool x too
        fenced = any(line.lstrip().startswith("```") for line in text.splitlines())
        out = ": delete the lines with ```, which are of the page it was copied from" if fenced else ""
        raise ValueError(f"{file} cannot be read as YAML ({' '.join(str(error).split())}){out}") from error
    if _values(documents, {}) > _MOST:
        raise ValueError(f"{file}: its aliases (*name) stand for more than {_MOST:,} values: write what they stand for")
    found = [own for own in documents if own is not None]
    if wrong := [own for own in found or [None] if not isinstance(own, dict)]:
        held = "nothing" if wrong[0] is None else f"a {type(wrong[0]).__name__}"
        raise ValueError(f"{file} holds {held}, must be the fields of {kind}")
    return found


def fields_of(file: Path, kind: str) -> dict[str, Any]:
    """The fields of a YAML file with one document. Raises: ValueError as `documents_of`, and for several ones."""
    found, *more = documents_of(file, kind)
    if more:
        raise ValueError(f"{file} holds several documents, must be the fields of one: write each to its own file")
    return found


def recipe_of(
    found: dict[str, Any],
    file: Path,
    *,
    into: str | None = None,
    partial: bool = False,
    merges: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """The merge that the fields of a file describe, in mergekit's format or in that of `own.written`.

    Args:
        file: in which they stand, perhaps in one of its documents.
        into: the model whose language model is merged (`folders.Options`), so that models differ in their names.
        partial: models may lack leaves of base.
        merges: names of earlier merges of the file, by their folders.
    Raises: ValueError that lists every field that is unknown, malformed, or asks for what no merger here does; no
        model is looked at before.
    """
    if "merger" in found:
        return read_own(found, file)
    if foreign := foreign_file(found, file):
        raise ValueError(foreign)
    notes = list[str]()
    found = plain(found, file, notes)
    try:
        errors.raise_problems(list(recipe_problems(found, notes)))
        recipe = resolve(found, inside=into is not None, partial=partial, merges=merges)
        return recipe._replace(notes=(*notes, *recipe.notes))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
