"""TIES without election: the sum of all that is kept, or its mean, which is Localize-and-Stitch without data."""

import math

import pytest
import torch
from safetensors.torch import save_file

from smat_fn import merge
from smat_fn.config import Ties
from smat_fn.folders import merge_folders
from smat_fn.folders.streaming.survey import Survey

ZEROS = {"w": torch.zeros(4)}


def of(*rows, **options):
    """The merged vector of experts of four coordinates, with aggregate mean."""
    options = {"aggregate": "mean", "elect": False, **options}
    experts = {name: {"w": torch.tensor(row)} for name, row in zip("abc", rows, strict=False)}
    return merge.ties(ZEROS, experts, coef=1.0, **options)["w"].tolist()


def test_by_hand():
    one, two = [4.0, 1.0, -3.0, 0.0], [2.0, -5.0, 3.0, 0.0]
    assert of(one, two, keep=0.5) == [3.0, -2.0, 0.0, 0.0]  # from 1 on, and from 2 on
    assert of(one, two, keep=0.25) == [4.0, -5.0, 0.0, 0.0]  # from 3 on
    assert of(one, two, keep=0.25, aggregate="sum") == [4.0, -5.0, 0.0, 0.0]
    assert of(one, two, keep=0.5, aggregate="sum") == [6.0, -4.0, 0.0, 0.0]
    assert of(one, two, keep=0.5, scope="tensor") == [4.0, -5.0, 0.0, 0.0]  # two each
    assert of(one, two, keep=0.5, elect=True) == [3.0, -5.0, 0.0, 0.0]


def test_an_expert_counts_only_where_it_changes_something():
    assert of([4.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], keep=0.5) == [3.0, 2.0, 2.0, 2.0]


def test_a_mean_is_over_the_weights_of_what_is_kept():
    rows = [4.0, 1.0, -3.0, 0.0], [2.0, -5.0, 3.0, 0.0]
    assert of(*rows, keep=0.5, weights={"b": 3.0}) == [2.5, -3.5, 1.5, 0.0]
    assert of(*rows, keep=0.25, weights={"b": 3.0}) == [4.0, -5.0, 1.5, 0.0]
    assert of(*rows, keep=0.5, weights={"b": -1.0}) == [2.0, 6.0, -6.0, 0.0]  # their weights sum to 0: not divided
    assert of(*rows, keep=0.5, weights={"b": 0.0}) == [4.0, 1.0, -3.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("keep", [0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_it_is_the_formula_of_localize_and_stitch(dtype, keep, count):
    generator = torch.Generator().manual_seed(count)
    shapes = {"a": (17, 9), "b": (31,), "c": (2, 3, 5)}
    base, *experts = (
        {path: torch.randn(shape, generator=generator).to(dtype) for path, shape in shapes.items()}
        for _ in range(count + 1)
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = [torch.cat([(own[p].to(wide) - base[p].to(wide)).flatten() for p in shapes]) for own in experts]
    size = len(rows[0])
    masks = []
    for row in rows:  # the top share, all that are as large as the coordinate below it, and nothing that is 0
        least = row.abs().sort().values[max(size - math.floor(size * keep), 1) - 1]
        masks.append(((row.abs() >= least) & (row != 0)).to(wide))
    shared = sum(masks)
    total = sum(mask / shared.clamp(min=1) * row for mask, row in zip(masks, rows, strict=True))
    found = merge.ties_vector(base, dict(enumerate(experts)), keep=keep, elect=False, aggregate="mean")
    torch.testing.assert_close(torch.cat([found[p].flatten() for p in shapes]), total)
    assert count < 3 or keep > 0.5 or ((shared > 0).any() and (shared == 0).any())
    for gamma in (0.5, 1.0):
        merged = merge.ties(base, dict(enumerate(experts)), coef=gamma, keep=keep, elect=False, aggregate="mean")
        assert all(torch.equal(merged[p], (base[p].to(wide) + gamma * found[p]).to(dtype)) for p in shapes)


@pytest.mark.parametrize("options", [{"elect": False}, {"weights": {"x": 0.5}}, {"scope": "tensor"}, {}], ids=str)
def test_folders_are_read_for_a_majority_only_where_it_counts(options, tmp_path, monkeypatch):
    for seed, name in enumerate(("base", "x", "y")):
        leaves = {"w": torch.randn(40, 9, generator=torch.Generator().manual_seed(seed))}
        save_file(leaves, tmp_path / f"{name}.safetensors")
    called = []
    monkeypatch.setattr(Survey, "_net_sign", lambda survey: called.append(survey) or 1)
    config = Ties(coef=1.0, keep=0.3, **{"aggregate": "mean", "scope": "global", **options})
    paths = tmp_path / "base.safetensors", {name: tmp_path / f"{name}.safetensors" for name in "xy"}
    merge_folders(config, *paths, tmp_path / "out")
    assert len(called) == (not options)


def test_with_everything_kept_it_is_the_mean_and_the_sum():
    generator = torch.Generator().manual_seed(0)
    base, *experts = ({"w": torch.randn(40, generator=generator)} for _ in range(4))
    for aggregate, divisor in ("mean", 3), ("sum", 1):
        found = merge.ties_vector(base, experts, keep=1.0, elect=False, aggregate=aggregate)["w"]
        torch.testing.assert_close(found, merge.task_arithmetic_vector(base, experts)["w"] / divisor)


def test_a_flag_is_true_or_false():
    with pytest.raises(ValueError, match="elect is 'False', must be"):
        of([1.0] * 4, keep=0.5, elect="False")
