"""Map checkpoints whose stored names and shapes differ to the leaves that ``transformers`` has in memory.

``from_pretrained`` renames (ViT), fuses (the experts of Qwen3-MoE) and adds prefixes (a backbone that is loaded for
image classification). The rules are transformers' own; here they are read off a model without memory, both ways.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reading import Folder
from .stored import Read

_AUTO = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForImageTextToText",
    "AutoModel",
)


class Group(NamedTuple):
    """Leaves of a checkpoint that are together converted to leaves of the module."""

    converter: Any
    target: str  # the module's first leaf
    stored: dict[str, tuple[str, str]]  # name in the checkpoint -> (the converter's pattern, name that it gives back)


class Naming(NamedTuple):
    """How a checkpoint's leaves become those of a module."""

    model: Any  # on the meta device
    names: dict[str, str]  # name in the checkpoint -> that in the module, of leaves that keep their values
    groups: tuple[Group, ...]

    @property
    def known(self) -> frozenset[str]:
        """The leaves of the checkpoint that have a place in the module."""
        return frozenset(self.names).union(*(group.stored for group in self.groups))

    def seen(self, folder: Folder) -> Folder:
        """A checkpoint as the module's leaves, formed while they are read; leaves that it has no place for are gone."""
        known = {name: path for name, path in self.names.items() if name in folder.leaves}
        leaves = {path: folder.leaves[name] for name, path in known.items()}
        reads = {path: folder.reads[name] for name, path in known.items()}

        @lru_cache(maxsize=2)  # a group is as large as all experts of a layer
        def formed(place: int) -> dict[str, Tensor]:
            own = self.groups[place]
            return _forwards(own, self.model, {name: folder.leaf(name) for name in own.stored})

        for place, group in enumerate(self.groups):
            if group.stored.keys() <= folder.leaves.keys():
                for path, leaf in _forwards(group, self.model, folder.leaves).items():
                    leaves[path], reads[path] = leaf, _part(formed, place, path)
        return folder._replace(leaves=leaves, reads=reads)

    def stored(self, whole: Folder, base: Folder, paths: Collection[str]) -> Folder:
        """Leaves ``paths`` of a module, as the checkpoint stores them; its other leaves are those of base."""
        leaves, reads = dict(base.leaves), dict(base.reads)
        for name, path in self.names.items():
            if path in paths:
                leaves[name], reads[name] = whole.leaves[path], whole.reads[path]

        @lru_cache(maxsize=2)
        def formed(place: int) -> dict[str, Tensor]:
            own = self.groups[place]
            seen = _forwards(own, self.model, base.leaves)
            return _backwards(own, self.model, {path: whole.leaf(path) for path in seen})

        for place, group in enumerate(self.groups):
            seen = _forwards(group, self.model, base.leaves)
            if not seen.keys().isdisjoint(paths):
                for name, leaf in _backwards(group, self.model, {path: whole.leaves[path] for path in seen}).items():
                    leaves[name], reads[name] = leaf, _part(formed, place, name)
        return whole._replace(leaves=leaves, reads=reads)


def namings(folder: Folder) -> Iterator[Naming]:
    """How the classes of ``transformers`` that may load a checkpoint name its leaves, the class that wrote it first.

    Nothing for a checkpoint without a config.json that transformers knows.
    """
    seen = set()
    for model in _models(folder.root):
        if type(model) in seen:
            continue
        seen.add(type(model))
        try:
            yield _naming(model, folder.leaves)
        except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):  # leaves that its rules do not fit
            continue


def _models(root: Path) -> Iterator[Any]:
    if not (root / "config.json").is_file():  # transformers, slow to import, would read a file as a configuration
        return
    import transformers

    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(root, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the last two of a file that is no mapping
            return
    for name in (*(getattr(config, "architectures", None) or ()), *_AUTO):
        if (model := _built(getattr(transformers, name, None), config)) is not None:
            yield model


def _built(kind: Any, config: Any) -> Any:
    """A model without memory; None where this class, or none of it, is not for such a configuration."""
    if type(config) not in getattr(kind, "_model_mapping", (type(config),)):
        return None  # the auto class's own error lists all models, and imports them for it: two seconds
    make = getattr(kind, "from_config", kind)
    try:
        with _quiet(), torch.device("meta"):
            return make(config)
    except (ValueError, TypeError, ImportError):
        return None


def _naming(model: Any, leaves: Mapping[str, Tensor]) -> Naming:
    """Raises: ValueError, or whatever an operation of transformers raises, where its rules cannot be taken back."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_renamings, dot_natural_key, rename_source_key

    rules, own, prefix = get_model_conversion_mapping(model), model.state_dict(), model.base_model_prefix
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if not isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names: dict[str, str] = {}
    groups: dict[str, Group] = {}
    for name in sorted(leaves, key=dot_natural_key):
        path, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if path not in own and name in own:
            path, pattern = rename_source_key(name, [], [], prefix, own)
        if path not in own:
            continue
        if pattern is None:
            names[name] = path
            continue
        group = groups.setdefault(path, Group(by_pattern[pattern], path, {}))
        group.stored[name] = pattern, apply_renamings(name, renamings)
    found = Naming(model, names, tuple(groups.values()))
    for group in found.groups:
        again = _backwards(group, model, _forwards(group, model, leaves))
        if any(again[name].shape != leaves[name].shape for name in group.stored):
            raise ValueError(f"{group.target} cannot be converted back to the parameters it was made from")
    return found


def _forwards(group: Group, model: Any, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's leaves that a group becomes."""
    rule = deepcopy(group.converter)
    for name, (pattern, _) in group.stored.items():
        rule.add_tensor(group.target, name, pattern, leaves[name])
    return _converted(rule, group.target, model)


def _backwards(group: Group, model: Any, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of a group, of all those of the module that it becomes."""
    rule = deepcopy(group.converter).reverse_transform()
    first = ""
    for path, leaf in leaves.items():
        renamed, pattern = rule.rename_source_key(path)
        first = first or renamed
        rule.add_tensor(first, path, pattern, leaf)
    found, prefix = _converted(rule, first, model), f"{model.base_model_prefix}."
    known = {name: leaf for path, leaf in found.items() for name in (path, prefix + path, path.removeprefix(prefix))}
    return {name: known[before] for name, (_, before) in group.stored.items()}


def _converted(rule: Any, first: str, model: Any) -> dict[str, Tensor]:
    found = rule.convert(first, model=model, config=model.config)
    return {path: leaf[0] if isinstance(leaf, list) else leaf for path, leaf in found.items()}


def _part(formed: Any, place: int, path: str) -> Read:
    return lambda start, stop: formed(place)[path].reshape(-1)[start:stop]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers' log messages about configurations: the relevant ones are reported here."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
