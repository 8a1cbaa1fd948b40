"""The mergers of singular vectors, angles and masks: their formulas in NumPy, closed forms, errors."""

import functools
import math
import re
import sys

import numpy as np
import pytest
import torch

from smat_fn import merge, tree
from smat_fn.config import Opcm, Wudi
from smat_fn.merge.parts.arithmetic import BLOCK

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


def plain_opcm(*changes, share=0.5):
    if changes[0].ndim != 2:
        return sum(changes)
    total = changes[0]
    for change in changes[1:]:
        u, s, vt = np.linalg.svd(total)  # with all vectors
        inside, first = u.T @ change @ vt.T, np.argmax(np.cumsum(s) / s.sum() > share)
        inside[:first, :first] = 0
        np.fill_diagonal(inside, 0)
        total = total + u @ inside @ vt
    return total


def plain_dc(*changes, keep=0.3):
    if changes[0].ndim != 2:
        return sum(changes) / len(changes)
    least, count = min(changes[0].shape), min(changes[0].shape) // len(changes)
    if not count:
        return sum(changes) / len(changes)
    parts = [svd(change) for change in changes]
    left = polar(np.hstack([u[:, :count] for u, _, _ in parts]))
    right = polar(np.vstack([vt[:count] for _, _, vt in parts]))
    cores = [left.T @ u[:, :count] @ np.diag(s[:count]) @ vt[:count] @ right.T for u, s, vt in parts]
    kept = [np.sort(np.abs(core).ravel())[::-1][: max(1, int(keep * least**2))][-1] for core in cores]
    cores = np.array([np.where(np.abs(core) >= limit, core, 0) for core, limit in zip(cores, kept, strict=True)])
    agree = np.sign(cores) * np.sign(cores.sum(0)) > 0
    core = np.where(agree, cores, 0).sum(0) / np.maximum(agree.sum(0), 1)
    own = np.arange(len(core)) // count
    return left @ np.where(own[:, None] == own, core, 0) @ right


def plain_wudi(*changes, ridge=1e-8, norms=True):
    if changes[0].ndim != 2:
        return sum(changes) / len(changes)
    left, right = np.zeros_like(changes[0]), ridge * np.eye(changes[0].shape[1])
    for change in changes:
        gram = change.T @ change / ((change**2).sum() if norms else 1)
        left, right = left + change @ gram, right + gram
    return left @ (np.linalg.inv(right) if ridge else np.linalg.pinv(right, hermitian=True))


def plain_nuslerp(one, two, t=0.3):
    cos = np.vdot(one, two) / np.linalg.norm(one) / np.linalg.norm(two)
    if abs(cos) > 1 - 1e-14:
        return (1 - t) * one + t * two
    omega = np.arccos(cos)
    return (np.sin((1 - t) * omega) * one + np.sin(t * omega) * two) / np.sin(omega)


def plain_nuslerp_rows(one, two):
    if one.ndim < 2:
        return plain_nuslerp(one, two)
    rows = [plain_nuslerp(*pair) for pair in zip(*(x.reshape(-1, x.shape[-1]) for x in (one, two)), strict=True)]
    return np.stack(rows).reshape(one.shape)


def plain_karcher(*leaves, weights=(1.0, 1.0, 1.0)):
    weights = np.array(weights) / sum(weights)
    units = np.stack([leaf / np.linalg.norm(leaf) for leaf in leaves])
    mean = np.tensordot(weights, units, 1)
    mean /= np.linalg.norm(mean)
    for _ in range(10):
        angles = [np.arccos(np.vdot(mean, unit)) for unit in units]
        logs = np.stack([a / np.sin(a) * (u - np.cos(a) * mean) for a, u in zip(angles, units, strict=True)])
        step = np.tensordot(weights, logs, 1)
        length = np.linalg.norm(step)
        if length < 1e-5:
            break
        mean = np.cos(length) * mean + np.sin(length) * step / length
    return sum(w * np.linalg.norm(leaf) for w, leaf in zip(weights, leaves, strict=True)) * mean


def plain_multislerp(*changes, weights=(0.5, 2.0, 0.3)):
    weights = np.array(weights) / sum(weights)
    units = np.stack([change / np.linalg.norm(change) for change in changes])
    mean = np.tensordot(weights, units, 1)
    mean /= np.linalg.norm(mean)
    tangents = np.stack([unit - np.vdot(unit, mean) * mean for unit in units])
    tangent = np.tensordot(weights, tangents, 1)
    length = np.linalg.norm(tangent) + 1e-8
    end = np.cos(length) * mean + np.sin(length) / length * tangent
    return end * sum(w * np.linalg.norm(change) for w, change in zip(weights, changes, strict=True))


def plain_sce(*changes, density=0.4):
    every = np.stack(changes)
    variance = every.var(0).reshape(-1)
    kept = np.argsort(-variance, kind="stable")[: int(density * np.count_nonzero(variance))]
    every = every * np.isin(np.arange(variance.size), kept).reshape(every.shape[1:])
    squares = (every**2).reshape(len(every), -1).mean(1)
    sign = np.where(every.sum(0) >= 0, 1, -1)
    weights = (squares / squares.sum()).reshape(-1, *[1] * (every.ndim - 1)) * (np.sign(every) == sign)
    return (every * weights).sum(0) / np.maximum(weights.sum(0), 1e-6)


def softmax(rows):
    values = np.exp(rows - rows.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True) + 1e-8


def plain_arcee(one, two):
    p, q = softmax(two), softmax(one)
    importance = np.abs(two - one) * (p * np.log(p / q)).sum(-1, keepdims=True)
    ordered = np.sort(importance.reshape(-1))
    low, middle, high = (ordered[int(q * (ordered.size - 1))] for q in (0.25, 0.5, 0.75))
    return one + COEF * (two - one) * (importance >= middle + 1.5 * (high - low))


def plain_cart(*leaves):
    mean = sum(leaves) / len(leaves)
    if mean.ndim != 2:
        return mean
    total = np.zeros_like(mean)
    for leaf in leaves:
        _, vectors = np.linalg.eigh((leaf - mean).T @ (leaf - mean))
        leading = vectors[:, -int(np.ceil(0.3 * min(mean.shape))) :]
        total += (leaf - mean) @ leading @ leading.T
    return mean + COEF * total


def plain_consensus(*changes, ratio=0.4, least=2):
    total = sum(changes)
    return total * (sum(np.abs(change) > ratio * np.abs(total - change) for change in changes) >= least)


def plain_tall(*changes, ratio=0.4):
    total = sum(changes)
    return total * (np.abs(changes[0]) > ratio * np.abs(total - changes[0]))


def plain_emr(*changes):
    sign = np.where(sum(changes) > 0, 1.0, -1.0)
    return sign * np.maximum(np.max([change * sign for change in changes], 0), 0) * (changes[0] * sign > 0)


def plain_svc(merged, *changes, alpha=0.2):
    if merged.ndim != 2:
        return merged
    u, s, vt = svd(merged)
    for r in range(s.size):
        ratios = [(u[:, r] @ merged) @ (u[:, r] @ d) / max(((u[:, r] @ d) ** 2).sum(), 1e-12) for d in changes]
        s[r] /= np.mean([max(ratio, alpha) for ratio in ratios])
    return u @ np.diag(s) @ vt


def plain_nearswap(change, limit=0.7):
    size = np.abs(change)
    return change * np.minimum(limit / np.maximum(size, 1e-300), 1)


def plain_ram(*changes, threshold=1.0, boost=0.0, cap=0.5):
    kept = [np.where(np.abs(change) > threshold, change, 0) for change in changes]
    count = sum((change != 0).astype(int) for change in kept)
    merged = sum(kept) / np.maximum(count, 1)
    for change in kept:
        alone, shared = (change != 0) & (count == 1), (change != 0) & (count > 1)
        merged[alone] *= 1 + boost * min(shared.sum() / max(alone.sum(), 1), cap)
    return merged


def scaled_back(base, experts, task):
    """The merger without its scale, the only number that sees several leaves."""
    vector = merge.emr_vector(base, experts, task=task)
    sizes, scale = [0.0, 0.0], 1.0
    for path, leaf in vector.items():
        start, leaves = base[path].double().numpy(), [expert[path].double().numpy() for expert in experts.values()]
        if leaf.numel():
            changes = [expert - start for expert in leaves]
            sizes[0] += np.abs(changes[0]).mean()
            sizes[1] += np.abs(plain_emr(*changes)).mean()
            scale = sizes[0] / sizes[1]
    return merge.emr(base, experts, task=task, coef=COEF / scale)


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
    "nuslerp": {
        "": (lambda b, e: merge.nuslerp(b, e, coef=COEF, t=0.3), plain_nuslerp, 2),
        " rows": (lambda b, e: merge.nuslerp(b, e, coef=COEF, t=0.3, along="last"), plain_nuslerp_rows, 2),
        " columns": (
            lambda b, e: merge.nuslerp(b, e, coef=COEF, t=0.3, along="first"),
            lambda *d: plain_nuslerp_rows(*(x.swapaxes(0, -1) for x in d)).swapaxes(0, -1),
            2,
        ),
    },
    "karcher": {
        "": (lambda b, e: merge.karcher(e), plain_karcher, 3),
        " weighted": (
            lambda b, e: merge.karcher(e, weights=(0.5, 2.0, 0.3)),
            functools.partial(plain_karcher, weights=(0.5, 2.0, 0.3)),
            3,
        ),
        " of no steps": (lambda b, e: merge.karcher(e, max_iter=0, weights=(0.5, 2.0, 0.3)), plain_multislerp, 3),
    },
    "sce": {
        "": (lambda b, e: merge.sce(b, e, coef=COEF), functools.partial(plain_sce, density=1.0), 3),
        " selected": (lambda b, e: merge.sce(b, e, coef=COEF, density=0.4), plain_sce, 3),
    },
    "arcee_fusion": {"": (lambda b, e: merge.arcee_fusion(e, coef=COEF), plain_arcee, 2)},
    "multislerp": {"": (lambda b, e: merge.multislerp(b, e, coef=COEF, weights=(0.5, 2.0, 0.3)), plain_multislerp, 3)},
    "cart": {"": (lambda b, e: merge.cart(e, coef=COEF, share=0.3), plain_cart, 3)},
    "consensus": {
        "": (lambda b, e: merge.consensus(b, e, coef=COEF, ratio=0.4), plain_consensus, 4),
        " of what one needs": (
            lambda b, e: merge.consensus(b, e, coef=COEF, ratio=1.5, least=1),
            functools.partial(plain_consensus, ratio=1.5, least=1),
            2,
        ),
    },
    "tall_mask": {
        "": (lambda b, e: merge.tall_mask(b, e, coef=COEF, ratio=0.4, task=next(iter(e), "")), plain_tall, 3),
    },
    "svc": {
        "": (lambda b, e: merge.svc(b, e, coef=COEF, alpha=0.2), plain_svc, 3),
        " of the paper": (lambda b, e: merge.svc(b, e, coef=COEF), functools.partial(plain_svc, alpha=1.0), 4),
    },
    "emr": {"": (lambda b, e: scaled_back(b, e, next(iter(e), "")), plain_emr, 3)},
    "nearswap": {"": (lambda b, e: merge.nearswap(b, e, coef=COEF, t=0.7), plain_nearswap, 1)},
    "ram": {
        "": (lambda b, e: merge.ram(b, e, coef=COEF, threshold=1.0), plain_ram, 3),
        " boosted": (
            lambda b, e: merge.ram(b, e, coef=COEF, threshold=1.0, boost=0.3, cap=2.5, scope="tensor"),
            functools.partial(plain_ram, boost=0.3, cap=2.5),
            4,
        ),
    },
    "opcm": {
        "": (lambda b, e: merge.opcm(b, e, coef=COEF, norms=False), plain_opcm, 3),
        " share": (
            lambda b, e: merge.opcm(b, e, coef=COEF, share=0.2, norms=False),
            functools.partial(plain_opcm, share=0.2),
            4,
        ),
    },
    "dc_merge": {"": (lambda b, e: merge.dc_merge(b, e, coef=COEF, keep=0.3), plain_dc, 3)},
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
        changes = [leaf - start for leaf in leaves]
        expected = plain(*leaves) if name.split()[0] in merge.BASELESS else start + COEF * plain(*changes)
        np.testing.assert_allclose(merged[path].double().numpy(), expected, rtol=error, atol=4 * error, err_msg=path)


@pytest.mark.parametrize("name", RUNS)
def test_trees_without_floating_coordinates_and_experts_that_do_not_fit(name):
    merger, _, count = RUNS[name]
    base = {"n": torch.tensor([1, 2]), "empty": torch.zeros(0, 3)}
    merged = merger(base, {str(i): base for i in range(count)})
    assert merged["n"].tolist() == [1, 2]
    assert merged["empty"].shape == (0, 3)
    base = {"w": torch.zeros(2), "v": torch.zeros(3)}
    with raises("experts is empty"):
        merger(base, {})
    with raises("lacks parameter 'v' of", "parameter 'w' has shape (4,) in expert 'x'"):
        merger(base, {**{str(i): base for i in range(count - 1)}, "x": {"w": torch.zeros(4)}})


def raises(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def matrices(count, shape=(18, 40), seed=0):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(merger, *deltas, **options):
    """The merged vector of a matrix."""
    experts = [{"w": delta.clone()} for delta in deltas]  # one tensor twice would be an error
    return merger({"w": torch.zeros_like(deltas[0])}, experts, coef=1.0, **options)["w"]


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


@pytest.mark.parametrize("options", [{"ridge": 1e-3}, {"ridge": 0.0, "norms": False}], ids=["wudi", "act_mat"])
def test_wudi_of_an_embedding_forms_no_square_of_its_rows(options, monkeypatch):
    changes = matrices(3, (40, 5))
    whole = of(merge.wudi, *changes, **options)
    monkeypatch.setattr(sys.modules["smat_fn.merge.wudi"], "LARGE", 0)  # the function has the name
    monkeypatch.setattr(
        torch, "cat", lambda parts, dim=0, cat=torch.cat: pytest.fail("a square") if dim else cat(parts)
    )
    found = of(merge.wudi, *changes, **options)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-7)
    monkeypatch.undo()
    embedding = {"w": torch.empty(49152, 576, device="meta")}
    assert Wudi(coef=1.0).memory(embedding, 2) < 100 * 49152 * 576
    assert Wudi(coef=1.0).memory({"w": torch.empty(576, 49152, device="meta")}, 2) < 130 * 49152 * 576


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("merger", [merge.iso_c, merge.iso_cts, merge.wudi, merge.svc, merge.opcm])
def test_a_matrix_that_is_not_finite_is_named(merger, value):
    bad = {path: torch.randn(8, 8, generator=torch.Generator().manual_seed(1)) for path in "vw"}
    bad["w"][1, 2] = value  # which LAPACK takes for a small matrix, and gives NaN
    with raises("parameter 'w' has no singular values, are all of its values finite?"):
        merger({path: torch.zeros(8, 8) for path in bad}, [bad, {path: torch.eye(8) for path in bad}], coef=1.0)


@pytest.mark.parametrize("skip", [None, [1]])
def test_what_is_no_list_of_globs_is_told(skip):
    leaf = {"w": torch.eye(2)}
    with raises(f"skip is {skip!r}: pass a list of globs"):
        merge.iso_c(leaf, [leaf], coef=1.0, skip=skip)


def test_a_ridge_of_wudi_that_is_lost_in_rounding_is_named_with_the_way_out():
    line = torch.arange(1.0, 5) * torch.arange(1.0, 7)[:, None]  # of rank 1
    with raises("ridge 1e-300 is below the rounding of its system: pass a larger one, or 0 for the pseudo-inverse"):
        of(merge.wudi, line, 2 * line, ridge=1e-300)


def test_tsv_of_all_singular_values():
    one, two = matrices(2, (6, 9))
    parts = zip(*map(svd, (one.numpy(), two.numpy())), strict=True)
    u, s, vt = (np.concatenate(part, axis) for part, axis in zip(parts, (1, 0, 0), strict=True))
    torch.testing.assert_close(of(merge.tsv_merge, one, two, share=1.0), torch.from_numpy(polar(u) * s @ polar(vt)))
    torch.testing.assert_close(of(merge.tsv_merge, one, share=1.0), one)
    for share in (0.5, 0.99):
        assert torch.linalg.matrix_rank(of(merge.tsv_merge, one, share=share)) == int(6 * share)
    assert torch.equal(of(merge.tsv_merge, one, two, share=0.1), (one + two) / 2)


ONE = {
    "ties": lambda b, e: merge.ties(b, e, coef=1.0, keep=1.0),
    "tsv_merge": lambda b, e: merge.tsv_merge(b, e, coef=1.0, share=1.0),
    "wudi": lambda b, e: merge.wudi(b, e, coef=1.0),
    "act_mat": lambda b, e: merge.wudi(b, e, coef=1.0, norms=False, ridge=0.0),
    "karcher": lambda b, e: merge.karcher(e),
    "multislerp": lambda b, e: merge.multislerp(b, e),
    "sce": lambda b, e: merge.sce(b, e),
    "cart": lambda b, e: merge.cart(e, coef=1.0),
    "consensus": lambda b, e: merge.consensus(b, e, coef=1.0, ratio=0.4, least=1),
    "tall_mask": lambda b, e: merge.tall_mask(b, e, ratio=0.4, task=min(e)),
    "emr": lambda b, e: merge.emr(b, e, task=min(e)),
}
MEANS = "wudi", "act_mat", "karcher", "multislerp", "sce", "cart"  # of equal experts they are the expert


@pytest.mark.parametrize("name", ONE)
def test_one_expert_at_one_and_equal_experts_are_the_expert(name, family):
    base, experts = family(torch.float64, count=1)
    expert = experts["sum"]
    for count in (1, 3) if name in MEANS else (1,):
        merged = ONE[name](base, {str(i): tree.clone(expert) for i in range(count)})
        for path, leaf in expert.items():
            torch.testing.assert_close(merged[path], leaf, rtol=1e-6, atol=1e-7, msg=f"{count}: {path}")


def test_nuslerp_of_parallel_opposite_and_zero_vectors_is_linear():
    one = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    for along in ("leaf", "first", "last"):
        for left, right in ((one, 3 * one), (one, -one), (one, 0 * one), (0 * one, 0 * one)):
            merged = of(merge.nuslerp, left, right, t=0.25, along=along)
            if right is not left and not right.any():  # no angle counts as a right one, as in mergekit
                assert torch.equal(merged, left * np.sin(0.75 * np.pi / 2))
            else:
                torch.testing.assert_close(merged, 0.75 * left + 0.25 * right)
    assert of(merge.nuslerp, one, -one, t=0.5).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("factor", [0.9, 0.37, 0.2, 0.1])
def test_rounding_gives_opposite_vectors_no_angle(factor):
    one = torch.linspace(0.01, 0.05, 64).view(8, 8)
    for left, right in ((one, -factor * one), (torch.tensor(0.5), torch.tensor(-0.5 * factor)), (one[:1, :1],) * 2):
        for along in ("leaf", "first", "last") if left.ndim else ("leaf",):
            torch.testing.assert_close(of(merge.nuslerp, left, right, t=0.5, along=along), (left + right) / 2)
        torch.testing.assert_close(of(merge.multislerp, left, right), (left + right) / 2)
        torch.testing.assert_close(of(merge.multislerp, left, right, left, right), (left + right) / 2)
    torch.testing.assert_close(of(merge.multislerp, one, 0 * one, weights=[0.0, 1.0]), 0 * one)


def test_nuslerp_keeps_the_norm_and_takes_rows_and_columns_by_themselves():
    one, two = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    rows = of(merge.nuslerp, one, two, along="last")
    torch.testing.assert_close(rows, torch.tensor([[0.5**0.5, 0.5**0.5], [0.0, 2.0]]))
    torch.testing.assert_close(of(merge.nuslerp, one.mT, two.mT, along="first"), rows.mT)
    whole = of(merge.nuslerp, torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0]), t=1 / 3)
    torch.testing.assert_close(whole, torch.tensor([1.5 * 3**0.5, 1.5]))


def test_karcher_is_the_middle_of_an_arc_and_of_a_corner():
    trees = [{"w": leaf} for leaf in torch.diag(torch.tensor([1.0, 2.0, 3.0]))]
    middle = merge.karcher(trees[:2])["w"]
    torch.testing.assert_close(middle, 1.5 * torch.tensor([0.5**0.5, 0.5**0.5, 0.0]))
    torch.testing.assert_close(merge.karcher(trees)["w"], 2 * torch.full((3,), 3**-0.5))


def test_karcher_of_opposite_and_of_zero_experts():
    one, zero = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}
    assert merge.karcher([one, {"w": -one["w"]}])["w"].tolist() == [3.0, 4.0]  # any direction is as good
    torch.testing.assert_close(merge.karcher([one, zero])["w"], one["w"] / 2)
    assert torch.equal(merge.karcher([zero, {"w": torch.zeros(2)}])["w"], zero["w"])


def test_karcher_of_leaves_too_small_for_a_direction_is_their_mean():
    small, three = {"w": torch.tensor([3e-3, -4e-3])}, {"w": torch.tensor([-1e-3, 2e-3])}
    assert torch.equal(merge.karcher([tree.clone(small) for _ in range(4)], tol=1e-2)["w"], small["w"])
    torch.testing.assert_close(merge.karcher([small, three], tol=1e-2)["w"], (small["w"] + three["w"]) / 2)
    assert torch.equal(merge.karcher([small], tol=1e-2)["w"], small["w"])


@pytest.mark.parametrize("tol", [1e-5, 1e-8, 1e-12])
def test_karcher_of_experts_of_both_signs_has_their_mean_norm(tol):
    for values in torch.randn(200, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64):
        found = merge.karcher([{"w": value} for value in values], tol=tol)["w"].abs()
        torch.testing.assert_close(found, values.abs().mean(), rtol=1e-9, atol=0)


def test_karcher_minimises_the_squared_arcs():
    leaves = torch.nn.functional.normalize(matrices(4, (6,)) + 0.5, dim=1)

    def arcs(point):
        return (leaves @ point / point.norm()).acos().square().sum()

    point = merge.karcher([{"w": leaf} for leaf in leaves], max_iter=50, tol=1e-9)["w"].requires_grad_()
    arcs(point).backward()
    assert point.grad.abs().max() < 1e-7


def test_weights_and_limits_by_leaf_are_those_of_every_leaf_alone():
    draws = torch.Generator().manual_seed(5)
    one, two, three = ({name: torch.randn(4, generator=draws) for name in "ab"} for _ in range(3))
    rules = [{"a": 0.2, "*": 3.0}, 1.0]
    for name, weights in {"a": [0.2, 1.0], "b": [3.0, 1.0]}.items():
        own = [{name: tree[name]} for tree in (one, two, three)]
        for merger in merge.multislerp, lambda _, experts, **options: merge.karcher(experts, **options):
            merged = merger(three, [one, two], weights=rules)[name]
            assert torch.equal(merged, merger(own[2], own[:2], weights=weights)[name])
        merged = merge.nearswap(three, [one], t={"a": 0.2, "*": 0.4})[name]
        assert torch.equal(merged, merge.nearswap(own[2], own[:1], t=0.2 if name == "a" else 0.4)[name])
    with raises("t of 'a' is 'x', must be a number", "t of 'b' is None"):
        merge.nearswap(three, [one], t={"a": "x", "b": None})
    with raises("t of 'a' is -1, must be finite and above 0"):
        merge.nearswap(three, [one], t={"a": -1, "*": 1.0})
    with raises("the sum of weights [1.0, -1.0] of a parameter is 0"):
        merge.karcher([one, two], weights=[{"a": 1.0, "*": 2.0}, -1.0])
    with raises("no rule matches parameter 'b'"):
        merge.multislerp(three, [one, two], weights=[{"a": 1.0}, 1.0])


def test_karcher_without_steps_of_directions_that_cancel_out_is_the_mean():
    values = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([-5.0])}]
    assert merge.karcher(values, max_iter=0)["w"].tolist() == [-1.0]
    assert merge.karcher(values)["w"].tolist() == [4.0]  # from the direction of the first


def test_multislerp_where_directions_cancel_out():
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([-6.0, -8.0])
    torch.testing.assert_close(of(merge.multislerp, one, two), (one + two) / 2)
    torch.testing.assert_close(of(merge.multislerp, one, two, one, -one), (two + one) / 4)
    torch.testing.assert_close(of(merge.multislerp, one, two, one), one * 20 / 15)
    assert of(merge.multislerp, 0 * one, 0 * one, 0 * one).tolist() == [0.0, 0.0]
    with raises("weights holds 1 numbers for 2 experts"):
        of(merge.multislerp, one, two, weights=[1.0])


def test_multislerp_takes_weights_by_name():
    base, experts = {"w": torch.zeros(2)}, {"a": {"w": torch.tensor([3.0, 0.0])}, "b": {"w": torch.tensor([0.0, 4.0])}}
    found = merge.multislerp(base, experts, weights={"b": 3.0, "a": 1.0})
    assert found["w"].equal(merge.multislerp(base, experts, weights=[1.0, 3.0])["w"])


def test_sce_by_hand():
    one, two = torch.tensor([4.0, 1.0, 0.0, 1.0]), torch.tensor([2.0, -1.0, 2.0, 1.0])
    # squares 18 and 10; signs +, + (a sum of 0), +, +
    expected = [(18 * 4 + 10 * 2) / 28, 1.0, 2.0, 1.0]
    torch.testing.assert_close(of(merge.sce, one, two), torch.tensor(expected))
    # variances 1, 1, 1, 0: of three that are not 0 two stay; squares 17 and 5
    torch.testing.assert_close(
        of(merge.sce, one, two, density=0.7), torch.tensor([(17 * 4 + 5 * 2) / 22, 1.0, 0.0, 0.0])
    )
    assert of(merge.sce, one, two, density=0.3).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_sce_of_small_changes_has_equal_weights_unless_told_otherwise():
    one, two = 1e-4 * torch.tensor([4.0, 2.0]), 1e-4 * torch.tensor([2.0, 1.0])
    torch.testing.assert_close(of(merge.sce, one, two), (one + two) / 2)
    torch.testing.assert_close(of(merge.sce, one, two, floor=0.0), (20 * one + 5 * two) / 25)


def test_no_number_of_threads_changes_the_divergence_of_a_row():
    find, (two, one) = sys.modules["smat_fn.merge.arcee_fusion"], torch.randn(2, 4, 40_000)
    expected, threads = find._divergences(two, one), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rows = [find._divergences(*row) for row in zip(two.split(1), one.split(1), strict=True)]
        assert torch.equal(torch.cat(rows), expected)
    finally:
        torch.set_num_threads(threads)


def test_arcee_fusion_takes_what_stands_out():
    one = {"w": torch.zeros(2, 8), "s": torch.tensor(1.0), "n": torch.tensor(3)}
    two = {"w": 0.01 * torch.arange(16.0).reshape(2, 8), "s": torch.tensor(2.0), "n": torch.tensor(3)}
    two["w"][1, 7] = 5.0
    merged = merge.arcee_fusion([one, two])
    assert merged["w"].nonzero().tolist() == [[1, 7]]
    assert merged["w"][1, 7] == 5.0
    assert merged["s"] == 2.0  # a single entry is its own quartile
    assert torch.equal(merge.arcee_fusion([one, tree.clone(one)])["w"], one["w"])


def test_cart_of_all_singular_values_is_task_arithmetic_around_the_mean(family):
    _, experts = family(torch.float64)
    mean = merge.weight_average(experts)
    merged, expected = merge.cart(experts, coef=0.4, share=1.0), merge.task_arithmetic(mean, experts, coef=0.4)
    for path in ("matrix", "row", "column"):
        torch.testing.assert_close(merged[path], expected[path])
    assert all(torch.equal(merged[path], mean[path]) for path in ("vector", "conv", "scalar"))
    assert torch.equal(merge.cart(experts, coef=0.4, skip=["mat*"])["matrix"], mean["matrix"])


@pytest.mark.parametrize(("share", "rank"), [(0.07, 7), (0.14, 14), (0.28, 28), (0.55, 55), (0.071, 8), (1e-12, 1)])
def test_cart_keeps_no_direction_more_for_the_rounding_of_its_share(share, rank):
    experts = [diagonal.diag() for diagonal in matrices(3, (100,)).double()]
    mean = sum(experts) / 3
    expected = mean.clone()
    for expert in experts:
        change = (expert - mean).diagonal()
        expected.diagonal().add_(
            torch.where(change.abs() >= change.abs().sort(descending=True).values[rank - 1], change, 0)
        )
    torch.testing.assert_close(merge.cart([{"w": own} for own in experts], coef=1.0, share=share)["w"], expected)


def test_consensus_and_tall_masks_by_hand():
    one, two, three = (
        torch.tensor(row) for row in ([4.0, 1.0, 2.0, 0.0], [1.0, 1.0, -2.0, 0.0], [-1.0, 1.0, 0.1, 1.0])
    )
    # the others add up to 0, 2, -1.9, 1 | 3, 2, 2.1, 1 | 5, 2, 0, 0
    options = {"ratio": 0.5}
    assert of(merge.tall_mask, one, two, three, task="0", **options).tolist() == [4.0, 0.0, pytest.approx(0.1), 0.0]
    assert of(merge.tall_mask, one, two, three, task="2", **options).tolist() == [0.0, 0.0, pytest.approx(0.1), 1.0]
    kept = {least: of(merge.consensus, one, two, three, least=least, **options) for least in range(5)}
    assert kept[0].tolist() == [4.0, 3.0, pytest.approx(0.1), 1.0]
    assert kept[1].tolist() == [4.0, 0.0, pytest.approx(0.1), 1.0]
    assert kept[2].tolist() == kept[3].tolist() == [0.0, 0.0, pytest.approx(0.1), 0.0]
    assert kept[4].tolist() == [0.0] * 4


def test_svc_undoes_a_sum_of_equal_experts_and_leaves_strangers_alone():
    one, two = matrices(2, (6, 9))
    torch.testing.assert_close(of(merge.svc, 3 * one, one, one, one), one)
    torch.testing.assert_close(of(merge.svc, one, one), one)
    left, right = one.clone(), two.clone()
    left[3:], right[:3] = 0, 0  # they change other outputs: no direction is shared
    torch.testing.assert_close(of(merge.svc, left, left, right), left)
    lowered = torch.linalg.svdvals(of(merge.svc, one + two, one, two))
    assert (lowered <= torch.linalg.svdvals(one + two) * (1 + 1e-12)).all()
    assert torch.equal(of(merge.svc, 3 * one, one, skip=("w",)), 3 * one)
    assert torch.equal(of(merge.svc, 0 * one, one), 0 * one)
    with raises("the number of experts is 1: svc takes at least 2", "alpha is 0, must be above 0 and finite"):
        of(merge.svc, one, alpha=0)


def test_emr_by_hand():
    base = {"a": torch.zeros(4), "b": torch.zeros(1)}
    one = {"a": torch.tensor([4.0, 1.0, -2.0, 0.0]), "b": torch.tensor([1.0])}
    two = {"a": torch.tensor([1.0, -3.0, -1.0, 1.0]), "b": torch.tensor([3.0])}
    # of both: 4, -3, -2, 1 and 3; one agrees with the first, the third and the last
    scale = (7 / 4 + 1) / (6 / 4 + 3)
    merged = merge.emr(base, {"one": one, "two": two}, task="one")
    torch.testing.assert_close(merged["a"], scale * torch.tensor([4.0, 0.0, -2.0, 0.0]))
    torch.testing.assert_close(merged["b"], scale * torch.tensor([3.0]))
    assert torch.equal(merge.emr(base, {"one": one}, task="one")["a"], one["a"])
    with raises("task 'three' is not an expert, choose one of 'one', 'two'"):
        merge.emr(base, {"one": one, "two": two}, task="three")


def test_emr_takes_the_negative_sign_of_a_sum_of_zero():
    base = {"w": torch.zeros(2)}
    experts = {"one": {"w": torch.tensor([1.0, 3.0])}, "two": {"w": torch.tensor([-1.0, 1.0])}}
    assert merge.emr(base, experts, task="one")["w"][0] == 0
    assert merge.emr(base, experts, task="two")["w"][0] < 0


def test_nearswap_by_hand():
    one = torch.tensor([0.5, -0.5, 0.1, 0.0, float("inf"), float("nan")])
    merged = merge.nearswap({"w": torch.ones(6)}, [{"w": 1 + one}], t=0.25)["w"]
    assert merged[:5].tolist() == [1.25, 0.75, pytest.approx(1.1), 1.0, 1.25]
    assert merged[5].isnan()


def test_opcm_by_hand():
    one, two = torch.diag(torch.tensor([4.0, 2.0, 1.0])), torch.arange(1.0, 10.0).view(3, 3)
    # of 7 in all the first value is 0.57, the first two are 0.86
    for share, kept in {
        0.5: [[4, 2, 3], [4, 2, 6], [7, 8, 1]],
        0.6: [[4, 2, 3], [4, 2, 6], [7, 8, 1]],
        0.9: [[4, 0, 3], [0, 2, 6], [7, 8, 1]],
    }.items():
        merged = of(merge.opcm, one, two, share=share, norms=False)
        torch.testing.assert_close(merged, torch.tensor(kept, dtype=torch.float32))
    torch.testing.assert_close(of(merge.opcm, one, one, one, norms=False), one)
    wide = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # a direction of 0 takes nothing away
    torch.testing.assert_close(
        of(merge.opcm, wide, torch.full((2, 3), 5.0), share=0.0, norms=False),
        torch.tensor([[3.0, 5.0, 5.0], [5.0, 5.0, 5.0]]),
    )


def test_opcm_has_the_mean_norm_of_its_experts_over_the_whole_model():
    base = {"matrix": torch.zeros(3, 4), "vector": torch.zeros(2), "none": torch.zeros(0, 5), "number": torch.tensor(3)}
    experts = [{**base, "matrix": torch.full((3, 4), size), "vector": torch.ones(2)} for size in (1.0, 2.0)]
    merged = merge.opcm_vector(base, experts)
    assert math.hypot(*(float(leaf.norm()) for leaf in merged.values())) == pytest.approx((14**0.5 + 50**0.5) / 2)
    assert merge.opcm(base, [base, tree.clone(base)])["matrix"].tolist() == base["matrix"].tolist()
    long = {"vector": torch.empty(1 << 20, device="meta")}  # the norm takes blocks of all experts, whatever the chunk
    assert Opcm().memory(long, 100) >= 100 * 4 * BLOCK > Opcm(norms=False).memory(long, 100)


@pytest.mark.parametrize(
    ("smooth", "ratio", "values"),
    [("none", 2.0, [5, 3, 1]), ("mean", 2.0, [3, 3, 3]), ("linear", 2.0, [4, 3, 2]), ("linear", 9.0, [5, 3, 1])],
)
def test_dc_merge_of_one_expert_smooths_its_singular_values(smooth, ratio, values):
    one = torch.diag(torch.tensor([5.0, 3.0, 1.0, 0.0]))
    merged = of(merge.dc_merge, one, share=1.0, keep=1.0, smooth=smooth, ratio=ratio)
    torch.testing.assert_close(merged, torch.diag(torch.tensor([*map(float, values), 0.0])))


def test_dc_merge_keeps_the_largest_entries_of_experts_in_directions_of_their_own():
    one, two = torch.zeros(2, 4, 4)
    one[0, 0], one[1, 1], two[2, 2], two[3, 3] = 5, 2, 3, 1
    assert of(merge.dc_merge, one, two).tolist() == torch.diag(torch.tensor([5.0, 0, 3, 0])).tolist()
    torch.testing.assert_close(of(merge.dc_merge, one, two, keep=1.0), one + two)


def test_ram_by_hand():
    base = {"a": torch.zeros(5), "b": torch.zeros(3)}
    one = {"a": torch.tensor([4.0, 1.0, 0.25, 0.0, 2.0]), "b": torch.tensor([1.0, 2.0, 0.0])}
    two = {"a": torch.tensor([2.0, 0.0, 8.0, 0.5, -2.0]), "b": torch.tensor([0.0, 0.0, 4.0])}
    options = {"threshold": 0.5, "cap": 10.0}
    plain = merge.ram(base, [one, two], **options)
    assert plain["a"].tolist() == [3.0, 1.0, 8.0, 0.0, 0.0]  # 0.5 is not above 0.5
    assert plain["b"].tolist() == [1.0, 2.0, 4.0]
    # both share two coordinates of "a"; alone they change 1 and 1 of them, and 2 and 1 of "b"
    of_all = merge.ram(base, [one, two], boost=1.0, **options)
    assert of_all["a"].tolist() == pytest.approx([3.0, 1.0 * (1 + 2 / 3), 8.0 * 2, 0.0, 0.0])
    assert of_all["b"].tolist() == pytest.approx([1.0 * (1 + 2 / 3), 2.0 * (1 + 2 / 3), 4.0 * 2])
    of_each = merge.ram(base, [one, two], boost=1.0, scope="tensor", **options)
    assert of_each["a"].tolist() == [3.0, 1.0 * 3, 8.0 * 3, 0.0, 0.0]
    assert of_each["b"].tolist() == plain["b"].tolist()  # nothing is shared
    capped = merge.ram(base, [one, two], boost=1.0, threshold=0.5, cap=0.5)
    assert capped["b"].tolist() == [1.5, 3.0, 6.0]


def test_ram_of_disjoint_changes_is_their_sum_and_keeps_what_is_not_a_number():
    one, two = torch.tensor([1.0, 0.0, float("nan")]), torch.tensor([0.0, 3.0, 1.0])
    for scope in ("global", "tensor"):
        merged = of(merge.ram, one, two, boost=0.5, scope=scope)
        assert merged[:2].tolist() == [1.0 * 1.5, 3.0 * 1.5]
        assert merged[2].isnan()


def test_options_out_of_range():
    one = {"w": torch.ones(2, 2)}
    with raises("coef is inf", "t is 0, must be finite and above 0", "the number of experts is 2: nearswap takes"):
        merge.nearswap(one, [one, one], coef=float("inf"), t=0)
    with raises("share is 1, must be at least 0 and below 1", "skip is the text"):
        merge.opcm(one, [one], share=1, skip="w")
    with raises(
        "coef is nan", "share is 2", "keep is 0, must be in (0, 1]", "smooth is 'flat'", "ratio is 0.5, must be"
    ):
        merge.dc_merge(one, [one], coef=float("nan"), share=2, keep=0, smooth="flat", ratio=0.5)
    with raises("threshold is -1, must be", "boost is nan, must be", "cap is -1, must be", "scope is 'leaf'"):
        merge.ram(one, [one], threshold=-1, boost=float("nan"), cap=-1, scope="leaf")
    with raises("coef is inf", "share is -1, must be in [0, 1]"):
        merge.tsv_merge(one, [one], coef=float("inf"), share=-1)
    with raises("coef is nan", "common is 1.5, must be in [0, 1]"):
        merge.iso_cts(one, [one], coef=float("nan"), common=1.5)
    with raises("ridge is -1.0, must be a finite number of at least 0"):
        merge.wudi(one, [one], coef=1.0, ridge=-1.0)
    with raises("coef is nan", "t is inf, must be finite", "along is 'row', must be 'leaf', 'first' or 'last'"):
        merge.nuslerp(one, [one, one], coef=float("nan"), t=float("inf"), along="row")
    with raises("max_iter is -1, must be an integer of at least 0", "tol is 0, must be above 0 and finite"):
        merge.karcher([one], max_iter=-1, tol=0)
    with raises("max_iter is 2.5, must be an integer of at least 0"):
        merge.karcher([one], max_iter=2.5)
    with raises("density is 2, must be in [0, 1]", "floor is -1, must be finite and at least 0"):
        merge.sce(one, [one], density=2, floor=-1)
    with raises("coef is nan", "share is 0, must be in (0, 1]", "skip is the text 'w'"):
        merge.cart([one], coef=float("nan"), share=0, skip="w")
    with raises("ratio is -1, must be finite and at least 0", "least is -1, must be at least 0"):
        merge.consensus(one, [one], coef=1.0, ratio=-1, least=-1)
    with raises("task 'b' is not an expert, choose one of 'a'"):
        merge.tall_mask(one, {"a": one}, task="b", ratio=0.4)
    for merger in (merge.arcee_fusion, functools.partial(merge.nuslerp, one)):
        with raises("the number of experts is 1:", "takes exactly 2"):
            merger([one])


@pytest.mark.parametrize("count", [3, 5, 6, 7])
def test_sce_selects_no_coordinate_in_which_all_experts_are_alike(count):
    base = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(1))}
    moved = base["w"] + 0.1 * torch.randn(4000, generator=torch.Generator().manual_seed(2))
    merged = merge.sce(base, [{"w": moved.clone()} for _ in range(count)], density=0.4)
    assert torch.equal(merged["w"], base["w"])


def test_sce_counts_in_float32_as_mergekit_does():
    assert int(5000 * 0.408) == 2039  # the nearest float64 is below 2040
    change = torch.arange(1.0, 5001.0)
    kept = merge.sce_vector({"w": torch.zeros(5000)}, [{"w": change}, {"w": -2 * change}], density=0.408)["w"]
    assert int(kept.count_nonzero()) == 2040


@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_slerp_divides_by_no_small_norm_where_mergekit_does_not(scale):
    left, right = {"w": torch.tensor([scale, 0.0])}, {"w": torch.tensor([3.0, 4.0])}
    merged = merge.slerp([left, right], coef=0.25, zeros=True)["w"]
    assert merged[1] == pytest.approx(4 * math.sin(math.pi / 8), rel=1e-6)  # the angle is a right one
