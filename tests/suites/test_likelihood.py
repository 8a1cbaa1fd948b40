"""Language tasks scored by likelihood: rows as they are trained, choices, what a score depends on, and its errors."""

import json
import math
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from smat_fn import random
from smat_fn.config import Finetune, TaskArithmetic, Training
from smat_fn.errors import problems_of
from smat_fn.evaluate.likelihood import log_likelihoods
from smat_fn.evaluate.records import Journal
from smat_fn.scripts.evaluate import evaluation, models
from smat_fn.scripts.merge.in_memory import Request, merge_run
from smat_fn.scripts.run_folder import find_inputs
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite

HERE = Path(__file__).parent
EXAMPLE = runpy.run_path(str(HERE.parents[1] / "examples/trace_tiny.py"))
PAIRS = runpy.run_path(str(HERE.parent / "models/test_seq2seq.py"))
WORDS = ["hold", "raise", "cut", "the rate", "prices", "now"]


def write_rows(folder, task="mine", *, choices=("dev", "eval"), sizes=(11, 5, 4)):
    (folder / task).mkdir(parents=True)
    for split, size in zip(("train", "dev", "eval"), sizes, strict=True):
        rows = [{"prompt": f"{split} {i}: {' '.join(WORDS[i % 3 :])}", "answer": WORDS[i % 4]} for i in range(size)]
        for i, row in enumerate(rows if split in choices else ()):
            row["choices"] = [WORDS[i % 4], *WORDS[4:]][:: 1 - 2 * (i % 2)]
        (folder / task / f"{split}.json").write_text(json.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and rows of two tasks, with choices in the splits that are scored."""
    root = tmp_path_factory.mktemp("likelihood")
    for task in ("mine", "other"):
        write_rows(root / "rows", task)
    texts = EXAMPLE["row_texts"](root / "rows", ["mine", "other"])
    EXAMPLE["write_model"](root / "model", texts, vocabulary=300, width=16, layers=1)
    return root


@pytest.fixture(scope="module")
def load(folders):
    def call(seed=3, **options):
        given = {"model": str(folders / "model"), "data": str(folders / "rows"), "device": "cpu"}
        return load_suite("trace", **{"seed": seed, **given, "metric": "likelihood", **options})

    return call


@pytest.fixture(scope="module")
def suite(load):
    return load()


def moved(suite, scale=0.3):
    generator = torch.Generator().manual_seed(1)
    return {name: leaf + scale * torch.randn(leaf.shape, generator=generator) for name, leaf in suite.base.items()}


def stored(folders, split, task="mine"):
    return json.loads((folders / "rows" / task / f"{split}.json").read_text())


def log_prob(suite, params, prompt, answer, *, end=True):
    """The sum of log p of an answer's tokens by transformers' own loss, and their number."""
    tokenizer, module = suite._lm.tokenizer, suite._lm.module
    front = tokenizer(prompt + "\n")["input_ids"]
    ids = tokenizer(prompt + "\n" + answer)["input_ids"] + [tokenizer.eos_token_id] * end
    assert ids[: len(front)] == front
    labels = [-100] * len(front) + ids[len(front) :]
    with torch.no_grad():
        out = torch.func.functional_call(
            module, dict(params), kwargs={"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels])}
        )
    return -float(out.loss) * (len(ids) - len(front)), len(ids) - len(front)


def test_a_score_is_the_perplexity_of_the_answers_as_they_are_trained(suite, load, folders):
    params = moved(suite)
    sums, counts = zip(
        *(log_prob(suite, params, row["prompt"], row["answer"]) for row in stored(folders, "dev")), strict=True
    )
    score = suite.score(params, "mine", "dev")
    assert score == pytest.approx(100 * math.exp(sum(sums) / sum(counts)), rel=1e-5)
    # which is the dev loss of answers alone
    masked = load(mask_prompt=True)
    losses = [(float(masked.loss_fn("mine")(params, own)[0]), weight) for own, weight in masked.dev_batches("mine")]
    mean = sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)
    assert score == pytest.approx(100 * math.exp(-mean), rel=1e-5)
    assert masked.score(params, "mine", "dev") == score
    assert suite.repeats == {}
    assert suite.notes == ()


def test_the_score_neither_depends_on_batches_nor_cuts_rows(suite, load):
    params = moved(suite)
    scores = [
        load(**options).score(params, "mine", "test") for options in ({"decode_batch": 1}, {"decode_batch": 3}, {})
    ]
    assert scores == pytest.approx([suite.score(params, "mine", "test")] * 3, rel=1e-6)
    short = load(max_length=4)
    assert short.score(params, "mine", "test") == suite.score(params, "mine", "test")


@pytest.mark.parametrize("metric", ["choice", "choice_norm"])
def test_a_choice_is_the_text_of_the_largest_log_probability(load, folders, metric):
    suite = load(metric=metric, decode_batch=2)
    for params in (suite.base, moved(suite)):
        right = []
        for row in stored(folders, "dev"):
            sums = [log_prob(suite, params, row["prompt"], own, end=False)[0] for own in row["choices"]]
            scores = [
                total / len(own) if metric == "choice_norm" else total
                for total, own in zip(sums, row["choices"], strict=True)
            ]
            right.append(row["choices"][scores.index(max(scores))] == row["answer"])
        assert suite.score(params, "mine", "dev") == 100 * sum(right) / len(right)
    # a model that has learned the rows by heart chooses their answers
    assert 0 <= suite.score(suite.base, "mine", "dev") < 100


def test_training_takes_the_answer_and_needs_no_choices(load, folders):
    plain, choice = load(), load(metric="choice")
    key = random.key(0)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.batch("mine", key, 1).values(), choice.batch("mine", key, 1).values(), strict=True)
    )
    assert plain.train_rows("mine")["hash"] == choice.train_rows("mine")["hash"]
    assert plain.train_rows("mine") == load(metric="exact").train_rows("mine")
    assert plain.train_rows("mine")["dev"] != choice.train_rows("mine")["dev"]
    assert choice._rows["mine", "train"].choices == ()


def test_scores_depend_on_choices_and_metric(load, folders, tmp_path):
    def content(change=lambda rows: rows, **options):
        data = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(folders / "rows", data)
        file = data / "mine/dev.json"
        file.write_text(json.dumps(change(json.loads(file.read_text()))))
        return load(data=str(data), **{"metric": "choice", **options}).content("mine", "dev")

    def reversed_choices(rows):
        return [{**row, "choices": row["choices"][::-1]} for row in rows]

    assert content() == content()
    assert content(reversed_choices) != content()  # the first of equals is chosen
    assert content(reversed_choices, metric="exact") == content(metric="exact")
    assert content(reversed_choices, metric="likelihood") == content(metric="likelihood") != content(metric="exact")


def test_what_was_read_is_not_read_again(load):
    suite, kept = load(decode_batch=2), {}
    params = moved(suite)
    calls = []
    suite._lm.module.register_forward_pre_hook(lambda *_: calls.append(1))

    def add(answers, done, total):
        kept.update({answer.row: answer.prediction for answer in answers})
        assert total == 5
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        suite.score_once(params, "mine", "dev", 0, Journal({}, add))
    assert len(kept) == 4
    assert len(calls) == 2
    before, rest = dict(kept), Journal(dict(kept), lambda answers, done, total: None)
    score = suite.score_once(params, "mine", "dev", 0, rest)
    assert len(calls) == 3
    assert score == suite.score(params, "mine", "dev")
    for text in before.values():
        total, count = text.split()
        assert float(total) < 0 < int(count)


def test_splits_made_of_training_rows_take_their_choices_along(load, tmp_path):
    write_rows(tmp_path, choices=("train",), sizes=(30, 3, 4))
    for split in ("dev", "eval"):
        (tmp_path / f"mine/{split}.json").unlink()
    suite = load(data=str(tmp_path), metric="choice")
    rows = suite._rows["mine", "dev"]
    assert len(rows.choices) == len(rows.answers) > 0
    assert all(answer in own for answer, own in zip(rows.answers, rows.choices, strict=True))
    assert 0 <= suite.score(suite.base, "mine", "dev") <= 100
    assert suite._rows["mine", "train"].choices == ()


def test_bad_choices_are_told_by_file_and_row(load, tmp_path):
    write_rows(tmp_path)
    file = tmp_path / "mine/dev.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([rows[0], {**rows[1], "choices": ["no", "nor"]}, *rows[2:]]))
    with pytest.raises(ValueError, match=r"dev\.json: the choices of row 1 do not hold the answer, first \['no', 'no"):
        load(data=str(tmp_path), metric="choice")
    load(data=str(tmp_path))
    for row in rows:
        row["options"] = row.pop("choices")
    file.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"column 'choices' is missing.*--suite-options columns choices=NAME"):
        load(data=str(tmp_path), metric="choice", only=("mine",))
    shutil.copy(file, tmp_path / "mine/eval.json")
    assert load(data=str(tmp_path), metric="choice", columns="choices=options").recipe["columns"]


def test_a_choice_that_begins_another_is_a_note(load, tmp_path):
    write_rows(tmp_path)
    file = tmp_path / "mine/dev.json"
    rows = json.loads(file.read_text())
    file.write_text(json.dumps([{**rows[0], "choices": [rows[0]["answer"], rows[0]["answer"] + "s"]}, *rows[1:]]))
    (note,) = load(data=str(tmp_path), metric="choice").notes
    assert note.startswith("in 1 of the 5 rows of mine (dev) a choice begins another one, which has the smaller")
    assert load(data=str(tmp_path), metric="choice_norm").notes == ()


def test_what_cannot_be_read_is_an_error_with_a_way_out(load, folders, tmp_path, monkeypatch):
    def engine(model, tokenizer, params, *, batch_size):
        raise AssertionError

    with pytest.raises(ValueError, match=r"metric likelihood reads log prob.*engine .*: leave the engine out, or"):
        load(engine=engine)
    load(engine=engine, metric="exact")
    with pytest.raises(ValueError, match="metric choice needs rows of prompt, answer and choices: leave --chat out"):
        load(chat=True, metric="choice")
    own = load()
    longest = max(len(one.input_ids) for row in own._tokens.read("mine", "test") for one in row)
    for limit in (longest, longest - 1):
        own = load()
        monkeypatch.setattr(own._tokens, "positions", limit)
        told = [text for text in problems_of(own.epoch_steps, "mine") if "(eval)" in text]
        assert len(told) == longest - limit
    assert (
        f"of mine (eval) with answers have up to {longest} tokens, more than the model's {longest - 1}: sh" in told[0]
    )
    with pytest.raises(ValueError, match=r"row.* of mine \(eval\) with answers"):
        own.score(own.base, "mine", "test")


def test_rows_as_long_as_the_positions_are_not_filled_up_beyond_them(load, folders, tmp_path):
    own = load(metric="choice")
    rows = [one for split in ("dev", "test") for row in own._tokens.read("mine", split) for one in row]
    longest = max(len(one.input_ids) for one in (*rows, *own._tokens.examples("mine", "train")))
    assert longest % 8  # batches are filled up to a multiple of it
    model, tokenizer = tmp_path / "model", own._lm.tokenizer
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=longest, n_embd=16, n_layer=1, n_head=2, **ends)
    GPT2LMHeadModel(config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    suite = load(model=str(model), metric="choice")
    for step in range(suite.epoch_steps("mine")):
        batch = suite.batch("mine", random.key(0), step)
        assert suite.loss_fn("mine")(suite.base, batch)[0].isfinite()
    assert suite.score(suite.base, "mine", "test") == load(model=str(model), metric="choice", decode_batch=1).score(
        suite.base, "mine", "test"
    )


def test_of_a_conversation_the_last_answer_and_its_end_are_read(load, folders, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folders / "model", model)
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "rows/mine").mkdir(parents=True)
    for split in ("train", "dev", "eval"):
        turns = [("user", f"{split}?"), ("assistant", "hold"), ("user", "and?"), ("assistant", "the rate")]
        rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
        (tmp_path / f"rows/mine/{split}.json").write_text(json.dumps(rows))
    suite = load(model=str(model), data=str(tmp_path / "rows"), chat=True)
    ((one,),) = suite._tokens.read("mine", "dev")
    own = suite._lm.tokenizer.decode([label for label in one.labels if label != -100])
    assert own.replace(" ", "") == "therate</s>"
    assert "[user]dev?" in suite._lm.tokenizer.decode(one.input_ids).replace(" ", "")
    count = sum(label != -100 for label in one.labels)
    ((total, found),) = log_likelihoods(
        suite._lm.loss_fn, suite.base, [one], collate=suite._tokens.collate, batch_size=1
    )
    assert found == count
    assert suite.score(suite.base, "mine", "dev") == pytest.approx(100 * math.exp(total / count))


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    PAIRS["make_module"]("t5", dtype=torch.float32).save_pretrained(root / "model")
    PAIRS["make_tokenizer"]().save_pretrained(root / "model")
    write_rows(root / "rows")
    return {"model": str(root / "model"), "data": str(root / "rows")}


def test_an_encoder_decoder_is_scored_by_its_targets(load, encoder_decoder):
    suite = load(**encoder_decoder)
    losses = [(float(suite.loss_fn("mine")(suite.base, own)[0]), weight) for own, weight in suite.dev_batches("mine")]
    mean = sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)
    assert suite.score(suite.base, "mine", "dev") == pytest.approx(100 * math.exp(-mean), rel=1e-4)
    choice = load(**encoder_decoder, metric="choice")
    rows, tokenizer, right = choice._rows["mine", "dev"], choice._lm.tokenizer, []
    for prompt, answer, own in zip(*rows[:3], strict=True):
        sums = []
        for text in own:
            target = torch.tensor([tokenizer(text_target=text)["input_ids"]])
            with torch.no_grad():
                logits = choice._lm.module(**tokenizer(prompt, return_tensors="pt"), labels=target).logits
            sums.append(float(logits[0].log_softmax(-1).gather(1, target[0][:, None])[:-1].sum()))
        right.append(own[sums.index(max(sums))] == answer)
    assert choice.score(choice.base, "mine", "dev") == 100 * sum(right) / len(right)


def test_a_search_and_scores_by_likelihood_resume(load, folders, tmp_path, monkeypatch):
    suite = load()
    train_run(suite, Finetune(), Training(steps=6, lr=1e-2), RunOptions(tmp_path / "run", suite.tasks, 3))
    (merged,) = merge_run(
        Request([TaskArithmetic()], *find_inputs(tmp_path / "run"), out=tmp_path / "run/merged", search=True, seed=0)
    )
    curve = json.loads((merged / "manifest.json").read_text())["dev_curve"]
    assert len(curve) == 10
    assert len({score for _, score in curve}) == 10
    best = max(curve, key=lambda pair: pair[1])
    assert json.loads((merged / "manifest.json").read_text())["hyperparameters"]["coef"] == best[0]
    rows = evaluation.evaluate(models.find_checkpoints([tmp_path / "run"]), keep=tmp_path / "kept")
    scores = {(row.model, row.task): row.score for row in rows}
    assert scores["expert:mine", "mine"] > suite.score(suite.base, "mine", "test")
    answers = (tmp_path / "kept/answers.jsonl").read_text().splitlines()
    assert len(answers) == 4 * 4  # two experts on their own task, a merge on both
    monkeypatch.setattr("smat_fn.suites.trace.likelihood.reader", lambda *a, **k: pytest.fail("all scores are kept"))
    assert evaluation.evaluate(models.find_checkpoints([tmp_path / "run"]), keep=tmp_path / "kept") == rows


def test_scores_of_two_metrics_in_one_table_have_a_note(load, tmp_path):
    for label, options in (("ONE", {"metric": "exact"}), ("TWO", {}), ("THREE", {"rows": 3})):
        own = RunOptions(tmp_path / label, ("mine",), 3, label=label)
        train_run(load(**options), Finetune(), Training(steps=1, lr=1e-2), own)
    one, two, three = (tmp_path / label / "mine" for label in ("ONE", "TWO", "THREE"))
    notes = list[str]()
    evaluation.evaluate([one, two, three], report=notes.append)
    assert "trained on different rows" in notes.pop(0)
    begin, end = "note: scores of", f"cannot be compared with those of {one}: metric likelihood, of the first exact"
    assert notes == [
        f"{begin} {two} {end}; --suite-options sets one value for all",
        f"{begin} {three} {end}, rows 3, of the first None; --suite-options sets one value for all",
    ]
    notes.clear()
    evaluation.evaluate([one, two, three], report=notes.append, options={"metric": "likelihood", "rows": 3})
    assert not any("cannot be compared" in note for note in notes)
