"""Every merger against the same formula written plainly: NumPy, loops, bits of Python integers. No tolerance."""

import functools
import hashlib
import itertools

import numpy as np
import pytest
import torch

from smat_fn import merge, random

SEED = -7
KEY = random.key(SEED)
WORD = 2**32 - 1


def philox(seed, counter):
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    c = [counter & WORD, (counter >> 32) & WORD, 0, 0]
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ k0, q & WORD, (p >> 32) ^ c[3] ^ k1, p & WORD]
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c


def child(key, data):
    if isinstance(data, str):
        data = int.from_bytes(hashlib.blake2b(data.encode(), digest_size=8).digest(), "little")
    w = philox(key[0], (key[1] + data) % 2**64)
    return w[0] + (w[1] << 32), w[2] + (w[3] << 32)


@functools.cache
def mask_fields(name, path, size):
    stream = child(child(child((SEED % 2**64, 0), name), path), 0)
    blocks = (philox(stream[0], (stream[1] + block) % 2**64) for block in range(-(-size // 8)))
    halves = [half for block in blocks for word in block for half in (word & 0xFFFF, word >> 16)]
    return np.array(halves[:size], dtype=np.int64)


def numbers(leaf):
    return leaf.double().numpy() if leaf.dtype == torch.float64 else leaf.float().numpy()


def deltas(base, experts):
    """{name: {path: flat Δ}} in compute dtype."""
    floating = [path for path, leaf in base.items() if leaf.is_floating_point()]
    return {
        name: {path: (numbers(expert[path]) - numbers(base[path])).reshape(-1) for path in floating}
        for name, expert in experts.items()
    }


def elect(masked, sign, mean):
    """Sum or mean of the entries that agree, and the weight that every entry got."""
    agree = [(x != 0) & (np.sign(x) == sign) for x in masked]
    total, count = np.zeros_like(masked[0]), np.zeros_like(masked[0])
    for x, a in zip(masked, agree, strict=True):
        total = total + np.where(a, x, np.zeros_like(x))
        count = count + a.astype(x.dtype)
    weights = np.maximum(count, count.dtype.type(1)) if mean else np.ones_like(count)
    return total / weights, [a / weights for a in agree]


# each returns {path: merged vector} and {name: {path: α_i m_i / γ}}


def reference_ta(base, experts):
    changes = deltas(base, experts)
    paths = next(iter(changes.values()))
    vector = {path: functools.reduce(np.add, [change[path] for change in changes.values()]) for path in paths}
    return vector, {name: {path: np.ones_like(x) for path, x in change.items()} for name, change in changes.items()}


def reference_ties(base, experts, *, keep, aggregate, scope):
    changes = deltas(base, experts)
    paths = list(next(iter(changes.values())))
    trimmed = {name: {} for name in changes}
    for name, change in changes.items():
        if scope == "global":
            ordered = sorted(abs(float(x)) for path in paths for x in change[path])
            cut = ordered[max(len(ordered) - int(len(ordered) * keep), 1) - 1]
            for path in paths:
                trimmed[name][path] = np.array(
                    [x if abs(float(x)) >= cut else 0 for x in change[path]], change[path].dtype
                )
        else:
            for path in paths:
                x = change[path]
                order = sorted(range(len(x)), key=lambda i: -abs(float(x[i])))
                kept = set(order[: max(int(len(x) * keep), 1)])
                trimmed[name][path] = np.array([x[i] if i in kept else 0 for i in range(len(x))], x.dtype)
    sums = {path: functools.reduce(np.add, [trimmed[name][path] for name in trimmed]) for path in paths}
    majority = 1 if scope == "tensor" else np.sign(sum(int(np.sign(s)) for path in paths for s in sums[path]))
    vector, weights = {}, {name: {} for name in changes}
    for path in paths:
        sign = np.where(sums[path] == 0, majority, np.sign(sums[path]))
        vector[path], shares = elect([trimmed[name][path] for name in trimmed], sign, aggregate == "mean")
        for name, share in zip(trimmed, shares, strict=True):
            weights[name][path] = share
    return vector, weights


def drop(change, fields, thresholds):
    kept = ((65536 - thresholds) / 65536).astype(change.dtype)
    mask = np.where(fields >= thresholds, 1 / kept.astype(np.float64), 0)
    return np.where(mask > 0, change / kept, np.zeros_like(change)), mask


def reference_dare(base, experts, *, drop_prob):
    threshold = min(round(65536 * drop_prob), 65535)
    vector, weights = {}, {name: {} for name in experts}
    for name, change in deltas(base, experts).items():
        for path, x in change.items():
            masked, mask = drop(x, mask_fields(name, path, x.size), np.full(x.size, threshold))
            vector[path] = vector[path] + masked if path in vector else masked
            weights[name][path] = mask
    return vector, weights


def reference_della(base, experts, *, drop_prob, window):
    masked, weights = {name: {} for name in experts}, {name: {} for name in experts}
    for name, change in deltas(base, experts).items():
        for path, x in change.items():
            n = base[path].shape[-1] if base[path].ndim else 1
            thresholds = np.zeros(x.size, dtype=np.int64)
            for first in range(0, x.size, max(n, 1)):
                order = sorted(range(first, first + n), key=lambda i: abs(float(x[i])))
                for r, i in enumerate(order):
                    q = (1 - drop_prob) - window / 2 + r / (n - 1) * window if n > 1 else 1 - drop_prob
                    thresholds[i] = min(round(65536 * (1 - q)), 65535)
            masked[name][path], weights[name][path] = drop(x, mask_fields(name, path, x.size), thresholds)
    vector = {}
    for path in next(iter(masked.values())):
        parts = [masked[name][path] for name in masked]
        sign = np.where(functools.reduce(np.add, parts) >= 0, 1, -1)
        vector[path], shares = elect(parts, sign, True)
        for name, share in zip(masked, shares, strict=True):
            weights[name][path] = weights[name][path] * share
    return vector, weights


CASES = {
    "ta": (lambda b, e, c: merge.task_arithmetic(b, e, coef=c), reference_ta),
    "dare-0.3": (
        lambda b, e, c: merge.dare(KEY, b, e, coef=c, drop_prob=0.3),
        functools.partial(reference_dare, drop_prob=0.3),
    ),
    "dare-0": (
        lambda b, e, c: merge.dare(KEY, b, e, coef=c, drop_prob=0.0),
        functools.partial(reference_dare, drop_prob=0.0),
    ),
}
for keep, aggregate, scope in itertools.product([0.2, 0.5, 1.0], ["sum", "mean"], ["global", "tensor"]):
    options = {"keep": keep, "aggregate": aggregate, "scope": scope}
    CASES[f"ties-{keep}-{aggregate}-{scope}"] = (
        lambda b, e, c, options=options: merge.ties(b, e, coef=c, **options),
        functools.partial(reference_ties, **options),
    )
for drop_prob, window in [(0.5, 0.14), (0.1, 0.14), (0.07, 0.14), (0.3, 0.0), (0.9, 0.14)]:
    options = {"drop_prob": drop_prob, "window": window}
    CASES[f"della-{drop_prob}-{window}"] = (
        lambda b, e, c, options=options: merge.della(KEY, b, e, coef=c, **options),
        functools.partial(reference_della, **options),
    )
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_to_the_plain_formula(case, dtype, family):
    merger, reference = CASES[case]
    base, experts = family(dtype)
    vector, _ = reference(base, experts)
    merged = merger(base, experts, 0.3)
    for path, change in vector.items():
        start = numbers(base[path]).reshape(-1)
        expected = torch.from_numpy(start + start.dtype.type(0.3) * change).to(dtype).reshape(base[path].shape)
        assert torch.equal(merged[path], expected), path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weight_average_is_the_sum_divided_and_rounded_once(dtype, family):
    _, experts = family(dtype)
    merged = merge.weight_average(experts)
    for path, leaf in next(iter(experts.values())).items():
        if leaf.is_floating_point():
            total = functools.reduce(np.add, [numbers(expert[path]) for expert in experts.values()])
            mean = np.asarray(total / total.dtype.type(3))
            assert torch.equal(merged[path], torch.from_numpy(mean).to(dtype)), path


@pytest.mark.parametrize("case", [*CASES, "wa"])
def test_merged_state_rebuilt_from_the_view_of_every_expert(case, family):
    base, experts = family(torch.float64)
    coef = 1.0 if case == "wa" else 0.3
    if case == "wa":
        merged, (_, weights) = merge.weight_average(experts), reference_ta(base, experts)
        weights = {name: {path: w / 3 for path, w in paths.items()} for name, paths in weights.items()}
    else:
        merged, (_, weights) = CASES[case][0](base, experts, coef), CASES[case][1](base, experts)
    changes = deltas(base, experts)
    for me, (path, leaf) in itertools.product(experts, base.items()):
        if leaf.is_floating_point():
            others = [coef * weights[name][path] * changes[name][path] for name in experts if name != me]
            noise = functools.reduce(np.add, others)
            rebuilt = numbers(leaf).reshape(-1) + coef * weights[me][path] * changes[me][path] + noise
            np.testing.assert_allclose(merged[path].numpy().reshape(-1), rebuilt, rtol=1e-14, atol=1e-14)
            # the displacement of the expert: alpha m Delta + epsilon less its own Delta
            displacement = coef * weights[me][path] * changes[me][path] + noise - changes[me][path]
            found = merge.task_vector(merged, experts[me])[path].numpy().reshape(-1)
            np.testing.assert_allclose(found, displacement, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("seed", range(20))
def test_ties_cuts_in_the_dtype_that_it_merges_in(scope, seed):
    # the deltas of the float32 expert are float64 ones, for another expert is float64
    generator = torch.Generator().manual_seed(seed)
    base, other, wide = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(3))
    trees = {"a": {"w": (base + 30 * other).float()}, "b": {"w": base + wide}}
    vector = merge.ties_vector({"w": base.float()}, trees, keep=0.02, scope=scope)
    own = {name: {"w": tree["w"].double()} for name, tree in trees.items()}
    expected, _ = reference_ties({"w": base.float().double()}, own, keep=0.02, aggregate="sum", scope=scope)
    np.testing.assert_array_equal(vector["w"].numpy(), expected["w"])
    assert merge.ties_density({"w": base.float()}, trees, keep=0.02, scope=scope) == (
        {"a": 0.02, "b": 0.02} if scope == "tensor" else {"a": 0.04, "b": 0.04}
    )


def test_fields_of_the_reference_are_those_of_random():
    stream = random.leaf_streams(random.fold_in(KEY, "qa"), ["a.b"])[0, 0]
    assert mask_fields("qa", "a.b", 21).tolist() == random.bits(stream, 21).tolist()


def test_one_rounding_of_bfloat16(family):
    base, experts = family(torch.bfloat16)
    wide = merge.task_arithmetic(
        {path: leaf.float() if leaf.is_floating_point() else leaf for path, leaf in base.items()}, experts, coef=0.3
    )
    merged = merge.task_arithmetic(base, experts, coef=0.3)
    assert all(torch.equal(merged[path], wide[path].to(leaf.dtype)) for path, leaf in base.items())
