"""Language tasks of plain texts: windows as batches, likelihood as score, folders of both kinds, and their errors."""

import importlib.util
import json
import math
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint, random
from smat_fn.config import Dev, Finetune, TaskArithmetic, Training
from smat_fn.data import text
from smat_fn.errors import problems_of
from smat_fn.scripts.evaluate import evaluation, models
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.describe import _task_line
from smat_fn.scripts.train.joint import joint_run
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import cut_notes, train_run
from smat_fn.suites import load_suite
from smat_fn.suites.trace_rows import given_metric

HERE = Path(__file__).parent
EXAMPLE = runpy.run_path(str(HERE.parents[1] / "examples/trace_tiny.py"))
PAIRS = runpy.run_path(str(HERE.parent / "models/test_seq2seq.py"))
_spec = importlib.util.spec_from_file_location("small_hub", HERE.parent / "folders/small_hub.py")
small_hub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small_hub)
WORDS = ["the", "party", "of", "the", "first", "part", "shall", "pay", "all", "costs", "and", "fees"]
SIZES = {"train": 11, "dev": 5, "eval": 4}
LIMIT = 12  # tokens of a window: some texts are longer


def texts_of(split):
    """Texts of 2 to 24 words, no two alike."""
    return [f"{split} {i}: {' '.join(WORDS[i % 5 :] * (1 + i % 2))}"[: 12 + 17 * i] for i in range(SIZES[split])]


def write_texts(folder, task, splits=SIZES):
    (folder / task).mkdir(parents=True)
    for split in splits:
        rows = "".join(json.dumps({"text": own}) + "\n" for own in texts_of(split))
        (folder / task / f"{split}.jsonl").write_text(rows)
    return folder


def write_pairs(folder, task):
    (folder / task).mkdir(parents=True)
    for split, size in SIZES.items():
        rows = [{"prompt": f"{split} {i}: {' '.join(WORDS[i % 3 :])}", "answer": WORDS[i % 4]} for i in range(size)]
        (folder / task / f"{split}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, rows of plain texts (law), and a folder of both kinds (law, qa)."""
    root = tmp_path_factory.mktemp("plain")
    write_texts(root / "rows", "law")
    write_pairs(write_texts(root / "both", "law"), "qa")
    EXAMPLE["write_model"](
        root / "model", EXAMPLE["row_texts"](root / "both", ["qa"]), vocabulary=300, width=16, layers=2
    )
    return root


@pytest.fixture(scope="module")
def load(folders):
    def call(seed=3, data="rows", **options):
        data = data if data.startswith("owner/") else str(folders / data)
        given = {"model": str(folders / "model"), "data": data, "device": "cpu"}
        return load_suite("trace", **{"seed": seed, **given, "max_length": LIMIT, **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


def moved(suite, scale=0.3):
    generator = torch.Generator().manual_seed(1)
    return {name: leaf + scale * torch.randn(leaf.shape, generator=generator) for name, leaf in suite.base.items()}


def losses(suite, params, split):
    """-log p of every predicted token of the texts of a split, by the model's own logits, window after window."""
    tokenizer, module, found = suite._lm.tokenizer, suite._lm.module, []
    for own in texts_of(split):
        ids = [*tokenizer(own)["input_ids"], tokenizer.eos_token_id]
        for start in range(0, len(ids) - 1, LIMIT - 1):
            window = torch.tensor([ids[start : start + LIMIT]])
            with torch.no_grad():
                logits = torch.func.functional_call(module, dict(params), kwargs={"input_ids": window}).logits
            found += (-logits[0, :-1].log_softmax(-1).gather(1, window[0, 1:, None])[:, 0]).tolist()
    return found


def test_the_loss_is_the_mean_over_all_tokens_of_the_texts(suite):
    params, loss_fn = moved(suite), suite.loss_fn("law")
    expected = losses(suite, params, "train")
    tokenizer = suite._lm.tokenizer
    assert len(expected) == sum(len(tokenizer(own)["input_ids"]) for own in texts_of("train"))  # BOS out, EOS in
    assert suite.epoch_steps("law") == 3  # 11 texts are 22 windows
    batches = [suite.batch("law", random.key(0), step) for step in range(3)]
    parts = [(float(loss_fn(params, own)[0]), int(loss_fn(params, own)[1])) for own in batches]
    assert sum(count for _, count in parts) == len(expected)
    assert sum(loss * count for loss, count in parts) == pytest.approx(sum(expected), rel=1e-5)
    dev, own = suite.dev_batches("law"), losses(suite, params, "dev")
    assert sum(weight for _, weight in dev) == len(own)
    assert sum(float(loss_fn(params, one)[0]) * weight for one, weight in dev) == pytest.approx(sum(own), rel=1e-5)


def test_the_score_is_a_hundred_over_the_perplexity_whatever_the_batches(suite, load):
    params = moved(suite)
    for split, name in (("dev", "dev"), ("test", "eval")):
        own = losses(suite, params, name)
        expected = 100 / math.exp(sum(own) / len(own))
        for options in ({}, {"decode_batch": 1}, {"decode_batch": 3}, {"metric": "likelihood"}):
            assert load(**options).score(params, "law", split) == pytest.approx(expected, rel=1e-5)
    assert suite.repeats == {}
    assert suite.plain == {"law"}
    assert suite.notes == ("law: plain texts, scored by likelihood, 100 / perplexity",)


def test_truncate_and_mask_prompt_change_nothing(suite, load):
    other = load(truncate="left", mask_prompt=True)
    key = random.key(1)
    for step in range(3):
        ours, theirs = (one.batch("law", key, step) for one in (suite, other))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    params = moved(suite)
    assert other.score(params, "law", "test") == suite.score(params, "law", "test")


def test_split_texts_are_counted(suite, load):
    whole = load(max_length=200)
    longest = max(len(own.input_ids) for own in whole._tokens.examples("law", "train"))
    assert suite.cuts("law") == text.Cut(22, 0, 0, 0, LIMIT, 11)
    assert whole.cuts("law") == text.Cut(11, 0, 0, 0, longest, 11)
    (note,) = cut_notes(suite, ("law",))
    assert note.startswith("note: some of the 11 training texts of law have more than max_length 12 tokens: ")
    assert note.endswith("all are trained as 22 windows")
    assert cut_notes(load(truncate="left"), ("law",)) == [note]
    assert cut_notes(whole, ("law",)) == []
    assert (
        _task_line(suite, "law", Training(steps=3, lr=1.0)) == "law: 3 steps, 11 texts in 22 windows of up to 12 tokens"
    )


def test_one_folder_has_tasks_of_both_kinds(load, folders, suite):
    both = load(data="both", metric="exact", max_new_tokens=3)
    assert both.plain == {"law"}
    assert both.notes[0] == "law: plain texts, scored by likelihood, 100 / perplexity"
    params = moved(suite)
    assert both.score(params, "law", "dev") == suite.score(params, "law", "dev")
    assert both.score(params, "qa", "dev") in {100 * i / 5 for i in range(6)}
    assert both._settings["qa"].max_new_tokens == 3
    assert both.epoch_steps("qa") == 2
    assert suite.content("law", "dev") == load(data="both").content("law", "dev")
    # a metric of letters compares no text
    (folders / "letters").mkdir()
    shutil.copytree(folders / "both/law", folders / "letters/law")
    write_pairs(folders / "letters", "qa")
    for split in SIZES:
        file = folders / f"letters/qa/{split}.json"
        file.write_text(json.dumps([{**row, "answer": "A"} for row in json.loads(file.read_text())]))
    for file in ("law/dev.jsonl", "law/eval.jsonl", "qa/dev.json"):
        (folders / "letters" / file).unlink()
    own = load(data="letters", metric="label", max_new_tokens=2)
    assert 0 < own.score(params, "law", "dev") < 100


def test_the_content_of_a_score_tells_kinds_and_windows_apart(load, suite, tmp_path):
    def content(row, **options):
        data = tmp_path / str(len(list(tmp_path.iterdir())))
        (data / "law").mkdir(parents=True)
        for split in SIZES:
            (data / f"law/{split}.json").write_text(json.dumps([row]))
        own = load(data=str(data), metric="likelihood", **options)
        return own.content("law", "dev"), own.train_rows("law")["hash"], own.train_rows("law")["inputs"]

    one = content({"text": "pay\nall"})
    assert content({"text": "pay\nall"}) == one
    assert not {*one} & {*content({"prompt": "pay", "answer": "all"})[:2]}
    assert content({"text": "pay\nall"}, max_length=3)[0] != one[0]
    assert content({"text": "pay\nall"}, max_length=3)[1] == one[1]
    assert content({"text": "pay\nall"}, max_length=3)[2] != one[2]


def test_splits_are_made_of_texts_that_differ(load, tmp_path):
    write_texts(tmp_path, "law", splits=("train",))
    own = load(data=str(tmp_path))
    assert own.made == {"law": ("test", "dev")}
    every = [text for split in ("train", "dev", "test") for text in own._rows["law", split].answers]
    assert sorted(every) == sorted(texts_of("train"))
    assert len(own._rows["law", "dev"].answers) == 1
    write_texts(tmp_path / "three", "law")
    rows = "".join(json.dumps({"text": own}) + "\n" for own in [*texts_of("dev"), texts_of("train")[0]])
    (tmp_path / "three/law/dev.jsonl").write_text(rows)
    notes = load(data=str(tmp_path / "three")).notes
    assert "1 of the 6 dev rows of law are training rows too: scores on them are too high" in notes


def test_empty_texts_are_left_out_with_a_note(load, suite, tmp_path):
    """As a third of the rows of WikiText."""
    write_texts(tmp_path / "rows", "law")
    for split, count in (("train", 3), ("eval", 1)):
        file = tmp_path / f"rows/law/{split}.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text(
            "".join(lines[:2] + ['{"text": ""}\n', '{"text": " \\n "}\n', '{"text": ""}\n'][:count] + lines[2:])
        )
    own = load(data=str(tmp_path / "rows"))
    assert own.notes[:2] == (
        "3 of the 14 texts of law (train) are empty, and left out",
        "1 of the 5 texts of law (eval) are empty, and left out",
    )
    assert len(own.notes) == 1 + 2
    assert {name: value for name, value in own.train_rows("law").items() if name != "from"} == {
        name: value for name, value in suite.train_rows("law").items() if name != "from"
    }
    assert own.content("law", "test") == suite.content("law", "test")
    (tmp_path / "rows/law/dev.jsonl").unlink()
    made = load(data=str(tmp_path / "rows"))
    assert made.made == {"law": ("dev",)}
    assert sum("left out" in note for note in made.notes) == 2


def test_frozen_layers_run_once_for_a_window(suite, load):
    top = load(train_layers=1)
    params = {name: leaf + 0.1 for name, leaf in top.base.items()}
    assert 0 < len(params) < len(suite.base)
    for step in range(3):
        own, whole = (one.batch("law", random.key(0), step) for one in (top, suite))
        assert set(own) - set(whole) == {"states"}
        loss = float(suite.loss_fn("law")({**suite.base, **params}, whole)[0])
        assert float(top.loss_fn("law")(params, own)[0]) == pytest.approx(loss, rel=1e-5)


def test_kinds_that_do_not_fit_are_errors_with_a_way_out(load, folders, tmp_path):
    for metric in ("exact", "choice", "smat_fn.evaluate.metrics:exact_match"):
        with pytest.raises(
            ValueError, match=rf"metric {metric} compares answers, and law are plain texts: leave the me"
        ):
            load(metric=metric)
    note = "metric exact scores none of law, which are plain texts"
    assert note in load(data="both", metric="exact", only=("law",)).notes
    for options in ({"only": ("law",)}, {"only": ("law",), "metric": "likelihood"}, {"metric": "exact"}):
        assert not [text for text in load(data="both", **options).notes if text.startswith("metric")]
    for suite, metric, found in (
        ("rows", "rouge-l", 1),
        ("rows", None, 0),
        ("rows", "likelihood", 0),
        ("both", "f1", 0),
    ):
        suite = load(data=suite)
        assert len(given_metric(suite, {"metric": metric})) == found
    write_texts(tmp_path / "seven", "FOMC")
    with pytest.raises(ValueError, match=r"^FOMC: the rows are plain texts, and .*: give the task another name$"):
        load(data=str(tmp_path / "seven"))
    shutil.copytree(folders / "both/qa", tmp_path / "kinds/law")
    (tmp_path / "kinds/law/train.json").unlink()
    shutil.copy(folders / "rows/law/train.jsonl", tmp_path / "kinds/law")
    with pytest.raises(
        ValueError, match="law has plain texts in train and prompts with answers in dev, eval: give all"
    ):
        load(data=str(tmp_path / "kinds"))
    with pytest.raises(ValueError, match="look like plain texts, which have no conversation: leave --chat out"):
        load(chat=True)

    def engine(model, tokenizer, params, *, batch_size):
        raise AssertionError

    with pytest.raises(ValueError, match=r"likelihood reads log prob.*engine .*, and tasks that are not plain texts"):
        load(data="both", engine=engine)
    PAIRS["make_module"]("t5", dtype=torch.float32).save_pretrained(tmp_path / "t5")
    PAIRS["make_tokenizer"]().save_pretrained(tmp_path / "t5")
    with pytest.raises(
        ValueError, match=r"law: plain texts are for causal models, .*t5 is an encoder-decoder: give rows"
    ):
        load(model=str(tmp_path / "t5"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    with small_hub.serving() as served:
        for name in "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN":
            monkeypatch.delenv(name, raising=False)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        for place, values in (
            (constants, {"ENDPOINT": served.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}),
            (constants, {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_TOKEN_PATH": str(tmp_path / "token")}),
            (datasets.config, {"HF_ENDPOINT": served.url, "HF_HUB_OFFLINE": False}),
            (datasets.config, {"HF_DATASETS_CACHE": tmp_path / "datasets", "HF_MODULES_CACHE": tmp_path / "modules"}),
        ):
            for name, value in values.items():
                monkeypatch.setattr(place, name, value)
        yield served
        huggingface_hub.close_session()


def test_plain_texts_of_the_hub_are_those_of_a_folder(hub, load, folders, suite, tmp_path):
    head = ["---", "configs:", "- config_name: law", "  data_files:"]
    for split in SIZES:
        head += [f"  - split: {split}", f"    path: law/{split}.jsonl"]
    write_texts(tmp_path / "whole", "law")
    (tmp_path / "whole/README.md").write_text("\n".join([*head, "---", ""]))
    hub.add("owner/texts", tmp_path / "whole")
    found = load(data="owner/texts", tasks=("law",))
    assert (found._rows, found.plain, found.notes) == (suite._rows, suite.plain, suite.notes)
    assert found.content("law", "test") == suite.content("law", "test")
    assert "/datasets/owner/texts/resolve/" in next(path for path in hub.downloaded() if path.endswith("eval.jsonl"))
    write_texts(tmp_path / "corpus", "default", ["train"])  # as most corpora: one split, and no names of configs
    hub.add("owner/corpus", tmp_path / "corpus/default")
    shutil.copytree(tmp_path / "corpus", folders / "corpus")
    found, own = (load(data=data, tasks=("default",)) for data in ("owner/corpus", "corpus"))
    assert (found._rows, found.plain, found.made) == (own._rows, {"default"}, {"default": ("test", "dev")})
    assert {*found._rows["default", "train"].answers} < {*texts_of("train")}
    with pytest.raises(ValueError, match=r"config 'law' of the hub.* cannot be loaded .*: name its own by --tasks"):
        load(data="owner/corpus", tasks=("law",))


def test_windows_beyond_the_models_positions_are_an_error(load, monkeypatch):
    for limit in (LIMIT, LIMIT - 1):
        own = load()
        monkeypatch.setattr(own._tokens, "positions", limit)
        problems = problems_of(own.epoch_steps, "law")
        assert len(problems) == LIMIT - limit
    assert re.match(r"windows of law \(train\) have up to 12 tokens, .* 11: pass `max_length=11` or less", problems[0])
    with pytest.raises(ValueError, match=r"windows of law \(eval\)"):
        own.score(own.base, "law", "test")


def test_a_run_is_trained_searched_and_scored(load, tmp_path):
    suite, run = load(data="both", max_new_tokens=2), tmp_path / "run"
    train_run(suite, Finetune(), Training(steps=6, lr=1e-2, dev=Dev(every=3)), RunOptions(run, suite.tasks, 3))
    joined = RunOptions(tmp_path / "joint", ("joint",), 3, joint=suite.tasks)
    own, training, options = joint_run(suite, Training(steps=4, lr=1e-2), joined)
    assert own.cuts("joint")[::5] == (33, 22)  # 11 rows of qa beside 22 windows of 11 texts
    train_run(own, Finetune(), training, options)
    asked = Request([TaskArithmetic()], *find_inputs(run), out=run / "merged", search=True, seed=0)
    (merged,) = merge_run(asked)
    manifest = checkpoint.load_manifest(merged)
    assert len({score for _, score in manifest["dev_curve"]}) == 10
    rows = evaluation.evaluate(models.find_checkpoints([run, tmp_path / "joint"]), keep=tmp_path / "kept", base=True)
    scores = {(row.method, row.model, row.task): row.score for row in rows}
    base = losses(suite, suite.base, "eval")
    assert scores["BASE", "expert:law", "law"] == pytest.approx(100 / math.exp(sum(base) / len(base)), rel=1e-4)
    assert min(scores["FT", own, "law"] for own in ("expert:law", "ta", "joint")) > scores["BASE", "expert:law", "law"]
    answers = map(json.loads, (tmp_path / "kept/answers.jsonl").read_text().splitlines())
    assert {(own["reference"], len(own["prediction"].split())) for own in answers if own["task"] == "law"} == {("", 2)}


def test_scores_at_two_lengths_of_windows_have_a_note(load, tmp_path):
    for label, options in (("ONE", {}), ("TWO", {"max_length": 8}), ("THREE", {"metric": "likelihood"})):
        own = RunOptions(tmp_path / label, ("law",), 3, label=label)
        train_run(load(**options), Finetune(), Training(steps=1, lr=1e-2), own)
    one, two, three = (tmp_path / label / "law" for label in ("ONE", "TWO", "THREE"))
    notes = list[str]()
    evaluation.evaluate([one, two, three], report=notes.append)
    compared = [note for note in notes if "cannot be compared" in note]
    assert compared == [
        f"note: scores of {two} cannot be compared with those of {one}: max_length 8, of the first 12; --suite-options "
        "sets one value for all"
    ]
