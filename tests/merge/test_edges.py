"""Closed forms: every edge of the definitions on numbers that can be checked by hand."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from smat_fn import merge, random
from smat_fn.grad import value_and_grad
from smat_fn.merge.della import thresholds as della_thresholds
from smat_fn.merge.parts.arithmetic import zeroed
from smat_fn.merge.parts.chunks import Piece
from smat_fn.merge.parts.merger import Cut
from smat_fn.merge.task_arithmetic import TaskArithmetic
from smat_fn.merge.ties import _limit, ties_vector, trimmed, votes
from smat_fn.testing import assert_trees_equal
from smat_fn.tree import tree_map

KEY = random.key(0)


def tree(*values, dtype=torch.float32):
    return {"w": torch.tensor(values, dtype=dtype)}


def zero(leaves):
    return {path: torch.zeros_like(leaf) for path, leaf in leaves.items()}


def ties(*experts, **options):
    options = {"coef": 1.0, "keep": 1.0} | options
    return merge.ties(zero(experts[0]), list(experts), **options)["w"].tolist()


def test_task_vector():
    base = {"a": torch.tensor([1.0, 2.0]).bfloat16(), "n": torch.tensor(3)}
    vector = merge.task_vector({"a": torch.tensor([1.5, 1.0]).bfloat16(), "n": torch.tensor(9)}, base)
    assert vector["a"].dtype == torch.float32
    assert (vector["a"].tolist(), vector["n"].item()) == ([0.5, -1.0], 0)
    assert merge.task_vector([torch.ones((), dtype=torch.float64)], [torch.ones(())])[0].dtype == torch.float64
    with pytest.raises(ValueError, match=r"params lacks parameter 'b' of base; parameter 'a' is int64 in params but"):
        merge.task_vector({"a": torch.zeros(2, dtype=torch.int64)}, {"a": torch.zeros(2), "b": torch.zeros(1)})


def test_task_vector_is_differentiable():
    params = torch.ones(2, requires_grad=True)
    merge.task_vector({"w": params}, {"w": torch.zeros(2)})["w"].sum().backward()
    assert params.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_apply_vector_is_differentiable_in_all_that_it_takes(dtype):
    base, vector, coef = (
        {"w": torch.tensor([1.0, -2.0], dtype=dtype), "n": torch.tensor(3)},
        {"w": torch.tensor([0.3, 0.7])},
        torch.tensor(0.6),
    )
    plain = merge.apply_vector(base, vector, coef=coef.item())
    weights = torch.tensor([2.0, 5.0])

    def loss(start, vector, coef):
        merged = merge.apply_vector({**base, "w": start}, {"w": vector}, coef=coef)
        assert merged["n"] == 3
        return (merged["w"].double() * weights).sum(), merged["w"]

    expected = weights.tolist(), (weights * coef).tolist(), (weights * vector["w"]).sum()
    grads, merged = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(base["w"], vector["w"], coef)
    leaves = [leaf.clone().requires_grad_() for leaf in (base["w"], vector["w"], coef)]
    value, recorded = loss(*leaves)
    value.backward()
    for found in grads, [leaf.grad for leaf in leaves]:
        assert found[0].tolist() == expected[0]
        torch.testing.assert_close(found[1].tolist(), expected[1])
        torch.testing.assert_close(found[2], expected[2])
    for own in merged, recorded:
        assert torch.equal(own, plain["w"])
    with torch.no_grad():
        assert not merge.apply_vector({"w": leaves[0]}, {"w": leaves[1]}, coef=leaves[2])["w"].requires_grad


def test_apply_vector_of_parameters_alone_is_detached_and_inside_a_loss_is_not():
    start, vector = {"w": torch.ones(2, requires_grad=True)}, {"w": torch.ones(2)}
    assert not merge.apply_vector(start, vector, coef=2.0)["w"].requires_grad

    def loss(params, _):
        return merge.apply_vector(params, vector, coef=2.0)["w"].square().sum(), {}

    for engine in "func", "autograd":
        _, grads = value_and_grad(loss, engine=engine)(start, None)
        assert grads["w"].tolist() == [6.0, 6.0]
    with pytest.raises(ValueError, match="out is written to, which has no derivative and no batches: leave it out"):
        merge.apply_vector(start, vector, coef=torch.tensor(2.0, requires_grad=True), out=start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vmap_over_coefficients_and_vectors_is_a_loop(dtype):
    base, vectors = {"w": torch.tensor([1.0, 2.0]).bfloat16()}, torch.tensor([[0.3, 0.7], [0.1, -0.4]])
    coefs = torch.tensor([0.25, 0.6], dtype=dtype)
    batched = torch.func.vmap(lambda v, c: merge.apply_vector(base, {"w": v}, coef=c)["w"])(vectors, coefs)
    one_by_one = [merge.apply_vector(base, {"w": v}, coef=c)["w"] for v, c in zip(vectors, coefs, strict=True)]
    assert torch.equal(batched, torch.stack(one_by_one))


def test_a_gradient_that_a_merge_would_lose_is_an_error():
    base, expert = tree(1.0, 2.0), tree(3.0, 1.0)
    for name in set(CALLS) - {"wa"}:
        with pytest.raises(ValueError, match=r"coef requires grad, and merging has no derivative: detach it"):
            CALLS[name](base, [expert], torch.tensor(0.5, requires_grad=True))
        with torch.no_grad():
            CALLS[name](base, [expert], torch.tensor(0.5, requires_grad=True))

    for name, call in CALLS.items():
        loss = value_and_grad(lambda params, call: call(base, [params], 0.5)["w"].sum(), engine="autograd")
        with pytest.raises(
            ValueError, match=r"'w' of expert '\d' requires grad inside a loss, and merging has no deri"
        ):
            loss(expert, call)
        own = {"w": expert["w"].clone().requires_grad_()}
        assert torch.equal(call(base, [own], 0.5)["w"], call(base, [expert], 0.5)["w"]), name
        detached = value_and_grad(
            lambda params, call: ((params["w"] * call(base, [tree_map(Tensor.detach, params)], 0.5)["w"]).sum(), None),
            engine="autograd",
        )
        assert torch.equal(detached(expert, call)[1]["w"], call(base, [expert], 0.5)["w"])


CALLS = {
    "ties": lambda base, experts, coef: merge.ties(base, experts, coef=coef, keep=0.5),
    "dare": lambda base, experts, coef: merge.dare(KEY, base, experts, coef=coef, drop_prob=0.5),
    "ta": lambda base, experts, coef: merge.task_arithmetic(base, experts, coef=coef),
    "wa": lambda base, experts, coef: merge.weight_average([base, *experts]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("of", ["base", "expert", "coef"])
@pytest.mark.parametrize("way", ["grad", "jvp"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of torch's own forward mode
def test_a_derivative_of_a_merge_is_an_error_and_not_zero(name, of, way):
    base, expert, coef = tree(1.0, 2.0), tree(3.0, 1.0), torch.tensor(0.5)
    if name == "wa" and of == "coef":
        return

    def merged(x):
        own = {"base": base, "expert": expert, "coef": coef} | {of: x if of == "coef" else {"w": x}}
        return CALLS[name](own["base"], [own["expert"]], own["coef"])["w"].sum()

    x = coef if of == "coef" else torch.tensor([0.5, 2.0])
    forward = partial(torch.func.jvp, merged, (x,), (torch.ones_like(x),))
    with pytest.raises(ValueError, match=r"is differentiated by torch\.func, and merging has no derivative: detach it"):
        (partial(torch.func.grad(merged), x) if way == "grad" else forward)()


@pytest.mark.parametrize("name", [name for name in CALLS if name != "wa"])
def test_a_merger_inside_vmap_is_an_error_with_a_way_out(name):
    base, experts = tree(1.0, 2.0), torch.tensor([[0.5, 2.0], [1.5, 3.0]])
    with pytest.raises(
        ValueError, match=r"'w' of expert '0' is batched by torch\.func\.vmap, and .* call it in a loop"
    ):
        torch.func.vmap(lambda x: CALLS[name](base, [{"w": x}], 0.5)["w"])(experts)


ALONE = {
    "karcher": merge.karcher,
    "slerp": partial(merge.slerp, coef=0.5),
    "arcee_fusion": merge.arcee_fusion,
}


@pytest.mark.parametrize("name", ALONE)
def test_a_merger_without_a_base_inside_vmap_is_an_error_with_a_way_out(name):
    with pytest.raises(
        ValueError, match=r"'w' of expert '0' is batched by torch\.func\.vmap, and .* call it in a loop"
    ):
        torch.func.vmap(lambda x: ALONE[name]([{"w": x}, {"w": x + 1}])["w"])(torch.ones(2, 3, 3))


@pytest.mark.parametrize("name", [name for name in CALLS if name != "wa"])
def test_a_batched_coefficient_is_an_error_with_a_way_out(name):
    base, expert = tree(1.0, 2.0), tree(3.0, 1.0)
    with pytest.raises(
        ValueError, match=r"'coef' of the call is batched by torch\.func\.vmap, and .* call it in a loop"
    ):
        torch.func.vmap(lambda x: CALLS[name](base, [expert], x)["w"])(torch.ones(2))


@pytest.mark.parametrize(
    "call",
    [
        partial(merge.dare, coef=0.5, drop_prob=0.5),
        partial(merge.dare_ties, coef=0.5, drop_prob=0.5, aggregate="sum"),
        partial(merge.della, coef=0.5, drop_prob=0.5, window=0.1),
    ],
    ids=["dare", "dare_ties", "della"],
)
def test_a_batched_key_is_an_error_with_a_way_out(call):
    base, expert = tree(1.0, 2.0), tree(3.0, 1.0)
    with pytest.raises(
        ValueError, match=r"'key' of the call is batched by torch\.func\.vmap, and .* call it in a loop"
    ):
        torch.func.vmap(lambda key: call(key, base, [expert])["w"])(random.split(random.key(0), 2))


OPTIONS = {
    "keep": lambda base, experts, x: merge.ties(base, experts, coef=1.0, keep=x),
    "drop_prob": lambda base, experts, x: merge.dare(KEY, base, experts, coef=1.0, drop_prob=x),
    "weights": lambda base, experts, x: merge.task_arithmetic(base, experts, coef=1.0, weights={"0": x}),
    "rules": lambda base, experts, x: merge.apply_rules(base, experts[0], coef={"*": x}),
    "list": lambda base, experts, x: merge.weighted_average([base, *experts], weights=[1.0, x]),
    "statistics": lambda base, experts, x: merge.fisher(base, experts, [{"w": x.expand(2)}]),
    "t": lambda base, experts, x: merge.nuslerp(base, [*experts, base], t=x),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_derivative_in_an_option_is_an_error_and_not_zero(name):
    base, expert = tree(1.0, 2.0), tree(3.0, 1.0)
    merged = torch.func.grad(lambda x: OPTIONS[name](base, [expert], x)["w"].sum())
    with pytest.raises(ValueError, match=r"is differentiated by torch\.func, and merging has no derivative"):
        merged(torch.tensor(0.5))


def test_a_merge_of_constants_inside_a_derivative_is_a_constant():
    base, expert = tree(1.0, 2.0), tree(3.0, 1.0)
    slope = torch.func.grad(lambda x: x * CALLS["ta"](base, [expert], 0.5)["w"].sum())(torch.tensor(1.0))
    assert slope == CALLS["ta"](base, [expert], 0.5)["w"].sum()


WEIGHTED = {
    "ta": merge.ta,
    "ties": partial(merge.ties, keep=0.5),
    "dare": partial(merge.dare, KEY, drop_prob=0.5),
    "dare_ties": partial(merge.dare_ties, KEY, drop_prob=0.5),
    "della": partial(merge.della, KEY, drop_prob=0.5, window=0.2),
    "breadcrumbs": partial(merge.breadcrumbs, drop_smallest=0.25, drop_largest=0.25),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_none_is_no_weight_and_no_density_of_any_expert(name):
    base, experts = tree(0.0, 0.0, 0.0, 0.0), [tree(1.0, -2.0, 3.0, 4.0), tree(2.0, 5.0, -1.0, 3.0)]
    options = {"weights": None, "densities": None} if name != "ta" else {"weights": None}
    merged = WEIGHTED[name](base, experts, coef=0.5, **options)
    assert merged["w"].tolist() == WEIGHTED[name](base, experts, coef=0.5)["w"].tolist()
    kind = next(kind for kind in (*merge.MERGERS, *merge.MORE_MERGERS) if kind.name == name)
    own = getattr(WEIGHTED[name], "keywords", {})
    assert kind(**own, **options) == kind(**own)


def test_none_is_no_weight_of_fisher():
    base, experts = tree(0.0, 0.0), [tree(1.0, -2.0), tree(2.0, 5.0)]
    fishers = [tree(1.0, 3.0), tree(2.0, 5.0)]
    merged = merge.fisher(base, experts, fishers, weights=None)
    assert merged["w"].tolist() == merge.fisher(base, experts, fishers)["w"].tolist()


@pytest.mark.parametrize("bad", ["1", None, torch.ones(2)])
def test_a_coef_that_is_no_number_is_named(bad):
    with pytest.raises(ValueError, match=r"coef is .*, must be a number"):
        merge.task_arithmetic(tree(1.0), [tree(2.0)], coef=bad)


def test_ties_threshold_takes_equal_magnitudes_in():
    # d = 5, keep 0.4: the (5 - 2)rd smallest of 1, 2, 2, 2, 3 is 2, so four stay
    leaves = tree(1.0, -2.0, 2.0, 3.0, -2.0)
    assert ties(leaves, keep=0.4) == [0.0, -2.0, 2.0, 3.0, -2.0]
    assert merge.ties_density(zero(leaves), {"e": leaves}, keep=0.4) == {"e": 0.8}
    # the count is ⌊d·keep⌋ + 1 without equal magnitudes: the threshold itself stays
    assert ties(tree(1.0, 2.0, 3.0, 4.0, 5.0), keep=0.4) == [0.0, 0.0, 3.0, 4.0, 5.0]
    assert ties(tree(1.0, 2.0, 3.0), keep=0.1) == [0.0, 0.0, 3.0]


def test_ties_tensor_scope_keeps_the_exact_count_by_position():
    leaves = tree(1.0, -2.0, 2.0, 3.0, -2.0)
    assert ties(leaves, keep=0.4, scope="tensor") == [0.0, -2.0, 0.0, 3.0, 0.0]
    assert ties(leaves, keep=0.6, scope="tensor") == [0.0, -2.0, 2.0, 3.0, 0.0]
    assert ties(leaves, keep=0.01, scope="tensor") == [0.0, 0.0, 0.0, 3.0, 0.0]
    assert ties(tree(1.0, 1.0, 1.0, 1.0), keep=0.5, scope="tensor") == [1.0, 1.0, 0.0, 0.0]
    assert merge.ties_density(zero(leaves), [leaves], keep=0.4, scope="tensor") == {"0": 0.4}


def test_ties_tensor_scope_names_the_leaf_with_nan():
    bad = torch.tensor([1.0, float("nan"), 2.0])
    with pytest.raises(ValueError, match="parameter 'w' of expert 'b' minus base's is NaN in places"):
        merge.ties(
            {"w": torch.zeros(3)}, {"a": {"w": torch.ones(3)}, "b": {"w": bad}}, coef=1.0, keep=0.5, scope="tensor"
        )


def test_ties_scopes_differ_over_leaves():
    leaves = {"small": torch.tensor([1.0, 2.0]), "large": torch.tensor([3.0, 4.0])}
    whole = merge.ties(zero(leaves), [leaves], coef=1.0, keep=0.25)
    each = merge.ties(zero(leaves), [leaves], coef=1.0, keep=0.5, scope="tensor")
    assert [whole[path].tolist() for path in leaves] == [[0.0, 0.0], [3.0, 4.0]]
    assert [each[path].tolist() for path in leaves] == [[0.0, 2.0], [0.0, 4.0]]


def test_ties_constant_magnitudes_and_zero_task_vectors_stay_whole():
    constant = tree(1.0, -1.0, 1.0, -1.0)
    assert ties(constant, keep=0.25) == [1.0, -1.0, 1.0, -1.0]
    assert merge.ties_density(zero(constant), [constant, zero(constant)], keep=0.25) == {"0": 1.0, "1": 1.0}
    assert merge.ties_density({"n": torch.tensor(1)}, [{"n": torch.tensor(1)}], keep=0.5) == {"0": 0.0}


def test_ties_keep_one_trims_nothing():
    assert ties(tree(1e-30, -5.0, 0.0)) == [pytest.approx(1e-30), -5.0, 0.0]


def test_ties_sum_and_mean_of_the_agreeing():
    experts = tree(4.0, -1.0, 2.0), tree(2.0, -3.0, 0.0), tree(-1.0, 2.0, 0.0)
    assert ties(*experts) == [6.0, -4.0, 2.0]
    assert ties(*experts, aggregate="mean") == [3.0, -2.0, 2.0]
    assert ties(*experts, coef=-0.5) == [-3.0, 2.0, -1.0]


@pytest.mark.parametrize(("sign", "expected"), [(1.0, 5.0), (-1.0, -5.0)])
def test_ties_cancelled_coordinates_take_the_majority_sign_over_all_leaves(sign, expected):
    one = {"a": torch.tensor([5.0, 1.0]), "b": torch.tensor([1.0, -1.0, 1.0])}
    two = {"a": torch.tensor([-5.0, 1.0]), "b": torch.tensor([1.0, -1.0, 1.0])}
    experts = [{path: sign * leaf for path, leaf in expert.items()} for expert in (one, two)]
    merged = merge.ties(zero(one), experts, coef=1.0, keep=1.0)
    assert merged["a"].tolist() == [expected, 2 * sign]
    assert merge.ties(zero(one), experts, coef=1.0, keep=1.0, scope="tensor")["a"].tolist() == [5.0, 2 * sign]


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_ties_of_unit_weights_or_equal_densities_is_that_without(scope, aggregate):
    one = {"a": torch.tensor([[-5.0, 1.0], [3.0, -0.5]]), "b": torch.tensor([-1.0, -1.0, -1.0])}
    two = {"a": torch.tensor([[5.0, -1.0], [-3.0, 2.0]]), "b": torch.tensor([-1.0, 0.25, -2.0])}
    experts, how = {"one": one, "two": two}, {"coef": 1.0, "keep": 0.9, "scope": scope, "aggregate": aggregate}
    plain = merge.ties(zero(one), experts, **how)
    assert plain["a"][0, 0] == (5.0 if scope == "tensor" else -5.0)
    for options in {"weights": {"one": 1.0}}, {"densities": {"two": 0.9}}, {"weights": {"one": 1}, "densities": {}}:
        assert_trees_equal(merge.ties(zero(one), experts, **how, **options), plain)
    alone = merge.ties(zero(one), {"one": one}, **how)
    assert_trees_equal(merge.ties(zero(one), experts, **how, densities={"two": 0.0}), alone)


def test_ties_with_densities_does_not_hide_an_expert_of_nan():
    experts = {"good": {"w": torch.arange(1.0, 9.0)}, "bad": {"w": torch.full((8,), math.nan)}}
    for options in {}, {"densities": {"good": 0.7}}:
        assert merge.ties(zero(experts["good"]), experts, coef=1.0, keep=0.5, **options)["w"].isnan().all()


def test_ties_without_a_majority_nothing_agrees():
    assert ties(tree(5.0, 3.0, -3.0), tree(-5.0, 3.0, -3.0)) == [0.0, 6.0, -6.0]


def test_ties_majority_counts_beyond_the_integers_of_float32():
    size = 2**24 + 2  # so many + that one − more or less is lost in a float32 sum
    half = size // 2
    values = torch.ones(size)
    values[:half] = -1
    one, two = values.clone(), values.clone()
    one[0], two[0] = 5.0, -5.0  # the majority is now + by one coordinate
    merged = merge.ties({"w": torch.zeros(size)}, [{"w": one}, {"w": two}], coef=1.0, keep=1.0)
    assert merged["w"][0] == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_limits_are_the_comparisons(dtype):
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    numbers = torch.tensor(
        [0.0, -0.0, 5e-324, 1e-45, tiny, 0.1, 1.0, 1 + 2**-23, 1 + 2**-52, largest, -1.0], dtype=dtype
    )
    numbers = torch.cat([numbers, -numbers])
    for value in torch.cat([numbers.double().abs(), torch.tensor([1 + 2**-40, 1e300, 1e-60], dtype=torch.float64)]):
        for equal in (False, True):
            kept = torch.nn.functional.hardshrink(numbers, _limit(value, dtype, equal=equal))
            magnitude = numbers.double().abs()
            expected = zeroed(numbers, magnitude >= value if equal else magnitude > value)
            assert torch.equal(kept, expected), (value, equal)
            assert torch.equal(kept.signbit() & (kept != 0), expected.signbit() & (expected != 0))


@pytest.mark.parametrize("at", [0, 3, 4, 5, 9])
def test_ties_equal_magnitudes_up_to_a_position(at):
    delta = torch.tensor([1.0, -1.0, 2.0, 0.5])
    piece = Piece("w", 4, [delta], [])
    (kept,) = trimmed(piece, {"w": [Cut(torch.tensor(1.0), at)]})
    assert kept.tolist() == [1.0 if at >= 4 else 0.0, -1.0 if at >= 5 else 0.0, 2.0, 0.0]


def test_ties_zeros_are_positive_where_nothing_agrees():
    base, expert = {"w": torch.full((2,), -0.0)}, {"w": torch.tensor([-1.0, 0.0])}
    merged = ties_vector(base, [expert], keep=0.5)["w"]
    assert merged.tolist() == [-1.0, 0.0]
    assert merged.signbit().tolist() == [True, False]


def test_ties_votes_beyond_the_integers_of_float32():
    assert votes(torch.ones(2**24 + 3)) == 2**24 + 3


def test_ties_float64_threshold_is_not_rounded_for_float32_leaves():
    leaves = {"narrow": torch.tensor([1.0]), "wide": torch.tensor([1 + 2.0**-40, 3.0], dtype=torch.float64)}
    merged = merge.ties(zero(leaves), [leaves], coef=1.0, keep=0.4)
    assert merged["narrow"].tolist() == [0.0]
    assert merged["wide"].tolist() == [1 + 2.0**-40, 3.0]


def test_dare_without_dropping_is_task_arithmetic(family):
    base, experts = family()
    left = merge.dare(KEY, base, experts, coef=0.7, drop_prob=0.0)
    right = merge.task_arithmetic(base, experts, coef=0.7)
    assert all(torch.equal(left[path], right[path]) for path in base)


def test_dare_rescales_by_the_realised_probability():
    leaves = {"w": torch.ones(4096)}
    vector = merge.dare_vector(KEY, zero(leaves), [leaves], drop_prob=0.3)["w"]
    assert set(vector.tolist()) == {0.0, (torch.tensor(1.0) / (1 - 19661 / 65536)).item()}
    # the largest probability still keeps one field of 65,536
    rare = merge.dare_vector(KEY, {"w": torch.zeros(1 << 18)}, [{"w": torch.ones(1 << 18)}], drop_prob=1 - 1e-9)["w"]
    assert set(rare.tolist()) == {0.0, 65536.0}


def test_nothing_stays_of_an_expert_whose_norm_is_nan():
    base, vectors = {"w": torch.ones(3)}, [{"w": torch.tensor([1.0, math.nan, 2.0])}, {"w": torch.ones(3)}]
    merged = merge.dare(KEY, base, vectors, coef=0.7, drop_prob=0.3, rescale=True, densities={"0": 0.0})
    assert torch.equal(merged["w"], base["w"])


def test_della_of_one_expert_without_window_is_dare(family):
    base, experts = family(count=1)
    left = merge.della_vector(KEY, base, experts, drop_prob=0.4, window=0.0)
    right = merge.dare_vector(KEY, base, experts, drop_prob=0.4)
    assert all(torch.equal(left[path], right[path]) for path in left)


def test_della_drops_below_the_threshold_and_not_at_it():
    size, threshold = 1 << 18, 26214
    stream = random.leaf_streams(random.fold_in(KEY, "0"), ["w"])[0, 0]
    fields = random.bits(stream, size)
    assert (fields == threshold).any()
    vector = merge.della_vector(
        KEY, {"w": torch.zeros(size, 1)}, [{"w": torch.ones(size, 1)}], drop_prob=0.4, window=0.1
    )
    assert torch.equal(vector["w"].reshape(-1) != 0, fields >= threshold)


def test_della_rows_of_length_one_take_the_mean_probability(family):
    base, experts = family(count=1)
    left = merge.della_vector(KEY, base, experts, drop_prob=0.4, window=0.3)
    right = merge.dare_vector(KEY, base, experts, drop_prob=0.4)
    for path in ("scalar", "one", "column"):
        assert torch.equal(left[path], right[path])
    assert not torch.equal(left["matrix"], right["matrix"])


def test_della_rows_are_those_of_the_last_axis():
    leaf = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    options = {"drop_prob": 0.5, "window": 0.9}
    deep = merge.della_vector(KEY, {"w": torch.zeros_like(leaf)}, [{"w": leaf}], **options)["w"]
    rows = merge.della_vector(KEY, {"w": torch.zeros(24, 5)}, [{"w": leaf.reshape(24, 5)}], **options)["w"]
    vector = merge.della_vector(KEY, {"w": torch.zeros(120)}, [{"w": leaf.reshape(120)}], **options)["w"]
    assert torch.equal(deep.reshape(24, 5), rows)
    assert not torch.equal(rows.reshape(-1), vector)


def test_della_thresholds_rise_with_the_rank_and_equal_magnitudes_rank_by_position():
    # keep probabilities 1/4, 1/2, 3/4, 1 are exact on 16 bits; the last of four equal magnitudes is never dropped
    options = {"drop_prob": 0.375, "window": 0.75}
    assert della_thresholds(4, **options).tolist() == [49152, 32768, 16384, 0]
    vector = merge.della_vector(KEY, {"w": torch.zeros(500, 4)}, [{"w": torch.ones(500, 4)}], **options)["w"]
    third = (torch.tensor(1.0) / 0.75).item()
    assert [set(vector[:, i].tolist()) for i in range(4)] == [{0.0, 4.0}, {0.0, 2.0}, {0.0, third}, {1.0}]
    long = merge.della_vector(KEY, {"w": torch.zeros(3000)}, [{"w": torch.ones(3000)}], **options)["w"]
    scale = 1 / (1 - della_thresholds(3000, **options).float() / 65536)
    assert torch.equal(long[long != 0], scale[long != 0])


def test_della_takes_the_mean_of_the_elected_sign_and_plus_for_zero():
    options = {"coef": 1.0, "drop_prob": 0.0, "window": 0.0}
    experts = [tree(4.0, -1.0, 2.0, 5.0, 0.0), tree(2.0, -3.0, 0.0, -5.0, 0.0), tree(-1.0, 2.0, 0.0, 0.0, 0.0)]
    assert merge.della(KEY, zero(experts[0]), experts, **options)["w"].tolist() == [3.0, -2.0, 2.0, 5.0, 0.0]


@pytest.mark.parametrize("drop_prob", [0.07, 0.5, 0.9])
def test_della_accepts_both_ends_of_the_open_interval(drop_prob):
    low, high = 1 - drop_prob - 0.07, 1 - drop_prob + 0.07
    thresholds = della_thresholds(9, drop_prob=drop_prob, window=0.14)
    assert thresholds[0] == round(65536 * (1 - low))
    assert thresholds[-1] == max(round(65536 * (1 - high)), 0)
    merge.della(KEY, tree(0.0), [tree(1.0)], coef=1.0, drop_prob=drop_prob, window=0.14)


@pytest.mark.parametrize(("drop_prob", "window"), [(0.0, 0.14), (0.06, 0.14), (0.93, 0.14), (0.95, 0.14), (0.9, 0.2)])
def test_della_refuses_keep_probabilities_outside(drop_prob, window):
    with pytest.raises(ValueError, match=rf"drop_prob {drop_prob} and window {window} give keep probabilities from"):
        merge.della(KEY, tree(0.0), [tree(1.0)], coef=1.0, drop_prob=drop_prob, window=window)


def test_trees_without_floating_coordinates():
    base = {"n": torch.tensor([1, 2]), "empty": torch.zeros(0, 3)}
    for merged in (
        merge.weight_average([base, base]),
        merge.task_arithmetic(base, [base], coef=1.0),
        merge.ties(base, [base], coef=1.0, keep=0.5),
        merge.ties(base, [base], coef=1.0, keep=0.5, scope="tensor"),
        merge.dare(KEY, base, [base], coef=1.0, drop_prob=0.5),
        merge.della(KEY, base, [base], coef=1.0, drop_prob=0.5, window=0.1),
    ):
        assert merged["n"].tolist() == [1, 2]
        assert merged["empty"].shape == (0, 3)


def test_weight_average_keeps_equal_buffers():
    one = {"w": torch.tensor([1.0]), "n": torch.tensor(4)}
    two = {"w": torch.tensor([2.0]), "n": torch.tensor(4)}
    merged = merge.weight_average([one, two])
    assert (merged["w"].item(), merged["n"].item()) == (1.5, 4)


def test_apply_vector_computes_wide_whatever_the_dtype_of_the_vector():
    merged = merge.apply_vector(tree(1.0), {"w": torch.tensor([0.5], dtype=torch.bfloat16)}, coef=0.3)
    assert merged["w"].item() == (torch.tensor(1.0) + torch.tensor(0.3) * 0.5).item()


BELOW_ZERO = {
    "task_arithmetic": lambda base, experts: merge.task_arithmetic(base, experts, coef=1.0),
    "ties": lambda base, experts: merge.ties(base, experts, coef=2.0, keep=1.0),
    "rules": lambda base, experts: merge.merge_by(TaskArithmetic(), base, experts, coef={"*": 1.0}),
    "weighted_average": lambda base, experts: merge.weighted_average([base, *experts], weights=[-2.0, 1.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("name", BELOW_ZERO)
def test_variances_of_batch_norms_do_not_become_negative(name):
    base, *experts = ({"bn.bias": torch.ones(2), "bn.running_var": torch.tensor([v, 0.0])} for v in (1, 0.3, 0.2, 0.1))
    with pytest.raises(ValueError, match=r"^parameter 'bn.running_var', .* below 0, .* by `coef=.'.running_.': 0.`"):
        BELOW_ZERO[name](base, experts)
    others = [{"bn.scale": own["bn.running_var"]} for own in (base, *experts)]
    assert float(BELOW_ZERO[name](others[0], others[1:])["bn.scale"][0]) < 0  # any other leaf may be
    merged = merge.merge_by(TaskArithmetic(), base, experts, coef={"*running_*": 0.0, "*": 1.0})
    assert merged["bn.running_var"].tolist() == [1.0, 0.0]


def test_a_search_goes_on_over_candidates_with_negative_variances():
    base, *experts = ({"bn.running_var": torch.tensor([float(v)])} for v in (1, 0.3, 0.2))
    vector = merge.task_arithmetic_vector(base, experts)
    found = merge.select_coef(base, vector, lambda merged: float(merged["bn.running_var"].sqrt() > 0), [0.2, 1.0, 2.0])
    assert [score for _, score in found.curve] == [1, 0, 0]
    with pytest.raises(ValueError, match=r"parameter 'bn\.running_var'"):
        merge.task_arithmetic(base, experts, coef=1.0)


def test_variances_without_values_are_not_read():
    def mean(leaf):
        trees = [{"running_var": leaf}, {"running_var": 2 * leaf}]
        return merge.weighted_average(trees, weights=[0.5, -1.0], normalize=False)["running_var"]

    assert torch.equal(torch.func.vmap(mean)(torch.ones(3, 2)), torch.full((3, 2), -1.5))
    with pytest.raises(ValueError, match="parameter 'running_var'"):
        mean(torch.ones(2))


@pytest.mark.parametrize("name", ["fisher", "emr"])
def test_sums_over_leaves_do_not_depend_on_their_order(name):
    for seed in range(5):
        noise = torch.Generator().manual_seed(seed)

        def tree(noise=noise):
            return {str(i): torch.randn(3 + i, generator=noise, dtype=torch.float64) for i in range(7)}

        base, experts, fishers = tree(), {"a": tree(), "b": tree()}, {"a": tree(), "b": tree()}
        fishers = {expert: {path: leaf.square() for path, leaf in own.items()} for expert, own in fishers.items()}
        merger = {
            "fisher": lambda base, experts, fishers: merge.fisher(base, experts, fishers),
            "emr": lambda base, experts, _: merge.emr(base, experts, task="a"),
        }[name]
        turned = [{path: own[path] for path in reversed(own)} for own in (base, *experts.values(), *fishers.values())]
        found = merger(turned[0], dict(zip("ab", turned[1:3], strict=True)), dict(zip("ab", turned[3:], strict=True)))
        wanted = merger(base, experts, fishers)
        assert all(torch.equal(found[path], leaf) for path, leaf in wanted.items())


MAPPED = {
    "weight_average": merge.weight_average, "weighted_average": partial(merge.weighted_average, weights=[1.0, 3.0]),
    "cart": partial(merge.cart, coef=0.7, share=0.5), "slerp": partial(merge.slerp, coef=0.3, arc="last"),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_mergers_that_vmap_takes_are_those_of_a_loop(name):
    noise = torch.Generator().manual_seed(0)
    experts = [{"w": torch.randn(3, 4, 5, generator=noise), "b": torch.randn(3, 4, generator=noise)} for _ in range(2)]
    found = torch.func.vmap(lambda *own: MAPPED[name](list(own)))(*experts)
    for i in range(3):
        wanted = MAPPED[name]([{path: leaf[i] for path, leaf in own.items()} for own in experts])
        torch.testing.assert_close({path: leaf[i] for path, leaf in found.items()}, wanted)
