"""The file of a merge, which `recipe.load` reads again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ... import __version__, checkpoint
from ...config import MergerConfig
from ...folders.inputs.hub import repository_of
from ...folders.inputs.reading import is_single
from ...folders.inputs.stacks import adapted_by, parts_of, stack_of

BESIDE = (
    "config_from", "tokenizer_from", "chat_template", "token_rows", "tokens", "pad_to_multiple_of", "heads", "into",
    "partial",
)  # fmt: skip
OWN = (
    "base", "experts", "coef", "seed", "semantics", "out_dtype", "shard_size", "vocabulary", "device", *BESIDE,
)  # fmt: skip


def written(
    config: MergerConfig, base: Path, experts: Mapping[str, Path], coef: Any, settings: Mapping[str, Any]
) -> str:
    """The file of a merge: `load` reads it again. It names folders without their paths; `sources` holds the paths."""
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


def placed_by_name(path: Path, depth: int = 1) -> str:
    """An input without its place on this machine: a hub name, or the name of its folder, of each part of a stack.

    Args: depth: names of folders above it, and its own, that are given; of different parts of one name as many as tell
        them from each other.
    """
    if parts := parts_of(path):
        given = {part.path for part in parts}
        while len({placed_by_name(own, depth) for own in given}) < len({os.path.abspath(own) for own in given}):
            depth += 1
        return str(stack_of([part._replace(path=Path(placed_by_name(part.path, depth))) for part in parts]))
    if pair := adapted_by(path):
        return "+".join(placed_by_name(own, depth) for own in pair)
    if repository_of(path):
        return str(path)
    parents = Path(os.path.abspath(path)).parents
    if len(parents) > 1 and parents[1].name == checkpoint.SNAPSHOTS:  # its own name is that of the finished expert
        depth = max(depth, 3)
    return "/".join(Path(os.path.abspath(path)).parts[-depth:])


def folder_name(path: Path) -> str:
    """The name of a folder, that of the working directory too; of a file of weights, without its suffix."""
    if is_single(path):
        return path.stem
    return path.name if path.name not in ("", "..") else path.resolve().name
