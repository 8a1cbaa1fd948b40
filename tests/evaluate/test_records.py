"""Records as JSON lines: what was added is found again, whatever ended the program."""

import json
import logging

import pytest

from smat_fn.evaluate.records import ANSWERS, SCORES, Answer, Records, Scored, content_key

FIRST = [Answer(3, 'a "quoted" answer', "right"), Answer(0, "二\nlines", "")]


@pytest.fixture
def folder(tmp_path):
    """A folder with two scores and three answers."""
    records = Records(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    records.add_score("k1", Scored(1 / 3, 2.0), {"task": "a"})
    records.add_score("k2", Scored(100.0, 0.5), {})
    records.add_answers("k1", FIRST, {"task": "a"})
    records.add_answers("k2", [Answer(0, "other", "b")], {})
    return tmp_path / "out"


def contents(records):
    return [records.score(key) for key in ("k1", "k2", "k3")], [dict(records.answers(k)) for k in ("k1", "k2", "k3")]


ALL = [Scored(1 / 3, 2.0), Scored(100.0, 0.5), None], [{3: 'a "quoted" answer', 0: "二\nlines"}, {0: "other"}, {}]


def test_what_was_added_is_found_again_bit_for_bit_and_readable(folder):
    assert contents(Records(folder)) == ALL
    lines = [json.loads(line) for line in (folder / ANSWERS).read_text(encoding="utf-8").splitlines()]
    first = {"key": "k1", "task": "a", "row": 3, "prediction": 'a "quoted" answer', "reference": "right"}
    assert lines[0] == first
    assert len(lines) == 3


def test_without_a_folder_records_live_in_memory():
    records = Records()
    records.add_score("k1", Scored(5.0, 1.0), {})
    records.add_answers("k1", FIRST, {})
    assert records.score("k1") == Scored(5.0, 1.0)
    assert records.answers("k1") == {0: "二\nlines", 3: 'a "quoted" answer'}
    assert records.answers("k2") == {}


@pytest.mark.parametrize("size", range(1, 45, 7))
def test_a_last_line_that_was_broken_off_is_dropped_and_written_again(folder, size):
    for name in (SCORES, ANSWERS):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-size])
    records = Records(folder)
    scores, answers = contents(records)
    assert scores == [*ALL[0][:1], None, None]
    assert answers == [ALL[1][0], {}, {}]
    records.add_score("k2", Scored(100.0, 0.5), {})
    records.add_answers("k2", [Answer(0, "other", "b")], {})
    assert contents(Records(folder)) == ALL


@pytest.mark.parametrize("size", [1, 20, 44])
def test_a_line_that_another_program_is_writing_is_left_to_it(folder, size):
    for name in (SCORES, ANSWERS):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-size])
        records = Records(folder)  # opened meanwhile
        assert (folder / name).read_bytes() == data[:-size]
        (folder / name).write_bytes(data)
        assert records.score("k1") == ALL[0][0]
    (folder / SCORES).write_bytes((folder / SCORES).read_bytes() + b"\n")  # of one that saw no end of the line before
    assert contents(Records(folder)) == ALL


def test_a_broken_line_in_the_middle_is_passed_over_with_a_warning(folder, caplog):
    for name in (SCORES, ANSWERS):
        lines = (folder / name).read_text(encoding="utf-8").splitlines(keepends=True)
        lines[0] = '{"key": "k1", "row": 3, "prediction": 7, "score": "x"}\n'
        (folder / name).write_text("".join(lines), encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        scores, answers = contents(Records(folder))
    assert scores == [None, Scored(100.0, 0.5), None]
    assert answers == [{0: "二\nlines"}, {0: "other"}, {}]
    assert caplog.text.count("lines [1] are not valid records") == 2


def test_a_score_that_no_metric_gives_is_passed_over(folder, caplog):
    lines = (folder / SCORES).read_text(encoding="utf-8").splitlines(keepends=True)
    for score in ("250.0", "NaN", "-1"):
        line = json.loads(lines[0])
        text = json.dumps(line | {"score": 0}).replace('"score": 0', f'"score": {score}')
        (folder / SCORES).write_text("".join([text + "\n", *lines[1:]]), encoding="utf-8")
        assert contents(Records(folder))[0] == [None, Scored(100.0, 0.5), None]
    assert caplog.text.count("lines [1] are not valid records") == 3


def test_a_key_is_the_content_of_its_facts():
    facts = {"a": 1, "b": [1, 2]}
    assert content_key(facts) == content_key({"b": [1, 2], "a": 1})
    others = [facts | {"b": [2, 1]}, facts | {"a": 1.5}, facts | {"c": None}]
    assert len({content_key(f) for f in (facts, *others)}) == 4
    with pytest.raises(ValueError, match="JSON"):
        content_key({"a": float("nan")})


def test_a_full_disk_names_the_file(tmp_path):
    records = Records(tmp_path)
    (tmp_path / "scores.jsonl").symlink_to("/dev/full")  # has no end to read
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'scores.jsonl'}'"):
        records.add_score("k", Scored(1.0, 0.1), {})
