"""Options of a merger that a search tries beside its coefficient: words of --search-over, and their combinations."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from .... import errors, merge, random
from ....config import MERGERS, MORE_MERGERS, MergerConfig
from ....merge.around.select import combinations

Over: TypeAlias = Mapping[str, Sequence[Any]]  # values to try by option
FLAG = "--search-over"
KINDS: Mapping[str, type[MergerConfig]] = {kind.name: kind for kind in (*MERGERS, *MORE_MERGERS)}
MUST = {int: "an integer", float: "a number", bool: "True or False"}


def over_of(kind: type[MergerConfig], words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values of each option of a merger in words ``NAME=VALUE,VALUE``, in their order.

    Raises: ValueError that lists unknown options, options that cannot be searched, values of another type, and options
        and values that are given twice.
    """
    found, bare, problems = dict[str, tuple[Any, ...]](), list[str](), list[str]()
    kinds, own = _searchable(kind), {f.name: f for f in fields(kind)}
    for word in words:
        name, values = _name(word), [value for value in word.partition("=")[2].split(",") if value]
        if not values:
            bare.append(word)
        elif name in found:
            problems.append(f"{FLAG} {name} is given twice: give all its values in one {name}=VALUE,VALUE")
        elif name in kinds:
            found[name], wrong = _values(name, kinds[name], values)
            problems += wrong
        elif name == "coef" in own:
            problems.append(f"{FLAG} coef: --search tries coefficients already, give them by --grid {' '.join(values)}")
        else:
            why = "is neither a number, a choice nor a switch" if name in own else f"is not an option of {kind.name}"
            near = "" if name in own else errors.suggestion(name, kinds)
            known = f"choose from {', '.join(kinds)}" if kinds else f"{kind.name} has no options to search"
            problems.append(f"{FLAG} {name} {why}{near or ':'} {known}")
    if bare:
        problems.append(f"{FLAG} {' '.join(bare)}: write NAME=VALUE,VALUE without spaces, such as ratio=0.2,0.4")
    errors.raise_problems(problems)
    return found


def _searchable(kind: type[MergerConfig]) -> dict[str, Any]:
    """The types of the options that are numbers, choices or switches, without a coefficient that --grid is for."""
    found, hints = {}, get_type_hints(kind)
    for option in fields(kind):
        hint = hints[option.name]
        own = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
        open_coef = option.name == "coef" and option.default is None
        if len(own) == 1 and (own[0] in MUST or get_origin(own[0]) is Literal) and not open_coef:
            found[option.name] = own[0]
    return found


def _values(name: str, kind: Any, words: Sequence[str]) -> tuple[tuple[Any, ...], list[str]]:
    """Words as values of an option of this type, and errors for those that are not, and for equal ones."""
    named = {str(value): value for value in get_args(kind) or (True, False)}
    found, problems = list[Any](), list[str]()
    for word in words:
        try:
            found.append(kind(word) if kind in (int, float) else named[word])
        except (ValueError, KeyError):
            must = MUST.get(kind) or f"one of {', '.join(named)}"
            problems.append(f"{FLAG} {name}={word}: must be {must}")
    if len({*found}) < len(found):
        problems.append(f"{FLAG} {name}={','.join(words)}: name each value once")
    return tuple(found), problems


def with_searched(words: list[str]) -> list[str]:
    """The words of a command, with a value for each required option that --search-over tries: it counts as given.

    Raises: ValueError as `over_of`; and for options that are also given.
    """
    kind = KINDS.get(next((word for word in words if word == "all" or word in KINDS), ""))
    tried = _after_flag(words)
    if kind is None or not tried:
        return words
    over, problems = dict[str, tuple[Any, ...]](), list[str]()
    given = {_name(word).removeprefix("no_"): word.partition("=")[0] for word in words if word.startswith("--")}
    with errors.collected(problems):
        over = over_of(kind, tried)
    named = {_name(word) for word in tried} & given.keys()
    problems += [f"{given[name]} and {FLAG} {name} both set {name}: leave one out" for name in sorted(named)]
    errors.raise_problems(problems)
    needed = [f.name for f in fields(kind) if f.default is MISSING is f.default_factory and f.name in over]
    return [*words, *(word for name in needed for word in (f"--{name.replace('_', '-')}", str(over[name][0])))]


def _after_flag(words: Sequence[str]) -> list[str]:
    """The values of --search-over in the words of a command."""
    found, inside = list[str](), False
    for word in words:
        if word.startswith("--"):
            inside = _name(word) == _name(FLAG)
            word = word.partition("=")[2] if inside else ""
        found += [word] if inside and word else []
    return found


def _name(word: str) -> str:
    """The option that a word names, as a dataclass has it."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_")


def combined(config: MergerConfig, over: Over) -> list[MergerConfig]:
    """The merger with every combination of values."""
    return [replace(config, **own) for own in combinations(over)]


def value_problems(config: MergerConfig, over: Over, names: Sequence[str]) -> list[str]:
    """Errors for combinations of options that a merger cannot have. Args: names: of the experts."""
    problems = list[str]()
    for one in combined(config, over):
        coef = 0.0 if getattr(one, "coef", 0.0) is None else None
        found = errors.problems_of(merge.check_options, one, names, key=random.key(0), coef=coef)
        problems += [f"{FLAG}: {text}" for text in found]
    return list(dict.fromkeys(problems))
