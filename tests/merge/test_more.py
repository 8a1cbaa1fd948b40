"""The mergers beyond the paper: each against its formula in NumPy, its closed forms, its errors."""

import functools
import itertools
import re

import numpy as np
import pytest
import torch

from smat_fn import merge, random
from smat_fn.merge.model_stock import ratio_of
from smat_fn.merge.parts.arithmetic import gram
from smat_fn.tree import clone

KEY = random.key(3)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COEF = 0.3
WEIGHTS = {"sum": 0.7, "cstance": -0.2, "qa": 1.3}


def tree(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


def zero(leaves):
    return {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}


def same(left, right):
    assert list(left) == list(right)
    assert all(torch.equal(leaf, right[path]) for path, leaf in left.items())


def numbers(leaf):
    return leaf.double().numpy() if leaf.dtype == torch.float64 else leaf.float().numpy()


# each returns the merged leaf in compute dtype: path, θ₀, [θ_i], {name: fields}


def plain_weighted(start, experts, fields, divide):
    total = functools.reduce(np.add, [start.dtype.type(WEIGHTS[n]) * leaf for n, leaf in experts.items()])
    return total / start.dtype.type(sum(WEIGHTS.values())) if divide else total


def plain_wise_ft(start, experts, fields):
    return start + start.dtype.type(COEF) * (experts["cstance"] - start)


def plain_magmax(start, experts, fields):
    changes = np.stack([leaf - start for leaf in experts.values()]).reshape(len(experts), -1)
    chosen = [max(column, key=lambda x: (abs(x), x)) for column in changes.T.tolist()]
    return start + start.dtype.type(COEF) * np.array(chosen, start.dtype).reshape(start.shape)


def plain_breadcrumbs(start, experts, fields):
    total = np.zeros_like(start).reshape(-1)
    for leaf in experts.values():
        change = (leaf - start).reshape(-1)
        order = sorted(range(change.size), key=lambda i: abs(float(change[i])))
        kept = order[int(0.45 * change.size) : change.size - int(0.2 * change.size)]
        total = total + np.array([change[i] if i in kept else 0 for i in range(change.size)], start.dtype)
    return start + start.dtype.type(COEF) * total.reshape(start.shape)


def plain_dare_ties(start, experts, fields):
    threshold = round(65536 * 0.3)
    kept = start.dtype.type((65536 - threshold) / 65536)
    masked = [np.where(fields[n] >= threshold, (leaf - start) / kept, 0) for n, leaf in experts.items()]
    sign = np.where(functools.reduce(np.add, masked) >= 0, 1, -1)
    agreeing = [np.where(x * sign > 0, x, np.zeros_like(x)) for x in masked]
    return start + start.dtype.type(COEF) * functools.reduce(np.add, agreeing)


EXACT = {
    "weighted": (
        lambda b, e: merge.weighted_average(e, weights=WEIGHTS),
        functools.partial(plain_weighted, divide=True),
    ),
    "weighted-sum": (
        lambda b, e: merge.weighted_average(e, weights=WEIGHTS, normalize=False),
        functools.partial(plain_weighted, divide=False),
    ),
    "wise_ft": (lambda b, e: merge.wise_ft(b, {"cstance": e["cstance"]}, coef=COEF), plain_wise_ft),
    "magmax": (lambda b, e: merge.magmax(b, e, coef=COEF), plain_magmax),
    "breadcrumbs": (
        lambda b, e: merge.breadcrumbs(b, e, coef=COEF, drop_smallest=0.45, drop_largest=0.2),
        plain_breadcrumbs,
    ),
    "dare_ties": (lambda b, e: merge.dare_ties(KEY, b, e, coef=COEF, drop_prob=0.3), plain_dare_ties),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_bit_equal_to_the_plain_formula(name, dtype, family):
    merger, plain = EXACT[name]
    base, experts = family(dtype)
    merged = merger(base, experts)
    for path, leaf in base.items():
        if leaf.is_floating_point():
            streams = {n: random.leaf_streams(random.fold_in(KEY, n), [path])[0, 0] for n in experts}
            fields = {n: random.bits(s, leaf.numel()).numpy().reshape(leaf.shape) for n, s in streams.items()}
            expected = plain(numbers(leaf), {n: numbers(expert[path]) for n, expert in experts.items()}, fields)
            assert torch.equal(merged[path], torch.from_numpy(np.asarray(expected)).to(dtype)), path


def angle(left, right):
    return np.arccos(np.clip(np.vdot(left, right) / np.linalg.norm(left) / np.linalg.norm(right), -1, 1))


def plain_slerp(start, one, two):
    omega = angle(one, two)
    return (np.sin((1 - COEF) * omega) * one + np.sin(COEF * omega) * two) / np.sin(omega)


def plain_model_stock(start, *experts):
    cos = np.mean([np.cos(angle(x - start, y - start)) for x, y in itertools.combinations(experts, 2)])
    n = len(experts)
    t = n * cos / (1 + (n - 1) * cos) if cos > 0 else 0
    return t * sum(experts) / n + (1 - t) * start


def inverse_root(matrix):
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(values**-0.5) @ vectors.T


def plain_tsv(start, *experts):
    changes = [leaf - start for leaf in experts]
    count = min(start.shape) // len(changes) if start.ndim == 2 else 0
    if not count:
        return start + COEF * sum(changes) / len(changes)
    parts = [np.linalg.svd(change, full_matrices=False) for change in changes]
    u, v = np.hstack([u[:, :count] for u, _, _ in parts]), np.hstack([vh[:count].T for _, _, vh in parts])
    u, v = u @ inverse_root(u.T @ u), v @ inverse_root(v.T @ v)  # the polar factor, without an SVD
    return start + COEF * u @ np.diag(np.concatenate([s[:count] for _, s, _ in parts])) @ v.T


CLOSE = {
    "slerp": (lambda b, e: merge.slerp(e, coef=COEF), plain_slerp, 2),
    "model_stock": (lambda b, e: merge.model_stock(b, e), plain_model_stock, 4),
    "tsv_merge": (lambda b, e: merge.tsv_merge(b, e, coef=COEF), plain_tsv, 3),
}


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", CLOSE)
def test_close_to_the_plain_formula(name, dtype, error, family):
    merger, plain, count = CLOSE[name]
    base, experts = family(dtype, count=count, scale=2.0)
    merged = merger(base, experts)
    for path in ("vector", "matrix", "conv", "column"):
        leaves = [leaf[path].double().numpy() for leaf in (base, *experts.values())]
        np.testing.assert_allclose(merged[path].double().numpy(), plain(*leaves), rtol=error, atol=4 * error)


def test_trees_without_floating_coordinates():
    base = {"n": torch.tensor([1, 2]), "empty": torch.zeros(0, 3)}
    two = [base, base]
    for merged in (
        merge.weighted_average(two, weights=[1, 2]),
        merge.wise_ft(base, [base], coef=1.0),
        merge.slerp(two, coef=0.5),
        merge.model_stock(base, two),
        merge.dare_ties(KEY, base, two, coef=1.0, drop_prob=0.5),
        merge.breadcrumbs(base, two, coef=1.0, drop_smallest=0.5, drop_largest=0.1),
        merge.magmax(base, two, coef=1.0),
        merge.tsv_merge(base, two, coef=1.0),
    ):
        assert merged["n"].tolist() == [1, 2]
        assert merged["empty"].shape == (0, 3)


def test_weighted_average_of_equal_weights_is_the_average(family):
    _, experts = family()
    average = merge.weight_average(experts)
    same(merge.weighted_average(experts, weights=[1, 1, 1]), average)
    same(merge.weighted_average(experts, weights=dict.fromkeys(experts, 1.0)), average)


def test_weighted_average_by_hand():
    experts = {"a": tree(1.0, 4.0), "b": tree(5.0, 0.0), "c": tree(100.0, 100.0)}
    weights = {"c": 0.0, "b": 3.0, "a": 1.0}
    assert merge.weighted_average(experts, weights=weights)["w"].tolist() == [4.0, 1.0]
    assert merge.weighted_average(experts, weights=weights, normalize=False)["w"].tolist() == [16.0, 4.0]
    assert merge.weighted_average(list(experts.values()), weights=[1, -1, 0], normalize=False)["w"].tolist() == [-4, 4]


def test_wise_ft_ends_are_the_base_and_the_expert():
    base, expert = tree(1.0, -2.0), tree(3.0, 2.0)
    ends = {coef: merge.wise_ft(base, [expert], coef=coef)["w"].tolist() for coef in (0.0, 0.5, 1.0, 2.0)}
    assert ends == {0.0: [1.0, -2.0], 0.5: [2.0, 0.0], 1.0: [3.0, 2.0], 2.0: [5.0, 6.0]}


def test_slerp_keeps_the_norm_and_the_ends():
    one, two = tree(3.0, 0.0), tree(0.0, 3.0)
    assert merge.slerp([one, two], coef=0.0)["w"].tolist() == [3.0, 0.0]
    assert merge.slerp([one, two], coef=1.0)["w"].tolist() == [0.0, 3.0]
    middle = merge.slerp([one, two], coef=1 / 3)["w"]
    torch.testing.assert_close(middle, 3 * torch.tensor([3**0.5 / 2, 0.5]))


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ([1.0, 2.0], [3.0, 6.0], [1.5, 3.0]),  # parallel
        ([1.0, 2.0], [-3.0, -6.0], [0.0, 0.0]),  # opposite
        ([0.0, 0.0], [4.0, 8.0], [1.0, 2.0]),  # no angle
        ([4.0, 8.0], [0.0, 0.0], [3.0, 6.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([1.0, 0.0], [1.0, 0.031], [1.0, 0.031 / 4]),  # cos ω = 0.99952
    ],
)
def test_slerp_is_linear_where_the_arc_is_a_line(one, two, expected):
    merged = merge.slerp([tree(*one), tree(*two)], coef=0.25)["w"]
    assert torch.equal(merged, torch.tensor(expected))


def test_slerp_of_equal_models_is_the_model(family):
    base, _ = family()
    same(merge.slerp([base, clone(base)], coef=0.3), base)


def test_slerp_turns_just_below_the_limit():
    merged = merge.slerp([tree(1.0, 0.0), tree(1.0, 0.032)], coef=0.25)["w"]  # cos ω = 0.99949
    assert merged[0] != 1.0
    torch.testing.assert_close(merged, torch.tensor([1.0, 0.008]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("along", ["leaf", "first", "last"])
def test_slerp_with_an_arc_of_nuslerp_is_that_of_a_zero_base(along):
    generator = torch.Generator().manual_seed(1)
    one = {"far": torch.randn(5, 3, generator=generator), "near": torch.randn(5, 3, generator=generator)}
    two = {"far": torch.randn(5, 3, generator=generator), "near": one["near"] + 0.01 * one["far"]}  # cos ω > 0.9995
    merged = merge.slerp([one, two], coef=0.3, arc=along)
    same(merged, merge.nuslerp(zero(one), [one, two], t=0.3, along=along))
    assert not torch.equal(merged["near"], merge.slerp([one, two], coef=0.3)["near"])


def test_slerp_takes_a_zero_leaf_as_mergekit_does_where_it_is_asked():
    # mergekit 0.1.5, slerp.py: norms below 1e-8 count as 1, so the cosine is 0
    merged = merge.slerp([tree(0.0, 0.0), tree(4.0, 8.0)], coef=1 / 3, zeros=True)["w"]
    torch.testing.assert_close(merged, torch.tensor([2.0, 4.0]))
    with pytest.raises(ValueError, match="arc is 'row', must be one of slerp, leaf, first, last"):
        merge.slerp([tree(0.0), tree(1.0)], coef=0.5, arc="row")


def test_weights_of_a_leaf_that_sum_to_zero_are_an_error():
    rules = {"w": 0.0, "*": 1.0}
    with pytest.raises(ValueError, match="of a parameter is 0: give other weights, or normalize False"):
        merge.weighted_average([tree(1.0), tree(2.0)], weights=[rules, rules])
    with pytest.raises(ValueError, match="the sum of weights is 0"):  # up to rounding
        merge.weighted_average([tree(1.0), tree(2.0), tree(3.0)], weights=[0.1, 0.2, -0.3])
    assert merge.weighted_average([tree(1.0), tree(2.0)], weights=[rules, rules], normalize=False)["w"].tolist() == [0]


def test_slerp_takes_every_leaf_by_itself():
    one = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 1.0])}
    two = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([3.0, 3.0])}
    merged = merge.slerp([one, two], coef=0.5)
    torch.testing.assert_close(merged["a"], torch.tensor([0.5, 0.5]).sqrt())
    assert merged["b"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_model_stock_stops_where_the_mean_is_nearest_to_the_centre(count, spread):
    # Δ_i = c + n_i of orthogonal c and n_i: the point t · mean nearest to c has t = ⟨mean, c⟩ / |mean|²
    noise = spread * torch.eye(count + 1, dtype=torch.float64)[1:]
    experts = [{"w": row} for row in noise + torch.eye(count + 1, dtype=torch.float64)[0]]
    mean = sum(expert["w"] for expert in experts) / count
    expected = mean[0] / mean.square().sum()
    base = zero(experts[0])
    assert ratio_of(gram([own["w"] for own in experts], base["w"]), clamp=True) == pytest.approx(
        expected.item(), rel=1e-14
    )
    torch.testing.assert_close(merge.model_stock(base, experts)["w"], expected * mean)


def test_model_stock_by_hand():
    base = tree(1.0, 1.0)
    ratio = lambda *experts: ratio_of(gram(list(map(torch.tensor, experts)), base["w"]), clamp=True)  # noqa: E731
    assert ratio((2.0, 2.0), (2.0, 2.0)) == 1.0
    assert ratio((2.0, 2.0), (2.0, 2.0), (2.0, 2.0)) == 1.0
    assert ratio((2.0, 1.0), (1.0, 5.0)) == 0.0  # orthogonal
    assert ratio((2.0, 1.0), (-4.0, 1.0)) == 0.0  # opposite
    assert ratio((2.0, 1.0), (1.0, 1.0)) == 0.0  # one is base
    assert ratio((2.0, 1.0), (2.0, 2.0)) == pytest.approx(2 * 0.5**0.5 / (1 + 0.5**0.5))
    assert merge.model_stock(base, [tree(3.0, 1.0), tree(3.0, 1.0)], coef=0.5)["w"].tolist() == [2.0, 1.0]
    assert merge.model_stock(base, [tree(2.0, 1.0), tree(-4.0, 1.0)])["w"].tolist() == [1.0, 1.0]


def test_model_stock_ratios_do_not_depend_on_the_order():
    leaves = torch.randn(4, 20, 50, generator=torch.Generator().manual_seed(0)) + 1
    for row in zip(*leaves, strict=True):
        expected = ratio_of(gram(row, torch.zeros(50)), clamp=True)
        orders = map(list, itertools.permutations(row))
        assert all(ratio_of(gram(order, torch.zeros(50)), clamp=True) == expected for order in orders)


def test_gram_beyond_one_block():
    leaves = torch.randn(3, 5, (1 << 18) // 5 + 7, generator=torch.Generator().manual_seed(0))
    experts = [{"w": leaf} for leaf in leaves[1:] + leaves[0] * 2]
    ratio = ratio_of(gram([own["w"] for own in experts], leaves[0]), clamp=True)
    one, two = ((expert["w"] - leaves[0]).double().reshape(-1) for expert in experts)
    cos = one @ two / one.norm() / two.norm()
    assert ratio == pytest.approx((2 * cos / (1 + cos)).item(), rel=1e-12)


def test_dare_ties_without_dropping_is_the_election_of_ties(family):
    base, experts = family(grid=2**-6)
    for aggregate in ("sum", "mean"):
        left = merge.dare_ties(KEY, base, experts, coef=COEF, drop_prob=0.0, aggregate=aggregate)
        same(left, merge.ties(base, experts, coef=COEF, keep=1.0, scope="tensor", aggregate=aggregate))


def test_dare_ties_is_dare_for_one_expert_and_della_without_window_for_the_mean(family):
    base, experts = family()
    left = merge.dare_ties_vector(KEY, base, experts, drop_prob=0.4, aggregate="mean")
    same(left, merge.della_vector(KEY, base, experts, drop_prob=0.4, window=0.0))
    one = {"qa": experts["qa"]}
    same(merge.dare_ties_vector(KEY, base, one, drop_prob=0.4), merge.dare_vector(KEY, base, one, drop_prob=0.4))


def test_dare_ties_by_hand():
    experts = [tree(4.0, -1.0, 2.0, 5.0, 0.0), tree(2.0, -3.0, 0.0, -5.0, 0.0), tree(-1.0, 2.0, 0.0, 0.0, 0.0)]
    options = {"coef": 1.0, "drop_prob": 0.0}
    assert merge.dare_ties(KEY, zero(experts[0]), experts, **options)["w"].tolist() == [6.0, -4.0, 2.0, 5.0, 0.0]
    merged = merge.dare_ties(KEY, zero(experts[0]), experts, aggregate="mean", **options)
    assert merged["w"].tolist() == [3.0, -2.0, 2.0, 5.0, 0.0]


def test_dare_ties_drops_below_the_threshold_and_not_at_it():
    size, threshold = 1 << 18, 26214
    fields = random.bits(random.leaf_streams(random.fold_in(KEY, "0"), ["w"])[0, 0], size)
    assert (fields == threshold).any()
    vector = merge.dare_ties_vector(KEY, {"w": torch.zeros(size)}, [{"w": torch.ones(size)}], drop_prob=0.4)
    assert torch.equal(vector["w"] != 0, fields >= threshold)


def breadcrumbs(*values, **shares):
    return merge.breadcrumbs_vector(zero(tree(*values)), [tree(*values)], **shares)["w"].tolist()


def test_breadcrumbs_by_hand():
    values = 1.0, -5.0, 2.0, 4.0, -3.0
    assert breadcrumbs(*values, drop_smallest=0.4, drop_largest=0.2) == [0.0, 0.0, 0.0, 4.0, -3.0]
    assert breadcrumbs(*values, drop_smallest=0.39, drop_largest=0.19) == [0.0, -5.0, 2.0, 4.0, -3.0]
    assert breadcrumbs(*values, drop_smallest=0.0, drop_largest=0.8) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert breadcrumbs(2.0, -2.0, 2.0, 2.0, drop_smallest=0.25, drop_largest=0.5) == [0.0, -2.0, 0.0, 0.0]
    assert breadcrumbs(7.0, drop_smallest=0.5, drop_largest=0.4) == [7.0]


def test_breadcrumbs_counts_in_every_leaf(family):
    leaves = {"small": torch.tensor([1.0, 2.0]), "large": torch.tensor([3.0, 4.0])}
    vector = merge.breadcrumbs_vector(zero(leaves), [leaves], drop_smallest=0.5, drop_largest=0.0)
    assert [vector[path].tolist() for path in leaves] == [[0.0, 2.0], [0.0, 4.0]]


def test_breadcrumbs_without_dropping_is_task_arithmetic(family):
    base, experts = family()
    left = merge.breadcrumbs(base, experts, coef=COEF, drop_smallest=0.0, drop_largest=0.0)
    same(left, merge.task_arithmetic(base, experts, coef=COEF))


def test_magmax_by_hand():
    experts = [tree(1.0, -3.0, 2.0, -2.0, 0.0), tree(-2.0, 2.0, -2.0, 2.0, 0.0), tree(1.5, 1.0, 0.0, 1.0, 0.0)]
    for order in itertools.permutations(experts):
        assert merge.magmax_vector(zero(experts[0]), list(order))["w"].tolist() == [-2.0, -3.0, 2.0, 2.0, 0.0]


def matrices(count, shape=(24, 18), seed=0):
    return torch.randn(count, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tsv(*deltas):
    deltas = [torch.as_tensor(delta, dtype=torch.float64).clone() for delta in deltas]
    return merge.tsv_merge_vector({"w": torch.zeros_like(deltas[0])}, [{"w": delta} for delta in deltas])["w"]


def low_rank(delta, rank):
    u, s, vh = torch.linalg.svd(delta, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def test_tsv_of_one_expert_is_the_expert():
    torch.testing.assert_close(tsv(matrices(1)[0]), matrices(1)[0])


def test_tsv_singular_values_are_the_leading_ones_of_all():
    deltas = matrices(4)  # k = 18 // 4
    expected = torch.linalg.svdvals(deltas)[:, :4].reshape(-1).sort(descending=True).values
    values = torch.linalg.svdvals(tsv(*deltas))
    torch.testing.assert_close(values[:16], expected)
    assert values[16:].max() < 1e-12


def test_tsv_adds_experts_that_share_no_direction():
    one, two = torch.zeros(6, 4), torch.zeros(6, 4)
    one[:3, :2], two[3:, 2:] = torch.arange(6.0).reshape(3, 2), torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]])
    torch.testing.assert_close(tsv(one, two), (one + two).double())


def test_tsv_does_not_depend_on_the_order():
    one, two, three = matrices(3)
    torch.testing.assert_close(tsv(one, two, three), tsv(three, one, two))


def test_tsv_directions_without_a_value_do_no_harm():
    one, two = matrices(2)
    nothing = torch.zeros_like(one)
    torch.testing.assert_close(tsv(one, nothing), low_rank(one, 9))
    assert torch.equal(tsv(nothing, nothing), nothing)
    # equal experts: their directions coincide, the factor of U is not unique
    torch.testing.assert_close(tsv(one, one), low_rank(one, 9))
    # of rank 2 both: the other 7 directions of each are arbitrary
    one, two = low_rank(one, 2), low_rank(two, 2)
    values = torch.linalg.svdvals(tsv(one, two))
    expected = torch.cat([torch.linalg.svdvals(one)[:2], torch.linalg.svdvals(two)[:2]]).sort(descending=True).values
    torch.testing.assert_close(values[:4], expected)
    assert values[4:].max() < 1e-12


@pytest.mark.parametrize("shape", [(), (5,), (2, 7), (3, 3, 3, 3), (1, 1)])
def test_tsv_averages_what_has_no_matrix_to_share(shape):
    deltas = matrices(3, shape)
    assert torch.equal(tsv(*deltas), (deltas[0] + deltas[1] + deltas[2]) / 3)


def raises(*parts):
    return pytest.raises(ValueError, match=".*".join(re.escape(part) for part in parts))


def test_number_of_experts():
    one = tree(1.0)
    with raises("coef is nan", "the number of experts is 2: wise_ft takes exactly 1"):
        merge.wise_ft(one, [one, one], coef=float("nan"))
    for experts in ([one], [one, one, one]):
        with raises("coef is inf", f"the number of experts is {len(experts)}: slerp takes exactly 2"):
            merge.slerp(experts, coef=float("inf"))
    for call in (merge.model_stock, merge.model_stock_vector):
        with raises("the number of experts is 1: model_stock takes at least 2"):
            call(one, [one])


def test_weights():
    experts = {"a": tree(1.0), "b": {"v": torch.zeros(1)}}
    with raises(
        "weights lacks expert 'b'",
        "weights names 'c', which is not an expert: remove it",
        "the weight of 'a' is nan, must be finite",
        "expert 'b' lacks parameter 'w' of expert 'a'",
    ):
        merge.weighted_average(experts, weights={"a": float("nan"), "c": 1.0})
    with raises("weights holds 1 numbers for 2 experts: give one for each"):
        merge.weighted_average([tree(1.0), tree(2.0)], weights=[1.0])
    with raises("the sum of weights is 0: give other weights, or normalize False"):
        merge.weighted_average([tree(1.0), tree(2.0)], weights=[1.0, -1.0])
    with raises("experts is a generator"):
        merge.weighted_average((e for e in [tree(1.0)]), weights=[1.0])


def test_shares_and_aggregate():
    one = tree(1.0)
    with raises("coef is nan", "drop_smallest is -0.1, must be in [0, 1)", "drop_largest is 1.0, must be in [0, 1)"):
        merge.breadcrumbs(one, [one], coef=float("nan"), drop_smallest=-0.1, drop_largest=1.0)
    with raises("drop_smallest 0.6 and drop_largest 0.4 leave nothing"):
        merge.breadcrumbs_vector(one, [one], drop_smallest=0.6, drop_largest=0.4)
    with raises("key must be", "coef is inf", "drop_prob is 1.0", "aggregate is 'max', must be 'sum' or 'mean'"):
        merge.dare_ties(0, one, [one], coef=float("inf"), drop_prob=1.0, aggregate="max")


def test_tsv_names_the_matrix_that_is_not_finite():
    bad = {"v": torch.ones(2, 2), "w": torch.full((2, 2), float("nan"))}
    with raises("parameter 'w' has no singular values, are all of its values finite?"):
        merge.tsv_merge(zero(bad), [bad], coef=1.0)


MERGERS = {
    "weighted_average": lambda base, experts: merge.weighted_average(experts, weights={"x": 1.0, "y": 1.0}),
    "wise_ft": lambda base, experts: merge.wise_ft(base, experts, coef=1.0),
    "slerp": lambda base, experts: merge.slerp(experts, coef=0.5),
    "model_stock": lambda base, experts: merge.model_stock(base, experts),
    "dare_ties": lambda base, experts: merge.dare_ties(KEY, base, experts, coef=1.0, drop_prob=0.5),
    "breadcrumbs": lambda base, experts: merge.breadcrumbs(
        base, experts, coef=1.0, drop_smallest=0.5, drop_largest=0.1
    ),
    "magmax": lambda base, experts: merge.magmax(base, experts, coef=1.0),
    "tsv_merge": lambda base, experts: merge.tsv_merge(base, experts, coef=1.0),
}


@pytest.mark.parametrize("name", MERGERS)
def test_experts_that_do_not_fit(name):
    base = {"w": torch.zeros(2), "v": torch.zeros(3)}
    with raises("experts is empty"):
        MERGERS[name](base, {})
    with raises("experts is a generator: pass a mapping {name: tree} or a list of trees"):
        MERGERS[name](base, (leaves for leaves in [base]))
    with raises("lacks parameter 'v' of", "parameter 'w' has shape (4,) in expert 'y'"):
        MERGERS[name](base, {"x": base, "y": {"w": torch.zeros(4)}})


def test_every_merger_is_tested_here():
    names = [merger.name for merger in merge.MORE_MERGERS if merger.name != "pcb"]
    assert list(MERGERS) == names[: len(MERGERS)]  # the others: test_pcb.py, test_modern.py
    assert {*EXACT, *CLOSE} - {"weighted", "weighted-sum"} | {"weighted_average"} == set(MERGERS)
