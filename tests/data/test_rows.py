"""Rows from files and from the hub: what comes out, and every problem named by its row."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest

from smat_fn.data.labelled import load_task
from smat_fn.data.rows import ImageRows, NoSplit, TextRows, load_conversations, load_rows, take
from smat_fn.errors import name_rows
from smat_fn.suites.sources import tasks_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
TRACE = "C-STANCE", "FOMC", "MeetingBank", "ScienceQA", "NumGLUE-cm", "NumGLUE-ds", "20Minuten"
CLIP8 = "Cars", "DTD", "EuroSAT", "GTSRB", "MNIST", "RESISC45", "SUN397", "SVHN"
ROWS = [{"prompt": "one\u00e9", "answer": "1"}, {"prompt": "two", "answer": ""}]
TEXTS = TextRows(("one\u00e9", "two"), ("1", ""))
PIXELS = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)


def png(pixels, mode="RGB", **options):
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, "PNG", **options)
    return out.getvalue()


def image_table(cells=None, labels=(1, 0), names=("image", "label")):
    """A datasets.Dataset as the hub gives them: encoded images, labels with names."""
    from datasets import ClassLabel, Dataset, Features, Image

    cells = [{"bytes": png(pixels), "path": None} for pixels in PIXELS] if cells is None else cells
    features = Features({names[0]: Image(), names[1]: ClassLabel(names=["cat", "dog"])})
    plain = Dataset.from_dict({names[0]: cells, names[1]: list(labels)})
    return Dataset(plain.data.table.cast(features.arrow_schema))


def write(folder, task, name, text):
    (folder / task).mkdir(exist_ok=True)
    (folder / task / name).write_text(text, encoding="utf-8")


def write_table(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def write_npz(path, **changes):
    arrays = {"images": PIXELS, "labels": np.array([1, 0]), "class_names": np.array(["cat", "dog"])} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.fixture
def hub(monkeypatch):
    """``hub(answer)`` makes the hub answer so, or raise; returns the list of what it was asked."""
    import datasets

    def install(answer):
        asked = []

        def load_dataset(path, name=None, split=None, **pinned):
            asked.append((path, name, split, *pinned.items()))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return install


def test_json_and_jsonl(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps(ROWS))
    write(tmp_path, "t", "dev.jsonl", "\ufeff" + "\r\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert load_rows(tmp_path, "t", "train") == TEXTS
    assert load_rows(str(tmp_path), "t", "dev") == TEXTS
    assert load_rows(tmp_path / "t" / "train.json", "any", "eval") == TEXTS


def test_text_parquet(tmp_path):
    write_table(tmp_path / "a.parquet", answer=["1", ""], prompt=["one\u00e9", "two"], more=[1, 2])
    assert load_rows(tmp_path / "a.parquet", "t", "train") == TEXTS


def test_columns_are_renamed(tmp_path):
    rows = [{"question": row["prompt"], "prompt": 3, "target": row["answer"]} for row in ROWS]
    write(tmp_path, "t", "train.json", json.dumps(rows))
    assert load_rows(tmp_path, "t", "train", columns={"prompt": "question", "answer": "target"}) == TEXTS
    with pytest.raises(ValueError, match=r"columns renames \['question'\]"):
        load_rows(tmp_path, "t", "train", columns={"question": "prompt"})
    write_npz(tmp_path / "a.npz", images=None, x=PIXELS)
    assert len(load_rows(tmp_path / "a.npz", "t", "train", columns={"image": "x"}).images) == 2


PLAIN = [{"text": "one\u00e9 and more", "url": "a"}, {"text": " two\n", "url": "b"}]
PLAIN_ROWS = TextRows(("", ""), ("one\u00e9 and more", " two\n"))


def test_plain_texts_are_rows_without_prompts(tmp_path):
    from datasets import Dataset

    write(tmp_path, "t", "train.jsonl", "\n".join(map(json.dumps, PLAIN)))
    write(tmp_path, "t", "eval.csv", 'text\n"one\u00e9 and more"\n" two\n"\n')
    columns = {name: [row[name] for row in PLAIN] for name in PLAIN[0]}
    write_table(tmp_path / "t" / "dev.parquet", **columns)
    Dataset.from_dict(columns).save_to_disk(tmp_path / "t" / "saved")
    for split in ("train", "dev", "eval", "saved"):
        assert load_rows(tmp_path, "t", split) == load_rows(tmp_path, "t", split, choices=True) == PLAIN_ROWS
    assert PLAIN_ROWS.plain
    assert take(PLAIN_ROWS, [1]) == TextRows(("",), (" two\n",))
    assert not TEXTS.plain
    assert not TextRows((), ("a",)).plain
    write(tmp_path, "u", "train.json", json.dumps([{"body": row["text"]} for row in PLAIN]))
    assert load_rows(tmp_path, "u", "train", columns={"text": "body"}) == PLAIN_ROWS


def test_bad_plain_texts_are_named_by_row(tmp_path):
    texts = ["a", "", " \n", 3, None, "\ud800"]
    write(tmp_path, "t", "train.json", json.dumps([*({"text": text} for text in texts), {"url": "b"}]))
    with pytest.raises(ValueError, match=r"train\.json: ") as caught:
        load_rows(tmp_path, "t", "train")
    for part in (
        "the text of row 6 is missing",
        "the text of rows 3 and 4 is not a string but 3 (int): write it as a text",
        "the text of row 5 has half a surrogate pair",
    ):
        assert part in str(caught.value)
    assert "empty" not in str(caught.value)


def test_empty_plain_texts_are_left_out_and_counted(tmp_path):
    texts = ["", "one\u00e9 and more", " \n\u2003", " two\n", ""]
    write(tmp_path, "t", "train.jsonl", "\n".join(json.dumps({"text": text}) for text in texts))
    write(tmp_path, "t", "eval.csv", 'text\n""\n"one\u00e9 and more"\n"  "\n" two\n"\n""\n')
    write_table(tmp_path / "t" / "dev.parquet", text=texts)
    for split in ("train", "dev", "eval"):
        assert load_rows(tmp_path, "t", split) == PLAIN_ROWS._replace(empty=3)
    write(tmp_path, "u", "train.json", json.dumps([{"text": " "}, {"text": ""}]))
    with pytest.raises(ValueError, match=r"train\.json: every text is empty, of 2: give some with words"):
        load_rows(tmp_path, "u", "train")


def test_a_split_has_rows_of_one_kind(tmp_path):
    mixed = [ROWS[0], PLAIN[0], ROWS[1], PLAIN[1]]
    write(tmp_path, "t", "train.jsonl", "\n".join(map(json.dumps, mixed)))
    write_table(
        tmp_path / "t" / "dev.parquet", **{n: [row.get(n) for row in mixed] for n in ("prompt", "answer", "text")}
    )
    for split in ("train", "dev"):
        with pytest.raises(
            ValueError, match=rf"{split}\.\w+: rows 1 and 3: no prompt, .*plain texts.*two tasks of them"
        ):
            load_rows(tmp_path, "t", split)
    with pytest.raises(ValueError, match="the text of rows 0 and 2 is missing"):
        load_rows(tmp_path, "t", "train", columns={"text": "text"})
    # a text beside prompts and answers is left out, as other columns are
    write(tmp_path, "t", "eval.json", json.dumps([{**row, "text": "all"} for row in ROWS]))
    assert load_rows(tmp_path, "t", "eval") == TEXTS
    assert load_rows(tmp_path, "t", "eval", columns={"text": "text"}) == TextRows(("", ""), ("all", "all"))
    assert load_rows(tmp_path, "t", "eval", columns={"text": "text", "prompt": "prompt"}) == TEXTS


@pytest.mark.parametrize("beside", ["label", "messages", "conversations", "instruction", "completion", "img"])
def test_a_text_beside_another_kind_of_rows_is_plain_where_it_is_named(tmp_path, beside):
    write(tmp_path, "t", "train.json", json.dumps([{**row, beside: "x"} for row in PLAIN]))
    write_table(tmp_path / "a.parquet", **{name: [row.get(name, "x") for row in PLAIN] for name in ("text", beside)})
    for source in (tmp_path, tmp_path / "a.parquet"):
        with pytest.raises(ValueError, match="for plain texts pass --suite-options columns text=text"):
            load_rows(source, "t", "train")
        assert load_rows(source, "t", "train", columns={"text": "text"}) == PLAIN_ROWS


def test_captions_of_images_are_not_plain_texts(tmp_path):
    image_table(names=("photo", "text")).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="column 'image' is missing, and 'photo' has images"):
        load_rows(tmp_path / "a.parquet", "t", "train")


def test_prompts_that_are_renamed_are_not_mistaken_for_plain_texts(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps([{"question": "a", "reply": "b", "text": "a b"}]))
    with pytest.raises(ValueError, match=r"columns 'qestion' and 'replay' are missing"):
        load_rows(tmp_path, "t", "train", columns={"prompt": "qestion", "answer": "replay"})
    write(tmp_path, "t", "dev.json", json.dumps(PLAIN))
    named = {"prompt": "question", "answer": "reply", "text": "text"}  # a folder of both kinds
    assert load_rows(tmp_path, "t", "train", columns=named) == TextRows(("a",), ("b",))
    assert load_rows(tmp_path, "t", "dev", columns=named) == PLAIN_ROWS


def test_plain_texts_are_no_conversations(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps([{"text": "a"}]))
    with pytest.raises(ValueError, match="these look like plain texts, which have no conversation: leave --chat out"):
        load_conversations(tmp_path, "t", "train")
    with pytest.raises(ValueError, match=r"there is no column label .*; plain texts are for --preset lm"):
        load_task(str(tmp_path / "t"))


CHOSEN = [{**row, "choices": [row["answer"] or "x", "x", "y"]} for row in ROWS]
CHOSEN[1]["answer"] = "x"


def test_choices_are_read_where_they_are_asked_for(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps(CHOSEN))
    write(
        tmp_path,
        "t",
        "dev.jsonl",
        "\n".join(json.dumps({"options": row.pop("choices"), **row}) for row in map(dict, CHOSEN)),
    )
    columns = {name: [row[name] for row in CHOSEN] for name in CHOSEN[0]}
    write_table(tmp_path / "a.parquet", **columns)
    expected = TextRows(("one\u00e9", "two"), ("1", "x"), (("1", "x", "y"), ("x", "x", "y")))
    assert load_rows(tmp_path, "t", "train", choices=True) == expected
    assert load_rows(tmp_path, "t", "dev", choices=True, columns={"choices": "options"}) == expected
    assert load_rows(tmp_path / "a.parquet", "t", "train", choices=True) == expected
    assert (
        load_rows(tmp_path, "t", "train")
        == load_rows(tmp_path / "a.parquet", "t", "train")
        == expected._replace(choices=())
    )
    assert take(expected, [1]) == TextRows(("two",), ("x",), (("x", "x", "y"),))


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        (None, "are missing: write a list of two texts or more, one of them exactly the answer"),
        ("x|y", r"are not a list, first 'x\|y' beside the answer 'x': write"),
        (["x", 3], r"are not all texts, first \['x', 3\]"),
        (["x", " "], r"are not all texts, first \['x', ' '\]"),
        (["x"], r"are fewer than two, first \['x'\]"),
        (["x", "\ud800"], "have half a surrogate pair"),
        (["X", "x "], r"do not hold the answer, first \['X', 'x '\] beside the answer 'x'"),
    ],
)
def test_bad_choices_are_named_by_row(tmp_path, choices, problem):
    write(tmp_path, "t", "train.json", json.dumps([CHOSEN[0], {**CHOSEN[1], "choices": choices}]))
    with pytest.raises(ValueError, match=rf"train\.json: the choices of row 1 {problem}.*rows count from 0"):
        load_rows(tmp_path, "t", "train", choices=True)
    assert load_rows(tmp_path, "t", "train").choices == ()


def test_rows_without_choices_say_how_to_name_them(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps([{**ROWS[0], "options": ["1", "x"]}]))
    with pytest.raises(ValueError, match=r"column 'choices' is missing, .*--suite-options columns choices=NAME"):
        load_rows(tmp_path, "t", "train", choices=True)
    write(tmp_path, "t", "dev.csv", "prompt,answer,choices\na,b,b c\n")
    with pytest.raises(ValueError, match=r"choices of row 0 are not a list, first 'b c' .*a \.csv cannot hold lists"):
        load_rows(tmp_path, "t", "dev", choices=True)


def test_npz(tmp_path):
    rows = load_rows(write_npz(tmp_path / "a.npz"), "t", "train")
    assert np.array_equal(rows.images, PIXELS)
    assert rows.images.dtype == np.uint8
    assert (rows.labels.tolist(), rows.labels.dtype, rows.class_names) == ([1, 0], np.int64, ("cat", "dog"))


def test_image_parquet_is_decoded_when_read(tmp_path):
    image_table(names=("img", "y")).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"column 'image' is missing, and 'img' has images: .*columns image=img,label="
    ):
        load_rows(tmp_path / "a.parquet", "t", "train")
    rows = load_rows(tmp_path / "a.parquet", "t", "train", columns={"image": "img", "label": "y"})
    assert isinstance(rows, ImageRows)
    assert np.array_equal(np.stack(list(rows.images)), PIXELS)
    assert rows.images[0].flags.writeable
    assert (rows.labels.tolist(), rows.class_names) == ([1, 0], ("cat", "dog"))


def test_images_without_the_hubs_metadata(tmp_path):
    write_table(tmp_path / "a.parquet", image=[png(pixels) for pixels in PIXELS], label=[5, 0])
    rows = load_rows(tmp_path / "a.parquet", "t", "train")
    assert np.array_equal(rows.images[1], PIXELS[1])
    assert (rows.labels.tolist(), rows.class_names) == ([5, 0], ())


def test_images_become_upright_rgb(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter
    grey = PIXELS[0, :, :, 0]
    cells = [png(PIXELS[0], exif=exif), png(grey, "L")]
    write_table(tmp_path / "a.parquet", image=cells, label=[0, 1])
    images = load_rows(tmp_path / "a.parquet", "t", "train").images
    assert np.array_equal(images[0], np.rot90(PIXELS[0], -1))
    assert np.array_equal(images[1], np.repeat(grey[:, :, None], 3, axis=2))


def test_the_hub_is_asked_for_config_and_split(hub):
    from datasets import Dataset

    asked = hub(Dataset.from_list(ROWS))
    assert load_rows("someone/texts", "FOMC", "dev") == TEXTS
    hub(image_table())
    rows = load_rows("someone/images", "MNIST", "test")
    assert np.array_equal(np.stack(list(rows.images)), PIXELS)
    assert rows.class_names == ("cat", "dog")
    assert asked == [("someone/texts", "FOMC", "dev")]


def test_a_revision_of_the_hub_is_asked_for(hub):
    from datasets import Dataset

    asked = hub(Dataset.from_list(ROWS))
    assert load_rows("someone/texts@v1.2", "FOMC", "train") == TEXTS
    assert asked == [("someone/texts", "FOMC", "train", ("revision", "v1.2"))]


def test_a_saved_dataset_is_rows_of_each_kind(tmp_path):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    splits = {"train": Dataset.from_list(ROWS), "validation": image_table()}
    DatasetDict(splits).save_to_disk(tmp_path / "t")
    assert load_rows(tmp_path, "t", "train") == TEXTS
    images = load_rows(tmp_path, "t", "dev")
    assert (images.class_names, np.array_equal(images.images[1], PIXELS[1])) == (("cat", "dog"), True)
    assert [own[1]["content"] for own in load_conversations(tmp_path, "t", "train")] == list(TEXTS.answers)
    labelled = [{"text": row["prompt"], "label": row["answer"] or "none"} for row in ROWS]
    DatasetDict({name: Dataset.from_list(labelled) for name in ("train", "dev", "test")}).save_to_disk(tmp_path / "l")
    assert load_task(str(tmp_path / "l")).splits["dev"].texts == TEXTS.prompts
    for split, names in (("train", ["neg", "pos"]), ("test", ["pos", "neg"])):  # 0 means another class
        kinds = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=kinds).save_to_disk(tmp_path / "n" / split)
    with pytest.raises(ValueError, match="class names of test are not those of train, in this order: cast the labels"):
        load_task(str(tmp_path / "n"))
    for split in ("dev", "test"):
        kinds = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
        Dataset.from_dict({"text": ["c", "d"], "label": [0, 1]}, features=kinds).save_to_disk(tmp_path / "n" / split)
    write(tmp_path, "n", "labels.json", '["Pos", "neg"]')
    with pytest.raises(
        ValueError, match=r"n/labels.json: 'Pos' is class 0 here and class 1 in the ClassLabel of the r"
    ):
        load_task(str(tmp_path / "n"))
    for names in (("neg", "pos"), ("negativ", "positiv")):  # the same, and translated
        write(tmp_path, "n", "labels.json", json.dumps(names))
        assert load_task(str(tmp_path / "n")).classes == names
    next((tmp_path / "t" / "train").glob("*.arrow")).write_bytes(b"")
    with pytest.raises(ValueError, match=r"train is not a dataset that can be read \(.*\): save it again"):
        load_rows(tmp_path, "t", "train")


def test_a_hub_out_of_reach_says_what_to_put_where(hub):
    cause = ConnectionError("Couldn't reach 'someone/texts' on the Hub (OfflineModeIsEnabled)\nmore")
    hub(cause)
    with pytest.raises(ValueError, match="someone/texts") as caught:
        load_rows("someone/texts", "FOMC", "dev")
    message = str(caught.value)
    assert "(ConnectionError: Couldn't reach 'someone/texts' on the Hub (OfflineModeIsEnabled))" in message
    assert 'make a folder with FOMC/dev.json (a list of {"prompt": ..., "answer": ...})' in message
    assert "for images FOMC/dev.npz (images, labels, class_names)" in message
    assert "\n" not in message
    assert caught.value.__cause__ is cause


def test_a_path_is_no_dataset_id(hub, tmp_path):
    asked = hub(AssertionError("asked"))
    for source in (tmp_path / "none", "./none", "none/a.json", "a/b/c"):
        with pytest.raises(ValueError, match="there is no file or folder"):
            load_rows(source, "t", "train")
    assert not asked


def test_files_that_are_not_there(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps(ROWS))
    with pytest.raises(
        ValueError, match=r"t has no eval.json, .*, and no folder eval .*images.*t holds \['train.json'\]"
    ):
        load_rows(tmp_path, "t", "eval")
    with pytest.raises(ValueError, match=r"u has no train.json, .* holds \['t'\]"):
        load_rows(tmp_path, "u", "train")
    write(tmp_path, "t", "train.jsonl", "")
    with pytest.raises(ValueError, match=r"train\.json and train\.jsonl: keep one"):
        load_rows(tmp_path, "t", "train")
    (tmp_path / "a.tsv").write_text("prompt\tanswer\n")
    with pytest.raises(ValueError, match=r"a.tsv is none of \.json, \.jsonl, \.csv, \.parquet, \.npz"):
        load_rows(tmp_path / "a.tsv", "t", "train")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.json", "[", r"a.json is not JSON \(Expecting value"),
        ("a.json", "{}", "holds one dict, not a list"),
        ("a.json", "[]", "there are no rows"),
        ("a.jsonl", "\n", "there are no rows"),
        ("a.jsonl", '[\n{"prompt": "p"}\n]', r"^[^;]*line 1 is not JSON \(.*\): .*; name a list of objects \.json$"),
        ("a.jsonl", "x\n" * 20, r"line 6 is not JSON [^;]*; and 14 more lines$"),
        ("a.json", '{"prompt": "p"}\n{"prompt": "q"}', "one object a line: name it .jsonl"),
        ("a.json", '[{"prompt": "p", "completion": "a"}]', "--suite-options columns answer=completion"),
        ("a.json", '[{"instruction": "i", "input": "x", "output": "o"}]', "into one column prompt, and name output"),
        ("a.json", '[{"conversations": []}]', "write messages of role .* and pass --chat"),
        ("a.csv", "", "there are no rows"),
        ("a.csv", "prompt,answer\n", "there are no rows"),
        ("a.csv", 'prompt,answer\na,"b', r"a.csv is not CSV \(unexpected end of data\) in line 2: "),
        (
            "a.csv",
            'prompt,answer\na,"b\nc"\n\n"d" e,f\ng,h',
            r"not CSV \('.*\) in line 5: .* write quotes in them tw",
        ),
        ("a.csv", 'prompt,answer\na,"b\nc"\nprompt,answer\nd,e', r"line 4 has the column names .* again: leave it out"),
        ("a.csv", "prompt,prompt\na,b", "column 'prompt' is there twice"),
        ("a.csv", "prompt,answer\na,b\nc\nd,e,f", r"rows 1 and 2: not as many values as the 2 columns"),
        ("a.csv", "prompt;answer\na;b", r"'prompt;answer' has ';' and no comma: separate columns by"),
        ("a.json", '[{}, 3, "x"]', "rows 1 and 2: not a JSON object"),
        (
            "a.jsonl",
            '{"prompt": "p", "answer": "a"}\n{\n\n[1]\nx',
            "line 2 is not JSON .* line 5 is not JSON .* row 1: not a JSON",
        ),
        (
            "a.json",
            '[{"words": "p"}]',
            r"'prompt' and 'answer' are missing, there are \['words'\]: .*prompt=NAME,answer=NAME",
        ),
        (
            "a.csv",
            "file_name,label\nx.png,cat",
            r"look like images, which .csv and .json cannot hold: .*a folder for each class",
        ),
        ("a.json", '[{"prompt": "p", "label": "a"}]', r"^[^;]*'answer' is missing, there are \['prompt', 'label'\]"),
    ],
)
def test_bad_json(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        load_rows(tmp_path / name, "t", "train")


def test_a_csv_has_the_rows_of_json(tmp_path):
    found = TextRows(("a, b", 'two\nlines "q"'), ("c", "é"))
    text = 'id,prompt,answer\r\n1,"a, b",c\r\n\r\n2,"two\nlines ""q""",é\r\n'
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_rows(tmp_path / "a.csv", "t", "train") == found


def test_a_csv_may_hold_long_texts(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f'prompt,answer\n"{"x" * 150_000}",y\n')
    assert len(load_rows(tmp_path / "a.csv", "t", "train").prompts[0]) == 150_000
    assert csv.field_size_limit() == limit


def test_json_in_another_encoding(tmp_path):
    (tmp_path / "a.json").write_bytes("[\u00e9]".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.json is not in UTF-8 .*: save it in this encoding"):
        load_rows(tmp_path / "a.json", "t", "train")


def test_all_bad_texts_are_named_at_once(tmp_path):
    rows = [
        {"prompt": "p", "answer": "a"},
        {"prompt": " \n", "answer": 3},
        {"answer": "a"},
        {"prompt": None, "answer": None},
        {"prompt": "", "answer": "\ud83d"},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"a\.json") as caught:
        load_rows(tmp_path / "a.json", "t", "train")
    assert str(caught.value).removeprefix(f"{tmp_path / 'a.json'}: ") == (
        "the prompt of row 2 is missing; the prompt of row 3 is not a string but None (NoneType): write it as a text; "
        "the prompt of rows 1 and 4 is empty; the answer of rows 1 and 3 is not a string but 3 (int): write it as a "
        "text; the answer of row 4 has half a surrogate pair (rows count from 0)"
    )


def test_many_rows_are_cut_short():
    assert name_rows([4]) == "row 4"
    assert name_rows([4, 7]) == "rows 4 and 7"
    assert name_rows(range(10)) == "rows 0, 1, 2, 3, 4, 5, 6, 7, 8 and 9"
    assert name_rows(range(1000)) == "rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"labels": np.array([2, -1])}, "label of rows 0 and 1 is outside 0 to 1"),
        ({"labels": np.array([0.0, 1.0])}, "label of rows 0 and 1 is not an integer"),
        ({"images": np.uint8(1)}, r"images are uint8 \(\), must be uint8 \(N, H, W, 3\)"),
        ({"labels": np.array([0])}, r"labels have shape \(1,\), must be one each of 2 images"),
        ({"images": PIXELS / 255, "class_names": np.array([3])}, "images are float64 .*class_names are int64"),
        ({"images": PIXELS[:0], "labels": np.array([], int)}, "there are no rows"),
        ({"class_names": None}, r"lacks \['class_names'\], its arrays are \['images', 'labels'\]"),
        ({"class_names": np.array(["a", None])}, "cannot be read .*without pickled objects"),
    ],
)
def test_bad_npz(tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_rows(write_npz(tmp_path / "a.npz", **changes), "t", "train")


@pytest.mark.parametrize("name", ["a.npz", "a.parquet"])
def test_files_that_are_something_else(tmp_path, name):
    array = io.BytesIO()
    np.save(array, PIXELS)
    for content in (b"", b"PK\x03\x04 and so on", b"text", array.getvalue()):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} (cannot be read|is not a parquet)"):
            load_rows(tmp_path / name, "t", "train")


def test_all_bad_images_are_named_at_once(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    cut = png(noise)[:1500]
    cells = [png(noise), b"text", None, cut]
    write_table(tmp_path / "a.parquet", image=cells, label=[0, -1, 1, None])
    with pytest.raises(ValueError, match=r"a.parquet: the label of row 3 is not an integer") as caught:
        load_rows(tmp_path / "a.parquet", "t", "train")
    message = str(caught.value)
    assert "the label of row 1 is outside 0, 1, ..." in message
    assert [f"the image of row {i} does not decode" in message for i in range(4)] == [False, True, True, True]


def test_missing_and_empty_columns_of_tables(tmp_path):
    write_table(tmp_path / "a.parquet", image=[b""])
    with pytest.raises(ValueError, match=r"'label' is missing, there are \['image'\]"):
        load_rows(tmp_path / "a.parquet", "t", "train")
    write_table(tmp_path / "a.parquet", picture=[b""])
    with pytest.raises(ValueError, match=r"columns 'prompt' and 'answer' are missing.*image rows need a column"):
        load_rows(tmp_path / "a.parquet", "t", "train")
    write_table(tmp_path / "a.parquet", content=["a"], repo=["b"])
    with pytest.raises(ValueError, match=r"'image', plain texts 'text' \(or columns text=NAME\)$"):
        load_rows(tmp_path / "a.parquet", "t", "train")
    write_table(tmp_path / "a.parquet", prompt=[], answer=[])
    with pytest.raises(ValueError, match="there are no rows"):
        load_rows(tmp_path / "a.parquet", "t", "train")


def test_take(tmp_path):
    assert take(TEXTS, [1, 0, 1]) == TextRows(("two", "one\u00e9", "two"), ("", "1", ""))
    arrays = load_rows(write_npz(tmp_path / "a.npz"), "t", "train")
    image_table().to_parquet(tmp_path / "a.parquet")
    for rows in (arrays, load_rows(tmp_path / "a.parquet", "t", "train")):
        few = take(take(rows, [1, 0]), [1])
        assert np.array_equal(few.images[0], PIXELS[0])
        assert (len(few.images), few.labels.tolist(), few.class_names) == (1, [1], ("cat", "dog"))


@needs_shared
@pytest.mark.parametrize("task", TRACE)
def test_trace(task):
    counts = {split: load_rows(SHARED / "trace", task, split) for split in ("train", "dev", "eval")}
    stored = json.loads((SHARED / "trace" / task / "dev.json").read_text(encoding="utf-8"))
    assert counts["dev"] == TextRows(tuple(r["prompt"] for r in stored), tuple(r["answer"] for r in stored))
    facts = json.loads((SHARED / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    assert {s: len(rows.prompts) for s, rows in counts.items()} == {
        s: facts[f"trace/{task}/{s}.json"]["rows"] for s in counts
    }


@needs_shared
@pytest.mark.parametrize("task", CLIP8)
def test_vision(task):
    facts = json.loads((SHARED / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    seen = set()
    for split in ("train", "dev", "test"):
        rows = load_rows(SHARED / "vision", task, split)
        assert rows.images.shape == (facts[f"vision/{task}/{split}.npz"]["rows"], 32, 32, 3)
        assert set(rows.labels.tolist()) == set(range(len(rows.class_names)))
        seen.add(rows.class_names)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("asked", "there"), [("eval", "test"), ("test", "eval"), ("dev", "validation"), ("dev", "valid")]
)
def test_a_split_is_found_by_its_other_names(tmp_path, asked, there):
    write(tmp_path, "t", f"{there}.json", json.dumps(ROWS))
    assert load_rows(tmp_path, "t", asked) == TEXTS
    assert tasks_of(tmp_path, None, known=(), splits=(asked,)) == ("t",)
    write(tmp_path, "t", f"{asked}.json", json.dumps(ROWS[:1]))
    with pytest.raises(ValueError, match=rf"{asked}\.json and {there}\.json, which all are split '{asked}': keep one"):
        load_rows(tmp_path, "t", asked)


def test_a_split_of_the_hub_is_asked_by_its_other_names(monkeypatch):
    from datasets import Dataset

    asked = []

    def load(source, *, part, instead, name, split):
        asked.append(split)
        if split != "validation":
            raise ValueError(f'Unknown split "{split}". Should be one of')
        return Dataset.from_list(ROWS)

    monkeypatch.setattr("smat_fn.data.rows.read_hub", load)
    assert load_rows("some/data", "t", "dev") == TEXTS
    assert asked == ["dev", "validation"]
    with pytest.raises(NoSplit, match='Unknown split "eval"'):
        load_rows("some/data", "t", "eval")

    def fails(source, *, part, instead, name, split):
        raise ValueError(f'Unknown split "{split}".' if split == "dev" else "cannot be reached")

    monkeypatch.setattr("smat_fn.data.rows.read_hub", fails)
    with pytest.raises(ValueError, match="cannot be reached") as error:  # it may have the split
        load_rows("some/data", "t", "dev")
    assert not isinstance(error.value, NoSplit)


def test_a_split_that_is_missing_is_told_from_a_task_that_is(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps(ROWS))
    with pytest.raises(NoSplit, match=r"t has no dev\.json"):
        load_rows(tmp_path, "t", "dev")
    with pytest.raises(ValueError, match=r"other has no dev\.json") as error:
        load_rows(tmp_path, "other", "dev")
    assert not isinstance(error.value, NoSplit)


def test_files_in_a_folder_of_a_splits_name_are_told_their_place(tmp_path):
    (tmp_path / "task").mkdir()
    write(tmp_path, "task/test", "data.jsonl", '{"prompt": "a", "answer": "b"}')
    told = r"a folder with data\.jsonl in it is not a split: move the rows into one file, .*/task/test\.jsonl"
    for read in (load_rows, load_conversations):
        with pytest.raises(ValueError, match=told):
            read(tmp_path, "task", "eval")


def test_rows_of_another_preset_are_recognised(tmp_path):
    write(tmp_path, "t", "train.json", json.dumps([{"text": "a", "label": 1}]))
    with pytest.raises(ValueError, match="these look like text/label rows, for which there is --preset text"):
        load_rows(tmp_path, "t", "train")
