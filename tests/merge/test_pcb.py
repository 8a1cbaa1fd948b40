"""PCB-Merging against its definition on one flat vector, order statistics against a sort."""

import math
import sys

import pytest
import torch

from smat_fn import merge
from smat_fn.merge.parts.ranks import ordered

pcb = sys.modules["smat_fn.merge.pcb"]  # the function has the module's name


def some(count=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (40, 9), "b": (31,), "c": (), "empty": (0, 3)}
    base, *others = [
        {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in shapes.items()}
        for _ in range(count + 1)
    ]
    return base, {f"e{i}": tree for i, tree in enumerate(others)}


def literal(base, experts, ratio, clip):
    """All experts as rows of one matrix, in float64: sort, clamp, normalise, weigh."""
    rows = torch.stack(
        [torch.cat([(tree[p] - base[p]).reshape(-1) for p in base]) for tree in experts.values()]
    ).double()
    count, size = rows.shape

    def clamped(values, low, high):
        order = values.sort(dim=1).values
        return values.clamp(order[:, int(size * low)][:, None], order[:, int(size * (1 - high) - 1)][:, None])

    def normal(values):
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        return (values - low) / (high - low)

    sizes = clamped(rows.abs(), clip, clip)
    beta = torch.exp(count * normal(sizes) ** 2) * torch.tanh(rows * rows.sum(0))
    scale = normal(clamped(beta, 1 - ratio, 0))
    merged = (scale * sizes * rows.sign()).sum(0) / scale.sum(0).clamp(min=1e-12)
    parts = merged.split([leaf.numel() for leaf in base.values()])
    return {path: part.view(leaf.shape) for (path, leaf), part in zip(base.items(), parts, strict=True)}


@pytest.mark.parametrize(("ratio", "clip"), [(0.1, 1e-4), (0.5, 0.01), (1.0, 0.1), (0.05, 0.0)])
def test_pcb_is_its_definition_on_the_whole_vector(ratio, clip):
    base, experts = some()
    vector = merge.pcb_vector(base, experts, ratio=ratio, clip=clip)
    expected = literal(base, experts, ratio, clip)
    for path, leaf in vector.items():
        torch.testing.assert_close(leaf.double(), expected[path], rtol=1e-5, atol=1e-5)
    merged = merge.pcb(base, experts, coef=1.2, ratio=ratio, clip=clip)
    torch.testing.assert_close(merged["a"], base["a"] + 1.2 * vector["a"])
    kept = torch.cat([leaf.reshape(-1) for leaf in vector.values()]) != 0
    assert kept.double().mean() >= min(ratio, 0.9) - 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_leaf_of_another_dtype_lets_no_coordinate_at_the_floor_in(dtype):
    for seed in range(6):
        change = torch.randn(100, generator=torch.Generator().manual_seed(seed))
        expert = {"w": change, "z": torch.full((1,), 1e-3, dtype=dtype)}
        vector = merge.pcb_vector({path: torch.zeros_like(leaf) for path, leaf in expert.items()}, [expert], ratio=0.3)
        assert int((vector["w"] != 0).sum()) == 30  # above the 70th of 101 from 0


def test_exponents_of_many_experts_do_not_overflow(monkeypatch):
    deltas = torch.ones(89, 3, dtype=torch.float64) * torch.arange(1, 4)
    *_, beta = next(pcb._balance(list(deltas), [pcb.Bounds(1.0, 3.0)] * 89))
    assert (beta[2].item(), beta.isfinite().all()) == (1, True)
    base, experts = some()
    vector = merge.pcb_vector(base, experts, ratio=0.3)
    monkeypatch.setattr(pcb, "_EXPERTS", 2)
    for path, leaf in merge.pcb_vector(base, experts, ratio=0.3).items():
        torch.testing.assert_close(leaf, vector[path])


def test_blocks_of_leaves_change_nothing(monkeypatch):
    base, experts = some()
    whole = merge.pcb_vector(base, experts, ratio=0.3)
    monkeypatch.setattr("smat_fn.merge.parts.arithmetic.BLOCK", 17)
    again = merge.pcb_vector(base, experts, ratio=0.3)
    assert all(torch.equal(leaf, again[path]) for path, leaf in whole.items())


def test_what_experts_agree_on_stays_and_equal_experts_keep_their_largest():
    base, experts = (
        {"w": torch.zeros(4)},
        {"x": torch.tensor([3.0, -3.0, 0.1, 2.0]), "y": torch.tensor([3.0, 3.0, 0.1, 2.0])},
    )
    experts = {name: {"w": leaf} for name, leaf in experts.items()}
    vector = merge.pcb_vector(base, experts, ratio=0.5, clip=0.0)["w"]
    assert vector.tolist() == [3.0, 0.0, 0.0, 0.0]  # the other of the two that take part is the floor, of scale 0
    twins = {name: {"w": experts["y"]["w"].clone()} for name in "xyz"}
    assert merge.pcb_vector(base, twins, ratio=1.0, clip=0.0)["w"].tolist() == [3.0, 3.0, 0.0, 2.0]
    flat = {"x": {"w": torch.full((4,), 2.0)}}
    assert merge.pcb_vector(base, flat)["w"].tolist() == [0.0] * 4  # all alike: none stands out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_statistics_are_those_of_a_sort(dtype):
    values = torch.randn(3, 1000, dtype=dtype, generator=torch.Generator().manual_seed(1))
    values[0, :400], values[1, 5], values[2, :3] = 0.25, -math.inf, torch.tensor([-0.0, 1e-40, -1e-40], dtype=dtype)
    ranks = [0, 1, 399, 500, 998, 999]
    found = ordered(lambda count: map(count, values.split(77, 1)), ranks, values)
    expected = values.sort(1).values
    for rank, value in zip(ranks, found, strict=True):
        assert torch.equal(value, expected[:, rank : rank + 1].double()), rank


def test_options_that_make_no_sense_are_refused():
    base, experts = some()
    with pytest.raises(ValueError, match=r"coef is inf.*ratio is 0, must be in \(0, 1\].*clip is 0.5, must be in"):
        merge.pcb(base, experts, coef=math.inf, ratio=0, clip=0.5)
