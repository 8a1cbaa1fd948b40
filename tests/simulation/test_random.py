"""Bits: Random123's known answers for the naive generator, and the fast generator equal to the naive one."""

import pytest
import torch

from smat_fn import random
from smat_fn.simulation import naive
from smat_fn.testing import assert_trees_equal

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**40) + 3]


def pair(key):
    return tuple(int(word) for word in key)


def signed(words):
    return tuple((word + 2**63) % 2**64 - 2**63 for word in words)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_naive_philox_gives_random123s_known_answers(counter, key, answer):
    assert naive.philox4x32_10(counter, key) == answer


def test_philox_equals_the_naive_one_over_64_bit_seeds_and_counters():
    counters = [0, 1, 2**32 - 1, 2**32, 2**62 + 12345, -1, -(2**63)]
    grid = [(s, c) for s in SEEDS for c in counters]
    seeds, counts = (torch.tensor(column) for column in zip(*grid, strict=True))
    words = torch.stack(random.philox(seeds, counts), -1).tolist()
    assert [tuple(w) for w in words] == [naive.block(s, c) for s, c in grid]


@pytest.mark.parametrize("seed", SEEDS)
def test_key_fold_in_and_split_equal_the_naive_child(seed):
    key = random.key(seed)
    assert pair(key) == (seed, 0)
    for data in (0, 1, 2**40, 2**64 - 1, -5):
        assert pair(random.fold_in(key, data)) == signed(naive.child(pair(key), data))
    deep = random.fold_in(random.fold_in(key, 7), 9)
    assert pair(deep) == signed(naive.child(naive.child(pair(key), 7), 9))
    assert [pair(k) for k in random.split(deep, 3)] == [signed(naive.child(pair(deep), i)) for i in range(3)]


def test_names_and_batches_fold_in_like_numbers_one_by_one():
    key = random.key(5)
    hashed = random.name_hashes(("blocks.0.weight", ""))
    assert torch.equal(random.fold_in(key, "blocks.0.weight"), random.fold_in(key, hashed[0]))
    assert torch.equal(random.fold_in(key, torch.tensor(hashed))[1], random.fold_in(key, ""))
    keys = random.split(key, 4).reshape(2, 2, 2)
    batched = random.split(keys, 3)
    assert batched.shape == (3, 2, 2, 2)
    assert torch.equal(batched[2, 1, 0], random.fold_in(keys[1, 0], 2))
    mask, noise = random.leaf_streams(key, ["a", "b"])
    assert torch.equal(mask[1], random.split(random.fold_in(key, "b"))[0])
    assert torch.equal(noise[0], random.split(random.fold_in(key, "a"))[1])


@pytest.mark.parametrize("start", [0, 3, 8, 2**35 + 5, 8 * 2**32 - 4, 2**40])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 63])
def test_bits_equal_the_naive_fields_from_any_start(start, size):
    key = random.fold_in(random.key(-3), "leaf")
    expected = [naive.field(pair(key), start + n) for n in range(size)]
    assert random.bits(key, size, start=start).tolist() == expected


def test_streams_are_the_bits_of_each_key():
    keys, sizes, starts = random.split(random.key(8), 4), [5, 0, 64, 9], [2, 7, 2**33, 0]
    for got, key, size, start in zip(random.streams(keys, sizes, starts=starts), keys, sizes, starts, strict=True):
        assert torch.equal(got, random.bits(key, size, start=start))
    assert [s.numel() for s in random.streams(keys, [0] * 4)] == [0] * 4


def test_uniform_is_the_low_24_bits_of_the_naive_words():
    key = random.fold_in(random.key(11), 1)
    words = [w for i in range(3) for w in naive.block(*(a + b for a, b in zip(pair(key), (0, i), strict=True)))]
    unit = torch.tensor([w % 2**24 / 2**24 for w in words[:10]], dtype=torch.float64)
    assert_trees_equal({"u": random.uniform(key, (2, 5))}, {"u": unit.float().view(2, 5)})
    scaled = random.uniform(key, (10,), dtype=torch.float64, minval=-2.0, maxval=3.0)
    assert_trees_equal({"u": scaled}, {"u": -2 + 5 * unit})
    assert random.uniform(key).shape == ()
    assert random.uniform(key, (0, 3)).shape == (0, 3)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = random.uniform(random.split(random.key(1))[0], (9,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(random.uniform(random.split(random.key(1))[0], (9,)), first)


@pytest.mark.parametrize("use", [random.uniform, lambda k: random.bits(k, 8), lambda k: random.leaf_streams(k, ["a"])])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_drawing_takes_one_key_not_a_batch(use, count):
    with pytest.raises(
        ValueError, match=rf"one key, of shape \(2,\), got torch.int64 \({count}, 2\): use torch.func.vmap"
    ):
        use(random.split(random.key(0), count))
