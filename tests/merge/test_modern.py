"""The mergers of singular vectors, angles and masks: their formulas in NumPy, closed forms, errors."""

import re

import numpy as np
import pytest
import torch

from smat_fn import merge

COEF = 0.3


def svd(matrix):
    return np.linalg.svd(matrix, full_matrices=False)


def polar(matrix):
    """The nearest orthonormal matrix, without an SVD of it: M (MᵀM)^(-1/2), or its transpose."""
    if matrix.shape[0] < matrix.shape[1]:
        return polar(matrix.T).T
    values, vectors = np.linalg.eigh(matrix.T @ matrix)
    return matrix @ vectors @ np.diag(values**-0.5) @ vectors.T


# each returns the merged vector of a leaf from its task vectors, float64


def plain_iso_c(*changes):
    if changes[0].ndim != 2:
        return sum(changes) / len(changes)
    total = sum(changes)
    return np.linalg.norm(total, "nuc") / min(total.shape) * polar(total)


def plain_iso_cts(*changes, common=0.5):
    if changes[0].ndim != 2:
        return sum(changes) / len(changes)
    least, count = min(changes[0].shape), len(changes)
    own = round((least - int(least * common)) / count)
    first = least - own * count
    u, s, vt = svd(sum(changes))
    lefts, values, rights = [u[:, :first]], [s[:first]], [vt[:first]]
    for change in changes:
        rest = change - u[:, :first] @ u[:, :first].T @ change
        u_i, s_i, vt_i = svd(rest)
        lefts, values, rights = [*lefts, u_i[:, :own]], [*values, s_i[:own]], [*rights, vt_i[:own]]
    return np.concatenate(values).mean() * polar(np.hstack(lefts)) @ polar(np.vstack(rights))


def plain_wudi(*changes, ridge=1e-8, norms=True):
    if changes[0].ndim != 2:
        return sum(changes) / len(changes)
    left, right = np.zeros_like(changes[0]), ridge * np.eye(changes[0].shape[1])
    for change in changes:
        gram = change.T @ change / ((change**2).sum() if norms else 1)
        left, right = left + change @ gram, right + gram
    return left @ (np.linalg.inv(right) if ridge else np.linalg.pinv(right, hermitian=True))


# name of a merger -> runs: (merger, plain formula, number of experts)
PLAIN = {
    "iso_c": {"": (lambda b, e: merge.iso_c(b, e, coef=COEF), plain_iso_c, 3)},
    "iso_cts": {"": (lambda b, e: merge.iso_cts(b, e, coef=COEF, common=0.5), plain_iso_cts, 3)},
    "wudi": {
        "": (lambda b, e: merge.wudi(b, e, coef=COEF, ridge=1e-3), lambda *d: plain_wudi(*d, ridge=1e-3), 3),
        " of one": (lambda b, e: merge.wudi(b, e, coef=COEF, ridge=1e-3), lambda *d: plain_wudi(*d, ridge=1e-3), 1),
        " act_mat": (
            lambda b, e: merge.wudi(b, e, coef=COEF, ridge=0.0, norms=False),
            lambda *d: plain_wudi(*d, ridge=0.0, norms=False),
            2,
        ),
    },
}
RUNS = {name + run: case for name, runs in PLAIN.items() for run, case in runs.items()}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-10), (torch.float32, 3e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", RUNS)
def test_close_to_the_plain_formula(name, dtype, error, family):
    merger, plain, count = RUNS[name]
    base, experts = family(dtype, count=count, scale=2.0)
    merged = merger(base, experts)
    for path in ("vector", "matrix", "conv", "column"):
        start, *leaves = [leaf[path].double().numpy() for leaf in (base, *experts.values())]
        expected = start + COEF * plain(*(leaf - start for leaf in leaves))
        np.testing.assert_allclose(merged[path].double().numpy(), expected, rtol=error, atol=4 * error, err_msg=path)


@pytest.mark.parametrize("name", RUNS)
def test_trees_without_floating_coordinates_and_experts_that_do_not_fit(name):
    merger, _, count = RUNS[name]
    base = {"n": torch.tensor([1, 2]), "empty": torch.zeros(0, 3)}
    merged = merger(base, [base] * count)
    assert merged["n"].tolist() == [1, 2]
    assert merged["empty"].shape == (0, 3)
    base = {"w": torch.zeros(2), "v": torch.zeros(3)}
    with raises("experts is empty"):
        merger(base, {})
    with raises("lacks leaf 'v' of", "leaf 'w' has shape (4,) in expert 'x'"):
        merger(base, {"x": {"w": torch.zeros(4)}, **{str(i): base for i in range(count - 1)}})


def raises(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def matrices(count, shape=(18, 40), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(merger, *deltas, **options):
    """The merged vector of a matrix."""
    return merger({"w": torch.zeros_like(deltas[0])}, [{"w": delta} for delta in deltas], coef=1.0, **options)["w"]


@pytest.mark.parametrize("shape", [(18, 40), (40, 18), (7, 7), (1, 5)])
def test_iso_c_has_one_singular_value_the_mean(shape):
    deltas = matrices(3, shape)
    values = torch.linalg.svdvals(of(merge.iso_c, *deltas))
    torch.testing.assert_close(values, torch.full_like(values, torch.linalg.svdvals(deltas.sum(0)).mean().item()))


def test_iso_c_leaves_out_directions_without_a_value():
    one = torch.outer(matrices(1)[0, :, 0], matrices(1)[0, 0])
    merged = of(merge.iso_c, one)
    torch.testing.assert_close(merged, one / 18)  # one value of 18, the others 0
    assert torch.equal(of(merge.iso_c, one, -one), torch.zeros_like(one))


def test_iso_cts_without_own_directions_is_iso_c():
    deltas = matrices(3)
    torch.testing.assert_close(of(merge.iso_cts, *deltas, common=1.0), of(merge.iso_c, *deltas))
    # 2 directions for 3 experts round to one each, which are 3 of the 2 that there are: none is taken
    small = matrices(3, (2, 5))
    torch.testing.assert_close(of(merge.iso_cts, *small, common=0.0), of(merge.iso_c, *small))


def test_iso_cts_keeps_an_expert_that_the_sum_hides():
    loud, quiet = torch.zeros(6, 6), torch.zeros(6, 6)
    loud[:5, :5], quiet[5, 5] = 10 * torch.eye(5), 1.0
    merged = of(merge.iso_cts, loud, quiet, common=0.7)  # four in common, one of each
    assert merged[5, 5] == pytest.approx((5 * 10 + 1) / 6)


def test_wudi_of_one_or_of_equal_experts_is_the_expert_and_of_strangers_the_sum():
    one, two = matrices(2, (7, 5))
    torch.testing.assert_close(of(merge.wudi, one), one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of(merge.wudi, two, two, two), two, rtol=1e-5, atol=1e-5)
    left, right = one.clone(), two.clone()
    left[:, 2:], right[:, :2] = 0, 0  # they respond to other inputs
    for options in ({}, {"ridge": 0.0, "norms": False}):
        torch.testing.assert_close(of(merge.wudi, left, right, **options), left + right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(of(merge.wudi, one, torch.zeros_like(one)), one, rtol=1e-5, atol=1e-5)


def test_wudi_minimises_the_interference_of_its_source():
    deltas = list(matrices(3, (7, 5)))

    def interference(vector):
        return sum((((vector - d) @ d.mT).square().sum() / d.square().sum()) for d in deltas)

    best = of(merge.wudi, *deltas, ridge=0.0).requires_grad_()
    interference(best).backward()
    assert best.grad.abs().max() < 1e-12
    assert interference(best) < interference(sum(deltas)) / 2


def test_wudi_weighs_experts_by_their_norms_unless_told_otherwise():
    one, two = matrices(2, (7, 5))
    near, far = (of(merge.wudi, one, 100 * two, norms=norms) for norms in (True, False))
    assert (near - 100 * two).norm() > 10 * (far - 100 * two).norm()


@pytest.mark.parametrize("merger", [merge.tsv_merge, merge.iso_c, merge.iso_cts, merge.wudi])
def test_other_leaves_and_skipped_matrices(merger):
    leaves = {"a.w": (3, 4), "embed.w": (4, 3), "b": (3,), "conv": (2, 2, 2)}
    base = {path: torch.zeros(shape) for path, shape in leaves.items()}
    experts = [{path: torch.randn(shape) for path, shape in leaves.items()} for _ in range(2)]
    means = {path: (experts[0][path] + experts[1][path]) / 2 for path in leaves}
    for options, others in (({}, means), ({"others": "zero"}, base)):
        merged = merger(base, experts, coef=1.0, skip=("embed*",), **options)
        assert all(torch.equal(merged[path], others[path]) for path in leaves if path != "a.w")
        plain = merger(base, experts, coef=1.0, **options)
        assert torch.equal(plain["a.w"], merged["a.w"])
        assert not torch.equal(plain["embed.w"], others["embed.w"])
    with raises("others is 'sum', must be 'mean' or 'zero'", "skip is the text 'embed*': pass a list of globs"):
        merger(base, experts, coef=1.0, others="sum", skip="embed*")


@pytest.mark.parametrize("merger", [merge.iso_c, merge.iso_cts, merge.wudi])
def test_a_matrix_that_is_not_finite_is_named(merger):
    bad = {"v": torch.ones(2, 2), "w": torch.full((2, 2), float("nan"))}
    with raises("leaf 'w' has no singular values, are all of its values finite?"):
        merger({path: torch.zeros(2, 2) for path in bad}, [bad], coef=1.0)


def test_tsv_of_all_singular_values():
    one, two = matrices(2, (6, 9))
    parts = zip(*map(svd, (one.numpy(), two.numpy())), strict=True)
    u, s, vt = (np.concatenate(part, axis) for part, axis in zip(parts, (1, 0, 0), strict=True))
    torch.testing.assert_close(of(merge.tsv_merge, one, two, share=1.0), torch.from_numpy(polar(u) * s @ polar(vt)))
    torch.testing.assert_close(of(merge.tsv_merge, one, share=1.0), one)
    for share in (0.5, 0.99):
        assert torch.linalg.matrix_rank(of(merge.tsv_merge, one, share=share)) == int(6 * share)
    assert torch.equal(of(merge.tsv_merge, one, two, share=0.1), (one + two) / 2)


def test_options_out_of_range():
    one = {"w": torch.ones(2, 2)}
    with raises("coef is inf", "share is -1, must be in [0, 1]"):
        merge.tsv_merge(one, [one], coef=float("inf"), share=-1)
    with raises("coef is nan", "common is 1.5, must be in [0, 1]"):
        merge.iso_cts(one, [one], coef=float("nan"), common=1.5)
    with raises("ridge is -1.0, must be a finite number of at least 0"):
        merge.wudi(one, [one], coef=1.0, ridge=-1.0)


def test_every_merger_is_tested_here():
    names = [merger.name for merger in merge.MORE_MERGERS]
    assert list(PLAIN) == names[names.index("tsv_merge") + 1 :]
