"""End points, realised probabilities and noise sets counted in full, and what a draw may depend on."""

import math
from fractions import Fraction

import pytest
import torch

from smat_fn import random
from smat_fn.ops import plain
from smat_fn.simulation import NOISES, draw, materialise, opposite, participation, reweight, simulate
from smat_fn.simulation import noise as noise_tables
from smat_fn.simulation.noise import quantiles, table_on
from smat_fn.simulation.state import all_off
from smat_fn.testing import assert_trees_close, assert_trees_equal, assert_within_errors, random_tree

OFF = {"alpha_min": 1.0, "drop_prob": 0.0, "sigma": 0.0}
FULL = {"alpha_min": 0.2, "drop_prob": 0.5, "sigma": 2e-3}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FIELDS = torch.arange(65536)


@pytest.fixture
def every_field(monkeypatch):
    """Each stream of 65,536 coordinates takes every 16-bit field once."""
    monkeypatch.setattr(plain, "_fields", lambda keys, windows: [FIELDS for _ in windows])
    return {"w": torch.zeros(65536, dtype=torch.float64)}


def ulp(x):
    return torch.nextafter(x, torch.full_like(x, torch.inf)) - x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_off_gives_theta_within_one_ulp(dtype):
    magnitudes = 2.0 ** (16 * random_tree(7, {"w": (4000,)})["w"] - 8)
    theta = (random_tree(1, {"w": (4000,)})["w"] * magnitudes).to(dtype)
    theta_0 = (random_tree(2, {"w": (4000,)})["w"] * magnitudes.flip(0)).to(dtype)
    theta_0[:9] = -theta[:9]
    got = simulate({"w": theta}, {"w": theta_0}, draw(random.key(0), **OFF))["w"]
    assert ((got.double() - theta.double()).abs() <= ulp(torch.maximum(theta.abs(), theta_0.abs())).double()).all()
    assert not torch.equal(got, theta) or dtype in (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_zero_gives_the_base_plus_noise(dtype, noise):
    theta, theta_0 = (random_tree(seed, {"w": (500,)}, dtype=dtype) for seed in (1, 2))
    drawn = draw(random.key(3), **FULL, noise=noise)._replace(scale=torch.zeros(()))
    epsilon = materialise(drawn, theta)[1]["w"]
    assert epsilon.abs().max() > 0
    expected = (theta_0["w"].to(epsilon.dtype) + epsilon).to(dtype)
    assert_trees_equal(simulate(theta, theta_0, drawn), {"w": expected})


@pytest.mark.parametrize("noise", NOISES)
def test_the_mask_leaves_base_and_noise_alone(noise):
    theta, theta_0 = (random_tree(seed, {"w": (500,)}) for seed in (1, 2))
    drawn = draw(random.key(3), **FULL, noise=noise)
    unmasked = draw(random.key(3), **(FULL | {"drop_prob": 0.0}), noise=noise)
    mask, epsilon = materialise(drawn, theta)
    assert_trees_equal(epsilon, materialise(unmasked, theta)[1])
    dropped = mask["w"] == 0
    assert 0 < dropped.sum() < 500
    assert torch.equal(simulate(theta, theta_0, drawn)["w"][dropped], (theta_0["w"] + epsilon["w"])[dropped])
    assert_trees_equal(simulate(theta_0, theta_0, drawn), {"w": theta_0["w"] + epsilon["w"]})


def test_leaves_outside_the_masked_set_take_part_with_alpha_exactly():
    like = random_tree(1, {"embed": (40,), "w": (40,), "norm": (40,)}) | {"e64": torch.zeros(9, dtype=torch.float64)}
    drawn = draw(random.key(3), **FULL)
    got = participation(drawn, like, where=lambda path, leaf: path == "w")
    for path in ("embed", "norm", "e64"):
        assert_trees_equal({"x": got[path]}, {"x": drawn.scale.to(like[path].dtype).expand(like[path].shape)})
    assert set(got["w"].tolist()) == {0.0, float(2 * drawn.scale)}
    mask, _ = materialise(drawn, like, where=lambda path, leaf: False)
    assert_trees_equal(mask, {path: torch.ones_like(leaf) for path, leaf in like.items()})


@pytest.mark.parametrize("drop_prob", [0.0, 1e-6, 1e-5, 0.1, 0.3, 0.5, 0.9, 0.999999])
def test_drop_probability_is_realised_on_16_bits_with_mean_one(every_field, drop_prob):
    cutoff = min(round(65536 * drop_prob), 65535)
    mask, _ = materialise(draw(random.key(0), **(FULL | {"drop_prob": drop_prob})), every_field)
    assert torch.equal(mask["w"] == 0, cutoff > FIELDS)
    # the kept value is the rational number that makes the mean one, correctly rounded
    kept = Fraction(65536, 65536 - cutoff)
    assert (65536 - cutoff) * kept == 65536
    assert mask["w"][cutoff:].eq(float(kept)).all()


@pytest.mark.parametrize("sigma", [1e-3, 0.7])
def test_all_uniform_noise_values_have_mean_zero_and_the_stated_variance(every_field, sigma):
    _, noise = materialise(draw(random.key(0), **(FULL | {"sigma": sigma})), every_field)
    values = noise["w"]
    assert torch.equal(values, -values.flip(0))
    assert values.abs().max() < math.sqrt(3) * sigma
    steps = values.diff()
    assert_trees_close({"step": steps}, {"step": torch.full_like(steps, 2 * math.sqrt(3) * sigma / 65536)}, rtol=1e-9)
    assert math.isclose(values.square().mean().item(), sigma**2 * (1 - 2.0**-32), rel_tol=1e-13)


def test_tables_made_in_inference_mode_serve_gradients(monkeypatch):
    monkeypatch.setattr(noise_tables, "_TABLES", {})
    monkeypatch.setattr(noise_tables, "_SENT", {})
    for noise in NOISES:
        with torch.inference_mode():
            there = table_on(quantiles(noise), torch.device("meta"))
        assert not quantiles(noise).is_inference()
        assert not there.is_inference()
    params = {"w": torch.ones(3, requires_grad=True)}
    simulate(params, {"w": torch.zeros(3)}, draw(random.key(0), **FULL))["w"].sum().backward()
    assert params["w"].grad is not None


def test_a_stand_in_of_a_transform_is_not_kept(monkeypatch):
    monkeypatch.setattr(noise_tables, "_SENT", {})
    table, place = quantiles("gaussian"), torch.device("meta")
    torch.func.grad(lambda x: (x * table_on(table, place).sum()).sum())(torch.ones(2, device="meta"))
    assert not any(torch._C._functorch.is_functorch_wrapped_tensor(kept) for kept in noise_tables._SENT.values())


def test_a_noise_table_is_sent_to_a_device_once():
    place = torch.device("meta")
    first, second = (table_on(quantiles("laplace"), place) for _ in range(2))
    assert first is second
    assert first.device == place
    key = random.key(0).to(place)
    assert all(draw(key, **FULL, noise="laplace").noise is first for _ in range(2))
    other = torch.zeros(65536)
    assert table_on(other, place) is not table_on(other, place)
    assert table_on(other, other.device) is other


def test_noise_tables_are_the_closed_form_quantiles_of_mean_zero_and_rms_one(every_field):
    middle = (FIELDS.double() + 0.5) / 65536
    tail = torch.minimum(middle, 1 - middle)
    closed = {
        "gaussian": torch.special.ndtri(middle),
        "laplace": torch.sign(middle - 0.5) * -torch.log(2 * tail) / math.sqrt(2),
    }
    for name, exact in closed.items():
        table = quantiles(name)
        assert table.dtype == torch.float32
        assert torch.equal(table, -table.flip(0))
        assert (table.diff() > 0).all()
        assert math.isclose(table.double().square().mean().item(), 1.0, rel_tol=1e-8)
        # normalising moves the quantiles of the continuous distribution by less than 1e-3
        rms = exact.square().mean().sqrt()
        assert abs(rms - 1) < 1e-3
        assert_trees_close({name: table}, {name: exact / rms}, rtol=1.2e-7)
        _, noise = materialise(draw(random.key(0), **(FULL | {"sigma": 0.25}), noise=name), every_field)
        assert_trees_equal({name: noise["w"]}, {name: table.double() / 4})
    assert quantiles("uniform").numel() == 0


def test_alpha_is_uniform_between_alpha_min_and_one_and_shared_by_all_leaves():
    keys = random.split(random.key(12), 4000)
    scales = torch.func.vmap(lambda k: draw(k, alpha_min=0.2, drop_prob=0.5, sigma=0.0).scale)(keys)
    assert scales.dtype == torch.float32
    assert 0.2 <= scales.min() < 0.201
    assert 0.999 < scales.max() <= 1
    assert_within_errors(scales, 0.6)
    assert_within_errors((scales.double() - 0.6).square(), 0.8**2 / 12)
    drawn = draw(keys[7], alpha_min=0.2, drop_prob=0.0, sigma=0.0)
    assert torch.equal(drawn.scale, scales[7])
    like = random_tree(0, {"a": (3,), "b": (2, 2)})
    assert {v.item() for leaf in participation(drawn, like).values() for v in leaf.flatten()} == {drawn.scale.item()}


def test_alpha_max_is_the_upper_end_of_the_same_uniform_number():
    key, numbers = random.key(12), {"drop_prob": 0.5, "sigma": 0.0}
    unit = random.uniform(random.fold_in(key, 0), dtype=torch.float64)
    for low, high in ((0.2, 1.8), (0.2, 0.2), (0.0, 1.0), (1.0, 3.0)):
        expected = (low + (high - low) * unit).float()
        assert torch.equal(draw(key, alpha_min=low, alpha_max=high, **numbers).scale, expected)
        ends = (torch.tensor(end, dtype=torch.float64) for end in (low, high))
        assert torch.equal(draw(key, alpha_min=next(ends), alpha_max=next(ends), **numbers).scale, expected)
    with pytest.raises(ValueError, match=r"alpha_max is 0\.1, must be finite and at least alpha_min, 0\.2"):
        draw(key, alpha_min=0.2, alpha_max=0.1, **numbers)


def test_alpha_comes_from_child_zero_of_the_key():
    key = random.key(12)
    unit = random.uniform(random.fold_in(key, 0), dtype=torch.float64)
    assert torch.equal(draw(key, **FULL).scale, (0.2 + 0.8 * unit).float())
    assert draw(key, **OFF).scale == 1


def test_alpha_mask_and_noise_are_independent():
    like = {"a": torch.zeros(4), "b": torch.zeros(4)}

    def one(key):
        drawn = draw(key, **FULL)
        mask, noise = materialise(drawn, like)
        alpha = (drawn.scale - 0.6) / math.sqrt(0.8**2 / 12)
        return torch.cat([alpha[None], mask["a"] - 1, mask["b"] - 1, noise["a"] / 2e-3, noise["b"] / 2e-3])

    samples = torch.func.vmap(one)(random.split(random.key(1), 4096)).double()
    assert samples.shape == (4096, 17)
    assert_within_errors(samples, 0.0)
    assert_within_errors(samples[:, :, None] * samples[:, None, :], torch.eye(17))


def test_neighbours_in_a_leaf_are_independent():
    mask, noise = materialise(draw(random.key(1), **FULL), {"w": torch.zeros(1 << 15)})
    m, e = mask["w"] - 1, noise["w"] / 2e-3
    assert_within_errors(m * e, 0.0)
    for lag in (1, 2, 7, 8):
        assert_within_errors(m[lag:] * m[:-lag], 0.0)
        assert_within_errors(e[lag:] * e[:-lag], 0.0)
        assert_within_errors(e[lag:] * m[:-lag], 0.0)


def test_a_leafs_draw_depends_on_its_path_alone():
    shapes = {"a": (70,), "b.c": (3, 5), "d": (9,)}
    theta, theta_0 = random_tree(1, shapes), random_tree(2, shapes)
    drawn = draw(random.key(5), **FULL)
    whole = simulate(theta, theta_0, drawn)
    for paths in (["d", "a", "b.c"], ["b.c"], ["d", "b.c"]):
        some = simulate({p: theta[p] for p in paths}, {p: theta_0[p] for p in reversed(paths)}, drawn)
        assert_trees_equal(some, {p: whole[p] for p in paths})
    longer = materialise(drawn, {"a": torch.zeros(500)})[1]["a"][:70]
    assert_trees_equal({"a": longer}, {"a": materialise(drawn, theta)[1]["a"]})
    renamed = materialise(drawn, {"a2": theta["a"]})
    assert not torch.equal(renamed[0]["a2"], materialise(drawn, theta)[0]["a"])
    assert not torch.equal(renamed[1]["a2"], materialise(drawn, theta)[1]["a"])


def test_nothing_that_ran_before_changes_a_draw_and_the_global_generator_stays():
    theta, theta_0 = random_tree(1, {"w": (50,)}), random_tree(2, {"w": (50,)})
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = simulate(theta, theta_0, draw(random.key(5), **FULL))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    simulate(theta_0, theta, draw(random.key(6), **FULL, noise="laplace"))
    assert_trees_equal(simulate(theta, theta_0, draw(random.key(5), **FULL)), first)


def test_two_steps_under_one_run_key_differ_in_every_part():
    run, like = random.key(5), {"w": torch.zeros(40)}
    one, two = (draw(random.fold_in(run, step), **FULL) for step in (0, 1))
    assert one.scale != two.scale
    for a, b in zip(materialise(one, like), materialise(two, like), strict=True):
        assert not torch.equal(a["w"], b["w"])


def test_mask_and_noise_streams_of_all_leaves_differ():
    mask, noise = random.leaf_streams(random.key(5), ["w", "v"])
    assert len({tuple(key.tolist()) for key in (*mask, *noise)}) == 4


def test_ranges_are_checked_all_at_once():
    with pytest.raises(ValueError, match=r"^draw: alpha_min") as error:
        draw(random.key(0), alpha_min=1.5, drop_prob=1.0, sigma=-1.0, noise="cauchy")
    assert str(error.value) == (
        "draw: alpha_min is 1.5, must lie in [0, 1] (1 switches Scale off); "
        "drop_prob is 1.0, must lie in [0, 1): it is the probability of removing a coordinate; "
        "sigma is -1.0, must be finite and not negative (0 switches Perturb off); "
        "noise is 'cauchy', choose one of uniform, gaussian, laplace"
    )


@pytest.mark.parametrize("name", list(OFF))
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01])
def test_each_strength_refuses_what_is_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^draw: {name} is {value}, must"):
        draw(random.key(0), **(OFF | {name: value}))


def test_alpha_max_is_what_float32_holds():
    assert draw(random.key(0), **OFF, alpha_max=3e38).scale.isfinite()
    with pytest.raises(ValueError, match=r"^draw: alpha_max is 1e\+39, must be at most 3.4e\+38, as a float32 is$"):
        draw(random.key(0), **OFF, alpha_max=1e39)


@pytest.mark.parametrize("sign", [0, 2, -0.5, math.nan, None, "1"])
def test_a_sign_is_one_or_minus_one(sign):
    drawn = draw(random.key(0), **FULL)
    assert opposite(opposite(drawn)) == opposite(drawn, 1) == opposite(drawn, torch.tensor(1)) == drawn
    with pytest.raises(ValueError, match=f"sign is {sign!r}, must be -1, or 1 for the draw itself"):
        opposite(drawn, sign)


@pytest.mark.parametrize("name", list(OFF))
@pytest.mark.parametrize("value", ["0.5", None])
def test_each_strength_refuses_what_is_no_number(name, value):
    with pytest.raises(ValueError, match=f"^draw: {name} is {value!r}: give a number or 0-d tensor"):
        draw(random.key(0), **(OFF | {name: value}))


@pytest.mark.parametrize("bad", [7, torch.zeros(2), random.split(random.key(0), 3)], ids=["int", "float", "batch"])
def test_a_bad_key_is_refused(bad):
    with pytest.raises(ValueError, match="key"):
        draw(bad, **FULL)


TENSORS = {name: torch.tensor(value, dtype=torch.float64) for name, value in FULL.items()}


@pytest.mark.parametrize("noise", NOISES)
def test_hyperparameters_may_be_tensors(noise):
    tree = random_tree(1, {"w": (50,)})
    found, expected = (draw(random.key(0), **values, noise=noise) for values in (TENSORS, FULL))
    assert_trees_equal(found, expected)
    for bad in ({"sigma": torch.tensor(-1.0)}, {"alpha_min": torch.tensor(1.5)}, {"drop_prob": torch.tensor(1.0)}):
        ((name, value),) = bad.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            draw(random.key(0), **(FULL | bad))
    with pytest.raises(ValueError, match=r"sigma is a torch\.float32 of shape \(2,\)"):
        draw(random.key(0), **(FULL | {"sigma": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"alpha_min is a torch\.int64"):
        draw(random.key(0), **(FULL | {"alpha_min": torch.tensor(1)}))
    assert simulate(tree, tree, found)["w"].shape == (50,)


@pytest.mark.parametrize("noise", NOISES)
def test_states_differentiate_in_alpha_min_and_sigma(noise):
    """s = theta_0 + (a + (1 - a) u) m (theta - theta_0) + sigma z, a = alpha_min."""
    theta, theta_0 = (random_tree(seed, {"w": (50,)}, dtype=torch.float64) for seed in (1, 2))

    def state(alpha_min, sigma):
        return simulate(theta, theta_0, draw(random.key(3), alpha_min=alpha_min, drop_prob=0.3, sigma=sigma, noise=noise))["w"]  # fmt: skip  # noqa: E501

    by_alpha, by_sigma = torch.func.jacrev(state, argnums=(0, 1))(TENSORS["alpha_min"], TENSORS["sigma"])
    unit = random.uniform(random.fold_in(random.key(3), 0), dtype=torch.float64)
    mask, epsilon = materialise(draw(random.key(3), alpha_min=0.2, drop_prob=0.3, sigma=2e-3, noise=noise), theta)
    expected = {"alpha": (1 - unit) * mask["w"] * (theta["w"] - theta_0["w"]), "sigma": epsilon["w"] / 2e-3}
    assert_trees_close({"alpha": by_alpha, "sigma": by_sigma}, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("names", [("alpha_min",), ("drop_prob",), ("sigma",), ("alpha_min", "drop_prob", "sigma")])
def test_a_batch_of_hyperparameters_is_the_loop(names):
    theta, theta_0 = (random_tree(seed, {"w": (50,)}) for seed in (1, 2))
    rows = {name: torch.tensor([0.1, 0.4, 0.8], dtype=torch.float64) for name in names}

    def state(values):
        return simulate(theta, theta_0, draw(random.key(3), **(FULL | values)))["w"]

    found = torch.func.vmap(state)(rows)
    for i in range(3):
        assert torch.equal(found[i], state({name: float(row[i]) for name, row in rows.items()}))


def test_a_drop_probability_that_is_differentiated_is_refused():
    def total(drop_prob):
        drawn = draw(random.key(3), **(FULL | {"drop_prob": drop_prob}))
        return simulate({"w": torch.ones(9)}, {"w": torch.zeros(9)}, drawn)["w"].sum()

    for call in (lambda p: torch.func.grad(total)(p), lambda p: total(p.clone().requires_grad_())):
        with pytest.raises(ValueError, match="drop_prob is differentiated"):
            call(torch.tensor(0.3))


def test_writing_into_out_inside_a_transform_is_refused():
    tree = {"w": torch.ones(3)}
    with pytest.raises(ValueError, match="and no out, inside"):
        torch.func.vmap(lambda key: simulate(tree, tree, draw(key, **FULL), out=tree))(random.split(random.key(0)))


def test_all_is_off_only_if_each_operation_is():
    assert all_off(1.0, 0.0, 0.0)
    assert not any(all_off(*strengths) for strengths in ((0.5, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, 1e-9)))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("scale", 0.25, r"scale of the draw is 0\.25, must be a 0-d tensor: draw\._replace\(scale=torch\.tensor"),
        ("sigma", 0.1, r"sigma of the draw is 0\.1, must be a 0-d tensor"),
        ("scale", torch.ones(2), r"scale of the draw is tensor\(\[1\., 1\.\]\), must be a 0-d tensor"),
        ("noise", torch.zeros(100), r"noise of the draw is torch\.float32 \(100,\), must be float32 or float64"),
        ("noise", torch.zeros(65536).half(), r"noise of the draw is torch\.float16 \(65536,\), must be float32"),
        ("noise", 0.1, r"noise of the draw is 0\.1, must be float32"),
    ],
)
def test_a_replaced_field_of_another_kind_is_an_error(field, value, said):
    params = {"w": torch.zeros(3)}
    drawn = draw(random.key(3), alpha_min=0.2, drop_prob=0.5, sigma=0.1)._replace(**{field: value})
    for use in (lambda: simulate(params, params, drawn), lambda: reweight(params, drawn)):
        with pytest.raises(ValueError, match=said):
            use()


def test_a_replaced_table_is_the_noise_of_the_draw():
    params = {"w": torch.zeros(100_000)}
    table = torch.linspace(-1, 1, 65536)
    drawn = draw(random.key(3), alpha_min=1.0, drop_prob=0.0, sigma=0.5)._replace(noise=table)
    fields = random.bits(random.leaf_streams(drawn.key, ["w"])[1, 0], 100_000)
    assert torch.equal(simulate(params, params, drawn)["w"], 0.5 * table[fields])
