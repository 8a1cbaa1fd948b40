"""Batches: epochs covered exactly, the partial batch kept, any step by itself."""

import pytest
import torch

from smat_fn import random
from smat_fn.data import batch_indices, permutation


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (12, 4), (3, 8), (1, 1), (300, 16)])
def test_every_epoch_covers_every_example_once(size, batch_size):
    key, per_epoch = random.key(3), -(-size // batch_size)
    for epoch in range(3):
        batches = [batch_indices(key, size, batch_size, epoch * per_epoch + b) for b in range(per_epoch)]
        assert [len(b) for b in batches] == [batch_size] * (per_epoch - 1) + [size - batch_size * (per_epoch - 1)]
        assert sorted(torch.cat(batches).tolist()) == list(range(size))


def test_a_step_needs_no_other_step():
    forward = [batch_indices(random.key(1), 50, 8, s) for s in range(30)]
    for step in reversed(range(30)):
        assert torch.equal(batch_indices(random.key(1), 50, 8, step), forward[step])


def test_epochs_and_keys_give_other_orders():
    orders = {tuple(batch_indices(random.key(k), 50, 50, e).tolist()) for k in range(3) for e in range(3)}
    assert len(orders) == 9


def test_changing_a_batch_in_place_changes_no_later_one():
    first = batch_indices(random.key(2), 10, 5, 0)
    kept = first.clone()
    first.zero_()
    assert torch.equal(batch_indices(random.key(2), 10, 5, 0), kept)


def test_permutation_ranks_words_then_positions(monkeypatch):
    words = torch.tensor([5, 1, 5, 0, 1], dtype=torch.float64) / 2**24
    monkeypatch.setattr(random, "uniform", lambda key, shape, dtype: words)
    assert permutation(random.key(0), 5).tolist() == [3, 1, 4, 0, 2]


def test_first_positions_of_permutations_are_uniform():
    firsts = torch.stack([permutation(random.key(k), 4) for k in range(400)])[:, 0].bincount(minlength=4)
    # chi-squared with 3 degrees of freedom: 16.3 has probability 1e-3; keys are fixed
    assert float(((firsts - 100) ** 2 / 100).sum()) < 16.3


def test_bad_sizes_are_listed_together():
    with pytest.raises(ValueError, match=r"size is 0.*batch_size is -1.*step is -2"):
        batch_indices(random.key(0), 0, -1, -2)
