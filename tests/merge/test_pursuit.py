"""Orthogonal matching pursuit and nearest rows: closed forms, and the steps written out."""

import pytest
import torch

from smat_fn.merge.around import pursuit
from smat_fn.merge.around.pursuit import Sparse, combined, matching_pursuit, nearest


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written_out(points, target, k):
    """The steps for one target, by least squares in float64: indices and coefficients."""
    points, target = points.double(), target.double()
    taken, rest, coefs = [], target, None
    for _ in range(k):
        scores = (points @ rest).abs()
        scores[taken] = -1
        taken.append(int(scores.argmax()))
        coefs = torch.linalg.lstsq(points[taken].T, target[:, None], driver="gelsd").solution.squeeze(1)
        rest = target - coefs @ points[taken]
    return taken, coefs


def dense(found, n):
    return torch.zeros(len(found.coefs), n, dtype=torch.float64).scatter_add(1, found.indices, found.coefs)


def test_a_sum_of_k_rows_is_found_with_its_coefficients():
    points = torch.linalg.qr(drawn(0, 32, 32)).Q[:24] + 0.01 * drawn(1, 24, 32)
    wanted = torch.zeros(3, 24, dtype=torch.float64)
    for row, places in enumerate(([3, 7, 11], [0, 1, 23], [5, 9, 14])):
        wanted[row, places] = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)
    targets = (wanted @ points.double()).float()
    found = matching_pursuit(points, targets, 3)
    assert found.indices.sort(1).values.tolist() == [[3, 7, 11], [0, 1, 23], [5, 9, 14]]
    torch.testing.assert_close(dense(found, 24), wanted, rtol=0, atol=1e-6)
    # more steps than rows in the sum change nothing: what is left is rounding
    torch.testing.assert_close(dense(matching_pursuit(points, targets, 20), 24), wanted, rtol=0, atol=1e-6)


def test_whole_numbers_are_found_exactly():
    points = 4 * torch.eye(6)[:5] + torch.tensor([0, 0, 0, 0, 0, 1.0])
    targets = torch.stack([3 * points[1] - 2 * points[4], points[2]])
    found = matching_pursuit(points, targets, 2)
    wanted = torch.tensor([[0, 3, 0, 0, -2], [0, 0, 1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(dense(found, 5), wanted, rtol=0, atol=1e-14)
    rows = drawn(2, 5, 9).bfloat16()
    exact = (3 * rows[1].double() - 2 * rows[4].double()).bfloat16()
    assert torch.equal(combined(rows, found), torch.stack([exact, rows[2]]))


@pytest.mark.parametrize("memory", [1 << 28, 1])
def test_steps_are_those_written_out_in_blocks_of_any_size(memory, monkeypatch):
    monkeypatch.setattr(pursuit, "MEMORY", memory)
    points, targets = drawn(3, 40, 16), drawn(4, 7, 16)
    found = matching_pursuit(points, targets, 9)
    for row, target in enumerate(targets):
        taken, coefs = written_out(points, target, 9)
        assert found.indices[row].tolist() == taken
        torch.testing.assert_close(found.coefs[row], coefs, rtol=1e-6, atol=1e-6)


def test_a_dependent_row_and_a_target_of_zeros_have_coefficients_of_zero():
    points = torch.tensor([[2.0, 0, 0], [2, 0, 0], [0, 1, 0], [4, 0, 0]])
    found = matching_pursuit(points, torch.tensor([[8.0, 1, 1], [0, 0, 0]]), 4)
    assert found.coefs.isfinite().all()
    torch.testing.assert_close(dense(found, 4) @ points.double(), torch.tensor([[8.0, 1, 0], [0, 0, 0]]).double())
    assert dense(found, 4).tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]


def test_the_nearest_rows_are_weighted_by_their_cosines():
    points = torch.tensor([[3.0, 0], [0, 5], [1, 1], [-1, 0]])
    found = nearest(points, torch.tensor([[2.0, 0], [0, 0]]), 3)
    root = 0.5**0.5
    torch.testing.assert_close(
        dense(found, 4),
        torch.tensor([[1 / (1 + root), 0, root / (1 + root), 0], [0, 0, 0, 0]]).double(),
        rtol=1e-6,
        atol=1e-7,
    )


def test_sums_of_rows_are_rounded_once():
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    found = combined(rows, Sparse(torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.float64)))
    assert found.item() == 1 + 2**-7  # half of the last place of 1 each: rounded after each sum it stays 1


def test_what_coefficients_lack_to_one_is_taken_of_the_centre():
    rows, centre = drawn(5, 3, 4), drawn(6, 1, 4).double()
    found = Sparse(torch.tensor([[0, 2]]), torch.tensor([[0.5, 2.0]], dtype=torch.float64))
    wanted = centre + 0.5 * (rows[0].double() - centre) + 2 * (rows[2].double() - centre)
    torch.testing.assert_close(combined(rows, found, centre), wanted.float())
