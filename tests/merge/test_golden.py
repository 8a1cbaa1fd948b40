"""Against mergekit 0.1.5, where its definitions and ours meet: made by make_golden.py, anew where it is installed.

The paper's mergers bit for bit. Of the others, those whose order of operations is another: bit for bit in bfloat16,
where both compute in float32 and round once, and within 2 units in the last place in float32.
"""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from smat_fn import merge, random
from smat_fn.merge.della import thresholds as della_thresholds
from smat_fn.merge.model_stock import ratio_of
from smat_fn.merge.parts.arithmetic import gram

STORED = Path(__file__).parent / "golden" / "mergekit.safetensors"
COEF, DENSITY = 0.3, 0.3
EMBED = "model.embed_tokens.weight"
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def golden(golden_file):
    stored = load_file(golden_file)

    def leaves(prefix):
        return {path.removeprefix(prefix + "/"): leaf for path, leaf in stored.items() if path.startswith(prefix + "/")}

    return leaves


def family(golden, dtype):
    return golden(f"{dtype}/base"), {f"e{i}": golden(f"{dtype}/e{i}") for i in range(3)}


def same(left, right):
    assert set(left) == set(right)
    assert len(left) == 7
    assert all(left[path].dtype == leaf.dtype and torch.equal(left[path], leaf) for path, leaf in right.items())


def undecided(base, experts, *counts):
    """Coordinates of several equal magnitudes on both sides of the largest ``count(size)`` of a leaf.

    mergekit sorts unstably: which of them it takes is left to the machine.
    """
    free = {path: torch.zeros_like(leaf, dtype=torch.bool) for path, leaf in base.items()}
    for expert, (path, leaf), count in itertools.product(experts.values(), base.items(), counts):
        magnitude = (expert[path].float() - leaf.float()).abs()
        largest = magnitude.flatten().sort(descending=True).values
        if largest[count(leaf.numel()) - 1] == largest[count(leaf.numel())]:
            free[path] |= magnitude == largest[count(leaf.numel())]
    return free


def close(left, right):
    """Equal in bfloat16, within 2 units of the largest number's last place in float32."""
    assert set(left) == set(right)
    for path, leaf in right.items():
        assert left[path].dtype == leaf.dtype
        error = (left[path].double() - leaf.double()).abs().max()
        assert error <= (2**-22 * leaf.double().abs().max() if leaf.dtype == torch.float32 else 0), path


def test_what_is_stored_is_what_mergekit_gives(golden_file):
    if golden_file == STORED:
        pytest.skip("mergekit is not installed (0.1.5, here or for $MERGEKIT_PYTHON)")
    stored, made = load_file(STORED), load_file(golden_file)
    assert stored.keys() == made.keys()
    assert [path for path, leaf in stored.items() if not torch.equal(leaf, made[path])] == []


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
    free = undecided(base, experts, lambda size: int(size * DENSITY))
    assert sum(int(leaf.sum()) for leaf in free.values()) == {"float32": 0, "bfloat16": 136}[dtype]
    same(*({path: leaf.where(~free[path], 0) for path, leaf in leaves.items()} for leaves in (merged, expected)))


@pytest.fixture
def masked(golden, monkeypatch):
    """(key, base, experts): the mask streams under the key are the masks that mergekit drew."""
    base, experts = family(golden, "float32")
    key, masks = random.key(0), {}
    for name in experts:
        mask = golden(f"dare_linear/mask/{name}")
        for path, stream in zip(
            mask, random.leaf_streams(random.fold_in(key, name), list(mask))[0].tolist(), strict=True
        ):
            masks[tuple(stream)] = torch.where(mask[path].reshape(-1), 65535, 0)

    def fields(keys, windows):
        found = [masks[tuple(stream.tolist())][start:stop] for stream, (start, stop) in zip(keys, windows, strict=True)]
        return [(field - 32768).to(torch.int16) for field in found]

    monkeypatch.setattr("smat_fn.merge.parts.chunks.centered_fields", fields)
    return key, base, experts


# at 1/2 our rescaling is an exact factor of 2, which the coefficient takes back: mergekit's runs do not rescale
def test_dare_on_the_masks_of_mergekit(golden, masked):
    same(merge.dare(*masked, coef=COEF / 2, drop_prob=0.5), golden("float32/dare_linear"))


def test_dare_ties_on_the_masks_of_mergekit(golden, masked):
    expected = golden("float32/dare_ties")
    same(merge.dare_ties(*masked, coef=COEF / 2, drop_prob=0.5), expected)
    assert any(not torch.equal(leaf, golden("float32/dare_linear")[path]) for path, leaf in expected.items())


def test_della_keep_probabilities_by_rank(golden):
    base, experts = family(golden, "float32")
    for name, expert in experts.items():
        for path, keep in golden(f"della/keep/{name}").items():
            rows = (expert[path] - base[path]).reshape(-1, expert[path].shape[-1])
            thresholds = della_thresholds(rows.shape[1], drop_prob=0.5, window=0.14)
            rank = (rows.abs()[:, None] < rows.abs()[:, :, None]).sum(-1)
            ours = 1 - thresholds[rank] / 65536
            # half a step of the 16 bits, and float32 rounding of the stored numbers
            assert (ours - keep.reshape(rows.shape)).abs().max() <= 2**-17 + 2**-23, (name, path)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "normalize"), [("linear_weighted", True), ("linear_sum", False)])
def test_weighted_average(golden, dtype, run, normalize):
    _, experts = family(golden, dtype)
    weights = {"e2": 0.3, "e1": 2.0, "e0": 0.5}
    close(merge.weighted_average(experts, weights=weights, normalize=normalize), golden(f"{dtype}/{run}"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_slerp(golden, dtype):
    base, experts = family(golden, dtype)
    close(merge.slerp([experts["e0"], experts["e1"]], coef=0.3), golden(f"{dtype}/slerp"))
    parallel = {**experts["e0"], EMBED: base[EMBED] * 1.25}
    close(merge.slerp([base, parallel], coef=0.3), golden(f"{dtype}/slerp_line"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_model_stock(golden, dtype):
    base, experts = family(golden, dtype)
    first, *others = experts.values()
    means = [
        {p: ((leaf.float() + other[p].float()) / 2).to(leaf.dtype) for p, leaf in first.items()} for other in others
    ]
    grams = [gram([own[path] for own in (first, *means)], leaf) for path, leaf in base.items()]
    assert all(0.5 < ratio_of(own, clamp=True) < 0.95 for own in grams)
    close(merge.model_stock(base, [first, *means]), golden(f"{dtype}/model_stock"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_breadcrumbs(golden, dtype):
    base, experts = family(golden, dtype)
    merged = merge.breadcrumbs(base, experts, coef=COEF, drop_smallest=0.25, drop_largest=0.125)
    free = undecided(base, experts, lambda size: size // 8, lambda size: size * 3 // 4)
    assert sum(int(leaf.sum()) for leaf in free.values()) == {"float32": 0, "bfloat16": 176}[dtype]
    expected = golden(f"{dtype}/breadcrumbs")
    same(*({path: leaf.where(~free[path], 0) for path, leaf in leaves.items()} for leaves in (merged, expected)))
