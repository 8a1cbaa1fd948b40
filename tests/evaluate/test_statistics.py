"""Intervals against scipy and closed forms, pairs against hand-made differences."""

import math
import sys

import pytest
from scipy import stats

from smat_fn.evaluate.statistics import differences, estimate, paired, settled_together


def test_the_interval_is_that_of_a_paired_t_test():
    first, second = [81.2, 79.9, 82.4, 80.0], [82.0, 80.1, 83.9, 79.7]
    got = estimate(b - a for a, b in zip(first, second, strict=True))
    for level in (0.8, 0.95):
        wanted = stats.ttest_rel(second, first).confidence_interval(level)
        interval = estimate(got.values, level=level).interval
        assert interval == pytest.approx((wanted.low, wanted.high), rel=1e-12)
    assert got.sd == pytest.approx(stats.tstd(got.values), rel=1e-12)
    assert got.signs == (3, 0, 1)
    assert not got.settled


def test_quantiles_are_those_of_scipy_stats_which_is_not_imported(monkeypatch):
    quantiles = {(n, level): stats.t.ppf((1 + level) / 2, n - 1) for n in range(2, 40) for level in (0.5, 0.9, 0.95)}
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    for (n, level), quantile in quantiles.items():
        got = estimate(range(n), level=level)
        half = quantile * got.sd / math.sqrt(n)
        assert got.interval == (got.mean - half, got.mean + half)


def test_two_values_have_the_interval_of_cauchy():
    got = estimate([1.0, 4.0])
    half = 1.5 * math.tan(0.475 * math.pi)
    assert (got.mean, got.sd) == (2.5, math.sqrt(4.5))
    assert got.interval == pytest.approx((2.5 - half, 2.5 + half))


def test_zero_in_the_interval_settles_nothing_and_one_value_has_none():
    assert estimate([1.0, 1.1, 0.9]).settled
    assert estimate([-1.0, -1.1, -0.9]).settled
    assert not estimate([0.0, 0.0]).settled  # the interval is the point 0
    assert estimate([0.5, 0.5]).settled
    alone = estimate([3.0])
    assert (alone.mean, alone.sd, alone.interval, alone.settled) == (3.0, None, None, False)


def of_p(p, n=5):
    """Values whose t test against 0 has a p-value."""
    values = [0.0, 1.0, 2.0, 3.0, 4.0][:n]
    apart = stats.t.isf(p / 2, n - 1) * stats.tstd(values) / math.sqrt(n)
    got = estimate(v - 2.0 + apart for v in values)
    assert stats.ttest_1samp(got.values, 0).pvalue == pytest.approx(p)
    return got


def test_holms_correction_compares_with_the_level_over_what_is_left():
    # 0.012 < 0.05 / 4 and 0.016 < 0.05 / 3, but 0.026 > 0.05 / 2: it and the last one, below 0.05 alone, are out
    found = {"c": of_p(0.026), "a": of_p(0.012), "d": of_p(0.04), "b": of_p(0.016)}
    assert all(own.settled for own in found.values())
    assert settled_together(found) == ["a", "b"]
    assert settled_together({"c": found["c"], "d": found["d"]}) == []
    assert settled_together({"c": of_p(0.024), "d": found["d"]}) == ["c", "d"]
    assert settled_together(found, level=0.2) == ["c", "a", "d", "b"]
    assert settled_together({"one": estimate([3.0]), "none": estimate([0.0, 0.0]), "equal": estimate([1.0, 1.0])}) == [
        "equal"
    ]
    assert settled_together({}) == []


def test_rounding_is_no_difference():
    # a mean of the same scores in another order
    one, other = (fsum / 3 for fsum in (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1))
    assert one != other
    got = estimate([one - other, 0.5, -0.5])
    assert got.signs == (1, 1, 1)
    assert (estimate([0.5 + one - other, 0.5]).alike, got.alike) == (True, False)


def test_differences_are_of_the_seeds_that_both_have():
    got = differences({1: 10.0, 2: 20.0, 3: 30.0}, {3: 33.0, 2: 20.0, 4: 0.0})
    assert got is not None
    assert got.values == (0.0, 3.0)
    assert got.signs == (1, 1, 0)
    assert differences({1: 10.0}, {2: 10.0}) is None


def test_paired_is_the_estimate_as_json_values():
    got = paired([0.0, 1.0], [1.0, 5.0])
    assert got["differences"] == [1.0, 4.0]
    assert (got["mean"], got["sd"]) == (2.5, math.sqrt(4.5))
    assert got["interval"] == list(estimate([1.0, 4.0]).interval)
    assert paired([3.0], [5.0]) == {"differences": [2.0], "mean": 2.0}


@pytest.mark.parametrize(("values", "level"), [([], 0.95), ([1.0], 0.0), ([1.0], 1.0), ([1.0], math.nan)])
def test_no_values_and_levels_that_are_none_are_refused(values, level):
    with pytest.raises(ValueError, match=rf"level {level} of {len(values)} values"):
        estimate(values, level=level)
