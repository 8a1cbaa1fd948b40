"""Rows of a task: texts (prompt, answer) or images (image, label), from files or from the Hugging Face hub."""

import io
import json
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

SUFFIXES = (".json", ".jsonl", ".parquet", ".npz")
_COLUMNS = ("prompt", "answer", "image", "label")
_ARRAYS = {"image": "images", "label": "labels"}
_MISSING = object()
_SHOWN = 10


class Images:
    """Encoded images, decoded when read: ``images[i]`` is uint8 (H, W, 3), upright by its EXIF orientation."""

    def __init__(self, read: Callable[[int], Any], indices: Sequence[int]) -> None:
        self.read, self.indices = read, indices  # read(i): bytes, or a mapping with "bytes" or "path"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> np.ndarray:
        return _decode(self.read(self.indices[place]))

    def take(self, places: Sequence[int] | np.ndarray, axis: int = 0) -> "Images":
        """Some of the images, as ``numpy.ndarray.take`` along the first axis."""
        return Images(self.read, [self.indices[place] for place in places])


class TextRows(NamedTuple):
    """Prompts and answers, one each a row."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...]


class ImageRows(NamedTuple):
    """Images and labels, one each a row."""

    images: np.ndarray | Images  # images[i]: uint8 (H, W, 3); as an array (N, H, W, 3)
    labels: np.ndarray  # int64 (N,)
    class_names: tuple[str, ...]  # of labels 0, 1, ...; () where the source names none


Rows: TypeAlias = TextRows | ImageRows


def load_rows(source: str | Path, task: str, split: str, *, columns: Mapping[str, str] | None = None) -> Rows:
    """The rows of one split of a task.

    Text rows have the columns ``prompt`` and ``answer``, image rows ``image`` (encoded) and ``label``; an ``.npz``
    has ``images`` uint8 (N, H, W, 3), ``labels`` (N,) integers and ``class_names`` (C,). Others are left out. Every
    image is decoded once, to be checked; those of parquet files and of the hub then stay encoded.

    Args:
        source: a folder with ``<task>/<split>`` as .json (a list of objects), .jsonl, .parquet or .npz; or one such
            file, whatever the task and split; or a dataset id of the hub, whose config is the task (HF_HUB_OFFLINE and
            HF_DATASETS_OFFLINE are minded).
        columns: the source's name of a column by its name here, e.g. ``{"prompt": "question"}``.
    Raises: ValueError that lists all problems by row, counted from 0; for a source that cannot be reached.
    """
    if unknown := sorted(set(columns or {}) - set(_COLUMNS)):
        raise ValueError(f"columns renames {unknown}, the columns are {list(_COLUMNS)}: write {{ours: the source's}}")
    names = {name: (columns or {}).get(name, name) for name in _COLUMNS}
    path = Path(source).expanduser()
    if not path.exists():
        return _dataset(_hub(str(source), task, split), names, f"{source} ({task}, {split})")
    file = _find(path, task, split) if path.is_dir() else path
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} is none of {', '.join(SUFFIXES)}: convert it to one of them")
    if file.suffix == ".npz":
        return _npz(file, {name: (columns or {}).get(name, array) for name, array in _ARRAYS.items()})
    return _dataset(_parquet(file), names, str(file)) if file.suffix == ".parquet" else _json(file, names)


def take(rows: Rows, indices: Sequence[int]) -> Rows:
    """The rows of these indices, in this order."""
    if isinstance(rows, TextRows):
        return TextRows(*(tuple(column[i] for i in indices) for column in rows))
    chosen = np.asarray(indices, dtype=np.int64)
    return ImageRows(rows.images.take(chosen, axis=0), rows.labels[chosen], rows.class_names)


def name_rows(indices: Sequence[int]) -> str:
    """Rows in an error message: "row 3", "rows 3, 5 and 7", the first ten of many."""
    shown, more = [str(i) for i in indices[:_SHOWN]], len(indices) - _SHOWN
    if more > 0:
        shown.append(f"{more} more")
    return f"row {shown[0]}" if len(shown) == 1 else f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def _find(folder: Path, task: str, split: str) -> Path:
    home = folder / task
    files = [file for suffix in SUFFIXES if (file := home / f"{split}{suffix}").is_file()]
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(f"{home} has {' and '.join(f.name for f in files)}: keep one of them")
    seen = home if home.is_dir() else folder
    there = sorted(f.name for f in seen.iterdir())
    raise ValueError(f"{home} has no {split}.json, .jsonl, .parquet or .npz: {seen} holds {there or 'nothing'}")


def _dataset(data: Any, names: Mapping[str, str], where: str) -> Rows:
    from datasets import Image

    kind = ("image", "label") if names["image"] in data.column_names else ("prompt", "answer")
    problems = [_absent(name, names[name], data.column_names) for name in kind if names[name] not in data.column_names]
    _complain(where, problems or ([] if len(data) else ["there are no rows"]))
    first, second = (names[name] for name in kind)
    if kind == ("prompt", "answer"):
        return _texts(where, data[first][:], data[second][:])
    pictures = data.select_columns(first)
    if isinstance(data.features[first], Image):
        pictures = pictures.cast_column(first, Image(decode=False))
    images = Images(lambda i: pictures[i][first], range(len(data)))
    return _images(where, images, data[second][:], tuple(getattr(data.features[second], "names", ())))


def _parquet(file: Path) -> Any:
    import pyarrow.parquet
    from datasets import Dataset

    try:
        return Dataset(pyarrow.parquet.read_table(file))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise ValueError(f"{file} is no parquet file ({error})") from error


def _hub(source: str, task: str, split: str) -> Any:
    if source.endswith(SUFFIXES) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"there is no file or folder {source}")
    import datasets

    try:
        return datasets.load_dataset(source, name=task, split=split)
    except Exception as error:  # of many packages: hub, http client, file system
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"there is no folder {source!r} here, and split {split!r} of config {task!r} of the hub's dataset of that "
            f"name cannot be had ({type(error).__name__}: {reason}): go online, or make a folder with "
            f'{task}/{split}.json (a list of {{"prompt": ..., "answer": ...}}), for images {task}/{split}.npz (images, '
            "labels, class_names), and give that folder as the source"
        ) from error


def _json(file: Path, names: Mapping[str, str]) -> TextRows:
    problems, rows = [], []
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".json":
            rows = json.loads(text)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both
        raise ValueError(f"{file} is no JSON in UTF-8 ({error})") from error
    if file.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                problems.append(f"line {number} is no JSON ({error})")
    if not isinstance(rows, list):
        problems, rows = [f"it holds one {type(rows).__name__}, not a list of objects"], [{}]
    if others := [i for i, row in enumerate(rows) if not isinstance(row, dict)]:
        problems.append(f"{name_rows(others)}: no JSON object")
    _complain(file, problems or ([] if rows else ["there are no rows"]))
    known = list(dict.fromkeys(key for row in rows for key in row))
    _complain(file, [_absent(name, names[name], known) for name in ("prompt", "answer") if names[name] not in known])
    return _texts(str(file), *([row.get(names[name], _MISSING) for row in rows] for name in ("prompt", "answer")))


def _npz(file: Path, names: Mapping[str, str]) -> ImageRows:
    wanted = (names["image"], names["label"], "class_names")
    try:
        with file.open("rb") as stream:  # np.load leaves a file open that is no archive
            store = np.load(stream, allow_pickle=False)
            there = getattr(store, "files", [])
            if absent := [name for name in wanted if name not in there]:
                raise ValueError(f"it lacks {absent}, its arrays are {there}")
            images, labels, class_names = (store[name] for name in wanted)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} cannot be read ({error}): write it by numpy.savez without pickled objects") from error
    problems = []
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        problems.append(f"images are {images.dtype} {images.shape}, must be uint8 (N, H, W, 3)")
    if labels.ndim != 1 or len(labels) != len(images):
        problems.append(f"labels have shape {labels.shape}, must be one each of {len(images)} images")
    if class_names.ndim != 1 or class_names.dtype.kind != "U" or not class_names.size:
        problems.append(f"class_names are {class_names.dtype} {class_names.shape}, must be strings (C,)")
    _complain(file, problems or ([] if len(images) else ["there are no rows"]))
    return _images(str(file), images, labels, tuple(class_names.tolist()))


def _texts(where: str, prompts: Sequence[Any], answers: Sequence[Any]) -> TextRows:
    checks: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("is missing", lambda value: value is _MISSING),
        ("is no string", lambda value: not isinstance(value, str)),
        ("has half a surrogate pair", lambda value: bool(re.search("[\ud800-\udfff]", value))),
    )
    problems = []
    for name, values in (("prompt", prompts), ("answer", answers)):
        own = (*checks, ("is empty", lambda value: not value.strip())) if name == "prompt" else checks
        bad: dict[str, list[int]] = {what: [] for what, _ in own}
        for i, value in enumerate(values):
            if what := next((what for what, fails in own if fails(value)), None):
                bad[what].append(i)
        problems += [f"the {name} of {name_rows(rows)} {what}" for what, rows in bad.items() if rows]
    _complain(where, problems)
    return TextRows(tuple(prompts), tuple(answers))


def _images(where: str, images: np.ndarray | Images, labels: Sequence[Any], class_names: tuple[str, ...]) -> ImageRows:
    integers = [isinstance(label, (int, np.integer)) and not isinstance(label, bool) for label in labels]
    wrong = [i for i, integer in enumerate(integers) if not integer]
    problems = [f"the label of {name_rows(wrong)} is no integer"] if wrong else []
    limit = len(class_names) or np.iinfo(np.int64).max
    outside = [i for i, integer in enumerate(integers) if integer and not 0 <= labels[i] < limit]
    if outside:
        span = f"0 to {limit - 1}, the places of the class names" if class_names else "0, 1, ..."
        problems.append(f"the label of {name_rows(outside)} is outside {span}")
    if isinstance(images, Images):

        def fault(place: int) -> str:
            try:
                images[place]
            except Exception as error:  # Pillow raises errors of many kinds on broken data
                return f"the image of row {place} does not decode ({error})"
            return ""

        with ThreadPoolExecutor() as pool:
            faults = [found for found in pool.map(fault, range(len(images))) if found]
        problems += faults[:_SHOWN]
        if len(faults) > _SHOWN:
            problems.append(f"nor do {len(faults) - _SHOWN} more")
    _complain(where, problems)
    return ImageRows(images, np.asarray(labels, dtype=np.int64), class_names)


def _decode(cell: Any) -> np.ndarray:
    from PIL import Image, ImageOps

    if isinstance(cell, Mapping):
        cell = cell.get("bytes") or Path(cell["path"]).read_bytes()
    if not isinstance(cell, bytes):
        raise ValueError(f"a {type(cell).__name__}, not an encoded image")
    with Image.open(io.BytesIO(cell)) as image:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"))


def _absent(name: str, theirs: str, there: Sequence[str]) -> str:
    hint = " (image rows need a column 'image')" if name == "prompt" else ""
    return f"column {theirs!r} is missing, there are {list(there)}: say which it is by columns={{{name!r}: ...}}{hint}"


def _complain(where: str | Path, problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)} (rows count from 0)")
