"""Train and dev rows from a raw pool: no prompt or image stands in two splits, the same for everyone who has the seed.

Rows are grouped by what they ask: `text_group` or `image_group`. Groups that a held-out split (eval, test) has too, and
groups with conflicting answers, are dropped. The clean groups are ranked by SHA-256(seed || group id), both as text.
Dev is the first row of the first groups; train is every row of the groups that dev did not take.

What the paper leaves open: answers conflict if they differ after the normalisation of prompts; 10 % of the groups is
rounded down; labels that tie for a remainder are taken in sorted order; indices are ascending.
"""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..errors import name_rows
from .rows import ImageRows, Rows, TextRows

RULE = 1
IDENTITY = MappingProxyType(
    {
        "text": "SHA-256 of the NFKC, whitespace-normalised prompt",
        "image": "SHA-256 of height x width x 3 and the decoded RGB bytes",
    }
)


class Splits(NamedTuple):
    """Which rows of a pool are train and dev, and what the pool was."""

    train: tuple[int, ...]
    dev: tuple[int, ...]
    groups: tuple[str, ...]  # group id of every row of the pool
    rows: tuple[str, ...]  # SHA-256 of every row of the pool as it stands, answer or label included
    dropped: Mapping[str, tuple[str, ...]]  # group id -> why: "held out", "conflicting answers"
    kind: str  # "text" or "image"
    seed: int


def text_group(prompt: str) -> str:
    """Group id of a prompt: SHA-256 of it in NFKC, every run of white space one space, none at the ends; UTF-8."""
    return hashlib.sha256(_normalise(prompt).encode("utf-8", "surrogatepass")).hexdigest()


def image_group(image: np.ndarray) -> str:
    """Group id of an image, uint8 (H, W, 3): SHA-256 of ``HxWx3:`` and its bytes, row by row."""
    return hashlib.sha256(f"{'x'.join(map(str, image.shape))}:".encode() + image.tobytes()).hexdigest()


def split_rows(
    rows: Rows,
    held_out: Sequence[Rows] = (),
    *,
    seed: int,
    size: int | None = None,
    labels: Sequence[Hashable] | None = None,
) -> Splits:
    """Split a pool by the rule of this module.

    With labels, dev has its share of each label's clean groups by largest remainder: ``floor(size n_l / n)``, and one
    more where the remainders are largest; a label may lose its last group to dev.

    Args: held_out: rows of eval and test; size: of dev, None: ``min(200, max(50, n // 10))`` for n clean groups of
        texts, 200 for images; labels: one a row, a group has that of its first row; None: those of image rows, none
        for texts.
    Raises: ValueError for rows of two kinds, for bad labels, and for a dev that would leave nothing to train on.
    """
    kinds = {type(part) for part in (rows, *held_out)}
    if len(kinds) != 1:
        raise ValueError(f"rows and held_out are of {len(kinds)} kinds: give text rows or image rows")
    groups, hashes, answers = _describe(rows)
    if labels is None and isinstance(rows, ImageRows):
        labels = rows.labels.tolist()
    if labels is not None and len(labels) != len(groups):
        raise ValueError(f"{len(labels)} labels for {len(groups)} rows: give one each")

    members: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)
    outside = {group for part in held_out for group in _describe(part)[0]}
    reasons = {
        group: (
            *(("held out",) if group in outside else ()),
            *(("conflicting answers",) if len({answers[i] for i in own}) > 1 else ()),
        )
        for group, own in members.items()
    }
    clean = [group for group, why in reasons.items() if not why]
    if size is None:
        size = 200 if isinstance(rows, ImageRows) else min(200, max(50, len(clean) // 10))
    if not 0 < size < len(clean):
        raise ValueError(
            f"dev would take {size} of {len(clean)} clean groups ({len(members) - len(clean)} are dropped): "
            "dev and train need one each, pass another size or more rows"
        )

    ranked = sorted(clean, key=lambda group: hashlib.sha256(f"{seed}{group}".encode()).hexdigest())
    label_of = {group: labels[members[group][0]] if labels is not None else None for group in ranked}
    room = _shares(list(label_of.values()), size)
    chosen = set()
    for group, label in label_of.items():
        if room[label]:
            room[label] -= 1
            chosen.add(group)
    return Splits(
        tuple(i for i, group in enumerate(groups) if not reasons[group] and group not in chosen),
        tuple(sorted(members[group][0] for group in chosen)),
        groups,
        hashes,
        {group: why for group, why in reasons.items() if why},
        _kind(rows),
        seed,
    )


def manifest(splits: Splits) -> dict[str, Any]:
    """The splits as JSON values; `from_manifest` reads them back."""
    body = {
        "rule": RULE,
        "identity": IDENTITY[splits.kind],
        "sizes": {"rows": len(splits.rows), "train": len(splits.train), "dev": len(splits.dev)},
        **{name: list(part) if isinstance(part, tuple) else part for name, part in splits._asdict().items()},
        "dropped": {group: list(why) for group, why in splits.dropped.items()},
    }
    return {**body, "sha256": _digest(body)}


def from_manifest(manifest: Mapping[str, Any], rows: Rows) -> Splits:
    """The splits of a manifest, on the very rows that they were made of.

    Raises: ValueError for another rule, an edited manifest, another kind or number of rows, and naming the rows that
        are not what they were.
    """
    if lacking := [name for name in ("rule", *Splits._fields) if name not in manifest]:
        raise ValueError(f"this is no split manifest: it lacks {lacking}")
    if manifest["rule"] != RULE:
        raise ValueError(f"the manifest is of split rule {manifest['rule']}, this is rule {RULE}: split the rows again")
    if manifest.get("sha256") != _digest({name: value for name, value in manifest.items() if name != "sha256"}):
        raise ValueError("the manifest is not as it was written: get the original, or split the rows again")
    if (kind := _kind(rows)) != manifest["kind"]:
        raise ValueError(f"the manifest is of {manifest['kind']} rows, these are {kind} rows")
    groups, hashes, _ = _describe(rows)
    problems = []
    if len(groups) != len(manifest["rows"]):
        problems.append(f"there are {len(groups)} rows, the manifest has {len(manifest['rows'])}")
    asked, answered = ("prompt", "answer or spelling") if kind == "text" else ("image", "label")
    both = list(enumerate(zip(groups, manifest["groups"], hashes, manifest["rows"], strict=False)))
    moved = [i for i, (group, was, _, _) in both if group != was]
    edited = [i for i, (group, was, now, then) in both if group == was and now != then]
    problems += [f"another {asked} in {name_rows(moved)}"] if moved else []
    problems += [f"another {answered} in {name_rows(edited)}"] if edited else []
    if problems:
        raise ValueError(
            f"the rows are not those that were split: {'; '.join(problems)} (rows count from 0): "
            "restore them, or split them again"
        )
    lists = {name: tuple(manifest[name]) for name in ("train", "dev", "groups", "rows")}
    dropped = {group: tuple(why) for group, why in manifest["dropped"].items()}
    return Splits(**lists, dropped=dropped, kind=kind, seed=manifest["seed"])


def _describe(rows: Rows) -> tuple[tuple[str, ...], tuple[str, ...], list[Hashable]]:
    """Of every row: group id, hash, and the answer that a group must agree on."""
    answers: list[Hashable]
    if isinstance(rows, TextRows):
        groups = tuple(map(text_group, rows.prompts))
        texts = [json.dumps(pair) for pair in zip(rows.prompts, rows.answers, strict=True)]
        answers = [_normalise(answer) for answer in rows.answers]
    else:
        groups = tuple(image_group(rows.images[i]) for i in range(len(rows.images)))
        answers = rows.labels.tolist()
        texts = [f"{group}:{label}" for group, label in zip(groups, answers, strict=True)]
    return groups, tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts), answers


def _shares(labels: Sequence[Any], size: int) -> dict[Any, int]:
    counts = Counter(labels)
    shares = {label: size * count // len(labels) for label, count in counts.items()}
    by_remainder = sorted(sorted(counts), key=lambda label: -(size * counts[label] % len(labels)))
    for label in by_remainder[: size - sum(shares.values())]:
        shares[label] += 1
    return shares


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _normalise(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _kind(rows: Rows) -> str:
    return "text" if isinstance(rows, TextRows) else "image"
