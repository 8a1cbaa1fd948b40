"""Merger variants: the paper's, mergekit's, or the original authors'."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, get_args

from ..errors import raise_problems
from ..merge import MERGERS, MORE_MERGERS, Merger

Semantics = Literal["paper", "mergekit", "original"]
C = TypeVar("C", bound=Merger)

DIFFERENCES: Mapping[Semantics, Mapping[str, Mapping[str, Any] | str]] = {
    semantics: {
        merger.name: merger.semantics[semantics]
        for merger in (*MERGERS, *MORE_MERGERS)
        if semantics in merger.semantics
    }
    for semantics in get_args(Semantics)
}


def with_semantics(config: C, semantics: Semantics) -> C:
    """A merger with the options that make it the paper's, mergekit's (0.1.5, its defaults), or its own source's.

    Where `DIFFERENCES` names nothing, the definitions agree. Hyperparameters (``coef``, ``keep``, ``drop_prob``) do not
    belong to a definition: mergekit's ``lambda`` is ``coef``, with all weights 1, its ``density`` is ``keep``.
    An option at its default counts as left out.
    Raises: ValueError for an option that says otherwise, for a merger that is unavailable, and for unknown semantics.
    """
    if semantics not in DIFFERENCES:
        raise ValueError(f"semantics {semantics!r} is unknown, choose one of {', '.join(DIFFERENCES)}")
    wanted = DIFFERENCES[semantics].get(config.name, {})
    if isinstance(wanted, str):
        raise ValueError(f"{config.name} with the semantics of {semantics} is unavailable: {wanted}")
    defaults = {f.name: f.default for f in fields(config)}
    given = {name: value for name in wanted if (value := getattr(config, name)) not in (None, defaults[name])}
    problems = [
        f"{name} of {config.name} is {value!r}, but {wanted[name]!r} with the semantics of {semantics}: leave one out"
        for name, value in given.items()
        if value != wanted[name]
    ]
    raise_problems(problems)
    return replace(config, **wanted)
