"""Grids of candidates that widen at their edges, and the forecast of a study's minutes."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import digits_lora, digits_onepass, digits_passes, methods, studies
from benchmarks.methods import Candidate
from benchmarks.study import asked, first_rows, grids
from benchmarks.study.grids import Axis, Grid
from benchmarks.study.trial import Seconds
from smat_fn.config import DIGITS, Training
from smat_fn.evaluate import Result
from smat_fn.evaluate.results import EXPERT

SMAT = DIGITS.methods["smat"]
GRID = Grid(SMAT, DIGITS.training, Axis("lr", (1e-4, 2e-4)), Axis("sigma", (0.01, 0.02, 0.04)))


def place(lr, sigma):
    return Candidate(replace(SMAT, sigma=sigma), replace(DIGITS.training, lr=lr))


def test_candidates_are_all_combinations_in_ascending_order():
    assert GRID.candidates() == [place(lr, sigma) for lr in (1e-4, 2e-4) for sigma in (0.01, 0.02, 0.04)]


def test_the_candidates_of_a_cross_share_one_value_with_its_center_and_an_arm_grows():
    cross = Grid(SMAT, DIGITS.training, Axis("lr", (1e-4, 2e-4, 4e-4)), Axis("sigma", (0.01, 0.02)), (2e-4, 0.01))
    own = [place(1e-4, 0.01), place(2e-4, 0.01), place(2e-4, 0.02), place(4e-4, 0.01)]
    assert cross.candidates() == own
    assert cross.widened(place(2e-4, 0.02)).candidates() == [*own[:3], place(2e-4, 0.04), own[3]]


@pytest.mark.parametrize(
    ("values", "chosen", "wider"),
    [
        ((1e-4, 2e-4, 4e-4), 2e-4, (1e-4, 2e-4, 4e-4)),
        ((1e-4, 2e-4, 4e-4), 1e-4, (5e-5, 1e-4, 2e-4, 4e-4)),
        ((1e-4, 2e-4, 4e-4), 4e-4, (1e-4, 2e-4, 4e-4, 8e-4)),
        ((200, 400), 200, (100, 200, 400)),
        ((400,), 400, (400,)),
        (("ema:0.98", "swa:25%"), "ema:0.98", ("ema:0.98", "swa:25%")),
    ],
)
def test_an_axis_grows_beyond_the_edge_that_was_chosen(values, chosen, wider):
    assert Axis("lr", values).widened(chosen) == Axis("lr", wider)


def test_an_axis_stays_below_its_largest_value():
    axis = Axis("alpha_min", (0.5, 1.0), most=1.0)
    assert axis.widened(1.0) == axis
    assert axis.widened(0.5).values == (0.25, 0.5, 1.0)


def test_tuning_widens_until_no_choice_is_at_an_edge_and_the_choices_are_read_back(monkeypatch, tmp_path):
    study = grids.widening(digits_onepass.STUDY.protocol._replace(name=str(tmp_path / "try")), {"SMAT": GRID})
    asked, best = [], iter([place(2e-4, 0.02), place(4e-4, 0.02), place(4e-4, 0.02)])

    def tune(protocol, folder, jobs, facts):
        asked.append(protocol.grids["SMAT"])
        chosen = next(best)
        assert chosen in asked[-1]
        protocol.file("_tuning.json").write_text(json.dumps({"chosen": {"SMAT": chosen.facts()}}))
        return {"SMAT": chosen}

    monkeypatch.setattr(grids, "tune", tune)
    grids.tune_widening(study.protocol, study.grids, tmp_path, 1, {})
    assert [sorted({c.training.lr for c in found}) for found in asked] == [
        [1e-4, 2e-4],
        [1e-4, 2e-4, 4e-4],
        [1e-4, 2e-4, 4e-4, 8e-4],
    ]
    assert grids.stored_choices(study.protocol, study.grids) == {"SMAT": [place(4e-4, 0.02)]}


def test_choices_of_adapters_are_read_back(monkeypatch, tmp_path):
    study = digits_lora.STUDY.protocol._replace(name=str(tmp_path / "try"))
    chosen = {label: grid.candidates()[-1] for label, grid in digits_lora.GRIDS.items()}
    facts = {label: candidate.facts() for label, candidate in chosen.items()}
    study.file("_tuning.json").write_text(json.dumps({"chosen": facts}))
    read = grids.stored_choices(study, digits_lora.GRIDS)
    assert read == {label: [one] for label, one in chosen.items()}
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    assert methods.frozen(study._replace(grids=read)) == chosen


def test_a_choice_that_is_still_at_an_edge_ends_the_widening(monkeypatch, tmp_path):
    number = []

    def tune(protocol, folder, jobs, facts):
        number.append(len(protocol.grids["SMAT"]))
        return {"SMAT": protocol.grids["SMAT"][0]}

    monkeypatch.setattr(grids, "tune", tune)
    study = grids.widening(digits_onepass.STUDY.protocol, {"SMAT": GRID})
    grids.tune_widening(study.protocol, study.grids, tmp_path, 1, {})
    assert number == [2 * 3, 3 * 4, 4 * 5]


def test_a_study_without_plain_fine_tuning_has_scores_and_no_differences():
    study = studies.study("vit_length", "/model", "/data", {}).protocol
    assert {(c.training.steps, c.training.lr) for (c,) in study.grids.values()} == {
        (steps, rate) for steps in (200, 400, 800, 1600) for rate in (1e-4, 2e-4)
    }
    rows = [
        Result(label, model, "DTD", "test", 50.0 + seed, seed)
        for label in study.grids
        for seed in (1, 2)
        for model in (f"{EXPERT}DTD", *(config.name for config in study.mergers))
    ]
    found = methods.summary(study.labels, rows, [config.name.upper() for config in study.mergers])
    assert found["paired"] == {}
    assert methods.text(found["paired"]) == ""
    assert found["test"].keys() == study.grids.keys()
    assert all(line["All"] == [51.0, 52.0] for line in found["test"].values())


def test_every_method_of_a_study_has_as_many_candidates_and_no_seed_of_another():
    every = {name: studies.study(name, "/model", "/data", {}) for name in studies.BACKBONES}
    every |= {"digits": digits_onepass.STUDY, "adapters": digits_lora.STUDY, "passes": digits_passes.STUDY}
    seen = set()
    for study in every.values():
        assert {len(candidates) for candidates in study.protocol.grids.values()} in ({9}, {5}, {3}, {1})
        own = {*study.protocol.tuning, *study.protocol.evaluation}
        assert len(own) == len(study.protocol.tuning) + len(study.protocol.evaluation)
        again = {*every["smollm2_text"].protocol.tuning} if study is every["smollm2_text_strengths"] else set()
        assert own & seen == again  # tuned further on the seed where its learning rate was chosen
        seen |= own


def test_mergers_beside_the_eight_are_scored_in_the_evaluation_and_enter_no_mean(tmp_path, monkeypatch):
    protocol = studies.study("text", "/model", "/data", {}).protocol
    candidate = protocol.grids["FT"][0]
    tuning, evaluation = (protocol.trial("FT", candidate, 1, tuning=stage) for stage in (True, False))
    assert tuning.facts()["suite"]["tasks"] == ("trec", "banking77", "clinc150")
    assert "tasks" not in evaluation.facts()["suite"]
    eight, every = ([config.name for config in trial.merging()] for trial in (tuning, evaluation))
    assert len(eight) == 8
    assert every[:8] == eight
    assert len(set(every)) == len(every) == 19
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    (tmp_path / methods.RESULTS).mkdir(parents=True)
    names = [*every, f"{EXPERT}trec"]
    rows = [Result("FT", name, "trec", "test", 10.0 if name in eight else 90.0, 1) for name in names]
    found = {"test": [asdict(row) for row in rows], "label": "FT", "trial": {**candidate.facts(), "seed": 1}}
    found |= {name: None for name in ("five", "coefs", "training_seconds", "seconds", "peak_bytes")}
    methods.publish(protocol._replace(grids={"FT": [candidate]}), {(1, "FT"): found}, {})
    stored = json.loads(protocol.file(".json").read_text())
    assert stored["test"]["FT"]["All"] == [10.0]
    assert stored["test"]["FT"]["CART"] == [90.0]


def test_a_backbone_may_have_fewer_candidates_and_mergers():
    found = studies.study("smollm2_text", "/model", "/data", {}).protocol
    assert list(found.grids) == ["FT", "SMAT", "SMAT climbing", "MSAM", "ASAM", "ASAM, half the steps"]
    for candidates in found.grids.values():
        assert [one.training.lr for one in candidates] == [5e-4, 1e-3, 2e-3]
        assert len({(one.method, one.training.steps) for one in candidates}) == 1
    assert [getattr(own[0].method, "rho", None) for own in found.grids.values()] == [None, None, *[0.5] * 4]
    assert [own[0].training.steps for own in found.grids.values()] == [125] * 5 + [62]
    assert [merger.name for merger in found.mergers] == ["wa", "ta", "ties", "tsv_merge", "wudi"]
    assert found.others == ()


def test_strengths_are_tuned_at_one_learning_rate_but_ft_whose_rates_are_finer():
    found = {
        label: grid for label, grid in studies.study("smollm2_text_strengths", "/model", "/data", {}).grids.items()
    }
    tried = {label: [(one.training.lr, one.method) for one in grid.candidates()] for label, grid in found.items()}
    assert [lr for lr, _ in tried.pop("FT")] == pytest.approx([7e-4, 1e-3, 1.4e-3])
    assert {lr for own in tried.values() for lr, _ in own} == {1e-3}
    assert [method.alpha_min for _, method in tried["SMAT"]] == [0.25, 0.5, 1.0]
    assert [method.rho for _, method in (*tried["MSAM"], *tried["ASAM"])] == [0.125, 0.25, 0.5, 0.25, 0.5, 1.0]
    largest = found["SMAT"].candidates()[-1]
    assert found["SMAT"].widened(largest) == found["SMAT"]  # no alpha_min above 1
    wider = found["MSAM"].widened(found["MSAM"].candidates()[0])
    assert [one.method.rho for one in wider.candidates()] == [0.0625, 0.125, 0.25, 0.5]


def test_without_seeds_of_tuning_the_one_candidate_of_each_method_is_evaluated(tmp_path, monkeypatch):
    study = studies.study("smollm2_trace", "/model", "/data", {})
    own = study.protocol
    assert list(own.grids) == ["FT", "SMAT", "SMAT climbing", "ASAM", "ASAM, half the steps"]
    assert {(len(found), found[0].training.lr) for found in own.grids.values()} == {(1, 1e-4)}
    assert [found[0].training.steps for found in own.grids.values()] == [120] * 4 + [60]
    called = []
    monkeypatch.setattr(grids, "evaluate", lambda *given: called.append(given))
    monkeypatch.setattr(grids, "tune_widening", None)
    study.run(tmp_path, 2, {})
    chosen = {label: found[0] for label, found in own.grids.items()}
    assert called == [(own, tmp_path, 2, {}, chosen)]
    with pytest.raises(ValueError, match="smollm2_trace_onepass has no tuning: leave --only out"):
        study.run(tmp_path, 2, {}, "tuning")


def test_labelled_texts_are_asked_for_their_class(tmp_path, monkeypatch):
    given = {"codes": (["b", "a"], [1, 0]), "names": (["x ", "y"], ["first_one", "other"])}
    for task, (texts, labels) in given.items():
        (tmp_path / task).mkdir()
        rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
        for split in ("train", "dev", "test"):
            (tmp_path / task / f"{split}.json").write_text(json.dumps(rows * 2))
    monkeypatch.setattr(asked, "TASKS", {"codes": asked.Asked("Kind", ("no", "yes")), "names": asked.Asked("Name")})
    monkeypatch.setattr(asked, "ROWS", {"dev": 3})
    made = asked.write_rows(str(tmp_path), tmp_path / "made")
    found = {
        (task, split): json.loads((made / task / f"{split}.json").read_text())
        for task in given
        for split in ("train", "dev", "eval")
    }
    codes = [{"prompt": "Text: b\nKind:", "answer": "yes"}, {"prompt": "Text: a\nKind:", "answer": "no"}]
    names = [{"prompt": "Text: x\nName:", "answer": "first one"}, {"prompt": "Text: y\nName:", "answer": "other"}]
    assert found["codes", "train"] == found["codes", "eval"] == codes * 2
    assert found["codes", "dev"] == (codes * 2)[:3]
    assert found["names", "train"] == names * 2


def test_a_study_may_score_the_first_rows_alone(tmp_path):
    (tmp_path / "given/task").mkdir(parents=True)
    long, short = {"prompt": "x" * 2001, "answer": "é"}, {"prompt": "x" * 2000, "answer": "é"}
    for split in ("train", "dev", "eval"):
        (tmp_path / f"given/task/{split}.json").write_text(json.dumps([long, *[short] * 201]))
    made = first_rows.write_rows(str(tmp_path / "given"), tmp_path / "made") / "task"
    found = {split: json.loads((made / f"{split}.json").read_text()) for split in ("train", "dev", "eval")}
    assert found == {"train": [long, *[short] * 201], "dev": [short] * 100, "eval": [short] * 200}


def test_a_forecast_multiplies_the_seconds_of_a_trial(monkeypatch):
    protocol = studies.study("vit", "/model", "/data", {}).protocol

    def seconds(trials, *, test):  # of 300 steps and of scores
        assert test == all("tasks" not in dict(trial.options) for trial in trials)
        slower = {"asam": 2, "smat both": 3}
        return {
            trial.kind(): Seconds(slower.get(trial.kind()[0], 1) * (60 if test else 20) / 300, 60 if test else 10)
            for trial in trials
        }

    monkeypatch.setattr(studies, "time_kinds", seconds)
    lines = studies.forecast(protocol, jobs=2).splitlines()
    assert lines == [
        "FT: 2.0 min a trial, 1.5 min of tuning",  # three candidates, half a minute each
        "SMAT: 2.0 min a trial, 1.5 min of tuning",
        "SMAT climbing: 4.0 min a trial, 3.5 min of tuning",
        "MSAM: 2.0 min a trial, 1.5 min of tuning",
        "ASAM: 3.0 min a trial, 2.5 min of tuning",
        "ASAM, half the steps: 2.0 min a trial, 1.5 min of tuning",
        # 12 / 2, 3 * 15 / 2
        "in 2 processes, if they do not slow each other down, without merging: tuning 6 min, evaluation 22 min",
    ]
    once = studies.forecast(protocol._replace(tuning=()), jobs=2).splitlines()
    assert once[0] == "FT: 2.0 min a trial, 0.0 min of tuning"


def test_results_name_the_gpu_that_suites_take(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    found = []
    monkeypatch.setattr(grids.Widening, "run", lambda own, folder, jobs, facts, only: found.append(facts))
    studies.main(tmp_path, name="text", model="/model", data="/data")
    assert "one NVIDIA X (" in found[0]["hardware"]


@pytest.mark.parametrize(("name", "gpu", "rounds"), [("vit", True, True), ("vit", False, False), ("text", True, False)])
def test_matrix_products_are_rounded_on_a_gpu_where_the_protocol_says_so(tmp_path, monkeypatch, name, gpu, rounds):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(grids.Widening, "run", lambda *given: None)
    monkeypatch.setattr(studies.os, "environ", dict(studies.os.environ))
    studies.main(tmp_path, name=name, model="/model", data="/data")
    assert chosen == ["high"] * rounds
    assert ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in studies.os.environ) == rounds


def test_a_trial_run_is_on_a_seed_of_no_stage_and_writes_into_its_folder(tmp_path):
    study = studies._trial_run(studies.study("smollm2_text", "/model", "/data", {}), tmp_path, 3)
    assert study.protocol.tuning == study.protocol.evaluation == (studies.TRIAL_SEED,)
    assert study.protocol.file(".json").parent == tmp_path
    assert all(c.training.steps == 3 for found in study.protocol.grids.values() for c in found)
    assert Training(3, 2e-5) != study.protocol.grids["FT"][0].training
