"""Problems of an input, collected and raised as one ValueError."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

_SHOWN = 10
_OF_A_KIND = 3
MANY = 12  # problems of one kind that are listed one by one

T = TypeVar("T")


class Problems(ValueError):
    """Several problems of an input: joined by semicolons as text, one by one in ``problems``."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type["Problems"], tuple[tuple[str, ...]]]:
        return type(self), (self.problems,)  # an exception is copied by its message, which is no sequence of problems


def raise_problems(problems: Sequence[str], of: str = "") -> None:
    """Raises: `Problems`, if there are any, each once; of: whose they are, its first word.

    Of more than ten, the first three of a kind (alike but for names and numbers) and the number of the others.
    """
    if not problems:
        return
    once = [f"{of}: {text}" if of and not i else text for i, text in enumerate(dict.fromkeys(problems))]
    kinds = [re.sub(r"'[^']*'|\S*[\d/]\S*", "", problem) for problem in once]
    shown = [problem for i, problem in enumerate(once) if kinds[:i].count(kinds[i]) < _OF_A_KIND]
    if len(once) <= _SHOWN or len(shown) == len(once):
        raise Problems(once)
    raise Problems([*shown, f"and {len(once) - len(shown)} more like these"])


def suggestion(value: str, known: Iterable[str], *, alike: float = 0.6, beginning: bool = True) -> str:
    """ ", did you mean 'smat'?" for a value that begins one of ``known``, or is nearly one, else an empty text.

    Args: alike: the share of two words that must agree; beginning: a value may be the beginning of one.
    """
    names, word = list(known), value.lower()
    near = [name for name in names if beginning and len(word) > 2 and name.lower().startswith(word)]
    near = near or get_close_matches(word, names, n=1, cutoff=alike)
    return f", did you mean {near[0]!r}?" if near else ""


def shortened(problems: Sequence[str], rest: str) -> list[str]:
    """Problems of one kind: all of them up to `MANY`; of more the first few, and ``rest`` with the number left."""
    if len(problems) <= MANY:
        return list(problems)
    few = MANY // 2
    return [*problems[:few], rest.replace("{}", str(len(problems) - few), 1)]


def some_of(names: Iterable[str]) -> str:
    """Names in one text: `shortened` ones, "a, b, 3 more"."""
    return ", ".join(shortened(list(names), "{} more"))


def and_more(names: Iterable[str], shown: int = 1) -> str:
    """The first names and the number of the others, "a, b and 3 more"."""
    every = list(names)
    more = len(every) - shown
    return ", ".join(every[:shown]) + (f" and {more} more" if more > 0 else "")


def name_rows(indices: Sequence[int]) -> str:
    """Rows in an error message: "row 3", "rows 3, 5 and 7", the first ten of many."""
    shown, more = [str(i) for i in indices[:_SHOWN]], len(indices) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def complain(where: str | Path, problems: Sequence[str]) -> None:
    """Raises: ValueError that lists the problems of a source, if there are any."""
    if problems:
        text = "; ".join(problems)
        raise ValueError(f"{where}: {text}{' (rows count from 0)' if re.search(r'[Rr]ows? [0-9]', text) else ''}")


def count_problems(recipe: Any, lowest: Mapping[str, int]) -> list[str]:
    """Errors for fields that are not integers >= the given minimum. None is allowed where it is the default."""
    optional = {field.name for field in fields(recipe) if field.default is None}
    given = [(name, getattr(recipe, name), low) for name, low in lowest.items()]
    return [
        text
        for name, value, low in given
        if value is not None or name not in optional
        for text in count_problem(name, value, low)
    ]


def count_problem(name: str, value: Any, low: int = 1) -> list[str]:
    """The error for a value that is not an integer >= ``low``, or nothing."""
    fine = type(value) is int and value >= low
    return [] if fine else [f"{name} is {value!r}, must be an integer of at least {low}"]


def flag_problems(**flags: object) -> list[str]:
    """Errors for switches that are not bools: a text such as "False" would count as True."""
    return [f"{name} is {value!r}, must be True or False" for name, value in flags.items() if type(value) is not bool]


def printable(text: str) -> str:
    """The text with control characters as escapes, ``\\x1b``: names in files may hold commands to a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def problems_of(check: Callable[..., object], *args: Any, **options: Any) -> list[str]:
    """The texts of the ValueError that ``check(*args, **options)`` raises, one for each problem, or nothing."""
    try:
        check(*args, **options)
    except ValueError as error:
        return texts(error)
    return []


def texts(error: ValueError) -> list[str]:
    """The problems of an error, one by one."""
    return list(error.problems) if isinstance(error, Problems) else [str(error)]


def all_at_once(problems: Sequence[str], step: Callable[[], T]) -> T:
    """The result of a step that checks more. Raises: one ValueError of the given problems and the step's."""
    try:
        result = step()
    except ValueError as error:
        raise Problems(list(dict.fromkeys([*problems, *texts(error)]))) from None
    raise_problems(problems)
    return result


@contextmanager
def collected(problems: list[str], of: object = "") -> Iterator[None]:
    """Adds the problems of the ValueError that ends the block, each after ``of`` and a colon; what follows runs."""
    try:
        yield
    except ValueError as error:
        problems += [f"{of}: {text}" if of else text for text in texts(error)]


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, joined with the rest after a colon; without text, its type."""
    first, _, rest = str(error).strip().partition("\n")
    return (f"{first} {rest.strip()}" if first.endswith(":") else first) or type(error).__name__


def check_member(kind: str, value: str, known: Sequence[str]) -> None:
    """Raises: ValueError unless ``value`` is one of ``known``."""
    if value not in known:
        near = suggestion(value, known)
        raise ValueError(f"{kind} {value!r} is unknown{near or ','} choose one of {', '.join(map(repr, known))}")


def takes(function: Callable[..., Any], count: int, **named: Any) -> bool:
    """Whether a function can be called with so many arguments, and these by name; True where nothing says so."""
    try:
        signature(function).bind(*range(count), **named)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def imported(what: str, name: str) -> Any:
    """The function "module:function". Raises: ValueError where there is none."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported ({error}): give module:function") from error
