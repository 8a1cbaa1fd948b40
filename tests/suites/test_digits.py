"""Digits: splits, transforms, pretraining, heads, and what may not leak."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from smat_fn import random
from smat_fn.grad import value_and_grad
from smat_fn.models import tiny_vit
from smat_fn.suites import digits, digits_base
from smat_fn.suites.digits import SIZES, TASKS, DigitsOptions, class_means, splits
from smat_fn.suites.digits_base import VIEWS, Examples, affine, pretrain

PRETRAINING = {"steps": 2, "batch": 32, "lr": 1e-3, "warmup": 1, "decay": 0.01}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_splits_are_disjoint_and_complete():
    parts = splits(0)
    assert {name: len(part.labels) for name, part in parts.items()} == {"train": 1000, "dev": 250, "test": 547}
    # no two of the 1,797 images are equal, so that their bytes are names
    images = [image.numpy().tobytes() for part in parts.values() for image in part.images]
    assert len(set(images)) == len(images) == 1797
    stacked = torch.cat([part.images for part in parts.values()])
    assert stacked.shape == (1797, 8, 8)
    assert stacked.min() == 0
    assert stacked.max() == 1


def test_images_are_scikit_learns_own_which_is_imported_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path))
    first = splits(0)
    pixels, labels = load_digits(return_X_y=True)
    known = {(image / 16).astype(np.float32).tobytes(): label for image, label in zip(pixels, labels, strict=True)}
    for part in first.values():
        assert [known[image.numpy().tobytes()] for image in part.images] == part.labels.tolist()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    again = splits(0)
    assert all(torch.equal(first[name].images, again[name].images) for name in SIZES)
    assert all(torch.equal(first[name].labels, again[name].labels) for name in SIZES)


def test_splits_follow_the_seed_and_keep_labels_with_images():
    first, again, other = splits(1), splits(1), splits(2)
    assert all(torch.equal(first[name].images, again[name].images) for name in SIZES)
    assert not torch.equal(first["dev"].images, other["dev"].images)
    known = {image.numpy().tobytes(): int(label) for image, label in zip(*other["train"], strict=True)}
    shared = [
        (known[i.numpy().tobytes()], int(d))
        for i, d in zip(*first["test"], strict=True)
        if i.numpy().tobytes() in known
    ]
    assert len(shared) > 100
    assert all(a == b for a, b in shared)


def test_transforms_are_what_they_say():
    image = torch.tensor([[[0.0, 0.25], [0.5, 1.0]]])
    expected = {
        "rot90": [[0.25, 1.0], [0.0, 0.5]],  # counter-clockwise
        "mirror": [[0.25, 0.0], [1.0, 0.5]],
        "negative": [[1.0, 0.75], [0.5, 0.0]],
        "stripes": [[0.0, 0.25], [0.5, 0.0]],
        "upright": [[0.0, 0.25], [0.5, 1.0]],
        "rot180": [[1.0, 0.5], [0.25, 0.0]],
        "transpose": [[0.0, 0.5], [0.25, 1.0]],
        "edge": [[0.0, 0.25], [0.5, 0.5]],
        "roll": [[0.0, 0.25], [0.5, 1.0]],  # by twice the width of this one
    }
    assert expected.keys() == TASKS.keys() | VIEWS.keys()
    assert not TASKS.keys() & VIEWS.keys()
    for name, rows in expected.items():
        assert (TASKS | VIEWS)[name](image)[0].tolist() == rows, name
    corner = torch.zeros(1, 8, 8)
    corner[0, 1, 6] = 1
    assert VIEWS["roll"](corner).nonzero().tolist() == [[0, 5, 2]]


def test_no_pretraining_view_is_a_task():
    images = splits(0)["train"].images[:20]
    for task in TASKS.values():
        assert not any(torch.equal(task(images), view(images)) for view in VIEWS.values())


def test_affine_without_extent_is_the_identity():
    images = splits(0)["train"].images[:7]
    still = affine(random.key(0), images, rotate=0, zoom=0, shift=0, shear=0)
    torch.testing.assert_close(still, images, atol=1e-6, rtol=0)


def test_affine_takes_each_number_from_the_key(monkeypatch):
    image = splits(0)["train"].images[:1]
    numbers = torch.tensor([[1.0], [0.0], [0.0], [0.0], [0.0]])
    monkeypatch.setattr(random, "uniform", lambda key, shape, minval: numbers)
    # a pixel is read at the mapped place: the grid turns clockwise on the page, the picture the other way
    turned = affine(random.key(0), image, rotate=90, zoom=0, shift=0, shear=0)
    torch.testing.assert_close(turned, torch.rot90(image, 1, (1, 2)), atol=1e-5, rtol=0)
    numbers[:] = torch.tensor([[0.0], [0.0], [0.0], [1.0], [0.0]])
    moved = affine(random.key(0), image, rotate=0, zoom=0, shift=0.25, shear=0)
    torch.testing.assert_close(moved, F.pad(image[:, :, 1:], (0, 1)), atol=1e-5, rtol=0)


def test_affine_follows_the_key_and_keeps_images_apart():
    images = splits(0)["train"].images[:1].expand(6, 8, 8)
    first = affine(random.key(0), images)
    assert torch.equal(first, affine(random.key(0), images))
    assert not torch.equal(first, affine(random.key(1), images))
    assert len({image.numpy().tobytes() for image in first}) == 6


def test_pretraining_follows_its_seed_and_no_global_generator():
    train = splits(0)["train"]
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = pretrain(train, 0, **PRETRAINING)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()
    torch.rand(3)
    assert same(first, pretrain(train, 0, **PRETRAINING))
    assert not same(first, pretrain(train, 1, **PRETRAINING))
    start = tiny_vit(random.fold_in(random.key(0), "init")).state_dict()
    assert first.keys() == start.keys()
    assert all(first[n].shape == start[n].shape for n in start)
    assert not any(torch.equal(first[n], start[n]) for n in start)


@pytest.mark.slow
def test_pretraining_lowers_its_loss(monkeypatch):
    losses, label_loss = [], digits_base._label_loss

    def recorded(module, batch):
        loss, aux = label_loss(module, batch)
        losses.append(loss.item())
        return loss, aux

    monkeypatch.setattr(digits_base, "_label_loss", recorded)
    pretrain(splits(0)["train"], 0, steps=80, batch=64, lr=1e-3, warmup=5, decay=0.01)
    # chance is log 10 = 2.3
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_the_schedule_of_all_stored_bases():
    rates = [digits_base._schedule(8.0, 8, 2)(step) for step in range(9)]
    assert rates == pytest.approx([4, 8, *(4 * (1 + math.cos(math.pi * step / 8)) for step in range(2, 9))])


def test_cache_hit_equals_rebuild_bit_for_bit(tmp_path, monkeypatch):
    train = splits(3)["train"]
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path / "a"))
    built, hit = (digits_base.base(train, 3, **PRETRAINING) for _ in range(2))
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path / "b"))
    rebuilt = digits_base.base(train, 3, **PRETRAINING)
    assert same(built, hit)
    assert same(hit, rebuilt)
    assert list(built) == list(hit)


def test_cache_tells_seeds_settings_and_training_images_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("SMAT_FN_CACHE", str(tmp_path))
    monkeypatch.setattr(digits_base, "pretrain", lambda train, seed, **settings: {"x": torch.zeros(1)})
    train = splits(3)["train"]
    other = Examples(train.images, train.labels.flip(0))
    for examples, seed, settings in (
        (train, 3, PRETRAINING),
        (train, 4, PRETRAINING),
        (train, 3, PRETRAINING | {"lr": 2e-3}),
        (other, 3, PRETRAINING),
    ):
        digits_base.base(examples, seed, **settings)
    assert len(list(tmp_path.glob("digits-base-*"))) == 4


def test_nothing_of_dev_and_test_reaches_base_heads_or_batches(suite, few, monkeypatch):
    def scrambled(seed):
        parts = splits(seed)
        return parts | {
            name: Examples(parts[name].images.flip(0) ** 2, (parts[name].labels + 1) % 10) for name in ("dev", "test")
        }

    monkeypatch.setattr(digits, "splits", scrambled)
    # past the cache, which would hide a leak into the base
    monkeypatch.setattr(digits, "base", lambda train, seed, progress, **kw: pretrain(train, seed, **kw))
    other = few()
    assert same(suite.base, other.base)
    key = random.key(7)
    for task in suite.tasks:
        batch = suite.batch(task, key, 3)
        assert all(torch.equal(a, b) for a, b in zip(batch, other.batch(task, key, 3), strict=True))
        # equal logits under equal weights: equal heads
        assert torch.equal(suite.loss_fn(task)(suite.base, batch)[1], other.loss_fn(task)(suite.base, batch)[1])
    assert suite.score(suite.base, "rot90", "dev") != other.score(suite.base, "rot90", "dev")


def test_training_images_of_a_task_are_300_of_train_under_its_transform(few):
    suite = few(images_per_task=300, batch_size=16)
    train = splits(0)["train"]
    sets = {}
    for task in suite.tasks:
        images, labels = (
            torch.cat(p) for p in zip(*(suite.batch(task, random.key(0), s) for s in range(19)), strict=True)
        )
        assert images.shape == (300, 8, 8)
        known = {
            image.numpy().tobytes(): (i, int(d))
            for i, (image, d) in enumerate(zip(TASKS[task](train.images), train.labels, strict=True))
        }
        found = [known[image.numpy().tobytes()] for image in images]
        assert [d for _, d in found] == labels.tolist()
        sets[task] = frozenset(i for i, _ in found)
        assert len(sets[task]) == 300
    assert len(set(sets.values())) == len(suite.tasks)


def test_loss_is_cross_entropy_of_scaled_cosines_with_class_means(suite):
    task = "stripes"
    images, labels = (torch.cat(p) for p in zip(*(suite.batch(task, random.key(0), s) for s in range(8)), strict=True))
    assert len(labels) == 120
    module = tiny_vit(random.key(0))
    module.load_state_dict(suite.base)
    with torch.no_grad():
        f = module(pixel_values=(images.double().sub(0.3) / 0.37).float()[:, None]).last_hidden_state[:, 0].double()
    f = f / f.norm(dim=1, keepdim=True)
    means = torch.stack([f[labels == d].mean(0) for d in range(10)])
    logits = 20 * f @ (means / means.norm(dim=1, keepdim=True)).T
    loss, aux = suite.loss_fn(task)(suite.base, (images, labels))
    torch.testing.assert_close(aux.double(), logits, atol=2e-4, rtol=0)
    nll = [
        math.log(sum(math.exp(v) for v in row)) - row[d]
        for row, d in zip(logits.tolist(), labels.tolist(), strict=True)
    ]
    assert abs(loss.item() - sum(nll) / len(nll)) < 1e-4


def test_score_counts_right_answers_of_the_whole_split(suite):
    for split in ("dev", "test"):
        examples = splits(0)[split]
        _, logits = suite.loss_fn("mirror")(suite.base, (examples.images.flip(-1), examples.labels))
        right = sum(int(p == d) for p, d in zip(logits.argmax(1).tolist(), examples.labels.tolist(), strict=True))
        assert suite.score(suite.base, "mirror", split) == 100 * right / SIZES[split]


def test_logits_that_are_nan_give_no_score(suite):
    broken = {name: leaf * 1e30 for name, leaf in suite.base.items()}
    assert math.isnan(suite.score(broken, "mirror", "dev"))
    assert suite.score_tensor(broken, "mirror", "dev").isnan()


def test_masked_set_is_the_twelve_linear_weights_of_the_blocks(suite):
    masked = [name for name, leaf in suite.base.items() if suite.where(name, leaf)]
    assert len(masked) == 12
    assert all(name.endswith("weight") and suite.base[name].ndim == 2 for name in masked)
    assert sum(suite.base[name].numel() for name in masked) == 2 * (4 * 128 * 128 + 2 * 128 * 256)


@pytest.mark.parametrize("engine", ["func", "autograd"])
def test_losses_and_scores_follow_the_dtype_of_the_weights(suite, engine):
    batch = suite.batch("rot90", random.key(0), 0)
    params = {name: leaf.double() for name, leaf in suite.base.items()}
    (loss, logits), grads = value_and_grad(suite.loss_fn("rot90"), engine=engine)(params, batch)
    assert loss.dtype == logits.dtype == torch.float64
    assert all(g.dtype == torch.float64 for g in grads.values())
    assert not logits.requires_grad
    assert suite.score(params, "rot90", "dev") == suite.score(suite.base, "rot90", "dev")


def test_a_class_without_images_is_named():
    examples = splits(0)["train"]
    keep = (examples.labels != 4) & (examples.labels != 7)
    with pytest.raises(ValueError, match=r"digits \[4, 7\] are not among \d+ training images: raise images_per_task"):
        class_means(tiny_vit(random.key(0)), Examples(examples.images[keep], examples.labels[keep]))


def test_bad_recipes_are_refused_all_at_once():
    with pytest.raises(
        ValueError, match=r"pretrain_steps is 0\.5.*logit_scale is nan.*images_per_task is 1001.*decay is -1"
    ):
        DigitsOptions(images_per_task=1001, pretrain_steps=0.5, logit_scale=math.nan, pretrain_decay=-1)
    with pytest.raises(ValueError, match=r"logit_scale is 'high', must be positive.*decay is 'low', must be finite"):
        DigitsOptions(logit_scale="high", pretrain_decay="low")
