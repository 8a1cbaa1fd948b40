"""Mergers that need data beside the others: what is published, the table, the heat map, and the stored results."""

import json
from dataclasses import asdict

import pytest

from benchmarks import digits_data_mergers, digits_mergers, methods, readme, text_data_mergers
from benchmarks.study.by_data import SEES
from smat_fn import checkpoint
from smat_fn.evaluate import Result, read_results

SCORES = {"FISHER": 60.0, "FISHER_ADAM": 61.0, "REG_MEAN": 70.0}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder that results are written to and read from; a stored table of three methods."""
    folder = tmp_path / methods.RESULTS
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    monkeypatch.setattr(readme, "RESULTS", folder)
    monkeypatch.setattr(digits_mergers, "FIGURE", tmp_path / "figure.png")
    line = {"Expert": [90.0, 92.0], "TA": [62.0, 64.0], "TSV_MERGE": [66.0, 67.0], "All": [64.0, 65.5]}
    result = {"command": "first", "hardware": "one core", "seeds": [141, 142], "planned_seeds": [141, 142]}
    result["test"] = {label: line for label in ("FT", "SMAT", "FT-Muon")}
    checkpoint.write_text(folder / "digits_mergers.json", json.dumps(result))
    return folder


def outcome(label, seed, scores):
    rows = [Result(label, "expert:a", "a", "test", 91.0, seed), Result(label, "expert:b", "b", "test", 93.0, seed)]
    # means over tasks are the scores, one point more in the second seed
    rows += [
        Result(label, name, task, "test", score + up + (seed % 100 - 41), seed)
        for name, score in scores.items()
        for task, up in (("a", -2.0), ("b", 2.0))
    ]
    facts = {"method": "ft", "hyperparameters": {}, "training": {}, "seed": seed}
    costs = {
        "five": 1.0,
        "coefs": {},
        "training_seconds": 2.0,
        "seconds": 3.0,
        "peak_bytes": None,
        "facts": {},
        "dev": {},
    }
    return {"label": label, "trial": facts, "test": [asdict(row) for row in rows], "dev": {}, **costs}


def test_methods_are_published_when_all_their_seeds_are_there(place, monkeypatch, tmp_path):
    kept = {label: ["candidate"] for label in ("FT", "FT-Muon", "SMAT")}
    asked = []

    def run_trials(trials, folder, **options):
        asked.extend((trial.label, trial.seed) for trial in trials)
        for trial in [trials[place] for place in (0, 2, 1, 3, 4)]:  # as they finish
            scores = {name: s for name, s in SCORES.items() if name != "FISHER_ADAM" or trial.label != "FT-Muon"}
            yield trial, outcome(trial.label, trial.seed, scores)
        raise RuntimeError("these trials failed")

    class Trial:
        def __init__(self, label, seed):
            self.label, self.seed = label, seed

    monkeypatch.setattr(digits_data_mergers, "stored_choices", lambda protocol, grids: kept)
    monkeypatch.setattr(methods.Protocol, "trial", lambda self, label, candidate, seed: Trial(label, seed))
    monkeypatch.setattr(digits_data_mergers, "run_trials", run_trials)
    with pytest.raises(RuntimeError, match="these trials failed"):
        digits_data_mergers.main(tmp_path / "work", seeds=2)
    # methods that come first are whole first; the last trial, of FT-Muon, is not there
    assert asked == [(label, seed) for label in ("FT", "SMAT", "FT-Muon") for seed in (141, 142)]
    result = json.loads((place / "digits_data_mergers.json").read_text())
    assert list(result["test"]) == ["FT", "SMAT"]
    assert result["test"]["FT"] == {"Expert": [92.0, 92.0]} | {name: [s, s + 1] for name, s in SCORES.items()}
    assert (result["seeds"], result["sees"]) == ([141, 142], SEES)
    runs = [json.loads(line) for line in (place / "digits_data_mergers_runs.jsonl").read_text().splitlines()]
    assert [(run["label"], run["seed"]) for run in runs] == asked[:4]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_adamerging_comes_last_and_is_published_with_the_last_seed(place, monkeypatch, tmp_path):
    trials = []

    def run_trials(asked, folder, **options):
        trials.extend(asked)
        return [(trial, outcome(trial.label, trial.seed, SCORES)) for trial in asked]

    def adapt_trial(trial, folder, found, keep):
        result = json.loads((place / "digits_data_mergers.json").read_text())
        assert "ADAMERGING_LAYER" not in result["test"]["FT"]
        own = outcome(trial.label, trial.seed, SCORES | {"ADAMERGING_LAYER": 80.0})
        return own | {"dev": {"ADAMERGING_LAYER": {}}}

    choices = {"FT": [digits_data_mergers.STUDY.protocol.grids["FT"][0]]}
    monkeypatch.setattr(digits_data_mergers, "stored_choices", lambda protocol, grids: choices)
    monkeypatch.setattr(digits_data_mergers, "run_trials", run_trials)
    monkeypatch.setattr(digits_data_mergers, "adapt_trial", adapt_trial)
    monkeypatch.setattr(digits_mergers, "merger_plot", lambda table, names: b"figure")
    digits_data_mergers.main(tmp_path / "work", seeds=2)
    result = json.loads((place / "digits_data_mergers.json").read_text())
    assert result["test"]["FT"]["ADAMERGING_LAYER"] == [80.0, 81.0]
    assert [trial.seed for trial in trials] == [141, 142]
    assert {trial.mergers for trial in trials} == {digits_data_mergers.CONFIGS}


def test_one_table_has_both_kinds_and_says_what_each_sees(place, monkeypatch):
    before = readme.digits_mergers(readme.stored("digits_mergers"))
    assert "| TA | - | 63.0 | 63.0 | 63.0 |" in before
    assert "Merger with data" not in before
    line = {"Expert": [90.0, 92.0], "FISHER": [60.0, 64.0]}
    test = {"FT": line, "SMAT": {**line, "FISHER": [66.0, 70.0]}, "FT-Muon": {"Expert": [90.0, 92.0]}}
    data = {"command": "second", "sees": {"FISHER": "rows"}, "test": test}
    checkpoint.write_text(place / "digits_data_mergers.json", json.dumps(data))
    text = readme.digits_mergers(readme.stored("digits_mergers"))
    assert text.splitlines()[:6] == [
        "|  | Data | FT | SMAT | FT-Muon |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| Expert | - | 91.0 | 91.0 | 91.0 |",
        "| TSV_MERGE | - | 66.5 | 66.5 | 66.5 |",
        "| FISHER | rows | 62.0 | 68.0 | - |",
        "| TA | - | 63.0 | 63.0 | 63.0 |",
    ]
    # differences 1 and 3, -3 and 0; of two seeds the interval is tan(0.475 pi) = 12.706 times half the distance
    assert "| FISHER | +2.00 (-10.71 to +14.71) | -1.50 (-20.56 to +17.56) | 2 |" in text
    assert "From `first` and `second` on one core." in text
    drawn = []
    monkeypatch.setattr(digits_mergers, "merger_plot", lambda table, names: drawn.append((table, names)) or b"figure")
    digits_mergers.draw()
    ((table, names),) = drawn
    assert names == ["TSV_MERGE", "FISHER (rows)", "TA"]
    assert table.cells["FT"]["FISHER (rows)"].mean == 62.0
    assert "FISHER (rows)" not in table.cells["FT-Muon"]


@pytest.mark.parametrize(
    ("names", "least"),
    [(("digits_mergers", "digits_data_mergers"), 4 * 3), (("text_onepass", "text_data_mergers"), 5 * 2)],
    ids=["digits", "text"],
)
def test_the_stored_scores_of_both_are_of_the_same_experts(names, least):
    rows = [
        {(r.method, r.seed, r.task): r.score for r in read_results(file) if r.model == f"expert:{r.task}"}
        for file in (readme.RESULTS / f"{name}.jsonl" for name in names)
    ]
    assert len(rows[1]) >= least  # tasks and seeds of a method at least, tasks and methods of a seed
    assert rows[1] == {place: rows[0][place] for place in rows[1]}


def test_of_the_text_encoder_whole_seeds_are_published_beside_mergers_without_data(place, monkeypatch, tmp_path):
    line = {"Expert": [90.0, 92.0, 94.0], "TA": [62.0, 64.0, 66.0], "TSV_MERGE": [70.0, 72.0, 74.0]}
    whole = {"seeds": [240, 241, 242], "test": {"FT": line, "SMAT": line, "ASAM": line}}
    checkpoint.write_text(place / "text_onepass.json", json.dumps(whole))
    kept = {label: ["candidate"] for label in ("FT", "SMAT", "ASAM")}
    asked = []

    def run_trials(trials, folder, *, run_one, **options):
        assert run_one is text_data_mergers.run_and_adapt
        asked.extend((trial.label, trial.seed) for trial in trials)
        for trial in trials[:5]:
            yield trial, outcome(trial.label, trial.seed, SCORES | {"ADAMERGING_TASK": 50.0})

    class Trial:
        def __init__(self, label, seed):
            self.label, self.seed = label, seed

    monkeypatch.setattr(text_data_mergers, "stored_choices", lambda protocol, grids: kept)
    monkeypatch.setattr(methods.Protocol, "trial", lambda self, label, candidate, seed: Trial(label, seed))
    monkeypatch.setattr(text_data_mergers, "run_trials", run_trials)
    monkeypatch.setattr(text_data_mergers, "FIGURE", tmp_path / "text.png")
    drawn = []
    monkeypatch.setattr(digits_mergers, "merger_plot", lambda table, names: drawn.append((table, names)) or b"figure")
    text_data_mergers.main(tmp_path / "work", model="m", data="d", seeds=3)
    table, names = drawn[-1]
    assert names[:2] == ["TSV_MERGE", "REG_MEAN (256 training rows a task; 2 seeds)"]
    assert (table.cells["FT"]["TA"].mean, table.cells["FT"][names[1]].mean) == (64.0, 70.5)
    assert names[1] not in table.cells["ASAM"]
    assert (tmp_path / "text.png").read_bytes() == b"figure"
    assert asked == [(label, seed) for seed in (241, 242, 243) for label in ("FT", "SMAT")]
    result = json.loads((place / "text_data_mergers.json").read_text())
    assert (result["seeds"], result["planned_seeds"]) == ([241, 242], [241, 242, 243])
    assert result["sees"]["ADAMERGING_TASK"] == "200 dev rows a task, no labels"
    text = readme.text_data_mergers(result | {"hardware": "one core"})
    assert "| FISHER | 256 training rows a task | 60.5 | 60.5 |" in text
    assert "| TA | - | 65.0 | 65.0 |" in text
    assert "mean over five tasks and 2 of 3 planned seeds" in text
    assert "| FISHER | -4.50 (-10.85 to +1.85) | -12.50 (-18.85 to -6.15) | 2 |" in text
