"""The screening: one small run of it, and what it says about its numbers."""

import json
from dataclasses import asdict, dataclass
from statistics import fmean

import pytest
from scipy import stats

from benchmarks import digits as first_study
from benchmarks import digits_lora, digits_methods, digits_onepass, digits_passes, readme, screening, when_it_pays
from benchmarks.study.trial import Trial
from smat_fn.config import Finetune, Msam, TaskArithmetic, Training
from smat_fn.evaluate import Result
from smat_fn.evaluate.statistics import paired
from smat_fn.suites import digits
from smat_fn.suites.digits_base import Examples


@dataclass(frozen=True)
class Few(digits.DigitsOptions):
    pretrain_steps: int = 10
    images_per_task: int = 120


@pytest.fixture
def _small(monkeypatch, _own_cache):
    """Two tasks, 60 dev and test images, four steps, three coefficients."""
    true = digits.splits
    monkeypatch.setattr(digits, "DigitsOptions", Few)
    monkeypatch.setattr(digits, "TASKS", {task: digits.TASKS[task] for task in ("rot90", "stripes")})
    monkeypatch.setattr(digits, "splits", lambda seed: {name: few(part, name) for name, part in true(seed).items()})
    monkeypatch.setattr(screening, "BASE", Training(steps=4, lr=1e-3))
    monkeypatch.setattr(screening, "COEFS", (0.5, 1.0, 2.0))


def few(part, name):
    return part if name == "train" else Examples(part.images[:60], part.labels[:60])


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_a_stopped_screening_resumes_and_writes_tables(tmp_path, capsys):
    words = [str(tmp_path), "--seeds", "112", "--rates", "1e-3", "--jobs", "1", "--families"]
    screening.main([*words, "MSAM, gradient"])
    result = json.loads((tmp_path / "screening.json").read_text())
    assert [line["label"] for line in result["lines"]] == ["FT", "MSAM along the last gradient, rho 0.5"]
    assert result["seeds"] == [112]
    for line in result["lines"]:
        assert line["training"]["lr"] == 1e-3
        assert line["cpu_seconds"][0] > 0
        assert line["coefs"][0]["wa"] is None
        assert {line["coefs"][0][name] for name in ("ta", "ties", "tsv_merge")} <= {0.5, 1.0, 2.0}
        mean = fmean(line["test"][name][0] for name in ("wa", "ta", "ties"))
        assert line["test"]["mean"] == [pytest.approx(mean)]
        assert line["from_ft"]["mean"] == pytest.approx(mean - result["lines"][0]["test"]["mean"][0])
    assert not list(tmp_path.rglob("model.safetensors"))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")}
    screening.main([*words, "MSAM, gradient", "SMAT"])
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("outcome.json")}.items()
    assert len(json.loads((tmp_path / "screening.json").read_text())["lines"]) == 3
    assert "| SMAT | 0.001 | 4 |" in (tmp_path / "screening.md").read_text()
    assert "2 of 3 trials stand" in capsys.readouterr().out


def outcome(test, dev, seconds):
    model_rows = [Result("x", name, "t", "test", score, 1) for name, score in test.items()]
    return {
        "trial": {"training": asdict(Training(steps=4, lr=1e-3))},
        "dev": {name: {"t": value} for name, value in dev.items()},
        "coefs": {},
        "test": [asdict(row) for row in model_rows],
        "training_cpu_seconds": seconds,
    }


def test_differences_are_paired_by_seed_and_the_choice_is_by_dev():
    def line(family, label, shifts, dev, seconds=2.0):
        scores = [
            {"expert:t": 90.0, "wa": 80 + i + s, "ta": 82 + i + s, "ties": 84 + i + s, "tsv_merge": 86.0}
            for i, s in enumerate(shifts)
        ]
        own = dict.fromkeys(("wa", "ta", "ties"), dev)
        candidate = screening.Candidate(family, label, Msam(), Training(steps=4, lr=1e-3))
        return screening.line_of(candidate, [outcome(one, own, seconds) for one in scores])

    lines = [
        line("FT", "FT", (0, 0, 0), 70),
        line("M", "good on test", (3, 4, 5), 71),
        line("M", "M", (1, 2, 6), 72, 3.0),
    ]
    result = screening.compared(lines)
    found = result["lines"][2]
    assert found["from_ft"]["differences"] == [1.0, 2.0, 6.0]
    interval = stats.t.interval(0.95, 2, 3.0, stats.sem([1, 2, 6]))
    assert found["from_ft"]["interval"] == pytest.approx(list(interval))
    assert found["cpu_ratio"] == 1.5
    assert [one["label"] for one in result["by_dev"]] == ["FT", "M"]
    text = screening.page({"seeds": [1, 2, 3], **result})
    assert text.index("good on test") < text.index("| M |") < text.index("| FT |")
    assert "| +3.00 (2.65) |" in text


def test_what_a_doubling_of_the_steps_adds_is_a_slope_for_each_seed_between_the_choices_of_dev():
    def line(family, steps, lr, scores, dev):
        scores = [{"expert:t": 90.0, **dict.fromkeys(("wa", "ta", "ties"), s), "tsv_merge": s / 2} for s in scores]
        method = Finetune() if family == "FT" else Msam()
        candidate = screening.Candidate(family, family, method, Training(steps=steps, lr=lr), length=steps)
        own = dict.fromkeys(("wa", "ta", "ties"), dev)
        found = screening.line_of(candidate, [outcome(one, own, 1.0) for one in scores])
        return {**found, "training": asdict(candidate.training)}

    lines = [
        line("FT", 100, 1e-3, (60.0, 62.0), 70),
        line("FT", 100, 2e-3, (10.0, 10.0), 60),  # not the choice
        line("FT", 400, 1e-3, (10.0, 10.0), 60),
        line("FT", 400, 2e-3, (70.0, 72.0), 75),
        line("M", 100, 1e-3, (61.0, 62.0), 70),
        line("M", 400, 1e-3, (72.0, 74.0), 80),
    ]
    result = screening.compared(lines)
    assert [(one["family"], one["length"], one["lr"], one["from_ft"]["mean"]) for one in result["by_dev"]] == [
        ("FT", 100, 1e-3, 0.0), ("FT", 400, 2e-3, 0.0), ("M", 100, 1e-3, 0.5), ("M", 400, 1e-3, 2.0),
    ]  # fmt: skip
    assert result["lines"][-1]["from_ft"]["mean"] == 63.0  # at its own rate and length
    assert result["per_doubling"]["M, mean"]["differences"] == pytest.approx([0.5, 1.0])  # (2 - 1)/2 and (2 - 0)/2
    assert result["per_doubling"]["M, tsv_merge"]["differences"] == pytest.approx([0.25, 0.5])
    assert "| M, mean | +0.75 (-2.43 to +3.93) |" in screening.page({"seeds": [1, 2], **result})
    found = list(when_it_pays._lengths("digits_length", {"seeds": [1, 2], **result}))
    assert len(found) == 2 * len(lines)
    gains = {(row.run.steps, row.run.lr, row.run.seed): row.gain for row in when_it_pays.gains(found)}
    # dev, at equal rates and lengths: what has no such FT beside it is left out
    assert gains == {(100, 1e-3, 1): 0.0, (100, 1e-3, 2): 0.0, (400, 1e-3, 1): 20.0, (400, 1e-3, 2): 20.0}


def test_the_table_of_lengths_has_the_choices_beside_each_other():
    def one(family, length, lr, mean):
        scores = {"expert": 90.0, "mean": mean, "tsv_merge": mean + 1}
        differences = {f"{name}from_ft": paired([80.0, 80.0], [mean, mean + 1]) for name in ("", "tsv_merge_")}
        return {"family": family, "length": length, "lr": lr, **scores, **differences}

    by_dev = [one("FT", 100, 1e-3, 80.0), one("SMAT", 100, 5e-4, 81.0)]
    slopes = {f"SMAT, {name}": paired([0.0, 0.0], [1.0, 2.0]) for name in ("mean", "tsv_merge")}
    text = readme.digits_length(
        {
            "by_dev": by_dev,
            "per_doubling": slopes,
            "seeds": [1, 2],
            "planned_seeds": [1, 2],
            "command": "c",
            "commit": "0" * 40,
            "hardware": "h",
        }
    )
    gain = "+1.50 (-4.85 to +7.85)"
    assert f"| 100 | 0.001, 0.0005 | 90.00 | 90.00 | 80.00 | 81.00 | {gain} | 81.00 | 82.00 | {gain} |" in text
    assert "adds +1.50 (-4.85 to +7.85) to the difference" in text


def test_every_length_has_every_candidate_and_asam_half_of_it():
    one, two = screening.candidates([1e-3], 100), screening.candidates([1e-3], 800)
    assert [a.label for a in one] == [b.label for b in two]
    assert {(a.length, b.length) for a, b in zip(one, two, strict=True)} == {(100, 800)}
    steps = {a.label: a.training.steps for a in two}
    assert (steps["SMAT"], steps["ASAM, half the steps, rho 0.5"], steps["FT-Muon"]) == (800, 400, 800)


def test_passes_count_asam_twice():
    passes = {one.label: one.passes for one in screening.candidates([1e-3])}
    assert passes["ASAM, rho 0.5"] == 2 * passes["FT"] == 800
    assert passes["ASAM, half the steps, rho 0.5"] == passes["MSAM, rho 0.5"] == passes["SMAT climbing, rho 1"] == 400


@pytest.mark.parametrize(("words", "told"), [
    (["--seeds", "41", "105"], "seed 41 was used before: take another; seed 105 was used before"),
    (["--families", "best"], "family 'best' is unknown, choose from FT, SMAT, ASAM"),
    (["--seeds", "111", "111"], "a seed is named twice"),
])  # fmt: skip
def test_bad_words_are_refused_before_any_work(tmp_path, capsys, words, told):
    with pytest.raises(SystemExit):
        screening.main([str(tmp_path / "out"), *words])
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_seed_of_a_protocol_is_one_of_the_screening():
    widening = digits_onepass.STUDY, digits_lora.STUDY, digits_passes.STUDY
    studies = *(study.protocol for study in widening), digits_methods.PROTOCOL, first_study.PROTOCOL
    seeds = {seed for study in studies for seed in (*study.tuning, *study.evaluation)}
    assert seeds <= screening.USED
    assert not {*screening.SEEDS} & screening.USED


def test_a_trial_states_its_mergers_and_coefficients(tmp_path):
    trial = screening.candidates([1e-3])[0].trial(111)
    mergers = trial.facts()["mergers"]
    assert list(mergers) == ["wa", "ta", "ties", "tsv_merge"]
    assert (mergers["wa"], mergers["ties"]["keep"]) == ({}, 0.5)
    assert trial.facts()["coefs"] == [i / 10 for i in range(1, 21)]
    parts = {one.label: one.trial(111).facts()["suite"] for one in screening.candidates([1e-3]) if one.options}
    suite = trial.facts()["suite"]
    assert parts == {
        "FT, linearised": {**suite, "linearised": True},
        "FT, attention alone": {**suite, "train": "attention"},
    }
    plain = Trial("FT", "digits", trial.method, trial.training, 111)
    assert "coefs" not in plain.facts()
    assert set(plain.facts()["mergers"]) == {"wa", "ta", "ties", "dare", "della"}
    assert trial._replace(mergers=(TaskArithmetic(),)).folder(tmp_path) != trial.folder(tmp_path)
