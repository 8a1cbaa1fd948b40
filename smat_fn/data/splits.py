"""Train and dev rows from a raw pool, by seed: no prompt or image is in two splits.

Rows are grouped by what they ask: `text_group` or `image_group`. Groups that a held-out split (eval, test) has too, and
groups with conflicting answers, are dropped. The clean groups are ranked by SHA-256(seed || group id), both as text.
Dev is the first row of the first groups; train is every row of the groups that dev did not take.

What the paper leaves open: answers conflict if they differ after the normalisation of prompts; 10 % of the groups is
rounded down; labels that tie for a remainder are taken in sorted order; indices are ascending.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .rows import ImageRows, Rows, TextRows

_SEED = 0  # of splits that a source does not have: the same for everyone
_SHARE = 5  # such a split takes at most a fifth of the rows

Held = TypeVar("Held")


class Splits(NamedTuple):
    """Which rows of a pool are train and dev."""

    train: tuple[int, ...]
    dev: tuple[int, ...]
    groups: tuple[str, ...]  # group id of every row of the pool
    dropped: Mapping[str, tuple[str, ...]]  # group id -> why: "held out", "conflicting answers"


def text_group(prompt: str) -> str:
    """Group id of a prompt: SHA-256 of it in NFKC, every run of white space one space, none at the ends; UTF-8."""
    return hashlib.sha256(normalised(prompt).encode("utf-8", "surrogatepass")).hexdigest()


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
    share: int = 1,
) -> Splits:
    """Split a pool by the rule of this module.

    With labels, dev has its share of each label's n_l clean groups: ``floor(size n_l / n)``, and one more where the
    remainders are largest; a label may lose its last group to dev.

    Args: held_out: rows of eval and test; size: of dev, None: ``min(200, max(50, n // 10))`` for n clean groups of
        texts, 200 for images; share: at most one group in so many, and above 1 size counts rows; labels: one a row, a
        group has that of its first row; None: those of image rows, none for texts.
    Raises: ValueError for rows of two kinds, for bad labels, and for a dev that would leave nothing to train on.
    """
    kinds = {type(part) for part in (rows, *held_out)}
    if len(kinds) != 1:
        raise ValueError(f"rows and held_out are of {len(kinds)} kinds: give text rows or image rows")
    groups, answers = _describe(rows)
    labels = rows.labels.tolist() if labels is None and isinstance(rows, ImageRows) else labels
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
    size = _size(rows, [len(members[group]) for group in clean], share) if size is None else size
    if not 0 < size < len(clean):
        raise ValueError(
            f"a held-out split would take {size} of {len(clean)} different rows ({len(members) - len(clean)} more are "
            "left out: they are in another split, or have two answers): give a file for the split, or more rows"
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
        {group: why for group, why in reasons.items() if why},
    )


def with_made(
    splits: Mapping[str, Held],
    missing: Sequence[str],
    *,
    rows: Callable[[Held], Rows],
    take: Callable[[Held, Sequence[int]], Held],
    labels: Callable[[Held], Sequence[Hashable] | None] = lambda held: None,
) -> dict[str, Held]:
    """The splits of a task with those that it lacks, each taken from train by `split_rows`, at most a fifth of it.

    Unlike there, such a split has every row of its groups, and train those of groups with conflicting answers: of
    train are left out only groups that a given split has. Every label keeps a row in train.

    Args:
        splits: train, and others that are there; missing: those to make, in this order.
        rows: of a split, to tell its rows from each other; take: rows of a split by place; labels: of a split, of which
            every made one gets its share.
    Raises: ValueError where train has too few rows.
    """
    found = dict(splits)
    for name in missing:
        pool = found["train"]
        held_out = [rows(held) for other, held in found.items() if other != "train"]
        own = labels(pool)
        parts = split_rows(rows(pool), held_out, seed=_SEED, labels=own, share=_SHARE)
        chosen = {parts.groups[i] for i in parts.dev}
        if own is not None:
            there = {own[i] for i in parts.train}
            chosen -= {parts.groups[i] for i in parts.dev if own[i] not in there}
        if not chosen:
            raise ValueError("every label has one row: give a file for the split, or more rows")
        others = chosen | {group for group, why in parts.dropped.items() if "held out" in why}
        found |= {
            "train": take(pool, [i for i, group in enumerate(parts.groups) if group not in others]),
            name: take(pool, [i for i, group in enumerate(parts.groups) if group in chosen]),
        }
    return found


def _size(rows: Rows, groups: Sequence[int], share: int) -> int:
    """The number of groups of dev. Args: groups: the rows of each clean one."""
    count, every = len(groups), sum(groups)
    size = 200 if isinstance(rows, ImageRows) else min(200, max(50, (every if share > 1 else count) // 10))
    return min(-(-size * count // max(every, 1)), max(1, count // share)) if share > 1 else size


def _describe(rows: Rows) -> tuple[tuple[str, ...], list[Hashable]]:
    """The group id of every row, and the answer that the rows of a group must agree on."""
    if isinstance(rows, TextRows):
        return tuple(map(text_group, rows.prompts)), [normalised(answer) for answer in rows.answers]
    return tuple(image_group(rows.images[i]) for i in range(len(rows.images))), rows.labels.tolist()


def _shares(labels: Sequence[Any], size: int) -> dict[Any, int]:
    counts = Counter(labels)
    shares = {label: size * count // len(labels) for label, count in counts.items()}
    by_remainder = sorted(sorted(counts), key=lambda label: -(size * counts[label] % len(labels)))
    for label in by_remainder[: size - sum(shares.values())]:
        shares[label] += 1
    return shares


def normalised(text: str) -> str:
    """A text in NFKC, every run of white space one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
