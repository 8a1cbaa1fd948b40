"""Keys and bits against Philox in Python integers, and against themselves under vmap and compile."""

import hashlib
import math

import numpy
import pytest
import torch

from smat_fn import random

EDGE_SEEDS = [0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63), 2**63 + 17, 2**64 - 3]
# Random123's kat_vectors for philox4x32-10: counter, key, words
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(counter, key):
    """Philox4x32-10 on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p, q = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (q >> 32) ^ c1 ^ k0, q & 0xFFFFFFFF, (p >> 32) ^ c3 ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def block(key, index):
    """Block ``index`` of a key (seed, offset), both taken modulo 2**64."""
    seed, counter = key[0] % 2**64, (key[1] + index) % 2**64
    return philox((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))


def child(key, data):
    w = block(key, data)
    return signed(w[0] | w[1] << 32), signed(w[2] | w[3] << 32)


def signed(number):
    return (number + 2**63) % 2**64 - 2**63


def fields(key, size, start=0):
    halves = lambda i: [half for word in block(key, i) for half in (word & 0xFFFF, word >> 16)]  # noqa: E731
    return [halves(n // 8)[n % 8] for n in range(start, start + size)]


def as_ints(key):
    return tuple(key.tolist())


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_reference_of_this_file_gives_the_published_answers(counter, key, words):
    assert philox(counter, key) == words


@pytest.mark.parametrize("seed", EDGE_SEEDS)
@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1, 2**32, 2**62 + 7, -1])
def test_philox_equals_the_reference(seed, counter):
    words = random.philox(torch.tensor(signed(seed)), torch.tensor(counter))
    assert tuple(int(word) for word in words) == block((seed, counter), 0)


def test_philox_gives_the_published_answer_of_zero():
    assert tuple(int(w) for w in random.philox(torch.tensor(0), torch.tensor(0))) == KNOWN[0][2]


@pytest.mark.parametrize("seed", EDGE_SEEDS)
def test_key_is_the_seed_modulo_two_to_the_64(seed):
    key = random.key(seed)
    assert key.dtype == torch.int64
    assert key.tolist() == [signed(seed), 0]
    assert torch.equal(key, random.key(seed + 2**64))


@pytest.mark.parametrize("seed", EDGE_SEEDS)
@pytest.mark.parametrize("data", [0, 3, -1, 2**63, 2**64 - 1])
def test_fold_in_is_one_block_of_the_key(seed, data):
    key = random.fold_in(random.key(seed), data)
    assert as_ints(key) == child((seed, 0), data)
    # a second level has an offset of its own
    assert as_ints(random.fold_in(key, 5)) == child(as_ints(key), 5)


def test_split_is_fold_in_of_the_index():
    key = random.fold_in(random.key(-7), 2**40)
    keys = random.split(key, 5)
    assert keys.shape == (5, 2)
    assert all(torch.equal(keys[i], random.fold_in(key, i)) for i in range(5))
    assert torch.equal(random.split(key), keys[:2])
    assert len({as_ints(k) for k in keys}) == 5


def test_batched_keys_are_keys_one_by_one():
    keys = random.split(random.key(3), 6).view(2, 3, 2)
    children = random.fold_in(keys, "name")
    halves = random.split(keys, 4)
    assert halves.shape == (4, 2, 3, 2)
    numbers = torch.arange(6).view(2, 3)
    numbered = random.fold_in(keys, numbers)
    for i in range(2):
        for j in range(3):
            assert torch.equal(children[i, j], random.fold_in(keys[i, j], "name"))
            assert torch.equal(halves[:, i, j], random.split(keys[i, j], 4))
            assert torch.equal(numbered[i, j], random.fold_in(keys[i, j], int(numbers[i, j])))


def test_a_tensor_of_numbers_folds_into_one_key():
    key, numbers = random.key(9), torch.tensor([0, 4, -2])
    assert torch.equal(random.fold_in(key, numbers), torch.stack([random.fold_in(key, int(n)) for n in numbers]))


@pytest.mark.parametrize("name", ["", "model.layers.0.weight", "ümlaut 文"])
def test_a_string_stands_for_its_blake2b_hash(name):
    digest = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    assert as_ints(random.fold_in(random.key(1), name)) == child((1, 0), digest)
    assert random.name_hashes((name,)) == [signed(digest)]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
@pytest.mark.parametrize("start", [0, 3, 8, 2**35 + 5])
def test_bits_equal_the_reference(size, start):
    key = random.fold_in(random.key(2**63 + 1), 4)
    got = random.bits(key, size, start=start)
    assert got.dtype == torch.int64
    assert got.tolist() == fields(as_ints(key), size, start)


def test_bits_of_a_window_are_the_window_of_the_bits():
    key = random.key(11)
    whole = random.bits(key, 200)
    for start in range(18):
        assert torch.equal(random.bits(key, 61, start=start), whole[start : start + 61])


def test_streams_are_bits_one_by_one():
    keys = random.split(random.key(5), 4)
    sizes, starts = [3, 0, 17, 8], [0, 9, 5, 2**40 + 1]
    for given in (None, starts):
        got = random.streams(keys, sizes, starts=given)
        want = [random.bits(k, n, start=s) for k, n, s in zip(keys, sizes, given or [0] * 4, strict=True)]
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert [len(s) for s in random.streams(keys[:2], [0, 0])] == [0, 0]


def test_leaf_streams_depend_on_the_path_alone():
    key, paths = random.key(6), ["a.weight", "b", "a.bias"]
    mask, noise = random.leaf_streams(key, paths)
    for i, path in enumerate(paths):
        assert torch.equal(mask[i], random.split(random.fold_in(key, path))[0])
        assert torch.equal(noise[i], random.split(random.fold_in(key, path))[1])
    assert torch.equal(random.leaf_streams(key, paths[::-1])[0], mask.flip(0))


@pytest.mark.parametrize(
    ("prob", "cutoff"), [(0.0, 0), (1.0, 65535), (0.5, 32768), (0.3, 19661), (1 - 1e-9, 65535), (1e-6, 0)]
)
def test_threshold_is_the_rounded_probability(prob, cutoff):
    assert int(random.threshold(prob)) == cutoff
    assert int(random.threshold(torch.tensor(prob, dtype=torch.float64))) == cutoff


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_the_low_24_bits_of_the_words(dtype):
    key = random.fold_in(random.key(8), 1)
    words = [word for i in range(4) for word in block(as_ints(key), i)]
    got = random.uniform(key, (3, 5), dtype=dtype)
    assert got.dtype == dtype
    assert got.flatten().tolist() == [(w & 0xFFFFFF) / 2**24 for w in words[:15]]
    assert random.uniform(key).shape == ()
    assert random.uniform(key).item() == got[0, 0].item()
    assert random.uniform(key, (0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uniform_scales_before_it_rounds(dtype):
    key = random.key(12)
    unit = random.uniform(key, (64,), dtype=torch.float64)
    below = torch.nextafter(torch.tensor(5.0, dtype=dtype), torch.tensor(0.0, dtype=dtype))
    rounded = (-3 + 8 * unit).to(dtype).minimum(below)
    assert torch.equal(random.uniform(key, (64,), dtype=dtype, minval=-3.0, maxval=5.0), rounded)
    assert (random.uniform(key, (4,), minval=2.0, maxval=2.0) == 2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bounds", [(0, 1), (1, 2), (-3, -2), (-1, 1), (0, 0.1), (-0.1, 0)], ids=str)
def test_uniform_stays_below_maxval_in_every_dtype(dtype, bounds, monkeypatch):
    low, high = bounds
    top = torch.full((), high, dtype=dtype)
    drawn = random.uniform(random.key(4), (4096,), dtype=dtype, minval=low, maxval=high)
    assert (drawn < top).all()
    assert (drawn >= torch.full((), low, dtype=dtype)).all()
    # the largest word there is
    ones = lambda seed, counter: numpy.full((4, *counter.shape), 2**32 - 1, numpy.uint64)  # noqa: E731
    monkeypatch.setattr(random, "_words", ones)
    largest = random.uniform(random.key(4), (2,), dtype=dtype, minval=low, maxval=high)
    exact = low + (high - low) * (1 - 2.0**-24)
    assert (largest < top).all()
    assert (largest >= torch.nextafter(top, torch.full_like(top, low))).all() or largest[0] == torch.tensor(
        exact, dtype=dtype
    )


def test_uniform_of_a_negative_size_is_refused():
    with pytest.raises(ValueError, match=r"uniform: shape \(2, -1\) has a negative size"):
        random.uniform(random.key(0), (2, -1))


def test_uniform_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"dtype torch\.int64 is not a floating-point dtype"):
        random.uniform(random.key(0), (2,), dtype=torch.int64)


def test_uniform_has_the_moments_of_the_uniform_distribution():
    n = 20_000
    u = random.uniform(random.key(123), (n,), dtype=torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 1 / 2) < 4 * math.sqrt(1 / 12 / n)
    # the variance of (u - 1/2)**2 is 1/180
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) < 4 * math.sqrt(1 / 180 / n)
    assert abs(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) < 4 / 12 / math.sqrt(n)


def test_fields_are_uniform_and_streams_uncorrelated():
    n = 32_768
    mask, noise = (s.double() for s in random.streams(random.split(random.key(77)), [n, n]))
    counts = torch.bincount(mask.long() >> 8, minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi2 - 255) < 4 * math.sqrt(2 * 255)
    assert abs(torch.corrcoef(torch.stack((mask, noise)))[0, 1]) < 4 / math.sqrt(n)


@pytest.mark.parametrize(
    "bad",
    [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.tensor(1), 7, None],
    ids=["float", "int32", "length", "0-d", "int", "None"],
)
def test_what_is_no_key_is_refused(bad):
    for use in (random.split, lambda k: random.fold_in(k, 1), random.uniform):
        with pytest.raises(
            ValueError, match=r"a key is an int64 tensor of shape \(\.\.\., 2\), got .*random\.key\(seed\)"
        ):
            use(bad)


@pytest.mark.parametrize("bad", [1.0, 1.5, "7", None, b"7"], ids=repr)
def test_what_is_no_integer_is_no_seed_and_folds_into_nothing(bad):
    with pytest.raises(ValueError, match=" is not an integer: keys are made of integers"):
        random.key(bad)
    if not isinstance(bad, str):
        with pytest.raises(ValueError, match=" is not an integer: keys are made of integers"):
            random.fold_in(random.key(0), bad)
        with pytest.raises(ValueError, match=" is not an integer"):
            random.split(random.key(0), bad)
    with pytest.raises(ValueError, match=r"data is a torch\.float32 tensor, must be one of integers"):
        random.fold_in(random.key(0), torch.tensor(3.0))


def test_integers_of_other_libraries_are_seeds():
    for seven in (numpy.int64(7), numpy.uint8(7), torch.tensor(7), torch.tensor(7, dtype=torch.int32)):
        assert torch.equal(random.key(seven), random.key(7))
        assert torch.equal(random.fold_in(random.key(1), seven), random.fold_in(random.key(1), 7))


def test_bad_ranges_are_refused():
    with pytest.raises(ValueError, match="maxval inf, or one of them is not finite"):
        random.uniform(random.key(0), maxval=math.inf)
    with pytest.raises(ValueError, match="num is 0"):
        random.split(random.key(0), 0)
    with pytest.raises(ValueError, match=r"minval 2\.0 is above maxval 1\.0"):
        random.uniform(random.key(0), minval=2.0, maxval=1.0)
    with pytest.raises(ValueError, match="size is 3 and start -1, must not be negative"):
        random.bits(random.key(0), 3, start=-1)
    assert random.bits(random.key(0), 1, start=2**66 - 9).shape == (1,)
    with pytest.raises(ValueError, match=r"bits: size is 1 and start \d+: their sum must be at most 2\*\*66 - 8"):
        random.bits(random.key(0), 1, start=2**66 - 8)
    with pytest.raises(ValueError, match=r"keys of shape \(2, 2\), 1 sizes and 1 starts: give a key, a size and"):
        random.streams(random.split(random.key(0)), (3,))


def test_vmap_over_keys():
    keys = random.split(random.key(4), 3)

    def use(key):
        named = random.fold_in(key, "w")
        return random.split(named), random.fold_in(named, 9), random.uniform(named, (5,)), random.bits(named, 11)

    batched = torch.func.vmap(use)(keys)
    for i in range(3):
        for got, want in zip(batched, use(keys[i]), strict=True):
            assert torch.equal(got[i], want)


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    def use(key):
        named = random.fold_in(random.fold_in(key, "layer.weight"), 3)
        return random.split(named), random.uniform(named, (5,)), random.bits(named, 9, start=3)

    key = random.key(21)
    compiled = torch.compile(use, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(key), use(key), strict=True):
        assert torch.equal(got, want)
