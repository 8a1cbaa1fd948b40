"""Regular expressions of adapters, matched by sets of positions: no expression makes the time grow exponentially."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from re import _compiler, _parser  # type: ignore[attr-defined]
from typing import Any

_ONE = {"LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"}  # nodes of one character, or of a place between two
_OTHERS = {"BRANCH", "SUBPATTERN", "MAX_REPEAT", "MIN_REPEAT"}  # nodes with trees in them
_DEEPEST = 50
_WAY = "give the names of modules instead"
_PLAIN = re.compile(r"[\w.\-]*")


def is_match(expression: str, module: str) -> bool:
    r"""Whether a module's path ends with what an expression matches: ``re.match(rf"(.*\.)?({expression})$", module)``.

    Of an expression that `problem` has passed. Time: the size of the expression times at most the cube of the path's
    length.
    """
    if _PLAIN.fullmatch(expression):  # the name of a module: nothing to go back to
        return re.match(_whole(expression), module) is not None
    found: dict[tuple[int, int], set[int]] = {}  # where a node that begins at a position may end

    def after(nodes: Iterable[Any], starts: set[int]) -> set[int]:
        for node in nodes:
            starts = {end for start in starts for end in ends(node, start)}
        return starts

    def ends(node: Any, start: int) -> set[int]:
        if (id(node), start) not in found:
            found[id(node), start] = computed(node, start)
        return found[id(node), start]

    def computed(node: Any, start: int) -> set[int]:
        code, value = str(node[0]), node[1]
        if code in _ONE:
            matched = alone[id(node)].match(module, start)
            return set() if matched is None else {matched.end()}
        if code in ("BRANCH", "SUBPATTERN"):
            branches = value[1] if code == "BRANCH" else [value[-1]]
            return {end for branch in branches for end in after(branch, {start})}
        low, high, inner = value
        new = {start}
        for _ in range(min(low, len(module) + 1)):  # all further ones are empty
            new = after(inner, new)
        every, count = set(new), low
        while new and count < high:
            new, count = after(inner, new) - every, count + 1
            every |= new
        return every

    tree, alone = _parsed(expression)
    return bool(after(tree, {0}))


def problem(expression: str) -> str:
    """Why `is_match` does not take an expression; empty for one that it takes."""
    try:
        for (code, value), depth in _nodes(_parser.parse(_whole(expression))):
            if depth > _DEEPEST:
                return f"is nested more than {_DEEPEST} deep: {_WAY}"
            if str(code) not in _ONE | _OTHERS or (str(code) == "SUBPATTERN" and (value[1] or value[2])):
                return f"has more than characters, classes, groups, alternatives and repetitions: {_WAY}"
    except (re.error, RecursionError, OverflowError) as error:  # "(" * 9999, "a{9999999999}"
        return f"is not a regular expression ({error})"
    return ""


def _whole(expression: str) -> str:
    return rf"(.*\.)?({expression})$"  # as in peft


@lru_cache(maxsize=1024)
def _parsed(expression: str) -> tuple[Any, dict[int, re.Pattern[str]]]:
    """The tree of an expression, and its nodes without trees in them, compiled, by identity."""
    tree = _parser.parse(_whole(expression))
    alone = [node for node, _ in _nodes(tree) if str(node[0]) in _ONE]
    return tree, {id(node): _compiler.compile(_parser.SubPattern(tree.state, [node])) for node in alone}


def _nodes(tree: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """All nodes of a tree, each with its depth."""
    for node in tree:
        yield node, depth
        code, value = str(node[0]), node[1]
        below = value[1] if code == "BRANCH" else [value[-1]] if code in _OTHERS else []
        for inner in below:
            yield from _nodes(inner, depth + 1)
