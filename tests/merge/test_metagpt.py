"""MetaGPT: shares of the squared norms as coefficients, and what they minimize."""

import math

import pytest
import torch

from smat_fn import merge
from smat_fn.merge.metagpt import shares_of


def family(count):
    """A base of three leaves, and task vectors whose norms differ by leaf and by expert."""
    draw = torch.Generator().manual_seed(count)
    shapes = {"a": (7, 5), "b": (3,), "c": ()}
    base = {path: torch.randn(shape, generator=draw, dtype=torch.float64) for path, shape in shapes.items()}
    experts = {
        f"e{i}": {
            path: leaf + (1 + i) * torch.randn(leaf.shape, generator=draw, dtype=torch.float64)
            for path, leaf in base.items()
        }
        for i in range(count)
    }
    return base, experts


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_coefficients_are_shares_of_the_squared_norms_of_whole_models(count):
    base, experts = family(count)
    squares = merge.norms(base, experts)
    shares = {name: size**2 / sum(size**2 for size in squares.values()) for name, size in squares.items()}
    merged = merge.metagpt(base, experts, coef=0.8)
    for path, leaf in base.items():
        expected = leaf + 0.8 * sum(shares[name] * (own[path] - leaf) for name, own in experts.items())
        torch.testing.assert_close(merged[path], expected, rtol=1e-14, atol=1e-14)


def test_metagpt_by_hand():
    """Squared norms 9 + 16 and 0 + 75: shares 1/4 and 3/4, in every leaf."""
    base = {"v": torch.zeros(2), "w": torch.zeros(3)}
    one = {"v": torch.tensor([3.0, 0.0]), "w": torch.tensor([0.0, 4.0, 0.0])}
    two = {"v": torch.zeros(2), "w": torch.tensor([5.0, 5.0, 5.0])}
    merged = merge.metagpt(base, {"one": one, "two": two})
    assert merged["v"].tolist() == [0.75, 0.0]
    assert merged["w"].tolist() == [3.75, 4.75, 3.75]


def test_task_vectors_of_one_norm_are_averaged_and_zero_ones_are_nothing():
    base = {"w": torch.zeros(2)}
    equal = [{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, -2.0])}]
    assert merge.metagpt(base, equal)["w"].tolist() == [1.0, -1.0]
    zero = [{"w": torch.zeros(2)} for _ in range(2)]
    assert merge.metagpt(base, zero)["w"].tolist() == [0.0, 0.0]
    assert merge.metagpt(base, [zero[0], equal[0]])["w"].tolist() == [2.0, 0.0]
    assert shares_of([0.0, 0.0, 0.0, 0.0]) == [0.25] * 4


def test_the_coefficients_minimize_the_bound_of_the_paper():
    """Orthogonal task vectors in a linear model whose losses have equal curvature δ: the mean over the tasks t of
    ‖Σ_k λ_k Δ_k − Δ_t‖² ‖Δ_t‖², which separates by expert, is least at the shares of the squared norms."""
    squares = [1.0, 4.0, 2.5]

    def bound(shares):
        return sum(
            square
            * sum((share - (i == t)) ** 2 * own for i, (share, own) in enumerate(zip(shares, squares, strict=True)))
            for t, square in enumerate(squares)
        )

    best = shares_of(squares)
    assert math.isclose(sum(best), 1.0)
    for i in range(3):
        for step in (-1e-3, 1e-3):
            assert bound([share + step * (i == k) for k, share in enumerate(best)]) > bound(best)


def test_a_coefficient_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="coef is inf, must be finite"):
        merge.metagpt({"w": torch.zeros(1)}, [{"w": torch.ones(1)}], coef=math.inf)
