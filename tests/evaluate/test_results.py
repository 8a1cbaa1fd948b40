"""Rows and their files."""

import json
import math
import re

import pytest
import torch

from smat_fn.evaluate import Result, accuracy, read_results, write_results
from smat_fn.evaluate.results import Run, read_rows

ROWS = [
    Result("SMAT", "expert:mirror", "mirror", "test", 98.5, 3),
    Result("FT", "ties", "Ärger", "dev", 100 / 3, 3, 0.7, {"keep": 0.5, "note": "zwei\nZeilen\u2028drei\x85vier"}),
]


def test_json_lines_round_trip(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    write_results(path, ROWS)
    assert read_results(path) == ROWS
    assert [json.loads(line)["method"] for line in path.read_text().split("\n")[:-1]] == ["SMAT", "FT"]
    write_results(path, reversed(ROWS))
    assert read_results(path) == ROWS[::-1]
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "results.jsonl"
    write_results(path, ROWS)
    with pytest.raises(TypeError):
        write_results(path, [Result("FT", "wa", "x", "dev", 1.0, 0, extra={"tensor": torch.ones(1)})])
    with pytest.raises(ValueError, match="Out of range float values"):
        write_results(path, [*ROWS, Result("FT", "wa", "x", "dev", 1.0, 0, extra={"loss": math.nan})])
    assert read_results(path) == ROWS
    assert list(tmp_path.iterdir()) == [path]


def test_all_bad_lines_are_named(tmp_path):
    path = tmp_path / "results.jsonl"
    write_results(path, ROWS[:1])
    good = path.read_text()
    unknown = json.dumps(json.loads(good) | {"extras": 1})
    path.write_text(f'{good}{{"method": "FT"\n{unknown}\n{{"method": "FT"}}\n')
    with pytest.raises(ValueError, match=r"line 2: .*line 3: unknown fields \['extras'\].*line 4: .*missing"):
        read_results(path)
    path.write_text(f"{unknown}\n" * 20)  # as scores.jsonl, which is a cache
    with pytest.raises(ValueError, match=r"line 6: [^;]*; and 14 more lines: remove these lines or write the file"):
        read_results(path)


@pytest.mark.parametrize(
    ("kind", "fields", "told"),
    [
        (Result, {"seed": "3"}, "seed is '3', must be int"),
        (Result, {"seed": None}, "seed is None, must be int"),
        (Result, {"task": 5}, "task is 5, must be str"),
        (Result, {"score": True}, "score is True, must be float"),
        (Result, {"coef": "a"}, "coef is 'a', must be float or null"),
        (Run, {"seconds": "long"}, "seconds is 'long', must be float or null"),
        (Run, {"training": "adam"}, "training is 'adam', must be Mapping"),
        (Run, {"versions": [1]}, "versions is [1], must be Mapping"),
    ],
    ids=repr,
)
def test_a_field_of_another_type_is_named(tmp_path, kind, fields, told):
    path, run = tmp_path / "rows.jsonl", Run("FT", "wa", 3, seconds=2, dev_curve=[[0.3, 50]])
    row = ROWS[1] if kind is Result else run
    write_results(path, [row])
    assert read_rows(path, kind) == [row]
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=re.escape(f"line 1: {told}: remove these lines")):
        read_rows(path, kind)


def test_a_score_of_a_tensor_is_a_float_and_a_text_is_refused(tmp_path):
    row = Result("FT", "wa", "x", "dev", torch.tensor(50.0), 0)
    write_results(tmp_path / "results.jsonl", [row])
    assert read_results(tmp_path / "results.jsonl") == [Result("FT", "wa", "x", "dev", 50.0, 0)]
    with pytest.raises(ValueError, match="score of FT, wa on x: '50' is not a number"):
        Result("FT", "wa", "x", "dev", "50", 0)


@pytest.mark.parametrize("score", [-0.1, 100.5, math.nan, math.inf])
def test_scores_outside_the_scale_are_refused(score):
    with pytest.raises(ValueError, match=r"score of FT, wa on x: .* is outside \[0, 100\]"):
        Result("FT", "wa", "x", "dev", score, 0)


def test_accuracy_counts():
    assert accuracy(torch.tensor([1, 2, 3]), torch.tensor([1, 0, 3])) == 200 / 3
    for predictions, labels in ((torch.zeros(0), torch.zeros(0)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(ValueError, match="give one prediction per label"):
            accuracy(predictions, labels)
