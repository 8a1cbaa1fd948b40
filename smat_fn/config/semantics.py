"""Whose definition of a merger: options where definitions differ, or the reason why one cannot be had."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from .mergers import MergerConfig

Semantics = Literal["paper", "mergekit", "original"]
C = TypeVar("C", bound=MergerConfig)

_L1 = "mergekit rescales what it keeps by a ratio of L1 norms, here each entry is divided by its keep probability"
_NONE = "mergekit has no such merger"
DIFFERENCES: Mapping[Semantics, Mapping[str, Mapping[str, Any] | str]] = {
    "paper": {},
    "mergekit": {
        "ties": {"aggregate": "mean", "scope": "tensor"},
        "dare": _L1,
        "della": _L1,
        "dare_ties": _L1,
        "magmax": _NONE,
        "tsv_merge": _NONE,
    },
    "original": {"ties": {"aggregate": "mean", "scope": "global"}},
}


def with_semantics(config: C, semantics: Semantics) -> C:
    """A merger with the options that make it the paper's, mergekit's (0.1.5, its defaults), or its own source's.

    Where `DIFFERENCES` names nothing, the definitions agree. Strengths (``coef``, ``keep``, ``drop_prob``) are no part
    of a definition: mergekit's ``lambda`` is ``coef``, with all weights 1, its ``density`` is ``keep``.
    Raises: ValueError for an option that says otherwise, for a merger that cannot be had, and for unknown semantics.
    """
    if semantics not in DIFFERENCES:
        raise ValueError(f"semantics {semantics!r} is unknown, choose one of {', '.join(DIFFERENCES)}")
    wanted = DIFFERENCES[semantics].get(config.name, {})
    if isinstance(wanted, str):
        raise ValueError(f"{config.name} with the semantics of {semantics} cannot be had: {wanted}")
    given = {name: value for name in wanted if (value := getattr(config, name)) is not None}
    problems = [
        f"{name} of {config.name} is {value!r}, but {wanted[name]!r} with the semantics of {semantics}: leave one out"
        for name, value in given.items()
        if value != wanted[name]
    ]
    if problems:
        raise ValueError("; ".join(problems))
    return replace(config, **wanted)
