"""Language tasks on a tiny model: the rows as batches, the decodes as scores, all problems before any training."""

import importlib
import json
import linecache
import runpy
import shutil
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from smat_fn import checkpoint, random, tree
from smat_fn.config import PRESETS, Dev, Finetune, TaskArithmetic, Training
from smat_fn.data import chat, text
from smat_fn.data.batching import batch_indices
from smat_fn.errors import problems_of
from smat_fn.evaluate.decoding import TRACE, Decoding, generator
from smat_fn.evaluate.metrics import TRACE_METRICS, label_accuracy, numeric_accuracy, word_rouge_l
from smat_fn.grad import value_and_grad
from smat_fn.mat import finetune
from smat_fn.models import causal_lm
from smat_fn.optim import adamw
from smat_fn.scripts.evaluate import evaluation, models
from smat_fn.scripts.merge.experts.inputs import facts_of, load_inputs
from smat_fn.scripts.merge.experts.suite import changed_rows, row_notes
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.joint import joint_run
from smat_fn.scripts.train.loop import budget
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite, task_names, trace, trace_rows, trace_states

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples/trace_tiny.py"))
WORDS = ["hold", "raise", "cut", "the", "rate", "and", "keep", "prices", "stable", "now"]


def write_rows(folder, task, sizes=(11, 3, 4), answers=("A", "B", "C")):
    """``folder/task/{train,dev,eval}.json``: prompts of a few words."""
    (folder / task).mkdir(parents=True)
    for split, size in zip(("train", "dev", "eval"), sizes, strict=True):
        rows = [
            {
                "prompt": f"{task} {split} {i}: " + " ".join(WORDS[i % 5 : i % 5 + 3 + i % 4]),
                "answer": answers[i % len(answers)],
            }
            for i in range(size)
        ]
        (folder / task / f"{split}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model and rows of a greedy and of a sampled task."""
    root = tmp_path_factory.mktemp("trace")
    for task in ("MeetingBank", "FOMC"):
        write_rows(root / "rows", task)
    texts = EXAMPLE["row_texts"](root / "rows", ["FOMC", "MeetingBank"])
    EXAMPLE["write_model"](root / "model", texts, vocabulary=300, width=16, layers=1)
    return root


@pytest.fixture(scope="module")
def load(folders):
    def call(seed=3, **options):
        given = {"model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu", "max_new_tokens": 4}
        return load_suite("trace", **{"seed": seed, **given, **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


@pytest.fixture(scope="module")
def lm(folders):
    return causal_lm.load(folders / "model")


def pairs(folders, task, split):
    return [
        (row["prompt"], row["answer"]) for row in json.loads((folders / "rows" / task / f"{split}.json").read_text())
    ]


def test_the_base_is_every_leaf_of_the_model_and_the_masked_set_that_of_blocks(suite, lm):
    assert list(suite.base) == list(lm.params)
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in lm.params.items())
    masked = {name for name, leaf in suite.base.items() if suite.where(name, leaf)}
    assert masked == {n for n in suite.base if "_proj" in n}
    assert len(masked) == 7


def test_answers_beyond_the_models_positions_are_one_line_for_all_tasks(load, monkeypatch):
    own = load()
    monkeypatch.setattr(own._tokens, "positions", 3)
    told = "max_new_tokens of FOMC, MeetingBank is 4, more than the model's 3: pass `max_new_tokens` below it"
    for task in ("FOMC", "MeetingBank"):
        problems = problems_of(own.epoch_steps, task)
        assert problems[0] == told
        assert not any("shorten these prompts" in text for text in problems)


def test_the_papers_tasks_stand_in_the_papers_order_and_others_after_them(folders, tmp_path):
    seven = ("C-STANCE", "FOMC", "MeetingBank", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten")
    assert (
        trace.TASKS
        == seven
        == task_names("trace", data="some/dataset")
        == tuple(PRESETS["llama-3.2-1b"].training.epochs)
    )
    for task in ("zebra", "ScienceQA", "apple", "FOMC"):
        write_rows(tmp_path, task)
    (tmp_path / "notes").mkdir()
    assert task_names("trace", data=str(tmp_path)) == ("FOMC", "ScienceQA", "apple", "zebra")
    assert task_names("trace", data=str(tmp_path), tasks=["zebra"]) == ("zebra",)
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ValueError, match=r"data is a file, .*train\.jsonl: pass a folder with a folder for each task"):
        task_names("trace", data=tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match="holds no task"):
        task_names("trace", data=str(tmp_path / "notes"))
    with pytest.raises(ValueError, match=r"\['a', 'a'\]: name at least one, each once"):
        task_names("trace", tasks=["a", "a"])


def test_batches_are_the_rows_as_text_encodes_them(suite, folders, lm):
    key = random.key(8)
    examples = text.encode(pairs(folders, "FOMC", "train"), lm.tokenizer, vocabulary=len(lm.tokenizer))
    for step in (5, 0, 1):
        found = suite.batch("FOMC", key, step)
        chosen = batch_indices(key, len(examples), 8, step).tolist()
        expected = text.collate([examples[i] for i in chosen], lm.tokenizer.pad_token_id)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # 11 rows: a batch of 8 and the last one of 3, every row once
    assert suite.epoch_steps("FOMC") == 2
    rows = [tuple(row[row != 2].tolist()) for s in (0, 1) for row in suite.batch("FOMC", key, s)["input_ids"]]
    assert sorted(rows) == sorted(example.input_ids for example in examples)


def test_rows_are_tokenized_once(load, monkeypatch):
    seen, encode = [], text.encode
    monkeypatch.setattr(text, "encode", lambda rows, *args, **own: seen.append(len(rows)) or encode(rows, *args, **own))
    suite = load()
    suite.epoch_steps("FOMC")
    suite.batch("FOMC", random.key(0), 0)
    suite.batch_rows("FOMC", random.key(0), 1)
    assert seen == [11]


def test_the_loss_is_the_mean_over_every_token_that_is_real(suite, lm):
    batch = suite.batch("MeetingBank", random.key(0), 0)
    loss, tokens = suite.loss_fn("MeetingBank")(suite.base, batch)
    with torch.no_grad():
        logits = lm.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    scores = logits.double().log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    real = batch["attention_mask"][:, 1:].bool()
    assert tokens == real.sum()
    torch.testing.assert_close(loss.double(), -scores[real].mean(), rtol=1e-5, atol=0)
    assert not real.all()


def test_options_reach_the_rows(load, suite):
    key = random.key(0)
    short = load(max_length=6, batch_size=2, rows=5, mask_prompt=True, truncate="prompt-middle")
    assert short.epoch_steps("FOMC") == 3
    batch = short.batch("FOMC", key, 0)
    assert batch["input_ids"].shape == (2, 8)
    assert int(batch["attention_mask"].sum()) == 12
    assert int((batch["labels"] >= 0).sum()) < 12
    assert short.cuts("FOMC")[:4] == (5, 0, 0, 0), "prompts alone are cut"
    assert load(max_length=6, rows=5).cuts("FOMC").eos == 1
    assert load(max_length=2, rows=5, truncate="prompt-middle").cuts("FOMC")[:4] == (5, 1, 0, 0)
    assert suite.cuts("FOMC").eos == 0


def test_rows_that_are_not_cut_are_tokenized_once(load, folders):
    tokenized: list[str] = []
    own = load(max_length=12)

    class Counted(chat.Rendered):
        def __call__(self, texts, **options):
            tokenized.extend(texts)
            return self.tokenizer(texts, **options)

    rows, tokenizer = pairs(folders, "FOMC", "train"), own._lm.tokenizer
    lengths = [len(example.input_ids) for example in own._tokens.examples("FOMC", "train")]
    whole = text.cut_report({"FOMC": rows}, tokenizer, max_length=12)["FOMC"]
    own._tokens._tokenizer = Counted(tokenizer)
    assert own.cuts("FOMC") == whole
    assert len(tokenized) == 2 * lengths.count(12)
    longest = load(max_length=whole.longest + 1)
    longest._tokens.examples("FOMC", "train")
    longest._tokens._tokenizer = None
    assert longest.cuts("FOMC") == text.Cut(len(rows), 0, 0, 0, whole.longest)


def test_the_vocabulary_is_hashed_once_for_all_tasks(load, monkeypatch):
    own, hashed = load(), []
    monkeypatch.setattr(trace, "content_key", lambda facts: hashed.append([*facts]) or "")
    for task in own.tasks:
        own.content(task, "test")
    assert hashed.count(["all"]) == 1
    assert len(hashed) == 1 + len(own.tasks)


def test_a_gpu_decodes_as_many_rows_together_as_have_few_enough_tokens(load, monkeypatch):
    asked = []

    def engine(model, tokenizer, params, *, batch_size):
        return lambda prompts, *args, **options: asked.append((batch_size, len(prompts))) or ["A"] * len(prompts)

    suite = load(engine=engine)
    count, longest = len(suite._rows["FOMC", "test"].answers), max(map(len, suite._tokens.prompt_ids("FOMC", "test")))
    suite.score_once(suite.base, "FOMC", "test", 0)
    suite._device = torch.device("meta")
    monkeypatch.setattr(trace, "_ON_A_GPU", (256, 2 * (longest + 4)))
    suite.score_once(suite.base, "FOMC", "test", 0)
    given = load(engine=engine, decode_batch=1)
    given._device = torch.device("meta")
    given.score_once(given.base, "FOMC", "test", 0)
    assert 2 < count <= 16
    assert asked[0] == (16, count)
    assert asked[1] == (256, 2)
    assert asked[-count:] == [(1, 1)] * count
    assert sum(rows for size, rows in asked if size == 256) == count


def test_without_a_loss_on_prompts_they_are_decoded_with_their_line_end(load, folders):
    """No expert learns to write it, and a tokenizer may join it to the prompt's last character."""
    asked = []

    def engine(model, tokenizer, params, *, batch_size):
        def generate(prompts, settings, seed, **options):
            asked.extend(prompts)
            return ["A"] * len(prompts)

        return generate

    masked = load(mask_prompt=True, engine=engine)
    assert masked.score(masked.base, "FOMC", "dev") == pytest.approx(100 / 3)
    prompts = [prompt for prompt, _ in pairs(folders, "FOMC", "dev")]
    assert sorted(asked) == sorted(prompt + "\n" for prompt in prompts)
    rows = masked.dev_batches("FOMC")[0].batch
    for prompt, ids, labels in zip(prompts, rows["input_ids"], rows["labels"], strict=True):
        unseen = int((labels < 0).int().argmin())  # of the row's beginning
        assert masked._lm.tokenizer(prompt + "\n")["input_ids"] == ids[:unseen].tolist()
    assert masked.content("FOMC", "dev") != load(engine=engine).content("FOMC", "dev")


def test_a_score_is_the_metric_of_the_decodes_and_of_sampled_ones_their_mean(load, suite, folders, lm):
    params = {
        name: leaf + 0.3 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1))
        for name, leaf in suite.base.items()
    }
    generate = generator(lm.loss_fn, lm.tokenizer, params)
    for task, split, file in (("FOMC", "dev", "dev"), ("FOMC", "test", "eval"), ("MeetingBank", "test", "eval")):
        prompts, answers = zip(*pairs(folders, task, file), strict=True)
        settings = TRACE[task]._replace(max_new_tokens=4)
        texts = [generate(prompts, settings, 3, repeat=r) for r in range(settings.repeats)]
        scores = [TRACE_METRICS[task](own, answers, prompts) for own in texts]
        assert suite.score(params, task, split) == fmean(scores)
        assert [suite.score_once(params, task, split, r) for r in range(settings.repeats)] == scores
    assert texts[0] != texts[1] != texts[2]
    assert suite.repeats == {"MeetingBank": 3}
    assert (twice := load(repeats=2)).repeats == {"MeetingBank": 2}
    assert twice.recipe == {**suite.recipe, "repeats": 2}
    assert load(repeats=1).repeats == {}
    assert load(repeats=2, tasks=("FOMC",)).notes == (
        "repeats 2 changes no score: all tasks are decoded greedily, once",
    )
    assert "repeats" not in suite.recipe  # of runs begun before there was the option, which resume


def test_scoring_leaves_the_model_as_it_was(suite):
    kept = tree.clone(suite.base)
    suite.score({name: torch.zeros_like(leaf) for name, leaf in kept.items()}, "FOMC", "dev")
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in kept.items())
    with pytest.raises(ValueError, match=r"lacks parameter 'model\.norm\.weight'"):
        suite.score({n: leaf for n, leaf in kept.items() if n != "model.norm.weight"}, "FOMC", "dev")


def test_a_method_learns_the_rows(suite):
    method = finetune.build(suite.loss_fn("FOMC"), adamw(1e-2, weight_decay=0.0), suite.base, donate=True)
    key, state, losses = random.key(0), method.init(suite.base), []
    for step in range(40):
        state, info = method.update(key, state, suite.batch("FOMC", key, step))
        losses.append(info.loss.item())
    assert fmean(losses[-2:]) < 0.5 * losses[0]


def test_the_recipe_is_json_with_absolute_paths_and_rebuilds_the_suite(load, suite, folders, monkeypatch):
    monkeypatch.chdir(folders)
    assert load(model="model", data="./rows").recipe == suite.recipe
    recipe = json.loads(json.dumps(suite.recipe))
    assert (recipe["model"], recipe["data"]) == (str(folders / "model"), str(folders / "rows"))
    assert recipe["tasks"] == ["FOMC", "MeetingBank"]
    twin = load_suite(**recipe, device="cpu")
    assert twin.recipe == suite.recipe
    assert checkpoint.fingerprint(twin.base) == checkpoint.fingerprint(suite.base)
    assert twin.score(twin.base, "MeetingBank", "dev") == suite.score(suite.base, "MeetingBank", "dev")


def test_steps_come_from_rows_and_epochs(suite):
    training = Training(None, 1e-3, epochs={"FOMC": 3, "MeetingBank": 7})
    assert [budget(suite, task, training).steps for task in suite.tasks] == [3 * 2, 7 * 2]
    assert budget(suite, "FOMC", training).epochs == {"FOMC": 3}
    assert budget(suite, "FOMC", Training(5, 1e-3, epochs={"FOMC": 3})) == Training(5, 1e-3)


def test_tasks_of_ones_own_are_decoded_greedily_and_scored_by_the_chosen_metric(load, tmp_path):
    write_rows(tmp_path, "mine", answers=("A", "B"))
    assert trace.settings_of("mine", trace.TraceOptions("m", "d")) == Decoding(100)
    for name, metric in {"label": label_accuracy, "number": numeric_accuracy, "rouge-l": word_rouge_l}.items():
        suite = load(data=str(tmp_path), metric=name)
        seen = []

        def spy(texts, answers, prompts, seen=seen, metric=metric):
            seen.append((len(texts), answers))
            return metric(texts, answers, prompts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace, "metric_of", {name: spy}.__getitem__)
            suite.score(suite.base, "mine", "dev")
        assert seen == [(3, ("A", "B", "A"))]
        assert suite.repeats == {}


def test_a_metric_that_scores_no_task_is_a_note(load):
    assert load().notes == ()
    assert load(metric="exact").notes == ("metric exact scores no task: the paper's seven have metrics of their own",)


def test_columns_of_other_names_are_named_and_stay_in_the_recipe(load, tmp_path):
    write_rows(tmp_path, "mine")
    for file in (tmp_path / "mine").iterdir():
        file.write_text(file.read_text().replace('"prompt"', '"question"'))
    with pytest.raises(ValueError, match=r"column 'prompt' is missing.*--suite-options columns prompt=NAME"):
        load(data=str(tmp_path))
    suite = load(data=str(tmp_path), columns="prompt=question")
    assert suite.recipe["columns"] == {"prompt": "question"}
    assert load(data=str(tmp_path), columns={"prompt": "question"}).recipe == suite.recipe
    twin = load_suite(**json.loads(json.dumps(suite.recipe)), device="cpu")
    assert torch.equal(*(s.batch("mine", random.key(0), 0)["input_ids"] for s in (suite, twin)))
    for bad in ("question", "prompt=", 3):
        with pytest.raises(ValueError, match="must be pairs OUR=SOURCE of names: prompt=question,answer=reply"):
            load(data=str(tmp_path), columns=bad)


def test_answers_that_a_metric_of_letters_can_never_count_are_told(load, tmp_path):
    write_rows(tmp_path, "mine", answers=("good", "poor"))
    load(data=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"no answer of mine \(dev\) begins with a stand-alone letter A to D.*mine \(eval\)"
    ):
        load(data=str(tmp_path), metric="label")
    write_rows(tmp_path / "some", "mine", answers=("A", "e", "b"))
    with pytest.raises(ValueError, match=r"answer of row 1 of mine \(dev\) does not begin .*: the same text would"):
        load(data=str(tmp_path / "some"), metric="label")
    load(data=str(tmp_path / "some"))
    write_rows(tmp_path / "some", "FOMC", answers=("A", "e", "b"))  # the paper's rows are as they are
    dev, test = load(data=str(tmp_path / "some"), tasks=("FOMC",)).notes
    assert dev.startswith("1 of 3 answers of FOMC (dev) do not begin with a stand-alone letter A to D")
    assert test.startswith("1 of 4 answers of FOMC (eval) do not")


def test_class_words_that_begin_with_a_letter_are_not_letters(load, tmp_path):
    write_rows(tmp_path / "words", "mine", answers=("business", "Crime", "a dog"))
    told = r"no answer of mine \(dev\) .*'business'; write letters \(.*\), or choose another metric, such as exact"
    with pytest.raises(ValueError, match=told):
        load(data=str(tmp_path / "words"), metric="label")
    write_rows(tmp_path / "letters", "mine", answers=("A\nBecause the answer is B", "B: hawkish", "c"))
    load(data=str(tmp_path / "letters"), metric="label")
    write_rows(tmp_path / "science", "ScienceQA", answers=("A\nBecause", "Because", "B"))  # first characters count
    assert load(data=str(tmp_path / "science"), tasks=("ScienceQA",)).notes == ()


def test_answers_that_a_metric_compares_badly_are_notes(load, tmp_path):
    def notes(metric, *answers):
        write_rows(tmp_path / metric, "mine", answers=answers)
        found = load(data=str(tmp_path / metric), metric=metric).notes
        return [note for note in found if "answers of mine (" in note]

    dev, test = notes("number", "7", "1,000", "-2.5")
    assert dev.startswith("of the 3 answers of mine (dev) 1 are not plain numbers, and count only where the whole")
    assert dev.endswith("the first is '1,000'")
    assert "(eval)" in test
    odd = "\u9996\u90fd\u662f\u5317\u4eac", "Beijing", ""
    for metric in ("rouge-l", "f1", "contains"):
        own = notes(metric, *odd)
        assert sum("(dev) 1 have no spaces between words, which this metric compares" in note for note in own) == 1
        assert sum("(dev) 1 are empty" in note for note in own) == (metric != "f1")
    assert notes("exact", *odd) == []
    write_rows(tmp_path / "symbols", "mine", answers=("+", "-", "7"))
    (dev, _) = load(data=str(tmp_path / "symbols"), metric="contains").notes
    assert "(dev) 2 are empty or punctuation alone, which this metric never" in dev


def test_dev_answers_that_are_longer_than_what_is_decoded_are_a_note(load, tmp_path):
    write_rows(tmp_path, "mine", answers=("hold the rate and keep prices stable now", "hold", "hold"))
    suite = load(data=str(tmp_path), max_new_tokens=4)
    tokens = len(suite._lm.tokenizer("hold the rate and keep prices stable now", add_special_tokens=False)["input_ids"])
    assert tokens > 4
    assert suite.notes == (
        f"1 of the 3 dev answers of mine have more than the 4 tokens that are decoded, up to {tokens}: "
        f"--suite-options max_new_tokens {tokens + 1} scores them whole",
    )
    assert load(data=str(tmp_path), max_new_tokens=tokens).notes == ()


def test_prompts_whose_last_token_takes_the_line_end_are_a_note(load, folders, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folders / "model", model)
    file = model / "tokenizer.json"
    facts = json.loads(file.read_text())
    facts["added_tokens"] += [
        {**facts["added_tokens"][0], "id": 299, "content": "\n", "special": False, "lstrip": True}
    ]
    file.write_text(json.dumps(facts))
    write_rows(tmp_path / "rows", "mine")
    rows = json.loads((tmp_path / "rows/mine/dev.json").read_text())
    ends = [rows[0], *({**row, "prompt": row["prompt"] + " "} for row in rows[1:])]  # joined to the line end
    (tmp_path / "rows/mine/dev.json").write_text(json.dumps(ends))
    options = {"model": str(model), "data": str(tmp_path / "rows")}
    (note,) = load(**options).notes
    assert "joins the line end that follows a prompt to its last token in 2 of 3 dev rows of mine" in note
    assert load(**options, mask_prompt=True).notes == ()


def test_answers_that_the_line_end_takes_tokens_of_or_that_hold_special_ones_are_notes(load, folders, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folders / "model", model)
    facts = json.loads((model / "tokenizer.json").read_text())
    facts["added_tokens"] += [
        {**facts["added_tokens"][0], "id": 299, "content": "\n ", "special": False},
        {**facts["added_tokens"][0], "id": 298, "content": "<yes>", "special": True},
    ]
    (model / "tokenizer.json").write_text(json.dumps(facts))
    own = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(own | {"additional_special_tokens": ["<yes>"]}))
    write_rows(tmp_path / "rows", "mine", answers=("A", " B", "<yes>"))
    options = {"model": str(model), "data": str(tmp_path / "rows")}
    special, again = load(**options).notes
    told = "hold special tokens of the tokenizer ('<yes>'), which decoding leaves out, so that the same answer counts"
    assert special.startswith(f"answers of mine (dev) {told}")
    assert again.startswith(f"answers of mine (eval) {told}")
    assert load(**options, metric="likelihood").notes == ()
    joined = [note for note in load(**options, mask_prompt=True).notes if "joins" in note]
    assert len(joined) == 1
    assert "joins the line end that follows a prompt to the answer in 1 of 3 dev rows of mine" in joined[0]


def test_rows_that_were_trained_on_are_known_again_without_a_tokenizer(load, tmp_path):
    write_rows(tmp_path, "mine")
    suite = load(data=str(tmp_path))
    manifest = {"train_rows": suite.train_rows("mine"), "suite": dict(suite.recipe), "task": "mine"}
    assert row_notes(suite, {"mine": manifest, "other": {}}) == []
    assert changed_rows(suite, "none", manifest, "dev") == ""
    (tmp_path / "mine/train.json").rename(tmp_path / "mine/kept.json")
    (tmp_path / "mine/eval.json").rename(tmp_path / "mine/train.json")
    (tmp_path / "mine/kept.json").rename(tmp_path / "mine/eval.json")
    (note,) = row_notes(load(data=str(tmp_path), max_new_tokens=3), {"mine": manifest})
    place = tmp_path / "mine/train.json"
    told = f"expert 'mine' was trained on other rows than {place} holds now, or in another order: rows of dev may have"
    assert note.startswith(told)
    assert changed_rows(load(data=str(tmp_path), rows=2), "mine", manifest, "dev") == ""  # of other options


def test_data_problems_are_told_together_before_the_model_is_loaded(load, tmp_path, monkeypatch):
    monkeypatch.setattr(causal_lm, "load", lambda *a, **k: pytest.fail("the model is not needed"))
    write_rows(tmp_path / "rows", "FOMC")
    (tmp_path / "rows" / "FOMC" / "dev.json").write_text('[{"prompt": "a"}]')
    (tmp_path / "rows" / "FOMC" / "eval.json").unlink()
    with pytest.raises(ValueError, match=r"other has no eval\.json") as error:
        load(data=str(tmp_path / "rows"), tasks=["FOMC", "other"], model=str(tmp_path / "none"), decode_batch=0)
    message = str(error.value)
    for part in (
        "'answer'",
        "other has no train.json",
        "other has no dev.json",
        f"no folder {tmp_path / 'none'}",
        "decode_batch is 0",
    ):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("gone", [("dev",), ("dev", "eval")])
def test_splits_that_a_task_lacks_are_made_from_train(load, tmp_path, gone):
    write_rows(tmp_path / "rows", "mine", sizes=(30, 3, 4))
    write_rows(tmp_path / "rows", "C-STANCE", sizes=(30, 3, 4), answers="ABB")
    file = tmp_path / "rows/mine/train.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([*rows, {**rows[0], "answer": "another"}]))  # a prompt with two answers
    for task in ("mine", "C-STANCE"):
        for split in gone:
            (tmp_path / "rows" / task / f"{split}.json").unlink()
    suite = load(data=str(tmp_path / "rows"))
    whole, own = suite._rows["mine", "train"], {split: suite._rows["mine", split] for split in ("train", "dev", "test")}
    prompts = {split: set(rows.prompts) for split, rows in own.items()}
    assert not prompts["train"] & (prompts["dev"] | prompts["test"])
    assert not prompts["dev"] & prompts["test"]
    sizes = {split: len(rows.answers) for split, rows in own.items()}
    assert sizes["dev"] == {1: 6, 2: 4}[len(gone)]  # at most a fifth of what is left
    assert ("another" in whole.answers) == (rows[0]["prompt"] in prompts["train"])
    lacks = {1: "no dev", 2: "no test and no dev"}[len(gone)]
    counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
    assert f"mine has {lacks} split, made from train: {counts} rows" in suite.notes
    assert suite._rows["C-STANCE", "dev"].answers.count("A") == {1: 2, 2: 1}[len(gone)]  # a third, as of train
    again = load(data=str(tmp_path / "rows"), rows=2)
    assert {split: again._rows["mine", split].prompts for split in own} == {s: r.prompts[:2] for s, r in own.items()}


def test_made_splits_have_every_letter_whatever_follows_it(load, tmp_path):
    answers = [f"{letter}. because {i}" for i, letter in enumerate("ABCD" * 3)]
    write_rows(tmp_path / "rows", "ScienceQA", sizes=(240, 3, 4), answers=answers)
    write_rows(tmp_path / "rows", "mine", sizes=(240, 3, 4), answers=answers)
    for task, split in (("ScienceQA", "dev"), ("ScienceQA", "eval"), ("mine", "dev"), ("mine", "eval")):
        (tmp_path / "rows" / task / f"{split}.json").unlink()
    for options in ({"tasks": ["ScienceQA"]}, {"tasks": ["mine"], "metric": "label"}):
        suite = load(data=str(tmp_path / "rows"), **options)
        (task,) = suite.tasks
        for split, least in (("dev", 9), ("test", 12)):
            letters = [answer[0] for answer in suite._rows[task, split].answers]
            assert min(letters.count(letter) for letter in "ABCD") >= least
        assert suite.made == {task: ("test", "dev")}


def test_answers_without_a_letter_are_told_by_the_rows_of_train_before_they_are_split(load, tmp_path):
    write_rows(tmp_path / "rows", "mine", sizes=(40, 3, 4), answers=["A", "B", "C", "x"])
    (tmp_path / "rows/mine/dev.json").unlink()
    with pytest.raises(ValueError, match=r"the answer of rows 3, 7, .* of mine \(train\) does not begin with a stand-"):
        load(data=str(tmp_path / "rows"), metric="label")


def test_a_misspelled_file_is_told_and_no_split_made(load, tmp_path):
    write_rows(tmp_path / "rows", "mine", sizes=(40, 3, 4))
    (tmp_path / "rows/mine/dev.json").rename(tmp_path / "rows/mine/validaton.json")
    with pytest.raises(
        ValueError, match=r"mine has no dev.json.*holds \['eval.json', 'train.json', 'validaton.json'\]"
    ):
        load(data=str(tmp_path / "rows"))


def test_a_task_without_training_rows_is_told_with_all_that_it_lacks(load, tmp_path):
    write_rows(tmp_path / "rows", "mine", sizes=(40, 3, 4))
    for split in ("train", "eval"):
        (tmp_path / f"rows/mine/{split}.json").unlink()
    with pytest.raises(ValueError, match=r"mine has no train\.json.*; .*mine has no eval\.json"):
        load(data=str(tmp_path / "rows"))


def test_a_task_with_too_few_rows_for_a_split_says_so(load, tmp_path):
    write_rows(tmp_path / "rows", "mine", sizes=(1, 3, 4))
    (tmp_path / "rows/mine/dev.json").unlink()
    with pytest.raises(ValueError, match="mine has no dev split, and none can be made of its 1 rows of train: "):
        load(data=str(tmp_path / "rows"))


def test_a_hub_that_fails_is_asked_once(load, monkeypatch):
    asked = []

    def fails(source, task, split, columns):
        asked.append((source, task, split))
        raise ValueError("cannot be had")

    monkeypatch.setattr(trace_rows, "load_rows", fails)
    with pytest.raises(ValueError, match=r"^cannot be had$"):
        load(data="nobody/none")
    assert asked == [("nobody/none", "C-STANCE", "train")]


def test_bad_options_are_told_together(load):
    with pytest.raises(ValueError, match="max_length is 1") as error:
        load(max_length=1, batch_size=0, rows=2.5, metric="bleu", truncate="middle", mask_prompt=1)
    for part in ("batch_size is 0", "rows is 2.5", "metric 'bleu'", "truncate 'middle'", "mask_prompt is 1"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"no options \['epochs'\].*'device'"):
        load(epochs=3)
    with pytest.raises(ValueError, match="trace needs model and data"):
        load_suite("trace", seed=0)
    with pytest.raises(ValueError, match="device 'gpu' is unknown"):
        load(device="gpu")
    with pytest.MonkeyPatch.context() as two_gpus:
        two_gpus.setattr(torch.cuda, "is_available", lambda: True)
        two_gpus.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(ValueError, match="device 'cuda:2': torch sees 2 GPUs here, the last one is cuda:1"):
            load(device="cuda:2")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        load(dtype="int8")


def test_unknown_tasks_and_splits_are_refused(suite):
    for call in (suite.loss_fn, suite.epoch_steps, suite.cuts, lambda task: suite.batch(task, random.key(0), 0)):
        with pytest.raises(ValueError, match=r"trace task 'C-STANCE' is unknown.*'FOMC'"):
            call("C-STANCE")
    with pytest.raises(ValueError, match=r"split 'train' is unknown"):
        suite.score(suite.base, "FOMC", "train")


def test_a_base_that_gives_no_finite_loss_is_not_blamed_on_the_learning_rate(suite, tmp_path):
    broken = suite.replace(base={name: leaf * float("nan") for name, leaf in suite.base.items()})
    with pytest.raises(ValueError, match=r"loss of FOMC is nan at step 0, on training rows .*: no step was trained"):
        train_run(broken, Finetune(), Training(2, 1e-3), RunOptions(tmp_path, ["FOMC"], 0))


def test_models_that_do_not_fit_are_told_before_training(load, folders, tmp_path):
    def edited(name, file, change):
        shutil.copytree(folders / "model", tmp_path / name)
        values = json.loads((tmp_path / name / file).read_text())
        change(values)
        (tmp_path / name / file).write_text(json.dumps(values))
        return str(tmp_path / name)

    config = "tokenizer_config.json"
    with pytest.raises(ValueError, match="has no EOS token"):
        load(model=edited("eos", config, lambda values: values.pop("eos_token")))
    short = edited("short", "config.json", lambda values: values.update(max_position_embeddings=20))
    with pytest.raises(
        ValueError, match=r"rows of FOMC have up to \d+ tokens, more than the model's 20: pass `max_len"
    ):
        load(model=short).epoch_steps("FOMC")
    room = edited("room", "config.json", lambda values: values.update(max_position_embeddings=40))
    with pytest.raises(
        ValueError, match=r"prompts of FOMC .* with 20 new .*: shorten these prompts, or pass `max_new_"
    ):
        load(model=room, max_new_tokens=20).epoch_steps("FOMC")
    EXAMPLE["write_model"](tmp_path / "small", ["a"], vocabulary=300, width=16, layers=1)
    for file in ("tokenizer.json", config):
        shutil.copy(folders / "model" / file, tmp_path / "small" / file)
    with pytest.raises(ValueError, match="the embedding has 259 rows, too few for the tokenizer"):
        load(model=str(tmp_path / "small"))


def test_a_suite_over_a_device_map_is_the_same_suite(load, suite, folders):
    pytest.importorskip("accelerate")
    mapped = load(device=None, device_map="auto")
    assert mapped.recipe == suite.recipe
    assert checkpoint.fingerprint(mapped.base) == checkpoint.fingerprint(suite.base)
    assert mapped.score(mapped.base, "MeetingBank", "dev") == suite.score(suite.base, "MeetingBank", "dev")
    with pytest.raises(ValueError, match="device is 'cpu' and device_map is given too: give one of them"):
        load(device_map="auto")


def test_only_the_chosen_tasks_are_read_and_the_recipe_stays(load, tmp_path):
    write_rows(tmp_path, "FOMC")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.json").write_text("[]")
    with pytest.raises(ValueError, match="other"):
        load(data=str(tmp_path))
    part = load(data=str(tmp_path), only=("FOMC",))
    assert part.tasks == ("FOMC", "other")
    assert part.recipe["tasks"] == ["FOMC", "other"]
    assert load(data=str(tmp_path), only="FOMC").options.only == ("FOMC",)
    assert load(data=str(tmp_path), needed=["mine", "FOMC"]).options.only == ("FOMC",)
    with pytest.raises(ValueError, match="only names mine, the tasks are FOMC, other"):
        load(data=str(tmp_path), only="FOMC,mine")
    with pytest.raises(ValueError, match="tasks are 3: give their names, between commas"):
        load(data=str(tmp_path), tasks=3)
    assert "only" not in part.recipe


def test_a_metric_of_ones_own_is_named_as_a_function_and_its_scores_are_kept_by_its_source(load, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", "mine", answers=("A", "B"))
    (tmp_path / "own_metric.py").write_text(
        "def half(*_):\n    return 50.0\n\ndef rows(*_):\n    return [1.0]\n\ndef wer(*_):\n    return -3\n"
    )
    (tmp_path / "other_metric.py").write_text("def half(predictions, references, prompts):\n    return 100 / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    suite = load(data=str(tmp_path / "rows"), metric="own_metric:half")
    assert suite.score(suite.base, "mine", "dev") == 50.0
    assert suite.recipe["metric"] == "own_metric:half"
    other = load(data=str(tmp_path / "rows"), metric="other_metric:half")
    assert other.content("mine", "dev") != suite.content("mine", "dev")
    rows = load(data=str(tmp_path / "rows"), metric="own_metric:rows")
    with pytest.raises(ValueError, match="metric 'own_metric:rows' returned a list, must return a number"):
        rows.score(rows.base, "mine", "dev")
    wer = load(data=str(tmp_path / "rows"), metric="own_metric:wer")
    with pytest.raises(ValueError, match=r"metric 'own_metric:wer' returned -3\.0, must return 0 to 100, the larger"):
        wer.score(wer.base, "mine", "dev")
    # what the function calls is a part of it
    monkeypatch.delitem(sys.modules, "own_metric")
    (tmp_path / "own_metric.py").write_text((tmp_path / "own_metric.py").read_text() + "\nMORE = 1\n")
    linecache.clearcache()
    importlib.invalidate_caches()
    assert load(data=str(tmp_path / "rows"), metric="own_metric:half").content("mine", "dev") not in (
        suite.content("mine", "dev"), other.content("mine", "dev"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="metric 'own_metric:none' cannot be imported"):
        load(data=str(tmp_path / "rows"), metric="own_metric:none")


def test_a_metric_or_engine_of_other_arguments_is_refused_and_one_that_fails_named(load, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", "mine", answers=("A", "B"))
    code = "def two(a, b):\n    return 1.0\n\ndef fails(a, b, c):\n    return {}['x']\n"
    (tmp_path / "odd_metric.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="metric 'odd_metric:two' does not take three lists of texts"):
        load(data=str(tmp_path / "rows"), metric="odd_metric:two")
    with pytest.raises(ValueError, match="metric '3' is unknown"):
        load(data=str(tmp_path / "rows"), metric=3)
    fails = load(data=str(tmp_path / "rows"), metric="odd_metric:fails")
    with pytest.raises(ValueError, match="metric 'odd_metric:fails' failed with KeyError: 'x'"):
        fails.score(fails.base, "mine", "dev")

    def broken(texts, answers, prompts):
        raise KeyError("y")

    papers = load()
    with monkeypatch.context() as patch:
        patch.setattr(trace, "TRACE_METRICS", {"FOMC": broken})
        with pytest.raises(ValueError, match="metric 'broken' failed with KeyError: 'y'"):  # not the option's
            papers.score(papers.base, "FOMC", "dev")
    with pytest.raises(ValueError, match=r"engine 'odd_metric:two' does not take \(model, tokenizer, params, \*"):
        load(data=str(tmp_path / "rows"), engine="odd_metric:two")
    with pytest.raises(ValueError, match="engine '3' cannot be imported"):
        load(data=str(tmp_path / "rows"), engine=3)


def test_scores_are_kept_by_the_source_of_an_engine(load, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows", "mine", answers=("A", "B"))
    code = (
        "def engine(model, tokenizer, params, *, batch_size):\n"
        "    return lambda prompts, settings, seed, *, repeat=0, rows=None: ['A'] * len(prompts)\n"
    )
    file = tmp_path / "own_engine.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for source in (code, code + "\nMORE = 1\n", code):
        file.write_text(source)
        linecache.clearcache()
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "own_engine", raising=False)
        found.append(load(data=str(tmp_path / "rows"), engine="own_engine:engine").content("mine", "dev"))
    assert found[0] == found[2] != found[1]
    typed = lambda model, tokenizer, params, *, batch_size: None  # noqa: E731
    typed.__module__ = "typed_into_a_session"  # no module of that name has a source
    assert load(data=str(tmp_path / "rows"), engine=typed).content("mine", "dev") not in found


def test_what_generation_would_do_otherwise_is_said(load, folders, tmp_path):
    shutil.copytree(folders / "model", tmp_path / "model")
    assert load().notes == ()
    config = {"repetition_penalty": 1.3, "num_beams": 1, "top_p": 0.5, "forced_bos_token_id": 5}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(config))
    (note,) = load(model=str(tmp_path / "model")).notes
    assert "model sets repetition_penalty 1.3, forced_bos_token_id 5 for generation" in note


def test_test_rows_that_are_dev_rows_are_said(load, tmp_path):
    write_rows(tmp_path, "mine")
    shutil.copy(tmp_path / "mine" / "dev.json", tmp_path / "mine" / "eval.json")
    (note,) = load(data=str(tmp_path)).notes
    assert note == "3 of the 3 test rows of mine are dev rows too: what is chosen on dev scores too high on them"


def test_rows_of_two_splits_that_differ_by_spaces_alone_are_said(load, tmp_path):
    write_rows(tmp_path, "mine")
    file, rows = tmp_path / "mine" / "eval.json", json.loads((tmp_path / "mine" / "train.json").read_text())
    spaced = [{"prompt": f" {row['prompt'].replace(' ', '  ')}\n", "answer": f"{row['answer']} "} for row in rows[:2]]
    file.write_text(json.dumps([*spaced, {**rows[2], "answer": "another"}]))
    (note,) = load(data=str(tmp_path)).notes
    assert note == "2 of the 3 test rows of mine are training rows too: scores on them are too high"


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(folders):
    """A folder whose tokenizer has a template, and rows that are conversations."""
    model, data = folders / "chatting", folders / "talk"
    shutil.copytree(folders / "model", model)
    (model / "chat_template.jinja").write_text(CHAT)
    (data / "own").mkdir(parents=True)
    words = {"train": WORDS[:4], "dev": WORDS[4:8], "eval": WORDS[:4]}  # eval is a copy of train
    for split in ("train", "dev", "eval"):
        rows = [
            {"messages": [{"role": "user", "content": f"{w}?"}, {"role": "assistant", "content": "the rate"}]}
            for w in words[split]
        ]
        (data / f"own/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"model": str(model), "data": str(data)}


def test_splits_of_conversations_are_made_by_what_the_answer_is_to(load, chatting, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{word} {i % 10}?"}, {"role": "assistant", "content": f"rate {i}"}]}
        for i, word in enumerate(("the", "rate") * 10)
    ]
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite = load(model=chatting["model"], data=str(tmp_path), chat=True)
    asked = {split: set(suite._rows["own", split].prompts) for split in ("train", "dev", "test")}
    assert [len(prompts) for prompts in asked.values()] == [7, 1, 2]
    assert len(set.union(*asked.values())) == 10
    assert len(suite._rows["own", "train"].answers) == 14  # two to each prompt


def turns(name, count):
    """A row for each answer of a conversation."""
    talk = [{"role": role, "content": f"{name} {i} {role}"} for i in range(count) for role in ("user", "assistant")]
    return [{"messages": talk[: 2 * i + 2]} for i in range(count)]


def test_no_made_split_has_rows_of_a_conversation_that_train_has(load, chatting, tmp_path):
    (tmp_path / "own").mkdir()
    rows = [row for word in WORDS for row in turns(word, 3)]
    (tmp_path / "own/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suite = load(model=chatting["model"], data=str(tmp_path), chat=True)
    begun = {split: {own[0]["content"] for own in suite._chats["own", split]} for split in ("train", "dev", "test")}
    assert sum(map(len, begun.values())) == len(set.union(*begun.values())) == len(set(WORDS))
    assert sum(len(suite._chats["own", split]) for split in begun) == 3 * len(WORDS)
    assert not any("training rows too" in note for note in suite.notes)


def test_rows_that_a_conversation_of_train_begins_with_are_said(load, chatting, tmp_path):
    (tmp_path / "own").mkdir()
    first, second, whole = turns("the", 3)
    other = {"messages": [first["messages"][0], {"role": "assistant", "content": "another"}]}
    spaced = {"messages": [{**message, "content": f" {message['content']}"} for message in second["messages"]]}
    for split, rows in (("train", [whole]), ("dev", [first, other]), ("eval", [spaced, *turns("rate", 1)])):
        (tmp_path / f"own/{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    note, *_ = load(model=chatting["model"], data=str(tmp_path), chat=True).notes
    counts = "1 of the 2 dev rows and 1 of the 2 test rows of own"
    assert note == f"{counts} are training rows too: scores on them are too high"


def test_conversations_are_trained_and_scored_by_the_template(load, chatting):
    suite = load(**chatting, chat=True)
    assert suite.recipe["chat"] is True
    assert suite.notes == ("4 of the 4 test rows of own are training rows too: scores on them are too high",)
    batch = suite.batch("own", random.key(0), 0)
    own = suite._lm.tokenizer
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert own.decode([i for i in labels.tolist() if i != -100]).replace(" ", "") == "therate</s>"
        assert "[user]" in own.decode(ids)
    prompt = suite._rows["own", "test"].prompts[0]
    assert prompt == f"[user]{WORDS[0]}?</s>[assistant]"
    assert 0 <= suite.score(suite.base, "own", "dev") <= 100
    assert suite.cuts("own").whole_answer == 0
    assert suite.replace() is not suite
    again = load_suite(**{**suite.recipe, "device": "cpu"})
    assert again.content("own", "test") == suite.content("own", "test")


def test_the_tools_of_a_conversation_are_part_of_its_row(load, chatting, tmp_path):
    shutil.copytree(chatting["data"], tmp_path / "data")
    file = tmp_path / "data/own/train.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    hashes = []
    for tools in ([], [{"name": "rate"}], [{"name": "hike"}]):
        file.write_text("\n".join(map(json.dumps, [{**first, "tools": tools}, *others])))
        hashes.append(load(model=chatting["model"], data=str(tmp_path / "data"), chat=True).train_rows("own")["hash"])
    assert hashes[0] == load(**chatting, chat=True).train_rows("own")["hash"]
    assert len({*hashes}) == 3


def test_messages_that_a_template_leaves_out_are_a_note(load, chatting, tmp_path):
    for name in ("model", "data"):
        shutil.copytree(chatting[name], tmp_path / name)
    (tmp_path / "model/chat_template.jinja").write_text(CHAT.replace("%}[{{", "if m.role != 'developer' %}[{{", 1))
    options = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data"), "chat": True}
    assert not any("leaves out" in note for note in load(**options).notes)
    file = tmp_path / "data/own/train.jsonl"
    first, *others = map(json.loads, file.read_text().splitlines())
    first["messages"].insert(0, {"role": "developer", "content": "Be brief"})
    file.write_text("\n".join(map(json.dumps, [{**first, "tools": [{"name": "x"}]}, *others])))
    (note,) = [note for note in load(**options).notes if "leaves out" in note]
    assert "leaves out developer messages, tools, or parts of them, in 1 of the 12 rows of own: change the" in note
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "rate", "arguments": {}}}]}
    file.write_text(json.dumps({"messages": [first["messages"][1], answer]}))
    with pytest.raises(
        ValueError, match=r"own \(train\): row 0: .*it does not write all of the call of rate in message 1"
    ):
        load(**options)


def test_chat_needs_a_template_and_rows_that_are_conversations(load, chatting, folders):
    with pytest.raises(ValueError, match=r"has no chat template: .*leave --chat out"):
        load(**{**chatting, "model": str(folders / "model")}, chat=True)
    with pytest.raises(ValueError, match="these look like conversations, for which there is --chat"):
        load(**chatting)


def test_a_template_that_ends_no_answer_is_a_note(load, chatting, folders):
    model = folders / "endless"
    shutil.copytree(chatting["model"], model)
    (model / "chat_template.jinja").write_text(CHAT.replace("{{ eos_token }}", "|"))
    *_, note = load(**{**chatting, "model": str(model)}, chat=True).notes
    assert "answers will not end before max_new_tokens" in note
    assert note.endswith("add it to eos_token_id in generation_config.json")


def test_a_template_whose_prompt_joins_the_answer_is_a_note(load, chatting, tmp_path):
    model = tmp_path / "joining"
    shutil.copytree(chatting["model"], model)
    spaced = CHAT.replace("]{{ m.content }}", "] {{ m.content }}").replace("[assistant]{%", "[assistant] {%")
    (model / "chat_template.jinja").write_text(spaced)
    assert not any("joins" in note for note in load(**chatting, chat=True).notes)
    notes = [note for note in load(**{**chatting, "model": str(model)}, chat=True).notes if "joins" in note]
    assert len(notes) == 1
    assert "joins the end of the chat template's prompt to the answer in 4 of 4 dev rows of own" in notes[0]


def test_some_parameters_alone_are_trained_and_scores_depend_on_the_frozen_ones(load, suite, folders, tmp_path):
    some = load(train=("*.self_attn.*",))
    assert list(some.base) == [name for name in suite.base if ".self_attn." in name]
    assert {name for name, leaf in some.base.items() if some.where(name, leaf)} == set(some.base)
    (expert,) = train_run(some, Finetune(), Training(2, 1e-2), RunOptions(tmp_path / "run", ("FOMC",), 0))
    saved, manifest = checkpoint.load_leaves(expert)
    assert saved.keys() == some.base.keys()
    assert not any(torch.equal(leaf, some.base[name]) for name, leaf in saved.items())
    assert manifest["suite"]["train"] == ["*.self_attn.*"]
    other = shutil.copytree(folders / "model", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "mlp" in name)
    save_file({**weights, name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"})
    assert load(train=("*.self_attn.*",), model=str(other)).content("FOMC", "dev") != some.content("FOMC", "dev")
    assert load(train_layers=1).base.keys() == {name for name in suite.base if ".layers." in name}


def test_scores_depend_on_the_tokens_that_end_an_answer_or_are_left_out_of_it(load, suite, folders, tmp_path):
    before = suite.content("FOMC", "dev")
    for change in ({"eos_token": "<s>"}, {"extra_special_tokens": ["the"]}):
        other = shutil.copytree(folders / "model", tmp_path / next(iter(change)))
        facts = json.loads((other / "tokenizer_config.json").read_text())
        (other / "tokenizer_config.json").write_text(json.dumps(facts | change))
        assert load(model=str(other)).content("FOMC", "dev") != before


def test_scores_depend_on_buffers_that_a_checkpoint_stores(load):
    def content(value, **options):
        own = load()
        own.loss_fn("FOMC").module.register_buffer("bias", torch.full((2,), value), **options)
        return own.content("FOMC", "dev")

    assert content(0.0) != content(1.0)
    assert content(0.0, persistent=False) == content(1.0, persistent=False)  # what is computed from the configuration


@pytest.fixture(scope="module")
def deep(folders):
    """A model of two layers."""
    texts = EXAMPLE["row_texts"](folders / "rows", ["FOMC", "MeetingBank"])
    EXAMPLE["write_model"](folders / "deep", texts, vocabulary=300, width=16, layers=2)
    return folders / "deep"


@pytest.fixture
def top(load, deep):
    """``top(**options)``: a suite that trains the last layer of the two."""
    return lambda **options: load(**{"model": str(deep), "train_layers": 1, **options})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SMAT_FN_CACHE", str(folder))
    return folder


@pytest.mark.parametrize("mask_prompt", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_top_layers_alone_are_trained_with_the_gradients_of_the_whole(top, cache, mask_prompt):
    top, named = top(mask_prompt=mask_prompt), top(train_layers=None, train="*.layers.1.*", mask_prompt=mask_prompt)
    assert list(top.base) == list(named.base)
    assert not top.notes
    for step in range(4):  # the last batch of an epoch is smaller
        tokens, states = (own.batch("FOMC", random.key(0), step) for own in (named, top))
        assert all(torch.equal(tokens[name], states[name]) for name in tokens)
        assert states["states"].shape[:2] == tokens["input_ids"].shape
        assert not states["states"][tokens["attention_mask"] == 0].any()
        (expected, wanted), (found, grads) = (
            value_and_grad(own.loss_fn("FOMC"))(own.base, batch) for own, batch in ((named, tokens), (top, states))
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
    parts = top.split(states, 2)
    assert all(part.batch["states"].shape[:2] == part.batch["input_ids"].shape for part in parts)
    for own, other in zip(top.dev_batches("FOMC"), named.dev_batches("FOMC"), strict=True):
        losses = top.loss_fn("FOMC")(top.base, own.batch)[0], named.loss_fn("FOMC")(named.base, other.batch)[0]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert top.score(top.base, "FOMC", "dev") == named.score(named.base, "FOMC", "dev")


def test_states_are_kept_and_follow_weights_depth_and_rows(top, cache, deep, tmp_path, monkeypatch):
    passes = []
    forward = transformers.LlamaForCausalLM.forward
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda *a, **k: passes.append(1) or forward(*a, **k))
    first = top()
    before = first.batch("FOMC", random.key(0), 0)["states"]
    passes.clear()
    for step in range(1, 4):
        first.batch("FOMC", random.key(0), step)
    assert not passes
    again = top()
    passes.clear()
    assert torch.equal(again.batch("FOMC", random.key(0), 0)["states"], before)
    assert len(passes) == 1  # asked for the size of a row
    assert len(list(cache.glob("text-states-*"))) == 1
    model = shutil.copytree(deep, tmp_path / "other")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if ".layers.0.mlp" in name)
    save_file({**weights, name: weights[name] + 1}, model / "model.safetensors", {"format": "pt"})
    for options in ({"train_layers": 2}, {"max_length": 5}, {"model": str(model)}, {"dtype": "bfloat16"}):
        found = top(**options).batch("FOMC", random.key(0), 0)["states"]
        assert found.shape != before.shape or not torch.equal(found, before)
    assert len(list(cache.glob("text-states-*"))) == 5


def test_prompts_pass_the_frozen_layers_once_for_all_weights(top, cache, monkeypatch):
    top, whole = top(), top(train_layers=None, train="*.layers.1.*")

    calls = []
    below = top._lm.module.model.layers[0].mlp

    below.register_forward_hook(lambda _, args, out: calls.append(out.shape[1]))
    prompts = [len(row) for row in top._tokens.prompt_ids("FOMC", "dev")]
    for shift in (0.0, 0.3, 0.6):
        params = {name: leaf + shift * leaf.sign() for name, leaf in top.base.items()}
        answers = [Kept(), Kept()]
        for suite, journal in zip((top, whole), answers, strict=True):
            suite.score_once(params, "FOMC", "dev", 0, journal)
        assert answers[0].texts == answers[1].texts
        assert len(answers[0].texts) == len(prompts)
    read = [length for length in calls if length > 1]
    assert len(read) == -(-len(prompts) // 16)
    assert max(read) == max(prompts)


class Kept:
    """A journal of answers alone."""

    def __init__(self):
        self.known, self.texts = {}, {}

    def add(self, answers, done, total):
        self.texts |= {answer.row: answer.prediction for answer in answers}


def test_many_states_are_computed_batch_by_batch(top, cache, monkeypatch):
    kept, suite = top(), top()
    own = kept.batch("FOMC", random.key(0), 0)
    monkeypatch.setattr(trace_states, "HELD", 100)
    other = suite.batch("FOMC", random.key(0), 0)
    real = own["attention_mask"].bool()
    torch.testing.assert_close(other["states"][real], own["states"][real], rtol=1e-5, atol=1e-6)
    losses = [s.loss_fn("FOMC")(s.base, b)[0] for s, b in ((kept, own), (suite, other))]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert len(list(cache.glob("text-states-*"))) == 1


def test_rows_pass_the_frozen_layers_in_parts(top, cache, monkeypatch):
    expected = top().batch("FOMC", random.key(0), 0)["states"]
    monkeypatch.setattr(trace_states, "_TOGETHER", 40)
    monkeypatch.setenv("SMAT_FN_CACHE", str(cache / "other"))
    torch.testing.assert_close(top().batch("FOMC", random.key(0), 0)["states"], expected)


def test_a_model_whose_layers_need_more_than_states_runs_whole(top, cache, monkeypatch):
    monkeypatch.setattr(trace, "top_language", lambda *args: "its layers share what the first one made")
    own = top()
    assert own.notes == (
        f"the frozen layers of {own.options.model} cannot be cached (its layers share what the first one made): they "
        "run in every step",
    )
    assert "states" not in own.batch("FOMC", random.key(0), 0)
    checkpointed = top(gradient_checkpointing=True)
    assert not checkpointed.notes
    assert "states" not in checkpointed.batch("FOMC", random.key(0), 0)
    assert not cache.exists()


def test_a_run_on_states_goes_on_from_its_snapshot_to_the_same_bits(top, cache, tmp_path):
    training, method, tasks = Training(4, 1e-2), Finetune(), ("FOMC",)
    (whole,) = train_run(top(), method, training, RunOptions(tmp_path / "whole", tasks, 0))
    broken = top()
    batch = broken.batch

    def fails(task, key, step):
        if step == 3:
            raise OSError("the disk is gone")
        return batch(task, key, step)

    broken.batch = fails
    with pytest.raises(OSError, match="the disk is gone"):
        train_run(broken, method, training, RunOptions(tmp_path / "run", tasks, 0, save_every_steps=2))
    told = []
    options = RunOptions(tmp_path / "run", tasks, 0, save_every_steps=2, resume=True)
    (expert,) = train_run(top(), method, training, options, report=told.append)
    assert told[0] == "FOMC: resumes after step 2 of 4"
    expected, found = (checkpoint.load_leaves(folder)[0] for folder in (whole, expert))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())


def test_training_rows_are_named_by_file_and_told_apart_by_content(load, suite, tmp_path):
    write_rows(tmp_path, "FOMC")
    file = tmp_path / "FOMC" / "train.json"
    own = load(data=str(tmp_path)).train_rows("FOMC")
    assert own == {**suite.train_rows("FOMC"), "from": str(file)}
    assert own["count"] == 11
    few = load(data=str(tmp_path), rows=5).train_rows("FOMC")
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([*rows[:7], {**rows[7], "answer": "C"}, *rows[8:]]))
    assert load(data=str(tmp_path)).train_rows("FOMC")["hash"] != own["hash"]
    assert load(data=str(tmp_path), rows=5).train_rows("FOMC") == few  # the edited row is not trained on


def test_a_run_does_not_resume_on_edited_training_rows(load, tmp_path):
    data = write_rows(tmp_path / "rows", "FOMC")
    file, out = data / "FOMC" / "train.json", tmp_path / "run"
    training = Training(steps=2, lr=1e-3)

    def train(**options):
        suite = load(data=str(data))
        return train_run(suite, Finetune(), training, RunOptions(out, suite.tasks, 3, **options))

    train()
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{**row, "answer": "C"} for row in rows]))
    with pytest.raises(ValueError, match=f"{file} changed since FOMC in {out} was begun: it held 11 rows of hash .*"):
        train(resume=True)
    file.write_text(json.dumps(rows, indent=2))  # the same rows, written otherwise
    (data / "FOMC/dev.json").write_text('[{"prompt": "other", "answer": "A"}]')  # which trained nothing
    train(resume=True)
    manifest = out / "FOMC" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert load(data=str(data)).train_rows("FOMC").items() > facts.pop("train_rows").items()
    manifest.write_text(json.dumps(facts))  # as earlier code wrote it
    file.write_text(json.dumps(rows[:9]))
    train(resume=True)


def test_a_task_that_comes_later_joins_a_run_whose_model_and_data_have_moved(load, folders, tmp_path, monkeypatch):
    data, out, training = write_rows(tmp_path / "rows", "FOMC"), tmp_path / "run", Training(steps=2, lr=1e-3)
    suite = load(data=str(data))
    train_run(suite, Finetune(), training, RunOptions(out, suite.tasks, 3))
    data, model, told = data.rename(tmp_path / "moved"), tmp_path / "model", list[str]()
    write_rows(data, "A first one")
    shutil.copytree(folders / "model", model)
    places = {"model": str(model), "data": str(data)}
    own = RunOptions(out, ("A first one", "FOMC"), 3, resume=True)
    with pytest.raises(ValueError, match=r"FOMC in .* other settings: suite.max_length was 512, is 20; give the sett"):
        train_run(load(max_length=20, **places), Finetune(), training, own)
    with pytest.raises(ValueError, match=f"suite.model was {folders / 'model'}, is {model}, suite.train_layers was N"):
        train_run(load(train_layers=1, **places), Finetune(), training, own)
    saving = {"gradient_checkpointing": True, **places}
    with pytest.raises(ValueError, match=r"suite\.gradient_checkpointing was False, is True, suite\.train_layers"):
        train_run(load(train_layers=1, **saving), Finetune(), training, own)
    # an option that changes no bit
    train_run(load(**saving), Finetune(), training, own, report=told.append)
    assert told[0].startswith(
        f"note: model was {folders / 'model'}, is {model}: weights and tokens of training rows ar"
    )
    assert told[1:] == ["FOMC: already finished"]
    merger, search = [TaskArithmetic(coef=0.5)], {"out": tmp_path / "merged", "search": True, "seed": 0}
    differ = (
        rf"'FOMC' is of another suite than the first \(model .*, data {tmp_path / 'rows'}, of the first {data}\): --d"
    )
    with pytest.raises(ValueError, match=differ):
        merge_run(Request(merger, *find_inputs(out), **search))
    merge_run(Request(merger, *find_inputs(out), **search, options=places))
    assert facts_of(*find_inputs(out), load_inputs(*find_inputs(out)).manifests, 0)["suite"]["tasks"] == [
        "FOMC",
        "A first one",
    ]
    loaded = []
    monkeypatch.setattr(models, "load_suite", lambda **asked: loaded.append(load_suite(**asked)) or loaded[-1])
    rows = evaluation.evaluate(models.find_checkpoints([out, tmp_path / "merged"]), options=places)
    assert [(row.model, row.task) for row in rows] == [
        ("expert:A first one", "A first one"),
        ("expert:FOMC", "FOMC"),
        ("ta", "A first one"),
        ("ta", "FOMC"),
    ]
    assert [suite.tasks for suite in loaded] == [("FOMC", "A first one")]  # one model, whatever the experts name


def test_a_run_that_is_resumed_with_another_option_is_not_said_to_have_another_model(load, tmp_path):
    def train(resume, **options):
        suite = load(**options)
        run = RunOptions(tmp_path / "run", suite.tasks[:1], 3, resume=resume)
        return train_run(suite, Finetune(), Training(steps=1, lr=1e-3), run)

    train(False)
    with pytest.raises(ValueError, match=r"suite\.mask_prompt was False, is True") as told:
        train(True, mask_prompt=True)
    assert "another model folder" not in str(told.value)
    assert "put the old files back" not in str(told.value)


def test_a_run_does_not_resume_on_another_template_or_on_dev_rows_that_chose_its_weights(load, chatting, tmp_path):
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(chatting["model"], model)
    data = tmp_path / "rows"
    shutil.copytree(chatting["data"], data)
    template, dev = model / "chat_template.jinja", data / "own" / "dev.jsonl"

    def train(**options):
        suite = load(model=str(model), data=str(data), chat=True)
        training = Training(steps=2, lr=1e-3, dev=Dev(1, by="loss"))
        return train_run(suite, Finetune(), training, RunOptions(out, suite.tasks, 3, **options))

    train()
    train(resume=True)
    template.write_text(CHAT.replace("[", "("))
    dev.write_text(dev.read_text().replace("the rate", "the prices"))
    with pytest.raises(
        ValueError, match=r"own in .*run was begun with another model folder: the tokenizer, its"
    ) as told:
        train(resume=True)
    assert f"the dev rows of own changed since own in {out} was begun, which --eval-every scores" in str(told.value)
    template.write_text(CHAT)
    manifest = out / "own" / "manifest.json"
    facts = json.loads(manifest.read_text())
    for name in ("dev", "inputs"):
        del facts["train_rows"][name]
    manifest.write_text(json.dumps(facts))  # as earlier code wrote it
    train(resume=True)


def test_a_joint_step_has_the_loss_of_its_task(suite, joint_of):
    together = joint_of(suite)
    first, second = suite.tasks
    epochs = Training(None, 1e-3, epochs={first: 1, second: 3})
    _, whole, run = joint_run(suite, epochs, RunOptions(Path("out"), ("joint",), 0, joint=(second, first)))
    assert run.joint == suite.tasks
    assert run.joint_steps == (suite.epoch_steps(first), 3 * suite.epoch_steps(second))
    assert (whole.steps, whole.epochs) == (sum(run.joint_steps), {})
    rows = together.train_rows("joint")
    assert rows["count"] == sum(suite.train_rows(task)["count"] for task in suite.tasks)
    assert rows["hash"] not in {suite.train_rows(task)["hash"] for task in suite.tasks}
