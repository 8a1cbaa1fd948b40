"""Language tasks on encoder-decoders: prompts as sources and answers as targets, in batches, losses and scores."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from smat_fn import checkpoint, random
from smat_fn.analyses import mean_loss
from smat_fn.config import Finetune, Training
from smat_fn.data import pairs, text
from smat_fn.evaluate.decoding import generator
from smat_fn.evaluate.engine import Decoding
from smat_fn.evaluate.metrics import label_accuracy
from smat_fn.grad import value_and_grad
from smat_fn.models import language
from smat_fn.scripts.analyse.weights import Landscape, landscape
from smat_fn.scripts.train.options import RunOptions
from smat_fn.scripts.train.training import train_run
from smat_fn.suites import load_suite

HERE = Path(__file__).parent
MODELS = runpy.run_path(str(HERE.parent / "models" / "test_seq2seq.py"))
ROWS = [("abc", "ba"), ("z", "q"), ("the quick", "abcdef"), ("someprompt", "")]


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """The folder of a tiny random model."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS["make_module"](request.param, dtype=torch.float32).save_pretrained(folder)
    MODELS["make_tokenizer"]().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for task in ("FOMC", "mine"):
        (folder / task).mkdir()
        for split, size in (("train", 7), ("dev", 3), ("eval", 2)):
            kinds = ("", "a", "ab") if split == "train" else ("b", "a", "a.")  # scores need a letter that stands alone
            answers = [kinds[i % 3] for i in range(size)]
            own = [{"prompt": f"{split} {'abc'[i % 3] * (i + 1)}", "answer": own} for i, own in enumerate(answers)]
            (folder / task / f"{split}.json").write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="module")
def suite(model, rows):
    return load_suite(
        "trace", seed=0, model=str(model), data=str(rows), batch_size=4, max_new_tokens=6, metric="label", device="cpu"
    )


def test_examples_are_source_and_target_cut_before_their_last_token():
    tokenizer = MODELS["make_tokenizer"]()
    a, b, c = tokenizer.convert_tokens_to_ids(list("abc"))
    first, _, _, last = pairs.encode(ROWS, tokenizer, vocabulary=30)
    assert first == ((a, b, c, 1), (b, a, 1))
    assert last.labels == (1,)
    assert pairs.encode(ROWS, tokenizer, vocabulary=30, max_length=2)[0] == ((a, 1), (b, 1))
    assert pairs.encode(ROWS, tokenizer, vocabulary=30, mask_prompt=True)[0] == first
    cut = pairs.cut_report({"t": ROWS}, tokenizer, max_length=3)["t"]
    assert cut == text.Cut(4, 0.0, 1 / 4, 0.0, 11)


def test_a_text_of_which_the_end_alone_would_fit_keeps_a_token_of_its_own():
    from tokenizers import processors

    tokenizer = MODELS["make_tokenizer"]()
    a, b, x = tokenizer.convert_tokens_to_ids(list("abx"))
    form = processors.TemplateProcessing(single="$A </s> x", special_tokens=[("</s>", 1), ("x", x)])
    tokenizer.backend_tokenizer.post_processor = form  # x as the language code of mBART
    for limit, end in ((3, (1, x)), (2, (x,))):
        assert pairs.encode(ROWS[:1], tokenizer, vocabulary=30, max_length=limit) == [((a, *end), (b, *end))]


def test_sources_end_as_they_do_in_decoding():
    tokenizer = MODELS["make_tokenizer"]()
    tokenizer.backend_tokenizer.post_processor = None  # nothing is closed
    ((source, target),) = pairs.encode([("ab", "c")], tokenizer, vocabulary=len(tokenizer))
    assert list(source) == tokenizer("ab")["input_ids"] == tokenizer.convert_tokens_to_ids(["a", "b"])
    assert list(target) == [*tokenizer.convert_tokens_to_ids(["c"]), 1]


def test_parts_weigh_their_target_tokens_and_give_the_loss_of_the_whole(suite):
    key, loss_fn = random.key(2), suite.loss_fn("mine")
    batch = suite.batch("mine", key, 0)
    loss, count = loss_fn(suite.base, batch)
    for parts in (1, 2, 3, 4, 9):
        found = suite.split(batch, parts)
        assert len(found) == min(parts, 4)
        assert sum(weight for _, weight in found) == count
        for micro, weight in found:
            assert micro["attention_mask"].any(0).all()
            assert (micro["labels"] != -100).any(0).all()
            assert (micro["labels"] != -100).sum() == weight
        mean = sum(weight * loss_fn(suite.base, micro)[0] for micro, weight in found) / count
        torch.testing.assert_close(mean, loss, rtol=1e-5, atol=0)
    rows = sorted(row for step in range(2) for row in suite.batch_rows("mine", key, step))
    assert (suite.epoch_steps("mine"), rows) == (2, list(range(7)))
    assert sum(weight for _, weight in suite.dev_batches("mine")) == (1 + 1) + (1 + 1) + (2 + 1)


def test_the_suite_is_that_of_the_model_and_scores_its_answers(suite, model, rows):
    lm = language.load(model)
    assert lm.module.config.is_encoder_decoder
    assert {name for name, leaf in suite.base.items() if suite.where(name, leaf)} == {
        name for name, leaf in lm.params.items() if lm.where(name, leaf)
    }
    assert all(torch.equal(suite.base[name], leaf) for name, leaf in lm.params.items())
    prompts, answers = ["eval a", "eval bb"], ["", "a"]
    other = {name: 1.5 * leaf for name, leaf in suite.base.items()}
    texts = generator(lm.loss_fn, lm.tokenizer, other)(prompts, Decoding(6), 0)
    assert suite.score(other, "mine", "test") == label_accuracy(texts, answers, prompts)
    assert suite.cuts("mine").rows == 7


def test_gradient_checkpointing_gives_the_same_up_to_rounding_without_dropout(model, suite):
    batch = suite.batch("mine", random.key(0), 0)
    plain, saving = (language.load(model, gradient_checkpointing=on) for on in (False, True))
    runs = [value_and_grad(lm.loss_fn, engine="autograd")(plain.params, batch) for lm in (plain, saving)]
    ((loss, _), grads), ((other, _), others) = runs
    torch.testing.assert_close(other, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(others, grads, rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_told_before_training(model, rows, tmp_path):
    def load(**options):
        given = {"model": str(model), "data": str(rows), "max_new_tokens": 6, "device": "cpu"}
        return load_suite("trace", seed=0, **{**given, **options})

    with pytest.raises(ValueError, match=r"training rows of mine: truncate 'left' requires a causal model"):
        load(truncate="left").epoch_steps("mine")
    tokenizer = MODELS["make_tokenizer"]()
    with pytest.raises(ValueError, match=r"the embedding has 10 rows, too few for the tokenizer"):
        pairs.encode(ROWS, tokenizer, vocabulary=10)
    tokenizer.add_tokens(["Q"])
    with pytest.raises(ValueError, match=r"too few for the tokens of rows 1 \(token 30\)"):
        pairs.encode([("a", "b"), ("Q", "b")], tokenizer, vocabulary=30)
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(ValueError, match="rows 0 have prompts without a token"):
        pairs.encode([("", "b")], tokenizer, vocabulary=31)
    if model.name.startswith("bart"):
        with pytest.raises(ValueError, match="max_new_tokens of mine is 30, more than the model's 24"):
            load(max_new_tokens=30).epoch_steps("mine")


def test_losses_of_a_landscape_are_those_of_the_answers(suite, tmp_path):
    run = tmp_path / "ft"
    train_run(suite, Finetune(), Training(steps=2, lr=1e-3), RunOptions(run, ("FOMC", "mine"), 0))
    given = {"tasks": ("mine",), "coef": 0.5, "batches": 1, "suite_options": {"device": "cpu"}}
    found = landscape(Landscape(ft=run, a=(0.0, 1.0), b=(0.0, 1.0), points=2, **given))
    losses = {row["a"]: row["loss"] for row in found["rows"] if row["b"] == 0}
    params = checkpoint.load_expert(run / "mine", suite.base)[0]
    loss = mean_loss(suite.loss_fn("mine"), suite.dev_batches("mine")[:1])
    for a, own in ((0.0, suite.base), (1.0, params)):
        assert losses[a] == pytest.approx(float(loss(own)), rel=1e-5)


def test_answers_that_training_starts_elsewhere_than_decoding_are_an_error_before_training(rows, tmp_path):
    module, _ = MODELS["of_family"]("MBartForConditionalGeneration")
    module.config.decoder_start_token_id = 5
    module.save_pretrained(tmp_path / "model")
    MODELS["make_tokenizer"]().save_pretrained(tmp_path / "model")
    suite = load_suite("trace", seed=0, model=str(tmp_path / "model"), data=str(rows), max_new_tokens=6, device="cpu")
    with pytest.raises(ValueError, match=r"decoded from token 5 .*starts them at token 1, which the tokenizer's"):
        suite.epoch_steps("mine")
