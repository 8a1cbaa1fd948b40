"""Texts and their classes: rows {text, label} of a task, from files or from the Hugging Face hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import collected, complain, name_rows, raise_problems, some_of
from . import strays
from .rows import SPELLINGS, TABLES, TextRows, is_saved, read_dataset, read_hub, read_objects
from .splits import normalised, with_made

SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "dev": SPELLINGS["dev"], "test": SPELLINGS["test"]}
_TEXTS, _LABELS = ("text", "sentence"), ("label", "coarse_label", "intent")  # columns, the first that is there
_Raw = dict[str, list[dict[str, Any]]]


class Labelled(NamedTuple):
    """The rows of one split."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


class Task(NamedTuple):
    """A task with its splits train, dev and test."""

    splits: dict[str, Labelled]
    classes: tuple[str, ...]  # names of labels 0, 1, ...
    made: tuple[str, ...] = ()  # splits that the source lacks, made from its rows of train
    left: int = 0  # rows of train that are then left out, since the split that is there has them


def load_task(source: str, *, columns: Mapping[str, str] | None = None) -> Task:
    """The rows of a task in all three splits.

    A row has a text (column text, else sentence) and a label (label, else coarse_label, else intent): a number, or the
    name of a class. Classes are named by ``labels.json`` or by a ClassLabel; else by the rows, whose labels are then
    all numbers or all names. A split that the source lacks is made from train by the rule of `splits`, seed 0, but
    takes at most a fifth of the rows: first test, then dev.

    Args: source: a folder with train, dev (or validation) and test as .json (a list of objects), .jsonl, .csv, .parquet
        or a folder that ``datasets`` saved; or a dataset of the hub, ``name``, ``name@revision`` or ``name:config``;
        columns: the source's names of ``text`` and ``label``.
    Raises: ValueError that lists all problems by row, counted from 0, and classes without training rows; for a source
        that cannot be loaded.
    """
    if unknown := sorted(set(columns or {}) - {"text", "label"}):
        raise ValueError(f"columns renames {unknown}, the columns are text and label: write text=NAME,label=NAME")
    folder = Path(source).expanduser()
    known = {name: (own,) for name, own in (columns or {}).items()}
    wanted = known.get("text", _TEXTS), known.get("label", _LABELS)
    raw, names = (_folder if folder.is_dir() else _hub)(source, wanted[1])
    if "train" not in raw:
        complain(source, [_no_train(folder, raw)])
    found = [_columns(rows, wanted, f"{source} ({split})") for split, rows in raw.items()]
    problems: list[str] = []
    if names is None:
        labels_of = {s: [row.get(label) for row in raw[s]] for s, (_, label) in zip(raw, found, strict=True)}
        names, problems = _named(labels_of)
        complain(source, problems if not names else [])
    splits = {}
    for (split, rows), (text, label) in zip(raw.items(), found, strict=True):
        texts, labels = [row.get(text) for row in rows], [_place(row.get(label), names) for row in rows]
        bad = [i for i, own in enumerate(texts) if not isinstance(own, str)]
        problems += [f"{split}: the {text} of {name_rows(bad)} is not text"] if bad else []
        bad = [i for i, own in enumerate(texts) if isinstance(own, str) and not own.strip()]
        problems += [f"{split}: the {text} of {name_rows(bad)} is empty"] if bad else []
        bad = [i for i, own in enumerate(labels) if own is None]
        if bad:
            which = f"{split}: the {label} of {name_rows(bad)}"
            problems.append(_label_problem(which, rows[bad[0]].get(label), names))
        splits[split] = Labelled(tuple(texts), tuple(labels))  # type: ignore[arg-type]
    complain(source, problems)
    count = len(splits["train"].texts)
    splits, made = _complete(splits, source)
    left = count - sum(len(splits[split].texts) for split in ("train", *made))
    there = set(splits["train"].labels)
    absent = [name for place, name in enumerate(names) if place not in there]
    way = "number classes from 0 without gaps, or write labels as texts; a class that only dev or test has needs rows"
    problems = [f"no row of train is of class {', '.join(absent[:10])}, and a head needs one: {way}"] if absent else []
    complain(source, problems or ([] if len(names) > 1 else [f"all rows are of class {names[0]!r}: give two or more"]))
    return Task({split: splits[split] for split in SPLITS}, tuple(names), made, left)


def take(rows: Labelled, places: Sequence[int]) -> Labelled:
    """The rows of these places, in this order."""
    return Labelled(tuple(rows.texts[i] for i in places), tuple(rows.labels[i] for i in places))


def _complete(splits: dict[str, Labelled], source: str) -> tuple[dict[str, Labelled], tuple[str, ...]]:
    """All splits, and the names of those that were made from train."""
    made = tuple(split for split in ("test", "dev") if split not in splits)
    try:
        return with_made(splits, made, rows=_pairs, take=take, labels=lambda rows: rows.labels), made
    except ValueError as error:
        count = len(splits["train"].texts)
        raise ValueError(
            f"{source} has no {' and no '.join(made)} split, and none can be made of its {count} rows of train: {error}"
        ) from error


def _pairs(rows: Labelled) -> TextRows:
    return TextRows(rows.texts, tuple(map(str, rows.labels)))


def _named(labels_of: Mapping[str, Sequence[Any]]) -> tuple[list[str], list[str]]:
    """The classes by the labels of all splits, and errors for labels that would name them in two ways."""
    values = [value for labels in labels_of.values() for value in labels]
    strings = sorted({value for value in values if isinstance(value, str) and value.strip()})
    numbers = [value for value in values if type(value) is int]
    problems = []
    if strings and numbers:
        kinds = [f"{s}: {', '.join(sorted({type(x).__name__ for x in own}))}" for s, own in labels_of.items()]
        problems.append(
            f"some labels are numbers and some are texts ({'; '.join(kinds)}), which could mean two classes by "
            f"{numbers[0]} and {str(numbers[0])!r}: write all in one way, or name the classes in labels.json"
        )
    if (last := max(numbers, default=-1)) >= len(values):  # numbers of something else, such as users
        few = f"labels go up to {last} in {len(values)} rows, so that most classes would have none"
        return [], [*problems, f"{few}: number classes from 0 without gaps, or write labels as texts"]
    alike: dict[str, list[str]] = {}
    for name in strings:
        alike.setdefault(normalised(name).casefold(), []).append(name)
    problems += [
        f"classes {own} differ only by case, spaces or the coding of characters: write them alike, or list them in "
        "labels.json"
        for own in alike.values()
        if len(own) > 1
    ]
    return strings or [str(label) for label in range(last + 1)], problems


def _label_problem(which: str, first: Any, names: Sequence[str]) -> str:
    """The error for labels that are not classes. Args: first: the first of them."""
    what = f"none of the {len(names)} classes" if names and type(first) in (str, int) else "not a label"
    way = ", and leave out a split whose labels are withheld (-1)" if first == -1 else ""
    return f"{which} is {what} ({first!r} the first): write whole numbers from 0, or the classes' names as texts{way}"


def _place(label: Any, names: Sequence[str]) -> int | None:
    """The place of a class by its name or number; a number may be a text, as in .csv, where no name is a number."""
    if isinstance(label, str):
        if label in names:
            return names.index(label)
        if not label.isdecimal() or any(name.isdecimal() for name in names):
            return None
        label = int(label)
    return label if type(label) is int and 0 <= label < len(names) else None


def _no_train(home: Path, raw: _Raw) -> str:
    there = f"there is no split train, there are {', '.join(sorted(raw)) or 'no splits'}"
    if (home / "train").is_dir() or (home / "train.npz").is_file():
        return f"{there} as {', '.join(TABLES)}; these look like images, for which there is --preset images"
    files = ", ".join(sorted(file.name for file in home.iterdir())[:10]) if home.is_dir() else ""
    return f"{there}: give train.jsonl, .json, .csv or .parquet{f' (the folder holds {files})' if files else ''}"


def _columns(rows: list[dict[str, Any]], wanted: tuple[tuple[str, ...], ...], where: str) -> tuple[str, str]:
    known = list(dict.fromkeys(key for row in rows for key in row))
    found = [next((name for name in names if name in known), None) for names in wanted]
    way = "say which it is by --suite-options columns text=NAME,label=NAME"
    if {"prompt", "answer"} <= {*known}:
        way = "these look like prompt/answer rows, for which there is --preset lm"
    elif [*known] == ["text"]:
        way += "; plain texts are for --preset lm"
    lacking = [" or ".join(names) for names, own in zip(wanted, found, strict=True) if own is None]
    missing = [f"there is no column {', and no column '.join(lacking)}, there are {known}: {way}"] if lacking else []
    complain(where, missing if rows else ["there are no rows"])
    return found[0], found[1]  # type: ignore[return-value]


def place_of(source: str) -> str:
    """The file of a task's training rows, or the hub's dataset."""
    folder = Path(source).expanduser()
    return next((str(file) for suffix in TABLES if (file := folder / f"train{suffix}").is_file()), source)


def _folder(source: str, labels: Sequence[str]) -> tuple[_Raw, list[str] | None]:
    home = Path(source).expanduser()
    raw, problems, typed, read, missing = {}, list[str](), {}, list[str](), list[str]()
    for split, spellings in SPLITS.items():
        files = [file for name in spellings for suffix in TABLES if (file := home / f"{name}{suffix}").is_file()]
        files += [saved for name in spellings if is_saved(saved := home / name)]
        read += [file.name for file in files]
        if len(files) > 1:
            problems.append(f"{home} has {' and '.join(file.name for file in files)}: keep one of them")
        elif files:
            with collected(problems):
                (file,) = files
                data = read_dataset(file)
                raw[split] = read_objects(file) if data is None else data.to_list()
                typed[split] = {} if data is None else data.features
        else:
            missing.append(split)
    names: Any = None
    if (file := home / "labels.json").is_file():
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(f"{file} is not JSON in UTF-8 ({error})")
        else:
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
                problems.append(f"{file} must be a list of the classes' names, in the order of their labels")
            elif len(set(names)) < len(names):
                problems.append(f"{file} names a class twice")
    if "train" not in missing:  # else the error says what there is
        problems += [f"{home}: {problem}" for problem in _strays(home, read, missing)]
    raise_problems(problems)
    numbered = _class_label(source, typed, labels)
    if names is None:
        return raw, numbered
    complain(str(file), _two_places(raw, names, labels) if numbered is None else _other_order(names, numbered))
    return raw, names


def _strays(home: Path, read: Sequence[str], missing: Sequence[str]) -> list[str]:
    """An error for files and folders that may be a split which is not read."""
    if (problems := strays.unread(home, read)) or not missing:
        return problems
    found = some_of(strays.strange(home, read))
    return [f"there is no {' and no '.join(missing)}, unless it is {found}: {strays.WAY}"] if found else []


def _two_places(raw: _Raw, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """An error for labels that are numbers and the names of classes at other places, as of one to five stars."""
    places = {name: place for place, name in enumerate(names)}
    problems = []
    for split, rows in raw.items():
        column = next((name for name in columns if any(name in row for row in rows)), "")
        labels = [row.get(column) for row in rows]
        bad = [i for i, own in enumerate(labels) if type(own) is int and places.get(str(own), own) != own]
        if bad:
            first = labels[bad[0]]
            problems.append(
                f"{split}: the {column} of {name_rows(bad)} ({first} the first) may mean the class {str(first)!r}, or "
                f"the one at place {first}, counted from 0: write labels as texts ({str(first)!r}), or name classes by "
                "words"
            )
    return problems


def _other_order(names: Sequence[str], numbered: Sequence[str]) -> list[str]:
    """An error for classes that labels.json has at another place than the ClassLabel whose numbers the rows hold.

    A name that only one of them has is a translation.
    """
    places = {normalised(name).casefold(): place for place, name in enumerate(numbered)}
    other = [
        f"{name!r} is class {place} here and class {there} in the ClassLabel of the rows"
        for place, name in enumerate(names)
        if (there := places.get(normalised(name).casefold(), place)) != place
    ]
    return [f"{', '.join(other[:3])}: the numbers are the ClassLabel's, write its order"] if other else []


def _class_label(source: str, typed: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> list[str] | None:
    """The names of the labels' ClassLabel. Raises: ValueError for splits whose numbers mean other classes."""
    found: dict[str, list[str]] = {}
    for split, features in typed.items():
        column = next((name for name in labels if name in features), "")
        if names := getattr(features.get(column), "names", None):
            found[split] = list(names)
    if not found:
        return None
    first, own = next(iter(found.items()))
    way = "cast the labels of all splits to one ClassLabel, or write them as texts"
    others = [split for split, names in found.items() if names != own]
    complain(source, [f"the class names of {split} are not those of {first}, in this order: {way}" for split in others])
    return own


def _hub(source: str, labels: Sequence[str]) -> tuple[_Raw, list[str] | None]:
    name, _, config = source.partition(":")
    instead = 'train.json, dev.json and test.json (lists of {"text": ..., "label": ...})'
    data = read_hub(name, part="", instead=instead, name=config or None)
    first = {ours: next((own for own in names if own in data), None) for ours, names in SPLITS.items()}
    raw = {ours: data[own].to_list() for ours, own in first.items() if own is not None}
    return raw, _class_label(source, {ours: data[own].features for ours, own in first.items() if own}, labels)
