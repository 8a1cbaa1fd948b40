"""Sweeps over sets of experts, with a score whose value after any merge is known in closed form."""

from collections import Counter
from functools import partial
from statistics import fmean

import pytest
import torch

from smat_fn import merge
from smat_fn.analyses import (
    Job,
    Scored,
    cyclic_subsets,
    experts_curve,
    gains,
    replacement_curve,
    replacement_sets,
    score_jobs,
)
from smat_fn.report.tables import MERGERS, MainTable, cell_of

TASKS = ("a", "b", "c", "d", "e")
COEF, HARM = 0.3, 0.1
BASE = {"w": torch.zeros(5, dtype=torch.float64)}
REFERENCE = {task: 50.0 + 10 * place for place, task in enumerate(TASKS)}


def expert(task, size=1.0):
    """The unit vector of a task, times its size."""
    return {"w": size * torch.eye(5, dtype=torch.float64)[TASKS.index(task)]}


def score(params, task):
    """100 w_i - 10 * sum of the others: each partner takes 10 γ from what the own update gives."""
    w = params["w"]
    own = float(w[TASKS.index(task)])
    return 100 * (own - HARM * (float(w.sum()) - own))


SCORES = partial(score_jobs, score=score)
EXPERTS = {task: expert(task) for task in TASKS}


def merged(subset):
    return merge.task_arithmetic(BASE, {task: EXPERTS[task] for task in subset}, coef=COEF)


def test_cyclic_subsets_are_windows_in_the_given_order():
    assert cyclic_subsets("abcd", 2) == [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]
    assert cyclic_subsets("abcd", 3) == [("a", "b", "c"), ("b", "c", "d"), ("a", "c", "d"), ("a", "b", "d")]
    assert cyclic_subsets("abcd", 4) == [("a", "b", "c", "d")]
    assert cyclic_subsets("abcd", 0) == [()]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_task_is_in_as_many_subsets_as_there_are_places(count):
    subsets = cyclic_subsets("abcdefg", count)
    assert len(set(subsets)) == 7
    assert Counter(task for subset in subsets for task in subset) == dict.fromkeys("abcdefg", count)


def test_counts_and_tasks_that_make_no_subsets_are_told_together():
    with pytest.raises(ValueError, match=r"count is 4, must be from 0 to 3.*name each once"):
        cyclic_subsets("aba", 4)


def test_experts_curve_is_its_closed_form():
    rows = experts_curve(TASKS, merged, SCORES, reference=REFERENCE)
    assert Counter(row.experts for row in rows) == {2: 10, 3: 15, 4: 20, 5: 5}
    for row in rows:
        assert row.task in row.subset
        assert len(row.subset) == row.experts
        expected = 100 * COEF * (1 - HARM * (row.experts - 1))
        assert row.score == pytest.approx(expected, rel=1e-12)
        assert row.relative == pytest.approx(100 * expected / REFERENCE[row.task], rel=1e-12)
    inverse = sum(100 / value for value in REFERENCE.values()) / 5
    for count in (2, 3, 4, 5):
        mean = fmean(row.relative for row in rows if row.experts == count)
        assert mean == pytest.approx(100 * COEF * (1 - HARM * (count - 1)) * inverse)


def test_the_last_point_is_the_merge_of_all():
    rows = [row for row in experts_curve(TASKS, merged, SCORES, reference=REFERENCE) if row.experts == 5]
    whole = merge.task_arithmetic(BASE, EXPERTS, coef=COEF)
    assert [(row.subset, row.task, row.score) for row in rows] == [(TASKS, t, score(whole, t)) for t in TASKS]


def test_references_that_cannot_be_divided_by_are_all_told_before_any_merge():
    with pytest.raises(ValueError, match=r"'b' is 0\.0: .*'c' is None"):
        experts_curve("abc", pytest.fail, SCORES, reference={"a": 1.0, "b": 0.0})
    with pytest.raises(ValueError, match="at least two"):
        experts_curve("a", pytest.fail, SCORES, reference={"a": 1.0})


def test_replacement_is_its_closed_form():
    other = {task: expert(task, 3.0) for task in TASKS}
    rows = replacement_curve(BASE, EXPERTS, other, SCORES, reference=REFERENCE, coef=COEF)
    assert Counter(row.experts for row in rows) == {0: 5, 1: 25, 2: 25, 3: 25, 4: 25, 5: 5}
    for row in rows:
        own = 3.0 if row.task in row.subset else 1.0
        total = 5 + 2 * len(row.subset)
        expected = 100 * COEF * (own - HARM * (total - own))
        assert row.score == pytest.approx(expected, rel=1e-12)
        assert row.relative == pytest.approx(100 * expected / REFERENCE[row.task], rel=1e-12)


def test_no_replacement_is_the_merge_of_ft_and_full_replacement_that_of_the_other():
    other = {task: expert(task, 3.0) for task in reversed(TASKS)}
    rows = replacement_curve(BASE, EXPERTS, other, SCORES, reference=REFERENCE)
    for count, experts in ((0, EXPERTS), (5, other)):
        whole = merge.task_arithmetic(BASE, experts, coef=0.3)
        assert {row.task: row.score for row in rows if row.experts == count} == {t: score(whole, t) for t in TASKS}


def test_replacement_sets_are_balanced_and_depend_on_tasks_alone():
    sets = replacement_sets("abcd")
    assert Counter(map(len, sets)) == {0: 1, 1: 4, 2: 4, 3: 4, 4: 1}
    assert Counter(task for chosen in sets if len(chosen) == 3 for task in chosen) == dict.fromkeys("abcd", 3)


def test_replacement_wants_both_experts_of_every_task():
    with pytest.raises(ValueError, match="'b' has only one of the two experts"):
        replacement_curve(
            BASE, EXPERTS, {"a": expert("a")} | {t: expert(t) for t in "cde"}, SCORES, reference=REFERENCE
        )


def test_curves_score_the_jobs_they_are_given_a_function_for():
    seen = []

    def scores(jobs):
        seen.extend(jobs)
        return [dict.fromkeys(job.tasks, 1.0) for job in jobs]

    rows = experts_curve("abc", lambda subset: subset, scores, reference=dict.fromkeys("abc", 2.0))
    assert all(isinstance(job, Job) for job in seen)
    assert [job.build() for job in seen] == [job.tasks for job in seen]
    assert rows[0] == Scored(2, ("a", "b"), "a", 1.0, 50.0)


def table(*columns):
    """FT and SMAT of seeds 3 and 1; a column's score is its place times ten, plus the seed."""
    line = {name: cell_of({seed: 10.0 * place + seed for seed in (3, 1)}) for place, name in enumerate(columns)}
    return MainTable("test", {"FT": line, "SMAT": line | {"Avg": cell_of({1: 5.0, 3: 20.0})}})


def test_gains_are_differences_seed_by_seed():
    found = gains(table("Avg", *MERGERS, "Expert"))
    assert list(found) == ["FT", "SMAT"]
    assert found["FT"].drop.by_seed == {1: 60.0, 3: 60.0}
    assert found["SMAT"].drop.by_seed == {1: 56.0, 3: 43.0}
    assert found["SMAT"].drop.mean == 49.5


def test_gains_want_experts_and_all_five_mergers_of_every_method():
    with pytest.raises(ValueError, match=r"FT has no Expert and no Avg: .*SMAT has no Expert"):
        gains(table("WA", "TA"))
