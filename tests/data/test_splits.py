"""The split rule: no group twice, dropped groups, sizes by hand."""

import hashlib
from collections import Counter

import numpy as np
import pytest

from smat_fn.data.rows import ImageRows, TextRows, take
from smat_fn.data.splits import image_group, split_rows, text_group, with_made

SEED = 7


def pool(count, labels="A"):
    """Prompts "p0", "p1", ..., their answers labels[0], labels[1], ..., round and round."""
    return TextRows(tuple(f"p{i}" for i in range(count)), tuple(labels[i % len(labels)] for i in range(count)))


def rank(prompt, seed=SEED):
    group = hashlib.sha256(prompt.encode()).hexdigest()
    return hashlib.sha256(f"{seed}{group}".encode()).hexdigest()


def pictures(count):
    return np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 2, 3)


def image_rows(images, labels):
    return ImageRows(images, np.array(labels, dtype=np.int64), ("cat", "dog"))


def test_a_group_is_a_prompt_up_to_white_space_and_form():
    assert text_group("a b") == hashlib.sha256(b"a b").hexdigest()
    assert text_group(" a\n\t b\u3000") == text_group("a b")
    assert text_group("\uff21\u00a0\ufb01") == text_group("A fi")
    assert len({text_group("a b"), text_group("A b"), text_group("ab")}) == 3


def test_a_group_is_an_image_of_a_shape():
    image = pictures(1)[0]
    assert image_group(image) == hashlib.sha256(b"2x2x3:" + bytes(range(12))).hexdigest()
    assert image_group(np.asfortranarray(image)) == image_group(image)
    assert image_group(image.reshape(1, 4, 3)) != image_group(image)


def test_dev_is_the_first_rows_of_the_first_groups():
    rows = pool(80)
    splits = split_rows(rows, seed=SEED)
    first = sorted(range(80), key=lambda i: rank(rows.prompts[i]))[:50]
    assert splits.dev == tuple(sorted(first))
    assert splits.train == tuple(i for i in range(80) if i not in first)
    assert split_rows(rows, seed=SEED + 1).dev != splits.dev


def test_the_split_of_a_group_depends_on_no_order():
    rows = pool(80)
    order = np.random.default_rng(0).permutation(80).tolist()
    shuffled = TextRows(tuple(rows.prompts[i] for i in order), tuple(rows.answers[i] for i in order))
    assert {shuffled.prompts[i] for i in split_rows(shuffled, seed=SEED).dev} == {
        rows.prompts[i] for i in split_rows(rows, seed=SEED).dev
    }


@pytest.mark.parametrize(("count", "size"), [(60, 50), (509, 50), (519, 51), (1234, 123), (2000, 200), (2600, 200)])
def test_dev_sizes(count, size):
    assert len(split_rows(pool(count), seed=SEED).dev) == size


def test_train_keeps_copies_and_no_group_is_in_two_splits():
    rows = pool(70)
    copies = TextRows((*rows.prompts, *(f"  {p}\n" for p in rows.prompts)), rows.answers * 2)
    splits = split_rows(copies, seed=SEED)
    assert splits.dev == split_rows(rows, seed=SEED).dev
    assert len(splits.train) == 2 * 20
    assert not {splits.groups[i] for i in splits.train} & {splits.groups[i] for i in splits.dev}


def test_held_out_and_conflicting_groups_are_dropped():
    rows = TextRows((*pool(70).prompts, "p1", "p2", "p3"), (*pool(70).answers, "A ", "B", "B"))
    held_out = [TextRows(("p3", " p4"), ("A", "A")), TextRows(("p5",), ("Z",))]
    splits = split_rows(rows, held_out, seed=SEED, size=10)
    used = {rows.prompts[i] for i in (*splits.train, *splits.dev)}
    assert used == set(rows.prompts) - {"p2", "p3", "p4", "p5"}
    assert splits.dropped == {
        text_group("p2"): ("conflicting answers",),
        text_group("p3"): ("held out", "conflicting answers"),
        text_group("p4"): ("held out",),
        text_group("p5"): ("held out",),
    }
    assert len(splits.train) + len(splits.dev) == 70 - 4 + 1


def test_labels_share_dev_by_largest_remainder():
    # 17 groups, dev 7: shares 7 * (9, 5, 3) / 17 = 3 + 12/17, 2 + 1/17, 1 + 4/17
    rows = TextRows(pool(17).prompts, tuple("C" * 3 + "A" * 9 + "B" * 5))
    splits = split_rows(rows, seed=SEED, size=7, labels=rows.answers)
    assert Counter(rows.answers[i] for i in splits.dev) == {"A": 4, "B": 2, "C": 1}
    for label in "ABC":
        own = [i for i, answer in enumerate(rows.answers) if answer == label]
        taken = [i for i in own if i in splits.dev]
        assert taken == sorted(sorted(own, key=lambda i: rank(rows.prompts[i]))[: len(taken)])


def test_equal_remainders_go_to_the_first_labels():
    rows = pool(8, "DCBA")
    splits = split_rows(rows, seed=SEED, size=2, labels=rows.answers)
    assert sorted(rows.answers[i] for i in splits.dev) == ["A", "B"]


def test_images_are_split_by_pixels_and_label():
    images = np.concatenate([pictures(20), pictures(20)[:4]])
    labels = [0] * 15 + [1] * 5 + [0, 0, 0, 1]
    splits = split_rows(image_rows(images, labels), [image_rows(pictures(1), [0])], seed=SEED, size=6)
    assert set(splits.dropped.values()) == {("held out",), ("conflicting answers",)}
    # 18 clean groups, 13 of label 0: 6 * 13 / 18 = 4 + 1/3, 6 * 5 / 18 = 1 + 2/3
    assert Counter(labels[i] for i in splits.dev) == {0: 4, 1: 2}
    assert not {0, 3, 20, 23} & {*splits.train, *splits.dev}
    assert {splits.groups[i] for i in splits.train}.isdisjoint(splits.groups[i] for i in splits.dev)


def test_images_have_a_dev_of_200():
    images = np.zeros((230, 1, 1, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(230)
    splits = split_rows(image_rows(images, [0, 1] * 115), seed=SEED)
    assert (len(splits.dev), len(splits.train)) == (200, 30)


def test_splits_that_cannot_be():
    with pytest.raises(ValueError, match=r"would take 50 of 50 different rows \(0 more are left out"):
        split_rows(pool(50), seed=SEED)
    with pytest.raises(ValueError, match="would take 0 of 60"):
        split_rows(pool(60), seed=SEED, size=0)
    with pytest.raises(ValueError, match="2 labels for 60 rows"):
        split_rows(pool(60), seed=SEED, labels="AB")
    with pytest.raises(ValueError, match="2 kinds"):
        split_rows(pool(60), [image_rows(pictures(1), [0])], seed=SEED)


def test_made_splits_take_a_fifth_and_leave_every_label_a_row():
    labels = [*(i % 3 for i in range(60)), 3, 4]  # two labels of one row
    rows = TextRows(tuple(f"text {i}" for i in range(62)), ("",) * 62)

    def taken(held, places):
        return take(held[0], places), [held[1][i] for i in places]

    found = with_made(
        {"train": (rows, labels)}, ("test", "dev"), rows=lambda held: held[0], take=taken, labels=lambda held: held[1]
    )
    assert {split: len(own) for split, (_, own) in found.items()} == {"train": 40, "test": 12, "dev": 10}
    assert {*found["train"][1]} == {0, 1, 2, 3, 4}
    texts = [text for own, _ in found.values() for text in own.prompts]
    assert sorted(texts) == sorted(rows.prompts)
    with pytest.raises(ValueError, match="a held-out split would take 1 of 1 different rows"):
        with_made({"train": (taken((rows, labels), [0]))}, ("dev",), rows=lambda held: held[0], take=taken)
    few = taken((rows, [*range(62)]), range(4))
    with pytest.raises(ValueError, match="every label has one row: give a file for the split, or more rows"):
        with_made({"train": few}, ("dev",), rows=lambda held: held[0], take=taken, labels=lambda held: held[1])


def test_made_splits_leave_out_what_a_given_split_has_and_nothing_else():
    asked = [f"text {i // 2}" for i in range(100)]  # every one twice, five of them with two answers
    answers = ["b" if i < 10 and i % 2 else "a" for i in range(100)]
    rows = TextRows(tuple(asked), tuple(answers))
    found = with_made({"train": rows}, ("test", "dev"), rows=lambda own: own, take=take)
    pairs = [pair for own in found.values() for pair in zip(own.prompts, own.answers, strict=True)]
    assert sorted(pairs) == sorted(zip(asked, answers, strict=True))
    sets = {split: set(own.prompts) for split, own in found.items()}
    assert {split: (len(own), len(found[split].prompts)) for split, own in sets.items()} == {
        "train": (34, 68), "test": (9, 18), "dev": (7, 14)
    }  # fmt: skip
    assert not sets["train"] & sets["test"] | sets["train"] & sets["dev"] | sets["test"] & sets["dev"]
    assert {f"text {i}" for i in range(5)} <= sets["train"]
    found = with_made({"train": rows, "test": take(rows, range(4, 24))}, ("dev",), rows=lambda own: own, take=take)
    assert {*found["train"].prompts, *found["dev"].prompts} == {*asked[:4], *asked[24:]}
    assert len(found["train"].prompts) + len(found["dev"].prompts) == 80


def test_made_splits_have_about_as_many_rows_whatever_the_size_of_groups():
    rows = TextRows(tuple(f"text {i // 10}" for i in range(3000)), ("",) * 3000)
    found = with_made({"train": rows}, ("test", "dev"), rows=lambda own: own, take=take)
    assert {split: len(own.prompts) for split, own in found.items()} == {"train": 2600, "test": 200, "dev": 200}
