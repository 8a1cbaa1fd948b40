"""What a report finds in folders: scores with their runs, trials of studies, analyses, manifests."""

import json
from dataclasses import asdict, replace

import pytest

from smat_fn.checkpoint import MANIFEST, describe, write_text
from smat_fn.evaluate import Result, write_results
from smat_fn.evaluate.results import SET, Run
from smat_fn.report import build_report, write_full_report
from smat_fn.report.tables import main_table
from smat_fn.scripts.evaluate import evaluation, models, outputs
from smat_fn.scripts.evaluate.sources import OUTCOME, read_sources

FT = [
    Result("FT", "expert:a", "a", "test", 90.0, 0),
    *(Result("FT", name, "a", "test", 50.0, 0, 0.3) for name in ("wa", "ta", "ties", "dare", "della")),
]
RUN = Run("FT", "expert:a", 0, "ft", {}, {"optimizer": "adam", "lr": 1e-3, "steps": 5}, 2.5)
SMAT = [replace(row, method="SMAT", score=row.score + 2) for row in FT]
OUTCOME_VALUES = {
    "label": "SMAT", "five": 50.0, "training_seconds": 4.0, "peak_bytes": 1 << 20, "seconds": 9.0,
    "trial": {
        "method": "smat", "hyperparameters": {"sigma": 0.01}, "training": {"optimizer": "adam", "lr": 1e-3, "steps": 5},
        "seed": 0, "suite": {"name": "toy"},
    },
    "test": [asdict(row) for row in SMAT],
}  # fmt: skip
GAINS = {
    "analysis": "gains",
    "settings": {"split": "test"},
    "runs": [],
    "versions": {},
    "rows": [
        {"method": "FT", "seed": 0, "expert": 90.0, "merged": 50.0, "drop": 40.0},
        {"method": "SMAT", "seed": 0, "expert": 92.0, "merged": 52.0, "drop": 40.0},
    ],
}


def evaluated(folder, rows, runs, **facts):
    write_results(folder / "results.jsonl", rows)
    write_results(folder / "runs.jsonl", runs)
    write_text(folder / "results.json", json.dumps(facts))


def test_folders_of_evaluations_studies_and_analyses_become_one_report(tmp_path):
    evaluated(tmp_path / "in" / "ft", FT, [RUN], command="eval ft", commit="c", means={})
    write_text(tmp_path / "in" / "work" / "smat-seed0" / OUTCOME, json.dumps(OUTCOME_VALUES))
    write_text(tmp_path / "in" / "more" / "gains.json", json.dumps(GAINS))
    found = read_sources([tmp_path / "in"])
    assert found.rows == FT + SMAT
    assert [(run.label, run.model) for run in found.runs] == [("FT", "expert:a"), ("SMAT", SET)]
    assert (found.runs[1].seconds, found.runs[1].peak_memory_bytes) == (4.0, 1 << 20)
    assert found.facts == {"command": "eval ft", "commit": "c"}
    (section,) = found.analyses
    assert section.title == "Gains"
    assert section.table.rows == [["FT", "90.00", "50.00", "40.00"], ["SMAT", "92.00", "52.00", "40.00"]]
    assert [record["merged"] for record in section.table.records] == [50.0, 52.0]
    assert section.png.startswith(b"\x89PNG")
    write_full_report(tmp_path / "out", found.rows, found.runs, facts=found.facts, extra=found.analyses)
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| SMAT | FT | Avg | +2.00 | – | 1 / 0 / 0 | open: one seed |" in text  # noqa: RUF001
    assert "![Gains](gains.png)" in text


def test_tuning_of_two_studies_is_in_one_report(tmp_path):
    for label, rows, rate in (("FT", FT, "0.1"), ("SMAT", SMAT, "0.2")):
        evaluated(tmp_path / label, rows, [], dev={label: {rate: [50.0]}}, lr={label: float(rate)})
    facts = read_sources([tmp_path]).facts
    assert facts == {"dev": {"FT": {"0.1": [50.0]}, "SMAT": {"0.2": [50.0]}}, "lr": {"FT": 0.1, "SMAT": 0.2}}


def test_manifests_fill_what_no_runs_file_tells(tmp_path):
    evaluated(tmp_path / "scores", FT, [RUN])
    whole = replace(RUN, label="SMAT", model=SET)
    evaluated(tmp_path / "set", SMAT, [whole])
    expert = {"kind": "expert", "task": "a", "label": "FT", "seed": 0, "method": "ft", "hyperparameters": {"rho": 1}}
    for name, manifest in {
        "a": expert,
        "b": {**expert, "task": "b"},
        "c": {**expert, "label": "SMAT"},
        "base": {"kind": "base"},
    }.items():
        write_text(tmp_path / "run" / name / MANIFEST, json.dumps(describe({}, **manifest)))
    found = read_sources([tmp_path])
    assert [(run.model, run.seconds) for run in found.runs] == [("expert:a", 2.5), (SET, 2.5), ("expert:b", None)]


def test_scores_of_weights_that_have_been_replaced_are_refused(tmp_path):
    evaluated(tmp_path / "scores", FT, [replace(RUN, fingerprint="old")])
    facts = {"kind": "expert", "task": "a", "label": "FT", "seed": 0, "method": "ft", "hyperparameters": {}}

    def write(name, **more):
        write_text(tmp_path / name / MANIFEST, json.dumps(facts | more))

    write("run/a", fingerprint="new")
    with pytest.raises(ValueError, match=r"results\.jsonl: the scores of FT, expert:a, seed 0 are of other .*run/a"):
        read_sources([tmp_path])
    assert read_sources([tmp_path / "scores"]).rows == FT
    write("kept/a", fingerprint="old")  # they lie there too
    assert read_sources([tmp_path]).rows == FT
    write("kept/a", fingerprint="other", training={"optimizer": "muon"})
    assert read_sources([tmp_path]).rows == FT


def test_suites_of_another_split_are_left_out(tmp_path):
    dev = [replace(row, split="dev") for row in FT + SMAT]
    labels = [RUN, replace(RUN, label="SMAT")]
    evaluated(tmp_path / "dev", dev, [replace(run, suite={"metric": "exact"}) for run in labels])
    evaluated(tmp_path / "ft", FT, [replace(RUN, suite={"metric": "choice"})])
    evaluated(tmp_path / "smat", SMAT, [replace(labels[1], suite={"metric": "choice"})])
    for split, metric in (("test", "choice"), ("dev", "exact")):
        assert [run.suite["metric"] for run in read_sources([tmp_path], split=split).runs] == [metric, metric]
    evaluated(tmp_path / "smat", SMAT, [replace(labels[1], suite={"metric": "likelihood"})])
    found = read_sources([tmp_path])
    with pytest.raises(ValueError, match=r'runs differ in metric \("choice", "likelihood"\)'):
        build_report(found.rows, found.runs)


def test_a_file_of_scores_brings_what_is_beside_it(tmp_path):
    write_results(tmp_path / "study.jsonl", FT)
    write_results(tmp_path / "study_runs.jsonl", [RUN])
    write_text(tmp_path / "study.json", json.dumps({"hardware": "an abacus", "dev": {"ft": {"0.1": [1.0]}}, "x": 1}))
    found = read_sources([tmp_path / "study.jsonl"])
    assert (found.rows, found.runs) == (FT, [RUN])
    assert found.facts == {"hardware": "an abacus", "dev": {"ft": {"0.1": [1.0]}}}


def test_one_label_with_muon_and_without_is_told_apart(tmp_path):
    evaluated(tmp_path / "adam", FT, [RUN])
    muon = replace(RUN, training={**RUN.training, "optimizer": "muon"})
    evaluated(tmp_path / "muon", [replace(row, score=40.0) for row in FT], [muon])
    found = read_sources([tmp_path])
    assert {row.method for row in found.rows} == {run.label for run in found.runs} == {"FT", "FT (Muon)"}


def test_a_studys_lines_have_no_model_and_its_tuning_no_scores(tmp_path):
    write_results(tmp_path / "study.jsonl", SMAT)
    line = {**OUTCOME_VALUES, **OUTCOME_VALUES["trial"]}
    write_text(tmp_path / "study_runs.jsonl", json.dumps(line) + "\n")
    write_text(tmp_path / "study_tuning.json", json.dumps({"dev": {}, "chosen": {"SMAT": {}}, "commit": "c"}))
    write_text(tmp_path / "work" / "tuning" / OUTCOME, json.dumps({**OUTCOME_VALUES, "label": "FT", "test": None}))
    found = read_sources([tmp_path / "study.jsonl", tmp_path / "work"])
    assert found.rows == SMAT
    assert [(run.label, run.model, run.seconds) for run in found.runs] == [("SMAT", SET, 4.0)]
    assert found.facts == {"dev": {}, "chosen": {"SMAT": {}}, "commit": "c"}


def test_facts_of_several_folders_are_joined_and_the_output_is_no_input(tmp_path):
    evaluated(tmp_path / "one", FT, [RUN], command="a", commit="c")
    evaluated(tmp_path / "two", SMAT, [], command="b", commit="c")
    evaluated(tmp_path / "report", [replace(row, score=0.0) for row in FT], [])
    found = read_sources([tmp_path], besides=tmp_path / "report")
    assert found.rows == FT + SMAT
    assert found.facts == {"command": "a; b", "commit": "c"}
    assert read_sources([tmp_path / "report"], besides=tmp_path / "report").rows[0].score == 0


def test_all_that_cannot_be_read_is_listed(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"empty: no scores there: run eval\.py"):
        read_sources([tmp_path / "empty"])
    (tmp_path / "bad" / "gains.json").write_text('{"analysis": "gains"}')
    (tmp_path / "bad" / "replacement.json").write_text('{"analysis": "replacement", "rows": []}')
    (tmp_path / "bad" / "diagnose.json").write_text("[1]")  # of another program
    told = (
        r"none: there is no such file or folder; .*results\.jsonl, line 1: .*replacement\.json: the analysis has no "
        r"rows: run it again.*gains\.json lacks '\w+': it was written"
    )
    with pytest.raises(ValueError, match=told):
        read_sources([tmp_path / "none", tmp_path / "bad"])


def test_what_cannot_be_read_is_named_once(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1") as told:
        read_sources([tmp_path])
    assert str(told.value).count(str(file)) == 1
    file.write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=rf"^{file} is not text in UTF-8 \(invalid start byte\): give a file"):
        read_sources([tmp_path])


def test_an_evaluation_keeps_what_a_report_needs(runs, tmp_path):
    folders = models.find_checkpoints([runs["ft"]])
    rows = evaluation.evaluate(folders)
    outputs.write_report(tmp_path, rows, main_table(rows), checkpoints=folders)
    found = read_sources([tmp_path])
    assert found.rows == rows
    assert [run.model for run in found.runs] == [row.model for row in rows]
    assert all(run.seconds > 0 and run.training["lr"] == 5e-4 for run in found.runs)
    assert set(found.facts) == {"command", "commit", "hardware", "versions"}
