"""Whole models of other tools on a suite that trains a part of them: a vision tower, top layers, an encoder."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ....errors import and_more
from ....folders import read_inputs
from ....folders.inputs.naming import Naming
from ....folders.inputs.opening import local_folder, place_of
from ....folders.inputs.optional_leaves import computed, copy_of, predicts_ahead
from ....folders.inputs.reading import Folder, config_of
from ....folders.inputs.stored import reader_of_tensor
from ....merge.parts.inputs import Leaves
from ....suites import SUITES, Suite, describe_options
from ....tree import dtype_name
from .inputs import like_base


class SuitePart(NamedTuple):
    """Where the leaves that a suite trains are in a whole model."""

    base: Leaves  # the whole model's, as it is stored
    view: Folder  # base, as the suite's library names its leaves
    names: Mapping[str, str]  # leaf in view -> leaf of the suite
    naming: Naming | None  # None: view has base's own names
    suite: str
    read: Collection[str]  # the leaves in view that scores depend on

    def of(self, leaves: Leaves) -> dict[str, Tensor]:
        """The suite's leaves of a model with base's."""
        own = self._seen(leaves)
        return {path: own.leaf(name) for name, path in self.names.items()}

    def check(self, label: str, leaves: Leaves) -> None:
        """Raises: ValueError for a model that differs from base where the suite takes base's weights."""
        if unlike := self._unlike(leaves, self.read):
            raise ValueError(
                f"{label} differs from its base in {and_more(map(repr, unlike))}, which suite {self.suite!r} takes "
                "from base: its score would be that of another model; leave out options that freeze layers, or give "
                "experts that changed only what the suite trains"
            )

    def runs(self, path: str) -> bool:
        """Whether scores depend on a leaf of base, by its stored name."""
        return (path if self.naming is None else self.naming.names.get(path, path)) in self.read

    def changed_beside(self, models: Iterable[Leaves]) -> list[str]:
        """Leaves in which some model differs from base, but for those that the suite trains and copies of these."""
        found = {path for leaves in models for path in self._unlike(leaves, self.view.leaves)}
        return [path for path in self.view.leaves if path in found]

    def whole(self, own: Leaves, others: Leaves) -> dict[str, Tensor]:
        """A model with base's leaves: those of the suite from ``own``, the rest from a whole model.

        A leaf of the whole model that is tied to one that the suite trains stays a copy of it.
        """
        seen = self._seen(others)
        taken = {path: own[name] for path, name in self.names.items()}
        rest = [path for path in seen.leaves if path not in taken and self._follows(path, seen)]
        copies = {path: copy_of(path, self.view, self.names) for path in rest}
        taken |= {path: taken[other] for path, other in copies.items() if other is not None}
        taken = like_base(seen.leaves, taken)
        if self.naming is None:
            return {**others, **taken}
        whole = _in_memory("model", {**seen.leaves, **taken}, self.view.root)
        stored = self.naming.stored(whole, _in_memory("model", others, self.view.root), taken)
        return {path: stored.leaf(path) for path in others}

    def _unlike(self, leaves: Leaves, paths: Iterable[str]) -> list[str]:
        """Those in which a model differs from base, but for the leaves that the suite trains and copies of these."""
        own, rest = self._seen(leaves), [path for path in paths if path not in self.names]
        unlike = [path for path in rest if not _alike(self.view.leaf(path), own.leaf(path))]
        return [path for path in unlike if not self._follows(path, own)]

    def _follows(self, path: str, own: Folder) -> bool:
        """Whether a leaf that base and a model store is a copy of one that the suite trains, and is tied to it."""
        if config_of(self.view.root).get("tie_word_embeddings") is False:
            return False
        other = copy_of(path, self.view, self.names)
        return other is not None and _alike(own.leaf(path), own.leaf(other))

    def _seen(self, leaves: Leaves) -> Folder:
        own = _in_memory("model", leaves, self.view.root)
        return own if self.naming is None else self.naming.seen(own)


def suite_part(suite: Suite, base: Leaves) -> SuitePart:
    """Where the leaves of a suite are in its whole model. Raises: ValueError where they are in no or several places."""
    root = local_folder("base", Path(suite.recipe["model"]))
    whole, part = (
        _in_memory(label, leaves, root) for label, leaves in (("base", base), (f"suite {suite.name!r}", suite.base))
    )
    view, prefix, naming = place_of(whole, part)
    known = None if suite.reads is None else {f"{prefix}{path}" for path in suite.reads}
    names, config = {f"{prefix}{path}": path for path in suite.base}, config_of(root)
    others = {path: leaf for path, leaf in view.leaves.items() if path not in names}
    unused = {path for path, leaf in others.items() if predicts_ahead(path, config) or computed(path, leaf)}
    read = [path for path in view.leaves if (known is None or path in known) and path not in unused]
    return SuitePart(base, view, names, naming, suite.name, read)


def lacking_problems(label: str, stand_ins: Collection[str], suite: Suite, part: SuitePart | None) -> list[str]:
    """An error for leaves of base that stand in for those of a model's own head, where scores depend on them.

    Args: part: None where the suite's leaves are the whole model.
    """
    read = [path for path in stand_ins if part is None or part.runs(path)]
    if not read:
        return []
    return [
        f"{label} lacks {and_more(map(repr, read))} of its base, or has it in another shape, and the scores of suite "
        f"{suite.name!r} depend on it: give a model of the kind and size of its base, saved by the same version of "
        "transformers"
    ]


def whole_base(suite: Suite) -> dict[str, Tensor] | None:
    """All leaves of the model that a suite trains a part of; None for suites without a model's folder."""
    if "model" not in suite.recipe:
        return None
    return read_inputs(Path(suite.recipe["model"]), {}, [])[0]


def own_dtype(suite: Any, leaves: Leaves) -> dict[str, str]:
    """The option dtype for a suite of this name, if it has one: that of a model's leaves, where they have but one."""
    found = {dtype_name(leaf) for leaf in leaves.values() if leaf.is_floating_point()}
    known = suite in SUITES and "dtype" in describe_options(suite)
    return {"dtype": found.pop()} if known and len(found) == 1 else {}


def of_whole_models(suite: Suite, part: SuitePart) -> Suite:
    """A suite whose base is the whole model, for scoring alone: `Suite.loss_fn` still takes the part."""

    def on(score: Callable[..., float]) -> Callable[..., float]:
        return lambda params, *rest: score(part.of(params), *rest)

    scores: dict[str, Any] = {"score": on(suite.score)}
    if suite.score_once is not None:
        scores["score_once"] = on(suite.score_once)
    return suite.replace(base=part.base, **scores)


def _in_memory(label: str, leaves: Leaves, root: Path) -> Folder:
    return Folder(label, dict(leaves), {path: reader_of_tensor(leaf) for path, leaf in leaves.items()}, {}, root)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, or one is the other rounded."""
    return one.equal(other.to(one.dtype)) or other.equal(one.to(other.dtype))
