"""The three scripts as a user runs them: what they write and print, and one line for whatever does not fit."""

import io
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import smat_fn.data
import smat_fn.suites
from smat_fn import checkpoint
from smat_fn.config import PRESETS, Adapters, Dev, Finetune
from smat_fn.evaluate import read_results
from smat_fn.scripts.commands import train as train_command
from smat_fn.scripts.merge.subcommands import statistics
from smat_fn.scripts.train import describe, joint, settings
from smat_fn.scripts.train import options as checks
from smat_fn.scripts.train import training as runs

from .conftest import assert_effects

ROOT = Path(__file__).parents[2]
SHORT = ("--steps", "6", "--suite-options", "pretrain_steps", "10", "images_per_task", "120")


def run(script, *words):
    """A script in a process of its own, warnings as errors."""
    command = [sys.executable, "-W", "error", ROOT / script, *words]
    own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=own, check=False)


def called(script, *words):
    """Run a script in this process, with the result of `run`."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [script, *map(str, words)])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return CompletedProcess(words, code or 0, out.getvalue(), err.getvalue())


LORA = {"lora_rank": 4}
TRAIN = [
    ({"preset": "llama-3.2-1b-muon"}, {
        "run.preset": "llama-3.2-1b-muon", "training.optimizer": "muon", "training.muon_lr": 4e-4,
        "origin": "preset llama-3.2-1b-muon",
    }),
    ({"model": "M"}, {"suite.model": "M"}),
    ({"data": "D"}, {"suite.data": "D"}),
    ({"epochs": 2, "tasks": ("b",)}, {"run.tasks": ("b",), "suite.needed": ("b",), "training.epochs": {"b": 2}}),
    ({"joint": True}, {"run.tasks": ("joint",), "run.joint": ("a", "b")}),
    ({"rows": 3}, {"suite.rows": 3}),
    ({"metric": "f1"}, {"suite.metric": "f1"}),
    ({"chat": True}, {"suite.chat": True}),
    ({"mask_prompt": True}, {"suite.mask_prompt": True}),
    ({"train": "attention"}, {"suite.train": "attention"}),
    ({"train_layers": 2}, {"suite.train_layers": 2}),
    ({"batch_size": 4}, {"suite.batch_size": 4}),
    ({"max_length": 64}, {"suite.max_length": 64}),
    ({"gradient_checkpointing": True}, {"suite.gradient_checkpointing": True}),
    ({"device": "cuda"}, {"suite.device": "cuda"}),
    ({"suite_options": {"truncate": "left"}}, {"suite.truncate": "left"}),
    ({"suite_seed": 5}, {"suite.seed": 5}),
    ({"method": Finetune()}, {"method": Finetune()}),
    ({"lr": 0.5}, {"training.lr": 0.5, "origin": "given"}),
    ({"optimizer": "muon", "lr": 0.5}, {
        "training.optimizer": "muon", "training.lr": 0.5, "training.muon_lr": 10.0, "origin": "given",
    }),
    ({"steps": 7}, {"training.steps": 7, "training.epochs": {}}),
    ({"epochs": 9}, {"training.epochs": {"a": 9, "b": 9}}),
    ({"eval_every": 3}, {"training.dev": Dev(3, "score", None)}),
    ({"eval_every": 3, "eval_by": "loss"}, {"training.dev": Dev(3, "loss", None)}),
    ({"eval_every": 3, "patience": 2}, {"training.dev": Dev(3, "score", 2)}),
    ({"optimizer": "muon"}, {"training.optimizer": "muon", "training.muon_lr": 20 * 2e-5}),
    ({"schedule": "linear"}, {"training.schedule": "linear"}),
    ({"warmup": 6}, {"training.warmup": 6}),
    ({"weight_decay": 0.3}, {"training.weight_decay": 0.3}),
    ({"max_grad_norm": 0.5}, {"training.max_grad_norm": 0.5}),
    ({"max_grad_norm": float("inf")}, {"training.max_grad_norm": None}),
    ({"accumulate": 2}, {"training.accumulate": 2}),
    ({"precision": "fp32"}, {"training.precision": "fp32", "suite.dtype": "float32"}),
    ({"dropout": True}, {"training.dropout": True}),
    ({"average": "swa:25%"}, {"training.average": "swa:25%"}),
    ({"optimizer": "muon", "muon_lr": 0.3}, {"training.optimizer": "muon", "training.muon_lr": 0.3}),
    ({"decay_matrices": True}, {"training.decay_matrices": True}),
    (LORA, {"training.lora": Adapters(4, 8)}),
    ({**LORA, "lora_alpha": 5.0}, {"training.lora": Adapters(4, 5.0)}),
    ({**LORA, "lora_targets": ("q_proj",)}, {"training.lora": Adapters(4, 8, ("q_proj",))}),
    ({**LORA, "lora_dropout": 0.1}, {"training.lora": Adapters(4, 8, dropout=0.1)}),
    ({**LORA, "lora_save": ("lm_head",)}, {"training.lora": Adapters(4, 8, save=("lm_head",))}),
    ({**LORA, "lora_simulate": "factors"}, {"training.lora": Adapters(4, 8, simulate="factors")}),
    ({"dry_run": True}, {"work": "plan", "origin": None}),
    ({"seed": 5}, {"run.seed": 5, "suite.seed": 5}),
    ({"statistics": ("gram",), "seed": 5}, {
        "run.seed": 5, "suite.seed": 5, "run.statistics": ("gram",), "statistics": {"kinds": ("gram",), "seed": 5},
    }),
    ({"threads": 3}, {"threads": 3}),
    ({"shard": True}, {"training.shard": True}),
    ({"compile": True}, {"training.compiled": True}),
    ({"independent_draws": True}, {"training.independent_draws": True}),
    ({"statistics": ("gram", "fisher")}, {
        "run.statistics": ("gram", "fisher"), "statistics": {"kinds": ("gram", "fisher"), "seed": 0},
    }),
    *(({name: value}, {f"run.{name}": value}) for name, value in {
        "out": Path("elsewhere"), "resume": True, "overwrite": True, "label": "mine", "probe": 2, "offload": "stream",
        "log": ("wandb",), "log_every": 4, "save_every_steps": 8, "save_every_minutes": 1.5, "keep_snapshots": 3,
        "keep_moments": True,
    }.items()),
]  # fmt: skip


def test_every_option_of_train_reaches_the_run(monkeypatch):
    got = {}

    def took(suite, method, training, run, *, work="train", **more):
        got.update({"work": work, "method": method})
        got.update({f"{part}.{name}": value for part, own in (("training", training), ("run", run))
                    for name, value in vars(own).items()})  # fmt: skip
        return [Path("expert")]

    stubs = {
        (torch, "set_num_threads"): lambda count: got.update(threads=count),
        (smat_fn.suites, "task_names"): lambda suite, **options: ("a", "b"),
        (smat_fn.suites, "load_suite"): lambda suite, **own: got.update({f"suite.{n}": v for n, v in own.items()}),
        (checks, "check_run"): lambda *args, **more: None,
        (joint, "joint_run"): lambda *given: given,
        (describe, "headline"): lambda *args, origin, **more: got.update(origin=origin),
        (describe, "dry_run"): lambda *args: took(*args, work="plan"),
        (runs, "train_run"): took,
        (statistics, "statistics_of_run"): lambda suite, folders, **own: got.update(statistics=own) or [],
    }
    for (module, name), stub in stubs.items():
        monkeypatch.setattr(module, name, stub)

    def call(options):
        got.clear()
        train_command.main(options)
        return dict(got)

    plain = assert_effects(
        call,
        train_command.Train(
            data=settings.DataSettings(preset="llama-3.2-1b"), method=PRESETS["llama-3.2-1b"].methods["smat"],
            training=settings.OptimizerSettings(), adapters=settings.AdapterSettings(),
            process=settings.ProcessSettings(), run=settings.RunSettings(Path("out")),
        ),
        TRAIN,
    )  # fmt: skip
    assert (plain["run.save_every_minutes"], plain["run.log_every"], plain["threads"]) == (30, 1, 1)


@pytest.fixture
def refused(exits):
    """``refused(script, *words)``: the text, or status, that the script exits with."""

    def call(script, *words):
        text = exits(script, *words)
        assert text is not None
        return text

    return call


def training(out):
    return "train.py", "smat", "--out", out, "--tasks", "rot90", "mirror", "--sigma", "0.02", *SHORT


def merging(run):
    return "merge.py", "all", "--run", run, "--search", "--grid", "0.3", "0.6", "--out", run / "merged"


@pytest.fixture(scope="module")
def trained(_own_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("scripts") / "run"
    return out, called(*training(out))


@pytest.fixture(scope="module")
def merged(trained):
    out = trained[0] / "merged"
    return out, called(*merging(trained[0]))


@pytest.fixture(scope="module")
def evaluated(trained, merged):
    out = trained[0].parent / "report"
    words = trained[0], "--out", out, "--plot", out.parent / "plots" / "bars.png"
    return out, called("eval.py", *words)


def assert_clean(process):
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    assert "Warning" not in process.stderr


def test_train_writes_experts_manifests_and_logs_and_says_where(trained):
    out, process = trained
    assert_clean(process)
    first, *rest = process.stdout.splitlines()
    assert first == "smat on digits: learning rate 0.0005 (preset digits), 6 steps, seed 21"
    assert [line.split(" is ")[0] for line in rest[:2]] == ["rot90: sigma 0.02", "mirror: sigma 0.02"]
    assert rest[2:] == [f"expert: {out / task}" for task in ("rot90", "mirror")]
    assert {p.name for p in out.iterdir() if p.name != "merged"} == {
        "base", "rot90", "rot90.log.jsonl", "mirror", "mirror.log.jsonl",
    }  # fmt: skip
    manifest = checkpoint.load_manifest(out / "rot90")
    assert (manifest["method"], manifest["task"], manifest["seed"]) == ("smat", "rot90", 21)
    assert manifest["hyperparameters"]["sigma"] == 0.02
    assert manifest["hyperparameters"]["alpha_min"] == 0.1
    assert manifest["training"]["steps"] == 6
    recipe = manifest["suite"]
    assert (recipe["seed"], recipe["pretrain_steps"], recipe["images_per_task"]) == (21, 10, 120)
    assert manifest["base_fingerprint"] == checkpoint.load_manifest(out / "base")["fingerprint"]
    assert {"smat_fn", "python", "torch", "safetensors"} <= set(manifest["versions"])
    rows = [json.loads(line) for line in (out / "rot90.log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))


def test_merge_writes_five_models_with_cards_and_says_coefficient_and_score(merged):
    out, process = merged
    assert_clean(process)
    names = ["wa", "ta", "ties", "dare", "della"]
    for line, name in zip(process.stdout.splitlines(), names, strict=True):
        manifest = checkpoint.load_manifest(out / name)
        dev = sum(manifest["dev"].values()) / 2
        coef = manifest["hyperparameters"].get("coef")
        line = re.sub(r" \((smallest|largest) of those tried: --widen or --grid tries more\)", "", line)
        assert line == f"merged: {out / name}" + ("" if coef is None else f", coef {coef:g}") + f", dev {dev:.2f}"
        assert {p.name for p in (out / name).iterdir()} == {
            "README.md", "manifest.json", "model.safetensors", "recipe.yml", "sources.json",
        }  # fmt: skip


def test_eval_prints_the_table_and_writes_report_and_plot(evaluated):
    out, process = evaluated
    assert_clean(process)
    rows = read_results(out / "results.jsonl")
    assert len(rows) == 2 + 5 * 2
    summary = json.loads((out / "results.json").read_text())
    five = summary["means"]["SMAT"]["Avg"]["mean"]
    assert process.stdout.splitlines()[-3:] == [
        f"results: {out}",
        f"plot: {out.parent / 'plots' / 'bars.png'}",
        f"mean over five mergers: SMAT {five:.2f}",
    ]
    assert re.search(rf"SMAT.*{five:.2f}", process.stdout)
    assert (out.parent / "plots" / "bars.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", ["train.py", "merge.py", "eval.py"])
def test_scripts_run_in_an_interpreter_of_their_own(script):
    process = run(script, "--help")
    assert_clean(process)
    assert process.stdout.startswith(f"usage: {script}")


@pytest.mark.slow
def test_processes_of_their_own_write_and_print_the_same(trained, merged, evaluated, tmp_path):
    out = tmp_path / "run"
    words = (
        training(out),
        merging(out),
        ("eval.py", out, "--out", tmp_path / "report", "--plot", tmp_path / "plots" / "bars.png"),
    )
    for command, (_, here) in zip(words, (trained, merged, evaluated), strict=True):
        process = run(*command)
        assert_clean(process)
        assert process.stdout == here.stdout.replace(str(trained[0].parent), str(tmp_path))
    for file in trained[0].rglob("model.safetensors"):
        assert (out / file.relative_to(trained[0])).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_a_second_run_is_refused_with_one_line(trained):
    out, _ = trained
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    process = run("train.py", "smat", "--out", out, "--tasks", "rot90", *SHORT)
    assert process.returncode == 1
    assert process.stdout == ""
    differs = "hyperparameters.sigma was 0.02, is 0.01"
    told = f"exists, trained with other settings ({differs}): pass another --out, or --overwrite"
    assert process.stderr == f"train.py smat: loading libraries\ntrain.py: {out / 'rot90'} {told}\n"
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before


def test_overwrite_replaces_what_is_there(trained, merged, tmp_path, exits, capsys):
    def call(*words):
        assert exits(*words) is None

    out = tmp_path / "run"
    call("train.py", "ft", "--out", out, "--tasks", "rot90", *SHORT)
    call("train.py", "ft", "--out", out, "--tasks", "rot90", *SHORT, "--lr", "1e-3", "--label", "fast", "--overwrite")
    manifest = checkpoint.load_manifest(out / "rot90")
    assert (manifest["training"]["lr"], manifest["label"]) == (1e-3, "fast")
    assert "learning rate 0.001 (given)" in capsys.readouterr().out
    for coef in ("0.3", "0.7"):
        call("merge.py", "ta", "--run", out, "--out", tmp_path / "merged", "--coef", coef, "--overwrite")
    assert checkpoint.load_manifest(tmp_path / "merged" / "ta")["hyperparameters"] == {"coef": 0.7}


def test_bad_numbers_and_tasks_are_told_together_before_the_suite_is_loaded(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(smat_fn.suites, "load_suite", lambda *a, **k: pytest.fail("a base would be pretrained"))
    text = refused(
        "train.py", "smat", "--out", tmp_path / "out", "--tasks", "rot90", "rot91", "--steps", "0", "--lr", "nan",
        "--sigma", "-1", "--period", "0", "--log-every", "0",
    )  # fmt: skip
    assert text.startswith("train.py:\n  ")
    assert all(line.startswith("  ") for line in text.split("\n")[1:])
    for part in ("steps is 0", "learning rate is nan", "sigma is -1", "period is 0", "--log-every is 0", "'rot91'"):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def test_unknown_presets_and_recipe_options_are_told_in_one_line(refused, tmp_path):
    out = ("--out", tmp_path / "out")
    assert refused("train.py", "ft", *out, "--preset", "digit") == (
        f"train.py: preset 'digit' is unknown, did you mean 'digits'? choose one of {', '.join(PRESETS)}"
    )
    assert refused("merge.py", "ta", *out, "--preset", "digit").startswith("merge.py: preset 'digit' is unknown")
    text = refused("train.py", "ft", *out, "--suite-options", "epochs", "3")
    assert text.startswith("train.py: digits has no options ['epochs']: they are ")
    text = refused("train.py", "ft", *out, "--model", "x", "--metric", "f1")
    assert text.startswith(
        "train.py: the preset digits has no --model, --metric: for a model and data of your own pass "
    )
    text = refused("train.py", "ft", *out, "--preset", "lm", "--model", "x", "--steps", "1")
    assert text == (
        "train.py: trace needs data: a folder, or a name on the hub (--data, or --suite-options data where a command "
        "has no such option)"
    )
    assert "pretrain_steps is 0, must be" in refused("train.py", "ft", *out, "--suite-options", "pretrain_steps", "0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--eval-by", "loss"), "--patience and --eval-by require --eval-every"),
        (("--lora-simulate", "factors"), "--lora-save and --lora-simulate require --lora-rank"),
        (("--epochs", "2"), "--epochs 2 and --steps 6 are both the length: give one of them"),
        (("--dry-run", "--lora-rank", "999"), "has no adapter of rank 999"),  # a dry run checks what a run does
        (("--rho", "0.9"), "rho 0.9 is the length of a climb, and there is none"),
    ],
)
def test_options_without_the_one_that_they_belong_to_are_errors(refused, tmp_path, words, told):
    assert told in refused("train.py", "smat", "--out", tmp_path / "run", *words, *SHORT)
    assert not (tmp_path / "run").exists()


def test_a_search_over_options_prints_a_line_for_each_combination(trained, tmp_path):
    words = "consensus", "--run", trained[0], "--search", "--grid", "0.3", "0.6", "--out", tmp_path
    process = called("merge.py", *words, "--search-over", "ratio=0.2,0.4", "least=2")
    assert_clean(process)
    *lines, last = process.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["ratio 0.2, least 2", "ratio 0.4, least 2"]
    assert re.match(
        rf"merged: {tmp_path}/consensus, ratio 0\.\d \((small|larg)est of those tried\), least 2, coef", last
    )


def test_a_grid_of_one_cannot_be_widened(refused, trained, tmp_path):
    words = "--run", trained[0], "--out", tmp_path / "out", "--search", "--widen", "--grid", "0.2"
    assert refused("merge.py", "ta", *words) == (
        "merge.py: --widen extends by the steps of --grid, 0.2 has none: give two or more"
    )


def test_merge_refuses_what_cannot_be_merged_in_one_line(refused, trained, tmp_path):
    out, base = ("--out", tmp_path / "out"), trained[0] / "base"
    either = "merge.py: give either --run FOLDER of train.py, or --base FOLDER with --experts FOLDER..."
    for words in (
        (), ("--base", base), ("--run", trained[0], "--base", base),
        ("--run", trained[0], "--experts", trained[0] / "rot90"),
    ):  # fmt: skip
        assert refused("merge.py", "wa", *out, *words) == either
    alone = "--experts", trained[0] / "rot90"
    way = "; wa takes configuration and tokenizer from --base: give any of the experts"
    assert refused("merge.py", "wa", *out, *alone) == either + way
    missing = "; the base, which the experts were trained from, is missing"
    assert refused("merge.py", "ta", *out, *alone) == either + missing
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    text = refused("merge.py", "ta", *out, *alone, "ours=" + str(adapter) + "@0.5")
    assert text.endswith("trained from, is by their files owner/base")
    (adapter / "adapter_config.json").unlink()
    adapter.rmdir()
    text = refused("merge.py", "ties", *out, "--base", base, "--experts", tmp_path / "a", tmp_path / "b", "--keep", "2")
    for part in ("ties needs a coefficient", "keep is 2.0", f"{tmp_path / 'a'} is no", f"{tmp_path / 'b'} is no"):
        assert part in text
    assert all(line.startswith("  ") for line in text.split("\n")[1:])
    assert refused("merge.py", "wa", *out, "--run", tmp_path).startswith(f"merge.py: {tmp_path} holds no experts")
    assert list(tmp_path.iterdir()) == []


def test_eval_refuses_folders_without_checkpoints_in_one_line(refused, tmp_path):
    text = refused("eval.py", tmp_path / "a", tmp_path / "b")
    assert text.count("is not a folder: give folders of train.py or merge.py") == 2
    assert all(line.startswith("  ") for line in text.split("\n")[1:])
    said = "eval.py: give at least one checkpoint, or a folder that contains some"
    assert refused("eval.py") == refused("eval.py", "--other-tasks", "stripes") == said
    swallowed = f"{said} before --other-tasks, which takes {tmp_path} as a task"
    assert refused("eval.py", "--other-tasks", tmp_path) == swallowed


def test_files_that_cannot_be_written_end_in_one_line(refused, tmp_path):
    (tmp_path / "file").write_text("")
    text = refused("train.py", "ft", "--out", tmp_path / "file", *SHORT)
    assert text.startswith(f"train.py: --out is {tmp_path / 'file'}, but {tmp_path / 'file'} is a file: ")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("zzz", "--out", "x"), "ft, smat"),
        (("ft",), "--out PATH"),
        (("ft", "--out", "x", "--lr", "fast"), "fast"),
        (("ft", "--out", "x", "--sigma", "1"), "train.py smat --help"),
        (("smat", "--out", "x", "--noise", "pink"), "laplace"),
    ],
    ids=["method", "required", "number", "option", "choice"],
)
def test_words_that_do_not_parse_exit_with_status_2_and_advice(refused, capsys, words, told):
    assert refused("train.py", *words) == 2
    assert told in capsys.readouterr().err


def test_help_loads_no_model_code_and_says_where_defaults_come_from():
    pages = [
        [script, *words, "--help-all"]
        for script, subcommands in {
            "train.py": ("ft", "smat", "smat --preset minilm"), "merge.py": ("wa", "ta"), "eval.py": ("",),
        }.items() for words in map(str.split, subcommands)
    ]  # fmt: skip
    code = f"""
import runpy, sys
for page in {pages!r}:
    sys.argv = page
    print("===", *page)
    try:
        runpy.run_path(page[0], run_name="__main__")
    except SystemExit as error:
        assert not error.code, page
heavy = {{"transformers", "datasets", "triton", "matplotlib", "sklearn", "scipy"}} & set(sys.modules)
assert not heavy, heavy
"""
    wide = os.environ | {"COLUMNS": "120"}  # wider ones have two columns
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=wide, check=False
    )
    assert process.returncode == 0, process.stderr
    texts = dict(
        re.findall(r"=== (.*?) --help-all\n(.*?)(?==== |\Z)", re.sub(r" *│\n│ +", " ", process.stdout), re.DOTALL)
    )
    assert list(texts) == [" ".join(page[:-1]) for page in pages]
    assert re.search(r"--sigma FLOAT\|\{auto\} +Perturb: [^(]*\(default: 0.01\)", texts["train.py smat"])  # of digits
    assert re.search(
        r"--sigma FLOAT\|\{auto\} +Perturb: [^(]*\(default: 0.005\)", texts["train.py smat --preset minilm"]
    )
    groups = ("--sigma", "model and data options", "--preset {digits,", "optimizer options", "output options")
    places = [texts["train.py smat"].index(name) for name in groups]
    assert places == sorted(places), "the method's own options come first"
    assert re.search(r"--noise \{uniform,gaussian,laplace\}", texts["train.py smat"])
    assert "(default: all of the suite)" in texts["train.py ft"]
    assert "--coef FLOAT" in texts["merge.py ta"]
    assert "--coef FLOAT" not in texts["merge.py wa"]
    assert "None" not in process.stdout
    assert "suite options (--preset digits, suite digits)" in texts["train.py ft"]
    assert re.search(r"  batch_size: .*\(default: 16\)", texts["train.py ft"])
    listed = texts["train.py smat --preset minilm"].partition("suite options (--preset minilm, suite short_text)")[2]
    assert re.search(r"  max_length: .*\(default: 64\)", listed)  # the preset's
    assert re.search(r"  head_c: .*\(default: 10.0\)", listed)  # the suite's
    assert "suite options (" not in texts["merge.py ta"] + texts["eval.py"]
