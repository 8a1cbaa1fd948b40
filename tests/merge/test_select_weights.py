"""Weights of experts by CMA-ES: scores in closed form, and nothing but their order decides."""

import math
import sys

import numpy
import pytest

from smat_fn import merge
from smat_fn.config import MultiSlerp, TaskArithmetic, Ties, WeightedAverage

ONES = {"a": 1.0, "b": 1.0, "c": 1.0}
BEST = {"a": 0.4, "b": 1.7, "c": 1.1}


def nearness(weights, best=BEST):
    """Largest at ``best``: a quadratic form of log factors with a ridge."""
    logs = [math.log(weights[name] / best[name]) for name in best]
    return -sum(w * x * x for w, x in zip((1, 4, 9), logs, strict=True)) - logs[0] * logs[1]


def test_the_optimum_of_a_quadratic_score_is_found():
    found = merge.select_weights(ONES, nearness, trials=300)
    assert found.best == pytest.approx(BEST, rel=0.01)
    assert found.score == nearness(found.best) > -1e-3
    assert nearness(ONES) < -1
    assert found.curve[0] == (ONES, nearness(ONES))
    assert len(found.curve) == 301
    assert all(list(weights) == list(ONES) for weights, _ in found.curve)
    assert all(weight == float(f"{weight:.4g}") for weights, _ in found.curve for weight in weights.values())
    few = merge.select_weights(ONES, nearness, trials=40)
    assert nearness(ONES) < few.score < found.score


@pytest.mark.parametrize("trials", [7, 8, 13, 14, 60])
def test_trials_are_counted_the_first_weights_apart_and_more_trials_begin_with_the_same(trials):
    calls = []
    found = merge.select_weights(ONES, lambda own: calls.append(own) or nearness(own), trials=trials)
    assert calls == [weights for weights, _ in found.curve]
    assert len(calls) == 1 + trials
    assert merge.select_weights(ONES, nearness, trials=61).curve[: 1 + trials] == found.curve
    other = merge.select_weights(ONES, nearness, trials=trials, seed=1)
    assert other.curve[0] == found.curve[0]
    assert other.curve[1] != found.curve[1]
    assert merge.select_weights(ONES, nearness, trials=trials, seed=2**64).curve == found.curve


def test_numpys_random_numbers_neither_change_nor_matter():
    numpy.random.seed(5)
    before = merge.select_weights(ONES, nearness, trials=20)
    drawn = numpy.random.rand()
    numpy.random.seed(5)
    assert numpy.random.rand() == drawn
    assert merge.select_weights(ONES, nearness, trials=20) == before


def test_the_score_is_never_below_that_of_the_first_weights_and_ties_go_to_the_earlier():
    assert merge.select_weights(BEST, nearness, trials=30).best == BEST
    found = merge.select_weights(ONES, lambda own: float(own["a"] > 1.2), trials=30)
    earlier = [weights for weights, _ in found.curve if weights["a"] > 1.2]
    assert len(earlier) > 1
    assert (found.best, found.score) == (earlier[0], 1)


def test_a_generation_of_equal_scores_is_the_last():
    found = merge.select_weights(ONES, lambda own: 3.0, trials=60)
    assert (found.best, found.score, len(found.curve)) == (ONES, 3.0, 1 + 7)
    two = {"a": 1.0, "b": 1.0}
    assert len(merge.select_weights(two, lambda own: 3.0, trials=60).curve) == 1 + 6


def test_scores_count_by_their_order_alone_and_may_be_infinite():
    found = merge.select_weights(ONES, nearness, trials=40)
    same = merge.select_weights(ONES, lambda own: math.expm1(nearness(own) / 9) + 7, trials=40)
    assert [weights for weights, _ in same.curve] == [weights for weights, _ in found.curve]
    wall = merge.select_weights(ONES, lambda own: nearness(own) if own["a"] < 1.2 else -math.inf, trials=100)
    assert sum(score == -math.inf for _, score in wall.curve) > 1
    assert wall.best == pytest.approx(BEST, rel=0.2)


def test_weights_keep_their_sign_zeros_stay_and_factors_are_within_a_hundred():
    start, seen = {"a": 0.5, "none": 0.0, "b": -2.0}, []
    found = merge.select_weights(start, lambda own: seen.append(own) or own["a"] + own["b"], trials=400)
    assert all(own["a"] > 0 and own["none"] == 0 and own["b"] < 0 for own in seen)
    assert max(own["a"] for own in seen) <= 50
    assert min(own["b"] for own in seen) >= -200
    assert found.best["a"] > 25
    assert found.best["b"] > -0.05
    assert sum(own["a"] != 0.5 for own in seen[1:7]) == 6, "six candidates of two weights are a generation"


@pytest.mark.parametrize(
    ("start", "trials", "text"),
    [
        (ONES, 0, "trials is 0, must be an integer of at least 7: a generation of 3 weights"),
        (ONES, 6, "trials is 6, must be an integer of at least 7"),
        (ONES, 8.0, "trials is 8.0, must be an integer of at least 7"),
        ({"a": 1.0}, 60, r"needs two experts at least with a weight other than 0, of \['a'\] there is 1: search one"),
        ({"a": 1.0, "b": 0.0}, 60, r"of \['a', 'b'\] there is 1"),
        ({}, 60, r"of \[\] there are none"),
        ({"a": 1.0, "b": math.inf}, 60, "the weight of 'b' is inf, must be finite"),
        ({"a": 1.0, "b": "x"}, 60, "the weight of 'b' is 'x', must be a number"),
        (["a", "b"], 60, r"start is \['a', 'b'\], must be a mapping"),
    ],
)
def test_what_cannot_be_searched_is_an_error_before_a_score(start, trials, text):
    with pytest.raises(ValueError, match=text):
        merge.select_weights(start, pytest.fail, trials=trials)


def test_a_score_that_is_not_a_number_names_the_weights():
    with pytest.raises(ValueError, match=r"the score of candidate \{'a': 1.0, .*\} is NaN"):
        merge.select_weights(ONES, lambda own: math.nan, trials=10)


def test_a_missing_package_is_named_before_a_score(monkeypatch):
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(ModuleNotFoundError, match="CMA-ES needs the package cma: pip install cma") as error:
        merge.select_weights(ONES, pytest.fail, trials=10)
    assert error.value.name == "cma"


def test_weights_of_mergers_are_by_name_or_in_the_experts_order():
    names = ["b", "a"]
    assert merge.weights_of(TaskArithmetic(), names) == {"b": 1.0, "a": 1.0}
    assert merge.weights_of(Ties(weights={"a": -0.5}), names) == {"b": 1.0, "a": -0.5}
    assert merge.weights_of(WeightedAverage(weights=(2.0, 3.0)), names) == {"b": 2.0, "a": 3.0}
    assert merge.weights_of(MultiSlerp(), names) == {"b": 1.0, "a": 1.0}
    new = {"b": 0.5, "a": 4.0}
    assert merge.with_weights(Ties(keep=0.3, weights={"a": 1.5}), new) == Ties(keep=0.3, weights=new)
    assert merge.with_weights(MultiSlerp(coef=2.0), new) == MultiSlerp(coef=2.0, weights=(0.5, 4.0))
    plain = TaskArithmetic()
    assert merge.with_weights(plain, {"b": 1.0, "a": 1.0}) is plain
