"""The study: choices from dev alone, test scores at the choice alone, stopped runs resume."""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from benchmarks import by_seed, digits_methods, methods, minilm_methods, readme
from benchmarks import digits as benchmark
from benchmarks.study import by_data
from benchmarks.study import trial as study_trial
from benchmarks.study.trial import Trial, _tick, time_kinds, whole_periods
from benchmarks.study.trials import OUTCOME, outcome, rows_of, run_trial, run_trials
from smat_fn import checkpoint, config, machine, merge
from smat_fn.config import DIGITS, Dare, Ties, Training
from smat_fn.evaluate import Result, Scorer, read_results
from smat_fn.evaluate.statistics import paired
from smat_fn.merge import fisher
from smat_fn.report.tables import main_table, markdown
from smat_fn.scripts.merge import in_memory, settings
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.merge.search.choosing import calibrate
from smat_fn.scripts.merge.subcommands import statistics
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train import loop, training
from smat_fn.suites import digits, load_suite
from smat_fn.suites.digits_base import Examples

METHODS, RATES = ("ft", "smat"), (1e-3, 1e-4)
ONE = RATES[:1], METHODS[1:]
DIGITS_METHODS = digits_methods.PROTOCOL


@dataclass(frozen=True)
class Few(digits.DigitsOptions):
    pretrain_steps: int = 10
    images_per_task: int = 120


@pytest.fixture(scope="module", autouse=True)
def _small():
    """A preset ``small``: two tasks, 60 dev and test images, four steps, three mergers, two learning rates."""
    preset = replace(
        DIGITS,
        training=Training(steps=4, lr=1e-3),
        lr_grid=RATES,
        mergers={name: DIGITS.mergers[name] for name in ("wa", "ta", "della")},
    )
    true = digits.splits
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(config.PRESETS, "small", preset)
        patch.setattr(digits, "DigitsOptions", Few)
        patch.setattr(digits, "TASKS", {task: digits.TASKS[task] for task in ("rot90", "stripes")})
        patch.setattr(digits, "splits", lambda seed: {name: few(part, name) for name, part in true(seed).items()})
        yield


def few(part, name):
    return part if name == "train" else Examples(part.images[:60], part.labels[:60])


def small_protocol(rates=RATES, names=METHODS):
    grids = {method.upper(): methods.grid("small", method, sorted(rates)) for method in names}
    return methods.Protocol("small", "small", grids, tuning=(21,), evaluation=(21,))


def small(work, *asked):
    return benchmark.study(small_protocol(*asked), work, jobs=1)


def preset_trial(preset, method, lr, seed):
    (candidate,) = methods.grid(preset, method, [lr])
    return Trial(method.upper(), preset, *candidate, seed)


def rate(study, method):
    return study.chosen[method.upper()].training.lr


@pytest.fixture(scope="module")
def first(_own_cache, _small, tmp_path_factory):
    """The folder of a study and what it found."""
    work = tmp_path_factory.mktemp("study")
    return work, small(work)


@pytest.fixture(scope="module")
def at_one_rate(_own_cache, _small, tmp_path_factory):
    """As `first`, of one candidate of SMAT."""
    work = tmp_path_factory.mktemp("study")
    return work, small(work, *ONE)


def chosen(work):
    return {
        path.parent.relative_to(work): checkpoint.load_manifest(path.parent)["hyperparameters"].get("coef")
        for path in sorted(work.rglob("merged/*/manifest.json"))
    }


@pytest.mark.slow
def test_every_choice_is_made_without_the_test_split(first, tmp_path, monkeypatch):
    work, study = first
    inputs = load_inputs(*find_inputs(preset_trial("small", "smat", 1e-3, 21).folder(work)))
    sparse = Ties(keep=0.5, aggregate="sum", scope="global"), Dare(drop_prob=0.3)

    def calibrated():
        suite = load_suite("digits", seed=21)
        return [calibrate(config, inputs, Scorer(suite), coef=0.2, seed=0).config for config in sparse]

    before, true = calibrated(), digits.splits

    def scrambled(seed):
        parts = true(seed)
        return parts | {"test": Examples(parts["test"].images, (parts["test"].labels + 1) % 10)}

    monkeypatch.setattr(digits, "splits", scrambled)
    other = small(tmp_path)
    assert other.dev == study.dev
    assert other.chosen == study.chosen
    assert chosen(tmp_path) == chosen(work)
    assert len(chosen(work)) == len(METHODS) * len(RATES) * 3
    assert calibrated() == before
    pairs = list(zip(study.rows, other.rows, strict=True))
    assert all(replace(a, score=0) == replace(b, score=0) for a, b in pairs)
    assert sum(a.score != b.score for a, b in pairs) > len(pairs) / 2


@pytest.mark.slow
def test_a_study_scores_the_chosen_learning_rates_alone(first):
    work, study = first
    protocol = small_protocol()
    assert study.chosen == {label: grid[methods.choose(study.dev[label])] for label, grid in protocol.grids.items()}
    assert {label: len(scores) for label, scores in study.dev.items()} == {"FT": 2, "SMAT": 2}
    facts = study.lines(protocol)
    assert facts["lr"] == {method: rate(study, method) for method in METHODS}
    assert facts["dev"]["ft"] == {"0.0001": study.dev["FT"][0], "0.001": study.dev["FT"][1]}
    # two experts on their own task, three merged models on two tasks
    assert [row.method for row in study.rows] == ["FT"] * (2 + 3 * 2) + ["SMAT"] * (2 + 3 * 2)
    suite = load_suite("digits", seed=21)
    for method in METHODS:
        lr = rate(study, method)
        folder = preset_trial("small", method, lr, 21).folder(work)
        params, _ = checkpoint.load_leaves(folder / "merged" / "ta")
        (row,) = (r for r in study.rows if (r.method, r.model, r.task) == (method.upper(), "ta", "stripes"))
        assert row.score == suite.score(params, "stripes", "test")
        dev = [checkpoint.load_manifest(folder / "merged" / name)["dev"].values() for name in ("wa", "ta", "della")]
        assert math.isclose(facts["dev"][method][f"{lr:g}"][0], sum(sum(scores) / 2 for scores in dev) / 3)


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(at_one_rate, tmp_path, monkeypatch):
    work, study = shutil.copytree(at_one_rate[0], tmp_path / "work"), at_one_rate[1]
    calls = []
    train_run = training.train_run
    monkeypatch.setattr(training, "train_run", lambda *a, **k: calls.append(a[3].out) or train_run(*a, **k))
    assert small(work, *ONE) == study
    assert calls == []
    folder = preset_trial("small", "smat", 1e-3, 21).folder(work)
    (folder / OUTCOME).unlink()
    assert small(work, *ONE) == study
    assert calls == [folder]


@pytest.fixture
def one(_small):
    return preset_trial("small", "smat", 1e-3, 21)


def test_a_trial_is_named_by_all_that_decides_it(one, tmp_path, monkeypatch):
    folder = one.folder(tmp_path)
    others = [
        one._replace(label="other"),
        one._replace(method=replace(one.method, sigma=0.02)),
        one._replace(training=replace(one.training, lr=2e-3)),
        one._replace(training=replace(one.training, optimizer="muon", muon_lr=1e-3)),
        one._replace(seed=22),
        one._replace(preset="digits"),
        one._replace(options=(("images_per_task", 130),)),
    ]
    assert len({trial.folder(tmp_path) for trial in (one, *others)}) == 1 + len(others)
    assert one.folder(tmp_path) == Trial(*one).folder(tmp_path)
    assert str(others[3]) == "SMAT, lr 0.001, muon_lr 0.001, seed 21"
    monkeypatch.setattr(machine, "code", lambda folder=None: "0.1.0+other")
    assert one.folder(tmp_path) not in {folder, *(trial.folder(tmp_path) for trial in others)}
    assert str(others[1]) == "SMAT, lr 0.001, sigma 0.02, seed 21"
    worded = one._replace(method=replace(one.method, noise="laplace", sigma_of="leaf"))
    assert str(worded) == "SMAT, lr 0.001, noise laplace, sigma_of leaf, seed 21"


@pytest.mark.parametrize(
    ("steps", "period", "taken", "counted"), [(12, 1, 12, 11), (12, 4, 12, 8), (12, 11, 12, 11), (12, 30, 31, 30)]
)
def test_whole_periods_are_timed(steps, period, taken, counted):
    assert whole_periods(steps, period) == (taken, counted)


def test_the_seconds_of_a_kind_are_those_of_a_step_and_of_all_scores(one, monkeypatch):
    def train(suite, task, method, short, *, seed, on_step):
        for step in range(short.steps):
            on_step(step, SimpleNamespace(loss=torch.ones(())))

    monkeypatch.setattr(loop, "train_expert", train)
    monkeypatch.setattr(Trial, "load", lambda trial: SimpleNamespace(tasks=("rot90", "stripes")))
    monkeypatch.setattr(study_trial, "_score", lambda suite, task, split: {"dev": 1.0, "test": 100.0}[split])
    climbing = one._replace(method=replace(one.method, climb="both"))
    found = time_kinds([one, climbing], 4, test=True)
    assert found.keys() == {("smat", "adam"), ("smat both", "adam")}
    assert {own.scores for own in found.values()} == {2 * (1 + 2 * (len(merge.COEFS) + 1) + 100 * 4)}
    assert all(own.step > 0 for own in found.values())
    assert {own.scores for own in time_kinds([one], 4).values()} == {2 * (1 + 2 * (len(merge.COEFS) + 1))}


def test_a_step_that_is_timed_ends_when_its_loss_is_there():
    stamps, read = [], []
    _tick(stamps, 0, SimpleNamespace(loss=SimpleNamespace(cpu=lambda: read.append(len(stamps)))))
    assert (read, len(stamps)) == ([0], 1)


@pytest.mark.slow
def test_a_stopped_trial_leaves_nothing_that_looks_finished(one, first, tmp_path, monkeypatch):
    whole = outcome(one, first[0])
    for module, name in ((in_memory, "merge_run"), (training, "train_run")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, stopped)
            with pytest.raises(KeyboardInterrupt):
                run_trial(one, tmp_path, test=False, keep=True)
        assert outcome(one, tmp_path) is None
    again = run_trial(one, tmp_path, test=False, keep=True)
    assert {name: again[name] for name in ("trial", "dev", "coefs", "five")} == {
        name: whole[name] for name in ("trial", "dev", "coefs", "five")
    }


def stopped(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_weights_go_when_all_is_scored_and_scores_are_those_of_kept_weights(first, tmp_path, monkeypatch):
    study = first[1]
    chosen_one = preset_trial("small", "smat", rate(study, "smat"), 21)
    begin = time.perf_counter()
    found = run_trial(chosen_one, tmp_path, test=True, keep=False)
    assert found["training_seconds"] < found["seconds"] < time.perf_counter() - begin + 0.01
    assert rows_of(found) == [row for row in study.rows if row.method == "SMAT"]
    assert not list(tmp_path.rglob(checkpoint.WEIGHTS))
    assert len(list(tmp_path.rglob(checkpoint.MANIFEST))) == 1 + 2 + 3
    monkeypatch.setattr(training, "train_run", stopped)
    assert run_trial(chosen_one, tmp_path, test=True, keep=False) == found


def test_a_failed_trial_does_not_stop_the_others(one, at_one_rate, tmp_path):
    work = shutil.copytree(at_one_rate[0], tmp_path / "work")
    bad = one._replace(label="bad", method=replace(one.method, sigma=-1.0))
    lines = []
    (one.folder(work) / OUTCOME).unlink()
    running = run_trials([bad, one], work, jobs=1, report=lines.append)
    assert next(running)[0] == one
    with pytest.raises(RuntimeError, match=r"bad, lr 0\.001, sigma -1, seed 21: .*sigma is -1"):
        next(running)
    assert outcome(bad, work) is None
    with pytest.raises(ValueError, match="twice"):
        list(run_trials([one, one], work, jobs=1, report=lines.append))


@pytest.fixture
def short(monkeypatch):
    """Statistics of 16 rows, three steps of AdaMerging."""
    monkeypatch.setattr(statistics, "Statistics", partial(statistics.Statistics, rows=16))
    monkeypatch.setattr(settings, "AdaMerging", partial(settings.AdaMerging, steps=3))
    monkeypatch.setattr(settings, "RegMeanPlus", partial(settings.RegMeanPlus, rows=16))


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_mergers_with_data_choose_without_test_and_a_finished_trial_is_kept(one, first, tmp_path, monkeypatch):
    trial, true = one._replace(mergers=by_data.CONFIGS), digits.splits
    found = by_data.run_by_data(trial, tmp_path / "a", test=True, keep=True)
    assert not by_data.is_adapted(found)
    found = by_data.adapt_trial(trial, tmp_path / "a", found, keep=True)
    assert by_data.is_adapted(found)
    assert outcome(trial, tmp_path / "a") == found
    rows = {(row.model, row.task): row.score for row in rows_of(found)}
    experts = {("expert:rot90", "rot90"), ("expert:stripes", "stripes")}
    assert rows.keys() == experts | {(name, task) for name in by_data.SEES for task in ("rot90", "stripes")}
    assert all(scores.keys() == {"rot90", "stripes"} for scores in found["dev"].values())
    # the experts of any other trial of these settings, and the library's own functions on what lies beside them
    stored = {(row.model, row.task): row.score for row in rows_of(run_trial(one, first[0], test=True, keep=True))}
    assert {place: rows[place] for place in experts} == {place: stored[place] for place in experts}
    suite, inputs = load_suite("digits", seed=21), load_inputs(*find_inputs(trial.folder(tmp_path / "a")))
    for name, kind in (("FISHER", "fisher"), ("FISHER_ADAM", "adam")):
        own = {x: load_file(trial.folder(tmp_path / "a") / x / checkpoint.STATISTICS[kind]) for x in inputs.experts}
        merged = fisher(inputs.base, inputs.experts, own, coef=found["coefs"][name])
        assert {task: suite.score(merged, task, "test") for task in suite.tasks} == {
            task: rows[name, task] for task in suite.tasks
        }

    def scrambled(seed):
        parts = true(seed)
        return parts | {"test": Examples(parts["test"].images, (parts["test"].labels + 1) % 10)}

    with monkeypatch.context() as patch:
        patch.setattr(digits, "splits", scrambled)
        running = run_trials([trial], tmp_path / "b", jobs=1, report=print, test=True, run_one=by_data.run_by_data)
        ((_, other),) = running
        other = by_data.adapt_trial(trial, tmp_path / "b", other, keep=False)
    assert {x: other[x] for x in ("dev", "coefs", "facts")} == {x: found[x] for x in ("dev", "coefs", "facts")}
    assert not list((tmp_path / "b").rglob("*.safetensors"))
    assert other["test"] != found["test"]
    monkeypatch.setattr(training, "train_run", stopped)
    running = run_trials([trial], tmp_path / "b", jobs=1, report=print, test=True, run_one=by_data.run_by_data)
    assert list(running) == [(trial, other)]


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_muon_leaves_no_moments_to_merge_by_and_weights_are_deleted(one, tmp_path):
    muon = one._replace(training=replace(one.training, optimizer="muon", muon_lr=1e-3), mergers=by_data.CONFIGS)
    found = by_data.run_by_data(muon, tmp_path, test=False, keep=False)
    assert found["dev"].keys() == {"FISHER", "REG_MEAN", "REG_MEAN_PLUS"}
    assert found["test"] is None
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("best", "edge"), [(1.4, ""), (2.6, ""), (9.0, "largest")])
def test_a_merged_model_is_stretched_to_the_best_dev_score(best, edge):
    class Line:
        base, tasks = {"w": torch.tensor([1.0, 2.0])}, ("a", "b")

        def score(self, params, task, split):
            assert split == "dev"
            return 50 - float(params["w"][0] - 1 - 2 * best) ** 2  # the merged w is 3, so that w - 1 is 2 gamma

    found = by_data.stretched(Line(), {"w": torch.tensor([3.0, 3.0])})
    assert found.coef == (best if not edge else 4.0)  # ten steps beyond 2
    assert found.facts == {"edge": edge}
    torch.testing.assert_close(found.params["w"], torch.tensor([1 + 2 * found.coef, 2 + found.coef]))


@pytest.mark.slow
def test_trials_in_two_processes_agree(tmp_path):
    # processes start anew and see no patch: the true suite
    trial = preset_trial("digits", "ft", 1e-3, 7)
    trials = [trial._replace(label=label, training=replace(trial.training, steps=2)) for label in ("a", "b")]
    lines = []
    found = {t.label: found for t, found in run_trials(trials, tmp_path, jobs=2, report=lines.append, test=True)}
    for name in ("trial", "dev", "coefs", "five"):
        assert found["a"][name] == found["b"][name]
    assert [row.score for row in rows_of(found["a"])] == [row.score for row in rows_of(found["b"])]
    assert "2 trials in 2 processes" in lines[1]
    assert len(lines) == 4
    assert {t.label: f for t, f in run_trials(trials, tmp_path, jobs=2, report=lines.append, test=True)} == found
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("protocol", "number"), [(DIGITS_METHODS, 6), (minilm_methods.PROTOCOL, 4)], ids=["digits", "minilm"]
)
def test_every_method_has_equally_many_candidates_and_smat_its_default(protocol, number):
    preset = config.PRESETS[protocol.preset]
    assert {label: len(grid) for label, grid in protocol.grids.items()} == dict.fromkeys(protocol.grids, number)
    default = methods.Candidate(preset.methods["smat"], replace(preset.training, lr=preset.lr["smat"]))
    assert default in protocol.grids["SMAT"]
    assert not set(protocol.tuning) & set(protocol.evaluation)
    assert set(protocol.kept) <= set(protocol.evaluation)
    assert methods.choose([[1.0, 3.0], [2.0, 2.0], [0.0, 3.0]]) == 0


def test_evaluation_takes_the_stored_choices_and_ablates_smats(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    protocol = DIGITS_METHODS
    with pytest.raises(ValueError, match="run the tuning first"):
        methods.frozen(protocol)
    chosen = {label: grid[3].facts() for label, grid in protocol.grids.items()}
    file = tmp_path / methods.RESULTS / "digits_methods_tuning.json"
    checkpoint.write_text(file, json.dumps({"chosen": chosen}))
    found = methods.frozen(protocol)
    assert list(found) == list(protocol.labels)
    assert {label: found[label] for label in protocol.grids} == {label: g[3] for label, g in protocol.grids.items()}
    smat, training = found["SMAT"]
    assert found["SMAT without Perturb"] == (replace(smat, sigma=0.0), training)
    assert found["SMAT without Scale"] == (replace(smat, alpha_min=1.0), training)
    assert found["SMAT without Mask"] == (replace(smat, drop_prob=0.0), training)
    chosen["FT"]["training"]["lr"] = 0.3
    checkpoint.write_text(file, json.dumps({"chosen": chosen}))
    with pytest.raises(ValueError, match="the choice of FT is not in its grid"):
        methods.frozen(protocol)


def test_a_summary_covers_the_complete_seeds_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(methods, "ROOT", tmp_path)
    protocol, labels = DIGITS_METHODS, DIGITS_METHODS.labels
    models = ("expert:a", "wa", "ta", "ties", "dare", "della")
    candidate = protocol.grids["FT"][0]

    def finished(seed, place):
        label = labels[place]
        trial = protocol.trial(label, candidate, seed)
        rows = [Result(label, m, "a", "test", 50.0 + place * (seed - 40) + (m == "expert:a"), seed) for m in models]
        costs = {"five": 1.0, "coefs": {}, "training_seconds": 2.0, "seconds": 3.0, "peak_bytes": None}
        return trial, {"label": label, "trial": trial.facts(), "test": [asdict(row) for row in rows], **costs}

    places = range(len(labels))
    running = [finished(s, p) for p in places for s in (42, 41)] + [finished(43, p) for p in places[1:]]
    monkeypatch.setattr(methods, "run_trials", lambda *args, **options: running)
    monkeypatch.setattr(methods, "frozen", lambda protocol: dict.fromkeys(labels, candidate))
    methods.evaluate(protocol, tmp_path, 1, {"commit": "abc"})
    result = json.loads((tmp_path / methods.RESULTS / "digits_methods.json").read_text())
    assert (result["commit"], result["seeds"]) == ("abc", [41, 42])
    assert result["paired"]["SMAT"]["differences"] == [1.0, 2.0]
    assert result["test"]["SMAT"]["Drop"] == [1.0, 1.0]
    assert len(labels) * 2 * len(models) == len(read_results(tmp_path / methods.RESULTS / "digits_methods.jsonl"))
    runs = (tmp_path / methods.RESULTS / "digits_methods_runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in runs] == [41, 42] * len(labels)


def test_a_trial_run_leaves_the_results_of_the_protocol_alone(tmp_path):
    protocol = minilm_methods.trial_run(minilm_methods.PROTOCOL, tmp_path, steps=4)
    assert protocol.file(".json") == tmp_path / "minilm_methods.json"
    assert {c.training.steps for grid in protocol.grids.values() for c in grid} == {4}
    seeds = {*protocol.tuning, *protocol.evaluation, *protocol.kept}
    assert not seeds & {*minilm_methods.PROTOCOL.tuning, *minilm_methods.PROTOCOL.evaluation}
    assert minilm_methods.PROTOCOL.file(".json") == methods.ROOT / "benchmarks/results/minilm_methods.json"


def test_tuning_takes_some_tasks_and_evaluation_all():
    protocol = minilm_methods.PROTOCOL._replace(options=(("model", "m"), ("data", "d")))
    candidate = protocol.grids["SMAT"][0]
    assert all(c.training.steps == 600 for grid in protocol.grids.values() for c in grid)
    tuned, scored = (protocol.trial("SMAT", candidate, 61, tuning=tuning).facts()["suite"] for tuning in (True, False))
    assert tuned == {**scored, "tasks": ("trec", "banking77", "clinc150")}
    assert "tasks" not in scored


def test_paired_differences_have_the_interval_of_students_t():
    first, second = [81.2, 79.9, 82.4, 80.0], [82.0, 80.1, 83.9, 79.7]
    got = paired(first, second)
    interval = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert got["differences"] == [b - a for a, b in zip(first, second, strict=True)]
    assert got["interval"] == pytest.approx([interval.low, interval.high], rel=1e-12)
    assert got["sd"] == pytest.approx(stats.tstd(got["differences"]), rel=1e-12)
    # two seeds: t with one degree of freedom is Cauchy, its 97.5 % point tan(0.475 pi)
    got = paired([0.0, 0.0], [1.0, 4.0])
    assert (got["mean"], got["sd"]) == (2.5, math.sqrt(4.5))
    assert got["interval"] == pytest.approx(
        [2.5 - 1.5 * math.tan(0.475 * math.pi), 2.5 + 1.5 * math.tan(0.475 * math.pi)]
    )
    assert paired([3.0], [5.0]) == {"differences": [2.0], "mean": 2.0}
    with pytest.raises(ValueError, match="shorter"):
        paired([1.0, 2.0], [1.0])


def test_the_benchmarks_paragraph_says_what_was_found():
    result = {
        "command": "python -m benchmarks digits",
        "hardware": "3 cores of Abacus",
        "seeds": [4, 5],
        "lr": {"ft": 2.5e-4, "smat": 5e-4},
        "paired": {"differences": [1.0, -0.5], "mean": 0.25, "sd": 1.0606, "interval": [-9.28, 9.78]},
    }
    assert benchmark.paragraph(result, "| table |\n") == (
        "| table |\n\nTest score, mean over four tasks and 2 seeds ± standard deviation; learning rates chosen on dev: "
        "FT 0.00025, SMAT 0.0005. SMAT - FT of the five-merger mean by seed: +1.00, -0.50; mean +0.25, standard "
        "deviation 1.06, 95 % interval -9.28 to +9.78 (optimistic: seeds re-split the same images). From `python -m "
        "benchmarks digits` on 3 cores of Abacus, by [protocols/digits.md](protocols/digits.md).\n"
    )


MARKS = "<!-- digits: begin -->", "<!-- digits: end -->"


def test_the_paragraph_goes_between_its_marks():
    begin, end = MARKS
    page = f"# a\n{begin}\nold\n{end}\nrest\n"
    assert readme.between(page, "digits", "new\n") == f"# a\n{begin}\nnew\n{end}\nrest\n"
    for lost in (page.replace(begin, ""), page.replace(end, ""), page + begin, f"{end}{begin}"):
        with pytest.raises(ValueError, match="the page must have the lines"):
            readme.between(lost, "digits", "new\n")


def test_the_sentence_on_merging_names_the_mergers_of_its_least_and_largest_ratio():
    names = "time ratio", "command ratio", "memory ratio"
    rows = [{"merger": name, **dict.fromkeys(names, ratio), "mergekit s": 1} for name, ratio in (
        ("della", 5), ("ties, threshold per tensor", 3), ("dare_ties", 9), ("wa", 4)
    )]  # fmt: skip
    facts = {"mergekit": "0.1", "experts": 2, "MB of a model": 1, "hardware": "3 cores of Abacus"}
    assert " takes 1/3.0 (TIES) to 1/9 (DARE-TIES) of the time " in readme.merge_sentence({"rows": rows, **facts})


def test_a_benchmark_writes_results_table_and_readme(tmp_path, monkeypatch, capsys):
    models = ("expert:a", "wa", "ta", "ties", "dare", "della")
    rows = [
        Result(method, model, "a", "test", 50.0 + seed + bonus, seed)
        for method, bonus in (("FT", 0), ("SMAT", 2)) for model in models for seed in (21, 22, 23)
    ]  # fmt: skip
    grid = benchmark.PROTOCOL.grids["FT"]
    study = benchmark.Study({"FT": [[1.0], [2.0], [0.0]]}, {"FT": grid[1]}, rows)
    asked = []
    monkeypatch.setattr(benchmark, "study", lambda *args, **options: asked.append((args, options)) or study)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / benchmark.PAGE).write_text("\n".join(MARKS))
    benchmark.main(tmp_path / "work")
    ((args, options),) = asked
    assert args == (benchmark.PROTOCOL, tmp_path / "work")
    assert options == {"jobs": 2}
    assert (list(benchmark.PROTOCOL.grids), benchmark.PROTOCOL.evaluation) == (["FT", "SMAT"], (21, 22, 23))
    result = benchmark.json.loads((tmp_path / "benchmarks/results/digits.json").read_text())
    assert result["dev"] == {"ft": {"0.000125": [1.0], "0.00025": [2.0], "0.0005": [0.0]}}
    assert result["lr"] == {"ft": 2.5e-4}
    assert result["test"]["SMAT"]["Avg"] == [73.0, 74.0, 75.0]
    assert result["paired"]["differences"] == [2.0, 2.0, 2.0]
    assert result["versions"]["torch"] == version("torch")
    assert (tmp_path / benchmark.PAGE).read_text() == readme.between(
        "\n".join(MARKS), "digits", benchmark.paragraph(result, markdown(main_table(rows)))
    )
    assert "mean +2.00" in capsys.readouterr().out


def test_the_calibration_coefficients_are_those_of_the_papers_families():
    assert merge.CALIBRATION_COEFS[DIGITS.family] == {"ties": 0.2, "dare": 0.2, "della": 1.0}


def test_the_tables_of_the_pages_are_those_of_the_stored_results():
    for name, (place, text) in readme.TABLES.items():
        page = (readme.ROOT / place).read_text(encoding="utf-8")
        result = readme.stored(readme.SOURCES.get(name, name))
        assert readme.between(page, name.replace("_", "-"), text(result)) == page


def test_a_figure_has_every_seed_and_a_panel_for_each_study(monkeypatch):
    drawn = []
    monkeypatch.setattr(by_seed, "png", lambda figure: drawn.append(figure) or b"")
    one = {"A": [1.0, 2.0, 3.0], "B": [-1.0, 1.0, 0.0], "C": [5.0, 5.0, 5.0]}
    studies = {"one": one, "two": {"A": [4.0]}}
    by_seed.by_seed({
        title: {"seeds": own["A"], "paired": {label: {"differences": values} for label, values in own.items()}}
        for title, own in studies.items()
    }, ["A", "B"])  # fmt: skip
    (figure,) = drawn
    assert [axes.get_title() for axes in figure.axes] == ["one, 3 seeds", "two, 1 seeds"]
    dots = [[list(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"] for axes in figure.axes]
    assert dots == [[[1.0, 2.0, 3.0], [-1.0, 1.0, 0.0]], [[4.0]]]  # no C, which was not asked for
    bars = [line.get_xdata() for line in figure.axes[0].lines if line.get_solid_capstyle() == "butt"]
    assert bars[0] == pytest.approx(paired([0.0] * 3, [1.0, 2.0, 3.0])["interval"])


def test_a_table_of_one_pass_has_the_methods_and_mergers_that_there_are(monkeypatch):
    result = readme.stored("text_onepass")
    labels, gone = ("FT", "SMAT", "SMAT climbing", "ASAM"), ("DARE", "DELLA", "ISO_C")
    test = {label: {name: own for name, own in result["test"][label].items() if name not in gone} for label in labels}
    seconds = {label: dict.fromkeys(result["seeds"], 1.0) for label in labels}
    monkeypatch.setattr(readme, "training_seconds", lambda name: seconds)
    lines = readme.TABLES["smollm2_text"][1]({**result, "test": test}).splitlines()
    heads = [line for line in lines if line.startswith("| Method")]
    assert "| Mean of five mergers | - FT (95 %) | - ASAM (95 %) | Training time x FT |" in heads[0]
    assert heads[1] == "| Method | WA | TA | TIES | TSV_MERGE | WUDI |"
    assert len([line for line in lines if line.startswith("|")]) == 2 * (2 + len(labels))
    counts = {"FT": [1, 2, 3], "SMAT": [1] * 12}
    monkeypatch.setattr(readme, "stored", lambda name: {"dev": counts} if name == "a_tuning" else {})
    assert readme.candidates("a") == "3 to 12 candidates"
    counts["SMAT"] = counts["FT"]
    assert readme.candidates("a") == "3 candidates"
