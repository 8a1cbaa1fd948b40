"""Weights of experts by CMA-ES: scores in closed form, and nothing but their order decides."""

import math
import sys

import numpy
import pytest
import torch

from smat_fn import merge, random
from smat_fn.config import Breadcrumbs, Dare, Della, MultiSlerp, TaskArithmetic, Ties, WeightedAverage

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
        ({"a": 1.0}, 60, r"needs at least two weights other than 0, of \['a'\] there is 1: search one"),
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
    for config, wanted in (
        (TaskArithmetic(), {"b": 1.0, "a": 1.0}),
        (Ties(weights={"a": -0.5}), {"b": 1.0, "a": -0.5}),
        (WeightedAverage(weights=(2.0, 3.0)), {"b": 2.0, "a": 3.0}),
        (MultiSlerp(), {"b": 1.0, "a": 1.0}),
    ):
        assert merge.numbers_of(config, names) == {"weights": wanted}
        assert list(merge.numbers_of(config, names)["weights"]) == names
        assert merge.with_numbers(config, {"weights": wanted}) is config
    new = {"weights": {"b": 0.5, "a": 4.0}}
    assert merge.with_numbers(Ties(keep=0.3, weights={"a": 1.5}), new) == Ties(keep=0.3, **new)
    assert merge.with_numbers(MultiSlerp(coef=2.0), new) == MultiSlerp(coef=2.0, weights=(0.5, 4.0))


def test_densities_of_mergers_are_those_of_experts_or_the_one_of_all():
    names = ["b", "a"]
    for config, own in (
        (Ties(keep=0.2, densities={"a": 0.9}), 0.2),
        (Dare(drop_prob=0.9, densities={"a": 0.9}), 0.1),
        (Della(drop_prob=0.4, window=0.1, densities={"a": 0.9}), 0.6),
        (Breadcrumbs(drop_smallest=0.3, drop_largest=0.1, densities={"a": 0.9}), 0.6),
    ):
        assert merge.numbers_of(config, names, ["densities"]) == {"densities": {"b": own, "a": 0.9}}
        assert merge.with_numbers(config, {"densities": {"b": own, "a": 0.9}}) is config
        new = {"densities": {"b": 0.5, "a": 0.25}, "weights": {"b": 2.0, "a": 1.0}}
        assert merge.numbers_of(merge.with_numbers(config, new), names, list(new)) == new
    crumbs = Breadcrumbs(drop_smallest=0.3, drop_largest=0.1, largest={"a": 0.4})
    assert merge.numbers_of(crumbs, names, ["densities"]) == {"densities": {"b": 0.6, "a": 0.3}}


BOTH = {"weights": {"a": 0.4, "b": 1.7}, "densities": {"a": 0.1, "b": 0.5}}


def test_weights_and_densities_are_searched_together_and_one_of_them_alone():
    config, names = Ties(keep=0.2), ["a", "b"]

    def distance(numbers):
        logs = [math.log(x / BOTH[option][name]) for option, own in numbers.items() for name, x in own.items()]
        return -math.fsum(x * x for x in logs)

    found = merge.select_numbers(config, names, distance, over=("weights", "densities"), trials=400)
    assert {option: pytest.approx(own, rel=0.02) for option, own in BOTH.items()} == found.best
    assert found.curve[0][0] == {"weights": {"a": 1.0, "b": 1.0}, "densities": {"a": 0.2, "b": 0.2}}
    assert len(found.curve) == 401
    alone = merge.select_numbers(config, names, distance, over=["densities"], trials=200)
    assert alone.best == {"densities": pytest.approx(BOTH["densities"], rel=0.02)}
    score = lambda own: distance({"weights": own["weights"]})  # noqa: E731
    weights = merge.select_numbers(config, names, score, trials=20, seed=3)
    same = merge.select_weights({"a": 1.0, "b": 1.0}, lambda own: score({"weights": own}), trials=20, seed=3)
    assert [(own["weights"], value) for own, value in weights.curve] == list(same.curve)


@pytest.mark.parametrize(
    ("config", "low", "high"),
    [
        (Ties(keep=0.5, aggregate="sum", scope="tensor"), 0.005, 1.0),
        (Dare(drop_prob=0.5), 0.005, 1.0),
        (Della(drop_prob=0.5, window=0.14), 0.07 + 2**-16, 0.93),
        (Della(drop_prob=0.5, window=0.14, windows={"a": 0.4, "b": {"x": 0.2, "*": 0.4}}), 0.2 + 2**-16, 0.8),
        (Breadcrumbs(drop_smallest=0.4, drop_largest=0.1), 0.005, 1.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("up", [True, False])
def test_densities_stay_where_the_merger_takes_them(config, low, high, up):
    base, seen = {"x": torch.zeros(4, 8), "y": torch.zeros(6)}, []
    experts = {name: {path: torch.randn_like(leaf) for path, leaf in base.items()} for name in ("a", "b")}

    def score(numbers):
        seen.append(numbers["densities"])
        merge.merge_by(merge.with_numbers(config, numbers), base, experts, key=random.key(0), coef=0.5)
        return sum(numbers["densities"].values()) * (1 if up else -1)

    found = merge.select_numbers(config, list(experts), score, over=["densities"], trials=150)
    assert all(low <= density <= high for own in seen for density in own.values())
    end = high if up else low
    assert found.best["densities"] == pytest.approx(dict.fromkeys(experts, end), abs=0.02)
    zero = merge.with_numbers(config, {"densities": {"a": 0.0, "b": 0.5}})
    found = merge.select_numbers(zero, list(experts), score, over=["weights", "densities"], trials=7)
    assert all(own["densities"]["a"] == 0 for own, _ in found.curve), "0 stays"


@pytest.mark.parametrize(
    ("config", "over", "text"),
    [
        (TaskArithmetic(), ["densities"], "trials: ta takes no densities by expert, leave over out"),
        (TaskArithmetic(), "weights", "over is 'weights', must be weights or densities, or both"),
        (Ties(keep=0.5), None, "over is None, must be weights or densities, or both"),
        (Ties(keep=0.5), [["weights"]], r"over is \[\['weights'\]\], must be weights or densities, or both"),
        (Ties(keep=0.5), [], r"over is \[\], must be weights or densities, or both"),
        (Ties(keep=0.5), ["weights", "weights"], r"over is \['weights', 'weights'\], must be weights or"),
        (Ties(keep=0.5), ["windows"], r"over is \['windows'\], must be weights or densities, or both"),
        (Ties(), ["densities"], "the density of 'a' is None, must be a number"),
        (
            Breadcrumbs(drop_smallest=0.3, drop_largest=0.1, largest={"a": {"x": 0.4}}),
            ["densities"],
            "the density of 'a' is None, must be a number",
        ),
        (Ties(keep=0.5, densities={"a": 0.0}), ["densities"], "needs at least two densities other than 0, of"),
        (Ties(keep=0.5), ["weights", "densities"], "at least 8: a generation of 2 weights and 2 densities"),
    ],
)
def test_options_that_cannot_be_searched_are_an_error_before_a_score(config, over, text):
    with pytest.raises(ValueError, match=text):
        merge.select_numbers(config, ["a", "b"], pytest.fail, over=over, trials=7)
