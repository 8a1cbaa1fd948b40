"""The scripts as a user runs them, in this process."""

import runpy
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def exits(monkeypatch):
    """``exits(script, *words)``: what the script exits with, None where it ends well."""

    def run(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as exit_:
            return exit_.code
        return None

    return run


def changed(options, given):
    """A dataclass of options, perhaps in groups, with other values by name; a dataclass takes the place of a group."""
    for name, value in given.items():
        places = [place for place, group in vars(options).items() if is_dataclass(group) and name in vars(group)]
        if places and not is_dataclass(value):
            name, value = places[0], replace(getattr(options, places[0]), **{name: value})
        options = replace(options, **{name: value})
    return options


def assert_effects(call, options, table, *, besides=()):
    """Every option of a command reaches the functions that do the work, and nothing else changes.

    Args:
        call: runs the command with stubs for these functions, and gives their arguments by name.
        table: (values of options, what changes): a row tests the last of its options, which the others make possible.
        besides: options that need no row.
    Returns: the arguments for ``options``.
    """
    plain, last = call(options), [[*given.items()][-1] for given, _ in table]
    whole = {name for name, value in last if is_dataclass(value)}
    groups = {name: group for name, group in vars(options).items() if is_dataclass(group) and name not in whole}
    names = {*vars(options)} - {*groups} | {name for group in groups.values() for name in vars(group)}
    assert {name for name, _ in last} | {*besides} == names, "an option without a row, or a row without one"
    for given, expected in table:
        found = call(changed(options, given))
        differ = {name: found.get(name) for name in plain | found if found.get(name) != plain.get(name)}
        assert differ == expected, given
    return plain
