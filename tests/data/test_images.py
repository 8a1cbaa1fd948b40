"""Folders of a class each as rows of images."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from smat_fn.data import images
from smat_fn.data.images import Images
from smat_fn.data.rows import load_rows


def write(path, value, size=(4, 5), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).convert(mode).save(path)


def test_the_rows_take_turns_between_classes(tmp_path):
    for name, values in {"b dog": (1, 2, 3), "a cat": (4, 5)}.items():
        for value in values:
            write(tmp_path / "t" / "train" / name / f"{value}.png", value)
    rows = load_rows(tmp_path, "t", "train")
    assert isinstance(rows.images, Images)
    assert rows.class_names == ("a cat", "b dog")
    assert [int(image[0, 0, 0]) for image in rows.images] == [4, 1, 5, 2, 3]
    assert rows.labels.tolist() == [0, 1, 0, 1, 1]
    assert rows.images[0].shape == (4, 5, 3)


def test_a_class_has_one_label_in_all_splits(tmp_path):
    write(tmp_path / "t" / "train" / "a" / "1.png", 1)
    write(tmp_path / "t" / "train" / "b" / "1.JPG", 2)
    write(tmp_path / "t" / "test" / "b" / "1.png", 3, mode="L")
    write(tmp_path / "t" / "test" / "c" / "1.png", 4)
    (tmp_path / "t" / "test" / "c" / "notes.txt").write_text("no image")
    rows = load_rows(tmp_path, "t", "test")
    assert rows.class_names == ("a", "b", "c") == load_rows(tmp_path, "t", "train").class_names
    assert rows.labels.tolist() == [1, 2]


def test_what_is_wrong_with_folders_is_told(tmp_path):
    write(tmp_path / "t" / "train" / "a" / "1.png", 1)
    (tmp_path / "t" / "train" / "a" / "2.png").write_bytes(b"broken")
    with pytest.raises(
        ValueError, match=r"the image of row 1 .*2\.png does not decode \(it is not an image\)"
    ) as caught:
        load_rows(tmp_path, "t", "train")
    assert str(caught.value).startswith(str(tmp_path / "t" / "train"))
    (tmp_path / "t" / "dev" / "a").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"dev: there are no images in its folders, none of \.png.*: put each image into .*CLASS"
    ):
        load_rows(tmp_path, "t", "dev")
    (tmp_path / "t" / "train.json").write_text("[]")
    with pytest.raises(ValueError, match=r"train\.json and train: keep one"):
        load_rows(tmp_path, "t", "train")


def test_images_are_decoded_to_check_them_once_whatever_the_command(tmp_path, monkeypatch):
    """Thousands of photographs would take minutes each time."""
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path / "cache"))
    decoded, decode = [], images._decode
    monkeypatch.setattr(images, "_decode", lambda encoded: decoded.append(1) or decode(encoded))
    files = [tmp_path / "t" / "train" / "a" / f"{i}.png" for i in range(3)]
    for value, file in enumerate(files):
        write(file, value)
    for _ in range(2):
        rows = load_rows(tmp_path, "t", "train")
        assert len(decoded) == 3
    assert rows.images.take([2, 0]).hashes == [images.hash_of(files[i].read_bytes()) for i in (2, 0)]
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:40])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the image of row 1 .*1\.png does not decode"):
            load_rows(tmp_path, "t", "train")
    files[1].write_bytes(whole)
    before = len(decoded)
    load_rows(tmp_path, "t", "train")
    assert len(decoded) == before
    monkeypatch.setattr(images, "DECODING", -1)
    load_rows(tmp_path, "t", "train")
    assert len(decoded) == before + 3


def test_an_image_as_it_is_stored(tmp_path):
    write(tmp_path / "t" / "train" / "a" / "1.png", 1)
    rows = load_rows(tmp_path, "t", "train")
    assert rows.images.encoded(0) == (tmp_path / "t" / "train" / "a" / "1.png").read_bytes()


def test_only_splits_give_classes_and_what_is_no_image_is_told(tmp_path, caplog):
    for place in (
        "train/a/1.png",
        "train/b/1.png",
        "raw/unsorted/1.png",
        "train/.checkpoints/1.png",
        "train/a/._1.png",
    ):
        write(tmp_path / "t" / place, 1)
    for left in ("train/a/2.heic", "train/b/deep/3.png", "train/4.png"):
        write(tmp_path / "t" / f"{left}.png", 1)
        (tmp_path / "t" / f"{left}.png").rename(tmp_path / "t" / left)
    (tmp_path / "t/train/a/labels.txt").touch()
    rows = load_rows(tmp_path, "t", "train")
    assert (rows.class_names, len(rows.images)) == (("a", "b"), 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{tmp_path / 't'}: 3 files or folders of train are left out, train/4.png the first" in line


def test_folders_that_name_a_class_in_two_ways_are_told(tmp_path):
    for place in ("train/ice cream/1.png", "train/b/1.png", "test/Ice_cream/1.png", "test/b/1.png"):
        write(tmp_path / "t" / place, 1)
    with pytest.raises(ValueError, match=r"t: the folders \['Ice_cream', 'ice cream'\] name one class in 2 ways: name"):
        load_rows(tmp_path, "t", "train")
    for place in ("train/caf\u00e9/1.png", "test/cafe\u0301/1.png"):
        write(tmp_path / "u" / place, 1)
    with pytest.raises(ValueError, match="name one class in 2 ways"):
        load_rows(tmp_path, "u", "train")
    for place in ("train/a cat/1.png", "train/b/1.png", "test/a cat /1.png", "test/b/1.png"):
        write(tmp_path / "v" / place, 1)
    with pytest.raises(ValueError, match=r"v: the folders \['a cat', 'a cat '\] name one class in 2 ways"):
        load_rows(tmp_path, "v", "train")


def test_folders_without_images_are_no_classes(tmp_path, caplog):
    for place in ("train/a/1.png", "train/b/1.png", "test/a/1.png", "test/c/1.png"):
        write(tmp_path / "t" / place, 1)
    for place in ("train/c", "train/empty", "train/__MACOSX/a", "test/B"):
        (tmp_path / "t" / place).mkdir(parents=True)
    (tmp_path / "t/train/__MACOSX/a/._1.png").touch()
    assert load_rows(tmp_path, "t", "train").class_names == ("a", "b", "c")
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        "t: folders of train without images in any split do not count as classes, __MACOSX, empty: images are files"
        in line
    )
    write(tmp_path / "t/test/empty/1.png", 1)
    assert load_rows(tmp_path, "t", "train").class_names == ("a", "b", "c", "empty")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_values_that_do_not_fit_8_bits_are_not_cut_off(tmp_path, dtype):
    folder = tmp_path / "t/train/a"
    folder.mkdir(parents=True)
    Image.fromarray(np.arange(20, dtype=dtype).reshape(4, 5)).save(folder / "1.tiff")
    with pytest.raises(ValueError, match=r"1\.tiff does not decode \(it has more than 8 bits a value, mode [IF]"):
        load_rows(tmp_path, "t", "train")


@pytest.mark.parametrize(("kind", "values"), [(0, 1), (2, 3), (4, 2), (6, 4)])  # of PNG: gray, colour, each with alpha
def test_16_bits_a_colour_are_not_cut_off(tmp_path, kind, values):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    file, lines = tmp_path / "t/train/a/1.png", (b"\0" + bytes(range(5 * values * 2))) * 4
    file.parent.mkdir(parents=True)
    header = struct.pack(">IIBBBBB", 5, 4, 16, kind, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines)), chunk(b"IEND", b""))
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    with pytest.raises(ValueError, match=r"1\.png does not decode \(it has more than 8 bits a value, mode [IR]"):
        load_rows(tmp_path, "t", "train")
