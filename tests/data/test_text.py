"""Training text: what is encoded, cut, padded and supervised, on tokenizers trained on the spot."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from smat_fn.data import text

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "trace"
ROWS = [("What is 1 + 1?", "2"), ("Name a colour:", "deep blue"), ("", "yes"), ("Is water wet? Why?", "it is")]


def tokenizer(*, bos=True, eos=True, pad=True, closes=False, wide=False):
    """Byte-level BPE with whatever special tokens, so that any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300 if wide else 270,
        special_tokens=list(special.values()),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    fast.train_from_iterator([" ".join(row) for row in ROWS] * 3 + ["x\n\n\ny"] * 50, trainer)
    template = f"{'<s>' if bos else ''} $A {'</s>' if closes else ''}".strip()
    fast.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)] if bos or closes else []
    )
    kept = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return PreTrainedTokenizerFast(tokenizer_object=fast, **{k: v for k, v in special.items() if kept[k]})


@pytest.fixture(scope="module")
def plain():
    return tokenizer()


BOS, EOS, PAD, SIZE = 0, 1, 2, 270


def encode(rows, tok, **options):
    return text.encode(rows, tok, vocabulary=SIZE, **options)


def pieces(tok, prompt, answer):
    """The tokens of a row in three parts, from the offsets of the tokenizer: BOS, prompt with line end, answer."""
    out = tok(prompt + "\n" + answer, return_offsets_mapping=True)
    ids, ends = out["input_ids"][1:], [end for _, end in out["offset_mapping"][1:]]
    cut = sum(end <= len(prompt) + 1 for end in ends)
    return ids[:cut], ids[cut:]


def test_a_row_is_bos_prompt_line_end_answer_eos(plain):
    for (prompt, answer), example in zip(ROWS, encode(ROWS, plain), strict=True):
        assert example.input_ids == (*plain(f"{prompt}\n{answer}")["input_ids"], EOS)
        assert example.input_ids[0] == BOS
        assert example.labels == example.input_ids
        assert plain.decode(example.input_ids) == f"<s>{prompt}\n{answer}</s>"


@pytest.mark.parametrize("options", [{}, {"mask_prompt": True}, {"truncate": "prompt-middle", "max_length": 9}])
def test_many_rows_are_tokenized_in_parts(plain, monkeypatch, options):
    rows = ROWS * 4
    whole = encode(rows, plain, **options)
    for together in ((3, 10**6), (1000, 30), (1000, 1)):
        monkeypatch.setattr(text, "_TOGETHER", together)
        assert encode(rows, plain, **options) == whole
    if not options.get("mask_prompt"):
        assert all(example.labels is example.input_ids for example in whole), "kept once"


def test_mask_prompt_supervises_the_answer_and_eos_alone(plain):
    for row, example in zip(ROWS, encode(ROWS, plain, mask_prompt=True), strict=True):
        front, answer = pieces(plain, *row)
        assert example.labels == (*[-100] * (1 + len(front)), *answer, EOS)


def test_a_token_across_the_border_belongs_to_the_answer(plain):
    row = ("a:", "\n\nb")
    front, answer = pieces(plain, *row)
    assert plain.decode(front) == "a:"
    assert plain.decode(answer) == "\n\n\nb"
    (example,) = encode([row], plain, mask_prompt=True)
    assert example.labels == (*[-100] * (1 + len(front)), *answer, EOS)


def test_a_tokenizer_that_closes_texts_itself_gets_no_second_eos():
    closing = tokenizer(closes=True)
    assert closing("a")["input_ids"][-1] == EOS
    assert encode(ROWS, closing, mask_prompt=True) == encode(ROWS, tokenizer(), mask_prompt=True)


def test_right_truncation_appends_eos_first_and_supervises_it_when_retained(plain):
    row = ROWS[1]
    (whole,) = encode([row], plain)
    n = len(whole.input_ids)
    for length in (n + 1, n, n - 1, 4):
        (example,) = encode([row], plain, max_length=length)
        assert example.input_ids == example.labels == whole.input_ids[:length]
        assert (EOS in example.labels) == (length >= n)


def test_left_truncation_keeps_bos_and_the_end(plain):
    (whole,) = encode([ROWS[1]], plain)
    (example,) = encode([ROWS[1]], plain, max_length=6, truncate="left")
    assert example.input_ids == (BOS, *whole.input_ids[-5:])
    (bare,) = encode([ROWS[1]], tokenizer(bos=False), max_length=6, truncate="left")
    assert bare.input_ids == whole.input_ids[-6:]


@pytest.mark.parametrize("spare", [1, 2, 3, 4])
def test_prompt_middle_keeps_answer_eos_and_both_ends_of_the_prompt(plain, spare):
    row = ROWS[1]
    front, answer = pieces(plain, *row)
    assert len(front) > 4
    (example,) = encode([row], plain, max_length=spare + len(answer) + 1, truncate="prompt-middle", mask_prompt=True)
    prompt = [BOS, *front]
    head = (spare + 1) // 2
    kept = prompt[:head] + prompt[len(prompt) - (spare - head) :]
    assert example.input_ids == (*kept, *answer, EOS)
    assert example.labels == (*[-100] * spare, *answer, EOS)


def test_prompt_middle_without_room_cuts_the_answer_after_bos(plain):
    row = ROWS[1]
    _, answer = pieces(plain, *row)
    (example,) = encode([row], plain, max_length=len(answer), truncate="prompt-middle")
    assert example.input_ids == (BOS, *answer[:-1])


@pytest.mark.parametrize("limit", [2, 3, 5, 8, 512])
def test_windows_predict_every_token_of_a_text_but_the_first_once(plain, limit):
    texts = [" ".join(row) for row in ROWS] * 2
    found = text.windows(texts, plain, vocabulary=SIZE, max_length=limit)
    for own, windows in zip(texts, found, strict=True):
        ids = (*plain(own)["input_ids"], EOS)
        assert windows[0].input_ids == ids[:limit]
        assert all(window.labels is window.input_ids for window in windows)
        assert all(len(window.input_ids) == limit for window in windows[:-1])
        assert 2 <= len(windows[-1].input_ids) <= limit
        assert sum((window.labels[1:] for window in windows), ids[:1]) == ids
        # each continues with the token that the one before has ended with
        assert all(a.input_ids[-1] == b.input_ids[0] for a, b in pairwise(windows))
        assert len(windows) == -(-(len(ids) - 1) // (limit - 1))


def test_windows_of_a_text_as_long_as_the_limit_are_one(plain):
    (whole,) = text.windows(["Is water wet?"], plain, vocabulary=SIZE)
    length = len(whole[0].input_ids)
    counts = [
        len(text.windows(["Is water wet?"], plain, vocabulary=SIZE, max_length=length - less)[0]) for less in (0, 1)
    ]
    assert (len(whole), counts) == (1, [1, 2])


def test_long_texts_are_tokenized_in_few_together():
    """Tokenizing takes more memory than a text and its tokens: calls are limited by characters too."""
    seen = []

    class Seen:
        bos_token_id, eos_token_id, pad_token_id, vocab_size = BOS, EOS, PAD, SIZE

        def __call__(self, texts, **options):
            seen.append(sum(map(len, texts)))
            return {"input_ids": [[3, 4] for _ in texts]}

    texts = ["a" * 300_000] * 8 + ["b" * 3_000_000] + ["c"] * 2500
    assert len(text.windows(texts, Seen(), vocabulary=SIZE)) == len(texts)
    assert seen == [900_000, 900_000, 600_000, 3_000_000, 1000, 1000, 500]


def test_windows_refuse_what_encode_refuses(plain):
    with pytest.raises(ValueError, match="max_length is 1, must be at least 2"):
        text.windows(["a"], plain, vocabulary=SIZE, max_length=1)
    with pytest.raises(ValueError, match="no EOS token"):
        text.windows(["a"], tokenizer(eos=False), vocabulary=SIZE)
    outside = tokenizer(wide=True)
    with pytest.raises(ValueError, match="the embedding has 270 rows"):
        text.windows(["x"], outside, vocabulary=SIZE)
    bare = tokenizer(bos=False)
    with pytest.raises(ValueError, match="the tokenizer finds no token in rows 1 and 2: remove these texts"):
        text.windows(["a", "", ""], bare, vocabulary=SIZE)


def test_collate_pads_to_a_multiple_of_eight_and_supervises_no_padding():
    two = [text.Example((5, 6, 7), (-100, 6, 7)), text.Example(tuple(range(9)), tuple(range(9)))]
    batch = text.collate(two, 2)
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (2, 16))
    assert batch["input_ids"][0].tolist() == [5, 6, 7] + [2] * 13
    assert batch["labels"][0].tolist() == [-100, 6, 7] + [-100] * 13
    assert batch["attention_mask"].sum(1).tolist() == [3, 9]
    assert batch["labels"][1].tolist() == [*range(9)] + [-100] * 7
    assert text.collate(two[1:], 2, multiple=3)["input_ids"].shape == (1, 9)
    with pytest.raises(ValueError, match="no examples"):
        text.collate([], 2)


def test_padding_with_eos_leaves_a_rows_own_eos_supervised():
    tok = tokenizer(pad=False)
    assert tok.pad_token_id is None
    assert text.pad_id(tok) == EOS
    assert text.pad_id(tokenizer()) == PAD
    batch = text.collate(encode(ROWS, tok), text.pad_id(tok))
    assert (batch["labels"] == EOS).sum(1).tolist() == [1] * len(ROWS)
    assert torch.equal(batch["labels"] != -100, batch["attention_mask"].bool())
    last = batch["attention_mask"].sum(1) - 1
    assert batch["labels"].gather(1, last[:, None]).flatten().tolist() == [EOS] * len(ROWS)


def test_cut_report_counts_rows_by_what_they_lose(plain):
    rows = {"one": [("p", "abc"), ("p", "abc def ghi jkl"), ("a long prompt that is cut", "x")], "two": [("p", "q")]}
    lengths = {task: [len(e.input_ids) for e in encode(pairs, plain)] for task, pairs in rows.items()}
    limit = lengths["one"][0]
    got = text.cut_report(rows, plain, max_length=limit)
    assert lengths["one"][1] > limit + 1
    assert got["one"] == text.Cut(3, 2 / 3, 2 / 3, 1 / 3, max(lengths["one"]), middle=1 / 3)
    assert got["two"] == text.Cut(1, 0, 0, 0, lengths["two"][0])
    # one token less: the first row loses EOS and keeps its answer
    assert text.cut_report(rows, plain, max_length=limit - 1)["one"][1:4] == (1, 2 / 3, 1 / 3)
    start = 1 + len(pieces(plain, *rows["one"][2])[0])  # the place of the answer's first token
    lost = [text.cut_report({"t": rows["one"][2:]}, plain, max_length=size)["t"] for size in (start, start + 1)]
    assert [cut.whole_answer for cut in lost] == [1, 0]
    for truncate in ("prompt-middle", "left"):  # of these rows the second answer alone is longer than all that is kept
        cut = text.cut_report(rows, plain, max_length=limit, truncate=truncate)["one"]
        assert cut[1:4] == (1 / 3 if truncate == "prompt-middle" else 0, 1 / 3, 0)
        kept = [own.input_ids[-1] == EOS for own in encode(rows["one"], plain, max_length=limit, truncate=truncate)]
        assert kept == [True, truncate == "left", True]
    with pytest.raises(ValueError, match="task 'none' has no rows"):
        text.cut_report({"none": []}, plain)


def test_real_rows_survive_the_round_trip(plain):
    if not TRACE.is_dir():
        pytest.skip("no ../shared")
    for task in ("C-STANCE", "20Minuten"):
        rows = [(r["prompt"], r["answer"]) for r in json.loads((TRACE / task / "dev.json").read_text())[:5]]
        for row, example in zip(rows, encode(rows, plain, max_length=10**6, mask_prompt=True), strict=True):
            assert plain.decode(example.input_ids[1:-1]) == "\n".join(row)
            assert plain.decode([i for i in example.labels if i != -100]).endswith(row[1] + "</s>")
            assert example.labels.count(-100) == 1 + len(pieces(plain, *row)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncate": "middle"}, "'middle' is unknown.*prompt-middle"),
        ({"max_length": 1}, "max_length is 1"),
        ({"mask_prompt": True, "max_length": 4}, r"within 4 tokens nothing.*rows 0 \(\d+ tokens\), 1 .*prompt-middle"),
    ],
)
def test_bad_options_are_told(plain, options, message):
    with pytest.raises(ValueError, match=message):
        encode(ROWS, plain, **options)


def test_long_lists_of_rows_are_cut_short(plain):
    with pytest.raises(ValueError, match=r"rows 0 \(.*, 4 \(\d+ tokens\) and 4 more:"):
        encode(ROWS[:1] * 9, plain, mask_prompt=True, max_length=4)


def test_a_tokenizer_that_does_not_fit_is_told(plain):
    with pytest.raises(ValueError, match=r"no EOS token.*set tokenizer\.eos_token"):
        encode(ROWS, tokenizer(eos=False))
    with pytest.raises(ValueError, match="no EOS token"):
        text.cut_report({"a": ROWS}, tokenizer(eos=False))
    with pytest.raises(ValueError, match=r"embedding has 270 rows, too few.*its 29. tokens.*resize the embedding"):
        encode(ROWS, tokenizer(wide=True))
    grown = tokenizer(pad=False)
    grown.add_special_tokens({"pad_token": "<new>"})
    with pytest.raises(ValueError, match=r"its pad token 270"):
        encode(ROWS, grown)
    # a token beyond the embedding does no harm before a row uses it
    added = tokenizer()
    added.add_tokens(["<image>"])
    assert encode(ROWS, added) == encode(ROWS, plain)
    with pytest.raises(ValueError, match=r"270 rows, too few for the tokens of rows 1 \(token 270\)"):
        encode([ROWS[0], ("<image>", "x")], added)
