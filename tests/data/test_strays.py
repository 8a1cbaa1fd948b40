"""Files that may be a split, under a name that is not read: told, before a split is made of the training rows."""

import json

import numpy as np
import pytest
from PIL import Image

from smat_fn.data.labelled import load_task
from smat_fn.data.rows import load_rows
from smat_fn.data.strays import like_splits
from smat_fn.suites.sources import tasks_of

LIKE = (
    *(f"test{suffix}" for suffix in (".tsv", ".JSONL", ".CSV", ".jsonl.gz", ".txt", ".arrow", ".xlsx", ".zip")),
    *("Test.jsonl", "testing.jsonl", "tests.json", "test_1.jsonl", "test-00000-of-00001.parquet", "test_set.csv"),
    *("development.jsonl", "Validation.csv", "train2.jsonl", "evaluation.json"),
)
OTHERS = (
    "tester.jsonl",
    "devices.csv",
    "values.json",
    "trainer_state.json",
    "test.py",
    "dev.md",
    "train.log",
    ".test.tsv",
)


def of_texts(home, *names):
    home.mkdir(parents=True, exist_ok=True)
    for name in ("train.jsonl", *names):
        rows = [{"text": f"{name} {i}", "label": "ab"[i % 2]} for i in range(10)]
        (home / name).write_text("\n".join(map(json.dumps, rows)))


def of_images(home, *names):
    for label in "ab":
        (home / "train" / label).mkdir(parents=True)
        Image.fromarray(np.full((4, 5, 3), ord(label), dtype=np.uint8)).save(home / "train" / label / "1.png")
    for name in names:
        (home / name).write_bytes(b"")


@pytest.mark.parametrize("name", LIKE)
def test_names_that_begin_like_a_splits_are_told(tmp_path, name):
    of_texts(tmp_path / "texts", name)
    of_images(tmp_path / "images", name)
    for read in (
        lambda: load_task(str(tmp_path / "texts")),
        lambda: load_rows(tmp_path, "texts", "train"),
        lambda: load_rows(tmp_path, "images", "train"),
    ):
        with pytest.raises(ValueError, match=r": name it exactly train, dev or test, as one \.jsonl") as error:
            read()
        assert f"{name} looks like a split that is not read" in str(error.value)


def test_another_part_of_a_split_is_told_though_no_split_is_missing(tmp_path):
    of_texts(tmp_path / "t", "dev.jsonl", "test.jsonl", "train2.jsonl")
    for read in (lambda: load_task(str(tmp_path / "t")), lambda: load_rows(tmp_path, "t", "test")):
        with pytest.raises(ValueError, match=r"train2\.jsonl looks like a split that is not read"):
            read()


def test_other_names_and_those_beside_a_split_are_none(tmp_path):
    of_texts(tmp_path / "t", *OTHERS)
    assert like_splits(tmp_path / "t", ["train.jsonl"]) == []
    of_texts(tmp_path / "u", "dev.jsonl", "test.jsonl", "train.tsv", "test.jsonl.gz")
    assert len(load_task(str(tmp_path / "u")).splits["train"].texts) == 10
    assert tasks_of(tmp_path, None, known=(), splits=("train",)) == ("t", "u")


def test_a_folder_or_a_table_may_be_the_split_that_is_missing(tmp_path):
    of_texts(tmp_path, "dev.jsonl")
    (tmp_path / "labels.json").write_text('["a", "b"]')
    assert load_task(str(tmp_path)).made == ("test",)
    (tmp_path / "sub").mkdir()
    (tmp_path / "held_out.TSV").touch()
    with pytest.raises(ValueError, match=r"there is no test, unless it is held_out\.TSV, sub: name it exactly"):
        load_task(str(tmp_path))
    of_texts(tmp_path, "test.jsonl")
    assert load_task(str(tmp_path)).made == ()
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="test looks like a split that is not read"):
        load_task(str(tmp_path))


def test_folders_that_hold_what_looks_like_a_split_are_no_tasks_in_silence(tmp_path):
    of_texts(tmp_path / "t")
    for place in (".git/train.tsv", "docs/chart.png", "docs/README.md"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    assert tasks_of(tmp_path, None, known=(), splits=("train",)) == ("t",)
    for place in ("u/train.tsv", "u/dev.tsv", "v/Train.jsonl", "w/training.jsonl"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).touch()
    told = (
        r"u holds dev\.tsv, train\.tsv, but no train that is read; v holds Train\.jsonl, .* or name the tasks \(--tasks"
    )
    with pytest.raises(ValueError, match=told):
        tasks_of(tmp_path, None, known=(), splits=("train",))
    assert tasks_of(tmp_path, ["t"], known=(), splits=("train",)) == ("t",)
