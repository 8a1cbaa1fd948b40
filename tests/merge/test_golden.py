"""Bit for bit against mergekit 0.1.5, where its definitions and ours meet; made by make_golden.py beside this file."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import merge, random

COEF, DENSITY = 0.3, 0.3
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def golden():
    stored = load_file(Path(__file__).parent / "golden" / "mergekit.safetensors")

    def leaves(prefix):
        return {path.removeprefix(prefix + "/"): leaf for path, leaf in stored.items() if path.startswith(prefix + "/")}

    return leaves


def family(golden, dtype):
    return golden(f"{dtype}/base"), {f"e{i}": golden(f"{dtype}/e{i}") for i in range(3)}


def same(left, right):
    assert set(left) == set(right)
    assert len(left) == 7
    assert all(left[path].dtype == leaf.dtype and torch.equal(left[path], leaf) for path, leaf in right.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(golden, dtype):
    _, experts = family(golden, dtype)
    same(merge.weight_average(experts), golden(f"{dtype}/linear"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_task_arithmetic(golden, dtype):
    same(merge.task_arithmetic(*family(golden, dtype), coef=COEF), golden(f"{dtype}/task_arithmetic"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_ties_per_tensor(golden, dtype, aggregate):
    base, experts = family(golden, dtype)
    merged = merge.ties(base, experts, coef=COEF, keep=DENSITY, aggregate=aggregate, scope="tensor")
    expected = golden(f"{dtype}/ties_{aggregate}")
    # mergekit sorts unstably: which of several magnitudes equal to the threshold it keeps is left to the machine
    free = {path: torch.zeros_like(leaf, dtype=torch.bool) for path, leaf in base.items()}
    for expert in experts.values():
        for path, leaf in base.items():
            magnitude = (expert[path].float() - leaf.float()).abs()
            count = int(leaf.numel() * DENSITY)
            cut = magnitude.flatten().sort(descending=True).values[count - 1]
            if (magnitude >= cut).sum() > count:
                free[path] |= magnitude == cut
    assert sum(int(leaf.sum()) for leaf in free.values()) == {"float32": 0, "bfloat16": 136}[dtype]
    same(*({path: leaf.where(~free[path], 0) for path, leaf in leaves.items()} for leaves in (merged, expected)))


def test_dare_on_the_masks_of_mergekit(golden, monkeypatch):
    base, experts = family(golden, "float32")
    key, masks = random.key(0), {}
    for name in experts:
        mask = golden(f"dare_linear/mask/{name}")
        for path, stream in zip(
            mask, random.leaf_streams(random.fold_in(key, name), list(mask))[0].tolist(), strict=True
        ):
            masks[tuple(stream)] = torch.where(mask[path].reshape(-1), 65535, 0)

    def streams(keys, sizes, *, starts):
        found = [masks[tuple(stream)] for stream in keys.tolist()]
        return [field[start : start + size] for field, size, start in zip(found, sizes, starts, strict=True)]

    monkeypatch.setattr("smat_fn.random.streams", streams)
    # at 1/2 our rescaling is an exact factor of 2, which the coefficient takes back: mergekit's run does not rescale
    same(merge.dare(key, base, experts, coef=COEF / 2, drop_prob=0.5), golden("float32/dare_linear"))


def test_della_keep_probabilities_by_rank(golden):
    base, experts = family(golden, "float32")
    for name, expert in experts.items():
        for path, keep in golden(f"della/keep/{name}").items():
            rows = (expert[path] - base[path]).reshape(-1, expert[path].shape[-1])
            thresholds = merge.MERGERS["della"].thresholds(rows.shape[1], drop_prob=0.5, window=0.14)
            rank = (rows.abs()[:, None] < rows.abs()[:, :, None]).sum(-1)
            ours = 1 - thresholds[rank] / 65536
            # half a step of the 16 bits, and float32 rounding of the stored numbers
            assert (ours - keep.reshape(rows.shape)).abs().max() <= 2**-17 + 2**-23, (name, path)
