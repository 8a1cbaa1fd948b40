"""Coefficients by parameter: globs of parameter names instead of one number."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

from ... import errors, tree
from ...errors import all_at_once, problems_of
from ...types import Params
from .inputs import type_problems
from .vectors import applied

Rules: TypeAlias = float | Mapping[str, float]


def coef_of(path: str, rules: Rules) -> float:
    """γ of a leaf: that of the first rule whose glob matches the whole path; a number stands for ``{"*": number}``.

    Args: path: "layers.0.weight"; rules: {glob: γ}, in order; ``*`` matches dots too, ``?`` and ``[…]`` one character.
    Raises: ValueError where no rule matches.
    """
    glob = _deciding(path, rules)
    if glob is None:
        raise ValueError(f"no rule matches parameter {path!r}, rules are {list(_table(rules))}: end them with '*'")
    return float(_table(rules)[glob])


def matches(path: str, rules: Rules) -> bool:
    """Whether a rule matches a leaf."""
    return _deciding(path, rules) is not None


def coefs_of(paths: Iterable[str], rules: Rules) -> dict[str, float]:
    """`coef_of` of many leaves, in their order.

    Raises: ValueError that lists every coefficient that is not finite, every leaf without a rule, and every rule that
        decides for no leaf, because it matches none or because earlier rules match all of its leaves.
    """
    paths, table = list(paths), _table(rules)
    errors.raise_problems([p for glob, c in table.items() for p in type_problems(**{f"coef of {glob!r}": c})])
    problems = [f"coef of {glob!r} is {c}, must be finite" for glob, c in table.items() if not math.isfinite(c)]
    deciding = {path: _deciding(path, rules) for path in paths}
    problems += [
        f"no rule matches parameter {path!r}: add one, or end the rules with '*'"
        for path, glob in deciding.items()
        if glob is None
    ]
    for glob in table if isinstance(rules, Mapping) else ():
        if glob not in deciding.values():
            shadowed = any(fnmatchcase(path, glob) for path in paths)
            reason = (
                "earlier rules match all of its parameters, put it before them"
                if shadowed
                else "it matches no parameter"
            )
            problems.append(f"rule {glob!r} of the coefficients decides for no parameter: {reason}")
    errors.raise_problems(problems)
    return {path: float(table[glob]) for path, glob in deciding.items() if glob is not None}


def apply_rules(base: Params, vector: Params, *, coef: Rules) -> Params:
    """θ₀ + γ_l τ_l for every leaf l, as `apply_vector` does with one γ.

    Args: vector: τ as in `apply_vector`; coef: γ, or {glob: γ} as in `coef_of`.
    Returns: a new tree of base's structure, shapes and dtypes; other leaves are copies of base's.
    Raises: ValueError that lists all that does not fit: leaves of vector, and rules.
    """
    leaves = tree.flatten(base)
    floating = {path: leaf for path, leaf in leaves.items() if leaf.is_floating_point()}
    errors.raise_problems([f"vector: {text}" for text in problems_of(tree.flatten, vector)])
    vector = tree.flatten(vector)
    problems = problems_of(lambda: tree.check_same(floating, "base", vector=vector))
    coefs = all_at_once(problems, lambda: coefs_of(floating, coef))
    merged = {
        path: applied({path: leaf}, {path: vector[path]}, coef=coefs[path])[path]
        if path in coefs
        else leaf.detach().clone()
        for path, leaf in leaves.items()
    }
    return tree.unflatten(base, merged)


def _table(rules: Rules) -> Mapping[str, float]:
    return rules if isinstance(rules, Mapping) else {"*": rules}


def _deciding(path: str, rules: Rules) -> str | None:
    return next((glob for glob in _table(rules) if fnmatchcase(path, glob)), None)
