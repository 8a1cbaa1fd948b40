"""Log probabilities of given texts: closed forms, the losses of transformers, any batches and paddings."""

import math
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from smat_fn import ModuleLoss
from smat_fn.data import pairs, text
from smat_fn.evaluate import likelihood
from smat_fn.evaluate.engine import Decoding
from smat_fn.evaluate.likelihood import log_likelihoods, reader
from smat_fn.evaluate.metrics import likelihood as score
from smat_fn.evaluate.metrics import metric_of, same_choice
from smat_fn.models import head

from .test_decoding import make_model, make_tokenizer, weights

PAIRS = runpy.run_path(str(Path(__file__).parents[1] / "models/test_seq2seq.py"))
ROWS = [
    ("abc", "ba"),
    ("z", "q"),
    ("the quick", "abcdef"),
    ("hello", "some long answer"),
    ("someprompt", ""),
    ("q", "e"),
]
collate = partial(text.collate, pad=2)


class Bigrams(nn.Module):
    """The logits of a token are a row of a table, by the token before it."""

    def __init__(self, table):
        super().__init__()
        self.table, self.config, self.seen = nn.Parameter(table), SimpleNamespace(), []

    def get_input_embeddings(self):
        return SimpleNamespace(weight=self.table)

    def forward(self, input_ids, attention_mask, use_cache):
        self.seen.append(tuple(input_ids.shape))
        return SimpleNamespace(logits=self.table[input_ids])


def encoded(rows=ROWS, tokenizer=None, **options):
    return text.encode(rows, tokenizer or make_tokenizer(), vocabulary=30, mask_prompt=True, **options)


def summed(module, examples, size=3):
    return log_likelihoods(ModuleLoss(module, None), weights(module), examples, collate=collate, batch_size=size)


def texts_of(module, examples, **options):
    own = {"collate": collate, "batch_size": 4, **options}
    read = reader(ModuleLoss(module, None), weights(module), [[example] for example in examples], **own)
    return read([""] * len(examples), Decoding(0), 0)


def test_a_uniform_model_scores_100_by_the_size_of_the_vocabulary_and_one_that_knows_all_answers_100():
    examples = encoded()
    assert score(texts_of(Bigrams(torch.full((30, 30), 0.7)), examples)) == pytest.approx(100 / 30, rel=1e-6)
    table = torch.zeros(30, 30)
    known = encoded([("q", "abcd"), ("z", "abcd")])  # a line end is z, as is what the tokenizer does not know
    for one in known:
        for before, after in zip(one.input_ids, one.labels[1:], strict=False):
            if after >= 0:
                table[before, after] = 1e4
    assert score(texts_of(Bigrams(table), known)) == 100
    assert score(texts_of(Bigrams(-table), known)) == 0


def test_the_sum_is_that_of_the_answers_tokens_and_of_eos_alone():
    module, examples = Bigrams(torch.randn(30, 30, dtype=torch.float64)), encoded()
    logs = module.table.detach().log_softmax(1)
    for (total, count), one, (_, answer) in zip(summed(module, examples), examples, ROWS, strict=True):
        assert count == len(answer) + 1
        places = range(len(one.input_ids) - count, len(one.input_ids))
        assert one.input_ids[-1] == 1
        assert total == pytest.approx(sum(float(logs[one.input_ids[t - 1], one.input_ids[t]]) for t in places))


def test_the_score_is_the_perplexity_of_all_tokens_and_not_a_mean_over_rows():
    assert score(["-2.0 1", "-1.0 5"]) == pytest.approx(100 * math.exp(-0.5))
    assert score(["-1.0 5", "-2.0 1"]) == score(["-2.0 1", "-1.0 5"])
    assert score(["-inf 1", "-1.0 5"]) == 0
    assert metric_of("likelihood") is score


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_log_probabilities_are_those_of_transformers_own_loss(kind):
    module, examples = make_model(kind=kind), encoded()
    for (total, count), one in zip(summed(module, examples), examples, strict=True):
        with torch.no_grad():
            ids, labels = torch.tensor([one.input_ids]), torch.tensor([one.labels])
            loss = module(input_ids=ids, labels=labels).loss
        assert count == int((labels[:, 1:] != -100).sum())
        assert total == pytest.approx(-float(loss) * count, rel=1e-6)


def test_of_an_encoder_decoder_they_are_those_of_its_targets():
    module, tokenizer = PAIRS["make_module"]().eval(), PAIRS["make_tokenizer"]()
    examples = pairs.encode(ROWS, tokenizer, vocabulary=30)
    for size in (1, 4):
        found = log_likelihoods(
            ModuleLoss(module, None), weights(module), examples, collate=partial(pairs.collate, pad=0), batch_size=size
        )
        for (total, count), one in zip(found, examples, strict=True):
            with torch.no_grad():
                loss = module(input_ids=torch.tensor([one.input_ids]), labels=torch.tensor([one.labels])).loss
            assert count == len(one.labels)
            assert total == pytest.approx(-float(loss) * count, rel=1e-6)


def test_neither_batches_nor_padding_nor_the_order_of_rows_count():
    module, tokenizer = make_model(), make_tokenizer()
    tokenizer.padding_side = "left"
    examples = encoded(tokenizer=tokenizer)
    assert examples == encoded()
    alone = summed(module, examples, 1)
    for size in (2, 3, 100):
        assert [total for total, _ in summed(module, examples, size)] == pytest.approx([total for total, _ in alone])
    assert summed(module, examples[::-1], 1) == alone[::-1]
    one = examples[0]
    left = [2] * 5 + list(one.input_ids), [-100] * 5 + list(one.labels), [0] * 5 + [1] * len(one.input_ids)
    batch = dict(zip(("input_ids", "labels", "attention_mask"), (torch.tensor([own]) for own in left), strict=True))
    with torch.no_grad():
        values, predicted = likelihood.log_probs(module, batch)
    assert int(predicted.sum()) == alone[0][1]
    # positions are not given to the model, which takes rotary ones: only differences of them count
    assert float(values.sum()) == pytest.approx(alone[0][0], rel=1e-6)


def test_few_logits_are_in_float32_at_once_and_few_in_a_batch(monkeypatch):
    module, examples = Bigrams(torch.randn(30, 30).bfloat16()), encoded()
    whole = summed(module, examples, 100)
    assert module.seen == [(len(examples), 24)]
    wide = Bigrams(module.table.detach().float())
    assert summed(wide, examples, 100) == whole  # logits of bfloat16, their softmax in float32
    monkeypatch.setattr(head, "AT_ONCE", 70)  # two tokens
    upcast, true = [], head.F.cross_entropy
    monkeypatch.setattr(
        head.F, "cross_entropy", lambda logits, *a, **k: upcast.append(logits.numel()) or true(logits, *a, **k)
    )
    assert summed(module, examples, 100) == whole
    assert max(upcast) == 60
    monkeypatch.setattr(likelihood, "LOGITS", 30 * 12)
    module.seen.clear()
    assert summed(module, examples, 100) == whole
    assert [rows for rows, _ in module.seen] == [1, 3, 2]  # of 17 labels, of 7 + 1 + 3 and of 2 + 2


def test_the_head_runs_at_answers_alone():
    module, examples, seen = make_model(), encoded(), []
    module.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    found = summed(module, examples, 100)
    assert seen == [sum(count for _, count in found)]


def test_windows_of_a_row_are_summed():
    module = Bigrams(torch.randn(30, 30, generator=torch.Generator().manual_seed(3)))
    tokenizer = make_tokenizer()
    rows = ["the quick abcdef", "ba", "abcdefabcdef"]
    one, three = (text.windows(rows, tokenizer, vocabulary=30, max_length=limit) for limit in (100, 6))
    assert [len(own) for own in one] == [1, 1, 1]
    assert len({len(own) for own in three}) > 1
    own = {"collate": collate, "batch_size": 2}

    def read(texts, **some):
        found = reader(ModuleLoss(module, None), weights(module), texts, **own)([""] * 3, Decoding(0), 0, **some)
        return [tuple(map(float, line.split())) for line in found]

    # a bigram sees one token, so that windows change nothing
    assert [count for _, count in read(three)] == [count for _, count in read(one)]
    assert [total for total, _ in read(three)] == pytest.approx([total for total, _ in read(one)], rel=1e-5)
    assert read(three, rows=[2, 0]) == [read(three)[2], read(three)[0]]


def test_the_likeliest_choice_is_that_of_the_largest_sum_and_the_first_of_equals():
    module = Bigrams(torch.zeros(30, 30))
    choices = [("ab", "a", "b"), ("a", "b"), ("abcd", "bc")]
    texts = [encoded([("q", choice) for choice in own]) for own in choices]
    texts = [[one._replace(labels=(*one.labels[:-1], -100)) for one in own] for own in texts]

    def read(**options):
        own = {"collate": collate, "batch_size": 2, **options}
        return reader(ModuleLoss(module, None), weights(module), texts, choices, **own)

    assert read()([""] * 3, Decoding(0), 0) == ["a", "a", "bc"]
    assert read(norm=True)([""] * 3, Decoding(0), 0) == ["ab", "a", "abcd"]  # all the same for each character
    assert read()([""] * 2, Decoding(0), 0, rows=[2, 0]) == ["bc", "a"]
    with torch.no_grad():
        b = make_tokenizer().convert_tokens_to_ids("b")
        module.table[:, b] = 3.0
    assert read()([""] * 3, Decoding(0), 0) == ["b", "b", "bc"]
    assert same_choice(["a", "b", " b"], ["a", "c", "b"]) == pytest.approx(100 / 3)
    assert metric_of("choice") is metric_of("choice_norm") is same_choice


def test_log_probabilities_that_are_nan_are_no_score():
    module = Bigrams(torch.randn(30, 30).half())
    with torch.no_grad():
        module.table[5] = float("inf")
    examples = encoded([("q", "cb"), ("q", "b")])  # c is token 5
    with pytest.raises(ValueError, match=r"of 1 of 2 texts are NaN: the weights overflow in torch\.float16, .*float32"):
        summed(module, examples)
