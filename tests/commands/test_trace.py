"""The language experiment as a user runs it, on a tiny model and rows that the tests write themselves."""

import json
import math
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint, suites
from smat_fn.evaluate import read_results
from smat_fn.merge import ties_density
from smat_fn.suites import load_suite
from smat_fn.testing import assert_trees_equal

ROOT = Path(__file__).parents[2]
TASKS = ("C-STANCE", "MeetingBank")
WORDS = ["the", "council", "voted", "to", "keep", "the", "plan", "as", "it", "is", "and", "nothing", "else"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Folders of a model and of rows: a greedy task and a sampled one."""
    root = tmp_path_factory.mktemp("inputs")
    for task in TASKS:
        (root / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "eval"):
            rows = [
                {"prompt": f"{split} {i}: {' '.join(WORDS[i:])}", "answer": f"{'ABCD'[i % 4]} {WORDS[i].upper()}"}
                for i in range(9)
            ]
            (root / "rows" / task / f"{split}.json").write_text(json.dumps(rows))
    example = runpy.run_path(str(ROOT / "examples/trace_tiny.py"))
    texts = example["row_texts"](root / "rows", TASKS)
    example["write_model"](root / "model", texts, vocabulary=300, width=16, layers=1)
    return root


@pytest.mark.slow
def test_training_accumulates_keeps_masters_probes_and_goes_on(inputs, exits, tmp_path, capsys):
    words = ("--preset", "llama-3.2-1b", "--model", inputs / "model", "--data", inputs / "rows", "--steps", "4")
    more = ("--accumulate", "3", "--precision", "mixed", "--probe", "2", "--tasks", "MeetingBank")
    cpu = ("--suite-options", "device", "cpu")
    assert exits("train.py", "smat", *words, *more, "--out", tmp_path, "--offload", "cpu", *cpu) is None
    kept = "precision mixed, float32 master weights while training, experts stored in bfloat16"
    kept += ", float32 weights rounded to bfloat16 (--precision fp32 keeps them)"
    assert f"4 steps, {kept}, 3 micro-batches a step, seed 0" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest = checkpoint.load_manifest(tmp_path / "MeetingBank")
    assert (manifest["training"]["accumulate"], manifest["training"]["precision"]) == (3, "mixed")
    assert manifest["suite"]["dtype"] == "bfloat16"
    assert {leaf.dtype for leaf in checkpoint.load_leaves(tmp_path / "MeetingBank")[0].values()} == {torch.bfloat16}
    whole = tmp_path / "whole"
    assert exits("merge.py", "export", tmp_path / "MeetingBank", "--base", inputs / "model", "--out", whole) is None
    exported = dict(AutoModelForCausalLM.from_pretrained(whole, dtype="auto").named_parameters())
    expert = checkpoint.load_leaves(tmp_path / "MeetingBank")[0]
    assert_trees_equal(exported, {name: expert[name].float() for name in exported})  # base is stored as float32
    assert len(exported) == len(expert)
    assert AutoTokenizer.from_pretrained(whole).eos_token_id is not None
    # a merge takes the settings of the experts' preset, and those of digits drop less
    merge = ("della", "--run", tmp_path, "--coef", "0.3", "--out", tmp_path / "merged")
    assert exits("merge.py", *merge) is None
    assert checkpoint.load_manifest(tmp_path / "merged/della")["hyperparameters"]["drop_prob"] == 0.5
    assert exits("merge.py", *merge, "--preset", "digits", "--overwrite") is None
    assert checkpoint.load_manifest(tmp_path / "merged/della")["hyperparameters"]["drop_prob"] == 0.1
    # a search is on the suite that is asked for, in base's dtype, and its folder says so
    short = ("--search", "--out", tmp_path / "searched", "--suite-options", "device", "cpu", "max_new_tokens", "2")
    assert exits("merge.py", "wa", "--base", inputs / "model", "--experts", whole, *short) is None
    suite = checkpoint.load_manifest(tmp_path / "searched/wa")["suite"]
    assert (suite["dtype"], suite["max_new_tokens"]) == ("float32", 2)
    assert exits("eval.py", tmp_path / "searched", "--out", tmp_path / "scores", *cpu) is None
    probe = manifest["probe"]
    assert 0 < probe["clean"] < 10
    assert (probe["keys"], probe["alpha_min"], probe["sigma"]) == (2, 0.2, 2e-3)
    rows = [json.loads(line) for line in (tmp_path / "MeetingBank.log.jsonl").read_text().splitlines()]
    assert all(row["tokens_per_second"] > 0 and row["lr"] == 2e-5 for row in rows)
    again = ("--accumulate", "3", "--precision", "fp32", "--tasks", *TASKS, "--out", tmp_path, "--resume")
    text = exits("train.py", "smat", *words, *again, *cpu)
    assert "training.precision was mixed, is fp32" in text
    assert "suite.dtype was bfloat16, is float32" in text


def test_a_dry_run_prints_what_would_be_trained_and_writes_nothing(inputs, exits, tmp_path, capsys, monkeypatch):
    words = ("--preset", "llama-3.2-1b", "--model", inputs / "model", "--data", inputs / "rows")
    more = ("--out", tmp_path / "out", "--rows", "9", "--sigma", "0.001", "--dry-run")
    assert exits("train.py", "smat", *words, *more) is None
    told = capsys.readouterr().out
    for part in (
        f"model {inputs / 'model'}", "max_length 512", "batch_size 8", "dtype bfloat16", "rows 9",
        "method smat: alpha_min 0.2, drop_prob 0.5, sigma 0.001, period 4, noise uniform",
        "lr 2e-05, optimizer adamw, schedule constant, weight_decay 0.001, max_grad_norm 1.0, accumulate 1, run seed 0",
        "model.layers.0.mlp.up_proj.weight", "in 7 tensors", "C-STANCE: 10 steps (5 epochs), 9 rows of up to",
        # the gains of the three norms are 1, below which bfloat16 numbers are 2**-8 apart
        "Perturb cannot move 48 of ", "MeetingBank: 14 steps (7 epochs)", "24 steps in all",
        "cut on the right: 0.0% lose EOS, 0.0% a part of the answer, 0.0% all of it",
    ):  # fmt: skip
        assert part in told
    assert exits("train.py", "smat", *words, *more, "--suite-options", "truncate", "left") is None
    assert "cut on the left: 0.0% lose EOS" in capsys.readouterr().out
    # of your own data the experts that MergOPT's offsets count are the tasks, also where one of them is trained alone
    own = ("--preset", "lm", "--tasks", "MeetingBank", *words[2:], *more)
    for tasks, count in ((["MeetingBank"], 2), (["MeetingBank", "a", "b"], 3)):  # one expert has a partner elsewhere
        monkeypatch.setattr(suites, "task_names", lambda *_, tasks=tasks, **__: tasks)
        assert exits("train.py", "mergopt", *(word for word in own if word not in ("--sigma", "0.001"))) is None
        assert f"method mergopt: b 0.0005, k_max {count}\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    # a task that comes later has the number of the experts that it joins
    before = {"kind": "expert", "method": "mergopt", "hyperparameters": {"b": 5e-4, "k_max": 2}}
    checkpoint.write_text(tmp_path / "out/a/manifest.json", json.dumps(before))
    assert exits("train.py", "mergopt", *(word for word in own if word not in ("--sigma", "0.001"))) is None
    told = capsys.readouterr().out
    assert "method mergopt: b 0.0005, k_max 2\n" in told
    assert f"note: k_max 2 is that of the experts in {tmp_path / 'out'}, the data have 3 tasks: " in told


def test_the_presets_training_can_be_overridden(inputs, exits, tmp_path, capsys):
    words = ("--preset", "llama-3.2-1b", "--model", inputs / "model", "--data", inputs / "rows")
    more = (
        "--schedule",
        "cosine",
        "--weight-decay",
        "0",
        "--max-grad-norm",
        "inf",
        "--optimizer",
        "adam",
        "--mask-prompt",
    )
    none = ("--suite-options", "max_new_tokens", "None")
    assert exits("train.py", "ft", *words, *more, *none, "--out", tmp_path / "out", "--dry-run") is None
    told = capsys.readouterr().out
    for part in ("optimizer adam, schedule cosine, weight_decay 0.0, accumulate 1, run seed 0", "mask_prompt True"):
        assert part in told
    assert "max_grad_norm" not in told
    text = exits("train.py", "ft", *words, "--optimizer", "adam", "--out", tmp_path / "out")
    assert text.endswith("--weight-decay is 0.001, adam has none: choose optimizer adamw, or --weight-decay 0")
    text = exits("train.py", "ft", *words, "--out", tmp_path / "out", "--suite-options", "batch_size", "None")
    assert text.endswith("trace: --batch-size is None, must be an integer of at least 1")


@pytest.mark.slow
def test_experts_of_others_are_searched_on_a_suite_that_is_named(inputs, exits, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for place, name in enumerate(("base", *TASKS)):
        module = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16)
        torch.manual_seed(place)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * place * torch.randn_like(parameter))
        module.save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(inputs / "model").save_pretrained(tmp_path / name)
    words = ("ties", "--base", tmp_path / "base", "--experts", *(tmp_path / task for task in TASKS), "--search")
    named = ("device", "cpu", "max_new_tokens", 4)
    data = ("--data", inputs / "rows", "--preset", "llama-3.2-1b")
    place = (*data, "--out", tmp_path / "merged", "--suite-options", *named)
    twice = exits("merge.py", *words, *place, "data", inputs / "rows")
    assert twice.endswith("--data is also given as --suite-options data: leave one of them out")
    assert exits("merge.py", *words, *place, "only", TASKS[0]).endswith("by --tasks of train.py alone: leave it out")
    other = exits("merge.py", *words, *place, "dtype", "float32")
    assert other.endswith("as --suite-options model, dtype")
    # the preset names the suite, base the model and the dtype
    assert exits("merge.py", *words, *place) is None
    manifest = checkpoint.load_manifest(tmp_path / "merged/ties")
    assert (manifest["suite"]["name"], manifest["suite"]["dtype"]) == ("trace", "bfloat16")
    assert len(manifest["dev_curve"]) == 10
    modules = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("base", *TASKS)]
    base, *experts = [dict(module.requires_grad_(False).named_parameters()) for module in modules]
    kept = ties_density(base, dict(zip(TASKS, experts, strict=True)), keep=0.5)
    assert manifest["density"] == kept
    assert f"kept: C-STANCE {kept['C-STANCE']:.6f}, " in (tmp_path / "merged/ties/README.md").read_text()
    cpu = ("--suite-options", "device", "cpu")
    assert exits("eval.py", tmp_path / "merged", "--out", tmp_path / "scores", *cpu) is None
    assert "TIES" in capsys.readouterr().out
    # with the experts themselves, one of them named as a model and in another dtype
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / TASKS[1], dtype="float32")
    wide.save_pretrained(tmp_path / "wide")
    given = [f"{TASKS[0]}={tmp_path / TASKS[0]}", f"{TASKS[1]}={tmp_path / 'wide'}"]
    capsys.readouterr()
    assert exits("eval.py", tmp_path / "merged", *given, *cpu) is None
    assert f"note: {tmp_path / 'wide'} is rounded to bfloat16, the dtype of its suite" in capsys.readouterr().out
    given = [f"{task}={tmp_path / task}" for task in TASKS]
    assert exits("eval.py", tmp_path / "merged", *given, "--out", tmp_path / "own", *cpu) is None
    rows = read_results(tmp_path / "own" / "results.jsonl")
    suite = load_suite(**manifest["suite"] | {"device": "cpu"})
    own = {f"expert:{task}": suite.score(expert, task, "test") for task, expert in zip(TASKS, experts, strict=True)}
    assert {row.model: row.score for row in rows if row.model != "ties"} == own
    lines = map(json.loads, (tmp_path / "own" / "scores.jsonl").read_text().splitlines())
    scored = {line["model"]["fingerprint"] for line in lines if "expert:" in line["name"]}
    assert scored == set(map(checkpoint.fingerprint, experts))
    assert {(row.method, row.seed) for row in rows} == {("+".join(TASKS), 0)}
    assert exits("eval.py", *given, *cpu).endswith("or images, with --model BASE --data DATA")
    capsys.readouterr()
    assert exits("eval.py", *given, "--preset", "lm", "--model", tmp_path / "base", *data[:2], *place[-5:]) is None
    assert f"{sum(own.values()) / 2:.2f}" in capsys.readouterr().out
    # without a search: merged from disk, in several files, of experts whose folders have other names
    for task in TASKS:
        (tmp_path / task).rename(tmp_path / f"step-{task}")
    words = ("--base", tmp_path / "base", "--experts", *(f"{task}={tmp_path / f'step-{task}'}" for task in TASKS))
    more = ("--coef", manifest["hyperparameters"]["coef"], "--preset", "llama-3.2-1b", "--shard-size", "4KB")
    assert exits("merge.py", "ties", *words, *more, "--out", tmp_path / "disk") is None
    folder = tmp_path / "disk/ties"
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert list(checkpoint.load_manifest(folder)["experts"]) == list(TASKS)
    assert_trees_equal(
        dict(sorted(checkpoint.load_leaves(folder)[0].items())),
        dict(sorted(checkpoint.load_leaves(tmp_path / "merged/ties")[0].items())),
    )
    assert exits("eval.py", folder, *cpu).endswith("or images, with --model BASE --data DATA")
    scored = (*data, "--model", tmp_path / "base", "--out", tmp_path / "again", "--suite-options", *named)
    assert exits("eval.py", folder, *scored) is None  # in the dtype of its leaves
    first, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("scores", "again"))
    assert [list(line.values()) for line in first["means"].values()] == [
        list(line.values()) for line in second["means"].values()
    ]
    renamed = (
        "--base",
        tmp_path / "base",
        "--experts",
        tmp_path / "step-C-STANCE",
        "--coef",
        "1",
        "--out",
        tmp_path / "x",
    )
    assert exits("merge.py", "ta", *renamed) is None
    assert "is of step-C-STANCE, which are not tasks of suite 'trace'" in exits("eval.py", tmp_path / "x", *scored)
    other = f"C-STANC={tmp_path / 'step-C-STANCE'}"
    unknown = f"{other}: task 'C-STANC' is unknown, did you mean 'C-STANCE'? choose one of 'C-STANCE'"
    assert unknown in exits("eval.py", other, *scored)


def test_a_dry_run_of_digits_has_no_rows_to_cut(exits, tmp_path, capsys):
    short = ("--steps", "6", "--suite-options", "pretrain_steps", "10", "images_per_task", "120")
    assert exits("train.py", "ft", "--out", tmp_path / "out", "--dry-run", *short) is None
    told = capsys.readouterr().out
    assert "mirror: 6 steps\n" in told
    assert "24 steps in all" in told
    assert "weights: " not in told
    lora = ("--lora-rank", "2", "--lora-targets", "q_proj", "--precision", "mixed")
    assert exits("train.py", "ft", "--out", tmp_path / "out", "--dry-run", *lora, *short) is None
    told = capsys.readouterr().out
    assert "weights: adapters trained and stored in float32\n" in told
    assert re.search(r"q_proj.lora_A.weight \(2\) +2 x \d+ +float32 +yes +yes ", told)
    trained = re.search(r"trained: ([\d,]+) parameters in 4 tensors, ([\d.]+)%", told)
    whole = re.search(r"all: ([\d,]+) parameters", told)
    share = int(trained[1].replace(",", "")) / int(whole[1].replace(",", ""))
    assert trained[2] == f"{share:.1%}"[:-1]


def test_what_does_not_fit_is_told_in_one_line_before_training(inputs, exits, tmp_path):
    def refused(*words, model=inputs / "model", data=inputs / "rows"):
        out = ("--out", tmp_path / "out", "--preset", "llama-3.2-1b", "--model", model, "--data", data)
        text = exits("train.py", "smat", *out, *words)
        assert text.startswith("train.py:")
        assert all(line.startswith("  ") for line in text.split("\n")[1:])
        return text

    assert "there is no folder" in refused(model=tmp_path / "model")
    assert "task 'FOMC' is unknown" in refused("--tasks", "FOMC")
    (tmp_path / "rows" / "mine").mkdir(parents=True)
    (tmp_path / "rows" / "mine" / "train.json").write_text('[{"prompt": "a", "answer": "b"}]')
    assert "task 'mine' has no number of epochs: give --epochs or --steps" in refused(data=tmp_path / "rows")
    text = refused("--epochs", "1", data=tmp_path / "rows")
    assert "mine has no test and no dev split, and none can be made of its 1 rows of train: " in text
    assert "epochs of mine is 0" in refused("--epochs", "0", data=tmp_path / "rows")
    for bound in ("0", "nan"):
        assert refused("--max-grad-norm", bound).endswith(f"is {bound}, must be positive (inf: no clipping)")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_experts_move_to_a_wider_model(inputs, exits, tmp_path, capsys):
    example = runpy.run_path(str(ROOT / "examples/trace_tiny.py"))
    texts = list(example["row_texts"](inputs / "rows", TASKS))
    example["write_model"](tmp_path / "wide", texts, vocabulary=300, width=32, layers=1, seed=1)
    backwards = [text[::-1] for text in texts]
    example["write_model"](tmp_path / "other", backwards, vocabulary=300, width=16, layers=1, seed=1)
    cpu = ("--suite-options", "device", "cpu")
    words = ("--preset", "lm", "--model", inputs / "model", "--data", inputs / "rows", "--steps", "2")
    assert exits("train.py", "ft", *words, "--precision", "fp32", "--out", tmp_path / "run", *cpu) is None
    move = ("transport", "--run", tmp_path / "run", "--model", tmp_path / "wide", "--rows", "4")
    refused = exits("merge.py", *move, "--out", tmp_path / "moved")
    assert "theseus alone moves to other shapes: pass --method theseus" in refused
    assert not (tmp_path / "moved").exists()
    other = ("transport", "--run", tmp_path / "run", "--model", tmp_path / "other", "--out", tmp_path / "moved_other")
    assert exits("merge.py", *other) is None
    assert "differently from the old base, e.g. " in (out := capsys.readouterr().out)
    assert "changes of embeddings are moved by number\n" in out
    assert exits("merge.py", *move, "--method", "theseus", "--out", tmp_path / "moved") is None
    assert f"moved: {tmp_path / 'moved' / 'MeetingBank'}, coefficient 1" in capsys.readouterr().out
    base, expert = (checkpoint.load_leaves(tmp_path / "moved" / name)[0] for name in ("base", "MeetingBank"))
    assert base["model.norm.weight"].shape == expert["model.norm.weight"].shape == (32,)
    changed = {path for path, leaf in base.items() if not torch.equal(expert[path], leaf)}
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"} <= changed
    assert exits("merge.py", "ta", "--run", tmp_path / "moved", "--coef", "0.3", "--out", tmp_path / "merged") is None


def test_scores_by_likelihood_decode_nothing_from_training_to_the_table(inputs, exits, tmp_path, capsys, monkeypatch):
    for task in ("first", "second"):
        (tmp_path / "rows" / task).mkdir(parents=True)
        for split in ("train", "dev", "eval"):
            rows = [
                {"prompt": f"{task} {split} {i}", "answer": WORDS[i], "choices": ["else", *WORDS[:4]]} for i in range(4)
            ]
            (tmp_path / "rows" / task / f"{split}.json").write_text(json.dumps(rows))
    monkeypatch.setattr("smat_fn.evaluate.decoding._decode", lambda *args: pytest.fail("nothing is decoded"))
    cpu, run = ("--suite-options", "device", "cpu"), tmp_path / "run"
    words = ("--preset", "lm", "--model", inputs / "model", "--data", tmp_path / "rows", "--metric", "likelihood")
    training = (*words, "--steps", "4", "--lr", "1e-2", "--precision", "fp32", "--out", run)
    assert exits("train.py", "ft", *training, *cpu, "--eval-every", "2") is None
    assert exits("merge.py", "ta", "--run", run, "--search", "--out", run / "merged", *cpu) is None
    curve = checkpoint.load_manifest(run / "merged/ta")["dev_curve"]
    assert len({score for _, score in curve}) == len(curve) == 10
    assert all(0 < score < 100 for _, score in curve)
    assert exits("eval.py", run, "--out", tmp_path / "scores", *cpu) is None
    assert {row.model: 0 < row.score < 100 for row in read_results(tmp_path / "scores/results.jsonl")} == {
        "expert:first": True, "expert:second": True, "ta": True,
    }  # fmt: skip
    by_choice = ("--out", tmp_path / "chosen", *cpu, "metric", "choice")
    assert exits("merge.py", "ta", "--run", run, "--search", "--grid", "0.3", "0.6", *by_choice) is None
    suite = checkpoint.load_manifest(tmp_path / "chosen/ta")["suite"]
    assert suite["metric"] == "choice"
    assert all(score % 12.5 == 0 for _, score in checkpoint.load_manifest(tmp_path / "chosen/ta")["dev_curve"])


@pytest.fixture(scope="module")
def texts(inputs):
    """A folder of plain texts (law) beside rows of prompts and answers (qa)."""
    for task in ("law", "qa"):
        (inputs / "texts" / task).mkdir(parents=True)
    for split in ("train", "dev", "eval"):
        rows = [{"text": f"{split} {i}: {' '.join(WORDS[i:] + WORDS)}", "url": i} for i in range(9)]
        (inputs / f"texts/law/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (inputs / f"texts/qa/{split}.json").write_text((inputs / f"rows/C-STANCE/{split}.json").read_text())
    return inputs / "texts"


def test_a_metric_that_is_given_for_plain_texts_alone_is_an_error_and_the_default_is_quiet(
    inputs, texts, exits, tmp_path, capsys
):
    shutil.copytree(texts / "law", tmp_path / "rows/law")
    run, cpu = tmp_path / "run", ("--suite-options", "device", "cpu")
    words = ("train.py", "ft", "--preset", "lm", "--model", inputs / "model", "--precision", "fp32", "--out", run)
    said = (
        "metric rouge-l compares answers, and law are plain texts: leave the metric out, they are scored by likelihood"
    )
    assert said in str(exits(*words, "--data", tmp_path / "rows", "--metric", "rouge-l", *cpu))
    assert not run.exists()
    train = ("--data", tmp_path / "rows", "--steps", "2", "--lr", "1e-2")
    assert exits(*words, *train, *cpu) is None
    assert checkpoint.load_manifest(run / "base")["suite"]["metric"] == "rouge-l", "recipes name the default"
    merged = ("merge.py", "ta", "--run", run, "--search", "--grid", "0.5", "1", "--out", run / "merged")
    for command in merged, ("eval.py", run, "--out", tmp_path / "scores"):
        assert said in str(exits(*command, *cpu, "metric", "rouge-l"))
        assert exits(*command, *cpu) is None
    capsys.readouterr()
    note = "note: metric exact scores none of law, which are plain texts"
    for tasks, told in ((("law",), True), (("qa",), False), (("law", "qa"), False)):
        both = ("--data", texts, "--tasks", *tasks, "--metric", "exact", "--dry-run")
        assert exits(*words[:-1], tmp_path / "other", *both, *cpu) is None
        assert (note in capsys.readouterr().out) == told


def test_experts_of_plain_texts_are_trained_merged_and_scored(inputs, texts, exits, tmp_path, capsys):
    words = ("--preset", "lm", "--model", inputs / "model", "--data", texts, "--steps", "6", "--lr", "1e-2")
    short = ("--suite-options", "device", "cpu", "max_length", "16", "max_new_tokens", "2")
    run = tmp_path / "run"
    assert exits("train.py", "ft", *words, "--dry-run", "--out", run, *short) is None
    told = capsys.readouterr().out
    assert re.search(r"law: 6 steps, 9 texts in \d+ windows of up to 16 tokens\n", told)
    assert "note: law: plain texts, scored by likelihood, 100 / perplexity" in told
    train = ("--metric", "exact", "--eval-every", "3", "--precision", "fp32")
    assert exits("train.py", "smat", *words, *train, "--out", run, *short) is None
    assert exits("merge.py", "ta", "--run", run, "--search", "--out", run / "merged") is None
    assert exits("merge.py", "statistics", run, "--kinds", "fisher", "gram", "--rows", "12") is None
    for merger, *words in (("fisher", "--coef", "1"), ("reg_mean", "--coef", "1"), ("reg_mean_plus",)):
        assert exits("merge.py", merger, "--run", run, *words, "--out", run / "merged") is None, merger
    assert exits("eval.py", run, "--base", "--out", tmp_path / "scores") is None
    assert "note: law: plain texts" in capsys.readouterr().out
    scores = {(r.method, r.model, r.task): r.score for r in read_results(tmp_path / "scores/results.jsonl")}
    suite = load_suite(**checkpoint.load_manifest(run / "merged/ta")["suite"], device="cpu")
    expected, count = 0.0, 0
    for line in (texts / "law/eval.jsonl").read_text().splitlines():
        ids = suite._lm.tokenizer(json.loads(line)["text"] + "</s>")["input_ids"]
        for start in range(0, len(ids) - 1, 15):
            window = torch.tensor([ids[start : start + 16]])
            with torch.no_grad():  # the base, by transformers' own loss
                loss = suite._lm.module(input_ids=window, labels=window).loss
            expected, count = expected + float(loss) * (window.shape[1] - 1), count + window.shape[1] - 1
    assert scores["BASE", "expert:law", "law"] == pytest.approx(100 * math.exp(-expected / count), rel=1e-4)
    assert scores["SMAT", "expert:law", "law"] > scores["BASE", "expert:law", "law"]
    assert {
        ("SMAT", merged, task) for merged in ("ta", "fisher", "reg_mean", "reg_mean_plus") for task in ("law", "qa")
    } <= {*scores}
