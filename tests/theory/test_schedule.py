"""Periodic scheduling: single-loss steps replace mixed ones up to second order, and drift little within a period."""

import itertools
import math

import pytest
import torch

from smat_fn import optim, random, value_and_grad
from smat_fn.mat import smat
from smat_fn.simulation import draw, mixed_loss, reweight, simulate
from smat_fn.testing import assert_trees_close, assert_within_errors, quadratic
from smat_fn.types import Optimizer


@pytest.fixture
def gradients(all_draws, point, waves):
    """Gradients of the clean and of the expected simulated loss, and (L_g, G) that hold for both everywhere."""
    draws, (_, theta_0), (loss, (bound, lipschitz, _)) = all_draws(0.2, 0.3, 0.4, "coin"), point, waves
    largest = draws.participation().amax(1)
    # ||E A grad L(theta~)|| <= E |A| G and its Lipschitz constant is at most E |A|^2 L, A = Diag(alpha m)
    constants = lipschitz * max(1.0, float(draws.mean(largest**2))), bound * max(1.0, float(draws.mean(largest)))
    simulated = torch.func.grad(lambda theta: draws.loss(loss, theta, theta_0))
    return torch.func.grad(loss), simulated, constants


def test_the_expected_simulated_gradient_is_the_average_of_reweighted_gradients(gradients, all_draws, point, waves):
    draws = all_draws(0.2, 0.3, 0.4, "coin")
    at_states = torch.func.vmap(torch.func.grad(waves[0]))(draws.states(*point))
    average = draws.mean(draws.participation() * at_states)
    assert_trees_close([gradients[1](point[0])], [average], rtol=1e-12)


def descend(theta, fields, step):
    for field in fields:
        theta = theta - step * field(theta)
    return theta


@pytest.mark.parametrize(
    ("n", "k"), [(2, 1), *(pytest.param(4, k, marks=pytest.mark.slow) for k in (1, 2)), (3, 0), (2, 2), (1, 1)]
)
def test_separate_steps_in_any_order_follow_mixed_steps_to_second_order(gradients, point, n, k):
    clean, simulated, (lipschitz, bound) = gradients

    def mixed(theta):
        return (1 - k / n) * clean(theta) + k / n * simulated(theta)

    steps = 0.02, 0.01
    targets = [descend(point[0], [mixed] * n, step) for step in steps]
    for chosen in itertools.combinations(range(n), k):
        order = [simulated if j in chosen else clean for j in range(n)]
        gaps = [float((descend(point[0], order, step) - y).norm()) for step, y in zip(steps, targets, strict=True)]
        for gap, step in zip(gaps, steps, strict=True):
            assert gap <= step**2 * lipschitz * bound * n * (n - 1) + 1e-15
        if 0 < k < n:
            assert gaps[0] > 1e-6
            assert math.isclose(gaps[0] / gaps[1], 4, rel_tol=0.1)
        else:
            assert max(gaps) < 1e-15


@pytest.mark.parametrize("period", [1, 2, 4])
def test_drift_within_a_period_of_a_training_run_is_under_its_bound(gradients, point, waves, period):
    clean, simulated, (lipschitz, _) = gradients
    theta, theta_0 = point
    method = smat.build(
        lambda params, batch: (waves[0](params["x"]), None), optim.adam(0.05), {"x": theta_0}, period=period, sigma=0.1
    )
    state, path, fields = method.init({"x": theta}), [], []
    for _ in range(period):
        path.append(state.params["x"])
        state, info = method.update(random.key(0), state, None)
        fields.append(simulated if info.simulated else clean)
    assert fields == [clean] * (period - 1) + [simulated]
    average = sum(field(x) for field, x in zip(fields, path, strict=True)) / period
    objective = (1 - 1 / period) * clean(theta) + simulated(theta) / period
    lengths = [(b - a).norm() for a, b in itertools.pairwise(path)]
    drift = (average - objective).norm()
    assert drift <= lipschitz * max(lengths, default=0.0) * (period - 1) / 2 + 1e-15
    # along a path that stands still the cycle is the objective itself
    assert drift > 1e-3 or period == 1
    still = sum(field(theta) for field in fields) / period
    assert_trees_close([still], [objective], rtol=1e-13)


def trained(theta, theta_0, loss, step, *, steps, **schedule):
    """(parameters, gradients, simulated steps) of ``smat.build`` under plain gradient descent."""
    seen = []

    def descend(grads, state, params):
        seen.append(grads["x"])
        return {"x": params["x"] - step * grads["x"]}, state

    method = smat.build(
        lambda params, batch: (loss(params["x"]), None), Optimizer(lambda params: (), descend), {"x": theta_0},
        alpha_min=0.2, drop_prob=0.3, sigma=0.4, **schedule,
    )  # fmt: skip
    state, simulated = method.init({"x": theta}), []
    for s in range(steps):
        assert "lam" in schedule or smat.is_simulated(s, schedule["period"]) == (s + 1 == steps)
        state, info = method.update(random.key(5), state, None)
        simulated += [s] if info.simulated else []
    return state.params["x"], torch.stack(seen), simulated


@pytest.mark.parametrize("period", [1, 2, 4, 7])
def test_a_cycle_of_the_schedule_has_the_mean_gradient_of_the_mixed_objective(point, waves, period):
    (theta, theta_0), loss = point, waves[0]
    # at parameters that stand still; the last step of both has the same draw
    _, periodic, simulated = trained(theta, theta_0, loss, 0.0, steps=period, period=period)
    _, mixed, _ = trained(theta, theta_0, loss, 0.0, steps=period, lam=1 / period)
    assert simulated == [period - 1]
    assert_trees_close([periodic.mean(0)], [mixed[-1]], rtol=1e-12)
    # and it is that of the two fields
    drawn = draw(random.fold_in(random.key(5), period - 1), alpha_min=0.2, drop_prob=0.3, sigma=0.4)
    gradient = value_and_grad(lambda params: (loss(params["x"]), None), engine="autograd")
    _, clean = gradient({"x": theta})
    _, merged = gradient(simulate({"x": theta}, {"x": theta_0}, drawn))
    weighted = reweight(merged, drawn)["x"]
    assert_trees_close([mixed[-1]], [(1 - 1 / period) * clean["x"] + weighted / period], rtol=1e-12)
    assert_trees_close([periodic[-1]], [weighted], rtol=1e-12)
    assert (weighted - clean["x"]).norm() > 0.1


@pytest.mark.parametrize("period", [2, 4])
def test_a_cycle_of_the_schedule_follows_mixed_steps_to_second_order(monkeypatch, point, waves, period):
    monkeypatch.setattr(random, "step_key", lambda key, step: key)  # one draw for all steps: two fields, no chance
    (theta, theta_0), (loss, (bound, lipschitz, _)) = point, waves
    factor = float(draw(random.key(5), alpha_min=0.2, drop_prob=0.3, sigma=0.4).scale) / (1 - 0.3)
    gaps = []
    for step in (0.02, 0.01):
        periodic, _, simulated = trained(theta, theta_0, loss, step, steps=period, period=period)
        mixed, _, _ = trained(theta, theta_0, loss, step, steps=period, lam=1 / period)
        assert simulated == [period - 1]
        gaps.append(float((periodic - mixed).norm()))
        constants = lipschitz * max(1.0, factor**2) * bound * max(1.0, factor)
        assert 1e-6 < gaps[-1] <= step**2 * constants * period * (period - 1)
    assert math.isclose(gaps[0] / gaps[1], 4, rel_tol=0.1)


def test_sampled_mixed_losses_average_to_the_gradient_of_a_cycle(all_draws, point, bowl):
    loss_fn, (theta, theta_0), period = quadratic(*bowl), point, 4
    draws = all_draws(0.2, 0.3, 0.4, "coin")
    clean = torch.func.grad(lambda x: loss_fn({"x": x})[0])(theta)
    simulated = torch.func.grad(lambda x: draws.loss(lambda y: loss_fn({"x": y})[0], x, theta_0))(theta)
    mixed = mixed_loss(loss_fn, 1 / period, where=lambda path, leaf: path == "w")

    def gradient(key):
        drawn = draw(key, alpha_min=0.2, drop_prob=0.3, sigma=0.4)
        params, base = ({"w": x[:2], "b": x[2:]} for x in (theta, theta_0))
        grads, _ = torch.func.grad(mixed, has_aux=True)(params, base, None, drawn)
        return torch.cat([grads["w"], grads["b"]])

    samples = torch.func.vmap(gradient)(random.split(random.key(3), 600))
    assert_within_errors(samples, ((period - 1) * clean + simulated) / period)
