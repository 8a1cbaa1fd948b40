"""Coefficients by globs of leaf paths."""

import re
from typing import NamedTuple

import pytest
import torch

from smat_fn import merge

PATHS = ["embed.weight", "layers.0.attn.weight", "layers.0.norm.bias", "layers.11.attn.weight", "head.weight"]
RULES = {"layers.*.attn.*": 0.4, "layers.0.*": 0.3, "*.weight": 0.2}


def raises(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def test_the_first_matching_rule_decides():
    expected = dict(zip(PATHS, [0.2, 0.4, 0.3, 0.4, 0.2], strict=True))
    assert merge.coefs_of(PATHS, RULES) == expected
    assert {path: merge.coef_of(path, RULES) for path in PATHS} == expected


@pytest.mark.parametrize(
    ("glob", "matches"),
    [("*", 5), ("layers.?.*", 2), ("layers.1[0-9].*", 1), ("weight", 0), ("EMBED.*", 0), ("head.weight", 1)],
)
def test_a_glob_matches_the_whole_path(glob, matches):
    assert [merge.coef_of(path, {glob: 1, "?*": 0}) for path in PATHS].count(1.0) == matches


def test_a_number_is_the_coefficient_of_every_leaf():
    assert merge.coef_of("x", 0.5) == 0.5
    assert merge.coefs_of(PATHS, 1) == dict.fromkeys(PATHS, 1.0)
    assert merge.coefs_of([], 1) == {}


def test_all_problems_at_once():
    with raises(
        "coef of 'layers.*' is nan, must be finite",
        "no rule matches parameter 'embed.weight': add one, or end the rules with '*'",
        "no rule matches parameter 'head.weight'",
        "rule 'layers.0.*' of the coefficients decides for no parameter: earlier rules match all of its parameters, "
        "put it before them",
        "rule 'haed.*' of the coefficients decides for no parameter: it matches no parameter",
    ):
        merge.coefs_of(iter(PATHS), {"layers.*": float("nan"), "layers.0.*": 0.1, "haed.*": 1.0})
    with raises("no rule matches parameter 'x', rules are ['y']"):
        merge.coef_of("x", {"y": 1.0})


class Layer(NamedTuple):
    weight: torch.Tensor
    bias: torch.Tensor


def test_apply_rules_by_hand():
    base = {"layers": [Layer(torch.ones(2), torch.zeros(1).bfloat16())], "n": torch.tensor(3)}
    vector = {"layers.0.weight": torch.tensor([1.0, 2.0]), "layers.0.bias": torch.tensor([4.0])}
    merged = merge.apply_rules(base, vector, coef={"*.bias": 0.25, "*": -1.0})
    assert type(merged["layers"][0]) is Layer
    assert merged["layers"][0].weight.tolist() == [0.0, -1.0]
    assert (merged["layers"][0].bias.dtype, merged["layers"][0].bias.item()) == (torch.bfloat16, 1.0)
    assert merged["n"].item() == 3
    assert merged["n"] is not base["n"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_apply_rules_is_apply_vector_leaf_by_leaf(dtype, family):
    base, experts = family(dtype)
    vector = merge.task_arithmetic_vector(base, experts)
    for rules in (0.3, {"*": 0.3}):
        merged, expected = merge.apply_rules(base, vector, coef=rules), merge.apply_vector(base, vector, coef=0.3)
        assert list(merged) == list(expected)
        assert all(torch.equal(merged[path], leaf) for path, leaf in expected.items())
    mixed = merge.apply_rules(base, vector, coef={"ma*": 0.7, "*": 0.3})
    assert torch.equal(mixed["matrix"], merge.apply_vector(base, vector, coef=0.7)["matrix"])
    assert torch.equal(mixed["conv"], expected["conv"])


def test_apply_rules_lists_all_that_does_not_fit():
    base = {"a": torch.zeros(2), "n": torch.tensor(1)}
    with raises(
        "vector has parameter 'b' that base lacks",
        "no rule matches parameter 'a'",
        "rule 'n' of the coefficients decides for no",
    ):
        merge.apply_rules(base, {"a": torch.zeros(2), "b": torch.zeros(1)}, coef={"n": 1.0})
    with raises("coef of '*' is nan"):
        merge.apply_rules(base, {"a": torch.zeros(2)}, coef=float("nan"))
