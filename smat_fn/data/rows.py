"""Rows of a task: texts (prompt, answer; or text) or images (image, label), from files or the Hugging Face hub."""

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..errors import complain, name_rows, shortened, some_of
from ..progress import downloading
from . import strays
from .conversations import Conversation, problem_of, tools_in, without_nulls
from .images import ImageRows, Images, class_folders, image_rows, npz_rows

TABLES = (".json", ".jsonl", ".csv", ".parquet")  # files of texts
SUFFIXES = (*TABLES, ".npz")
_COLUMNS = ("prompt", "answer", "choices", "text", "image", "label")
SPELLINGS: Mapping[str, tuple[str, ...]] = {  # of a split; on the hub the first that is there
    "dev": ("dev", "validation", "valid", "val"),
    "eval": ("eval", "test"),
    "test": ("test", "eval"),
}
_SPLITS = frozenset(("train", *(name for names in SPELLINGS.values() for name in names)))
_ARRAYS = {"image": "images", "label": "labels"}
_PICTURES = "image", "img", "picture", "file_name", "filename", "image_path", "filepath"  # usual columns of images
_NEAR = "completion", "response", "output", "target", "chosen"  # usual columns of answers
# columns beside which a text is hardly all of a row
_OTHERS = "label", "messages", "conversations", "instruction", *_NEAR, *_PICTURES
_MISSING = object()


class TextRows(NamedTuple):
    """Prompts and answers, one of each per row; choices of every row where they were asked for.

    Plain texts are answers, and their prompts are empty, as no other row's are.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...] = ()
    empty: int = 0  # rows of the source that are left out: plain texts of white space alone

    @property
    def plain(self) -> bool:
        """Whether these are plain texts."""
        return self.prompts[:1] == ("",)


class NoSplit(ValueError):
    """The source of a task has no such split, and can be read."""


Rows: TypeAlias = TextRows | ImageRows
_Kind: TypeAlias = Callable[[Sequence[str]], Sequence[str]]  # the columns that are taken, of those that are there


def load_rows(
    source: str | Path, task: str, split: str, *, columns: Mapping[str, str] | None = None, choices: bool = False
) -> Rows:
    """The rows of one split of a task.

    Text rows have the columns ``prompt`` and ``answer``, plain texts ``text`` and neither of these, image rows
    ``image`` (encoded) and ``label``; an ``.npz`` has ``images`` uint8 (N, H, W, 3), ``labels`` (N,) integers and
    ``class_names`` (C,). Others are left out, but a ``text`` beside a column of another kind of rows, such as label or
    messages, must be named by ``columns``. Plain texts of white space alone are left out, and counted. Every image is
    decoded once, to be checked; all but those of an .npz then stay encoded.

    Args:
        source: a folder with ``<task>/<split>`` as .json (a list of objects), .jsonl, .csv, .parquet or .npz, as a
            folder that ``datasets`` saved, or as one with a folder of images per class; or one such file, whatever the
            task and split; or a dataset id of the hub, perhaps with @revision, whose config is the task
            (HF_HUB_OFFLINE and HF_DATASETS_OFFLINE are minded).
        columns: the source's name of a column by its name here, e.g. ``{"prompt": "question"}``.
        choices: text rows have the column ``choices`` too, a list of texts, one of them the answer.
    Raises: ValueError that lists all problems by row, counted from 0; for a source that cannot be reached.
    """
    if unknown := sorted(set(columns or {}) - set(_COLUMNS)):
        raise ValueError(f"columns renames {unknown}, the columns are {list(_COLUMNS)}: write {{ours: the source's}}")
    names = {name: (columns or {}).get(name, name) for name in _COLUMNS}
    own = ("prompt", "answer", *(("choices",) if choices else ()))
    texts = partial(_kind, own, names, frozenset(columns or {}))
    path = Path(source).expanduser()
    if not path.exists():
        instead = (
            f'{task}/{split}.json (a list of {{"prompt": ..., "answer": ...}}), for images {task}/{split}.npz (images, '
            "labels, class_names)"
        )
        return _dataset(_hub_split(str(source), task, split, instead), texts, names, f"{source} ({task}, {split})")
    file = _find(path, task, split) if path.is_dir() else path
    if is_saved(file):
        return _dataset(read_saved(file), texts, names, str(file))
    if file.is_dir():
        return class_folders(file.parent, file.name, {*_SPLITS, split})
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file} is none of {', '.join(SUFFIXES)}: convert it to one of them")
    if file.suffix == ".npz":
        return npz_rows(file, {name: (columns or {}).get(name, array) for name, array in _ARRAYS.items()})
    if file.suffix == ".parquet":
        return _dataset(read_parquet(file), texts, names, str(file))
    return _json(file, texts, names)


def load_conversations(
    source: str | Path, task: str, split: str, *, columns: Mapping[str, str] | None = None
) -> tuple[Conversation, ...]:
    """The conversations of one split of a task: a list of messages with ``role`` and ``content``, the last an answer.

    A row has them in the column ``messages``, or is a pair of ``prompt`` and ``answer``; in the column ``tools``
    it may have a list of tools, or a JSON text of one. Keys of a message or a tool whose value is null, at every depth,
    are left out.

    Args: source: as `load_rows`, without images; columns: the source's names of these three columns.
    Raises: ValueError that lists all problems by row, counted from 0; for a source that cannot be reached.
    """
    known = ("messages", "prompt", "answer")
    if unknown := sorted(set(columns or {}) - set(known)):
        raise ValueError(f"columns renames {unknown}, conversations have {list(known)}")
    names = {name: (columns or {}).get(name, name) for name in known}
    path = Path(source).expanduser()
    if not path.exists():
        instead = f'{task}/{split}.jsonl (objects {{"messages": [{{"role": ..., "content": ...}}, ...]}})'
        where, found = str(source), list(_hub_split(str(source), task, split, instead))
    else:
        file = _find(path, task, split) if path.is_dir() else path
        if file.suffix not in TABLES and not is_saved(file):
            raise ValueError(f"{file} holds no conversations: give .json, .jsonl, .csv or .parquet")
        where, found = str(file), read_table(file)
    there = list(dict.fromkeys(key for row in found for key in row))
    if not {names["messages"], names["prompt"]} & {*there}:
        complain(where, [f"there is no column {names['messages']!r}, there are {there}: {_conversation_way(there)}"])
    if names["messages"] not in there:
        complain(where, _absent(("prompt", "answer"), names, there))
    bad: dict[str, list[int]] = {}
    rows = []
    for i, row in enumerate(found):
        messages = row.get(names["messages"])
        if messages is None and {names["prompt"], names["answer"]} <= set(row):
            roles = {"user": row[names["prompt"]], "assistant": row[names["answer"]]}
            messages = [{"role": role, "content": content} for role, content in roles.items()]
            if all(isinstance(content, list | tuple) for content in roles.values()):
                bad.setdefault("prompt and answer are lists: join them into one column messages", []).append(i)
                continue
        messages, tools = without_nulls(messages), tools_in(row.get("tools"))
        if what := problem_of(messages, tools):
            bad.setdefault(what, []).append(i)
        rows.append((messages, tools))
    complain(where, [f"{name_rows(places)}: {what}" for what, places in bad.items()])
    return tuple(Conversation.of(*row) for row in rows)


def take(rows: Rows, indices: Sequence[int]) -> Rows:
    """The rows of these indices, in this order."""
    if isinstance(rows, TextRows):
        prompts, answers, choices = rows[:3]
        own = tuple(choices[i] for i in indices) if choices else ()
        return TextRows(tuple(prompts[i] for i in indices), tuple(answers[i] for i in indices), own)
    chosen = np.asarray(indices, dtype=np.int64)
    return ImageRows(rows.images.take(chosen, axis=0), rows.labels[chosen], rows.class_names)


def place_of(source: str | Path, task: str, split: str) -> str:
    """The file that `load_rows` reads, or the source and the part of it."""
    path = Path(source).expanduser()
    if not path.exists():
        return f"{source} ({task}, {split})"
    return str(_find(path, task, split) if path.is_dir() else path)


def _find(source: Path, task: str, split: str) -> Path:
    home = source / task
    names = SPELLINGS.get(split, (split,))
    files = [file for name in names for suffix in SUFFIXES if (file := home / f"{name}{suffix}").is_file()]
    files += [folder for name in names if (folder := home / name).is_dir()]
    if len(files) > 1:
        why = f", which all are split {split!r}" if len({file.stem for file in files}) > 1 else ""
        raise ValueError(f"{home} has {' and '.join(f.name for f in files)}{why}: keep one of them")
    seen = home if home.is_dir() else source
    known = {f"{name}{suffix}" for name in {*_SPLITS, *names} for suffix in ("", *SUFFIXES)}
    there = sorted(f.name for f in seen.iterdir())
    complain(home, strays.unread(home, known.intersection(there)) if home.is_dir() else [])
    if files:
        _check_folder(files[0])
        return files[0]
    raise (NoSplit if home.is_dir() and not strays.strange(seen, known) else ValueError)(
        f"{home} has no {split}.json, .jsonl, .csv, .parquet or .npz, and no folder {split} (a saved dataset, or "
        f"images in a folder for each class): {seen} holds {there or 'nothing'}"
    )


def _check_folder(split: Path) -> None:
    """Raises: ValueError for a folder with files of rows in it, which is neither a saved dataset nor has classes."""
    inside = [] if split.is_file() or is_saved(split) else [f for f in split.iterdir() if not f.name.startswith(".")]
    tables = sorted(f.name for f in inside if f.suffix in SUFFIXES)
    if tables and not any(f.is_dir() for f in inside):
        way = f"move the rows into one file, {split}{Path(tables[0]).suffix}"
        complain(split, [f"a folder with {', '.join(tables[:3])} in it is not a split: {way}"])


def _kind(texts: Sequence[str], names: Mapping[str, str], named: Set[str], there: Sequence[str]) -> Sequence[str]:
    """The columns of text rows that are taken: ``text`` alone, or ``texts``.

    Args: names: the source's by ours; named: ours that were given; there: the source's.
    """
    asked, answered = {names["prompt"], names["answer"]} & {*there}, named & {"prompt", "answer"}
    alone = not (asked and answered) if "text" in named else not (asked or answered or {*_OTHERS} & {*there})
    return ("text",) if alone and names["text"] in there else texts


def _dataset(data: Any, texts: _Kind, names: Mapping[str, str], where: str) -> Rows:
    from datasets import Image

    pictures = [name for name, type_ in data.features.items() if isinstance(type_, Image)]
    there = [*data.column_names, *_PICTURES[: len(pictures)]]  # under a usual name, beside which a text is not plain
    kind = ("image", "label") if names["image"] in data.column_names else texts(there)
    problems = _absent(kind, names, data.column_names)
    if "prompt" in kind and problems and pictures:
        way = f"say which it is by --suite-options columns image={pictures[0]},label=NAME"
        problems = [f"column {names['image']!r} is missing, and {pictures[0]!r} has images: {way}"]
    complain(where, problems or ([] if len(data) else ["there are no rows"]))
    if "image" not in kind:
        beside = names["text"] in data.column_names
        return _texts(where, {name: data[names[name]][:] for name in kind}, beside=beside)
    first, second = (names[name] for name in kind)
    pictures = data.select_columns(first)
    if isinstance(data.features[first], Image):
        pictures = pictures.cast_column(first, Image(decode=False))
    images = Images(lambda i: pictures[i][first], range(len(data)))
    return image_rows(where, images, data[second][:], tuple(getattr(data.features[second], "names", ())))


def read_parquet(file: Path) -> Any:
    """The rows of a file as a `datasets.Dataset`. Raises: ValueError for one that cannot be read."""
    import pyarrow.parquet
    from datasets import Dataset

    try:
        return Dataset(pyarrow.parquet.read_table(file))
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise ValueError(f"{file} is not a parquet file ({error})") from error


def is_saved(folder: Path) -> bool:
    """Whether ``Dataset.save_to_disk`` has written it."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def read_saved(folder: Path) -> Any:
    """The rows of such a folder. Raises: ValueError for one that cannot be read."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # of datasets, pyarrow and the file system
        raise ValueError(f"{folder} is not a dataset that can be read ({error}): save it again") from error


def read_table(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of `TABLES`, or of a saved dataset. Raises: ValueError as the functions that it calls."""
    data = read_dataset(file)
    return read_objects(file) if data is None else data.to_list()


def read_dataset(file: Path) -> Any:
    """The rows of a parquet file or a saved dataset, with the types of their columns; None for a file without types.

    Raises: ValueError as `read_parquet` and `read_saved`.
    """
    if file.is_dir():
        return read_saved(file)
    return read_parquet(file) if file.suffix == ".parquet" else None


def read_hub(source: str, /, *, part: str, instead: str, **where: str | None) -> Any:
    """``datasets.load_dataset(source, **where)``, at a revision of its own.

    Args: source: its name, or ``name@revision``; part: the part of the dataset that is asked for, and instead: the
        files of a folder that would do, both for the message.
    Raises: ValueError for a source that is not a name on the hub, or is unavailable.
    """
    if source.endswith(SUFFIXES) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(@[\w.-]+)?", source):
        raise ValueError(f"there is no file or folder {source}: give one (--data), or a dataset's name on the hub")
    import datasets

    name, _, revision = source.partition("@")
    pinned = {"revision": revision} if revision else {}

    try:
        with downloading(source, "datasets"):
            return datasets.load_dataset(name, **where, **pinned)
    except Exception as error:  # of many packages: hub, http client, file system
        reason = (str(error).strip().splitlines() or [""])[0]
        own = "name its own by --tasks, " if "BuilderConfig" in reason else ""  # of datasets, with those that it has
        raise ValueError(
            f"there is no folder {source!r} here, and {part}the hub's dataset of that name cannot be loaded "
            f"({type(error).__name__}: {reason}): {own}go online, or make a folder with {instead}, and give "
            "that folder as the source"
        ) from error


def _hub_split(source: str, task: str, split: str, instead: str) -> Any:
    """`read_hub` of a split by the first of its names that the dataset has. Raises: the first name's ValueError."""
    own = {"part": f"split {split!r} of config {task!r} of ", "instead": instead, "name": task}
    first, *others = SPELLINGS.get(split, (split,))
    try:
        return read_hub(source, split=first, **own)
    except ValueError as error:
        if "unknown split" not in str(error).lower():
            raise
        for name in others:
            try:
                return read_hub(source, split=name, **own)
            except ValueError as other:
                if "unknown split" not in str(other).lower():
                    raise
        raise NoSplit(str(error)) from error


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The rows of a .json (a list of objects), .jsonl or .csv, where every value is a text.

    Not by `datasets`: its loaders infer one schema for all rows and stop at the first row that does not fit.

    Raises: ValueError that lists all lines or rows that are not, or the first of them.
    """
    problems, rows = [], []
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8 ({error}): save it in this encoding") from error
    if file.suffix == ".csv":
        return _csv(file, text)
    if file.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            way = ", one object a line: name it .jsonl" if _is_object(text.split("\n", 1)[0]) else ""
            raise ValueError(f"{file} is not JSON ({error}){way}") from error
    if file.suffix == ".jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                problems.append(f"line {number} is not JSON ({error})")
        if problems and text.lstrip().startswith("["):
            problems = [f"{problems[0]}: a .jsonl has one object a line; name a list of objects .json"]
        problems = shortened(problems, "and {} more lines")
    if not isinstance(rows, list):
        problems, rows = [f"it holds one {type(rows).__name__}, not a list of objects"], [{}]
    if others := [i for i, row in enumerate(rows) if not isinstance(row, dict)]:
        problems.append(f"{name_rows(others)}: not a JSON object")
    complain(file, problems or ([] if rows else ["there are no rows"]))
    return rows


def _is_object(line: str) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(line), dict)
    return False


def _csv(file: Path, text: str) -> list[dict[str, Any]]:
    """Rows of a table with commas and a line of column names. Raises: ValueError that lists all rows that do not fit.

    Lines are split by `csv`, not before: a quoted text may hold line ends.
    """
    limit = csv.field_size_limit(max(len(text), 1))  # else 131,072 characters a value
    reader, found, line = csv.reader(io.StringIO(text, newline=""), strict=True), [], 0
    try:
        for row in reader:
            found += [(line + 1, row)] if row else []
            line = reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"{file} is not CSV ({error}) in line {line + 1}: separate columns by commas, quote texts that hold some "
            'and write quotes in them twice ("")'
        ) from error
    finally:
        csv.field_size_limit(limit)
    head, *cells = [row for _, row in found] or [[]]
    problems = [f"column {name!r} is there twice" for name in dict.fromkeys(head) if head.count(name) > 1]
    if again := [str(number) for number, row in found[1:] if row == head]:
        problems.append(f"line {some_of(again)} has the column names {head} again: leave it out where files are joined")
    if bad := [i for i, row in enumerate(cells) if len(row) != len(head)]:
        problems.append(
            f"{name_rows(bad)}: not as many values as the {len(head)} columns of the first line {head} (quote texts "
            "that hold a comma)"
        )
    if len(head) == 1 and (other := next((mark for mark in ";\t|" if mark in head[0]), None)):
        problems.append(f"the first line {head[0]!r} has {other!r} and no comma: separate columns by commas")
    complain(file, problems or ([] if cells else ["there are no rows"]))
    return [dict(zip(head, row, strict=True)) for row in cells]


def _json(file: Path, texts: _Kind, names: Mapping[str, str]) -> TextRows:
    rows = read_objects(file)
    known = list(dict.fromkeys(key for row in rows for key in row))
    kind = texts(known)
    problems = _absent(kind, names, known)
    if "prompt" in kind and names["prompt"] not in known and {*_PICTURES} & {*known}:
        problems = [
            f"the columns {known} look like images, which .csv and .json cannot hold: make a folder for each class, "
            "TASK/SPLIT/CLASS with image files in it, or a .parquet with a column of encoded images"
            f"{_plain_way(names, known)}"
        ]
    complain(file, problems)
    columns = {name: [row.get(names[name], _MISSING) for row in rows] for name in kind}
    return _texts(str(file), columns, beside=names["text"] in known)


def _texts(where: str, columns: Mapping[str, Sequence[Any]], *, beside: bool) -> TextRows:
    """The rows of checked columns. Args: beside: a column of plain texts is there too."""
    checks: tuple[tuple[str, Callable[[Any], bool]], ...] = (
        ("is missing", lambda value: value is _MISSING),
        ("is not a string", lambda value: not isinstance(value, str)),
        ("has half a surrogate pair", lambda value: bool(re.search("[\ud800-\udfff]", value))),
    )
    problems, choices = [], columns.get("choices", ())
    if bare := [i for i, value in enumerate(columns.get("prompt", ())) if beside and value in (None, _MISSING)]:
        way = "a split is all plain texts or all prompts with answers, so make two tasks of them"
        complain(where, [f"{name_rows(bare)}: no prompt, and there is a column of plain texts: {way}"])
    for name, values in columns.items():
        if name == "choices":
            continue
        own = checks if name in ("answer", "text") else (*checks, ("is empty", lambda value: not value.strip()))
        bad: dict[str, list[int]] = {what: [] for what, _ in own}
        for i, value in enumerate(values):
            if what := next((what for what, fails in own if fails(value)), None):
                bad[what].append(i)
        problems += [
            f"the {name} of {name_rows(rows)} {what}{_instead(values[rows[0]])}" for what, rows in bad.items() if rows
        ]
    complain(where, [*problems, *_of_choices(choices, columns.get("answer", ()))])
    if "text" in columns:  # of WikiText every third one is empty
        texts = tuple(text for text in columns["text"] if text.strip())
        complain(where, [] if texts else [f"every text is empty, of {len(columns['text'])}: give some with words"])
        return TextRows(("",) * len(texts), texts, empty=len(columns["text"]) - len(texts))
    return TextRows(tuple(columns["prompt"]), tuple(columns["answer"]), tuple(map(tuple, choices)))


def _of_choices(choices: Sequence[Any], answers: Sequence[Any]) -> list[str]:
    """Errors for choices that are not two texts or more, one of them the row's answer."""
    checks: tuple[tuple[str, Callable[[Any, Any], bool]], ...] = (
        ("are missing", lambda own, _: own is _MISSING or own is None),
        ("are not a list", lambda own, _: not isinstance(own, list | tuple)),
        ("are not all texts", lambda own, _: not all(isinstance(text, str) and text.strip() for text in own)),
        ("are fewer than two", lambda own, _: len(own) < 2),
        ("have half a surrogate pair", lambda own, _: any(re.search("[\ud800-\udfff]", text) for text in own)),
        ("do not hold the answer", lambda own, answer: answer not in own),
    )
    bad: dict[str, list[int]] = {what: [] for what, _ in checks}
    for i, (own, answer) in enumerate(zip(choices, answers, strict=False)):
        if what := next((what for what, fails in checks if fails(own, answer)), None):
            bad[what].append(i)
    way = "write a list of two texts or more, one of them exactly the answer (a .csv cannot hold lists)"
    return [
        f"the choices of {name_rows(rows)} {what}, first {shorten(repr(choices[rows[0]]), 60)} beside the answer "
        f"{shorten(repr(answers[rows[0]]), 60)}: {way}"
        if what != "are missing"
        else f"the choices of {name_rows(rows)} {what}: {way}"
        for what, rows in bad.items()
        if rows
    ]


def _instead(value: Any) -> str:
    """The value that should be a string, with the way out; "" where it is one."""
    if isinstance(value, str) or value is _MISSING:
        return ""
    way = "write one text a row" if isinstance(value, list | tuple) else "write it as a text"
    return f" but {shorten(repr(value), 60)} ({type(value).__name__}): {way}"


def _absent(kind: Sequence[str], names: Mapping[str, str], there: Sequence[str]) -> list[str]:
    """The error for columns that are missing, with the way out that the others suggest."""
    lacking = [name for name in kind if names[name] not in there]
    if not lacking:
        return []
    way = f"say which it is by --suite-options columns {','.join(f'{name}=NAME' for name in lacking)}"
    way += f" (in Python columns={{{lacking[0]!r}: ...}})"
    near = [own for own in _NEAR if own in there]
    if lacking == ["answer"] and near:
        way = way.replace("NAME", near[0])
    if "prompt" in lacking:
        own = names.get("text")  # of conversations there are none
        way += "; image rows need a column 'image'"
        way += f", plain texts {own!r} (or columns text=NAME)" if own not in (None, *there) else ""
    if {"instruction", "output"} <= {*there}:
        way = "write instruction and input into one column prompt, and name output answer"
    if {"text", "label"} <= {*there}:
        way = "these look like text/label rows, for which there is --preset text"
    if "messages" in there:
        way = "these look like conversations, for which there is --chat"
    if "conversations" in there:
        way = _conversation_way(there)
    if "prompt" in kind:
        way += _plain_way(names, there)
    missing = " and ".join(repr(names[name]) for name in lacking)
    return [
        f"column{'s' * (len(lacking) > 1)} {missing} {'are' if len(lacking) > 1 else 'is'} missing, there are "
        f"{list(there)}: {way}"
    ]


def _plain_way(names: Mapping[str, str], there: Sequence[str]) -> str:
    """The way out for plain texts beside columns of another kind of rows."""
    own = names.get("text")
    return f"; for plain texts pass --suite-options columns text={own}" if own in there else ""


def _conversation_way(there: Sequence[str]) -> str:
    if [*there] == ["text"]:
        return "these look like plain texts, which have no conversation: leave --chat out"
    if "conversations" in there:
        return (
            "these look like conversations of from and value: write messages of role (system, user, assistant) and "
            "content, and pass --chat"
        )
    return "with --chat a row has messages, or prompt and answer; say which by --suite-options columns messages=NAME"
