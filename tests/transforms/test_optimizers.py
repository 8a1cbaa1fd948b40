"""Optimizers and clipping inside transforms: derivatives against differences and closed forms, values bit for bit."""

import pytest
import torch
from torch.func import grad, jvp, vmap

from smat_fn import optim, random
from smat_fn.simulation import draw, reweight, reweight_and_clip
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree

# torch's own: forward mode registers decompositions by torch.jit.script
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

SHAPES = {"w": (4, 3), "b": (3,)}
SMOOTH = {
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(optim.cosine(0.1, 9, warmup=2), weight_decay=0.2),
    "clip and adam": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(0.1)),
}
SMOOTH |= {
    "moving average": optim.averaged(optim.adam(0.1), optim.ema(0.5)),
    "mean of the last": optim.averaged(optim.adam(0.1), optim.swa(2, 0.5)),
    "partition": optim.partition(lambda path, leaf: path == "w", SMOOTH["adamw"], optim.adam(optim.linear(0.2, 4))),
}
ALL = SMOOTH | {"muon": optim.muon(0.1, rest=optim.adam(0.1), weight_decay=0.1)}
each = pytest.mark.parametrize("name", ALL)


def trees(*seeds, dtype=torch.float64):
    return [random_tree(seed, SHAPES, dtype=dtype) for seed in seeds]


def two_steps(optimizer, grads, params):
    """A number that depends on everything that two updates return."""
    state = optimizer.init(params)
    for _ in range(2):
        params, state = optimizer.update(grads, state, params)
        grads = {path: g + 0.3 * params[path] for path, g in grads.items()}
    ends = [*params.values(), *getattr(state, "average", {}).values()]
    return sum((leaf * torch.arange(leaf.numel()).view_as(leaf).cos()).sum() for leaf in ends)


def along(tree, tangent, t):
    return {path: leaf + t * tangent[path] for path, leaf in tree.items()}


@pytest.mark.parametrize("name", SMOOTH)
def test_two_updates_have_the_derivative_of_differences(name):
    (grads, params, u, v), step = trees(1, 2, 3, 4), 1e-6
    by_grads, by_params = grad(lambda g, p: two_steps(SMOOTH[name], g, p), argnums=(0, 1))(grads, params)
    slope = sum((by_grads[p] * u[p]).sum() + (by_params[p] * v[p]).sum() for p in SHAPES)
    ends = [two_steps(SMOOTH[name], along(grads, u, t), along(params, v, t)) for t in (step, -step)]
    difference = (ends[0] - ends[1]) / (2 * step)
    assert slope.abs() > 1e-3
    torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-8)
    _, forward = jvp(lambda g, p: two_steps(SMOOTH[name], g, p), (grads, params), (u, v))
    torch.testing.assert_close(forward, slope, rtol=1e-10, atol=0)


def test_muon_has_the_derivative_of_its_iteration():
    (g, p, u) = (tree["w"] for tree in trees(1, 2, 3))
    optimizer = optim.muon(0.1, rest=optim.adam(0.1))

    def step(g):
        return optimizer.update({"w": g}, optimizer.init({"w": p}), {"w": p})[0]["w"]

    def ideal(g):
        x = g.T / g.norm()  # momentum and its look-ahead are multiples of the first gradient
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return p - 0.1 * (4 / 3) ** 0.5 * x.T

    (_, found), (_, wanted) = jvp(step, (g,), (u,)), jvp(ideal, (g,), (u,))
    assert (found - wanted).norm() < 0.2 * wanted.norm()  # the iteration runs in bfloat16


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_inside_a_derivative_are_those_outside(name, dtype):
    grads, params = trees(1, 2, dtype=dtype)
    seen = []

    def run(grads):
        state, own = ALL[name].init(params), params
        for _ in range(3):
            own, state = ALL[name].update(grads, state, own)
        seen.append((own, state))
        return sum(leaf.sum() for leaf in own.values()).float(), own

    run(grads)
    _, inside = grad(run, has_aux=True)(grads)
    assert_trees_equal(inside, seen[0][0])


@each
def test_a_batch_is_the_loop(name):
    rows = [trees(10 + i, 20 + i) for i in range(3)]
    grads, params = ({p: torch.stack([row[i][p] for row in rows]) for p in SHAPES} for i in range(2))

    def run(grads, params):
        state = ALL[name].init(params)
        for _ in range(2):
            params, state = ALL[name].update(grads, state, params)
        return params, state

    found, state = vmap(run)(grads, params)
    counts = [leaf for leaf in torch.utils._pytree.tree_leaves(state) if leaf.dtype == torch.int64]
    assert counts
    assert all(count.tolist() == [2] * 3 for count in counts)
    tolerance = 2e-2 if name == "muon" else 1e-12  # muon iterates in bfloat16
    for i, row in enumerate(rows):
        assert_trees_close({p: leaf[i] for p, leaf in found.items()}, run(*row)[0], rtol=tolerance, atol=tolerance)
    shared, _ = vmap(run, in_dims=(0, None))(grads, rows[0][1])
    assert_trees_close({p: leaf[0] for p, leaf in shared.items()}, run(*rows[0])[0], rtol=tolerance, atol=tolerance)


@each
def test_donation_inside_a_transform_is_refused(name):
    grads, params = trees(1, 2)
    state = ALL[name].init(params)

    def total(grads):
        return sum(leaf.sum() for leaf in ALL[name].update(grads, state, params, donate=True)[0].values())

    calls = (lambda: grad(total)(grads), lambda: jvp(total, (grads,), (grads,)))
    for call in (*calls, lambda: vmap(total)({p: g[None] for p, g in grads.items()})):
        with pytest.raises(ValueError, match=r"donate=True.*take donate=False"):
            call()


@each
def test_a_gradient_of_zero_has_a_finite_derivative(name):
    (params,) = trees(2)
    zero = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    slopes = grad(lambda g: two_steps(ALL[name], g, params))(zero)
    assert all(slope.isfinite().all() for slope in slopes.values())


def test_the_learning_rate_has_a_derivative():
    grads, params = trees(1, 2)

    def end(lr):
        optimizer = optim.adam(lr)
        return optimizer.update(grads, optimizer.init(params), params)[0]["w"][0].sum()

    found = grad(end)(torch.tensor(0.1, dtype=torch.float64))
    # the first step of Adam is lr g / (|g| + eps)
    torch.testing.assert_close(found, -(grads["w"] / (grads["w"].abs() + 1e-8))[0].sum(), rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "schedule",
    [build(warmup) for warmup in (0, 3, 8) for build in (
        lambda warmup: optim.constant(0.7, warmup=warmup), lambda warmup: optim.cosine(0.7, 8, warmup=warmup),
        lambda warmup: optim.linear(0.7, 8, warmup=warmup),
    )] + [optim.ema(0.9), optim.ema(0.0), optim.swa(8, 0.5), optim.swa(8, 1.0)],
)  # fmt: skip
def test_a_schedule_of_tensors_is_that_of_numbers(schedule):
    found = vmap(lambda step: torch.as_tensor(schedule(step)))(torch.arange(11))
    torch.testing.assert_close(found, torch.tensor([schedule(s) for s in range(11)], dtype=found.dtype), rtol=1e-14, atol=1e-16)  # fmt: skip  # noqa: E501


def test_a_schedule_of_tensors_leaves_a_single_number_its_dtype():
    optimizer, start = optim.adamw(optim.cosine(0.1, 8), weight_decay=0.5), {"s": torch.tensor(2.0)}
    (found,) = vmap(lambda _: optimizer.update(start, optimizer.init(start), start)[0]["s"])(torch.arange(1))
    expected = optimizer.update(start, optimizer.init(start), start)[0]["s"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)

    def twice(slope):  # torch's forward derivative of a 0-d number divided by a float is float64
        params, state = start, optimizer.init(start)
        for _ in range(2):
            params, state = optimizer.update({"s": slope * params["s"]}, state, params)
        return params["s"]

    value, tangent = jvp(twice, (torch.tensor(1.0),), (torch.tensor(1.0),))
    assert (value.dtype, tangent.dtype) == (torch.float32, torch.float32)


def clipped(grads, max_norm=1.0):
    return optim.clip(grads, max_norm)[0]["w"]


def test_clip_batches_and_differentiates():
    grads, u = trees(1, 2)
    stacked = {p: torch.stack([0.01 * g, g]) for p, g in grads.items()}
    found, norms = vmap(lambda g: optim.clip(g, 1.0))(stacked)
    for i, scale in enumerate((0.01, 1.0)):
        wanted, norm = optim.clip({p: g * scale for p, g in grads.items()}, 1.0)
        assert_trees_close({p: leaf[i] for p, leaf in found.items()}, wanted, rtol=1e-14)
        assert norms[i] == norm
    # d (g / |g|) = u / |g| - g (g . u) / |g|^3, but for the 1e-6 in the factor
    norm = torch.sqrt(sum(g.square().sum() for g in grads.values()))
    inner = sum((grads[p] * u[p]).sum() for p in SHAPES)
    _, found = jvp(clipped, (grads,), (u,))
    shifted = norm + 1e-6
    torch.testing.assert_close(found, u["w"] / shifted - grads["w"] * inner / norm / shifted**2, rtol=1e-12, atol=0)
    small = {p: 0.01 * g for p, g in grads.items()}
    assert torch.equal(jvp(clipped, (small,), (u,))[1], u["w"])


def test_reweight_and_clip_batches_over_draws_and_differentiates():
    grads, u = trees(1, 2)
    keys = random.split(random.key(0), 3)

    def both(key, grads=grads):
        drawn = draw(key, alpha_min=0.2, drop_prob=0.4, sigma=0.1)
        return reweight_and_clip(grads, drawn, max_norm=0.7)

    def apart(key, grads=grads):
        drawn = draw(key, alpha_min=0.2, drop_prob=0.4, sigma=0.1)
        return optim.clip(reweight(grads, drawn), 0.7)

    found, norms = vmap(both)(keys)
    for i, key in enumerate(keys):
        wanted, norm = both(key)
        assert_trees_close({p: leaf[i] for p, leaf in found.items()}, wanted, rtol=1e-14)
        assert norms[i] == norm
    found, wanted = (jvp(lambda g, fn=fn: fn(keys[0], g)[0], (grads,), (u,))[1] for fn in (both, apart))
    assert_trees_close(found, wanted, rtol=1e-13)
    with pytest.raises(ValueError, match="donate=True"):
        vmap(lambda key: reweight_and_clip(grads, draw(key, alpha_min=1, drop_prob=0, sigma=0), donate=True))(keys)
