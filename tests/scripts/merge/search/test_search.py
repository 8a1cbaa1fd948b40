"""The two stages of a search over sampled scores: who is decoded again, and who wins."""

import math

import pytest
import torch

from smat_fn.config import Dare, TaskArithmetic
from smat_fn.evaluate import Scorer
from smat_fn.scripts.merge import in_memory
from smat_fn.scripts.merge.experts import suite as scoring
from smat_fn.scripts.merge.experts.inputs import Inputs
from smat_fn.scripts.merge.search.choosing import calibrate, merge_one, rerank
from smat_fn.scripts.run_folder import find_inputs


def toy(sampled, greedy):
    """``score`` of a table {candidate: decodes of task "sampled"} and {candidate: score of task "greedy"}."""
    calls = []

    def score(candidate, decodes):
        calls.append((candidate, tuple(decodes)))
        return [sampled[candidate][repeat] if task == "sampled" else greedy[candidate] for task, repeat in decodes]

    return score, calls


def search(sampled, greedy, **options):
    score, calls = toy(sampled, greedy)
    found = rerank(list(sampled), score, tasks=["sampled", "greedy"], repeats={"sampled": 3}, **options)
    return found, calls


def test_every_candidate_once_the_two_best_again_and_the_best_mean_wins():
    sampled = {"a": (10, 99, 99), "b": (40, 10, 10), "c": (30, 42, 45)}
    found, calls = search(sampled, {"a": 20, "b": 40, "c": 44})
    first, more = (("sampled", 0), ("greedy", 0)), (("sampled", 1), ("sampled", 2))
    assert calls == [("a", first), ("b", first), ("c", first), ("b", more), ("c", more)]
    assert found.curve == (("a", 15), ("b", 40), ("c", 37))
    # b: ((40 + 10 + 10) / 3 + 40) / 2; c: ((30 + 42 + 45) / 3 + 44) / 2; the repeats of a would have won
    assert found.finals == (("b", 30), ("c", 41.5))
    assert found.best == "c"
    assert found.scores == {"sampled": 39, "greedy": 44}


def test_ties_go_to_the_earlier_candidate_in_both_stages():
    even = dict.fromkeys("abcd", (20, 20, 20))
    found, calls = search(even, dict.fromkeys("abcd", 7))
    assert found.best == "a"
    assert [candidate for candidate, _ in calls[4:]] == ["a", "b"]
    # d is best once, b and c tie for the second place: b stays, and equals d in the end
    found, calls = search({"a": (0, 0, 0), "b": (8, 9, 4), "c": (8, 9, 9), "d": (9, 8, 4)}, dict.fromkeys("abcd", 1))
    assert [candidate for candidate, _ in calls[4:]] == ["b", "d"]
    assert found.best == "b"
    assert found.finals == (("b", 4), ("d", 4))


def test_one_candidate_and_tasks_without_repeats():
    found, calls = search({"a": (1, 2, 6)}, {"a": 5})
    assert (found.best, found.finals, len(calls)) == ("a", (("a", 4),), 2)
    score, calls = toy({}, {"a": 3, "b": 4})
    found = rerank(["a", "b"], score, tasks=["greedy"], repeats={})
    assert (found.best, found.finals) == ("b", (("a", 3), ("b", 4)))
    assert len(calls) == 2


def test_no_candidates_and_nan_are_refused():
    with pytest.raises(ValueError, match="candidates is empty"):
        search({}, {})
    with pytest.raises(ValueError, match="is NaN"):
        search({"a": (1, 1, 1), "b": (math.nan, 1, 1)}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="is NaN"):
        search({"a": (1, 1, 1), "b": (2, 1, math.nan)}, {"a": 1, "b": 1})


def sampling(suite, once):
    """The suite with a second task that is decoded three times: ``once(weight, task, repeat)``."""
    return suite.replace(
        repeats={"mirror": 3},
        score_once=lambda params, task, split, repeat: once(float(params["w"][1]), task, repeat),
        score=lambda params, task, split: pytest.fail("one decode at a time"),
    )


@pytest.fixture
def inputs():
    return Inputs(
        {"w": torch.zeros(4)}, {task: {"w": torch.tensor([0.0, 1.0, 2.0, 3.0])} for task in ("rot90", "mirror")}, {}
    )


def test_a_sampling_suite_is_searched_in_two_stages(suite, inputs):
    seen = []

    def once(weight, task, repeat):
        coef = round(weight / 2, 1)
        seen.append((coef, task, repeat))
        # best once at 0.5, then 0.4; the repeats turn it round
        return 50 - 100 * abs(coef - 0.5) + (0 if repeat == 0 else 90 * (0.5 - coef))

    model = merge_one(TaskArithmetic(), inputs, seed=0, scorer=Scorer(sampling(suite, once)))
    tens = [i / 10 for i in range(1, 11)]
    assert seen[:20] == [(c, task, 0) for c in tens for task in ("rot90", "mirror")]
    assert seen[20:] == [(c, "mirror", r) for c in (0.4, 0.5) for r in (1, 2)]
    # mean over tasks: 0.5 has 50; 0.4 has 40 and (40 + 49 + 49) / 3 = 46: 43
    assert model.coef == 0.5
    assert [c for c, _ in model.curve] == tens
    assert model.finals == ((0.4, pytest.approx(43)), (0.5, 50))
    assert model.dev == {"rot90": 50, "mirror": 50}
    assert torch.equal(model.params["w"], torch.tensor([0.0, 1.0, 2.0, 3.0]))


def test_calibration_on_a_sampling_suite_is_in_two_stages(suite, inputs):
    seen = []

    def once(weight, task, repeat):
        seen.append((task, repeat))
        return 10.0

    chosen = calibrate(Dare(drop_prob=0.3), inputs, Scorer(sampling(suite, once)), coef=0.3, seed=0).config
    assert chosen == Dare(drop_prob=0.1)
    assert seen == [("rot90", 0), ("mirror", 0)] * 5 + [("mirror", 1), ("mirror", 2)] * 2


def test_the_card_and_manifest_tell_both_stages(runs, suite, tmp_path, monkeypatch):
    sampled = suite.replace(repeats={"mirror": 2}, score_once=lambda params, task, split, repeat: 10.0 + repeat)
    monkeypatch.setattr(scoring, "load_suite", lambda **recipe: sampled)
    inputs = find_inputs(runs["ft"])
    (model,) = in_memory.merge_run(
        in_memory.Request([TaskArithmetic()], *inputs, out=tmp_path, search=True, seed=0)
    ).values()
    assert model.finals == ((0.1, 10.125), (0.2, 10.125))
    assert in_memory.checkpoint.load_manifest(tmp_path / "ta")["dev_finals"] == [[0.1, 10.125], [0.2, 10.125]]
    assert (
        "the best were decoded again, means over decodes: 0.1: 10.12, 0.2: 10.12"
        in (tmp_path / "ta" / "README.md").read_text()
    )
