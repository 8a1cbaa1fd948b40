"""The masks as random variables: rates and means within five standard errors, dtypes and ranks apart."""

import math

import pytest
import torch

from smat_fn import merge, random

DTYPES = [torch.float32, torch.bfloat16]


def close(count, size, prob):
    return abs(count - size * prob) <= 5 * math.sqrt(size * prob * (1 - prob))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("drop_prob", [0.1, 0.3, 0.9])
def test_dare_keeps_the_stated_fraction_and_the_mean(drop_prob, dtype):
    size = 1 << 17
    base, expert = {"w": torch.zeros(size, dtype=dtype)}, {"w": torch.ones(size, dtype=dtype)}
    vector = merge.dare_vector(random.key(1), base, [expert], drop_prob=drop_prob)["w"]
    assert close(int((vector != 0).sum()), size, 1 - drop_prob)
    error = math.sqrt(drop_prob / (1 - drop_prob) / size)
    assert abs(vector.double().mean().item() - 1) <= 5 * error


def test_dare_masks_of_experts_leaves_and_keys_are_independent():
    size = 1 << 16
    base = {"a": torch.zeros(size), "b": torch.zeros(size)}
    ones = {"a": torch.ones(size), "b": torch.ones(size)}

    def kept(seed, name):
        vector = merge.dare_vector(random.key(seed), base, {name: ones}, drop_prob=0.5)
        return [vector["a"] != 0, vector["b"] != 0]

    masks = [*kept(0, "x"), *kept(0, "y"), *kept(1, "x")]
    for i, left in enumerate(masks):
        assert all(close(int((left == right).sum()), size, 0.5) for right in masks[:i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_della_keeps_by_rank_and_every_mean(dtype):
    rows, length, drop_prob, window = 8192, 16, 0.5, 0.6
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand(rows, length, generator=generator).argsort(-1)
    sign = torch.where(torch.rand(rows, length, generator=generator) < 0.5, -1, 1)
    delta = (sign * (rank + 1)).to(dtype)  # magnitude rank + 1 at a random position of each row
    base = {"w": torch.zeros(rows, length, dtype=dtype)}
    vector = merge.della_vector(random.key(2), base, [{"w": delta}], drop_prob=drop_prob, window=window)["w"]
    for r in range(length):
        prob = 1 - drop_prob - window / 2 + r / (length - 1) * window
        ratio = (vector / delta.float())[rank == r].double()
        assert close(int((ratio != 0).sum()), rows, prob), r
        assert abs(ratio.mean().item() - 1) <= 5 * math.sqrt((1 - prob) / prob / rows), r


def test_della_keeps_more_of_the_task_vector_than_dare():
    # the point of ranks: at equal drop rate the kept magnitude is larger, by window/2 · E|Δ|·rank correlation > 0
    delta = {"w": torch.randn(256, 256, generator=torch.Generator().manual_seed(0))}
    base, key = {"w": torch.zeros(256, 256)}, random.key(3)
    by_rank = merge.della_vector(key, base, [delta], drop_prob=0.5, window=0.9)["w"] != 0
    flat = merge.dare_vector(key, base, [delta], drop_prob=0.5)["w"] != 0
    assert delta["w"].abs()[by_rank].sum() > 1.2 * delta["w"].abs()[flat].sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)  # with and without compiled loops
def test_dare_drops_below_the_threshold_and_not_at_it(dtype):
    size, threshold = 1 << 18, int(random.threshold(0.4))
    fields = random.bits(random.leaf_streams(random.fold_in(random.key(1), "0"), ["w"])[0, 0], size)
    assert (fields == threshold).any()
    base, expert = {"w": torch.zeros(size, dtype=dtype)}, {"w": torch.ones(size, dtype=dtype)}
    vector = merge.dare_vector(random.key(1), base, [expert], drop_prob=0.4)["w"]
    assert torch.equal(vector != 0, fields >= threshold)
    assert vector.max() == torch.tensor(1 / (1 - threshold / 65536), dtype=dtype)
