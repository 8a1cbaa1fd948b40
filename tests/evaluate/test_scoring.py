"""Scores of models in memory: the right tasks, each score once, and nothing mixed."""

import io
import math
import sys

import pytest
import torch

from smat_fn import machine
from smat_fn.evaluate import Records, Result, Scorer, score_bar, score_model
from smat_fn.evaluate.records import Answer
from smat_fn.evaluate.scoring import shares_note
from smat_fn.suites.suite import BaseSuite

ONE = {"fingerprint": "1"}


@pytest.fixture
def suite():
    def score(params, task, split):
        return float(params["x"]) + {"a": 1, "b": 2}[task] + {"dev": 0, "test": 10}[split]

    return BaseSuite(name="toy", tasks=("a", "b"), base={}, recipe={}, seed=0, score=score)


@pytest.fixture
def counted(suite):
    """``counted(**fields)``: the suite with other fields, and the list of what it has scored."""
    calls = []

    def score(params, task, split):
        calls.append((float(params["x"]), task, split))
        return suite.score(params, task, split)

    return lambda **fields: (suite.replace(score=score, **fields), calls)


def at(x):
    return lambda: {"x": torch.tensor(float(x))}


def test_other_tasks_are_scored_after_the_models_own_and_named_apart(suite):
    scorer, found = Scorer(suite), []
    for model, x, coef in (("expert:a", 20.0, None), ("ta", 50.0, 0.3)):
        found += score_model(
            scorer, {"x": torch.tensor(x)}, "test", method="FT", model=model, seed=5, tasks=["a"], others=["b"],
            coef=coef,
        )  # fmt: skip
    assert found == [
        Result("FT", "expert:a", "a", "test", 31.0, 5),
        Result("FT", "other:expert:a", "b", "test", 32.0, 5),
        Result("FT", "ta", "a", "test", 61.0, 5, 0.3),
        Result("FT", "other:ta", "b", "test", 62.0, 5, 0.3),
    ]


def test_a_score_is_computed_once_and_its_parameters_only_then_built(counted, tmp_path):
    suite, calls = counted()
    for expected_calls in (1, 1):
        scorer = Scorer(suite, Records(tmp_path))
        assert scorer.once(at(5), "a", "dev", model=ONE, name="m") == 6.0
        refuse = lambda: pytest.fail("the score is known")  # noqa: E731
        assert scorer.once(refuse, "a", "dev", model=ONE, name="another name") == 6.0
        assert len(calls) == expected_calls
    assert (scorer.cost.scores, scorer.cost.kept, scorer.cost.seconds) == (2, 2, 0.0)
    facts = {"method": "FT", "model": "ta", "seed": 0, "tasks": ["a", "b"]}
    first, again = (
        score_model(Scorer(suite, Records(tmp_path)), {"x": torch.tensor(5.0)}, "dev", **facts) for _ in range(2)
    )
    assert first == again
    assert len(calls) == 3


def test_edited_code_scores_anew(counted, tmp_path, monkeypatch):
    suite, calls = counted()
    for code in ("one", "two", "one"):
        monkeypatch.setattr(machine, "code", lambda code=code: code)
        Scorer(suite, Records(tmp_path)).once(at(1), "a", "dev", model=ONE, name="m")
    assert len(calls) == 2


def test_a_suites_own_error_names_model_and_task(suite):
    def fail(params, task, split):
        raise ValueError("prompt 3 is too long")

    with pytest.raises(ValueError, match=r"^ta, coef 1 on a \(dev\): prompt 3 is too long$"):
        Scorer(suite.replace(score=fail)).once(at(1), "a", "dev", model=ONE, name="ta, coef 1")


def test_whatever_a_score_depends_on_is_in_its_key(counted, tmp_path):
    suite, calls = counted(recipe={"seed": 1}, content=lambda task, split: "rows")
    plain = {"suite": suite, "about": {"base": "b"}, "model": ONE, "task": "a", "split": "dev", "repeat": 0}
    changes = [
        {},
        {"suite": suite.replace(recipe={"seed": 2})},
        {"suite": suite.replace(content=lambda task, split: "other rows")},
        {"suite": suite.replace(content=None)},
        {"about": {"base": "c"}},
        {"model": {"fingerprint": "2"}},
        {"task": "b"},
        {"split": "test"},
        {"repeat": 1},
    ]
    for known in (False, True):
        for change in changes:
            case = plain | change
            scorer = Scorer(case["suite"], Records(tmp_path), about=case["about"])
            scorer.once(at(1), case["task"], case["split"], case["repeat"], model=case["model"], name="m")
            assert scorer.cost.kept == known
    assert len(calls) == len(changes)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -0.5, 100.5])
def test_a_score_that_is_no_number_from_0_to_100_is_refused_at_once_and_not_kept(suite, tmp_path, bad):
    scorer = Scorer(suite.replace(score=lambda params, task, split: bad), Records(tmp_path))
    message = rf"the score of ties, coef 0.3 on a \(dev\) is {bad}, no number from 0 to 100: look at the metric of"
    with pytest.raises(ValueError, match=message):
        scorer.once(at(1), "a", "dev", model=ONE, name="ties, coef 0.3")
    assert not list(tmp_path.iterdir())


def test_a_score_of_several_decodes_is_their_mean_and_a_suite_gets_its_known_rows(suite, tmp_path):
    seen = []

    def once(params, task, split, repeat, journal=None):
        seen.append(dict(journal.known))
        journal.add([Answer(0, "yes", "no")], 1, 2)
        if len(seen) == 2:
            raise KeyboardInterrupt
        journal.add([Answer(1, "no", "no")], 2, 2)
        return 10.0 * (repeat + 1)

    sampled = suite.replace(repeats={"a": 3}, score_once=once)
    with pytest.raises(KeyboardInterrupt):
        Scorer(sampled, Records(tmp_path), answers=True).score(at(0), "a", "dev", model=ONE, name="m")
    scorer = Scorer(sampled, Records(tmp_path), answers=True)
    assert scorer.score(at(0), "a", "dev", model=ONE, name="m") == 20.0
    # repeat 0 was finished, repeat 1 had one row, repeat 2 none
    assert seen == [{}, {}, {0: "yes"}, {}]
    assert (scorer.cost.scores, scorer.cost.kept) == (3, 1)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_the_bar_counts_scores_where_stderr_is_a_terminal(suite, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    shown = []

    def once(params, task, split, repeat, journal=None):
        journal.add([Answer(0, "", "")], 1, 4)
        bar.refresh()
        shown.append(bar.n)
        return 1.0

    with score_bar() as bar:
        scorer = Scorer(suite.replace(score_once=once), bar=bar, answers=True)
        scorer.expect(4)
        for task in ("a", "b", "a"):  # the third is known
            scorer.once(at(0), task, "dev", model=ONE, name="m")
        bar.refresh()
        text = sys.stderr.getvalue()
        if stream is Terminal:
            assert shown == [0.25, 1.25]
            assert bar.total == 3
            assert "2.0 of 3 [" in text
        else:
            assert text == ""


def test_scores_below_1_have_a_note_that_holds_for_any_metric():
    assert shares_note([]) == shares_note([0.0]) == shares_note([0.2, 1.5]) == ""
    assert shares_note([0.0, 0.7]) == (
        "no score is above 1 of 100: the models solve next to nothing, or a metric of your own returns shares"
    )
