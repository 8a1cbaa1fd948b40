"""Options of suites that name model, rows and device: checks and defaults."""

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..data import strays
from ..data.rows import SPELLINGS, SUFFIXES, NoSplit
from ..data.splits import normalised
from ..errors import collected, complain, some_of

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


def tasks_of(
    data: str | Path, tasks: Sequence[str] | str | None, *, known: Sequence[str], splits: Sequence[str]
) -> tuple[str, ...]:
    """The given tasks; else those of a folder, the known ones first, then its others by name; else the known ones.

    A task is a folder that holds a split, as a file or as a folder; a text names tasks between commas. Raises:
    ValueError for a file, a folder without tasks, folders whose files look like splits and are none, and for tasks
    named twice.
    """
    if data and (file := Path(data).expanduser()).is_file():
        where = f"{file.parent / 'TASK'} with {', '.join(splits)}{file.suffix} in it"
        raise ValueError(f"data is a file, {file}: pass a folder with a folder for each task, such as {where}")
    if (tasks := _names(tasks)) is not None:
        if not tasks or len(set(tasks)) < len(tasks):
            raise ValueError(f"tasks are {list(tasks)}: name at least one, each once")
        return tuple(tasks)
    if not data or not (folder := Path(data).expanduser()).is_dir():
        return tuple(known)
    spelled = [own for split in splits for own in SPELLINGS.get(split, (split,))]
    names = {f"{own}{suffix}" for own in spelled for suffix in ("", *SUFFIXES)}
    found = {child.name for child in folder.iterdir() if any((child / name).exists() for name in names)}
    _check_others(folder, found, splits)
    if not found:
        there = sorted(child.name for child in folder.iterdir())[:10]
        one = "pass the folder above it, or put the files into a folder for the task"
        way = f"{one}, {folder / 'TASK'}" if names & {*there} else "make a folder for each task"
        raise ValueError(
            f"{folder} holds no task, but {', '.join(there) or 'nothing'}: {way}, with {', '.join(splits)} in it "
            f"(.jsonl, .json, .csv, .parquet, or images)"
        )
    return (*(task for task in known if task in found), *sorted(found.difference(known)))


def _check_others(folder: Path, found: Collection[str], splits: Sequence[str]) -> None:
    """Raises: ValueError for folders other than tasks that hold what looks like a split."""
    others = (f for f in folder.iterdir() if f.is_dir() and f.name not in found and not f.name.startswith("."))
    like = {child.name: names for child in sorted(others) if (names := strays.like_splits(child))}
    lacking = f"no {' or '.join(splits)} that is read"
    problems = [f"{name} holds {some_of(names)}, but {lacking}" for name, names in like.items()]
    complain(folder, [f"{'; '.join(problems)}: {strays.WAY}; or name the tasks (--tasks)"] if problems else [])


def _names(given: Any) -> Any:
    """Names from a text between commas; None, and several, as they are. Raises: ValueError for anything else."""
    if isinstance(given, str):
        return [name for part in given.split(",") if (name := part.strip())]
    if not (given is None or (isinstance(given, Sequence) and all(isinstance(name, str) for name in given))):
        raise ValueError(f"tasks are {given!r}: give their names, between commas")
    return given


def settled(tasks: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that suites of models share, as their dataclasses hold them. Raises: ValueError for bad ones."""
    return {
        "model": absolute(options["model"]),
        "tasks": tasks,
        "only": _some_of(tasks, options.get("only")),
        "columns": _columns_of(options.get("columns")),
        "train": patterns_of(options.get("train")),
    }


def _some_of(tasks: Sequence[str], only: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """The tasks of the option ``only``; a text names them between commas. Raises: ValueError for others."""
    chosen = _names(only)
    if chosen is not None and (strange := [name for name in chosen if name not in tasks]):
        raise ValueError(f"only names {', '.join(strange)}, the tasks are {', '.join(tasks)}")
    return None if chosen is None else tuple(chosen)


def _columns_of(given: Mapping[str, str] | str | None) -> dict[str, str]:
    """{ours: the source's}, as `rows.load_rows` takes it, from such a mapping or "prompt=question,answer=reply".

    Raises: ValueError for anything else.
    """
    if isinstance(given, str):
        parts = [part.partition("=") for part in given.split(",") if part.strip()]
        given = {ours.strip(): theirs.strip() for ours, _, theirs in parts}
    found = dict(given or {}) if isinstance(given, Mapping) or not given else {"": ""}
    if not all(isinstance(name, str) and name for pair in found.items() for name in pair):
        raise ValueError(f"columns are {given!r}, must be pairs OUR=SOURCE of names: prompt=question,answer=reply")
    return found


def patterns_of(given: Sequence[str] | str | None) -> tuple[str, ...] | None:
    """Patterns of names from a sequence, or from a text that separates them by commas; None for None.

    Raises: ValueError for anything else, and for no pattern.
    """
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(name, str) and name for name in parts):
        raise ValueError(f"train is {given!r}, must be patterns of parameter names: *.self_attn.*,*.mlp.*")
    return tuple(parts)


def json_file(file: str | Path, what: str) -> Any:
    """The value in a JSON file. Raises: ValueError that says ``what`` it should be."""
    try:
        return json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} is not a {what} ({error})") from error


def collect(
    keys: Iterable[Key], read: Callable[[Key], Found], *, local: Callable[[Key], bool]
) -> tuple[dict[Key, Found], list[str]]:
    """``read(key)`` of every key, and the messages of the ValueErrors it raised.

    Stops at the first error of a source that is not local: a hub that cannot be reached takes a minute to say so.
    """
    found, problems = dict[Key, Found](), list[str]()
    for key in keys:
        with collected(problems):
            found[key] = read(key)
        if key not in found and not local(key):
            break
    return found, problems


class Collected(NamedTuple, Generic[Found]):
    """The rows of all tasks, with the problems and notes of reading them."""

    rows: dict[tuple[str, str], Found]  # by task and split
    problems: list[str]
    notes: list[str]
    made: dict[str, tuple[str, ...]]  # the splits that a task lacked


def collect_splits(
    tasks: Iterable[str],
    read: Callable[[str, str], Found],
    make: Callable[[str, dict[str, Found], tuple[str, ...]], dict[str, Found]],
    *,
    size: Callable[[Found], int],
    take: Callable[[Found, Sequence[int]], Found],
    rows: int | None,
    local: bool,
) -> Collected[Found]:
    """The first rows of every task in train, dev and test; a dev or test split that it lacks is made from train.

    Stops at the first error of a source that is not local: a hub that cannot be reached takes a minute to say so.

    Args:
        read: the rows of a task and a split, which raises `NoSplit` where there are none.
        make: the splits of a task with the missing ones, as `splits.with_made`; size: the number of rows; take: rows by
            place.
        rows: of each split at most; None: all.
    """
    every, problems, notes = dict[tuple[str, str], Found](), list[str](), list[str]()
    lacked = dict[str, tuple[str, ...]]()
    for task in tasks:
        found, missing, wrong = dict[str, Found](), dict[str, str](), list[str]()
        for split in ("train", "dev", "test"):
            with collected(wrong):
                try:
                    found[split] = read(task, split)
                except NoSplit as error:
                    missing[split] = str(error)
            if wrong and not local:
                return Collected(every, [*problems, *wrong], notes, lacked)
        problems += wrong
        made = tuple(split for split in ("test", "dev") if split in missing)
        if "train" in found and made and not wrong:
            pool = size(found["train"])
            try:
                found = make(task, found, made)
            except ValueError as error:
                problems.append(
                    f"{task} has no {' and no '.join(made)} split, and none can be made of its {pool} rows of train: "
                    f"{error}"
                )
        elif "train" in missing:
            problems += missing.values()
        whole = {split: size(own) for split, own in found.items()}
        if rows is not None:
            found = {split: take(own, range(min(rows, size(own)))) for split, own in found.items()}
        if made and len(found) == 3:
            lacked[task] = made
            sizes = {split: size(found[split]) for split in ("train", "dev", "test")}
            left = pool - sum(whole[split] for split in ("train", *made))
            notes.append(made_note(task, made, sizes, left=left))
        every |= {(task, split): own for split, own in found.items()}
    return Collected(every, problems, notes, lacked)


def made_note(task: str, made: Sequence[str], sizes: Mapping[str, int], *, left: int) -> str:
    """A note on splits that were made from the training rows, with the number of rows of every split.

    Args: left: rows of train that are in none of them, since the split that is given has them.
    """
    counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
    note = f"{task} has no {' and no '.join(made)} split, made from train: {counts} rows"
    given = "dev" if made == ("test",) else "test"
    return f"{note}; {left} rows of train are left out, for they are {given} rows too" if left else note


def shared_rows(task: str, rows: Mapping[str, Sequence[Hashable]]) -> list[str]:
    """Notes on rows of dev and test, by split, that the task trains on too, and on those of test that are in dev.

    Texts that differ by white space or the coding of characters are the same, as for splits that are made.
    """
    rows = {split: [normalised(row) if isinstance(row, str) else row for row in own] for split, own in rows.items()}
    train, dev = set(rows.get("train", ())), set(rows.get("dev", ()))
    counts = {split: sum(row in train for row in own) for split, own in rows.items() if split != "train"}
    found = [f"{count} of the {len(rows[split])} {split} rows" for split, count in counts.items() if count]
    notes = [f"{' and '.join(found)} of {task} are training rows too: scores on them are too high"] if found else []
    if both := sum(row in dev for row in rows.get("test", ())):
        count = f"{both} of the {len(rows['test'])} test rows of {task}"
        notes.append(f"{count} are dev rows too: what is chosen on dev scores too high on them")
    return notes


def two_labels(task: str, rows: Sequence[Hashable], labels: Sequence[Hashable]) -> list[str]:
    """A note on training rows that are there with two labels, or none."""
    found: dict[Hashable, set[Hashable]] = {}
    for row, label in zip(rows, labels, strict=True):
        found.setdefault(row, set()).add(label)
    count = sum(len(own) > 1 for own in found.values())
    return [f"{task} trains on {count} row{'s' * (count > 1)} with two labels or more"] if count else []


def one_class(task: str, labels: Mapping[str, Sequence[int]], names: Sequence[str]) -> list[str]:
    """Notes on splits whose rows are all of one class, as the first rows of a sorted file are."""
    return [
        f"all {len(own)} {split} rows of {task} are of class {names[own[0]]!r}: shuffle them, or give more"
        for split, own in labels.items()
        if len(own) > 1 and len(set(own)) == 1
    ]


def model_problems(model: str) -> list[str]:
    """A message for a model's folder that does not exist, or nothing."""
    if Path(model).is_absolute() and not Path(model).is_dir():
        return [
            f"there is no folder {model}: give a model's folder, or its name on the hub (--model, or "
            "--suite-options model where a command has no such option)"
        ]
    return []


def absolute(source: str | Path) -> str:
    """A folder by its absolute path, also one that is not there but can be no name on the hub."""
    path, name = Path(source).expanduser(), str(source)
    return str(path.resolve()) if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1 else name


def pick_device(name: str | None) -> torch.device:
    """The device of a name, None: the first GPU, or the CPU. Raises: ValueError for one that is not here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):
            torch.empty(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {name!r} is unknown, or not here: cpu, cuda, or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: there is no GPU here, or torch cannot use it")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ValueError(f"device {name!r}: torch sees {count} GPUs here, the last one is cuda:{count - 1}")
    return device
