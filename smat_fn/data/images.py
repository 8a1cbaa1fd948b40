"""Rows of images and labels, from encoded images, arrays, or one folder per class."""

import hashlib
import io
import logging
import re
import unicodedata
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import complain, name_rows, some_of
from .cache import cached, versions

log = logging.getLogger(__name__)

PICTURES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".avif", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
_BESIDE = (".txt", ".md", ".json", ".csv", ".xml", ".db", ".ini")  # files that may be beside images
DECODING = 2  # of what a stored image gives: another number where `_decode` gives other values, or errors, than before
_SHOWN = 10


class Images:
    """Encoded images, decoded when read: ``images[i]`` is uint8 (H, W, 3), upright by EXIF, transparency on white."""

    def __init__(self, read: Callable[[int], Any], indices: Sequence[int]) -> None:
        self.read, self.indices = read, indices  # read(i): bytes, or a mapping with "bytes" or "path"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> np.ndarray:
        return _decode(self.encoded(place))

    def encoded(self, place: int) -> bytes:
        """The image as it is stored."""
        return _encoded(self.read(self.indices[place]))

    @cached_property
    def hashes(self) -> list[bytes]:
        """Hash of every stored image."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(lambda place: hash_of(self.encoded(place)), range(len(self))))

    def take(self, places: Sequence[int] | np.ndarray, axis: int = 0) -> "Images":
        """Some of the images, as ``numpy.ndarray.take`` along the first axis."""
        some = Images(self.read, [self.indices[place] for place in places])
        if "hashes" in vars(self):
            vars(some)["hashes"] = [self.hashes[place] for place in places]
        return some


def hash_of(stored: bytes) -> bytes:
    """128-bit BLAKE2b."""
    return hashlib.blake2b(stored, digest_size=16).digest()


class ImageRows(NamedTuple):
    """Images and labels, one of each per row."""

    images: np.ndarray | Images  # images[i]: uint8 (H, W, 3); as an array (N, H, W, 3)
    labels: np.ndarray  # int64 (N,)
    class_names: tuple[str, ...]  # of labels 0, 1, ...; () where the source names none


def npz_rows(file: Path, names: Mapping[str, str]) -> ImageRows:
    """The rows of an .npz. Raises: ValueError that lists what is missing or of another shape or dtype."""
    wanted = (names["image"], names["label"], "class_names")
    try:
        with file.open("rb") as stream:  # np.load leaves a file open that is not an archive
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
    elif labels.shape != images.shape[:1]:
        problems.append(f"labels have shape {labels.shape}, must be one each of {len(images)} images")
    if class_names.ndim != 1 or class_names.dtype.kind != "U" or not class_names.size:
        problems.append(f"class_names are {class_names.dtype} {class_names.shape}, must be strings (C,)")
    complain(file, problems or ([] if len(images) else ["there are no rows"]))
    return image_rows(str(file), images, labels, tuple(class_names.tolist()))


def class_folders(home: Path, split: str, splits: Collection[str]) -> ImageRows:
    """The rows of ``home/<split>/<class>/<image files>``, class by class in turn, so that the first rows are of all.

    The classes are the folders of all splits of ``home`` together, by name; hidden ones are left out, and those without
    images in any split.

    Args: splits: names of splits, among which folders of ``home`` are looked up.
    Raises: ValueError as `image_rows`, and for classes that differ only by case, spaces, hyphens, underscores or the
        coding of characters.
    """
    names = _class_names(home, split, splits)
    found, others = [], [file for file in _visible(home / split) if not file.is_dir()]
    for label, name in enumerate(names):
        inside = sorted(_visible(home / split / name))
        files = [file for file in inside if _is_picture(file)]
        others += [file for file in inside if not _is_picture(file)]
        found += [(place, label, file) for place, file in enumerate(files)]
    found.sort()
    if not found:
        way = f"put each image into the folder of its class, {home / split / 'CLASS'}"
        complain(home / split, [f"there are no images in its folders, none of {', '.join(PICTURES)}: {way}"])
    if lost := [str(file.relative_to(home)) for file in others if file.suffix.lower() not in _BESIDE]:
        ways = f"images are files {', '.join(PICTURES)} in the folder of their class"
        log.warning(f"{home}: {len(lost)} files or folders of {split} are left out, {lost[0]} the first: {ways}")
    paths = [file for _, _, file in found]
    images = Images(lambda i: {"path": paths[i]}, range(len(paths)))
    return image_rows(str(home / split), images, [label for _, label, _ in found], tuple(names))


def _class_names(home: Path, split: str, splits: Collection[str]) -> list[str]:
    """The names of `class_folders`, with a line in the log on folders of ``split`` that do not count."""
    found: dict[str, bool] = {}
    for folder in (f for part in home.iterdir() if part.name in splits for f in _visible(part) if f.is_dir()):
        found[folder.name] = found.get(folder.name, False) or any(map(_is_picture, _visible(folder)))
    names = sorted(name for name, images in found.items() if images)
    alike: dict[str, list[str]] = {}
    for name in names:
        plain = unicodedata.normalize("NFKC", name)  # macOS may take letters and their accents apart
        alike.setdefault(" ".join(re.split(r"[\s_-]+", plain.strip())).casefold(), []).append(name)
    twice = [f"the folders {own} name one class in {len(own)} ways" for own in alike.values() if len(own) > 1]
    complain(home, [f"{'; '.join(twice)}: name them alike in all splits"] if twice else [])
    if empty := sorted(name for name, images in found.items() if not images and (home / split / name).is_dir()):
        kinds = f"images are files {', '.join(PICTURES)}"
        log.warning(
            f"{home}: folders of {split} without images in any split do not count as classes, {some_of(empty)}: {kinds}"
        )
    return names


def image_rows(
    where: str, images: np.ndarray | Images, labels: Sequence[Any], class_names: tuple[str, ...]
) -> ImageRows:
    """Rows whose labels are places of the class names and whose images decode. Raises: ValueError that lists others."""
    integers = [isinstance(label, (int, np.integer)) and not isinstance(label, bool) for label in labels]
    wrong = [i for i, integer in enumerate(integers) if not integer]
    way = "number the classes from 0, with their names in a ClassLabel, or make a folder for each class"
    problems = [f"the label of {name_rows(wrong)} is not an integer: {way}"] if wrong else []
    limit = len(class_names) or np.iinfo(np.int64).max
    outside = [i for i, integer in enumerate(integers) if integer and not 0 <= labels[i] < limit]
    if outside:
        span = f"0 to {limit - 1}, the places of the class names" if class_names else "0, 1, ..."
        problems.append(f"the label of {name_rows(outside)} is outside {span}")
    if isinstance(images, Images):
        faults = [fault for place in _broken(images) if (fault := _fault(images, place))]
        problems += faults[:_SHOWN]
        if len(faults) > _SHOWN:
            problems.append(f"nor do {len(faults) - _SHOWN} more")
    complain(where, problems)
    return ImageRows(images, np.asarray(labels, dtype=np.int64), class_names)


def _broken(images: Images) -> list[int]:
    """Places of images that do not decode, through the cache: hashing them takes much less time."""

    def decoded() -> dict[str, torch.Tensor]:
        with ThreadPoolExecutor() as pool:
            faults = pool.map(lambda place: _fault(images, place), range(len(images)))
            return {"broken": torch.tensor([place for place, fault in enumerate(faults) if fault], dtype=torch.int64)}

    try:
        hashes = images.hashes
    except Exception:  # one that cannot be read
        return decoded()["broken"].tolist()
    config = {"images": hash_of(b"".join(hashes)).hex(), "decoding": DECODING, **versions("pillow")}
    return cached("decoded-images", config, decoded)["broken"].tolist()


def _fault(images: Images, place: int) -> str:
    """Why an image does not decode, an empty text if it does."""
    from PIL import UnidentifiedImageError

    try:
        images[place]
    except Exception as error:  # Pillow raises errors of many kinds on broken data
        cell = images.read(images.indices[place])
        file = f" {name}" if isinstance(cell, Mapping) and (name := cell.get("path")) else ""
        reason = "it is not an image" if isinstance(error, UnidentifiedImageError) else error
        return f"the image of row {place}{file} does not decode ({reason})"
    return ""


def _visible(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if not child.name.startswith(".")] if folder.is_dir() else []


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in PICTURES


def _encoded(cell: Any) -> bytes:
    if isinstance(cell, Mapping):
        cell = cell.get("bytes") or Path(cell["path"]).read_bytes()
    if not isinstance(cell, bytes):
        raise ValueError(f"a {type(cell).__name__}, not an encoded image")
    return cell


def _decode(encoded: bytes) -> np.ndarray:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(encoded)) as image:
        # Pillow would cut values of I and F off at 255, and keep the upper 8 of 16 bits a colour: all white or black
        if image.mode.startswith(("I", "F")) or any(";16" in str(tile.args) for tile in image.tile):
            raise ValueError(
                f"it has more than 8 bits a value, mode {image.mode}: scale it to 8 bits and save it again"
            )
        upright = ImageOps.exif_transpose(image)
        if "A" in upright.getbands() or upright.info.get("transparency") is not None:  # as processors of transformers
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        return np.array(upright.convert("RGB"))
