"""The fast forms of masks, ranks and selections give the bits of their definitions."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import pad

from smat_fn import execution, merge, random
from smat_fn.merge.della import ascending
from smat_fn.merge.parts import arithmetic, ranks
from smat_fn.merge.parts.arithmetic import Norm, agreeing, elected, gram, halved, products, squares, zeroed
from smat_fn.merge.parts.chunks import fields_of, mask_keys

SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, float("inf"), -float("inf"), float("nan")]


def magnitudes(kind, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    scaled = {
        "distinct": values,
        "equal": (values * 3).round(),
        "constant": torch.ones(shape),
        "zero": torch.zeros(shape),
        # neighbours that share their upper or their lower 16 bits, subnormal numbers, all exponents
        "near": 1 + torch.randint(0, 9, shape, generator=generator) * 2.0**-23,
        "coarse": 2.0 ** torch.randint(-5, 5, shape, generator=generator),
        "wide": values * 10.0 ** torch.randint(-44, 38, shape, generator=generator),
    }[kind]
    return scaled.to(dtype).abs()


@pytest.mark.parametrize("shape", [(7, 300), (3, 1), (1, 2), (1, 70000), (0, 4), (2, 0)], ids=str)
@pytest.mark.parametrize("kind", ["distinct", "equal", "constant", "zero", "near", "coarse", "wide"])
def test_ranks_are_those_of_a_stable_sort(kind, shape):
    values = magnitudes(kind, shape)
    assert torch.equal(ascending(values), values.argsort(dim=-1, stable=True))


def test_ranks_of_float64_infinite_and_transposed_numbers():
    double = magnitudes("distinct", (4, 50), torch.float64)
    near = double[0, 0] * (1 + 2.0**-50 * torch.arange(50, 0, -1))  # equal in float32
    special = torch.tensor([SPECIAL]).abs()
    for values in (double, near[None], special, magnitudes("equal", (50, 4)).T):
        assert torch.equal(ascending(values), values.argsort(dim=-1, stable=True))


@pytest.mark.parametrize("small", [0, 1000], ids=["counted", "sorted"])
@pytest.mark.parametrize("kind", ["distinct", "equal", "zero", "near", "wide", "special"])
def test_masks_of_the_largest_are_those_of_a_stable_sort(kind, small, monkeypatch):
    monkeypatch.setattr(ranks, "SMALL", small)
    monkeypatch.setattr(ranks, "STEP", 64)
    values = torch.tensor(SPECIAL * 3).abs() if kind == "special" else magnitudes(kind, (200,))
    for count in (0, 1, len(values) // 2, len(values) - 1, len(values)):
        expected = torch.zeros_like(values, dtype=torch.bool)
        expected[values.argsort(descending=True, stable=True)[:count]] = True
        assert torch.equal(ranks.among_largest(values, count), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_and_election_of_all_kinds_of_numbers(dtype):
    left, right = (
        part.reshape(-1) for part in torch.meshgrid(*[torch.tensor(SPECIAL, dtype=dtype)] * 2, indexing="ij")
    )
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    for keep in (left > right, left == right, torch.zeros_like(left, dtype=torch.bool)):
        assert torch.equal(zeroed(left, keep).view(bits), left.where(keep, 0).view(bits))
    sign = torch.where(left + right >= 0, 1.0, -1.0).to(dtype)
    assert torch.equal(elected([left, right]), sign)
    agrees = [tensor * sign > 0 for tensor in (left, right)]
    total = left.where(agrees[0], 0) + right.where(agrees[1], 0)
    count = agrees[0].to(dtype) + agrees[1].to(dtype)
    for mean, expected in ((False, total), (True, total / count.clamp(min=1))):
        assert torch.equal(agreeing([left, right], sign, mean=mean).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("group", [[(0, 13, 50)], [(1, 0, 9), (0, 3, 5), (2, 0, 1)], [(1, 8, 16), (2, 8, 16)]])
def test_fields_are_those_of_each_stream(group):
    key, names, paths = random.key(5), ["qa", "sum", "fomc"], ["a.b", "c", "d"]
    drawn = fields_of(mask_keys(key, names, paths), group, torch.device("cpu"))
    for (leaf, start, stop), fields in zip(group, drawn, strict=True):
        for name, field in zip(names, fields, strict=True):
            stream = random.leaf_streams(random.fold_in(key, name), [paths[leaf]])[0][0]
            assert field.tolist() == random.bits(stream, stop - start, start=start).tolist()


def test_trees_without_a_floating_point_leaf_need_no_masks():
    base = {"steps": torch.tensor(3)}
    assert merge.dare(random.key(0), base, [base], coef=1.0, drop_prob=0.5) == base
    assert mask_keys(random.key(0), ["a"], []).shape == (1, 0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_order_statistic_is_that_of_a_sort(dtype):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(60, generator=generator, dtype=torch.float64) * 10.0 ** torch.randint(
        -45, 38, (60,), generator=generator
    )
    # neighbours that differ in the last bit only, zeros, a subnormal, equal ones
    near = torch.tensor([1.0, 1.0 + torch.finfo(dtype).eps, 0.0, 0.0, 5e-324, 1e-45, 2.0, 2.0, 2.0])
    values = torch.cat([wide, near]).to(dtype).abs()
    ordered = values.sort().values
    for rank in range(1, len(values) + 1):
        order, finite = ranks.select(lambda: values.split(13), rank, dtype)
        value = ranks.value_of(order.bits, dtype)
        assert finite
        assert value == ordered[rank - 1]
        assert (order.below, order.equal) == (int((values < value).sum()), int((values == value).sum()))
        assert ranks.order_of(values, rank) == order  # sorted, as few are
        last = int((values == value).nonzero().max())
        assert ranks.position(lambda: values.split(13), order.bits, order.equal) == last
    values[7] = float("inf")
    order, finite = ranks.select(lambda: values.split(13), len(values), dtype)
    assert not finite
    assert ranks.value_of(order.bits, dtype) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_norm_depends_on_no_cut(dtype):
    values = (torch.randn(100_001) * torch.linspace(-30, 3, 100_001).exp()).to(dtype)

    def norm(*cuts):
        found, room = Norm(), torch.empty_like(values)
        for start, stop in pairwise([0, *cuts, len(values)]):
            found.add(room[: stop - start].copy_(values[start:stop]))
            room.fill_(float("nan"))  # whose memory is taken again
        return found.value()

    whole = norm()
    assert norm(1, 4096, 4096, 5000, 50_000, 99_999) == whole
    assert norm(*range(7, len(values), 1000)) == whole
    with execution.off():
        assert norm() == norm(4095) == whole
    blocks = [halved(block[None].abs().double()).item() for block in pad(values, (0, 4096)).split(4096)]
    assert whole == math.fsum(blocks)
    assert whole == pytest.approx(math.fsum(values.double().abs().tolist()), rel=1e-13)
    assert Norm().value() == 0


@pytest.mark.parametrize("size", [(1 << 18) + 1, 5 << 17, 3 << 18])
def test_inner_products_of_several_blocks_at_once_are_those_of_each(size, monkeypatch):
    rows = torch.randn(3, size) * torch.tensor([[1e-20], [1.0], [-3.0]])
    rows[0, -5:] = 0
    each = torch.cat([products(block) for block in rows.split(arithmetic.BLOCK, 1)])
    assert torch.equal(products(rows), each)
    assert torch.equal(products(rows[:, :9].double()), products(rows[:, :9]))
    assert torch.equal(products(rows[:, ::2]), products(rows[:, ::2].clone()))
    one_by_one = gram(list(rows)), squares(rows.split(arithmetic.BLOCK, 1))
    wide = rows.double()
    torch.testing.assert_close(torch.tensor(one_by_one[0], dtype=torch.float64), wide @ wide.T, rtol=1e-12, atol=0)
    assert one_by_one[1] == [row[i] for i, row in enumerate(one_by_one[0])]
    assert arithmetic.step_on(rows.device, 3) == arithmetic.BLOCK  # which a compiled loop takes
    away = [arithmetic.step_on(torch.device("meta"), count) // arithmetic.BLOCK for count in (0, 1, 5, 99)]
    assert away == [32, 32, 6, 1]
    monkeypatch.setattr(arithmetic, "step_on", lambda *_: 2 * arithmetic.BLOCK)  # as on a GPU
    assert (gram(list(rows)), squares(rows.split(2 * arithmetic.BLOCK, 1))) == one_by_one


@pytest.mark.parametrize("size", [1, 7, 1000, 4096, 10_001, 1 << 18])
def test_inner_products_of_a_block_by_loops_are_those_of_torch(size):
    rows = torch.randn(4, size) * torch.tensor([[1e-20], [1.0], [1e15], [-3.0]])
    with execution.off():
        expected = products(rows)
    assert torch.equal(products(rows), expected)
    scale = rows.double().square().sum(1).sqrt()
    exact = rows.double() @ rows.double().T
    torch.testing.assert_close(
        expected[0] / (scale[:, None] * scale), exact / (scale[:, None] * scale), rtol=0, atol=1e-12
    )


def test_numbers_are_added_in_turn_on_every_python():
    assert arithmetic.plain_sum([1e16, 1.0, -1e16]) == 0.0  # `sum` gives 1 from Python 3.12 on
    assert arithmetic.plain_sum([]) == 0.0
    assert arithmetic.plain_sum(iter([0.1] * 10)) == 0.9999999999999999
