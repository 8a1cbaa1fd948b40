"""Tall matrices by blocks of rows: accuracy of a whole decomposition, the same bits from folders, bounded memory."""

import pytest
import torch

from smat_fn.config import IsoC, IsoCts, TsvMerge
from smat_fn.merge import merge_by
from smat_fn.merge.parts import tall
from smat_fn.merge.parts.merger import InMemory
from smat_fn.merge.parts.spectral import svd
from smat_fn.tree import clone

KINDS = [
    TsvMerge(coef=0.5), TsvMerge(coef=0.5, share=0.2), IsoC(coef=0.5), IsoCts(coef=0.5), IsoCts(coef=0.5, common=1.0)
]  # fmt: skip
NAMES = ["tsv_merge", "tsv_merge-share", "iso_c", "iso_cts", "iso_cts-common"]


@pytest.fixture
def tall_from(monkeypatch):
    """``tall_from(size)``: matrices of more coordinates are merged by blocks of rows."""
    return lambda size: monkeypatch.setattr(tall, "LARGE", size)


def trees(dtype=torch.float32, *, rows=403, columns=12, count=3):
    generator = torch.Generator().manual_seed(1)

    def matrix(scale):
        return (scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)).to(dtype)

    base = {"embed": matrix(1.0), "small": torch.ones(3, 4, dtype=dtype), "bias": torch.zeros(5, dtype=dtype)}

    def moved(leaf):
        return leaf + (0.1 * torch.randn(leaf.shape, generator=generator)).to(dtype)

    return base, {f"e{i}": {path: moved(leaf) for path, leaf in base.items()} for i in range(count)}


def steep(condition, rows=2000, columns=32):
    """A float64 matrix of known singular values, from 1 down to 1 / condition."""
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
    values = torch.logspace(0, -torch.tensor(condition).log10().item(), columns, dtype=torch.float64)
    return (left * values) @ right.mT, values


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6])
def test_singular_values_are_as_exact_as_of_the_whole_matrix(condition):
    exact, values = steep(condition)
    matrix = exact.float()
    ours = torch.linalg.svdvals(tall.triangle(matrix.split(32)))
    whole = torch.linalg.svdvals(matrix)
    errors = [(found.double() - values).abs().max() for found in (ours, whole)]
    assert errors[0] < 1e-6
    if condition == 1e6:  # the square of the condition is beyond float32: AᵀA has lost the small ones
        squared = torch.linalg.svdvals(matrix.mT @ matrix).sqrt().double()
        assert (squared - values).abs().max() > 100 * errors[0]


@pytest.mark.parametrize("condition", [1e1, 1e5])  # of the latter a part is 0 up to rounding
def test_left_vectors_are_orthonormal_and_give_the_matrix_back(condition):
    exact, values = steep(condition)
    matrix = exact.float()
    found = tall.right(tall.triangle(matrix.split(100)), len(matrix), 32)
    left = torch.cat([block @ found.inverse for block in matrix.split(77)])
    real = found.values > 0
    assert int(real.sum()) == int((values > len(matrix) * torch.finfo(torch.float32).eps).sum())
    inner = left[:, real].double().mT @ left[:, real].double()
    assert (inner - torch.eye(len(inner))).abs().max() < 20 / len(matrix)
    assert torch.allclose((left * found.values) @ found.vectors.mT, matrix, atol=3e-4 if condition > 100 else 1e-6)
    assert torch.equal(left[:, ~real], torch.zeros(len(left), int((~real).sum())))


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 4e-14)])
def test_rows_merge_to_the_values_of_whole_matrices(config, dtype, close, tall_from):
    base, experts = trees(dtype)
    whole = merge_by(config, base, experts)
    tall_from(403 * 12 - 1)
    found = merge_by(config, base, experts)
    assert config.streams((403, 12), 3)
    assert not torch.equal(found["embed"], whole["embed"])  # another way
    assert (found["embed"] - whole["embed"]).abs().max() < close
    assert all(torch.equal(found[path], whole[path]) for path in ("small", "bias"))


@pytest.mark.parametrize("config", KINDS, ids=NAMES)
def test_experts_without_change_of_low_rank_or_equal_do_no_harm(config, tall_from):
    base, experts = trees(torch.float64)
    line = torch.outer(torch.arange(403.0), torch.arange(12.0)).double()
    flat = {**base, "embed": base["embed"] + line}
    cases = [[base], [flat, clone(flat)], [experts["e0"], clone(experts["e0"]), base]]
    for others in cases:
        given = {f"x{i}": tree for i, tree in enumerate(others)}
        tall_from(1 << 28)
        whole = merge_by(config, base, given)
        tall_from(403 * 12 - 1)
        found = merge_by(config, base, given)
        assert torch.allclose(found["embed"], whole["embed"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1 << 28, 403 * 12 - 1], ids=["whole", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iso_cts_normalises_no_rounding_of_experts_in_the_common_space(size, dtype, tall_from):
    tall_from(size)
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (403, 12))
    for rank in (1, 2):  # of the sum rank directions: sigma is their mean over all twelve, and nothing else is left
        change = (left[:, :rank] @ right[:, :rank].mT).to(dtype)
        zeros = torch.zeros(403, 12, dtype=dtype)
        found = merge_by(IsoCts(coef=1.0), {"w": zeros}, {"a": {"w": change}, "b": {"w": change.clone()}})["w"]
        values = torch.linalg.svdvals(found.double())
        mean = torch.linalg.svdvals(2 * change.double())[:rank].sum() / 12
        assert torch.allclose(values[:rank], mean.expand(rank), rtol=1e-5)
        assert values[rank] < 1e-5 * mean  # it was the mean itself, in directions that rounding chose


def test_what_counts_as_zero_does_not_grow_with_the_rows():
    eps = torch.finfo(torch.float32).eps
    for shape, side in {(8, 8): 8, (3, 100): 100, (4096, 64): 4096, (5120, 5120): 5120}.items():  # as it always was
        assert tall.negligible(shape, torch.float32) == eps * side
    for shape, side in {(262144, 4096): 4096, (896, 151936): 4096, (11008, 5120): 5120}.items():
        assert tall.negligible(shape, torch.float32) == eps * side
    exact, values = steep(1e3, rows=60000, columns=16)  # the last is 0.1 %, eps · 60,000 would be 0.7 %
    matrix = exact.float()
    found = tall.right(tall.triangle(matrix.split(1000)), len(matrix), 16)
    assert torch.allclose(found.values.double(), values, atol=1e-6)
    assert torch.allclose(svd(matrix)[1].double(), values, atol=1e-6)
    low = matrix[:, :4] @ torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    assert int((tall.right(tall.triangle(low.split(1000)), len(low), 16).values > 0).sum()) == 4  # and rounding is none
    assert int((svd(low)[1] > 0).sum()) == 4


def test_the_memory_of_a_large_embedding_is_a_few_squares_of_its_columns():
    large, plain = (262144, 4096), (32000, 4096)
    leaves = {"embed": torch.empty(large, device="meta"), "head": torch.empty(plain, device="meta")}
    for config, each in ((TsvMerge(coef=1.0), 12), (IsoC(coef=1.0), 12), (IsoCts(coef=1.0), 24)):
        rule = config.rule(InMemory(leaves, dict.fromkeys("abcd", leaves)))
        assert [rule.at_once(leaves, path) for path in leaves] == [4096 * 4096, 32000 * 4096]
        assert config.streams(large, 4)
        assert config.streams((128256, 2048), 4)  # the embedding of Llama-3.2-1B
        assert not config.streams(plain, 4)  # merged whole, as it always was
        assert not config.streams(large[::-1], 4)
        assert config.memory({"embed": leaves["embed"]}, 4) == (each * 4 + 96) * 4096**2
        assert config.memory(leaves, 4) == (4 * 4 + 64) * 32000 * 4096
    assert not TsvMerge(coef=1.0, share=1.0).streams(large, 4)  # four times as many directions as columns
