"""Files and folders beside a task's splits that may be splits too, under a name that is not read."""

import re
from collections.abc import Collection
from pathlib import Path

from ..errors import some_of

_LIKE = re.compile(
    r"(train(ing)?|dev(elopment)?|val(id(ation)?)?|eval(uation)?|test(ing)?)(s|_?set)?(?![a-z])", re.IGNORECASE
)
_TABLES = (
    ".json",
    ".jsonl",
    ".ndjson",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".feather",
    ".npz",
    ".npy",
    ".xls",
    ".xlsx",
)
_PERHAPS = (".txt", ".pkl", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z")  # by the name's beginning
_BESIDE = ("labels.json", "dataset_dict.json")
WAY = (
    "name it exactly train, dev or test, as one .jsonl, .json, .csv or .parquet or as one folder of images, or move it "
    "elsewhere"
)


def like_splits(folder: Path, read: Collection[str] = ()) -> list[str]:
    """Names that begin like a split's, of folders and of files that may hold rows.

    Args: read: names of the splits' files and folders, with which others may share what is before the first point.
    """
    stems = {name.split(".")[0] for name in read}
    return sorted(
        file.name
        for file in folder.iterdir()
        if _LIKE.match(file.name)
        and file.name.split(".")[0] not in stems
        and (file.is_dir() or file.suffix.lower() in _PERHAPS or _is_table(file))
    )


def strange(folder: Path, read: Collection[str]) -> list[str]:
    """Names of folders and of tables that are not read, any of which may be a split that is missing. Args: as above."""
    others = (f for f in folder.iterdir() if f.name not in {*read, *_BESIDE} and not f.name.startswith("."))
    return sorted(file.name for file in others if file.is_dir() or _is_table(file))


def unread(folder: Path, read: Collection[str]) -> list[str]:
    """The error for `like_splits`, or nothing."""
    if not (found := like_splits(folder, read)):
        return []
    return [f"{some_of(found)} {'looks' if len(found) == 1 else 'look'} like a split that is not read: {WAY}"]


def _is_table(file: Path) -> bool:
    return any(suffix.lower() in _TABLES for suffix in file.suffixes)
