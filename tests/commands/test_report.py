"""Reports as a user makes them."""

import json
from pathlib import Path

import pytest

import smat_fn.report
from smat_fn.evaluate import Result, read_results, write_results
from smat_fn.report import plots, write_full_report
from smat_fn.scripts.commands import eval as command
from smat_fn.scripts.evaluate import evaluation, models, sources

from .conftest import assert_effects

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "results" / "digits.jsonl"


def test_every_option_reaches_a_report(monkeypatch, tmp_path):
    got, found = {}, sources.Sources([], [], [], [])
    read = lambda paths, *, besides, split: got.update(sources=paths, besides=besides, of=split) or found  # noqa: E731
    monkeypatch.setattr(sources, "read_sources", read)
    monkeypatch.setattr(smat_fn.report, "write_full_report", lambda out, *found, **own: got.update(out=out, **own))

    def call(options):
        got.clear()
        command.report(options)
        return dict(got)

    elsewhere = tmp_path / "elsewhere"
    table = [
        ({"sources": (elsewhere,)}, {"sources": (elsewhere,)}),
        ({"out": elsewhere}, {"out": elsewhere, "besides": elsewhere}),
        ({"split": "dev"}, {"split": "dev", "of": "dev"}),
        *(({name: value}, {name: value}) for name, value in (("title", "T"), ("reference", "SMAT"))),
    ]
    assert_effects(call, command.Report((STUDY,), tmp_path), table, besides={"overwrite"})  # tested below


@pytest.fixture
def call(exits, capsys):
    """``call(*words)``: what eval.py exits with and prints."""
    return lambda *words: (exits("eval.py", *words), capsys.readouterr().out)


def test_the_stored_study_becomes_a_report_that_says_what_it_found(call, tmp_path):
    status, printed = call("report", STUDY, "--out", tmp_path / "out", "--title", "FT and SMAT")
    assert status is None
    assert printed == f"report: {tmp_path / 'out' / 'report.html'}\n"
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    stored = json.loads(STUDY.with_suffix(".json").read_text(encoding="utf-8"))
    low, high = stored["paired"]["interval"]
    finding = "not established" if low < 0 < high else "above" if low > 0 else "below"
    assert f"| SMAT | FT | Avg | {stored['paired']['mean']:+.2f} | {low:+.2f} to {high:+.2f} |" in text
    assert f"| {finding} |" in text
    assert stored["commit"] in text
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<title>FT and SMAT</title>" in page
    assert "<script" not in page


@pytest.fixture
def _undrawn(monkeypatch):
    """Drawing takes long."""
    for drawn in ("main_plot", "merger_plot", "paired_plot", "noise_plot"):
        monkeypatch.setattr(plots, drawn, lambda *a, **options: b"x")
    monkeypatch.setattr(sources, "draw", lambda result: b"x")


@pytest.mark.usefixtures("_undrawn")
@pytest.mark.parametrize("name", ["digits", "minilm"])
def test_the_reports_in_docs_are_those_of_the_stored_results(name, tmp_path):
    places = STUDY.with_name(f"{name}_methods.jsonl"), STUDY.with_name("analyses") / f"{name}_methods"
    found, title = sources.read_sources(places), f"{name}: all methods"
    write_full_report(tmp_path, found.rows, found.runs, facts=found.facts, extra=found.analyses, title=title)
    stored = ROOT / "docs" / "results" / f"{name}_methods" / "report.md"
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == stored.read_text(encoding="utf-8"), (
        "make the reports again, by the commands in docs/reports.md"
    )


def test_what_cannot_be_reported_ends_in_one_line(call, tmp_path):
    text, _ = call("report", tmp_path / "none", "--out", tmp_path / "out")
    assert text == f"eval.py report: {tmp_path / 'none'}: there is no such file or folder"
    text, _ = call("report", STUDY, "--split", "dev", "--out", tmp_path / "out")
    assert text == "eval.py report: no dev scores of any model: pass --split test, or evaluate some with eval.py"
    text, _ = call("report", "--out", tmp_path / "out")
    assert text == "eval.py report: give at least one folder of scores"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_undrawn")
def test_a_report_that_exists_is_only_replaced_on_demand(call, tmp_path):
    (tmp_path / "report.html").write_text("mine")
    text, _ = call("report", STUDY, "--out", tmp_path)
    assert text == f"eval.py report: {tmp_path / 'report.html'} exists: choose another --out or pass --overwrite"
    assert (tmp_path / "report.html").read_text() == "mine"
    assert "holds something else than is written" in call("report", STUDY, "--out", tmp_path, "--overwrite")[0]
    (tmp_path / "report.html").unlink()
    assert call("report", STUDY, "--out", tmp_path)[0] is None
    whole = (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").write_text(whole[:1000])
    assert call("report", STUDY, "--out", tmp_path, "--overwrite")[0] is None
    assert (tmp_path / "report.html").read_text() == whole


def test_a_mistyped_command_is_suggested_by_every_script(exits, capsys):
    for words, near in (
        (("eval.py", "landscap"), "landscape"),
        (("train.py", "samt", "--out", "x"), "smat"),
        (("merge.py", "verfy", "x"), "verify"),
    ):
        assert exits(*words) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.startswith(f"{words[0]}: {words[1]!r} is unknown, did you mean {near!r}?")
    assert exits("merge.py", "verify", "/nope") == (
        "merge.py verify: there is no folder /nope: give that of a merged model, or its README.md"
    )


def test_an_evaluation_says_that_it_replaces_the_results_of_another_that_ended_meanwhile(call, tmp_path, monkeypatch):
    own, other = (Result(label, "ta", "a", "test", 50.0, 0) for label in ("FT", "SMAT"))
    results = tmp_path / "results.jsonl"
    meanwhile = iter([lambda: None, lambda: write_results(results, [other])])
    monkeypatch.setattr(models, "find_checkpoints", lambda paths: [])
    monkeypatch.setattr(evaluation, "evaluate", lambda folders, **options: next(meanwhile)() or [own])
    for said in (False, True):
        status, printed = call(tmp_path, "--out", tmp_path)
        assert status is None
        assert (f"note: replaces {results}, which another evaluation wrote meanwhile: " in printed) is said
    assert read_results(results) == [own]


RUN = {
    "label": "SMAT", "model": "expert:a", "seed": 0, "method": "smat", "hyperparameters": {"sigma": 0.1},
    "training": {"steps": 5}, "evaluations": {"curve": [[5, 1.0]], "by": "score", "step": 5, "best": 1.0},
}  # fmt: skip
FACTS = {"dev": {"FT": {"0.1": [1.0]}, "SMAT": [{"training": {}, "hyperparameters": {}, "dev": [1.0]}]}}


@pytest.mark.parametrize(
    ("run", "facts", "told"),
    [
        ({"training": {"steps": "5"}}, {}, "runs.jsonl, line 1: training['steps'] is '5', must be int or null"),
        ({"hyperparameters": {"sigma": "0.1"}}, {}, "line 1: hyperparameters['sigma'] is '0.1', must be float"),
        ({"hyperparameters": {}, "sigma_from": {"x": 1}}, {}, "line 1: hyperparameters['sigma'] is None, must be"),
        ({"evaluations": {"curve": []}}, {}, "line 1: evaluations['curve'] is [], must hold pairs of a step"),
        ({"evaluations": {"curve": [[1]]}}, {}, "line 1: evaluations['curve'] is [[1]], must hold pairs of a step"),
        ({"evaluations": {"curve": [[1, 2]]}}, {}, "line 1: evaluations['by'] is None, must be str"),
        ({"dev": {"a": "50"}}, {}, "line 1: dev['a'] is '50', must be float: remove these lines or write"),
        ({"versions": {"torch": 2}}, {}, "line 1: versions['torch'] is 2, must be str"),
        ({}, [], "results.json beside it the value is [], must be Mapping: correct it, or remove that file"),
        ({}, {"versions": ["2"]}, "results.json beside it versions is ['2'], must be Mapping or null: correct it"),
        ({}, {"lr": {"FT": [1]}}, "results.json beside it lr['FT'] is [1], must be float: correct it"),
        ({}, {"dev": {"FT": {"0.1": 3}}}, "beside it dev['FT']['0.1'] is 3, must be Sequence: correct it"),
        ({}, {"dev": {"FT": [{"training": 1}]}}, "beside it dev['FT'][0]['training'] is 1, must be Mapping"),
        ({}, FACTS, None),
    ],
    ids=repr,
)
def test_values_of_another_type_are_named_with_file_and_place(call, tmp_path, run, facts, told):
    write_results(tmp_path / "results.jsonl", [Result("SMAT", "expert:a", "a", "test", 50.0, 0)])
    (tmp_path / "runs.jsonl").write_text(json.dumps(RUN | run))
    (tmp_path / "results.json").write_text(json.dumps(facts))
    status, _ = call("report", tmp_path, "--out", tmp_path / "out")
    assert status is None if told is None else told in status


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("manifest.json", {"kind": "expert", "task": ["a"], "label": "FT", "seed": 0}, "task is ['a'], must be str"),
        ("gains.json", {"analysis": "gains", "rows": [5], "settings": {}}, "another type ('int' object is not"),
        (
            "experts-curve.json",
            {"analysis": "experts-curve", "rows": [{"method": "FT", "experts": 2, "seed": 0, "relative": 1.0}],
             "settings": {"merger": 5}},
            "holds a value of another type ('int' object has no attribute 'upper'): write it again",
        ),
        (
            "outcome.json",
            {"label": "T", "seed": 0, "test": [{"method": "T", "model": 3, "task": "a", "split": "test", "score": 5.0,
                                                "seed": 0}]},
            "outcome.json: model is 3, must be str",
        ),
    ],
)  # fmt: skip
def test_damaged_manifests_analyses_and_outcomes_end_in_one_line(call, tmp_path, name, values, told):
    (tmp_path / name).write_text(json.dumps(values))
    assert told in call("report", tmp_path, "--out", tmp_path / "out")[0]
