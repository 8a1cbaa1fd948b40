"""Scores on tasks that no expert was trained on: the suite's own numbers, apart from the others' means."""

import json

import pytest

from smat_fn import checkpoint
from smat_fn.config import Emr, TaskArithmetic, WeightAverage
from smat_fn.evaluate import Result
from smat_fn.report.tables import main_table, other_table
from smat_fn.scripts.evaluate import evaluation, models
from smat_fn.scripts.evaluate.evaluation import evaluate
from smat_fn.scripts.evaluate.models import find_checkpoints
from smat_fn.scripts.evaluate.outputs import write_report
from smat_fn.scripts.evaluate.sources import read_sources
from smat_fn.scripts.merge import on_disk
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs

OWN, OTHERS = ("rot90", "mirror"), ("negative", "stripes")


@pytest.fixture(scope="module")
def folders(train, tmp_path_factory):
    """Experts of two of the four tasks, and two merges of them."""
    run = tmp_path_factory.mktemp("two") / "ft"
    train(run, "ft", tasks=OWN)
    configs = [TaskArithmetic(coef=0.4), WeightAverage()]
    merge_run(Request(configs, *find_inputs(run), out=run / "merged", search=False, seed=0))
    return find_checkpoints([run])


@pytest.fixture(scope="module")
def rows(folders):
    return evaluate(folders, base=True, other_tasks=())


def test_every_model_and_the_base_is_scored_under_the_suites_heads_of_other_tasks(folders, rows, suite):
    others = [row for row in rows if row.model.startswith("other:")]
    assert [row for row in rows if row not in others] == evaluate(folders, base=True)
    expected = []
    for folder in folders:
        params, manifest = checkpoint.load_expert(folder, suite.base)
        model = f"other:expert:{manifest['task']}" if manifest["kind"] == "expert" else f"other:{manifest['merger']}"
        coef = manifest["hyperparameters"].get("coef")
        expected += [Result("FT", model, t, "test", suite.score(params, t, "test"), 21, coef) for t in OTHERS]
    expected += [
        Result("BASE", f"other:expert:{task}", task, "test", suite.score(suite.base, task, "test"), 21)
        for task in OTHERS
    ]
    assert others == expected


def test_the_other_table_has_their_means_and_the_main_table_none_of_them(folders, rows):
    assert main_table(rows) == main_table(evaluate(folders, base=True))
    scores = {(row.method, row.model, row.task): row.score for row in rows}
    experts = [scores["FT", f"other:expert:{own}", task] for own in OWN for task in OTHERS]
    table = other_table(rows)
    assert {name: list(line) for name, line in table.cells.items()} == {
        "FT": ["Expert", "WA", "TA"],
        "BASE": ["Expert"],
    }
    assert table.cells["FT"]["Expert"].by_seed == {21: pytest.approx(sum(experts) / 4)}
    for merger in ("WA", "TA"):
        own = [scores["FT", f"other:{merger.lower()}", task] for task in OTHERS]
        assert table.cells["FT"][merger].by_seed == {21: pytest.approx(sum(own) / 2)}
    base = [scores["BASE", f"other:expert:{task}", task] for task in OTHERS]
    assert table.cells["BASE"]["Expert"].by_seed == {21: pytest.approx(sum(base) / 2)}


def test_some_of_them_can_be_named_and_scores_are_those_of_the_cache(folders, rows, tmp_path, monkeypatch, suite):
    calls = []

    def score(params, task, split):
        calls.append(task)
        return suite.score(params, task, split)

    monkeypatch.setattr(models, "load_suite", lambda **recipe: suite.replace(score=score))
    few = evaluate(folders, base=True, other_tasks=["stripes"], keep=tmp_path)
    assert few == [row for row in rows if row.task != "negative"]
    assert len(calls) == len(few)
    assert calls.count("stripes") == len(folders) + 1
    calls.clear()
    assert evaluate(folders, base=True, other_tasks=["stripes", "negative"], keep=tmp_path) != few
    assert calls == ["negative"] * (len(folders) + 1)
    calls.clear()
    assert evaluate(folders, base=True, keep=tmp_path) == [row for row in rows if row.task in OWN]
    assert not calls


def test_a_report_shows_them_in_a_section_of_their_own(folders, rows, tmp_path):
    table = other_table(rows)
    write_report(tmp_path, rows, main_table(rows), checkpoints=folders, other=table)
    found = read_sources([tmp_path])
    assert found.rows == rows
    summary = json.loads((tmp_path / "results.json").read_text())
    assert summary["other_tasks"]["tasks"] == list(OTHERS)
    assert summary["other_tasks"]["means"]["FT"]["TA"]["mean"] == table.cells["FT"]["TA"].mean
    assert summary["means"]["FT"]["TA"]["mean"] == main_table(rows).cells["FT"]["TA"].mean
    assert summary["coefs"] == {"FT ta seed 21": 0.4}
    text = (tmp_path / "table.md").read_text()
    assert "\nOther tasks (negative, stripes), mean over tasks:\n\n| Method | Expert |" in text
    assert f"| {table.cells['BASE']['Expert'].mean:.2f} |" in text


def test_what_has_no_other_task_is_refused_before_anything_is_scored(runs, folders, monkeypatch):
    monkeypatch.setattr(evaluation, "score_model", lambda *a, **k: pytest.fail("nothing is scored"))
    whole = find_checkpoints([runs["ft"]])
    with pytest.raises(ValueError, match=r"other_tasks: all tasks of the suite \(.*stripes\) are tasks of the check"):
        evaluate(whole, other_tasks=())
    told = r"other_tasks names 'mirror', a task of the check.*; other task 'strips' is unknown, did you mean 'stripes'"
    with pytest.raises(ValueError, match=told):
        evaluate(folders, other_tasks=["mirror", "strips"])


def test_a_model_for_each_task_has_none_for_others(folders, tmp_path):
    run = folders[-1].parent
    list(on_disk.stream_run([Emr()], on_disk.order(*find_inputs(run), out=tmp_path, seed=0)))
    notes = []
    several = find_checkpoints([tmp_path])
    found = evaluate([*folders, *several], other_tasks=(), report=notes.append)
    assert notes == [f"note: {several[0]} has a model for each task: it is not scored on other tasks"]
    assert {row.model for row in found if row.model.startswith("other:")} == {
        "other:ta", "other:wa", "other:expert:rot90", "other:expert:mirror"
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"other_tasks: .*emr: a model for each of its tasks and none for other"):
        evaluate(several, other_tasks=())
