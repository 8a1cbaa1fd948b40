"""Expressions of adapters, against the module re."""

import random
import re

import pytest

from smat_fn.folders.inputs.patterns import is_match, problem

MODULES = ("model.layers.0.self_attn.q_proj", "layers.10.mlp.up_proj", "q_proj", "a.b", "aab", "b", "", "a\nb")
WRITTEN = (
    "q_proj", "model.layers.0.self_attn.q_proj", r".*\.0\.self_attn\.q_proj", r"layers\.\d+\..*", "layers.(0|10).+",
    r".*(q|up)_proj", r"[^.]+\.b", "(a|ab)*b?", "a{2}b", "a{,2}b", "(a?){3,}b",
    "(a*)*b", "(|a)+?b", r"\bq_proj", "^a.b",
    "a$|b", "(?:a|b)+", "(?P<x>a)b", "[a-c]{1,2}", r"[^\W\d]+", "a|",
)  # fmt: skip


@pytest.mark.parametrize("expression", WRITTEN)
def test_matches_are_those_of_re(expression):
    assert problem(expression) == ""
    for module in MODULES:
        assert is_match(expression, module) == bool(re.match(rf"(.*\.)?({expression})$", module)), module


def test_matches_of_drawn_expressions_are_those_of_re():
    draw, found = random.Random(0), []

    def drawn(depth):
        kind = draw.randrange(7 if depth else 3)
        if kind < 3:
            return draw.choice(["a", "b", ".", "[ab]", r"\.", "^", "$", r"\b"])
        inner = drawn(depth - 1)
        if kind == 3:
            return inner + drawn(depth - 1)
        if kind == 4:
            return f"({inner}|{drawn(depth - 1)})"
        return f"({inner}){draw.choice(['*', '+', '?', '*?', '{2}', '{1,2}', '{3,}', '{0,2}?'])}"

    for _ in range(300):
        expression, module = drawn(4), "".join(draw.choice("ab.") for _ in range(draw.randrange(6)))
        found.append(is_match(expression, module))
        assert found[-1] == bool(re.match(rf"(.*\.)?({expression})$", module)), (expression, module)
    assert 60 < sum(found) < 240


@pytest.mark.parametrize("expression", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "a?" * 30 + "a" * 30 + "b", "(.*)*" * 9 + "b"])
def test_no_expression_runs_for_ever(expression):
    assert not problem(expression)
    assert not is_match(expression, "a" * 60)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("(", "is not a regular expression"),
        ("(" * 9999, "is not a regular expression"),
        ("(?i)a", "is not a regular expression"),  # behind what peft puts before it
        ("a{99999999999}", "is not a regular expression"),
        (
            "(?=a)a",
            "has more than characters, classes, groups, alternatives and repetitions: give the names of modules",
        ),
        (r"(a)\3", "has more than characters"),
        ("a*+", "has more than characters"),
        ("(?i:a)", "has more than characters"),
        ("(" * 60 + "a" + ")" * 60, "is nested more than 50 deep: give the names of modules instead"),
    ],
)
def test_other_expressions_are_named(expression, told):
    assert told in problem(expression)
