"""The analyses as a user runs them on a small digits suite: what they write, and that it is what the library gives."""

import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file

from smat_fn import analyses, checkpoint, merge, tree
from smat_fn.analyses import plots as drawing
from smat_fn.analyses import results as of_results
from smat_fn.config import DIGITS, PRESETS, Training
from smat_fn.models import pretrained
from smat_fn.report import plots, tables
from smat_fn.scripts import run_folder
from smat_fn.scripts.analyse import commands, pictures, predictions, scores, weights
from smat_fn.scripts.analyse import runs as reading
from smat_fn.scripts.commands import eval as command
from smat_fn.scripts.evaluate import evaluation, models, outputs
from smat_fn.scripts.merge import in_memory
from smat_fn.scripts.merge.experts import inputs
from smat_fn.scripts.merge.experts import suite as scoring
from smat_fn.scripts.merge.experts.inputs import load_inputs
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite
from smat_fn.suites.digits import Digits
from smat_fn.types import Micro

from ..scripts.conftest import few_scored
from .conftest import assert_effects

ROOT = Path(__file__).parents[2]
RECIPE = {"seed": 21, "pretrain_steps": 10, "images_per_task": 120}
TASKS, COEF = ("rot90", "mirror", "stripes"), 0.4


@pytest.fixture(scope="module", autouse=True)
def _few_scored():
    with few_scored():
        yield


ONE, TWO, THREE = map(Path, ("one", "two", "three"))
AN_ANALYSIS = [({"threads": 3}, {"threads": 3}), ({"out": Path("elsewhere")}, {"out": Path("elsewhere")})]
OF_SUITE = ({"suite_options": {"device": "cuda"}}, {"options": {"device": "cuda"}})
ANSWERS = {"mask_prompt": True, "truncate": "prompt-middle"}
ANALYSES = {
    scores.experts_curve: (scores.ExpertsCurve(runs=(ONE,)), [
        *AN_ANALYSIS, OF_SUITE,
        ({"runs": (ONE, TWO)}, {"runs": [ONE, TWO]}),
        ({"merger": "dare"}, {"chosen": ("dare", None, None)}),
        ({"coef": (0.2,)}, {"chosen": ("ta", 0.2, None)}),
        ({"preset": "lm"}, {"chosen": ("ta", None, "lm")}),
        ({"seed": 5}, {"searched": (5, None), "seed": 5}),
        ({"split": "dev"}, {"scored": ("dev", None), "reference": "dev"}),
        ({"memory": 3}, {"searched": (0, 3 << 20), "scored": ("test", 3 << 20)}),
    ]),
    scores.replacement: (scores.Replacement(ft=(ONE,), other=(TWO,)), [
        *AN_ANALYSIS, OF_SUITE,
        ({"ft": (THREE,)}, {"runs": [THREE, TWO]}),
        ({"other": (THREE,)}, {"runs": [ONE, THREE]}),
        ({"coef": 0.7}, {"coef": 0.7}),
        ({"split": "dev"}, {"scored": ("dev", None), "reference": "dev"}),
        ({"memory": 3}, {"scored": ("test", 3 << 20)}),
    ]),
    scores.gains: (scores.Gains(runs=(ONE,)), [
        *AN_ANALYSIS, OF_SUITE,
        ({"runs": (ONE, TWO)}, {"runs": [ONE, TWO]}),
        ({"split": "dev"}, {"split": "dev", "table": "dev"}),
    ]),
    weights.landscape: (weights.Landscape(ft=ONE, points=2), [
        *AN_ANALYSIS,
        ({"suite_options": {"truncate": "end"}}, {"options": {**ANSWERS, "truncate": "end"}}),
        ({"suite_options": {"model": "T5"}}, {"options": {"model": "T5"}}),
        ({"ft": TWO}, {"runs": [TWO]}),
        ({"methods": (TWO,)}, {"runs": [ONE, TWO]}),
        ({"tasks": ("a",)}, {"tasks": "a"}),
        ({"coef": 0.7}, {"coef": 0.7}),
        ({"a": (0.0, 3.0)}, {"a": [0, 1, 3]}),
        ({"b": (-1.0, 2.0)}, {"b": [-1, 0, 2]}),
        ({"points": 3}, {"b": [-1, 0, 1, 3]}),
        ({"batches": 2}, {"samples": (2, 0)}),
        ({"seed": 5}, {"samples": (8, 5)}),
        ({"memory": 3}, {"memory": 3 << 20}),
    ]),
    weights.diagnose: (weights.Diagnose(run=ONE), [
        *AN_ANALYSIS, OF_SUITE,
        ({"run": TWO}, {"runs": [TWO]}),
        ({"coef": 0.7}, {"coef": 0.7}),
        ({"sigma": 0.5}, {"unmoved": 0.5, "rows": [(2.0, 5.0)], "origin": "given"}),
    ]),
    predictions.disentanglement: (predictions.Disentanglement(runs=(ONE,), points=2), [
        *AN_ANALYSIS, OF_SUITE,
        ({"runs": (ONE, TWO)}, {"runs": [ONE, TWO], "pairs": ["ab", "ac", "bc"] * 2}),
        ({"tasks": ("c", "a")}, {"pairs": ["ac"]}),
        ({"coef": 0.7}, {"points": [(-1, -1), (-1, 2), (2, -1), (2, 2), (0.7, 0.7)]}),
        ({"a": (0.0, 0.3)}, {"points": [(0, 0), (0, 0.3), (0.3, 0), (0.3, 0.3)]}),
        ({"points": 3}, {"points": [*product((-1, 0.5, 2), repeat=2), (0.3, 0.3)]}),
        ({"batches": 2}, {"samples": (2, 0)}),
        ({"seed": 5}, {"samples": (8, 5)}),
        ({"memory": 3}, {"memory": 3 << 20}),
    ]),
    pictures.interference: (pictures.Interference(runs=(ONE,)), [
        *AN_ANALYSIS,
        ({"runs": (TWO,)}, {"drawn": (TWO, [TWO], "error")}),
        ({"runs": (), "experts": (ONE, TWO), "base": THREE}, {"drawn": (THREE, [ONE, TWO], "error")}),
        ({"runs": (), "base": THREE, "experts": (TWO,)}, {"drawn": (THREE, [TWO], "error")}),
        ({"heads": "keep"}, {"drawn": (ONE, [ONE], "keep")}),
    ]),
}  # fmt: skip


def asked(monkeypatch):
    """Replace the functions that load, score and draw. Returns: a dict that gets their arguments, by name."""
    got = {}
    named = partial(dict.__setitem__, got)

    def loaded(paths, *, options=None):
        got.update(runs=[*paths], options=options)
        trees = inputs.Inputs({}, {"a": {}, "b": {}, "c": {}}, {})
        suite = SimpleNamespace(name="digits", loss_fn=lambda task: SimpleNamespace(module=None), where=None)
        return [reading.Run(path, path.name, "ft", 0, trees, suite) for path in paths]

    def chosen(run, merger, *, coef, preset):
        named("chosen", (merger, coef, preset))
        return DIGITS.mergers["ta"]

    def searched(run, config, *, seed, memory):
        named("searched", (seed, memory))
        return config

    def points(base, expert, partners, loss, *, a, b, memory, done):
        got.update(a=a, b=b, memory=memory)
        return [[0.0] * len(a)] * len(b)

    def paired(base, experts, predict, points, *, memory, done):
        got.setdefault("pairs", []).append("".join(experts))
        got.update(points=points, memory=memory)
        return [dict.fromkeys(experts, 0.0)] * len(points)

    def partners(base, experts, task, *, coef):
        got.update(tasks=got.get("tasks", "") + task, coef=coef)

    def result(name, runs, rows, *, sigma_origin=None, **settings):
        if name == "diagnose":
            by = [(row["sigma_by_delta"], row["sigma_by_partners"]) for row in rows]
            got.update(rows=by, origin=sigma_origin)
        return {"analysis": name}

    group = analyses.Group(*[0] * len(analyses.Group._fields))._replace(kind="all", delta=0.25, partners=0.1)
    for module, stubs in {
        torch: {"set_num_threads": lambda count: named("threads", count)},
        of_results: {"summary": lambda result: ("", [], [])},
        drawing: {"write": lambda out, result: named("out", out) or []},
        tables: {"show": lambda table: None, "main_table": lambda rows, *, split: named("table", split)},
        checkpoint: {"load_manifest": lambda folder: {"suite": {"mask_prompt": False, "model": "llama"}}},
        pretrained: {"is_encoder_decoder": lambda model: model == "T5"},
        run_folder: {"find_inputs": lambda run: (run, [run])},
        models: {"find_checkpoints": lambda paths: named("runs", [*paths]) or []},
        evaluation: {
            "evaluate": lambda folders, *, split, options, **more: got.update(split=split, options=options),
        },
        reading: {
            "load_runs": loaded,
            "standard_runs": lambda runs: {0: runs[0]},
            "check_merger": lambda paths, merger, preset: None,
            "chosen_merger": lambda run, merger, *, coef, preset: (
                named("chosen", (merger, coef, preset)) or DIGITS.mergers["ta"]
            ),
            "with_coef": searched,
            "merged_params": lambda config, run, tasks, *, seed: named("seed", seed),
            "facts": lambda run: {"hyperparameters": {"sigma": 0.1}},
            "result_of": result,
        },
        pictures: {"rows_of": lambda base, experts, *, heads, **own: named("drawn", (base, experts, heads)) or []},
        scores: {"_reference": lambda runs, split: named("reference", split) or {0: {}}},
        weights: {"samples": lambda suite, task, *, batches, seed: named("samples", (batches, seed)) or ("dev", [])},
        analyses: {
            "scores_of": lambda suite, split, *, memory, done: named("scored", (split, memory)),
            "experts_curve": lambda tasks, merged, score, *, reference: merged(tasks) or [],
            "replacement_curve": lambda *trees, reference, coef: named("coef", coef) or [],
            "gains": lambda table: {},
            "partner_update": partners,
            "mean_loss": lambda loss, found: None,
            "landscape": points,
            "disentanglement": paired,
            "predictions": lambda losses, batches: None,
            "groups": lambda module, where: {},
            "diagnose": lambda base, experts, kinds, *, coef: named("coef", coef) or [group],
            "unmoved_shares": lambda weights, kinds, sigma, noise: named("unmoved", sigma) or {},
        },
    }.items():
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)
    return got


@pytest.mark.parametrize("compute", ANALYSES, ids=lambda compute: compute.__name__)
def test_every_option_reaches_an_analysis(compute, monkeypatch):
    got, (options, table) = asked(monkeypatch), ANALYSES[compute]

    def call(options):
        got.clear()
        commands.command(compute, type(options))[0](options)
        return dict(got)

    plain = assert_effects(call, options, table)
    assert plain.get("options", {}) == (ANSWERS if compute is weights.landscape else {})


def test_every_option_reaches_an_evaluation(monkeypatch):
    got, note = {}, lambda *args, **more: None

    def evaluated(folders, *, recipes, report, **own):
        got.update(own)
        return []

    for module, stubs in {
        torch: {"set_num_threads": lambda count: got.update(threads=count)},
        pictures: {"check_picture": note},
        plots: {"check_colours": note, "main_plot": lambda table, *, title: got.update(title=title)},
        checkpoint: {"write_bytes": lambda file, content: got.update(plot=file)},
        tables: {
            "main_table": lambda rows, *, split: got.update(table=split), "terminal": note, "show": note,
            "relative_table": lambda rows, *, split: got.update(relative=split),
            "other_table": lambda rows, *, split: got.update(other=split), "other_tasks_of": lambda rows: [],
        },
        evaluation: {"evaluate": evaluated},
        models: {
            "find_checkpoints": lambda paths: got.update(paths=paths) or [], "lacking_experts": lambda paths: [],
            "manifests_of": lambda folders: {},
        },
        outputs: {
            "write_report": lambda out, *args, **more: got.update(out=out), "verdict": lambda table: "none is best",
            "notes_on": lambda rows, table: [],
        },
    }.items():  # fmt: skip
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)

    def call(options):
        got.clear()
        command.main(options)
        return dict(got)

    drawn = {"plot": Path("p.png"), "title": "test score, mean over tasks"}
    assert_effects(call, command.Eval((ONE,)), [
        ({"checkpoints": (ONE, TWO)}, {"paths": (ONE, TWO)}),
        ({"out": Path("elsewhere")}, {"keep": Path("elsewhere"), "out": Path("elsewhere")}),
        ({"plot": Path("p.png")}, drawn),
        ({"split": "dev"}, {"split": "dev", "table": "dev"}),
        ({"split": "dev", "plot": Path("p.png")}, {
            **drawn, "title": "dev score, mean over tasks", "split": "dev", "table": "dev",
        }),
        ({"base": True}, {"base": True}),
        ({"relative": True}, {"relative": "test"}),
        ({"other_tasks": ("a",)}, {"other_tasks": ("a",), "other": "test"}),
        ({"preset": "lm"}, {"implied": {"name": "trace", **PRESETS["lm"].options}}),
        ({"model": "M"}, {"options": {"model": "M"}}),
        ({"data": "D"}, {"options": {"data": "D"}}),
        ({"device": "cpu"}, {"options": {"device": "cpu"}}),
        OF_SUITE,
        ({"threads": 3}, {"threads": 3}),
    ])  # fmt: skip


def test_other_tasks_are_printed_and_written_and_reported_apart(runs, call, tmp_path):
    code, said = call(runs[0], "--base", "--other-tasks", "--out", tmp_path / "scores")
    assert code is None
    first, last = said.split("other tasks (negative): mean test score over tasks, 0 to 100")
    assert "BASE" in first
    assert "BASE" in last
    scored = [json.loads(line) for line in (tmp_path / "scores" / "results.jsonl").read_text().splitlines()]
    assert {row["model"].startswith("other:") for row in scored if row["task"] == "negative"} == {True}
    assert {row["model"].startswith("other:") for row in scored if row["task"] != "negative"} == {False}
    code, again = call(runs[0], "--base", "--other-tasks", "negative", "--out", tmp_path / "scores")
    assert (code, again) == (None, said)
    assert call("report", tmp_path / "scores", "--out", tmp_path / "report")[0] is None
    text = (tmp_path / "report" / "report.md").read_text()
    mean = json.loads((tmp_path / "scores" / "results.json").read_text())["other_tasks"]["means"]["BASE"]["Expert"]
    assert f"| BASE | {mean['mean']:.2f} |" in text.partition("## Other tasks")[2].partition("##")[0]
    assert "--other-tasks names 'mirror', a task of the checkpoints" in call(runs[0], "--other-tasks", "mirror")[0]


def test_scores_are_written_where_an_expert_has_no_share(runs, exits, tmp_path, monkeypatch):
    true = evaluation.evaluate

    def scored(*args, **options):
        return [replace(row, score=0.0) if row.model == "expert:rot90" else row for row in true(*args, **options)]

    monkeypatch.setattr(evaluation, "evaluate", scored)
    said = exits("eval.py", runs[0], "--relative", "--out", tmp_path / "scores")
    assert said == "eval.py: FT, seed 21: the expert of rot90 scores 0: merged scores have no share of it"
    written = json.loads((tmp_path / "scores" / "results.json").read_text())
    assert "TA" in written["means"]["FT"]
    assert "relative" not in written


@pytest.fixture(scope="module")
def suite(_own_cache):
    return load_suite("digits", progress=False, **RECIPE)


@pytest.fixture(scope="module")
def runs(suite, tmp_path_factory):
    """FT and SMAT on three tasks, with all five merged models each."""
    folder = tmp_path_factory.mktemp("analyses")
    for name in ("ft", "smat"):
        method, out = DIGITS.methods[name], folder / name
        train_run(suite, method, Training(steps=4, lr=5e-4), RunOptions(out, TASKS, 21))
        configs = [
            c.__class__(**{**vars(c), **({"coef": COEF} if "coef" in vars(c) else {})}) for c in DIGITS.mergers.values()
        ]
        in_memory.merge_run(in_memory.Request(configs, *find_inputs(out), out=out / "merged", search=False, seed=0))
    return folder / "ft", folder / "smat"


@pytest.fixture
def _unrendered(monkeypatch):
    """Figures are drawn up, and files of them begin as they do."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **options: file.write(b"\x89PNG"))


@pytest.fixture
def call(exits, capsys):
    """``call(*words)``: what eval.py exits with and prints."""
    return lambda *words: (exits("eval.py", *words), capsys.readouterr().out)


def read(out, name):
    """The JSON that a command wrote; CSV and PNG stand beside it."""
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / f"{name}.json").read_text())
    with (out / f"{name}.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + len(found["rows"])
    assert found["analysis"] == name
    assert {"smat_fn", "python", "torch"} <= set(found["versions"])
    return found


def experts(folder):
    return load_inputs(*find_inputs(folder)).experts


def test_experts_curve_keeps_each_runs_own_coefficient_and_ends_at_its_merged_model(runs, suite, call, tmp_path):
    code, printed = call("experts-curve", *runs, "--out", tmp_path, "--split", "dev")
    assert code is None
    found = read(tmp_path, "experts-curve")
    assert re.search(r"SMAT .*│ +\d+\.\d\d", printed)
    assert printed.splitlines()[-3:] == [f"{s}: {tmp_path / 'experts-curve'}.{s}" for s in ("json", "csv", "png")]
    assert [run["label"] for run in found["runs"]] == ["FT", "SMAT"]
    for run, folder in zip(found["runs"], runs, strict=True):
        manifest = checkpoint.load_manifest(folder / "mirror")
        assert run["suite"] == manifest["suite"]
        assert run["experts"]["mirror"] == manifest["fingerprint"]
    reference = {task: suite.score(params, task, "dev") for task, params in experts(runs[0]).items()}
    assert {row["coef"] for row in found["rows"]} == {COEF}
    assert found["settings"]["merger_settings"] == [{"coef": COEF}] * 2
    for folder, label in zip(runs, ("FT", "SMAT"), strict=True):
        rows = [row for row in found["rows"] if row["method"] == label]
        assert len(rows) == 3 * 2 + 3
        merged, _ = checkpoint.load_leaves(folder / "merged" / "ta")
        scores = {row["task"]: row["score"] for row in rows if row["experts"] == 3}
        assert scores == {task: suite.score(merged, task, "dev") for task in TASKS}
        for row in rows:
            assert row["relative"] == pytest.approx(100 * row["score"] / reference[row["task"]])


@pytest.mark.slow
def test_experts_curve_takes_coefficients_and_searches_where_there_is_none(runs, call, tmp_path):
    bare = tmp_path / "bare"
    for name in ("base", *TASKS):
        shutil.copytree(runs[0] / name, bare / name)
    other = shutil.copytree(runs[0] / "merged" / "ta", bare / "lines")  # coefficients by depth are another merger
    manifest = checkpoint.load_manifest(other)
    manifest["hyperparameters"]["lines"] = [0.5, 1.0]
    checkpoint.write_text(other / checkpoint.MANIFEST, json.dumps(manifest))
    assert call("experts-curve", bare, "--out", tmp_path / "found", "--memory", "0")[0] is None
    inputs = load_inputs(*find_inputs(bare))
    suite, vector = scoring.common_suite(inputs, {}), merge.task_arithmetic_vector(inputs.base, inputs.experts)
    best = merge.select_coef(
        inputs.base, vector, lambda params: sum(suite.score(params, task, "dev") for task in TASKS)
    ).best
    assert {row["coef"] for row in read(tmp_path / "found", "experts-curve")["rows"]} == {best}
    assert call("experts-curve", *runs, "--coef", "0.2", "0.5", "--merger", "ties", "--out", tmp_path)[0] is None
    rows = read(tmp_path, "experts-curve")["rows"]
    assert {(row["method"], row["coef"]) for row in rows} == {("FT", 0.2), ("SMAT", 0.5)}
    for name, coef in (("iso_c", 0.2), ("cart", 0.2), ("karcher", None)):  # with a base, and without
        words = ("--coef", coef) if coef else ()
        assert call("experts-curve", runs[0], "--merger", name, *words, "--out", tmp_path / name)[0] is None
        assert {row["coef"] for row in read(tmp_path / name, "experts-curve")["rows"]} == {coef}


@pytest.mark.slow
@pytest.mark.usefixtures("_unrendered")
def test_replacement_goes_from_the_merge_of_ft_to_that_of_the_other(runs, suite, call, tmp_path):
    assert call("replacement", "--ft", runs[0], "--other", runs[1], "--out", tmp_path, "--coef", "0.3")[0] is None
    rows = read(tmp_path, "replacement")["rows"]
    assert {row["method"] for row in rows} == {"SMAT"}
    assert [row["experts"] for row in rows] == [
        q for q, sets in ((0, 1), (1, 3), (2, 3), (3, 1)) for _ in range(3 * sets)
    ]
    for count, folder in ((0, runs[0]), (3, runs[1])):
        own = experts(folder)
        merged = merge.task_arithmetic(suite.base, {task: own[task] for task in TASKS}, coef=0.3)
        scores = {row["task"]: row["score"] for row in rows if row["experts"] == count}
        assert scores == {task: suite.score(merged, task, "test") for task in TASKS}


@pytest.mark.slow
def test_gains_are_those_of_the_main_table(runs, suite, call, tmp_path):
    assert call("gains", *runs, "--out", tmp_path)[0] is None
    found = read(tmp_path, "gains")
    assert [row["method"] for row in found["rows"]] == ["FT", "SMAT"]
    assert len(found["runs"]) == 2 * (3 + 5)
    for row, folder in zip(found["rows"], runs, strict=True):
        own = [suite.score(params, task, "test") for task, params in experts(folder).items()]
        merged = [
            suite.score(checkpoint.load_leaves(folder / "merged" / name)[0], task, "test")
            for name in ("wa", "ta", "ties", "dare", "della") for task in TASKS
        ]  # fmt: skip
        assert row["expert"] == pytest.approx(sum(own) / 3)
        assert row["merged"] == pytest.approx(sum(merged) / 15)
        assert row["drop"] == row["expert"] - row["merged"]


@pytest.mark.usefixtures("_unrendered")
def test_landscape_passes_through_base_and_experts(runs, suite, call, tmp_path):
    words = ("--tasks", "mirror", "--points", "2", "--b", "-1", "1")
    assert call("landscape", "--ft", runs[0], "--methods", runs[1], "--out", tmp_path, *words)[0] is None
    found = read(tmp_path, "landscape")
    assert found["settings"]["samples"]["split"] == "dev"
    assert len(found["rows"]) == 2 * 9
    (batch, _), loss = suite.dev_batches("mirror")[0], suite.loss_fn("mirror")
    for folder, label in zip(runs, ("FT", "SMAT"), strict=True):
        losses = {(row["a"], row["b"]): row["loss"] for row in found["rows"] if row["method"] == label}
        assert losses[1.0, 0.0] == pytest.approx(float(loss(experts(folder)["mirror"], batch)[0]), rel=1e-5)
        assert losses[0.0, 0.0] == pytest.approx(float(loss(suite.base, batch)[0]), rel=1e-5)
        # the partners are FT's, whatever the method
        partners = {task: params for task, params in experts(runs[0]).items() if task != "mirror"}
        moved = merge.task_arithmetic(suite.base, partners, coef=0.3)
        assert losses[0.0, 1.0] == pytest.approx(float(loss(moved, batch)[0]), rel=1e-5)


def test_landscape_takes_training_samples_where_a_suite_has_no_dev_batches(suite):
    from smat_fn.analyses import mean_loss
    from smat_fn.scripts.analyse.weights import samples

    split, found = samples(suite.replace(dev_batches=None), "mirror", batches=2, seed=0)
    assert split == "train"
    assert [len(batch[1]) for batch, _ in found] == [16, 16]
    again = samples(suite.replace(dev_batches=None), "mirror", batches=3, seed=0)[1]
    assert all((a[0] == b[0]).all() for (a, _), (b, _) in zip(found, again, strict=False))
    loss = suite.loss_fn("mirror")
    weighted = mean_loss(loss, [Micro(found[0].batch, 3.0), Micro(found[1].batch, 1.0)])(suite.base)
    parts = [float(loss(suite.base, batch)[0]) for batch, _ in found]
    assert float(weighted) == pytest.approx((3 * parts[0] + parts[1]) / 4, rel=1e-6)


@pytest.mark.slow
def test_diagnose_in_a_process_of_its_own_says_what_the_run_had_and_suggests(runs, suite, tmp_path):
    command = [sys.executable, "-W", "error", ROOT / "eval.py", "diagnose", runs[1], "--out", tmp_path / "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stderr == "eval.py diagnose: loading libraries\n"
    found = read(tmp_path / "out", "diagnose")
    settings, whole = found["settings"], found["rows"][-1]
    assert (settings["sigma"], settings["sigma_origin"]) == (DIGITS.methods["smat"].sigma, "the run's")
    assert settings["suggested_sigma"] == float(f"{whole['partners']:.2g}")
    assert "suggested sigma" in re.sub(r"\s+", " ", process.stdout)
    deltas = [merge.task_vector(params, suite.base) for params in experts(runs[1]).values()]
    norms = [float(tree.global_norm(delta)) ** 2 for delta in deltas]
    assert whole["delta"] == pytest.approx((sum(norms) / 3 / whole["size"]) ** 0.5, rel=1e-5)
    assert whole["size"] == sum(leaf.numel() for leaf in suite.base.values())


def test_diagnose_reads_sigma_in_the_units_noise_and_dtype_of_the_run(runs, tmp_path):
    for name in ("base", *TASKS):
        shutil.copytree(runs[1] / name, tmp_path / name)

    def found(precision=None, **method):
        for task in TASKS:
            manifest = checkpoint.load_manifest(runs[1] / task)
            manifest["hyperparameters"] |= method
            manifest["training"] |= {"precision": precision}
            checkpoint.write_text(tmp_path / task / checkpoint.MANIFEST, json.dumps(manifest))
        result = weights.diagnose(weights.Diagnose(run=tmp_path))
        return result["settings"], result["rows"][-1]["unmoved"]

    settings, share = found(sigma=1e-5)
    assert (settings["sigma"], settings["sigma_origin"], share) == (1e-5, "the run's", 0.0)
    share = found("mixed", sigma=1e-5)[1]  # simulated states are rounded to bfloat16
    assert 0 < found("mixed", sigma=1e-5, noise="laplace")[1] < share
    settings, _ = found(sigma=0.5, sigma_of="update")  # times the RMS of the update
    assert (settings["sigma"], settings["sigma_origin"]) == (settings["suggested_sigma"], "suggested")


@pytest.mark.usefixtures("_unrendered")
def test_disentanglement_compares_predictions_of_sums_with_those_of_one_update(runs, suite, call, tmp_path):
    words = "--a", 0, 2, "--points", 3, "--coef", 0.5, "--out", tmp_path
    code, said = call("disentanglement", *runs, *words)
    assert code is None
    found = read(tmp_path, "disentanglement")
    assert found["settings"]["a"] == [0, 1, 2]
    assert len(found["rows"]) == 2 * 3 * (9 + 1)  # runs, pairs, points
    own = [row for row in found["rows"] if (row["method"], row["first"], row["second"]) == ("SMAT", "rot90", "stripes")]
    trees = experts(runs[1])
    first, second = (merge.task_vector(trees[task], suite.base) for task in ("rot90", "stripes"))

    def predicted(a, b, task):
        model = {path: leaf + a * first[path] + b * second[path] for path, leaf in suite.base.items()}
        return suite.predictions(model, task, [part.batch for part in suite.dev_batches(task)])

    for row in own:
        a, b = row["a1"], row["a2"]
        for name, task, alone in (("on_first", "rot90", (a, 0)), ("on_second", "stripes", (0, b))):
            share = (predicted(a, b, task) != predicted(*alone, task)).double().mean()
            assert row[name] == pytest.approx(float(share), abs=2 / 64), row  # a row or two on the edge of two classes
    assert any(row["on_first"] > 0 for row in own)
    line = next(line for line in said.splitlines() if "SMAT" in line)
    at = [
        50 * (row["on_first"] + row["on_second"])
        for row in found["rows"]
        if row["method"] == "SMAT" and row["a1"] == row["a2"] == 0.5
    ]
    assert f"{sum(at) / 3:.2f}" in line
    code, alone = call("disentanglement", runs[1], *words[:-2], "--tasks", "mirror", "rot90", "--memory", 0)
    assert code is None
    assert "SMAT" in alone


def test_what_cannot_be_analysed_is_told_in_one_line(runs, call, tmp_path):
    ft, smat = runs
    fewer = tmp_path / "fewer"
    for name in ("base", *TASKS[:2]):
        shutil.copytree(ft / name, fewer / name)
        manifest = checkpoint.load_manifest(fewer / name)
        checkpoint.write_text(fewer / name / checkpoint.MANIFEST, json.dumps(manifest | {"seed": 22}))
    several, coefs = tmp_path / "several", tmp_path / "coefs"
    for place, name, changes in ((several, "ties", ({"keep": 0.1}, {"keep": 0.5})), (coefs, "ta", ({"coef": 0.1}, {}))):
        shutil.copytree(ft, place)
        for number, own in enumerate(changes):
            made = shutil.copytree(ft / "merged" / "ta", place / str(number))
            manifest = checkpoint.load_manifest(made)
            set_ = {"coef": 0.2, **({"aggregate": "sum", "scope": "global"} if name == "ties" else {}), **own}
            manifest |= {"merger": name, "hyperparameters": set_}
            checkpoint.write_text(made / checkpoint.MANIFEST, json.dumps(manifest))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "interference.png").write_text("mine")
    for words, told in (
        (("experts-curve", several, "--merger", "ties", "--coef", 0.2), 'and {"aggregate": "sum", "keep": 0.5'),
        (("experts-curve", several, "--merger", "ties", "--coef", 0.2), "move those that are not meant to another"),
        (("experts-curve", several, "--merger", "ties"), "move those that are not meant to another folder"),
        (("experts-curve", coefs), '{"coef": 0.1} and {"coef": 0.2}'),
        (("experts-curve", coefs), ": pass --coef"),
        (("experts-curve", smat), "seed 21 has 0 runs of method ft"),
        (("experts-curve", ft, smat, "--coef", "1", "2", "3"), "3 coefs for 2 runs"),
        (("experts-curve", ft, "--merger", "wa", "--coef", "1"), "WA has none"),
        (
            ("experts-curve", ft, "--merger", "fisher"),
            "--merger is 'fisher': must be one of wa, ta, ties, dare, della, ",
        ),
        (("experts-curve", ft, "--merger", "slerp", "--coef", "0.5"), "slerp"),
        (("experts-curve", tmp_path / "a", tmp_path / "b"), "holds no experts"),
        (("experts-curve", ft, ft), "are both FT of seed 21"),
        (("experts-curve", ft, fewer), "means over different tasks cannot be compared"),
        (("replacement", "--ft", smat, "--other", ft), "is of method smat, not ft"),
        (("replacement", "--ft", ft, "--other"), "no runs in --other"),
        (("replacement", "--ft", ft, "--other", smat, "--coef", "nan"), "coef is nan"),
        (("gains", ft / "mirror"), "no Avg"),
        (("landscape", "--ft", ft, "--tasks", "negative", "--batches", "0"), "batches is 0"),
        (("landscape", "--ft", ft, "--points", "1", "--a", "1", "0"), "points is 1"),
        (("landscape", "--ft", ft, "--a", "0", "inf"), "a is 0 inf, must rise between finite numbers"),
        (("landscape", "--ft", smat, "--methods", ft, "--coef", "nan"), "is of method smat, not ft"),
        (("landscape", "--ft", ft, "--memory", "-1"), "memory is -1"),
        (("disentanglement", ft, "--tasks", "rot90"), "tasks are rot90: a pair takes two"),
        (
            ("disentanglement", ft, "--tasks", "negative"),
            "runs have no task 'negative', they have rot90, mirror, stripes",
        ),
        (("disentanglement", ft, "--points", "1", "--batches", "0"), "points is 1, must be at least 2"),
        (("disentanglement", ft, "--a", "2", "1", "--coef", "nan"), "a is 2 1, must rise between finite numbers"),
        (("disentanglement", ft, "--a", "0", "1e39"), "a is 0 1e+39, must be between -1e38 and 1e38"),
        (("disentanglement", ft, "--a", "-1e39", "0"), "a is -1e+39 0, must be between -1e38 and 1e38"),
        (("disentanglement", ft, "--coef", "-1e39"), "coef is -1e+39, must be finite, from -1e38 to 1e38"),
        (("landscape", "--ft", ft, "--b", "0", "1e39"), "b is 0 1e+39, must be between -1e38 and 1e38"),
        (("diagnose", ft, "--sigma", "nan"), "sigma is nan, must be finite and not negative"),
        (("diagnose", ft, "--coef", "-0.3"), "coef is -0.3, must be finite and not negative"),
        (("interference", ft, ft), "2 runs are FT of seed 21: give one, or another --label"),
        (("interference", ft, "--out", mine), "interference.png holds something else than is written there: move it"),
    ):
        code, _ = call(*words, *(() if "--out" in words else ("--out", tmp_path / "out")))
        assert code.startswith(f"eval.py {words[0]}:"), code
        assert told in code
        assert all(line.startswith("  ") for line in code.split("\n")[1:])
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_told_before_anything_is_scored(runs, call, monkeypatch, tmp_path):
    scored = []
    monkeypatch.setattr(Digits, "score", lambda self, params, task, split: scored.append((task, split)) or 0.0)
    shutil.copytree(runs[0], tmp_path / "ft", ignore=shutil.ignore_patterns("dare"))
    assert "FT has no Avg: score its experts and all five mergers" in call("gains", tmp_path / "ft")[0]
    assert "WA has none: leave --coef out" in call("experts-curve", runs[0], "--merger", "wa", "--coef", 0.3)[0]
    assert scored == []
    shutil.rmtree(tmp_path / "ft" / "merged")  # its coefficient would be searched
    assert "the FT expert's score of 'rot90' is 0.0" in call("experts-curve", tmp_path / "ft")[0]
    assert scored == [(task, "test") for task in TASKS]


def test_a_narrow_axis_has_all_its_points():
    def points(*ends, count=21):
        return weights._axes(weights.Landscape(ft=Path(), a=ends, b=ends, points=count))["a"]

    assert points(0.0, 2.0) == [i / 10 for i in range(21)]
    assert points(0.0, 2.0, count=7)[1] == 0.333333
    assert points(0.0, 1e-6) == [*(round(5e-8 * i, 9) for i in range(21)), 1.0]
    assert points(1.0, 1 + 1e-9)[1] == 1.00000000005


def test_methods_that_have_no_colour_are_refused_before_anything_is_scored(exits, tmp_path):
    for count in range(6):
        manifest = {"kind": "expert", "label": f"m{count}", "task": "a", "seed": 0, "hyperparameters": {}}
        checkpoint.write_text(tmp_path / f"m{count}" / checkpoint.MANIFEST, json.dumps(manifest))
    assert "cannot draw methods ['m0', 'm1'" in exits("eval.py", tmp_path, "--plot", tmp_path / "x.png")


def test_help_of_the_commands_comes_without_torch():
    code = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT)!r})
for name in ("experts-curve", "replacement", "gains", "landscape", "diagnose", "disentanglement", ""):
    sys.argv = ["eval.py", *name.split(), "--help"]
    try:
        runpy.run_path({str(ROOT / "eval.py")!r}, run_name="__main__")
    except SystemExit as error:
        assert not error.code, name
assert not {{"torch", "numpy", "matplotlib", "transformers"}} & set(sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "usage: eval.py experts-curve" in process.stdout
    assert "None" not in process.stdout


def test_interference_leaves_running_statistics_out_and_takes_heads_apart(call, tmp_path):
    def save(name, scale, **more):
        leaves = {
            "layers.0.w": torch.tensor([1.0, scale]),
            "layers.0.bn.running_mean": torch.tensor([10 * scale]),
            "layers.0.bn.running_var": torch.tensor([1 + 10 * scale]),
            "layers.0.bn.num_batches_tracked": torch.tensor(int(10 * scale)),
        }
        (tmp_path / name).mkdir()
        save_file(leaves | more, tmp_path / name / "model.safetensors")
        checkpoint.write_text(tmp_path / name / "config.json", "{}")
        return tmp_path / name

    base, one, two = (save(name, scale) for name, scale in (("base", 0.0), ("one", 3.0), ("two", 4.0)))
    (*_, whole) = pictures.rows_of(base, [one, two])
    assert (whole["size"], whole["rms"]) == (2, {"one": math.sqrt(4.5), "two": math.sqrt(8)})
    other = save("other", 4.0, **{"head.weight": torch.zeros(2)})
    words = "interference", "--base", base, "--experts", one, other
    assert "if they are heads, pass --heads keep, which merges the rest" in call(*words)[0]
    assert call(*words, "--heads", "keep")[0] is None
    assert pictures.rows_of(base, [one, two], heads="keep")[-1] == whole  # as --plot of a search, where there are none


@pytest.mark.usefixtures("_unrendered")
def test_interference_of_runs_and_of_folders_is_that_of_the_updates(runs, call, tmp_path, exits, capsys):
    code, said = call("interference", *runs, "--out", tmp_path / "scores")
    assert code is None
    rows = read(tmp_path / "scores", "interference")["rows"]
    assert [row["layer"] for row in rows if row["method"] == "FT"][-1] == "all"
    assert {row["method"] for row in rows} == {"FT", "SMAT"}
    inputs = load_inputs(*find_inputs(runs[0]))
    deltas = {name: tree.flatten(merge.task_vector(own, inputs.base)) for name, own in inputs.experts.items()}
    expected = analyses.interference(
        (path, [deltas[name][path] for name in sorted(deltas)]) for path in tree.flatten(inputs.base)
    )
    found = [row for row in rows if row["method"] == "FT"]
    for row, layer in zip(found, expected, strict=True):
        assert (row["layer"], row["size"]) == (layer.layer, layer.size)
        assert list(row["rms"].values()) == pytest.approx(layer.rms, rel=1e-6)
        assert [row["cosine"], row["agreement"]] == pytest.approx([layer.cosine, layer.agreement], rel=1e-5)
    base, experts = find_inputs(runs[0])
    code, other = call("interference", "--base", base, "--experts", *experts)
    assert code is None
    assert other.count("\n") < said.count("\n")
    assert "give either run folders" in call("interference", *runs, "--base", base)[0]
    assert "give either run folders" in call("interference")[0]
    words = "ta", "--coef", 0.3, "--base", base, "--experts", *experts, "--out", tmp_path / "m"
    assert exits("merge.py", *words, "--plot", tmp_path / "merge.png") is None
    assert capsys.readouterr().out.endswith(f"plot: {tmp_path / 'merge.png'}\n")
    assert (tmp_path / "merge.png").read_bytes().startswith(b"\x89PNG")
    twice = "ta", "--coef", 0.3, "--base", base, "--experts", experts[0], experts[0], "--out", tmp_path / "n"
    assert exits("merge.py", *twice, "--plot", tmp_path / "x.png") is not None
    assert not (tmp_path / "x.png").exists()
