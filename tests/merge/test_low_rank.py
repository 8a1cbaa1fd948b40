"""The nearest matrix of low rank, and the rank that holds a share of the squared norm."""

import numpy as np
import pytest
import torch

from smat_fn.merge.around.low_rank import low_rank, remainder, square


def integers(*shape, seed):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
def test_a_matrix_of_known_rank_has_that_rank(rank, shape):
    matrix = integers(shape[0], rank, seed=rank) @ integers(rank, shape[1], seed=rank + 1)
    assert np.linalg.matrix_rank(matrix.numpy()) == rank
    left, right = low_rank(matrix, energy=1 - 1e-9)
    assert (left.shape, right.shape) == ((shape[0], rank), (rank, shape[1]))
    torch.testing.assert_close(left @ right, matrix, rtol=0, atol=1e-4)
    assert low_rank(matrix)[0].shape[1] == min(shape)
    assert low_rank(matrix, rank=1, energy=1 - 1e-9)[0].shape[1] == 1


def test_a_share_that_is_reached_exactly_takes_no_further_value():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 0.0]))  # shares 4/5, 5/5, 5/5
    ranks = {energy: low_rank(matrix, energy=energy)[0].shape[1] for energy in (1e-9, 0.8, 0.8 + 1e-12, 1 - 1e-12)}
    assert list(ranks.values()) == [1, 1, 2, 2]


@pytest.mark.parametrize("energy", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("shape", [(20, 8), (8, 20)])
def test_energy_is_a_share_of_the_squared_singular_values(energy, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    u, s, v = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    shares = np.cumsum(s**2) / np.sum(s**2)
    rank = int(np.argmax(shares >= energy)) + 1
    left, right = low_rank(matrix, energy=energy)
    assert left.shape[1] == rank
    nearest = torch.from_numpy((u[:, :rank] * s[:rank]) @ v[:rank]).float()
    torch.testing.assert_close(left @ right, nearest, rtol=0, atol=1e-5)
    assert remainder(matrix, left, right) / square(matrix) == pytest.approx(1 - shares[rank - 1], abs=1e-6)
    assert low_rank(matrix, rank=rank + 1, energy=energy)[0].shape[1] == rank
    assert low_rank(matrix, rank=max(1, rank - 1), energy=energy)[0].shape[1] == max(1, rank - 1)
