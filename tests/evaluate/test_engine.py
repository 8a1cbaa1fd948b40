"""Answers batch by batch, whoever gives them: what is known is not asked for again, and changes nothing."""

import pytest

from smat_fn.evaluate import decoding
from smat_fn.evaluate.engine import Decoding, engine_name, find_engine, in_batches, row_seed

PROMPTS = ["aaa", "b", "cccccc", "dd", "eeee", "f", "ggggg"]
LENGTHS = [len(prompt) for prompt in PROMPTS]
SETTINGS = Decoding(5, 0.7)


class Talker:
    """A `Generate` that remembers what it was asked."""

    def __init__(self, stop_after=None):
        self.asked, self.stop_after = [], stop_after

    def __call__(self, prompts, settings, seed, *, repeat=0, rows=None):
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(rows)
        assert [PROMPTS[row] for row in rows] == prompts
        return [f"{prompt} {seed} {repeat} {row}" for prompt, row in zip(prompts, rows, strict=True)]


def run(talker, known=None, on_batch=None):
    options = {"repeat": 2, "lengths": LENGTHS, "batch_size": 3, "known": known or {}, "on_batch": on_batch}
    return in_batches(talker, PROMPTS, SETTINGS, 9, **options)


def test_rows_are_asked_for_by_length_and_answered_in_order():
    talker, told = Talker(), []
    assert run(talker, on_batch=lambda *batch: told.append(batch)) == [f"{p} 9 2 {i}" for i, p in enumerate(PROMPTS)]
    assert talker.asked == [[2, 6, 4], [0, 3, 1], [5]]
    assert [(sorted(new), done, total) for new, done, total in told] == [
        ([2, 4, 6], 3, 7),
        ([0, 1, 3], 6, 7),
        ([5], 7, 7),
    ]


def test_a_batch_has_no_more_tokens_than_allowed_but_one_row_at_least():
    talker, lengths = Talker(), [2, 10, 5, 3, 5, 1, 30]
    new = SETTINGS.max_new_tokens
    texts = in_batches(talker, PROMPTS, SETTINGS, 9, lengths=lengths, batch_size=3, tokens=2 * (5 + new))
    assert talker.asked == [[6], [1], [2, 4], [3, 0], [5]]
    assert texts == in_batches(Talker(), PROMPTS, SETTINGS, 9, lengths=lengths, batch_size=3)
    in_batches(few := Talker(), PROMPTS, SETTINGS, 9, lengths=lengths, batch_size=3, tokens=10_000)
    assert few.asked == [[6, 1, 2], [4, 3, 0], [5]]


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_what_was_ended_goes_on_in_the_same_batches(batches):
    kept = {}
    try:
        run(Talker(stop_after=batches), on_batch=lambda new, done, total: kept.update(new))
    except KeyboardInterrupt:
        assert batches < 3
    talker, told = Talker(), []
    whole = run(talker, known=dict(kept), on_batch=lambda *batch: told.append(batch))
    assert whole == run(Talker())
    assert talker.asked == [[2, 6, 4], [0, 3, 1], [5]][batches:]
    assert [len(new) for new, _, _ in told] == [0] * batches + [3, 3, 1][batches:]
    # a batch that was written in part is decoded whole, so that it is padded as before
    kept.pop(4, None)
    run(talker := Talker(), known=kept)
    assert talker.asked[0] == [2, 6, 4]


def test_an_engine_that_gives_other_than_one_text_a_prompt_is_refused():
    for answers in (["a"] * 2, ["a", "b", None]):
        with pytest.raises(ValueError, match=rf"gave {len(answers)} answers to 3 prompts: it must give one text each"):
            run(lambda *args, answers=answers, **options: answers)
    with pytest.raises(ValueError, match="batch_size is 0"):
        in_batches(Talker(), PROMPTS, SETTINGS, 0, lengths=LENGTHS, batch_size=0)


def test_the_seed_of_a_row_is_its_own_and_fits_an_engine():
    seeds = {row_seed(s, repeat, row) for s in range(2) for repeat in range(2) for row in range(20)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3)


def test_an_engine_is_found_by_name_or_told():
    assert find_engine("smat_fn.evaluate.decoding:generator") is decoding.generator
    assert engine_name(decoding.generator) == "smat_fn.evaluate.decoding:generator"
    talker = Talker()
    assert engine_name(talker) == repr(talker)
    for name in ("smat_fn.evaluate.decoding:nothing", "no_such_module:make", "smat_fn.evaluate.decoding", ""):
        with pytest.raises(ValueError, match=rf"engine '{name}' cannot be imported.*give module:function"):
            find_engine(name)
