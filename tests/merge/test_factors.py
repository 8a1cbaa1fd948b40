"""Adapters of one matrix as one: PEFT's numbers, closed forms, masks by key."""

import warnings

import peft
import pytest
import torch
from torch import nn

from smat_fn import random
from smat_fn.config import TaskArithmetic
from smat_fn.merge import Factors, combine, knots, truncated
from smat_fn.merge.around.factors import METHODS, RULES

WEIGHTS = {"x": 0.7, "y": -0.4, "z": 1.3}
KEY = random.key(3)


def some(rank=3, scale=2.0, shape=(7, 5), names="xyz", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Factors(*(torch.randn(size, generator=generator) for size in ((rank, shape[1]), (shape[0], rank))), scale)
        for name in names
    }


def product(factors):
    return factors.scale * factors.b.double() @ factors.a.double()


def of_peft(adapters, method, weights, **options):
    """A, B and their product that peft's add_weighted_adapter makes of the same adapters."""
    (out, into), first = (len(next(iter(adapters.values())).b), next(iter(adapters.values())).a.shape[1]), None
    model = nn.Sequential(nn.Linear(into, out, bias=False))
    for name, found in adapters.items():
        config = peft.LoraConfig(r=found.rank, lora_alpha=found.rank * found.scale, target_modules=["0"])
        first = first or peft.get_peft_model(model, config, adapter_name=name)
        if name != next(iter(adapters)):
            first.add_adapter(name, config)
        layer = first.base_model.model[0]
        layer.lora_A[name].weight.data, layer.lora_B[name].weight.data = found.a.clone(), found.b.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # density 1 prunes nothing
        first.add_weighted_adapter(
            list(adapters), [weights[n] for n in adapters], "m", combination_type=method, **options
        )
    return layer.lora_A["m"].weight.data, layer.lora_B["m"].weight.data, layer.get_delta_weight("m").detach()


@pytest.mark.parametrize("majority", ["total", "frequency"])
@pytest.mark.parametrize("density", [0.3, 0.55, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_are_those_of_peft(method, density, majority):
    if method.startswith("dare"):
        density = 1.0  # its masks are of torch's generator
    options = {} if method in ("linear", "cat", "svd") else {"density": density}
    adapters = some()
    elected = {"majority_sign_method": majority} if "ties" in method else {}
    a, b, delta = of_peft(adapters, method, WEIGHTS, **options, **elected)
    merged = combine(adapters, method=method, weights=WEIGHTS, majority=majority, key=KEY, **options)
    torch.testing.assert_close(product(merged).float(), delta, rtol=1e-5, atol=1e-5)
    assert (merged.scale, merged.a.dtype) == (1.0, torch.float32)
    if method in RULES or method == "cat":
        torch.testing.assert_close(merged.a, a, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(merged.b, b, rtol=1e-6, atol=1e-6)
    else:
        assert merged.rank == 3
        torch.testing.assert_close(merged.a.abs(), a.abs(), rtol=1e-4, atol=1e-4)  # up to signs


@pytest.mark.parametrize("full", [True, False])
def test_how_peft_computes_an_svd_changes_nothing(full):
    adapters = some()
    delta = of_peft(adapters, "ties_svd", WEIGHTS, density=0.5, svd_full_matrices=full)[2]
    merged = combine(adapters, method="ties_svd", weights=WEIGHTS, density=0.5)
    torch.testing.assert_close(product(merged).float(), delta, rtol=1e-5, atol=1e-5)


def test_an_autocast_of_the_caller_plays_no_part():
    for method in ("svd", "ties_svd"):
        options = {"density": 0.5} if method == "ties_svd" else {}
        want = combine(some(), method=method, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = combine(some(), method=method, **options)
        assert torch.equal(got.a, want.a)
        assert torch.equal(got.b, want.b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["svd", "ties_svd"])
def test_factors_that_are_not_finite_have_no_svd(method, value):
    adapters = some()
    next(iter(adapters.values())).a[0, 0] = value
    with pytest.raises(ValueError, match="the change is not finite: factors hold NaN"):
        combine(adapters, method=method, **({"density": 0.5} if method == "ties_svd" else {}))


@pytest.mark.parametrize("method", ["cat", "svd", "ties_svd"])
def test_ranks_and_scales_may_differ(method):
    adapters = some(rank=2, scale=0.5, names="x") | some(rank=4, scale=3.0, names="yz", seed=1)
    options = {"density": 0.5} if method == "ties_svd" else {}
    extra = {} if method == "cat" else {"svd_rank": 3}
    delta = of_peft(adapters, method, WEIGHTS, **options, **extra)[2]
    merged = combine(adapters, method=method, weights=WEIGHTS, rank=None if method == "cat" else 3, **options)
    torch.testing.assert_close(product(merged).float(), delta, rtol=1e-5, atol=1e-5)
    assert merged.rank == (10 if method == "cat" else 3)


def test_what_adds_up_is_the_dense_merge_where_the_rank_suffices():
    adapters = some(rank=2, shape=(20, 15))
    dense = sum(WEIGHTS[name] * product(found) for name, found in adapters.items())
    for method in ("cat", "svd"):
        for rank in (6, 9):
            merged = combine(adapters, method=method, weights=WEIGHTS, rank=rank)
            torch.testing.assert_close(product(merged), dense, rtol=1e-5, atol=1e-5)
            assert merged.rank == 6
    u, values, v = torch.linalg.svd(dense)
    short = combine(adapters, method="cat", weights=WEIGHTS, rank=3)
    torch.testing.assert_close(product(short), (u[:, :3] * values[:3]) @ v[:3], rtol=1e-5, atol=1e-5)
    ties = combine(adapters, method="ties_svd", density=0.5, rank=99)
    assert ties.rank == 15


def test_linear_is_exact_where_one_factor_is_shared():
    adapters = some()
    shared = {name: found._replace(a=adapters["x"].a, scale=1.0) for name, found in adapters.items()}
    merged = combine(shared, method="linear", weights=dict.fromkeys("xyz", 0.25))
    dense = sum(0.25 * product(found) for found in shared.values())
    torch.testing.assert_close(product(merged), 3 * dense)  # (3 √w A)(√w Σ B): cross terms, not the mean


def test_one_adapter_is_itself_and_equal_ones_are_one():
    one = some(names="x")
    for method in METHODS:
        options = {"density": 1.0} if method not in ("linear", "cat", "svd") else {}
        torch.testing.assert_close(
            product(combine(one, method=method, key=KEY, **options)), product(one["x"]), rtol=1e-5, atol=1e-5
        )
    twins = {name: one["x"] for name in "uvw"}
    thirds = dict.fromkeys("uvw", 1 / 3)
    for method in ("cat", "svd", "dare_linear_svd"):
        options = {"density": 1.0} if method == "dare_linear_svd" else {}
        merged = combine(twins, method=method, weights=thirds, key=KEY, **options)
        torch.testing.assert_close(product(merged), product(one["x"]), rtol=1e-5, atol=1e-5)
    ties = combine(twins, method="ties", density=1.0)
    torch.testing.assert_close(product(ties), product(one["x"]), rtol=1e-5, atol=1e-5)


def test_masks_depend_on_key_name_and_factor_alone():
    adapters = some(shape=(60, 50), rank=8)
    options = {"method": "dare_linear_svd", "density": 0.6, "rank": 50}
    merged = combine(adapters, key=KEY, **options)
    again = combine(dict(reversed(adapters.items())), key=KEY, **options)
    torch.testing.assert_close(product(merged), product(again), rtol=1e-4, atol=1e-4)
    parts = [
        combine({name: found}, method="dare_linear_svd", density=0.6, key=KEY, rank=50)
        for name, found in adapters.items()
    ]
    torch.testing.assert_close(product(merged), sum(map(product, parts)), rtol=1e-4, atol=1e-4)
    other = combine(adapters, key=random.key(4), **options)
    assert not torch.allclose(product(merged), product(other))


def test_random_masks_keep_the_share_and_the_mean():
    ones = {"x": Factors(torch.ones(1, 40_000), torch.ones(1, 1))}
    merged = combine(ones, method="dare_linear_svd", density=0.3, key=KEY)
    delta = product(merged)[0]
    kept, scale = delta.abs() > 0.5, 65536 / (65536 - round(0.7 * 65536))
    assert abs(kept.double().mean() - 0.3) < 0.01
    torch.testing.assert_close(delta[kept], torch.full_like(delta[kept], scale), rtol=1e-5, atol=1e-5)
    halves = combine(
        {"a": Factors(torch.ones(200, 200), torch.ones(200, 200))}, method="dare_ties", density=0.5, key=KEY
    )
    assert not torch.equal(halves.a, halves.b)  # each factor has a mask of its own


def test_equal_magnitudes_are_kept_by_position():
    found = {"x": Factors(torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.ones(1, 1))}
    assert combine(found, method="magnitude_prune_svd", density=0.5).a.count_nonzero() == 2
    assert combine(found, method="magnitude_prune", density=0.5).a.tolist() == [[1.0, -1.0, 0.0, 0.0]]


def test_a_float64_adapter_is_merged_in_float64_and_bfloat16_in_float32():
    adapters = some()
    wide = adapters["y"]
    adapters["y"] = Factors(wide.a.double(), wide.b.double(), 2.0)
    assert combine(adapters, method="cat").a.dtype == torch.float64
    low = {name: Factors(f.a.bfloat16(), f.b.bfloat16()) for name, f in some().items()}
    assert combine(low, method="svd").a.dtype == torch.float32
    torch.testing.assert_close(
        product(combine(low, method="cat")), sum(map(product, low.values())), rtol=1e-6, atol=1e-6
    )


def test_truncation_shares_nothing_with_the_dense_matrix():
    a, b = torch.randn(4, 9, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    for rank in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"^rank is {rank}, must be an integer of at least 1$"):
            truncated(Factors(a, b, 0.5), rank)
    short = truncated(Factors(a, b, 0.5), 2)
    u, values, v = torch.linalg.svd(0.5 * b @ a)
    torch.testing.assert_close(product(short), (u[:, :2] * values[:2]) @ v[:2])
    torch.testing.assert_close(short.a @ short.a.T, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"method": "tie"}, "method is 'tie', did you mean 'ties'"),
        ({"method": "ties"}, "ties drops entries: give density"),
        ({"method": "cat", "density": 0.5}, "cat drops no entries: leave out density"),
        ({"method": "ties", "density": 0.0}, "density is 0.0, must be in"),
        ({"method": "ties", "density": "0.5"}, "density is '0.5', must be a number"),
        ({"method": "svd", "weights": {"x": "1"}}, "the weight of 'x' is '1', must be a number"),
        ({"method": "svd", "weights": [1.0]}, "weights a list: pass mappings {expert's name: Factors}"),
        ({"method": "dare_linear", "density": 0.5}, "drops at random: pass a key"),
        ({"method": "svd", "rank": 0}, "rank is 0, must be an integer of at least 1"),
        ({"method": "svd", "rank": 1.5}, "rank is 1.5, must be an integer of at least 1"),
        ({"method": ["svd"]}, "must be one of linear, magnitude_prune"),
        ({"method": "dare_linear", "density": 0.5, "key": 3}, "key must be an int64 tensor"),
        ({"method": "ties", "density": 0.5, "majority": "most"}, "majority is 'most', must be"),
        ({"method": "svd", "weights": {"q": 1.0}}, "weights names 'q', which is not an adapter: they are x, y, z"),
        ({"method": "svd", "weights": {"x": float("inf")}}, "the weight of 'x' is inf"),
    ],
)
def test_what_makes_no_sense_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        combine(some(), **options)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        combine(some(names="x") | some(names="y", shape=(7, 6)), method="svd")
    with pytest.raises(ValueError, match=r"ranks differ .*: take cat, svd or an _svd"):
        combine(some(names="x") | some(names="y", rank=2), method="linear")
    with pytest.raises(ValueError, match=r"A \(2, 3\) and B \(4, 3\) of adapter 'x' do not fit"):
        combine({"x": Factors(torch.zeros(2, 3), torch.zeros(4, 3))}, method="svd")
    with pytest.raises(ValueError, match="no adapters"):
        combine({}, method="svd")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ((torch.ones(2, 4), torch.ones(3, 2)), "adapter 'x' is a tuple, must be Factors"),
        (Factors(None, torch.ones(3, 2)), "A of adapter 'x' is NoneType, must be a floating-point tensor"),
        (Factors(torch.ones(2, 4), torch.ones(3, 2).long()), "B of adapter 'x' is int64, must be a floating-point"),
        (Factors(torch.ones(2), torch.ones(3, 2)), r"A \(2,\) and B \(3, 2\) of adapter 'x' do not fit"),
        (Factors(torch.ones(0, 4), torch.ones(3, 0)), r"A \(0, 4\) and B \(3, 0\) of adapter 'x' are empty"),
        (Factors(torch.ones(2, 4), torch.ones(3, 2), "1"), "the scale of adapter 'x' is '1', must be a number"),
        (Factors(torch.ones(2, 4), torch.ones(3, 2), float("nan")), "the scale of adapter 'x' is nan, must be finite"),
    ],
)
def test_what_is_not_the_factors_of_a_matrix_is_refused(own, told):
    with pytest.raises(ValueError, match=told):
        combine({"x": own}, method="cat")
    with pytest.raises(ValueError, match=told.replace("adapter 'x'", "'m' of expert 'x'")):
        knots({"x": {"m": own}}, TaskArithmetic(), coef=1.0)
