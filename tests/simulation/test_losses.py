"""The losses of Eq. smat-objective: clean, simulated, mixed."""

import pytest
import torch

from smat_fn import random
from smat_fn.simulation import clean_loss, draw, mixed_loss, reweight, simulate, simulated_loss
from smat_fn.testing import assert_trees_close, assert_trees_equal, random_tree

SHAPES = {"w": (3, 4), "b": (3,)}
THETA, THETA_0 = (random_tree(seed, SHAPES, dtype=torch.float64) for seed in (1, 2))
BATCH = random_tree(3, {"x": (5, 4)}, dtype=torch.float64)["x"]
DRAW = draw(random.key(1), alpha_min=0.2, drop_prob=0.5, sigma=0.1)


def loss_fn(params, batch):
    hidden = torch.tanh(batch @ params["w"].t() + params["b"])
    return hidden.square().sum(), {"hidden": hidden.sum()}


def only_w(path, leaf):
    return path == "w"


def test_clean_and_simulated_are_the_loss_at_theta_and_at_the_simulated_state():
    assert clean_loss(loss_fn)(THETA, BATCH) == loss_fn(THETA, BATCH)
    state = simulate(THETA, THETA_0, DRAW, where=only_w)
    assert simulated_loss(loss_fn, where=only_w)(THETA, THETA_0, BATCH, DRAW) == loss_fn(state, BATCH)
    assert loss_fn(state, BATCH)[0] != loss_fn(THETA, BATCH)[0]
    assert loss_fn(state, BATCH)[0] != loss_fn(simulate(THETA, THETA_0, DRAW), BATCH)[0]


@pytest.mark.parametrize("lam", [0.0, 0.25, 1.0])
def test_mixed_weighs_both_losses_and_their_gradients(lam):
    clean, clean_aux = loss_fn(THETA, BATCH)
    state = simulate(THETA, THETA_0, DRAW, where=only_w)
    simulated, simulated_aux = loss_fn(state, BATCH)
    mixed = mixed_loss(loss_fn, lam, where=only_w)
    grads, (loss, aux) = torch.func.grad_and_value(mixed, has_aux=True)(THETA, THETA_0, BATCH, DRAW)
    assert loss == (1 - lam) * clean + lam * simulated
    assert_trees_equal(list(aux), [clean_aux, simulated_aux])
    at_theta, at_state = (torch.func.grad(loss_fn, has_aux=True)(p, BATCH)[0] for p in (THETA, state))
    weighted = reweight(at_state, DRAW, where=only_w)
    assert_trees_close(grads, {p: (1 - lam) * at_theta[p] + lam * weighted[p] for p in grads}, rtol=1e-12, atol=1e-15)


def test_a_loss_without_aux_is_refused_by_all_three():
    def alone(params, batch):
        return loss_fn(params, batch)[0]

    calls = [lambda: clean_loss(alone)(THETA, BATCH)]
    calls += [lambda f=f: f(THETA, THETA_0, BATCH, DRAW) for f in (simulated_loss(alone), mixed_loss(alone, 0.5))]
    for call in calls:
        with pytest.raises(ValueError, match="the loss function returned a Tensor: return"):
            call()


@pytest.mark.parametrize("lam", [-0.1, 1.1, float("nan")])
def test_a_weight_outside_the_unit_interval_is_refused(lam):
    with pytest.raises(ValueError, match=rf"lam is {lam}, the weight of the simulated loss must lie in \[0, 1\]"):
        mixed_loss(loss_fn, lam)
